//! Bodies that somebody changed at random: each is answered, none by a fault of the server, and nothing stays behind.

use serde_json::{Value, json};

use crate::{
    client::get,
    world::{Setup, World, keeping},
};

#[path = "../../../../fuzz/src/alter.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod alter;
#[path = "../../../../fuzz/src/body.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod body;
#[path = "../../../../fuzz/src/mutate.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod mutate;

/// What stands where something else was, or beside it.
const WORDS: &[&[u8]] = &[
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1e308",
    b"1e999",
    b"18446744073709551615",
    b"-9223372036854775808",
    b"4294967296",
    b"0.1",
    b"\"\"",
    b"\"a\"",
    b"[]",
    b"{}",
    b"[[]]",
    b"[{}]",
    b"{\"a\":{}}",
    b"[1,2]",
    b"[\"a\",\"b\"]",
    b"\\u0000",
    b"\\ud800",
    b"<|im_end|>",
    b"\xff",
    b"\"stream\":true,",
    b"\"n\":129,",
    b"\"n\":128,",
    b"\"logprobs\":20,",
    b"\"prompt_logprobs\":5,",
    b"\"echo\":true,",
    b"\"max_tokens\":0,",
    b"\"max_tokens\":1,",
    b"\"stop\":[\"\"],",
    b"\"guided_regex\":\"(a|b\",",
    b"\"guided_grammar\":\"start: start\",",
    b"\"guided_choice\":[],",
    b"\"guided_json\":{\"type\":\"nothing\"},",
    b"\"response_format\":{\"type\":\"json_object\"},",
    b"\"tools\":[],",
    b"\"tool_choice\":\"required\",",
    b"\"model\":\"\",",
    b"\"model\":\"script\",",
    b"\"ignore_eos\":true,",
    b"\"allowed_token_ids\":[300],",
    b"\"bad_words\":[\"a\"],",
    b"\"mirostat\":2,",
    b"\"priority\":-128,",
    b"\"continue_final_message\":true,",
    b"\"add_generation_prompt\":false,",
    b"\"role\":\"tool\",",
    b"\"type\":\"image\",",
    b"\"suffix\":\"x\",",
    b"\"background\":true,",
    b"\"type\":\"item_reference\",",
    b"\"best_of\":2,",
    b"\"cache_salt\":\"x\",",
    b"\"webhook\":\"http://127.0.0.1/\",",
    b"\"shared_prefix\":\"x\",",
    b"\"items\":[],",
    b"--B--",
    b"\r\n",
];

/// Values that do not belong where they come.
fn strange() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1),
        json!(20),
        json!(128),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(0.5),
        json!(1e308),
        json!(""),
        json!("a"),
        json!("script"),
        json!("\u{0}<|im_end|>\u{fdd0}"),
        json!("x".repeat(5000)),
        json!([]),
        json!({}),
        json!([[]]),
        json!([1, 2]),
        json!(["a", "b"]),
        json!([{"role": "assistant", "content": "{\"a\":"}]),
        json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]),
        json!({"type": "json_object"}),
        json!({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}),
        json!({"type": "object", "properties": {"a": {"type": "integer"}}}),
        json!({"type": "function", "function": {"name": "look"}}),
        json!("required"),
        json!("auto"),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_bodies_are_answered_and_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup {
        context: 512,
        ..Setup::skilled("{\"a\":5} and <tool_call>{\"name\":\"look\",\"arguments\":{}}")
    };
    let world = World::ready(keeping(folder.path(), setup)).await;
    let seeds = mutate::seeds("body");
    let address = world.address;
    tokio::task::spawn_blocking(move || {
        let mut caller = body::Caller::new(address);
        let mut refused = Vec::new();
        for seed in &seeds {
            if !caller.body(seed) {
                refused.push(String::from_utf8_lossy(&seed[..seed.len().min(40)]).into_owned());
            }
        }
        // What they name is not there: a file, a running job. An embedding is asked of what embeds nothing as it does.
        println!("refused as they are: {refused:?}");
        assert!(refused.len() * 4 < seeds.len(), "seeds are what servers take: {refused:?}");
        let strange = strange();
        mutate::cases("bodies", 3000, |mut random| {
            // Most stay JSON: a server that reads none of them is asked nothing.
            if random.below(4) == 0 {
                return caller.body(&mutate::changed(&mut random, &seeds, WORDS));
            }
            let seed: &Vec<u8> = random.of(&seeds);
            let seed = String::from_utf8_lossy(seed);
            let (path, body) = seed.split_once('\n').expect("a route and a body");
            let Ok(mut body) = serde_json::from_str(body) else { return caller.body(seed.as_bytes()) };
            for _ in 0..=random.below(3) {
                alter::alter(&mut body, &mut random, &strange);
            }
            caller.body(format!("{path}\n{body}").as_bytes())
        });
    })
    .await
    .unwrap();
    // Jobs that were let in end by themselves.
    world
        .until("/health", |health| {
            let health = health.json();
            health["running"] == 0 && health["waiting"] == 0 && health["kv"]["pages_used"] == 0
        })
        .await;
    assert_eq!(get(world.address, "/health").await.json()["status"], json!("ready"));
    world.stopped().await.unwrap();
}
