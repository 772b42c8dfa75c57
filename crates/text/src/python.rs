//! Values written as Python writes them: chat templates are made for Jinja2, and models are trained on its output.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// How deep lists and maps may lie in each other where they are written. Conversations are bounded by the JSON reader's
/// 128; a namespace that holds itself has no end.
const DEPTH_MAX: usize = 512;

/// Bytes that one value may be written as.
const BYTES_MAX: usize = 64 << 20;

/// Bytes of what a template has between values and in front of lines of JSON: they come again for each.
const SEPARATOR_BYTES_MAX: usize = 32;

/// `str(value)`.
pub(crate) fn display(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.as_str().unwrap_or_default().to_owned()),
        ValueKind::Undefined => Ok(String::new()),
        _ => {
            let mut out = String::new();
            repr(value, 0, &mut out)?;
            Ok(out)
        }
    }
}

/// `repr(value)`.
fn repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    check_size(depth, out.len())?;
    match value.kind() {
        ValueKind::String => out.push_str(&repr_str(value.as_str().unwrap_or_default())),
        ValueKind::Undefined | ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::Map => {
            out.push('{');
            for (at, (key, item)) in items(value).enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                repr(&key, depth + 1, out)?;
                out.push_str(": ");
                repr(&item, depth + 1, out)?;
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let is_tuple = value.is_tuple();
            out.push(if is_tuple { '(' } else { '[' });
            for (at, item) in members(value).enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                repr(&item, depth + 1, out)?;
            }
            out.push(if is_tuple { ')' } else { ']' });
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

fn check_size(depth: usize, bytes: usize) -> Result<(), Error> {
    let wrong = |reason: String| Err(Error::new(ErrorKind::InvalidOperation, reason));
    if depth > DEPTH_MAX {
        return wrong(format!("lists and maps lie more than {DEPTH_MAX} deep in each other"));
    }
    if bytes > BYTES_MAX {
        return wrong(format!("a value takes more than {BYTES_MAX} bytes"));
    }
    Ok(())
}

fn members(value: &Value) -> impl Iterator<Item = Value> {
    value.try_iter().into_iter().flatten()
}

fn items(value: &Value) -> impl Iterator<Item = (Value, Value)> {
    members(value).map(|key| {
        let item = value.get_item(&key).unwrap_or_default();
        (key, item)
    })
}

fn repr_str(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_ascii_control() => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => float_repr(float),
        _ => value.to_string(),
    }
}

/// The shortest digits that read back as the same number, with an exponent below 1e-4 and from 1e16 on.
fn float_repr(float: f64) -> String {
    if !float.is_finite() {
        return if float.is_nan() { "nan".to_owned() } else { format!("{float}") };
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if float != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = float.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// `json.dumps` as the filter `tojson` of transformers calls it: nothing escaped for HTML, letters of all scripts as
/// they are, a space after each comma and colon.
pub(crate) fn to_json(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|indent| !indent.is_none()) {
        Some(indent) if indent.as_str().is_some() => indent.as_str().map(str::to_owned),
        Some(indent) => Some(" ".repeat(usize::try_from(indent)?.min(32))),
        None => None,
    };
    let separators = options.get::<Option<Value>>("separators")?.filter(|pair| !pair.is_none());
    let separator = |at: usize, default: &str| match &separators {
        Some(pair) => pair.get_item_by_index(at).and_then(|part| display(&part)),
        None => Ok(default.to_owned()),
    };
    let mut json = Json {
        comma: separator(0, if indent.is_some() { "," } else { ", " })?,
        colon: separator(1, ": ")?,
        indent,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        out: String::new(),
    };
    options.assert_all_used()?;
    let words = [Some(&json.comma), Some(&json.colon), json.indent.as_ref()];
    if words.into_iter().flatten().any(|word| word.len() > SEPARATOR_BYTES_MAX) {
        let reason = format!("separators and indentation of JSON have at most {SEPARATOR_BYTES_MAX} bytes");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    json.write(value, 0)?;
    Ok(json.out)
}

struct Json {
    comma: String,
    colon: String,
    /// One level's indentation; `None` keeps everything on one line.
    indent: Option<String>,
    ascii: bool,
    sorted: bool,
    out: String,
}

impl Json {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        check_size(depth, self.out.len())?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&match number(value).as_str() {
                "nan" => "NaN".to_owned(),
                "inf" => "Infinity".to_owned(),
                "-inf" => "-Infinity".to_owned(),
                finite => finite.to_owned(),
            }),
            ValueKind::String => self.write_str(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let members = members(value);
                self.write_all("[", members, "]", depth, |json, item| json.write(&item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut items: Vec<(Value, Value)> = items(value).collect();
                if self.sorted {
                    items.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.write_all("{", items, "}", depth, |json, (key, item)| {
                    json.write_str(&display(&key)?);
                    json.out.push_str(&json.colon.clone());
                    json.write(&item, depth + 1)
                })?;
            }
            kind => {
                let reason = format!("{kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        }
        Ok(())
    }

    fn write_all<T>(
        &mut self,
        open: &str,
        parts: impl IntoIterator<Item = T>,
        close: &str,
        depth: usize,
        mut write: impl FnMut(&mut Json, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push_str(open);
        let mut is_empty = true;
        for (at, part) in parts.into_iter().enumerate() {
            is_empty = false;
            if at > 0 {
                self.out.push_str(&self.comma.clone());
            }
            self.break_line(depth + 1);
            write(self, part)?;
        }
        if !is_empty {
            self.break_line(depth);
        }
        self.out.push_str(close);
        Ok(())
    }

    fn break_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn write_str(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a string cannot fail.
                        write!(self.out, "\\u{unit:04x}").ok();
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let check = |float: f64, want: &str| assert_eq!(float_repr(float), want);
        check(1.0, "1.0");
        check(0.1, "0.1");
        check(-0.0, "-0.0");
        check(1e-4, "0.0001");
        check(1e-5, "1e-05");
        check(1.5e-7, "1.5e-07");
        check(1e15, "1000000000000000.0");
        check(1e16, "1e+16");
        check(123_456_789.125, "123456789.125");
        check(2.5e100, "2.5e+100");
    }

    #[test]
    fn values_are_written_as_python_writes_them() {
        let check = |value: Value, want: &str| assert_eq!(display(&value).unwrap(), want);
        check(Value::from(true), "True");
        check(Value::from(()), "None");
        check(Value::from("it's"), "it's");
        check(Value::from_iter(["it's", "a\n"]), "[\"it's\", 'a\\n']");
        check(Value::from_pairs([("a", Value::from(1)), ("b", Value::from(false))]), "{'a': 1, 'b': False}");
    }
}
