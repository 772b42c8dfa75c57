//! What `generate`, `run`, `perplexity`, `tokenize` and `inspect` do with the default model.

use std::io::Read;
use std::process::{Child, Command, Output, Stdio};

use crate::{cache, command, fornax, fornax_with_input, model, ran};

/// The names of an object's fields, in order.
fn fields(value: &serde_json::Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn generate_prints_the_documented_json() {
    let Some(path) = model("smollm2", "generate_prints_the_documented_json") else { return };
    let args = ["generate", &path, "--prompt", "The sky is blue because", "--max-tokens", "8", "--json"];
    let ran = fornax(args);
    let answer = ran.json();
    assert_eq!(fields(&answer), ["text", "tokens", "finish_reason", "usage", "timings", "seed", "memory"]);
    let counts = ["prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens"];
    assert_eq!(fields(&answer["usage"]), counts);
    assert_eq!(answer["usage"]["prompt_tokens"], 5);
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    assert_eq!(answer["usage"]["total_tokens"], 13);
    assert_eq!(answer["finish_reason"], "length");
    assert_eq!(answer["tokens"].as_array().unwrap().len(), 8);
    for field in ["load_ms", "first_token_ms", "decode_ms", "decode_tokens_per_second"] {
        assert!(answer["timings"][field].as_f64().unwrap() > 0.0, "{field}");
    }
    // The choice that `auto` made is said once, on standard error.
    assert_eq!(ran.stderr.matches("device: cpu").count(), 1, "{}", ran.stderr);
    assert_eq!(fornax(args.into_iter().chain(["--device", "cpu"])).stderr, "");
}

#[test]
fn streamed_text_is_the_whole_text() {
    let Some(path) = model("smollm2", "streamed_text_is_the_whole_text") else { return };
    // Characters of several tokens, and a stop string that never comes but is begun.
    let args = ["generate", &path, "--prompt", "Emoji: 🙂 🎉", "--max-tokens", "40", "--seed", "3"];
    let args = args.into_iter().chain(["--temperature", "1.2", "--stop", "🙂🙂🙂🙂🙂🙂"]);
    let whole = fornax(args.clone().chain(["--json"])).json()["text"].as_str().unwrap().to_owned();
    assert_eq!(fornax(args).stdout, format!("{whole}\n"));
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let Some(path) = model("smollm2", "a_stop_string_ends_the_text_before_it") else { return };
    let generate = |stop: &[&str]| {
        let args = ["generate", &path, "--prompt", "The sky is blue because", "--max-tokens", "32", "--json"];
        fornax(args.iter().chain(stop)).json()
    };
    let whole = generate(&[])["text"].as_str().unwrap().to_owned();
    // The end of one word and the beginning of the next: it straddles tokens.
    let border = whole.match_indices(' ').nth(4).unwrap().0;
    let stop = &whole[border - 1..border + 2];
    let at = whole.find(stop).unwrap();
    let cut = generate(&["--stop", "never", "--stop", stop]);
    assert_eq!(cut["text"], whole[..at]);
    assert_eq!(cut["finish_reason"], "stop");
}

#[test]
fn an_end_token_stops_unless_ignored_and_is_not_shown() {
    let Some(path) = model("smollm2", "an_end_token_stops_unless_ignored_and_is_not_shown") else { return };
    let prompt = "<|im_start|>system\nYou answer in one word.<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";
    let args = ["generate", &path, "--special", "--prompt", prompt, "--max-tokens", "12", "--json"];
    let answer = fornax(args).json();
    assert_eq!(answer["finish_reason"], "stop");
    assert_eq!(answer["text"], "The capital of France is Paris.");
    // The end token is among the tokens: it was generated.
    assert_eq!(answer["tokens"].as_array().unwrap().last().unwrap(), 2);
    let on = fornax(args.into_iter().chain(["--ignore-eos"])).json();
    assert_eq!(on["finish_reason"], "length");
    assert_eq!(on["tokens"].as_array().unwrap().len(), 12);
}

#[test]
fn control_tokens_in_a_prompt_are_text_unless_asked_for() {
    let Some(path) = model("smollm2", "control_tokens_in_a_prompt_are_text_unless_asked_for") else { return };
    let count = |special: &[&str]| {
        let args = ["generate", &path, "--prompt", "<|im_end|>", "--max-tokens", "1", "--json"];
        fornax(args.iter().chain(special)).json()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert!(count(&[]) > 1);
    assert_eq!(count(&["--special"]), 1);
}

#[test]
fn run_answers_once_with_the_chat_template() {
    let Some(_) = model("smollm2", "run_answers_once_with_the_chat_template") else { return };
    let args = ["run", "Write a haiku about a furnace.", "--temperature", "0", "--max-tokens", "24"];
    let answer = fornax(args);
    assert_eq!(answer.code, Some(0), "{}", answer.stderr);
    assert!(answer.stdout.starts_with("In the heart of the earth, a furnace burns"), "{}", answer.stdout);
    assert!(answer.stderr.contains(" tok/s"), "{}", answer.stderr);
    assert!(!answer.stdout.contains("im_end"), "{}", answer.stdout);
}

#[test]
fn run_reads_a_chat_from_a_pipe_and_remembers_it() {
    let Some(path) = model("smollm2", "run_reads_a_chat_from_a_pipe_and_remembers_it") else { return };
    let questions = ["What is the capital of France?", "And of Italy?"];
    let args = ["run", &path, "--temperature", "0", "--max-tokens", "16"];
    let chat = fornax_with_input(&args, &questions.join("\n\n"));
    assert_eq!(chat.code, Some(0), "{}", chat.stderr);
    // The same conversation spelled out, as the model's template does.
    let mut prompt = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n".to_owned();
    let mut answers = String::new();
    for question in questions {
        prompt.push_str(&format!("<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"));
        let answer =
            fornax(["generate", &path, "--special", "--prompt", &prompt, "--max-tokens", "16", "--json"]);
        let text = answer.json()["text"].as_str().unwrap().to_owned();
        answers.push_str(&format!("{text}\n"));
        prompt.push_str(&format!("{text}<|im_end|>\n"));
    }
    assert_eq!(chat.stdout, answers);
    // Two answers, and no prompt marks in a pipe.
    let speeds: Vec<&str> = chat.stderr.lines().filter(|line| line.contains("tok/s; seed")).collect();
    assert_eq!(speeds.len(), 2, "{}", chat.stderr);
    // The second question finds the first, and its answer, in the cache: whole pages of 32 tokens.
    assert!(speeds[0].contains(" 0 of them cached"), "{}", speeds[0]);
    assert!(
        speeds[1].contains(" 32 of them cached") || speeds[1].contains(" 64 of them cached"),
        "{}",
        speeds[1]
    );
    assert!(!chat.stderr.contains("> "), "{}", chat.stderr);
}

#[test]
fn a_template_of_ones_own_is_used() {
    let Some(path) = model("smollm2", "a_template_of_ones_own_is_used") else { return };
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("chat.jinja");
    std::fs::write(&template, "{{ raise_exception('only haiku') }}").unwrap();
    let args = ["run", &path, "Hello", "--chat-template-file", template.to_str().unwrap()];
    fornax(args).fails(2, "INVALID_INPUT", &["only haiku"]);
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let Some(path) = model("smollm2", "a_closed_pipe_ends_quietly") else { return };
    let mut child = command(&cache())
        .args(["generate", &path, "--prompt", "1, 2, 3,", "--max-tokens", "200", "--device", "cpu"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    assert_eq!(output.status.code(), Some(0));
}

/// Starts a command, waits until it has begun to answer, and interrupts it as Ctrl-C does.
fn interrupted(args: &[&str], begun: impl FnOnce(&mut Child)) -> Output {
    let mut child =
        command(&cache()).args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    begun(&mut child);
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    child.wait_with_output().unwrap()
}

#[test]
fn an_interrupt_stops_the_answer_with_its_own_code() {
    let Some(path) = model("smollm2", "an_interrupt_stops_the_answer_with_its_own_code") else { return };
    let args = ["generate", &path, "--prompt", "1, 2, 3,", "--ignore-eos", "--device", "cpu"];
    let output = interrupted(&args, |child| {
        let mut first = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    });
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    let said: Vec<&str> = stderr.lines().filter(|line| !line.starts_with("loading: ")).collect();
    assert!(matches!(said[..], [line] if line.starts_with("error: CANCELLED: ")), "{stderr}");
}

#[test]
fn an_interrupt_stops_the_reading_of_a_long_prompt() {
    let Some(path) = model("smollm2", "an_interrupt_stops_the_reading_of_a_long_prompt") else { return };
    let prompt = "The quick brown fox jumps over the lazy dog. ".repeat(700);
    let args = ["generate", &path, "--prompt", &prompt, "--max-tokens", "1"];
    let output = interrupted(&args, |child| {
        // The device is announced when nothing but the prompt stands before the first token. A slow machine says
        // how far loading is before that.
        let mut said = Vec::new();
        while !said.ends_with(b"device: ") {
            let mut byte = [0];
            child.stderr.as_mut().unwrap().read_exact(&mut byte).unwrap();
            said.push(byte[0]);
        }
    });
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("error: CANCELLED: "), "{stderr}");
    assert_eq!(output.stdout, b"");
}

#[test]
fn an_interrupt_leaves_nothing_half_written() {
    let Some(path) = model("smollm2", "an_interrupt_leaves_nothing_half_written") else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("logits.f32");
    let prompt = "The quick brown fox jumps over the lazy dog. ".repeat(500);
    let args = ["logits", &path, "--prompt", &prompt, "--all", "--out", out.to_str().unwrap()];
    let files = || std::fs::read_dir(folder.path()).unwrap().count();
    let output = interrupted(&args, |child| {
        while files() == 0 {
            assert!(child.try_wait().unwrap().is_none(), "it ended before it wrote");
            std::thread::yield_now();
        }
    });
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(files(), 0);
}

#[test]
fn tokenize_needs_no_weights_and_shows_pieces() {
    let Some(path) = model("smollm2", "tokenize_needs_no_weights_and_shows_pieces") else { return };
    let tokens = fornax(["tokenize", &path, "--json", "--text", "The sky is"]).json();
    let expected = serde_json::json!({"tokens": [
        {"id": 504, "piece": "The"}, {"id": 6376, "piece": " sky"}, {"id": 314, "piece": " is"},
    ]});
    assert_eq!(tokens, expected);
    let with_bos = fornax(["tokenize", &path, "--json", "--bos", "--text", "The"]).json();
    assert_eq!(with_bos["tokens"][0]["id"], 1);
    let from_stdin = fornax_with_input(&["tokenize", &path, "--json", "--file", "-"], "The sky is");
    assert_eq!(from_stdin.json(), expected);
    assert_eq!(fornax(["tokenize", &path, "--text", "The"]).stdout, "     504  \"The\"\n");
}

#[test]
fn perplexity_is_the_mean_of_what_logits_say() {
    let Some(path) = model("smollm2", "perplexity_is_the_mean_of_what_logits_say") else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../../../../tests/golden/smollm2-q4_1.json")).unwrap();
    let case = golden.as_array().unwrap().iter().find(|case| case["name"] == "code").unwrap();
    std::fs::write(&file, case["prompt"].as_str().unwrap()).unwrap();
    let args = ["perplexity", &path, "--file", file.to_str().unwrap(), "--activations", "float", "--json"];
    let measured = fornax(args).json();
    // One window holds all: the reference's log-probability of every token after the first.
    let logprobs = case["prompt_logprobs"].as_array().unwrap();
    let mean = -logprobs.iter().map(|value| value.as_f64().unwrap()).sum::<f64>() / logprobs.len() as f64;
    assert_eq!(measured["tokens"], logprobs.len());
    assert_eq!(measured["windows"], 1);
    assert!((measured["nll"].as_f64().unwrap() - mean).abs() < 0.02, "{measured}, wanted {mean}");
    // Windows of 7 make three of the 18 tokens, and lose the first token of each.
    let windows = fornax(args.into_iter().chain(["--context", "7"])).json();
    assert_eq!((&windows["windows"], &windows["tokens"]), (&3.into(), &15.into()));
}

#[test]
fn inspect_shows_what_the_file_holds() {
    let Some(path) = model("smollm2", "inspect_shows_what_the_file_holds") else { return };
    let shown = fornax(["inspect", &path, "--json"]).json();
    assert_eq!(shown["architecture"], "llama");
    assert_eq!(shown["parameters"], 134_515_008);
    assert_eq!(shown["tensors"].as_array().unwrap().len(), 272);
    assert_eq!(shown["facts"]["context"], 8192);
    assert_eq!(shown["tokenizer"]["tokens"], 49152);
    assert!(shown["chat_template"].as_str().unwrap().contains("im_start"));
    let text = fornax(["inspect", &path]).stdout;
    assert!(text.contains("token_embd.weight") && text.contains("49152 x 576"), "{text}");
}

#[test]
fn peak_memory_stays_near_the_file() {
    let Some(path) = model("smollm2", "peak_memory_stays_near_the_file") else { return };
    let prompt = "The quick brown fox jumps over the lazy dog. ".repeat(60);
    let mut generate = command(&cache());
    generate.args(["generate", &path, "--prompt", &prompt, "--max-tokens", "32", "--json"]);
    let answer = ran(&mut generate).json();
    let Some(peak) = answer["timings"]["peak_bytes"].as_u64() else {
        println!("SKIP peak_memory_stays_near_the_file: this system does not tell a process its peak");
        return;
    };
    let kv = answer["timings"]["kv_bytes"].as_u64().unwrap();
    let file = std::fs::metadata(&path).unwrap().len();
    let bound = file + file / 2 + kv + (64 << 20);
    assert!(peak < bound, "{peak} bytes, bound {bound}");
}
