//! What an OpenTelemetry collector is told of requests.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener},
    sync::mpsc::{self, Receiver},
};

use fornax_server::ServerOptions;
use serde_json::{Value, json};

use crate::{
    client::{get, post, raw, request},
    world::{PATIENCE, Setup, World},
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// A collector that takes everything: where it listens, and what it was sent.
fn collector() -> (SocketAddr, Receiver<(String, Value)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, posts) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut line = String::new();
            // One connection may carry several posts.
            while reader.read_line(&mut line).unwrap() > 0 {
                let (mut length, mut header) = (0, String::new());
                while reader.read_line(&mut header).unwrap() > 2 {
                    let lower = header.to_ascii_lowercase();
                    if let Some(value) = lower.strip_prefix("content-length:") {
                        length = value.trim().parse().unwrap();
                    }
                    header.clear();
                }
                let mut body = vec![0; length];
                reader.read_exact(&mut body).unwrap();
                sender.send((line.clone(), serde_json::from_slice(&body).unwrap())).unwrap();
                reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}").unwrap();
                line.clear();
            }
        }
    });
    (address, posts)
}

fn traced(setup: Setup, address: SocketAddr) -> Setup {
    let otlp = Some(format!("http://{address}"));
    Setup { options: ServerOptions { otlp, ..setup.options }, ..setup }
}

fn attribute<'a>(span: &'a Value, key: &str) -> &'a Value {
    let attributes = span["attributes"].as_array().unwrap();
    let found = attributes.iter().find(|attribute| attribute["key"] == key);
    found.map_or(&Value::Null, |attribute| &attribute["value"])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_request_is_a_span_with_what_happened_and_nothing_of_what_was_said() {
    let (address, posts) = collector();
    let world = World::ready(traced(Setup::saying("an answer of mine"), address)).await;
    let asked = json!({"messages": [{"role": "user", "content": "a question of yours"}], "n": 2});
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let headers = [("traceparent", parent.as_str()), ("X-Request-Id", "r1")];
    raw(world.address, &request("POST", "/v1/chat/completions", &headers, asked.to_string().as_bytes()))
        .await;
    post(world.address, "/v1/completions", &json!({"prompt": "a question of yours", "stream": true})).await;
    post(world.address, "/v1/completions", &json!({"prompt": "a question of yours", "top_p": 5})).await;
    get(world.address, "/v1/models/other").await;
    get(world.address, "/made/up/by/a/client").await;
    // Nobody records these: the caller's trace is not sampled, and probes would drown the rest.
    let unrecorded = format!("00-{TRACE}-{PARENT}-00");
    raw(world.address, &request("GET", "/v1/models", &[("traceparent", &unrecorded)], b"")).await;
    get(world.address, "/health").await;
    // What is told when the server ends is told before it ends.
    world.stopped().await.unwrap();

    let mut spans = Vec::new();
    for (line, body) in posts.try_iter() {
        assert_eq!(line, "POST /v1/traces HTTP/1.1\r\n");
        let resource = &body["resourceSpans"][0];
        assert_eq!(attribute(&resource["resource"], "service.name")["stringValue"], "fornax");
        for word in ["question", "answer", "made"] {
            assert!(!body.to_string().contains(word), "{body}");
        }
        spans.extend(resource["scopeSpans"][0]["spans"].as_array().unwrap().clone());
    }
    let mut names: Vec<&str> = spans.iter().map(|span| span["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    let completions = "POST /v1/completions";
    assert_eq!(names, ["GET", "GET /v1/models/{id}", "POST /v1/chat/completions", completions, completions]);
    for span in &spans {
        let nanoseconds = |key: &str| span[key].as_str().unwrap().parse::<u64>().unwrap();
        assert!(nanoseconds("startTimeUnixNano") <= nanoseconds("endTimeUnixNano"));
        assert!(
            span["traceId"].as_str().unwrap().len() == 32 && span["spanId"].as_str().unwrap().len() == 16
        );
        assert_eq!(span["kind"], 2);
    }
    let named = |name: &str, status: &str| {
        let found = spans.iter().find(|span| {
            span["name"] == name && attribute(span, "http.response.status_code")["intValue"] == status
        });
        found.unwrap_or_else(|| panic!("no {name} with {status}: {spans:?}"))
    };
    let chat = named("POST /v1/chat/completions", "200");
    assert_eq!((&chat["traceId"], &chat["parentSpanId"]), (&json!(TRACE), &json!(PARENT)));
    assert_eq!(attribute(chat, "fornax.request_id")["stringValue"], "r1");
    assert_eq!(attribute(chat, "gen_ai.response.model")["stringValue"], "script");
    assert_eq!(attribute(chat, "gen_ai.usage.output_tokens")["intValue"], "36");
    let finishes = &attribute(chat, "gen_ai.response.finish_reasons")["arrayValue"]["values"];
    assert_eq!(*finishes, json!([{"stringValue": "stop"}, {"stringValue": "stop"}]));
    // A stream's span ends with the stream.
    let stream = named(completions, "200");
    let events: Vec<&str> =
        stream["events"].as_array().unwrap().iter().map(|event| event["name"].as_str().unwrap()).collect();
    assert_eq!(events, ["started", "first token"]);
    assert_eq!(attribute(stream, "gen_ai.usage.output_tokens")["intValue"], "16");
    assert_eq!(stream["status"], Value::Null);
    // The client's mistake is no failure of the server's.
    let refused = named(completions, "400");
    assert_eq!(attribute(refused, "error.type")["stringValue"], "INVALID_INPUT");
    assert_eq!(refused["status"], Value::Null);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_in_mid_stream_is_the_spans_failure() {
    let (address, posts) = collector();
    let world = World::ready(traced(Setup { fails_at: Some(3), ..Setup::default() }, address)).await;
    post(world.address, "/v1/completions", &json!({"prompt": "a", "stream": true})).await;
    let (_, body) = posts.recv_timeout(PATIENCE).unwrap();
    let span = &body["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
    assert_eq!(attribute(span, "http.response.status_code")["intValue"], "200");
    assert_eq!(span["status"], json!({"code": 2, "message": "NUMERIC_FAULT"}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_gone_costs_spans_and_nothing_else() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let world = World::ready(traced(Setup::default(), gone)).await;
    for _ in 0..3 {
        assert_eq!(post(world.address, "/v1/completions", &json!({"prompt": "a"})).await.status, 200);
    }
    world.until("/metrics", |page| page.body.contains("\nfornax_spans_dropped_total 3\n")).await;
    world.stopped().await.unwrap();
}

#[tokio::test]
async fn an_address_that_is_none_is_refused_at_the_start() {
    for url in ["collector", "ftp://collector", "http://", "http://a b"] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let options = ServerOptions { otlp: Some(url.to_owned()), ..Default::default() };
        let error =
            fornax_server::Server::new(listener, options, Vec::new()).await.err().unwrap().to_string();
        assert!(error.contains("--otlp") && error.contains(url), "{error}");
    }
}
