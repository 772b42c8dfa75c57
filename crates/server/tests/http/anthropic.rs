//! Messages, as Anthropic's clients ask for them.

use serde_json::{Value, json};

use crate::{
    client::{Response, post, raw, request},
    tools::CALLS,
    world::{Setup, World},
};

const MESSAGES: &str = "/v1/messages";

fn ask(more: &Value) -> Value {
    let mut body =
        json!({"model": "script", "max_tokens": 400, "messages": [{"role": "user", "content": "Why?"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn tools() -> Value {
    let tool = |name: &str| {
        json!({"name": name, "description": "Tells.", "input_schema": {"type": "object",
        "properties": {"zone": {"enum": ["CET"]}}, "required": ["zone"], "additionalProperties": false}})
    };
    json!([tool("get_time"), tool("get_weather")])
}

async fn answer(script: &str, more: Value) -> Response {
    let world = World::ready(Setup::skilled(script)).await;
    let response = post(world.address, MESSAGES, &ask(&more)).await;
    world.stopped().await.unwrap();
    response
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_message_looks_as_anthropic_writes_it() {
    insta::assert_snapshot!(answer(CALLS, json!({"tools": tools()})).await.transcript());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_opens_and_closes_each_block() {
    let body = json!({"stream": true, "tools": tools()});
    insta::assert_snapshot!(
        answer("<think>a</think>b<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", body)
            .await
            .transcript()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_end_for_a_reason() {
    let check = async |script: &str, more: Value, reason: &str, sequence: Value| {
        let whole = answer(script, more).await.json();
        assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!(reason), &sequence), "{whole}");
    };
    check("Yes.", json!({}), "end_turn", Value::Null).await;
    check("Yes. No.", json!({"stop_sequences": ["x", " No"]}), "stop_sequence", json!(" No")).await;
    check("Yes.", json!({"max_tokens": 2}), "max_tokens", Value::Null).await;
    let choice = json!({"type": "tool", "name": "get_time"});
    check("Yes.", json!({"tools": tools(), "tool_choice": choice}), "tool_use", Value::Null).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_counted_as_they_would_be_computed() {
    let world = World::ready(Setup::skilled("Yes.")).await;
    let mut body = ask(
        &json!({"tools": tools(), "system": [{"type": "text", "text": "Be kind."}], "messages": [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "tool_use", "id": "a", "name": "get_time", "input": {"zone": "CET"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "12"}]}]}]}),
    );
    let whole = post(world.address, MESSAGES, &body).await.json();
    let usage = &whole["usage"];
    let prompt = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    body.as_object_mut().unwrap().remove("max_tokens");
    let counted = post(world.address, "/v1/messages/count_tokens", &body).await.json();
    assert_eq!(counted, json!({"input_tokens": prompt}), "{whole}");
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_have_the_shape_that_clients_read() {
    let check = async |body: Value, status: u16, kind: &str| {
        let world = World::ready(Setup::skilled("a")).await;
        let response = post(world.address, MESSAGES, &body).await;
        let error = response.json();
        assert_eq!(
            (response.status, &error["type"], &error["error"]["type"]),
            (status, &json!("error"), &json!(kind)),
            "{error}"
        );
        assert!(!error["error"]["message"].as_str().unwrap().is_empty());
        world.stopped().await.unwrap();
    };
    check(json!({"messages": []}), 400, "invalid_request_error").await;
    check(ask(&json!({"model": "other"})), 404, "not_found_error").await;
    check(ask(&json!({"mcp_servers": [{}]})), 400, "invalid_request_error").await;
    check(ask(&json!({"messages": [{"role": "assistant", "content": "I"}]})), 400, "invalid_request_error")
        .await;
    check(
        ask(&json!({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]})),
        400,
        "invalid_request_error",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_may_come_as_anthropic_s_clients_send_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "a-key-of-good-length\n").unwrap();
    let mut setup = Setup::skilled("Yes.");
    setup.options.api_key_file = Some(file);
    let world = World::ready(setup).await;
    let body = ask(&json!({})).to_string();
    let send = async |key: &str| {
        raw(world.address, &request("POST", MESSAGES, &[("x-api-key", key)], body.as_bytes())).await
    };
    assert_eq!(send("a-key-of-good-length").await.status, 200);
    let refused = send("another-key-of-length").await;
    assert_eq!((refused.status, &refused.json()["error"]["type"]), (401, &json!("authentication_error")));
}
