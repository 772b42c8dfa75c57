//! The routes of llama.cpp's server.

use serde_json::{Value, json};

use crate::{
    client::{get, post},
    world::{Setup, World},
};

/// Without what differs from run to run.
fn stable(mut answer: Value) -> Value {
    if let Some(timings) = answer.get_mut("timings").and_then(Value::as_object_mut) {
        for (name, value) in timings {
            if name.ends_with("_ms") || name.ends_with("_second") {
                *value = json!("[…]");
            }
        }
    }
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_looks_as_llama_cpp_writes_it() {
    let world = World::ready(Setup::saying(" blue.")).await;
    let body =
        json!({"prompt": "The sky is", "n_predict": -1, "seed": 4, "n_probs": 2, "return_tokens": true});
    let whole = post(world.address, "/completion", &body).await;
    assert_eq!(whole.status, 200, "{}", whole.body);
    insta::assert_json_snapshot!("whole", stable(whole.json()));
    let body = json!({"prompt": [84, 104, 101], "n_predict": 2, "seed": 4, "stream": true});
    let streamed = post(world.address, "/completions", &body).await;
    let events: Vec<Value> = streamed.events().into_iter().map(stable).collect();
    insta::assert_json_snapshot!("stream", events);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_says_how_it_stopped_and_follows_its_form_and_parameters() {
    let world = World::ready(Setup::saying("one two three")).await;
    let check = async |more: Value, content: &str, stop_type: &str, word: &str| {
        let mut body = json!({"prompt": "a"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let response = post(world.address, "/completion", &body).await;
        assert_eq!(response.status, 200, "{more}: {}", response.body);
        let answer = response.json();
        let told = (&answer["content"], &answer["stop_type"], &answer["stopping_word"]);
        assert_eq!(told, (&json!(content), &json!(stop_type), &json!(word)), "{more}");
    };
    check(json!({}), "one two three", "eos", "").await;
    check(json!({"n_predict": 3}), "one", "limit", "").await;
    check(json!({"stop": ["x", " two"]}), "one", "word", " two").await;
    let sampling = world.asked.lock().unwrap().clone().unwrap().sampling;
    let chosen = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p);
    assert_eq!(chosen, (0.8, 40, 0.95, 0.05), "as llama.cpp chooses");
    check(json!({"repeat_penalty": 1.5, "top_k": 3, "mirostat": 0}), "one two three", "eos", "").await;
    let sampling = world.asked.lock().unwrap().clone().unwrap().sampling;
    assert_eq!((sampling.repetition_penalty, sampling.top_k), (1.5, 3));
    let schema = json!({"json_schema": {"enum": ["two"]}});
    check(schema, "\"two\"", "eos", "").await;
    check(json!({"grammar": "root ::= \"two\" | \"(\" root \")\""}), "two", "eos", "").await;
    check(json!({"grammar": "start: \"three\""}), "three", "eos", "").await;
    check(json!({"grammar": ""}), "one two three", "eos", "").await;
    // OpenAI's routes take these names, too.
    let ask = json!({"messages": [{"role": "user", "content": "a"}], "grammar": "root ::= \"t\" [a-z]+"});
    let answer = post(world.address, "/v1/chat/completions", &ask).await.json();
    assert!(answer["choices"][0]["message"]["content"].as_str().unwrap().starts_with('t'), "{answer}");
    let ask = json!({"prompt": "a", "json_schema": {"const": 5}});
    assert_eq!(post(world.address, "/v1/completions", &ask).await.json()["choices"][0]["text"], "5");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_prompts_are_answered_in_their_order() {
    let world = World::ready(Setup::saying("yes")).await;
    for prompt in [json!(["a", "b"]), json!([[97], [98]])] {
        let body = json!({"prompt": prompt, "n_predict": 2});
        let answers = post(world.address, "/completion", &body).await.json();
        let told: Vec<(&Value, &Value, &Value)> = (answers.as_array().unwrap().iter())
            .map(|answer| (&answer["index"], &answer["prompt"], &answer["content"]))
            .collect();
        assert_eq!(told, [(&json!(0), &json!("a"), &json!("ye")), (&json!(1), &json!("b"), &json!("ye"))]);
    }
    let body = json!({"prompt": ["a", "b"], "n_predict": 2, "stream": true});
    let events = post(world.address, "/completion", &body).await.events();
    for index in 0..2 {
        let of_it = || events.iter().filter(|event| event["index"] == index);
        let text: String = of_it().map(|event| event["content"].as_str().unwrap()).collect();
        let ends = of_it().filter(|event| event["stop"] == true).count();
        assert_eq!((text.as_str(), ends), ("ye", 1), "{events:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_llama_cpp_knows_and_this_server_does_not_is_refused_by_name() {
    let world = World::ready(Setup::default()).await;
    let check = async |more: Value, param: &str| {
        let mut body = json!({"prompt": "a"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let response = post(world.address, "/completion", &body).await;
        assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!(param)), "{more}");
    };
    check(json!({"grammar": "root ::= other"}), "grammar").await;
    check(json!({"grammar": "root ::= \"a\"", "json_schema": {}}), "json_schema").await;
    check(json!({"samplers": ["top_k"]}), "samplers").await;
    check(json!({"n_keep": 5}), "n_keep").await;
    check(json!({"n_predict": 0}), "n_predict").await;
    check(json!({"n_predict": -2}), "n_predict").await;
    check(json!({"prompt": []}), "prompt").await;
    check(json!({"prompt": vec!["a"; 129]}), "prompt").await;
    check(json!({"n": 2}), "n").await;
    check(json!({"json_schema": {"type": "string"}, "guided_regex": "a"}), "json_schema").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn openai_routes_answer_without_their_prefix_too() {
    let world = World::ready(Setup::saying("yes")).await;
    let ask = json!({"messages": [{"role": "user", "content": "a"}]});
    let answer = post(world.address, "/chat/completions", &ask).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "yes");
    let embedded = post(world.address, "/embeddings", &json!({"input": "a"})).await.json();
    assert_eq!(embedded["data"][0]["embedding"][0], 0.6);
    assert_eq!(get(world.address, "/models").await.json(), get(world.address, "/v1/models").await.json());
    let rendered = post(world.address, "/apply-template", &ask).await.json();
    let prompt = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(rendered, json!({"prompt": prompt}));
    let props = get(world.address, "/props").await.json();
    assert_eq!(
        (&props["total_slots"], &props["default_generation_settings"]["n_ctx"]),
        (&json!(8), &json!(4096))
    );
    assert!(props["chat_template"].as_str().unwrap().contains("im_start"));
    let slots = get(world.address, "/slots").await.json();
    assert_eq!((slots.as_array().map(Vec::len), &slots[0]["is_processing"]), (Some(8), &json!(false)));
    assert_eq!(get(world.address, "/props?model=other").await.status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_waits_for_the_model_where_launchers_take_it_for_readiness() {
    for (waits, loading) in [(true, 503), (false, 200)] {
        let (loaded, load) = tokio::sync::oneshot::channel();
        let mut setup = Setup { load: Some(load), ..Setup::default() };
        setup.options.health_when_ready = waits;
        let world = World::listening(setup).await;
        assert_eq!(get(world.address, "/health").await.status, loading);
        loaded.send(Ok(())).unwrap();
        world.until("/health", |response| response.json()["status"] == "ready").await;
        assert_eq!(get(world.address, "/health").await.status, 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_is_too_long_is_refused_in_llama_cpps_words_too() {
    let world = World::ready(Setup { context: 64, fills: true, ..Setup::default() }).await;
    let long = "a".repeat(70);
    for (path, body, tokens) in [
        ("/completion", json!({"prompt": long}), 70),
        ("/infill", json!({"input_prefix": long, "input_suffix": "b"}), gap(&long, "b")),
        ("/embeddings", json!({"input": long}), 70),
    ] {
        let refused = post(world.address, path, &body).await;
        let error = &refused.json()["error"];
        let said = (&error["type"], &error["n_prompt_tokens"], &error["n_ctx"], &error["code"]);
        let wanted =
            (&json!("exceed_context_size_error"), &json!(tokens), &json!(64), &json!("PROMPT_TOO_LONG"));
        assert_eq!((refused.status, said), (400, wanted), "{path}");
        assert!(error["message"].as_str().unwrap().contains("maximum context length is 64"), "{error}");
    }
}

/// What a prompt of these parts has as tokens, each text's bytes and each control token one.
fn gap(before: &str, behind: &str) -> usize {
    before.len() + behind.len() + 3
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gap_is_filled_on_every_api_that_asks_for_it() {
    let world = World::ready(Setup { fills: true, ..Setup::saying("return a") }).await;
    let (before, behind) = ("def f(a):\n    ", "\n\nf(1)\n<|fim_middle|>");
    // Control tokens that are spelled out are text.
    let asked = gap(before, behind);
    let body = json!({"input_prefix": before, "input_suffix": behind, "n_predict": 8});
    let filled = post(world.address, "/infill", &body).await.json();
    assert_eq!(
        (&filled["content"], &filled["tokens_evaluated"]),
        (&json!("return a"), &json!(asked)),
        "{filled}"
    );
    let mut begun = body.clone();
    begun["prompt"] = json!("ret");
    begun["stream"] = json!(true);
    let events = post(world.address, "/infill", &begun).await.events();
    assert_eq!(events.last().unwrap()["tokens_evaluated"], asked + 3);
    // Other files stand before it; this model has no tokens for them.
    let mut more = body.clone();
    more["input_extra"] = json!([{"text": "x = 1", "filename": "x.py"}, {"text": "y = 2"}]);
    let more = post(world.address, "/infill", &more).await.json();
    assert_eq!(more["tokens_evaluated"], asked + 2 * ("x = 1".len() + "\n\n--- snippet ---\n\n".len()));
    let body = json!({"prompt": before, "suffix": behind});
    let openai = post(world.address, "/v1/completions", &body).await.json();
    assert_eq!(
        (&openai["choices"][0]["text"], &openai["usage"]["prompt_tokens"]),
        (&json!("return a"), &json!(asked))
    );
    let ollama = json!({"model": "script", "prompt": before, "suffix": behind, "stream": false});
    let ollama = post(world.address, "/api/generate", &ollama).await.json();
    assert_eq!((&ollama["response"], &ollama["prompt_eval_count"]), (&json!("return a"), &json!(asked)));
    let check = async |path: &str, body: Value, param: &str| {
        let refused = post(world.address, path, &body).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(param)), "{body}");
    };
    check("/infill", json!({"input_prefix": "a"}), "input_suffix").await;
    check(
        "/infill",
        json!({"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}),
        "input_extra[0].text",
    )
    .await;
    check("/v1/completions", json!({"prompt": [1, 2], "suffix": "b"}), "suffix").await;
    check("/v1/completions", json!({"prompt": "a", "suffix": "b", "echo": true}), "suffix").await;

    let none = World::ready(Setup::default()).await;
    for (path, body) in [
        ("/infill", json!({"input_prefix": "a", "input_suffix": "b"})),
        ("/v1/completions", json!({"prompt": "a", "suffix": "b"})),
    ] {
        let refused = post(none.address, path, &body).await;
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("MODEL_UNSUPPORTED")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_of_other_servers_that_are_not_here_say_why() {
    let world = World::ready(Setup::default()).await;
    for (path, why) in [
        ("/slots/0?action=save", "slots are not saved"),
        ("/v1/audio/speech", "no sound"),
        ("/v1/nothing", "nothing at this path"),
    ] {
        let refused = post(world.address, path, &json!({})).await;
        let error = &refused.json()["error"];
        assert_eq!((refused.status, &error["code"]), (404, &json!("UNKNOWN_ENDPOINT")));
        assert!(error["message"].as_str().unwrap().contains(why), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_not_there_is_the_first_one_where_that_is_wanted() {
    let mut setup = Setup::default();
    setup.options.any_model_name = true;
    let world = World::ready(setup).await;
    let hi = json!([{"role": "user", "content": "Hi"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"model": "gpt-4", "messages": hi})),
        ("/v1/messages", json!({"model": "claude", "max_tokens": 9, "messages": hi})),
        ("/v1/responses", json!({"model": "gpt-5", "input": "Hi"})),
        ("/api/chat", json!({"model": "llama3:8b", "messages": hi, "stream": false})),
    ] {
        let told = post(world.address, path, &body).await;
        assert_eq!((told.status, &told.json()["model"]), (200, &json!("script")), "{path}: {}", told.body);
    }
    // What is looked up or changed is not another one.
    assert_eq!(get(world.address, "/v1/models/gpt-4").await.status, 404);
    assert_eq!(post(world.address, "/api/show", &json!({"model": "gpt-4"})).await.status, 404);
    world.stopped().await.unwrap();
}
