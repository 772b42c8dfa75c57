//! What Ollama's clients ask for.

use serde_json::{Value, json};

use crate::{
    client::{get, post},
    tools::{CALLS, tools},
    world::{Setup, World},
};

/// The lines of a body.
fn lines(body: &str) -> Vec<Value> {
    body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_is_lines_and_the_last_has_timings() {
    let world = World::ready(Setup::skilled(CALLS)).await;
    let mut body = json!({"model": "script:latest", "messages": [{"role": "user", "content": "Why?"}], "tools": tools()});
    let streamed = post(world.address, "/api/chat", &body).await;
    assert_eq!(streamed.header("content-type"), Some("application/x-ndjson"));
    let streamed = lines(&streamed.body);
    let join =
        |name: &str| streamed.iter().filter_map(|line| line["message"][name].as_str()).collect::<String>();
    assert_eq!((join("content"), join("thinking")), ("Let me see.".to_owned(), "Hm.".to_owned()));
    let calls: Vec<&Value> =
        streamed.iter().filter_map(|line| line["message"]["tool_calls"].as_array()).flatten().collect();
    assert_eq!(*calls[1], json!({"function": {"name": "get_weather", "arguments": {"place": "UTC"}}}));
    let last = streamed.last().unwrap();
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("stop")));
    assert_eq!(last["eval_count"], CALLS.len() + 1, "every byte, and the end");
    for field in
        ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "prompt_eval_count"]
    {
        assert!(last[field].is_u64(), "{field}: {last}");
    }
    body["stream"] = json!(false);
    let whole = post(world.address, "/api/chat", &body).await.json();
    assert_eq!(whole["message"]["content"], "Let me see.");
    assert_eq!(whole["message"]["tool_calls"].as_array().unwrap().len(), 2);
    assert_eq!(whole["done"], true);
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_answered_with_a_template_or_raw() {
    let world = World::ready(Setup::saying("Blue.")).await;
    let ask = |more: Value| {
        let mut body = json!({"model": "script", "prompt": "Sky?", "stream": false});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let check = async |more: Value, response: &str, prompt: u64| {
        let whole = post(world.address, "/api/generate", &ask(more)).await.json();
        assert_eq!(
            (&whole["response"], &whole["prompt_eval_count"]),
            (&json!(response), &json!(prompt)),
            "{whole}"
        );
    };
    check(json!({}), "Blue.", 23).await;
    check(json!({"raw": true}), "Blue.", 4).await;
    check(json!({"options": {"num_predict": 2}}), "Bl", 23).await;
    check(json!({"options": {"stop": ["e"]}}), "Blu", 23).await;
    check(json!({"options": {"num_ctx": 100_000}, "keep_alive": "5m"}), "Blue.", 23).await;
    check(json!({"format": "json"}), "{}", 23).await;
    let loads = post(world.address, "/api/generate", &json!({"model": "script"})).await.json();
    assert_eq!((&loads["done"], &loads["done_reason"]), (&json!(true), &json!("load")));
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_listed_and_shown() {
    let world = World::ready(Setup::skilled("a")).await;
    let tags = get(world.address, "/api/tags").await.json();
    let tag = &tags["models"][0];
    assert_eq!(
        (&tag["name"], &tag["size"], &tag["digest"]),
        (&json!("script"), &json!(2048), &json!("ab".repeat(32)))
    );
    let details = json!({"parent_model": "", "format": "gguf", "family": "scripted", "families": ["scripted"],
        "parameter_size": "134.52M", "quantization_level": "Q4_1"});
    assert_eq!(tag["details"], details);
    let running = get(world.address, "/api/ps").await.json()["models"][0].clone();
    assert_eq!(
        (&running["model"], &running["size"], &running["size_vram"]),
        (&json!("script"), &json!(1024), &json!(0))
    );
    assert_eq!(running["context_length"], 4096);
    let shown = post(world.address, "/api/show", &json!({"model": "script:latest"})).await.json();
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
    assert_eq!(shown["model_info"]["scripted.context_length"], 4096);
    assert_eq!(
        (&shown["model_info"]["general.parameter_count"], &shown["parameters"]),
        (&json!(134_515_008), &json!("num_ctx 4096"))
    );
    assert!(get(world.address, "/api/version").await.json()["version"].is_string());
    let embedded =
        post(world.address, "/api/embed", &json!({"model": "script", "input": ["a", "b"]})).await.json();
    assert_eq!(embedded["embeddings"].as_array().unwrap().len(), 2, "{embedded}");
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_are_cut_where_that_is_asked_for_and_the_older_route_leaves_lengths() {
    let world = World::ready(Setup { context: 64, ..Setup::default() }).await;
    let body = |text: &str| json!({"model": "script", "input": text});
    let long = "a".repeat(100);
    let mut cut = body(&long);
    cut["truncate"] = json!(true);
    let cut = post(world.address, "/api/embed", &cut).await.json();
    assert_eq!(cut["prompt_eval_count"], 64, "{cut}");
    let refused = post(world.address, "/api/embed", &body(&long)).await;
    assert_eq!(refused.status, 400, "{}", refused.body);
    let one = post(world.address, "/api/embeddings", &json!({"model": "script", "prompt": "a"})).await.json();
    assert_eq!(one, json!({"embedding": [3.0, 0.0, -4.0]}));
    let none = post(world.address, "/api/embeddings", &json!({"model": "script"})).await.json();
    assert_eq!(none, json!({"embedding": []}));
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_served_need_not_be_pulled() {
    let world = World::ready(Setup::default()).await;
    let pulled = post(world.address, "/api/pull", &json!({"model": "script:latest"})).await;
    assert_eq!(lines(&pulled.body), [json!({"status": "pulling manifest"}), json!({"status": "success"})]);
    let whole = post(world.address, "/api/pull", &json!({"name": "script", "stream": false})).await;
    assert_eq!(whole.json(), json!({"status": "success"}));
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_come_with_their_log_probabilities() {
    let world = World::ready(Setup::saying("Hi")).await;
    let ask = json!({"model": "script", "messages": [{"role": "user", "content": "a"}], "prompt": "a",
        "logprobs": true, "top_logprobs": 2, "stream": false});
    let bytes = |text: &str| json!(text.as_bytes());
    let wanted = json!({"token": "H", "logprob": -0.5, "bytes": bytes("H"), "top_logprobs": [
        {"token": "H", "logprob": -0.5, "bytes": bytes("H")}, {"token": "I", "logprob": -1.5, "bytes": bytes("I")}]});
    for path in ["/api/chat", "/api/generate"] {
        let whole = post(world.address, path, &ask).await.json();
        assert_eq!(
            (&whole["logprobs"][0], whole["logprobs"].as_array().unwrap().len()),
            (&wanted, 2),
            "{path}: {whole}"
        );
        let mut streamed = ask.clone();
        streamed["stream"] = json!(true);
        let streamed = lines(&post(world.address, path, &streamed).await.body);
        let tokens: Vec<&Value> =
            streamed.iter().filter_map(|line| line["logprobs"].as_array()).flatten().collect();
        assert_eq!(json!(tokens), whole["logprobs"], "{path}");
    }
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_are_a_text_and_nothing_is_accepted_in_vain() {
    let world = World::ready(Setup::default()).await;
    let check = async |path: &str, body: Value, status: u16, message: &str| {
        let response = post(world.address, path, &body).await;
        let error = response.json();
        assert_eq!(response.status, status, "{error}");
        assert!(error["error"].as_str().unwrap().contains(message), "{error}");
    };
    let chat = |more: Value| {
        let mut body = json!({"model": "script", "messages": [{"role": "user", "content": "a"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    check("/api/chat", chat(json!({"model": "other"})), 404, "no such model").await;
    check("/api/chat", chat(json!({"top_logprobs": 2})), 400, "needs logprobs").await;
    check("/api/chat", chat(json!({"keep_alive": "soon"})), 400, "keep_alive").await;
    let image = json!({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]});
    check("/api/chat", chat(image), 400, "messages[0].images: this model reads no images").await;
    check("/api/chat", chat(json!({"tools": tools()})), 400, "tools").await;
    check("/api/chat", chat(json!({"format": "yaml"})), 400, "format").await;
    let gap = json!({"model": "script", "prompt": "a", "suffix": "b"});
    check("/api/generate", gap, 400, "no tokens to ask for what stands between").await;
    check("/api/pull", json!({"model": "other"}), 404, "no such model").await;
    check("/api/copy", json!({"source": "other", "destination": "b"}), 404, "no such model").await;
    check("/api/blobs/sha256:0", json!({}), 404, "weights are not sent here").await;
    check("/api/nothing", json!({}), 404, "nothing at this path").await;
    world.stopped().await.unwrap();
}
