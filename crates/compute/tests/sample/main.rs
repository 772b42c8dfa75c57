//! Sampling against a second implementation (`make_vectors.py`), against exact distributions, and at its edges.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use fornax_compute::{Error, SampleRow, SampleScratch, Sampled, sample, uniform};
use serde::Deserialize;

#[derive(Deserialize)]
struct Vectors {
    uniform: Vec<Uniform>,
    rows: Vec<Vec<f32>>,
    cases: Vec<Case>,
    distributions: Vec<Distribution>,
}

#[derive(Deserialize)]
struct Uniform {
    seed: u64,
    position: u32,
    draw: u32,
    u: f64,
}

#[derive(Deserialize)]
struct Case {
    logits: usize,
    position: u32,
    seed: u64,
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    vocab: u32,
    mask: Option<Vec<u32>>,
    token: u32,
    logprob: f64,
}

#[derive(Deserialize)]
struct Distribution {
    logits: usize,
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    vocab: u32,
    ids: Vec<u32>,
    probabilities: Vec<f64>,
}

fn vectors() -> Vectors {
    serde_json::from_str(include_str!("vectors.json")).unwrap()
}

fn row(vocab: usize) -> SampleRow<'static> {
    SampleRow {
        wanted: 0,
        slot: 0,
        position: 0,
        seed: 0,
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        vocab: vocab.try_into().unwrap(),
        mask: None,
    }
}

fn once(logits: &[f32], row: &SampleRow<'_>) -> Sampled {
    sample(logits, row, &mut SampleScratch::default())
}

#[test]
fn random_numbers_are_those_of_the_paper() {
    for case in vectors().uniform {
        assert_eq!(uniform(case.seed, case.position, case.draw), case.u);
    }
}

#[test]
fn the_documented_order_chooses_what_numpy_chooses() {
    let vectors = vectors();
    assert!(vectors.cases.len() > 300);
    // One scratch for all: a call must not see what an earlier one left.
    let mut scratch = SampleScratch::default();
    for (number, case) in vectors.cases.iter().enumerate() {
        let row = SampleRow {
            position: case.position,
            seed: case.seed,
            temperature: case.temperature,
            top_k: case.top_k,
            top_p: case.top_p,
            min_p: case.min_p,
            vocab: case.vocab,
            mask: case.mask.as_deref(),
            ..row(0)
        };
        let got = sample(&vectors.rows[case.logits], &row, &mut scratch);
        assert!(!got.fault, "case {number}: {row:?}");
        assert_eq!(got.token, case.token, "case {number}: {row:?}");
        assert!((f64::from(got.logprob) - case.logprob).abs() < 2e-6, "case {number}: {got:?}");
    }
}

/// Fixed seeds, so this either always passes or never does; the limit is the 99.9 % point of chi-squared.
#[test]
fn draws_follow_the_exact_distribution() {
    const DRAWS: u32 = 20_000;
    let vectors = vectors();
    for exact in &vectors.distributions {
        let mut counts = vec![0u32; exact.ids.len()];
        for draw in 0..DRAWS {
            let row = SampleRow {
                position: draw % 100,
                seed: u64::from(draw / 100),
                temperature: exact.temperature,
                top_k: exact.top_k,
                top_p: exact.top_p,
                min_p: exact.min_p,
                vocab: exact.vocab,
                ..row(0)
            };
            let token = once(&vectors.rows[exact.logits], &row).token;
            let rank = exact.ids.iter().position(|&id| id == token);
            counts[rank.unwrap_or_else(|| panic!("token {token} was cut off"))] += 1;
        }
        let chi_squared: f64 = exact
            .probabilities
            .iter()
            .zip(&counts)
            .map(|(&p, &count)| {
                let expected = p * f64::from(DRAWS);
                assert!(expected > 5.0, "too rare for the statistic");
                (f64::from(count) - expected).powi(2) / expected
            })
            .sum();
        // Wilson and Hilferty's approximation with the normal quantile 3.09.
        let freedom = (exact.ids.len() - 1) as f64;
        let spread = 2.0 / (9.0 * freedom);
        let limit = freedom * (1.0 - spread + 3.09 * spread.sqrt()).powi(3);
        assert!(chi_squared < limit, "chi-squared {chi_squared:.1} of at most {limit:.1}");
    }
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    let greedy = SampleRow { temperature: 0.0, ..row(6) };
    assert_eq!(once(&[1.0, 3.0, 2.0, 3.0, 3.0, -1.0], &greedy).token, 1);
    assert_eq!(once(&[-0.0, 0.0, -1.0, 0.0, -0.0, -2.0], &greedy).token, 0);
}

