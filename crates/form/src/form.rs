//! What an answer must look like, and the text of it that the compiler gets.

use std::sync::Arc;

use fornax_code::Code;
use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use crate::{gbnf, meeting, schema};

/// Bytes of one form.
const FORM_BYTES_MAX: usize = 1 << 20;

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// JSON that is valid against this schema, written compactly.
    JsonSchema(Value),
    /// Any JSON object, written compactly.
    JsonObject,
    /// A match of this regular expression, from its first character to its last.
    Regex(String),
    /// A sentence of this grammar, in Lark's syntax or llama.cpp's (GBNF): there a rule has `::=`.
    Grammar(String),
    /// Exactly one of these.
    Choice(Vec<String>),
}

/// Why a form cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormError {
    /// A schema keyword that would be ignored, and so is refused.
    #[error("keyword {keyword:?} at {path:?} is not supported")]
    Keyword {
        /// The keyword.
        keyword: String,
        /// The schema it is in, as a JSON pointer; empty for the whole schema.
        path: String,
    },
    /// A schema keyword that is known, used in a way that cannot be honoured.
    #[error("keyword {keyword:?} at {path:?}: {why}")]
    Misused {
        /// The keyword.
        keyword: String,
        /// The schema it is in, as a JSON pointer; empty for the whole schema.
        path: String,
        /// What is wrong.
        why: &'static str,
    },
    /// Larger than what is compiled here.
    #[error("the {what} is more than {max}")]
    TooLarge {
        /// What was measured.
        what: &'static str,
        /// The bound.
        max: usize,
    },
    /// Compiling it takes more time or memory than forms may take.
    #[error("the form takes more than {what} to compile")]
    TooMuch {
        /// What there would have to be more of.
        what: &'static str,
    },
    /// Nobody wants it any more, and it was not compiled to the end.
    #[error("compiling was broken off")]
    Unwanted,
    /// No answer has this form, so none could ever be whole.
    #[error("no answer can satisfy this form")]
    Unsatisfiable,
    /// It cannot be compiled: not well-formed, or too complex.
    #[error("{0}")]
    Compile(String),
}

impl FormError {
    /// What programs know it by.
    pub fn code(&self) -> Code {
        Code::SchemaUnsupported
    }
}

impl Form {
    /// For another process: `from_json` reads it.
    pub fn to_json(&self) -> Value {
        match self {
            Form::JsonSchema(schema) => json!({"schema": schema}),
            Form::JsonObject => json!({"object": {}}),
            Form::Regex(regex) => json!({"regex": regex}),
            Form::Grammar(text) => json!({"grammar": text}),
            Form::Choice(choices) => json!({"choice": choices}),
        }
    }

    /// What `to_json` wrote.
    pub fn from_json(value: Value) -> Option<Form> {
        let Value::Object(fields) = value else { return None };
        let (kind, value) = fields.into_iter().next()?;
        let text = |value: Value| if let Value::String(text) = value { Some(text) } else { None };
        Some(match kind.as_str() {
            "schema" => Form::JsonSchema(value),
            "object" => Form::JsonObject,
            "regex" => Form::Regex(text(value)?),
            "grammar" => Form::Grammar(text(value)?),
            "choice" => match value {
                Value::Array(choices) => Form::Choice(choices.into_iter().map(text).collect::<Option<_>>()?),
                _ => return None,
            },
            _ => return None,
        })
    }

    /// A text that only equal forms share. The order of a schema's properties is part of it: answers follow it.
    pub(crate) fn key(&self) -> Result<Arc<str>, FormError> {
        let key = match self {
            Form::JsonSchema(schema) => {
                schema::check_size(schema)?;
                format!("schema {schema}")
            }
            Form::JsonObject => "object".to_owned(),
            Form::Regex(regex) => format!("regex {regex}"),
            Form::Grammar(text) => format!("grammar {text}"),
            Form::Choice(choices) => format!("choice {}", json!(choices)),
        };
        if key.len() > FORM_BYTES_MAX {
            return Err(FormError::TooLarge { what: "size of the form in bytes", max: FORM_BYTES_MAX });
        }
        Ok(key.into())
    }

    /// The form in the compiler's own languages.
    pub(crate) fn written(&self) -> Result<TopLevelGrammar, FormError> {
        Ok(match self {
            Form::JsonSchema(schema) => {
                let prepared = schema::prepared(schema)?;
                meeting::check_schema(&prepared)?;
                TopLevelGrammar::from_json_schema(prepared)
            }
            Form::JsonObject => {
                TopLevelGrammar::from_json_schema(schema::prepared(&json!({"type": "object"}))?)
            }
            Form::Regex(regex) => {
                // The compiler drops a backslash that escapes nothing.
                if regex.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 1 {
                    return Err(FormError::Compile("the regular expression ends in a backslash".to_owned()));
                }
                // In parentheses, because two slashes with nothing between them begin a comment.
                TopLevelGrammar::from_regex(&format!("(?:{regex})"))
            }
            Form::Grammar(text) if gbnf::is_meant(text) => gbnf::written(text)?,
            Form::Grammar(lark) => {
                meeting::check_grammar(lark)?;
                TopLevelGrammar::from_lark(lark.clone())
            }
            Form::Choice(choices) if choices.is_empty() => {
                return Err(FormError::Compile("a choice of nothing".to_owned()));
            }
            Form::Choice(choices) => {
                // One expression: as rules of their own, twenty thousand choices took seconds.
                let literals: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
                TopLevelGrammar::from_regex(&format!("(?:{})", literals.join("|")))
            }
        })
    }
}

/// A regular expression that matches only this.
fn literal(text: &str) -> String {
    let mut expression = String::new();
    for character in text.chars() {
        if character.is_alphanumeric() {
            expression.push(character);
        } else {
            expression.push_str(&format!("\\x{{{:X}}}", u32::from(character)));
        }
    }
    expression
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_reads_what_was_written() {
        for form in [
            Form::JsonSchema(json!({"b": 1, "a": [null]})),
            Form::JsonObject,
            Form::Regex("a|b\\".to_owned()),
            Form::Grammar("start: \"x\"".to_owned()),
            Form::Grammar("root ::= \"x\"".to_owned()),
            Form::Choice(vec!["yes".to_owned(), String::new()]),
        ] {
            assert_eq!(Form::from_json(form.to_json()).as_ref(), Some(&form));
        }
        for wrong in [json!(5), json!({}), json!({"regex": 5}), json!({"choice": [5]}), json!({"other": ""})]
        {
            assert_eq!(Form::from_json(wrong), None);
        }
    }
}
