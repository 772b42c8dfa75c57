//! The second opinion: whether an answer is what its schema says, and how sure the model was of what it chose.
//!
//! Answers are made to fit by the engine's grammar. Here they are judged by another implementation, and by one that
//! never repairs anything.

use std::{fmt, ops::Range};

use serde_json::{Map, Value};

use crate::{Failure, model::Token};

/// A schema, compiled for judging.
pub struct Schema {
    value: Value,
    name: Option<String>,
    validator: jsonschema::Validator,
    has_choices: bool,
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schema").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Schema {
    /// Compiles it, or says why it is none.
    pub fn new(value: &Value, name: Option<&str>) -> Result<Schema, Failure> {
        let unsupported = |reason: String| Failure::new("SCHEMA_UNSUPPORTED", "submit", reason);
        if !value.is_object() {
            return Err(unsupported("a schema is a JSON object".to_owned()));
        }
        let validator = jsonschema::validator_for(value).map_err(|error| {
            unsupported(format!("not a schema, at {:?}", error.instance_path().to_string()))
        })?;
        Ok(Schema {
            has_choices: has_choices(value),
            name: name.map(str::to_owned),
            value: value.clone(),
            validator,
        })
    }

    /// As it was given.
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// The name that it was registered under.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether some values are chosen from a list, so that it can be said how surely.
    pub fn has_choices(&self) -> bool {
        self.has_choices
    }

    /// The answer as a value, if it is one and is valid.
    pub(crate) fn judge(&self, text: &str) -> Result<Value, Failure> {
        let invalid = |place: String| {
            let message = format!("the answer is not valid against its schema, at {place:?}");
            Failure::new("INTERNAL", "validate", message)
        };
        let value: Value =
            serde_json::from_str(text).map_err(|error| invalid(format!("column {}", error.column())))?;
        let place = self.validator.iter_errors(&value).next().map(|error| error.instance_path().to_string());
        place.map_or(Ok(value), |place| Err(invalid(place)))
    }

    /// How likely each value that was chosen from a list is, among those that could have been chosen: by its place, as a
    /// JSON pointer. Never too high: what is not among the most likely tokens is counted as if it just missed them.
    pub(crate) fn confidence(&self, text: &str, tokens: &[Token]) -> Map<String, Value> {
        let written: Vec<u8> = tokens.iter().flat_map(|token| token.bytes.iter().copied()).collect();
        let mut confidence = Map::new();
        if !self.has_choices || written != text.as_bytes() {
            return confidence;
        }
        let mut leaves = Vec::new();
        Scanner { text: text.as_bytes(), at: 0 }.value(String::new(), &mut leaves);
        for (pointer, span) in leaves {
            let Some(choices) = choices_at(&self.value, &self.value, &pointer) else { continue };
            let choices: Vec<Vec<u8>> =
                choices.iter().map(|choice| choice.to_string().into_bytes()).collect();
            confidence.insert(pointer, Value::from(sureness(text.as_bytes(), &span, tokens, &choices)));
        }
        confidence
    }
}

/// The product, over the tokens of a value, of their share among all tokens that lead to one of the choices.
fn sureness(text: &[u8], span: &Range<usize>, tokens: &[Token], choices: &[Vec<u8>]) -> f64 {
    let (mut product, mut begins) = (1.0, 0);
    for token in tokens {
        let (from, to) = (begins, begins + token.bytes.len());
        begins = to;
        let Some(logprob) = token.logprob.filter(|_| from < span.end && to > span.start) else { continue };
        // A token may begin before the value: then only what follows is the value's.
        let lead = &text[from.min(span.start)..span.start];
        let lead = if from < span.start { &lead[lead.len() - (span.start - from)..] } else { &[] };
        let prefix = &text[span.start..from.max(span.start)];
        let open: Vec<&[u8]> = choices.iter().filter_map(|choice| choice.strip_prefix(prefix)).collect();
        let leads_to = |bytes: &[u8], rest: &[u8]| {
            bytes.strip_prefix(lead).is_some_and(|bytes| rest.starts_with(bytes) || bytes.starts_with(rest))
        };
        let probability = f64::from(logprob).exp();
        let others = token.top.iter().filter(|(bytes, _)| *bytes != token.bytes);
        let others: Vec<(&[u8], f64)> = others
            .map(|(bytes, logprob)| (bytes.as_slice(), f64::from(*logprob).exp()))
            .filter(|(bytes, _)| open.iter().any(|rest| leads_to(bytes, rest)))
            .collect();
        let seen: f64 = others.iter().map(|(_, probability)| probability).sum();
        let is_seen = |rest: &&[u8]| {
            leads_to(&token.bytes, rest) || others.iter().any(|(bytes, _)| leads_to(bytes, rest))
        };
        let unseen = open.iter().filter(|rest| !is_seen(rest)).count();
        let least = token.top.iter().map(|(_, logprob)| f64::from(*logprob).exp()).fold(1.0, f64::min);
        product *= probability / (probability + seen + unseen as f64 * least);
    }
    product
}

