//! How sure the model was of the values that it chose from a list of its schema.

use std::ops::Range;

use fornax_form::Schema;
use serde_json::{Map, Value};

use crate::model::Token;

/// How likely each value that was chosen from a list is, among those that could have been chosen: by its place, as a
/// JSON pointer. Never too high: what is not among the most likely tokens is counted as if it just missed them.
pub(crate) fn confidence(schema: &Schema, text: &str, tokens: &[Token]) -> Map<String, Value> {
    let written: Vec<u8> = tokens.iter().flat_map(|token| token.bytes.iter().copied()).collect();
    let mut confidence = Map::new();
    if !schema.has_choices() || written != text.as_bytes() {
        return confidence;
    }
    let mut leaves = Vec::new();
    Scanner { text: text.as_bytes(), at: 0 }.value(String::new(), &mut leaves);
    for (pointer, span) in leaves {
        let Some(choices) = schema.choices(&pointer) else { continue };
        let choices: Vec<Vec<u8>> = choices.iter().map(|choice| choice.to_string().into_bytes()).collect();
        confidence.insert(pointer, Value::from(sureness(text.as_bytes(), &span, tokens, &choices)));
    }
    confidence
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
            let got = confidence(&schema, std::str::from_utf8(&text).unwrap(), tokens);
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
        assert!(confidence(&kinds(), "{\"kind\":\"other\"}", &[token("{", Some(0.5), &[])]).is_empty());
    }
}
