//! Responses, as OpenAI's newer clients ask for them, and ranking.

use serde_json::{Value, json};

use crate::{
    client::post,
    tools::CALLS,
    world::{Setup, World},
};

const RESPONSES: &str = "/v1/responses";

fn tools() -> Value {
    let tool = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}});
    json!([tool("get_time"), tool("get_weather")])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_response_looks_as_openai_writes_it() {
    let world = World::ready(Setup::skilled(CALLS)).await;
    let body = json!({"model": "script", "input": "Why?", "instructions": "Be kind.", "tools": tools()});
    insta::assert_snapshot!(post(world.address, RESPONSES, &body).await.transcript());
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_tells_every_item_and_ends_with_the_whole() {
    let script = "<think>a</think>b<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let world = World::ready(Setup::skilled(script)).await;
    let body = json!({"input": "Why?", "tools": tools(), "stream": true});
    let events = post(world.address, RESPONSES, &body).await.events();
    let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    for (index, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], index);
    }
    let whole = &events.last().unwrap()["response"];
    assert_eq!(whole["output"][1]["content"][0]["text"], "b");
    assert_eq!(whole["output"][2]["arguments"], "{}");
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_is_brought_along() {
    let world = World::ready(Setup::skilled("Noon.")).await;
    let items = json!([{"role": "user", "content": [{"type": "input_text", "text": "Time?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "12:00"}]);
    let whole = post(world.address, RESPONSES, &json!({"input": items, "tools": tools()})).await.json();
    assert_eq!(whole["output"][0]["content"][0]["text"], "Noon.", "{whole}");
    let body = json!({"input": "a", "max_output_tokens": 2, "temperature": 0.7});
    let cut = post(world.address, RESPONSES, &body).await.json();
    // Repeated as it was sent, to the digit.
    assert_eq!(cut["temperature"], 0.7);
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    world.stopped().await.unwrap();
}

/// What Codex sends besides its prompts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tools_that_a_model_may_do_without_are_left_out_and_others_refused() {
    let world = World::ready(Setup::skilled("Noon.")).await;
    let hosted = json!([
        {"type": "web_search", "external_web_access": false}, {"type": "namespace", "name": "n", "tools": []},
        {"type": "image_generation"}, tools()[0],
    ]);
    let body = json!({
        "model": "script", "instructions": "Be kind.", "store": false, "include": ["reasoning.encrypted_content"],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Time?"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": null},
            {"type": "web_search_call", "status": "completed"},
        ],
        "tools": hosted, "tool_choice": "auto", "parallel_tool_calls": false, "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}, "max_tool_calls": 3,
        "truncation": "auto",
    });
    let whole = post(world.address, RESPONSES, &body).await.json();
    assert_eq!(whole["output"][0]["content"][0]["text"], "Noon.", "{whole}");
    let check = async |more: Value, message: &str| {
        let mut body = json!({"input": "a"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let refused = post(world.address, RESPONSES, &body).await;
        let said = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(refused.status == 400 && said.starts_with(message), "{more}: {said}");
    };
    for kind in ["file_search", "mcp", "code_interpreter", "computer_use_preview", "custom"] {
        check(json!({"tools": [tools()[0], {"type": kind}]}), "tools[1].type: is a tool that this server")
            .await;
    }
    check(json!({"tools": [{"type": "function"}]}), "tools[0].name: is required").await;
    check(json!({"tools": [{"name": "f"}]}), "tools[0].type must be a string").await;
    check(json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}), "tool_choice: needs tools")
        .await;
    let item = |item: Value| json!({"input": [item]});
    let image = json!({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]});
    check(item(image), "input[0].content[0].type: this model reads no images").await;
    check(item(json!({"type": "computer_call"})), "input[0].type must be one of").await;
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_answers_orders_no_documents() {
    let world = World::ready(Setup::default()).await;
    for path in ["/v1/rerank", "/rerank"] {
        let response =
            post(world.address, path, &json!({"query": "a", "documents": ["b", {"text": "c"}]})).await;
        assert_eq!((response.status, &response.json()["error"]["code"]), (400, &json!("MODEL_UNSUPPORTED")));
    }
    world.stopped().await.unwrap();
}
