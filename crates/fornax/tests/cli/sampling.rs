//! Sampling flags reach the sampler, and forms hold, through the command line. What each sampler computes is tested
//! against an independent implementation where samplers are.

use serde_json::Value;

use crate::tiny::{fixtures, tokens};
use crate::{fornax, model};

/// What the tiny model generates from its own tokens with these flags.
fn generate(flags: &[&str]) -> Value {
    let (ids, _) = tokens("llama");
    let path = fixtures().join("llama");
    let args = ["generate", path.to_str().unwrap(), "--tokens", &ids, "--max-tokens", "20", "--json"];
    fornax(args.iter().chain(flags)).json()
}

#[test]
fn truncations_to_one_token_are_greedy() {
    let greedy = generate(&[])["tokens"].clone();
    for flags in [
        ["--top-k", "1"],
        ["--top-p", "0.000001"],
        ["--min-p", "1"],
        ["--top-n-sigma", "0.000001"],
        ["--typical-p", "0.000001"],
    ] {
        let hot = generate(&["--temperature", "1.5", "--seed", "7"]);
        assert_ne!(hot["tokens"], greedy);
        let cut = generate(&[&["--temperature", "1.5", "--seed", "7"], &flags[..]].concat());
        // The most typical token need not be the most likely; what is left is one token all the same.
        let again = generate(&[&["--temperature", "1.5", "--seed", "8"], &flags[..]].concat());
        assert_eq!(cut["tokens"], again["tokens"], "{flags:?}");
        if flags[0] != "--typical-p" {
            assert_eq!(cut["tokens"], greedy, "{flags:?}");
        }
    }
}

#[test]
fn every_flag_changes_what_is_chosen() {
    let hot = ["--temperature", "1.2", "--seed", "7"];
    let base = generate(&hot)["tokens"].clone();
    let greedy = generate(&[])["tokens"].clone();
    let first = greedy[0].to_string();
    let (bias, allowed) = (format!("{first}=-100"), "5,6,7,8");
    let check = |start: &Value, flags: &[&str]| {
        assert_ne!(&generate(flags)["tokens"], start, "{flags:?} changed nothing");
    };
    let check_hot = |flags: &[&str]| check(&base, &[&hot[..], flags].concat());
    check_hot(&["--dynatemp-range", "1.1"]);
    check_hot(&["--dynatemp-range", "1.1", "--dynatemp-exponent", "4"]);
    check_hot(&["--xtc-probability", "1", "--xtc-threshold", "0.001"]);
    check_hot(&["--mirostat", "1", "--mirostat-tau", "1"]);
    check_hot(&["--mirostat", "2", "--mirostat-tau", "1", "--mirostat-eta", "0.5"]);
    check(&greedy, &["--repeat-penalty", "5"]);
    check(&greedy, &["--presence-penalty", "20"]);
    check(&greedy, &["--frequency-penalty", "20"]);
    check(&greedy, &["--logit-bias", &bias]);
    check(&greedy, &["--banned-tokens", &first]);
    check(&greedy, &["--allowed-tokens", allowed]);
    for token in generate(&["--allowed-tokens", allowed])["tokens"].as_array().unwrap() {
        assert!((5..=8).contains(&token.as_u64().unwrap()), "{token}");
    }
    // A window of one token sees only the last: less is penalised than over all.
    let windowed = generate(&["--repeat-penalty", "5", "--repeat-last-n", "1"]);
    check(&windowed["tokens"], &["--repeat-penalty", "5"]);
}

#[test]
fn dry_breaks_a_loop_and_its_breakers_and_window_keep_it() {
    let Some(path) = model("smollm2", "dry_breaks_a_loop_and_its_breakers_and_window_keep_it") else {
        return;
    };
    // "The sky is The sky", and then " is" is far more likely than the only other token allowed.
    let next = |flags: &[&str]| {
        let args = ["generate", &path, "--tokens", "504,6376,314,504,6376", "--max-tokens", "1", "--json"];
        let two = ["--allowed-tokens", "314,504", "--logit-bias", "314=50"];
        fornax(args.iter().chain(&two).chain(flags)).json()["tokens"][0].as_u64().unwrap()
    };
    assert_eq!(next(&[]), 314);
    assert_eq!(next(&["--dry-multiplier", "100"]), 504);
    assert_eq!(next(&["--dry-multiplier", "1", "--dry-base", "100"]), 314);
    assert_eq!(next(&["--dry-multiplier", "1", "--dry-base", "100", "--dry-allowed-length", "1"]), 504);
    for weaker in
        [["--dry-penalty-last-n", "1"], ["--dry-allowed-length", "3"], ["--dry-sequence-breaker", " sky"]]
    {
        assert_eq!(next(&[&["--dry-multiplier", "100"], &weaker[..]].concat()), 314, "{weaker:?}");
    }
}

