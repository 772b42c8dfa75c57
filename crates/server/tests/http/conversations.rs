//! Conversations with ids of their own, which responses go on from and are added to.

use std::path::Path;

use fornax_server::ServerOptions;
use serde_json::{Value, json};

use crate::{
    client::{Response, get, post, raw, request},
    world::{Setup, World, keeping},
};

const CONVERSATIONS: &str = "/v1/conversations";

async fn world(folder: &Path) -> World {
    World::ready(keeping(folder, Setup::saying("At noon."))).await
}

fn path(conversation: &Value, more: &str) -> String {
    format!("{CONVERSATIONS}/{}{more}", conversation["id"].as_str().unwrap())
}

async fn sent(world: &World, path: &str, body: &Value) -> Value {
    let response = post(world.address, path, body).await;
    assert_eq!(response.status, 200, "{path}: {}", response.body);
    response.json()
}

async fn delete(world: &World, path: &str) -> Response {
    raw(world.address, &request("DELETE", path, &[], b"")).await
}

fn message(role: &str, text: &str) -> Value {
    json!({"type": "message", "role": role, "content": text})
}

/// What its items say, the first one first.
async fn says(world: &World, conversation: &Value) -> Vec<String> {
    let items = get(world.address, &path(conversation, "/items?order=asc&limit=100")).await.json();
    let text = |item: &Value| item["content"][0]["text"].as_str().unwrap().to_owned();
    items["data"].as_array().unwrap().iter().map(text).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_go_on_from_a_conversation_and_are_added_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let first = world(folder.path()).await;
    let begun = json!({"items": [message("developer", "Be brief.")], "metadata": {"topic": "time"}});
    let conversation = sent(&first, CONVERSATIONS, &begun).await;
    assert_eq!(conversation["object"], "conversation");
    assert_eq!(conversation["metadata"], json!({"topic": "time"}));
    let id = &conversation["id"];
    let one = sent(&first, "/v1/responses", &json!({"conversation": id, "input": "When?"})).await;
    assert_eq!(one["conversation"], json!({"id": id}));
    assert_eq!(says(&first, &conversation).await, ["Be brief.", "When?", "At noon."]);
    first.stopped().await.unwrap();

    // Another server goes on with it.
    let world = world(folder.path()).await;
    assert_eq!(get(world.address, &path(&conversation, "")).await.json(), conversation);
    let streamed = json!({"conversation": {"id": id}, "input": "Sure?", "stream": true});
    assert_eq!(post(world.address, "/v1/responses", &streamed).await.status, 200);
    let all = ["Be brief.", "When?", "At noon.", "Sure?", "At noon."];
    assert_eq!(says(&world, &conversation).await, all);
    // Nobody waits for this one; it is added when it has ended.
    let later = json!({"conversation": id, "input": "Really?", "background": true});
    let later = sent(&world, "/v1/responses", &later).await;
    let told = format!("/v1/responses/{}", later["id"].as_str().unwrap());
    world.until(&told, |response| response.json()["status"] == "completed").await;
    let six = [&all[..], &["Really?", "At noon."]].concat();
    assert_eq!(says(&world, &conversation).await, six);

    // The model was asked with all of it, as if it had been sent whole.
    let whole: Vec<Value> = [
        ("developer", "Be brief."),
        ("user", "When?"),
        ("assistant", "At noon."),
        ("user", "Sure?"),
        ("assistant", "At noon."),
        ("user", "Really?"),
    ]
    .map(|(role, text)| message(role, text))
    .into();
    let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64().unwrap();
    let whole = sent(&world, "/v1/responses", &json!({"input": whole, "store": false})).await;
    assert_eq!(tokens(&get(world.address, &told).await.json()), tokens(&whole));
    // What is not kept is not added.
    let aside = json!({"conversation": id, "input": "By the way?", "store": false});
    sent(&world, "/v1/responses", &aside).await;
    assert_eq!(says(&world, &conversation).await, six);
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn items_are_added_turned_over_and_taken_away() {
    let folder = tempfile::tempdir().unwrap();
    let world = world(folder.path()).await;
    let conversation = sent(&world, CONVERSATIONS, &json!({})).await;
    let items = json!({"items": [message("user", "One."), message("user", "Two."),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"}]});
    let added = sent(&world, &path(&conversation, "/items"), &items).await;
    assert_eq!(added["data"].as_array().unwrap().len(), 4);
    assert_eq!(added["data"][2]["name"], "f");
    let newest = get(world.address, &path(&conversation, "/items?limit=3")).await.json();
    assert_eq!((&newest["data"][0], &newest["has_more"]), (&added["data"][3], &json!(true)));
    let last = newest["last_id"].as_str().unwrap();
    let oldest =
        get(world.address, &path(&conversation, &format!("/items?limit=3&after={last}"))).await.json();
    assert_eq!((&oldest["data"], &oldest["has_more"]), (&json!([added["data"][0]]), &json!(false)));

    let second = path(&conversation, &format!("/items/{}", added["data"][1]["id"].as_str().unwrap()));
    assert_eq!(get(world.address, &second).await.json(), added["data"][1]);
    assert_eq!(delete(&world, &second).await.json(), conversation);
    assert_eq!(get(world.address, &second).await.status, 404);
    assert_eq!(delete(&world, &second).await.status, 404);
    // What comes behind it keeps its place, and what is added has the last.
    sent(&world, &path(&conversation, "/items"), &json!({"items": [message("user", "Three.")]})).await;
    let left = get(world.address, &path(&conversation, "/items?order=asc")).await.json();
    let kinds: Vec<&Value> = left["data"].as_array().unwrap().iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["message", "function_call", "function_call_output", "message"]);

    let renamed = sent(&world, &path(&conversation, ""), &json!({"metadata": {"a": "b"}})).await;
    assert_eq!(renamed["metadata"], json!({"a": "b"}));
    assert_eq!(get(world.address, &path(&conversation, "")).await.json(), renamed);
    let gone = delete(&world, &path(&conversation, "")).await.json();
    assert_eq!(gone, json!({"id": conversation["id"], "object": "conversation.deleted", "deleted": true}));
    assert_eq!(get(world.address, &path(&conversation, "/items")).await.status, 404);
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_with_a_conversation_is_told_by_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let world = world(folder.path()).await;
    let conversation = sent(&world, CONVERSATIONS, &json!({})).await;
    let id = &conversation["id"];
    let response = sent(&world, "/v1/responses", &json!({"input": "Hi"})).await;
    let items = path(&conversation, "/items");
    let check = async |path: &str, body: Value, status: u16, named: &str| {
        let refused = post(world.address, path, &body).await;
        assert_eq!(refused.status, status, "{path} {body}: {}", refused.body);
        assert!(refused.json()["error"]["message"].as_str().unwrap().contains(named), "{}", refused.body);
    };
    check(CONVERSATIONS, json!({"items": [{"role": "king", "content": ""}]}), 400, "items[0].role").await;
    check(CONVERSATIONS, json!({"metadata": {"a": 1}}), 400, "metadata").await;
    check(&items, json!({"items": []}), 400, "items").await;
    check(&items, json!({"items": [{"type": "item_reference", "id": "x"}]}), 400, "items[0].id").await;
    check("/v1/conversations/conv_none/items", json!({"items": [message("user", "Hi")]}), 404, "no such")
        .await;
    let ask = |more: Value| {
        let mut body = json!({"input": "Hi"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let responses = "/v1/responses";
    check(responses, ask(json!({"conversation": "conv_none"})), 400, "conversation").await;
    let both = json!({"conversation": id, "previous_response_id": response["id"]});
    check(responses, ask(both), 400, "cannot be combined").await;
    // One is not the other.
    check(responses, ask(json!({"conversation": response["id"]})), 400, "no such conversation").await;
    check(responses, ask(json!({"previous_response_id": id})), 400, "no such response").await;
    let as_response = format!("/v1/responses/{}", id.as_str().unwrap());
    assert_eq!(get(world.address, &as_response).await.status, 404);
    assert_eq!(delete(&world, &as_response).await.status, 404);
    assert_eq!(get(world.address, &path(&response, "")).await.status, 404);
    assert_eq!(delete(&world, &path(&response, "")).await.status, 404);
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_key_does_not_find_a_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "one-key-of-good-length\nother-key-of-good-length\n").unwrap();
    let options = ServerOptions { api_key_file: Some(keys), ..ServerOptions::default() };
    let world = World::ready(keeping(folder.path(), Setup { options, ..Setup::default() })).await;
    let send = async |key: &str, method: &str, path: &str, body: Value| {
        let key = format!("Bearer {key}-key-of-good-length");
        let head = [("Authorization", key.as_str()), ("Content-Type", "application/json")];
        raw(world.address, &request(method, path, &head, body.to_string().as_bytes())).await
    };
    let begun = json!({"items": [message("user", "Mine.")]});
    let conversation = send("one", "POST", CONVERSATIONS, begun.clone()).await.json();
    let own = path(&conversation, "");
    for (method, path, body) in [
        ("GET", own.clone(), json!({})),
        ("POST", own.clone(), json!({"metadata": {}})),
        ("GET", format!("{own}/items"), json!({})),
        ("POST", format!("{own}/items"), begun),
        ("DELETE", own.clone(), json!({})),
    ] {
        let refused = send("other", method, &path, body).await;
        assert_eq!(refused.status, 404, "{method} {path}: {}", refused.body);
    }
    let asked = json!({"input": "Hi", "conversation": conversation["id"]});
    assert_eq!(send("other", "POST", "/v1/responses", asked).await.status, 400);
    assert_eq!(send("one", "GET", &own, json!({})).await.status, 200);
    world.stopped().await.unwrap();
}
