//! Output that is right by construction: only tokens that keep the form alive can be chosen.
//!
//! Forms are compiled off the engine's thread, once each; a sequence gets a copy of the compiled state. The engine
//! knows tokens as bytes here, never as text of a tokenizer.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use llguidance::{Matcher, ParserFactory, api::TopLevelGrammar};
use serde_json::{Value, json};
use toktrie::{SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// JSON that is valid against this schema, written compactly.
    JsonSchema(Value),
    /// Any JSON object, written compactly.
    JsonObject,
    /// A match of this regular expression, from its first character to its last.
    Regex(String),
    /// A sentence of this grammar, in Lark syntax.
    Grammar(String),
    /// Exactly one of these.
    Choice(Vec<String>),
}

/// Why a form cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormError {
    /// A schema keyword that would be ignored, and so is refused.
    #[error("SCHEMA_UNSUPPORTED: keyword {keyword:?} at {path} is not supported")]
    Keyword {
        /// The keyword.
        keyword: String,
        /// Where, as a JSON pointer; empty for the schema itself.
        path: String,
    },
    /// It cannot be compiled: not well-formed, too large, or nothing satisfies it.
    #[error("SCHEMA_UNSUPPORTED: {0}")]
    Compile(String),
}

/// Bytes to tokens.
pub type Encode = Arc<dyn Fn(&[u8]) -> Vec<u32> + Send + Sync>;

/// The tokens of a model as bytes.
pub struct Vocabulary {
    /// By id. Control tokens are empty: no form contains them.
    pub bytes: Vec<Vec<u8>>,
    /// The tokens that end an answer.
    pub end_tokens: Vec<u32>,
    /// How the model's tokenizer would write these bytes: forced text takes the tokens that the model knows it by.
    pub encode: Encode,
}

/// Compiled forms kept for the next request that asks for the same.
const KEPT: usize = 64;

/// Compiles forms for one vocabulary. Shared by all callers; the engine never waits for it.
pub struct Grammars {
    factory: ParserFactory,
    end_tokens: Arc<[u32]>,
    /// Most recently used last.
    kept: Mutex<VecDeque<(Form, Grammar)>>,
}

impl Grammars {
    /// Builds the trie of all tokens.
    pub fn new(vocabulary: Vocabulary) -> Result<Grammars, FormError> {
        let end_tokens: Arc<[u32]> = vocabulary.end_tokens.clone().into();
        let environment: TokEnv = Arc::new(Environment::new(vocabulary)?);
        let mut factory = ParserFactory::new_simple(&environment)
            .map_err(|error| FormError::Compile(first_line(&error.to_string())))?;
        factory.quiet();
        // Errors go to the caller: they must not carry what was generated.
        factory.limits_mut().verbose_errors = false;
        Ok(Grammars { factory, end_tokens, kept: Mutex::new(VecDeque::new()) })
    }

    /// The compiled form, from the kept ones if it is there.
    pub fn compile(&self, form: &Form) -> Result<Grammar, FormError> {
        if let Some(grammar) = self.recall(form) {
            return Ok(grammar);
        }
        // Outside the lock: a large schema takes its time and must not hold up others.
        let grammar = self.compile_new(form)?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back((form.clone(), grammar.clone()));
        Ok(grammar)
    }

    fn recall(&self, form: &Form) -> Option<Grammar> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let index = kept.iter().position(|(known, _)| known == form)?;
        let entry = kept.remove(index)?;
        let grammar = entry.1.clone();
        kept.push_back(entry);
        Some(grammar)
    }

    fn compile_new(&self, form: &Form) -> Result<Grammar, FormError> {
        let top = match form {
            Form::JsonSchema(schema) => {
                check_keywords(schema, "")?;
                TopLevelGrammar::from_json_schema(compact(schema))
            }
            Form::JsonObject => TopLevelGrammar::from_json_schema(compact(&json!({"type": "object"}))),
            Form::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Form::Grammar(lark) => TopLevelGrammar::from_lark(lark.clone()),
            Form::Choice(choices) if choices.is_empty() => {
                return Err(FormError::Compile("a choice of nothing".to_owned()));
            }
            Form::Choice(choices) => {
                let quoted: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", quoted.join(" | ")))
            }
        };
        let mut matcher = Matcher::new(self.factory.create_parser(top));
        if let Some(error) = matcher.get_error() {
            return Err(FormError::Compile(first_line(&error)));
        }
        // What accepts nothing at all is refused here, not after a prompt was computed.
        let mask =
            matcher.compute_mask().map_err(|error| FormError::Compile(first_line(&error.to_string())))?;
        if mask.is_zero() {
            return Err(FormError::Compile("nothing satisfies it".to_owned()));
        }
        Ok(Grammar { matcher, end_tokens: Arc::clone(&self.end_tokens) })
    }
}

