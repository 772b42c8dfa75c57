//! Files and batches, as OpenAI's clients use them.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use fornax_server::{Ceiling, ServerOptions};
use serde_json::{Value, json};

use crate::{
    client::{Response, get, post, raw, request},
    world::{Setup, World, keeping},
};

const BOUNDARY: &str = "----form";

/// A form with a file, as clients send it.
fn form(purpose: &str, name: &str, content: &[u8]) -> Vec<u8> {
    let mut body = format!(
        "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\n{purpose}\r\n--{BOUNDARY}\r\n\
         Content-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\
         Content-Type: application/octet-stream\r\n\r\n"
    )
    .into_bytes();
    body.extend(content);
    body.extend(format!("\r\n--{BOUNDARY}--\r\n").bytes());
    body
}

async fn send_form(world: &World, headers: &[(&str, &str)], body: &[u8]) -> Response {
    let mut head = format!(
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\
         Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n",
        body.len()
    );
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    let mut bytes = (head + "\r\n").into_bytes();
    bytes.extend(body);
    raw(world.address, &bytes).await
}

async fn upload(world: &World, content: &str) -> String {
    let response = send_form(world, &[], &form("batch", "requests.jsonl", content.as_bytes())).await;
    assert_eq!(response.status, 200, "{}", response.body);
    response.json()["id"].as_str().unwrap().to_owned()
}

