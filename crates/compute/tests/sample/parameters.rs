//! What is refused, by name, with its value and the rule.

use fornax_compute::{Error, Given, Mirostat, SampleFault, SampleRow, Sampling, TOP_LOGPROBS_MAX};

use crate::{once, row};

/// Refused under this name, and never a panic.
fn refused(bad: Sampling, wanted: &str) {
    match bad.check(8) {
        Err(Error::SampleParameter { name, .. }) => assert_eq!(name, wanted),
        other => panic!("{bad:?}: {other:?}"),
    }
    assert_eq!(once(&[1.0; 8], &row(8, &bad)).fault, Some(SampleFault::Parameters));
}

fn plain() -> Sampling {
    Sampling::default()
}

#[test]
fn numbers_out_of_range_are_refused_by_name() {
    for value in [f32::NAN, -0.5, f32::INFINITY, f32::NEG_INFINITY] {
        refused(Sampling { temperature: value, ..plain() }, "temperature");
        refused(Sampling { dynatemp_range: value, ..plain() }, "dynatemp_range");
        refused(Sampling { dynatemp_exponent: value, ..plain() }, "dynatemp_exponent");
        refused(Sampling { top_p: value, ..plain() }, "top_p");
        refused(Sampling { min_p: value, ..plain() }, "min_p");
        refused(Sampling { typical_p: value, ..plain() }, "typical_p");
        refused(Sampling { top_n_sigma: value, ..plain() }, "top_n_sigma");
        refused(Sampling { xtc_probability: value, ..plain() }, "xtc_probability");
        refused(Sampling { xtc_threshold: value, ..plain() }, "xtc_threshold");
        refused(Sampling { dry_multiplier: value, ..plain() }, "dry_multiplier");
        refused(Sampling { dry_base: value, ..plain() }, "dry_base");
        refused(Sampling { mirostat_tau: value, ..plain() }, "mirostat_tau");
        refused(Sampling { mirostat_eta: value, ..plain() }, "mirostat_eta");
        refused(Sampling { repetition_penalty: value, ..plain() }, "repetition_penalty");
    }
    for value in [f32::NAN, f32::INFINITY] {
        refused(Sampling { presence_penalty: value, ..plain() }, "presence_penalty");
        refused(Sampling { frequency_penalty: value, ..plain() }, "frequency_penalty");
        refused(Sampling { logit_bias: vec![(0, value)], ..plain() }, "logit_bias");
    }
    refused(Sampling { top_p: 1.01, ..plain() }, "top_p");
    refused(Sampling { typical_p: 1.01, ..plain() }, "typical_p");
    refused(Sampling { repetition_penalty: 0.0, ..plain() }, "repetition_penalty");
    refused(Sampling { dry_base: 0.99, ..plain() }, "dry_base");
    refused(Sampling { dry_allowed_length: 0, ..plain() }, "dry_allowed_length");
    refused(Sampling { top_logprobs: Some(TOP_LOGPROBS_MAX + 1), ..plain() }, "top_logprobs");
}

#[test]
fn tokens_that_do_not_exist_are_refused_by_name() {
    refused(Sampling { logit_bias: vec![(8, 1.0)], ..plain() }, "logit_bias");
    refused(Sampling { bad_words: vec![vec![0], vec![1, 8]], ..plain() }, "bad_words");
    refused(Sampling { bad_words: vec![vec![]], ..plain() }, "bad_words");
    refused(Sampling { dry_sequence_breakers: vec![vec![9]], ..plain() }, "dry_sequence_breakers");
    refused(Sampling { dry_sequence_breakers: vec![vec![]], ..plain() }, "dry_sequence_breakers");
    refused(Sampling { allowed_token_ids: Some(vec![0, 8]), ..plain() }, "allowed_token_ids");
    refused(Sampling { allowed_token_ids: Some(vec![]), ..plain() }, "allowed_token_ids");
}

