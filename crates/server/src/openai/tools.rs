//! Tools as OpenAI's clients describe them.

use fornax_chat::{Choice, Definition};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::error::Fault;

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

/// `none`, `auto`, `required`, {type: function, function: {name}}, or {type: allowed_tools, allowed_tools: {mode, tools}}.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum ToolChoiceBody {
    Mode(Mode),
    Named(Named),
}

impl ToolChoiceBody {
    pub(crate) fn choice(&self, field: &str, faults: &mut Vec<Fault>) -> Choice {
        let named = match self {
            ToolChoiceBody::Mode(mode) => return mode.choice(),
            ToolChoiceBody::Named(named) => named,
        };
        match (named.r#type, &named.function, &named.allowed_tools) {
            (ChoiceType::Function, Some(function), _) => Choice::Named(function.name.clone()),
            (ChoiceType::AllowedTools, _, Some(allowed)) => {
                let names = allowed.tools.iter().map(|tool| tool.function.name.clone()).collect();
                Choice::Among { names, required: allowed.mode == Mode::Required }
            }
            (ChoiceType::Function, None, _) => {
                faults.push(Fault::rule(format!("{field}.function"), "is required"));
                Choice::Auto
            }
            (ChoiceType::AllowedTools, _, None) => {
                faults.push(Fault::rule(format!("{field}.allowed_tools"), "is required"));
                Choice::Auto
            }
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
    r#type: ChoiceType,
    /// With type function.
    function: Option<NamedFunction>,
    /// With type allowed_tools.
    allowed_tools: Option<AllowedTools>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum ChoiceType {
    Function,
    AllowedTools,
}

/// The tools that may be called now, of all that the model knows.
#[derive(Clone, Debug, Deserialize, ToSchema)]
struct AllowedTools {
    /// auto or required.
    mode: Mode,
    #[schema(min_items = 1, max_items = 1024)]
    tools: Vec<AllowedTool>,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
struct AllowedTool {
    #[expect(dead_code, reason = "there is only one type")]
    r#type: ToolType,
    function: NamedFunction,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
struct NamedFunction {
    #[schema(min_length = 1, max_length = 128)]
    name: String,
}
