//! Chat templates of other projects, each through a whole loop of tools: the model calls, gets results, and answers. They
//! are fetched by `cargo xtask prove templates`, never committed; what their models would write is what the templates
//! themselves write of an earlier answer, which `calls_that_templates_write_are_read_back` of `fornax-text` leaves beside
//! them.

use std::{collections::BTreeMap, env, fmt::Write as _, path::PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    client::post,
    world::{Setup, World},
};

/// What a template writes of an answer with calls.
#[derive(Deserialize)]
struct Written {
    answer: String,
    /// How many calls are in it.
    calls: usize,
    content: String,
    thought: String,
}

/// The calls of every answer, in their order.
fn wanted() -> Vec<(&'static str, Value)> {
    vec![("get_weather", json!({"city": "Köln \"x\"", "days": 3})), ("get_time", json!({"zone": "CET"}))]
}

fn parameters() -> [Value; 2] {
    [
        json!({"type": "object", "properties": {"city": {"type": "string", "description": "Where."}, "days": {"type": "integer", "description": "How long."}}}),
        json!({"type": "object", "properties": {"zone": {"type": "string", "description": "Where."}}}),
    ]
}

/// What is answered to the results. Byte by byte: every cut that there is.
const MILD: &str = "It is mild.";

/// The parts of a streamed chat, joined as a whole message.
fn joined(events: &[Value]) -> Value {
    let mut message = json!({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []});
    for delta in events.iter().map(|event| &event["choices"][0]["delta"]) {
        for name in ["content", "reasoning_content"] {
            let text = message[name].as_str().unwrap().to_owned() + delta[name].as_str().unwrap_or_default();
            message[name] = json!(text);
        }
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            let calls = message["tool_calls"].as_array_mut().unwrap();
            if let Some(call) = calls.get_mut(usize::try_from(part["index"].as_u64().unwrap()).unwrap()) {
                let text = call["function"]["arguments"].as_str().unwrap().to_owned();
                call["function"]["arguments"] =
                    json!(text + part["function"]["arguments"].as_str().unwrap_or_default());
            } else {
                let mut call = part.clone();
                call.as_object_mut().unwrap().remove("index");
                calls.push(call);
            }
        }
    }
    message
}

/// Names and arguments of a message's calls.
fn calls(message: &Value) -> Vec<(String, Value)> {
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    calls
        .map(|call| {
            let arguments = call["function"]["arguments"].as_str().unwrap_or_default();
            let arguments = serde_json::from_str(arguments).unwrap_or_else(|_| json!(arguments));
            (call["function"]["name"].as_str().unwrap_or_default().to_owned(), arguments)
        })
        .collect()
}

/// One template through its loop, on every API: whether it tells its model of tools. What is wrong, if something is.
async fn looped(source: String, written: &Written) -> Result<bool, String> {
    let script = format!("{}\x0c{MILD}", written.answer);
    // The model of these tests has no such token.
    let source = match source.contains("bos_token") {
        true => format!("{{%- set bos_token = '' -%}}{source}"),
        false => source,
    };
    // A template lives as long as its server, which a test has to the end.
    let setup =
        Setup { template: Box::leak(source.into_boxed_str()), context: 65_536, ..Setup::saying(&script) };
    let world = World::ready(setup).await;
    let wanted: Vec<(String, Value)> =
        wanted().into_iter().take(written.calls).map(|(name, value)| (name.to_owned(), value)).collect();
    let functions: Vec<Value> =
        (wanted_tools().into_iter()).map(|tool| json!({"type": "function", "function": tool})).collect();
    // Firefunction wants these two of whoever renders it.
    let variables =
        json!({"enable_thinking": true, "functions": json!(functions).to_string(), "datetime": "now"});
    let ask = async |messages: &[Value], streamed: bool| {
        let body = json!({"messages": messages, "tools": functions, "stream": streamed,
            "chat_template_kwargs": variables});
        let response = post(world.address, "/v1/chat/completions", &body).await;
        match (response.status, streamed) {
            (200, false) => Ok(response.json()["choices"][0]["message"].clone()),
            (200, true) => Ok(joined(&response.events())),
            _ => Err(format!("{}: {}", response.status, response.body)),
        }
    };
    let user = json!({"role": "user", "content": "U1"});
    for streamed in [false, true] {
        let said = match ask(std::slice::from_ref(&user), streamed).await {
            Ok(said) => said,
            // Refused by name: there is no loop to go through.
            Err(error) if error.contains("does not tell the model of tools") => return Ok(false),
            Err(error) => return Err(format!("asked, {error}")),
        };
        let text = |name: &str| said[name].as_str().unwrap_or_default();
        if (calls(&said), text("content"), text("reasoning_content"))
            != (wanted.clone(), &*written.content, &*written.thought)
        {
            return Err(format!("streamed {streamed}: {:?} was read as {said}", written.answer));
        }
        // As clients send it back, and as those do who leave what is empty out.
        let mut silent = said.clone();
        silent["content"] = Value::Null;
        silent.as_object_mut().unwrap().remove("reasoning_content");
        for said in [said, silent] {
            let mut messages = vec![user.clone(), said.clone()];
            for call in said["tool_calls"].as_array().unwrap() {
                messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "18 degrees"}));
            }
            let answer = ask(&messages, streamed).await.map_err(|error| format!("got results, {error}"))?;
            answered(&answer["content"], &answer["reasoning_content"], &answer)?;
        }
    }
    others(&world, &wanted, &variables).await?;
    world.stopped().await.unwrap();
    Ok(true)
}

