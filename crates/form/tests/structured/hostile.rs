//! Forms made to hurt: each is refused or bounded, soon.

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use fornax_form::{Form, FormError, Owner};
use serde_json::{Value, json};

use crate::world::Tokens;

/// Far more than any of these takes, far less than a person would wait for an attack.
const SOON: Duration = Duration::from_secs(20);

/// Compiles a form and takes a few steps in it; returns how it was refused.
fn refusal(form: &Form) -> Option<FormError> {
    let tokens = Tokens::new();
    let grammars = tokens.grammars();
    let start = Instant::now();
    let compiled = grammars.compile(form);
    let took = start.elapsed();
    let shown: String = match form {
        // As text: its debug form may be deeper than the stack.
        Form::JsonSchema(_) => "a schema".to_owned(),
        other => format!("{other:?}").chars().take(60).collect(),
    };
    println!("{took:?}: {shown}: {:?}", compiled.as_ref().err().map(ToString::to_string));
    assert!(took < SOON, "{took:?} for {shown}");
    compiled.err()
}

/// Nested so deep that nothing may recurse over it.
fn nested(depth: usize) -> Value {
    (0..depth).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}))
}

#[test]
fn schemas_too_large_or_too_deep_are_refused_with_the_bound() {
    let check = |form: Form, wanted: &str| {
        let refused = refusal(&form).unwrap_or_else(|| panic!("compiled")).to_string();
        assert_eq!(refused, wanted);
    };
    check(Form::JsonSchema(nested(1_000)), "the nesting of the schema is more than 64");
    check(
        Form::JsonSchema(json!({"enum": (0..30_000).collect::<Vec<_>>()})),
        "the number of values in the schema is more than 20000",
    );
    let megabytes = "x".repeat(10 << 20);
    let too_long = "the size of the form in bytes is more than 1048576";
    check(Form::JsonSchema(json!({"const": megabytes})), too_long);
    check(Form::Regex(megabytes.clone()), too_long);
    check(Form::Grammar(format!("start: \"{megabytes}\"")), too_long);
    check(Form::Choice(vec![megabytes]), too_long);
    for keyword in ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"] {
        for value in [json!(1_000_000_000_u64), json!(u64::MAX), json!(-1), json!(1e300), json!("9")] {
            let why = "wanted a whole number up to 100000";
            check(
                Form::JsonSchema(json!({(keyword): value})),
                &format!("keyword {keyword:?} at \"\": {why}"),
            );
        }
    }
}

#[test]
fn what_costs_more_than_it_says_is_bounded() {
    let chain = |length: usize| {
        let links = (0..length).map(|n| (format!("d{n}"), json!({"$ref": format!("#/$defs/d{}", n + 1)})));
        let mut definitions: serde_json::Map<String, Value> = links.collect();
        definitions.insert(format!("d{length}"), json!({"type": "null"}));
        json!({"$ref": "#/$defs/d0", "$defs": definitions})
    };
    // The longest chain of references that is let in, and its bushy sister.
    assert_eq!(refusal(&Form::JsonSchema(chain(9_000))), None);
    let doubling = |levels: usize| {
        let level = |n: usize| {
            let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
            (
                format!("d{n}"),
                json!({"allOf": [{"properties": {"a": next}}, {"properties": {"b": next}}, next]}),
            )
        };
        let mut definitions: serde_json::Map<String, Value> = (0..levels).map(level).collect();
        definitions.insert(format!("d{levels}"), json!({"type": "object"}));
        json!({"$ref": "#/$defs/d0", "$defs": definitions})
    };
    for form in [
        Form::JsonSchema(doubling(30)),
        Form::JsonSchema(json!({"type": "string", "minLength": 100_000, "maxLength": 100_000})),
        Form::JsonSchema(json!({"type": "string", "minLength": 50_000, "pattern": "^(a|b|ab)*c"})),
        Form::JsonSchema(json!({"type": "array", "minItems": 100_000, "items": {"enum": [1, 2]}})),
        Form::JsonSchema(
            json!({"type": "array", "maxItems": 100_000, "items": {"type": "array", "maxItems": 100_000}}),
        ),
        Form::JsonSchema(json!({"type": "string", "pattern": "^(a+)+$"})),
        Form::JsonSchema(json!({"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"})),
        Form::JsonSchema(json!({"type": "string", "pattern": "(x+x+)+y(.*a){40}"})),
        Form::JsonSchema(json!({"enum": (0..9_000).map(|n| format!("value {n}")).collect::<Vec<_>>()})),
        Form::Regex("(.*a.{400})".into()),
        Form::Regex("(a{0,1000}){0,1000}".into()),
        Form::Regex(format!("({})", vec!["[a-z]{20,40}"; 400].join("|"))),
        Form::Regex("(".repeat(10_000) + &")".repeat(10_000)),
        Form::Grammar(format!("start: {}", vec!["/[a-z]+/"; 3_000].join(" "))),
        Form::Grammar("start: a\na: a a | \"x\"".into()),
        Form::Grammar(format!("start: {}\"x\"{}", "(".repeat(10_000), ")".repeat(10_000))),
        Form::Choice((0..70_000).map(|n| format!("choice {n}")).collect()),
        Form::Choice((0..1000).map(|n| "x".repeat(n)).collect()),
        Form::Regex(vec!["[a-z]{2,9}x"; 80_000].join("|")),
        Form::Regex("\\p{L}{1,50}".repeat(80_000)),
        Form::Grammar(
            (0..40_000).map(|n| format!("r{n}: \"a\" r{}\n", n + 1)).collect::<String>()
                + "r40000: \"b\"\nstart: r0",
        ),
        Form::Grammar(
            (0..20_000).map(|n| format!("T{n}: /a{{{n}}}/\n")).collect::<String>() + "start: T1 T2",
        ),
    ] {
        refusal(&form);
    }
}

