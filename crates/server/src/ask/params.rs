//! The parameters that chat and completions share, and what the engine makes of them.

use std::collections::BTreeMap;

use fornax_chat::{Ask, Reading};
use fornax_compute::{Mirostat, Sampling};
use fornax_engine::Request;
use fornax_form::Form;
use fornax_text::{Special, StopStrings, Tokenizer};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::{
    app::{random_id, random_seed},
    ask::prepare::Preparing,
    error::{ApiError, Fault},
    shape::Unsupported,
};

/// Where llama.cpp stops to see repetitions, if nothing else is said.
const DRY_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// Biases of one request: they are looked at for each of its tokens.
const BIASES_MAX: usize = 4096;

/// Fields of OpenAI's, vLLM's and llama.cpp's API that would change the answer and are not honoured.
pub(crate) const UNSUPPORTED: &[Unsupported] = &[
    unsupported("audio", &[]),
    unsupported("banned_tokens", &["[]"]),
    unsupported("best_of", &["1"]),
    unsupported("continue_final_message", &["false"]),
    unsupported("add_generation_prompt", &["true"]),
    unsupported("chat_template", &[]),
    unsupported("documents", &["[]"]),
    unsupported("ebnf", &[]),
    unsupported("echo", &["false"]),
    unsupported("enable_thinking", &[]),
    unsupported("function_call", &["\"none\""]),
    unsupported("functions", &["[]"]),
    unsupported("grammar_lazy", &["false"]),
    unsupported("grammar_triggers", &["[]"]),
    unsupported("guided_decoding_backend", &[]),
    unsupported("guided_whitespace_pattern", &[]),
    unsupported("include_stop_str_in_output", &["false"]),
    unsupported("length_penalty", &["1", "1.0"]),
    unsupported("lora", &["[]"]),
    unsupported("max_new_tokens", &[]),
    unsupported("min_keep", &["0"]),
    unsupported("modalities", &["[\"text\"]"]),
    unsupported("n_predict", &[]),
    unsupported("n_probs", &["0"]),
    unsupported("no_repeat_ngram_size", &["0"]),
    unsupported("num_predict", &[]),
    unsupported("parallel_tool_calls", &["true", "false"]),
    unsupported("penalty_last_n", &[]),
    unsupported("prediction", &[]),
    unsupported("reasoning_effort", &["\"none\""]),
    unsupported("reasoning_format", &["\"auto\"", "\"deepseek\""]),
    unsupported("regex", &[]),
    unsupported("return_token_ids", &["false"]),
    unsupported("return_tokens_as_token_ids", &["false"]),
    unsupported("samplers", &[]),
    unsupported("service_tier", &["\"auto\"", "\"default\""]),
    unsupported("skip_special_tokens", &["true"]),
    unsupported("stop_token_ids", &["[]"]),
    unsupported("structural_tag", &[]),
    unsupported("suffix", &["\"\""]),
    unsupported("tfs_z", &["1", "1.0"]),
    unsupported("think", &[]),
    // Those of chats, which completions do not have.
    unsupported("tool_choice", &["\"none\"", "\"auto\""]),
    unsupported("tools", &["[]"]),
    unsupported("truncate_prompt_tokens", &[]),
    unsupported("use_beam_search", &["false"]),
    unsupported("web_search_options", &[]),
];

