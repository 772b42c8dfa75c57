//! What was said so far, by whom, in typed parts.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::{Error, Fault, Place};

/// Messages, the oldest first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The messages.
    pub messages: Vec<Message>,
}

/// What one of them says.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// The speaker's own name, which some templates show.
    pub name: Option<String>,
    /// What is said, part by part.
    pub content: Vec<Content>,
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Whoever instructs the model beforehand.
    System,
    /// Whoever asks, and whoever runs tools for the model: results are part of this side.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// The word that templates know it by.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// What is said. Several texts of a message stand on lines of their own.
    Text(String),
    /// A picture. Models that read none refuse it.
    Image(Image),
    /// What the model thought before it spoke.
    Thought(String),
    /// A tool that the model called.
    Call(Call),
    /// What a call came to.
    Result(Outcome),
}

/// A picture as it was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The bytes of its file. Shared, because conversations are copied.
    pub bytes: Arc<[u8]>,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// What its result is given back under.
    pub id: Option<String>,
    /// The tool, as the model wrote it.
    pub name: String,
    /// Its arguments by name.
    pub arguments: Map<String, Value>,
}

impl Call {
    /// Arguments out of their JSON text; an empty one has none. `None` where it is no object.
    pub fn arguments_of(text: &str) -> Option<Map<String, Value>> {
        if text.is_empty() { Some(Map::new()) } else { serde_json::from_str(text).ok() }
    }

    /// As templates know it: they write the arguments as JSON themselves.
    fn to_json(&self) -> Value {
        let function = json!({"name": self.name, "arguments": self.arguments});
        match &self.id {
            Some(id) => json!({"id": id, "type": "function", "function": function}),
            None => json!({"type": "function", "function": function}),
        }
    }
}

/// What a call came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The call's id.
    pub call: Option<String>,
    /// The tool; found by the id where it is not given.
    pub name: Option<String>,
    /// What it says.
    pub text: String,
}

impl Message {
    /// One text of anyone.
    pub fn new(role: Role, text: impl Into<String>) -> Message {
        Message::of(role, vec![Content::Text(text.into())])
    }

    /// Parts of anyone.
    pub fn of(role: Role, content: Vec<Content>) -> Message {
        Message { role, name: None, content }
    }

    /// What the model is told beforehand.
    pub fn system(text: impl Into<String>) -> Message {
        Message::new(Role::System, text)
    }

    /// What the user says.
    pub fn user(text: impl Into<String>) -> Message {
        Message::new(Role::User, text)
    }

    /// What the model said.
    pub fn assistant(text: impl Into<String>) -> Message {
        Message::new(Role::Assistant, text)
    }

    /// What the model called.
    pub fn calls(calls: impl IntoIterator<Item = Call>) -> Message {
        Message::of(Role::Assistant, calls.into_iter().map(Content::Call).collect())
    }

    /// What a call came to, given back to the model.
    pub fn result(call: impl Into<String>, text: impl Into<String>) -> Message {
        let outcome = Outcome { call: Some(call.into()), name: None, text: text.into() };
        Message::of(Role::User, vec![Content::Result(outcome)])
    }

    /// Its texts, each on lines of its own.
    pub fn text(&self) -> String {
        joined(self.content.iter().filter_map(|part| match part {
            Content::Text(text) => Some(text.as_str()),
            _ => None,
        }))
    }

    /// Its pictures, in their order.
    pub fn images(&self) -> impl Iterator<Item = &Image> {
        self.content.iter().filter_map(|part| match part {
            Content::Image(image) => Some(image),
            _ => None,
        })
    }

    /// Texts and pictures as templates know them, which write a placeholder for each picture.
    fn parts(&self) -> Value {
        let part = |part: &Content| match part {
            Content::Text(text) => Some(json!({"type": "text", "text": text})),
            Content::Image(_) => Some(json!({"type": "image"})),
            _ => None,
        };
        self.content.iter().filter_map(part).collect()
    }

    /// As templates know it. Results are messages of their own and stand before what is said to them.
    fn write(&self, messages: &mut Vec<Value>) {
        let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
        let mut results = 0;
        for part in &self.content {
            match part {
                Content::Text(text) => texts.push(text.as_str()),
                Content::Thought(text) => thoughts.push(text.as_str()),
                Content::Call(call) => calls.push(call.to_json()),
                // Between the texts, below.
                Content::Image(_) => {}
                Content::Result(outcome) => {
                    results += 1;
                    let mut message = json!({"role": "tool", "content": outcome.text});
                    set(&mut message, "name", json!(outcome.name));
                    set(&mut message, "tool_call_id", json!(outcome.call));
                    messages.push(message);
                }
            }
        }
        if results > 0 && results == self.content.len() {
            return;
        }
        // Where only calls are made, nothing is said: many templates take no null for that.
        let content = if self.images().next().is_some() { self.parts() } else { json!(joined(texts)) };
        let mut message = json!({"role": self.role.name(), "content": content});
        set(&mut message, "name", json!(self.name));
        if !calls.is_empty() {
            message["tool_calls"] = json!(calls);
        }
        if !thoughts.is_empty() {
            message["reasoning_content"] = json!(joined(thoughts));
        }
        messages.push(message);
    }
}

