//! What can be wrong with a question, by where it stands: whoever has an API knows the field's name.

use fornax_form::FormError;
use serde_json::Value;

use crate::Unseen;

/// Why a question cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Parts of it are wrong or cannot be had together.
    #[error("{}", sentences(.0))]
    Asked(Vec<Fault>),
    /// The model has no chat template that can be used.
    #[error("{0}")]
    NoTemplate(String),
    /// The model cannot be told of tools, or its calls cannot be read.
    #[error("the chat template {0}")]
    ToolsUnsupported(String),
    /// The arguments of a tool have a schema that cannot be held to.
    #[error("tools: {0}")]
    Form(FormError),
    /// What the answer must look like cannot be had.
    #[error("{field}: {error}")]
    Said {
        /// What the caller calls it.
        field: &'static str,
        /// Why.
        error: FormError,
    },
    /// A picture was not seen, through no fault of its own.
    #[error(transparent)]
    Unseen(#[from] Unseen),
    /// The engine would not take it.
    #[error(transparent)]
    Refused(#[from] fornax_engine::Refusal),
    /// The text side failed.
    #[error(transparent)]
    Text(#[from] fornax_text::Error),
}

fn sentences(faults: &[Fault]) -> String {
    faults.iter().map(ToString::to_string).collect::<Vec<String>>().join("; ")
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{place}: {rule}")]
pub struct Fault {
    /// Where.
    pub place: Place,
    /// What it must be, or why it cannot be.
    pub rule: String,
    /// What it is, where the rule speaks of a value.
    pub got: Option<Value>,
}

impl Fault {
    /// Something that cannot be as it is.
    pub(crate) fn rule(place: Place, rule: impl Into<String>) -> Fault {
        Fault { place, rule: rule.into(), got: None }
    }

    /// A value that breaks its rule.
    pub(crate) fn value(place: Place, rule: impl Into<String>, got: &Value) -> Fault {
        Fault { place, rule: rule.into(), got: Some(got.clone()) }
    }
}

/// A part of a question. In words where nobody has another name for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Place {
    /// The message of that index.
    #[error("message {0}")]
    Message(usize),
    /// All tools together.
    #[error("tools")]
    Tools,
    /// A part of the tool of that index.
    #[error("tool {0}, {1}")]
    Tool(usize, ToolField),
    /// Which tool is demanded.
    #[error("the choice of a tool")]
    Choice,
    /// The name of the tool that is demanded.
    #[error("the tool that is demanded")]
    ChoiceName,
    /// How hard to think.
    #[error("the effort of thinking")]
    Effort,
    /// How many tokens may be thought.
    #[error("the thinking budget")]
    Budget,
}

/// A part of a tool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolField {
    /// Its name.
    #[error("its name")]
    Name,
    /// The schema of its arguments, at a path such as `.properties.a`.
    #[error("its parameters{0}")]
    Parameters(String),
}
