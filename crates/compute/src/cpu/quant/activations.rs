//! Activations as int8: blocks of 32, in which every four values share a scale.
//!
//! Fours cost nothing, for they are what one lane of a vector product sums, and they pay: on SmolLM2 the
//! log-probabilities err by 0.015 (root mean square) and at most 0.18; with one scale for 32 values, as is usual, by
//! 0.042 and 0.38, because one outlier takes the resolution of all its neighbours. With one for 256, as is usual for the
//! K formats, Qwen2.5-Coder missed by 0.40.
//!
//! A scale is the largest magnitude / 127, and a value is `x / magnitude * 127` rounded to nearest, ties to even:
//! always in -127..=127, so that a negated value and a sum of two products fit where the kernels put them. Zeros have
//! scale 0. A NaN or an infinity makes the scale NaN: every product with it is NaN, and the fault is seen downstream
//! instead of turning into zeros.

use super::Simd;

/// 32 activations.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Q8Block {
    /// activation = scale of its four * value
    pub(crate) scales: [f32; 8],
    /// Sum of the activations, for formats whose blocks carry an offset.
    pub(crate) sum: f32,
    /// The values, never -128.
    pub(crate) values: [i8; 32],
}

impl Q8Block {
    /// The product with a block of codes: exact within each four, which are then added in order.
    #[inline]
    pub(super) fn dot<C: Copy + Into<i32>>(&self, codes: &[C; 32]) -> f32 {
        let fours = codes.as_chunks::<4>().0.iter().zip(self.values.as_chunks::<4>().0);
        fours
            .zip(self.scales)
            .fold(0.0, |sum, ((codes, values), scale)| sum + scale * integer_dot(codes, values) as f32)
    }

    /// The same for each half of the codes.
    #[inline]
    pub(super) fn dot_halves<C: Copy + Into<i32>>(&self, codes: &[C; 32]) -> [f32; 2] {
        let four = |four: usize| {
            let values = four * 4..four * 4 + 4;
            self.scales[four] * integer_dot(&codes[values.clone()], &self.values[values]) as f32
        };
        [0..4, 4..8].map(|fours| fours.map(four).fold(0.0, |sum, product| sum + product))
    }
}

