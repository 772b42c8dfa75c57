//! A request for a response, and the question that it asks.

use std::collections::BTreeMap;

use fornax_chat::{
    Ask, Call, Choice, Content, Definition, Effort, Message, Outcome, Question, READS_NO_IMAGES, Role,
    Thinking, Tools,
};
use fornax_form::Form;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::memory::Memory;
use crate::{
    app::random_id,
    ask::{
        chat::{ChatAsk, Names},
        image::{self, Blind},
        params::Params,
        prepare::Preparing,
    },
    error::{ApiError, Fault},
    openai::{
        batches::check_metadata,
        chat::{Verbosity, unreadable},
        tools::Function,
    },
    shape::{self, Unknown, Unsupported, body},
};

/// What this API calls the parts of a question.
const NAMES: Names = Names {
    tool: "",
    parameters: "parameters",
    choice: "tool_choice",
    choice_name: "tool_choice.name",
    effort: "reasoning.effort",
    budget: "reasoning",
    messages: "input",
};

/// Items of one conversation.
const ITEMS_MAX: usize = 16384;

/// Fields of OpenAI's API that would change the answer and are not honoured.
const UNSUPPORTED: &[Unsupported] = &[
    Unsupported { field: "prompt", neutral: &[] },
    Unsupported { field: "top_logprobs", neutral: &["0"] },
    // Nothing is cut: what is too long is refused, which `auto` leaves open.
    Unsupported { field: "truncation", neutral: &["\"disabled\"", "\"auto\""] },
];

/// A conversation to go on with. What is answered later is kept as it is written again: its fields that mean something.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
pub(crate) struct ResponsesBody {
    /// The served model's name; without it, that model.
    #[schema(min_length = 1, max_length = 512)]
    model: Option<String>,
    /// A string, or items: messages, function_call, function_call_output, reasoning, item_reference.
    #[schema(required = true)]
    pub(crate) input: ResponsesInput,
    /// The response that this one goes on from: its conversation stands before `input`. Needs a server that keeps
    /// responses.
    #[schema(max_length = 256)]
    previous_response_id: Option<String>,
    /// The conversation that it goes on from, by its id or as {id}: its items stand before `input`, and what is asked and
    /// answered is added to it, unless `store` is false. Needs a server that keeps responses.
    conversation: Option<ConversationOf>,
    /// Whether the response is kept; true by default, where the server keeps responses.
    pub(crate) store: Option<bool>,
    /// Answer later: the response is queued, and retrieved until it has ended. Needs a server that keeps responses.
    pub(crate) background: Option<bool>,
    /// Up to 16 notes of the client's own.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
    instructions: Option<String>,
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    max_output_tokens: Option<u32>,
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f64>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    stream: Option<bool>,
    /// Functions. Tools of the provider's own that a model need not use are left out.
    #[schema(max_items = 1024, value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// `none`, `auto`, `required`, {type: function, name}, or {type: allowed_tools, mode, tools}.
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    text: Option<TextBody>,
    /// With effort, as in chats.
    #[schema(value_type = Option<Object>)]
    reasoning: Option<Map<String, Value>>,
}

body!(ResponsesBody, Unknown::IgnoreBut(UNSUPPORTED));

/// A conversation, by its id.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(untagged)]
enum ConversationOf {
    Id(String),
    Object(ConversationId),
}

#[derive(Debug, Deserialize, Serialize, ToSchema)]
struct ConversationId {
    #[schema(max_length = 256)]
    id: String,
}

/// A string, or items.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum ResponsesInput {
    Text(String),
    Items(Vec<InputItem>),
}

/// A message, a call, its result or a thought, with the fields of its type.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub(crate) struct InputItem {
    /// message (by default), function_call, function_call_output, reasoning or item_reference.
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<String>,
    /// What it is called by; of a reference, the item that is meant: one of a response that was kept.
    #[schema(max_length = 256)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    /// Of a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<String>,
    /// Of a message: a string, or parts of type input_text, output_text or text; of reasoning: parts of type
    /// reasoning_text.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Value>,
    /// Of a call and its result.
    #[schema(max_length = 256)]
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<String>,
    #[schema(max_length = 256)]
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<String>,
    /// Of a result: a string, or parts of type input_text.
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<Value>,
    /// Of reasoning without content: parts of type summary_text.
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Value>,
}

/// How the answer must look.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
struct TextBody {
    format: Option<TextFormat>,
    /// How much to say. A wish that no model here is told of.
    #[serde(skip_serializing)]
    #[expect(dead_code, reason = "it asks for nothing that can be had")]
    verbosity: Option<Verbosity>,
}

