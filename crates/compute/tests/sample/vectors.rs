//! What numpy chose, and how often it would.

use fornax_compute::{Given, Mirostat, SampleRow, SampleScratch, Sampling, sample, uniform};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::row;

#[derive(Deserialize)]
struct Vectors {
    uniform: Vec<Uniform>,
    rows: Vec<Vec<f32>>,
    histories: Vec<Vec<u32>>,
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
    row: usize,
    position: u32,
    seed: u64,
    vocab: u32,
    past: usize,
    generated: u32,
    parameters: Map<String, Value>,
    mask: Option<Vec<u32>>,
    mu: Option<f32>,
    token: u32,
    logprob: f64,
    #[serde(default)]
    top: Vec<(u32, f64)>,
    next_mu: Option<f32>,
}

#[derive(Deserialize)]
struct Distribution {
    parameters: Map<String, Value>,
    past: usize,
    generated: u32,
    ids: Vec<u32>,
    probabilities: Vec<f64>,
}

fn vectors() -> Vectors {
    serde_json::from_str(include_str!("vectors.json")).unwrap()
}

fn read<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

/// The neutral parameters with these set.
fn sampling(parameters: &Map<String, Value>) -> Sampling {
    let mut sampling = Sampling { top_logprobs: Some(0), ..Sampling::default() };
    for (name, value) in parameters {
        match name.as_str() {
            "temperature" => sampling.temperature = read(value),
            "dynatemp_range" => sampling.dynatemp_range = read(value),
            "dynatemp_exponent" => sampling.dynatemp_exponent = read(value),
            "top_k" => sampling.top_k = read(value),
            "top_p" => sampling.top_p = read(value),
            "min_p" => sampling.min_p = read(value),
            "typical_p" => sampling.typical_p = read(value),
            "top_n_sigma" => sampling.top_n_sigma = read(value),
            "xtc_probability" => sampling.xtc_probability = read(value),
            "xtc_threshold" => sampling.xtc_threshold = read(value),
            "dry_multiplier" => sampling.dry_multiplier = read(value),
            "dry_base" => sampling.dry_base = read(value),
            "dry_allowed_length" => sampling.dry_allowed_length = read(value),
            "dry_penalty_last_n" => sampling.dry_penalty_last_n = read(value),
            "dry_sequence_breakers" => sampling.dry_sequence_breakers = read(value),
            "mirostat" => {
                sampling.mirostat =
                    [Mirostat::Off, Mirostat::V1, Mirostat::V2][usize::try_from(read::<u32>(value)).unwrap()];
            }
            "mirostat_tau" => sampling.mirostat_tau = read(value),
            "mirostat_eta" => sampling.mirostat_eta = read(value),
            "repetition_penalty" => sampling.repetition_penalty = read(value),
            "presence_penalty" => sampling.presence_penalty = read(value),
            "frequency_penalty" => sampling.frequency_penalty = read(value),
            "repeat_last_n" => sampling.repeat_last_n = read(value),
            "logit_bias" => sampling.logit_bias = read(value),
            "bad_words" => sampling.bad_words = read(value),
            "allowed_token_ids" => sampling.allowed_token_ids = read(value),
            "min_tokens" => sampling.min_tokens = read(value),
            "end_tokens" => sampling.end_tokens = read(value),
            "top_logprobs" => sampling.top_logprobs = read(value),
            other => panic!("{other} is no parameter"),
        }
    }
    sampling
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
    assert!(vectors.cases.len() > 500);
    // One scratch for all: a call must not see what an earlier one left.
    let mut scratch = SampleScratch::default();
    for (number, case) in vectors.cases.iter().enumerate() {
        let sampling = sampling(&case.parameters);
        let row = SampleRow {
            position: case.position,
            seed: case.seed,
            vocab: case.vocab,
            history: &vectors.histories[case.past],
            generated: case.generated,
            mask: case.mask.as_deref(),
            mirostat_mu: case.mu.unwrap_or(7.5),
            ..row(0, &sampling)
        };
        let name = format!("case {number}: row {}, past {}, {:?}", case.row, case.past, case.parameters);
        let got = sample(&vectors.rows[case.row], &row, &mut scratch);
        assert_eq!((got.fault, got.token), (None, case.token), "{name}");
        let close = |got: f32, wanted: f64| (f64::from(got) - wanted).abs() < 2e-6;
        assert!(close(got.logprob.unwrap(), case.logprob), "{name}: {got:?}");
        assert_eq!(got.top.len(), case.top.len(), "{name}");
        for (got, wanted) in got.top.iter().zip(&case.top) {
            assert!(got.0 == wanted.0 && close(got.1, wanted.1), "{name}: {got:?}, wanted {wanted:?}");
        }
        let mu = case.next_mu.unwrap_or(7.5);
        assert!((got.mu - mu).abs() < 1e-5, "{name}: {} wanted {mu}", got.mu);
        // Whatever the parameters, a given token is as likely as the model says.
        let given = Given { token: case.token, top: u32::try_from(case.top.len()).unwrap() };
        let scored = sample(&vectors.rows[case.row], &SampleRow { given: Some(given), ..row }, &mut scratch);
        assert_eq!((scored.token, scored.logprob, &scored.top), (got.token, got.logprob, &got.top), "{name}");
    }
}

/// Fixed seeds, so this either always passes or never does; the limit is the 99.9 % point of chi-squared.
#[test]
fn draws_follow_the_exact_distribution() {
    const DRAWS: u32 = 20_000;
    let vectors = vectors();
    let mut scratch = SampleScratch::default();
    for exact in &vectors.distributions {
        let sampling = Sampling { top_logprobs: None, ..sampling(&exact.parameters) };
        let mut counts = vec![0u32; exact.ids.len()];
        for draw in 0..DRAWS {
            let row = SampleRow {
                position: draw % 100,
                seed: u64::from(draw / 100),
                history: &vectors.histories[exact.past],
                generated: exact.generated,
                ..row(24, &sampling)
            };
            let token = sample(&vectors.rows[0], &row, &mut scratch).token;
            let rank = exact.ids.iter().position(|&id| id == token);
            counts[rank.unwrap_or_else(|| panic!("token {token} was cut off"))] += 1;
        }
        let chi_squared: f64 = exact
            .probabilities
            .iter()
            .zip(&counts)
            .map(|(&p, &count)| {
                let expected = p * f64::from(DRAWS);
                assert!(expected > 5.0, "too rare for the statistic: {:?}", exact.parameters);
                (f64::from(count) - expected).powi(2) / expected
            })
            .sum();
        // Wilson and Hilferty's approximation with the normal quantile 3.09.
        let freedom = (exact.ids.len() - 1) as f64;
        let spread = 2.0 / (9.0 * freedom);
        let limit = freedom * (1.0 - spread + 3.09 * spread.sqrt()).powi(3);
        assert!(chi_squared < limit, "{:?}: {chi_squared:.1} of at most {limit:.1}", exact.parameters);
    }
}
