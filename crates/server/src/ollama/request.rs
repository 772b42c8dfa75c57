//! What chat and generate share: options, formats, names.

use fornax_chat::{Effort, Thinking};
use fornax_form::Form;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::{
    ask::{
        chat::Names,
        params::{Params, Stop},
    },
    error::{ApiError, Fault},
    served::Served,
};

/// What Ollama calls the parts of a question.
pub(crate) const NAMES: Names = Names {
    tool: ".function",
    parameters: "parameters",
    choice: "tools",
    choice_name: "tools",
    effort: "think",
    budget: "think",
    stop: "options.stop",
    messages: "messages",
};

/// How an answer is chosen. What is not listed here changes nothing in this server: how a model is loaded is decided
/// when it starts.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct OllamaOptions {
    /// Must fit into the context that the model was loaded with.
    #[schema(minimum = 0)]
    num_ctx: Option<u64>,
    /// At most so many tokens follow; below 0, what is left of the context.
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
    pub(crate) fn params(&self, served: &Served) -> Result<(Params, Option<usize>), ApiError> {
        let context = served.engine.capacity().context;
        if let Some(asked) = self.num_ctx.filter(|&asked| asked > context as u64) {
            let rule = format!("at most {context}, the context that the model was loaded with");
            return Err(ApiError::fault(Fault::value("options.num_ctx", rule, &json!(asked))));
        }
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

/// Ollama's clients add a tag to names that have none.
pub(crate) fn untagged(model: &str) -> &str {
    model.strip_suffix(":latest").unwrap_or(model)
}
