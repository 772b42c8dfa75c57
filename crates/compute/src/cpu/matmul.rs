//! Rows of activations times the rows of a weight.
//!
//! Threads divide the output columns (the weight's rows), so each weight byte is read by one thread only. A thread
//! goes through its weight rows in tiles that stay in the first cache while all activation rows pass over them.
//! Neither the tiles nor the threads touch the order inside one product: that is the format's own.

use std::ops::Range;

use super::Activations;
use super::disjoint::{Disjoint, for_each_row};
use super::memory::{Block, Matrix, WeightPart};
use super::pool::Pool;
use super::quant::{Activation, Dot, Format, Q8Block, Simd, dot_f32, quantize_q8};

/// Weight rows of a tile: their results fill a cache line of an output row.
const TILE_WEIGHTS: usize = 16;
/// Activation rows of a tile: quantised, 64 rows of a 1536-wide model are 120 KB.
const TILE_ROWS: usize = 64;

/// What a multiplication works with beside its operands.
pub(super) struct Multiplier<'a> {
    pub(super) pool: &'a Pool,
    pub(super) simd: Simd,
    pub(super) activations: Activations,
    /// Room for quantised activations.
    pub(super) quantized: &'a mut Block,
    /// Room for dequantised weight rows: the same number of values for each thread.
    pub(super) dequantized: &'a mut Block,
}

impl Multiplier<'_> {
    /// `out[r][n]` = sum over k of `x[r][k] * weight[n][k]`.
    pub(super) fn multiply(&mut self, weight: Matrix<'_>, x: &[f32], out: &mut [f32]) {
        if x.is_empty() || out.is_empty() {
            return;
        }
        let Some(row_bytes) = self.quantized_row_bytes(weight) else {
            return self.multiply_block(weight, x, out);
        };
        // As many activation rows at a time as the scratch holds when quantised.
        let rows = self.quantized.bytes().len() / row_bytes;
        for (x, out) in x.chunks(rows * weight.columns).zip(out.chunks_mut(rows * weight.rows)) {
            self.multiply_block(weight, x, out);
        }
    }

    /// Bytes that one activation row takes in the scratch; `None` if all parts take it as it is.
    fn quantized_row_bytes(&self, weight: Matrix<'_>) -> Option<usize> {
        self.quantizes(weight).then_some(weight.columns / 32 * size_of::<Q8Block>())
    }

    /// Whether any part takes quantised activations.
    fn quantizes(&self, weight: Matrix<'_>) -> bool {
        self.activations == Activations::Int8 && weight.parts.iter().any(|part| is_q8(part.format))
    }

    fn multiply_block(&mut self, weight: Matrix<'_>, x: &[f32], out: &mut [f32]) {
        let rows = x.len() / weight.columns;
        let q8_blocks = usize::from(self.quantizes(weight)) * rows * (weight.columns / 32);
        let (pool, simd, columns) = (self.pool, self.simd, weight.columns);

        let q8_bytes = &mut self.quantized.bytes_mut()[..q8_blocks * size_of::<Q8Block>()];
        let q8_rows: &mut [Q8Block] = bytemuck::cast_slice_mut(q8_bytes);
        for_each_row(pool, q8_rows, columns / 32, |row, out| {
            quantize_q8(simd, &x[row * columns..][..columns], out);
        });
        let inputs = Inputs { rows, columns, float: x, q8: q8_rows };

        let scratch: &mut [f32] = self.dequantized.values_mut();
        let scratch_values = scratch.len() / pool.threads();
        let (scratch, out) = (Disjoint::new(scratch), Disjoint::new(out));
        let int8 = self.activations == Activations::Int8;
        pool.for_each(weight.rows.div_ceil(TILE_WEIGHTS), |thread, tiles| {
            // SAFETY: each thread takes its own stretch.
            let scratch = unsafe { scratch.part(thread * scratch_values..(thread + 1) * scratch_values) };
            let mine = tiles.start * TILE_WEIGHTS..weight.rows.min(tiles.end * TILE_WEIGHTS);
            let mut first = 0;
            for part in weight.parts {
                let here = mine.start.max(first)..mine.end.min(first + part.rows);
                let store = |row: usize, weight_row: usize, products: &[f32]| {
                    let at = row * weight.rows + first + weight_row;
                    // SAFETY: threads have different weight rows, and a thread writes one tile at a time.
                    unsafe { out.part(at..at + products.len()) }.copy_from_slice(products);
                };
                if !here.is_empty() {
                    let rows = here.start - first..here.end - first;
                    multiply_part(simd, int8, (weight, part, rows), &inputs, scratch, store);
                }
                first += part.rows;
            }
        });
    }
}

