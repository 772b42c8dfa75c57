//! NaN and infinity: a broken value must come out broken, where the sampler sees it, and stay in its row.

use fornax_format::DType;

use crate::{
    Attention, Backend, Batch, Glu, Heads, KvDType, KvGroup, KvKind, KvLayer, KvSpec, Norm, PageId, Purpose,
    Row, Rows, Token,
};

use super::bench::{Bench, Table, batch, step};
use super::random::{Random, Stored};
use super::{Failure, Op, Suite};

const COLUMNS: usize = 256;
/// Rows of each case, and the one that is broken.
const ROWS: usize = 6;
const BROKEN: usize = 2;

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for fault in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for dtype in suite.weight_types() {
            suite.check(Op::Fault, format_args!("{fault} through matmul {dtype}"), |backend| {
                stays_in_its_row(&product(backend, dtype, fault)?)
            });
        }
        suite.check(Op::Fault, format_args!("{fault} through norm"), |backend| {
            stays_in_its_row(&norm(backend, fault)?)
        });
        suite.check(Op::Fault, format_args!("{fault} through glu"), |backend| {
            stays_in_its_row(&gated(backend, fault)?)
        });
        suite.check(Op::Fault, format_args!("{fault} through attention"), |backend| {
            stays_in_its_row(&attention(backend, fault)?)
        });
    }
}

/// The broken row holds something that is not finite, every other row is finite throughout.
fn stays_in_its_row(table: &Table) -> Result<(), Failure> {
    for (row, values) in table.rows().enumerate() {
        let finite = values.iter().all(|value| value.is_finite());
        if finite == (row == BROKEN) {
            return Err(Failure(match finite {
                true => "the fault was lost".to_owned(),
                false => format!("the fault of row {BROKEN} reached row {row}"),
            }));
        }
    }
    Ok(())
}

fn inputs(columns: usize, fault: f32) -> Vec<f32> {
    let mut values = Random::of("faults").values(ROWS * columns);
    values[BROKEN * columns + 5] = fault;
    values
}

fn product<B: Backend>(backend: &B, dtype: DType, fault: f32) -> Result<Table, Failure> {
    let weight = Stored::matrix(&mut Random::of("fault weight"), dtype, 9, COLUMNS);
    let weight = backend.upload(&[weight.part()?])?;
    let x = Bench::filled(backend, Purpose::Activations, COLUMNS, &inputs(COLUMNS, fault))?;
    let mut out = Bench::filled(backend, Purpose::Activations, 9, &[0.0; ROWS * 9])?;
    step(backend, &batch(ROWS, 0), |step| {
        Ok(backend.matmul(step, Rows::Tokens, &weight, &x.buf, &mut out.buf)?)
    })?;
    out.table(backend)
}

fn norm<B: Backend>(backend: &B, fault: f32) -> Result<Table, Failure> {
    let norm = Norm::rms(backend.upload_values(&[0.5; COLUMNS])?, 1e-5);
    let x = Bench::filled(backend, Purpose::Residual, COLUMNS, &inputs(COLUMNS, fault))?;
    let mut out = Bench::filled(backend, Purpose::Activations, COLUMNS, &[0.0; ROWS * COLUMNS])?;
    step(backend, &batch(ROWS, 0), |step| {
        Ok(backend.norm(step, Rows::Tokens, &norm, &x.buf, &mut out.buf)?)
    })?;
    out.table(backend)
}

fn gated<B: Backend>(backend: &B, fault: f32) -> Result<Table, Failure> {
    // Among the ups: a gate of minus infinity is rightly zero.
    let mut values = Random::of("faults").values(ROWS * COLUMNS);
    values[BROKEN * COLUMNS + COLUMNS / 2] = fault;
    let x = Bench::filled(backend, Purpose::Activations, COLUMNS, &values)?;
    let mut out = Bench::filled(backend, Purpose::Activations, COLUMNS / 2, &[0.0; ROWS * COLUMNS / 2])?;
    step(backend, &batch(ROWS, 0), |step| Ok(backend.glu(step, Glu::Silu, &x.buf, &mut out.buf)?))?;
    out.table(backend)
}

/// The value of one of six sequences of one token is broken.
fn attention<B: Backend>(backend: &B, fault: f32) -> Result<Table, Failure> {
    let heads = Heads { query: 2, kv: 1, dim: 32 };
    let layer = KvLayer { group: 0, layer: 0 };
    let group = KvGroup { layers: 1, kind: KvKind::pairs(1, 32), window: None, pages: ROWS + 1 };
    let mut kv = backend.alloc_kv(&KvSpec { groups: vec![group], dtype: KvDType::F16 })?;
    let mut values = Random::of("faults").values(ROWS * heads.qkv_columns());
    values[(BROKEN + 1) * heads.qkv_columns() - 1] = fault;
    let qkv = Bench::filled(backend, Purpose::Activations, heads.qkv_columns(), &values)?;
    let mut out = Bench::filled(backend, Purpose::Activations, 64, &[0.0; ROWS * 64])?;
    let mut batch = Batch::default();
    for slot in 0..ROWS as u32 {
        let row = Row { slot, start: 0, len: 1, pages: vec![vec![PageId(slot + 1)]], wanted: 0 };
        batch.push(row, [Token::Known(0)]);
    }
    step(backend, &batch, |step| {
        backend.kv_write(step, heads, layer, &qkv.buf, &mut kv)?;
        Ok(backend.attention(step, &Attention::causal(heads, layer, 0.2), &qkv.buf, &kv, &mut out.buf)?)
    })?;
    out.table(backend)
}