/// Finds where the plain values of valid JSON stand.
struct Scanner<'a> {
    text: &'a [u8],
    at: usize,
}

impl Scanner<'_> {
    fn value(&mut self, pointer: String, leaves: &mut Vec<(String, Range<usize>)>) {
        self.space();
        match self.text.get(self.at) {
            Some(b'{') => {
                self.at += 1;
                while self.goes_on(b'}') {
                    let from = self.at;
                    self.string();
                    let name: String = serde_json::from_slice(&self.text[from..self.at]).unwrap_or_default();
                    self.space();
                    self.at += 1;
                    let name = name.replace('~', "~0").replace('/', "~1");
                    self.value(format!("{pointer}/{name}"), leaves);
                }
            }
            Some(b'[') => {
                self.at += 1;
                let mut index = 0;
                while self.goes_on(b']') {
                    self.value(format!("{pointer}/{index}"), leaves);
                    index += 1;
                }
            }
            Some(b'"') => {
                let from = self.at;
                self.string();
                leaves.push((pointer, from..self.at));
            }
            _ => {
                let from = self.at;
                let ends = |byte: &u8| b",]} \t\r\n".contains(byte);
                let length = self.text[from..].iter().position(ends).unwrap_or(self.text.len() - from);
                self.at += length;
                leaves.push((pointer, from..self.at));
            }
        }
    }

    /// Whether another part comes before the end, which is passed otherwise.
    fn goes_on(&mut self, end: u8) -> bool {
        self.space();
        if self.text.get(self.at) == Some(&b',') {
            self.at += 1;
            self.space();
        }
        match self.text.get(self.at) {
            Some(byte) if *byte != end => true,
            _ => {
                self.at += 1;
                false
            }
        }
    }

    fn string(&mut self) {
        self.at += 1;
        while let Some(byte) = self.text.get(self.at) {
            self.at += match byte {
                b'\\' => 2,
                b'"' => {
                    self.at += 1;
                    return;
                }
                _ => 1,
            };
        }
    }

    fn space(&mut self) {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }
}

/// References followed for one step: a schema may refer to itself.
const REFERENCES_MAX: usize = 64;

fn resolved<'a>(root: &'a Value, mut schema: &'a Value) -> Option<&'a Value> {
    for _ in 0..REFERENCES_MAX {
        match schema["$ref"].as_str() {
            Some(reference) => schema = root.pointer(reference.strip_prefix('#')?)?,
            None => return Some(schema),
        }
    }
    None
}

/// The list that the value at a place is chosen from, if it is.
fn choices_at<'a>(root: &'a Value, schema: &'a Value, pointer: &str) -> Option<&'a Vec<Value>> {
    let schema = resolved(root, schema)?;
    let Some(rest) = pointer.strip_prefix('/') else { return schema["enum"].as_array() };
    let (step, rest) = rest.find('/').map_or((rest, ""), |end| rest.split_at(end));
    let name = step.replace("~1", "/").replace("~0", "~");
    let index: Option<usize> = name.parse().ok();
    let next = schema["properties"].get(&name).or_else(|| {
        let prefix = schema["prefixItems"].as_array();
        index.and_then(|index| prefix.and_then(|items| items.get(index)).or(schema.get("items")))
    });
    choices_at(root, next?, rest)
}

