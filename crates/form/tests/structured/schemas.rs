//! Schemas made from a seed: every answer that ends as one validates, by an independent validator.

use fornax_engine::simulation::Dice;
use fornax_form::Form;
use serde_json::{Map, Value, json};

use crate::world::{Tokens, answers};

const SEED: u64 = 1;
const SCHEMAS: usize = 200;

#[test]
fn whatever_the_schema_every_finished_answer_validates() {
    let mut dice = Dice::new(SEED);
    let schemas: Vec<Value> = (0..SCHEMAS).map(|_| schema(&mut dice)).collect();
    let forms: Vec<Form> = schemas.iter().cloned().map(Form::JsonSchema).collect();
    let tokens = Tokens::new();
    let grammars = tokens.grammars();
    let (mut finished, mut truncated, mut huge) = (0, 0, 0);
    let mut with_answer = std::collections::BTreeSet::new();
    for depth in [0, 1] {
        for answer in answers(&tokens, &grammars, &forms, depth) {
            let schema = &schemas[answer.form];
            if !answer.finished() {
                truncated += 1;
                continue;
            }
            let text = answer.text();
            assert_compact(text);
            let value: Value = match serde_json::from_str(text) {
                Ok(value) => value,
                // JSON bounds no number, this reader does.
                Err(error) if error.to_string().starts_with("number out of range") => {
                    huge += 1;
                    continue;
                }
                Err(error) => panic!("{text:?} is not JSON: {error}; {schema}"),
            };
            if let Err(error) = validator(schema).validate(&value) {
                panic!("{text} is not what was asked for: {error}; {schema}");
            }
            finished += 1;
            with_answer.insert(answer.form);
        }
    }
    println!(
        "{SCHEMAS} schemas of seed {SEED}: {finished} finished answers validate, {truncated} truncated, {huge} with \
         numbers beyond f64; {} schemas finished at least once",
        with_answer.len()
    );
    assert!(finished > 600 && truncated > 100 && with_answer.len() > SCHEMAS * 9 / 10);
}

/// An independent validator that takes formats seriously.
pub(crate) fn validator(schema: &Value) -> jsonschema::Validator {
    let built = jsonschema::options().should_validate_formats(true).build(schema);
    built.unwrap_or_else(|error| panic!("{schema}: {error}"))
}

/// No white space but inside strings.
fn assert_compact(text: &str) {
    let (mut in_string, mut escaped) = (false, false);
    for character in text.chars() {
        match character {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            _ => assert!(in_string || !character.is_whitespace(), "not compact: {text:?}"),
        }
    }
}

/// A schema with a few definitions, some of them recursive.
fn schema(dice: &mut Dice) -> Value {
    let mut root = match node(dice, 3) {
        Value::Object(fields) => fields,
        other => return other,
    };
    let definitions = json!({
        "leaf": leaf(dice),
        // Ends because its children may be absent, empty, or null.
        "tree": {"type": "object", "properties": {"value": node(dice, 0), "next": {"$ref": "#/$defs/tree"}},
            "required": ["value"], "additionalProperties": false},
        "list": {"type": "array", "items": {"$ref": "#/$defs/list"}, "maxItems": 2},
        "maybe": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
    });
    root.insert("$defs".to_owned(), definitions);
    Value::Object(root)
}

fn node(dice: &mut Dice, depth: usize) -> Value {
    if depth == 0 {
        return leaf(dice);
    }
    match dice.below(10) {
        0..=3 => object(dice, depth),
        4..=5 => array(dice, depth),
        6 => json!({"anyOf": [node(dice, depth - 1), node(dice, depth - 1)]}),
        // Apart by type, so that exactly one holds.
        7 => json!({"oneOf": [string(dice), integer(dice), {"type": "null"}, object(dice, depth - 1)]}),
        8 => json!({"$ref": format!("#/$defs/{}", dice.pick(&["leaf", "tree", "list", "maybe"]))}),
        _ => leaf(dice),
    }
}

fn leaf(dice: &mut Dice) -> Value {
    match dice.below(9) {
        0..=2 => string(dice),
        3 => integer(dice),
        4 => number(dice),
        5 => json!({"type": "boolean"}),
        6 => json!({"const": constant(dice)}),
        7 => json!({"enum": (0..dice.between(1, 4)).map(|_| constant(dice)).collect::<Vec<_>>()}),
        _ => json!({"type": ["string", "null"], "maxLength": 5}),
    }
}

fn constant(dice: &mut Dice) -> Value {
    dice.pick(&[
        json!(null),
        json!(true),
        json!(0),
        json!(-17),
        json!(2.5),
        json!("alpha"),
        json!("with \"quotes\" and \\"),
        json!("日本"),
        json!(["a", 1, {"b": null}]),
        json!({"kind": "x", "tags": []}),
    ])
    .clone()
}

