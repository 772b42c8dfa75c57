//! Messages of a chat as Python programs write them, and what they are to the facade.

use fornax::{Call, Content, Message, Outcome, Role};
use serde::Deserialize;
use serde_json::{Map, Value};

/// One message. Fields that nobody knows are refused.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Said {
    role: Speaker,
    #[serde(default)]
    content: Option<Body>,
    #[serde(default)]
    name: Option<String>,
    /// What was thought before it was said.
    #[serde(default)]
    thought: Option<String>,
    #[serde(default)]
    tool_calls: Vec<Called>,
    #[serde(default)]
    tool_call_id: Option<String>,
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Speaker {
    #[serde(alias = "developer")]
    System,
    User,
    Assistant,
    Tool,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "content must be a text, or a list of {\"type\": \"text\", \"text\": ...}; pictures are for the HTTP API and the terminal"
)]
enum Body {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
enum Part {
    Text { text: String },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Called {
    #[serde(default)]
    id: Option<String>,
    #[serde(default, rename = "type")]
    _type: Option<String>,
    function: Function,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Function {
    name: String,
    arguments: Arguments,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "arguments must be an object, or its JSON")]
enum Arguments {
    Object(Map<String, Value>),
    Json(String),
}

/// Messages as the facade has them, or which one is wrong and why.
pub(crate) fn conversation(messages: Vec<Value>) -> Result<Vec<Message>, String> {
    let read = |(index, value)| {
        let wrong = |why: String| format!("messages[{index}]: {why}");
        let said: Said = serde_json::from_value(value).map_err(|error| wrong(error.to_string()))?;
        said.message().map_err(wrong)
    };
    messages.into_iter().enumerate().map(read).collect()
}

impl Said {
    fn message(self) -> Result<Message, String> {
        let Said { role, content, name, thought, tool_calls, tool_call_id } = self;
        if role != Speaker::Assistant && !(tool_calls.is_empty() && thought.is_none()) {
            return Err("only an assistant's message has tool_calls or a thought".to_owned());
        }
        if (role == Speaker::Tool) != tool_call_id.is_some() {
            return Err("tool_call_id and the role tool belong together".to_owned());
        }
        let texts: Vec<String> = match content {
            Some(Body::Text(text)) => vec![text],
            Some(Body::Parts(parts)) => parts.into_iter().map(|Part::Text { text }| text).collect(),
            None if tool_calls.is_empty() => return Err("content is missing".to_owned()),
            None => Vec::new(),
        };
        if role == Speaker::Tool {
            let outcome = Outcome { call: tool_call_id, name, text: texts.join("\n") };
            return Ok(Message::of(Role::User, vec![Content::Result(outcome)]));
        }
        let mut parts: Vec<Content> = thought.map(Content::Thought).into_iter().collect();
        parts.extend(texts.into_iter().map(Content::Text));
        for Called { id, function: Function { name, arguments }, .. } in tool_calls {
            let arguments = match arguments {
                Arguments::Object(fields) => fields,
                Arguments::Json(text) => Call::arguments_of(&text)
                    .ok_or_else(|| format!("the arguments of the call of {name:?} are no JSON object"))?,
            };
            parts.push(Content::Call(Call { id, name, arguments }));
        }
        let role = match role {
            Speaker::System => Role::System,
            Speaker::Assistant => Role::Assistant,
            Speaker::User | Speaker::Tool => Role::User,
        };
        Ok(Message { name, ..Message::of(role, parts) })
    }
}
