//! Which JSON schemas are honoured to the letter, and how they are written for the compiler.
//!
//! The compiler skips over some of what it does not know and approximates some of what it does. Here every place in a
//! schema is looked at first: what would be ignored or bent is refused with its path, patterns are translated from
//! ECMA 262, and formats become patterns of our own. What passes is meant exactly.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use crate::{FormError, formats::format, pattern::ecma_262};

/// Nesting of a schema, values inside it included. The compiler recurses, so there must be an end.
const DEPTH_MAX: usize = 64;

/// Objects, lists and values of a schema. A chain of references nests the compiler as deep as it is long, so this also
/// bounds its stack; see `STACK` in `compiler.rs`.
const NODES_MAX: usize = 20_000;

/// Lengths and counts. More tokens than any context has cannot be asked for; the compiler's work grows with them.
const COUNT_MAX: u64 = 100_000;

/// Whole numbers below this are exact as `f64`, which is how the compiler keeps them.
const NUMBER_MAX: f64 = 9_007_199_254_740_992.0;

/// The schema as the compiler gets it: compact JSON, nothing that it would ignore. Its size was checked.
pub(crate) fn prepared(schema: &Value) -> Result<Value, FormError> {
    let dialect = dialect(schema)?;
    let mut walk = Walk {
        dialect,
        root: dialect,
        places: HashSet::new(),
        references: Vec::new(),
        multiples: Multiples::default(),
    };
    let prepared = walk.schema(schema, "")?;
    walk.check_references()?;
    Ok(compact(prepared))
}

/// Refuses what is too deep or too large, without recursion.
pub(crate) fn check_size(schema: &Value) -> Result<(), FormError> {
    let mut nodes = 0;
    let mut open = vec![(schema, 0)];
    while let Some((value, depth)) = open.pop() {
        nodes += 1;
        let too_large = |what, max| Err(FormError::TooLarge { what, max });
        if depth > DEPTH_MAX {
            return too_large("nesting of the schema", DEPTH_MAX);
        }
        if nodes > NODES_MAX {
            return too_large("number of values in the schema", NODES_MAX);
        }
        match value {
            Value::Array(values) => open.extend(values.iter().map(|value| (value, depth + 1))),
            Value::Object(fields) => open.extend(fields.values().map(|value| (value, depth + 1))),
            _ => {}
        }
    }
    Ok(())
}

/// The versions of JSON Schema, oldest first, as far as they differ in what is accepted here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Dialect {
    Draft4,
    Draft6,
    Draft7,
    Draft2019,
    Draft2020,
}

fn dialect(schema: &Value) -> Result<Dialect, FormError> {
    let Some(name) = schema.get("$schema") else { return Ok(Dialect::Draft2020) };
    match name.as_str().map(|name| name.trim_end_matches('#')) {
        Some("https://json-schema.org/draft/2020-12/schema") => Ok(Dialect::Draft2020),
        Some("https://json-schema.org/draft/2019-09/schema") => Ok(Dialect::Draft2019),
        Some("http://json-schema.org/draft-07/schema") => Ok(Dialect::Draft7),
        Some("http://json-schema.org/draft-06/schema") => Ok(Dialect::Draft6),
        Some("http://json-schema.org/draft-04/schema") => Ok(Dialect::Draft4),
        _ => Err(misused("$schema", "", "wanted draft 4, 6, 7, 2019-09 or 2020-12")),
    }
}

/// Whether this is the place of a definition of the whole, which may be of another version.
fn is_definition(path: &str) -> bool {
    let name = path.strip_prefix("/$defs/").or_else(|| path.strip_prefix("/definitions/"));
    name.is_some_and(|name| !name.contains('/'))
}

/// One pass over all schemas inside a schema.
struct Walk {
    /// Of the schema that is looked at.
    dialect: Dialect,
    /// Of the whole, which is what the compiler goes by.
    root: Dialect,
    /// Where schemas are, as JSON pointers.
    places: HashSet<String>,
    /// Where references are, and to what.
    references: Vec<(String, String)>,
    multiples: Multiples,
}

