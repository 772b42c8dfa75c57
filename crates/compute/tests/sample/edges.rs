//! Ties, padding, masks, windows, breakers, faults: where samplers go wrong.

use std::collections::BTreeSet;

use fornax_compute::{Mirostat, SampleFault, SampleRow, SampleScratch, Sampling, sample, uniform};

use crate::{drawn, once, row};

const GREEDY: Sampling = Sampling::greedy();

fn hot(temperature: f32) -> Sampling {
    Sampling { temperature, ..Sampling::default() }
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    assert_eq!(once(&[1.0, 3.0, 2.0, 3.0, 3.0, -1.0], &row(6, &GREEDY)).token, 1);
    assert_eq!(once(&[-0.0, 0.0, -1.0, 0.0, -0.0, -2.0], &row(6, &GREEDY)).token, 0);
}

#[test]
fn padding_rows_never_win() {
    let mut logits = vec![0.0; 100];
    logits[90..].fill(1e30);
    logits[95] = f32::NAN;
    for temperature in [0.0, 1.0] {
        let sampling = Sampling { top_logprobs: Some(100), ..hot(temperature) };
        for position in 0..200 {
            let got = once(&logits, &SampleRow { position, ..row(90, &sampling) });
            assert!(got.fault.is_none() && got.token < 90);
            assert_eq!(got.top.len(), 90);
            let error = got.logprob.unwrap() - (1.0f32 / 90.0).ln();
            assert!(error.abs() < 1e-6, "padding counts for nothing: {got:?}");
        }
    }
}

#[test]
fn masked_tokens_are_never_chosen_and_count_in_the_logprob() {
    let logits = [5.0, 1.0, 4.0, 0.0];
    let mask = [0b1010u32];
    for temperature in [0.0, 1.0, 50.0] {
        let sampling = Sampling { top_logprobs: Some(2), ..hot(temperature) };
        for position in 0..100 {
            let got = once(&logits, &SampleRow { position, mask: Some(&mask), ..row(4, &sampling) });
            assert!(got.token % 2 == 1);
            assert!(got.logprob.unwrap() < -3.9);
            assert_eq!([got.top[0].0, got.top[1].0], [0, 2], "the model's own, masked or not");
        }
    }
    // A mask that ends early allows nothing beyond its end.
    let got = once(&[0.0; 64], &SampleRow { mask: Some(&[1 << 31]), ..row(64, &GREEDY) });
    assert_eq!(got.token, 31);
    // Also where the lists make a mask of their own.
    let banned = Sampling { bad_words: vec![vec![31], vec![63]], ..GREEDY };
    let got = once(&[0.0; 64], &SampleRow { mask: Some(&[1 << 31]), ..row(64, &banned) });
    assert_eq!(got.fault, Some(SampleFault::NothingAllowed));
}

#[test]
fn broken_logits_are_a_fault_whatever_is_allowed() {
    for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = [1.0; 8];
        logits[5] = broken;
        for sampling in [hot(0.0), hot(0.8), Sampling { mirostat: Mirostat::V2, ..hot(1.0) }] {
            for mask in [None, Some(&[0b1111u32][..])] {
                let got = once(&logits, &SampleRow { mask, ..row(8, &sampling) });
                assert_eq!(got.fault, Some(SampleFault::Logits));
            }
        }
    }
    assert_eq!(once(&[1.0; 8], &row(9, &GREEDY)).fault, Some(SampleFault::Logits));
}

