//! Sampling: the chosen tokens, and their way into the next step.

use std::fmt;

use fornax_format::DType;

use crate::{
    Backend, Batch, Error, Given, Mirostat, Purpose, Row, SampleRow, SampleScratch, Sampled, Sampling, Token,
    sample,
};

use super::bench::{Bench, Table, count};
use super::random::{Random, Stored};
use super::{Case, Failure, Op, SLOTS, Suite};

/// Tokens that exist, and columns of the logits: the rest is padding, and larger than all else.
const VOCAB: usize = 1000;
const COLUMNS: usize = 1024;

/// How logits lie.
#[derive(Clone, Copy, PartialEq)]
enum Spread {
    /// [`VOCAB`] of them, as a model's do.
    Usual,
    /// As many as large models have.
    Large,
    /// As many, all within a hundredth of each other.
    Near,
    /// As many, all the same.
    Same,
    /// More than any other, the largest of them far from each other.
    Huge,
    /// So many that rows do not begin at whole vectors.
    Odd,
}

impl Spread {
    /// (tokens that exist, columns)
    fn counts(self) -> (usize, usize) {
        match self {
            Spread::Usual => (VOCAB, COLUMNS),
            Spread::Large | Spread::Near | Spread::Same => (50_003, 50_048),
            Spread::Huge => (200_003, 200_064),
            Spread::Odd => (8_201, 8_209),
        }
    }
}

/// Log-probabilities may be summed in f32.
const LOGPROB_BOUND: f32 = 1e-4;

/// What a case's rows ask for. Each row takes the next of the parameters: requests sampled together differ.
struct Rows {
    name: &'static str,
    sampling: Vec<Sampling>,
    masked: bool,
    /// Every second row's token is known.
    given: bool,
    spread: Spread,
}

impl Rows {
    fn of(name: &'static str, sampling: Sampling) -> Rows {
        Rows { name, sampling: vec![sampling], masked: false, given: false, spread: Spread::Usual }
    }
}

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for rows in common().into_iter().chain(rare()).chain(large()) {
        suite.check(Op::Sample, rows.name, |backend| chooses_as_specified(backend, &rows));
    }
    suite.check(Op::Sample, "ties, faults and an empty mask", |backend| faults_stay_in_their_row(backend));
    suite.compare(FedBack { in_flight: false });
    suite.compare(FedBack { in_flight: true });
}

/// What every device does itself.
fn common() -> Vec<Rows> {
    let rows = Rows::of;
    let plain = Sampling::default;
    let truncated =
        || Sampling { temperature: 0.8, top_k: 50, top_p: 0.95, min_p: 0.02, ..Sampling::default() };
    let penalised = || Sampling {
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.3,
        repeat_last_n: Some(20),
        ..Sampling::default()
    };
    let restricted = || Sampling {
        logit_bias: vec![(3, 9.5), (4, -2.0), (count(VOCAB / 2), -100.0)],
        bad_words: vec![vec![5], vec![6, 7], vec![count(VOCAB / 2 + 7)]],
        min_tokens: 10,
        end_tokens: vec![3, 8],
        ..Sampling::default()
    };
    vec![
        rows("greedy", GREEDY),
        Rows { masked: true, ..rows("greedy, masked", GREEDY) },
        rows("temperature 1", plain()),
        Rows { masked: true, ..rows("temperature 1, masked", plain()) },
        rows("temperature 0.3", Sampling { temperature: 0.3, ..plain() }),
        rows("temperature 5", Sampling { temperature: 5.0, ..plain() }),
        rows("top_k 1", Sampling { top_k: 1, ..plain() }),
        rows("top_k 40", Sampling { top_k: 40, ..plain() }),
        rows("top_p 0", Sampling { top_p: 0.0, ..plain() }),
        rows("top_p 0.9", Sampling { top_p: 0.9, ..plain() }),
        rows("min_p 0.05", Sampling { min_p: 0.05, ..plain() }),
        rows("top_n_sigma 1.5", Sampling { top_n_sigma: 1.5, ..plain() }),
        Rows { masked: true, ..rows("top_k, top_p and min_p, masked", truncated()) },
        rows("penalties, greedy", Sampling { temperature: 0.0, ..penalised() }),
        rows("penalties", penalised()),
        rows("bias, bans and min_tokens", restricted()),
        rows("allowed tokens", Sampling { allowed_token_ids: Some(vec![900, 2, 31, 32]), ..plain() }),
        rows("logprobs", Sampling { top_logprobs: Some(20), ..plain() }),
        Rows { given: true, masked: true, ..rows("given tokens", truncated()) },
        rows("no logprobs", Sampling { top_logprobs: None, ..plain() }),
        Rows {
            name: "each row its own parameters",
            sampling: vec![GREEDY, truncated(), penalised(), restricted(), Sampling { top_k: 3, ..plain() }],
            ..rows("", plain())
        },
    ]
}

