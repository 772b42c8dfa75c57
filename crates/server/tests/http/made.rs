//! Models that clients make of those that are served, as Ollama's clients do.

use std::path::Path;

use fornax_server::ServerOptions;
use serde_json::{Value, json};

use crate::{
    client::{Response, get, post, raw, request},
    world::{Setup, World, keeping},
};

async fn world(folder: &Path) -> World {
    World::ready(keeping(folder, Setup::saying("It's-a me."))).await
}

async fn make(world: &World, body: &Value) -> Response {
    post(world.address, "/api/create", body).await
}

async fn delete(world: &World, name: &str) -> Response {
    let body = json!({"model": name}).to_string();
    let head = [("Content-Type", "application/json")];
    raw(world.address, &request("DELETE", "/api/delete", &head, body.as_bytes())).await
}

/// The prompt that a question becomes.
async fn prompt(world: &World, model: &str, messages: Value) -> String {
    let body = json!({"model": model, "messages": messages});
    let told = post(world.address, "/apply-template", &body).await;
    assert_eq!(told.status, 200, "{}", told.body);
    told.json()["prompt"].as_str().unwrap().to_owned()
}

fn hi() -> Value {
    json!([{"role": "user", "content": "Hi"}])
}

fn mario() -> Value {
    json!({"model": "mario", "from": "script", "system": "You are Mario.", "stream": false,
        "parameters": {"temperature": 0.25, "top_k": 7, "seed": 11, "num_predict": 3, "stop": ["a"]},
        "messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_made_of_one_that_is_served_and_every_api_knows_it() {
    let folder = tempfile::tempdir().unwrap();
    let first = world(folder.path()).await;
    let made = make(&first, &mario()).await;
    assert_eq!((made.status, made.body.as_str()), (200, "{\"status\":\"success\"}"));
    first.stopped().await.unwrap();

    // It is on disk.
    let world = world(folder.path()).await;
    let begun = "<|im_start|>system\nYou are Mario.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n\
        <|im_start|>assistant\nMe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(prompt(&world, "mario", hi()).await, begun);
    assert_eq!(prompt(&world, "mario:latest", hi()).await, begun);
    // A request's own instructions take the place of the model's, and stay the first.
    let own = json!([{"role": "system", "content": "Be Luigi."}, {"role": "user", "content": "Hi"}]);
    assert_eq!(prompt(&world, "mario", own).await, begun.replace("You are Mario.", "Be Luigi."));
    assert!(!prompt(&world, "script", hi()).await.contains("Mario"));

    let sampled = || {
        let asked = world.asked.lock().unwrap().clone().unwrap();
        (asked.seed, asked.sampling.temperature, asked.sampling.top_k)
    };
    let messages = hi();
    let told =
        post(world.address, "/v1/chat/completions", &json!({"model": "mario", "messages": messages})).await;
    assert_eq!(told.json()["model"], "mario");
    assert_eq!(told.json()["choices"][0]["finish_reason"], "length", "three tokens");
    assert_eq!(sampled(), (11, 0.25, 7));
    let more = json!({"model": "mario", "messages": messages, "temperature": 0.5, "max_tokens": 20});
    let told = post(world.address, "/v1/chat/completions", &more).await.json();
    assert_eq!(told["choices"][0]["message"]["content"], "It's-", "it stops at its own word");
    assert_eq!(sampled(), (11, 0.5, 7), "what a request says goes before");
    let said = json!({"model": "mario", "messages": messages, "max_tokens": 3});
    let told = post(world.address, "/v1/messages", &said).await.json();
    assert_eq!((&told["model"], &told["content"][0]["text"]), (&json!("mario"), &json!("It'")));
    let said = json!({"model": "mario", "prompt": "Hi", "stream": false});
    let told = post(world.address, "/api/generate", &said).await.json();
    assert_eq!((&told["model"], &told["response"]), (&json!("mario"), &json!("It'")));

    let listed = get(world.address, "/v1/models").await.json();
    let ids: Vec<&Value> = listed["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["script", "mario"]);
    assert_eq!(listed["data"][1]["parent"], "script");
    let tags = get(world.address, "/api/tags").await.json();
    assert_eq!(tags["models"][1]["name"], "mario");
    assert_eq!(tags["models"][1]["details"]["parent_model"], "script");
    assert_ne!(tags["models"][1]["digest"], tags["models"][0]["digest"]);
    let shown = post(world.address, "/api/show", &json!({"model": "mario"})).await.json();
    assert_eq!(shown["system"], "You are Mario.");
    assert_eq!(shown["messages"][1], json!({"role": "assistant", "content": "Me."}));
    let modelfile = shown["modelfile"].as_str().unwrap();
    for line in
        ["FROM script", "SYSTEM \"\"\"You are Mario.\"\"\"", "PARAMETER top_k 7", "PARAMETER stop \"a\""]
    {
        assert!(modelfile.lines().any(|there| there == line), "{line}: {modelfile}");
    }
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_was_made_is_copied_changed_and_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let world = world(folder.path()).await;
    assert_eq!(make(&world, &mario()).await.body, "{\"status\":\"success\"}");
    let copied = post(world.address, "/api/copy", &json!({"source": "mario", "destination": "luigi"})).await;
    assert_eq!((copied.status, copied.body.as_str()), (200, ""));
    // One that is made of one that was made has what that has, where it says nothing.
    let streamed =
        make(&world, &json!({"model": "wario", "from": "mario:latest", "system": "You are Wario."})).await;
    assert!(streamed.body.ends_with("{\"status\":\"success\"}\n"), "{}", streamed.body);
    assert_eq!(delete(&world, "mario").await.status, 200);
    assert_eq!(delete(&world, "mario").await.status, 404);
    assert!(prompt(&world, "luigi", hi()).await.contains("You are Mario."));
    let wario = prompt(&world, "wario", hi()).await;
    assert!(wario.contains("You are Wario.") && wario.contains("Me."), "{wario}");
    // Made again, it is another; with a template of its own.
    let again = json!({"model": "luigi", "from": "script", "stream": false,
        "template": "{% for message in messages %}[{{ message.content }}]{% endfor %}"});
    assert_eq!(make(&world, &again).await.status, 200);
    assert_eq!(prompt(&world, "luigi", hi()).await, "[Hi]");
    let copied = post(world.address, "/api/copy", &json!({"source": "script", "destination": "plain"})).await;
    assert_eq!(copied.status, 200);
    assert!(!prompt(&world, "plain", hi()).await.contains("system"));

    let check = async |body: Value, status: u16, named: &str| {
        let refused = make(&world, &body).await;
        assert_eq!(refused.status, status, "{body}: {}", refused.body);
        assert!(refused.json()["error"].as_str().unwrap().contains(named), "{body}: {}", refused.body);
    };
    check(json!({"model": "x"}), 400, "from").await;
    check(json!({"from": "script"}), 400, "model").await;
    check(json!({"model": "x", "from": "none"}), 404, "there is no such model").await;
    check(json!({"model": "script", "from": "script"}), 400, "a model that is served").await;
    check(json!({"model": "a b", "from": "script"}), 400, "letters").await;
    check(json!({"model": "x", "from": "script", "template": "{{ if .System }}{{ end }}"}), 400, "Jinja")
        .await;
    check(json!({"model": "x", "from": "script", "parameters": {"top_k": "many"}}), 400, "parameters.top_k")
        .await;
    check(json!({"model": "x", "from": "script", "files": {"a.gguf": "sha256:0"}}), 400, "files").await;
    check(json!({"model": "x", "from": "script", "adapters": {"a": "sha256:0"}}), 400, "adapters").await;
    check(json!({"model": "x", "from": "script", "quantize": "q4_0"}), 400, "quantize").await;
    check(json!({"model": "x", "from": "script", "system": "a".repeat(1 << 20)}), 400, "bytes").await;
    assert_eq!(delete(&world, "script").await.status, 400, "what is served stays");
    // What waits outlives it, perhaps.
    let job = post(world.address, "/v2/luigi/run", &json!({"input": {"prompt": "Hi"}})).await;
    assert_eq!(job.status, 404, "{}", job.body);
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_made_by_keys_that_may() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "one-key-of-good-length models\nother-key-of-good-length\n").unwrap();
    let options = ServerOptions { api_key_file: Some(keys), ..ServerOptions::default() };
    let world = World::ready(keeping(folder.path(), Setup { options, ..Setup::default() })).await;
    let send = async |key: &str, method: &str, path: &str, body: Value| {
        let key = format!("Bearer {key}-key-of-good-length");
        let head = [("Authorization", key.as_str()), ("Content-Type", "application/json")];
        raw(world.address, &request(method, path, &head, body.to_string().as_bytes())).await
    };
    let copy = json!({"source": "script", "destination": "x"});
    for (method, path, body) in [
        ("POST", "/api/create", mario()),
        ("POST", "/api/copy", copy),
        ("DELETE", "/api/delete", json!({"model": "x"})),
    ] {
        let refused = send("other", method, path, body.clone()).await;
        assert_eq!(refused.status, 403, "{path}: {}", refused.body);
        assert!(refused.body.contains("`models`"), "{}", refused.body);
        assert_eq!(send("one", method, path, body).await.status, 200, "{path}");
    }
    // All may use what there is.
    let asked = json!({"model": "mario", "messages": hi()});
    assert_eq!(send("other", "POST", "/v1/chat/completions", asked).await.status, 200);
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_store_no_models_are_made() {
    let world = World::ready(Setup::default()).await;
    let refused = make(&world, &mario()).await;
    assert_eq!(refused.status, 404);
    assert!(refused.body.contains("--jobs-db"), "{}", refused.body);
    world.stopped().await.unwrap();
}