fn has_choices(schema: &Value) -> bool {
    match schema {
        Value::Object(fields) => {
            fields.get("enum").is_some_and(Value::is_array) || fields.values().any(has_choices)
        }
        Value::Array(items) => items.iter().any(has_choices),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn kinds() -> Schema {
        let schema = json!({"type": "object", "properties": {
            "kind": {"enum": ["invoice", "receipt", "other"]}, "n": {"type": "integer"},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}}},
            "required": ["kind"], "$defs": {"line": {"properties": {"side": {"enum": ["debit", "credit"]}}}}});
        Schema::new(&schema, None).unwrap()
    }

    #[test]
    fn an_answer_that_is_cut_anywhere_is_never_a_result() {
        let actions = json!({"type": "object", "properties": {"actions": {"type": "array", "items": {
            "type": "object", "properties": {"book": {"type": "string"}, "cents": {"type": "integer"}},
            "required": ["book", "cents"]}, "minItems": 2}}, "required": ["actions"]});
        let schema = Schema::new(&actions, None).unwrap();
        let text = r#"{"actions":[{"book":"rent","cents":70000},{"book":"tax","cents":1900}]}"#;
        assert!(schema.judge(text).is_ok());
        for end in 0..text.len() {
            assert_eq!(schema.judge(&text[..end]).unwrap_err().stage, "validate", "{}", &text[..end]);
        }
        assert!(schema.judge(r#"{"actions":[{"book":"rent","cents":70000}]}"#).is_err(), "half of it");
    }

    #[test]
    fn what_is_no_schema_is_refused() {
        for schema in
            [json!(5), json!("text"), json!({"type": "nonsense"}), json!({"properties": 3}), json!([])]
        {
            assert_eq!(Schema::new(&schema, None).unwrap_err().code, "SCHEMA_UNSUPPORTED", "{schema}");
        }
    }

    /// Tokens with log-probabilities of probabilities, and the alternatives of each.
    fn token(text: &str, probability: Option<f64>, top: &[(&str, f64)]) -> Token {
        let top = top.iter().map(|(text, p)| (text.as_bytes().to_vec(), p.ln() as f32)).collect();
        Token { bytes: text.into(), logprob: probability.map(|p| p.ln() as f32), top }
    }

    #[test]
    fn confidence_is_the_share_of_the_choice_among_the_choices() {
        let schema = kinds();
        let check = |tokens: &[Token], wanted: &[(&str, f64)]| {
            let text: Vec<u8> = tokens.iter().flat_map(|token| token.bytes.clone()).collect();
            let got = schema.confidence(std::str::from_utf8(&text).unwrap(), tokens);
            assert_eq!(got.len(), wanted.len(), "{got:?}");
            for (place, wanted) in wanted {
                let got = got[*place].as_f64().unwrap();
                assert!((got - wanted).abs() < 1e-5, "{place}: {got}, not {wanted}");
            }
        };
        // All three choices are seen: 0.4 of 0.5; the token that is no choice does not count.
        let top = [("inv", 0.4), ("banana", 0.3), ("rec", 0.08), ("oth", 0.02)];
        let head = token("{\"kind\":\"", None, &[]);
        check(&[head.clone(), token("inv", Some(0.4), &top), token("oice\"}", None, &[])], &[("/kind", 0.8)]);
        // One choice is not seen: it may be as likely as the last that is.
        let top = [("inv", 0.4), ("rec", 0.1)];
        check(
            &[head.clone(), token("inv", Some(0.4), &top), token("oice\"}", None, &[])],
            &[("/kind", 0.4 / 0.6)],
        );
        // A token that begins before the value, and one that ends behind it.
        let top = [("\"rec", 0.6), ("\"inv", 0.2), ("\"oth", 0.2)];
        let end = [("eipt\",\"", 0.9), ("nonsense", 0.1)];
        check(
            &[
                token("{\"kind\":", None, &[]),
                token("\"rec", Some(0.6), &top),
                token("eipt\",\"", Some(0.9), &end),
                token("n\":1}", None, &[]),
            ],
            &[("/kind", 0.6)],
        );
        // Inside lists and behind references; numbers are not chosen from a list.
        let sides = [("cre", 0.75), ("deb", 0.25)];
        check(
            &[
                token("{\"lines\":[{\"side\":\"", None, &[]),
                token("cre", Some(0.75), &sides),
                token("dit\"}],\"n\":1}", None, &[]),
            ],
            &[("/lines/0/side", 0.75)],
        );
    }

    #[test]
    fn tokens_that_are_not_the_text_say_nothing() {
        assert!(kinds().confidence("{\"kind\":\"other\"}", &[token("{", Some(0.5), &[])]).is_empty());
    }
}
