//! Private inference as three processes: two servers and a client, over sockets.

use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};

use fornax::{OpenOptions, Private, Request};

use crate::sparse::safetensors;
use crate::tiny::{fixtures, tokens};
use crate::{Ran, cache, command, fornax};

/// A process that listens, ended with the test.
struct Listening {
    child: Child,
    url: String,
}

impl Drop for Listening {
    fn drop(&mut self) {
        // Already gone is as good.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Listening {
    fn start(args: &[&str]) -> Listening {
        let mut child =
            command(&cache()).args(args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().rsplit(' ').next().unwrap().to_owned();
        assert!(url.contains("://"), "{line:?}");
        Listening { child, url }
    }

    fn party(model: &str, party: &str) -> Listening {
        let args = ["private", "serve", model, "--party", party, "--port", "0", "--demo-single-host"];
        Listening::start(&args)
    }
}

/// Both parties of a tiny model, and the flags with which they are asked.
fn parties(model: &str) -> ([Listening; 2], Vec<String>) {
    let parties = ["0", "1"].map(|party| Listening::party(model, party));
    let flags = [
        "--party0".to_owned(),
        parties[0].url.clone(),
        "--party1".to_owned(),
        parties[1].url.clone(),
        "--demo-single-host".to_owned(),
    ];
    (parties, flags.to_vec())
}

fn path(case: &str) -> String {
    fixtures().join(case).to_str().unwrap().to_owned()
}

fn private<'a>(first: &[&'a str], flags: &'a [String]) -> Ran {
    fornax(["private"].into_iter().chain(first.iter().copied()).chain(flags.iter().map(String::as_str)))
}

#[test]
fn three_processes_answer_as_the_reference_does_and_their_views_pass_the_audit() {
    let folder = tempfile::tempdir().unwrap();
    for case in ["llama.gguf", "qwen2"] {
        let model = path(case);
        let (ids, _) = tokens(case.trim_end_matches(".gguf"));
        let (_servers, flags) = parties(&model);
        let record = folder.path().join(case);
        let record = record.to_str().unwrap();
        let generate = ["generate", &model, "--tokens", &ids, "--max-tokens", "20", "--ignore-eos", "--json"];
        let args = [&generate[..], &["--record", record, "--threads", "1"]].concat();
        let got = private(&args, &flags).json();

        let reference = OpenOptions::new(&model).private(Private::Reference).threads(1).open().unwrap();
        let prompt = ids.split(',').map(|id| id.parse().unwrap()).collect();
        let request = Request { max_tokens: Some(20), ignore_eos: true, ..Request::tokens(prompt) };
        let wanted = reference.generate(&request).unwrap();
        assert_eq!(got["tokens"], serde_json::json!(wanted.tokens), "{case}");
        assert_eq!(got["usage"]["cached_tokens"], 0);

        let views = [0, 1].map(|party| format!("{record}.party{party}"));
        let judged = fornax(["private", "audit", &views[0], &views[1]]);
        assert_eq!(judged.code, Some(0), "{}", judged.stdout);
        assert!(judged.stdout.lines().count() >= 12 && !judged.stdout.contains("FAIL"), "{}", judged.stdout);
    }
}

/// The audit is only worth something if it can fail.
#[test]
fn the_audit_fails_what_gives_something_away() {
    let folder = tempfile::tempdir().unwrap();
    let model = path("llama.gguf");
    let (ids, _) = tokens("llama");
    let (_servers, flags) = parties(&model);
    let record = folder.path().join("view");
    let args =
        ["generate", &model, "--tokens", &ids, "--max-tokens", "4", "--record", record.to_str().unwrap()];
    let recorded = private(&[&args[..], &["--ask-anew"]].concat(), &flags);
    assert_eq!(recorded.code, Some(0));
    for said in ["together are the conversation in clear", "leak: --ask-anew tells both servers where"] {
        assert!(recorded.stderr.contains(said), "{}", recorded.stderr);
    }
    // Party 1's view under party 0's name: a seed where none may be.
    let [zero, one] = [0, 1].map(|party| format!("{}.party{party}", record.display()));
    let bytes = fs::read(&one).unwrap();
    let renamed = String::from_utf8_lossy(&bytes[..64]).replacen("party 1", "party 0", 1);
    let wrong = folder.path().join("wrong");
    fs::write(&wrong, [renamed.as_bytes()[..37].to_vec(), bytes[37..].to_vec()].concat()).unwrap();
    let judged = fornax(["private", "audit", wrong.to_str().unwrap(), "--json"]);
    assert_eq!(judged.code, Some(1), "{}", judged.stdout);
    assert!(judged.stderr.contains("INTEGRITY_FAILURE"), "{}", judged.stderr);
    let other = fornax(["private", "audit", &model]);
    other.fails(2, "INVALID_INPUT", &["not a transcript"]);
    assert_eq!(fornax(["private", "audit", &zero]).code, Some(0));
}