/// What a device meets where there are many tokens: cuts and draws deep among them, and many of one likelihood.
fn large() -> Vec<Rows> {
    let rows = |name, spread, sampling| Rows { spread, ..Rows::of(name, sampling) };
    let hot = || Sampling { temperature: 1.5, ..Sampling::default() };
    let penalised = Sampling { repetition_penalty: 1.2, frequency_penalty: 0.5, top_p: 0.9, ..hot() };
    let each = || {
        let cut = Sampling { top_k: 5000, top_p: 0.7, min_p: 0.01, ..hot() };
        vec![GREEDY, hot(), Sampling { min_p: 0.02, ..hot() }, Sampling { top_p: 0.98, ..hot() }, cut]
    };
    vec![
        rows("many tokens", Spread::Large, Sampling::default()),
        rows("many tokens, top_k 40", Spread::Large, Sampling { top_k: 40, ..hot() }),
        rows("many tokens, top_k 20000", Spread::Large, Sampling { top_k: 20_000, ..hot() }),
        rows("many tokens, top_p 0.95", Spread::Large, Sampling { top_p: 0.95, ..hot() }),
        rows("many tokens, min_p", Spread::Large, Sampling { min_p: 0.001, top_p: 0.999, ..hot() }),
        Rows { masked: true, ..rows("many tokens, penalties, masked", Spread::Large, penalised) },
        rows("near logits", Spread::Near, hot()),
        rows("near logits, top_p 0.5", Spread::Near, Sampling { top_p: 0.5, ..hot() }),
        rows("near logits, top_k 30000", Spread::Near, Sampling { top_k: 30_000, min_p: 0.1, ..hot() }),
        rows("equal logits", Spread::Same, Sampling::default()),
        Rows { masked: true, ..rows("equal logits, masked", Spread::Same, Sampling { top_p: 0.3, ..hot() }) },
        Rows { sampling: each(), ..rows("200,003 tokens", Spread::Huge, hot()) },
        Rows { sampling: each(), masked: true, ..rows("200,003 tokens, masked", Spread::Huge, hot()) },
        Rows { sampling: each(), masked: true, ..rows("an odd number of columns", Spread::Odd, hot()) },
    ]
}

/// What a device may leave to the specification.
fn rare() -> Vec<Rows> {
    let rows = Rows::of;
    let plain = Sampling::default;
    let dry = Sampling { dry_multiplier: 4.0, dry_sequence_breakers: vec![vec![2]], ..plain() };
    let mirostat = |mirostat| Sampling { mirostat, mirostat_tau: 3.0, ..plain() };
    vec![
        rows("dynamic temperature", Sampling { dynatemp_range: 0.7, ..plain() }),
        rows("typical_p 0.8", Sampling { typical_p: 0.8, ..plain() }),
        rows("XTC", Sampling { xtc_probability: 0.5, xtc_threshold: 0.02, ..plain() }),
        rows("DRY", dry.clone()),
        rows("mirostat 1", mirostat(Mirostat::V1)),
        rows("mirostat 2", mirostat(Mirostat::V2)),
        Rows {
            name: "rare among common parameters",
            sampling: vec![GREEDY, dry, plain(), mirostat(Mirostat::V2)],
            masked: true,
            ..rows("", plain())
        },
    ]
}

const GREEDY: Sampling = {
    let mut sampling = Sampling::greedy();
    sampling.top_logprobs = Some(0);
    sampling
};

fn greedy(slot: usize) -> SampleRow<'static> {
    static SAMPLING: Sampling = GREEDY;
    let slot = count(slot);
    SampleRow { wanted: slot, slot, position: 1, ..SampleRow::plain(count(VOCAB), &SAMPLING) }
}

