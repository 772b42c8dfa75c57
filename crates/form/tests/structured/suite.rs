//! The JSON Schema Test Suite: what schemas mean, by those who define them. A form lets through what the suite calls
//! valid and nothing that it calls invalid, or the schema is refused.

use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

use fornax_engine::Grammar;
use fornax_form::{Form, FormError, Grammars, Vocabulary};
use serde_json::{Map, Value};

use crate::schemas::FORMATS;

/// What became of the suite's schemas and instances.
#[derive(Debug, Default)]
struct Counts {
    schemas: usize,
    schemas_refused: usize,
    /// By the keyword that they are refused for.
    refused_for: BTreeMap<String, usize>,
    valid_accepted: usize,
    invalid_refused: usize,
    /// Valid in the suite, and yet not written by the form: why, and how often.
    narrower: BTreeMap<&'static str, usize>,
}

#[test]
fn the_json_schema_test_suite_is_met_or_its_schemas_refused() {
    let test = "the_json_schema_test_suite_is_met_or_its_schemas_refused";
    let cache = std::env::var_os("FORNAX_CACHE").unwrap_or_default();
    let suite = Path::new(&cache).join("json-schema-test-suite/tests");
    if !suite.is_dir() {
        println!(
            "SKIP {test}: there is no JSON Schema Test Suite in the cache folder; `cargo xtask fixtures` fetches it"
        );
        return;
    }
    let grammars = bytewise();
    let mut counts = Counts::default();
    let mut wrong = Vec::new();
    for (draft, dialect) in [
        ("draft2020-12", "https://json-schema.org/draft/2020-12/schema"),
        ("draft2019-09", "https://json-schema.org/draft/2019-09/schema"),
        ("draft7", "http://json-schema.org/draft-07/schema#"),
        ("draft6", "http://json-schema.org/draft-06/schema#"),
        ("draft4", "http://json-schema.org/draft-04/schema#"),
    ] {
        let optional = suite.join(draft).join("optional");
        for folder in [suite.join(draft), optional.clone(), optional.join("format")] {
            let mut files: Vec<_> =
                fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
            files.sort();
            for file in
                files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "json"))
            {
                let groups: Vec<Value> = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
                for group in &groups {
                    check(&grammars, file, dialect, group, &mut counts, &mut wrong);
                }
            }
        }
    }
    println!("JSON Schema Test Suite: {counts:#?}");
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(counts.valid_accepted > 800 && counts.invalid_refused > 500, "the suite was hardly touched");
}

/// One schema of the suite with its instances.
fn check(
    grammars: &Grammars,
    file: &Path,
    dialect: &str,
    group: &Value,
    counts: &mut Counts,
    wrong: &mut Vec<String>,
) {
    let mut schema = group["schema"].clone();
    if let Value::Object(fields) = &mut schema {
        fields.entry("$schema").or_insert_with(|| dialect.into());
    }
    counts.schemas += 1;
    let grammar = match grammars.compile(&Form::JsonSchema(schema.clone())) {
        Ok(grammar) => grammar,
        // Right if nothing is valid.
        Err(FormError::Unsatisfiable) => {
            for test in group["tests"].as_array().unwrap() {
                if test["valid"] == Value::Bool(true) {
                    wrong.push(format!(
                        "{}: valid {} of {schema}: called unsatisfiable",
                        file.display(),
                        test["data"]
                    ));
                } else {
                    counts.invalid_refused += 1;
                }
            }
            return;
        }
        Err(error) => {
            counts.schemas_refused += 1;
            let why = match error {
                FormError::Keyword { keyword, .. } | FormError::Misused { keyword, .. } => keyword,
                FormError::Compile(reason) => reason.chars().take(60).collect(),
                other => other.to_string(),
            };
            *counts.refused_for.entry(why).or_default() += 1;
            return;
        }
    };
    let names = names(&schema);
    for test in group["tests"].as_array().unwrap() {
        let instance = &test["data"];
        let accepted = spellings(instance, &names).iter().any(|text| admits(&grammar, text));
        match (test["valid"].as_bool().unwrap(), accepted) {
            (true, true) => counts.valid_accepted += 1,
            (false, false) => counts.invalid_refused += 1,
            (false, true) => wrong.push(format!(
                "{}: {}: invalid {instance} of {schema} was accepted",
                file.display(),
                test["description"]
            )),
            (true, false) => match narrower(&schema, instance) {
                Some(why) => *counts.narrower.entry(why).or_default() += 1,
                None => wrong.push(format!(
                    "{}: {}: valid {instance} of {schema} was refused",
                    file.display(),
                    test["description"]
                )),
            },
        }
    }
}

