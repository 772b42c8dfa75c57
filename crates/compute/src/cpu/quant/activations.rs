//! Activations as integers of 16 bits: blocks of 32 that share a scale.
//!
//! **The specification of integer activations.** A row is cut into blocks of 32. With `magnitude` the largest absolute
//! value of a block, its scale is `magnitude / 32767` and a value is `x * (32767 / magnitude)` rounded to nearest, ties
//! to even: always in -32767..=32767. A block whose magnitude is below 2^-100 is all zeros with scale 0. A block that
//! holds a NaN or an infinity is all zeros with scale NaN: every product with it is NaN, and the fault is seen
//! downstream instead of turning into zeros. The sum of a block is `scale * (sum of its integers)`.
//!
//! A product goes through the blocks in order and has one running f32 sum. For each run of values with one weight scale
//! (32, or 16 in Q6_K) it takes the exact integer product of codes and activations, rounded once to f32, and then `sum
//! = fma(weight scale, integer * activation scale, sum)`; a format with a minimum goes on with `sum = fma(minimum,
//! block sum, sum)`. Nothing in it depends on the instruction set, so all of them give the same bits.
//!
//! Why 16 bits: hidden states have outliers, which take the resolution of what shares their scale. Over the prompts of
//! the golden data and twelve more (SmolLM2 Q4_1 / Qwen2.5-Coder Q4_K_M, worst log-probability above -4 against float):
//! int8 with a scale per 32 values 0.27 / 0.41, per 16 0.27 / 0.23, per 8 0.19, per 4 0.15, int16 per 32 0.001. No kind
//! of layer is the culprit: rounding the inputs of Q, K and V alone costs 0.18, of gate and up 0.17, of down 0.19, of
//! the head 0.22. Fine int8 scales forbid long integer sums and so cost more than a second byte does.

use super::Simd;

/// Values that share a scale.
pub(crate) const BLOCK: usize = 32;
/// Below this magnitude a block is zero: its reciprocal would overflow.
const MAGNITUDE_MIN: f32 = f32::from_bits(27 << 23); // 2^-100

/// 32 activations.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct IntBlock {
    /// The values, in order.
    pub(crate) values: [i16; BLOCK],
    /// activation = scale * value
    pub(crate) scale: f32,
    /// Sum of the activations, for formats whose blocks carry an offset.
    pub(crate) sum: f32,
}

impl IntBlock {
    /// `integer * scale`, where the integer is the exact product with codes of these activations from `first` on.
    #[inline]
    pub(super) fn dot<C: Copy + Into<i32>>(&self, first: usize, codes: &[C]) -> f32 {
        let terms = codes.iter().zip(&self.values[first..]);
        let integer: i32 = terms.map(|(&code, &value)| code.into() * i32::from(value)).sum();
        integer as f32 * self.scale
    }

    /// Quantises 32 activations. No branch and no call, so that it vectorises; the same bits whatever it is compiled
    /// for.
    #[inline(always)]
    fn new(activations: &[f32; BLOCK]) -> IntBlock {
        // Adding and subtracting it rounds to an integer, which then sits in the low mantissa bits.
        const ROUND: f32 = 12_582_912.0;
        // As bits, magnitudes order like the values, with infinity and then NaN above every finite one.
        let mut bits = 0;
        for value in activations {
            bits = bits.max(value.to_bits() & 0x7fff_ffff);
        }
        let magnitude = f32::from_bits(bits);
        if !magnitude.is_finite() || magnitude < MAGNITUDE_MIN {
            let scale = if magnitude.is_finite() { 0.0 } else { f32::NAN };
            return IntBlock { values: [0; BLOCK], scale, sum: scale };
        }
        let (factor, scale) = (32767.0 / magnitude, magnitude / 32767.0);
        let (mut values, mut integer) = ([0; BLOCK], 0);
        for (out, value) in values.iter_mut().zip(activations) {
            let rounded = (value * factor + ROUND).to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
            *out = rounded as i16;
            integer += rounded;
        }
        IntBlock { values, scale, sum: integer as f32 * scale }
    }
}