const fn unsupported(field: &'static str, neutral: &'static [&'static str]) -> Unsupported {
    Unsupported { field, neutral }
}

/// How an answer is chosen.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct Params {
    /// How many answers.
    #[schema(minimum = 1, maximum = 128)]
    pub(crate) n: Option<u32>,
    /// An integer of 64 bits with a sign; it fixes all random numbers.
    pub(crate) seed: Option<i64>,
    /// 0 is greedy; 1 by default.
    #[schema(minimum = 0, maximum = 2)]
    pub(crate) temperature: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) top_p: Option<f32>,
    /// -1 and 0 keep all.
    #[schema(minimum = -1, maximum = 1_000_000)]
    pub(crate) top_k: Option<i32>,
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) min_p: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) typical_p: Option<f32>,
    /// 0 and below keep all.
    #[schema(minimum = -1, maximum = 1000)]
    pub(crate) top_n_sigma: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) xtc_probability: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) xtc_threshold: Option<f32>,
    #[schema(minimum = 0, maximum = 100)]
    pub(crate) dry_multiplier: Option<f32>,
    #[schema(minimum = 1, maximum = 100)]
    pub(crate) dry_base: Option<f32>,
    #[schema(minimum = 1, maximum = 1_000_000)]
    pub(crate) dry_allowed_length: Option<u32>,
    /// -1 looks at everything.
    #[schema(minimum = -1, maximum = 1_000_000_000)]
    pub(crate) dry_penalty_last_n: Option<i64>,
    #[schema(max_items = 64)]
    pub(crate) dry_sequence_breakers: Option<Vec<Word>>,
    /// 0 is off.
    #[schema(minimum = 0, maximum = 2)]
    pub(crate) mirostat: Option<u8>,
    #[schema(minimum = 0, maximum = 1000)]
    pub(crate) mirostat_tau: Option<f32>,
    #[schema(minimum = 0, maximum = 1000)]
    pub(crate) mirostat_eta: Option<f32>,
    #[schema(minimum = 0, maximum = 2)]
    pub(crate) dynatemp_range: Option<f32>,
    #[schema(minimum = 0, maximum = 100)]
    pub(crate) dynatemp_exponent: Option<f32>,
    #[schema(exclusive_minimum = 0, maximum = 100)]
    pub(crate) repetition_penalty: Option<f32>,
    /// llama.cpp's name of repetition_penalty.
    #[schema(exclusive_minimum = 0, maximum = 100)]
    pub(crate) repeat_penalty: Option<f32>,
    /// How many tokens back the penalties look; -1 looks at everything.
    #[schema(minimum = -1, maximum = 1_000_000_000)]
    pub(crate) repeat_last_n: Option<i64>,
    #[schema(minimum = -2, maximum = 2)]
    pub(crate) presence_penalty: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Up to 4096 token ids and what is added to their logits.
    pub(crate) logit_bias: Option<BTreeMap<String, Bias>>,
    /// No end before this many tokens.
    #[schema(minimum = 0, maximum = 1_000_000_000)]
    pub(crate) min_tokens: Option<u32>,
    /// Go on behind the model's own end.
    pub(crate) ignore_eos: Option<bool>,
    #[schema(min_items = 1, max_items = 1_000_000)]
    pub(crate) allowed_token_ids: Option<Vec<u32>>,
    /// Never written.
    #[schema(max_items = 256)]
    pub(crate) bad_words: Option<Vec<Word>>,
    /// A string of 1 to 4096 characters, or up to 16 of them.
    pub(crate) stop: Option<Stop>,
    /// The answer is a match of this regular expression.
    #[schema(min_length = 1, max_length = 65536)]
    pub(crate) guided_regex: Option<String>,
    /// The answer is a sentence of this grammar, in Lark's syntax or llama.cpp's.
    #[schema(min_length = 1, max_length = 1_048_576)]
    pub(crate) guided_grammar: Option<String>,
    /// llama.cpp's name of guided_grammar; an empty one is none.
    #[schema(max_length = 1_048_576)]
    pub(crate) grammar: Option<String>,
    /// llama.cpp's name of guided_json.
    pub(crate) json_schema: Option<Value>,
    /// The answer is one of these.
    #[schema(min_items = 1, max_items = 4096)]
    pub(crate) guided_choice: Option<Vec<Word>>,
    /// The answer is valid against this JSON Schema, or the text of one.
    pub(crate) guided_json: Option<Value>,
    /// The answer has one of the forms of vLLM: `json`, `json_object`, `regex`, `choice` or `grammar` (in Lark's syntax or llama.cpp's).
    pub(crate) structured_outputs: Option<StructuredOutputs>,
    /// How many of the most likely tokens come with the log-probability of each token of the prompt; not in streams.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) prompt_logprobs: Option<u32>,
    /// Smaller is sooner.
    #[schema(minimum = -128, maximum = 127)]
    pub(crate) priority: Option<i8>,
    /// Computed prefixes are shared only under the same salt.
    #[schema(min_length = 1, max_length = 256)]
    pub(crate) cache_salt: Option<String>,
    /// False computes the whole prompt: under a salt that no other request has.
    pub(crate) cache_prompt: Option<bool>,
}

