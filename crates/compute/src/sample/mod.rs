//! Choosing a token: an operation of every backend, and its scalar reference.

mod allowed;
mod crew;
mod draw;
mod dry;
mod kept;
mod logprobs;
mod mirostat;
mod penalties;
mod sampling;
mod truncation;
mod weights;
mod whole;

pub(crate) use crew::{Alone, Crew};
pub use penalties::Change;
pub use sampling::{Mirostat, Sampling, TOP_LOGPROBS_MAX};
pub use whole::halvings;

use crate::{Error, philox};
use allowed::Allowed;
use whole::STRETCH;

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
    /// Tokens that exist: rows of the head beyond it are padding and can never be chosen.
    pub vocab: u32,
    /// The request's parameters.
    pub sampling: &'a Sampling,
    /// The tokens before this one: prompt, then generated. May be empty where no parameter looks at it
    /// ([`Sampling::needs_history`]).
    pub history: &'a [u32],
    /// How many tokens at the end of the history were generated; with an empty history, how many were generated at
    /// all: `min_tokens` counts them.
    pub generated: u32,
    /// One bit per token, set where it is allowed; `None` allows all. Tokens beyond its end are not allowed.
    pub mask: Option<&'a [u32]>,
    /// The token is known already, and only how likely it was is asked for: [`Sampled`] repeats it with its
    /// log-probability. Nothing is drawn, no parameter applies, and the slot keeps what it holds.
    pub given: Option<Given>,
    /// Mirostat's state: [`Sampling::mirostat_start`] for the first token, then [`Sampled::mu`] of the one before.
    pub mirostat_mu: f32,
}

/// A token whose log-probability is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    /// The token.
    pub token: u32,
    /// How many of the most likely tokens are told with it.
    pub top: u32,
}

impl<'a> SampleRow<'a> {
    /// The first logits row's first token, for slot 0 and seed 0: nothing came before it, and every token is allowed.
    pub fn plain(vocab: u32, sampling: &'a Sampling) -> SampleRow<'a> {
        SampleRow {
            wanted: 0,
            slot: 0,
            position: 0,
            seed: 0,
            vocab,
            sampling,
            history: &[],
            generated: 0,
            mask: None,
            given: None,
            mirostat_mu: sampling.mirostat_start(),
        }
    }

    /// Refuses parameters and state that mean nothing.
    pub fn check(&self) -> Result<(), Error> {
        self.sampling.check(self.vocab)?;
        let refuse = |name, value: String, wanted| Err(Error::SampleParameter { name, value, wanted });
        if self.sampling.mirostat != Mirostat::Off && !self.mirostat_mu.is_finite() {
            return refuse("mirostat_mu", self.mirostat_mu.to_string(), "finite");
        }
        if !self.history.is_empty() && self.generated as usize > self.history.len() {
            return refuse("generated", self.generated.to_string(), "no more than the history holds");
        }
        if let Some(given) = self.given {
            if given.token >= self.vocab {
                return refuse("given token", given.token.to_string(), "a token that exists");
            }
            if given.top > TOP_LOGPROBS_MAX {
                return refuse("prompt_logprobs", given.top.to_string(), "at most 128");
            }
        }
        Ok(())
    }

    /// The ids that may be chosen, for a device that chooses itself: the row's own mask where nothing else restricts
    /// it, otherwise `words`, which become it; `None` allows all.
    pub fn allowed<'b>(&'b self, words: &'b mut Vec<u32>) -> Option<&'b [u32]> {
        Allowed::of(self, words).mask()
    }

    /// What is done to single logits before a token is chosen, in its order for each token, for a device that chooses
    /// itself; DRY aside. `scratch` is used again and again.
    pub fn changes(&self, scratch: &mut SampleScratch, change: impl FnMut(u32, Change)) {
        penalties::changes(self, scratch.penalties.counts(), change);
    }

    /// The generated part of the history.
    fn generated_history(&self) -> &[u32] {
        last(self.history, Some(self.generated))
    }
}

/// The last `count` tokens, or all.
fn last(tokens: &[u32], count: Option<u32>) -> &[u32] {
    let count = count.map_or(tokens.len(), |count| tokens.len().min(count as usize));
    &tokens[tokens.len() - count..]
}

/// What came out for one sampled row.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The chosen token. Meaningless when there is a fault.
    pub token: u32,
    /// Its log-probability under the model, if [`Sampling::top_logprobs`] asks for any: softmax over the vocabulary
    /// before every adjustment, mask, truncation and temperature.
    pub logprob: Option<f32>,
    /// The most likely tokens with their log-probabilities, likewise; as many as asked for, the most likely first and
    /// the lowest id among equals.
    pub top: Vec<(u32, f32)>,
    /// Mirostat's state for the next token; what came in when mirostat is off.
    pub mu: f32,
    /// Why no token was chosen.
    pub fault: Option<SampleFault>,
}