#[test]
fn where_nothing_is_allowed_no_token_is_chosen() {
    let nothing = |sampling: Sampling, mask: Option<&[u32]>| {
        for temperature in [0.0, 0.8] {
            let sampling = Sampling { temperature, ..sampling.clone() };
            let row = SampleRow { history: &[1], generated: 1, mask, ..row(4, &sampling) };
            assert_eq!(once(&[1.0, 2.0, 3.0, 4.0], &row).fault, Some(SampleFault::NothingAllowed), "{row:?}");
        }
    };
    let all_banned = Sampling { bad_words: (0..4).map(|token| vec![token]).collect(), ..GREEDY };
    nothing(GREEDY, Some(&[0xFF00]));
    nothing(GREEDY, Some(&[]));
    nothing(all_banned, None);
    nothing(Sampling { allowed_token_ids: Some(vec![2]), ..GREEDY }, Some(&[0b1011]));
    nothing(Sampling { allowed_token_ids: Some(vec![2]), bad_words: vec![vec![1, 2]], ..GREEDY }, None);
    // Only the end is allowed, and it may not be the end yet.
    let unfinished = Sampling { min_tokens: 2, end_tokens: vec![3], ..GREEDY };
    nothing(Sampling { allowed_token_ids: Some(vec![3]), ..unfinished.clone() }, None);
    nothing(unfinished, Some(&[0b1000]));
    assert!(once(&[], &row(0, &GREEDY)).fault.is_some());
}

#[test]
fn end_tokens_wait_for_min_tokens() {
    let sampling = Sampling { min_tokens: 2, end_tokens: vec![1, 3, 900], ..GREEDY };
    let at = |generated| once(&[0.0, 9.0, 1.0, 8.0], &SampleRow { generated, ..row(4, &sampling) }).token;
    assert_eq!([at(0), at(1), at(2), at(3)], [2, 2, 1, 1]);
}

#[test]
fn bad_words_are_never_completed_and_begin_only_in_what_was_generated() {
    let sampling = Sampling { bad_words: vec![vec![0, 1, 2], vec![3]], ..GREEDY };
    let after = |history: &[u32], generated| {
        once(&[0.0, 1.0, 5.0, 9.0], &SampleRow { history, generated, ..row(4, &sampling) }).token
    };
    assert_eq!(after(&[0, 1], 2), 1, "2 would complete it, 3 is banned");
    assert_eq!(after(&[0, 1], 1), 2, "the prompt is not ours to judge");
    assert_eq!(after(&[1], 1), 2);
    assert_eq!(after(&[0, 1, 1], 3), 2);
}

#[test]
fn greedy_obeys_penalties_and_bias() {
    let logits = [5.0, 4.0, 3.0, -1.0];
    let choose = |sampling: Sampling, history: &[u32], generated| {
        once(&logits, &SampleRow { history, generated, ..row(4, &sampling) }).token
    };
    assert_eq!(choose(Sampling { repetition_penalty: 2.0, ..GREEDY }, &[0], 0), 1);
    assert_eq!(choose(Sampling { presence_penalty: 1.5, ..GREEDY }, &[0], 1), 1);
    assert_eq!(choose(Sampling { presence_penalty: 1.5, ..GREEDY }, &[0], 0), 0, "prompts are not sampled");
    assert_eq!(choose(Sampling { frequency_penalty: 0.6, ..GREEDY }, &[0, 0], 2), 1);
    assert_eq!(choose(Sampling { frequency_penalty: 0.6, ..GREEDY }, &[0, 0], 1), 0);
    assert_eq!(choose(Sampling { logit_bias: vec![(3, 7.0)], ..GREEDY }, &[], 0), 3);
    assert_eq!(choose(Sampling { dry_multiplier: 2.0, ..GREEDY }, &[1, 2, 0, 1, 2], 0), 1);
    // A penalty makes the unlikely less likely, never more: a negative logit is multiplied.
    let sampling = Sampling { repetition_penalty: 10.0, ..GREEDY };
    let row = SampleRow { history: &[1], ..row(2, &sampling) };
    assert_eq!(once(&[-2.0, -1.0], &row).token, 0);
}

#[test]
fn windows_reach_exactly_as_far_as_they_say() {
    let logits = [5.0, 4.0];
    let choose = |repeat_last_n, history: &[u32]| {
        let sampling = Sampling { repetition_penalty: 2.0, repeat_last_n, ..GREEDY };
        once(&logits, &SampleRow { history, ..row(2, &sampling) }).token
    };
    let history = [0, 7, 7];
    assert_eq!([0, 1, 2].map(|window| choose(Some(window), &history)), [0; 3]);
    assert_eq!([Some(3), Some(4), Some(u32::MAX), None].map(|window| choose(window, &history)), [1; 4]);
    assert_eq!(choose(None, &[]), 0);
}

