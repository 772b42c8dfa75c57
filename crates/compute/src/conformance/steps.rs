//! What a backend promises around its operations: recording, refusals, accounting.

use std::fmt;

use fornax_format::DType;

use crate::{
    Backend, Batch, Counting, Error, Heads, KvDType, KvGroup, KvKind, KvLayer, KvSpec, Memory, Norm, PageId,
    Part, Purpose, Row, Rows, Sizes, Token, Usage,
};

use super::bench::{Bench, Table, batch, count};
use super::random::{Random, Stored};
use super::{Case, Failure, Op, Suite};

pub(super) fn cases<B: Backend, S: Sizes + Clone>(suite: &mut Suite<'_, B>, sizes: &S) {
    suite.compare(Replayed);
    suite.check(Op::Limits, "step slots run out and come back", |backend| step_slots_are_counted(backend));
    for (what, batch, expected) in refused() {
        suite.check(Op::Limits, format_args!("refused: {what}"), |backend| {
            is_refused(backend, &batch, expected)
        });
    }
    suite.check(Op::Limits, "refused: a token beyond the table", |backend| token_is_checked(backend));
    suite.check(Op::Limits, "refused: a page beyond the pool", |backend| page_is_checked(backend));
    suite.check(Op::Limits, "a step that wants no logits", |backend| nothing_wanted(backend));
    suite.check(Op::Memory, "counted like the plan, and given back", |backend| {
        memory_is_counted(backend, sizes)
    });
}

/// Steps of the same shape through `record`: what was recorded for the first must compute the others from their own
/// tokens.
struct Replayed;

impl fmt::Display for Replayed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("embed and matmul, three steps of one shape")
    }
}

impl Case for Replayed {
    fn op(&self) -> Op {
        Op::Record
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        const COLUMNS: usize = 64;
        const TOKENS: usize = 4;
        let mut random = Random::of(self);
        let embedding = Stored::matrix(&mut random, DType::F16, 40, COLUMNS);
        let embedding = backend.upload(&[embedding.part()?])?;
        let head = Stored::matrix(&mut random, DType::Q4_0, 40, COLUMNS);
        let head = backend.upload(&[head.part()?])?;
        let mut hidden = Bench::poisoned(backend, Purpose::Residual, TOKENS, COLUMNS)?;
        let mut logits = Bench::poisoned(backend, Purpose::Logits, TOKENS, 40)?;
        let mut all = Table::new(40);
        for round in 0..3 {
            backend.write(&mut hidden.buf, 0, &[f32::NAN; TOKENS * COLUMNS])?;
            backend.write(&mut logits.buf, 0, &[f32::NAN; TOKENS * 40])?;
            let mut batch = batch(TOKENS, TOKENS);
            batch.tokens = (0..TOKENS).map(|token| Token::Known(count(9 * round + token))).collect();
            let step = backend.begin(&batch)?;
            let done = backend.record(&step, &mut || {
                backend.embed(&step, &embedding, &mut hidden.buf)?;
                backend.matmul(&step, Rows::Wanted, &head, &hidden.buf, &mut logits.buf)
            });
            backend.finish(step)?;
            done?;
            all.append(logits.table(backend)?);
        }
        Ok(all)
    }
}

fn step_slots_are_counted<B: Backend>(backend: &B) -> Result<(), Failure> {
    const MANY: usize = 64;
    let mut steps = Vec::new();
    let refusal = loop {
        match backend.begin(&batch(1, 0)) {
            Ok(step) if steps.len() < MANY => steps.push(step),
            Ok(_) => return Err(Failure(format!("{MANY} steps begun and none refused"))),
            Err(error) => break error,
        }
    };
    let begun = steps.len();
    // Any slot comes back, not only the last one.
    let finished = steps.drain(..1).map(|step| backend.finish(step)).collect::<Result<Vec<_>, _>>();
    let again = backend.begin(&batch(1, 0));
    for step in steps.into_iter().chain(again.ok()) {
        backend.finish(step)?;
    }
    finished?;
    match refusal {
        Error::StepsInFlight { slots } if slots == begun => {}
        other => return Err(Failure(format!("after {begun} steps: {other}"))),
    }
    // And all of them come back.
    let steps = (0..begun).map(|_| backend.begin(&batch(1, 0))).collect::<Result<Vec<_>, _>>()?;
    for step in steps {
        backend.finish(step)?;
    }
    Ok(())
}

