//! A request for a response, and the chat that it means.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::{
    error::{ApiError, Fault},
    openai::{
        chat::ChatBody,
        tools::{Function, ToolType},
    },
    shape::{self, Unknown, Unsupported, body},
};

/// Fields of OpenAI's API that would change the answer and are not honoured.
const UNSUPPORTED: &[Unsupported] = &[
    // Nothing is remembered between requests.
    Unsupported { field: "store", neutral: &["false"] },
    Unsupported { field: "previous_response_id", neutral: &["\"\""] },
    Unsupported { field: "conversation", neutral: &[] },
    Unsupported { field: "background", neutral: &["false"] },
    Unsupported { field: "prompt", neutral: &[] },
    Unsupported { field: "max_tool_calls", neutral: &[] },
    Unsupported { field: "top_logprobs", neutral: &["0"] },
    Unsupported { field: "truncation", neutral: &["\"disabled\""] },
];

/// A conversation to go on with.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ResponsesBody {
    /// The served model's name; without it, that model.
    #[schema(min_length = 1, max_length = 512)]
    model: Option<String>,
    /// A string, or items: messages, function_call, function_call_output, reasoning.
    #[schema(required = true)]
    input: ResponsesInput,
    instructions: Option<String>,
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    max_output_tokens: Option<u32>,
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f64>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    stream: Option<bool>,
    #[schema(max_items = 1024)]
    tools: Option<Vec<ResponsesTool>>,
    /// `none`, `auto`, `required`, or {type: function, name}.
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    text: Option<TextBody>,
    /// With effort, as in chats.
    #[schema(value_type = Option<Object>)]
    reasoning: Option<Map<String, Value>>,
}

body!(ResponsesBody, Unknown::IgnoreBut(UNSUPPORTED));

/// A string, or items.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
enum ResponsesInput {
    Text(String),
    Items(Vec<InputItem>),
}

/// A message, a call, its result or a thought, with the fields of its type.
#[derive(Debug, Deserialize, ToSchema)]
struct InputItem {
    r#type: Option<InputItemType>,
    /// Of a message.
    role: Option<String>,
    /// Of a message: a string, or parts of type input_text, output_text or text; of reasoning: parts of type
    /// reasoning_text.
    content: Option<Value>,
    /// Of a call and its result.
    #[schema(max_length = 256)]
    call_id: Option<String>,
    #[schema(max_length = 256)]
    name: Option<String>,
    arguments: Option<String>,
    /// Of a result: a string, or parts of type input_text.
    output: Option<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum InputItemType {
    Message,
    FunctionCall,
    FunctionCallOutput,
    Reasoning,
}

/// A function that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
struct ResponsesTool {
    #[expect(dead_code, reason = "there is only one type")]
    r#type: ToolType,
    #[serde(flatten)]
    function: Function,
}

/// How the answer must look.
#[derive(Debug, Deserialize, ToSchema)]
struct TextBody {
    format: Option<TextFormat>,
}

#[derive(Debug, Deserialize, ToSchema)]
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