fn string(dice: &mut Dice) -> Value {
    let mut schema = json!({"type": "string"});
    match dice.below(4) {
        0 => {
            let least = dice.below(6);
            schema["minLength"] = json!(least);
            schema["maxLength"] = json!(least + dice.below(8));
        }
        1 => schema["pattern"] = json!(dice.pick(PATTERNS)),
        2 => schema["format"] = json!(dice.pick(FORMATS)),
        _ => {
            schema["pattern"] = json!("^[a-z日é]*$");
            schema["minLength"] = json!(dice.below(3));
            schema["maxLength"] = json!(dice.between(3, 9));
        }
    }
    schema
}

pub(crate) const FORMATS: &[&str] =
    &["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Anchored or not, with classes that differ between dialects.
const PATTERNS: &[&str] = &[
    "^[A-Z]{2}-\\d{3}$",
    "^\\w+$",
    "a",
    "^a",
    "b$",
    "^(red|green|blue)$",
    "^.{1,4}$",
    "^\\s\\S$",
    "^[^\\W\\d]{2}$",
    "^(a|bc)+d?$",
    "^[[a]$",
    "^[&~]+$",
    "^a{2,3}?$",
    "^[\\w.-]+@x\\.y$",
    "^\\D\\/\\W$",
    "^(?:x|yz){2}$",
    "^\\u00e9\\x41?$",
    "^\\p{Lu}\\p{Ll}$",
    "^$|^ab$",
];

fn integer(dice: &mut Dice) -> Value {
    let mut schema = json!({"type": "integer"});
    let low = i64::try_from(dice.below(2000)).unwrap() - 1000;
    let high = low + i64::try_from(dice.below(500)).unwrap();
    match dice.below(4) {
        0 => {}
        1 => {
            schema["minimum"] = json!(low);
            schema["maximum"] = json!(high);
        }
        2 => {
            schema["exclusiveMinimum"] = json!(low);
            schema["exclusiveMaximum"] = json!(high + 2);
        }
        _ => {
            schema["minimum"] = json!(low);
            schema["maximum"] = json!(low + 5000);
            schema["multipleOf"] = json!(dice.between(1, 40));
        }
    }
    schema
}

fn number(dice: &mut Dice) -> Value {
    let mut schema = json!({"type": "number"});
    let low = (dice.below(2000) as f64 - 1000.0) / 8.0;
    match dice.below(4) {
        0 => {}
        1 => schema["minimum"] = json!(low),
        2 => {
            schema["exclusiveMinimum"] = json!(low);
            schema["maximum"] = json!(low + dice.between(1, 100) as f64 / 4.0);
        }
        _ => schema["exclusiveMaximum"] = json!(low),
    }
    schema
}

fn object(dice: &mut Dice, depth: usize) -> Value {
    let names = ["name", "id", "tags", "value", "kind", "a/b", "quoted \"x\"", "日"];
    let mut properties = Map::new();
    let mut required = Vec::new();
    for _ in 0..dice.below(4) {
        let name = *dice.pick(&names);
        properties.insert(name.to_owned(), node(dice, depth.saturating_sub(1)));
        if dice.chance(60) && !required.contains(&name) {
            required.push(name);
        }
    }
    let mut schema = json!({"type": "object", "required": required});
    match dice.below(6) {
        0 => {
            schema["additionalProperties"] = leaf(dice);
            schema["maxProperties"] = json!(required.len() + 2);
            properties.retain(|name, _| required.contains(&name.as_str()));
        }
        1 => schema["additionalProperties"] = json!({"type": "integer", "minimum": 0, "maximum": 99}),
        2 => {
            schema["patternProperties"] = json!({"^x[0-9]*$": leaf(dice), "^y": {"type": "boolean"}});
            schema["additionalProperties"] = json!(false);
        }
        3 => {
            properties.insert("last".to_owned(), json!({"type": "null"}));
            schema["additionalProperties"] = json!(false);
            schema["minProperties"] = json!(required.len() + 1);
        }
        _ => schema["additionalProperties"] = json!(false),
    }
    schema["properties"] = Value::Object(properties);
    if dice.chance(15) {
        schema = json!({"allOf": [schema, {"type": "object"}]});
    }
    schema
}

fn array(dice: &mut Dice, depth: usize) -> Value {
    let mut schema = json!({"type": "array"});
    let least = dice.below(3);
    if dice.chance(30) {
        schema["prefixItems"] = json!([leaf(dice), leaf(dice)]);
        schema["items"] = if dice.chance(50) { json!(false) } else { leaf(dice) };
        schema["minItems"] = json!(dice.below(3));
    } else {
        schema["items"] = node(dice, depth - 1);
        schema["minItems"] = json!(least);
        schema["maxItems"] = json!(least + dice.between(0, 3));
    }
    schema
}