#[test]
fn adjustments_never_leave_the_finite_numbers() {
    let logits = [f32::MAX, -f32::MAX, 1.0, 0.0];
    for sampling in [
        Sampling { logit_bias: vec![(0, f32::MAX), (1, -f32::MAX)], ..hot(1.0) },
        Sampling { repetition_penalty: 1e-30, ..hot(1.0) },
        Sampling { repetition_penalty: 1e30, frequency_penalty: f32::MAX, ..hot(1.0) },
        Sampling { dry_multiplier: f32::MAX, dry_base: f32::MAX, dry_allowed_length: 1, ..hot(1.0) },
        Sampling { mirostat: Mirostat::V1, ..hot(1.0) },
        Sampling { mirostat: Mirostat::V2, mirostat_tau: f32::MAX / 2.0, mirostat_eta: f32::MAX, ..hot(1.0) },
        Sampling { top_n_sigma: 1.0, typical_p: 0.5, xtc_probability: 1.0, ..hot(f32::MIN_POSITIVE) },
        Sampling { dynatemp_range: f32::MAX, dynatemp_exponent: f32::MAX, ..hot(1.0) },
    ] {
        let history = [0, 1, 2, 0, 1, 2, 0, 1, 2];
        let row = SampleRow { history: &history, generated: 9, ..row(4, &sampling) };
        let got = once(&logits, &row);
        assert!(got.fault.is_none() && got.token < 4 && got.mu.is_finite(), "{sampling:?}: {got:?}");
    }
}

#[test]
fn a_dynamic_temperature_of_zero_is_greedy() {
    // One token has all probability, so the entropy is 0 and the temperature 1 - 1.
    let sampling = Sampling { dynatemp_range: 1.0, ..hot(1.0) };
    assert_eq!(drawn(&[-1e4, 0.0, 1e4, 0.0], &row(4, &sampling), 50), [2; 50]);
}

#[test]
fn xtc_leaves_the_least_likely_of_the_likely() {
    // 0.4, 0.3, 0.2 and 0.1, as in llama.cpp's tests.
    let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
    let left = |xtc_probability, xtc_threshold| {
        let sampling = Sampling { xtc_probability, xtc_threshold, ..Sampling::default() };
        drawn(&logits, &row(4, &sampling), 400).into_iter().collect::<BTreeSet<u32>>()
    };
    assert_eq!(left(1.0, 0.09), [3].into());
    assert_eq!(left(1.0, 0.19), [2, 3].into());
    assert_eq!(left(1.0, 0.29), [1, 2, 3].into());
    assert_eq!(left(1.0, 0.39), [0, 1, 2, 3].into());
    assert_eq!(left(0.5, 0.09), [0, 1, 2, 3].into());
}

#[test]
fn filters_keep_what_llama_cpp_keeps() {
    let left = |probabilities: [f32; 4], sampling: Sampling| {
        let logits = probabilities.map(f32::ln);
        drawn(&logits, &row(4, &sampling), 400).into_iter().collect::<BTreeSet<u32>>()
    };
    let plain = Sampling::default;
    assert_eq!(left([0.97, 0.01, 0.01, 0.01], Sampling { typical_p: 0.5, ..plain() }), [0].into());
    assert_eq!(left([0.4, 0.2, 0.2, 0.2], Sampling { typical_p: 0.5, ..plain() }), [1, 2, 3].into());
    let rising = [0.1, 0.2, 0.3, 0.4];
    assert_eq!(left(rising, Sampling { top_n_sigma: 1.0, ..plain() }), [2, 3].into());
    assert_eq!(left(rising, Sampling { top_n_sigma: 3.0, ..plain() }), [0, 1, 2, 3].into());
    assert_eq!(left(rising, Sampling { top_p: 0.65, ..plain() }), [2, 3].into());
    assert_eq!(left(rising, Sampling { min_p: 0.26, ..plain() }), [1, 2, 3].into());
    assert_eq!(left(rising, Sampling { min_p: 0.76, ..plain() }), [3].into());
    assert_eq!(left(rising, Sampling { top_k: 3, ..plain() }), [1, 2, 3].into());
}

