//! Clients that leave, that do not read, that are too many.

use std::{sync::mpsc, time::Duration};

use fornax_engine::QueueLimits;
use fornax_server::ServerOptions;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

use crate::{
    client::{self, get, post, request},
    world::{Setup, World, in_time},
};

const COMPLETIONS: &str = "/v1/completions";

async fn send(world: &World, body: &Value) -> TcpStream {
    send_over(TcpStream::connect(world.address).await.unwrap(), body).await
}

async fn send_over(mut stream: TcpStream, body: &Value) -> TcpStream {
    stream.write_all(&request("POST", COMPLETIONS, &[], body.to_string().as_bytes())).await.unwrap();
    stream
}

fn is_idle(health: &client::Response) -> bool {
    let health = health.json();
    health["running"] == 0 && health["waiting"] == 0 && health["kv"]["pages_used"] == 0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_cancels_streaming_or_not() {
    for stream in [true, false] {
        let (world, gate) = World::gated(Setup::saying(&"a".repeat(2000))).await;
        let client = send(&world, &json!({"prompt": "a", "max_tokens": 2000, "stream": stream})).await;
        world.until_stepping().await;
        drop(client);
        // Steps go on one by one, no faster than health is asked, until the engine has noticed.
        in_time(async {
            while world.engine.stats().ended.cancelled == 0 || !is_idle(&get(world.address, "/health").await)
            {
                gate.send(()).unwrap();
                get(world.address, "/health").await;
            }
        })
        .await;
        let ended = world.engine.stats().ended;
        assert_eq!((ended.cancelled, ended.failed), (1, 0), "stream: {stream}");
        let page = get(world.address, "/metrics").await.body;
        assert!(page.contains("finished_reason=\"abort\"} 1"), "{page}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_who_does_not_read_slows_nobody() {
    let world = World::ready(Setup::saying(&"long ".repeat(700))).await;
    let lazy = send(&world, &json!({"prompt": "a", "max_tokens": 3500, "stream": true})).await;
    for _ in 0..10 {
        let other = post(world.address, COMPLETIONS, &json!({"prompt": "b", "max_tokens": 5})).await;
        assert_eq!(other.json()["choices"][0]["text"], "long ");
    }
    // The lazy one's answer was computed all the same, and its pages are back.
    world.until("/health", is_idle).await;
    let mut lazy = lazy;
    let read = client::read(&mut lazy).await;
    assert!(read.whole && read.body.ends_with("data: [DONE]\n\n"));
}

/// Answers that are longer than anybody waits for.
fn endless(options: ServerOptions) -> Setup {
    Setup { options, context: 30_000, ..Setup::saying(&"long ".repeat(2000)) }
}

/// Streams of four answers each, of which nobody reads anything, and little fits into what the system keeps for them.
async fn unread<const STREAMS: usize>(world: &World) -> [TcpStream; STREAMS] {
    let body = json!({"prompt": "a", "max_tokens": 10_000, "stream": true, "logprobs": 20, "n": 4});
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        streams.push(send_over(socket.connect(world.address).await.unwrap(), &body).await);
    }
    streams.try_into().unwrap()
}

/// Lets the model be no faster than one is: otherwise all would be said before anybody is missed.
async fn until_cancelled(world: &World, gate: &mpsc::Sender<()>, choices: u64) {
    in_time(async {
        while world.engine.stats().ended.cancelled < choices {
            gate.send(()).unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_who_never_reads_is_broken_off() {
    let options = ServerOptions { write_timeout: Duration::from_millis(50), ..Default::default() };
    let (world, gate) = World::gated(endless(options)).await;
    let [mut lazy] = unread(&world).await;
    until_cancelled(&world, &gate, 4).await;
    let read = client::read(&mut lazy).await;
    assert!(!read.whole && !read.body.contains("[DONE]"), "a stream that is broken off does not look ended");
}

/// An answer under way keeps its connection from others: where nobody reads it, four thousand of them kept everybody out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_who_never_reads_makes_room_for_others() {
    let options =
        ServerOptions { write_timeout: Duration::from_millis(50), connections_max: 2, ..Default::default() };
    let (world, gate) = World::gated(endless(options)).await;
    let lazy: [TcpStream; 2] = unread(&world).await;
    until_cancelled(&world, &gate, 8).await;
    drop(gate);
    // Both are still there, and read nothing.
    assert_eq!(in_time(get(world.address, "/health")).await.status, 200);
    drop(lazy);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_is_told_at_once() {
    let setup =
        Setup { queue: QueueLimits { requests_max: 1, tokens_max: 1000 }, slots: 1, ..Setup::default() };
    let (world, gate) = World::gated(setup).await;
    let mut first = send(&world, &json!({"prompt": "a", "stream": true})).await;
    world.until_stepping().await;
    let mut second = send(&world, &json!({"prompt": "b"})).await;
    world.until("/health", |health| health.json()["waiting"] == 1).await;
    let third = post(world.address, COMPLETIONS, &json!({"prompt": "c"})).await;
    assert_eq!((third.status, third.header("retry-after")), (429, Some("1")));
    let error = third.json();
    assert_eq!((&error["error"]["code"], &error["error"]["retryable"]), (&json!("QUEUE_FULL"), &json!(true)));
    drop(gate);
    assert!(client::read(&mut first).await.body.ends_with("data: [DONE]\n\n"));
    assert_eq!(client::read(&mut second).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_takes_too_long_is_ended_from_when_it_started() {
    let options = ServerOptions { request_timeout: Some(Duration::from_millis(30)), ..Default::default() };
    let (world, gate) = World::gated(Setup { options, ..Setup::default() }).await;
    let whole = post(world.address, COMPLETIONS, &json!({"prompt": "a"})).await;
    assert_eq!((whole.status, whole.json()["error"]["code"].clone()), (504, json!("EXECUTION_TIMEOUT")));
    gate.send(()).unwrap();
    let streamed = post(world.address, COMPLETIONS, &json!({"prompt": "a", "stream": true})).await;
    let last = streamed.events().pop().unwrap();
    assert_eq!((streamed.status, &last["error"]["code"]), (200, &json!("EXECUTION_TIMEOUT")));
    drop(gate);
    world.until("/health", is_idle).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_is_filled_with_comments() {
    let options = ServerOptions { keep_alive: Duration::from_millis(5), ..Default::default() };
    let (world, gate) = World::gated(Setup { options, ..Setup::default() }).await;
    let mut stream = send(&world, &json!({"prompt": "a", "stream": true})).await;
    let mut seen: Vec<u8> = Vec::new();
    while !seen.windows(5).any(|window| window == b"\n:\n\n\r" || window == b"\r\n:\n\n") {
        let mut bytes = [0; 256];
        let count = stream.read(&mut bytes).await.unwrap();
        assert!(count > 0);
        seen.extend(&bytes[..count]);
    }
    drop(gate);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_of_many_streams_leave_and_nothing_is_left_of_them() {
    let world = World::ready(Setup::saying(&"word ".repeat(20))).await;
    let mut clients = Vec::new();
    for index in 0..60 {
        let body = json!({"prompt": format!("{index}"), "max_tokens": 100, "stream": index % 3 != 0});
        clients.push(send(&world, &body).await);
    }
    for (index, mut client) in clients.into_iter().enumerate() {
        if index % 2 == 0 {
            let response = client::read(&mut client).await;
            assert_eq!((response.status, response.whole), (200, true), "{index}: {}", response.body);
        }
    }
    world.until("/health", is_idle).await;
    let stats = world.engine.stats();
    assert_eq!(stats.ended.failed, 0);
    world.stopped().await.unwrap();
}

/// For a socket nobody needs a key: four thousand of them, opened anew twice a minute, shut everybody out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sockets_on_which_nothing_is_asked_make_room() {
    let hour = Duration::from_secs(3600);
    let options = ServerOptions { connections_max: 4, read_timeout: hour, ..Default::default() };
    let (world, gate) = World::gated(Setup { options, ..Setup::saying(&"a".repeat(50)) }).await;
    let mut asking = Vec::new();
    for _ in 0..2 {
        let stream = send(&world, &json!({"prompt": "a", "stream": true})).await;
        // What has begun to be answered is answered to its end.
        stream.peek(&mut [0]).await.unwrap();
        asking.push(stream);
    }
    let mut silent = Vec::new();
    for number in 0..20 {
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        // Nothing, a part of a request, or a whole one and then nothing.
        let said: &[u8] = match number % 3 {
            0 => b"",
            1 => b"GET /health HTTP/1.1\r\n",
            _ => b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        };
        stream.write_all(said).await.unwrap();
        silent.push(stream);
        assert_eq!(in_time(get(world.address, "/health")).await.status, 200, "after {number}");
    }
    drop(gate);
    for stream in &mut asking {
        assert!(client::read(stream).await.body.ends_with("data: [DONE]\n\n"));
    }
}

/// A text that stands in a pair with each of thousands of others is thousands of times as long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_text_that_does_not_fit_is_refused_before_it_is_paired() {
    let world = World::ready(Setup { context: 256, pairs: true, ..Setup::default() }).await;
    // Both are too long: the second by its bytes, which are looked at before it becomes tokens.
    let (first, second) = ("a".repeat(1000), "b".repeat(100_000));
    for (path, body) in [
        ("/v1/rerank", json!({"query": first, "documents": [second]})),
        ("/v1/score", json!({"text_1": first, "text_2": [second]})),
    ] {
        let refused = post(world.address, path, &body).await.json();
        assert_eq!(refused["error"]["code"], "PROMPT_TOO_LONG", "{path}: {refused}");
        let message = refused["error"]["message"].as_str().unwrap();
        assert!(message.contains("1000 tokens"), "{path}: {message}");
    }
    world.stopped().await.unwrap();
}
