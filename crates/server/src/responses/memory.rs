//! What is remembered of responses: read before one is asked, written when it is answered.

use std::{collections::BTreeMap, sync::Arc};

use axum::http::StatusCode;
use fornax_jobs::{EndedResponse, NewResponse, ResponseItem, State};
use serde_json::{Value, json};

use super::{
    conversations::is_conversation,
    request::{InputItem, ResponsesBody},
};
use crate::{
    app::{App, unix_seconds},
    ask::prepare::blocking,
    error::{ApiError, Code, Fault},
    front::keys::Tenant,
    shares::Share,
};

/// Items that a request may name instead of sending them again.
const REFERENCES_MAX: usize = 1024;

/// What a request goes on from, and what it names instead of sending it again.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) before: Vec<InputItem>,
    named: BTreeMap<String, InputItem>,
    /// Its part of what all bodies may take.
    _rooms: Vec<Share>,
}

impl Memory {
    /// The item that a reference stands for.
    pub(crate) fn meant(&self, item: &InputItem) -> Option<&InputItem> {
        self.named.get(item.reference()?)
    }
}

/// A response to be kept once it is answered.
pub(crate) struct Keeping {
    app: Arc<App>,
    owner: String,
    previous: Option<String>,
    /// The conversation that it is added to.
    conversation: Option<String>,
    asked: Vec<ResponseItem>,
    /// The client said so: what cannot be kept then is an error, and the answer without its being kept otherwise.
    is_demanded: bool,
    /// What was asked is held until then.
    _room: Share,
}

impl Keeping {
    /// Keeps what was answered, if there is room on the disk.
    pub(crate) async fn keep(&self, response: &mut Value) -> Result<(), ApiError> {
        let items = self.asked.iter().cloned().chain(answered(&response["output"]));
        let kept = NewResponse {
            id: response["id"].as_str().unwrap_or_default().to_owned(),
            owner: self.owner.clone(),
            previous: self.previous.clone(),
            conversation: self.conversation.clone(),
            items: items.collect(),
            body: response.to_string(),
        };
        match self.app.store()?.keep_response(&kept).await {
            Ok(()) => Ok(()),
            Err(error) if self.is_demanded => Err(error.into()),
            Err(error) => {
                tracing::error!(reason = error.to_string(), "a response could not be kept");
                response["store"] = json!(false);
                Ok(())
            }
        }
    }
}

/// Items of an answer, as they are kept.
fn answered(output: &Value) -> impl Iterator<Item = ResponseItem> {
    output.as_array().into_iter().flatten().map(|item| ResponseItem {
        id: item["id"].as_str().unwrap_or_default().to_owned(),
        said: true,
        body: item.to_string(),
    })
}

/// What is told of a response, and its items, once the job has ended that answered it while nobody waited.
pub(crate) fn ended(
    EndedResponse { body: mut response, state, output }: EndedResponse,
) -> (String, Vec<ResponseItem>) {
    let answer = &output["response"];
    let status = match state {
        State::Completed => &answer["status"],
        State::Cancelled => &json!("cancelled"),
        _ => &json!("failed"),
    };
    response["status"] = status.clone();
    if state == State::Completed {
        for field in ["output", "usage", "incomplete_details"] {
            response[field] = answer[field].clone();
        }
        response["completed_at"] = json!(unix_seconds());
    } else if state != State::Cancelled {
        response["error"] = json!({"code": output["code"], "message": output["error"]});
    }
    let items = answered(&response["output"]).collect();
    (response.to_string(), items)
}

impl App {
    /// Whether responses are kept here.
    pub(crate) fn keeps_responses(&self) -> bool {
        self.durable.get().is_some()
    }