/// Which refusal a batch deserves.
#[derive(Clone, Copy, Debug)]
enum Refusal {
    Limit,
    Shape,
}

fn refused() -> Vec<(&'static str, Batch, Refusal)> {
    let row = |slot, len, pages: Vec<Vec<PageId>>, wanted| Row { slot, start: 0, len, pages, wanted };
    let of = |rows: Vec<Row>| {
        let mut batch = Batch::default();
        for row in rows {
            let len = row.len;
            batch.push(row, (0..len).map(Token::Known));
        }
        batch
    };
    let mut missing_tokens = batch(5, 1);
    missing_tokens.tokens.pop();
    let mut missing_positions = batch(5, 1);
    missing_positions.positions.pop();
    let mut sampled_slot = batch(1, 1);
    sampled_slot.tokens = vec![Token::Sampled(1 << 20)];
    vec![
        ("a million tokens", batch(1 << 20, 1), Refusal::Limit),
        ("slot a million", of(vec![row(1 << 20, 1, vec![], 1)]), Refusal::Limit),
        ("token sampled into slot a million", sampled_slot, Refusal::Limit),
        ("more wanted than tokens", batch(3, 4), Refusal::Limit),
        ("fewer tokens than rows say", missing_tokens, Refusal::Shape),
        ("fewer positions than tokens", missing_positions, Refusal::Shape),
        ("two rows of one slot", of(vec![row(1, 2, vec![], 1), row(1, 2, vec![], 1)]), Refusal::Shape),
        ("33 tokens on one page", of(vec![row(0, 33, vec![vec![PageId(1)]], 1)]), Refusal::Shape),
        ("a row without tokens", of(vec![row(0, 0, vec![], 0)]), Refusal::Shape),
    ]
}

/// Refused, and again and again: a refused batch holds no step slot.
fn is_refused<B: Backend>(backend: &B, batch: &Batch, expected: Refusal) -> Result<(), Failure> {
    for _ in 0..8 {
        match (backend.begin(batch), expected) {
            (Err(Error::BatchLimit { .. }), Refusal::Limit)
            | (Err(Error::BatchShape { .. }), Refusal::Shape) => {}
            (Err(other), _) => return Err(Failure(format!("refused for another reason: {other}"))),
            (Ok(step), _) => {
                backend.finish(step)?;
                return Err(Failure("accepted".to_owned()));
            }
        }
    }
    Ok(())
}

fn expect_refused(done: Result<(), Error>) -> Result<(), Failure> {
    match done {
        Err(Error::BatchLimit { .. }) => Ok(()),
        Err(other) => Err(Failure(format!("refused for another reason: {other}"))),
        Ok(()) => Err(Failure("accepted".to_owned())),
    }
}

fn token_is_checked<B: Backend>(backend: &B) -> Result<(), Failure> {
    let table = Stored::matrix(&mut Random::of("token"), DType::F32, 4, 8);
    let table = backend.upload(&[table.part()?])?;
    let mut out = Bench::poisoned(backend, Purpose::Residual, 5, 8)?;
    // Ids 0 to 4 of a table of four rows.
    let step = backend.begin(&batch(5, 0))?;
    let done = backend.embed(&step, &table, &mut out.buf);
    backend.finish(step)?;
    expect_refused(done)
}

fn page_is_checked<B: Backend>(backend: &B) -> Result<(), Failure> {
    let heads = Heads { query: 1, kv: 1, dim: 8 };
    let group = KvGroup { layers: 1, kind: KvKind::pairs(1, 8), window: None, pages: 3 };
    let mut kv = backend.alloc_kv(&KvSpec { groups: vec![group], dtype: KvDType::F32 })?;
    let qkv = Bench::filled(backend, Purpose::Activations, heads.qkv_columns(), &[0.5; 24])?;
    let mut batch = batch(1, 0);
    batch.rows[0].pages = vec![vec![PageId(3)]];
    let step = backend.begin(&batch)?;
    let done = backend.kv_write(&step, heads, KvLayer { group: 0, layer: 0 }, &qkv.buf, &mut kv);
    backend.finish(step)?;
    expect_refused(done)
}