fn line(custom_id: &str, url: &str, body: Value) -> String {
    json!({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).to_string()
}

async fn begin(world: &World, file: &str, endpoint: &str) -> Response {
    let body = json!({"input_file_id": file, "endpoint": endpoint, "completion_window": "24h",
        "metadata": {"for": "a test"}});
    post(world.address, "/v1/batches", &body).await
}

async fn ended(world: &World, id: &str) -> Value {
    let path = format!("/v1/batches/{id}");
    let is_open = |status: &str| matches!(status, "in_progress" | "cancelling");
    world.until(&path, |response| !is_open(response.json()["status"].as_str().unwrap())).await;
    get(world.address, &path).await.json()
}

async fn lines(world: &World, batch: &Value, which: &str) -> Vec<Value> {
    let path = format!("/v1/files/{}/content", batch[which].as_str().unwrap());
    let content = get(world.address, &path).await;
    assert_eq!((content.status, content.header("content-type")), (200, Some("application/octet-stream")));
    content.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

async fn world(folder: &Path, script: &str) -> World {
    World::ready(keeping(folder, Setup::saying(script))).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_of_requests_becomes_a_file_of_answers() {
    let folder = tempfile::tempdir().unwrap();
    let world = world(folder.path(), "blue").await;
    let chat = "/v1/chat/completions";
    let ask =
        |text: &str| json!({"model": "script", "messages": [{"role": "user", "content": text}], "seed": 1});
    let text = [
        line("first", chat, ask("Which colour?")),
        line("wrong", chat, json!({"model": "script", "messages": [], "temperature": 9})),
        line("last", chat, ask("And this?")),
    ]
    .join("\n");
    let file = upload(&world, &text).await;
    let begun = begin(&world, &file, chat).await;
    assert_eq!(begun.status, 200, "{}", begun.body);
    let begun = begun.json();
    assert_eq!((&begun["status"], &begun["request_counts"]["total"]), (&json!("in_progress"), &json!(3)));
    let batch = ended(&world, begun["id"].as_str().unwrap()).await;
    let counts = json!({"total": 3, "completed": 2, "failed": 1});
    assert_eq!((&batch["status"], &batch["request_counts"]), (&json!("completed"), &counts), "{batch}");
    assert_eq!((&batch["metadata"], &batch["errors"]), (&json!({"for": "a test"}), &Value::Null));
    assert!(batch["completed_at"].is_u64() && batch["expires_at"].as_u64() > batch["created_at"].as_u64());

    let answers = lines(&world, &batch, "output_file_id").await;
    let ids: Vec<&Value> = answers.iter().map(|line| &line["custom_id"]).collect();
    assert_eq!(ids, [&json!("first"), &json!("last")]);
    for answer in &answers {
        let response = &answer["response"];
        let said = &response["body"]["choices"][0]["message"]["content"];
        assert_eq!(
            (&response["status_code"], said, &answer["error"]),
            (&json!(200), &json!("blue"), &Value::Null)
        );
        // What the route itself answers.
        let mut own = post(world.address, chat, &ask("Which colour?")).await.json();
        own["id"] = response["body"]["id"].clone();
        own["created"] = response["body"]["created"].clone();
        own["usage"] = response["body"]["usage"].clone();
        assert_eq!(own, response["body"]);
    }
    let errors = lines(&world, &batch, "error_file_id").await;
    assert_eq!(errors.len(), 1);
    let response = &errors[0]["response"];
    assert_eq!((&errors[0]["custom_id"], &response["status_code"]), (&json!("wrong"), &json!(400)));
    let error = &response["body"]["error"];
    assert_eq!(
        (&error["code"], error["errors"].as_array().map(Vec::len)),
        (&json!("INVALID_INPUT"), Some(2))
    );

    let listed = get(world.address, "/v1/batches?limit=1").await.json();
    assert_eq!((&listed["data"][0]["id"], &listed["has_more"]), (&begun["id"], &json!(false)));
    // The jobs of RunPod's API are others.
    assert_eq!(get(world.address, "/v2/default/jobs").await.json()["jobs"], json!([]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_that_a_batch_may_have_answers_in_its_own_form() {
    let folder = tempfile::tempdir().unwrap();
    let world = world(folder.path(), "yes").await;
    let check = async |route: &str, body: Value, pointer: &str, wanted: Value| {
        let file = upload(&world, &line("a", route, body)).await;
        let begun = begin(&world, &file, route).await.json();
        let batch = ended(&world, begun["id"].as_str().unwrap()).await;
        assert_eq!(batch["request_counts"]["completed"], 1, "{route}: {batch}");
        let answer = &lines(&world, &batch, "output_file_id").await[0];
        assert_eq!(answer["response"]["body"].pointer(pointer), Some(&wanted), "{answer}");
    };
    check("/v1/completions", json!({"prompt": "a"}), "/choices/0/text", json!("yes")).await;
    let echo = json!({"prompt": "a", "echo": true, "max_tokens": 0});
    check("/v1/completions", echo, "/choices/0/text", json!("a")).await;
    check("/v1/embeddings", json!({"input": "a"}), "/data/0/embedding/0", json!(0.6)).await;
    check("/v1/responses", json!({"input": "a"}), "/output/0/content/0/text", json!("yes")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_wrong_fails_with_each_of_its_lines_and_asks_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let world = world(folder.path(), "x").await;
    let route = "/v1/completions";
    let good = json!({"prompt": "a"});
    let check = async |text: String, wanted: &[(&str, Value)]| {
        let file = upload(&world, &text).await;
        let batch = begin(&world, &file, route).await.json();
        assert_eq!(batch["status"], "failed", "{batch}");
        let errors = batch["errors"]["data"].as_array().unwrap();
        let got: Vec<(&str, Value)> =
            errors.iter().map(|error| (error["code"].as_str().unwrap(), error["line"].clone())).collect();
        assert_eq!(got, wanted, "{text}");
        assert!(!batch.to_string().contains("secret"), "{batch}");
    };
    check(String::new(), &[("empty_file", Value::Null)]).await;
    check("{\n\n".to_owned() + &line("a", route, good.clone()), &[("invalid_json_line", json!(1))]).await;
    let twice = [line("a", route, good.clone()), line("a", route, good.clone())].join("\n");
    check(twice, &[("duplicate_custom_id", json!(2))]).await;
    check(line("a", "/secret", good.clone()), &[("mismatched_url", json!(1))]).await;
    check(line("a", route, json!("secret")), &[("invalid_body", json!(1))]).await;
    check(line("a", route, json!({"prompt": "a", "stream": true})), &[("invalid_body", json!(1))]).await;
    check(line("a", route, json!({"model": "secret"})), &[("model_not_found", json!(1))]).await;
    check(line("", route, good.clone()), &[("invalid_custom_id", json!(1))]).await;
    check(json!({"url": route}).to_string(), &[("missing_required_parameter", json!(1))]).await;
    let get_it = line("a", route, good).replace("POST", "GET");
    check(get_it, &[("invalid_method", json!(1))]).await;
    assert_eq!(get(world.address, "/v2/default/health").await.json()["jobs"]["inQueue"], 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_and_batches_are_refused_by_the_field_that_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let mut setup = keeping(folder.path(), Setup::default());
    setup.options.file_bytes_max = 4096;
    let world = World::ready(setup).await;
    let check_form = async |body: Vec<u8>, status: u16, code: &str, param: Value| {
        let response = send_form(&world, &[], &body).await;
        let error = &response.json()["error"];
        assert_eq!(
            (response.status, &error["code"], &error["param"]),
            (status, &json!(code), &param),
            "{error}"
        );
    };
    check_form(form("fine-tune", "a", b"{}"), 400, "INVALID_INPUT", json!("purpose")).await;
    check_form(form("batch", "a", b"\xff"), 400, "INVALID_INPUT", json!("file")).await;
    check_form(form("batch", "a", b"a\0b"), 400, "INVALID_INPUT", json!("file")).await;
    check_form(form("batch", "a", &[b'x'; 5000]), 413, "BODY_TOO_LARGE", Value::Null).await;
    check_form(b"no form".to_vec(), 400, "INVALID_INPUT", json!("body")).await;
    // Files are counted as other fields are: sixty-four megabytes of them took a thread of the sockets for a minute.
    let part = format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n\r\n");
    check_form(
        (part.repeat(17) + &format!("--{BOUNDARY}--\r\n")).into_bytes(),
        400,
        "INVALID_INPUT",
        json!("body"),
    )
    .await;
    check_form(form("batch", "a", b"{}")[..80].to_vec(), 400, "INVALID_INPUT", json!("body")).await;
    let without = post(world.address, "/v1/files", &json!({})).await;
    assert_eq!((without.status, &without.json()["error"]["param"]), (400, &json!("body")));

    let file = upload(&world, &line("a", "/v1/completions", json!({"prompt": "a"}))).await;
    let check = async |more: Value, status: u16, code: &str, param: Value| {
        let mut body =
            json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let response = post(world.address, "/v1/batches", &body).await;
        let error = &response.json()["error"];
        assert_eq!(
            (response.status, &error["code"], &error["param"]),
            (status, &json!(code), &param),
            "{more}"
        );
    };
    check(json!({"endpoint": "/v1/moderations"}), 400, "INVALID_INPUT", json!("endpoint")).await;
    for window in ["24", "0h", "169h", "1d", "-1h"] {
        check(json!({"completion_window": window}), 400, "INVALID_INPUT", json!("completion_window")).await;
    }
    check(json!({"metadata": {"a": 1}}), 400, "INVALID_INPUT", json!("metadata")).await;
    check(json!({"input_file_id": "file-none"}), 404, "FILE_NOT_FOUND", Value::Null).await;
    for path in ["/v1/files/file-none", "/v1/files/file-none/content"] {
        assert_eq!(get(world.address, path).await.status, 404);
    }
    let missing = get(world.address, "/v1/batches/batch_none").await;
    assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &json!("BATCH_NOT_FOUND")));
    assert_eq!(post(world.address, "/v1/batches/batch_none/cancel", &json!({})).await.status, 404);
    for query in ["limit=0", "limit=x", "order=up"] {
        assert_eq!(get(world.address, &format!("/v1/files?{query}")).await.status, 400, "{query}");
    }
    let without = World::ready(Setup::default()).await;
    assert_eq!(get(without.address, "/v1/files").await.status, 404, "nothing is kept there");
}

/// A line of a few megabytes of small objects took a hundred times its bytes, and a small request had a file of any size
/// read as often as it was sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_file_makes_the_server_hold_has_the_bounds_of_what_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let route = "/v1/completions";
    let left = Arc::new(AtomicU64::new(u64::MAX));
    let seen = Arc::clone(&left);
    let mut setup = keeping(folder.path(), Setup::default());
    setup.options.ceiling = Some(Ceiling::new(move || Some(seen.load(Ordering::Relaxed))));
    let world = World::ready(setup).await;
    let many = format!("{{\"prompt\":\"a\",\"x\":[{}]}}", vec!["{\"\":0}"; 300_000].join(","));
    let many = line("a", route, json!({"prompt": "a"})).replace("{\"prompt\":\"a\"}", &many);
    let long = line("a", route, json!({"prompt": "a".repeat(9 << 20)}));
    let mut ids = Vec::new();
    for (text, rule) in [(many, "more values than a body may have"), (long, "a line may have 8388608 bytes")]
    {
        let file = upload(&world, &text).await;
        let failed = begin(&world, &file, route).await.json();
        assert_eq!(
            (&failed["status"], &failed["errors"]["data"][0]["code"]),
            (&json!("failed"), &json!("invalid_json_line"))
        );
        assert!(failed["errors"]["data"][0]["message"].as_str().unwrap().contains(rule), "{failed}");
        ids.push(file);
    }
    // Enough for requests, and not for one that has nine megabytes read.
    left.store(132 << 20, Ordering::Relaxed);
    let refused = begin(&world, &ids[1], route).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!("OUT_OF_MEMORY")));

    let folder = tempfile::tempdir().unwrap();
    let mut setup = keeping(folder.path(), Setup::default());
    setup.options.per_key_max = 0;
    let busy = World::ready(setup).await;
    assert_eq!(begin(&busy, "file-1", route).await.status, 429, "it counts as a request of its key");
    assert_eq!(send_form(&busy, &[], &form("batch", "a", b"{}")).await.status, 429);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_belongs_to_the_key_that_sent_it() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "the-key-of-alice-1234\nthe-key-of-bob-123456\n").unwrap();
    let options = ServerOptions { api_key_file: Some(keys), ..ServerOptions::default() };
    let world = World::ready(keeping(folder.path(), Setup { options, ..Setup::default() })).await;
    let alice = [("Authorization", "Bearer the-key-of-alice-1234")];
    let bob = [("Authorization", "Bearer the-key-of-bob-123456")];
    let content = line("a", "/v1/completions", json!({"prompt": "a"}));
    let file = send_form(&world, &alice, &form("batch", "a.jsonl", content.as_bytes())).await.json();
    let id = file["id"].as_str().unwrap();
    assert_eq!((&file["filename"], &file["bytes"]), (&json!("a.jsonl"), &json!(content.len())));
    let send = async |key: &[(&str, &str)], method: &str, path: &str, body: &Value| {
        raw(world.address, &request(method, path, key, body.to_string().as_bytes())).await
    };
    let path = format!("/v1/files/{id}");
    let batch = json!({"input_file_id": id, "endpoint": "/v1/completions", "completion_window": "24h"});
    assert_eq!(send(&bob, "GET", &path, &json!({})).await.status, 404);
    assert_eq!(send(&bob, "GET", &format!("{path}/content"), &json!({})).await.status, 404);
    assert_eq!(send(&bob, "DELETE", &path, &json!({})).await.status, 404);
    assert_eq!(send(&bob, "POST", "/v1/batches", &batch).await.status, 404);
    assert_eq!(send(&bob, "GET", "/v1/files", &json!({})).await.json()["data"], json!([]));
    assert_eq!(send(&alice, "GET", &path, &json!({})).await.json(), file);
    assert_eq!(send(&alice, "GET", &format!("{path}/content"), &json!({})).await.body, content);
    let mut keyed = alice.to_vec();
    keyed.push(("Idempotency-Key", "once"));
    let begun = send(&keyed, "POST", "/v1/batches", &batch).await.json();
    assert_eq!(send(&keyed, "POST", "/v1/batches", &batch).await.json()["id"], begun["id"]);
    let other = json!({"input_file_id": id, "endpoint": "/v1/completions", "completion_window": "1h"});
    assert_eq!(send(&keyed, "POST", "/v1/batches", &other).await.status, 409);
    let path_of_batch = format!("/v1/batches/{}", begun["id"].as_str().unwrap());
    assert_eq!(send(&bob, "GET", &path_of_batch, &json!({})).await.status, 404);
    assert_eq!(send(&bob, "POST", &format!("{path_of_batch}/cancel"), &json!({})).await.status, 404);
    let deleted = send(&alice, "DELETE", &path, &json!({})).await.json();
    assert_eq!(deleted, json!({"id": id, "object": "file", "deleted": true}));
    assert_eq!(send(&alice, "GET", &path, &json!({})).await.status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_batch_stops_and_another_server_finds_what_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        ServerOptions { drain_timeout: std::time::Duration::from_millis(20), ..ServerOptions::default() };
    let setup = keeping(folder.path(), Setup { options, ..Setup::saying("done") });
    let (world, gate) = World::gated(setup).await;
    let requests: Vec<String> =
        (0..8).map(|n| line(&n.to_string(), "/v1/completions", json!({"prompt": "a"}))).collect();
    let file = upload(&world, &requests.join("\n")).await;
    let first = begin(&world, &file, "/v1/completions").await.json();
    let second = begin(&world, &file, "/v1/completions").await.json();
    let path = format!("/v1/batches/{}/cancel", first["id"].as_str().unwrap());
    let cancelled = post(world.address, &path, &json!({})).await.json();
    assert!(cancelled["cancelling_at"].is_u64(), "{cancelled}");
    let cancelled = ended(&world, first["id"].as_str().unwrap()).await;
    let counts = json!({"total": 8, "completed": 0, "failed": 0});
    assert_eq!((&cancelled["status"], &cancelled["request_counts"]), (&json!("cancelled"), &counts));
    drop(gate);
    world.stopped().await.unwrap();

    let world = World::ready(keeping(folder.path(), Setup::saying("done"))).await;
    let batch = ended(&world, second["id"].as_str().unwrap()).await;
    assert_eq!(batch["request_counts"], json!({"total": 8, "completed": 8, "failed": 0}), "{batch}");
    let answers = lines(&world, &batch, "output_file_id").await;
    let ids: Vec<String> =
        answers.iter().map(|answer| answer["custom_id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ids, (0..8).map(|n| n.to_string()).collect::<Vec<_>>());
}
