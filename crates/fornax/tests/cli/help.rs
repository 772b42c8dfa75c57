//! What the commands say of themselves.

use crate::fornax;

#[test]
fn every_command_explains_itself_with_examples() {
    let check = |command: &str| {
        let args: Vec<&str> = command.split_whitespace().chain(["--help"]).collect();
        let help = fornax(&args);
        assert_eq!((help.code, help.stderr.as_str()), (Some(0), ""));
        assert!(help.stdout.contains("Examples:\n  fornax "), "{}", help.stdout);
        let name = if command.is_empty() { "fornax" } else { command };
        insta::assert_snapshot!(name, help.stdout);
    };
    for command in [
        "",
        "run",
        "serve",
        "generate",
        "embed",
        "jobs",
        "private",
        "plan",
        "inspect",
        "tokenize",
        "logits",
        "perplexity",
        "bench",
        "pull",
        "list",
        "rm",
        "doctor",
        "completions",
    ] {
        check(command);
    }
}

#[test]
fn the_version_is_printed() {
    let short = concat!("fornax ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(fornax(["-V"]).stdout, short);
    let long = fornax(["--version"]).stdout;
    let facts = long.strip_prefix(short).unwrap();
    let names: Vec<&str> = facts.lines().map(|line| line.split_once(": ").unwrap().0).collect();
    assert_eq!(names, ["commit", "built for", "devices"]);
}

#[test]
fn completions_know_the_commands_and_flags() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = fornax(["completions", shell]).stdout;
        for word in ["perplexity", "kv-dtype", "ignore-eos"] {
            assert!(script.contains(word), "{shell} lacks {word}");
        }
    }
}