#[test]
fn padding_rows_never_win() {
    let mut logits = vec![0.0; 100];
    logits[90..].fill(1e30);
    logits[95] = f32::NAN;
    for temperature in [0.0, 1.0] {
        for position in 0..200 {
            let got = once(&logits, &SampleRow { temperature, position, ..row(90) });
            assert!(!got.fault && got.token < 90);
            assert!((got.logprob - (1.0f32 / 90.0).ln()).abs() < 1e-6, "padding counts for nothing: {got:?}");
        }
    }
}

#[test]
fn masked_tokens_are_never_chosen_and_count_in_the_logprob() {
    let logits = [5.0, 1.0, 4.0, 0.0];
    let mask = [0b1010u32];
    for temperature in [0.0, 1.0, 50.0] {
        for position in 0..100 {
            let got = once(&logits, &SampleRow { temperature, position, mask: Some(&mask), ..row(4) });
            assert!(got.token % 2 == 1);
            assert!(got.logprob < -3.9);
        }
    }
    // A mask that ends early allows nothing beyond its end.
    let got = once(&[0.0; 64], &SampleRow { temperature: 0.0, mask: Some(&[1 << 31]), ..row(64) });
    assert_eq!(got.token, 31);
}

#[test]
fn what_cannot_be_sampled_is_a_fault() {
    let check = |logits: &[f32], row: SampleRow<'_>| {
        for temperature in [0.0, 0.8] {
            assert!(once(logits, &SampleRow { temperature, ..row.clone() }).fault, "{row:?}");
        }
    };
    for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = [1.0; 8];
        logits[7] = broken;
        check(&logits, row(8));
        // Also where the mask forbids it: the model is broken.
        check(&logits, SampleRow { mask: Some(&[0b1111]), ..row(8) });
    }
    check(&[1.0; 8], SampleRow { mask: Some(&[0xFF00]), ..row(8) });
    check(&[1.0; 8], SampleRow { mask: Some(&[]), ..row(8) });
    check(&[1.0; 8], row(9));
    check(&[], row(0));
}

#[test]
fn senseless_parameters_are_refused_by_name_and_never_panic() {
    let check = |bad: SampleRow<'_>, wanted: &str| {
        match bad.check() {
            Err(Error::SampleParameter { name, .. }) => assert_eq!(name, wanted),
            other => panic!("{bad:?}: {other:?}"),
        }
        assert!(once(&[1.0, 2.0], &bad).fault);
    };
    for value in [f32::NAN, -0.5, f32::INFINITY, f32::NEG_INFINITY] {
        check(SampleRow { temperature: value, ..row(2) }, "temperature");
        check(SampleRow { top_p: value, ..row(2) }, "top_p");
        check(SampleRow { min_p: value, ..row(2) }, "min_p");
    }
    check(SampleRow { top_p: 1.01, ..row(2) }, "top_p");
    assert!(row(2).check().is_ok());
}

#[test]
fn a_number_close_to_one_takes_the_last_candidate() {
    // Look for positions whose number lies in the last 1/5000: equal probabilities make it choose among the last ids.
    let logits = vec![2.5; 5000];
    let mut seen = 0;
    for position in 0..50_000 {
        let u = uniform(11, position, 0);
        if u > 1.0 - 1.0 / 5000.0 {
            seen += 1;
            let got = once(&logits, &SampleRow { seed: 11, position, ..row(5000) });
            assert_eq!(got.token, 4999, "u = {u}");
        }
    }
    assert!(seen > 3);
}

#[test]
fn extreme_temperatures_stay_finite() {
    let logits = [f32::MAX, -f32::MAX, 1.0, f32::MAX];
    for temperature in [f32::MIN_POSITIVE, 1e-40, 1.0, f32::MAX] {
        let got = once(&logits, &SampleRow { temperature, ..row(4) });
        assert!(!got.fault && got.token < 4, "{got:?}");
    }
    // Cold enough, a draw is greedy.
    assert_eq!(once(&[1.0, 1.5, 0.0], &SampleRow { temperature: 1e-30, ..row(3) }).token, 1);
}
