//! What chat and generate share: options, formats, names.

use std::time::Duration;

use fornax_chat::{Content, Effort, Thinking};
use fornax_form::Form;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::{
    ask::{
        chat::Names,
        image::{self, Blind},
        params::{Params, Stop},
    },
    error::{ApiError, Fault},
    models::FOR_EVER,
};

/// What Ollama calls the parts of a question.
pub(crate) const NAMES: Names = Names {
    tool: ".function",
    parameters: "parameters",
    choice: "tools",
    choice_name: "tools",
    effort: "think",
    budget: "think",
    messages: "messages",
};

/// How an answer is chosen. What is not listed here changes nothing in this server: how a model is loaded is decided
/// when it starts.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct OllamaOptions {
    /// Taken: the context is that which the model was loaded with, and what does not fit into it is refused.
    #[schema(minimum = 0)]
    #[expect(dead_code, reason = "what matters is whether the request fits")]
    num_ctx: Option<u64>,
    /// At most this many tokens follow; below 0, what is left of the context.
    #[schema(minimum = -2, maximum = 1_000_000_000)]
    num_predict: Option<i64>,
    seed: Option<i64>,
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f32>,
    #[schema(minimum = -1, maximum = 1_000_000)]
    top_k: Option<i32>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    typical_p: Option<f32>,
    #[schema(minimum = -1, maximum = 1_000_000_000)]
    repeat_last_n: Option<i64>,
    #[schema(exclusive_minimum = 0, maximum = 100)]
    repeat_penalty: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f32>,
    #[schema(minimum = 0, maximum = 2)]
    mirostat: Option<u8>,
    #[schema(minimum = 0, maximum = 1000)]
    mirostat_tau: Option<f32>,
    #[schema(minimum = 0, maximum = 1000)]
    mirostat_eta: Option<f32>,
    #[schema(max_items = 16)]
    stop: Option<Vec<String>>,
}

impl OllamaOptions {
    /// As every API has them; with them, how many tokens may follow.
    pub(crate) fn params(&self) -> Result<(Params, Option<usize>), ApiError> {
        let mut faults = Vec::new();
        let params = Params {
            seed: self.seed,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            repeat_last_n: self.repeat_last_n,
            repetition_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            mirostat: self.mirostat,
            mirostat_tau: self.mirostat_tau,
            mirostat_eta: self.mirostat_eta,
            stop: Stop::of("options.stop", self.stop.as_deref(), &mut faults),
            ..Params::default()
        };
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let limit = self.num_predict.filter(|&count| count >= 0).map(|count| count.max(1));
        Ok((params, limit.and_then(|count| usize::try_from(count).ok())))
    }
}

/// Pictures of a message or a prompt.
pub(crate) fn images(
    images: Option<&[String]>,
    field: &str,
    blind: Blind,
    faults: &mut Vec<Fault>,
) -> Vec<Content> {
    let images = images.unwrap_or_default();
    if let (Some(reason), false) = (blind, images.is_empty()) {
        faults.push(Fault::rule(field, reason));
        return Vec::new();
    }
    let images = images.iter().enumerate();
    let read =
        |(at, data): (usize, &String)| image::of_base64(data, &format!("{field}[{at}]"), blind, faults);
    images.filter_map(read).map(Content::Image).collect()
}

/// `json`, or a JSON Schema; an empty text for none.
pub(crate) fn form(format: Option<&Value>) -> Result<Option<(&'static str, Form)>, ApiError> {
    match format {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) if name.is_empty() => Ok(None),
        Some(Value::String(name)) if name == "json" => Ok(Some(("format", Form::JsonObject))),
        Some(schema @ Value::Object(_)) => Ok(Some(("format", Form::JsonSchema(schema.clone())))),
        Some(other) => {
            Err(ApiError::fault(Fault::value("format", "\"json\" or a JSON Schema object", other)))
        }
    }
}

