//! What `bench` measures and writes, on a random model that it made itself.

use std::path::{Path, PathBuf};

use crate::plan::{without_numbers, without_values};
use crate::{cache, command, fornax, ran};

/// A small random model in a folder.
fn random(folder: &Path, quant: &str) -> PathBuf {
    let path = folder.join(format!("{quant}.gguf"));
    let made = fornax(["bench", path.to_str().unwrap(), "--make-random", "tiny", "--quant", quant]);
    assert_eq!((made.code, &*made.stdout), (Some(0), &*format!("{}\n", path.display())), "{}", made.stderr);
    path
}

#[test]
fn the_report_has_every_measurement() {
    let folder = tempfile::tempdir().unwrap();
    let path = random(folder.path(), "q8_0");
    let args = ["bench", path.to_str().unwrap(), "--tokens", "8", "--device", "cpu"];
    let mut report = fornax(args.iter().chain(&["--json"])).json();
    let positive = |value: &serde_json::Value, fields: &[&str]| {
        for field in fields {
            assert!(value[field].as_f64().unwrap() > 0.0, "{field} of {value}");
        }
    };
    positive(&report, &["memory_bytes_per_second", "threads"]);
    positive(&report["load"], &["seconds", "weights_seconds", "file_bytes", "allocated_bytes"]);
    for (prefill, tokens) in report["prefill"].as_array().unwrap().iter().zip([128, 512]) {
        assert_eq!(prefill["tokens"], tokens);
        positive(prefill, &["tokens_per_second", "first_token_ms", "bytes", "operations_per_second"]);
    }
    for (decode, streams) in report["decode"].as_array().unwrap().iter().zip([1, 4, 16]) {
        assert_eq!(decode["streams"], streams);
        positive(decode, &["tokens_per_second", "bytes_per_token", "memory_rate_percent"]);
    }
    // Streams share the reading of weights.
    let bytes = |at: usize| report["decode"][at]["bytes_per_token"].as_f64().unwrap();
    assert!(bytes(0) > 3.0 * bytes(1) && bytes(1) > 2.0 * bytes(2), "{report}");
    // Whole pages before the last token are found.
    assert_eq!(
        (&report["prefix"]["tokens"], &report["prefix"]["cached_tokens"]),
        (&1024.into(), &992.into())
    );
    positive(&report["prefix"], &["first_ms", "again_ms"]);
    let is_mixed = |mixed: &serde_json::Value| {
        positive(mixed, &["requests_per_second", "tokens_per_second", "seconds", "operations_per_second"]);
        assert_eq!(mixed["requests"], 16);
        for times in ["first_token_ms", "between_tokens_ms"] {
            let [p50, p90, p99] = ["p50", "p90", "p99"].map(|p| mixed[times][p].as_f64().unwrap());
            assert!(0.0 < p50 && p50 <= p90 && p90 <= p99, "{mixed}");
        }
    };
    is_mixed(&report["mixed"]);
    assert!(report.get("http").is_none() && report.get("skipped").is_none(), "{report}");
    report["model"] = "PATH".into();
    without_values(&mut report);
    insta::assert_json_snapshot!("bench_json", report);

    let shown = fornax(args);
    assert_eq!((shown.code, &*shown.stderr), (Some(0), ""));
    let shown = shown.stdout.replace(path.to_str().unwrap(), "PATH");
    insta::assert_snapshot!("bench_table", without_numbers(&shown));
}

#[test]
fn several_numbers_of_threads_are_compared_and_the_best_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = random(folder.path(), "q8_0");
    let path = path.to_str().unwrap();
    let only = ["--only", "decode", "--streams", "1", "--tokens", "4", "--device", "cpu", "--json"];
    let report = fornax(["bench", path, "--threads", "1,2"].iter().chain(&only)).json();
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(runs.iter().map(|run| run["threads"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2]);
    let rate = |run: &serde_json::Value| run["decode"][0]["tokens_per_second"].as_f64().unwrap();
    let best = &report["best"][0];
    assert_eq!(best["what"], "decode x 1");
    assert_eq!(best["tokens_per_second"].as_f64().unwrap(), rate(&runs[0]).max(rate(&runs[1])), "{report}");

    let automatic = fornax(["bench", path, "--threads", "auto"].iter().chain(&only)).json();
    assert!(automatic["threads_for_few"].as_u64() <= automatic["threads"].as_u64(), "{automatic}");
    let refused = fornax(["plan", path, "--threads", "1,2"]);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("--threads takes one number here, not 2"), "{}", refused.stderr);
}

#[test]
fn shapes_are_made_measured_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let decode = ["--only", "decode", "--streams", "1", "--tokens", "4"];
    let args = ["bench", folder.path().to_str().unwrap(), "--shapes=tiny", "--device", "cpu"];
    let args: Vec<&str> = args.into_iter().chain(decode).collect();
    let report = fornax(args.iter().chain(&["--json"])).json();
    let models = report["models"].as_array().unwrap();
    let quants: Vec<_> = models.iter().map(|model| model["quant"].as_str().unwrap()).collect();
    assert_eq!(quants, ["bf16", "q8_0", "q4_k_m", "q6_k"]);
    for model in models {
        assert!(model["load"]["seconds"].as_f64().unwrap() > 0.0, "{model}");
        // A long conversation is for GPUs.
        assert_eq!(model["decode"].as_array().unwrap().len(), 1, "{model}");
        assert!(model["decode"][0]["tokens_per_second"].as_f64().unwrap() > 0.0, "{model}");
        assert!(model.get("mixed").is_none() && model.get("prefix").is_none(), "{model}");
    }
    let bytes = |at: usize| models[at]["decode"][0]["bytes_per_token"].as_f64().unwrap();
    assert!(bytes(0) > bytes(1) && bytes(1) > bytes(3) && bytes(3) > bytes(2), "{report}");
    let shown = fornax(args.iter().chain(&["--types", "q8_0,F16"]));
    let names: Vec<_> = shown.stdout.lines().filter(|line| line.starts_with("tiny ")).collect();
    assert!(
        matches!(names[..], [q8_0, f16] if q8_0.contains("q8_0: ") && f16.contains("f16: ")),
        "{names:?}"
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    fornax(["bench", "--shapes", "--types", "q9"]).fails(2, "INVALID_INPUT", &["\"q9\"", "q4_k_m"]);
    fornax(["bench", "--shapes=huge"]).fails(2, "INVALID_INPUT", &["\"huge\"", "qwen2.5-7b"]);
}

