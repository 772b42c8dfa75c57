//! Several keys on one server: none sees, changes or holds up what is another's.

use std::{
    fs,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use fornax_engine::QueueLimits;
use fornax_form::FormError;
use fornax_server::{Ceiling, ServerOptions};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    client::{self, Response, post, raw, request},
    world::{Setup, World, in_time, keeping, until_keyed},
};

const ALICE: &str = "alices-key-0123456789";
const BOB: &str = "bobs-key-0123456789";

fn keyed(folder: &Path, keys: &str, mut setup: Setup) -> Setup {
    let file = folder.join("keys");
    fs::write(&file, keys).unwrap();
    setup.options.api_key_file = Some(file);
    setup
}

/// Alice and Bob.
fn two(folder: &Path, setup: Setup) -> Setup {
    keyed(folder, &format!("{ALICE}\n{BOB}\n"), setup)
}

fn bytes(method: &str, path: &str, key: &str, body: &Value) -> Vec<u8> {
    let bearer = format!("Bearer {key}");
    let body = if body.is_null() { String::new() } else { body.to_string() };
    request(method, path, &[("Authorization", &bearer)], body.as_bytes())
}

async fn ask(world: &World, method: &str, path: &str, key: &str, body: &Value) -> Response {
    raw(world.address, &bytes(method, path, key, body)).await
}

async fn send(world: &World, path: &str, key: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(&bytes("POST", path, key, body)).await.unwrap();
    stream
}

