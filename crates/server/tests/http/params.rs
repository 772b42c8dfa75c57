//! Every parameter that is accepted reaches what it is meant for.

use std::collections::BTreeSet;

use fornax_compute::{Mirostat, Sampling};
use serde_json::{Value, json};

use crate::{
    client::{get, post},
    world::{Setup, World, in_time},
};

/// A completion of "a" with more fields.
async fn complete(world: &World, more: &Value) -> Value {
    let mut body = json!({"prompt": "a"});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    let response = post(world.address, "/v1/completions", &body).await;
    assert_eq!(response.status, 200, "{more}: {}", response.body);
    response.json()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_sampling_parameter_arrives_as_itself_and_changes_nothing_else() {
    let world = World::ready(Setup::default()).await;
    complete(&world, &json!({})).await;
    let plain = world.asked.lock().unwrap().clone().unwrap().sampling;
    let mut known = BTreeSet::new();
    let mut check = async |more: Value, set: &dyn Fn(&mut Sampling)| {
        complete(&world, &more).await;
        let asked = world.asked.lock().unwrap().clone().unwrap().sampling;
        let mut wanted = plain.clone();
        set(&mut wanted);
        assert_ne!(wanted, plain, "{more} asks for nothing");
        assert_eq!(asked, wanted, "{more}");
        known.extend(more.as_object().unwrap().keys().cloned());
    };
    check(json!({"temperature": 0.5}), &|s| s.temperature = 0.5).await;
    check(json!({"dynatemp_range": 0.25}), &|s| s.dynatemp_range = 0.25).await;
    check(json!({"dynatemp_exponent": 2}), &|s| s.dynatemp_exponent = 2.0).await;
    check(json!({"top_k": 7}), &|s| s.top_k = 7).await;
    check(json!({"top_p": 0.5}), &|s| s.top_p = 0.5).await;
    check(json!({"min_p": 0.5}), &|s| s.min_p = 0.5).await;
    check(json!({"typical_p": 0.5}), &|s| s.typical_p = 0.5).await;
    check(json!({"top_n_sigma": 1.5}), &|s| s.top_n_sigma = 1.5).await;
    check(json!({"xtc_probability": 0.5}), &|s| s.xtc_probability = 0.5).await;
    check(json!({"xtc_threshold": 0.25}), &|s| s.xtc_threshold = 0.25).await;
    check(json!({"dry_multiplier": 0.5, "dry_sequence_breakers": ["x"]}), &|s| {
        s.dry_multiplier = 0.5;
        s.dry_sequence_breakers = vec![vec![u32::from(b'x')]];
    })
    .await;
    check(json!({"dry_base": 2.5}), &|s| s.dry_base = 2.5).await;
    check(json!({"dry_allowed_length": 5}), &|s| s.dry_allowed_length = 5).await;
    check(json!({"dry_penalty_last_n": 9}), &|s| s.dry_penalty_last_n = Some(9)).await;
    check(json!({"mirostat": 1}), &|s| s.mirostat = Mirostat::V1).await;
    check(json!({"mirostat": 2}), &|s| s.mirostat = Mirostat::V2).await;
    check(json!({"mirostat_tau": 3}), &|s| s.mirostat_tau = 3.0).await;
    check(json!({"mirostat_eta": 0.5}), &|s| s.mirostat_eta = 0.5).await;
    check(json!({"repetition_penalty": 1.5}), &|s| s.repetition_penalty = 1.5).await;
    check(json!({"repeat_penalty": 1.5}), &|s| s.repetition_penalty = 1.5).await;
    check(json!({"repeat_last_n": 12}), &|s| s.repeat_last_n = Some(12)).await;
    check(json!({"presence_penalty": 0.5}), &|s| s.presence_penalty = 0.5).await;
    check(json!({"frequency_penalty": -0.5}), &|s| s.frequency_penalty = -0.5).await;
    check(json!({"logit_bias": {"5": -100}}), &|s| s.logit_bias = vec![(5, -100.0)]).await;
    check(json!({"bad_words": ["no"]}), &|s| {
        s.bad_words = [&b"no"[..], b" no"].map(|word| word.iter().map(|&b| u32::from(b)).collect()).to_vec();
    })
    .await;
    check(json!({"allowed_token_ids": [97, 98]}), &|s| s.allowed_token_ids = Some(vec![97, 98])).await;
    check(json!({"min_tokens": 3}), &|s| s.min_tokens = 3).await;
    check(json!({"ignore_eos": true}), &|s| s.end_tokens = Vec::new()).await;
    check(json!({"logprobs": 2}), &|s| s.top_logprobs = Some(2)).await;

    // Whoever adds a parameter adds it here or says where else it is shown.
    let elsewhere = [
        "n",
        "seed",
        "stop",
        "guided_regex",
        "guided_grammar",
        "guided_choice",
        "guided_json",
        "grammar",
        "json_schema",
        "structured_outputs",
        "prompt_logprobs",
        "priority",
        "cache_salt",
        "cache_prompt",
    ];
    known.extend(elsewhere.map(str::to_owned));
    let document = get(world.address, "/openapi.json").await.json();
    for name in document["components"]["schemas"]["Params"]["properties"].as_object().unwrap().keys() {
        assert!(known.contains(name), "{name} is accepted, and nothing shows that it is honoured");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seeds_forms_and_salts_are_honoured() {
    let world = World::ready(Setup::default()).await;
    let text = |answer: &Value| answer["choices"][0]["text"].as_str().unwrap().to_owned();
    for seed in [0, 7, -1] {
        complete(&world, &json!({"seed": seed})).await;
        assert_eq!(world.asked.lock().unwrap().as_ref().unwrap().seed, i64::cast_unsigned(seed));
    }
    let number = text(&complete(&world, &json!({"guided_regex": "[0-9]{3}"})).await);
    assert!(number.len() == 3 && number.bytes().all(|byte| byte.is_ascii_digit()), "{number}");
    let sentence = complete(&world, &json!({"guided_grammar": "start: \"ab\" | \"cd\""})).await;
    assert!(["ab", "cd"].contains(&text(&sentence).as_str()), "{sentence}");
    let choice = complete(&world, &json!({"guided_choice": ["yes", "no"]})).await;
    assert!(["yes", "no"].contains(&text(&choice).as_str()), "{choice}");
    let object =
        complete(&world, &json!({"response_format": {"type": "json_object"}, "max_tokens": 200})).await;
    if object["choices"][0]["finish_reason"] == "stop" {
        assert!(serde_json::from_str::<Value>(&text(&object)).unwrap().is_object(), "{object}");
    }

    let cached = async |salt: &str| {
        let answer = complete(&world, &json!({"prompt": "b".repeat(200), "cache_salt": salt})).await;
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached("mine").await, 0);
    assert!(cached("mine").await > 100);
    assert_eq!(cached("yours").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_smaller_priority_is_sooner() {
    let (world, gate) = World::gated(Setup { slots: 1, ..Setup::saying("many words") }).await;
    let waiting = async |count: u64| world.until("/health", |health| health.json()["waiting"] == count).await;
    let (first, late, early) = (json!({}), json!({"priority": 5}), json!({"priority": -5}));
    let ask = |more| Box::pin(complete(&world, more));
    let mut first = ask(&first);
    let mut late = ask(&late);
    let mut early = ask(&early);
    // Each is under way before the next is sent: the order of arrival is known.
    tokio::select! { biased; _ = &mut first => unreachable!(), () = world.until_stepping() => {} }
    tokio::select! { biased; _ = &mut late => unreachable!(), () = waiting(1) => {} }
    tokio::select! { biased; _ = &mut early => unreachable!(), () = waiting(2) => {} }
    let step = async {
        loop {
            gate.send(()).unwrap();
            // A step, and then time enough for its tokens to arrive.
            get(world.address, "/health").await;
        }
    };
    let came_first = async {
        tokio::select! { _ = late => "late", _ = early => "early", () = step => unreachable!() }
    };
    let came_first = in_time(came_first).await;
    assert_eq!(came_first, "early");
}