impl Sampled {
    /// No token was chosen.
    pub const fn fault(fault: SampleFault) -> Sampled {
        Sampled { token: 0, logprob: None, top: Vec::new(), mu: 0.0, fault: Some(fault) }
    }
}

/// Why no token could be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleFault {
    /// A logit below `vocab` is NaN or infinite (masked or not: the model is broken), or missing.
    Logits,
    /// Mask, allowed and banned tokens and `min_tokens` together leave nothing.
    NothingAllowed,
    /// [`SampleRow::check`] refuses the row.
    Parameters,
}

/// Memory that [`sample`] uses again and again: after a first call with the same vocabulary, parameters and length of
/// the history it allocates nothing but the top log-probabilities that were asked for.
#[derive(Debug, Default)]
pub struct SampleScratch {
    mask: Vec<u32>,
    penalties: penalties::Scratch,
    keys: Vec<u64>,
    distances: Vec<(u64, u64)>,
    top: Vec<u64>,
    draw: draw::Scratch,
    best: Vec<Best>,
}

/// The specification of the sampling operation. A backend's own version chooses the same tokens.
///
/// # The order
///
/// It is llama.cpp's, whose names the rarer parameters carry, with two differences that are told where they stand.
/// A parameter at its neutral value costs nothing.
///
/// 1. **Who may be chosen**: ids below `vocab` that the row's mask allows, that are among `allowed_token_ids`, that
///    would not complete one of `bad_words`, and that are not an end token while fewer than `min_tokens` are generated.
///    The tokens left are the *candidates*. First, because nothing later may bring back what was forbidden.
/// 2. **Adjusted logits**: `logit_bias` is added; `repetition_penalty` divides the positive logits and multiplies the
///    others of all tokens among the last `repeat_last_n`, prompt included; `frequency_penalty` for each time and
///    `presence_penalty` once are subtracted for those of them that were *generated* (OpenAI's definition: "sampled");
///    then DRY subtracts `dry_multiplier * dry_base^(length - dry_allowed_length)` from each token that would continue
///    a repetition of that length. Each adjustment is computed in f64 and rounded to the nearest finite f32.
/// 3. **Temperature 0** takes the largest adjusted logit, the lowest id among equals. No division, no random number.
/// 4. **Truncation**, at temperature 1, so that what is implausible does not become plausible by heating it. The
///    candidates in the order (most likely, then lowest id) are cut before the first below `largest - top_n_sigma *
///    standard deviation`, after the first `top_k`, after the first whose running sum reaches `top_p`, and before the
///    first less likely than `min_p` times the most likely. All four look at one softmax over *all* candidates
///    (llama.cpp renormalises after each), so the shortest decides and no order among them exists. The most likely
///    always stays.
/// 5. **Typical**: of what is left, renormalised, those whose surprise is closest to the mean surprise, until their
///    sum reaches `typical_p`. After the cuts of step 4 (llama.cpp: among them), because it alone does not cut the
///    order but picks from it, and picking first could leave the others nothing.
/// 6. **XTC**: with `xtc_probability`, all that are at least `xtc_threshold` likely (renormalised) but the least
///    likely of them are dropped.
/// 7. **Temperature**: divides what is left; with `dynatemp_range` it lies between `temperature - range` (at least 0)
///    and `temperature + range`, by (entropy / largest possible entropy)^`dynatemp_exponent` of what is left.
/// 8. **The draw**: in the order of their ids, the first whose running sum exceeds the random number. Weights are whole
///    numbers, 2^40 the largest, which every device computes to the bit; so that a device passes over the logits once,
///    ids are taken in stretches of 4096, whose weights are relative to the largest of the stretch, and a stretch is
///    chosen before a token of it.
///
/// **Mirostat** replaces steps 4 to 6 and comes after the temperature: version 2 keeps what surprises by at most `mu`
/// bits; version 1 keeps as many as a Zipf distribution fitted to the 100 most likely needs to reach `mu`. The
/// surprise of the token drawn moves `mu` towards `mirostat_tau`, and `mu` is the caller's to carry ([`Sampled::mu`]).
///
/// **Random numbers** are [`uniform`](crate::uniform) of (seed, position, draw): draw 0 chooses the token, draw 1 asks
/// whether XTC strikes. No number depends on the batch, on other rows, or on how often a position was tried.
///
/// **Forced tokens**, of which a grammar allows exactly one, need no sampling: the engine appends them, and so no
/// penalty touches them. A mask with a single bit gives the same token here.
pub fn sample(logits: &[f32], row: &SampleRow<'_>, scratch: &mut SampleScratch) -> Sampled {
    sample_by(&Alone, logits, row, scratch)
}