#[test]
fn words_can_be_forbidden_and_the_end_put_off() {
    let Some(path) = model("smollm2", "words_can_be_forbidden_and_the_end_put_off") else { return };
    let prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";
    let answer = |flags: &[&str]| {
        let args = ["generate", &path, "--special", "--prompt", prompt, "--max-tokens", "16", "--json"];
        fornax(args.iter().chain(flags)).json()
    };
    let plain = answer(&[]);
    assert!(plain["text"].as_str().unwrap().contains("Paris"), "{plain}");
    assert_eq!(plain["finish_reason"], "stop");
    let without = answer(&["--bad-word", "Paris"]);
    assert!(!without["text"].as_str().unwrap().contains("Paris"), "{without}");
    let long = answer(&["--min-tokens", "16"]);
    assert_eq!(long["tokens"].as_array().unwrap().len(), 16);
    assert!(!long["tokens"].as_array().unwrap()[..15].contains(&2.into()), "{long}");
}

#[test]
fn logprobs_are_those_of_the_logits() {
    let (ids, _) = tokens("llama");
    let path = fixtures().join("llama");
    let top = fornax(["logits", path.to_str().unwrap(), "--tokens", &ids, "--top", "3", "--json"]).json();
    let answer = generate(&["--top-logprobs", "3", "--temperature", "0.5", "--seed", "1"]);
    let logprobs = answer["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), answer["tokens"].as_array().unwrap().len());
    assert_eq!(logprobs[0]["token"], answer["tokens"][0]);
    for (got, wanted) in logprobs[0]["top"].as_array().unwrap().iter().zip(top["top"].as_array().unwrap()) {
        assert_eq!(got["token"], wanted["token"]);
        let difference = got["logprob"].as_f64().unwrap() - wanted["logprob"].as_f64().unwrap();
        assert!(difference.abs() < 1e-4, "{got} {wanted}");
    }
    let alone = generate(&["--logprobs"]);
    assert!(alone["logprobs"][0]["logprob"].as_f64().unwrap() <= 0.0);
    assert!(alone["logprobs"][0].get("top").is_none());
    assert!(generate(&[]).get("logprobs").is_none());
    let prompt = generate(&["--prompt-logprobs"])["prompt_logprobs"].clone();
    assert_eq!(prompt.as_array().unwrap().len(), ids.split(',').count() - 1);
    assert_eq!(prompt[0]["token"].to_string(), ids.split(',').nth(1).unwrap());
    assert_eq!(
        generate(&["--prompt-logprobs", "2"])["prompt_logprobs"][0]["top"].as_array().unwrap().len(),
        2
    );
}

#[test]
fn several_answers_come_as_choices() {
    let hot = ["--temperature", "1.5", "--seed", "7"];
    let several = generate(&[&hot[..], &["--n", "3", "--parallel", "2"]].concat());
    let choices = several["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    assert_eq!(choices[0]["tokens"], generate(&hot)["tokens"]);
    assert_ne!(choices[0]["tokens"], choices[1]["tokens"]);
    assert_eq!(several["usage"]["completion_tokens"], 60);
    assert!(several.get("text").is_none() && several.get("seed").is_none(), "{several}");
    let seed = choices[2]["seed"].to_string();
    let again = generate(&["--temperature", "1.5", "--seed", &seed]);
    assert_eq!(again["tokens"], choices[2]["tokens"]);
}

#[test]
fn every_form_is_kept() {
    let Some(path) = model("smollm2", "every_form_is_kept") else { return };
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let file = folder.path().join(name);
        std::fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let schema = write(
        "schema.json",
        r#"{"type": "object", "properties": {"city": {"enum": ["Paris", "Rome", "Île"]},
            "people": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["city", "people"], "additionalProperties": false}"#,
    );
    let lark = write("form.lark", "start: \"a\" /[0-9]{2}/ (\"-\" /[x-z]/)+ \".\"");
    let answer = |flags: &[&str], temperature: &str| {
        let args = ["generate", &path, "--prompt", "The answer: ", "--max-tokens", "64", "--json"];
        let hot = ["--temperature", temperature, "--seed", "5"];
        let answer = fornax(args.iter().chain(&hot).chain(flags)).json();
        assert_eq!(answer["finish_reason"], "stop", "{answer}");
        answer["text"].as_str().unwrap().to_owned()
    };
    for temperature in ["0", "1"] {
        let text = answer(&["--schema", &schema], temperature);
        let object: Value = serde_json::from_str(&text).unwrap();
        assert!(["Paris", "Rome", "Île"].contains(&object["city"].as_str().unwrap()), "{text}");
        assert!(object["people"].as_u64().unwrap() <= 99, "{text}");
        assert_eq!(object.to_string(), text, "compact");
        let text = answer(&["--regex", "[0-9]{3}-[A-C]+x"], temperature);
        assert!(text.len() > 5 && text.as_bytes()[3] == b'-' && text.ends_with('x'), "{text}");
        assert!(["yes", "no"].contains(&&*answer(&["--choice", "yes", "--choice", "no"], temperature)));
        let text = answer(&["--grammar", &lark], temperature);
        assert!(text.starts_with('a') && text.ends_with('.') && text.len() >= 6, "{text}");
    }
    let text = answer(&["--json-object", "--bad-word", "\\"], "0");
    assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
}
