//! Forms compiled in a process of their own.

use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::{cache, command};

/// Whether the process that tries a form ends well.
fn ends_well(form: &Value, memory: &str, seconds: &str) -> bool {
    let mut child = command(&cache())
        .args(["compile-form", "--memory", memory, "--seconds", seconds])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // One that is ended reads no further.
    drop(child.stdin.take().unwrap().write_all(form.to_string().as_bytes()));
    child.wait().unwrap().success()
}

#[test]
fn a_form_is_compiled_within_limits_of_memory_or_not_at_all() {
    let large = json!({"regex": vec!["[a-z]{2,9}x"; 80_000].join("|")});
    assert!(ends_well(&large, "2GiB", "300"));
    assert!(!ends_well(&large, "1MiB", "300"), "it takes more than that");
    // What is refused in good time is refused by whoever asked, with the reason.
    for form in [json!({"regex": "a+"}), json!({"regex": "("}), json!({"schema": {"not": {}}})] {
        assert!(ends_well(&form, "1MiB", "60"), "{form}");
    }
    assert!(!ends_well(&json!({"unknown": 1}), "1MiB", "60"));
}

#[test]
fn where_memory_runs_out_the_process_that_tries_a_form_goes_first() {
    let mut child = command(&cache())
        .args(["compile-form", "--memory", "1MiB", "--seconds", "60"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let score = format!("/proc/{}/oom_score_adj", child.id());
    // It waits for a form until its input ends; nothing but the first lines of it is waited for here.
    while std::fs::read_to_string(&score).unwrap().trim() != "1000" {
        assert!(child.try_wait().unwrap().is_none(), "it ended");
        std::thread::yield_now();
    }
    drop(child.stdin.take());
    child.wait().unwrap();
}