#[derive(Debug, Deserialize, Serialize, ToSchema)]
struct TextFormat {
    /// text, json_object or json_schema.
    r#type: String,
    #[schema(max_length = 256)]
    name: Option<String>,
    /// With type json_schema.
    #[schema(value_type = Option<Object>)]
    schema: Option<Value>,
}

impl ResponsesBody {
    pub(crate) fn is_streamed(&self) -> bool {
        self.stream == Some(true)
    }

    pub(crate) fn is_background(&self) -> bool {
        self.background == Some(true)
    }

    /// The response that it goes on from.
    pub(crate) fn previous(&self) -> Option<&str> {
        self.previous_response_id.as_deref().filter(|id| !id.is_empty())
    }

    /// The conversation that it goes on from and is added to.
    pub(crate) fn conversation(&self) -> Option<&str> {
        let (ConversationOf::Id(id) | ConversationOf::Object(ConversationId { id })) =
            self.conversation.as_ref()?;
        Some(id).filter(|id| !id.is_empty()).map(String::as_str)
    }

    /// The items that it names instead of sending them again, and how often.
    pub(crate) fn references(&self) -> BTreeMap<String, usize> {
        let mut named = BTreeMap::new();
        for id in self.items().iter().filter_map(InputItem::reference) {
            *named.entry(id.to_owned()).or_insert(0) += 1;
        }
        named
    }

    fn items(&self) -> &[InputItem] {
        match &self.input {
            ResponsesInput::Text(_) => &[],
            ResponsesInput::Items(items) => items,
        }
    }

    /// Its own part of the conversation: what was sent, or named.
    pub(crate) fn asked(&self, memory: &Memory) -> Vec<InputItem> {
        match &self.input {
            ResponsesInput::Text(text) => vec![InputItem::user(text)],
            ResponsesInput::Items(items) => {
                items.iter().map(|item| memory.meant(item).unwrap_or(item).clone()).collect()
            }
        }
    }

