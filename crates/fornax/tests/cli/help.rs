//! What the commands say of themselves.

use crate::{command, fornax, ran};

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
        "convert",
        "quantize",
        "cache",
        "imatrix",
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
fn paragraphs_are_wrapped_once() {
    // Wide enough for every paragraph: a line break within one would be the text's own, beside the terminal's.
    let broken = |help: &str| {
        let lines: Vec<&str> = help.lines().collect();
        let prose = |line: &str| !line.is_empty() && !line.starts_with(' ') && !line.ends_with(':');
        let pair = lines.windows(2).find(|pair| prose(pair[0]) && prose(pair[1]) && pair[0] != lines[0]);
        pair.map(|pair| pair.join("|"))
    };
    assert!(broken("Title\n\nOne half\nand the other").is_some(), "what is broken is seen");
    let cache = tempfile::tempdir().unwrap();
    for name in ["", "run", "serve", "generate", "plan", "pull", "list", "bench", "private", "jobs", "doctor"]
    {
        let args = name.split_whitespace().chain(["--help"]);
        let help = ran(command(cache.path()).args(args).env("COLUMNS", "2000"));
        let usage = help.stdout.find("Usage:").unwrap();
        let behind = help.stdout.find("Examples:").unwrap();
        assert_eq!(broken(&help.stdout[..usage]), None, "{name}");
        assert_eq!(broken(&help.stdout[behind..]), None, "{name}");
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
