//! What an answer must look like, beside tools and stop strings, by every API's name for it.

use serde_json::{Value, json};

use crate::{
    client::{Response, post},
    tools::{CALLS, tools},
    world::{Setup, World},
};

const CHAT: &str = "/v1/chat/completions";

fn merged(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn ask(more: &Value) -> Value {
    merged(json!({"messages": [{"role": "user", "content": "Why?"}]}), more)
}

async fn answer(script: &str, more: Value) -> Response {
    let world = World::ready(Setup::skilled(script)).await;
    let response = post(world.address, CHAT, &ask(&more)).await;
    world.stopped().await.unwrap();
    response
}

/// `{"sum": 7}` or `{"sum": 42}`.
fn sum() -> Value {
    json!({"type": "object", "properties": {"sum": {"enum": [7, 42]}}, "required": ["sum"], "additionalProperties": false})
}

fn form() -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "sum", "schema": sum()}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beside_tools_what_is_said_has_its_form_and_a_call_is_a_call() {
    let check = async |script: &str, is_said: bool, thought: Value, calls: usize| {
        let more = json!({"tools": tools(), "response_format": form()});
        let whole = answer(script, more.clone()).await.json();
        let choice = &whole["choices"][0];
        let message = &choice["message"];
        let content = message["content"].as_str();
        let said: Option<Value> = content.map(|content| serde_json::from_str(content).unwrap());
        assert_eq!(said.is_some(), is_said, "{script}: {whole}");
        assert!(said.is_none_or(|said| said["sum"] == 7 || said["sum"] == 42), "{script}: {whole}");
        assert_eq!(message["reasoning_content"], thought, "{script}: {whole}");
        assert_eq!(message["tool_calls"].as_array().map_or(0, Vec::len), calls, "{script}: {whole}");
        let reason = if calls > 0 { "tool_calls" } else { "stop" };
        assert_eq!(choice["finish_reason"], reason, "{script}");
        // In parts it is the same, and it begins once.
        let events = answer(script, merged(more, &json!({"stream": true}))).await.events();
        let deltas: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
        let said: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
        assert_eq!(said, content.unwrap_or_default(), "{script}");
        assert_eq!(deltas.iter().filter(|delta| delta["role"].is_string()).count(), 1, "{script}");
    };
    let then = |first: &str| format!("{first}\x0c{{\"sum\":42}}");
    let none = Value::Null;
    check(&then("{\"sum\":42}"), true, none.clone(), 0).await;
    check(&then("It is 42."), true, none.clone(), 0).await;
    // What may become a call and is none, nothing at all, and a thought before words.
    check(&then("<tool_cat>"), true, none.clone(), 0).await;
    check(&then("<tool_call>\nno"), true, none.clone(), 0).await;
    check(&then(""), true, none.clone(), 0).await;
    check(&then("<think>\nHm.\n</think>\n\nIt is 42."), true, json!("Hm."), 0).await;
    check(&then("<think>\nHm.\n</think>\n\n"), true, json!("Hm."), 0).await;
    // A call, and what would be said behind it.
    let call = "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>";
    check(call, false, none.clone(), 1).await;
    check(&format!("{call}\nI have called."), false, none.clone(), 1).await;
    check(&format!("<think>\nHm.\n</think>\n{call}\n{call}"), false, json!("Hm."), 2).await;
    // Words stand before the calls: what is said first decides.
    check(&then(CALLS), true, json!("Hm."), 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beside_a_demanded_call_a_form_of_words_is_not_asked_for() {
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "get_time"}})] {
        let more = json!({"tools": tools(), "tool_choice": choice, "response_format": form()});
        let whole = answer("I would rather talk.", more).await.json();
        assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls", "{whole}");
        assert_eq!(whole["choices"][0]["message"]["content"], Value::Null);
    }
    // A schema that cannot be followed is refused before anything is said, with its field.
    let bad = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}});
    let refused = answer("a", json!({"tools": tools(), "response_format": bad})).await.json();
    assert_eq!(refused["error"]["param"], "response_format", "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_ends_what_has_a_form_where_it_stands() {
    let script = "{\"sum\":42}";
    let check = async |more: Value, content: Value, reason: &str| {
        let whole = answer(script, more).await.json();
        let choice = &whole["choices"][0];
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&content, &json!(reason)),
            "{whole}"
        );
    };
    check(json!({"response_format": form(), "stop": ["Observation:"]}), json!(script), "stop").await;
    check(json!({"response_format": form(), "stop": ["42"]}), json!("{\"sum\":"), "stop").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_held_to_a_schema_take_stop_strings() {
    let called = |whole: &Value| {
        let choice = &whole["choices"][0];
        let function = &choice["message"]["tool_calls"][0]["function"];
        (function["arguments"].as_str().unwrap().to_owned(), choice["finish_reason"].clone())
    };
    // As smolagents asks: a call is demanded, and what an observation begins with must not follow.
    let stops = json!(["Observation:", "Calling tools:"]);
    for more in
        [json!({"tool_choice": "required"}), json!({"tool_choice": "required", "parallel_tool_calls": true})]
    {
        let more = merged(json!({"tools": [tools()[0]], "stop": stops}), &more);
        let script = "{\"zone\":\"UTC\"}\x0c</tool_call>\nObservation: 12:00 <tool_call>";
        let (arguments, reason) = called(&answer(script, more).await.json());
        assert_eq!((arguments.as_str(), reason), ("{\"zone\":\"UTC\"}", json!("tool_calls")));
    }
    let mut strict = tools();
    strict[0]["function"]["strict"] = json!(true);
    let script = "Hm. <tool_call>{\"name\": \"get_time\", \"arguments\": {\"zone\": \"Mars\"}}</tool_call>";
    let script = format!("{script}\x0c{{\"zone\":\"CET\"}}");
    let held = answer(&script, json!({"tools": strict, "stop": stops})).await;
    let (arguments, reason) = called(&held.json());
    assert_eq!((arguments.as_str(), reason), ("{\"zone\":\"CET\"}", json!("tool_calls")));
    // One that a stop string cuts is not called whole.
    let cut = answer(
        "{\"zone\":\"UTC\"}",
        json!({"tools": [tools()[0]], "tool_choice": "required", "stop": "UTC"}),
    );
    let (arguments, reason) = called(&cut.await.json());
    assert_eq!((arguments.as_str(), reason), ("{\"zone\":\"", json!("stop")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schemas_of_several_tools_may_name_their_version() {
    let tool = |name: &str, version: &str| {
        let parameters = merged(
            json!({"$id": format!("https://example.com/{name}"), "definitions": {"n": {"type": "integer"}},
                "type": "object", "properties": {"n": {"$ref": "#/definitions/n"}}, "required": ["n"],
                "additionalProperties": false}),
            &if version.is_empty() { json!({}) } else { json!({"$schema": version}) },
        );
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    let (old, new) =
        ("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema");
    for (first, second) in [(old, old), (new, new), (old, new), (new, old), (old, ""), ("", new)] {
        let more = json!({"tools": [tool("f", first), tool("g", second)], "tool_choice": "required"});
        let whole = answer("{\"name\":\"g\",\"arguments\":{\"n\":7}}", more).await.json();
        let function = &whole["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(
            (&function["name"], &function["arguments"]),
            (&json!("g"), &json!("{\"n\":7}")),
            "{whole}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tool_without_parameters_is_called_with_an_empty_object() {
    let tool = |name: &str, more: Value| json!({"type": "function", "function": merged(json!({"name": name, "description": ""}), &more)});
    for parameters in [
        json!({}),
        json!({"parameters": null}),
        json!({"parameters": {}}),
        json!({"parameters": {"type": "object", "properties": {}}}),
        json!({"parameters": {"type": "object", "properties": {}, "required": [], "$schema": "http://json-schema.org/draft-07/schema#"}}),
    ] {
        for choice in [json!("required"), json!({"type": "function", "function": {"name": "f"}})] {
            for tools in [
                json!([tool("f", parameters.clone())]),
                json!([tool("f", parameters.clone()), tool("g", json!({}))]),
            ] {
                let whole = answer("2021", json!({"tools": tools, "tool_choice": choice})).await.json();
                let function = &whole["choices"][0]["message"]["tool_calls"][0]["function"];
                assert_eq!(function["arguments"], "{}", "{parameters} {choice}: {whole}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_tools_that_are_allowed_now_are_there() {
    let allowed = |mode: &str, name: &str| json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}});
    let more = json!({"tools": tools(), "tool_choice": allowed("required", "get_weather")});
    let whole = answer("I would rather talk.", more).await.json();
    let function = &whole["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(function["name"], "get_weather", "{whole}");
    // The model is told of one: the prompt is shorter than with both.
    let tokens = async |more: Value| {
        let whole = answer("Yes.", merged(json!({"tools": tools()}), &more)).await.json();
        whole["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let one = json!({"tools": [tools()[0]]});
    assert_eq!(tokens(json!({"tool_choice": allowed("auto", "get_time")})).await, tokens(one).await);
    let input = json!({"input": "Why?", "tool_choice": {"type": "allowed_tools", "mode": "required",
        "tools": [{"type": "function", "name": "get_weather"}]},
        "tools": tools().as_array().unwrap().iter().map(|tool| merged(tool["function"].clone(), &json!({"type": "function"}))).collect::<Vec<_>>()});
    let world = World::ready(Setup::skilled("No.")).await;
    let whole = post(world.address, "/v1/responses", &input).await.json();
    assert_eq!(whole["output"][0]["name"], "get_weather", "{whole}");
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_form_has_many_names() {
    let world = World::ready(Setup::saying("{\"sum\":42}")).await;
    let user = json!([{"role": "user", "content": "a"}]);
    let check = async |path: &str, body: Value, at: &str, wanted: &str| {
        let whole = post(world.address, path, &body).await.json();
        assert_eq!(whole.pointer(at).and_then(Value::as_str), Some(wanted), "{body}: {whole}");
    };
    let forty_two = json!({"type": "object", "properties": {"x": {"const": 42}}, "required": ["x"], "additionalProperties": false});
    let text = "{\"x\":42}";
    for (more, wanted) in [
        (json!({"response_format": {"type": "json_object", "schema": forty_two}}), text),
        (json!({"response_format": {"type": "json_object"}}), "{\"sum\":42}"),
        (json!({"guided_json": forty_two}), text),
        (json!({"guided_json": forty_two.to_string()}), text),
        (json!({"structured_outputs": {"json": forty_two}}), text),
        (json!({"structured_outputs": {"json": forty_two.to_string()}}), text),
        (json!({"structured_outputs": {"json_object": true}}), "{\"sum\":42}"),
        (json!({"structured_outputs": {"regex": "ab{2}"}}), "abb"),
        (json!({"structured_outputs": {"choice": ["yes"]}}), "yes"),
        (json!({"structured_outputs": {"grammar": "start: \"ok\""}}), "ok"),
    ] {
        let chat = merged(json!({"messages": user}), &more);
        check(CHAT, chat, "/choices/0/message/content", wanted).await;
        let completion = merged(json!({"prompt": "a", "max_tokens": 64}), &more);
        check("/v1/completions", completion, "/choices/0/text", wanted).await;
    }
    let format = json!({"type": "json_schema", "schema": forty_two});
    for more in [json!({"output_config": {"format": format}}), json!({"output_format": format})] {
        let message = merged(json!({"messages": user, "max_tokens": 64}), &more);
        check("/v1/messages", message, "/content/0/text", text).await;
    }
    world.stopped().await.unwrap();
}
