//! A request for a message, and the question that it asks.

use fornax_chat::{
    Ask, Call, Choice as Demand, Content, Definition, Effort, Message, Outcome, Question, Role, Thinking,
    Tools,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::{
    ask::{
        chat::{ChatAsk, Names},
        params::{Params, Stop},
        prepare::Preparing,
    },
    error::{ApiError, Fault},
    shape::{Unknown, Unsupported, body},
};

/// What Anthropic calls the parts of a question.
const NAMES: Names = Names {
    tool: "",
    parameters: "input_schema",
    choice: "tool_choice",
    choice_name: "tool_choice.name",
    effort: "thinking",
    budget: "thinking.budget_tokens",
    stop: "stop_sequences",
    messages: "messages",
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
    #[expect(dead_code, reason = "the request was let in to it already")]
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
    #[expect(dead_code, reason = "the request was let in to it already")]
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
    temperature: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f32>,
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
    /// The question that it asks.
    pub(crate) fn ask(&self, served: &Preparing<'_>) -> Result<Ask, ApiError> {
        self.more.ask(&self.messages, Some(self.max_tokens), served)
    }

    pub(crate) fn is_streamed(&self) -> bool {
        self.more.stream == Some(true)
    }

    pub(crate) fn stop_sequences(&self) -> Vec<String> {
        self.more.stop_sequences.clone().unwrap_or_default()
    }
}

impl CountBody {
    /// The question that it asks.
    pub(crate) fn ask(&self, served: &Preparing<'_>) -> Result<Ask, ApiError> {
        self.more.ask(&self.messages, None, served)
    }
}

impl AnthropicMore {
    fn ask(
        &self,
        turns: &[AnthropicMessage],
        max_tokens: Option<u32>,
        served: &Preparing<'_>,
    ) -> Result<Ask, ApiError> {
        let mut faults = Vec::new();
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            messages.push(Message::system(system.text("system", &mut faults)));
        }
        for (index, turn) in turns.iter().enumerate() {
            messages.extend(turn.message(&format!("messages[{index}].content"), &mut faults));
        }
        if turns.last().is_some_and(|turn| turn.role == Speaker::Assistant) {
            let rule = "must end with the user: an answer cannot be begun for the model";
            faults.push(Fault::rule("messages", rule));
        }
        let tools = self.tools(&mut faults);
        let (thinking, variables) = self.thinking(&mut faults);
        let params = Params {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k.map(u32::cast_signed),
            stop: Stop::of("stop_sequences", self.stop_sequences.as_deref(), &mut faults),
            ..Params::default()
        };
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let question =
            Question { conversation: messages.into(), tools, thinking, variables, ..Question::default() };
        let chat = ChatAsk {
            question,
            params: &params,
            max_tokens: max_tokens.map(|count| count as usize),
            top_logprobs: None,
            names: &NAMES,
        };
        chat.ask(served)
    }

    fn tools(&self, faults: &mut Vec<Fault>) -> Option<Tools> {
        let definitions = self.tools.iter().flatten().map(|tool| Definition {
            name: tool.name.clone(),
            description: tool.description.clone(),
            parameters: Some(tool.input_schema.clone()),
            strict: false,
        });
        let choice = match self.tool_choice.as_ref().map(|choice| (choice.r#type, &choice.name)) {
            None | Some((Choice::Auto, _)) => Demand::Auto,
            Some((Choice::Any, _)) => Demand::Required,
            Some((Choice::None, _)) => Demand::Never,
            Some((Choice::Tool, Some(name))) => Demand::Named(name.clone()),
            Some((Choice::Tool, None)) => {
                faults.push(Fault::rule("tool_choice.name", "is required"));
                Demand::Auto
            }
        };
        let alone =
            self.tool_choice.as_ref().is_some_and(|choice| choice.disable_parallel_tool_use == Some(true));
        let definitions: Vec<Definition> = definitions.collect();
        NAMES.tools(&definitions, &choice, alone.then_some(false), faults)
    }

    /// How much to think, and what the template is told of it.
    fn thinking(&self, faults: &mut Vec<Fault>) -> (Thinking, Map<String, Value>) {
        let (mut thinking, mut variables) = (Thinking::default(), Map::new());
        match self.thinking.as_ref().map(|thinking| (thinking.r#type, thinking.budget_tokens)) {
            Some((Switch::Enabled, None)) => {
                faults.push(Fault::rule("thinking.budget_tokens", "is required"));
            }
            Some((Switch::Enabled, Some(budget))) => {
                thinking.budget = Some(budget as usize);
                // Templates have one or the other name; what a template does not know it does not read.
                variables.extend(["enable_thinking", "thinking"].map(|name| (name.to_owned(), json!(true))));
            }
            Some((Switch::Disabled, _)) => thinking.effort = Some(Effort::None),
            Some((Switch::Adaptive, _)) | None => {}
        }
        (thinking, variables)
    }
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
    /// What it says; nothing where a user sends no blocks.
    fn message(&self, path: &str, faults: &mut Vec<Fault>) -> Option<Message> {
        let role = if self.role == Speaker::User { Role::User } else { Role::Assistant };
        let blocks = match &self.content {
            Blocks::Text(text) => return Some(Message::new(role, text)),
            Blocks::List(blocks) => blocks,
        };
        let blocks = blocks.iter().enumerate();
        let content: Vec<Content> = blocks
            .filter_map(|(index, block)| block.content(role, &format!("{path}[{index}]"), faults))
            .collect();
        let is_silent = role == Role::User && content.is_empty();
        (!is_silent).then(|| Message::of(role, content))
    }
}

impl Block {
    /// What it says, unless something is wrong with it.
    fn content(&self, role: Role, path: &str, faults: &mut Vec<Fault>) -> Option<Content> {
        let mut needed = |name: &str| {
            faults.push(Fault::rule(format!("{path}.{name}"), "is required"));
            String::new()
        };
        Some(match (self.r#type, role) {
            (BlockType::Text, _) => Content::Text(self.text.clone().unwrap_or_else(|| needed("text"))),
            (BlockType::Thinking, Role::Assistant) => {
                Content::Thought(self.thinking.clone().unwrap_or_else(|| needed("thinking")))
            }
            // Nobody here can read it.
            (BlockType::RedactedThinking, Role::Assistant) => return None,
            (BlockType::ToolUse, Role::Assistant) => Content::Call(Call {
                id: Some(self.id.clone().unwrap_or_else(|| needed("id"))),
                name: self.name.clone().unwrap_or_else(|| needed("name")),
                arguments: self.input.as_ref().and_then(Value::as_object).cloned().unwrap_or_default(),
            }),
            (BlockType::ToolResult, Role::User) => {
                let call = Some(self.tool_use_id.clone().unwrap_or_else(|| needed("tool_use_id")));
                let mut text = result_text(self.content.as_ref(), path, faults);
                if self.is_error == Some(true) {
                    text.insert_str(0, "Error: ");
                }
                Content::Result(Outcome { call, name: None, text })
            }
            (_, _) => {
                let rule = format!("cannot stand with {}", role.name());
                faults.push(Fault::rule(format!("{path}.type"), rule));
                return None;
            }
        })
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