/// What vLLM calls a form.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct StructuredOutputs {
    /// A JSON Schema, or the text of one.
    json: Option<Value>,
    json_object: Option<bool>,
    #[schema(min_length = 1, max_length = 65536)]
    regex: Option<String>,
    #[schema(min_items = 1, max_items = 4096)]
    choice: Option<Vec<Word>>,
    #[schema(min_length = 1, max_length = 1_048_576)]
    grammar: Option<String>,
    /// Not read here.
    #[schema(value_type = Option<Object>)]
    structural_tag: Option<Value>,
    /// Not read here: JSON is written compactly.
    whitespace_pattern: Option<String>,
    /// Not read here: what a schema says of further properties holds.
    disable_additional_properties: Option<bool>,
}

impl StructuredOutputs {
    fn forms(&self, forms: &mut Vec<(&'static str, Form)>) -> Result<(), ApiError> {
        let unread = [
            ("structured_outputs.structural_tag", self.structural_tag.is_some()),
            ("structured_outputs.whitespace_pattern", self.whitespace_pattern.is_some()),
            (
                "structured_outputs.disable_additional_properties",
                self.disable_additional_properties == Some(true),
            ),
        ];
        if let Some((field, _)) = unread.iter().find(|(_, given)| *given) {
            return Err(ApiError::fault(Fault::rule(*field, "is not supported by this server")));
        }
        if let Some(schema) = &self.json {
            forms.push(("structured_outputs.json", schema_form("structured_outputs.json", schema)?));
        }
        if self.json_object == Some(true) {
            forms.push(("structured_outputs.json_object", Form::JsonObject));
        }
        if let Some(regex) = &self.regex {
            forms.push(("structured_outputs.regex", Form::Regex(regex.clone())));
        }
        if let Some(choices) = &self.choice {
            let choices = choices.iter().map(|choice| choice.0.clone()).collect();
            forms.push(("structured_outputs.choice", Form::Choice(choices)));
        }
        if let Some(grammar) = &self.grammar {
            forms.push(("structured_outputs.grammar", Form::Grammar(grammar.clone())));
        }
        Ok(())
    }
}

/// A JSON Schema, or the text of one.
fn schema_form(field: &str, schema: &Value) -> Result<Form, ApiError> {
    let rule = "a JSON Schema, or the text of one";
    let wrong = || ApiError::fault(Fault::value(field, rule, schema));
    match schema {
        Value::String(text) => serde_json::from_str(text).map(Form::JsonSchema).map_err(|_| wrong()),
        Value::Object(_) => Ok(Form::JsonSchema(schema.clone())),
        _ => Err(wrong()),
    }
}

/// A string of 1 to 4096 characters.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(min_length = 1, max_length = 4096)]
pub(crate) struct Word(pub(crate) String);

/// A number from -100 to 100.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[schema(minimum = -100, maximum = 100)]
pub(crate) struct Bias(f32);

/// A string of 1 to 4096 characters, or up to 16 of them.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Stop {
    One(Word),
    Many(Words),
}

/// Up to 16 strings of 1 to 4096 characters.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(max_items = 16)]
pub(crate) struct Words(Vec<Word>);

/// Characters of a stop string; the bound of [`Word`] for APIs whose strings have another type.
const WORD_CHARS_MAX: usize = 4096;

impl Stop {
    /// Stop strings of an API that calls them `field`; no strings are none.
    pub(crate) fn of(field: &str, stops: Option<&[String]>, faults: &mut Vec<Fault>) -> Option<Stop> {
        let stops = stops.filter(|stops| !stops.is_empty())?;
        for (index, stop) in stops.iter().enumerate() {
            if !(1..=WORD_CHARS_MAX).contains(&stop.chars().count()) {
                let rule = format!("a string of 1 to {WORD_CHARS_MAX} characters");
                faults.push(Fault::value(format!("{field}[{index}]"), rule, &json!(stop)));
            }
        }
        Some(Stop::Many(Words(stops.iter().cloned().map(Word).collect())))
    }
}