/// `true`, `false`, or how hard: `low`, `medium`, `high`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Think {
    Switch(bool),
    Effort(ThinkEffort),
}

#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ThinkEffort {
    Low,
    Medium,
    High,
}

impl Think {
    /// How hard to think, and what the template is told of it.
    pub(crate) fn apply(think: Option<&Think>) -> (Thinking, Map<String, Value>) {
        let mut variables = Map::new();
        let effort = match think {
            None => None,
            // Whoever thinks anyway needs no telling.
            Some(Think::Switch(true)) => {
                variables.extend(["enable_thinking", "thinking"].map(|name| (name.to_owned(), json!(true))));
                None
            }
            Some(Think::Switch(false)) => Some(Effort::None),
            Some(Think::Effort(ThinkEffort::Low)) => Some(Effort::Low),
            Some(Think::Effort(ThinkEffort::Medium)) => Some(Effort::Medium),
            Some(Think::Effort(ThinkEffort::High)) => Some(Effort::High),
        };
        (Thinking { effort, budget: None }, variables)
    }
}

/// How many alternatives of each token are told, if tokens are.
pub(crate) fn scored(logprobs: Option<bool>, top: Option<u32>) -> Result<Option<u32>, ApiError> {
    match (logprobs, top) {
        (Some(true), top) => Ok(Some(top.unwrap_or(0))),
        (_, Some(1..)) => Err(ApiError::fault(Fault::rule("top_logprobs", "needs logprobs"))),
        _ => Ok(None),
    }
}

/// How long the model stays loaded without a request: seconds, or a text such as `5m` or `1h30m`; below 0 for ever.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum KeepAlive {
    Seconds(f64),
    Text(String),
}

impl KeepAlive {
    /// The time, or what is wrong with it.
    pub(crate) fn stays(keep: Option<&KeepAlive>) -> Result<Option<Duration>, ApiError> {
        let Some(keep) = keep else { return Ok(None) };
        let seconds = match keep {
            KeepAlive::Seconds(seconds) => Some(*seconds),
            KeepAlive::Text(text) => seconds_of(text),
        };
        let wrong = || {
            let rule = "must be seconds, or a duration such as 5m or 1h30m";
            ApiError::fault(Fault::rule("keep_alive", rule))
        };
        let seconds = seconds.filter(|seconds| seconds.is_finite()).ok_or_else(wrong)?;
        let stays =
            if seconds < 0.0 { FOR_EVER } else { Duration::try_from_secs_f64(seconds).unwrap_or(FOR_EVER) };
        Ok(Some(stays.min(FOR_EVER)))
    }
}

/// A duration as Go writes it: numbers with units, or one without.
fn seconds_of(text: &str) -> Option<f64> {
    if let Ok(seconds) = text.parse::<f64>() {
        return Some(seconds);
    }
    let (sign, mut rest) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, units) = rest.split_at(end);
        let end = units.find(|c: char| c.is_ascii_digit()).unwrap_or(units.len());
        let (unit, more) = units.split_at(end);
        let size = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "\u{b5}s" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        seconds += number.parse::<f64>().ok()? * size;
        rest = more;
    }
    (!text.is_empty()).then_some(sign * seconds)
}

/// Ollama's clients add a tag to names that have none.
pub(crate) fn untagged(model: &str) -> &str {
    model.strip_suffix(":latest").unwrap_or(model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_writes_them() {
        let check = |text: &str, wanted: Option<f64>| assert_eq!(seconds_of(text), wanted, "{text:?}");
        check("5m", Some(300.0));
        check("1h30m", Some(5400.0));
        check("1.5h", Some(5400.0));
        check("250ms", Some(0.25));
        check("10", Some(10.0));
        check("0", Some(0.0));
        check("-1", Some(-1.0));
        check("-1m", Some(-60.0));
        for wrong in ["", "m", "5 m", "5x", "h5", "5m6"] {
            check(wrong, None);
        }
    }
}
