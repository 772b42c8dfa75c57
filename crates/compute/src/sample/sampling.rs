//! What a request asks of sampling.

use crate::Error;

/// The most top log-probabilities that one token may come with.
pub const TOP_LOGPROBS_MAX: u32 = 128;

/// All parameters of a request, under the names of the API. They are applied in the order that [`sample`] documents.
///
/// `Default` is neutral: it draws from the model's own distribution.
///
/// [`sample`]: crate::sample
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy: no division, no random number. Penalties, bias and masks apply.
    pub temperature: f32,
    /// How far the temperature may move either way with the entropy; 0 keeps it.
    pub dynatemp_range: f32,
    /// How the entropy's share of its largest value becomes the temperature's.
    pub dynatemp_exponent: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop what is less likely than this share of the most likely; 0 keeps all.
    pub min_p: f32,
    /// Keep the most typical, whose probability together reaches this; 1 keeps all.
    pub typical_p: f32,
    /// Keep logits within this many standard deviations of the largest; 0 keeps all.
    pub top_n_sigma: f32,
    /// How often the most likely are excluded (XTC); 0 is never.
    pub xtc_probability: f32,
    /// From which probability on a token counts as likely for XTC.
    pub xtc_threshold: f32,
    /// The scale of the penalty on continuing a repetition (DRY); 0 is off.
    pub dry_multiplier: f32,
    /// By how much it grows with each repeated token.
    pub dry_base: f32,
    /// The longest repetition that is not penalised, plus one: from this length on it is.
    pub dry_allowed_length: u32,
    /// How many tokens back DRY looks; `None` looks at all.
    pub dry_penalty_last_n: Option<u32>,
    /// Token sequences that no repetition reaches across. A sequence of a single token is itself never penalised.
    pub dry_sequence_breakers: Vec<Vec<u32>>,
    /// Truncates by surprise instead of by all of the above.
    pub mirostat: Mirostat,
    /// The surprise to aim at, in bits.
    pub mirostat_tau: f32,
    /// How fast to correct towards it.
    pub mirostat_eta: f32,
    /// Divides positive logits and multiplies others of tokens that occurred; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted once from tokens that were generated; 0 changes nothing.
    pub presence_penalty: f32,
    /// Subtracted from tokens for each time that they were generated; 0 changes nothing.
    pub frequency_penalty: f32,
    /// How many tokens back the three penalties look; `None` looks at all.
    pub repeat_last_n: Option<u32>,
    /// Added to the logits of these tokens; a token named twice gets both.
    pub logit_bias: Vec<(u32, f32)>,
    /// Token sequences that are never completed: a sequence's last token is forbidden where the generated tokens end
    /// with those before it. A single token is forbidden everywhere.
    pub bad_words: Vec<Vec<u32>>,
    /// The only tokens that may be chosen; `None` allows all.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Forbids `end_tokens` until this many tokens are generated.
    pub min_tokens: u32,
    /// What ends the sequence: the model's end tokens and the request's own.
    pub end_tokens: Vec<u32>,
    /// Log-probabilities: `None` computes none, `Some(n)` that of the chosen token and of the n most likely.
    pub top_logprobs: Option<u32>,
}

/// Which version of mirostat, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mirostat {
    /// None.
    #[default]
    Off,
    /// Estimates how many tokens to keep from the shape of the distribution (Basu et al., 2021).
    V1,
    /// Keeps tokens up to a surprise.
    V2,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 1.0, ..Sampling::greedy() }
    }
}

impl Sampling {
    /// Always the most likely token; all else is neutral.
    pub const fn greedy() -> Sampling {
        Sampling {
            temperature: 0.0,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            top_n_sigma: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: None,
            dry_sequence_breakers: Vec::new(),
            mirostat: Mirostat::Off,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_last_n: None,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            allowed_token_ids: None,
            min_tokens: 0,
            end_tokens: Vec::new(),
            top_logprobs: None,
        }
    }

    /// Mirostat's state before the first token: twice the surprise aimed at.
    pub fn mirostat_start(&self) -> f32 {
        2.0 * self.mirostat_tau
    }

    /// Whether a parameter looks at the tokens before.
    pub fn needs_history(&self) -> bool {
        self.penalises() || self.dry_multiplier > 0.0 || self.bad_words.iter().any(|word| word.len() > 1)
    }

    /// Whether a parameter is of the rarer kind: a device may read such a row's logits back and use [`sample`]. The
    /// other rows it samples itself.
    ///
    /// [`sample`]: crate::sample
    pub fn is_rare(&self) -> bool {
        self.typical_p < 1.0
            || self.xtc_probability > 0.0
            || self.dry_multiplier > 0.0
            || self.dynatemp_range > 0.0
            || self.mirostat != Mirostat::Off
    }

    /// Whether every candidate may be drawn, at a temperature that is known beforehand.
    pub(super) fn keeps_all(&self) -> bool {
        let cuts = self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0 || self.top_n_sigma > 0.0;
        let picks = self.typical_p < 1.0 || self.xtc_probability > 0.0;
        !cuts && !picks && self.dynatemp_range == 0.0
    }

    /// Whether logits are changed before a token is chosen, DRY aside.
    pub fn adjusts(&self) -> bool {
        !self.logit_bias.is_empty() || self.penalises()
    }