    /// What a request of an owner's needs of what was kept.
    pub(crate) async fn remember(
        &self,
        owner: &str,
        tenant: &Tenant,
        body: &ResponsesBody,
    ) -> Result<Memory, ApiError> {
        let references = body.references();
        let mut memory = Memory::default();
        let fields = [
            ("background", body.is_background()),
            ("previous_response_id", body.previous().is_some()),
            ("conversation", body.conversation().is_some()),
            ("input", !references.is_empty()),
        ];
        let Some((field, _)) = fields.into_iter().find(|(_, needed)| *needed) else { return Ok(memory) };
        if !self.keeps_responses() {
            let rule = "needs a server that keeps responses: start it with --jobs-db, or send the whole conversation";
            return Err(ApiError::fault(Fault::rule(field, rule)));
        }
        let store = self.store()?;
        let (mut before, mut named) = (Vec::new(), Vec::new());
        let most = self.options.body_bytes_max;
        let mut bytes = 0;
        let from = match (body.previous(), body.conversation()) {
            (Some(_), Some(_)) => {
                let rule = "cannot be combined with previous_response_id";
                return Err(ApiError::fault(Fault::rule("conversation", rule)));
            }
            (Some(id), None) => Some(("previous_response_id", id)),
            (None, id) => id.map(|id| ("conversation", id)),
        };
        if let Some((field, id)) = from {
            let is_own = field == "conversation";
            let wrong = |code, rule: &str| {
                let fault = Fault::rule(field, rule);
                let message = fault.message.clone();
                let status = Some(StatusCode::BAD_REQUEST);
                ApiError { faults: vec![fault], status, ..ApiError::new(code, message) }
            };
            let (code, gone) = match is_own {
                true => (
                    Code::ConversationNotFound,
                    "there is no such conversation of this key; they are kept for a limited time",
                ),
                false => (
                    Code::ResponseNotFound,
                    "there is no such response of this key; responses are kept for a limited time",
                ),
            };
            let conversation = match is_own == is_conversation(id) {
                true => store.conversation(owner, id).await?,
                false => None,
            };
            let conversation = conversation.ok_or_else(|| wrong(code, gone))?;
            if conversation.is_open {
                return Err(wrong(Code::InvalidInput, "is still being answered"));
            }
            if !conversation.is_whole {
                return Err(wrong(Code::ResponseNotFound, "responses before it are not kept any more"));
            }
            bytes = usize::try_from(conversation.bytes).unwrap_or(usize::MAX);
            if bytes > most {
                let rule = format!("its conversation has {bytes} bytes; {most} can be gone on from");
                return Err(wrong(Code::InvalidInput, &rule));
            }
            memory._rooms.push(self.room(tenant, bytes).await?);
            before = store.conversation_items(&conversation).await?;
        }
        if references.len() > REFERENCES_MAX {
            let rule = format!("must name at most {REFERENCES_MAX} items that were kept");
            return Err(ApiError::fault(Fault::rule("input", rule)));
        }
        for (id, times) in references {
            // One that is not kept is told with its place among the others' faults.
            let Some(item) = store.response_item(owner, &id).await? else { continue };
            bytes = bytes.saturating_add(item.len().saturating_mul(times));
            if bytes > most {
                let rule = format!("with what it names has more than {most} bytes");
                return Err(ApiError::fault(Fault::rule("input", rule)));
            }
            memory._rooms.push(self.room(tenant, item.len().saturating_mul(times)).await?);
            named.push((id, item));
        }
        let understood = blocking(self, tenant, move |patience| {
            let read = |text: &str| {
                patience.check()?;
                serde_json::from_str::<InputItem>(text)
                    .map_err(|_| ApiError::new(Code::Internal, "an item that was kept cannot be read"))
            };
            let before = before.iter().map(|item| read(item)).collect::<Result<_, _>>()?;
            let named = named.iter().map(|(id, item)| Ok((id.clone(), read(item)?)));
            Ok((before, named.collect::<Result<_, ApiError>>()?))
        });
        (memory.before, memory.named) = understood.await?;
        Ok(memory)
    }

    /// What is needed to keep a response once it is answered.
    pub(crate) fn keeping(
        self: &Arc<App>,
        owner: &str,
        body: &ResponsesBody,
        asked: Vec<ResponseItem>,
        room: Share,
    ) -> Keeping {
        Keeping {
            app: Arc::clone(self),
            owner: owner.to_owned(),
            previous: body.previous().map(str::to_owned),
            conversation: body.conversation().map(str::to_owned),
            asked,
            is_demanded: body.store == Some(true),
            _room: room,
        }
    }
}