fn code(response: &Response) -> (u16, Value) {
    (response.status, response.json()["error"]["code"].clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_key_has_sent_is_found_in_the_cache_by_itself_alone_unless_all_share() {
    let folder = tempfile::tempdir().unwrap();
    let text =
        "The diagnosis of the patient, who was born in 1957, is not known to anybody else yet. ".repeat(2);
    // No two routes send what begins alike.
    let own = |route: &str| format!("{route}: {text}");
    let messages = |route: &str| json!([{"role": "user", "content": own(route)}]);
    let routes = [
        (
            "/v1/completions",
            json!({"prompt": own("completions")}),
            "/usage/prompt_tokens_details/cached_tokens",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages("chat")}),
            "/usage/prompt_tokens_details/cached_tokens",
        ),
        (
            "/v1/messages",
            json!({"messages": messages("messages"), "max_tokens": 5, "model": "script"}),
            "/usage/cache_read_input_tokens",
        ),
        ("/v1/responses", json!({"input": own("responses")}), "/usage/input_tokens_details/cached_tokens"),
    ];
    for shared in [false, true] {
        let options = ServerOptions { shared_prefixes: shared, ..Default::default() };
        let world = World::ready(two(folder.path(), Setup { options, ..Setup::default() })).await;
        for (path, body, place) in &routes {
            let cached = async |key: &str, body: &Value| {
                let response = ask(&world, "POST", path, key, body).await;
                let found = response.json().pointer(place).and_then(Value::as_u64);
                found.unwrap_or_else(|| panic!("{path}: {}", response.body))
            };
            assert_eq!(cached(ALICE, body).await, 0, "{path}: nobody sent it before");
            let hers = cached(ALICE, body).await;
            assert!(hers >= 128, "{path}: her own");
            let theirs = cached(BOB, body).await;
            assert_eq!(theirs, if shared { hers } else { 0 }, "{path}: what she sent");
            assert!(cached(BOB, body).await >= 128, "{path}: his own");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_schemas_and_queues_are_their_owners() {
    let folder = tempfile::tempdir().unwrap();
    let keys = format!("{ALICE} owner=alice\n{BOB}\nalices-next-key-0123456789 owner=alice\n");
    let setup = keyed(folder.path(), &keys, keeping(folder.path(), Setup::saying("{\"amount\":4711}")));
    let (world, gate) = World::gated(setup).await;
    let job = json!({"input": {"prompt": "a"}});
    let run = async |key: &str| {
        let accepted = ask(&world, "POST", "/v2/default/run", key, &job).await;
        accepted.json()["id"].as_str().unwrap_or_else(|| panic!("{}", accepted.body)).to_owned()
    };
    let id = run(ALICE).await;
    for (method, path) in
        [("GET", "status"), ("GET", "timeline"), ("GET", "stream"), ("POST", "cancel"), ("POST", "retry")]
    {
        let path = format!("/v2/default/{path}/{id}");
        let theirs = ask(&world, method, &path, BOB, &Value::Null).await;
        assert_eq!(code(&theirs), (404, json!("JOB_NOT_FOUND")), "{path}");
    }
    // A queue of them, behind those that are worked on.
    for _ in 0..8 {
        run(ALICE).await;
    }
    let purged = ask(&world, "POST", "/v2/default/purge-queue", BOB, &Value::Null).await.json();
    assert_eq!(purged["removed"], 0, "none of it is Bob's");
    let status = async |key: &str| {
        let path = format!("/v2/default/status/{id}");
        ask(&world, "GET", &path, key, &Value::Null).await
    };
    assert_eq!(status("alices-next-key-0123456789").await.status, 200, "the owner's other key");
    let purged = ask(&world, "POST", "/v2/default/purge-queue", ALICE, &Value::Null).await.json();
    assert!(purged["removed"].as_u64().unwrap() >= 4, "{purged}");
    drop(gate);

    let amounts = |kind: Value| {
        json!({"type": "object", "properties": {"amount": kind}, "required": ["amount"],
        "additionalProperties": false})
    };
    let path = "/v2/default/schemas/invoice";
    let put = async |key: &str, schema: Value| ask(&world, "PUT", path, key, &schema).await.status;
    assert_eq!(put(ALICE, amounts(json!({"type": "integer"}))).await, 200);
    let theirs = ask(&world, "GET", path, BOB, &Value::Null).await;
    assert_eq!(code(&theirs), (404, json!("SCHEMA_NOT_FOUND")));
    assert_eq!(put(BOB, amounts(json!({"const": 0}))).await, 200);
    let input = json!({"input": {"prompt": "a", "schema": "invoice"}});
    let answer = async |key: &str| {
        let done = ask(&world, "POST", "/v2/default/runsync", key, &input).await.json();
        done["output"]["output"]["amount"].clone()
    };
    assert_eq!((answer(ALICE).await, answer(BOB).await), (json!(4711), json!(0)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_of_a_scheduler_is_cancelled_by_its_own_key_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (world, gate) = World::gated(two(folder.path(), Setup::default())).await;
    let job = json!({"job_id": "job-1", "prompt": "a", "max_tokens": 10});
    let mut hers = send(&world, "/execute", ALICE, &job).await;
    hers.peek(&mut [0]).await.unwrap();
    let mut his = send(&world, "/execute", BOB, &job).await;
    his.peek(&mut [0]).await.unwrap();
    let cancel = ask(&world, "POST", "/cancel", BOB, &json!({"job_id": "job-1"})).await;
    assert_eq!(cancel.status, 202);
    let reason = async |stream: &mut TcpStream| {
        let read = client::read(stream).await;
        read.events().pop().unwrap()["stop_reason"].clone()
    };
    // No step is computed until it has ended.
    assert_eq!(reason(&mut his).await, "CANCELLED");
    drop(gate);
    assert_eq!(reason(&mut hers).await, "MAX_TOKENS");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn going_before_others_is_the_operators_to_allow() {
    let folder = tempfile::tempdir().unwrap();
    let keys = format!("{ALICE} priority\n{BOB}\n");
    for open in [false, true] {
        let options = ServerOptions { priority_open: open, ..Default::default() };
        let setup = keeping(folder.path(), Setup { options, ..Setup::default() });
        let world = World::ready(keyed(folder.path(), &keys, setup)).await;
        let check = async |path: &str, body: Value, key: &str, allowed: bool| {
            let response = ask(&world, "POST", path, key, &body).await;
            let said = response.json();
            assert_eq!(response.status == 200, allowed, "{path} {body}: {said}");
            if !allowed {
                assert!(said["error"]["param"].as_str().unwrap().ends_with("priority"), "{said}");
            }
        };
        for (priority, needs) in [(-1, true), (0, false), (5, false)] {
            let body = json!({"prompt": "a", "priority": priority});
            check("/v1/completions", body.clone(), ALICE, true).await;
            check("/v1/completions", body.clone(), BOB, open || !needs).await;
            check("/v2/default/run", json!({"input": body}), BOB, open || !needs).await;
        }
        world.stopped().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_one_key_delays_another_by_some_steps() {
    let folder = tempfile::tempdir().unwrap();
    let queue = QueueLimits { requests_max: 16, tokens_max: 1 << 20 };
    let setup = Setup { queue, slots: 2, ..Setup::saying(&"word ".repeat(200)) };
    let (world, gate) = World::gated(two(folder.path(), setup)).await;
    let long = json!({"prompt": "a", "max_tokens": 1000});
    let mut flood = Vec::new();
    for _ in 0..12 {
        flood.push(send(&world, "/v1/completions", ALICE, &long).await);
    }
    // Half of the queue is hers, and two or so are under way.
    until_keyed(world.address, ALICE, "/metrics", |page| {
        page.body.contains("fornax_failures_total{code=\"QUEUE_FULL\"}")
    })
    .await;
    let waiting = async |wanted: u64| {
        until_keyed(world.address, BOB, "/health", |health| health.json()["waiting"] == wanted).await;
    };
    waiting(8).await;
    let mut his = send(&world, "/v1/completions", BOB, &json!({"prompt": "b", "max_tokens": 5})).await;
    waiting(9).await;
    let answered = tokio::spawn(async move { client::read(&mut his).await });
    let mut steps = 0;
    while !answered.is_finished() {
        gate.send(()).unwrap();
        // Not before this step is done, or is waited for by nobody.
        ask(&world, "GET", "/health", BOB, &Value::Null).await;
        steps += 1;
        assert!(steps < 900, "a thousand steps would be her first answer");
    }
    let answer = answered.await.unwrap();
    assert_eq!(answer.json()["choices"][0]["text"], "word ", "{}", answer.body);
    drop((flood, gate));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counting_tokens_counts_as_a_request_and_comes_whole() {
    let options = ServerOptions { per_key_max: 0, ..Default::default() };
    let world = World::ready(Setup { options, ..Setup::default() }).await;
    let messages = json!({"messages": [{"role": "user", "content": "a"}], "model": "script"});
    for (path, body) in [
        ("/tokenize", json!({"content": "a"})),
        ("/detokenize", json!({"tokens": [65]})),
        ("/v1/messages/count_tokens", messages),
    ] {
        assert_eq!(post(world.address, path, &body).await.status, 429, "{path}");
    }
    let world = World::ready(Setup::default()).await;
    for length in [0, 1, 4095, 4096, 4097, 20_000] {
        let text = "ab\u{e4}".chars().cycle().take(length).collect::<String>();
        for pieces in [false, true] {
            let said =
                post(world.address, "/tokenize", &json!({"content": text, "with_pieces": pieces})).await;
            let said = said.json();
            let tokens = said["tokens"].as_array().unwrap();
            assert_eq!((tokens.len(), &said["count"]), (text.len(), &json!(text.len())));
            let ids = tokens.iter().map(|token| if pieces { &token["id"] } else { token });
            let ids: Vec<u8> = ids.map(|id| u8::try_from(id.as_u64().unwrap()).unwrap()).collect();
            assert_eq!(ids, text.as_bytes());
            if pieces && length > 2 {
                assert_eq!((&tokens[0]["piece"], &tokens[2]["piece"]), (&json!("a"), &json!([0xc3])));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_template_is_given_is_not_the_clients_to_replace() {
    let world = World::ready(Setup::default()).await;
    for name in ["messages", "tools", "documents", "add_generation_prompt", "strftime_now", "bos_token"] {
        let body =
            json!({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {(name): [1]}});
        let refused = post(world.address, "/v1/chat/completions", &body).await;
        let field = format!("chat_template_kwargs.{name}");
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(field)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_there_is_no_memory_for_is_refused_until_there_is() {
    let left = Arc::new(AtomicU64::new(u64::MAX));
    let seen = Arc::clone(&left);
    let ceiling = Ceiling::new(move || Some(seen.load(Ordering::Relaxed)));
    let options = ServerOptions { ceiling: Some(ceiling), ..Default::default() };
    let world = World::ready(Setup { options, ..Setup::default() }).await;
    let body = json!({"prompt": "a".repeat(1 << 20), "max_tokens": 1});
    let status = async || post(world.address, "/v1/completions", &body).await;
    assert_eq!(status().await.json()["error"]["code"], "context_length_exceeded");
    // Enough for small requests, and not for this one.
    left.store(132 << 20, Ordering::Relaxed);
    let refused = status().await;
    assert_eq!((code(&refused), refused.header("retry-after")), ((503, json!("OUT_OF_MEMORY")), Some("5")));
    assert_eq!(post(world.address, "/v1/completions", &json!({"prompt": "a"})).await.status, 200);
    left.store(0, Ordering::Relaxed);
    let small = post(world.address, "/v1/completions", &json!({"prompt": "a"})).await;
    assert_eq!(code(&small), (503, json!("OUT_OF_MEMORY")));
    assert_eq!(client::get(world.address, "/health").await.status, 200, "whoever looks is told");
}

/// A hundred answers with twenty alternatives of each token are gigabytes, asked for in a line.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_holds_more_than_there_is_ends_and_others_go_on() {
    let looks = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&looks);
    // There is room when it comes in, and none later.
    let left = move || Some(if seen.fetch_add(1, Ordering::Relaxed) == 0 { u64::MAX } else { 0 });
    let options = ServerOptions { ceiling: Some(Ceiling::new(left)), ..Default::default() };
    let world = World::ready(Setup { options, ..Setup::saying(&"a".repeat(1000)) }).await;
    let body = |n: u32| json!({"prompt": "a", "max_tokens": 1000, "n": n, "logprobs": 20});
    let whole = post(world.address, "/v1/completions", &body(1)).await;
    assert_eq!(whole.status, 200, "{}", whole.body);
    looks.store(0, Ordering::Relaxed);
    let ended = post(world.address, "/v1/completions", &body(8)).await;
    assert_eq!((code(&ended), ended.header("retry-after")), ((503, json!("OUT_OF_MEMORY")), Some("5")));
    world.until("/health", |health| health.json()["kv"]["pages_used"] == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preparing_has_an_end() {
    let options = ServerOptions { prepare_timeout: Duration::ZERO, ..Default::default() };
    let world = World::ready(Setup { options, ..Setup::default() }).await;
    for (path, body) in [("/v1/completions", json!({"prompt": "a"})), ("/tokenize", json!({"content": "a"}))]
    {
        let late = post(world.address, path, &body).await;
        assert_eq!(code(&late), (504, json!("EXECUTION_TIMEOUT")), "{path}");
    }
    // Values are counted while they are read: eight megabytes of these took most of a gigabyte.
    let world = World::ready(Setup::default()).await;
    let body = format!("{{\"prompt\":\"a\",\"x\":[{}]}}", vec!["{\"\":0}"; 300_000].join(","));
    let many = raw(world.address, &request("POST", "/v1/completions", &[], body.as_bytes())).await;
    assert_eq!(code(&many), (400, json!("INVALID_INPUT")));
    assert!(many.body.contains("more than 200000 objects and lists"), "{}", many.body);
    let seed = post(world.address, "/v1/completions", &json!({"prompt": "a", "seed": u64::MAX})).await;
    assert_eq!((seed.status, &seed.json()["error"]["param"]), (400, &json!("seed")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compiling_ends_when_nobody_waits_for_it_any_more() {
    let (said, heard) = mpsc::channel();
    let said = Mutex::new(said);
    // Stands in for a process that would never end by itself.
    let trial = Arc::new(move |_: &_, wanted: &dyn Fn() -> bool| {
        said.lock().unwrap().send("begun").unwrap();
        while wanted() {
            std::thread::yield_now();
        }
        said.lock().unwrap().send("ended").unwrap();
        Err(FormError::Unwanted)
    });
    let world = World::ready(Setup { trial: Some(trial), ..Setup::default() }).await;
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let body = json!({"prompt": "a", "guided_regex": "a+"}).to_string();
    stream.write_all(&request("POST", "/v1/completions", &[], body.as_bytes())).await.unwrap();
    let hear = async |wanted: &str| {
        in_time(async {
            loop {
                match heard.try_recv() {
                    Ok(word) => break assert_eq!(word, wanted),
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        })
        .await;
    };
    hear("begun").await;
    drop(stream);
    hear("ended").await;
}