/// The server is a real one, and so are the sockets.
#[test]
fn a_server_is_measured_beside_its_engine() {
    let folder = tempfile::tempdir().unwrap();
    let flags =
        ["--only", "decode,mixed", "--streams", "1,5", "--tokens", "6", "--rate", "200", "--requests", "9"];
    let args =
        ["bench", folder.path().to_str().unwrap(), "--shapes=tiny", "--types", "q8_0", "--device", "cpu"];
    let args: Vec<&str> = args.into_iter().chain(flags).chain(["--http"]).collect();
    let report = fornax(args.iter().chain(&["--json"])).json();
    let model = &report["models"][0];
    for figures in [model, &model["http"]] {
        let decode = figures["decode"].as_array().unwrap();
        let streams: Vec<_> = decode.iter().map(|decode| decode["streams"].as_u64().unwrap()).collect();
        assert_eq!(streams, [1, 5], "{figures}");
        assert!(decode.iter().all(|decode| decode["tokens_per_second"].as_f64().unwrap() > 0.0), "{figures}");
        assert_eq!(
            (&figures["mixed"]["requests"], &figures["mixed"]["requests_per_second"]),
            (&9.into(), &200.0.into())
        );
    }
    // The same lengths for both, drawn from the same seed.
    for field in ["prompt_tokens", "generated_tokens"] {
        assert_eq!(model["mixed"][field], model["http"]["mixed"][field]);
    }
    let shown = fornax(args);
    for line in ["decode x 5 ", "http decode x 5 ", "mixed ", "http mixed "] {
        assert!(shown.stdout.lines().any(|shown| shown.starts_with(line)), "{line}: {}", shown.stdout);
    }
}

#[test]
fn a_short_context_is_measured_as_far_as_it_goes() {
    let path = crate::tiny::fixtures().join("llama.gguf");
    let report = fornax(["bench", path.to_str().unwrap(), "--tokens", "4", "--json"]).json();
    assert_eq!(report["prefill"].as_array().unwrap().len(), 1);
    assert_eq!(report["prefix"]["tokens"], 255);
    assert_eq!(report["skipped"], serde_json::json!(["prefill 512: the context holds 256"]));
}

#[test]
fn a_random_model_is_one_that_others_can_open() {
    let folder = tempfile::tempdir().unwrap();
    for quant in ["f32", "bf16", "q4_k"] {
        let path = random(folder.path(), quant);
        let shown = fornax(["inspect", path.to_str().unwrap(), "--json"]).json();
        assert_eq!((&shown["architecture"], &shown["facts"]["vocab"]), (&"llama".into(), &1024.into()));
        let args = ["generate", path.to_str().unwrap(), "--tokens", "1,2,3", "--max-tokens", "5", "--json"];
        assert_eq!(fornax(args).json()["tokens"].as_array().unwrap().len(), 5, "{quant}");
    }
    // Without a name it is written to the folder that one is in.
    let mut made = command(&cache());
    made.current_dir(folder.path()).args(["bench", "--make-random", "tiny", "--quant", "Q4_0"]);
    assert_eq!(ran(&mut made).stdout, "tiny-q4_0.gguf\n");
    assert!(folder.path().join("tiny-q4_0.gguf").exists());
}

#[test]
fn what_cannot_be_made_or_measured_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = random(folder.path(), "f16");
    let path = path.to_str().unwrap();
    let check = |args: &[&str], says: &[&str]| {
        fornax(["bench"].iter().chain(args)).fails(2, "INVALID_INPUT", says);
    };
    check(&[path, "--make-random", "tiny", "--quant", "f16"], &["exists"]);
    check(&["--make-random", "huge", "--quant", "f16"], &["\"huge\"", "qwen2.5-7b"]);
    check(&["--make-random", "tiny", "--quant", "q2_k"], &["\"q2_k\"", "q4_k"]);
    check(&["--make-random", "tiny"], &["--quant"]);
    check(&["no/such/x.gguf", "--make-random", "tiny", "--quant", "f16"], &["cannot write no/such/x.gguf"]);
    check(&[path, "--tokens", "1"], &["--tokens", "at least 2"]);
    check(&[path, "--streams", "0"], &["--streams"]);
    check(&[path, "--rate", "-1"], &["--rate", "more than 0"]);
    check(&[path, "--only", "everything"], &["everything"]);
    check(&[path, "--only", "mixed"], &["--only mixed needs --rate"]);
    check(&["--http=ftp://x"], &["ftp://x", "is no server"]);
    fornax(["bench", path, "--http", "--device", "cpu"]).fails(2, "INVALID_INPUT", &["tokenizer"]);
    fornax(["bench", "--http=http://127.0.0.1:1"]).fails(
        2,
        "INVALID_INPUT",
        &["cannot reach http://127.0.0.1:1"],
    );
    fornax(["bench", path, "--memory-limit", "1MiB"]).fails(3, "MODEL_DOES_NOT_FIT", &["weights"]);
}
