//! A request for a message, and the question that it asks.

use fornax_chat::{
    Ask, Call, Choice as Demand, Content, Definition, Effort, Message, Outcome, Question, READS_NO_IMAGES,
    Role, Thinking, Tools,
};
use fornax_form::Form;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::{
    ask::{
        chat::{ChatAsk, Names},
        image::{self, Blind},
        params::{Params, Stop},
        prepare::Preparing,
    },
    error::{ApiError, Fault},
    openai::chat::unreadable,
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
    messages: "messages",
};

/// Fields of Anthropic's API that would change the answer and are not honoured.
const UNSUPPORTED: &[Unsupported] = &[
    Unsupported { field: "container", neutral: &[] },
    Unsupported { field: "mcp_servers", neutral: &["[]"] },
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
    /// At most this many tokens follow.
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
    /// -1 and 0 keep all.
    #[schema(minimum = -1, maximum = 1_000_000)]
    top_k: Option<i32>,
    #[schema(max_items = 1024)]
    tools: Option<Vec<AnthropicTool>>,
    tool_choice: Option<AnthropicToolChoice>,
    thinking: Option<AnthropicThinking>,
    output_config: Option<OutputConfig>,
    /// The older name of output_config.format.
    output_format: Option<OutputFormat>,
    context_management: Option<ContextManagement>,
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
    /// Instructions that come later than the first.
    System,
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
    r#type: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    #[schema(value_type = Option<Object>)]
    input: Option<Value>,
    tool_use_id: Option<String>,
    /// Of a tool_result: a string, or blocks of type text.
    content: Option<Value>,
    /// Of an image.
    source: Option<Source>,
    is_error: Option<bool>,
}

/// Where a picture is.
#[derive(Debug, Deserialize, ToSchema)]
struct Source {
    /// base64, or url: of a data URL.
    r#type: String,
    data: Option<String>,
    url: Option<String>,
}

/// A tool of the caller's.
#[derive(Debug, Deserialize, ToSchema)]
struct AnthropicTool {
    /// custom: a tool that the caller runs.
    r#type: Option<String>,
    #[schema(min_length = 1, max_length = 128)]
    name: String,
    #[schema(max_length = 65536)]
    description: Option<String>,
    /// The JSON Schema of its arguments, an object's.
    #[schema(value_type = Option<Object>)]
    input_schema: Option<Value>,
    /// Whether arguments follow the schema by construction.
    strict: Option<bool>,
}

/// How the answer is to be.
#[derive(Debug, Deserialize, ToSchema)]
struct OutputConfig {
    /// How hard to think, where the model's chat template knows degrees of it.
    #[schema(max_length = 32)]
    effort: Option<String>,
    format: Option<OutputFormat>,
}

/// What the answer must look like.
#[derive(Debug, Deserialize, ToSchema)]
struct OutputFormat {
    r#type: OutputType,
    #[schema(value_type = Object)]
    schema: Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum OutputType {
    JsonSchema,
}

/// What of the conversation is left out.
#[derive(Debug, Deserialize, ToSchema)]
struct ContextManagement {
    #[schema(max_items = 16)]
    edits: Option<Vec<ContextEdit>>,
}

/// clear_thinking_20251015 leaves out what the assistant thought.
#[derive(Debug, Deserialize, ToSchema)]
struct ContextEdit {
    r#type: String,
    /// all, or {type: thinking_turns, value}: that of the last answers; of the last one by default.
    keep: Option<Value>,
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
            messages.extend(turn.message(&format!("messages[{index}].content"), served.blind(), &mut faults));
        }
        let continues = turns.last().is_some_and(|turn| turn.role == Speaker::Assistant);
        self.leave_out(&mut messages, &mut faults);
        let tools = self.tools(&mut faults);
        let (thinking, variables) = self.thinking(&mut faults);
        let params = Params {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            stop: Stop::of("stop_sequences", self.stop_sequences.as_deref(), &mut faults),
            ..Params::default()
        };
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let form = self.form().map(|(field, schema)| (field, Form::JsonSchema(schema.clone())));
        let conversation = messages.into();
        let question = Question { conversation, tools, thinking, variables, form, continues };
        let chat = ChatAsk {
            question,
            params: &params,
            max_tokens: max_tokens.map(|count| count as usize),
            top_logprobs: None,
            counts: max_tokens.is_none(),
            names: &NAMES,
        };
        chat.ask(served)
    }

    /// What the answer must look like, by the newer or the older name.
    fn form(&self) -> Option<(&'static str, &Value)> {
        let newer = self.output_config.as_ref().and_then(|config| config.format.as_ref());
        let newer = newer.map(|format| ("output_config.format", format));
        let format = newer.or(self.output_format.as_ref().map(|format| ("output_format", format)));
        format.map(|(field, OutputFormat { r#type: OutputType::JsonSchema, schema })| (field, schema))
    }

    /// Leaves thoughts out as the caller wants it.
    fn leave_out(&self, messages: &mut [Message], faults: &mut Vec<Fault>) {
        let edits = self.context_management.iter().flat_map(|management| &management.edits).flatten();
        for (index, edit) in edits.enumerate() {
            let field = format!("context_management.edits[{index}]");
            if edit.r#type != "clear_thinking_20251015" {
                faults
                    .push(Fault::rule(format!("{field}.type"), "is an edit that this server does not make"));
                continue;
            }
            let kept = match &edit.keep {
                None | Some(Value::Null) => Some(1),
                Some(Value::String(all)) if all == "all" => None,
                Some(keep) if keep["type"] == "all" => None,
                Some(keep) if keep["value"].is_u64() => keep["value"].as_u64(),
                Some(keep) => {
                    let rule = "all, or {type: thinking_turns, value}";
                    faults.push(Fault::value(format!("{field}.keep"), rule, keep));
                    continue;
                }
            };
            let is_thought = |part: &Content| matches!(part, Content::Thought(_));
            let thoughtful =
                messages.iter_mut().rev().filter(|message| message.content.iter().any(is_thought));
            let kept = kept.map_or(usize::MAX, |kept| usize::try_from(kept).unwrap_or(usize::MAX));
            thoughtful.skip(kept).for_each(|message| message.content.retain(|part| !is_thought(part)));
        }
    }

    fn tools(&self, faults: &mut Vec<Fault>) -> Option<Tools> {
        let mut definitions: Vec<Definition> = Vec::new();
        for (index, tool) in self.tools.iter().flatten().enumerate() {
            match tool.r#type.as_deref() {
                None | Some("custom") => {
                    if tool.input_schema.is_none() {
                        faults.push(Fault::rule(format!("tools[{index}].input_schema"), "is required"));
                    }
                    definitions.push(Definition {
                        name: tool.name.clone(),
                        description: tool.description.clone(),
                        parameters: tool.input_schema.clone(),
                        strict: tool.strict == Some(true),
                    });
                }
                // A model need not look anything up.
                Some(hosted) if hosted.starts_with("web_search") || hosted.starts_with("web_fetch") => {}
                Some(_) => {
                    let rule = "is a tool that this server does not have; describe it with input_schema";
                    faults.push(Fault::rule(format!("tools[{index}].type"), rule));
                }
            }
        }
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
        let effort = self.output_config.as_ref().and_then(|config| config.effort.as_deref());
        if let Some(effort) = effort {
            let word = match Effort::named(effort) {
                Some(Effort::Low) => "low",
                Some(Effort::Medium) => "medium",
                Some(Effort::High) => "high",
                _ => {
                    let rule = "one of low, medium, high, xhigh and max";
                    faults.push(Fault::value("output_config.effort", rule, &json!(effort)));
                    ""
                }
            };
            // Whether to think is said elsewhere, and what a template does not know it does not read.
            variables.insert("reasoning_effort".to_owned(), json!(word));
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
                Some(text) if block.r#type == "text" => texts.push(text.as_str()),
                _ => faults.push(unreadable(
                    format!("{path}[{index}].type"),
                    &block.r#type,
                    Some(READS_NO_IMAGES),
                    "text",
                )),
            }
        }
        texts.join("\n")
    }
}

