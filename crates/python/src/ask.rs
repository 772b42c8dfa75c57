//! What is asked, as Python writes it, and the request that it is to the facade.

use std::collections::BTreeMap;

use fornax::{Choice, Definition, Effort, Form, Mirostat, Prompt, Request, Sampling, Text, Thinking, Tools};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::message;

/// What to continue.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Asked {
    Text(String),
    Tokens(Vec<u32>),
    Messages(Vec<Value>),
}

/// How, by the names of the HTTP API. What is absent is neutral.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Options {
    max_tokens: Option<usize>,
    min_tokens: Option<u32>,
    temperature: Option<f32>,
    dynatemp_range: Option<f32>,
    dynatemp_exponent: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    typical_p: Option<f32>,
    top_n_sigma: Option<f32>,
    xtc_probability: Option<f32>,
    xtc_threshold: Option<f32>,
    dry_multiplier: Option<f32>,
    dry_base: Option<f32>,
    dry_allowed_length: Option<u32>,
    dry_penalty_last_n: Option<u32>,
    dry_sequence_breakers: Option<Vec<String>>,
    mirostat: Option<u8>,
    mirostat_tau: Option<f32>,
    mirostat_eta: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    repeat_last_n: Option<u32>,
    logit_bias: BTreeMap<u32, f32>,
    bad_words: Vec<String>,
    banned_tokens: Vec<u32>,
    allowed_tokens: Option<Vec<u32>>,
    seed: Option<u64>,
    stop: Vec<String>,
    ignore_eos: bool,
    logprobs: Option<u32>,
    schema: Option<Value>,
    json_object: bool,
    regex: Option<String>,
    grammar: Option<String>,
    choice: Option<Vec<String>>,
    tools: Vec<Tool>,
    tool_choice: Option<String>,
    parallel_tool_calls: Option<bool>,
    thinking_budget: Option<usize>,
    thinking_effort: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tool {
    name: String,
    #[serde(default)]
    description: Option<String>,
    #[serde(default)]
    parameters: Option<Value>,
    #[serde(default)]
    strict: bool,
}

/// The request that two JSON texts stand for, or what is wrong with them. Texts among the options become tokens of this
/// model.
pub(crate) fn request(asked: &str, options: &str, text: &Text) -> Result<Request, Fault> {
    let asked: Asked =
        serde_json::from_str(asked).map_err(|error| Fault::Wrong(format!("the prompt: {error}")))?;
    let options = options_of(options)?;
    let is_chat = matches!(asked, Asked::Messages(_));
    let prompt = match asked {
        Asked::Text(text) => Prompt::Text { text, special: false },
        Asked::Tokens(tokens) => Prompt::Tokens(tokens),
        Asked::Messages(messages) => Prompt::Chat(message::conversation(messages)?),
    };
    let sampling = options.sampling(text)?;
    let (tools, thinking, form) = (options.tools()?, options.thinking()?, options.form()?);
    if !is_chat && (tools.is_some() || thinking != Thinking::default()) {
        return Err(Fault::Wrong("tools and thinking belong to a chat".to_owned()));
    }
    Ok(Request {
        sampling,
        max_tokens: options.max_tokens,
        stop: options.stop,
        ignore_eos: options.ignore_eos,
        seed: options.seed,
        form,
        tools,
        thinking,
        parts: is_chat,
        ..Request::new(prompt)
    })
}

/// Why there is no request.
pub(crate) enum Fault {
    /// What was given is wrong.
    Wrong(String),
    /// The facade says so.
    Facade(fornax::Error),
}

impl From<String> for Fault {
    fn from(reason: String) -> Fault {
        Fault::Wrong(reason)
    }
}

impl From<fornax::Error> for Fault {
    fn from(error: fornax::Error) -> Fault {
        Fault::Facade(error)
    }
}

/// Reads each option alone first: an error of the whole would not say whose it is.
fn options_of(json: &str) -> Result<Options, String> {
    let wrong = |error: serde_json::Error| format!("the options: {error}");
    let fields: Map<String, Value> = serde_json::from_str(json).map_err(wrong)?;
    for (name, value) in &fields {
        let alone = Map::from_iter([(name.clone(), value.clone())]);
        serde_json::from_value::<Options>(Value::Object(alone))
            .map_err(|error| format!("{name}: {error}"))?;
    }
    serde_json::from_value(Value::Object(fields)).map_err(wrong)
}

/// The tokens of a text among the options.
fn tokens(option: &str, word: &str, text: &Text) -> Result<Vec<u32>, Fault> {
    if word.is_empty() {
        return Err(Fault::Wrong(format!("{option} holds an empty text")));
    }
    Ok(text.tokens(word)?)
}

/// Where repetitions end unless the caller says otherwise, as in the terminal.
const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

