//! How much a model is to think, as it is asked for and as templates understand it.

use fornax_text::{ChatTemplate, Dialect};
use serde_json::{Map, Value, json};

use crate::{Fault, Place};

/// How much to think; by default as the model does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Thinking {
    /// How hard, where the template knows degrees of it.
    pub effort: Option<Effort>,
    /// At most so many tokens; then the answer begins.
    pub budget: Option<usize>,
}

/// How hard to think.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
}

impl Effort {
    /// The one of that name.
    pub fn named(name: &str) -> Option<Effort> {
        Some(match name {
            "none" => Effort::None,
            "minimal" => Effort::Minimal,
            "low" => Effort::Low,
            "medium" => Effort::Medium,
            "high" => Effort::High,
            _ => return None,
        })
    }
}

/// Sets what the template knows. What it does not know cannot be honoured, and is refused.
pub(crate) fn apply(
    effort: Option<Effort>,
    template: &ChatTemplate,
    dialect: Dialect,
    variables: &mut Map<String, Value>,
) -> Option<Fault> {
    let effort = effort?;
    let knows = |name: &str| template.source().contains(name);
    let switch = ["enable_thinking", "thinking"].into_iter().find(|name| knows(name));
    let mut set = |name: &str, value: Value| {
        variables.entry(name.to_owned()).or_insert(value);
        None
    };
    let refused = |rule: &str| Some(Fault::rule(Place::Effort, rule));
    match (effort, switch) {
        (Effort::None, Some(switch)) => set(switch, json!(false)),
        (Effort::None, None) if !dialect.thinks() => None,
        (Effort::None, None) => refused("this model cannot be told not to think"),
        (_, _) if knows("reasoning_effort") => {
            let word = match effort {
                Effort::None | Effort::Minimal | Effort::Low => "low",
                Effort::Medium => "medium",
                Effort::High => "high",
            };
            set("reasoning_effort", json!(word))
        }
        // It thinks or it does not: there are no degrees, and what is asked for by default is what happens.
        (Effort::Medium, Some(switch)) => set(switch, json!(true)),
        (_, _) => {
            refused("this model's chat template knows no degrees of thinking; thinking_budget bounds it")
        }
    }
}
