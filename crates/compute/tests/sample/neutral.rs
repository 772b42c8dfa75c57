//! A parameter at its neutral value changes nothing.

use fornax_compute::{SampleRow, Sampling};
use proptest::prelude::*;

use crate::{once, row};

/// Parameters at a neutral value, beside ones that then mean nothing: each alone, none may matter.
fn neutral(temperature: f32, vocab: u32) -> Vec<Sampling> {
    let plain = || Sampling { temperature, ..Sampling::default() };
    vec![
        Sampling { top_k: vocab, ..plain() },
        Sampling { top_k: u32::MAX, ..plain() },
        Sampling { dynatemp_exponent: 3.0, ..plain() },
        Sampling { xtc_threshold: 0.0, ..plain() },
        Sampling { dry_base: 4.0, dry_allowed_length: 1, dry_sequence_breakers: vec![vec![0]], ..plain() },
        Sampling { dry_multiplier: 5.0, dry_penalty_last_n: Some(0), ..plain() },
        Sampling { dry_multiplier: 5.0, dry_allowed_length: u32::MAX, ..plain() },
        Sampling { mirostat_tau: 1.0, mirostat_eta: 1.0, ..plain() },
        Sampling { repeat_last_n: Some(3), ..plain() },
        Sampling { repeat_last_n: Some(0), repetition_penalty: 2.0, presence_penalty: 1.0, ..plain() },
        Sampling { logit_bias: vec![(0, 0.0)], ..plain() },
        Sampling { allowed_token_ids: Some((0..vocab).rev().collect()), ..plain() },
        Sampling { min_tokens: 100, ..plain() },
        Sampling { end_tokens: vec![0, 1], ..plain() },
        Sampling { top_n_sigma: 1e30, ..plain() },
        Sampling { min_p: 1e-40, ..plain() },
    ]
}

proptest! {
    #[test]
    fn a_neutral_value_changes_nothing(
        logits in prop::collection::vec(-20.0f32..20.0, 2..300),
        history in prop::collection::vec(0u32..8, 0..40),
        generated in 0u32..40,
        temperature in prop_oneof![Just(0.0f32), 0.1f32..3.0],
        seed in any::<u64>(),
        position in any::<u32>(),
    ) {
        let generated = generated.min(history.len() as u32);
        let vocab = logits.len();
        let plain = Sampling { temperature, ..Sampling::default() };
        let place = SampleRow { history: &history, generated, seed, position, ..row(vocab, &plain) };
        let wanted = once(&logits, &place);
        for sampling in neutral(temperature, vocab as u32) {
            let got = once(&logits, &SampleRow { sampling: &sampling, ..place.clone() });
            prop_assert_eq!(&got, &wanted, "{:?}", sampling);
        }
        // Log-probabilities are looked at, not used.
        let asked = Sampling { top_logprobs: Some(5), ..plain.clone() };
        let got = once(&logits, &SampleRow { sampling: &asked, ..place.clone() });
        prop_assert_eq!(got.token, wanted.token);
        prop_assert_eq!(got.top.len(), vocab.min(5));
    }
}