#[test]
fn info_says_what_is_claimed_and_that_one_host_protects_nothing() {
    let claim = fornax(["private", "info"]);
    assert_eq!(claim.code, Some(0));
    for words in ["the two servers do not collude", "which model is used", "NO PRIVACY IS PROVIDED"] {
        assert!(claim.stdout.contains(words), "{words}");
    }
    let (_servers, flags) = parties(&path("llama.gguf"));
    let asked = private(&["info"], &flags);
    assert_eq!(asked.code, Some(0), "{}", asked.stderr);
    assert!(
        asked.stdout.contains("\"protocol\": \"blind2\"")
            && asked.stdout.contains("\"demo_single_host\": true")
    );
    assert!(
        asked.stdout.trim_end().ends_with("This is a demonstration of the protocol."),
        "{}",
        asked.stdout
    );
}

#[test]
fn what_could_not_be_private_or_exact_is_refused_in_one_line() {
    let (model, other) = (path("llama.gguf"), path("llama3.gguf"));
    let (servers, flags) = parties(&model);
    let (others, other_flags) = parties(&other);
    let ask = |party0: &str, party1: &str, more: &[&str]| {
        let args = ["private", "generate", &model, "--tokens", "1,2", "--max-tokens", "1", "--party0"];
        fornax(args.into_iter().chain([party0, "--party1", party1]).chain(more.iter().copied()))
    };
    let (zero, one) = (servers[0].url.as_str(), servers[1].url.as_str());
    let demo = ["--demo-single-host"];
    ask(zero, zero, &demo).fails(2, "INVALID_INPUT", &["the same server"]);
    ask(zero, one, &[]).fails(2, "INVALID_INPUT", &["on one host", "--demo-single-host"]);
    ask(one, zero, &demo).fails(2, "INVALID_INPUT", &["serves party 1, not party 0"]);
    ask(zero, &others[1].url, &demo).fails(1, "WEIGHTS_DIFFER", &["party 0 has weights", "party 1 has"]);
    ask("tcp://127.0.0.1:1", one, &demo).fails(2, "INVALID_INPUT", &["127.0.0.1:1", "refused"]);
    ask("http://a", one, &demo).fails(2, "INVALID_INPUT", &["tls://"]);
    let differing = private(&["generate", &model, "--tokens", "1,2", "--max-tokens", "1"], &other_flags);
    assert_eq!(differing.code, Some(1));
    assert!(
        differing.stderr.contains("WEIGHTS_DIFFER") && differing.stderr.contains("this client has weights")
    );
    let proxy = private(&["proxy", &model, "--host", "0.0.0.0"], &flags);
    proxy.fails(2, "INVALID_INPUT", &["this machine's own addresses only"]);
    let plain = fornax(["private", "serve", &model, "--party", "0", "--host", "0.0.0.0", "--port", "0"]);
    plain.fails(2, "INVALID_INPUT", &["is beyond this machine"]);
    let gpu = private(&["generate", &model, "--tokens", "1", "--device", "cuda:0"], &flags);
    gpu.fails(2, "INVALID_INPUT", &["the client of private inference computes on the cpu"]);
}

