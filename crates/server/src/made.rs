//! A model that a client made of one that is served: a name, and what a question to it begins with. It has no weights
//! of its own.

use std::sync::Arc;

use fornax_chat::{Message, Role};
use fornax_text::ChatTemplate;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use utoipa::ToSchema;

use crate::{
    ask::params::Params,
    error::{ApiError, Fault},
    ollama::request::OllamaOptions,
    shape,
};

/// How a model is described, and kept.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub(crate) struct Description {
    pub(crate) name: String,
    /// The model that is served, or one of its adapters.
    pub(crate) from: String,
    /// What a conversation begins with that has no such message of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) system: Option<String>,
    /// In the place of the model's own chat template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) template: Option<String>,
    /// Options of Ollama's, for requests that do not say them.
    #[serde(default)]
    pub(crate) parameters: Map<String, Value>,
    /// What every conversation begins with.
    #[serde(default)]
    pub(crate) messages: Vec<MadeMessage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) license: Option<Value>,
    /// When it was made, in seconds since 1970.
    pub(crate) created: u64,
}

/// One message of those before.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
pub(crate) struct MadeMessage {
    /// system, user or assistant.
    pub(crate) role: MadeRole,
    pub(crate) content: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MadeRole {
    System,
    User,
    Assistant,
}

impl MadeRole {
    pub(crate) fn name(self) -> &'static str {
        Role::from(self).name()
    }
}

impl From<MadeRole> for Role {
    fn from(role: MadeRole) -> Role {
        match role {
            MadeRole::System => Role::System,
            MadeRole::User => Role::User,
            MadeRole::Assistant => Role::Assistant,
        }
    }
}

/// The same, understood.
#[derive(Debug)]
pub(crate) struct MadeModel {
    pub(crate) told: Description,
    template: Option<Result<ChatTemplate, fornax_text::Error>>,
    params: Params,
    max_tokens: Option<usize>,
}

impl PartialEq for MadeModel {
    fn eq(&self, other: &MadeModel) -> bool {
        self.told == other.told
    }
}

impl Eq for MadeModel {}

impl MadeModel {
    /// Understands a description, or says what is wrong with it.
    pub(crate) fn new(told: Description) -> Result<Arc<MadeModel>, ApiError> {
        let mut faults = Vec::new();
        let parameters = Value::Object(told.parameters.clone());
        let options = shape::part::<OllamaOptions>(&parameters, "parameters", &mut faults);
        let template = told.template.as_deref().map(ChatTemplate::new);
        let unread = match (&template, &told.template) {
            (Some(Err(error)), _) => Some(error.to_string()),
            // Go's may be read as Jinja, and say something else.
            (Some(Ok(_)), Some(text)) if !text.contains("messages") => {
                Some("it writes no messages".to_owned())
            }
            _ => None,
        };
        if let Some(reason) = unread {
            let rule =
                format!("must be a chat template in Jinja, as models carry one, not in Go's: {reason}");
            faults.push(Fault::rule("template", rule));
        }
        let (Some(options), true) = (options, faults.is_empty()) else {
            return Err(ApiError::faults(faults));
        };
        let (params, max_tokens) = options.params()?;
        Ok(Arc::new(MadeModel { told, template, params, max_tokens }))
    }

    /// Tells it from others, and from what it was made of, whose files have this digest.
    pub(crate) fn digest(&self, files: &str) -> String {
        let told = serde_json::to_vec(&self.told).expect("descriptions are JSON");
        let digest = Sha256::new().chain_update(files).chain_update(told).finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Its options, a line each.
    pub(crate) fn parameters(&self) -> Vec<String> {
        let each = self.told.parameters.iter().flat_map(|(name, value)| match value {
            Value::Array(values) => values.iter().map(|value| format!("{name} {value}")).collect(),
            value => vec![format!("{name} {value}")],
        });
        each.collect()
    }

    /// The same as Ollama's users write it.
    pub(crate) fn modelfile(&self) -> String {
        let told = &self.told;
        let mut lines = vec![format!("FROM {}", told.from)];
        lines.extend(told.template.iter().map(|text| format!("TEMPLATE \"\"\"{text}\"\"\"")));
        lines.extend(told.system.iter().map(|text| format!("SYSTEM \"\"\"{text}\"\"\"")));
        lines.extend(self.parameters().iter().map(|line| format!("PARAMETER {line}")));
        let message = |own: &MadeMessage| format!("MESSAGE {} \"\"\"{}\"\"\"", own.role.name(), own.content);
        lines.extend(told.messages.iter().map(message));
        lines.join("\n") + "\n"
    }

    /// Its own chat template.
    pub(crate) fn template(&self) -> Option<Result<&ChatTemplate, &fornax_text::Error>> {
        self.template.as_ref().map(Result::as_ref)
    }

    /// What a request asks for, with its own words for what the request does not say.
    pub(crate) fn params(&self, asked: &Params) -> Params {
        asked.over(&self.params)
    }

    pub(crate) fn max_tokens(&self) -> Option<usize> {
        self.max_tokens
    }

    /// Begins a conversation with its own messages. Instructions of the request's own stay the first and take the
    /// place of its own.
    pub(crate) fn begin(&self, messages: &mut Vec<Message>) {
        let has_system = messages.first().is_some_and(|first| first.role == Role::System);
        let own = self.told.messages.iter().map(|own| Message::new(own.role.into(), own.content.as_str()));
        let at = usize::from(has_system);
        messages.splice(at..at, own);
        if let (Some(system), false) = (&self.told.system, has_system) {
            messages.insert(0, Message::system(system));
        }
    }
}