impl AnthropicMessage {
    /// What it says; nothing where a user sends no blocks.
    fn message(&self, path: &str, blind: Blind, faults: &mut Vec<Fault>) -> Option<Message> {
        let role = match self.role {
            Speaker::User => Role::User,
            Speaker::Assistant => Role::Assistant,
            Speaker::System => Role::System,
        };
        let blocks = match &self.content {
            Blocks::Text(text) => return Some(Message::new(role, text)),
            Blocks::List(blocks) => blocks,
        };
        let blocks = blocks.iter().enumerate();
        let content: Vec<Content> = blocks
            .filter_map(|(index, block)| block.content(role, &format!("{path}[{index}]"), blind, faults))
            .collect();
        let is_silent = role == Role::User && content.is_empty();
        (!is_silent).then(|| Message::of(role, content))
    }
}

impl Block {
    /// What it says, unless something is wrong with it.
    fn content(&self, role: Role, path: &str, blind: Blind, faults: &mut Vec<Fault>) -> Option<Content> {
        if let ("image", Role::User, None) = (self.r#type.as_str(), role, blind) {
            let source = format!("{path}.source");
            return match &self.source {
                Some(Source { r#type, data: Some(data), .. }) if r#type == "base64" => {
                    image::of_base64(data, &format!("{source}.data"), blind, faults)
                }
                Some(Source { r#type, url: Some(url), .. }) if r#type == "url" => {
                    image::of_url(url, &format!("{source}.url"), blind, faults)
                }
                _ => {
                    faults.push(Fault::rule(source, "must be a picture in base64, or a data URL"));
                    None
                }
            }
            .map(Content::Image);
        }
        let mut needed = |name: &str| {
            faults.push(Fault::rule(format!("{path}.{name}"), "is required"));
            String::new()
        };
        Some(match (self.r#type.as_str(), role) {
            ("text", _) => Content::Text(self.text.clone().unwrap_or_else(|| needed("text"))),
            ("thinking", Role::Assistant) => {
                Content::Thought(self.thinking.clone().unwrap_or_else(|| needed("thinking")))
            }
            // Nobody here can read it.
            ("redacted_thinking", Role::Assistant) => return None,
            ("tool_use", Role::Assistant) => Content::Call(Call {
                id: Some(self.id.clone().unwrap_or_else(|| needed("id"))),
                name: self.name.clone().unwrap_or_else(|| needed("name")),
                arguments: self.input.as_ref().and_then(Value::as_object).cloned().unwrap_or_default(),
            }),
            ("tool_result", Role::User) => {
                let call = Some(self.tool_use_id.clone().unwrap_or_else(|| needed("tool_use_id")));
                let mut text = result_text(self.content.as_ref(), path, faults);
                if self.is_error == Some(true) {
                    text.insert_str(0, "Error: ");
                }
                Content::Result(Outcome { call, name: None, text })
            }
            ("thinking" | "redacted_thinking" | "tool_use" | "tool_result", _) => {
                let rule = format!("cannot stand with {}", role.name());
                faults.push(Fault::rule(format!("{path}.type"), rule));
                return None;
            }
            (other, _) => {
                let rule = "one of text, image, thinking, redacted_thinking, tool_use and tool_result";
                faults.push(unreadable(format!("{path}.type"), other, blind, rule));
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