#[test]
fn a_model_whose_rows_would_overflow_the_ring_is_refused_when_it_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let (hidden, ffn, vocab) = (8, 140_000, 16);
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("lm_head.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    let layer = [
        ("input_layernorm", vec![hidden]),
        ("post_attention_layernorm", vec![hidden]),
        ("self_attn.q_proj", vec![hidden, hidden]),
        ("self_attn.k_proj", vec![hidden, hidden]),
        ("self_attn.v_proj", vec![hidden, hidden]),
        ("self_attn.o_proj", vec![hidden, hidden]),
        ("mlp.gate_proj", vec![ffn, hidden]),
        ("mlp.up_proj", vec![ffn, hidden]),
        ("mlp.down_proj", vec![hidden, ffn]),
    ];
    tensors.extend(layer.map(|(name, shape)| (format!("model.layers.0.{name}.weight"), shape)));
    let values: usize = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    let mut file = safetensors(folder.path(), tensors, "BF16", 2);
    // All weights are one: none can be spared.
    file.seek(SeekFrom::End(-i64::try_from(2 * values).unwrap())).unwrap();
    file.write_all(&[0x80, 0x3f].repeat(values)).unwrap();
    let config = serde_json::json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": 1,
        "num_key_value_heads": 1, "vocab_size": vocab, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": false});
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let model = folder.path().to_str().unwrap();
    let serve = ["private", "serve", model, "--party", "0", "--port", "0", "--demo-single-host"];
    fornax(serve).fails(
        4,
        "MODEL_UNSUPPORTED",
        &["140000 weights sum to 17780000", "at least 127 are needed"],
    );
}

/// Sends a request to a loopback server and reads until it closes.
fn post(url: &str, route: &str, body: &str) -> String {
    let address = url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!(
        "POST {route} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

fn ready(url: &str) {
    loop {
        let mut stream = TcpStream::connect(url.strip_prefix("http://").unwrap()).unwrap();
        stream.write_all(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        if response.starts_with("HTTP/1.1 200") {
            return;
        }
        assert!(response.contains("503"), "{response}");
    }
}

#[test]
fn the_proxy_speaks_openais_api_over_two_servers() {
    let (servers, flags) = parties("smollm2");
    let mut args = vec!["private", "proxy", "smollm2", "--port", "0", "--context", "256"];
    args.extend(flags.iter().map(String::as_str));
    let proxy = Listening::start(&args);
    ready(&proxy.url);
    let body = |stream: bool| {
        format!(
            r#"{{"model":"smollm2","messages":[{{"role":"user","content":"Say hello."}}],"max_tokens":8,"temperature":0,"stream":{stream}}}"#
        )
    };
    let whole = post(&proxy.url, "/v1/chat/completions", &body(false));
    assert!(whole.starts_with("HTTP/1.1 200"), "{whole}");
    let json: serde_json::Value = serde_json::from_str(whole.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    let text = json["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!text.is_empty());
    let streamed = post(&proxy.url, "/v1/chat/completions", &body(true));
    assert!(streamed.contains("data: [DONE]"), "{streamed}");
    let pieces: String = streamed
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line.strip_prefix("data: ")?).ok())
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(pieces, text, "streamed and whole");
    assert!(!streamed.contains("\"cached_tokens\":1"), "prefixes are not used again: {streamed}");

    // A server that goes away fails the request, and nothing else.
    let [zero, one] = servers;
    drop(one);
    let failed = post(&proxy.url, "/v1/chat/completions", &body(false));
    assert!(failed.starts_with("HTTP/1.1 500"), "{failed}");
    assert!(!failed.contains("\"choices\""), "{failed}");
    drop(zero);
}

#[test]
fn servers_say_nothing_of_sessions() {
    let folder = tempfile::tempdir().unwrap();
    let model = path("llama.gguf");
    let log = folder.path().join("log");
    let quiet = |party: &str| {
        let mut child = command(&cache())
            .args(["private", "serve", &model, "--party", party, "--port", "0"])
            .stdout(Stdio::piped())
            .stderr(fs::File::options().create(true).append(true).open(&log).unwrap())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.next().unwrap().unwrap();
        assert!(line.starts_with("weights ") && line.contains("; party "), "{line}");
        (Listening { child, url: line.rsplit(' ').next().unwrap().to_owned() }, lines)
    };
    let [(zero, mut zero_lines), (one, mut one_lines)] = ["0", "1"].map(quiet);
    let args = ["generate", &model, "--tokens", "1,2,3", "--max-tokens", "3"];
    let flags = ["--party0", &zero.url, "--party1", &one.url, "--demo-single-host"].map(str::to_owned);
    assert_eq!(private(&args, &flags).code, Some(0));
    drop((zero, one));
    assert!(zero_lines.next().is_none() && one_lines.next().is_none());
    assert_eq!(fs::read_to_string(Path::new(&log)).unwrap(), "");
}
