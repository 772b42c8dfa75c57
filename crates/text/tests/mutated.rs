//! Templates and tokenizer files that somebody changed at random: none ends the process or contradicts itself. A few seconds
//! of cases here; `cargo xtask prove fuzz-text` runs as many as FORNAX_FUZZ_CASES says.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and says how much it did"
)]

mod support;

use std::path::Path;
use std::time::Instant;

use fornax_format::Checkpoint;
use fornax_text::{Chat, ChatTemplate, Special, Tokenizer};
use serde_json::{Value, json};

/// Numbers that follow from the number of the case, so that a case can be repeated (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % bound.max(1) as u64).unwrap()
    }

    fn of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// Runs the cases, and says how many came through to the end and how many were a second.
fn cases(name: &str, few: u64, mut case: impl FnMut(Random) -> bool) {
    let set = std::env::var("FORNAX_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok());
    let count: u64 = set.unwrap_or(few);
    let began = Instant::now();
    let whole = (0..count).filter(|&number| case(Random(number))).count();
    let rate = count as f64 / began.elapsed().as_secs_f64();
    println!("FUZZ {name}: {count} cases, {whole} of them accepted, {rate:.0} a second");
    assert!(whole > 0 && (whole as u64) < count, "{whole} of {count} were accepted: the changes are no test");
}

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
    let mut chat = Chat::new(vec![
        json!({"role": "user", "content": "Hi <EOS>"}),
        json!({"role": "assistant", "content": "Hello"}),
        json!({"role": "user", "content": "Why?"}),
    ]);
    chat.now = "2026-11-05T07:08:09[UTC]".parse().unwrap();
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
        let rendered = ChatTemplate::new(&source).and_then(|template| template.render(&chat, &tokenizer));
        let Ok(prompt) = rendered else { return false };
        tokenizer.encode_chat(&prompt).unwrap();
        true
    });
}

/// A small file of each model that the `tokenizers` crate has, with most of its parts.
fn tokenizer_files() -> Vec<Value> {
    let bpe = json!({"type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "fuse_unk": true,
        "vocab": {"<unk>": 0, "<s>": 1, "a": 2, "b": 3, "ab": 4, "▁": 5, "<0x0A>": 6}, "merges": ["a b"]});
    let unigram = json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false,
        "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0], ["▁ab", -1.5]]});
    let pieces = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "a": 1, "##b": 2}});
    let levels = json!({"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0, "ab": 1}});
    let around = |model: Value| {
        json!({"version": "1.0", "model": model,
            "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
            "padding": {"strategy": {"Fixed": 4}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "<unk>"},
            "added_tokens": [{"id": 7, "content": "<x>", "special": true, "normalized": false, "lstrip": false,
                "rstrip": false, "single_word": false}],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"}, {"type": "Lowercase"},
                {"type": "Strip", "strip_left": true, "strip_right": false}]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "(?=a)\\w+|\\s"}, "behavior": "Isolated", "invert": false},
                {"type": "Digits", "individual_digits": true}, {"type": "Metaspace", "replacement": "▁",
                    "prepend_scheme": "first", "split": true}]},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<x>": {"id": "<x>", "ids": [7], "tokens": ["<x>"]}}},
            "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}})
    };
    [bpe, unigram, pieces, levels].into_iter().map(around).collect()
}

/// Values that do not belong where they come.
fn strange(random: &mut Random) -> Value {
    let long = "ab".repeat(50);
    let values = [
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
    ];
    random.of(&values).clone()
}

/// Changes something somewhere below.
fn change(value: &mut Value, random: &mut Random) {
    let is_here = random.below(4) == 0;
    match value {
        Value::Object(map) if !map.is_empty() && !is_here => {
            let key = map.keys().nth(random.below(map.len())).unwrap().clone();
            match random.below(12) {
                0 => drop(map.remove(&key)),
                1 => {
                    let moved = map.remove(&key).unwrap();
                    map.insert(format!("{key}a"), moved);
                }
                _ => change(map.get_mut(&key).unwrap(), random),
            }
        }
        Value::Array(list) if !list.is_empty() && !is_here => {
            let at = random.below(list.len());
            match random.below(8) {
                0 => drop(list.remove(at)),
                1 => list.extend_from_within(at..),
                _ => change(&mut list[at], random),
            }
        }
        _ => *value = strange(random),
    }
}

#[test]
fn changed_tokenizer_files_end_in_a_tokenizer_or_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let header = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let weights = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let seeds = tokenizer_files();
    for seed in &seeds {
        std::fs::write(folder.path().join("tokenizer.json"), seed.to_string()).unwrap();
        let opened = Checkpoint::open(folder.path()).map(|checkpoint| Tokenizer::open(&checkpoint));
        assert!(matches!(opened, Ok(Ok(_))), "{}: {opened:?}", seed["model"]["type"]);
    }
    cases("tokenizer.json", 3000, |mut random| {
        let mut file = random.of(&seeds).clone();
        for _ in 0..=random.below(3) {
            change(&mut file, &mut random);
        }
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let Ok(tokenizer) = Tokenizer::open(&checkpoint) else { return false };
        let mut whole = true;
        for text in ["", "ab <x> ba\n12 é▁a", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"] {
            for special in [Special::AsText, Special::Parse] {
                // What a file makes of its own tokens may be nonsense; that ids exist may not.
                let Ok(tokens) = tokenizer.encode_prompt(text, special) else {
                    whole = false;
                    continue;
                };
                let known = tokens.iter().filter(|&&id| (id as usize) < tokenizer.vocab_len());
                let known: Vec<u32> = known.copied().collect();
                tokenizer.decode(&known);
            }
        }
        whole
    });
}