/// The same, the vocabulary looked at by several threads where that is easy.
pub(crate) fn sample_by(
    crew: &impl Crew,
    logits: &[f32],
    row: &SampleRow<'_>,
    scratch: &mut SampleScratch,
) -> Sampled {
    if row.check().is_err() {
        return Sampled::fault(SampleFault::Parameters);
    }
    let bests = &mut scratch.best;
    let Some(raw) = logits.get(..row.vocab as usize).filter(|logits| all_finite(crew, logits, bests)) else {
        return Sampled::fault(SampleFault::Logits);
    };
    if let Some(Given { token, top }) = row.given {
        let (logprob, top) = logprobs::of(raw, token as usize, top as usize, &mut scratch.top);
        return Sampled { token, logprob, top, mu: row.mirostat_mu, fault: None };
    }
    let sampling = row.sampling;
    let allowed = Allowed::of(row, &mut scratch.mask);
    let logits = penalties::adjusted(raw, row, &mut scratch.penalties);
    let Some(best) = largest(crew, logits, allowed, bests) else {
        return Sampled::fault(SampleFault::NothingAllowed);
    };

    let mut mu = row.mirostat_mu;
    let token = if sampling.temperature == 0.0 {
        best
    } else {
        let random = philox::random_bits(row.seed, row.position, 0);
        if sampling.mirostat == Mirostat::Off {
            let candidates = truncation::Candidates { logits, allowed, best };
            if sampling.keeps_all() {
                let temperature = f64::from(sampling.temperature);
                draw::of_all(crew, logits, allowed, temperature, random, &mut scratch.draw)
            } else {
                let strikes = || philox::uniform(row.seed, row.position, 1);
                let (keys, distances) = (&mut scratch.keys, &mut scratch.distances);
                let kept = candidates.kept(crew, sampling, strikes, keys, distances);
                kept.draw(random, &mut scratch.draw)
            }
        } else {
            let kept = mirostat::kept(logits, allowed, best, row, &mut scratch.keys);
            let token = kept.draw(random, &mut scratch.draw);
            mu = mirostat::next_mu(sampling, mu, kept.probability(token));
            token
        }
    };

    let (logprob, top) = match sampling.top_logprobs {
        None => (None, Vec::new()),
        Some(count) => logprobs::of(raw, token, count as usize, &mut scratch.top),
    };
    Sampled { token: token as u32, logprob, top, mu, fault: None }
}

/// What one stretch of ids tells of the largest logit.
#[derive(Clone, Copy, Debug)]
struct Best {
    finite: bool,
    /// The lowest id among those with the largest logit, and that logit; of those that are allowed.
    best: Option<(usize, f32)>,
}

/// What each stretch of ids tells, in their order.
fn of_stretches<'a>(
    crew: &impl Crew,
    logits: &[f32],
    bests: &'a mut Vec<Best>,
    of: impl Fn(usize, &[f32]) -> Best + Sync,
) -> &'a [Best] {
    bests.clear();
    bests.resize(logits.len().div_ceil(STRETCH), Best { finite: true, best: None });
    crew.set(bests, |stretch| {
        let first = stretch * STRETCH;
        of(first, &logits[first..logits.len().min(first + STRETCH)])
    });
    bests
}

fn all_finite(crew: &impl Crew, logits: &[f32], bests: &mut Vec<Best>) -> bool {
    // Without a way out of the loop, so that it becomes vector instructions.
    let finite = |logits: &[f32]| logits.iter().fold(true, |finite, logit| finite & logit.is_finite());
    let bests = of_stretches(crew, logits, bests, |_, logits| Best { finite: finite(logits), best: None });
    bests.iter().all(|best| best.finite)
}

/// The lowest id among those with the largest logit.
fn largest(crew: &impl Crew, logits: &[f32], allowed: Allowed<'_>, bests: &mut Vec<Best>) -> Option<usize> {
    let bests = of_stretches(crew, logits, bests, |first, logits| Best {
        finite: true,
        best: largest_of(first, logits, allowed),
    });
    let best = bests.iter().filter_map(|best| best.best);
    let best = best.reduce(|best, other| if other.1 > best.1 { other } else { best });
    best.map(|(id, _)| id)
}

/// The same of a stretch of ids, `first` the first of them, with its logit.
fn largest_of(first: usize, logits: &[f32], allowed: Allowed<'_>) -> Option<(usize, f32)> {
    /// So many are passed at once, by vector instructions, unless one of them is larger than all before.
    const BLOCK: usize = 64;
    let mut best = None;
    let mut largest = f32::NEG_INFINITY;
    for (block, logits) in logits.chunks(BLOCK).enumerate() {
        if !logits.iter().fold(false, |any, &logit| any | (logit > largest)) {
            continue;
        }
        for (at, &logit) in logits.iter().enumerate() {
            let id = first + block * BLOCK + at;
            if logit > largest && allowed.contains(id) {
                (best, largest) = (Some((id, logit)), logit);
            }
        }
    }
    best
}