#[test]
fn what_would_be_ignored_is_refused() {
    let greedy = Sampling::greedy;
    refused(Sampling { mirostat: Mirostat::V2, ..greedy() }, "mirostat");
    refused(Sampling { typical_p: 0.9, ..greedy() }, "typical_p");
    refused(Sampling { xtc_probability: 0.1, ..greedy() }, "xtc_probability");
    refused(Sampling { dynatemp_range: 0.1, ..greedy() }, "dynatemp_range");
    for mirostat in [Mirostat::V1, Mirostat::V2] {
        let on = || Sampling { mirostat, ..plain() };
        refused(Sampling { top_k: 40, ..on() }, "top_k");
        refused(Sampling { top_p: 0.9, ..on() }, "top_p");
        refused(Sampling { min_p: 0.1, ..on() }, "min_p");
        refused(Sampling { typical_p: 0.9, ..on() }, "typical_p");
        refused(Sampling { top_n_sigma: 1.0, ..on() }, "top_n_sigma");
        refused(Sampling { xtc_probability: 0.1, ..on() }, "xtc_probability");
        refused(Sampling { dynatemp_range: 0.1, ..on() }, "dynatemp_range");
    }
}

#[test]
fn a_refusal_names_the_value_and_the_rule() {
    let error = |sampling: Sampling| sampling.check(8).unwrap_err().to_string();
    assert_eq!(error(Sampling { top_p: 1.5, ..plain() }), "top_p is 1.5, must be between 0 and 1");
    assert_eq!(
        error(Sampling { logit_bias: vec![(70_000_001, 1.0)], ..plain() }),
        "logit_bias is 70000001, must be a token of the vocabulary"
    );
    assert_eq!(
        error(Sampling { mirostat: Mirostat::V1, ..Sampling::greedy() }),
        "mirostat is 1, must be off where the temperature is 0, which is greedy"
    );
    let limit = error(Sampling { top_logprobs: Some(4000), ..plain() });
    assert_eq!(limit, format!("top_logprobs is 4000, must be at most {TOP_LOGPROBS_MAX}"));
}

#[test]
fn a_row_whose_state_means_nothing_is_refused() {
    let sampling = Sampling { mirostat: Mirostat::V2, ..plain() };
    let bad_mu = SampleRow { mirostat_mu: f32::NAN, ..row(8, &sampling) };
    assert!(matches!(bad_mu.check(), Err(Error::SampleParameter { name: "mirostat_mu", .. })));
    let (neutral, history) = (plain(), [1, 2]);
    for (token, top) in [(8, 0), (0, 129)] {
        let given = SampleRow { given: Some(Given { token, top }), ..row(8, &neutral) };
        assert!(given.check().is_err(), "{given:?}");
    }
    let too_many = SampleRow { history: &history, generated: 3, ..row(8, &neutral) };
    assert!(matches!(too_many.check(), Err(Error::SampleParameter { name: "generated", .. })));
    for bad in [bad_mu, too_many] {
        assert_eq!(once(&[1.0; 8], &bad).fault, Some(SampleFault::Parameters));
    }
    assert!(row(8, &neutral).check().is_ok());
}

#[test]
fn rare_and_looking_back_are_told_apart() {
    let common = Sampling {
        temperature: 0.7,
        top_k: 40,
        top_p: 0.9,
        min_p: 0.1,
        top_n_sigma: 1.0,
        logit_bias: vec![(1, 1.0)],
        bad_words: vec![vec![2]],
        min_tokens: 3,
        ..plain()
    };
    assert!(!common.is_rare() && !common.needs_history());
    for looking in [
        Sampling { repetition_penalty: 1.1, ..plain() },
        Sampling { presence_penalty: -1.0, ..plain() },
        Sampling { frequency_penalty: 0.1, ..plain() },
        Sampling { bad_words: vec![vec![1, 2]], ..plain() },
    ] {
        assert!(looking.needs_history() && !looking.is_rare(), "{looking:?}");
    }
    for rare in [
        Sampling { typical_p: 0.9, ..plain() },
        Sampling { xtc_probability: 0.1, ..plain() },
        Sampling { dry_multiplier: 0.8, ..plain() },
        Sampling { dynatemp_range: 0.1, ..plain() },
        Sampling { mirostat: Mirostat::V1, ..plain() },
    ] {
        assert!(rare.is_rare(), "{rare:?}");
    }
}
