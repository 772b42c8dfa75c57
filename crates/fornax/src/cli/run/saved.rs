//! A conversation in a file: JSON with the messages as OpenAI's clients write them.

use std::io::Write;
use std::path::Path;

use fornax::{Call, Content, Message, Outcome, Role};
use serde::{Deserialize, Serialize};

use super::super::failure::Failure;
use super::super::output;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Saved {
    pub(super) model: String,
    pub(super) messages: Vec<Message>,
    pub(super) temperature: Option<f32>,
    pub(super) seed: Option<u64>,
    pub(super) schema: Option<serde_json::Value>,
}

/// As it stands in the file.
#[derive(Serialize, Deserialize)]
struct Document {
    #[serde(default)]
    model: String,
    messages: Vec<Turn>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    temperature: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    schema: Option<serde_json::Value>,
}

#[derive(Serialize, Deserialize)]
struct Turn {
    role: String,
    #[serde(default)]
    content: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<TurnCall>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct TurnCall {
    #[serde(default)]
    id: Option<String>,
    r#type: String,
    function: TurnFunction,
}

#[derive(Serialize, Deserialize)]
struct TurnFunction {
    name: String,
    /// The text of a JSON object.
    arguments: String,
}

impl Turn {
    fn new(role: &str, content: String) -> Turn {
        Turn { role: role.to_owned(), content, tool_calls: Vec::new(), tool_call_id: None }
    }

    /// A message as it stands in the file: results are turns of their own.
    fn of(message: &Message) -> Vec<Turn> {
        let mut turns = Vec::new();
        let mut own = Turn::new(message.role.name(), message.text());
        for part in &message.content {
            match part {
                Content::Call(call) => own.tool_calls.push(TurnCall {
                    id: call.id.clone(),
                    r#type: "function".to_owned(),
                    function: TurnFunction {
                        name: call.name.clone(),
                        arguments: serde_json::json!(call.arguments).to_string(),
                    },
                }),
                Content::Result(outcome) => turns.push(Turn {
                    tool_call_id: Some(outcome.call.clone().unwrap_or_default()),
                    ..Turn::new("tool", outcome.text.clone())
                }),
                Content::Text(_) | Content::Thought(_) | Content::Image(_) => {}
            }
        }
        if turns.is_empty() {
            turns.push(own);
        }
        turns
    }

    /// The messages of the file; or whose they cannot be.
    fn messages(turns: Vec<Turn>) -> Result<Vec<Message>, String> {
        let mut messages: Vec<Message> = Vec::new();
        for (index, turn) in turns.into_iter().enumerate() {
            let role = match (turn.role.as_str(), &turn.tool_call_id) {
                ("user", _) => Role::User,
                ("assistant", _) => Role::Assistant,
                ("system", _) if index == 0 => Role::System,
                ("tool", Some(call)) => {
                    let outcome = Outcome { call: Some(call.clone()), name: None, text: turn.content };
                    match messages.last_mut() {
                        // Results of one answer's calls are one message.
                        Some(last) if last.content.iter().all(|part| matches!(part, Content::Result(_))) => {
                            last.content.push(Content::Result(outcome));
                        }
                        _ => messages.push(Message::of(Role::User, vec![Content::Result(outcome)])),
                    }
                    continue;
                }
                (other, _) => return Err(format!("message {index} is of {other:?}")),
            };
            let mut content = vec![Content::Text(turn.content)];
            for TurnCall { id, function, .. } in turn.tool_calls {
                let arguments = Call::arguments_of(&function.arguments)
                    .ok_or_else(|| format!("message {index} calls with no JSON object"))?;
                content.push(Content::Call(Call { id, name: function.name, arguments }));
            }
            messages.push(Message::of(role, content));
        }
        Ok(messages)
    }
}

impl Saved {
    /// Reads a conversation and checks who speaks in it.
    pub(super) fn read(path: &Path) -> Result<Saved, Failure> {
        let wrong = |what: String| Failure::usage(format!("{} is no conversation: {what}", path.display()));
        let document: Document =
            serde_json::from_str(&output::text_of(path)?).map_err(|error| wrong(error.to_string()))?;
        let Document { model, messages, temperature, seed, schema } = document;
        let messages = Turn::messages(messages).map_err(wrong)?;
        if temperature.is_some_and(|value| !value.is_finite() || value < 0.0) {
            return Err(wrong(format!("temperature {temperature:?}")));
        }
        Ok(Saved { model, messages, temperature, seed, schema })
    }

    /// Writes it whole or not at all. A file that is there and is something else stays as it is.
    pub(super) fn write(&self, path: &Path) -> Result<(), Failure> {
        if path.exists() && Saved::read(path).is_err() {
            let message = format!("{} exists and is no conversation; choose another name", path.display());
            return Err(Failure::usage(message));
        }
        let document = Document {
            model: self.model.clone(),
            messages: self.messages.iter().flat_map(Turn::of).collect(),
            temperature: self.temperature,
            seed: self.seed,
            schema: self.schema.clone(),
        };
        let text =
            serde_json::to_string_pretty(&document).map_err(|error| Failure::usage(error.to_string()))?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let written = || -> std::io::Result<()> {
            let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
            writeln!(file, "{text}")?;
            file.persist(path)?;
            Ok(())
        }();
        written.map_err(|error| Failure::unwritable(path, &error))
    }

    /// The system's message and the turns.
    pub(super) fn split(&self) -> (Option<String>, Vec<Message>) {
        match self.messages.split_first() {
            Some((first, rest)) if first.role == Role::System => (Some(first.text()), rest.to_vec()),
            _ => (None, self.messages.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_comes_back_and_overwrites_only_its_kind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chat.json");
        let arguments = Call::arguments_of(r#"{"city": "Paris"}"#).unwrap();
        let call = Call { id: Some("c1".to_owned()), name: "weather".to_owned(), arguments };
        let saved = Saved {
            model: "smollm2".to_owned(),
            messages: vec![
                Message::system("Be brief."),
                Message::user("Grüße"),
                Message::of(Role::Assistant, vec![Content::Text("\"ja\"\n".to_owned()), Content::Call(call)]),
                Message::result("c1", "18 degrees"),
            ],
            temperature: Some(0.5),
            seed: Some(7),
            schema: None,
        };
        saved.write(&path).unwrap();
        saved.write(&path).unwrap();
        assert_eq!(Saved::read(&path).unwrap(), saved);
        let (system, turns) = saved.split();
        assert_eq!((system.as_deref(), turns.len()), (Some("Be brief."), 3));
        let other = folder.path().join("notes.txt");
        std::fs::write(&other, "mine").unwrap();
        assert!(saved.write(&other).unwrap_err().to_string().contains("is no conversation"));
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "mine");
    }

    #[test]
    fn what_is_no_conversation_is_refused_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chat.json");
        let check = |text: &str, says: &str| {
            std::fs::write(&path, text).unwrap();
            let failure = Saved::read(&path).unwrap_err().to_string();
            assert!(failure.contains(says), "{failure}");
        };
        check("{", "is no conversation");
        check(r#"{"model": "a"}"#, "messages");
        check(r#"{"messages": [{"role": "tool", "content": ""}]}"#, "message 0 is of \"tool\"");
        check(
            r#"{"messages": [{"role": "user", "content": ""}, {"role": "system", "content": ""}]}"#,
            "message 1 is of \"system\"",
        );
        check(r#"{"messages": [], "temperature": -1}"#, "temperature");
    }
}
