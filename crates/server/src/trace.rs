//! Traces for an OpenTelemetry collector: one span for each request, from its arrival to the last byte of its answer.
//!
//! Spans tell what happened and when, never what was said. OTLP's JSON form is written here and posted by the client
//! that there is: a span has a dozen fields, and the official exporter would bring protobuf and a second HTTP stack.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use fornax_chat::{Counts, Finish};
use serde_json::{Value, json};

use crate::{app::random_id, error::Code, openai::reply::finish_reason};

/// Spans that wait for a collector; further ones are dropped and counted.
const SPANS_WAITING_MAX: usize = 4096;

/// Spans in one post.
const BATCH_SPANS_MAX: usize = 512;

/// How long a span may wait for others to be posted with.
const BATCH_PAUSE: Duration = Duration::from_secs(1);

/// A collector that takes longer to answer has not taken the batch.
const POST_TIMEOUT: Duration = Duration::from_secs(10);

/// How often a batch is posted, and the pause after the first time, which doubles.
const ATTEMPTS: u32 = 3;
const ATTEMPT_PAUSE: Duration = Duration::from_millis(500);

/// OTLP's number for the side of a call that answers it, and for a span that failed.
const KIND_SERVER: u8 = 2;
const STATUS_ERROR: u8 = 2;

/// The way to a collector.
pub(crate) struct Traces {
    sender: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

enum Message {
    Span(Value),
    /// Everything before this has been posted, or given up, when the sender is dropped.
    Flush(SyncSender<()>),
}

impl Traces {
    /// Starts posting to the collector at `endpoint`, as `http://127.0.0.1:4318`.
    pub(crate) fn open(endpoint: &str) -> Traces {
        let (sender, receiver) = sync_channel(SPANS_WAITING_MAX);
        let dropped = Arc::new(AtomicU64::new(0));
        let base = endpoint.trim_end_matches('/');
        let url = if base.ends_with("/v1/traces") { base.to_owned() } else { format!("{base}/v1/traces") };
        let exporter = Exporter::new(url, Arc::clone(&dropped));
        // Blocking, and with a pace of its own. It ends when the last span's way to it is gone.
        std::thread::spawn(move || exporter.run(&receiver));
        Traces { sender, dropped }
    }

    /// Spans that no collector has taken.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Waits until what was told so far is posted, at most so long. Blocks.
    pub(crate) fn flush(&self, patience: Duration) {
        let (sender, done) = sync_channel(0);
        if self.sender.try_send(Message::Flush(sender)).is_ok() {
            // The other end is dropped, never used: either way nothing is waited for any more.
            done.recv_timeout(patience).unwrap_or_default();
        }
    }

