//! How much a model is to think, as it is asked for and as templates understand it.

use fornax_text::{ChatTemplate, Dialect};
use serde_json::{Map, Value, json};

use crate::{Fault, Place};

/// How much to think; by default as the model does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Thinking {
    /// How hard, where the template knows degrees of it.
    pub effort: Option<Effort>,
    /// At most this many tokens; then the answer begins.
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
            "high" | "xhigh" | "max" => Effort::High,
            _ => return None,
        })
    }
}

/// Sets what the template knows. Degrees that it does not know leave the model to think as it does; only not to think
/// at all is more than a wish, and refused where nobody can tell the model.
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
    match (effort, switch) {
        (Effort::None, Some(switch)) => set(switch, json!(false)),
        (Effort::None, None) if !dialect.thinks() => None,
        (Effort::None, None) => Some(Fault::rule(Place::Effort, "this model cannot be told not to think")),
        (_, _) if knows("reasoning_effort") => {
            let word = match effort {
                Effort::None | Effort::Minimal | Effort::Low => "low",
                Effort::Medium => "medium",
                Effort::High => "high",
            };
            set("reasoning_effort", json!(word))
        }
        // It thinks or it does not: of degrees there are none, and how hard to think is a wish.
        (Effort::Low | Effort::Medium | Effort::High, Some(switch)) => set(switch, json!(true)),
        (_, _) => None,
    }
}