fn is_q8(format: &Format) -> bool {
    matches!(format.activation, Activation::Q8(_))
}

/// The activation rows in every form that the weight's parts ask for; the others are empty.
struct Inputs<'a> {
    rows: usize,
    columns: usize,
    float: &'a [f32],
    q8: &'a [Q8Block],
}

/// Multiplies some rows of one part by all activation rows; `store(activation row, first weight row, products)`.
fn multiply_part(
    simd: Simd,
    int8: bool,
    (weight, part, rows): (Matrix<'_>, &WeightPart, Range<usize>),
    inputs: &Inputs<'_>,
    scratch: &mut [f32],
    store: impl Fn(usize, usize, &[f32]),
) {
    let tiles =
        |weights: usize| rows.clone().step_by(weights).map(move |start| start..rows.end.min(start + weights));
    match &part.format.activation {
        Activation::Q8(dot) if int8 => {
            for tile in tiles(TILE_WEIGHTS) {
                let store = |row, products: &[f32]| store(row, tile.start, products);
                multiply_tile(
                    dot,
                    tile.len(),
                    weight.part_rows(part, tile.clone()),
                    inputs.q8,
                    inputs.rows,
                    store,
                );
            }
        }
        _ => {
            for tile in tiles(TILE_WEIGHTS.min(scratch.len() / inputs.columns)) {
                let values = &mut scratch[..tile.len() * inputs.columns];
                (part.format.dequantize)(weight.part_rows(part, tile.clone()), values);
                let store = |row, products: &[f32]| store(row, tile.start, products);
                multiply_tile(dot_f32(simd), tile.len(), values, inputs.float, inputs.rows, store);
            }
        }
    }
}

/// The products of a few weight rows with all activation rows; both lie row after row.
fn multiply_tile<W, A>(
    dot: &Dot<W, A>,
    weight_rows: usize,
    weights: &[W],
    inputs: &[A],
    rows: usize,
    store: impl Fn(usize, &[f32]),
) {
    let (weight_len, input_len) = (weights.len() / weight_rows, inputs.len() / rows);
    let weights = || weights.chunks_exact(weight_len);
    let mut products = [0.0; TILE_WEIGHTS];
    if rows == 1 {
        for (product, weight) in products.iter_mut().zip(weights()) {
            *product = dot.one(weight, inputs);
        }
        return store(0, &products[..weight_rows]);
    }
    // (weight row, activation row)
    let mut tile = [[0.0; TILE_ROWS]; TILE_WEIGHTS];
    for (chunk, inputs) in inputs.chunks(TILE_ROWS * input_len).enumerate() {
        let rows = inputs.len() / input_len;
        for (out, weight) in tile.iter_mut().zip(weights()) {
            dot.rows(weight, inputs, &mut out[..rows]);
        }
        for row in 0..rows {
            for (product, out) in products.iter_mut().zip(&tile) {
                *product = out[row];
            }
            store(chunk * TILE_ROWS + row, &products[..weight_rows]);
        }
    }
}

#[cfg(test)]
mod tests {
    use fornax_format::{DType, View};

    use crate::cpu::testing::{bits, decode_batch, numbers};
    use crate::cpu::{Activations, Cpu, CpuOptions, Simd};
    use crate::{Backend, Memory, Part, Purpose, Rows};

    /// Stored bytes whose scales are ordinary numbers: f16 scales get a fixed exponent.
    fn stored(dtype: DType, seed: u64, values: usize) -> Vec<u8> {
        let random = numbers(seed, dtype.bytes_for(values).unwrap());
        match dtype {
            DType::F32 => numbers(seed, values).iter().flat_map(|x| x.to_le_bytes()).collect(),
            DType::F16 => {
                numbers(seed, values).iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect()
            }
            DType::BF16 => {
                numbers(seed, values).iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect()
            }
            _ => {
                let mut bytes: Vec<u8> = random.iter().map(|x| x.to_le_bytes()[1]).collect();
                let scales: &[usize] = match dtype {
                    DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => &[0],
                    DType::Q6_K => &[208],
                    _ => &[0, 2],
                };
                for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                    for &at in scales {
                        block[at + 1] = 0x20 | block[at + 1] & 0x83;
                    }
                }
                bytes
            }
        }
    }

    /// Multiplies `rows` rows by a weight of several types, `at_once` rows at a time.
    fn product(
        options: CpuOptions,
        types: &[DType],
        columns: usize,
        rows: usize,
        at_once: usize,
    ) -> Vec<f32> {
        let cpu = Cpu::new(options).unwrap();
        let weight_rows = [37, 5, 16];
        let bytes: Vec<_> = types
            .iter()
            .zip(weight_rows)
            .map(|(&dtype, rows)| stored(dtype, rows as u64, rows * columns))
            .collect();
        let parts: Vec<_> = types
            .iter()
            .zip(weight_rows)
            .zip(&bytes)
            .map(|((&dtype, rows), bytes)| {
                Part::from(View::new("w", dtype, vec![rows, columns], bytes).unwrap())
            })
            .collect();
        let weight = cpu.upload(&parts).unwrap();
        let mut x = cpu.alloc(Purpose::Activations, at_once, columns).unwrap();
        let mut out = cpu.alloc(Purpose::Activations, at_once + 1, weight.rows).unwrap();
        let inputs = numbers(9, rows * columns);
        let mut all = Vec::new();
        for inputs in inputs.chunks(at_once * columns) {
            let rows = inputs.len() / columns;
            cpu.write(&mut x, 0, inputs).unwrap();
            cpu.write(&mut out, 0, &vec![f32::NAN; (at_once + 1) * weight.rows]).unwrap();
            let step = cpu.begin(&decode_batch(rows)).unwrap();
            cpu.matmul(&step, Rows::Tokens, &weight, &x, &mut out).unwrap();
            cpu.finish(step).unwrap();
            all.extend(cpu.read(&out, 0, rows).unwrap());
            let beyond = cpu.read(&out, rows, at_once + 1 - rows).unwrap();
            assert!(beyond.iter().all(|value| value.is_nan()), "rows beyond the step were written");
        }
        all
    }

    fn dequantized_product(types: &[DType], columns: usize, rows: usize) -> Vec<f64> {
        let inputs = numbers(9, rows * columns);
        let mut weights = Vec::new();
        for (&dtype, rows) in types.iter().zip([37, 5, 16]) {
            let mut values = vec![0.0; rows * columns];
            let format = super::super::quant::format(dtype, Simd::Scalar).unwrap();
            (format.dequantize)(&stored(dtype, rows as u64, rows * columns), &mut values);
            weights.extend(values);
        }
        let dot =
            |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>();
        let product = |x| weights.chunks(columns).map(move |w| dot(x, w));
        inputs.chunks(columns).flat_map(product).collect()
    }

    #[test]
    fn rows_alone_among_others_and_on_any_number_of_threads_give_the_same_bits_near_the_true_product() {
        const MIXES: [&[DType]; 5] = [
            &[DType::F32, DType::F16, DType::BF16],
            &[DType::Q4_0, DType::Q4_1, DType::Q5_0],
            &[DType::Q5_1, DType::Q8_0, DType::F32],
            &[DType::Q4_K, DType::Q5_K, DType::Q6_K],
            &[DType::Q4_K, DType::Q8_0, DType::F16],
        ];
        let (columns, rows) = (512, 71);
        for types in MIXES {
            let truth = dequantized_product(types, columns, rows);
            let power = truth.iter().map(|x| x * x).sum::<f64>();
            for activations in [Activations::Float, Activations::Int8] {
                for simd in Simd::present() {
                    let options = |threads| CpuOptions {
                        threads,
                        simd,
                        activations,
                        slots: 128,
                        ..CpuOptions::default()
                    };
                    let whole = product(options(1), types, columns, rows, rows);
                    let error =
                        whole.iter().zip(&truth).map(|(&x, y)| (f64::from(x) - y).powi(2)).sum::<f64>();
                    let bound = if activations == Activations::Float { 1e-12 } else { 1e-4 };
                    assert!(error / power < bound, "{types:?} {activations:?} {}", error / power);
                    for (threads, at_once) in [(1, 1), (2, 1), (3, rows), (2, 6)] {
                        let again = product(options(threads), types, columns, rows, at_once);
                        assert_eq!(
                            bits(&again),
                            bits(&whole),
                            "{types:?} {activations:?} {threads} {at_once}"
                        );
                    }
                }
            }
        }
    }
}