fn set(message: &mut Value, name: &str, value: Value) {
    if !value.is_null() {
        message[name] = value;
    }
}

fn joined<'t>(texts: impl IntoIterator<Item = &'t str>) -> String {
    texts.into_iter().collect::<Vec<&str>>().join("\n")
}

impl From<Vec<Message>> for Conversation {
    fn from(messages: Vec<Message>) -> Conversation {
        Conversation { messages }
    }
}

impl Conversation {
    /// Bytes of what is said and of results.
    pub fn bytes(&self) -> usize {
        let parts = self.messages.iter().flat_map(|message| &message.content);
        parts
            .map(|part| match part {
                Content::Text(text) => text.len(),
                Content::Result(outcome) => outcome.text.len(),
                Content::Image(_) | Content::Thought(_) | Content::Call(_) => 0,
            })
            .sum()
    }

    /// Its pictures with the messages that show them.
    pub(crate) fn images(&self) -> Vec<(usize, &Image)> {
        let messages = self.messages.iter().enumerate();
        messages.flat_map(|(index, message)| message.images().map(move |image| (index, image))).collect()
    }

    /// Refuses images where the model reads none, for this reason.
    pub(crate) fn check(&self, blind: Option<&'static str>) -> Result<(), Error> {
        let Some(reason) = blind else { return Ok(()) };
        let shows = |message: &Message| message.images().next().is_some();
        let faults: Vec<Fault> = self
            .messages
            .iter()
            .enumerate()
            .filter(|(_, message)| shows(message))
            .map(|(index, _)| Fault::rule(Place::Message(index), reason))
            .collect();
        if faults.is_empty() { Ok(()) } else { Err(Error::Asked(faults)) }
    }

    /// The messages as a template knows them.
    pub(crate) fn to_json(&self, template: &str) -> Vec<Value> {
        let mut messages = Vec::with_capacity(self.messages.len());
        for message in &self.messages {
            message.write(&mut messages);
        }
        name_results(&mut messages);
        name_thoughts(&mut messages, template);
        messages
    }
}

/// Gives results of calls the name of the tool, which some templates want, by the id of the call.
fn name_results(messages: &mut [Value]) {
    let mut names: HashMap<String, Value> = HashMap::new();
    for message in messages {
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            if let Some(id) = call["id"].as_str() {
                names.insert(id.to_owned(), call["function"]["name"].clone());
            }
        }
        let known = message["tool_call_id"].as_str().and_then(|id| names.get(id)).cloned();
        if let Some(name) = known.filter(|_| message["role"] == "tool" && message["name"].is_null()) {
            message["name"] = name;
        }
    }
}

/// What was thought has several names among templates.
fn name_thoughts(messages: &mut [Value], template: &str) {
    let names = ["thinking", "reasoning"].map(|name| (name, [format!(".{name}"), format!("['{name}']")]));
    for message in messages {
        let thought = message["reasoning_content"].clone();
        for (name, uses) in names.iter().filter(|_| thought.is_string()) {
            if uses.iter().any(|text| template.contains(text)) {
                message[*name] = thought.clone();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, name: &str) -> Call {
        Call { id: Some(id.to_owned()), name: name.to_owned(), arguments: Map::new() }
    }

    #[test]
    fn results_stand_before_what_is_said_to_them_and_have_the_name_of_their_tool() {
        let outcome = Outcome { call: Some("1".to_owned()), name: None, text: "18".to_owned() };
        let parts = vec![Content::Text("And now?".to_owned()), Content::Result(outcome)];
        let conversation = Conversation::from(vec![
            Message::calls([call("1", "weather")]),
            Message::of(Role::User, parts),
            Message::result("unknown", "0"),
        ]);
        let wanted = json!([
            {"role": "assistant", "content": "",
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {}}}]},
            {"role": "tool", "content": "18", "tool_call_id": "1", "name": "weather"},
            {"role": "user", "content": "And now?"},
            {"role": "tool", "content": "0", "tool_call_id": "unknown"},
        ]);
        assert_eq!(json!(conversation.to_json("")), wanted);
    }

    #[test]
    fn texts_are_lines_and_thoughts_have_the_template_s_name() {
        let text = |text: &str| Content::Text(text.to_owned());
        let parts = vec![Content::Thought("Hm.".to_owned()), text("a"), text("b")];
        let conversation = Conversation::from(vec![Message::of(Role::Assistant, parts)]);
        let written = conversation.to_json("{{ message.thinking }}");
        let wanted =
            json!([{"role": "assistant", "content": "a\nb", "reasoning_content": "Hm.", "thinking": "Hm."}]);
        assert_eq!(json!(written), wanted);
    }

    #[test]
    fn an_image_is_refused_with_its_message() {
        let image = Content::Image(Image { bytes: vec![1].into() });
        let conversation = Conversation::from(vec![Message::user("a"), Message::of(Role::User, vec![image])]);
        assert!(conversation.check(None).is_ok());
        let Err(Error::Asked(faults)) = conversation.check(Some("none")) else {
            panic!("no model reads images")
        };
        assert_eq!(faults.iter().map(|fault| &fault.place).collect::<Vec<_>>(), [&Place::Message(1)]);
    }
}
