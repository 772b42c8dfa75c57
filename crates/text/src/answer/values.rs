//! Values that models write otherwise than as JSON: in tags, as Python, with marks for quotes.

use serde_json::{Map, Value};

/// Nesting that is read; deeper is no value.
const DEPTH_MAX: usize = 64;

/// The JSON of a value that stood in tags. Its tool's schema says whether it is text; where nothing does, it is what it
/// looks like.
pub(super) fn typed(text: &str, schema: Option<&Value>, is_text: Option<bool>) -> String {
    let parsed = || serde_json::from_str::<Value>(text.trim()).ok();
    let allowed: Vec<&str> = match schema.map(|schema| &schema["type"]) {
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(several)) => several.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let value = match is_text {
        Some(true) => None,
        Some(false) => parsed(),
        None if !allowed.contains(&"string") => parsed(),
        // Text, unless it says null where null is allowed.
        None => parsed().filter(|value| value.is_null() && allowed.contains(&"null")),
    };
    value.unwrap_or_else(|| Value::from(text)).to_string()
}

/// `[name(key=value, ...), ...]`, as Python writes calls.
pub(super) fn python_calls(text: &str) -> Option<Vec<(String, String)>> {
    let mut literal = Literal { rest: text.trim() };
    literal.eat("[");
    let mut calls = Vec::new();
    loop {
        let name = literal.until(&['(', ']']).trim().to_owned();
        if !literal.eat("(") {
            break;
        }
        let arguments = literal.fields('=', ")", 0)?;
        calls.push((name, Value::Object(arguments).to_string()));
        if !literal.eat(",") {
            break;
        }
    }
    literal.eat("]");
    (!calls.is_empty() && literal.rest.trim().is_empty()).then_some(calls)
}

/// `call:name{key:value}`, as Gemma writes a call.
pub(super) fn gemma_call(text: &str) -> Option<(String, String)> {
    let mut literal = Literal { rest: text.trim() };
    if !literal.eat("call:") {
        return None;
    }
    let name = literal.until(&['{']).trim().to_owned();
    if !literal.eat("{") {
        return None;
    }
    let arguments = literal.fields(':', "}", 0)?;
    literal.rest.trim().is_empty().then(|| (name, Value::Object(arguments).to_string()))
}

/// A literal of either kind, read from the front.
struct Literal<'a> {
    rest: &'a str,
}

/// Gemma's mark for a quote.
const QUOTE: &str = "<|\"|>";

impl<'a> Literal<'a> {
    fn eat(&mut self, text: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(text);
        if let Some(rest) = rest {
            self.rest = rest;
        }
        rest.is_some()
    }

    fn until(&mut self, ends: &[char]) -> &'a str {
        let at = self.rest.find(ends).unwrap_or(self.rest.len());
        let (text, rest) = self.rest.split_at(at);
        self.rest = rest;
        text
    }

    /// Keys and values up to `end`.
    fn fields(&mut self, between: char, end: &str, depth: usize) -> Option<Map<String, Value>> {
        let mut fields = Map::new();
        while !self.eat(end) {
            let key = match self.quoted() {
                Some(key) => key?,
                None => self.until(&[between, ')', '}', ',']).trim().to_owned(),
            };
            if !self.eat(&between.to_string()) {
                return None;
            }
            fields.insert(key, self.value(depth + 1)?);
            if !self.eat(",") {
                return self.eat(end).then_some(fields);
            }
        }
        Some(fields)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        if let Some(text) = self.quoted() {
            return text.map(Value::from);
        }
        if self.eat("{") {
            return self.fields(':', "}", depth).map(Value::Object);
        }
        if self.eat("[") {
            let mut items = Vec::new();
            while !self.eat("]") {
                items.push(self.value(depth + 1)?);
                if !self.eat(",") {
                    return self.eat("]").then_some(Value::Array(items));
                }
            }
            return Some(Value::Array(items));
        }
        match self.until(&[',', ')', ']', '}']).trim() {
            "True" => Some(Value::from(true)),
            "False" => Some(Value::from(false)),
            "None" => Some(Value::Null),
            word => serde_json::from_str(word).ok(),
        }
    }

    /// A quoted text, if one begins here; `Some(None)` if it does not end.
    #[expect(clippy::option_option, reason = "no text here, and text without an end, are different things")]
    fn quoted(&mut self) -> Option<Option<String>> {
        let rest = self.rest.trim_start();
        if let Some(inside) = rest.strip_prefix(QUOTE) {
            let Some((text, rest)) = inside.split_once(QUOTE) else { return Some(None) };
            self.rest = rest;
            return Some(Some(text.to_owned()));
        }
        let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let mut text = String::new();
        let mut chars = rest[1..].char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                _ if c == quote => {
                    self.rest = &rest[at + 2..];
                    return Some(Some(text));
                }
                '\\' => match chars.next() {
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, 't')) => text.push('\t'),
                    Some((_, 'r')) => text.push('\r'),
                    Some((_, other)) => text.push(other),
                    None => return Some(None),
                },
                _ => text.push(c),
            }
        }
        Some(None)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_in_tags_are_what_the_schema_says() {
        let check = |text: &str, schema: Value, want: &str| {
            assert_eq!(typed(text, Some(&schema), None), want, "{text:?} as {schema}");
        };
        check("3", json!({"type": "integer"}), "3");
        check("3", json!({"type": "string"}), "\"3\"");
        check("[1, 2]", json!({}), "[1,2]");
        check("some text", json!({"type": "integer"}), "\"some text\"");
        check("null", json!({"type": ["string", "null"]}), "null");
        check("null", json!({"type": "string"}), "\"null\"");
    }

    #[test]
    fn python_calls_become_json() {
        let check = |text: &str, want: Option<Vec<(&str, &str)>>| {
            let want = want.map(|calls| {
                calls.into_iter().map(|(name, arguments)| (name.to_owned(), arguments.to_owned())).collect()
            });
            assert_eq!(python_calls(text), want, "{text:?}");
        };
        check("[f(a='it\\'s', b=3), g()]", Some(vec![("f", r#"{"a":"it's","b":3}"#), ("g", "{}")]));
        check(
            "[f(a=[1, True, None], b={'k': \"v\"})]",
            Some(vec![("f", r#"{"a":[1,true,null],"b":{"k":"v"}}"#)]),
        );
        check("[f(a='open)]", None);
        check("just text", None);
        check("[f(a=1)] and more", None);
    }

    #[test]
    fn a_call_of_gemma_becomes_json() {
        let text = "call:f{a:<|\"|>x, \"y\"<|\"|>,n:{list:[1,2]},b:true}";
        let want = ("f".to_owned(), r#"{"a":"x, \"y\"","n":{"list":[1,2]},"b":true}"#.to_owned());
        assert_eq!(gemma_call(text), Some(want));
        assert_eq!(gemma_call("call:f{a:<|\"|>x"), None);
    }
}
