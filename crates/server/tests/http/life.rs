//! From listening to drained: what operators see.

use std::time::Duration;

use fornax_server::{Code, Failed, Progress, ServerOptions};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::oneshot,
};

use crate::{
    client::{self, get, post, request},
    world::{Setup, World, in_time},
};

/// Begins a stream and waits for its first bytes.
async fn begun(world: &World, path: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(&request("POST", path, &[], body.to_string().as_bytes())).await.unwrap();
    let mut line = [0; 15];
    stream.peek(&mut line).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_and_progress_answer_while_the_model_loads() {
    let (loaded, load) = oneshot::channel();
    let world = World::listening(Setup { load: Some(load), ..Setup::default() }).await;
    let health = get(world.address, "/health").await;
    assert_eq!((health.status, &health.json()["status"]), (200, &json!("starting")));
    assert_eq!(get(world.address, "/ready").await.status, 503);
    let refused = post(world.address, "/v1/completions", &json!({"prompt": "a"})).await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("5")));
    assert_eq!(refused.json()["error"]["code"], "MODEL_NOT_READY");

    let mut watching = TcpStream::connect(world.address).await.unwrap();
    watching.write_all(&request("GET", "/loading", &[], b"")).await.unwrap();
    let progress = Progress { stage: "weights".into(), bytes: 50, bytes_total: 100 };
    world.progress.send(progress).unwrap();
    world.until("/health", |health| health.json()["status"] == "loading").await;
    loaded.send(Ok(())).unwrap();
    world.until("/ready", |response| response.status == 200).await;
    let events = client::read(&mut watching).await.events();
    assert_eq!(events.last().unwrap(), &json!({"status": "ready", "model": "script"}));
    assert!(
        events.contains(&json!({"stage": "weights", "bytes": 50, "bytes_total": 100, "status": "loading"}))
    );
    insta::assert_snapshot!(get(world.address, "/health").await.transcript());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_loaded_ends_the_server_with_its_reason() {
    let (loaded, load) = oneshot::channel();
    let world = World::listening(Setup { load: Some(load), ..Setup::default() }).await;
    let failed = Failed { code: Code::ModelCorrupt, message: "tensor x is short".into() };
    loaded.send(Err(failed.clone())).unwrap();
    let error = world.running.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), failed.to_string());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_fails_its_self_test_is_never_ready() {
    let world = World::listening(Setup { fails_at: Some(1), ..Setup::default() }).await;
    let error = world.running.await.unwrap().unwrap_err().to_string();
    assert!(error.starts_with("NUMERIC_FAULT: the self-test failed"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_answers_and_does_not_lie_while_a_step_never_ends() {
    let (world, gate) =
        World::gated(Setup { stuck_after: Duration::from_millis(20), ..Setup::default() }).await;
    let _stuck = begun(&world, "/v1/completions", &json!({"prompt": "a", "stream": true})).await;
    world.until("/health", |health| health.status == 503).await;
    assert_eq!(get(world.address, "/health").await.json()["status"], "stuck");
    assert_eq!(get(world.address, "/ready").await.status, 503);
    drop(gate);
    world.until("/health", |health| health.json()["status"] == "ready").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_refuses_the_new_and_finishes_the_old() {
    let (mut world, gate) = World::gated(Setup::saying("to the end")).await;
    let mut running = begun(&world, "/v1/completions", &json!({"prompt": "a", "stream": true})).await;
    world.stop();
    world.until("/health", |health| health.json()["status"] == "draining" && health.status == 503).await;
    let refused = post(world.address, "/v1/completions", &json!({"prompt": "b"})).await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("5")));
    assert_eq!(get(world.address, "/ready").await.status, 503);
    drop(gate);
    let finished = client::read(&mut running).await;
    assert!(finished.whole && finished.body.ends_with("data: [DONE]\n\n"), "{}", finished.body);
    let engine = world.engine.clone();
    world.stopped().await.unwrap();
    assert_eq!(engine.stats().running, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_finish_in_time_ends_as_an_error() {
    let options = ServerOptions { drain_timeout: Duration::from_millis(20), ..Default::default() };
    let (mut world, gate) = World::gated(Setup { options, ..Setup::default() }).await;
    let mut running = begun(&world, "/v1/completions", &json!({"prompt": "a", "stream": true})).await;
    world.stop();
    let ended = client::read(&mut running).await;
    let last = ended.events().pop().unwrap();
    assert_eq!((&last["error"]["code"], ended.body.contains("[DONE]")), (&json!("CANCELLED"), false));
    world.stopped().await.unwrap();
    drop(gate);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_do_not_hold_the_server_back() {
    let world = World::ready(Setup::default()).await;
    let mut idle = TcpStream::connect(world.address).await.unwrap();
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let mut first = [0; 12];
    idle.read_exact(&mut first).await.unwrap();
    in_time(world.stopped()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_have_the_names_that_dashboards_read() {
    let world = World::ready(Setup::default()).await;
    post(world.address, "/v1/completions", &json!({"prompt": "a", "max_tokens": 2})).await;
    post(world.address, "/v1/completions", &json!({"prompt": "a", "max_tokens": 99})).await;
    post(world.address, "/v1/completions", &json!({"prompt": 5})).await;
    let page = get(world.address, "/metrics").await;
    assert_eq!(page.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let stable = page.body.lines().filter(|line| !line.contains("_bucket{") && !line.contains("_sum{"));
    insta::assert_snapshot!(stable.collect::<Vec<_>>().join("\n"));
}
