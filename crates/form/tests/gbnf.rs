//! Grammars in llama.cpp's notation: what they accept, byte by byte.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and says what it skips"
)]

use std::sync::Arc;

use fornax_engine::allows;
use fornax_form::{Form, Grammars, Vocabulary};

/// Bytes are tokens of the same number; then the end.
fn grammars() -> Grammars {
    let encode = Arc::new(|bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).collect());
    let mut bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    bytes.push(Vec::new());
    Grammars::new(Vocabulary { bytes, end_tokens: vec![256], encode }).unwrap()
}

/// Whether a text may be written, and end there.
fn accepts(form: &Form, text: &str) -> bool {
    let mut grammar = grammars().compile(form).unwrap();
    for &byte in text.as_bytes() {
        if !allows(&grammar.mask().unwrap(), u32::from(byte)) {
            return false;
        }
        grammar.accept(u32::from(byte)).unwrap();
    }
    grammar.may_end()
}

#[test]
fn grammars_in_llama_cpps_notation_accept_what_they_say() {
    let check = |text: &str, yes: &[&str], no: &[&str]| {
        // As it is, and so that it refers to itself: what is a single expression then is a grammar.
        let recursive =
            format!("{}\nmore ::= \"~\" more | \"~\" root", text.replacen("root ::=", "root ::= more |", 1));
        for form in [Form::Grammar(text.into()), Form::Grammar(recursive)] {
            for text in yes {
                assert!(accepts(&form, text), "{form:?} refuses {text:?}");
            }
            for text in no {
                assert!(!accepts(&form, text), "{form:?} accepts {text:?}");
            }
        }
    };
    check("root ::= \"yes\" | \"no\"", &["yes", "no"], &["", "y", "yesno", "YES"]);
    // A longer lexeme would take what the shorter one needs.
    check("root ::= [a-z]+ \"x\" \"xy\"?", &["ax", "axxy", "axx", "xxxy"], &["x", "ay", "axxyz"]);
    check(
        "# moves\nroot ::= (\n  \"1. \" move # first\n  \" \" move \"\\n\"\n)+\nmove ::= [a-h] [1-8] [+#]? |\n  \"O-O\"",
        &["1. e4 O-O\n", "1. e4+ e5#\n1. a1 a2\n"],
        &["1. e9 e5\n", "1. e4 e5", ""],
    );
    check(
        "root ::= \"a\"{2} \"b\"{1,} \"c\"{0,2} \"d\"{0}",
        &["aab", "aabbbcc"],
        &["ab", "aa", "aabccc", "aabd"],
    );
    check(
        "root ::= (\"ab\")* [^\\n\\x41-\\x43] .",
        &["ababxA", "\u{e9}\u{1f600}", "\u{4e2d}\n"],
        &["abAx", "\nx", "x"],
    );
    check(
        "root ::= [\\u3041-\\U0000309f]+ opt\nopt ::= | \"-\" [a\\]-]",
        &["\u{3042}", "\u{3042}-]", "\u{3042}--"],
        &["", "-a", "a"],
    );
}

#[test]
fn a_recursive_grammar_in_llama_cpps_notation_is_followed() {
    let json = Form::Grammar(
        "root ::= object\nvalue ::= object | array | string | number | (\"true\" | \"false\" | \"null\") ws\n\
         object ::= \"{\" ws (string \":\" ws value (\",\" ws string \":\" ws value)*)? \"}\" ws\n\
         array ::= \"[\" ws (value (\",\" ws value)*)? \"]\" ws\n\
         string ::= \"\\\"\" ([^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" ([\"\\\\bfnrt] | \"u\" [0-9a-fA-F]{4}))* \"\\\"\" ws\n\
         number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ([eE] [-+]? [1-9] [0-9]{0,15})? ws\n\
         ws ::= | \" \" | \"\\n\" [ \\t]{0,20}"
            .into(),
    );
    for text in [r#"{"a": [1, -2.5e3, {"b": "\u00e9x\n"}], "c": true}"#, "{}", "{\n  \"x\":null}"] {
        assert!(accepts(&json, text), "{text:?}");
        let whole: serde_json::Value = serde_json::from_str(text).unwrap();
        assert!(whole.is_object());
    }
    for text in ["[]", r#"{"a":}"#, r#"{"a":1,}"#, r#"{"a":"\q"}"#, r#"{"a":truefalse}"#, "{\"a\":01}", "{"] {
        assert!(!accepts(&json, text), "{text:?}");
    }
    let left = Form::Grammar("root ::= root \"+\" term | term\nterm ::= [0-9]+ | \"(\" root \")\"".into());
    assert!(accepts(&left, "12+(3+4)") && !accepts(&left, "12+") && !accepts(&left, "(1"));
    let endless = Form::Grammar("root ::= \"a\" root".into());
    assert!(grammars().compile(&endless).is_err());
}

#[test]
fn grammars_of_llama_cpp_accept_what_they_should() {
    let Some(file) = std::env::var_os("FORNAX_GRAMMARS") else {
        println!("SKIP grammars_of_llama_cpp_accept_what_they_should: no FORNAX_GRAMMARS");
        return;
    };
    let cases: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let mut texts = 0;
    for case in &cases {
        let form = Form::Grammar(case["grammar"].as_str().unwrap().to_owned());
        if case["grammar"].as_str().unwrap().contains("<[") {
            // Tokens by their numbers: refused, never followed by half.
            assert!(grammars().compile(&form).is_err(), "{}", case["name"]);
            continue;
        }
        for (kind, wanted) in [("passing", true), ("failing", false)] {
            for text in case[kind].as_array().unwrap() {
                let text = text.as_str().unwrap();
                assert_eq!(accepts(&form, text), wanted, "{}: {text:?}", case["name"]);
                texts += 1;
            }
        }
    }
    println!("Tally {} grammars of llama.cpp, {texts} texts", cases.len());
}
