//! What is wrong is refused with its field and rule, and never answered.

use serde_json::{Value, json};

use crate::{
    client::{post, raw, request},
    world::{Setup, World},
};

/// When each field was tried in turn the time grew with the square of their number: 8000 took nine seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_is_found_among_any_number_of_other_fields() {
    let world = World::ready(Setup::default()).await;
    let mut body = json!({"messages": [{"role": "user", "content": "a"}], "seed": u64::MAX});
    for field in 0..200_000 {
        body[format!("k{field}")] = json!(0);
    }
    let response = post(world.address, "/v1/chat/completions", &body).await;
    assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!("seed")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wrong_field_gives_400_with_the_field_and_its_rule() {
    let world = World::ready(Setup::default()).await;
    let check = async |more: Value, param: &str, message: &str| {
        let mut body = json!({"messages": [{"role": "user", "content": "a secret"}]});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        let response = post(world.address, "/v1/chat/completions", &body).await;
        let error = &response.json()["error"];
        assert_eq!((response.status, &error["code"]), (400, &json!("INVALID_INPUT")), "{more}: {error}");
        assert_eq!(error["param"], param, "{more}: {error}");
        assert_eq!(error["errors"][0]["field"], param, "{more}: {error}");
        let said = error["message"].as_str().unwrap();
        assert!(said.contains(message) && !said.contains("secret"), "{more}: {said}");
    };
    check(json!({"temperature": 2.5}), "temperature", "a number from 0 to 2; got 2.5").await;
    check(json!({"temperature": "secret"}), "temperature", "got a string of 6 characters").await;
    check(json!({"top_p": -0.1}), "top_p", "a number from 0 to 1").await;
    check(json!({"n": 0}), "n", "an integer from 1 to 128").await;
    check(json!({"n": 1.5}), "n", "an integer").await;
    check(json!({"n": 1000}), "n", "an integer from 1 to 128; got 1000").await;
    check(json!({"max_tokens": 0}), "max_tokens", "an integer from 1").await;
    check(json!({"max_tokens": 5, "max_completion_tokens": 6}), "max_tokens", "differs").await;
    check(json!({"stop": ""}), "stop", "a string of 1 to 4096 characters").await;
    check(json!({"stop": ["a", ""]}), "stop[1]", "from 1 to 4096").await;
    check(json!({"stop": vec!["a"; 17]}), "stop", "up to 16").await;
    check(json!({"stop": "x".repeat(5000)}), "stop", "a string of 1 to 4096 characters").await;
    check(json!({"logit_bias": {"5": 101}}), "logit_bias.5", "from -100 to 100").await;
    check(json!({"logit_bias": {"secret": 1}}), "logit_bias", "token ids").await;
    let biases: Value = (0..5000).map(|token| (token.to_string(), json!(1))).collect();
    check(json!({"logit_bias": biases}), "logit_bias", "at most 4096").await;
    check(json!({"logit_bias": {"99999": 1}}), "logit_bias", "a token of the vocabulary").await;
    check(json!({"allowed_token_ids": []}), "allowed_token_ids", "").await;
    check(json!({"allowed_token_ids": [5_000_000_000u64]}), "allowed_token_ids", "").await;
    check(json!({"top_logprobs": 3}), "top_logprobs", "needs logprobs").await;
    check(json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs", "from 0 to 20").await;
    check(json!({"logprobs": 3}), "logprobs", "true or false").await;
    check(json!({"stream_options": {"include_usage": true}}), "stream_options", "needs stream").await;
    check(json!({"stream": true, "prompt_logprobs": 1}), "prompt_logprobs", "cannot be combined with stream")
        .await;
    check(json!({"mirostat": 2, "top_p": 0.5}), "top_p", "mirostat").await;
    check(json!({"mirostat": 3}), "mirostat", "from 0 to 2").await;
    check(json!({"priority": 200}), "priority", "from -128 to 127").await;
    check(json!({"seed": "secret"}), "seed", "an integer").await;
    check(json!({"seed": u64::MAX}), "seed", "an integer of 64 bits").await;
    check(json!({"ignore_eos": true, "guided_regex": "a"}), "ignore_eos", "guided_regex").await;
    check(json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice", "cannot be combined with")
        .await;
    check(json!({"messages": []}), "messages", "an array").await;
    check(json!({"messages": "secret"}), "messages", "an array").await;
    check(json!({"messages": [{"role": "user"}]}), "messages[0].content", "is required").await;
    check(json!({"messages": [{"role": "king", "content": "a"}]}), "messages[0].role", "one of").await;
    check(
        json!({"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}),
        "messages[0].content[0].type",
        "this model reads no images",
    )
    .await;
    let audio =
        json!({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]});
    check(audio, "messages[0].content[0].type", "reads no sound").await;
    check(json!({"repeat_penalty": 1.5, "repetition_penalty": 1.2}), "repeat_penalty", "differs").await;
    check(json!({"guided_json": 5}), "guided_json", "a JSON Schema").await;
    check(
        json!({"structured_outputs": {"structural_tag": {}}}),
        "structured_outputs.structural_tag",
        "not supported",
    )
    .await;
    let both = json!({"structured_outputs": {"regex": "a", "choice": ["a"]}});
    check(both, "structured_outputs.choice", "cannot be combined with").await;
    let schema = json!({"response_format": {"type": "json_object", "schema": 123}});
    check(schema, "response_format.schema", "a JSON Schema").await;
    let schema = json!({"response_format": {"type": "text", "schema": {}}});
    check(schema, "response_format.schema", "belongs to").await;
    check(json!({"response_format": {"type": "yaml"}}), "response_format.type", "one of").await;
    check(json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema", "required")
        .await;
    check(json!({"chat_template_kwargs": 5}), "chat_template_kwargs", "an object").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_known_and_not_honoured_is_refused_by_name_and_the_unknown_ignored() {
    let world = World::ready(Setup::default()).await;
    let check = async |name: &str, value: Value, status: u16| {
        let mut body = json!({"prompt": "a"});
        body[name] = value.clone();
        let response = post(world.address, "/v1/completions", &body).await;
        assert_eq!(response.status, status, "{name}: {value}: {}", response.body);
        if status == 400 {
            assert_eq!(response.json()["error"]["param"], name);
        }
    };
    check("tools", json!([{"type": "function"}]), 400).await;
    check("tool_choice", json!("required"), 400).await;
    check("echo", json!(true), 200).await;
    check("best_of", json!(2), 400).await;
    for name in [
        "banned_tokens",
        "ebnf",
        "enable_thinking",
        "guided_whitespace_pattern",
        "max_new_tokens",
        "num_predict",
        "penalty_last_n",
        "regex",
        "samplers",
        "structural_tag",
        "think",
    ] {
        check(name, json!("x"), 400).await;
        check(name, Value::Null, 200).await;
    }
    for (name, neutral) in [
        ("min_keep", json!(0)),
        ("n_probs", json!(0)),
        ("no_repeat_ngram_size", json!(0)),
        ("tfs_z", json!(1.0)),
        ("return_token_ids", json!(false)),
        ("return_tokens_as_token_ids", json!(false)),
    ] {
        check(name, json!(3), 400).await;
        check(name, neutral, 200).await;
    }
    check("reasoning_effort", json!("high"), 400).await;
    check("tools", json!([]), 200).await;
    check("echo", json!(false), 200).await;
    check("best_of", json!(null), 200).await;
    check("user", json!("me"), 200).await;
    check("something_new", json!({"a": 1}), 200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_refusals_have_their_own_status_and_code() {
    let world = World::ready(Setup { context: 64, ..Setup::default() }).await;
    let check = async |path: &str, body: Value, status: u16, code: &str, message: &str| {
        let response = post(world.address, path, &body).await;
        let error = &response.json()["error"];
        assert_eq!((response.status, &error["code"]), (status, &json!(code)), "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
        assert!(error["retryable"].is_boolean());
    };
    let completions = "/v1/completions";
    check(completions, json!({"prompt": "a", "model": "gpt-9"}), 404, "MODEL_NOT_FOUND", "\"script\"").await;
    // Refused without being cut into tokens: no token of this model has more than twelve bytes.
    let huge = "a".repeat(1 << 20);
    let message = "1048576 bytes; this model's maximum context length is 64 tokens";
    let too_long = "context_length_exceeded";
    check(completions, json!({"prompt": huge}), 400, too_long, message).await;
    let chat = json!({"messages": [{"role": "user", "content": huge}]});
    check("/v1/chat/completions", chat, 400, too_long, message).await;
    let bomb = format!("((a*)*)*b{}", "(x+x+)+".repeat(50));
    check(completions, json!({"prompt": "a", "guided_regex": bomb}), 400, "SCHEMA_UNSUPPORTED", "lexer")
        .await;
    let long = "a".repeat(64);
    let words =
        "This model's maximum context length is 64 tokens. However, your messages resulted in 64 tokens.";
    check(completions, json!({"prompt": long}), 400, too_long, words).await;
    let words = "64 tokens. However, you requested 65 tokens (1 in the messages, 64 in the completion).";
    check(completions, json!({"prompt": "a", "max_tokens": 64}), 400, too_long, words).await;
    check("/v1/embeddings", json!({"input": long + "a"}), 400, too_long, "maximum context length").await;
    check("/v1/responses", json!({"input": "a".repeat(64)}), 400, too_long, "maximum context length").await;
    // Each API says it in its own words.
    let refused =
        async |path: &str, body: Value| post(world.address, path, &body).await.json()["error"].clone();
    let user = |text: &str| json!([{"role": "user", "content": text}]);
    let error = refused("/v1/messages", json!({"messages": user(&"a".repeat(90)), "max_tokens": 1})).await;
    assert_eq!(error["message"], "prompt is too long: 109 tokens > 64 maximum");
    let error = refused("/v1/messages", json!({"messages": user("a"), "max_tokens": 60})).await;
    let words = "input length and `max_tokens` exceed context limit: 20 + 60 > 64, decrease input length or `max_tokens` and try again";
    assert_eq!(error["message"], words);
    let error = refused("/api/chat", json!({"model": "script", "messages": user(&"a".repeat(90))})).await;
    assert!(error.as_str().unwrap().starts_with("the input length exceeds the context length"), "{error}");
    check(completions, json!({"prompt": [300]}), 400, "INVALID_INPUT", "token 300").await;
    check(completions, json!({"prompt": ""}), 400, "INVALID_INPUT", "empty").await;
    check(completions, json!({"prompt": []}), 400, "INVALID_INPUT", "prompt").await;
    check(
        completions,
        json!({"prompt": "a", "guided_regex": "("}),
        400,
        "SCHEMA_UNSUPPORTED",
        "guided_regex",
    )
    .await;
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}});
    let body = json!({"prompt": "a", "response_format": format});
    check(completions, body, 400, "SCHEMA_UNSUPPORTED", "\"not\"").await;
    check("/tokenize", json!({"content": "a", "other": 1}), 400, "INVALID_INPUT", "not a field").await;
    check("/tokenize", json!({}), 400, "INVALID_INPUT", "required").await;
    check("/detokenize", json!({"tokens": [1, 258]}), 400, "INVALID_INPUT", "tokens[1]").await;
    let strange = raw(world.address, &request("GET", "/v1/models/%ff", &[], b"")).await;
    assert_eq!((strange.status, &strange.json()["error"]["param"]), (400, &json!("id")));
    check("/nothing", json!({}), 404, "UNKNOWN_ENDPOINT", "nothing at this path").await;
    check("/health", json!({}), 405, "UNKNOWN_ENDPOINT", "method").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_are_no_json_are_refused() {
    let world = World::ready(Setup::default()).await;
    let bodies: [&[u8]; 7] =
        [b"", b"{", b"[1]", b"\xff\xfe", b"{\"prompt\": \"\xc3\"}", b"null", &b"[".repeat(100_000)];
    for body in bodies {
        for path in ["/v1/completions", "/v1/chat/completions", "/execute", "/cancel", "/tokenize"] {
            let response = raw(world.address, &request("POST", path, &[], body)).await;
            assert_eq!(
                response.status,
                400,
                "{path} {:?}",
                String::from_utf8_lossy(&body[..body.len().min(20)])
            );
        }
    }
}