#[test]
fn patterns_that_multiply_when_they_meet_are_refused_before_they_do() {
    // 26 of these took four gigabytes, 40 of them all there was.
    let pattern = |n: u8| format!("(.*{}.*)*x{n}", char::from(b'a' + n % 26));
    let patterns = |count: u8| -> Vec<Value> {
        (0..count).map(|n| json!({"pattern": format!("^{}$", pattern(n))})).collect()
    };
    let nested = (0..40).fold(json!({}), |inner, n| json!({"allOf": [inner, {"pattern": pattern(n)}]}));
    let by_name: Vec<Value> =
        patterns(40).iter().map(|pattern| json!({"properties": {"a": pattern}})).collect();
    let terminals = |count: u8, join: &str| {
        let terminals: String = (0..count)
            .map(|n| {
                format!(
                    "T{n}: /{}/
",
                    pattern(n)
                )
            })
            .collect();
        let all: Vec<String> = (0..count).map(|n| format!("T{n}")).collect();
        format!(
            "start: ALL
{terminals}ALL: {}",
            all.join(join)
        )
    };
    let inside = json!({"type": "string", "allOf": patterns(40)});
    for form in [
        Form::JsonSchema(inside.clone()),
        Form::JsonSchema(nested),
        Form::JsonSchema(json!({"type": "object", "allOf": by_name})),
        Form::Grammar(terminals(40, " & ")),
        Form::Grammar(terminals(40, " & ~")),
        Form::Grammar(format!("start: %json {inside}")),
    ] {
        let refused = refusal(&form);
        assert!(matches!(refused, Some(FormError::TooLarge { .. })), "{refused:?}");
    }
    // What comes near the bound is soon over, one way or the other: long ones, wide ones, ones that repeat.
    let long = |n: u8| format!("(.*{0}.*{0}{0}.*|.{{3}}{0})*x{n}", char::from(b'a' + n));
    let wide = |n: usize| {
        let ways = (0..150)
            .map(|way| format!("[{}-z]{way}", char::from(b'a' + u8::try_from((way + n) % 25).unwrap())));
        format!("^({})*$", ways.collect::<Vec<_>>().join("|"))
    };
    for count in 2..5 {
        let long: Vec<Value> = (0..count).map(|n| json!({"pattern": format!("^{}$", long(n))})).collect();
        refusal(&Form::JsonSchema(json!({"type": "string", "allOf": long})));
        let wide: Vec<Value> = (0..usize::from(count)).map(|n| json!({"pattern": wide(n)})).collect();
        refusal(&Form::JsonSchema(json!({"type": "string", "allOf": wide})));
        let repeating: Vec<Value> =
            (0..count).map(|n| json!({"pattern": format!("(.*[a-{0}]{0}){{40}}", n + b'c')})).collect();
        refusal(&Form::JsonSchema(json!({"type": "string", "allOf": repeating})));
    }
    for count in 2..9 {
        refusal(&Form::Grammar(terminals(count, " & ")));
        refusal(&Form::Grammar(terminals(count, " & ~")));
    }
    // Two patterns and a format are no attack.
    let plain =
        json!({"type": "string", "format": "date", "allOf": [{"pattern": "^20"}, {"pattern": "-01$"}]});
    assert_eq!(refusal(&Form::JsonSchema(plain)), None);
}

