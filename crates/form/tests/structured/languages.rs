//! Regular expressions, grammars, choices and objects, through the same loop.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use fornax_compute::Sampling;
use fornax_engine::simulation::Dice;
use fornax_engine::{EndReason, Event, Failure, Refusal, Reply, Request, Turn};
use fornax_form::{Form, Grammars, Vocabulary};
use regex::Regex;
use serde_json::{Value, json};

use crate::{
    suite::bytewise,
    world::{Answer, Tokens, answers, engine},
};

/// Finished answers of these forms, and how many were cut.
fn finished(forms: &[Form]) -> (Vec<Answer>, usize) {
    let tokens = Tokens::new();
    let all = answers(&tokens, &tokens.grammars(), forms, 1);
    let count = all.len();
    let finished: Vec<Answer> = all.into_iter().filter(Answer::finished).collect();
    let cut = count - finished.len();
    (finished, cut)
}

#[test]
fn whatever_the_regular_expression_every_finished_answer_matches_it() {
    let mut dice = Dice::new(3);
    let mut patterns: Vec<String> = (0..150).map(|_| expression(&mut dice, 3)).collect();
    // Anchors say nothing new; case and line flags do.
    patterns.extend(
        ["^abc$", "(?i)yes|no", "a.c", "(?s)a.c", "x{3,5}?", "[^a-z\\d]{2}", "\\\\\"", "\\d+(\\.\\d{2})?"]
            .map(str::to_owned),
    );
    let forms: Vec<Form> = patterns.iter().cloned().map(Form::Regex).collect();
    let (finished, cut) = finished(&forms);
    for answer in &finished {
        let pattern = &patterns[answer.form];
        let whole = Regex::new(&format!("^(?:{pattern})$")).unwrap();
        assert!(whole.is_match(answer.text()), "{:?} does not match {pattern:?}", answer.text());
    }
    println!("{} expressions: {} finished answers match, {cut} truncated", patterns.len(), finished.len());
    assert!(finished.len() > 300);
}

fn expression(dice: &mut Dice, depth: usize) -> String {
    let atoms = [
        "a",
        "b",
        "abc",
        "[a-f]",
        "[^\"\\n]",
        "\\d",
        "\\w",
        "\\s",
        ".",
        "é",
        "日本",
        "\\.",
        "\\/",
        "\"",
        "[0-9]{2}",
        "\\p{Greek}",
    ];
    if depth == 0 {
        return (*dice.pick(&atoms)).to_owned();
    }
    let inner = expression(dice, depth - 1);
    match dice.below(7) {
        0 => format!("(?:{inner})?"),
        1 => format!("(?:{inner}){{1,3}}"),
        2 => format!("(?:{inner}|{})", expression(dice, depth - 1)),
        3 => format!("({inner})+{}", dice.pick(&["x", "-", "\\)"])),
        4 => format!("{inner}{}", expression(dice, depth - 1)),
        5 => format!("(?:{inner}){{2}}"),
        _ => format!("{}{inner}", dice.pick(&atoms)),
    }
}

#[test]
fn a_choice_is_written_exactly() {
    let odd = [
        "yes",
        "no",
        "no way",
        "\"quoted\"",
        "back\\slash",
        "new\nline",
        "tab\t",
        "日本",
        "🙂",
        "/slash/",
        "%json {}",
        "a|b",
        "x",
        "xy",
        "\u{1}",
        "//",
        "#",
    ];
    let mut dice = Dice::new(5);
    let choices: Vec<Vec<String>> =
        (0..60).map(|_| (0..dice.between(1, 5)).map(|_| (*dice.pick(&odd)).to_owned()).collect()).collect();
    let forms: Vec<Form> = choices.iter().cloned().map(Form::Choice).collect();
    let (finished, _) = finished(&forms);
    for answer in &finished {
        let choices = &choices[answer.form];
        assert!(
            choices.iter().any(|choice| choice == answer.text()),
            "{:?} is none of {choices:?}",
            answer.text()
        );
    }
    assert!(finished.len() > 150, "{}", finished.len());
}

#[test]
fn any_object_is_an_object_and_compact() {
    let (finished, cut) = finished(&vec![Form::JsonObject; 80]);
    for answer in &finished {
        match serde_json::from_str::<Value>(answer.text()) {
            Ok(value) => assert!(value.is_object(), "{value}"),
            Err(error) => {
                assert!(error.to_string().starts_with("number out of range"), "{}: {error}", answer.text())
            }
        }
    }
    println!("{} objects, {cut} truncated", finished.len());
    assert!(finished.len() > 20);
}

