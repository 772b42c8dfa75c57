//! A request for a message, and the chat that it means.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::{
    error::{ApiError, Fault},
    openai::chat::ChatBody,
    shape::{self, Unknown, Unsupported, body},
};

/// Fields of Anthropic's API that would change the answer and are not honoured.
const UNSUPPORTED: &[Unsupported] = &[
    Unsupported { field: "container", neutral: &[] },
    Unsupported { field: "context_management", neutral: &[] },
    Unsupported { field: "mcp_servers", neutral: &["[]"] },
    Unsupported { field: "output_config", neutral: &["{}"] },
    Unsupported { field: "output_format", neutral: &[] },
];

/// A conversation to go on with.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MessagesBody {
    /// The served model's name; without it, that model.
    #[schema(min_length = 1, max_length = 512)]
    model: Option<String>,
    #[schema(required = true, min_items = 1, max_items = 16384)]
    messages: Vec<AnthropicMessage>,
    /// At most so many tokens follow.
    #[schema(required = true, minimum = 1, maximum = 1_000_000_000)]
    max_tokens: u32,
    #[serde(flatten)]
    more: AnthropicMore,
}

body!(MessagesBody, Unknown::IgnoreBut(UNSUPPORTED));

/// A conversation whose tokens are counted.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CountBody {
    #[schema(min_length = 1, max_length = 512)]
    model: Option<String>,
    #[schema(required = true, min_items = 1, max_items = 16384)]
    messages: Vec<AnthropicMessage>,
    #[serde(flatten)]
    more: AnthropicMore,
}

body!(CountBody, Unknown::IgnoreBut(UNSUPPORTED));

/// What both say besides the conversation.
#[derive(Debug, Deserialize, ToSchema)]
struct AnthropicMore {
    /// Instructions: a string, or blocks of type text.
    system: Option<Blocks>,
    #[schema(max_items = 16)]
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f64>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    #[schema(minimum = 0, maximum = 1_000_000)]
    top_k: Option<u32>,
    #[schema(max_items = 1024)]
    tools: Option<Vec<AnthropicTool>>,
    tool_choice: Option<AnthropicToolChoice>,
    thinking: Option<AnthropicThinking>,
}

/// One message.
#[derive(Debug, Deserialize, ToSchema)]
struct AnthropicMessage {
    role: Speaker,
    content: Blocks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Speaker {
    User,
    Assistant,
}

/// A string, or blocks.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
enum Blocks {
    Text(String),
    List(Vec<Block>),
}

/// A block of type text, thinking, redacted_thinking, tool_use or tool_result, with the fields of its type.
#[derive(Debug, Deserialize, ToSchema)]
struct Block {
    r#type: BlockType,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    #[schema(value_type = Option<Object>)]
    input: Option<Value>,
    tool_use_id: Option<String>,
    /// Of a tool_result: a string, or blocks of type text.
    content: Option<Value>,
    is_error: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum BlockType {
    Text,
    Thinking,
    RedactedThinking,
    ToolUse,
    ToolResult,
}

/// A tool of the caller's.
#[derive(Debug, Deserialize, ToSchema)]
struct AnthropicTool {
    #[expect(dead_code, reason = "there is only one type")]
    r#type: Option<AnthropicToolType>,
    #[schema(min_length = 1, max_length = 128)]
    name: String,
    #[schema(max_length = 65536)]
    description: Option<String>,
    /// The JSON Schema of its arguments, an object's.
    #[schema(value_type = Object)]
    input_schema: Value,
}

#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum AnthropicToolType {
    Custom,
}

/// Whether tools are called.
#[derive(Debug, Deserialize, ToSchema)]
struct AnthropicToolChoice {
    r#type: Choice,
    /// With type tool.
    #[schema(max_length = 128)]
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Choice {
    Auto,
    Any,
    Tool,
    None,
}

/// Whether and how much to think.
#[derive(Debug, Deserialize, ToSchema)]
struct AnthropicThinking {
    r#type: Switch,
    /// With type enabled.
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    budget_tokens: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Switch {
    Enabled,
    Adaptive,
    Disabled,
}

impl MessagesBody {
    /// The chat that it means.
    pub(crate) fn chat(&self) -> Result<ChatBody, ApiError> {
        chat(self.model.as_deref(), &self.messages, &self.more, Some(self.max_tokens))
    }

    pub(crate) fn is_streamed(&self) -> bool {
        self.more.stream == Some(true)
    }

