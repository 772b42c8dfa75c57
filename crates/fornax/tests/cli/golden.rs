//! Real models against an independent implementation: transformers in float32 on the dequantised weights.
//!
//! The data says how to compare: tokens are equal; log-probabilities are within 0.02 with float activations, and
//! within 0.3 for tokens above -4 with int8 ones; greedy tokens are equal up to the first step whose margin is below
//! 0.05 (float) or 0.3 (int8), after which another continuation proves nothing. Every position is compared where models
//! are tested; here it is seen that the command line computes the same.

use serde::Deserialize;

use crate::{fornax, model};

#[derive(Deserialize)]
struct Case {
    name: String,
    prompt: serde_json::Value,
    prompt_tokens: Vec<u32>,
    top10: Vec<(u32, f64)>,
    greedy_tokens: Vec<u32>,
    greedy_margins: Vec<f64>,
    greedy_text: Option<String>,
}

impl Case {
    /// The prompt where it is a text.
    fn text(&self) -> Option<&str> {
        self.prompt.as_str()
    }

    fn ids(&self) -> String {
        self.prompt_tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
    }
}

fn smollm2() -> Vec<Case> {
    serde_json::from_str(include_str!("../../../../tests/golden/smollm2-q4_1.json")).unwrap()
}

fn qwen() -> Vec<Case> {
    #[derive(Deserialize)]
    struct File {
        cases: Vec<Case>,
    }
    serde_json::from_str::<File>(include_str!("../../../../tests/golden/qwen2.5-coder-0.5b-q4_k_m.json"))
        .unwrap()
        .cases
}

/// The bounds of one activation mode.
#[derive(Clone, Copy)]
struct Mode {
    activations: &'static str,
    logprob: f64,
    /// Less likely tokens are not compared.
    floor: f64,
    /// A smaller margin between the first two tokens decides nothing.
    margin: f64,
}

const FLOAT: Mode = Mode { activations: "float", logprob: 0.02, floor: f64::NEG_INFINITY, margin: 0.05 };
const INT8: Mode = Mode { activations: "int8", logprob: 0.3, floor: -4.0, margin: 0.3 };

fn check_tokens(path: &str, cases: &[Case]) {
    for case in cases {
        let Some(text) = case.text() else { continue };
        let tokens = fornax(["tokenize", path, "--special", "--json", "--text", text]).json();
        let ids: Vec<u32> = tokens["tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| token["id"].as_u64().unwrap() as u32)
            .collect();
        assert_eq!(ids, case.prompt_tokens, "{}", case.name);
    }
}

fn check_logits(path: &str, cases: &[Case], mode: Mode) {
    for case in cases {
        let ids = case.ids();
        // More than ten: the last of the reference's ten may lose their places to others that are as likely.
        let args =
            ["logits", path, "--json", "--top", "20", "--activations", mode.activations, "--tokens", &ids];
        let top = fornax(args).json();
        let top = top["top"].as_array().unwrap();
        assert_eq!(top.len(), 20);
        for &(token, wanted) in case.top10.iter().filter(|(_, wanted)| *wanted > mode.floor) {
            let entry = top.iter().find(|entry| entry["token"] == token);
            let got = entry.unwrap_or_else(|| panic!("{}: {token} is not there", case.name))["logprob"]
                .as_f64()
                .unwrap();
            assert!((got - wanted).abs() <= mode.logprob, "{}: {token}: {got}, wanted {wanted}", case.name);
        }
    }
}

fn check_greedy(path: &str, cases: &[Case], mode: Mode) {
    for case in cases {
        let count = case.greedy_tokens.len().to_string();
        let mut args = vec!["generate", path, "--json", "--ignore-eos", "--max-tokens", &count];
        args.extend(["--temperature", "0", "--activations", mode.activations]);
        let ids = case.ids();
        match case.text() {
            Some(text) => args.extend(["--special", "--prompt", text]),
            None => args.extend(["--tokens", &ids]),
        }
        let answer = fornax(args).json();
        let tokens: Vec<u32> =
            answer["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(tokens.len(), case.greedy_tokens.len(), "{}", case.name);
        let sure = case.greedy_margins.iter().take_while(|margin| **margin >= mode.margin).count();
        assert_eq!(tokens[..sure], case.greedy_tokens[..sure], "{}", case.name);
        assert_eq!(answer["usage"]["prompt_tokens"], case.prompt_tokens.len(), "{}", case.name);
        if let Some(text) = &case.greedy_text
            && tokens == case.greedy_tokens
        {
            // The reference spells control tokens, which are never shown.
            assert_eq!(answer["text"].as_str().unwrap(), text.replace("<|im_end|>", ""), "{}", case.name);
        }
    }
}

#[test]
fn smollm2_tokens_are_the_reference_tokens() {
    let Some(path) = model("smollm2", "smollm2_tokens_are_the_reference_tokens") else { return };
    check_tokens(&path, &smollm2());
}

#[test]
fn smollm2_logits_agree_in_float() {
    let Some(path) = model("smollm2", "smollm2_logits_agree_in_float") else { return };
    check_logits(&path, &smollm2(), FLOAT);
}

#[test]
fn smollm2_logits_agree_in_int8() {
    let Some(path) = model("smollm2", "smollm2_logits_agree_in_int8") else { return };
    check_logits(&path, &smollm2(), INT8);
}

#[test]
fn smollm2_greedy_tokens_agree_in_float() {
    let Some(path) = model("smollm2", "smollm2_greedy_tokens_agree_in_float") else { return };
    check_greedy(&path, &smollm2(), FLOAT);
}

#[test]
fn smollm2_greedy_tokens_agree_in_int8() {
    let Some(path) = model("smollm2", "smollm2_greedy_tokens_agree_in_int8") else { return };
    check_greedy(&path, &smollm2(), INT8);
}

#[test]
fn qwen_tokens_and_greedy_choices_agree() {
    let Some(path) = model("qwen2.5-coder-0.5b", "qwen_tokens_and_greedy_choices_agree") else { return };
    check_tokens(&path, &qwen());
    check_greedy(&path, &qwen(), INT8);
}