#[test]
fn top_p_looks_at_the_whole_vocabulary_also_behind_top_k() {
    // Half of all probability lies in the first token; of the first two it has 0.83.
    let logits = [0.5f32, 0.1, 0.1, 0.1, 0.1, 0.1].map(f32::ln);
    let sampling = Sampling { top_k: 2, top_p: 0.55, ..Sampling::default() };
    assert!(drawn(&logits, &row(6, &sampling), 400).contains(&1));
}

#[test]
fn mirostat_brings_the_surprise_to_its_target() {
    let logits: Vec<f32> = (0..2000).map(|rank| -1.1 * (rank as f32 + 1.0).ln()).collect();
    for (mirostat, tau) in [(Mirostat::V1, 3.0), (Mirostat::V2, 2.0), (Mirostat::V2, 4.0)] {
        let sampling = Sampling { mirostat, mirostat_tau: tau, ..Sampling::default() };
        let mut scratch = SampleScratch::default();
        let mut mu = sampling.mirostat_start();
        assert_eq!(mu, 2.0 * tau);
        let (mut sum, mut count) = (0.0, 0.0);
        for position in 0..3000 {
            let row = SampleRow { position, mirostat_mu: mu, ..row(2000, &sampling) };
            let got = sample(&logits, &row, &mut scratch);
            assert_eq!(got, sample(&logits, &row, &mut scratch), "resuming finds the same state");
            if position >= 500 {
                // mu moved by eta times the surprise less the target.
                sum += (mu - got.mu) / sampling.mirostat_eta + tau;
                count += 1.0;
            }
            mu = got.mu;
        }
        let surprise: f32 = sum / count;
        assert!((surprise - tau).abs() < 0.1, "{mirostat:?}: {surprise} bits, wanted {tau}");
    }
}

#[test]
fn a_number_close_to_one_takes_the_last_candidate() {
    // Look for positions whose number lies in the last 1/5000: equal probabilities make it choose among the last ids.
    let (logits, sampling) = (vec![2.5; 5000], Sampling::default());
    let mut seen = 0;
    for position in 0..50_000 {
        let u = uniform(11, position, 0);
        if u > 1.0 - 1.0 / 5000.0 {
            seen += 1;
            let got = once(&logits, &SampleRow { seed: 11, position, ..row(5000, &sampling) });
            assert_eq!(got.token, 4999, "u = {u}");
        }
    }
    assert!(seen > 3);
}

#[test]
fn extreme_temperatures_stay_finite() {
    let logits = [f32::MAX, -f32::MAX, 1.0, f32::MAX];
    for temperature in [f32::MIN_POSITIVE, 1e-40, 1.0, f32::MAX] {
        let got = once(&logits, &row(4, &hot(temperature)));
        assert!(got.fault.is_none() && got.token < 4, "{got:?}");
    }
    // Cold enough, a draw is greedy.
    assert_eq!(once(&[1.0, 1.5, 0.0], &row(3, &hot(1e-30))).token, 1);
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let logits: Vec<f32> = (0..300).map(|id| ((id * 37 % 101) as f32) / 20.0).collect();
    let sampling = Sampling { xtc_probability: 0.5, typical_p: 0.9, ..Sampling::default() };
    let mut scratch = SampleScratch::default();
    let forward: Vec<u32> = drawn(&logits, &row(300, &sampling), 100);
    let mut backward: Vec<u32> = (0..100)
        .rev()
        .map(|position| {
            // Another slot, another row of the step, other rows in between.
            sample(&logits, &row(200, &GREEDY), &mut scratch);
            let row = SampleRow { position, slot: 3, wanted: 9, ..row(300, &sampling) };
            sample(&logits, &row, &mut scratch).token
        })
        .collect();
    backward.reverse();
    assert_eq!(forward, backward);
    assert_ne!(forward, drawn(&logits, &SampleRow { seed: 1, ..row(300, &sampling) }, 100));
}
