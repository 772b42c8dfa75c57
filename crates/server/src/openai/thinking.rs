//! How much a model is to think, as requests say it and as templates understand it.

use fornax_text::{ChatTemplate, Dialect};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::error::Fault;

/// How hard to think.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
}

/// How much to think.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
pub(crate) struct Reasoning {
    pub(crate) effort: Option<Effort>,
    /// As thinking_budget.
    #[schema(minimum = 0, maximum = 1_000_000_000)]
    pub(crate) max_tokens: Option<u32>,
}

/// Sets what the template knows. What it does not know cannot be honoured, and is refused.
pub(crate) fn apply(
    effort: Option<Effort>,
    template: &ChatTemplate,
    dialect: Dialect,
    variables: &mut Map<String, Value>,
    faults: &mut Vec<Fault>,
) {
    let Some(effort) = effort else { return };
    let knows = |name: &str| template.source().contains(name);
    let switch = ["enable_thinking", "thinking"].into_iter().find(|name| knows(name));
    let mut set = |name: &str, value: Value| {
        variables.entry(name.to_owned()).or_insert(value);
    };
    match (effort, switch) {
        (Effort::None, Some(switch)) => set(switch, json!(false)),
        (Effort::None, None) if !dialect.thinks() => {}
        (Effort::None, None) => {
            faults.push(Fault::rule("reasoning_effort", "this model cannot be told not to think"));
        }
        (_, _) if knows("reasoning_effort") => {
            let word = match effort {
                Effort::None | Effort::Minimal | Effort::Low => "low",
                Effort::Medium => "medium",
                Effort::High => "high",
            };
            set("reasoning_effort", json!(word));
        }
        // It thinks or it does not: there are no degrees, and what is asked for by default is what happens.
        (Effort::Medium, Some(switch)) => set(switch, json!(true)),
        (_, _) => {
            let rule = "this model's chat template knows no degrees of thinking; thinking_budget bounds it";
            faults.push(Fault::rule("reasoning_effort", rule));
        }
    }
}