/// How the answer must look.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ResponseFormat {
    r#type: FormatType,
    /// With type json_schema.
    json_schema: Option<JsonSchema>,
    /// With type json_object, a JSON Schema of it, as llama.cpp and others take one.
    schema: Option<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum FormatType {
    Text,
    JsonObject,
    JsonSchema,
}

/// A schema with its name.
#[derive(Debug, Deserialize, ToSchema)]
struct JsonSchema {
    #[expect(dead_code, reason = "clients must send it, and it changes nothing")]
    #[schema(min_length = 1, max_length = 256)]
    name: Option<String>,
    /// A JSON Schema object.
    #[schema(value_type = Object)]
    schema: Value,
    #[expect(dead_code, reason = "every schema is followed exactly here")]
    strict: Option<bool>,
}

/// What of a request is not in [`Params`].
pub(crate) struct Wanted {
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_tokens: Option<usize>,
    /// What the answer must look like, and the field that says so.
    pub(crate) form: Option<(&'static str, Form)>,
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) starts_text: bool,
    pub(crate) reading: Option<Reading>,
}

impl Params {
    /// The question for the engine. Compiles a form where one is asked for: not for an async thread.
    pub(crate) fn ask(&self, served: &Preparing<'_>, wanted: Wanted) -> Result<Ask, ApiError> {
        match served.made() {
            None => self.ask_as_said(served, wanted),
            Some(made) => {
                let max_tokens = wanted.max_tokens.or(made.max_tokens());
                made.params(self).ask_as_said(served, Wanted { max_tokens, ..wanted })
            }
        }
    }

    /// These, and where they say nothing, others.
    pub(crate) fn over(&self, others: &Params) -> Params {
        let penalty = self.repeat_penalty.is_none().then_some(others.repetition_penalty).flatten();
        Params {
            seed: self.seed.or(others.seed),
            temperature: self.temperature.or(others.temperature),
            top_k: self.top_k.or(others.top_k),
            top_p: self.top_p.or(others.top_p),
            min_p: self.min_p.or(others.min_p),
            typical_p: self.typical_p.or(others.typical_p),
            repeat_last_n: self.repeat_last_n.or(others.repeat_last_n),
            repetition_penalty: self.repetition_penalty.or(penalty),
            presence_penalty: self.presence_penalty.or(others.presence_penalty),
            frequency_penalty: self.frequency_penalty.or(others.frequency_penalty),
            mirostat: self.mirostat.or(others.mirostat),
            mirostat_tau: self.mirostat_tau.or(others.mirostat_tau),
            mirostat_eta: self.mirostat_eta.or(others.mirostat_eta),
            stop: self.stop.clone().or_else(|| others.stop.clone()),
            ..self.clone()
        }
    }

    fn ask_as_said(&self, served: &Preparing<'_>, wanted: Wanted) -> Result<Ask, ApiError> {
        let form = wanted.form;
        if let (Some((field, _)), Some(true)) = (&form, self.ignore_eos) {
            let rule = format!("cannot be combined with {field}, whose end it would ignore");
            return Err(ApiError::fault(Fault::rule("ignore_eos", rule)));
        }
        let grammar = match &form {
            None => None,
            Some((field, form)) => {
                let compiled = served.compile(form);
                Some(compiled.map_err(|error| ApiError::form(field, &error))?)
            }
        };
        let mut sampling = self.sampling(&served.tokenizer)?;
        sampling.top_logprobs = wanted.top_logprobs;
        let capacity = served.engine.capacity();
        // The engine refuses what does not fit, with its numbers.
        let left = capacity.context.saturating_sub(wanted.prompt.len()).max(1);
        let max_tokens = wanted.max_tokens.unwrap_or(left);
        if self.min_tokens.is_some_and(|least| least as usize > max_tokens) {
            return Err(ApiError::fault(Fault::rule("min_tokens", "is more than max_tokens")));
        }
        let request = Request {
            seed: self.seed.map_or_else(random_seed, i64::cast_unsigned),
            grammar,
            prompt_logprobs: self.prompt_logprobs,
            choices: self.n.unwrap_or(1),
            priority: self.priority.unwrap_or(0),
            salt: match self.cache_prompt {
                Some(false) => random_id().into(),
                _ => self.cache_salt.as_deref().unwrap_or_default().into(),
            },
            ..Request::new(wanted.prompt, max_tokens, sampling)
        };
        Ok(Ask {
            stops: self.stops()?,
            starts_text: wanted.starts_text,
            reading: wanted.reading,
            ..Ask::new(request)
        })
    }

