//! `POST /v1/responses`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response, sse::Event},
};
use fornax_chat::{Ask, Counts, Finish, Piece};
use fornax_jobs::{NewJob, NewResponse, Policy, ResponseItem};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{
    items::Items,
    memory::{Keeping, Memory},
    request::{InputItem, ResponsesBody, ResponsesInput},
};
use crate::{
    app::{Admission, App},
    ask::prepare::{Read, on_a_thread, read},
    error::{ApiError, Fault},
    front::{body::RawBody, keys::Caller},
    jobs::route::Route,
    models::Chosen,
    sse::{self, Transcript},
    work::Work,
};

/// A whole answer.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResponseAnswer {
    id: String,
    object: String,
    created_at: u64,
    /// completed, or incomplete where the limit of tokens cut it; in the background also queued, in_progress, failed or
    /// cancelled.
    status: String,
    model: String,
    /// Items of type reasoning, message and function_call.
    #[schema(value_type = Vec<Object>)]
    output: Vec<Value>,
    #[schema(value_type = Object)]
    usage: Value,
    /// Whether it is kept.
    store: bool,
}

/// Go on with a conversation, as OpenAI's newer clients ask
///
/// With `stream`, the events of that API; an error in the middle is an `error` event. Closing the connection cancels.
/// With `background` the response is on disk before it is returned, queued, and answered later.
#[utoipa::path(post, path = "/v1/responses", tag = "openai", request_body = ResponsesBody, responses(
    (status = 200, description = "The answer, or a stream of its parts",
        content((ResponseAnswer = "application/json"), (String = "text/event-stream"))),
    (status = 507, body = crate::openapi::ErrorBody, description = "The disk is full: the response was to be kept"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let entry = app.enter(&caller)?;
    let Read { body, model, share } = read::<ResponsesBody>(&app, caller.tenant(), body).await?;
    let memory = app.remember(&caller.key.owner, caller.tenant(), &body).await?;
    let chosen = app.asked(model.as_deref())?;
    if body.is_background() {
        return Ok(Json(begin(&app, &caller, chosen, body, memory).await?).into_response());
    }
    let admission = entry.admit(chosen).await?;
    let keeps = app.keeps_responses() && body.store != Some(false);
    let understood = on_a_thread(&app, caller.tenant(), &admission.served, move |served| {
        let ask = body.ask(&memory, served)?;
        let asked = keeps.then(|| body.asked(&memory).iter().map(kept).collect());
        Ok((body, ask, asked))
    });
    let (body, ask, asked) = understood.await?;
    let keeping = asked.map(|asked| app.keeping(&caller.key.owner, &body, asked, share));
    let (is_streamed, repeated) = (body.is_streamed(), body.repeated(keeping.is_some()));
    drop(body);
    let work = Work::submit(admission, vec![ask])?;
    let items = Items::new(work.model(), repeated);
    if is_streamed {
        let transcript = ResponseTranscript { items, keeping, whole: None, ended: None };
        return Ok(sse::stream(work, transcript, &app.options));
    }
    let mut response = whole(work, items).await?;
    if let Some(keeping) = keeping {
        keeping.keep(&mut response).await?;
    }
    Ok(Json(response).into_response())
}

/// How many tokens a request has.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct InputTokens {
    object: &'static str,
    input_tokens: usize,
}

