//! Messages, as Anthropic's clients ask for them.

use serde_json::{Value, json};

use crate::{
    client::{Response, post, raw, request},
    tools::CALLS,
    world::{Setup, World},
};

const MESSAGES: &str = "/v1/messages";

fn ask(more: &Value) -> Value {
    let mut body =
        json!({"model": "script", "max_tokens": 400, "messages": [{"role": "user", "content": "Why?"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn tools() -> Value {
    let tool = |name: &str| {
        json!({"name": name, "description": "Tells.", "input_schema": {"type": "object",
        "properties": {"zone": {"enum": ["CET"]}}, "required": ["zone"], "additionalProperties": false}})
    };
    json!([tool("get_time"), tool("get_weather")])
}

async fn answer(script: &str, more: Value) -> Response {
    let world = World::ready(Setup::skilled(script)).await;
    let response = post(world.address, MESSAGES, &ask(&more)).await;
    world.stopped().await.unwrap();
    response
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_message_looks_as_anthropic_writes_it() {
    insta::assert_snapshot!(answer(CALLS, json!({"tools": tools()})).await.transcript());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_opens_and_closes_each_block() {
    let body = json!({"stream": true, "tools": tools()});
    insta::assert_snapshot!(
        answer("<think>a</think>b<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", body)
            .await
            .transcript()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_end_for_a_reason() {
    let check = async |script: &str, more: Value, reason: &str, sequence: Value| {
        let whole = answer(script, more).await.json();
        assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!(reason), &sequence), "{whole}");
    };
    check("Yes.", json!({}), "end_turn", Value::Null).await;
    check("Yes. No.", json!({"stop_sequences": ["x", " No"]}), "stop_sequence", json!(" No")).await;
    check("Yes.", json!({"max_tokens": 2}), "max_tokens", Value::Null).await;
    let choice = json!({"type": "tool", "name": "get_time"});
    check("Yes.", json!({"tools": tools(), "tool_choice": choice}), "tool_use", Value::Null).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_counted_as_they_would_be_computed() {
    let world = World::ready(Setup::skilled("Yes.")).await;
    let mut body = ask(
        &json!({"tools": tools(), "system": [{"type": "text", "text": "Be kind."}], "messages": [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "tool_use", "id": "a", "name": "get_time", "input": {"zone": "CET"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "12"}]}]}]}),
    );
    let whole = post(world.address, MESSAGES, &body).await.json();
    let usage = &whole["usage"];
    let prompt = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    body.as_object_mut().unwrap().remove("max_tokens");
    let counted = post(world.address, "/v1/messages/count_tokens", &body).await.json();
    assert_eq!(counted, json!({"input_tokens": prompt}), "{whole}");
    world.stopped().await.unwrap();
}

/// Refuses instructions that come late, as several families do.
const STRICT_TEMPLATE: &str = "{% for message in messages %}\
    {% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}\
    <|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// What Claude Code 2.1 sends besides its prompts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_agents_send_and_what_changes_nothing_is_taken() {
    let body = ask(&json!({
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Why?", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "The date has changed."},
        ],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}, "metadata": {"user_id": "u"},
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}], "top_k": -1,
    }));
    for template in [crate::world::TOOL_TEMPLATE, STRICT_TEMPLATE] {
        let world = World::ready(Setup { template, ..Setup::saying("Yes.") }).await;
        let whole = post(world.address, MESSAGES, &body).await.json();
        assert_eq!(whole["content"], json!([{"type": "text", "text": "Yes."}]), "{whole}");
        world.stopped().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thoughts_are_left_out_as_asked_and_other_edits_refused() {
    let world = World::ready(Setup::skilled("Yes.")).await;
    let thought = |text: &str| json!({"role": "assistant", "content": [{"type": "thinking", "thinking": text, "signature": ""}, {"type": "text", "text": "x"}]});
    let user = json!({"role": "user", "content": "y"});
    let messages = json!([user, thought("a".repeat(10).as_str()), user, thought(&"b".repeat(20)), user]);
    let tokens = async |edit: Value| {
        let body = ask(&json!({"messages": messages, "context_management": {"edits": [edit]}}));
        let whole = post(world.address, "/v1/messages/count_tokens", &body).await.json();
        whole["input_tokens"].as_u64().unwrap_or_else(|| panic!("{whole}"))
    };
    let kind = "clear_thinking_20251015";
    let all = tokens(json!({"type": kind, "keep": "all"})).await;
    let marks = "<think></think>".len() as u64;
    assert_eq!(tokens(json!({"type": kind})).await, all - 10 - marks);
    assert_eq!(tokens(json!({"type": kind, "keep": {"type": "thinking_turns", "value": 2}})).await, all);
    assert_eq!(
        tokens(json!({"type": kind, "keep": {"type": "thinking_turns", "value": 0}})).await,
        all - 30 - 2 * marks
    );
    let body = ask(&json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}));
    let refused = post(world.address, MESSAGES, &body).await.json();
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("context_management.edits[0].type"), "{message}");
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_goes_on_behind_the_beginning_that_was_sent() {
    let world = World::ready(Setup::skilled("Yes.")).await;
    let user = json!({"role": "user", "content": "Why?"});
    let count = async |messages: Value| {
        let whole = post(world.address, MESSAGES, &ask(&json!({"messages": messages}))).await.json();
        assert_eq!(whole["content"][0]["text"], "Yes.", "{whole}");
        let usage = &whole["usage"];
        usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap()
    };
    // Only its own text is added: no turn ends, and none begins. A mark that it spells is text.
    let plain = count(json!([user])).await;
    let begun = "The reason <|im_end|> is";
    assert_eq!(
        count(json!([user, {"role": "assistant", "content": begun}])).await,
        plain + begun.len() as u64
    );
    let chat = json!({"messages": [user, {"role": "assistant", "content": begun}],
        "continue_final_message": true, "add_generation_prompt": false});
    let whole = post(world.address, "/v1/chat/completions", &chat).await.json();
    assert_eq!(whole["usage"]["prompt_tokens"], plain + begun.len() as u64, "{whole}");
    let call =
        json!({"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]});
    for more in [
        json!({"messages": [user, call]}),
        json!({"messages": [user, {"role": "assistant", "content": "{"}],
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
    ] {
        let refused = post(world.address, MESSAGES, &ask(&more)).await;
        assert_eq!(refused.status, 400, "{more}: {}", refused.body);
    }
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_would_change_the_answer_is_refused_by_its_name() {
    let world = World::ready(Setup::skilled("a")).await;
    let check = async |more: Value, message: &str| {
        let refused = post(world.address, MESSAGES, &ask(&more)).await;
        let said = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(refused.status == 400 && said.starts_with(message), "{more}: {said}");
    };
    let block = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    let image =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}});
    check(block(image.clone()), "messages[0].content[0].type: this model reads no images").await;
    check(block(json!({"type": "image", "source": {}})), "messages[0].content[0].source.type: is required")
        .await;
    check(
        block(
            json!({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}),
        ),
        "messages[0].content[0].type: this model reads no sound and no files",
    )
    .await;
    let result = json!({"type": "tool_result", "tool_use_id": "a", "content": [image]});
    check(block(result), "messages[0].content[0].content[0].type: this model reads no images").await;
    check(
        json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        "tools[0].type: is a tool that this server",
    )
    .await;
    check(json!({"tools": [{"name": "f"}]}), "tools[0].input_schema: is required").await;
    check(json!({"output_config": {"effort": "huge"}}), "output_config.effort").await;
    let hosted = json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}});
    check(hosted, "tool_choice: needs tools").await;
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_have_the_shape_that_clients_read() {
    let check = async |body: Value, status: u16, kind: &str| {
        let world = World::ready(Setup::skilled("a")).await;
        let response = post(world.address, MESSAGES, &body).await;
        let error = response.json();
        assert_eq!(
            (response.status, &error["type"], &error["error"]["type"]),
            (status, &json!("error"), &json!(kind)),
            "{error}"
        );
        assert!(!error["error"]["message"].as_str().unwrap().is_empty());
        world.stopped().await.unwrap();
    };
    check(json!({"messages": []}), 400, "invalid_request_error").await;
    check(ask(&json!({"model": "other"})), 404, "not_found_error").await;
    check(ask(&json!({"mcp_servers": [{}]})), 400, "invalid_request_error").await;
    check(
        ask(&json!({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]})),
        400,
        "invalid_request_error",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_may_come_as_anthropic_s_clients_send_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "a-key-of-good-length\n").unwrap();
    let mut setup = Setup::skilled("Yes.");
    setup.options.api_key_file = Some(file);
    let world = World::ready(setup).await;
    let body = ask(&json!({})).to_string();
    let send = async |key: &str| {
        raw(world.address, &request("POST", MESSAGES, &[("x-api-key", key)], body.as_bytes())).await
    };
    assert_eq!(send("a-key-of-good-length").await.status, 200);
    let refused = send("another-key-of-length").await;
    assert_eq!((refused.status, &refused.json()["error"]["type"]), (401, &json!("authentication_error")));
}