    fn tell(&self, span: Value) {
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            self.sender.try_send(Message::Span(span))
        {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Posts spans, on its own thread.
struct Exporter {
    url: String,
    agent: ureq::Agent,
    dropped: Arc<AtomicU64>,
}

impl Exporter {
    fn new(url: String, dropped: Arc<AtomicU64>) -> Exporter {
        let config = ureq::config::Config::builder().timeout_global(Some(POST_TIMEOUT)).build();
        Exporter { url, agent: ureq::Agent::new_with_config(config), dropped }
    }

    fn run(&self, messages: &Receiver<Message>) {
        // Nothing happens while there is nothing to tell.
        while let Ok(first) = messages.recv() {
            let deadline = Instant::now() + BATCH_PAUSE;
            let (mut batch, mut flushes) = (Vec::new(), Vec::new());
            let mut next = Ok(first);
            loop {
                match next {
                    Ok(Message::Span(span)) => batch.push(span),
                    Ok(Message::Flush(flush)) => flushes.push(flush),
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
                }
                if batch.len() == BATCH_SPANS_MAX || !flushes.is_empty() {
                    break;
                }
                next = messages.recv_timeout(deadline.saturating_duration_since(Instant::now()));
            }
            if !batch.is_empty() {
                self.post(batch);
            }
        }
    }

    fn post(&self, spans: Vec<Value>) {
        let count = spans.len();
        let resource = json!({"attributes": [
            attribute("service.name", &json!("fornax")),
            attribute("service.version", &json!(env!("CARGO_PKG_VERSION"))),
        ]});
        let scope = json!({"name": "fornax-server", "version": env!("CARGO_PKG_VERSION")});
        let message = json!({"resourceSpans": [
            {"resource": resource, "scopeSpans": [{"scope": scope, "spans": spans}]}
        ]});
        let mut pause = ATTEMPT_PAUSE;
        for attempt in 1..=ATTEMPTS {
            let Err(error) = self.agent.post(&self.url).send_json(&message) else { return };
            let reason = error.to_string();
            tracing::warn!(
                attempt,
                attempts = ATTEMPTS,
                spans = count,
                reason,
                "the collector took no spans"
            );
            // What it refuses now it refuses again, unless it is busy.
            let is_final = matches!(error, ureq::Error::StatusCode(400..=428 | 430..=499));
            if is_final || attempt == ATTEMPTS {
                break;
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
        self.dropped.fetch_add(count as u64, Ordering::Relaxed);
    }
}

/// A request as a collector sees it. It ends when the last holder lets go of it.
pub(crate) struct Span {
    traces: Arc<Traces>,
    context: Context,
    span_id: String,
    began: SystemTime,
    /// Locked for as long as it takes to note one thing; nobody waits for anything meanwhile.
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    name: String,
    attributes: Vec<(&'static str, Value)>,
    events: Vec<(&'static str, SystemTime)>,
    /// Tokens of all answers that have ended.
    counts: Counts,
    finishes: Vec<&'static str>,
    /// The code of what went wrong inside the server.
    failed: Option<&'static str>,
}

impl Span {
    /// Begins a span, unless the caller's own trace is not recorded.
    pub(crate) fn begin(traces: &Arc<Traces>, traceparent: Option<&str>) -> Option<Arc<Span>> {
        let context = Context::of(traceparent)?;
        Some(Arc::new(Span {
            traces: Arc::clone(traces),
            context,
            span_id: random_id()[..16].to_owned(),
            began: SystemTime::now(),
            notes: Mutex::default(),
        }))
    }

    /// Names the request. `route` is ours; paths that clients make up are no names.
    pub(crate) fn request(&self, method: &str, route: Option<&str>, request_id: &str) {
        self.note(|notes| {
            notes.name = route.map_or(method.to_owned(), |route| format!("{method} {route}"));
            notes.attributes.push(("http.request.method", json!(method)));
            notes.attributes.extend(route.map(|route| ("http.route", json!(route))));
            notes.attributes.push(("fornax.request_id", json!(request_id)));
        });
    }

    /// The status that the client was told, and what went wrong if something did.
    pub(crate) fn response(&self, status: u16, code: Option<Code>) {
        self.note(|notes| notes.attributes.push(("http.response.status_code", json!(status))));
        if let Some(code) = code {
            self.failed(code, status >= 500);
        }
    }

    /// Who answers.
    pub(crate) fn model(&self, name: &str) {
        self.note(|notes| notes.attributes.push(("gen_ai.response.model", json!(name))));
    }

    /// Something happened, once.
    pub(crate) fn event(&self, name: &'static str) {
        self.note(|notes| {
            if notes.events.iter().all(|(known, _)| *known != name) {
                notes.events.push((name, SystemTime::now()));
            }
        });
    }

    /// One answer ended.
    pub(crate) fn ended(&self, finish: Finish, counts: Counts) {
        self.note(|notes| {
            // Answers to one prompt share it.
            notes.counts.prompt = notes.counts.prompt.max(counts.prompt);
            notes.counts.cached = notes.counts.cached.max(counts.cached);
            notes.counts.generated += counts.generated;
            notes.finishes.push(finish_reason(finish, false));
        });
    }

    /// The request failed; `is_ours` if that is the server's fault.
    pub(crate) fn failed(&self, code: Code, is_ours: bool) {
        self.note(|notes| {
            notes.attributes.push(("error.type", json!(code.name())));
            if is_ours {
                notes.failed = Some(code.name());
            }
        });
    }

    fn note(&self, note: impl FnOnce(&mut Notes)) {
        note(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn to_json(&self, notes: &Notes) -> Value {
        let mut attributes: Vec<Value> =
            notes.attributes.iter().map(|(name, value)| attribute(name, value)).collect();
        if !notes.finishes.is_empty() {
            attributes.push(attribute("gen_ai.response.finish_reasons", &json!(notes.finishes)));
            attributes.push(attribute("gen_ai.usage.input_tokens", &json!(notes.counts.prompt)));
            attributes.push(attribute("gen_ai.usage.output_tokens", &json!(notes.counts.generated)));
            attributes.push(attribute("fornax.usage.cached_tokens", &json!(notes.counts.cached)));
        }
        let events: Vec<Value> = notes
            .events
            .iter()
            .map(|(name, at)| json!({"name": name, "timeUnixNano": nanoseconds(*at)}))
            .collect();
        let mut span = json!({
            "traceId": self.context.trace_id,
            "spanId": self.span_id,
            "name": notes.name,
            "kind": KIND_SERVER,
            "startTimeUnixNano": nanoseconds(self.began),
            "endTimeUnixNano": nanoseconds(SystemTime::now()),
            "attributes": attributes,
            "events": events,
        });
        if let Some(parent) = &self.context.parent {
            span["parentSpanId"] = json!(parent);
        }
        if let Some(code) = notes.failed {
            span["status"] = json!({"code": STATUS_ERROR, "message": code});
        }
        span
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let notes = std::mem::take(self.notes.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.traces.tell(self.to_json(&notes));
    }
}

/// The trace that a span belongs to.
#[derive(Debug, PartialEq, Eq)]
struct Context {
    trace_id: String,
    parent: Option<String>,
}

impl Context {
    /// The caller's, from its W3C `traceparent`, or a new one. `None` if the caller records nothing.
    fn of(traceparent: Option<&str>) -> Option<Context> {
        let own = || Context { trace_id: random_id(), parent: None };
        let Some((trace_id, parent, flags)) = traceparent.and_then(parts) else { return Some(own()) };
        let context = Context { trace_id: trace_id.to_owned(), parent: Some(parent.to_owned()) };
        (flags & 1 == 1).then_some(context)
    }
}

/// Trace, span and flags of a `traceparent`, if it is one.
fn parts(text: &str) -> Option<(&str, &str, u8)> {
    let is_hex = |part: &str, length: usize| {
        part.len() == length && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_id = |part: &str, length: usize| is_hex(part, length) && part.bytes().any(|byte| byte != b'0');
    let mut fields = text.split('-');
    let (version, trace_id, parent, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    // Later versions may add fields; the first has none, and the last there can be is forbidden.
    let is_version = is_hex(version, 2) && version != "ff" && (version != "00" || fields.next().is_none());
    let valid = is_version && is_id(trace_id, 32) && is_id(parent, 16) && is_hex(flags, 2);
    valid.then_some((trace_id, parent, u8::from_str_radix(flags, 16).ok()?))
}

/// As OTLP's JSON has it: integers are strings, so that none loses digits.
fn attribute(key: &str, value: &Value) -> Value {
    fn typed(value: &Value) -> Value {
        match value {
            Value::Array(items) => {
                let values: Vec<Value> = items.iter().map(typed).collect();
                json!({"arrayValue": {"values": values}})
            }
            Value::Number(number) => json!({"intValue": number.to_string()}),
            other => json!({"stringValue": other}),
        }
    }
    json!({"key": key, "value": typed(value)})
}

fn nanoseconds(time: SystemTime) -> String {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callers_trace_is_joined_if_it_is_one_and_recorded() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        let parent = "00f067aa0ba902b7";
        let joined = Some(Context { trace_id: trace.to_owned(), parent: Some(parent.to_owned()) });
        assert_eq!(Context::of(Some(&format!("00-{trace}-{parent}-01"))), joined);
        assert_eq!(Context::of(Some(&format!("01-{trace}-{parent}-03-more"))), joined);
        assert_eq!(Context::of(Some(&format!("00-{trace}-{parent}-00"))), None);
        let no_traces = [
            String::new(),
            "hello".to_owned(),
            format!("00-{trace}-{parent}-01-more"),
            format!("ff-{trace}-{parent}-01"),
            format!("00-{trace}-{}-01", "0".repeat(16)),
            format!("00-{}-{parent}-01", "0".repeat(32)),
            format!("00-{}-{parent}-01", trace.to_uppercase()),
            format!("00-{trace}-{parent}-1"),
        ];
        for text in no_traces {
            let own = Context::of(Some(&text)).unwrap();
            assert!(own.parent.is_none() && own.trace_id.len() == 32 && own.trace_id != trace, "{text}");
        }
    }
}