/// Tokens are bytes here: the form meets the instance letter by letter.
pub(crate) fn bytewise() -> Grammars {
    let mut bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    bytes.push(Vec::new());
    let encode = Arc::new(|bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).collect());
    Grammars::new(Vocabulary { bytes, end_tokens: vec![256], encode }).unwrap()
}

fn admits(grammar: &Grammar, text: &str) -> bool {
    grammar.admits(&text.bytes().map(u32::from).collect::<Vec<_>>())
}

/// Every name in a schema, in its order: properties are written in the order in which the schema lists them.
fn names(schema: &Value) -> Vec<String> {
    let mut names = Vec::new();
    let mut open = vec![schema];
    while let Some(value) = open.pop() {
        match value {
            Value::Object(fields) => {
                names.extend(fields.keys().cloned());
                open.extend(fields.values().rev());
            }
            Value::Array(values) => {
                names.extend(values.iter().filter_map(Value::as_str).map(str::to_owned));
                open.extend(values.iter().rev());
            }
            _ => {}
        }
    }
    names
}

/// The instance in compact form: as it stands, in the schema's order, and in every order if it is small.
fn spellings(instance: &Value, names: &[String]) -> Vec<String> {
    let mut texts = vec![instance.to_string(), ordered(instance, names).to_string()];
    if let Value::Object(fields) = instance
        && fields.len() <= 4
    {
        let mut orders: Vec<Vec<&String>> = vec![Vec::new()];
        for name in fields.keys() {
            orders = orders
                .into_iter()
                .flat_map(|order| {
                    (0..=order.len()).map(move |index| {
                        let mut longer = order.clone();
                        longer.insert(index, name);
                        longer
                    })
                })
                .collect();
        }
        for order in orders {
            let fields: Map<String, Value> =
                order.into_iter().map(|name| (name.clone(), ordered(&fields[name], names))).collect();
            texts.push(Value::Object(fields).to_string());
        }
    }
    texts.dedup();
    texts
}

fn ordered(value: &Value, names: &[String]) -> Value {
    match value {
        Value::Array(values) => values.iter().map(|value| ordered(value, names)).collect(),
        Value::Object(fields) => {
            let mut sorted: Vec<_> = fields.iter().collect();
            sorted
                .sort_by_key(|(name, _)| names.iter().position(|other| other == *name).unwrap_or(usize::MAX));
            Value::Object(
                sorted.into_iter().map(|(name, value)| (name.clone(), ordered(value, names))).collect(),
            )
        }
        other => other.clone(),
    }
}

/// Where forms are narrower than schemas, on purpose.
fn narrower(schema: &Value, instance: &Value) -> Option<&'static str> {
    let text = schema.to_string();
    let formatted = FORMATS.iter().any(|format| text.contains(&format!("\"format\":\"{format}\"")));
    if formatted && instance.is_string() {
        return Some("a format is stricter than its specification");
    }
    if has_whole_fraction(instance) {
        return Some("a whole number is written without a fraction");
    }
    None
}

fn has_whole_fraction(value: &Value) -> bool {
    match value {
        Value::Number(number) => {
            number.is_f64() && number.as_f64().is_some_and(|number| number.fract() == 0.0)
        }
        Value::Array(values) => values.iter().any(has_whole_fraction),
        Value::Object(fields) => fields.values().any(has_whole_fraction),
        _ => false,
    }
}
