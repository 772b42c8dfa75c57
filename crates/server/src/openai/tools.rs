//! Tools as OpenAI's clients describe them.

use fornax_chat::{Choice, Definition};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A function that the model may call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct ToolBody {
    #[expect(dead_code, reason = "there is only one type")]
    r#type: ToolType,
    pub(crate) function: Function,
}

#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToolType {
    Function,
}

/// What a tool is.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub(crate) struct Function {
    /// Letters, digits, `_`, `-` and `.`.
    #[schema(min_length = 1, max_length = 128)]
    pub(crate) name: String,
    #[schema(max_length = 65536)]
    pub(crate) description: Option<String>,
    /// The JSON Schema of its arguments, an object's; without it there are none.
    #[schema(value_type = Option<Object>)]
    pub(crate) parameters: Option<Value>,
    /// Whether arguments follow the schema by construction; those of a call that is demanded do in any case. Such a call
    /// ends the answer, unless parallel_tool_calls is true.
    pub(crate) strict: Option<bool>,
}

impl Function {
    pub(crate) fn definition(&self) -> Definition {
        Definition {
            name: self.name.clone(),
            description: self.description.clone(),
            parameters: self.parameters.clone(),
            strict: self.strict == Some(true),
        }
    }
}

/// `none`, `auto`, `required`, or {type: function, function: {name}}.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum ToolChoiceBody {
    Mode(Mode),
    Named(Named),
}

impl ToolChoiceBody {
    pub(crate) fn choice(&self) -> Choice {
        match self {
            ToolChoiceBody::Mode(mode) => mode.choice(),
            ToolChoiceBody::Named(named) => Choice::Named(named.function.name.clone()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    None,
    Auto,
    Required,
}

impl Mode {
    pub(crate) fn choice(self) -> Choice {
        match self {
            Mode::None => Choice::Never,
            Mode::Auto => Choice::Auto,
            Mode::Required => Choice::Required,
        }
    }
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct Named {
    #[expect(dead_code, reason = "there is only one type")]
    r#type: ToolType,
    function: NamedFunction,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
struct NamedFunction {
    #[schema(min_length = 1, max_length = 128)]
    name: String,
}
