//! Templates and tokenizer files that somebody changed at random: none ends the process or contradicts itself. A few
//! seconds of cases here; `cargo xtask prove fuzz-templates` and `fuzz-tokenizers` run
//! ten million, or an hour.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and says how much it did"
)]

mod support;

use std::path::Path;

use serde_json::{Value, json};

#[path = "../../../fuzz/src/alter.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod alter;
#[path = "../../../fuzz/src/mutate.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod mutate;
#[path = "../../../fuzz/src/template.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod template;
#[path = "../../../fuzz/src/tokenizer.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod tokenizer;

use mutate::cases;

/// Pieces of templates, most of which make something of something.
const PIECES: &[&str] = &[
    "{{ ns.x }}",
    "{% set ns.x = ns.x ~ ns.x %}",
    "{% set ns.x = [ns.x, ns.x] %}",
    "{% set ns.x = ns %}",
    " ~ ",
    " + ",
    " * ",
    " * 99999999",
    " ** ",
    " % ",
    " in ",
    " is in ",
    " == ",
    " if ",
    " else ",
    " not ",
    "[",
    "]",
    "(",
    ")",
    "{",
    "}",
    "[::-1]",
    "[0:999999999]",
    ".x",
    "{% for i in range(9999) %}",
    "{% endfor %}",
    "{% if true %}",
    "{% endif %}",
    "{% macro m(a) %}",
    "{% endmacro %}",
    "{{ m(m) }}",
    "{% set y %}",
    "{% endset %}",
    "{% filter upper %}",
    "{% endfilter %}",
    "{% call m(1) %}",
    "{% endcall %}",
    "{% include 'chat' %}",
    "{% break %}",
    "loop.cycle()",
    "loop.changed(ns)",
    "{{ loop }}",
    "{{ loop(messages) }}",
    " recursive ",
    " | join",
    " | join('ab')",
    " | list",
    " | string",
    " | tojson(indent=9)",
    " | replace('', 'abcdef')",
    " | map('upper')",
    " | map('replace', '', 'ab')",
    " | map(attribute='role')",
    " | selectattr('role', 'eq', 'user')",
    " | select('in', messages)",
    " | sort",
    " | unique",
    " | groupby('role')",
    " | batch(99999999)",
    " | slice(99999999)",
    " | format(1)",
    " | indent(99999999)",
    " | pprint",
    " | length",
    " | first",
    " | sum",
    " | zip(messages)",
    " | chain(messages)",
    " | dictsort",
    " | items",
    " | safe",
    ".split('')",
    ".replace('a', 'aaaaaaaa')",
    ".join(messages)",
    ".format(1)",
    ".items()",
    ".strip()",
    "*args",
    "**args",
    "'%s'",
    "'%99999999d'",
    "99999999999999999999",
    "-1",
    "1e308",
    "none",
    "messages",
    "strftime_now('%Y')",
    "raise_exception('x')",
    "namespace(x=1)",
    "dict(a=1)",
    "range(99999)",
    "{#",
    "#}",
    "{{-",
    "-}}",
    "\u{fdd0}",
    "é",
];

#[test]
fn changed_templates_end_in_a_text_or_an_error() {
    let tokenizer = support::bytes_tokenizer();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    paths.sort();
    let mut seeds: Vec<String> = paths.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
    seeds.push(
        "{% set ns = namespace(x='ab') %}{% for m in messages %}{{ m.content }}{{ ns.x }}{% endfor %}"
            .to_owned(),
    );
    let chat = template::chat();
    cases("templates", 1500, |mut random| {
        // Half are a few pieces alone: changes of a long template rarely meet.
        let mut text: Vec<char> = if random.below(2) == 0 {
            random.of(&seeds).chars().collect()
        } else {
            "{% set ns = namespace(x='ab') %}{{ messages }}".chars().collect()
        };
        for _ in 0..=random.below(6) {
            let at = random.below(text.len() + 1);
            let end = (at + random.below(40)).min(text.len());
            match random.below(4) {
                0 => drop(text.drain(at..end)),
                1 => drop(text.splice(at..at, text[at..end].to_vec())),
                _ => {
                    let piece: Vec<char> = random.of(PIECES).chars().collect();
                    // Where an expression is, rather than anywhere.
                    let inside = (at..text.len()).find(|&at| text[at..].starts_with(&[' ', '}', '}']));
                    let at = inside.filter(|_| random.below(2) == 0).unwrap_or(at);
                    text.splice(at..at, piece);
                }
            }
        }
        let source: String = text.into_iter().collect();
        template::template(&source, &chat, &tokenizer)
    });
}

/// Values that do not belong where they come.
fn strange() -> Vec<Value> {
    let long = "ab".repeat(50);
    vec![
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(7),
        json!(1 << 21),
        json!(u32::MAX),
        json!(u64::MAX),
        json!(1e308),
        json!(""),
        json!("a"),
        json!("b a"),
        json!("▁"),
        json!(long),
        json!([]),
        json!({}),
        json!([["a", "b"]]),
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAABh"}),
        json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9hAA=="}),
        json!({"type": "Replace", "pattern": {"String": ""}, "content": "abcd"}),
        json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "lowercase": true}),
        json!({"type": "Split", "pattern": {"Regex": "(a|a)*(?=c)"}, "behavior": "Removed", "invert": true}),
        json!({"type": "Split", "pattern": {"Regex": "(?:(?:a{1000}){1000}){1000}"}, "behavior": "Removed", "invert": true}),
        json!({"type": "Punctuation", "behavior": "MergedWithNext"}),
        json!({"Fixed": 4_000_000_000_u64}),
        json!({"Regex": ""}),
        json!({"String": ""}),
        json!("(?<=a)"),
        json!(["a b", "ab a", "a ab"]),
        json!([["a", -1.0]]),
    ]
}

#[test]
fn changed_tokenizer_files_end_in_a_tokenizer_or_an_error() {
    let folder = tempfile::tempdir().unwrap();
    tokenizer::prepare(folder.path());
    let seeds = mutate::seeds("tokenizer");
    for seed in &seeds {
        let opened = tokenizer::open(folder.path(), seed);
        assert!(opened.is_ok(), "{}: {opened:?}", String::from_utf8_lossy(seed));
    }
    let files: Vec<Value> = seeds.iter().map(|seed| serde_json::from_slice(seed).unwrap()).collect();
    let strange = strange();
    cases("tokenizer.json", 3000, |mut random| {
        if random.below(4) == 0 {
            let bytes = mutate::changed(&mut random, &seeds, &[b"4294967295", b"\"\"", b"-1"]);
            return tokenizer::tokenizer(folder.path(), &bytes);
        }
        let mut file = random.of(&files).clone();
        for _ in 0..=random.below(3) {
            alter::alter(&mut file, &mut random, &strange);
        }
        tokenizer::tokenizer(folder.path(), file.to_string().as_bytes())
    });
}
