//! Tools and thoughts in chat completions.

use serde_json::{Value, json};

use crate::{
    client::{Response, post},
    world::{Setup, World},
};

const CHAT: &str = "/v1/chat/completions";

/// Two tools as OpenAI's clients describe them.
pub(crate) fn tools() -> Value {
    let tool = |name: &str, key: &str| {
        let parameters = json!({"type": "object", "properties": {key: {"type": "string", "enum": ["CET", "UTC"]}},
            "required": [key], "additionalProperties": false});
        json!({"type": "function", "function": {"name": name, "description": "Tells.", "parameters": parameters}})
    };
    json!([tool("get_time", "zone"), tool("get_weather", "place")])
}

/// An answer with a thought, a word and two calls.
pub(crate) const CALLS: &str = "<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"place\": \"UTC\"}}\n</tool_call>";

fn ask(more: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Why?"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

async fn answer(script: &str, more: Value) -> Response {
    let world = World::ready(Setup::skilled(script)).await;
    let response = post(world.address, CHAT, &ask(&more)).await;
    world.stopped().await.unwrap();
    response
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_and_thoughts_are_told_apart_from_what_is_said() {
    let whole = answer(CALLS, json!({"tools": tools()})).await.json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
    assert_eq!(choice["message"]["content"], "Let me see.");
    assert_eq!(choice["message"]["reasoning_content"], "Hm.");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let told: Vec<(&Value, Value)> = calls
        .iter()
        .map(|call| {
            (
                &call["function"]["name"],
                serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap(),
            )
        })
        .collect();
    let (time, weather) = (json!("get_time"), json!("get_weather"));
    assert_eq!(told, [(&time, json!({"zone": "CET"})), (&weather, json!({"place": "UTC"}))]);
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert!(whole["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streamed_parts_joined_are_the_whole() {
    let events = answer(CALLS, json!({"tools": tools(), "stream": true})).await.events();
    let deltas: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
    let join = |name: &str| deltas.iter().filter_map(|delta| delta[name].as_str()).collect::<String>();
    assert_eq!((join("content"), join("reasoning_content")), ("Let me see.".to_owned(), "Hm.".to_owned()));
    let calls: Vec<&Value> = deltas.iter().filter_map(|delta| delta["tool_calls"].get(0)).collect();
    let arguments = |index: u64| {
        let parts = calls.iter().filter(|call| call["index"] == index);
        parts.filter_map(|call| call["function"]["arguments"].as_str()).collect::<String>()
    };
    assert_eq!(
        (arguments(0).as_str(), arguments(1).as_str()),
        ("{\"zone\": \"CET\"}", "{\"place\": \"UTC\"}")
    );
    let ends: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["finish_reason"]).collect();
    assert_eq!(ends.iter().filter(|end| !end.is_null()).collect::<Vec<_>>(), [&&json!("tool_calls")]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demanded_call_has_arguments_of_its_schema_whatever_the_model_would_say() {
    let check = async |choice: Value, names: &[&str]| {
        let response = answer("I would rather talk.", json!({"tools": tools(), "tool_choice": choice})).await;
        let whole = response.json();
        let message = &whole["choices"][0]["message"];
        assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls", "{whole}");
        assert_eq!(message["content"], Value::Null);
        let function = &message["tool_calls"][0]["function"];
        let name = function["name"].as_str().unwrap();
        assert!(names.contains(&name), "{name}");
        let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        let key = if name == "get_time" { "zone" } else { "place" };
        assert!(["CET", "UTC"].contains(&arguments[key].as_str().unwrap()), "{arguments}");
    };
    check(json!({"type": "function", "function": {"name": "get_weather"}}), &["get_weather"]).await;
    check(json!("required"), &["get_time", "get_weather"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_strict_call_of_the_model_s_own_follows_its_schema() {
    // The script is begun anew where the arguments begin, and goes on only as the schema allows.
    let mut strict = tools();
    strict[0]["function"]["strict"] = json!(true);
    let script =
        "Hm. <tool_call>{\"name\": \"get_time\", \"arguments\": {\"zone\": \"Mars\"}}</tool_call> And more.";
    let free = answer(script, json!({"tools": tools()})).await.json();
    assert_eq!(
        free["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
        "{\"zone\": \"Mars\"}"
    );
    let held = answer(script, json!({"tools": strict})).await.json();
    let message = &held["choices"][0]["message"];
    assert_eq!(message["content"], "Hm.", "{held}");
    let arguments: Value =
        serde_json::from_str(message["tool_calls"][0]["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(["CET", "UTC"].contains(&arguments["zone"].as_str().unwrap()), "{held}");
    assert_eq!(held["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_calls_follow_their_schemas_where_that_is_asked_for() {
    // Acts: the model's own words; the arguments, which only the schema makes right; what follows behind them, and so
    // on.
    let call = |zone: &str| {
        format!("<tool_call>{{\"name\": \"get_time\", \"arguments\": {{\"zone\": \"{zone}\"}}}}</tool_call>")
    };
    let unknown = "</tool_call><tool_call>{\"name\": \"fly\", \"arguments\": {}}</tool_call>";
    let zone = |choice: &Value, at: usize| {
        let arguments = choice["message"]["tool_calls"][at]["function"]["arguments"].as_str().unwrap();
        let arguments: Value = serde_json::from_str(arguments).unwrap_or_else(|_| panic!("{choice}"));
        assert_eq!(arguments.as_object().unwrap().len(), 1, "{choice}");
        arguments["zone"].as_str().unwrap().to_owned()
    };
    let check = async |script: &str, more: Value, zones: &[&str], content: Value| {
        let whole = answer(script, more.clone()).await.json();
        let choice = &whole["choices"][0];
        let calls = choice["message"]["tool_calls"].as_array().unwrap().len();
        assert_eq!((0..calls).map(|at| zone(choice, at)).collect::<Vec<_>>(), zones, "{whole}");
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&content, &json!("tool_calls"))
        );
        // The same in pieces: each call once by its number, arguments joined.
        let mut streamed = more;
        streamed["stream"] = json!(true);
        let mut calls: Vec<String> = Vec::new();
        for part in answer(script, streamed).await.events() {
            for call in part["choices"][0]["delta"]["tool_calls"].as_array().into_iter().flatten() {
                let index = call["index"].as_u64().unwrap() as usize;
                if call["id"].is_string() {
                    assert_eq!(index, calls.len(), "{call}");
                    calls.push(String::new());
                }
                calls[index].push_str(call["function"]["arguments"].as_str().unwrap());
            }
        }
        let made = choice["message"]["tool_calls"].as_array().unwrap().iter();
        assert_eq!(
            calls,
            made.map(|call| call["function"]["arguments"].as_str().unwrap()).collect::<Vec<_>>()
        );
    };
    let mut strict = tools();
    strict[0]["function"]["strict"] = json!(true);
    let mars = call("Mars");
    let script = [
        &format!("Hm. {mars}"),
        "{\"zone\":\"UTC\"}",
        &format!("</tool_call>{mars}"),
        "{\"zone\":\"CET\"}",
        "</tool_call> Done.",
    ];
    let script = script.join("\x0c");
    let all = |more: Value| {
        let mut asked = json!({"tools": strict, "parallel_tool_calls": true});
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        asked
    };
    check(&script, all(json!({})), &["UTC", "CET"], json!("Hm.Done.")).await;
    // By default the first of them ends the answer.
    check(&script, json!({"tools": strict}), &["UTC"], json!("Hm.")).await;

    // Demanded: nothing but calls, and none of a tool that there is not.
    let forced = ["{\"zone\":\"UTC\"}", &format!("</tool_call>{mars}"), "{\"zone\":\"CET\"}"];
    let choice = json!({"tool_choice": {"type": "function", "function": {"name": "get_time"}}});
    for end in ["</tool_call>", "</tool_call> And that is all.", unknown] {
        let script = forced.iter().copied().chain([end]).collect::<Vec<_>>().join("\x0c");
        check(&script, all(choice.clone()), &["UTC", "CET"], Value::Null).await;
    }
    let any = [
        "{\"name\":\"get_time\",\"arguments\":{\"zone\":\"UTC\"}}",
        &format!("</tool_call>{mars}"),
        "{\"zone\":\"CET\"}",
        "</tool_call>",
    ];
    check(&any.join("\x0c"), all(json!({"tool_choice": "required"})), &["UTC", "CET"], Value::Null).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_call_is_enough_where_several_are_not_wanted() {
    let whole = answer(CALLS, json!({"tools": tools(), "parallel_tool_calls": false})).await.json();
    assert_eq!(whole["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_no_tool_may_be_called_a_call_is_text() {
    let more = json!({"tools": tools(), "tool_choice": "none"});
    let whole = answer("<tool_call>{}</tool_call>", more).await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], "<tool_call>{}</tool_call>");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_had_with_tools_is_said() {
    let check = async |setup: Setup, more: Value, code: &str, field: &str| {
        let world = World::ready(setup).await;
        let response = post(world.address, CHAT, &ask(&more)).await;
        let error = &response.json()["error"];
        assert_eq!(
            (response.status, &error["code"], &error["param"]),
            (400, &json!(code), &json!(field)),
            "{error}"
        );
        world.stopped().await.unwrap();
    };
    let skilled = || Setup::skilled("a");
    let with = |parameters: Value| json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]});
    // A template that does not tell the model of tools; one whose calls nobody can read; one that fails.
    check(Setup::default(), json!({"tools": tools()}), "MODEL_UNSUPPORTED", "tools").await;
    let odd = Setup { template: "{{ tools }}{{ messages[0].content }}", ..Setup::default() };
    check(odd, json!({"tools": tools()}), "MODEL_UNSUPPORTED", "tools").await;
    let fails =
        Setup { template: "{% if tools %}{{ raise_exception('no tools') }}{% endif %}x", ..Setup::default() };
    check(fails, json!({"tools": tools()}), "MODEL_UNSUPPORTED", "tools").await;
    // What is no schema.
    let bad = json!({"type": "object", "properties": {"a": {"type": "strin"}}});
    check(skilled(), with(bad), "INVALID_INPUT", "tools[0].function.parameters.properties.a.type").await;
    check(skilled(), with(json!([])), "INVALID_INPUT", "tools[0].function.parameters").await;
    check(skilled(), json!({"tool_choice": "required"}), "INVALID_INPUT", "tool_choice").await;
    let other = json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "x"}}});
    check(skilled(), other, "INVALID_INPUT", "tool_choice.function.name").await;
    let history = json!({"messages": [{"role": "assistant", "content": null,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{no"}}]}]});
    check(skilled(), history, "INVALID_INPUT", "messages[0].tool_calls[0].function.arguments").await;
    check(Setup::default(), json!({"thinking_budget": 5}), "INVALID_INPUT", "thinking_budget").await;
    let begun = json!({"continue_final_message": true});
    check(skilled(), begun, "INVALID_INPUT", "messages[0]").await;
    check(skilled(), json!({"add_generation_prompt": false}), "INVALID_INPUT", "add_generation_prompt").await;
    let others = json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "x"}}]}});
    check(
        skilled(),
        json!({"tools": tools(), "tool_choice": others}),
        "INVALID_INPUT",
        "tool_choice.function.name",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_before_and_their_results_are_part_of_the_prompt() {
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{\"zone\": \"CET\"}"}});
    let messages = json!([{"role": "user", "content": "Time?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}]);
    let whole = answer("Noon.", json!({"messages": messages, "tools": tools()})).await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], "Noon.", "{whole}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thinking_that_the_prompt_began_is_no_answer() {
    let kwargs = json!({"enable_thinking": true});
    let whole = answer("Hm.\n</think>\n\nBlue.", json!({"chat_template_kwargs": kwargs})).await.json();
    let message = &whole["choices"][0]["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("Hm."), &json!("Blue.")),
        "{whole}"
    );
    // A form leaves no room for thoughts: the prompt ends them.
    let format = json!({"type": "json_object"});
    let whole = answer("{}", json!({"chat_template_kwargs": kwargs, "response_format": format})).await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], "{}", "{whole}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_ends_thinking_and_the_answer_goes_on() {
    // The script is begun anew behind what ends thinking.
    let more =
        json!({"chat_template_kwargs": {"enable_thinking": true}, "thinking_budget": 4, "max_tokens": 64});
    let whole = answer("abcdefgh", more.clone()).await.json();
    let message = &whole["choices"][0]["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("abcd"), &json!("abcdefgh")),
        "{whole}"
    );
    assert_eq!(whole["usage"]["completion_tokens_details"]["reasoning_tokens"], 4);
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let mut none = more;
    none["thinking_budget"] = json!(0);
    let whole = answer("abcdefgh", none).await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], "abcdefgh", "{whole}");
    assert_eq!(whole["choices"][0]["message"]["reasoning_content"], Value::Null);
}

/// As several families write theirs: nothing is asked before texts are joined, so null and what is not there fail.
const JOINING_TEMPLATE: &str = "{% for tool in tools or [] %}\
    {{ '<tool_call>' + tool.function.name + tool.function.description }}{% endfor %}\
    {% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_said_is_an_empty_text_for_templates_on_every_api() {
    let world = World::ready(Setup { template: JOINING_TEMPLATE, ..Setup::saying("Noon.") }).await;
    let check = async |path: &str, body: Value| {
        let response = post(world.address, path, &body).await;
        assert_eq!(response.status, 200, "{path}: {}", response.json());
    };
    let function = json!({"name": "get_time", "parameters": {"type": "object", "properties": {}}});
    let tools = json!([{"type": "function", "function": function}]);
    let user = json!({"role": "user", "content": "Time?"});
    let call = json!({"id": "c", "type": "function", "function": {"name": "get_time", "arguments": "{}"}});
    let result = json!({"role": "tool", "tool_call_id": "c", "content": "12:00"});
    for silent in [json!({"content": null}), json!({})] {
        let mut assistant = silent;
        assistant["role"] = json!("assistant");
        assistant["tool_calls"] = json!([call]);
        check("/v1/chat/completions", json!({"messages": [user, assistant, result], "tools": tools})).await;
    }
    let called =
        json!({"role": "assistant", "tool_calls": [{"function": {"name": "get_time", "arguments": {}}}]});
    let result = json!({"role": "tool", "tool_name": "get_time", "content": "12:00"});
    let messages = json!([user, called, result]);
    let body = json!({"model": "script", "messages": messages, "tools": tools, "stream": false});
    check("/api/chat", body).await;
    let called = json!({"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "get_time", "input": {}}]});
    let result = json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]});
    let tool = json!({"name": "get_time", "input_schema": {"type": "object", "properties": {}}});
    let body = json!({"max_tokens": 16, "messages": [user, called, result], "tools": [tool]});
    check("/v1/messages", body).await;
    let items = json!([user, {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "12:00"}]);
    let mut tool = function;
    tool["type"] = json!("function");
    check("/v1/responses", json!({"input": items, "tools": [tool]})).await;
    world.stopped().await.unwrap();
}

/// Takes ids of nine characters alone, as Mistral's do.
const NINE: &str = "{% if tools %}Tools: {{ tools | tojson }} in <tool_call>{% endif %}\
    {% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}\
    {% for call in message.tool_calls or [] %}\
    {% if call.id is undefined or call.id | length != 9 %}{{ raise_exception('nine, please') }}{% endif %}\
    <tool_call>{{ call.id }} {{ call.function | tojson }}</tool_call>{% endfor %}\
    {% if message.role == 'tool' %}\
    {% if message.tool_call_id | length != 9 %}{{ raise_exception('nine, please') }}{% endif %}\
    of {{ message.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_have_ids_that_their_template_takes_whoever_made_them() {
    let world = World::ready(Setup { template: NINE, ..Setup::saying("Mild.") }).await;
    let called = |ids: [Value; 2]| {
        let calls: Vec<Value> = ids
            .iter()
            .map(|id| json!({"id": id, "type": "function", "function": {"name": "get_time", "arguments": "{}"}}))
            .collect();
        json!({"tools": tools(), "messages": [{"role": "user", "content": "Why?"},
            {"role": "assistant", "content": null, "tool_calls": calls},
            {"role": "tool", "tool_call_id": ids[1], "content": "second"},
            {"role": "tool", "tool_call_id": ids[0], "content": "first"}]})
    };
    let prompt = async |ids| {
        let rendered = post(world.address, "/apply-template", &called(ids)).await;
        assert_eq!(rendered.status, 200, "{}", rendered.body);
        rendered.json()["prompt"].as_str().unwrap().to_owned()
    };
    // Ids that are taken stay as they are.
    let own = prompt([json!("abcdefgh1"), json!("abcdefgh2")]).await;
    assert!(own.contains("secondof abcdefgh2") && own.contains("firstof abcdefgh1"), "{own}");
    let others = prompt([json!("call_a"), json!("toolu_01A09q90qw90lq917835lq9")]).await;
    assert!(others.contains("<tool_call>call00000 ") && others.contains("<tool_call>call00001 "), "{others}");
    assert!(others.contains("secondof call00001") && others.contains("firstof call00000"), "{others}");

    // Ollama's have none: each result belongs to the first call of its tool that has none yet.
    let call = |name: &str| json!({"function": {"name": name, "arguments": {}}});
    let body = json!({"model": "script", "stream": false, "tools": tools(), "messages": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "", "tool_calls": [call("get_time"), call("get_weather")]},
        {"role": "tool", "tool_name": "get_weather", "content": "18"}, {"role": "tool", "content": "noon"}]});
    let answer = post(world.address, "/api/chat", &body).await;
    assert_eq!(
        (answer.status, &answer.json()["message"]["content"]),
        (200, &json!("Mild.")),
        "{}",
        answer.body
    );
    world.stopped().await.unwrap();
}