    pub(crate) fn stop_sequences(&self) -> Vec<String> {
        self.more.stop_sequences.clone().unwrap_or_default()
    }
}

impl CountBody {
    /// The chat that it means.
    pub(crate) fn chat(&self) -> Result<ChatBody, ApiError> {
        chat(self.model.as_deref(), &self.messages, &self.more, None)
    }
}

fn chat(
    model: Option<&str>,
    turns: &[AnthropicMessage],
    more: &AnthropicMore,
    max_tokens: Option<u32>,
) -> Result<ChatBody, ApiError> {
    let mut faults = Vec::new();
    let mut messages = Vec::new();
    if let Some(system) = &more.system {
        let text = system.text("system", &mut faults);
        messages.push(json!({"role": "system", "content": text}));
    }
    for (index, turn) in turns.iter().enumerate() {
        turn.messages(&format!("messages[{index}].content"), &mut messages, &mut faults);
    }
    if turns.last().is_some_and(|turn| turn.role == Speaker::Assistant) {
        faults
            .push(Fault::rule("messages", "must end with the user: an answer cannot be begun for the model"));
    }
    let mut body = Map::new();
    let mut set = |name: &str, value: Value| {
        if !value.is_null() {
            body.insert(name.to_owned(), value);
        }
    };
    set("model", json!(model));
    set("messages", Value::Array(messages));
    set("max_tokens", json!(max_tokens));
    set("temperature", json!(more.temperature));
    set("top_p", json!(more.top_p));
    set("top_k", json!(more.top_k));
    set("stop", json!(more.stop_sequences.as_ref().filter(|stops| !stops.is_empty())));
    let tools = more.tools.iter().flatten().map(|tool| {
        let AnthropicTool { name, description, input_schema, .. } = tool;
        json!({"type": "function", "function": {"name": name, "description": description, "parameters": input_schema}})
    });
    set("tools", Value::Array(tools.collect()));
    if let Some(choice) = &more.tool_choice {
        set(
            "tool_choice",
            match (choice.r#type, &choice.name) {
                (Choice::Auto, _) => json!("auto"),
                (Choice::Any, _) => json!("required"),
                (Choice::None, _) => json!("none"),
                (Choice::Tool, Some(name)) => json!({"type": "function", "function": {"name": name}}),
                (Choice::Tool, None) => {
                    faults.push(Fault::rule("tool_choice.name", "is required"));
                    Value::Null
                }
            },
        );
        if choice.disable_parallel_tool_use == Some(true) {
            set("parallel_tool_calls", json!(false));
        }
    }
    match &more.thinking {
        Some(AnthropicThinking { r#type: Switch::Enabled, budget_tokens: None }) => {
            faults.push(Fault::rule("thinking.budget_tokens", "is required"));
        }
        Some(AnthropicThinking { r#type: Switch::Enabled, budget_tokens }) => {
            set("thinking_budget", json!(budget_tokens));
            set("chat_template_kwargs", json!({"enable_thinking": true, "thinking": true}));
        }
        Some(AnthropicThinking { r#type: Switch::Disabled, .. }) => set("reasoning_effort", json!("none")),
        Some(AnthropicThinking { r#type: Switch::Adaptive, .. }) | None => {}
    }
    if !faults.is_empty() {
        return Err(ApiError::faults(faults));
    }
    shape::understand(Value::Object(body), Unknown::Refuse)
}

impl Blocks {
    /// All its text, where only text can stand.
    fn text(&self, path: &str, faults: &mut Vec<Fault>) -> String {
        let blocks = match self {
            Blocks::Text(text) => return text.clone(),
            Blocks::List(blocks) => blocks,
        };
        let mut texts = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            match &block.text {
                Some(text) if block.r#type == BlockType::Text => texts.push(text.as_str()),
                _ => faults.push(Fault::rule(format!("{path}[{index}]"), "must be a block of type text")),
            }
        }
        texts.join("\n")
    }
}

impl AnthropicMessage {
    /// The messages of a chat that it is: results of tools stand before what the user says to them.
    fn messages(&self, path: &str, messages: &mut Vec<Value>, faults: &mut Vec<Fault>) {
        let role = if self.role == Speaker::User { "user" } else { "assistant" };
        let blocks = match &self.content {
            Blocks::Text(text) => return messages.push(json!({"role": role, "content": text})),
            Blocks::List(blocks) => blocks,
        };
        let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
        for (index, block) in blocks.iter().enumerate() {
            let path = format!("{path}[{index}]");
            let mut needed = |name: &str| {
                faults.push(Fault::rule(format!("{path}.{name}"), "is required"));
                String::new()
            };
            match (block.r#type, self.role) {
                (BlockType::Text, _) => texts.push(block.text.clone().unwrap_or_else(|| needed("text"))),
                (BlockType::Thinking, Speaker::Assistant) => {
                    thoughts.push(block.thinking.clone().unwrap_or_else(|| needed("thinking")));
                }
                // Nobody here can read it.
                (BlockType::RedactedThinking, Speaker::Assistant) => {}
                (BlockType::ToolUse, Speaker::Assistant) => {
                    let id = block.id.clone().unwrap_or_else(|| needed("id"));
                    let name = block.name.clone().unwrap_or_else(|| needed("name"));
                    let input = block.input.clone().unwrap_or_else(|| json!({}));
                    calls.push(json!({"id": id, "function": {"name": name, "arguments": input}}));
                }
                (BlockType::ToolResult, Speaker::User) => {
                    let id = block.tool_use_id.clone().unwrap_or_else(|| needed("tool_use_id"));
                    let mut text = result_text(block.content.as_ref(), &path, faults);
                    if block.is_error == Some(true) {
                        text.insert_str(0, "Error: ");
                    }
                    messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
                }
                (_, _) => {
                    faults.push(Fault::rule(format!("{path}.type"), format!("cannot stand with {role}")))
                }
            }
        }
        if self.role == Speaker::User && texts.is_empty() {
            return;
        }
        let text = texts.join("\n");
        let mut message = json!({"role": role, "content": text});
        if !thoughts.is_empty() {
            message["reasoning_content"] = json!(thoughts.join("\n"));
        }
        if !calls.is_empty() {
            message["tool_calls"] = json!(calls);
            if text.is_empty() {
                message["content"] = Value::Null;
            }
        }
        messages.push(message);
    }
}

fn result_text(content: Option<&Value>, path: &str, faults: &mut Vec<Fault>) -> String {
    match content {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => match Blocks::deserialize(other) {
            Ok(blocks) => blocks.text(&format!("{path}.content"), faults),
            Err(_) => {
                let rule = "a string, or blocks of type text";
                faults.push(Fault::value(format!("{path}.content"), rule, other));
                String::new()
            }
        },
    }
}
