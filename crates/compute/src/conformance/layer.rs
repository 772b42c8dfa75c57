//! Whole layers inside `record`, as models run them: where a backend does several operations at once, the result must
//! still be that of one after the other, and must not depend on how a sequence was cut into steps.

use std::fmt;

use fornax_format::DType;

use crate::{
    Attention, Backend, Batch, Glu, Heads, KvDType, KvGroup, KvKind, KvLayer, KvSpec, Linear, Norm,
    PAGE_TOKENS, Purpose, Rope, Row, Rows, Token,
};

use super::bench::{Table, count};
use super::random::{Random, Stored};
use super::{Case, Failure, Op, Suite};

const LAYERS: usize = 2;
const VOCAB: usize = 40;
/// Tokens of the sequence: beyond the 64 keys that a backend may take at once.
const TOKENS: usize = 70;

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    let small = Heads { query: 4, kv: 2, dim: 32 };
    let large = Heads { query: 7, kv: 1, dim: 64 };
    let narrow = |dtypes| Layers { hidden: 96, ffn: 160, heads: small, dtypes };
    let wide = |dtypes| Layers { hidden: 256, ffn: 512, heads: Heads { query: 8, ..small }, dtypes };
    for layers in [
        narrow([DType::BF16, DType::F16, DType::F32, DType::Q8_0]),
        narrow([DType::Q5_0, DType::Q4_0, DType::Q5_0, DType::Q8_0]),
        narrow([DType::Q8_0, DType::Q4_1, DType::Q5_1, DType::BF16]),
        wide([DType::Q4_K, DType::Q4_K, DType::Q4_K, DType::Q6_K]),
        wide([DType::Q6_K, DType::Q5_K, DType::Q5_K, DType::Q4_K]),
        Layers { hidden: 448, ffn: 80, heads: large, dtypes: [DType::BF16; 4] },
    ] {
        suite.same_bits(format_args!("{layers}: in one step, in chunks, token by token"), |backend| {
            let one = layers.logits(backend, &[TOKENS])?;
            let mut other = layers.logits(backend, &[33, 1, 20, 5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])?;
            if within_bits(&one, &other) {
                other = layers.logits(backend, &[1; TOKENS])?;
            }
            Ok((one, other))
        });
        suite.compare(layers);
    }
}

fn within_bits(one: &Table, other: &Table) -> bool {
    one.values.iter().map(|value| value.to_bits()).eq(other.values.iter().map(|value| value.to_bits()))
}

/// Layers of the llama family; the types are those of QKV, output, gate with up, and down.
struct Layers {
    hidden: usize,
    ffn: usize,
    heads: Heads,
    dtypes: [DType; 4],
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Layers { hidden, ffn, dtypes: [qkv, output, gate_up, down], .. } = self;
        write!(f, "layers of {hidden} and {ffn}, {qkv} {output} {gate_up} {down}")
    }
}

impl Case for Layers {
    fn op(&self) -> Op {
        Op::Layer
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        self.logits(backend, &[62, 1, 1, 1, 1, 1, 1, 1, 1])
    }
}

impl Layers {
    /// The logits of every token of one sequence, computed in steps of this many tokens.
    fn logits<B: Backend>(&self, backend: &B, chunks: &[usize]) -> Result<Table, Failure> {
        let Layers { hidden, ffn, heads, dtypes } = *self;
        let mut random = Random::of(self);
        let mut matrix = |dtype, rows, columns| -> Result<B::Weight, Failure> {
            let stored = Stored::matrix(&mut random, dtype, rows, columns);
            Ok(backend.upload(&[stored.part()?])?)
        };
        let embedding = matrix(DType::F16, VOCAB, hidden)?;
        let qkv_weight = matrix(dtypes[0], heads.qkv_columns(), hidden)?;
        let output_weight = matrix(dtypes[1], hidden, heads.query * heads.dim)?;
        let gate_up_weight = matrix(dtypes[2], 2 * ffn, hidden)?;
        let down_weight = matrix(dtypes[3], hidden, ffn)?;
        let mut vector = |values: usize| backend.upload_values(&random.values(values));
        let bias = vector(heads.qkv_columns())?;
        let norms = [vector(hidden)?, vector(hidden)?, vector(hidden)?].map(|weight| Norm::rms(weight, 1e-5));
        let frequencies: Vec<f32> = (0..heads.dim / 2).map(|pair| 0.7f32.powf(pair as f32)).collect();
        let rope = Rope {
            frequencies: backend.upload_values(&frequencies)?,
            pairs: frequencies.len(),
            magnitude: 1.0,
            sections: Vec::new(),
        };
        let pages = TOKENS.div_ceil(PAGE_TOKENS) + 1;
        let group = KvGroup { layers: LAYERS, kind: KvKind::pairs(heads.kv, heads.dim), window: None, pages };
        let mut kv = backend.alloc_kv(&KvSpec { groups: vec![group], dtype: KvDType::F32 })?;
        let table = random.pages(pages);
        let rows = chunks.iter().copied().max().unwrap_or(0);
        let buf = |columns| backend.alloc(Purpose::Activations, rows, columns);
        let (mut residual, mut branch, mut wanted, mut normed) =
            (buf(hidden)?, buf(hidden)?, buf(hidden)?, buf(hidden)?);
        let (mut qkv, mut attended) = (buf(heads.qkv_columns())?, buf(heads.query * heads.dim)?);
        let (mut gate_up, mut gated, mut logits) = (buf(2 * ffn)?, buf(ffn)?, buf(VOCAB)?);

        let mut all = Table::new(VOCAB);
        let mut start = 0;
        for &len in chunks {
            let mut batch = Batch::default();
            let row = Row {
                slot: 0,
                start: count(start),
                len: count(len),
                pages: vec![table.clone()],
                wanted: count(len),
            };
            batch.push(row, (start..start + len).map(|token| Token::Known(count(token * 7 % VOCAB))));
            let step = backend.begin(&batch)?;
            let (tokens, step_ref) = (Rows::Tokens, &step);
            let done = backend.record(&step, &mut || {
                let step = step_ref;
                backend.embed(step, &embedding, &mut residual)?;
                for layer in 0..LAYERS {
                    let attention = Attention::causal(heads, KvLayer { group: 0, layer }, 0.2);
                    backend.norm(step, tokens, &norms[0], &residual, &mut branch)?;
                    backend.linear(step, tokens, &qkv_weight, Some(&bias), &branch, &mut qkv)?;
                    backend.attend(step, &attention, Some(&rope), &mut qkv, &mut kv, &mut attended)?;
                    let output = Linear { weight: &output_weight, bias: None };
                    backend.linear_add(step, tokens, output, &attended, &mut branch, &mut residual)?;
                    backend.norm(step, tokens, &norms[1], &residual, &mut branch)?;
                    backend.linear(step, tokens, &gate_up_weight, None, &branch, &mut gate_up)?;
                    backend.glu(step, Glu::Silu, &gate_up, &mut gated)?;
                    let down = Linear { weight: &down_weight, bias: None };
                    backend.linear_add(step, tokens, down, &gated, &mut branch, &mut residual)?;
                }
                backend.gather_wanted(step, &residual, &mut wanted)?;
                backend.norm(step, Rows::Wanted, &norms[2], &wanted, &mut normed)?;
                backend.matmul(step, Rows::Wanted, &embedding, &normed, &mut logits)
            });
            backend.finish(step)?;
            done?;
            all.append(Table { columns: VOCAB, values: backend.read(&logits, 0, len)? });
            start += len;
        }
        Ok(all)
    }
}