impl Walk {
    /// A schema at `path`, checked and rewritten.
    fn schema(&mut self, schema: &Value, path: &str) -> Result<Value, FormError> {
        self.places.insert(path.to_owned());
        let fields = match schema {
            Value::Object(fields) => fields,
            Value::Bool(_) => return Ok(schema.clone()),
            _ => {
                return Err(FormError::Compile(format!(
                    "a schema is an object or a boolean, but not at {path:?}"
                )));
            }
        };
        let around = self.dialect;
        if is_definition(path) && fields.contains_key("$schema") {
            self.dialect = dialect(schema)?;
        }
        let mut prepared = Map::new();
        // What a keyword is rewritten to when its own place cannot hold it.
        let mut extra = Vec::new();
        for (keyword, value) in fields {
            let here = format!("{path}/{}", escaped(keyword));
            let wrong = |wanted| Err(misused(keyword, path, wanted));
            let rewritten = match (keyword.as_str(), value) {
                ("$schema" | "$id", Value::String(_)) if path.is_empty() => value.clone(),
                ("$schema", Value::String(_)) if is_definition(path) => continue,
                ("$schema" | "$id", _) => return wrong("only at the root of the schema"),
                ("id", Value::String(_)) if self.dialect == Dialect::Draft4 && !path.is_empty() => {
                    return wrong("only at the root of the schema");
                }
                (
                    "id" | "$anchor" | "$comment" | "title" | "description" | "default" | "readOnly"
                    | "writeOnly" | "examples" | "deprecated",
                    _,
                ) => continue,
                ("type", _) => value.clone(),
                ("const", value) => {
                    self.literal(keyword, value, path)?;
                    value.clone()
                }
                ("enum", Value::Array(values)) => {
                    for value in values {
                        self.literal(keyword, value, path)?;
                    }
                    value.clone()
                }
                ("enum", _) => return wrong("wanted a list"),
                ("$ref", _) if self.dialect <= Dialect::Draft7 && !stands_alone(fields) => {
                    return wrong("what stands beside it was ignored before draft 2019-09");
                }
                ("$ref", Value::String(target)) => {
                    self.references.push((path.to_owned(), target.clone()));
                    value.clone()
                }
                ("$ref", _) => return wrong("wanted a string"),
                ("minLength" | "maxLength" | "minItems" | "maxItems" | "maxProperties", _) => {
                    count(keyword, value, path)?;
                    value.clone()
                }
                ("minProperties", _) => {
                    let least = count(keyword, value, path)?;
                    if least > certain_properties(fields) {
                        return wrong(
                            "more than the required properties and one, while further names are allowed: \
                             a name written twice would count twice",
                        );
                    }
                    value.clone()
                }
                ("minimum" | "maximum", Value::Number(_)) => {
                    self.literal(keyword, value, path)?;
                    value.clone()
                }
                ("items", Value::Array(_))
                | ("additionalItems" | "prefixItems", _)
                | ("exclusiveMinimum" | "exclusiveMaximum", Value::Bool(_))
                    if self.dialect != self.root =>
                {
                    return wrong("it means something else in the version of the schema around it");
                }
                ("exclusiveMinimum" | "exclusiveMaximum", Value::Bool(_))
                    if self.dialect == Dialect::Draft4 =>
                {
                    value.clone()
                }
                ("exclusiveMinimum" | "exclusiveMaximum", Value::Number(_))
                    if self.dialect > Dialect::Draft4 =>
                {
                    self.literal(keyword, value, path)?;
                    value.clone()
                }
                ("minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", _) => {
                    return wrong("wanted a number");
                }
                ("multipleOf", _) => {
                    if !self.multiples.take(value.as_f64()) {
                        return wrong("wanted a positive number of few digits");
                    }
                    value.clone()
                }
                ("pattern", Value::String(pattern)) => match ecma_262(pattern) {
                    Ok(pattern) => json!(pattern),
                    Err(reason) => return wrong(reason),
                },
                ("pattern", _) => return wrong("wanted a string"),
                ("format", Value::String(name)) => match format(name) {
                    // Beside a pattern of the schema's own.
                    Some(form) => {
                        extra.push(json!({"pattern": format!("^(?:{})$", form.pattern)}));
                        extra.extend(form.length_max.map(|length| json!({"maxLength": length})));
                        continue;
                    }
                    None => return wrong("not a format that is known here"),
                },
                ("format", _) => return wrong("wanted a string"),
                ("required", _) => value.clone(),
                ("additionalProperties", _) => self.schema(value, &here)?,
                ("items", Value::Array(_)) if fields.contains_key("prefixItems") => {
                    return wrong("a list, beside prefixItems");
                }
                ("additionalItems", _) if !fields.get("items").is_some_and(Value::is_array) => {
                    return wrong("without a list of items it means nothing");
                }
                ("prefixItems", _) if self.dialect < Dialect::Draft2020 => {
                    return wrong("it means nothing before draft 2020-12");
                }
                ("items", Value::Array(schemas))
                | ("prefixItems" | "anyOf" | "oneOf" | "allOf", Value::Array(schemas)) => {
                    let numbered = schemas.iter().enumerate();
                    Value::Array(
                        numbered
                            .map(|(index, schema)| self.schema(schema, &format!("{here}/{index}")))
                            .collect::<Result<_, _>>()?,
                    )
                }
                ("items" | "additionalItems", _) => self.schema(value, &here)?,
                ("prefixItems" | "anyOf" | "oneOf" | "allOf", _) => return wrong("wanted a list"),
                ("properties" | "$defs" | "definitions", Value::Object(schemas)) => {
                    self.named(schemas, &here, |name| Ok(name.to_owned()))?
                }
                ("patternProperties", Value::Object(schemas)) => self.named(schemas, &here, |pattern| {
                    ecma_262(pattern).map_err(|reason| misused("patternProperties", path, reason))
                })?,
                ("properties" | "$defs" | "definitions" | "patternProperties", _) => {
                    return wrong("wanted an object");
                }
                _ => return Err(FormError::Keyword { keyword: keyword.clone(), path: path.to_owned() }),
            };
            prepared.insert(keyword.clone(), rewritten);
        }
        self.dialect = around;
        if !extra.is_empty() {
            let all = prepared.entry("allOf").or_insert_with(|| json!([]));
            if let Value::Array(all) = all {
                all.extend(extra);
            }
        }
        Ok(Value::Object(prepared))
    }