/// One sequence per slot, each wanting the logits of its only token.
fn one_row_per_slot() -> Batch {
    let mut batch = Batch::default();
    for slot in 0..SLOTS {
        let row = Row { slot: count(slot), start: 0, len: 1, pages: Vec::new(), wanted: 1 };
        batch.push(row, [Token::Known(0)]);
    }
    batch
}

/// Logits with ties at the top, and padding beyond the vocabulary.
fn logits(random: &mut Random, spread: Spread) -> Vec<f32> {
    let (vocab, columns) = spread.counts();
    let mut logits = random.values(SLOTS * columns);
    for row in logits.chunks_exact_mut(columns) {
        let scale = match spread {
            Spread::Usual | Spread::Large | Spread::Huge | Spread::Odd => 3.0,
            Spread::Near => 0.003,
            Spread::Same => 0.0,
        };
        row.iter_mut().for_each(|logit| *logit *= scale);
        if scale > 1.0 {
            row[VOCAB / 2] = 9.0;
            row[VOCAB / 2 + 7] = 9.0;
        }
        if spread == Spread::Huge {
            row.iter_mut().enumerate().for_each(|(id, logit)| *logit += (id / 5000 % 7) as f32 * 0.5);
        }
        row[vocab..].fill(1e9);
    }
    logits
}

fn sampled<B: Backend>(backend: &B, logits: &[f32], rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, Failure> {
    let buf = Bench::<B>::filled(backend, Purpose::Logits, logits.len() / SLOTS, logits)?;
    let mut step = backend.begin(&one_row_per_slot())?;
    let done = backend.sample(&mut step, &buf.buf, rows);
    let output = backend.finish(step)?;
    done?;
    Ok(output.sampled)
}

/// What the scalar specification chooses.
fn specified(logits: &[f32], row: &SampleRow<'_>) -> Sampled {
    let columns = logits.len() / SLOTS;
    sample(&logits[row.wanted as usize * columns..][..columns], row, &mut SampleScratch::default())
}

fn expect_equal(row: usize, got: Option<&Sampled>, wanted: &Sampled) -> Result<(), Failure> {
    let close = |got: f32, wanted: f32| (got - wanted).abs() < LOGPROB_BOUND;
    let equal = got.is_some_and(|got| match wanted.fault {
        Some(fault) => got.fault == Some(fault),
        None => {
            let logprob = match (got.logprob, wanted.logprob) {
                (Some(got), Some(wanted)) => close(got, wanted),
                (got, wanted) => got == wanted,
            };
            let mut tops = got.top.iter().zip(&wanted.top);
            (got.token, got.fault) == (wanted.token, None)
                && logprob
                && got.top.len() == wanted.top.len()
                && tops.all(|(got, wanted)| got.0 == wanted.0 && close(got.1, wanted.1))
                && close(got.mu, wanted.mu)
        }
    });
    if equal { Ok(()) } else { Err(Failure(format!("row {row}: {got:?}, wanted {wanted:?}"))) }
}

fn chooses_as_specified<B: Backend>(backend: &B, asked: &Rows) -> Result<(), Failure> {
    let mut random = Random::of(asked.name);
    let logits = logits(&mut random, asked.spread);
    let (vocab, columns) = asked.spread.counts();
    let masks: Vec<Vec<u32>> =
        (0..SLOTS).map(|_| (0..columns / 32).map(|_| random.below(1 << 32) as u32).collect()).collect();
    // Few different tokens, so that they repeat, and the most likely among them.
    let histories: Vec<Vec<u32>> = (0..SLOTS)
        .map(|slot| {
            let token = |at: usize| [VOCAB / 2, VOCAB / 2 + 7, 2, 3, 6][at];
            (0..8 * slot).map(|_| count(token(random.below(5)))).collect()
        })
        .collect();
    // Many tokens take the specification long.
    let rounds = if asked.spread == Spread::Usual { 6 } else { 2 };
    for round in 0..rounds {
        // Neither the order of rows nor the slots follow the order of the logits.
        let (order, slots) = (random.order(SLOTS), random.order(SLOTS));
        let rows: Vec<SampleRow<'_>> = order
            .iter()
            .zip(&slots)
            .enumerate()
            .map(|(at, (&wanted, &slot))| {
                let history = &histories[wanted as usize];
                SampleRow {
                    wanted,
                    slot,
                    position: 1000 * round + wanted,
                    seed: u64::from(slot) << 33 | 5,
                    vocab: count(vocab),
                    sampling: &asked.sampling[at % asked.sampling.len()],
                    history,
                    generated: count(history.len()) / 2,
                    mask: asked.masked.then(|| &masks[wanted as usize][..]),
                    given: (asked.given && at % 2 == 1)
                        .then(|| Given { token: 100 * slot + wanted, top: 3 * wanted }),
                    mirostat_mu: 1.5 * round as f32,
                }
            })
            .collect();
        let got = sampled(backend, &logits, &rows)?;
        for (at, row) in rows.iter().enumerate() {
            expect_equal(at, got.get(at), &specified(&logits, row))?;
        }
    }
    Ok(())
}

/// A broken row says so; its neighbours are chosen as if it were not there.
fn faults_stay_in_their_row<B: Backend>(backend: &B) -> Result<(), Failure> {
    let mut logits = logits(&mut Random::of("faults"), Spread::Usual);
    logits[COLUMNS + 3] = f32::NAN;
    logits[2 * COLUMNS + 999] = f32::INFINITY;
    logits[3 * COLUMNS] = f32::NEG_INFINITY;
    let nothing = [0; COLUMNS / 32];
    let mut rows: Vec<SampleRow<'_>> = (0..SLOTS).map(greedy).collect();
    rows[4].mask = Some(&nothing);
    let warm = Sampling { temperature: 0.7, ..Sampling::default() };
    for row in &mut rows[5..] {
        row.sampling = &warm;
    }
    let got = sampled(backend, &logits, &rows)?;
    for (at, row) in rows.iter().enumerate() {
        let wanted = specified(&logits, row);
        assert_eq!(wanted.fault.is_some(), (1..5).contains(&at), "the specification of row {at}");
        expect_equal(at, got.get(at), &wanted)?;
    }
    Ok(())
}

/// Sampled tokens are embedded in the next step, which may begin before the first is finished.
struct FedBack {
    in_flight: bool,
}

impl fmt::Display for FedBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fed to the next step{}", if self.in_flight { " while in flight" } else { "" })
    }
}