    /// What a response repeats of its request.
    pub(crate) fn repeated(&self, stored: bool) -> Value {
        let mut repeated = json!({"previous_response_id": self.previous(), "store": stored, "background": self.is_background(),
            "metadata": self.metadata.clone().unwrap_or_default(),
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p,
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "tool_choice": self.tool_choice.clone().unwrap_or_else(|| json!("auto")),
            "tools": self.tools.iter().flatten().map(repeated_tool).collect::<Vec<Value>>(),
            "text": {"format": self.text.as_ref().and_then(|text| text.format.as_ref()).map_or_else(
                || json!({"type": "text"}), |format| json!({"type": format.r#type, "name": format.name, "schema": format.schema}))}});
        if let Some(id) = self.conversation() {
            repeated["conversation"] = json!({"id": id});
        }
        repeated
    }

    /// The question that it asks.
    pub(crate) fn ask(&self, memory: &Memory, served: &Preparing<'_>) -> Result<Ask, ApiError> {
        let mut faults = Vec::new();
        if let Some(metadata) = &self.metadata {
            check_metadata(metadata, &mut faults);
        }
        let messages = self.messages(memory, served.blind(), &mut faults);
        let tools = self.tools(&mut faults);
        let thinking = Thinking { effort: self.effort(&mut faults), budget: None };
        let form = self.form(&mut faults);
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let params = Params {
            temperature: self.temperature.map(|value| value as f32),
            top_p: self.top_p.map(|value| value as f32),
            ..Params::default()
        };
        let question =
            Question { conversation: messages.into(), tools, thinking, form, ..Question::default() };
        let chat = ChatAsk {
            question,
            params: &params,
            max_tokens: self.max_output_tokens.map(|count| count as usize),
            top_logprobs: None,
            counts: false,
            names: &NAMES,
        };
        chat.ask(served)
    }

    fn messages(&self, memory: &Memory, blind: Blind, faults: &mut Vec<Fault>) -> Vec<Message> {
        let mut messages: Vec<Message> = self.instructions.iter().map(Message::system).collect();
        for item in &memory.before {
            item.write(
                if self.conversation().is_some() { "conversation" } else { "previous_response_id" },
                blind,
                &mut messages,
                faults,
            );
        }
        match &self.input {
            ResponsesInput::Text(text) => messages.push(Message::user(text)),
            ResponsesInput::Items(items) if items.len() > ITEMS_MAX => {
                let rule = format!("must have at most {ITEMS_MAX} items");
                faults.push(Fault::rule("input", rule));
            }
            ResponsesInput::Items(items) => {
                for (index, item) in items.iter().enumerate() {
                    let meant = memory.meant(item).unwrap_or(item);
                    meant.write(&format!("input[{index}]"), blind, &mut messages, faults);
                }
            }
        }
        if messages.is_empty() && faults.is_empty() {
            faults.push(Fault::rule("input", "must say something"));
        }
        messages
    }

    fn tools(&self, faults: &mut Vec<Fault>) -> Option<Tools> {
        let tools = self.tools.iter().flatten().enumerate();
        let definitions: Vec<Definition> =
            tools.filter_map(|(index, tool)| definition(tool, &format!("tools[{index}]"), faults)).collect();
        let choice = match &self.tool_choice {
            None | Some(Value::Null) => Choice::Auto,
            Some(Value::String(mode)) if mode == "auto" => Choice::Auto,
            Some(Value::String(mode)) if mode == "none" => Choice::Never,
            Some(Value::String(mode)) if mode == "required" => Choice::Required,
            Some(Value::Object(choice)) if choice.get("name").is_some_and(Value::is_string) => {
                Choice::Named(choice["name"].as_str().unwrap_or_default().to_owned())
            }
            Some(choice) if choice["type"] == "allowed_tools" && choice["tools"].is_array() => {
                let tools = choice["tools"].as_array().into_iter().flatten();
                // Those that are left out are not called anyway.
                let functions = tools.filter(|tool| tool["type"] == "function");
                let names = functions.map(|tool| tool["name"].as_str().unwrap_or_default().to_owned());
                Choice::Among { names: names.collect(), required: choice["mode"] == "required" }
            }
            Some(other) => {
                let rule =
                    "none, auto, required, {type: function, name}, or {type: allowed_tools, mode, tools}";
                faults.push(Fault::value("tool_choice", rule, other));
                Choice::Auto
            }
        };
        NAMES.tools(&definitions, &choice, self.parallel_tool_calls, faults)
    }

    fn effort(&self, faults: &mut Vec<Fault>) -> Option<Effort> {
        let effort = self.reasoning.as_ref()?.get("effort").filter(|effort| !effort.is_null())?;
        let named = effort.as_str().and_then(Effort::named);
        if named.is_none() {
            let rule = "one of none, minimal, low, medium, high, xhigh and max";
            faults.push(Fault::value("reasoning.effort", rule, effort));
        }
        named
    }

    fn form(&self, faults: &mut Vec<Fault>) -> Option<(&'static str, Form)> {
        let format = self.text.as_ref()?.format.as_ref()?;
        let form = match (format.r#type.as_str(), &format.schema) {
            ("text", _) => return None,
            ("json_object", _) => Form::JsonObject,
            ("json_schema", Some(schema)) => Form::JsonSchema(schema.clone()),
            ("json_schema", None) => {
                faults.push(Fault::rule("text.format.schema", "is required"));
                return None;
            }
            (other, _) => {
                let rule = "one of text, json_object and json_schema";
                faults.push(Fault::value("text.format.type", rule, &json!(other)));
                return None;
            }
        };
        Some(("text.format", form))
    }
}

/// A tool as a response repeats it: clients look for all fields of a function.
fn repeated_tool(tool: &Value) -> Value {
    let mut tool = tool.clone();
    if let Some(fields) = tool.as_object_mut().filter(|fields| fields.get("type") == Some(&json!("function")))
    {
        for name in ["description", "parameters", "strict"] {
            fields.entry(name).or_insert(Value::Null);
        }
    }
    tool
}

/// A function that the model may call. Tools that only OpenAI runs are none; one that a model may do without is left out, and
/// one whose answers the caller would miss is refused.
fn definition(tool: &Value, path: &str, faults: &mut Vec<Fault>) -> Option<Definition> {
    /// Looks, draws or finds further tools, if the model wants that.
    const LEFT_OUT: [&str; 4] = ["web_search", "image_generation", "tool_search", "namespace"];
    match tool["type"].as_str() {
        Some("function") => {
            let function = shape::part::<Function>(tool, path, faults)?;
            Some(function.definition())
        }
        Some(kind) if LEFT_OUT.iter().any(|name| kind.starts_with(name)) => None,
        Some(_) => {
            let rule = "is a tool that this server does not have; describe a function instead";
            faults.push(Fault::rule(format!("{path}.type"), rule));
            None
        }
        None => {
            faults.push(Fault::value(format!("{path}.type"), "a string", &tool["type"]));
            None
        }
    }
}

impl InputItem {
    fn user(text: &str) -> InputItem {
        InputItem {
            r#type: None,
            id: None,
            role: Some("user".to_owned()),
            content: Some(json!(text)),
            call_id: None,
            name: None,
            arguments: None,
            output: None,
            summary: None,
        }
    }

    /// The item that it stands for.
    pub(crate) fn reference(&self) -> Option<&str> {
        self.id.as_deref().filter(|_| self.r#type.as_deref() == Some("item_reference"))
    }

    /// As it is kept and listed: with its type and an id, and of its parts what was read. It was understood before.
    pub(crate) fn kept(&self) -> (String, Value) {
        let kind = self.r#type.as_deref().unwrap_or("message");
        let (prefix, part) = match (kind, self.role.as_deref()) {
            ("message", Some("assistant")) => ("msg", "output_text"),
            ("message", _) => ("msg", "input_text"),
            ("reasoning", _) => ("rs", "reasoning_text"),
            ("function_call", _) => ("fc", "input_text"),
            ("function_call_output", _) => ("fco", "input_text"),
            _ => ("item", "input_text"),
        };
        let id = self.id.clone().filter(|id| !id.is_empty());
        let id = id.unwrap_or_else(|| format!("{prefix}_{}", random_id()));
        let mut kept = json!({"type": kind, "id": id, "status": "completed"});
        let mut set = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                kept[name] = value;
            }
        };
        set("role", self.role.as_ref().map(|role| json!(role)));
        set("content", self.content.as_ref().map(|content| parts(content, part)));
        set("call_id", self.call_id.as_ref().map(|id| json!(id)));
        set("name", self.name.as_ref().map(|name| json!(name)));
        set("arguments", self.arguments.as_ref().map(|arguments| json!(arguments)));
        set("output", self.output.as_ref().map(text_or_parts));
        set("summary", self.summary.as_ref().map(|summary| parts(summary, "summary_text")));
        (id, kept)
    }

    /// Says what is wrong with it, whichever model may read it.
    pub(crate) fn check(&self, path: &str, faults: &mut Vec<Fault>) {
        self.write(path, None, &mut Vec::new(), faults);
    }

    /// Adds what it means to the conversation: thoughts, words and calls of one answer are one message of the assistant.
    fn write(&self, path: &str, blind: Blind, messages: &mut Vec<Message>, faults: &mut Vec<Fault>) {
        let needed = |name: &str, faults: &mut Vec<Fault>| {
            faults.push(Fault::rule(format!("{path}.{name}"), "is required"));
        };
        match self.r#type.as_deref().unwrap_or("message") {
            "message" => {
                let role = match self.role.as_deref() {
                    None => return needed("role", faults),
                    Some("system" | "developer") => Role::System,
                    Some("user") => Role::User,
                    Some("assistant") => Role::Assistant,
                    Some(other) => {
                        let rule = "one of system, developer, user and assistant";
                        return faults.push(Fault::value(format!("{path}.role"), rule, &json!(other)));
                    }
                };
                let path = format!("{path}.content");
                if role == Role::User && blind.is_none() && shows(self.content.as_ref()) {
                    let content = parts_of(self.content.as_ref(), &path, faults);
                    return messages.push(Message::of(role, content));
                }
                let text = text_of(self.content.as_ref(), &path, blind, faults);
                match messages.last_mut() {
                    // What was thought before it was said.
                    Some(last) if role == Role::Assistant && is_thought(last) => {
                        last.content.push(Content::Text(text));
                    }
                    _ => messages.push(Message::new(role, text)),
                }
            }
            "reasoning" => {
                let content = self.content.as_ref().filter(|content| !content.is_null());
                let (content, name) = match content {
                    Some(content) => (Some(content), "content"),
                    None => (self.summary.as_ref(), "summary"),
                };
                let text = text_of(content, &format!("{path}.{name}"), Some(READS_NO_IMAGES), faults);
                if !text.is_empty() {
                    messages.push(Message::of(Role::Assistant, vec![Content::Thought(text)]));
                }
            }
            "function_call" => {
                let Some(name) = self.name.clone() else { return needed("name", faults) };
                let text = self.arguments.as_deref().unwrap_or_default();
                let arguments = Call::arguments_of(text).unwrap_or_else(|| {
                    let field = format!("{path}.arguments");
                    faults.push(Fault::value(field, "the text of a JSON object", &json!(text)));
                    Map::new()
                });
                let call = Call { id: self.call_id.clone(), name, arguments };
                match messages.last_mut().filter(|last| last.role == Role::Assistant) {
                    Some(last) => last.content.push(Content::Call(call)),
                    None => messages.push(Message::calls([call])),
                }
            }
            "function_call_output" => {
                let text =
                    text_of(self.output.as_ref(), &format!("{path}.output"), Some(READS_NO_IMAGES), faults);
                let outcome = Outcome { call: self.call_id.clone(), name: None, text };
                messages.push(Message::of(Role::User, vec![Content::Result(outcome)]));
            }
            "item_reference" => {
                let rule = "is no item of a response that this key has kept";
                faults.push(Fault::rule(format!("{path}.id"), rule));
            }
            // What was left out of the tools was not called either.
            "web_search_call" | "image_generation_call" | "tool_search_call" => {}
            other => {
                let rule =
                    "one of message, function_call, function_call_output, reasoning and item_reference";
                faults.push(Fault::value(format!("{path}.type"), rule, &json!(other)));
            }
        }
    }
}

fn is_thought(message: &Message) -> bool {
    message.role == Role::Assistant && message.content.iter().all(|part| matches!(part, Content::Thought(_)))
}

/// Parts with text, of what was understood as such.
fn parts(content: &Value, kind: &str) -> Value {
    let part = |kind: &Value, text: &str| match kind.as_str() {
        Some("output_text") => json!({"type": kind, "text": text, "annotations": []}),
        _ => json!({"type": kind, "text": text}),
    };
    match content {
        Value::String(text) => json!([part(&json!(kind), text)]),
        Value::Array(parts) => {
            let kept = |own: &Value| match own["type"].as_str() {
                Some("input_image") => own.clone(),
                _ => part(&own["type"], own["text"].as_str().unwrap_or_default()),
            };
            parts.iter().map(kept).collect()
        }
        _ => json!([]),
    }
}

/// The same of what may be one string.
fn text_or_parts(content: &Value) -> Value {
    if content.is_string() { content.clone() } else { parts(content, "input_text") }
}

/// Whether a picture is among the parts.
fn shows(content: Option<&Value>) -> bool {
    let parts = content.and_then(Value::as_array).into_iter().flatten();
    parts.into_iter().any(|part| part["type"] == "input_image")
}

/// Texts and pictures, in their order.
fn parts_of(content: Option<&Value>, path: &str, faults: &mut Vec<Fault>) -> Vec<Content> {
    let parts = content.and_then(Value::as_array).into_iter().flatten().enumerate();
    let read = |(index, part): (usize, &Value)| {
        let path = format!("{path}[{index}]");
        match (part["type"].as_str(), part["image_url"].as_str(), part["text"].as_str()) {
            (Some("input_image"), Some(url), _) => {
                image::of_url(url, &format!("{path}.image_url"), None, faults).map(Content::Image)
            }
            (Some("input_image"), None, _) => {
                faults.push(Fault::rule(format!("{path}.image_url"), "is required: no files are kept here"));
                None
            }
            (Some("input_text" | "text"), _, Some(text)) => Some(Content::Text(text.to_owned())),
            (Some(kind), _, _) => {
                faults.push(unreadable(format!("{path}.type"), kind, None, "input_text or input_image"));
                None
            }
            (None, _, _) => {
                faults.push(Fault::rule(path, "must be a part with text or a picture"));
                None
            }
        }
    };
    parts.filter_map(read).collect()
}

/// A string, or the texts of parts.
fn text_of(content: Option<&Value>, path: &str, blind: Blind, faults: &mut Vec<Fault>) -> String {
    match content {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let mut texts = Vec::new();
            for (index, part) in parts.iter().enumerate() {
                let is_text = matches!(
                    part["type"].as_str(),
                    Some("input_text" | "output_text" | "text" | "reasoning_text" | "summary_text")
                );
                match (part["text"].as_str().filter(|_| is_text), part["type"].as_str()) {
                    (Some(text), _) => texts.push(text),
                    (None, Some(kind)) if !is_text => {
                        faults.push(unreadable(
                            format!("{path}[{index}].type"),
                            kind,
                            blind,
                            "a part with text",
                        ));
                    }
                    _ => faults.push(Fault::rule(format!("{path}[{index}]"), "must be a part with text")),
                }
            }
            texts.join("\n")
        }
        Some(other) => {
            faults.push(Fault::value(path, "a string, or parts with text", other));
            String::new()
        }
    }
}