#[test]
fn a_form_that_no_answer_has_is_refused_as_such() {
    let mut wrong = Vec::new();
    for form in [
        Form::JsonSchema(json!(false)),
        Form::JsonSchema(json!({"$ref": "#"})),
        Form::JsonSchema(json!({"type": "integer", "minimum": 3, "maximum": 2})),
        Form::JsonSchema(json!({"enum": []})),
        Form::JsonSchema(json!({"allOf": [{"type": "string"}, {"type": "null"}]})),
        Form::JsonSchema(json!({"type": "string", "minLength": 3, "maxLength": 2})),
        Form::JsonSchema(json!({"type": "string", "pattern": "^ab$", "maxLength": 1})),
        Form::JsonSchema(json!({"type": "array", "items": false, "minItems": 1})),
        // Each needs one more inside.
        Form::JsonSchema(
            json!({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}),
        ),
        Form::JsonSchema(json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1})),
        Form::Grammar("start: \"a\" start".into()),
        Form::Grammar("start: a | b\na: \"x\" b\nb: \"y\" a".into()),
        Form::Regex("[^\\s\\S]".into()),
        Form::Regex("a[^\\d\\D]".into()),
    ] {
        let refused = refusal(&form);
        if refused != Some(FormError::Unsatisfiable) {
            wrong.push(format!("{form:?}: {refused:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    // One way leads nowhere: a request that takes it could not be saved any more.
    let dead_end =
        json!({"properties": {"loop": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}});
    assert!(refusal(&Form::JsonSchema(dead_end)).is_some());
}

#[test]
fn many_who_ask_for_the_same_wait_for_one_and_only_some_are_kept() {
    let grammars = Tokens::new().grammars();
    let good =
        Form::JsonSchema(json!({"enum": (0..3_000).map(|n| format!("value {n}")).collect::<Vec<_>>()}));
    let bad = Form::JsonSchema(json!({"not": {}}));
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| drop(grammars.compile(&good).unwrap()));
            scope.spawn(|| drop(grammars.compile(&bad).unwrap_err()));
        }
    });
    assert_eq!(grammars.compiled(), 2, "thirty-two asked for two forms");
    for n in 0..64 {
        grammars.compile(&Form::Regex(format!("{n}"))).unwrap();
    }
    let before = grammars.compiled();
    grammars.compile(&good).unwrap();
    assert_eq!(grammars.compiled(), before + 1, "the oldest made room");
    grammars.compile(&Form::Regex("63".into())).unwrap();
    assert_eq!(grammars.compiled(), before + 1, "the newest is still there");
    // The order of properties is part of a form: answers follow it.
    let order = |first: &str, second: &str| {
        let properties = json!({(first): {"const": 1}, (second): {"const": 2}});
        Form::JsonSchema(
            json!({"properties": properties, "required": [first, second], "additionalProperties": false, "type": "object"}),
        )
    };
    grammars.compile(&order("a", "b")).unwrap();
    grammars.compile(&order("b", "a")).unwrap();
    assert_eq!(grammars.compiled(), before + 3);
}

#[test]
fn what_one_owner_has_compiled_pushes_out_its_own_and_waits_for_nobody_elses() {
    let grammars = Tokens::new().grammars();
    let (alice, mallory): (Owner, Owner) = (Some("alice".into()), Some("mallory".into()));
    let compile = |owner: &Owner, word: &str, remark: usize| {
        let form = Form::Grammar(format!("start: \"{word}\" // {}", "x".repeat(remark)));
        drop(grammars.compile_for(&form, owner, &|| true).unwrap());
    };
    let hers = || (0..8).for_each(|number| compile(&alice, &format!("hers {number}"), 0));
    hers();
    (0..200).for_each(|number| compile(&mallory, &format!("his {number}"), 0));
    // Nor by their bytes.
    (0..12).for_each(|number| compile(&mallory, &format!("his {number}"), 600_000));
    let before = grammars.compiled();
    hers();
    assert_eq!(grammars.compiled(), before, "all of hers are still there");
    compile(&mallory, "his 0", 0);
    assert_eq!(grammars.compiled(), before + 1, "his own made room");

    // He has begun to compile a form that she asks for, and does not come to an end.
    let grammars = Tokens::new().grammars();
    let (begun, ended) = (Arc::new(Barrier::new(2)), Arc::new(AtomicBool::new(false)));
    let trials = Arc::new(AtomicUsize::new(0));
    let (begins, ends, counts) = (Arc::clone(&begun), Arc::clone(&ended), Arc::clone(&trials));
    grammars.try_with(Arc::new(move |_, _| {
        if counts.fetch_add(1, Ordering::SeqCst) == 0 {
            begins.wait();
            while !ends.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        }
        Ok(())
    }));
    let form = Form::Regex("theirs".to_owned());
    thread::scope(|scope| {
        scope.spawn(|| drop(grammars.compile_for(&form, &mallory, &|| true).unwrap()));
        begun.wait();
        // If she waited for him, she would be asked whether it is still wanted, and it is not.
        let hers = grammars.compile_for(&form, &alice, &|| false);
        ended.store(true, Ordering::SeqCst);
        drop(hers.unwrap());
    });
    assert_eq!(trials.load(Ordering::SeqCst), 2);
}
