//! Activations as 8-bit floats: what tensor cores multiply with weights that are 8-bit floats themselves.
//!
//! **The specification of 8-bit activations**, for weights of type FP8_A8. A row is multiplied by the power of two
//! that brings its largest magnitude to [2^7, 2^8), each value is rounded to the nearest 8-bit float ([`float8`], ties
//! to even), and the sums are multiplied by the inverse of that power (at most 2^126: rows below 2^-119 keep fewer
//! bits). A row's power follows from that row alone. A row that holds a NaN or an infinity has products that are NaN.
//!
//! A power of two and not the magnitude over 448: an 8-bit float is relative, so where the range begins decides only
//! what is lost of values 2^-14 below the largest; and what is undone by a power of two is undone without rounding.

use crate::float8;

/// The exponent that the largest magnitude of a row gets.
const TOP: i32 = 7;

/// Rounds a row in place to what products see of it, as values of its own size.
pub(crate) fn round_row_to_eights(row: &mut [f32]) {
    // As bits, magnitudes order like the values, with infinity and then NaN above every finite one.
    let most = row.iter().fold(0, |most, value| most.max(value.to_bits() & 0x7fff_ffff));
    if most >= 0x7f80_0000 {
        return row.fill(f32::NAN);
    }
    let exponent = (127 + TOP - (most >> 23).cast_signed()).min(126);
    let power = |exponent: i32| f32::from_bits((127 + exponent).cast_unsigned() << 23);
    let (scale, inverse) = (power(exponent), power(-exponent));
    for value in row {
        // Exact: an 8-bit float has four bits.
        *value = float8::value(float8::code(*value * scale)) * inverse;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows, and what `torch` makes of them: make_eights.py says how.
    const GOLDEN: &[u8] = include_bytes!("../../../tests/quant/eights.bin");
    const COLUMNS: usize = 256;

    #[test]
    fn rows_round_to_the_values_that_torch_gives() {
        let values: Vec<f32> = GOLDEN.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let rows = values.chunks_exact(2 * COLUMNS);
        assert!(rows.len() > 20 && rows.remainder().is_empty());
        for (index, row) in rows.enumerate() {
            let (given, wanted) = row.split_at(COLUMNS);
            let mut got = given.to_vec();
            round_row_to_eights(&mut got);
            for (column, (got, wanted)) in got.iter().zip(wanted).enumerate() {
                assert_eq!(got.to_bits(), wanted.to_bits(), "row {index} column {column}: {}", given[column]);
            }
        }
    }

    #[test]
    fn what_is_not_a_number_is_seen_and_zeros_stay() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = [1.0, bad, 2.0];
            round_row_to_eights(&mut row);
            assert!(row.iter().all(|value| value.is_nan()));
        }
        let mut zeros = [0.0, -0.0];
        round_row_to_eights(&mut zeros);
        assert_eq!(zeros, [0.0, 0.0]);
    }
}
