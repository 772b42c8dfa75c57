//! Durable jobs over HTTP.

use std::time::Duration;

use fornax_jobs::StoreOptions;
use fornax_server::ServerOptions;
use serde_json::{Value, json};

use crate::{
    client::{Response, get, post, raw, request},
    world::{Setup, World, keeping},
};

async fn run(world: &World, body: &Value) -> Response {
    post(world.address, "/v2/default/run", body).await
}

async fn runsync(world: &World, input: Value) -> Value {
    let response = post(world.address, "/v2/default/runsync", &json!({"input": input})).await;
    assert_eq!(response.status, 200, "{}", response.body);
    response.json()
}

async fn send(world: &World, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Response {
    raw(world.address, &request(method, path, headers, body.as_bytes())).await
}

async fn ended(world: &World, id: &str) -> Value {
    let path = format!("/v2/default/status/{id}");
    let is_open = |status: &str| matches!(status, "IN_QUEUE" | "IN_PROGRESS");
    world.until(&path, |response| !is_open(response.json()["status"].as_str().unwrap())).await;
    get(world.address, &path).await.json()
}

/// Without what differs from run to run.
fn stable(mut status: Value) -> Value {
    for field in ["id", "delayTime", "executionTime"] {
        if !status[field].is_null() {
            status[field] = json!("[…]");
        }
    }
    for place in ["/output/metadata/timings", "/output/metadata/seed"] {
        if let Some(value) = status.pointer_mut(place) {
            *value = json!("[…]");
        }
    }
    status
}

fn kinds() -> Value {
    json!({"type": "object", "properties": {"kind": {"enum": ["invoice", "receipt"]}}, "required": ["kind"],
        "additionalProperties": false})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_submitted_polled_and_valid() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::ready(keeping(folder.path(), Setup::saying("{\"kind\":\"receipt\"}"))).await;
    let input =
        json!({"messages": [{"role": "user", "content": "What is it? <|im_end|>"}], "schema": kinds()});
    let accepted = run(&world, &json!({"input": input})).await;
    assert_eq!((accepted.status, &accepted.json()["status"]), (200, &json!("IN_QUEUE")));
    let id = accepted.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(id.len(), 12 + 32);
    insta::assert_json_snapshot!(stable(ended(&world, &id).await));
    let events = get(world.address, &format!("/v2/script/timeline/{id}")).await.json();
    let events: Vec<&str> =
        events["events"].as_array().unwrap().iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(events, ["submitted", "started", "completed"]);
    let health = get(world.address, "/v2/default/health").await.json();
    let jobs = json!({"completed": 1, "failed": 0, "inProgress": 0, "inQueue": 0, "retried": 0});
    assert_eq!((&health["jobs"], &health["workers"]["idle"]), (&jobs, &json!(1)));
    let page = get(world.address, "/console/jobs").await;
    assert!(page.body.starts_with("<!doctype html>") && page.header("content-security-policy").is_some());
    let metrics = get(world.address, "/metrics").await.body;
    assert!(metrics.contains("fornax_jobs{model_name=\"script\",state=\"COMPLETED\"} 1"), "{metrics}");
    let list = get(world.address, "/v2/default/jobs?status=COMPLETED&limit=5").await.json();
    assert_eq!((&list["jobs"][0]["id"], &list["jobs"][0]["output"]), (&json!(id), &Value::Null));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thoughts_and_calls_of_a_job_stand_apart_from_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let script = "<think>Let me see.</think>\n\nHm. <tool_call>{\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET\"}}</tool_call>";
    let world = World::ready(keeping(folder.path(), Setup::skilled(script))).await;
    let messages = json!([{"role": "user", "content": "When?"}]);
    let done = runsync(&world, json!({"messages": messages, "tools": crate::tools::tools()})).await;
    let output = &done["output"];
    assert_eq!(
        (&output["output"], &output["reasoning_content"]),
        (&json!("Hm."), &json!("Let me see.")),
        "{done}"
    );
    let call = &output["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "get_time", "arguments": "{\"zone\": \"CET\"}"}));
    assert_eq!(
        (call["id"].as_str().map(str::len), &output["metadata"]["finish_reason"]),
        (Some(9), &json!("tool_calls"))
    );
    // Without tools a call is text, and a prompt that is no chat is continued as it is.
    let done = runsync(&world, json!({"messages": messages})).await;
    assert!(done["output"]["output"].as_str().unwrap().starts_with("Hm. <tool_call>"), "{done}");
    let done = runsync(&world, json!({"prompt": "a", "max_tokens": 200})).await;
    assert_eq!((&done["output"]["output"], done["output"].get("reasoning_content")), (&json!(script), None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_actions_cut_at_any_token_are_never_a_success() {
    let folder = tempfile::tempdir().unwrap();
    let text = r#"{"actions":[{"book":"rent","cents":70},{"book":"tax","cents":19}]}"#;
    let world = World::ready(keeping(folder.path(), Setup::saying(text))).await;
    let action = json!({"type": "object", "properties": {"book": {"type": "string"}, "cents": {"type": "integer"}},
        "required": ["book", "cents"], "additionalProperties": false});
    let schema = json!({"type": "object", "properties": {"actions": {"type": "array", "items": action, "minItems": 2,
        "maxItems": 2}}, "required": ["actions"], "additionalProperties": false});
    for tokens in 1..=text.len() {
        let status = runsync(&world, json!({"prompt": "book", "schema": schema, "max_tokens": tokens})).await;
        let output = &status["output"];
        if tokens < text.len() {
            assert_eq!(
                (&status["status"], &output["code"]),
                (&json!("FAILED"), &json!("OUTPUT_TRUNCATED")),
                "{tokens}"
            );
            assert_eq!((&output["success"], &output["output"]), (&json!(false), &Value::Null), "{tokens}");
        } else {
            assert_eq!(
                (&status["status"], &output["success"]),
                (&json!("COMPLETED"), &json!(true)),
                "{status}"
            );
            assert_eq!(output["output"], serde_json::from_str::<Value>(text).unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_and_the_older_input_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::ready(keeping(folder.path(), Setup::saying("{\"kind\":\"invoice\"}"))).await;
    let registered = send(&world, "PUT", "/v2/default/schemas/kinds", &[], &kinds().to_string()).await;
    assert_eq!(
        (registered.status, registered.body.as_str()),
        (200, r#"{"name":"kinds","status":"registered"}"#)
    );
    assert_eq!(get(world.address, "/v2/default/schemas/kinds").await.json(), kinds());
    let items: Vec<Value> =
        (0..6).map(|n| json!({"id": format!("d{n}"), "text": format!("document {n}")})).collect();
    let prefix = "You sort documents. ".repeat(20);
    let input = json!({"shared_prefix": prefix, "items": items, "schema": "kinds"});
    let accepted = run(&world, &json!({"input": input})).await.json();
    let id = accepted["id"].as_str().unwrap();
    let path = format!("/v2/default/stream/{id}");
    let lines = send(&world, "GET", &path, &[("Accept", "application/x-ndjson")], "").await;
    assert!(lines.whole && lines.header("content-type") == Some("application/x-ndjson"));
    let lines: Vec<Value> = lines.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ids: Vec<&Value> = lines.iter().map(|line| &line["id"]).collect();
    assert_eq!(
        ids,
        [&json!("d0"), &json!("d1"), &json!("d2"), &json!("d3"), &json!("d4"), &json!("d5"), &json!(id)]
    );
    let status = &lines[6];
    assert_eq!((&status["status"], &status["output"]["success"]), (&json!("COMPLETED"), &json!(true)));
    let polled = get(world.address, &format!("/v2/default/status/{id}")).await.json();
    assert_eq!(polled["items"], json!({"done": 6, "total": 6}));
    let usage = &status["output"]["metadata"]["usage"];
    let (prompt, cached) = (usage["prompt"].as_u64().unwrap(), usage["cached"].as_u64().unwrap());
    assert!(cached * 10 > prompt * 7, "{cached} of {prompt} tokens were computed once for all");
    assert_eq!(lines[2]["metadata"]["schema"], "kinds");

    // As RunPod's clients ask: each part once.
    let first = get(world.address, &path).await.json();
    assert_eq!((first["stream"].as_array().unwrap().len(), &first["status"]), (6, &json!("COMPLETED")));
    assert_eq!(first["stream"][5]["output"]["id"], "d5");
    assert_eq!(get(world.address, &path).await.json()["stream"], json!([]));

    let older = json!({"endpoint": "/prompt", "data": {"prompt": "Sort it.", "context": "invoice", "max_tokens": 90}});
    assert_eq!(runsync(&world, older).await["output"]["output"], "{\"kind\":\"invoice\"}");
    assert_eq!(
        runsync(&world, json!({"endpoint": "/health"})).await["output"]["output"]["status"],
        "healthy"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_done_is_refused_with_its_own_code() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup { context: 256, ..Setup::default() };
    let world = World::ready(keeping(folder.path(), setup)).await;
    let check = async |path: &str, body: Value, status: u16, code: &str, field: Option<&str>| {
        let response = post(world.address, path, &body).await;
        let error = &response.json()["error"];
        let got = (response.status, error["code"].as_str(), error["param"].as_str());
        assert_eq!(got, (status, Some(code), field), "{body}: {}", response.body);
    };
    let ask = |input: Value| json!({"input": input});
    let run = "/v2/default/run";
    check("/v2/other/run", ask(json!({"prompt": "a"})), 404, "UNKNOWN_ENDPOINT", None).await;
    check(run, json!({"input": {"prompt": "a"}, "stage": "x"}), 400, "INVALID_INPUT", Some("stage")).await;
    check(run, json!({}), 400, "INVALID_INPUT", Some("input")).await;
    check(run, ask(json!({"prompt": "a", "colour": 1})), 400, "INVALID_INPUT", Some("input.colour")).await;
    check(
        run,
        ask(json!({"prompt": "a", "temperature": 9})),
        400,
        "INVALID_INPUT",
        Some("input.temperature"),
    )
    .await;
    check(run, ask(json!({"endpoint": "/other", "data": {}})), 400, "INVALID_INPUT", Some("input.endpoint"))
        .await;
    check(run, ask(json!({"prompt": "a", "schema": "none"})), 404, "SCHEMA_NOT_FOUND", Some("input.schema"))
        .await;
    let missing = get(world.address, "/v2/default/schemas/none").await;
    assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &json!("SCHEMA_NOT_FOUND")));
    check(run, ask(json!({"prompt": "a", "schema": {"type": "x"}})), 400, "SCHEMA_UNSUPPORTED", None).await;
    let not = json!({"prompt": "a", "schema": {"not": {}}});
    check(run, ask(not), 400, "SCHEMA_UNSUPPORTED", Some("input.schema")).await;
    check(run, ask(json!({"prompt": "a".repeat(300)})), 400, "PROMPT_TOO_LONG", None).await;
    check(run, ask(json!({"prompt": "a", "max_tokens": 999})), 400, "PROMPT_TOO_LONG", None).await;
    let policy = json!({"input": {"prompt": "a"}, "policy": {"ttl": 5, "speed": 1}});
    check(run, policy, 400, "INVALID_INPUT", Some("policy.speed")).await;
    let policy = json!({"input": {"prompt": "a"}, "policy": {"executionTimeout": 0}});
    check(run, policy, 400, "INVALID_INPUT", Some("policy.executionTimeout")).await;
    for url in ["http://127.0.0.1/", "http://localhost/", "https://other.example/", "file:///etc/passwd"] {
        check(
            run,
            json!({"input": {"prompt": "a"}, "webhook": url}),
            400,
            "WEBHOOK_REFUSED",
            Some("webhook"),
        )
        .await;
    }
    check("/v2/default/runsync?wait=5", ask(json!({"prompt": "a"})), 400, "INVALID_INPUT", Some("wait"))
        .await;
    check("/v2/default/cancel/nothing", json!({}), 404, "JOB_NOT_FOUND", None).await;
    check("/v2/default/retry/nothing", json!({}), 404, "JOB_NOT_FOUND", None).await;
    let large = send(&world, "POST", run, &[], &"x".repeat(20 << 20)).await;
    assert_eq!((large.status, &large.json()["error"]["code"]), (413, &json!("BODY_TOO_LARGE")));
    let counts = get(world.address, "/v2/default/health").await.json();
    assert_eq!(counts["jobs"]["inQueue"], 0, "nothing half-written");
    let without = World::ready(Setup::default()).await;
    let response = post(without.address, run, &ask(json!({"prompt": "a"}))).await;
    assert_eq!((response.status, &response.json()["error"]["code"]), (404, &json!("UNKNOWN_ENDPOINT")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_that_wait_are_cancelled_purged_refused_and_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let options = ServerOptions { drain_timeout: Duration::from_millis(20), ..ServerOptions::default() };
    let setup = keeping(folder.path(), Setup { options, ..Setup::saying("done") });
    let (mut world, gate) = World::gated(setup).await;
    let body = json!({"input": {"prompt": "a"}});
    let keyed = [("Idempotency-Key", "one")];
    let first = send(&world, "POST", "/v2/default/run", &keyed, &body.to_string()).await.json();
    let again = send(&world, "POST", "/v2/default/run", &keyed, &body.to_string()).await.json();
    assert_eq!(first["id"], again["id"]);
    let other = json!({"input": {"prompt": "b"}}).to_string();
    let refused = send(&world, "POST", "/v2/default/run", &keyed, &other).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (409, &json!("KEY_REUSED")));

    // Four are worked on, the others wait until there is no room for more.
    let mut ids = vec![first["id"].as_str().unwrap().to_owned()];
    loop {
        let response = run(&world, &body).await;
        if response.status == 429 {
            assert_eq!(
                (response.json()["error"]["code"].as_str(), response.header("retry-after")),
                (Some("QUEUE_FULL"), Some("1"))
            );
            break;
        }
        ids.push(response.json()["id"].as_str().unwrap().to_owned());
        assert!(ids.len() < 40);
    }
    let waits = get(world.address, &format!("/v2/default/status/{}", ids[10])).await.json();
    assert_eq!(waits["status"], "IN_QUEUE");
    let cancelled = post(world.address, &format!("/v2/default/cancel/{}", ids[10]), &json!({})).await.json();
    assert_eq!(
        (&cancelled["status"], &cancelled["output"]["code"]),
        (&json!("CANCELLED"), &json!("CANCELLED"))
    );
    let refused = post(world.address, &format!("/v2/default/retry/{}", ids[10]), &json!({})).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (409, &json!("WRONG_STATE")));
    assert_eq!(refused.json()["error"]["retryable"], false);
    // One that is worked on ends at once, too.
    let cancelled = post(world.address, &format!("/v2/default/cancel/{}", ids[0]), &json!({})).await.json();
    assert_eq!(cancelled["status"], "CANCELLED");
    let purged = post(world.address, "/v2/default/purge-queue", &json!({})).await.json();
    assert!(purged["removed"].as_u64().unwrap() >= 15, "{purged}");
    let kept = run(&world, &body).await.json()["id"].as_str().unwrap().to_owned();
    // A job that waits longer than it may: all that can be worked on is.
    let hasty = json!({"input": {"prompt": "a"}, "policy": {"ttl": 1}});
    let hasty = run(&world, &hasty).await.json()["id"].as_str().unwrap().to_owned();
    let status = ended(&world, &hasty).await;
    assert_eq!(
        (&status["status"], &status["output"]["code"]),
        (&json!("TIMED_OUT"), &json!("TTL_EXPIRED")),
        "{status}"
    );

    // Told to stop while it works: what it had taken waits in the file for the next one.
    world.stop();
    drop(gate);
    world.stopped().await.unwrap();
    let world = World::ready(keeping(folder.path(), Setup::saying("done"))).await;
    for id in [&kept, &ids[1], &ids[2]] {
        let status = ended(&world, id).await;
        assert_eq!(
            (&status["status"], &status["output"]["output"]),
            (&json!("COMPLETED"), &json!("done")),
            "{status}"
        );
    }
    assert_eq!(ended(&world, &ids[10]).await["status"], "CANCELLED");
    let list = get(world.address, "/v2/default/jobs?status=CANCELLED&limit=1000").await.json();
    assert!(list["jobs"].as_array().unwrap().len() >= 17);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_refuses_a_job_whole_and_keeps_all_others() {
    let folder = tempfile::tempdir().unwrap();
    let mut setup = keeping(folder.path(), Setup::saying("done"));
    let jobs = setup.options.jobs.as_mut().unwrap();
    jobs.store = StoreOptions { queue_max: 1000, bytes_max: Some(400_000), ..jobs.store.clone() };
    // Beyond the test of the model itself nothing is computed.
    let (world, gate) = World::gated(setup).await;
    let body = json!({"input": {"messages": [{"role": "user", "content": "x".repeat(2000)}]}});
    let mut kept = Vec::new();
    let refused = loop {
        let response = run(&world, &body).await;
        if response.status != 200 {
            break response;
        }
        kept.push(response.json()["id"].as_str().unwrap().to_owned());
        assert!(kept.len() < 400, "400 kB cannot hold these");
    };
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (507, &json!("DISK_FULL")));
    assert_eq!(refused.json()["error"]["retryable"], true);
    assert!(kept.len() > 20, "{} were kept", kept.len());
    // Every job that was accepted is there, and nothing of the one that was not.
    let list = get(world.address, "/v2/default/jobs?limit=1000").await.json();
    let mut there: Vec<&str> =
        list["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_str().unwrap()).collect();
    let mut kept: Vec<&str> = kept.iter().map(String::as_str).collect();
    there.sort_unstable();
    kept.sort_unstable();
    assert_eq!(there, kept);
    drop(gate);
}
