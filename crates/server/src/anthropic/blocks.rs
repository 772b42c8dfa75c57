//! An answer as blocks, whole and streamed.

use axum::response::sse::Event;
use fornax_chat::{Counts, Finish, call_id};
use fornax_text::Delta;
use serde_json::{Value, json};

use crate::sse::named_event;

/// What is known of a message before its answer.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) model: String,
    pub(crate) stop_sequences: Vec<String>,
}

impl Head {
    /// The message, with these blocks.
    pub(crate) fn message(
        &self,
        content: Vec<Value>,
        ended: Option<(Finish, bool)>,
        counts: Counts,
    ) -> Value {
        let (reason, sequence) = match ended {
            Some((finish, called)) => self.stopped(finish, called),
            None => (Value::Null, Value::Null),
        };
        json!({"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": reason, "stop_sequence": sequence, "usage": usage(counts)})
    }

    /// Why it ended, and at which of the caller's words.
    pub(crate) fn stopped(&self, finish: Finish, called: bool) -> (Value, Value) {
        match finish {
            Finish::Stop(index) | Finish::Cut(index) => {
                (json!("stop_sequence"), json!(self.stop_sequences.get(index)))
            }
            Finish::End if called => (json!("tool_use"), Value::Null),
            Finish::End | Finish::Cancelled => (json!("end_turn"), Value::Null),
            Finish::Length | Finish::Truncated => (json!("max_tokens"), Value::Null),
        }
    }
}

pub(crate) fn usage(counts: Counts) -> Value {
    json!({"input_tokens": counts.prompt - counts.cached, "cache_read_input_tokens": counts.cached,
        "cache_creation_input_tokens": 0, "output_tokens": counts.generated})
}

/// The blocks of an answer so far.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    blocks: Vec<Block>,
}

#[derive(Debug)]
enum Block {
    Thinking(String),
    Text(String),
    ToolUse { id: String, name: String, input: String },
}

impl Block {
    /// As a stream announces it.
    fn empty(&self) -> Value {
        match self {
            Block::Thinking(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
            Block::Text(_) => json!({"type": "text", "text": ""}),
            Block::ToolUse { id, name, .. } => {
                json!({"type": "tool_use", "id": id, "name": name, "input": {}})
            }
        }
    }

    fn whole(self) -> Value {
        match self {
            Block::Thinking(thinking) => json!({"type": "thinking", "thinking": thinking, "signature": ""}),
            Block::Text(text) => json!({"type": "text", "text": text}),
            Block::ToolUse { id, name, input } => {
                // An answer that was cut leaves no JSON; Anthropic's own advice is to say so in this way.
                let input: Value =
                    serde_json::from_str(&input).unwrap_or_else(|_| json!({"INVALID_JSON": input}));
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        }
    }
}

impl Blocks {
    /// Takes a part of the answer, and tells it as a stream does.
    pub(crate) fn take(&mut self, delta: Delta) -> Vec<Event> {
        let mut events = Vec::new();
        let is_new = match (&delta, self.blocks.last()) {
            (Delta::Call { .. }, _) => true,
            (Delta::Reasoning(_), last) => !matches!(last, Some(Block::Thinking(_))),
            (Delta::Content(_), last) => !matches!(last, Some(Block::Text(_))),
            (Delta::Arguments { .. }, _) => false,
        };
        if is_new {
            events.extend(self.stop());
            let block = match &delta {
                Delta::Reasoning(_) => Block::Thinking(String::new()),
                Delta::Call { name, .. } => Block::ToolUse {
                    id: format!("toolu_{}", call_id()),
                    name: name.clone(),
                    input: String::new(),
                },
                Delta::Content(_) | Delta::Arguments { .. } => Block::Text(String::new()),
            };
            let start = json!({"type": "content_block_start", "index": self.blocks.len(), "content_block": block.empty()});
            events.push(named_event("content_block_start", &start));
            self.blocks.push(block);
        }
        let told = match (delta, self.blocks.last_mut()) {
            (Delta::Reasoning(more), Some(Block::Thinking(text))) => {
                text.push_str(&more);
                json!({"type": "thinking_delta", "thinking": more})
            }
            (Delta::Content(more), Some(Block::Text(text))) => {
                text.push_str(&more);
                json!({"type": "text_delta", "text": more})
            }
            (Delta::Arguments { text: more, .. }, Some(Block::ToolUse { input, .. })) => {
                input.push_str(&more);
                json!({"type": "input_json_delta", "partial_json": more})
            }
            _ => return events,
        };
        let delta = json!({"type": "content_block_delta", "index": self.blocks.len() - 1, "delta": told});
        events.push(named_event("content_block_delta", &delta));
        events
    }

    /// Ends the block that is open.
    pub(crate) fn stop(&self) -> Option<Event> {
        let last = self.blocks.len().checked_sub(1)?;
        Some(named_event("content_block_stop", &json!({"type": "content_block_stop", "index": last})))
    }

    pub(crate) fn have_calls(&self) -> bool {
        self.blocks.iter().any(|block| matches!(block, Block::ToolUse { .. }))
    }

    pub(crate) fn whole(self) -> Vec<Value> {
        self.blocks.into_iter().map(Block::whole).collect()
    }
}