/// Count the tokens of a request for a response
///
/// Those that the same request would compute, its conversation before it included. Nothing is asked.
#[utoipa::path(post, path = "/v1/responses/input_tokens", tag = "openai", request_body = ResponsesBody, responses(
    (status = 200, body = InputTokens, description = "How many"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn count(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<InputTokens>, ApiError> {
    let _entry = app.enter(&caller)?;
    let Read { body, model, share } = read::<ResponsesBody>(&app, caller.tenant(), body).await?;
    let memory = app.remember(&caller.key.owner, caller.tenant(), &body).await?;
    let lease = app.lease(app.asked(model.as_deref())?).await?;
    let counted = on_a_thread(&app, caller.tenant(), &lease, move |served| {
        Ok(body.ask(&memory, served)?.request.prompt.len())
    });
    let input_tokens = counted.await?;
    drop(share);
    Ok(Json(InputTokens { object: "response.input_tokens", input_tokens }))
}

/// An item as it is kept.
pub(super) fn kept(item: &InputItem) -> ResponseItem {
    let (id, body) = item.kept();
    ResponseItem { id, said: false, body: body.to_string() }
}

/// Has a response answered while nobody waits. What could never be answered is refused now, not after it has waited.
async fn begin(
    app: &Arc<App>,
    caller: &Caller,
    chosen: Chosen,
    mut body: ResponsesBody,
    memory: Memory,
) -> Result<Value, ApiError> {
    let refused = [
        ("stream", body.is_streamed(), "cannot be had of a response in the background; retrieve it"),
        (
            "store",
            body.store == Some(false),
            "must be true in the background: the response is kept until it is retrieved",
        ),
    ];
    if let Some((field, _, rule)) = refused.into_iter().find(|(_, given, _)| *given) {
        return Err(ApiError::fault(Fault::rule(field, rule)));
    }
    // It may wait for longer than an adapter is loaded.
    let chosen = app.models.lasting(Some(app.models.name(&chosen)))?;
    let (store, lease) = (app.store()?, app.lease(chosen.clone()).await?);
    let model = lease.name().to_owned();
    let understood = on_a_thread(app, caller.tenant(), &lease, move |served| {
        let ask = body.ask(&memory, served)?;
        ask.request.check(&served.engine.capacity())?;
        let asked = body.asked(&memory);
        let items: Vec<ResponseItem> = asked.iter().map(kept).collect();
        let repeated = body.repeated(true);
        let previous = body.previous().map(str::to_owned);
        let conversation = body.conversation().map(str::to_owned);
        // It is answered when this is gone: with what was meant, as a request that is not kept again.
        body.input = ResponsesInput::Items(asked);
        (body.background, body.store) = (None, Some(false));
        let input = serde_json::to_value(&body).expect("bodies are JSON");
        Ok((items, repeated, (previous, conversation), input))
    });
    let (items, repeated, (previous, conversation), input) = understood.await?;
    drop(lease);
    let mut response = Items::new(&model, repeated).response(None);
    response["status"] = json!("queued");
    let new = NewResponse {
        id: response["id"].as_str().unwrap_or_default().to_owned(),
        owner: caller.key.owner.to_string(),
        previous,
        conversation,
        body: response.to_string(),
        items,
    };
    let job = NewJob {
        model: app.name_of(&chosen).to_owned(),
        owner: new.owner.clone(),
        shares: caller.tenant().is_some(),
        input,
        webhook: None,
        policy: Policy::default(),
        idempotency_key: None,
    };
    store.begin_response(&new, &job, Route::Responses.path()).await?;
    Ok(response)
}

/// The whole answer to a question, and what it repeats of it.
pub(crate) async fn answer(admission: Admission, (ask, repeated): (Ask, Value)) -> Result<Value, ApiError> {
    let work = Work::submit(admission, vec![ask])?;
    let items = Items::new(work.model(), repeated);
    whole(work, items).await
}

/// Waits for everything. Dropped with the connection, it cancels.
async fn whole(mut work: Work, mut items: Items) -> Result<Value, ApiError> {
    let mut ended = None;
    while let Some((_, piece)) = work.next().await {
        match piece? {
            Piece::Said { deltas, .. } => {
                for delta in deltas {
                    drop(items.take(delta));
                }
            }
            Piece::End { finish, usage } => ended = Some((finish, usage)),
            Piece::Started { .. }
            | Piece::Text { .. }
            | Piece::Scored(_)
            | Piece::Token(_)
            | Piece::Embedding(_) => {}
        }
    }
    Ok(items.response(ended))
}

/// The events of a streamed answer.
struct ResponseTranscript {
    items: Items,
    keeping: Option<Keeping>,
    /// The response as it was kept.
    whole: Option<Value>,
    ended: Option<(Finish, Counts)>,
}

impl Transcript for ResponseTranscript {
    fn say(&mut self, _work: &Work, _index: usize, piece: Piece) -> Vec<Event> {
        match piece {
            Piece::Started { .. } => ["response.created", "response.in_progress"]
                .into_iter()
                .map(|name| {
                    let response = self.items.response(None);
                    self.items.event(name, json!({"response": response}))
                })
                .collect(),
            Piece::Said { deltas, .. } => {
                deltas.into_iter().flat_map(|delta| self.items.take(delta)).collect()
            }
            Piece::End { finish, usage } => {
                self.ended = Some((finish, usage));
                self.items.stop()
            }
            Piece::Text { .. } | Piece::Scored(_) | Piece::Token(_) | Piece::Embedding(_) => Vec::new(),
        }
    }

    fn fail(&mut self, error: &ApiError) -> Event {
        let error = json!({"code": error.code.name(), "message": error.message, "param": null});
        self.items.event("error", error)
    }

    async fn finish(&mut self) -> Result<(), ApiError> {
        let mut response = self.items.response(self.ended);
        // Whoever hears that it is whole may go on from it at once.
        if let Some(keeping) = self.keeping.take() {
            keeping.keep(&mut response).await?;
        }
        self.whole = Some(response);
        Ok(())
    }

    fn close(&mut self) -> Vec<Event> {
        let response = self.whole.take().unwrap_or_else(|| self.items.response(self.ended));
        let name =
            if response["status"] == "incomplete" { "response.incomplete" } else { "response.completed" };
        vec![self.items.event(name, json!({"response": response}))]
    }
}
