//! Commands that the documentation shows are commands that this command line takes.
#![cfg(test)]

use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser};

use super::args::Cli;

/// Pages that nobody has to read, with commands of their day.
const OLD: &[&str] = &["docs/log"];

/// A command as it is shown: where, its words, and whether it is whole or has `...` in the place of some of them.
#[derive(Debug, PartialEq)]
struct Shown {
    place: String,
    words: Vec<String>,
    is_whole: bool,
}

/// Every page: README.md, the documentation, the examples.
fn pages() -> Vec<PathBuf> {
    fn below(folder: &Path, root: &Path, found: &mut Vec<PathBuf>) {
        let mut entries: Vec<PathBuf> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        for path in entries {
            let name = path.strip_prefix(root).unwrap().to_str().unwrap();
            if path.is_dir() && !OLD.contains(&name) {
                below(&path, root, found);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = vec![root.join("README.md")];
    below(&root.join("docs"), &root, &mut found);
    below(&root.join("examples"), &root, &mut found);
    found
}

/// The words of a shell's line as far as its first command goes: quotes are taken off, comments and pipes end it.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for letter in line.chars() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(letter),
            (None, '"' | '\'') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            (None, '|' | '>' | '<' | ';' | '&') => break,
            (None, '#') if word.is_none() => break,
            (None, _) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

/// The `fornax` commands of a page's blocks of code.
fn commands(name: &str, text: &str) -> Vec<Shown> {
    let (mut found, mut is_code, mut held) = (Vec::new(), false, String::new());
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
            held.clear();
            continue;
        }
        if !is_code {
            continue;
        }
        if let Some(begun) = line.strip_suffix('\\') {
            held.push_str(begun);
            continue;
        }
        let whole = std::mem::take(&mut held) + line;
        let command = whole.trim_start().trim_start_matches("$ ");
        let command = match command.strip_prefix("cargo run --release -- ") {
            Some(arguments) => format!("fornax {arguments}"),
            None => command.to_owned(),
        };
        // Behind a pipe, and behind what is set for one command, too.
        let part = command.split(" | ").find(|part| part.trim_start().starts_with("fornax "));
        let Some(part) = part.map(str::trim_start) else { continue };
        let is_whole = !part.contains("...") && !part.contains('…');
        // Where words are left out, what stands behind many spaces is an explanation.
        let shown = if is_whole { part } else { part.split("   ").next().unwrap_or(part) };
        found.push(Shown { place: format!("{name}:{}", index + 1), words: words(shown), is_whole });
    }
    found
}

/// Flags that the command's command line does not know.
fn unknown_flags(words: &[String]) -> Vec<String> {
    let (mut command, mut rest) = (Cli::command(), &words[1..]);
    command.build();
    while let Some(inner) = rest.first().and_then(|word| command.find_subcommand(word)).cloned() {
        (command, rest) = (inner, &rest[1..]);
    }
    let known = |flag: &str| command.get_arguments().any(|one| one.get_long() == Some(flag));
    let flags =
        rest.iter().filter_map(|word| word.strip_prefix("--")).map(|flag| flag.split('=').next().unwrap());
    flags.filter(|flag| !known(flag)).map(str::to_owned).collect()
}

#[test]
fn every_command_of_the_documentation_is_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut wrong = Vec::new();
    let mut count = 0;
    for page in pages() {
        let name = page.strip_prefix(&root).unwrap().display().to_string();
        for shown in commands(&name, &std::fs::read_to_string(&page).unwrap()) {
            count += 1;
            let said = if shown.is_whole {
                Cli::try_parse_from(&shown.words)
                    .err()
                    .filter(clap::Error::use_stderr)
                    .map(|error| error.to_string())
            } else {
                let flags = unknown_flags(&shown.words);
                (!flags.is_empty()).then(|| format!("no such flags: {flags:?}"))
            };
            wrong.extend(said.map(|said| format!("{}: {}\n{said}", shown.place, shown.words.join(" "))));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 50, "only {count} commands were found");
}

#[test]
fn commands_are_found_as_a_shell_would_read_them() {
    let page = "fornax outside\n```sh\n$ fornax run \"a b\" # what\necho x | fornax run 'c' > out\n  fornax serve \\\n  --port 1\n\
        fornax private chat --party0 ...      asks both\ncurl fornax\n```\n";
    let found: Vec<(String, bool)> =
        commands("page", page).into_iter().map(|shown| (shown.words.join("|"), shown.is_whole)).collect();
    let wanted = [
        ("fornax|run|a b", true),
        ("fornax|run|c", true),
        ("fornax|serve|--port|1", true),
        ("fornax|private|chat|--party0|...", false),
    ];
    assert_eq!(found, wanted.map(|(words, is_whole)| (words.to_owned(), is_whole)));
    assert_eq!(unknown_flags(&words("fornax private chat --party0 ... --colour")), ["colour"]);
}
