//! Choosing a token: an operation of every backend.

/// What one sampled row asks for.
#[derive(Clone, Debug)]
pub struct SampleRow<'a> {
    /// Which logits row of the step.
    pub wanted: u32,
    /// The sequence slot whose next token this is.
    pub slot: u32,
    /// The absolute position the chosen token will have. With the seed it fixes the random numbers: they are a
    /// function of (seed, position, draw), not a stream, so preemption and resuming change nothing.
    pub position: u32,
    /// The request's seed.
    pub seed: u64,
    /// 0 is greedy: no division, no random number.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop what is less likely than this share of the most likely; 0 keeps all.
    pub min_p: f32,
    /// Tokens that exist: rows of the head beyond it are padding and can never be chosen.
    pub vocab: u32,
    /// One bit per token, set where it is allowed; `None` allows all.
    pub mask: Option<&'a [u32]>,
}

/// What came out for one sampled row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// The chosen token. Meaningless when `fault` is set.
    pub token: u32,
    /// Its log-probability under the model: softmax over the vocabulary before temperature and truncation.
    pub logprob: f32,
    /// A logit was NaN or infinite, or nothing was allowed: no token was chosen.
    pub fault: bool,
}
