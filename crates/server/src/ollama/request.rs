//! What chat and generate share: options, formats, names.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::{
    error::{ApiError, Fault},
    served::Served,
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
    temperature: Option<f64>,
    #[schema(minimum = -1, maximum = 1_000_000)]
    top_k: Option<i64>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f64>,
    #[schema(minimum = 0, maximum = 1)]
    typical_p: Option<f64>,
    #[schema(minimum = -1, maximum = 1_000_000_000)]
    repeat_last_n: Option<i64>,
    #[schema(exclusive_minimum = 0, maximum = 100)]
    repeat_penalty: Option<f64>,
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f64>,
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f64>,
    #[schema(minimum = 0, maximum = 2)]
    mirostat: Option<u8>,
    #[schema(minimum = 0, maximum = 1000)]
    mirostat_tau: Option<f64>,
    #[schema(minimum = 0, maximum = 1000)]
    mirostat_eta: Option<f64>,
    #[schema(max_items = 16)]
    stop: Option<Vec<String>>,
}

impl OllamaOptions {
    /// Writes them under the names that the OpenAI routes have.
    pub(crate) fn write(&self, served: &Served, body: &mut Map<String, Value>) -> Result<(), ApiError> {
        let context = served.engine.capacity().context;
        if let Some(asked) = self.num_ctx.filter(|&asked| asked > context as u64) {
            let rule = format!("at most {context}, the context that the model was loaded with");
            return Err(ApiError::fault(Fault::value("options.num_ctx", rule, &json!(asked))));
        }
        let limit = self.num_predict.filter(|&count| count >= 0).map(|count| count.max(1));
        let fields = [
            ("max_tokens", json!(limit)),
            ("seed", json!(self.seed)),
            ("temperature", json!(self.temperature)),
            ("top_k", json!(self.top_k)),
            ("top_p", json!(self.top_p)),
            ("min_p", json!(self.min_p)),
            ("typical_p", json!(self.typical_p)),
            ("repeat_last_n", json!(self.repeat_last_n)),
            ("repetition_penalty", json!(self.repeat_penalty)),
            ("presence_penalty", json!(self.presence_penalty)),
            ("frequency_penalty", json!(self.frequency_penalty)),
            ("mirostat", json!(self.mirostat)),
            ("mirostat_tau", json!(self.mirostat_tau)),
            ("mirostat_eta", json!(self.mirostat_eta)),
            ("stop", json!(self.stop.as_ref().filter(|stops| !stops.is_empty()))),
        ];
        let given = fields.into_iter().filter(|(_, value)| !value.is_null());
        body.extend(given.map(|(name, value)| (name.to_owned(), value)));
        Ok(())
    }
}

/// `json`, or a JSON Schema; an empty text for none.
pub(crate) fn response_format(format: Option<&Value>) -> Result<Option<Value>, ApiError> {
    match format {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) if name.is_empty() => Ok(None),
        Some(Value::String(name)) if name == "json" => Ok(Some(json!({"type": "json_object"}))),
        Some(schema @ Value::Object(_)) => {
            Ok(Some(json!({"type": "json_schema", "json_schema": {"name": "format", "schema": schema}})))
        }
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
    /// Writes it under the names that the OpenAI routes have.
    pub(crate) fn write(think: Option<&Think>, body: &mut Map<String, Value>) {
        let effort = match think {
            None => return,
            // Whoever thinks anyway needs no telling.
            Some(Think::Switch(true)) => {
                let variables = json!({"enable_thinking": true, "thinking": true});
                body.insert("chat_template_kwargs".to_owned(), variables);
                return;
            }
            Some(Think::Switch(false)) => "none",
            Some(Think::Effort(ThinkEffort::Low)) => "low",
            Some(Think::Effort(ThinkEffort::Medium)) => "medium",
            Some(Think::Effort(ThinkEffort::High)) => "high",
        };
        body.insert("reasoning_effort".to_owned(), json!(effort));
    }
}

/// Ollama's clients add a tag to names that have none.
pub(crate) fn untagged(model: &str) -> &str {
    model.strip_suffix(":latest").unwrap_or(model)
}
