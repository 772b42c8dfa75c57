//! Completions, tokens, models, embeddings.

use serde_json::{Value, json};

use crate::{
    client::{get, post},
    world::{Setup, World},
};

const COMPLETIONS: &str = "/v1/completions";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_looks_as_openai_writes_it() {
    let world = World::ready(Setup::saying(" blue.")).await;
    let body = json!({"model": "script", "prompt": "The sky is", "logprobs": 1});
    insta::assert_snapshot!("whole", post(world.address, COMPLETIONS, &body).await.transcript());
    let body = json!({"model": "script", "prompt": "The sky is", "stream": true, "logprobs": 0, "max_tokens": 2,
        "stream_options": {"include_usage": true}});
    insta::assert_snapshot!("stream", post(world.address, COMPLETIONS, &body).await.transcript());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_may_be_texts_or_tokens_one_or_many() {
    let world = World::ready(Setup::saying("yes")).await;
    let check = async |prompt: Value, choices: usize, tokens: u64| {
        let response = post(world.address, COMPLETIONS, &json!({"prompt": prompt, "n": 2})).await;
        assert_eq!(response.status, 200, "{}", response.body);
        let response = response.json();
        let texts = response["choices"].as_array().unwrap();
        assert_eq!(texts.len(), choices, "{prompt}");
        for (index, choice) in texts.iter().enumerate() {
            assert_eq!((&choice["index"], &choice["text"]), (&json!(index), &json!("yes")));
        }
        assert_eq!(response["usage"]["prompt_tokens"], tokens, "{prompt}");
    };
    check(json!("abc"), 2, 3).await;
    check(json!(["abc", "de"]), 4, 5).await;
    check(json!([97, 98]), 2, 2).await;
    check(json!([[97, 98], [99]]), 4, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_tokens_follow_unless_more_are_asked_for() {
    let world = World::ready(Setup::saying(&"a".repeat(50))).await;
    let check = async |body: Value, length: usize| {
        let response = post(world.address, COMPLETIONS, &body).await.json();
        assert_eq!(response["choices"][0]["text"].as_str().unwrap().len(), length);
    };
    check(json!({"prompt": "x"}), 16).await;
    check(json!({"prompt": "x", "max_tokens": 40}), 40).await;
    check(json!({"prompt": "x", "max_tokens": 60, "ignore_eos": false}), 50).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_and_tokens_turn_into_each_other() {
    let world = World::ready(Setup::default()).await;
    let check = async |path: &str, body: Value, wanted: Value| {
        let response = post(world.address, path, &body).await;
        assert_eq!((response.status, response.json()), (200, wanted), "{body}");
    };
    let tokens =
        |tokens: Value, count: usize| json!({"tokens": tokens, "count": count, "max_model_len": 4096});
    check(
        "/tokenize",
        json!({"content": "é<|im_end|>"}),
        tokens(json!([195, 169, 60, 124, 105, 109, 95, 101, 110, 100, 124, 62]), 12),
    )
    .await;
    check("/tokenize", json!({"content": "a<|im_end|>", "parse_special": true}), tokens(json!([97, 257]), 2))
        .await;
    check("/tokenize", json!({"prompt": "a", "model": "script"}), tokens(json!([97]), 1)).await;
    check(
        "/tokenize",
        json!({"content": "é", "with_pieces": true}),
        tokens(json!([{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]), 2),
    )
    .await;
    check("/detokenize", json!({"tokens": [195, 169, 257, 33]}), json!({"content": "é!", "prompt": "é!"}))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_one_model_is_listed_and_found_by_name() {
    let world = World::ready(Setup::default()).await;
    let model = json!({"id": "script", "object": "model", "created": 1_700_000_000, "owned_by": "fornax",
        "max_model_len": 4096, "state": "loaded"});
    let list = get(world.address, "/v1/models").await;
    assert_eq!(list.json(), json!({"object": "list", "data": [model]}));
    assert_eq!(get(world.address, "/v1/models/script").await.json(), model);
    assert_eq!(get(world.address, "/v1/models/other").await.status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embeddings_come_in_order_and_of_length_one() {
    let world = World::ready(Setup::default()).await;
    let check = async |body: Value, count: usize, prompt_tokens: usize, embedding: &str| {
        let response = post(world.address, "/v1/embeddings", &body).await;
        assert_eq!(response.status, 200, "{}", response.json());
        let response = response.json();
        let data = response["data"].as_array().unwrap();
        assert_eq!(data.len(), count);
        for (index, item) in data.iter().enumerate() {
            assert_eq!((&item["object"], &item["index"]), (&json!("embedding"), &json!(index)));
            assert_eq!(item["embedding"].to_string(), embedding);
        }
        assert_eq!((&response["object"], &response["model"]), (&json!("list"), &json!("script")));
        assert_eq!(response["usage"]["prompt_tokens"], prompt_tokens);
        assert_eq!(response["usage"]["completion_tokens"], 0);
    };
    let numbers = "[0.6,0.0,-0.8]";
    check(json!({"input": "text"}), 1, 4, numbers).await;
    check(json!({"input": [1, 2, 3], "encoding_format": "float"}), 1, 3, numbers).await;
    check(json!({"input": [[1], [2, 3]], "dimensions": null}), 2, 3, numbers).await;
    check(json!({"input": "ab", "dimensions": 3}), 1, 2, numbers).await;
    // The first of them, at length one again.
    check(json!({"input": "ab", "dimensions": 2}), 1, 2, "[1.0,0.0]").await;
    check(json!({"input": vec!["ab"; 100]}), 100, 200, numbers).await;
    check(json!({"input": ["a"], "encoding_format": "base64"}), 1, 1, "\"mpkZPwAAAADNzEy/\"").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_embedded_is_refused_with_its_field() {
    let world = World::ready(Setup::default()).await;
    let check = async |body: Value, code: &str, param: Value| {
        let response = post(world.address, "/v1/embeddings", &body).await;
        let error = &response.json()["error"];
        assert_eq!((&error["code"], &error["param"]), (&json!(code), &param), "{body}: {error}");
        assert_eq!(response.status, 400);
    };
    check(json!({}), "INVALID_INPUT", json!("input")).await;
    check(json!({"input": []}), "INVALID_INPUT", json!("input")).await;
    check(json!({"input": vec!["a"; 2049]}), "INVALID_INPUT", json!("input")).await;
    check(json!({"input": {"text": "a"}}), "INVALID_INPUT", json!("input")).await;
    check(json!({"input": "a", "encoding_format": "hex"}), "INVALID_INPUT", json!("encoding_format")).await;
    check(json!({"input": "a", "dimensions": 4}), "INVALID_INPUT", json!("dimensions")).await;
    check(json!({"input": "a".repeat(5000)}), "context_length_exceeded", Value::Null).await;
    check(json!({"input": ["a", ""]}), "INVALID_INPUT", json!("input")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_echoed_prompt_comes_with_its_log_probabilities_in_the_same_lists() {
    let world = World::ready(Setup::saying(" blue.")).await;
    let body = json!({"prompt": "é is", "echo": true, "logprobs": 1, "max_tokens": 2});
    insta::assert_snapshot!("echo", post(world.address, COMPLETIONS, &body).await.transcript());
    let body = json!({"prompt": "ab", "echo": true, "logprobs": 0, "max_tokens": 1, "stream": true,
        "stream_options": {"include_usage": true}});
    insta::assert_snapshot!("echo_stream", post(world.address, COMPLETIONS, &body).await.transcript());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_echo_tells_every_prompt_and_only_the_tokens_that_were_asked_for() {
    let world = World::ready(Setup::saying("yes")).await;
    let check = async |more: Value, texts: Value, tokens: Value, generated: u64| {
        let mut body = json!({"echo": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let response = post(world.address, COMPLETIONS, &body).await;
        assert_eq!(response.status, 200, "{more}: {}", response.body);
        let response = response.json();
        let choices = response["choices"].as_array().unwrap();
        let of = |pointer: &str| -> Value {
            choices.iter().map(|choice| choice.pointer(pointer).cloned().unwrap_or_default()).collect()
        };
        assert_eq!((of("/text"), of("/logprobs/tokens")), (texts, tokens), "{more}");
        assert_eq!(response["usage"]["completion_tokens"], generated, "{more}");
        if more["logprobs"].is_u64() {
            for choice in choices {
                let logprobs = &choice["logprobs"];
                assert_eq!(
                    (&logprobs["token_logprobs"][0], &logprobs["top_logprobs"][0]),
                    (&Value::Null, &Value::Null)
                );
                assert!(
                    logprobs["token_logprobs"].as_array().unwrap()[1..].iter().all(Value::is_f64),
                    "{more}"
                );
            }
        }
    };
    check(json!({"prompt": "ab", "max_tokens": 0}), json!(["ab"]), json!([null]), 0).await;
    check(json!({"prompt": "ab", "max_tokens": 2}), json!(["abye"]), json!([null]), 2).await;
    check(json!({"prompt": "ab", "max_tokens": 0, "logprobs": 0}), json!(["ab"]), json!([["a", "b"]]), 0)
        .await;
    check(json!({"prompt": "a", "max_tokens": 0, "logprobs": 0}), json!(["a"]), json!([["a"]]), 0).await;
    let lists = json!([["a", "b", "y"], ["c", "y"]]);
    check(
        json!({"prompt": [[97, 98], [99]], "max_tokens": 1, "logprobs": 1}),
        json!(["aby", "cy"]),
        lists,
        2,
    )
    .await;
    let twice = json!([["a", "b", "y"], ["a", "b", "y"]]);
    check(json!({"prompt": "ab", "n": 2, "max_tokens": 1, "logprobs": 1}), json!(["aby", "aby"]), twice, 2)
        .await;
    // The token that ends the answer is no text, and whoever leaves out the last one counts on it.
    let ended = json!([["a", "b", "y", "e", "s", "<|im_end|>"]]);
    check(json!({"prompt": "ab", "logprobs": 1}), json!(["abyes"]), ended, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_says_where_a_prompt_differs_from_the_nearest_one_under_the_same_salt() {
    let world = World::ready(Setup::saying("x")).await;
    let told = async |prompt: &str, salt: &str, more: Value| {
        let mut body = json!({"prompt": prompt, "cache_salt": salt, "max_tokens": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let response = post(world.address, COMPLETIONS, &body).await;
        assert_eq!(response.status, 200, "{}", response.body);
        response.json()["usage"]["prompt_tokens_details"].clone()
    };
    let prompt = "The quick brown fox jumps over the lazy dog. ".repeat(4);
    let other = prompt.replacen("jumps", "leaps", 1);
    assert_eq!(told(&prompt, "a", json!({})).await, json!({"cached_tokens": 0}));
    assert_eq!(told(&prompt, "a", json!({})).await, json!({"cached_tokens": 160}));
    let differs = json!({"cached_tokens": 0, "cache_miss": {"reason": "differs", "tokens": 20}});
    assert_eq!(told(&other, "a", json!({})).await, differs);
    assert_eq!(
        told(&other, "b", json!({})).await,
        json!({"cached_tokens": 0}),
        "another tenant's is not told"
    );
    let whole = json!({"cached_tokens": 0, "cache_miss": {"reason": "whole"}});
    assert_eq!(told(&prompt, "a", json!({"prompt_logprobs": 0})).await, whole);
}