/// Quantises a row of whole blocks, handing each block to `store` with its index.
pub(crate) fn quantize(simd: Simd, activations: &[f32], store: impl FnMut(usize, &IntBlock)) {
    let (blocks, rest) = activations.as_chunks();
    assert!(rest.is_empty(), "activations do not divide into blocks of 32");
    simd.assert_present();
    match simd {
        Simd::Scalar => quantize_row(blocks, store),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: asserted above.
        Simd::Avx2 => unsafe { quantize_row_avx2(blocks, store) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: asserted above.
        Simd::Avx512 | Simd::Amx => unsafe { quantize_row_avx512(blocks, store) },
        #[cfg(target_arch = "aarch64")]
        Simd::Neon | Simd::Dotprod | Simd::I8mm => quantize_row(blocks, store),
    }
}

#[inline(always)]
fn quantize_row(blocks: &[[f32; BLOCK]], mut store: impl FnMut(usize, &IntBlock)) {
    for (index, block) in blocks.iter().enumerate() {
        store(index, &IntBlock::new(block));
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn quantize_row_avx2(blocks: &[[f32; BLOCK]], store: impl FnMut(usize, &IntBlock)) {
    quantize_row(blocks, store);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
fn quantize_row_avx512(blocks: &[[f32; BLOCK]], store: impl FnMut(usize, &IntBlock)) {
    quantize_row(blocks, store);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::quant::check::Activations;
    use proptest::prelude::*;

    fn check_row(activations: &[f32]) -> Vec<IntBlock> {
        let quantized = |simd| {
            let mut blocks = Vec::new();
            quantize(simd, activations, |_, block| blocks.push(*block));
            blocks
        };
        let scalar = quantized(Simd::Scalar);
        for simd in Simd::present() {
            let blocks = quantized(simd);
            assert_eq!(bytemuck::cast_slice::<_, u8>(&blocks), bytemuck::cast_slice::<_, u8>(&scalar));
        }
        scalar
    }

    #[test]
    fn activations_quantise_to_the_bits_that_numpy_gives() {
        let Activations { rows, blocks } = Activations::read();
        for (index, row) in rows.iter().enumerate() {
            for (block, (scale, values)) in check_row(row).iter().zip(&blocks[index]) {
                assert_eq!((block.scale.to_bits(), &block.values), (scale.to_bits(), values));
            }
        }
    }

    #[test]
    fn one_bad_activation_makes_what_shares_its_scale_nan_and_nothing_else() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 31, 100, 255] {
                let mut activations = [1.0; 512];
                activations[at] = bad;
                for (index, block) in check_row(&activations).iter().enumerate() {
                    let hit = index == at / BLOCK;
                    assert_eq!((block.scale.is_nan(), block.sum.is_nan()), (hit, hit), "{bad} at {at}");
                }
            }
        }
    }

    #[test]
    fn what_is_too_small_to_scale_is_zero_and_the_largest_numbers_are_not() {
        for tiny in [0.0, -0.0, 1e-45, 1e-38, 7e-31] {
            let block = check_row(&[tiny; 32])[0];
            assert_eq!(block, IntBlock { values: [0; 32], scale: 0.0, sum: 0.0 });
        }
        for large in [8e-31, 1.0, 3e38] {
            let block = check_row(&[-large; 32])[0];
            assert_eq!(block.values, [-32767; 32]);
            assert!((block.scale * 32767.0 / large - 1.0).abs() < 1e-6);
        }
    }

    proptest! {
        /// The value is the nearest multiple of the scale, up to the rounding of three f32 operations.
        #[test]
        fn a_value_is_the_nearest_multiple_of_its_scale(
            values in prop::collection::vec(-1e3f32..1e3, 64),
            exponent in -60i32..60,
        ) {
            let activations: Vec<_> = values.iter().map(|value| value * 2f32.powi(exponent)).collect();
            for (block, row) in check_row(&activations).iter().zip(activations.chunks(32)) {
                for (value, activation) in block.values.iter().zip(row) {
                    let error = (f64::from(*activation) - f64::from(block.scale) * f64::from(*value)).abs();
                    prop_assert!(error <= f64::from(block.scale) * 0.51, "{activation} as {value} * {}", block.scale);
                }
            }
        }
    }
}
