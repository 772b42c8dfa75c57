//! Responses that are kept: conversations that go on from them, and answers while nobody waits.

use std::{path::Path, time::Duration};

use fornax_server::ServerOptions;
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpSocket};

use crate::{
    client::{self, Response, get, post, raw, request},
    world::{Setup, World, keeping},
};

const RESPONSES: &str = "/v1/responses";

/// A thought, a word and a call.
const SAID: &str =
    "<think>Hm.</think>One moment.<tool_call>{\"name\": \"get_time\", \"arguments\": {}}</tool_call>";

fn tools() -> Value {
    json!([{"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}])
}

async fn world(folder: &Path, script: &str) -> World {
    World::ready(keeping(folder, Setup::skilled(script))).await
}

async fn ask(world: &World, body: &Value) -> Value {
    let response = post(world.address, RESPONSES, body).await;
    assert_eq!(response.status, 200, "{}", response.body);
    response.json()
}

async fn told(world: &World, id: &Value) -> Value {
    let response = get(world.address, &path(id, "")).await;
    assert_eq!(response.status, 200, "{}", response.body);
    response.json()
}

fn path(id: &Value, more: &str) -> String {
    format!("{RESPONSES}/{}{more}", id.as_str().unwrap())
}

async fn delete(world: &World, path: &str) -> Response {
    raw(world.address, &request("DELETE", path, &[], b"")).await
}

/// Waits until a response in the background has ended.
async fn ended(world: &World, id: &Value) -> Value {
    let is_open =
        |response: &Response| matches!(response.json()["status"].as_str().unwrap(), "queued" | "in_progress");
    world.until(&path(id, ""), |response| !is_open(response)).await;
    told(world, id).await
}

/// The conversation that the answer was made for is this one, to the token: sent whole, nearly all of it is found
/// computed.
async fn was_asked(world: &World, response: &Value, input: &Value) {
    let whole = ask(world, &json!({"input": input, "tools": tools(), "store": false})).await;
    let tokens = whole["usage"]["input_tokens"].as_u64().unwrap();
    assert_eq!(response["usage"]["input_tokens"], tokens);
    let cached = whole["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!(cached, (tokens - 1) / 32 * 32, "{input}");
}

fn joined(parts: &[&Value]) -> Value {
    parts.iter().flat_map(|part| part.as_array().unwrap().clone()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_goes_on_from_what_was_kept() {
    let folder = tempfile::tempdir().unwrap();
    let first_world = world(folder.path(), SAID).await;
    let begun =
        json!({"input": "Time?", "instructions": "Be kind.", "tools": tools(), "metadata": {"a": "b"}});
    let first = ask(&first_world, &begun).await;
    assert_eq!(
        (&first["store"], &first["metadata"], &first["previous_response_id"]),
        (&json!(true), &json!({"a": "b"}), &Value::Null)
    );
    let kinds: Vec<&Value> = first["output"].as_array().unwrap().iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(told(&first_world, &first["id"]).await, first);
    let result = json!([{"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "12:00"}]);
    let on = |from: &Value, input: &Value| json!({"previous_response_id": from["id"], "input": input, "tools": tools()});
    let second = ask(&first_world, &on(&first, &result)).await;
    assert_eq!(second["previous_response_id"], first["id"]);
    // Instructions are a request's own.
    let time = json!([{"role": "user", "content": "Time?"}]);
    let so_far = joined(&[&time, &first["output"], &result]);
    was_asked(&first_world, &second, &so_far).await;
    first_world.stopped().await.unwrap();

    // Another server finds all of it.
    let world = world(folder.path(), SAID).await;
    let thanks = json!([{"role": "user", "content": [{"type": "input_text", "text": "Thanks."}]}]);
    let third = ask(&world, &on(&second, &thanks)).await;
    let so_far = joined(&[&so_far, &second["output"], &thanks]);
    was_asked(&world, &third, &so_far).await;
    let counted = post(world.address, "/v1/responses/input_tokens", &on(&second, &thanks)).await.json();
    let wanted = json!({"object": "response.input_tokens", "input_tokens": third["usage"]["input_tokens"]});
    assert_eq!(counted, wanted);
    // Two may go on from one, and a text is a message.
    let other = ask(&world, &on(&first, &json!("Never mind."))).await;
    let never_mind = json!([{"role": "user", "content": "Never mind."}]);
    was_asked(&world, &other, &joined(&[&time, &first["output"], &never_mind])).await;
    // What was kept can be named instead.
    let named: Value = first["output"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| json!({"type": "item_reference", "id": item["id"]}))
        .collect();
    let again = ask(&world, &json!({"input": joined(&[&time, &named, &result]), "tools": tools()})).await;
    assert_eq!(again["usage"]["input_tokens"], second["usage"]["input_tokens"]);
    was_asked(&world, &again, &joined(&[&time, &first["output"], &result])).await;
    let items = get(world.address, &path(&again["id"], "/input_items?order=asc")).await.json();
    let kinds: Vec<&Value> = items["data"].as_array().unwrap().iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["message", "reasoning", "message", "function_call", "function_call_output"]);
    assert_eq!((&items["data"][1]["id"], &items["has_more"]), (&first["output"][0]["id"], &json!(false)));

    // The oldest of the conversation is forgotten, and what went on from it is broken.
    assert_eq!(
        delete(&world, &path(&first["id"], "")).await.json(),
        json!({"id": first["id"], "object": "response", "deleted": true})
    );
    for (from, code) in [(&first, "RESPONSE_NOT_FOUND"), (&third, "RESPONSE_NOT_FOUND")] {
        let refused = post(world.address, RESPONSES, &on(from, &thanks)).await;
        let error = &refused.json()["error"];
        assert_eq!(
            (refused.status, &error["code"], &error["param"]),
            (400, &json!(code), &json!("previous_response_id"))
        );
    }
    assert_eq!(told(&world, &third["id"]).await, third);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_asked_is_told_page_by_page() {
    let folder = tempfile::tempdir().unwrap();
    let world = world(folder.path(), "Noon.").await;
    let message = |text: &str| json!({"role": "user", "content": text});
    let asked = ask(&world, &json!({"input": [message("a"), message("b"), message("c")]})).await;
    let items =
        async |query: &str| get(world.address, &path(&asked["id"], &format!("/input_items{query}"))).await;
    let texts = |list: &Value| -> Vec<String> {
        let texts = list["data"].as_array().unwrap().iter().map(|item| &item["content"][0]["text"]);
        texts.map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let newest = items("").await.json();
    assert_eq!(texts(&newest), ["c", "b", "a"]);
    assert_eq!(newest["data"][0]["content"][0]["type"], "input_text");
    let first = items("?order=asc&limit=2").await.json();
    assert_eq!((texts(&first), &first["has_more"]), (vec!["a".to_owned(), "b".to_owned()], &json!(true)));
    let rest = items(&format!("?order=asc&after={}", first["last_id"].as_str().unwrap())).await.json();
    assert_eq!((texts(&rest), &rest["has_more"]), (vec!["c".to_owned()], &json!(false)));
    assert_eq!(items("?limit=101").await.status, 400);
    assert_eq!(get(world.address, "/v1/responses/resp_1/input_items").await.status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_is_kept_before_it_is_said_to_be_whole_unless_nobody_wants_that() {
    let folder = tempfile::tempdir().unwrap();
    let world = world(folder.path(), SAID).await;
    let stream = async |more: Value| {
        let mut body = json!({"input": "Time?", "tools": tools(), "stream": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let events = post(world.address, RESPONSES, &body).await.events();
        events.last().unwrap()["response"].clone()
    };
    let kept = stream(json!({})).await;
    assert_eq!((&kept["status"], &told(&world, &kept["id"]).await), (&json!("completed"), &kept));
    let cut = stream(json!({"store": true, "max_output_tokens": 3})).await;
    assert_eq!((&cut["status"], &told(&world, &cut["id"]).await), (&json!("incomplete"), &cut));
    for whole in
        [stream(json!({"store": false})).await, ask(&world, &json!({"input": "Time?", "store": false})).await]
    {
        assert_eq!(whole["store"], false);
        assert_eq!(get(world.address, &path(&whole["id"], "")).await.status, 404);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_belongs_to_the_key_that_asked_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "the-key-of-alice-1234\nthe-key-of-bob-123456\n").unwrap();
    let options = ServerOptions { api_key_file: Some(keys), ..ServerOptions::default() };
    let world = World::ready(keeping(folder.path(), Setup { options, ..Setup::skilled(SAID) })).await;
    let send = async |who: &str, method: &str, path: &str, body: Value| {
        let bearer = format!("Bearer the-key-of-{who}");
        raw(world.address, &request(method, path, &[("Authorization", &bearer)], body.to_string().as_bytes()))
            .await
    };
    let (alice, bob) = ("alice-1234", "bob-123456");
    let asked = send(alice, "POST", RESPONSES, json!({"input": "Time?", "tools": tools()})).await.json();
    let later = send(alice, "POST", RESPONSES, json!({"input": "Time?", "background": true})).await.json();
    let (own, item) = (&asked["id"], &asked["output"][0]["id"]);
    let on = json!({"input": "And?", "previous_response_id": own});
    let naming =
        json!({"input": [{"role": "user", "content": "And?"}, {"type": "item_reference", "id": item}]});
    for (method, at) in [("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")] {
        for id in [own, &later["id"]] {
            let refused = send(bob, method, &path(id, at), json!({})).await;
            let unknown = send(bob, method, &path(&json!("resp_1"), at), json!({})).await;
            assert_eq!((refused.status, &refused.body), (404, &unknown.body), "{method} {at}");
        }
    }
    for body in [&on, &naming] {
        assert_eq!(send(bob, "POST", RESPONSES, body.clone()).await.status, 400);
        assert_eq!(send(alice, "POST", RESPONSES, body.clone()).await.status, 200);
    }
    assert_eq!(send(alice, "GET", &path(own, ""), json!({})).await.json(), asked);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_in_the_background_outlives_its_server() {
    let folder = tempfile::tempdir().unwrap();
    let options = ServerOptions { drain_timeout: Duration::from_millis(20), ..ServerOptions::default() };
    let setup = keeping(folder.path(), Setup { options, ..Setup::skilled(SAID) });
    let (mut first_world, gate) = World::gated(setup).await;
    let body = json!({"input": "Time?", "tools": tools(), "background": true, "metadata": {"a": "b"}});
    let queued = ask(&first_world, &body).await;
    // More than are answered at a time: the last ones are left to the next server.
    let mut last = Value::Null;
    for _ in 0..11 {
        last = ask(&first_world, &body).await;
    }
    assert_eq!(
        (&queued["status"], &queued["background"], &queued["output"]),
        (&json!("queued"), &json!(true), &json!([]))
    );
    first_world.until_stepping().await;
    assert_eq!(told(&first_world, &queued["id"]).await["status"], "in_progress");
    // Nobody goes on from it meanwhile.
    let on = json!({"input": "And?", "previous_response_id": queued["id"]});
    let refused = post(first_world.address, RESPONSES, &on).await;
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("previous_response_id")));
    first_world.stop();
    drop(gate);
    first_world.stopped().await.unwrap();

    let world = world(folder.path(), SAID).await;
    assert_eq!(ended(&world, &queued["id"]).await["status"], "completed");
    let (queued, done) = (&last, ended(&world, &last["id"]).await);
    assert_eq!(
        (&done["status"], &done["id"], &done["created_at"], &done["metadata"]),
        (&json!("completed"), &queued["id"], &queued["created_at"], &json!({"a": "b"}))
    );
    assert_eq!(
        (&done["output"][1]["content"][0]["text"], &done["store"]),
        (&json!("One moment."), &json!(true))
    );
    assert!(done["completed_at"].is_u64() && done["usage"]["output_tokens"].is_u64(), "{done}");
    // It is a response as any other, and its job is gone.
    let time = json!([{"role": "user", "content": "Time?"}]);
    was_asked(&world, &done, &time).await;
    let next =
        ask(&world, &json!({"input": "And?", "previous_response_id": done["id"], "tools": tools()})).await;
    was_asked(
        &world,
        &next,
        &joined(&[&time, &done["output"], &json!([{"role": "user", "content": "And?"}])]),
    )
    .await;
    let job = format!("/v2/default/status/{}", done["id"].as_str().unwrap());
    assert_eq!(get(world.address, &job).await.status, 404);
    assert_eq!(post(world.address, &path(&done["id"], "/cancel"), &json!({})).await.json(), done);

    // One goes on from what was kept, too.
    let later = ask(
        &world,
        &json!({"input": "And?", "previous_response_id": done["id"], "tools": tools(), "background": true}),
    )
    .await;
    let later = ended(&world, &later["id"]).await;
    assert_eq!(
        (&later["status"], &later["usage"]["input_tokens"]),
        (&json!("completed"), &next["usage"]["input_tokens"])
    );
    assert_eq!(later["previous_response_id"], done["id"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_in_the_background_is_cancelled_forgotten_or_fails() {
    let folder = tempfile::tempdir().unwrap();
    let (world, _gate) = World::gated(keeping(folder.path(), Setup::skilled(SAID))).await;
    let body = json!({"input": "Time?", "background": true});
    let (first, second) = (ask(&world, &body).await, ask(&world, &body).await);
    world.until_stepping().await;
    for _ in 0..2 {
        let cancelled = post(world.address, &path(&first["id"], "/cancel"), &json!({})).await.json();
        assert_eq!((&cancelled["status"], &cancelled["error"]), (&json!("cancelled"), &Value::Null));
    }
    assert_eq!(delete(&world, &path(&second["id"], "")).await.status, 200);
    assert_eq!(get(world.address, &path(&second["id"], "")).await.status, 404);
    let counts = get(world.address, "/v2/default/health").await.json();
    assert_eq!(
        (&counts["jobs"]["inQueue"], &counts["jobs"]["inProgress"]),
        (&json!(0), &json!(0)),
        "{counts}"
    );
    let check = async |more: Value, param: &str| {
        let mut body = body.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let refused = post(world.address, RESPONSES, &body).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(param)), "{more}");
    };
    check(json!({"stream": true}), "stream").await;
    check(json!({"store": false}), "store").await;
    check(json!({"metadata": {"a": 1}}), "metadata").await;
    check(json!({"max_output_tokens": 0}), "max_output_tokens").await;
    check(json!({"input": [{"type": "item_reference", "id": "msg_1"}]}), "input[0].id").await;
    let long = post(world.address, RESPONSES, &json!({"input": "a".repeat(5000), "background": true})).await;
    assert_eq!(long.json()["error"]["code"], "context_length_exceeded");
    assert_eq!(get(world.address, &path(&first["id"], "?stream=true")).await.status, 400);

    let folder = tempfile::tempdir().unwrap();
    let world =
        World::ready(keeping(folder.path(), Setup { fails_at: Some(3), ..Setup::skilled(SAID) })).await;
    let failed = ask(&world, &body).await;
    let failed = ended(&world, &failed["id"]).await;
    assert_eq!(
        (&failed["status"], &failed["error"]["code"]),
        (&json!("failed"), &json!("NUMERIC_FAULT")),
        "{failed}"
    );
    // What nobody waited for cannot be cancelled.
    let folder = tempfile::tempdir().unwrap();
    let world = self::world(folder.path(), SAID).await;
    let asked = ask(&world, &json!({"input": "Time?"})).await;
    let refused = post(world.address, &path(&asked["id"], "/cancel"), &json!({})).await;
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("response_id")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_keeps_nothing_answers_and_names_the_flag() {
    let world = World::ready(Setup::skilled(SAID)).await;
    for store in [Value::Null, json!(true), json!(false)] {
        let whole = ask(&world, &json!({"input": "Time?", "store": store})).await;
        assert_eq!((&whole["status"], &whole["store"]), (&json!("completed"), &json!(false)));
    }
    for (more, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"background": true}), "background"),
        (json!({"input": [{"type": "item_reference", "id": "msg_1"}]}), "input"),
    ] {
        let mut body = json!({"input": "Time?"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let refused = post(world.address, RESPONSES, &body).await;
        let error = &refused.json()["error"];
        assert_eq!((refused.status, &error["param"]), (400, &json!(param)));
        assert!(error["message"].as_str().unwrap().contains("--jobs-db"), "{error}");
    }
    assert_eq!(get(world.address, "/v1/responses/resp_1").await.status, 404);
}

/// A small request has a large answer sent: whoever asks often and reads nothing holds as much as bodies may, and no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_told_of_a_response_takes_room_until_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let options = ServerOptions {
        bodies_bytes_max: 8 << 20,
        file_bytes_max: 1 << 20,
        read_timeout: Duration::from_secs(3),
        ..Default::default()
    };
    let world = World::ready(keeping(folder.path(), Setup { options, ..Setup::default() })).await;
    // No part of the prompt, but of what is kept.
    let item = json!({"role": "user", "content": "a", "output": "x".repeat(7 << 20)});
    let kept = ask(&world, &json!({"input": [item]})).await;
    let path = path(&kept["id"], "/input_items");
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut lazy = socket.connect(world.address).await.unwrap();
    lazy.write_all(&request("GET", &path, &[], b"")).await.unwrap();
    // Its first bytes are there.
    lazy.peek(&mut [0]).await.unwrap();
    let refused = get(world.address, &path).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!("QUEUE_FULL")));
    assert!(client::read(&mut lazy).await.body.len() > 7 << 20);
    assert_eq!(get(world.address, &path).await.status, 200);
    world.stopped().await.unwrap();
}