    /// Whether one of the three penalties is on.
    pub(super) fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Refuses what means nothing or contradicts itself, for a model with `vocab` tokens: for the edge where a request
    /// comes in. What it accepts is honoured.
    pub fn check(&self, vocab: u32) -> Result<(), Error> {
        self.check_ranges()?;
        self.check_tokens(vocab)?;
        if self.temperature == 0.0 {
            const GREEDY: &str = "off where the temperature is 0, which is greedy";
            rule("mirostat", self.mirostat.number(), self.mirostat == Mirostat::Off, GREEDY)?;
            rule("dynatemp_range", self.dynatemp_range, self.dynatemp_range == 0.0, GREEDY)?;
            rule("typical_p", self.typical_p, self.typical_p == 1.0, GREEDY)?;
            rule("xtc_probability", self.xtc_probability, self.xtc_probability == 0.0, GREEDY)?;
        }
        if self.mirostat != Mirostat::Off {
            const REPLACED: &str = "off where mirostat is on, which replaces it";
            rule("dynatemp_range", self.dynatemp_range, self.dynatemp_range == 0.0, REPLACED)?;
            rule("top_k", self.top_k, self.top_k == 0, REPLACED)?;
            rule("top_p", self.top_p, self.top_p == 1.0, REPLACED)?;
            rule("min_p", self.min_p, self.min_p == 0.0, REPLACED)?;
            rule("typical_p", self.typical_p, self.typical_p == 1.0, REPLACED)?;
            rule("top_n_sigma", self.top_n_sigma, self.top_n_sigma == 0.0, REPLACED)?;
            rule("xtc_probability", self.xtc_probability, self.xtc_probability == 0.0, REPLACED)?;
        }
        Ok(())
    }

    fn check_ranges(&self) -> Result<(), Error> {
        for (name, value) in [
            ("temperature", self.temperature),
            ("dynatemp_range", self.dynatemp_range),
            ("dynatemp_exponent", self.dynatemp_exponent),
            ("top_n_sigma", self.top_n_sigma),
            ("dry_multiplier", self.dry_multiplier),
            ("mirostat_tau", self.mirostat_tau),
            ("mirostat_eta", self.mirostat_eta),
        ] {
            rule(name, value, value.is_finite() && value >= 0.0, "finite and not negative")?;
        }
        for (name, value) in [
            ("top_p", self.top_p),
            ("min_p", self.min_p),
            ("typical_p", self.typical_p),
            ("xtc_probability", self.xtc_probability),
            ("xtc_threshold", self.xtc_threshold),
        ] {
            rule(name, value, (0.0..=1.0).contains(&value), "between 0 and 1")?;
        }
        for (name, value) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            rule(name, value, value.is_finite(), "finite")?;
        }
        let (repetition, base, length) = (self.repetition_penalty, self.dry_base, self.dry_allowed_length);
        let positive = repetition.is_finite() && repetition > 0.0;
        rule("repetition_penalty", repetition, positive, "finite and above 0")?;
        rule("dry_base", base, base.is_finite() && base >= 1.0, "finite and at least 1")?;
        rule("dry_allowed_length", length, length > 0, "at least 1")?;
        let top = self.top_logprobs.unwrap_or(0);
        rule("top_logprobs", top, top <= TOP_LOGPROBS_MAX, "at most 128")
    }

    fn check_tokens(&self, vocab: u32) -> Result<(), Error> {
        let vocab_len = vocab as usize;
        const PER_TOKEN: &str = "no longer than the vocabulary";
        rule("logit_bias", self.logit_bias.len(), self.logit_bias.len() <= vocab_len, PER_TOKEN)?;
        let known = |name, token: u32| rule(name, token, token < vocab, "a token of the vocabulary");
        for &(token, bias) in &self.logit_bias {
            known("logit_bias", token)?;
            rule("logit_bias", bias, bias.is_finite(), "finite")?;
        }
        for (name, sequences) in
            [("dry_sequence_breakers", &self.dry_sequence_breakers), ("bad_words", &self.bad_words)]
        {
            rule(name, sequences.len(), sequences.len() <= SEQUENCES_MAX, "at most 4096 sequences")?;
            for sequence in sequences {
                let len = sequence.len();
                rule(name, len, len <= SEQUENCE_TOKENS_MAX, "made of at most 256 tokens each")?;
                rule(name, "an empty sequence", !sequence.is_empty(), "made of at least one token each")?;
                sequence.iter().try_for_each(|&token| known(name, token))?;
            }
        }
        if let Some(ids) = &self.allowed_token_ids {
            rule("allowed_token_ids", ids.len(), ids.len() <= vocab_len, PER_TOKEN)?;
            rule("allowed_token_ids", "empty", !ids.is_empty(), "absent or name a token")?;
            ids.iter().try_for_each(|&token| known("allowed_token_ids", token))?;
        }
        Ok(())
    }
}

impl Mirostat {
    /// As the API counts them.
    fn number(self) -> u8 {
        match self {
            Mirostat::Off => 0,
            Mirostat::V1 => 1,
            Mirostat::V2 => 2,
        }
    }
}

/// Banned words or sequence breakers of one request: each is compared at every token.
const SEQUENCES_MAX: usize = 4096;

/// Tokens of one of them.
const SEQUENCE_TOKENS_MAX: usize = 256;

fn rule(name: &'static str, value: impl ToString, valid: bool, wanted: &'static str) -> Result<(), Error> {
    if valid { Ok(()) } else { Err(Error::SampleParameter { name, value: value.to_string(), wanted }) }
}