    fn named(
        &mut self,
        schemas: &Map<String, Value>,
        path: &str,
        rename: impl Fn(&str) -> Result<String, FormError>,
    ) -> Result<Value, FormError> {
        let mut prepared = Map::new();
        for (name, schema) in schemas {
            let schema = self.schema(schema, &format!("{path}/{}", escaped(name)))?;
            prepared.insert(rename(name)?, schema);
        }
        Ok(Value::Object(prepared))
    }

    /// A value that must be met exactly: its numbers must be such that the compiler keeps them exactly.
    fn literal(&self, keyword: &str, value: &Value, path: &str) -> Result<(), FormError> {
        match value {
            Value::Number(number) => match number.as_f64() {
                Some(number) if number.abs() < NUMBER_MAX => Ok(()),
                _ => Err(misused(keyword, path, "a number of 2^53 and more cannot be held exactly")),
            },
            Value::Array(values) => values.iter().try_for_each(|value| self.literal(keyword, value, path)),
            Value::Object(fields) => fields.values().try_for_each(|value| self.literal(keyword, value, path)),
            _ => Ok(()),
        }
    }

    /// A reference must lead to a schema that was looked at; the compiler follows any path.
    fn check_references(&self) -> Result<(), FormError> {
        for (path, target) in &self.references {
            let plain = target.strip_prefix('#').filter(|rest| !rest.contains(['~', '%']));
            // The compiler reads "#/" as the whole schema, where it means the member with the empty name.
            if !plain.is_some_and(|place| place != "/" && self.places.contains(place)) {
                return Err(misused(
                    "$ref",
                    path,
                    "wanted # or #/ and the plain path of a schema in this document",
                ));
            }
        }
        Ok(())
    }
}

/// Whether nothing beside a reference constrains.
fn stands_alone(fields: &Map<String, Value>) -> bool {
    let silent = ["$ref", "$schema", "$id", "id", "$comment", "title", "description", "default", "examples"];
    let silent = |name: &String| silent.contains(&name.as_str()) || name == "definitions" || name == "$defs";
    fields.keys().all(silent)
}

fn misused(keyword: &str, path: &str, why: &'static str) -> FormError {
    FormError::Misused { keyword: keyword.to_owned(), path: path.to_owned(), why }
}

fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

fn count(keyword: &str, value: &Value, path: &str) -> Result<u64, FormError> {
    match value.as_u64() {
        Some(count) if count <= COUNT_MAX => Ok(count),
        _ => Err(misused(keyword, path, "wanted a whole number up to 100000")),
    }
}

/// How many different properties an object is sure to have once that many are written. The compiler lets a name that
/// the schema does not list be written twice, and then counts it twice.
fn certain_properties(fields: &Map<String, Value>) -> u64 {
    let closed = fields.get("additionalProperties") == Some(&Value::Bool(false))
        && !fields.contains_key("patternProperties");
    if closed {
        return u64::MAX;
    }
    let required: HashSet<&str> = fields
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    required.len() as u64 + 1
}

/// All multiples that a schema asks for. The compiler merges them in 32 bits without a look at overflow, so together
/// they must fit.
#[derive(Default)]
struct Multiples {
    /// The least common multiple so far, and its decimals.
    merged: Option<(u64, u32)>,
}

