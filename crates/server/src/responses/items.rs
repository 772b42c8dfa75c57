//! An answer as items, whole and streamed.

use axum::response::sse::Event;
use fornax_chat::{Counts, Finish, call_id};
use fornax_text::Delta;
use serde_json::{Value, json};

use crate::{
    app::{random_id, unix_seconds},
    sse::named_event,
};

/// A response under way.
pub(crate) struct Items {
    id: String,
    created: u64,
    model: String,
    /// What it repeats of its request.
    repeated: Value,
    items: Vec<Item>,
    /// Numbers the events.
    sequence: usize,
}

struct Item {
    id: String,
    kind: Kind,
    text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call { call_id: String, name: String },
}

impl Item {
    fn to_json(&self, status: &str) -> Value {
        let id = &self.id;
        match &self.kind {
            Kind::Reasoning => {
                let content = json!([{"type": "reasoning_text", "text": self.text}]);
                json!({"type": "reasoning", "id": id, "status": status, "summary": [], "content": content})
            }
            Kind::Message => {
                json!({"type": "message", "id": id, "status": status, "role": "assistant", "content": [self.part()]})
            }
            Kind::Call { call_id, name } => {
                json!({"type": "function_call", "id": id, "status": status, "call_id": call_id, "name": name,
                    "arguments": self.text})
            }
        }
    }

    /// The one part of a message.
    fn part(&self) -> Value {
        json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []})
    }
}

impl Items {
    pub(crate) fn new(model: &str, repeated: Value) -> Items {
        let id = format!("resp_{}", random_id());
        Items {
            id,
            created: unix_seconds(),
            model: model.to_owned(),
            repeated,
            items: Vec::new(),
            sequence: 0,
        }
    }

    /// The response as it stands.
    pub(crate) fn response(&self, ended: Option<(Finish, Counts)>) -> Value {
        let (status, reason) = match ended {
            None => ("in_progress", Value::Null),
            Some((Finish::Length | Finish::Truncated, _)) => {
                ("incomplete", json!({"reason": "max_output_tokens"}))
            }
            Some(_) => ("completed", Value::Null),
        };
        let last = self.items.len();
        let items = self.items.iter().enumerate().map(|(index, item)| {
            item.to_json(if index + 1 == last && status != "completed" { "incomplete" } else { "completed" })
        });
        let usage = ended.map(|(_, counts)| {
            json!({"input_tokens": counts.prompt, "input_tokens_details": {"cached_tokens": counts.cached},
                "output_tokens": counts.generated, "output_tokens_details": {"reasoning_tokens": counts.thought},
                "total_tokens": counts.prompt + counts.generated})
        });
        let mut response = json!({"id": self.id, "object": "response", "created_at": self.created,
            "status": status, "error": null, "incomplete_details": reason, "model": self.model,
            "output": items.collect::<Vec<Value>>(), "previous_response_id": null, "store": false,
            "background": false, "truncation": "disabled", "metadata": {}, "reasoning": {"effort": null, "summary": null},
            "usage": usage});
        if let (Some(into), Some(from)) = (response.as_object_mut(), self.repeated.as_object()) {
            into.extend(from.clone());
        }
        response
    }

    /// An event of that name.
    pub(crate) fn event(&mut self, name: &str, mut value: Value) -> Event {
        value["type"] = json!(name);
        value["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        named_event(name, &value)
    }

    /// Takes a part of the answer, and tells it as a stream does.
    pub(crate) fn take(&mut self, delta: Delta) -> Vec<Event> {
        let mut events = Vec::new();
        let last = self.items.last().map(|item| &item.kind);
        let kind = match (&delta, last) {
            (Delta::Reasoning(_), Some(Kind::Reasoning)) | (Delta::Content(_), Some(Kind::Message)) => None,
            (Delta::Reasoning(_), _) => Some((Kind::Reasoning, "rs")),
            (Delta::Content(_), _) => Some((Kind::Message, "msg")),
            (Delta::Call { name, .. }, _) => {
                Some((Kind::Call { call_id: format!("call_{}", call_id()), name: name.clone() }, "fc"))
            }
            (Delta::Arguments { .. }, _) => None,
        };
        if let Some((kind, prefix)) = kind {
            events.extend(self.stop());
            let item = Item { id: format!("{prefix}_{}", random_id()), kind, text: String::new() };
            let mut told = item.to_json("in_progress");
            if !matches!(item.kind, Kind::Call { .. }) {
                told["content"] = json!([]);
            }
            let (index, id, part) = (self.items.len(), item.id.clone(), item.part());
            let is_message = item.kind == Kind::Message;
            self.items.push(item);
            events
                .push(self.event("response.output_item.added", json!({"output_index": index, "item": told})));
            if is_message {
                let part = json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
                events.push(self.event("response.content_part.added", part));
            }
        }
        let more = match delta {
            Delta::Reasoning(text) | Delta::Content(text) | Delta::Arguments { text, .. } => text,
            Delta::Call { .. } => return events,
        };
        let index = self.items.len().saturating_sub(1);
        let Some(item) = self.items.last_mut() else { return events };
        item.text.push_str(&more);
        let mut told = json!({"item_id": item.id, "output_index": index, "delta": more});
        let name = match item.kind {
            Kind::Call { .. } => "response.function_call_arguments.delta",
            Kind::Reasoning => "response.reasoning_text.delta",
            Kind::Message => "response.output_text.delta",
        };
        if !matches!(item.kind, Kind::Call { .. }) {
            told["content_index"] = json!(0);
        }
        if item.kind == Kind::Message {
            told["logprobs"] = json!([]);
        }
        events.push(self.event(name, told));
        events
    }

    /// Ends the item that is open.
    pub(crate) fn stop(&mut self) -> Vec<Event> {
        let Some(index) = self.items.len().checked_sub(1) else { return Vec::new() };
        let Item { id, kind, text } = &self.items[index];
        let (id, text, part) = (id.clone(), text.clone(), self.items[index].part());
        let whole = self.items[index].to_json("completed");
        let at = json!({"item_id": id, "output_index": index});
        let with = |fields: Value| {
            let mut value = at.clone();
            if let (Some(into), Value::Object(from)) = (value.as_object_mut(), fields) {
                into.extend(from);
            }
            value
        };
        let told = match kind {
            Kind::Call { name, .. } => {
                let fields = json!({"arguments": text, "name": name});
                vec![("response.function_call_arguments.done", with(fields))]
            }
            Kind::Reasoning => {
                vec![("response.reasoning_text.done", with(json!({"content_index": 0, "text": text})))]
            }
            Kind::Message => vec![
                (
                    "response.output_text.done",
                    with(json!({"content_index": 0, "text": text, "logprobs": []})),
                ),
                ("response.content_part.done", with(json!({"content_index": 0, "part": part}))),
            ],
        };
        let done = ("response.output_item.done", json!({"output_index": index, "item": whole}));
        told.into_iter().chain([done]).map(|(name, value)| self.event(name, value)).collect()
    }
}