/// A form and how far an answer has got in it.
pub struct Grammar {
    matcher: Matcher,
    end_tokens: Arc<[u32]>,
}

impl Clone for Grammar {
    fn clone(&self) -> Self {
        // Deep: copies work on different threads and must not share lexer caches.
        Grammar { matcher: self.matcher.deep_clone(), end_tokens: Arc::clone(&self.end_tokens) }
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Grammar {
    /// One bit per token that may come next.
    pub(crate) fn mask(&mut self) -> Result<SimpleVob, String> {
        let mut mask = self.matcher.compute_mask_or_eos().map_err(|error| first_line(&error.to_string()))?;
        let may_end = self.may_end();
        for &token in self.end_tokens.iter() {
            if may_end { mask.allow_token(token) } else { mask.disallow_token(token) }
        }
        Ok(mask)
    }

    /// Moves on by a chosen token.
    pub(crate) fn accept(&mut self, token: u32) -> Result<(), String> {
        self.matcher.consume_token(token).map_err(|error| first_line(&error.to_string()))
    }

    /// Tokens that must follow because there is only one way on. They are not accepted yet.
    pub(crate) fn forced(&mut self) -> Vec<u32> {
        self.matcher.compute_ff_tokens()
    }

    /// Whether the answer is whole if it ends here.
    pub(crate) fn may_end(&mut self) -> bool {
        self.matcher.is_stopped() || self.matcher.is_accepting().unwrap_or(false)
    }

    /// Whether nothing can follow.
    pub(crate) fn is_over(&self) -> bool {
        self.matcher.is_stopped()
    }
}

/// The trie and the encoding that forms are compiled against.
struct Environment {
    trie: TokTrie,
    encode: Encode,
}

impl Environment {
    fn new(vocabulary: Vocabulary) -> Result<Environment, FormError> {
        let Some(&end) = vocabulary.end_tokens.first() else {
            return Err(FormError::Compile("the model has no end token".to_owned()));
        };
        let count = u32::try_from(vocabulary.bytes.len()).expect("token ids fit 32 bits");
        let trie = TokTrie::from(&TokRxInfo::new(count, end), &vocabulary.bytes);
        Ok(Environment { trie, encode: vocabulary.encode })
    }
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        (self.encode)(bytes)
    }
}

/// The schema with the request to write no white space.
fn compact(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Object(fields) => fields.clone(),
        // `true` and `false` are schemas too.
        other => return json!({"allOf": [other], "x-guidance": COMPACT.clone()}),
    };
    schema.insert("x-guidance".to_owned(), COMPACT.clone());
    Value::Object(schema)
}

static COMPACT: std::sync::LazyLock<Value> = std::sync::LazyLock::new(
    || json!({"whitespace_flexible": false, "item_separator": ",", "key_separator": ":", "lenient": false}),
);

/// What a keyword holds, for finding the schemas inside it.
enum Inside {
    /// No schema.
    Data,
    /// A schema.
    Schema,
    /// A schema or a list of them.
    Schemas,
    /// Schemas by name.
    Named,
}

/// Keywords that are honoured, or that say nothing about validity.
fn keyword(name: &str) -> Option<Inside> {
    Some(match name {
        "type" | "const" | "enum" | "$ref" | "minItems" | "maxItems" | "required" | "minProperties"
        | "maxProperties" | "minLength" | "maxLength" | "pattern" | "format" | "minimum" | "maximum"
        | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => Inside::Data,
        "$anchor" | "$schema" | "$id" | "id" | "$comment" | "title" | "description" | "default"
        | "readOnly" | "writeOnly" | "examples" | "deprecated" => Inside::Data,
        "additionalProperties" | "additionalItems" => Inside::Schema,
        "items" | "prefixItems" | "anyOf" | "oneOf" | "allOf" => Inside::Schemas,
        "properties" | "patternProperties" | "$defs" | "definitions" => Inside::Named,
        _ => return None,
    })
}

