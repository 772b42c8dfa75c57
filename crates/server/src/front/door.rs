//! Identity, origin and key of every request, and its count.

use std::sync::Arc;

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tokio::sync::OwnedSemaphorePermit;

use super::{
    keys::{Caller, Key},
    line::{Line, Names, is_polling},
    origin,
};
use crate::{
    app::{App, random_id},
    error::{ApiError, Code},
    ops::console,
    trace::Span,
};

/// Names one request, in logs here and at the client's.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Names one job across machines.
pub(crate) const CORRELATION_ID: HeaderName = HeaderName::from_static("x-correlation-id");

/// Longer ids are nobody's id.
const ID_CHARS_MAX: usize = 128;

/// Lets a request in or turns it away, and begins its line in the log.
pub(crate) async fn door(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let request_id = id(request.headers(), &REQUEST_ID);
    let correlation_id = id(request.headers(), &CORRELATION_ID);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let key = app.keys.find(sent_key(request.headers()));
    let line = Arc::new(Line::begin(Names {
        request_id: request_id.clone(),
        correlation_id: correlation_id.clone(),
        method: method.clone(),
        path: path.clone(),
        key: key.as_ref().map_or("none".to_owned(), |key| key.label.clone()),
    }));

    let span = span(&app, &request);
    if let Some(span) = &span {
        let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
        span.request(method.as_str(), route, request_id.to_str().unwrap_or_default());
    }
    let mut response = match admitted(&app, &request, key).and_then(|key| with_place(&app, &request, key)) {
        Ok(Some((key, place))) => {
            request.extensions_mut().insert(Caller { key, span: span.clone(), line: Arc::clone(&line) });
            let mut response = next.run(request).await;
            response.extensions_mut().insert(place);
            response
        }
        Ok(None) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    let error = response.extensions_mut().remove::<ApiError>();
    if let Some(shaped) = error.and_then(|error| error.shaped_for(&path)) {
        response = shaped;
    }
    let code = response.extensions().get::<Code>().copied();
    if let Some(code) = code {
        app.metrics.failed(code);
    }
    if let Some(span) = span {
        span.response(response.status().as_u16(), code);
    }
    line.response(response.status().as_u16(), code);
    response.headers_mut().insert(REQUEST_ID, request_id);
    response.headers_mut().insert(CORRELATION_ID, correlation_id);
    response
}

/// The request's span, where traces are wanted. Probes would drown the rest.
fn span(app: &App, request: &Request) -> Option<Arc<Span>> {
    let traces = app.traces.as_ref()?;
    if matches!(request.uri().path(), "/health" | "/ready" | "/metrics") {
        return None;
    }
    let parent = request.headers().get("traceparent").and_then(|parent| parent.to_str().ok());
    Span::begin(traces, parent)
}

/// Whether the request may go on, and with which key. Some paths need none, and then show less.
fn admitted(app: &App, request: &Request, key: Option<Key>) -> Result<Option<Key>, ApiError> {
    if !app.keys.are_needed() {
        origin::check(request.uri().host(), request.headers(), &app.options)?;
        return Ok(key);
    }
    let open = match request.uri().path() {
        "/health" | "/ready" => true,
        "/metrics" => app.options.metrics_open,
        path => console::is_page(path),
    };
    match key {
        Some(key) => Ok(Some(key)),
        None if open => Ok(None),
        None => Err(ApiError::new(Code::Unauthorized, "this needs a key: Authorization: Bearer KEY")),
    }
}

/// A place among the requests of a key that are under way. It goes along with the answer, down to its last byte: whoever
/// does not read, or only waits, takes a connection and more all the same. What is polled all the time has none.
#[derive(Clone)]
pub(crate) struct Place(#[expect(dead_code, reason = "it is held")] Option<Arc<OwnedSemaphorePermit>>);

/// A key with a place for its request.
fn with_place(app: &App, request: &Request, key: Option<Key>) -> Result<Option<(Key, Place)>, ApiError> {
    let Some(key) = key else { return Ok(None) };
    if is_polling(request.method(), request.uri().path()) {
        return Ok(Some((key, Place(None))));
    }
    match Arc::clone(&key.permits).try_acquire_owned() {
        Ok(permit) => Ok(Some((key, Place(Some(Arc::new(permit)))))),
        Err(_) => {
            let most = app.options.per_key_max;
            let message = format!("{most} requests are under way already, as many as a key may have");
            Err(ApiError::new(Code::QueueFull, message))
        }
    }
}

/// The key that was sent, as most clients send it or as Anthropic's do.
fn sent_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = || {
        let value = headers.get(header::AUTHORIZATION)?.as_bytes();
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    };
    bearer().or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))
}

fn id(headers: &HeaderMap, name: &HeaderName) -> HeaderValue {
    let sane = |value: &&HeaderValue| {
        let bytes = value.as_bytes();
        (1..=ID_CHARS_MAX).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
    };
    let sent = headers.get(name).filter(sane).cloned();
    sent.unwrap_or_else(|| HeaderValue::try_from(random_id()).expect("hexadecimal digits are a header"))
}
