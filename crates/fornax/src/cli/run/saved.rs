//! A conversation in a file: JSON with the messages as OpenAI's clients write them.

use std::io::Write;
use std::path::Path;

use fornax::Message;
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
    content: String,
}

impl Saved {
    /// Reads a conversation and checks who speaks in it.
    pub(super) fn read(path: &Path) -> Result<Saved, Failure> {
        let wrong = |what: String| Failure::usage(format!("{} is no conversation: {what}", path.display()));
        let document: Document =
            serde_json::from_str(&output::text_of(path)?).map_err(|error| wrong(error.to_string()))?;
        let Document { model, messages, temperature, seed, schema } = document;
        for (index, Turn { role, .. }) in messages.iter().enumerate() {
            match role.as_str() {
                "user" | "assistant" => {}
                "system" if index == 0 => {}
                _ => return Err(wrong(format!("message {index} is of {role:?}"))),
            }
        }
        if temperature.is_some_and(|value| !value.is_finite() || value < 0.0) {
            return Err(wrong(format!("temperature {temperature:?}")));
        }
        let messages = messages.into_iter().map(|turn| Message::new(turn.role, turn.content)).collect();
        Ok(Saved { model, messages, temperature, seed, schema })
    }

    /// Writes it whole or not at all. A file that is there and is something else stays as it is.
    pub(super) fn write(&self, path: &Path) -> Result<(), Failure> {
        if path.exists() && Saved::read(path).is_err() {
            let message = format!("{} exists and is no conversation; choose another name", path.display());
            return Err(Failure::usage(message));
        }
        let turn = |message: &Message| Turn { role: message.role.clone(), content: message.content.clone() };
        let document = Document {
            model: self.model.clone(),
            messages: self.messages.iter().map(turn).collect(),
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
            Some((first, rest)) if first.role == "system" => (Some(first.content.clone()), rest.to_vec()),
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
        let saved = Saved {
            model: "smollm2".to_owned(),
            messages: vec![
                Message::system("Be brief."),
                Message::user("Grüße"),
                Message::assistant("\"ja\"\n"),
            ],
            temperature: Some(0.5),
            seed: Some(7),
            schema: None,
        };
        saved.write(&path).unwrap();
        saved.write(&path).unwrap();
        assert_eq!(Saved::read(&path).unwrap(), saved);
        let (system, turns) = saved.split();
        assert_eq!((system.as_deref(), turns.len()), (Some("Be brief."), 2));
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
