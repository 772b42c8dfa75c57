//! Rotary embedding of the query and key heads.

use super::disjoint::for_each_row;
use super::pool::Pool;
use super::quant::Simd;
use crate::Heads;

/// What rotates the heads of a row: pair `i` is the values `i` and `i + frequencies.len()` of a head.
pub(super) struct Rotation<'a> {
    /// Radians per position.
    pub(super) frequencies: &'a [f32],
    /// Multiplies sine and cosine.
    pub(super) magnitude: f32,
    /// The position of each row.
    pub(super) positions: &'a [u32],
    /// By pair, which section of the position turns it; empty where that is the first.
    pub(super) pairs: &'a [u8],
    /// The further sections; empty where all are as the first.
    pub(super) sections: &'a [Vec<u32>],
}

impl Rotation<'_> {
    /// Where a row is, as a pair sees it.
    fn position(&self, row: usize, pair: usize) -> f32 {
        let section = self.pairs.get(pair).map_or(0, |section| usize::from(*section));
        let positions = match section {
            0 => Some(self.positions),
            section => self.sections.get(section - 1).map(Vec::as_slice),
        };
        positions.unwrap_or(self.positions)[row] as f32
    }
}

/// Pairs that get their sine and cosine at once: on the stack, then used by every head of the row.
const PAIRS: usize = 64;

/// Rotates, in every row of `qkv`, the query heads and the key heads that follow them.
pub(super) fn rotate(pool: &Pool, simd: Simd, heads: Heads, rotation: &Rotation<'_>, qkv: &mut [f32]) {
    for_each_row(pool, qkv, heads.qkv_columns(), |row, qkv| {
        let rotated = &mut qkv[..(heads.query + heads.kv) * heads.dim];
        // As the reference implementations do it, the angle is a product in f32.
        let (position, one) = (rotation.positions[row] as f32, rotation.pairs.is_empty());
        let pairs = rotation.frequencies.len();
        for (chunk, frequencies) in rotation.frequencies.chunks(PAIRS).enumerate() {
            let (mut sines, mut cosines) = ([0.0; PAIRS], [0.0; PAIRS]);
            for (pair, ((sine, cosine), frequency)) in
                sines.iter_mut().zip(&mut cosines).zip(frequencies).enumerate()
            {
                let position = if one { position } else { rotation.position(row, chunk * PAIRS + pair) };
                let (sin, cos) = (position * frequency).sin_cos();
                (*sine, *cosine) = (sin * rotation.magnitude, cos * rotation.magnitude);
            }
            let (sines, cosines) = (&sines[..frequencies.len()], &cosines[..frequencies.len()]);
            for head in rotated.chunks_exact_mut(heads.dim) {
                let (first, second) = head.split_at_mut(pairs);
                let first = &mut first[chunk * PAIRS..][..frequencies.len()];
                let second = &mut second[chunk * PAIRS..][..frequencies.len()];
                match simd {
                    Simd::Scalar => rotate_head(sines, cosines, first, second),
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: the backend was made for a processor with AVX2.
                    Simd::Avx2 | Simd::Avx512 | Simd::Amx => unsafe {
                        turn_avx2(sines, cosines, first, second)
                    },
                    #[cfg(target_arch = "aarch64")]
                    Simd::Neon | Simd::Dotprod | Simd::I8mm => rotate_head(sines, cosines, first, second),
                }
            }
        }
    });
}

/// Element by element, so every instruction set gives the same bits.
#[inline(always)]
fn rotate_head(sines: &[f32], cosines: &[f32], first: &mut [f32], second: &mut [f32]) {
    for (((first, second), sine), cosine) in first.iter_mut().zip(second).zip(sines).zip(cosines) {
        let (a, b) = (*first, *second);
        *first = a * cosine - b * sine;
        *second = b * cosine + a * sine;
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn turn_avx2(sines: &[f32], cosines: &[f32], first: &mut [f32], second: &mut [f32]) {
    rotate_head(sines, cosines, first, second);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{bits, numbers};

    /// A pair is a complex number, and rotating it a multiplication by e^(i * angle).
    #[test]
    fn pairs_turn_like_complex_numbers_and_the_rest_stays() {
        for (heads, pairs) in [
            (Heads { query: 3, kv: 1, dim: 8 }, 4),
            (Heads { query: 4, kv: 2, dim: 64 }, 16),
            (Heads { query: 2, kv: 2, dim: 256 }, 128),
            (Heads { query: 1, kv: 1, dim: 260 }, 130),
        ] {
            let positions = [0, 1, 77, 4095, 31];
            let frequencies: Vec<_> = (0..pairs).map(|i| 1e4_f32.powf(-(i as f32) / pairs as f32)).collect();
            let rotation = Rotation {
                frequencies: &frequencies,
                magnitude: 1.25,
                positions: &positions,
                pairs: &[],
                sections: &[],
            };
            let before = numbers(4, positions.len() * heads.qkv_columns());
            let mut scalar = before.clone();
            rotate(&Pool::new(1).unwrap(), Simd::Scalar, heads, &rotation, &mut scalar);
            for (at, (&before_value, &after)) in before.iter().zip(&scalar).enumerate() {
                let (row, column) = (at / heads.qkv_columns(), at % heads.qkv_columns());
                let (head, i) = (column / heads.dim, column % heads.dim);
                if head >= heads.query + heads.kv || i >= 2 * pairs {
                    assert_eq!(after, before_value);
                    continue;
                }
                let angle = f64::from(positions[row] as f32 * frequencies[i % pairs]);
                let other = f64::from(before[if i < pairs { at + pairs } else { at - pairs }]);
                let sine = if i < pairs { -angle.sin() } else { angle.sin() };
                let wanted = 1.25 * (f64::from(before_value) * angle.cos() + other * sine);
                assert!((f64::from(after) - wanted).abs() < 2e-6, "{after} {wanted}");
            }
            for simd in Simd::present() {
                let mut out = before.clone();
                rotate(&Pool::new(3).unwrap(), simd, heads, &rotation, &mut out);
                assert_eq!(bits(&out), bits(&scalar));
            }
        }
    }
}