    /// What a response repeats of its request.
    pub(crate) fn repeated(&self) -> Value {
        json!({"instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p,
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "tool_choice": self.tool_choice.clone().unwrap_or_else(|| json!("auto")),
            "tools": self.tools.iter().flatten().map(ResponsesTool::to_json).collect::<Vec<Value>>(),
            "text": {"format": self.text.as_ref().and_then(|text| text.format.as_ref()).map_or_else(
                || json!({"type": "text"}), |format| json!({"type": format.r#type, "name": format.name, "schema": format.schema}))}})
    }

    /// The chat that it means.
    pub(crate) fn chat(&self) -> Result<ChatBody, ApiError> {
        let mut faults = Vec::new();
        let mut messages = Vec::new();
        if let Some(instructions) = &self.instructions {
            messages.push(json!({"role": "system", "content": instructions}));
        }
        match &self.input {
            ResponsesInput::Text(text) => messages.push(json!({"role": "user", "content": text})),
            ResponsesInput::Items(items) => {
                for (index, item) in items.iter().enumerate() {
                    item.write(&format!("input[{index}]"), &mut messages, &mut faults);
                }
            }
        }
        let mut body = Map::new();
        let mut set = |name: &str, value: Value| {
            if !value.is_null() {
                body.insert(name.to_owned(), value);
            }
        };
        set("model", json!(self.model));
        set("messages", Value::Array(messages));
        set("max_completion_tokens", json!(self.max_output_tokens));
        set("temperature", json!(self.temperature));
        set("top_p", json!(self.top_p));
        set("parallel_tool_calls", json!(self.parallel_tool_calls));
        let tools =
            self.tools.iter().flatten().map(|tool| json!({"type": "function", "function": tool.function}));
        set("tools", Value::Array(tools.collect()));
        match &self.tool_choice {
            Some(Value::Object(choice)) => {
                set("tool_choice", json!({"type": "function", "function": {"name": choice.get("name")}}));
            }
            Some(choice) => set("tool_choice", choice.clone()),
            None => {}
        }
        if let Some(effort) = self.reasoning.as_ref().and_then(|reasoning| reasoning.get("effort")) {
            set("reasoning_effort", effort.clone());
        }
        if let Some(format) = self.text.as_ref().and_then(|text| text.format.as_ref()) {
            set(
                "response_format",
                match (format.r#type.as_str(), &format.schema) {
                    ("json_schema", schema) => {
                        let name = format.name.as_deref().unwrap_or("answer");
                        json!({"type": "json_schema", "json_schema": {"name": name, "schema": schema}})
                    }
                    (other, _) => json!({"type": other}),
                },
            );
        }
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        shape::understand(Value::Object(body), Unknown::Refuse)
    }
}

impl ResponsesTool {
    fn to_json(&self) -> Value {
        let mut tool = json!({"type": "function"});
        if let (Value::Object(tool), Value::Object(function)) = (&mut tool, json!(self.function)) {
            tool.extend(function);
        }
        tool
    }
}

impl InputItem {
    /// Adds what it means to the messages of a chat: thoughts and calls belong to one message of the assistant.
    fn write(&self, path: &str, messages: &mut Vec<Value>, faults: &mut Vec<Fault>) {
        let needed = |name: &str, faults: &mut Vec<Fault>| {
            faults.push(Fault::rule(format!("{path}.{name}"), "is required"));
        };
        match self.r#type.unwrap_or(InputItemType::Message) {
            InputItemType::Message => {
                let Some(role) = &self.role else { return needed("role", faults) };
                let text = text_of(self.content.as_ref(), &format!("{path}.content"), faults);
                match messages.last_mut() {
                    // What was thought before it was said.
                    Some(last) if role == "assistant" && is_thought(last) => last["content"] = json!(text),
                    _ => messages.push(json!({"role": role, "content": text})),
                }
            }
            InputItemType::Reasoning => {
                let text = text_of(self.content.as_ref(), &format!("{path}.content"), faults);
                if !text.is_empty() {
                    messages.push(json!({"role": "assistant", "content": "", "reasoning_content": text}));
                }
            }
            InputItemType::FunctionCall => {
                let Some(name) = &self.name else { return needed("name", faults) };
                let arguments = self.arguments.as_deref().unwrap_or_default();
                let call = json!({"id": self.call_id, "function": {"name": name, "arguments": arguments}});
                match messages.last_mut().filter(|last| last["role"] == "assistant") {
                    Some(last) => match last["tool_calls"].as_array_mut() {
                        Some(calls) => calls.push(call),
                        None => last["tool_calls"] = json!([call]),
                    },
                    None => {
                        messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
                    }
                }
            }
            InputItemType::FunctionCallOutput => {
                let text = text_of(self.output.as_ref(), &format!("{path}.output"), faults);
                messages.push(json!({"role": "tool", "tool_call_id": self.call_id, "content": text}));
            }
        }
    }
}

fn is_thought(message: &Value) -> bool {
    message["content"] == json!("")
        && message["reasoning_content"].is_string()
        && message["tool_calls"].is_null()
}

/// A string, or the texts of parts.
fn text_of(content: Option<&Value>, path: &str, faults: &mut Vec<Fault>) -> String {
    match content {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let mut texts = Vec::new();
            for (index, part) in parts.iter().enumerate() {
                let is_text = matches!(
                    part["type"].as_str(),
                    Some("input_text" | "output_text" | "text" | "reasoning_text")
                );
                match part["text"].as_str().filter(|_| is_text) {
                    Some(text) => texts.push(text),
                    None => faults.push(Fault::rule(format!("{path}[{index}]"), "must be a part with text")),
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