impl Options {
    fn sampling(&self, text: &Text) -> Result<Sampling, Fault> {
        let base = Sampling::greedy();
        let mirostat = match self.mirostat {
            None | Some(0) => Mirostat::Off,
            Some(1) => Mirostat::V1,
            Some(2) => Mirostat::V2,
            Some(other) => return Err(Fault::Wrong(format!("mirostat is {other}; wanted 0 (off), 1 or 2"))),
        };
        let dry_multiplier = self.dry_multiplier.unwrap_or(base.dry_multiplier);
        let mut dry_sequence_breakers = Vec::new();
        if dry_multiplier > 0.0 {
            let given = self.dry_sequence_breakers.as_ref();
            // A model without a tokenizer repeats ids, and nothing stands between them.
            let usual: &[&str] = if text.tokenizer().is_some() { &BREAKERS } else { &[] };
            let texts =
                given.map_or_else(|| usual.to_vec(), |given| given.iter().map(String::as_str).collect());
            for breaker in texts {
                dry_sequence_breakers.push(tokens("dry_sequence_breakers", breaker, text)?);
            }
        }
        let mut bad_words: Vec<Vec<u32>> = self.banned_tokens.iter().map(|&token| vec![token]).collect();
        for word in &self.bad_words {
            // At the beginning of a text and behind a space it is different tokens.
            bad_words.push(tokens("bad_words", word, text)?);
            bad_words.push(text.tokens(&format!(" {word}"))?);
        }
        Ok(Sampling {
            temperature: self.temperature.unwrap_or(base.temperature),
            dynatemp_range: self.dynatemp_range.unwrap_or(base.dynatemp_range),
            dynatemp_exponent: self.dynatemp_exponent.unwrap_or(base.dynatemp_exponent),
            top_k: self.top_k.unwrap_or(base.top_k),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            typical_p: self.typical_p.unwrap_or(base.typical_p),
            top_n_sigma: self.top_n_sigma.unwrap_or(base.top_n_sigma),
            xtc_probability: self.xtc_probability.unwrap_or(base.xtc_probability),
            xtc_threshold: self.xtc_threshold.unwrap_or(base.xtc_threshold),
            dry_multiplier,
            dry_base: self.dry_base.unwrap_or(base.dry_base),
            dry_allowed_length: self.dry_allowed_length.unwrap_or(base.dry_allowed_length),
            dry_penalty_last_n: self.dry_penalty_last_n,
            dry_sequence_breakers,
            mirostat,
            mirostat_tau: self.mirostat_tau.unwrap_or(base.mirostat_tau),
            mirostat_eta: self.mirostat_eta.unwrap_or(base.mirostat_eta),
            repetition_penalty: self.repetition_penalty.unwrap_or(base.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(base.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(base.frequency_penalty),
            repeat_last_n: self.repeat_last_n,
            logit_bias: self.logit_bias.iter().map(|(&token, &bias)| (token, bias)).collect(),
            bad_words,
            allowed_token_ids: self.allowed_tokens.clone(),
            min_tokens: self.min_tokens.unwrap_or(0),
            top_logprobs: self.logprobs,
            ..base
        })
    }

    fn form(&self) -> Result<Option<Form>, String> {
        let mut forms = Vec::new();
        forms.extend(self.schema.clone().map(Form::JsonSchema));
        forms.extend(self.json_object.then_some(Form::JsonObject));
        forms.extend(self.regex.clone().map(Form::Regex));
        forms.extend(self.grammar.clone().map(Form::Grammar));
        forms.extend(self.choice.clone().map(Form::Choice));
        match forms.len() {
            0 | 1 => Ok(forms.pop()),
            _ => Err("schema, json_object, regex, grammar and choice exclude each other".to_owned()),
        }
    }

    fn tools(&self) -> Result<Option<Tools>, String> {
        let definitions: Vec<Definition> = self
            .tools
            .iter()
            .map(|Tool { name, description, parameters, strict }| Definition {
                name: name.clone(),
                description: description.clone(),
                parameters: parameters.clone(),
                strict: *strict,
            })
            .collect();
        let choice = match self.tool_choice.as_deref() {
            None | Some("auto") => Choice::Auto,
            Some("none") => Choice::Never,
            Some("required") => Choice::Required,
            Some(name) => Choice::Named(name.to_owned()),
        };
        let tools = Tools::new(&definitions, &choice)
            .map_err(|faults| faults.iter().map(ToString::to_string).collect::<Vec<String>>().join("; "))?;
        Ok(tools.map(|tools| tools.parallel(self.parallel_tool_calls)))
    }

    fn thinking(&self) -> Result<Thinking, String> {
        let effort = match &self.thinking_effort {
            None => None,
            Some(name) => Some(Effort::named(name).ok_or_else(|| {
                format!("thinking_effort is {name:?}; wanted none, minimal, low, medium or high")
            })?),
        };
        Ok(Thinking { effort, budget: self.thinking_budget })
    }
}