    /// The stop strings, by their index.
    pub(crate) fn stop_words(&self) -> Vec<String> {
        match &self.stop {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop.0.clone()],
            Some(Stop::Many(stops)) => stops.0.iter().map(|stop| stop.0.clone()).collect(),
        }
    }

    fn stops(&self) -> Result<StopStrings, ApiError> {
        let stops: &[Word] = match &self.stop {
            None => &[],
            Some(Stop::One(stop)) => std::slice::from_ref(stop),
            Some(Stop::Many(stops)) => &stops.0,
        };
        Ok(StopStrings::new(stops.iter().map(|stop| stop.0.as_str()))?)
    }

    /// What the answer must look like, and the field that says so. A form of the caller's stands for `response_format`.
    pub(crate) fn form(
        &self,
        format: Option<&ResponseFormat>,
        given: Option<Form>,
    ) -> Result<Option<(&'static str, Form)>, ApiError> {
        let mut forms: Vec<(&'static str, Form)> =
            given.into_iter().map(|form| ("response_format", form)).collect();
        if let Some(format) = format {
            if format.schema.is_some() && format.r#type != FormatType::JsonObject {
                let rule = "belongs to type json_object";
                return Err(ApiError::fault(Fault::rule("response_format.schema", rule)));
            }
            match (format.r#type, &format.json_schema) {
                (FormatType::Text, None) => {}
                (FormatType::JsonObject, None) => forms.push(match &format.schema {
                    None => ("response_format", Form::JsonObject),
                    Some(schema) => {
                        ("response_format.schema", schema_form("response_format.schema", schema)?)
                    }
                }),
                (FormatType::JsonSchema, Some(schema)) => {
                    forms.push(("response_format", Form::JsonSchema(schema.schema.clone())));
                }
                (FormatType::JsonSchema, None) => {
                    return Err(ApiError::fault(Fault::rule("response_format.json_schema", "is required")));
                }
                (_, Some(_)) => {
                    let rule = "belongs to type json_schema";
                    return Err(ApiError::fault(Fault::rule("response_format.json_schema", rule)));
                }
            }
        }
        if let Some(regex) = &self.guided_regex {
            forms.push(("guided_regex", Form::Regex(regex.clone())));
        }
        if let Some(grammar) = &self.guided_grammar {
            forms.push(("guided_grammar", Form::Grammar(grammar.clone())));
        }
        if let Some(grammar) = self.grammar.as_ref().filter(|grammar| !grammar.is_empty()) {
            forms.push(("grammar", Form::Grammar(grammar.clone())));
        }
        if let Some(choices) = &self.guided_choice {
            let choices = choices.iter().map(|choice| choice.0.clone()).collect();
            forms.push(("guided_choice", Form::Choice(choices)));
        }
        if let Some(schema) = &self.guided_json {
            forms.push(("guided_json", schema_form("guided_json", schema)?));
        }
        if let Some(schema) = &self.json_schema {
            forms.push(("json_schema", schema_form("json_schema", schema)?));
        }
        if let Some(outputs) = &self.structured_outputs {
            outputs.forms(&mut forms)?;
        }
        if let [(first, _), (second, _), ..] = &forms[..] {
            return Err(ApiError::fault(Fault::rule(*second, format!("cannot be combined with {first}"))));
        }
        Ok(forms.pop())
    }

    fn sampling(&self, tokenizer: &Tokenizer) -> Result<Sampling, ApiError> {
        let neutral = Sampling::default();
        let encode = |text: &str| tokenizer.encode(text, Special::AsText);
        let dry_multiplier = self.dry_multiplier.unwrap_or(0.0);
        let breakers: Vec<&str> = match &self.dry_sequence_breakers {
            Some(words) => words.iter().map(|word| word.0.as_str()).collect(),
            None if dry_multiplier > 0.0 => DRY_BREAKERS.to_vec(),
            None => Vec::new(),
        };
        let mut bad_words = Vec::new();
        for word in self.bad_words.iter().flatten() {
            // At the start of a text and in its middle words are different tokens.
            bad_words.push(encode(&word.0)?);
            bad_words.push(encode(&format!(" {}", word.0))?);
        }
        bad_words.retain(|word| !word.is_empty());
        let positive = |value: i64| u32::try_from(value).ok();
        Ok(Sampling {
            temperature: self.temperature.unwrap_or(1.0),
            dynatemp_range: self.dynatemp_range.unwrap_or(neutral.dynatemp_range),
            dynatemp_exponent: self.dynatemp_exponent.unwrap_or(neutral.dynatemp_exponent),
            top_k: self.top_k.map_or(0, |count| u32::try_from(count).unwrap_or(0)),
            top_p: self.top_p.unwrap_or(neutral.top_p),
            min_p: self.min_p.unwrap_or(neutral.min_p),
            typical_p: self.typical_p.unwrap_or(neutral.typical_p),
            top_n_sigma: self.top_n_sigma.unwrap_or(0.0).max(0.0),
            xtc_probability: self.xtc_probability.unwrap_or(neutral.xtc_probability),
            xtc_threshold: self.xtc_threshold.unwrap_or(neutral.xtc_threshold),
            dry_multiplier,
            dry_base: self.dry_base.unwrap_or(neutral.dry_base),
            dry_allowed_length: self.dry_allowed_length.unwrap_or(neutral.dry_allowed_length),
            dry_penalty_last_n: self.dry_penalty_last_n.and_then(positive),
            dry_sequence_breakers: breakers.into_iter().map(encode).collect::<Result<_, _>>()?,
            mirostat: match self.mirostat.unwrap_or(0) {
                0 => Mirostat::Off,
                1 => Mirostat::V1,
                _ => Mirostat::V2,
            },
            mirostat_tau: self.mirostat_tau.unwrap_or(neutral.mirostat_tau),
            mirostat_eta: self.mirostat_eta.unwrap_or(neutral.mirostat_eta),
            repetition_penalty: self.repetition_penalty()?.unwrap_or(neutral.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(neutral.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(neutral.frequency_penalty),
            repeat_last_n: self.repeat_last_n.and_then(positive),
            logit_bias: self.biases()?,
            bad_words,
            allowed_token_ids: self.allowed_token_ids.clone(),
            min_tokens: self.min_tokens.unwrap_or(0),
            end_tokens: match self.ignore_eos {
                Some(true) => Vec::new(),
                _ => tokenizer.end_tokens().to_vec(),
            },
            top_logprobs: None,
        })
    }

    /// By either of its names.
    fn repetition_penalty(&self) -> Result<Option<f32>, ApiError> {
        match (self.repetition_penalty, self.repeat_penalty) {
            (Some(one), Some(other)) if one != other => {
                Err(ApiError::fault(Fault::rule("repeat_penalty", "differs from repetition_penalty")))
            }
            (one, other) => Ok(one.or(other)),
        }
    }

    fn biases(&self) -> Result<Vec<(u32, f32)>, ApiError> {
        if self.logit_bias.as_ref().is_some_and(|biases| biases.len() > BIASES_MAX) {
            let rule = format!("an object of at most {BIASES_MAX} token ids");
            return Err(ApiError::fault(Fault::value("logit_bias", rule, &json!({}))));
        }
        let pairs = self.logit_bias.iter().flatten();
        pairs
            .map(|(token, bias)| match token.parse() {
                Ok(token) => Ok((token, bias.0)),
                Err(_) => Err(ApiError::fault(Fault::value(
                    "logit_bias",
                    "an object whose keys are token ids",
                    &json!({}),
                ))),
            })
            .collect()
    }
}