/// Quantises whole blocks of 32; panics unless `out` has a block for each. All levels give the same bits.
pub(crate) fn quantize_q8(simd: Simd, activations: &[f32], out: &mut [Q8Block]) {
    let (blocks, rest) = activations.as_chunks();
    assert!(rest.is_empty() && blocks.len() == out.len(), "activations do not match the blocks of 32");
    simd.assert_present();
    for (values, out) in blocks.iter().zip(out) {
        match simd {
            Simd::Scalar => quantize_fours_scalar(values, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: asserted above.
            Simd::Avx2 => unsafe { quantize_fours_avx2(values, out) },
        }
        out.sum = out.dot(&[1i8; 32]);
    }
}

fn quantize_fours_scalar(values: &[f32; 32], out: &mut Q8Block) {
    let fours = values.as_chunks::<4>().0.iter().zip(out.values.as_chunks_mut::<4>().0);
    for ((values, out), scale) in fours.zip(&mut out.scales) {
        *scale = quantize_scalar(values, out);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn quantize_fours_avx2(values: &[f32; 32], out: &mut Q8Block) {
    use core::arch::x86_64::*;

    let mut integers = [_mm256_setzero_si256(); 4];
    let eights = values.as_chunks::<8>().0.iter().zip(out.scales.as_chunks_mut::<2>().0);
    for ((values, scales), integers) in eights.zip(&mut integers) {
        // SAFETY: eight readable f32; the load needs no alignment.
        let values = unsafe { _mm256_loadu_ps(values.as_ptr()) };
        // The largest bits of each four, in all four lanes; as bits, infinity and then NaN are above every number.
        let bits = _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(i32::MAX));
        let bits = _mm256_max_epu32(bits, _mm256_shuffle_epi32::<0b10_11_00_01>(bits));
        let bits = _mm256_max_epu32(bits, _mm256_shuffle_epi32::<0b01_00_11_10>(bits));
        let magnitude = _mm256_castsi256_ps(bits);
        let infinite = _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(f32::MAX.to_bits().cast_signed()));
        let zero = _mm256_cmpeq_epi32(bits, _mm256_setzero_si256());
        // The conversion rounds to nearest, ties to even: the mode that Rust code may rely on.
        let scaled = _mm256_mul_ps(_mm256_div_ps(values, magnitude), _mm256_set1_ps(127.0));
        *integers = _mm256_andnot_si256(_mm256_or_si256(infinite, zero), _mm256_cvtps_epi32(scaled));
        let scale = _mm256_div_ps(magnitude, _mm256_set1_ps(127.0));
        let scale = _mm256_blendv_ps(scale, _mm256_set1_ps(f32::NAN), _mm256_castsi256_ps(infinite));
        let lanes: [f32; 8] = bytemuck::cast(scale);
        *scales = [lanes[0], lanes[4]];
    }
    out.values = bytemuck::cast(packed(integers));
}

/// 32 integers within i8, eight to a vector, as bytes in their order.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn packed([a, b, c, d]: [core::arch::x86_64::__m256i; 4]) -> core::arch::x86_64::__m256i {
    use core::arch::x86_64::*;

    let (ab, cd) = (_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    // Packing works in each half of the register: fours of a, b, c, d, and then again. Put them in order.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order)
}

fn quantize_scalar<const N: usize>(values: &[f32; N], out: &mut [i8; N]) -> f32 {
    // As bits, magnitudes order like the values, with infinity and then NaN above every finite one.
    let magnitude = values.iter().map(|value| value.abs().to_bits()).max().map_or(0.0, f32::from_bits);
    if magnitude == 0.0 || !magnitude.is_finite() {
        out.fill(0);
        return if magnitude == 0.0 { 0.0 } else { f32::NAN };
    }
    for (out, value) in out.iter_mut().zip(values) {
        *out = (value / magnitude * 127.0).round_ties_even() as i8;
    }
    magnitude / 127.0
}

/// Exact product of small integers: `codes` within -128..=255, `values` activations.
#[inline]
pub(super) fn integer_dot<C: Copy + Into<i32>>(codes: &[C], values: &[i8]) -> i32 {
    codes.iter().zip(values).map(|(&code, &value)| code.into() * i32::from(value)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::quant::check::Activations;
    use proptest::prelude::*;

    fn check_q8(activations: &[f32]) -> Vec<Q8Block> {
        let quantized = |simd| {
            let mut blocks = vec![bytemuck::Zeroable::zeroed(); activations.len() / 32];
            quantize_q8(simd, activations, &mut blocks);
            blocks
        };
        let scalar = quantized(Simd::Scalar);
        for simd in Simd::present() {
            let blocks = quantized(simd);
            assert_eq!(bytemuck::cast_slice::<_, u8>(&blocks), bytemuck::cast_slice::<_, u8>(&scalar));
        }
        scalar
    }

    /// The value is the nearest multiple of the scale, up to the rounding of two f32 operations.
    fn check_nearest(activation: f32, scale: f32, value: i8) {
        assert!(value != i8::MIN);
        let error = (f64::from(activation) - f64::from(scale) * f64::from(value)).abs();
        // A scale among the subnormals is off by up to half of the smallest one, and 127 times that is 8.9e-44.
        assert!(error <= f64::from(scale) * 0.5001 + 9e-44, "{activation} as {value} * {scale}");
    }

    #[test]
    fn activations_quantise_to_the_bits_that_numpy_gives() {
        let Activations { rows, q8 } = Activations::read();
        for (index, row) in rows.iter().enumerate() {
            let blocks = check_q8(row);
            let fours = blocks.iter().flat_map(|block| block.scales.iter().zip(block.values.as_chunks().0));
            for ((scale, values), (wanted_scale, wanted)) in fours.zip(&q8[index]) {
                assert_eq!((scale.to_bits(), values), (wanted_scale.to_bits(), wanted));
            }
        }
    }

    #[test]
    fn one_bad_activation_makes_what_shares_its_scale_nan_and_nothing_else() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 31, 100, 255] {
                let mut activations = [1.0; 512];
                activations[at] = bad;
                for (index, block) in check_q8(&activations).iter().enumerate() {
                    for (four, scale) in block.scales.iter().enumerate() {
                        assert_eq!(scale.is_nan(), index * 8 + four == at / 4);
                    }
                    assert_eq!(block.sum.is_nan(), index == at / 32);
                }
            }
        }
    }

    #[test]
    fn zeros_have_scale_zero() {
        assert_eq!(check_q8(&[0.0, -0.0].repeat(16)), [bytemuck::Zeroable::zeroed()]);
    }

    proptest! {
        #[test]
        fn finite_activations_come_back_within_half_a_step(
            activations in prop::collection::vec(prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL | prop::num::f32::ZERO, 256),
            one_range in prop::collection::vec(-4.0f32..4.0, 256),
        ) {
            for activations in [activations, one_range] {
                for (block, activations) in check_q8(&activations).iter().zip(activations.as_chunks::<32>().0) {
                    let terms = || (0..32).map(|i| f64::from(block.scales[i / 4]) * f64::from(block.values[i]));
                    let magnitude: f64 = terms().map(f64::abs).sum();
                    let error = (f64::from(block.sum) - terms().sum::<f64>()).abs();
                    // A sum beyond f32 is infinite, as it should be.
                    prop_assert!(error <= 1e-6 * magnitude + 1e-42 || magnitude > f64::from(f32::MAX));
                    for (i, (&activation, &value)) in activations.iter().zip(&block.values).enumerate() {
                        check_nearest(activation, block.scales[i / 4], value);
                    }
                }
            }
        }

        #[test]
        fn any_bits_quantise_alike_at_every_level(bits in prop::collection::vec(any::<u32>(), 256)) {
            let activations: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            check_q8(&activations);
        }
    }
}