fn wanted_tools() -> Vec<Value> {
    (wanted().into_iter().zip(parameters()))
        .map(|((name, _), parameters)| json!({"name": name, "description": "D", "parameters": parameters}))
        .collect()
}

/// Whether it is the answer; a template that begins a thought for the model makes one of it.
fn answered(content: &Value, thought: &Value, whole: &Value) -> Result<(), String> {
    let texts = [content, thought].map(|text| text.as_str().unwrap_or_default());
    match texts.contains(&MILD) {
        true => Ok(()),
        false => Err(format!("answered {whole}")),
    }
}

/// The second half of the loop as Anthropic's, OpenAI's newer and Ollama's clients ask for it.
async fn others(world: &World, wanted: &[(String, Value)], variables: &Value) -> Result<(), String> {
    let each = |made: &dyn Fn(usize, &str, &Value) -> Value| -> Vec<Value> {
        wanted.iter().enumerate().map(|(index, (name, arguments))| made(index, name, arguments)).collect()
    };
    // As Anthropic's clients know them, and not as Mistral's templates want them.
    let id = |index: usize| format!("toolu_{index}");

    let used = each(
        &|index, name, input| json!({"type": "tool_use", "id": id(index), "name": name, "input": input}),
    );
    let results = each(
        &|index, _, _| json!({"type": "tool_result", "tool_use_id": id(index), "content": "18 degrees"}),
    );
    let tools: Vec<Value> = (wanted_tools().into_iter())
        .map(|tool| json!({"name": tool["name"], "description": "D", "input_schema": tool["parameters"]}))
        .collect();
    let messages = json!([{"role": "user", "content": "U1"}, {"role": "assistant", "content": used},
        {"role": "user", "content": results}]);
    let body =
        json!({"max_tokens": 256, "messages": messages, "tools": tools, "chat_template_kwargs": variables});
    let response = post(world.address, "/v1/messages", &body).await;
    let texts = response.json();
    let texts: Vec<&Value> = texts["content"].as_array().into_iter().flatten().collect();
    let part = |name: &str| texts.iter().map(|block| block[name].clone()).find(|text| !text.is_null());
    answered(
        &part("text").unwrap_or_default(),
        &part("thinking").unwrap_or_default(),
        &json!([response.status, "/v1/messages", response.body]),
    )?;

    let mut input = vec![json!({"role": "user", "content": "U1"})];
    input.extend(each(&|index, name, arguments| {
        json!({"type": "function_call", "call_id": id(index), "name": name, "arguments": arguments.to_string()})
    }));
    input.extend(each(
        &|index, _, _| json!({"type": "function_call_output", "call_id": id(index), "output": "18 degrees"}),
    ));
    let mut tools = wanted_tools();
    tools.iter_mut().for_each(|tool| tool["type"] = json!("function"));
    let body = json!({"input": input, "tools": tools, "chat_template_kwargs": variables});
    let response = post(world.address, "/v1/responses", &body).await;
    let told = response.json();
    let part = |kind: &str| {
        let items = told["output"].as_array().into_iter().flatten();
        items.filter(|item| item["type"] == kind).map(|item| item["content"][0]["text"].clone()).next()
    };
    answered(
        &part("message").unwrap_or_default(),
        &part("reasoning").unwrap_or_default(),
        &json!([response.status, "/v1/responses", response.body]),
    )?;

    let used = each(&|_, name, arguments| json!({"function": {"name": name, "arguments": arguments}}));
    let mut messages = vec![
        json!({"role": "user", "content": "U1"}),
        json!({"role": "assistant", "content": "", "tool_calls": used}),
    ];
    messages.extend(each(&|_, name, _| json!({"role": "tool", "tool_name": name, "content": "18 degrees"})));
    let tools: Vec<Value> =
        wanted_tools().into_iter().map(|tool| json!({"type": "function", "function": tool})).collect();
    let body = json!({"model": "script", "messages": messages, "tools": tools, "stream": false});
    let response = post(world.address, "/api/chat", &body).await;
    let told = &response.json()["message"];
    answered(&told["content"], &told["thinking"], &json!([response.status, "/api/chat", response.body]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_template_goes_through_a_whole_loop_of_tools() {
    const NAME: &str = "every_template_goes_through_a_whole_loop_of_tools";
    let Some(folder) = env::var_os("FORNAX_TEMPLATES").map(PathBuf::from) else {
        println!("SKIP {NAME}: FORNAX_TEMPLATES names no folder");
        return;
    };
    let written = std::fs::read_to_string(folder.join("answers.json")).unwrap();
    let written: BTreeMap<String, Written> = serde_json::from_str(&written).unwrap();
    assert!(!written.is_empty(), "no templates");
    let (mut whole, mut refused, mut wrong) = (0, Vec::new(), String::new());
    for (name, written) in &written {
        match looped(std::fs::read_to_string(folder.join(name)).unwrap(), written).await {
            Ok(true) => whole += 1,
            Ok(false) => refused.push(name.trim_end_matches(".jinja")),
            Err(reason) => writeln!(wrong, "{name}: {reason}").unwrap(),
        }
    }
    println!(
        "Tally {whole} templates through a whole loop on four APIs; refused by name: {}",
        refused.join(", ")
    );
    assert!(wrong.is_empty(), "{whole} went through, not:\n{wrong}");
}