/// Refuses keywords that would not be honoured, wherever they are.
fn check_keywords(schema: &Value, path: &str) -> Result<(), FormError> {
    let Value::Object(fields) = schema else { return Ok(()) };
    for (name, value) in fields {
        let here = format!("{path}/{}", name.replace('~', "~0").replace('/', "~1"));
        match (keyword(name), value) {
            (None, _) => return Err(FormError::Keyword { keyword: name.clone(), path: path.to_owned() }),
            (Some(Inside::Data), _) => {}
            (Some(Inside::Schemas), Value::Array(schemas)) => {
                for (index, schema) in schemas.iter().enumerate() {
                    check_keywords(schema, &format!("{here}/{index}"))?;
                }
            }
            (Some(Inside::Schema | Inside::Schemas), schema) => check_keywords(schema, &here)?,
            (Some(Inside::Named), Value::Object(schemas)) => {
                for (name, schema) in schemas {
                    let name = name.replace('~', "~0").replace('/', "~1");
                    check_keywords(schema, &format!("{here}/{name}"))?;
                }
            }
            (Some(Inside::Named), _) => {}
        }
    }
    Ok(())
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary of single bytes, and one end token.
    fn grammars() -> Grammars {
        let mut bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        bytes.push(Vec::new());
        let encode = Arc::new(|bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).collect());
        Grammars::new(Vocabulary { bytes, end_tokens: vec![256], encode }).unwrap()
    }

    /// Whether `text` can be written from beginning to end, and the answer may end there.
    fn accepts(form: &Form, text: &str) -> bool {
        let mut grammar = grammars().compile(form).unwrap();
        for byte in text.bytes() {
            let mask = grammar.mask().unwrap();
            if !mask.is_allowed(u32::from(byte)) {
                return false;
            }
            grammar.accept(u32::from(byte)).unwrap();
        }
        let may_end = grammar.may_end();
        assert_eq!(
            grammar.mask().unwrap().is_allowed(256),
            may_end,
            "the end token is allowed exactly there"
        );
        may_end
    }

    #[test]
    fn each_form_accepts_what_it_says_and_nothing_else() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
            "additionalProperties": false});
        let check = |form: &Form, yes: &[&str], no: &[&str]| {
            for text in yes {
                assert!(accepts(form, text), "{form:?} refuses {text:?}");
            }
            for text in no {
                assert!(!accepts(form, text), "{form:?} accepts {text:?}");
            }
        };
        check(
            &Form::JsonSchema(schema),
            &[r#"{"a":1}"#, r#"{"a":-12}"#],
            &["{}", r#"{"a": 1}"#, r#"{"a":1.5}"#, r#"{"a":1"#],
        );
        check(&Form::JsonObject, &["{}", r#"{"x":[1,{"y":null}]}"#], &["[]", "1", "{", "{ }"]);
        check(&Form::Regex("[ab]+c".into()), &["abc", "bc"], &["c", "ab", "abcd"]);
        check(
            &Form::Choice(vec!["yes".into(), "no \"way\"".into()]),
            &["yes", "no \"way\""],
            &["ye", "maybe"],
        );
        check(&Form::Grammar("start: \"x\" \"y\"+".into()), &["xy", "xyyy"], &["x", "y"]);
    }

    #[test]
    fn forced_tokens_are_found() {
        let form = Form::JsonSchema(json!({"type": "object", "properties": {"name": {"type": "boolean"}},
            "required": ["name"], "additionalProperties": false}));
        let mut grammar = grammars().compile(&form).unwrap();
        let forced: Vec<u8> = grammar.forced().iter().map(|&token| u8::try_from(token).unwrap()).collect();
        assert_eq!(forced, br#"{"name":"#);
        for &byte in forced.iter().chain(b"t") {
            assert!(!grammar.may_end());
            grammar.accept(u32::from(byte)).unwrap();
        }
        assert_eq!(grammar.forced(), b"rue}".map(u32::from));
        for byte in *b"rue}" {
            grammar.accept(u32::from(byte)).unwrap();
        }
        assert!(grammar.is_over());
    }

    #[test]
    fn what_would_be_ignored_is_refused_with_its_path() {
        let check = |schema: Value, keyword: &str, path: &str| {
            let refused = grammars().compile(&Form::JsonSchema(schema)).unwrap_err();
            assert_eq!(refused, FormError::Keyword { keyword: keyword.into(), path: path.into() });
        };
        check(json!({"not": {}}), "not", "");
        check(json!({"properties": {"a/b": {"uniqueItems": true}}}), "uniqueItems", "/properties/a~1b");
        check(json!({"items": [{}, {"if": true}]}), "if", "/items/1");
        check(json!({"$defs": {"x": {"anyOf": [{"contains": {}}]}}}), "contains", "/$defs/x/anyOf/0");
        // A property may have any name.
        assert!(accepts(
            &Form::JsonSchema(
                json!({"type": "object", "properties": {"not": {"const": 1}}, "required": ["not"],
                "additionalProperties": false})
            ),
            r#"{"not":1}"#
        ));
    }

    #[test]
    fn what_cannot_be_compiled_is_refused_in_one_line() {
        for form in [
            Form::Regex("(".into()),
            Form::Grammar("start: undefined_rule".into()),
            Form::Choice(Vec::new()),
            Form::JsonSchema(json!({"type": "integer", "minimum": 3, "maximum": 2})),
            Form::JsonSchema(json!(false)),
            Form::JsonSchema(json!({"type": "nonsense"})),
        ] {
            let Err(FormError::Compile(reason)) = grammars().compile(&form) else {
                panic!("{form:?} compiled")
            };
            assert!(!reason.is_empty() && !reason.contains('\n'), "{reason:?}");
        }
    }
}