/// The first chunks of a prompt want no logits, and take the same way as the last.
fn nothing_wanted<B: Backend>(backend: &B) -> Result<(), Failure> {
    let mut random = Random::of("nothing wanted");
    let head = Stored::matrix(&mut random, DType::Q8_0, 5, 32);
    let head = backend.upload(&[head.part()?])?;
    let norm = Norm::rms(backend.upload_values(&random.values(32))?, 1e-5);
    let x = Bench::filled(backend, Purpose::Residual, 32, &random.values(3 * 32))?;
    let mut gathered = Bench::poisoned(backend, Purpose::Residual, 0, 32)?;
    let mut normed = Bench::poisoned(backend, Purpose::Activations, 0, 32)?;
    let mut logits = Bench::poisoned(backend, Purpose::Logits, 0, 5)?;
    let mut step = backend.begin(&batch(3, 0))?;
    let done = backend
        .gather_wanted(&step, &x.buf, &mut gathered.buf)
        .and_then(|()| backend.norm(&step, Rows::Wanted, &norm, &gathered.buf, &mut normed.buf))
        .and_then(|()| backend.matmul(&step, Rows::Wanted, &head, &normed.buf, &mut logits.buf))
        .and_then(|()| backend.sample(&mut step, &logits.buf, &[]));
    let output = backend.finish(step)?;
    done?;
    for bench in [&gathered, &normed, &logits] {
        bench.table(backend)?;
    }
    if output.sampled.is_empty() { Ok(()) } else { Err(Failure(format!("sampled {:?}", output.sampled))) }
}

/// Everything a model allocates, on any memory; held until the result is dropped.
fn allocate<M: Memory>(memory: &M, parts: &[Part<'_>], vectors: &[Part<'_>]) -> Result<impl Sized, Error> {
    let weight = memory.upload(parts)?;
    let mut bufs = vec![memory.upload_vector(vectors)?, memory.upload_values(&[1.0; 33])?];
    for purpose in [Purpose::Residual, Purpose::Activations, Purpose::Logits] {
        bufs.push(memory.alloc(purpose, 7, 129)?);
    }
    let group = |layers, window| KvGroup { layers, kind: KvKind::pairs(3, 64), window, pages: 5 };
    let groups = vec![group(2, None), group(1, Some(32))];
    let kv = memory.alloc_kv(&KvSpec { groups, dtype: KvDType::BF16 })?;
    Ok((weight, bufs, kv))
}

fn memory_is_counted<B: Backend, S: Sizes + Clone>(backend: &B, sizes: &S) -> Result<(), Failure> {
    let mut random = Random::of("memory");
    let stored = [(DType::Q4_K, 5), (DType::Q6_K, 3), (DType::F16, 1)]
        .map(|(dtype, rows)| Stored::matrix(&mut random, dtype, rows, 256));
    let parts = stored.iter().map(Stored::part).collect::<Result<Vec<_>, _>>()?;
    let vector = Stored::vector(&mut random, DType::BF16, 77);
    let vectors = [vector.part()?];
    let plan = Counting::new(sizes.clone());
    let (before, planned_before) = (backend.usage(), plan.usage());
    let expect = |what: &str, got: Usage, wanted: Usage| match got == wanted {
        true => Ok(()),
        false => Err(Failure(format!("{what}: {got:?}, wanted {wanted:?}"))),
    };
    expect("nothing allocated", before, planned_before)?;
    allocate(&plan, &parts, &vectors)?;
    let held = allocate(backend, &parts, &vectors)?;
    expect("allocated", backend.usage(), plan.usage())?;
    drop(held);
    expect("given back", backend.usage(), before)?;

    let too_much = backend.alloc(Purpose::Activations, 1 << 40, 1 << 20);
    match too_much.map(|_| ()) {
        Err(Error::OutOfMemory { purpose: Purpose::Activations, .. }) => {}
        Err(other) => return Err(Failure(format!("2^60 values: refused for another reason: {other}"))),
        Ok(()) => return Err(Failure("2^60 values were allocated".to_owned())),
    }
    expect("after a refusal", backend.usage(), before)
}
