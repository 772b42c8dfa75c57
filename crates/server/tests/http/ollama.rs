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
    check(json!({"format": "json"}), "{}", 23).await;
    let loads = post(world.address, "/api/generate", &json!({"model": "script"})).await.json();
    assert_eq!((&loads["done"], &loads["done_reason"]), (&json!(true), &json!("load")));
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_listed_and_shown() {
    let world = World::ready(Setup::skilled("a")).await;
    let tags = get(world.address, "/api/tags").await.json();
    assert_eq!((&tags["models"][0]["name"], &tags["models"][0]["size"]), (&json!("script"), &json!(1024)));
    assert_eq!(get(world.address, "/api/ps").await.json()["models"][0]["model"], "script");
    let shown = post(world.address, "/api/show", &json!({"model": "script:latest"})).await.json();
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
    assert_eq!(shown["model_info"]["scripted.context_length"], 4096);
    assert!(get(world.address, "/api/version").await.json()["version"].is_string());
    let embedded =
        post(world.address, "/api/embed", &json!({"model": "script", "input": ["a", "b"]})).await.json();
    assert_eq!(embedded["embeddings"].as_array().unwrap().len(), 2, "{embedded}");
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
    check("/api/chat", chat(json!({"options": {"num_ctx": 100_000}})), 400, "num_ctx").await;
    check("/api/chat", chat(json!({"tools": tools()})), 400, "tools").await;
    check("/api/chat", chat(json!({"format": "yaml"})), 400, "format").await;
    check("/api/generate", json!({"model": "script", "prompt": "a", "suffix": "b"}), 400, "suffix").await;
    check("/api/embed", json!({"model": "script", "input": "a", "truncate": true}), 400, "truncate").await;
    check("/api/nothing", json!({}), 404, "nothing at this path").await;
    world.stopped().await.unwrap();
}