impl Multiples {
    /// `false`: not positive, not exact, or too much.
    fn take(&mut self, value: Option<f64>) -> bool {
        let Some(mut value) = value.filter(|value| value.is_finite() && *value > 0.0) else { return false };
        let mut decimals = 0;
        while value.fract() != 0.0 && decimals < 9 {
            value *= 10.0;
            decimals += 1;
        }
        if value.fract() != 0.0 || value > f64::from(u32::MAX) {
            return false;
        }
        #[expect(
            clippy::cast_sign_loss,
            clippy::cast_possible_truncation,
            reason = "a whole number below 2^32"
        )]
        let new = (value as u64, decimals);
        let merged = match self.merged {
            None => Some(new),
            Some(old) => least_common(old, new),
        };
        self.merged = merged.or(self.merged);
        merged.is_some()
    }
}

fn least_common(a: (u64, u32), b: (u64, u32)) -> Option<(u64, u32)> {
    let decimals = a.1.max(b.1);
    let scaled = |(value, own): (u64, u32)| value.checked_mul(10_u64.checked_pow(decimals - own)?);
    let (a, b) = (scaled(a)?, scaled(b)?);
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    // The compiler multiplies before it divides.
    let product = a.checked_mul(b).filter(|product| *product <= u64::from(u32::MAX))?;
    Some((product / x, decimals))
}

/// The schema with the request to write no white space.
fn compact(schema: Value) -> Value {
    let mut schema = match schema {
        Value::Object(fields) => fields,
        // `true` and `false` are schemas too.
        other => Map::from_iter([("allOf".to_owned(), json!([other]))]),
    };
    let wishes =
        json!({"whitespace_flexible": false, "item_separator": ",", "key_separator": ":", "lenient": false});
    schema.insert("x-guidance".to_owned(), wishes);
    Value::Object(schema)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_honoured_is_refused_where_it_stands() {
        let check = |schema: Value, keyword: &str, path: &str| match prepared(&schema) {
            Err(FormError::Misused { keyword: found, path: place, .. }) => {
                assert_eq!((found.as_str(), place.as_str()), (keyword, path), "{schema}");
            }
            other => panic!("{schema}: {other:?}"),
        };
        let draft_7 = "http://json-schema.org/draft-07/schema#";
        check(json!({"$schema": "https://example.com/my-own"}), "$schema", "");
        check(json!({"properties": {"a": {"$id": "https://example.com/a"}}}), "$id", "/properties/a");
        // The compiler would forget prefixItems.
        check(json!({"prefixItems": [{}], "items": {}, "additionalItems": true}), "additionalItems", "");
        // A definition may be of another version than the whole, if that makes no difference to the compiler.
        let other = |more: Value| {
            let mut schema = json!({"$schema": draft_7});
            schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"$ref": "#/$defs/a", "$defs": {"a": schema}})
        };
        check(other(json!({"items": [{}]})), "items", "/$defs/a");
        check(other(json!({"items": {"$ref": "#", "minItems": 1}})), "$ref", "/$defs/a/items");
        let same = prepared(&other(json!({"type": "string"}))).unwrap();
        assert_eq!(same["$defs"]["a"], json!({"type": "string"}));
        check(json!({"$schema": draft_7, "prefixItems": [{}]}), "prefixItems", "");
        check(json!({"$schema": draft_7, "items": {"$ref": "#", "minItems": 1}}), "$ref", "/items");
        // The compiler would take the nearest number that it can hold.
        check(json!({"const": [9_007_199_254_740_993_u64]}), "const", "");
        check(json!({"items": {"maximum": 1e30}}), "maximum", "/items");
        check(json!({"exclusiveMinimum": true}), "exclusiveMinimum", "");
        // The compiler would overflow.
        check(json!({"allOf": [{"multipleOf": 65_537}, {"multipleOf": 65_539}]}), "multipleOf", "/allOf/1");
        check(json!({"multipleOf": 0}), "multipleOf", "");
        // The compiler would count a name twice that is written twice.
        check(json!({"minProperties": 2}), "minProperties", "");
        check(
            json!({"minProperties": 3, "required": ["a"], "additionalProperties": {}}),
            "minProperties",
            "",
        );
        check(json!({"format": "unknown"}), "format", "");
        check(json!({"anyOf": [{"pattern": "(?=x)"}]}), "pattern", "/anyOf/0");
        // The compiler would follow it into what is no schema, or past an escape.
        for target in ["#/default", "#/$defs/a~1b", "https://example.com", "#anchor", "#/$defs/missing", "#/"]
        {
            let schema = json!({"$ref": target, "default": {"not": {}}, "$defs": {"a/b": {}, "a~1b": {}}});
            check(schema, "$ref", "");
        }
    }
}
