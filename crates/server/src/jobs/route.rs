//! Routes whose requests can be kept and answered later.

use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    app::{Admission, App},
    ask::prepare::{Preparing, on_a_thread},
    error::{ApiError, Code, Fault},
    front::keys::Tenant,
    models::Lease,
    openai::{
        chat, chat::ChatBody, completions, completions::CompletionBody, embeddings, embeddings::EmbeddingBody,
    },
    responses::{create, request::ResponsesBody},
    shape::{self, Body},
};

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Chat,
    Completions,
    Embeddings,
    Responses,
}

impl Route {
    pub(crate) const ALL: [Route; 4] = [Route::Chat, Route::Completions, Route::Embeddings, Route::Responses];

    pub(crate) fn path(self) -> &'static str {
        match self {
            Route::Chat => "/v1/chat/completions",
            Route::Completions => "/v1/completions",
            Route::Embeddings => "/v1/embeddings",
            Route::Responses => "/v1/responses",
        }
    }

    pub(crate) fn named(path: &str) -> Option<Route> {
        Route::ALL.into_iter().find(|route| route.path() == path)
    }

    /// What the route answers, whole.
    pub(crate) async fn respond(
        self,
        app: &App,
        admission: Admission,
        owner: &str,
        body: Value,
    ) -> Result<Value, ApiError> {
        let tenant = admission.tenant().clone();
        let whose = (&tenant, &admission.served);
        match self {
            Route::Chat => {
                let ask =
                    prepared(app, whose, body, |body: ChatBody, served| Ok(body.ask(served)?.0)).await?;
                Ok(as_written(&chat::answer(admission, ask).await?))
            }
            Route::Completions => {
                let asked =
                    prepared(app, whose, body, |body: CompletionBody, served| body.asked(served)).await?;
                Ok(as_written(&completions::answer(admission, asked).await?))
            }
            Route::Embeddings => {
                let asked =
                    prepared(app, whose, body, |body: EmbeddingBody, served| body.ask(served)).await?;
                Ok(as_written(&embeddings::answer(admission, asked).await?))
            }
            Route::Responses => {
                let body = prepared(app, whose, body, |body: ResponsesBody, _| Ok(body)).await?;
                if body.is_background() {
                    let rule = "cannot be had of a request that is answered later anyway";
                    return Err(ApiError::fault(Fault::rule("background", rule)));
                }
                let memory = app.remember(owner, &tenant, &body).await?;
                // What is asked in a file of requests is answered in one, and not kept twice.
                let asked = on_a_thread(app, &tenant, &admission.served, move |served| {
                    Ok((body.ask(&memory, served)?, body.repeated(false)))
                });
                let asked = asked.await?;
                create::answer(admission, asked).await
            }
        }
    }
}

/// As it would be read off the wire. A value made directly would have every f32 as the longer digits of an f64.
fn as_written(answer: &impl Serialize) -> Value {
    let text = serde_json::to_string(answer).expect("responses are JSON");
    serde_json::from_str(&text).expect("it was just written")
}

/// Understands a body and makes of it what is asked, on a thread that may block.
async fn prepared<B: Body + Send, T: Send + 'static>(
    app: &App,
    (tenant, lease): (&Tenant, &Lease),
    body: Value,
    work: impl FnOnce(B, &Preparing<'_>) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if body.get("stream").is_some_and(|stream| *stream == json!(true)) {
        return Err(ApiError::fault(Fault::rule(
            "stream",
            "cannot be had of a request that is answered later",
        )));
    }
    on_a_thread(app, tenant, lease, move |served| work(shape::understand(body, B::UNKNOWN)?, served)).await
}

impl App {
    /// A route by its path, as it was stored.
    pub(crate) fn route(path: &str) -> Result<Route, ApiError> {
        Route::named(path)
            .ok_or_else(|| ApiError::new(Code::UnknownEndpoint, "there is no such route any more"))
    }
}