impl Case for FedBack {
    fn op(&self) -> Op {
        Op::Sample
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut random = Random::of("fed back");
        let table = Stored::matrix(&mut random, DType::Q8_0, VOCAB, 32);
        let table = backend.upload(&[table.part()?])?;
        let logits =
            Bench::<B>::filled(backend, Purpose::Logits, COLUMNS, &logits(&mut random, Spread::Usual))?;
        let mut first = backend.begin(&one_row_per_slot())?;
        let warm = Sampling { temperature: 2.0, ..Sampling::default() };
        let rows: Vec<SampleRow<'_>> =
            (0..SLOTS).map(|slot| SampleRow { sampling: &warm, seed: slot as u64, ..greedy(slot) }).collect();
        backend.sample(&mut first, &logits.buf, &rows)?;

        let mut batch = one_row_per_slot();
        batch.tokens = (0..SLOTS)
            .map(|slot| if slot == 3 { Token::Known(77) } else { Token::Sampled(count(SLOTS - 1 - slot)) })
            .collect();
        let mut first = Some(first);
        if !self.in_flight {
            first.take().map(|step| backend.finish(step)).transpose()?;
        }
        let mut second = match backend.begin(&batch) {
            // A backend with a single slot need not overlap steps.
            Err(Error::StepsInFlight { slots: 1 }) => {
                first.take().map(|step| backend.finish(step)).transpose()?;
                backend.begin(&batch)?
            }
            begun => begun?,
        };
        let mut out = Bench::poisoned(backend, Purpose::Residual, SLOTS, 32)?;
        backend.embed(&second, &table, &mut out.buf)?;
        let mut rows = rows;
        // Slot 5 keeps its token: what is asked about it is only how likely it was.
        rows[5].given = Some(Given { token: 9, top: 0 });
        rows.iter_mut().for_each(|row| row.position = 2);
        backend.sample(&mut second, &logits.buf, &rows)?;
        first.take().map(|step| backend.finish(step)).transpose()?;
        backend.finish(second)?;

        let mut third_out = Bench::poisoned(backend, Purpose::Residual, SLOTS, 32)?;
        batch.tokens = (0..count(SLOTS)).map(Token::Sampled).collect();
        let third = backend.begin(&batch)?;
        backend.embed(&third, &table, &mut third_out.buf)?;
        backend.finish(third)?;
        let mut both = out.table(backend)?;
        both.append(third_out.table(backend)?);
        Ok(both)
    }
}
