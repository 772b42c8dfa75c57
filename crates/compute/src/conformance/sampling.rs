//! Sampling: the chosen tokens, and their way into the next step.

use std::fmt;

use fornax_format::DType;

use crate::{Backend, Batch, Error, Purpose, Row, SampleRow, SampleScratch, Sampled, Token, sample};

use super::bench::{Bench, Table, count};
use super::random::{Random, Stored};
use super::{Case, Failure, Op, SLOTS, Suite};

/// Tokens that exist, and columns of the logits: the rest is padding, and larger than all else.
const VOCAB: usize = 1000;
const COLUMNS: usize = 1024;

/// Log-probabilities may be summed in f32.
const LOGPROB_BOUND: f32 = 1e-4;

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    let plain = Parameters { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, masked: false };
    for parameters in [
        Parameters { temperature: 0.0, ..plain },
        Parameters { temperature: 0.0, masked: true, ..plain },
        plain,
        Parameters { masked: true, ..plain },
        Parameters { temperature: 0.3, ..plain },
        Parameters { temperature: 5.0, ..plain },
        Parameters { top_k: 1, ..plain },
        Parameters { top_k: 40, ..plain },
        Parameters { top_p: 0.0, ..plain },
        Parameters { top_p: 0.9, ..plain },
        Parameters { min_p: 0.05, ..plain },
        Parameters { temperature: 0.8, top_k: 50, top_p: 0.95, min_p: 0.02, masked: true },
    ] {
        suite.check(Op::Sample, parameters, |backend| chooses_as_specified(backend, parameters));
    }
    suite.check(Op::Sample, "ties, faults and an empty mask", |backend| faults_stay_in_their_row(backend));
    suite.compare(FedBack { in_flight: false });
    suite.compare(FedBack { in_flight: true });
}

#[derive(Clone, Copy)]
struct Parameters {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    masked: bool,
}

impl fmt::Display for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Parameters { temperature, top_k, top_p, min_p, masked } = self;
        write!(f, "temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}")?;
        if *masked { f.write_str(", masked") } else { Ok(()) }
    }
}

fn greedy(slot: usize) -> SampleRow<'static> {
    SampleRow {
        wanted: count(slot),
        slot: count(slot),
        position: 1,
        seed: 0,
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        vocab: count(VOCAB),
        mask: None,
    }
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
fn logits(random: &mut Random) -> Vec<f32> {
    let mut logits = random.values(SLOTS * COLUMNS);
    for row in logits.chunks_exact_mut(COLUMNS) {
        row.iter_mut().for_each(|logit| *logit *= 3.0);
        row[VOCAB / 2] = 9.0;
        row[VOCAB / 2 + 7] = 9.0;
        row[VOCAB..].fill(1e9);
    }
    logits
}

fn sampled<B: Backend>(backend: &B, logits: &[f32], rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, Failure> {
    let buf = Bench::<B>::filled(backend, Purpose::Logits, COLUMNS, logits)?;
    let mut step = backend.begin(&one_row_per_slot())?;
    let done = backend.sample(&mut step, &buf.buf, rows);
    let output = backend.finish(step)?;
    done?;
    Ok(output.sampled)
}

/// What the scalar specification chooses.
fn specified(logits: &[f32], row: &SampleRow<'_>) -> Sampled {
    sample(&logits[row.wanted as usize * COLUMNS..][..COLUMNS], row, &mut SampleScratch::default())
}

fn expect_equal(row: usize, got: Option<&Sampled>, wanted: Sampled) -> Result<(), Failure> {
    let equal = got.is_some_and(|got| match wanted.fault {
        true => got.fault,
        false => {
            (got.token, got.fault) == (wanted.token, false)
                && (got.logprob - wanted.logprob).abs() < LOGPROB_BOUND
        }
    });
    if equal { Ok(()) } else { Err(Failure(format!("row {row}: {got:?}, wanted {wanted:?}"))) }
}

fn chooses_as_specified<B: Backend>(backend: &B, parameters: Parameters) -> Result<(), Failure> {
    let mut random = Random::of(parameters);
    let logits = logits(&mut random);
    let masks: Vec<Vec<u32>> =
        (0..SLOTS).map(|_| (0..COLUMNS / 32).map(|_| random.below(1 << 32) as u32).collect()).collect();
    for round in 0..6 {
        // Neither the order of rows nor the slots follow the order of the logits.
        let (order, slots) = (random.order(SLOTS), random.order(SLOTS));
        let rows: Vec<SampleRow<'_>> = order
            .iter()
            .zip(&slots)
            .map(|(&wanted, &slot)| SampleRow {
                wanted,
                slot,
                position: 1000 * round + wanted,
                seed: u64::from(slot) << 33 | 5,
                temperature: parameters.temperature,
                top_k: parameters.top_k,
                top_p: parameters.top_p,
                min_p: parameters.min_p,
                mask: parameters.masked.then(|| &masks[wanted as usize][..]),
                ..greedy(0)
            })
            .collect();
        let got = sampled(backend, &logits, &rows)?;
        for (at, row) in rows.iter().enumerate() {
            expect_equal(at, got.get(at), specified(&logits, row))?;
        }
    }
    Ok(())
}

/// A broken row says so; its neighbours are chosen as if it were not there.
fn faults_stay_in_their_row<B: Backend>(backend: &B) -> Result<(), Failure> {
    let mut logits = logits(&mut Random::of("faults"));
    logits[COLUMNS + 3] = f32::NAN;
    logits[2 * COLUMNS + 999] = f32::INFINITY;
    logits[3 * COLUMNS] = f32::NEG_INFINITY;
    let nothing = [0; COLUMNS / 32];
    let mut rows: Vec<SampleRow<'_>> = (0..SLOTS).map(greedy).collect();
    rows[4].mask = Some(&nothing);
    for row in &mut rows[5..] {
        row.temperature = 0.7;
    }
    let got = sampled(backend, &logits, &rows)?;
    for (at, row) in rows.iter().enumerate() {
        let wanted = specified(&logits, row);
        assert_eq!(wanted.fault, (1..5).contains(&at), "the specification of row {at}");
        expect_equal(at, got.get(at), wanted)?;
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
        let logits = Bench::<B>::filled(backend, Purpose::Logits, COLUMNS, &logits(&mut random))?;
        // Slot 5 is not sampled in the second step: its token stays.
        let mut first = backend.begin(&one_row_per_slot())?;
        let rows: Vec<SampleRow<'_>> = (0..SLOTS)
            .map(|slot| SampleRow { temperature: 2.0, seed: slot as u64, ..greedy(slot) })
            .collect();
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
        rows.remove(5);
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