#[test]
fn every_finished_answer_is_a_sentence_of_its_grammar() {
    /// A grammar and who judges its sentences.
    type Judge = fn(&str) -> bool;
    let grammars: [(&str, Judge); 4] = [
        ("start: \"(\" start \")\" | \"x\"", |text| {
            let depth = text.chars().take_while(|&c| c == '(').count();
            text == format!("{}x{}", "(".repeat(depth), ")".repeat(depth))
        }),
        ("start: item (\",\" item)*\nitem: /[0-9]{1,3}/ | \"[\" start \"]\"", |text| {
            let text = text.replace('[', "(").replace(']', ")");
            let bare: String = text.chars().filter(|c| !"()".contains(*c)).collect();
            let balanced = text.chars().try_fold(0_i32, |depth, c| {
                let depth = depth + i32::from(c == '(') - i32::from(c == ')');
                (depth >= 0).then_some(depth)
            });
            balanced == Some(0)
                && bare
                    .split(',')
                    .all(|item| (1..=3).contains(&item.len()) && item.bytes().all(|b| b.is_ascii_digit()))
        }),
        ("start: \"SELECT\" (\" \" NAME)+ \" FROM\" \" \" NAME\nNAME: /[a-z]+/", |text| {
            Regex::new("^SELECT( [a-z]+)+ FROM [a-z]+$").unwrap().is_match(text)
        }),
        ("start: a b\na: \"a\"*\nb: \"b\"+ | \"é\"", |text| {
            Regex::new("^a*(b+|é)$").unwrap().is_match(text)
        }),
    ];
    let forms: Vec<Form> =
        (0..40).map(|index| Form::Grammar(grammars[index % grammars.len()].0.to_owned())).collect();
    let (finished, cut) = finished(&forms);
    for answer in &finished {
        let (grammar, judge) = grammars[answer.form % grammars.len()];
        assert!(judge(answer.text()), "{:?} is no sentence of {grammar:?}", answer.text());
    }
    println!("{} sentences, {cut} truncated", finished.len());
    assert!(finished.len() > 60);
}

#[test]
fn a_form_of_another_vocabulary_is_refused_at_the_door() {
    let tokens = Tokens::new();
    let (_engine, handle) = engine(&tokens, 1);
    let grammar = bytewise().compile(&Form::JsonObject).unwrap();
    let request = Request { grammar: Some(grammar), ..Request::new(vec![2], 5, Sampling::greedy()) };
    let refused = handle.submit(request).err();
    assert!(matches!(refused, Some(Refusal::Parameter { name: "grammar", .. })), "{refused:?}");
}

#[test]
fn a_token_that_ends_an_answer_does_not_complete_its_form() {
    let tokens = Tokens::new();
    let grammar = tokens.grammars().compile(&Form::JsonObject).unwrap();
    // Every token that has text ends this request: whatever begins the object also ends it.
    let end_tokens =
        (0..).zip(&tokens.bytes).filter(|(_, bytes)| !bytes.is_empty()).map(|(id, _)| id).collect();
    let sampling = Sampling { temperature: 1.0, end_tokens, ..Sampling::greedy() };
    for seed in 0..40 {
        let (mut engine, handle) = engine(&tokens, 1);
        let request =
            Request { seed, grammar: Some(grammar.clone()), ..Request::new(vec![2], 50, sampling.clone()) };
        let mut reply = handle.submit(request).unwrap().remove(0);
        while engine.turn() == Turn::Worked {}
        let events: Vec<Event> = std::iter::from_fn(|| reply.recv()).collect();
        let Some(Event::End { reason, .. }) = events.last() else { panic!("{events:?}") };
        assert_eq!(*reason, EndReason::FormTruncated, "{events:?}");
    }
}

#[test]
fn a_panic_inside_a_form_fails_its_request_and_no_other() {
    let tokens = Tokens::new();
    let (mut engine, handle) = engine(&tokens, 1);
    let broken = Arc::new(AtomicBool::new(false));
    let encode = {
        let broken = Arc::clone(&broken);
        Arc::new(move |bytes: &[u8]| {
            assert!(!broken.load(Ordering::Relaxed), "a panic on purpose");
            vec![0; bytes.len()]
        })
    };
    let vocabulary = Vocabulary { bytes: tokens.bytes.clone(), end_tokens: vec![1], encode };
    let form = Form::JsonSchema(
        json!({"type": "object", "properties": {"name": {"type": "null"}}, "required": ["name"]}),
    );
    let grammar = Grammars::new(vocabulary).unwrap().compile(&form).unwrap();
    broken.store(true, Ordering::Relaxed);
    let plain = Request::new(vec![2], 5, Sampling::greedy());
    let mut fails = handle.submit(Request { grammar: Some(grammar), ..plain.clone() }).unwrap().remove(0);
    let mut goes_on = handle.submit(plain).unwrap().remove(0);
    while engine.turn() == Turn::Worked {}
    engine.assert_consistent();
    let last = |reply: &mut Reply| std::iter::from_fn(|| reply.recv()).last().unwrap();
    let failed = last(&mut fails);
    assert!(matches!(&failed, Event::Failed(Failure::Form(why)) if !why.contains('\n')), "{failed:?}");
    assert!(matches!(last(&mut goes_on), Event::End { reason: EndReason::Length, .. }));
    assert!(handle.stats().pages.iter().all(|pages| pages.referenced == 0));
}
