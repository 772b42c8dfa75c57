//! Which JSON schemas are honoured to the letter, and how they are written for the grammar compiler.
//!
//! The compiler skips over some of what it does not know and approximates some of what it does. Here every place in a
//! schema is looked at first: what would be ignored or bent is refused with its path, patterns are translated from
//! ECMA 262, and formats become patterns of our own. What passes is meant exactly.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use crate::grammar::FormError;

/// Nesting of a schema, values inside it included. The compiler recurses, so there must be an end.
const DEPTH_MAX: usize = 64;

/// Objects, lists and values of a schema. A chain of references nests the compiler as deep as it is long, so this also
/// bounds its stack; see `STACK` in `grammar.rs`.
const NODES_MAX: usize = 20_000;

/// Lengths and counts. More tokens than any context has cannot be asked for; the compiler's work grows with them.
const COUNT_MAX: u64 = 100_000;

/// Whole numbers below this are exact as `f64`, which is how the compiler keeps them.
const NUMBER_MAX: f64 = 9_007_199_254_740_992.0;

/// The schema as the compiler gets it: compact JSON, nothing that it would ignore. Its size was checked.
pub(crate) fn prepared(schema: &Value) -> Result<Value, FormError> {
    let mut walk = Walk {
        dialect: dialect(schema)?,
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

/// One pass over all schemas inside a schema.
struct Walk {
    dialect: Dialect,
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
        let mut prepared = Map::new();
        // What a keyword is rewritten to when its own place cannot hold it.
        let mut extra = Vec::new();
        for (keyword, value) in fields {
            let here = format!("{path}/{}", escaped(keyword));
            let wrong = |wanted| Err(misused(keyword, path, wanted));
            let rewritten = match (keyword.as_str(), value) {
                ("$schema" | "$id", Value::String(_)) if path.is_empty() => value.clone(),
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

/// A string format as a pattern, at least as strict as its specification.
struct Format {
    pattern: &'static str,
    length_max: Option<u32>,
}

/// Formats that are enforced. Each pattern is anchored by its user.
fn format(name: &str) -> Option<Format> {
    /// Years that are leap years, then the months with their days.
    macro_rules! date {
        () => {
            concat!(
                "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
                "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))",
                "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
            )
        };
    }
    /// Without leap seconds: whether a minute has one depends on the day and the offset.
    macro_rules! time {
        () => {
            "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
        };
    }
    macro_rules! byte {
        () => {
            "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
        };
    }
    macro_rules! ipv4 {
        () => {
            concat!("(?:", byte!(), "\\.){3}", byte!())
        };
    }
    /// Letters, digits and single hyphens: two of them in the third and fourth place would be an encoded label, whose
    /// validity no pattern tells.
    macro_rules! label {
        () => {
            "[a-zA-Z0-9](?:[a-zA-Z0-9]|-[a-zA-Z0-9]){0,30}"
        };
    }
    macro_rules! hostname {
        () => {
            concat!(label!(), "(?:\\.", label!(), "){0,6}")
        };
    }
    let (pattern, length_max) = match name {
        "date" => (date!(), None),
        "time" => (time!(), None),
        "date-time" => (concat!(date!(), "[tT]", time!()), None),
        "duration" => (
            concat!(
                "P(?:[0-9]+W|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)",
                "(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))?",
                "|T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))"
            ),
            None,
        ),
        "email" => (concat!("[a-zA-Z0-9_+-]+(?:\\.[a-zA-Z0-9_+-]+){0,3}@", hostname!()), Some(64)),
        "hostname" => (hostname!(), Some(253)),
        "ipv4" => (ipv4!(), None),
        "ipv6" => (
            concat!(
                "(?:(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
                "|(?:[0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}",
                "|(?:[0-9a-fA-F]{1,4}:){1,5}(?::[0-9a-fA-F]{1,4}){2}",
                "|(?:[0-9a-fA-F]{1,4}:){1,4}(?::[0-9a-fA-F]{1,4}){3}",
                "|(?:[0-9a-fA-F]{1,4}:){1,3}(?::[0-9a-fA-F]{1,4}){4}",
                "|(?:[0-9a-fA-F]{1,4}:){1,2}(?::[0-9a-fA-F]{1,4}){5}",
                "|[0-9a-fA-F]{1,4}:(?::[0-9a-fA-F]{1,4}){6}",
                "|:(?::[0-9a-fA-F]{1,4}){1,7}|(?:[0-9a-fA-F]{1,4}:){1,7}:|::)"
            ),
            None,
        ),
        "uuid" => ("[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", None),
        "uri" => (
            concat!(
                "[a-zA-Z][a-zA-Z0-9+.-]*:(?://",
                hostname!(),
                "(?::[0-9]{1,5})?(?:/(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})*)*",
                "|(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})+",
                "(?:/(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})*)*)",
                "(?:\\?(?:[a-zA-Z0-9._~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})*)?",
                "(?:#(?:[a-zA-Z0-9._~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})*)?"
            ),
            None,
        ),
        _ => return None,
    };
    Some(Format { pattern, length_max })
}

/// White space in ECMA 262, as the inside of a character class.
const SPACE: &str =
    r"\t\n\x0B\x0C\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}";

/// A pattern of ECMA 262 (in its unicode mode) in the syntax of the compiler, or what of it is not supported.
fn ecma_262(pattern: &str) -> Result<String, &'static str> {
    let mut out = String::new();
    let mut rest = pattern.chars().peekable();
    let mut in_class = false;
    while let Some(character) = rest.next() {
        match character {
            '\\' => escape(&mut rest, in_class, &mut out)?,
            ']' if in_class => {
                in_class = false;
                out.push(']');
            }
            '-' if in_class && rest.peek() == Some(&'-') => {
                return Err("a double hyphen in a class is not supported");
            }
            '[' | '&' | '~' if in_class => out.extend(['\\', character]),
            _ if in_class => out.push(character),
            '[' => {
                in_class = true;
                out.push('[');
                if rest.next_if_eq(&'^').is_some() {
                    out.push('^');
                }
                if rest.peek() == Some(&']') {
                    return Err("an empty class is not supported");
                }
            }
            '.' => out.push_str(r"[^\n\r\u{2028}\u{2029}]"),
            '(' if rest.peek() == Some(&'?') => {
                let ahead: String = rest.clone().take(3).collect();
                let named =
                    (ahead.starts_with("?<") && !ahead.starts_with("?<=") && !ahead.starts_with("?<!"))
                        || ahead == "?P<";
                if !named && !ahead.starts_with("?:") {
                    return Err("look-around and flags are not supported");
                }
                out.push('(');
            }
            _ => out.push(character),
        }
    }
    if in_class { Err("a class without its end") } else { Ok(out) }
}

/// What follows a backslash.
fn escape(
    rest: &mut std::iter::Peekable<std::str::Chars<'_>>,
    in_class: bool,
    out: &mut String,
) -> Result<(), &'static str> {
    match rest.next() {
        None => return Err("a backslash at its end"),
        Some('s') if in_class => out.push_str(SPACE),
        Some('s') => out.extend(["[", SPACE, "]"]),
        Some('S') => out.extend(["[^", SPACE, "]"]),
        Some('b') if in_class => out.push_str(r"\x08"),
        Some('v') => out.push_str(r"\x0B"),
        Some('0') if !rest.peek().is_some_and(char::is_ascii_digit) => out.push_str(r"\x00"),
        Some('c') => match rest.next() {
            Some(letter) if letter.is_ascii_alphabetic() => {
                out.push_str(&format!(r"\x{:02X}", letter as u32 % 32))
            }
            _ => return Err("a control character without its letter"),
        },
        Some(class @ ('d' | 'D' | 'w' | 'W' | 'n' | 'r' | 't' | 'f' | 'p' | 'P' | 'x' | 'u')) => {
            out.extend(['\\', class]);
        }
        Some(other) if other.is_ascii_alphanumeric() => {
            return Err("a back reference, a word boundary or an unknown escape is not supported");
        }
        Some(other) => out.extend(['\\', other]),
    }
    Ok(())
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
    fn patterns_keep_their_meaning_in_the_other_syntax() {
        let check = |pattern: &str, wanted: Result<&str, ()>| {
            assert_eq!(ecma_262(pattern).as_deref().map_err(|_| ()), wanted, "{pattern}");
        };
        check(r"^a.\d\/$", Ok(r"^a[^\n\r\u{2028}\u{2029}]\d\/$"));
        check(r"[[a&&b~.]]", Ok(r"[\[a\&\&b\~.]]"));
        check(r"[\s\b\cJ]\0\v", Ok(&format!(r"[{SPACE}\x08\x0A]\x00\x0B")));
        check(r"(?:a)(?<n>b)(?P<m>c)", Ok(r"(?:a)(?<n>b)(?P<m>c)"));
        for refused in [
            r"\bword\b",
            r"(a)\1",
            r"(?=a)",
            r"(?!a)",
            r"(?<=a)",
            r"(?<!a)",
            r"(?i)a",
            r"\A",
            r"\Z",
            r"[]",
            r"[^]",
            "[a",
            "a\\",
            "[a--b]",
        ] {
            check(refused, Err(()));
        }
    }

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
