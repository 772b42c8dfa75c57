//! Chat completions, whole and streamed.

use serde_json::{Value, json};

use crate::{
    client::{Response, post},
    world::{Setup, World},
};

const CHAT: &str = "/v1/chat/completions";

/// One question of a user, with more fields.
fn ask(more: &Value) -> Value {
    let mut body = json!({"model": "script", "messages": [{"role": "user", "content": "Why?"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

async fn answer(script: &str, more: Value) -> Response {
    let world = World::ready(Setup::saying(script)).await;
    let response = post(world.address, CHAT, &ask(&more)).await;
    assert!(response.whole);
    world.stopped().await.unwrap();
    response
}

fn content(response: &Response) -> String {
    response.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

/// The text of all deltas of a choice.
fn streamed(response: &Response, index: u64) -> String {
    let events = response.events();
    let choices = events.iter().filter_map(|event| event["choices"].as_array()).flatten();
    let texts = choices
        .filter(|choice| choice["index"] == index)
        .filter_map(|choice| choice["delta"]["content"].as_str());
    texts.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_answer_looks_as_openai_writes_it() {
    insta::assert_snapshot!(answer("Air scatters.", json!({})).await.transcript());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_looks_as_openai_writes_it() {
    let body = json!({"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 5});
    insta::assert_snapshot!(answer("Hé €uro", body).await.transcript());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_probabilities_come_with_tokens_and_bytes() {
    let body = json!({"logprobs": true, "top_logprobs": 2});
    insta::assert_snapshot!("logprobs_whole", answer("Hé", body).await.transcript());
    let body = json!({"logprobs": true, "stream": true});
    insta::assert_snapshot!("logprobs_stream", answer("Hé", body).await.transcript());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_joined_is_the_whole_answer() {
    for script in ["The sky.", "Grüße, 世界! 👋 done", "<b>END</b> and ENDE"] {
        for stop in [json!(null), json!("END"), json!(["ky.", "👋 d"])] {
            let whole = answer(script, json!({"stop": stop})).await;
            let stream = answer(script, json!({"stop": stop, "stream": true})).await;
            assert_eq!(streamed(&stream, 0), content(&whole), "{script} {stop}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_answers_have_their_own_index_and_one_prompt() {
    let whole = answer("Yes.", json!({"n": 3})).await.json();
    let indices: Vec<&Value> =
        whole["choices"].as_array().unwrap().iter().map(|choice| &choice["index"]).collect();
    assert_eq!(indices, [0, 1, 2]);
    let one = answer("Yes.", json!({})).await.json();
    assert_eq!(whole["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"]);
    // Four characters and the end, three times.
    assert_eq!(whole["usage"]["completion_tokens"], 15);
    let stream = answer("Yes.", json!({"n": 3, "stream": true})).await;
    for index in 0..3 {
        assert_eq!(streamed(&stream, index), "Yes.");
    }
    let ends = stream.events().iter().filter(|event| !event["choices"][0]["finish_reason"].is_null()).count();
    assert_eq!((ends, stream.events().last().unwrap()), (3, &json!("[DONE]")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_end_for_the_reason_they_say() {
    let check = async |script: &str, more: Value, text: &str, reason: &str| {
        let response = answer(script, more.clone()).await;
        let choice = &response.json()["choices"][0];
        assert_eq!(choice["message"]["content"], text, "{more}");
        assert_eq!(choice["finish_reason"], reason, "{more}");
    };
    check("Hello.", json!({}), "Hello.", "stop").await;
    check("Hello.", json!({"max_tokens": 3}), "Hel", "length").await;
    check("Hello.", json!({"max_completion_tokens": 3}), "Hel", "length").await;
    check("Hello.", json!({"stop": "lo"}), "Hel", "stop").await;
    check("Hello.", json!({"stop": ["x", "ell"]}), "H", "stop").await;
    check("Hello.", json!({"stop": "lo", "min_tokens": 5}), "Hello.", "stop").await;
    check("Hello.", json!({"guided_choice": ["yes", "no"]}), "no", "stop").await;
    check("777", json!({"guided_regex": "[0-9]{2}"}), "77", "stop").await;
    check("ab", json!({"guided_grammar": "start: \"a\" \"b\"+"}), "ab", "stop").await;
    check("{}", json!({"response_format": {"type": "json_object"}}), "{}", "stop").await;
    check("Hello.", json!({"response_format": {"type": "text"}}), "Hello.", "stop").await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
        "additionalProperties": false});
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    check("?????12}", json!({"response_format": format}), r#"{"a":12}"#, "stop").await;
    check("?????12}", json!({"response_format": format, "max_tokens": 6}), r#"{"a":1"#, "length").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_seen_before_counts_as_cached() {
    let world = World::ready(Setup::default()).await;
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(100)}]});
    let first = post(world.address, CHAT, &long).await.json();
    let second = post(world.address, CHAT, &long).await.json();
    let cached =
        |response: &Value| response["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!(cached(&first), 0);
    // Whole pages of 32 tokens.
    assert_eq!(cached(&second), 96);
    let salted = json!({"messages": long["messages"], "cache_salt": "mine"});
    assert_eq!(cached(&post(world.address, CHAT, &salted).await.json()), 0);
    // llama.cpp's way to ask for the whole; what it computes is found by nobody.
    let alone = json!({"messages": long["messages"], "cache_prompt": false});
    for _ in 0..2 {
        assert_eq!(cached(&post(world.address, CHAT, &alone).await.json()), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_before_the_end_is_an_error_and_never_an_end() {
    let world = World::ready(Setup { fails_at: Some(4), ..Setup::default() }).await;
    let whole = post(world.address, CHAT, &ask(&json!({}))).await;
    insta::assert_snapshot!("failed_whole", whole.transcript());
    let stream = post(world.address, CHAT, &ask(&json!({"stream": true}))).await;
    insta::assert_snapshot!("failed_stream", stream.transcript());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_reach_the_template_whatever_their_form() {
    let check = async |messages: Value, tokens: u64| {
        let response = answer("ok", json!({"messages": messages})).await.json();
        assert_eq!(response["usage"]["prompt_tokens"], tokens, "{messages}");
    };
    // <|im_start|> u s e r \n a <|im_end|> \n, then the assistant's turn of 11.
    check(json!([{"role": "user", "content": "a"}]), 20).await;
    check(
        json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
        22,
    )
    .await;
    // A marker in a message is text: ten characters, not one token.
    check(json!([{"role": "user", "content": "<|im_end|>"}]), 29).await;
    check(json!([{"role": "developer", "content": "a"}]), 22).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_log_probabilities_are_told_by_position() {
    let response = answer("ok", json!({"prompt_logprobs": 1, "max_tokens": 1})).await.json();
    let scored = response["prompt_logprobs"].as_array().unwrap();
    assert_eq!(scored.len() as u64, response["usage"]["prompt_tokens"].as_u64().unwrap());
    assert_eq!(scored[0], Value::Null);
    assert_eq!(scored[1]["117"]["decoded_token"], "u");
    assert_eq!(scored[1]["117"]["logprob"], -0.5);
}
