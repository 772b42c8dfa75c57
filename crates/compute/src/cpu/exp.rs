//! The exponential and the hyperbolic tangent, written so that they vectorise: no table, no branch, no call.

/// `e^x` within 2 units in the last place of the true value wherever that is a normal number; 0 below (x < -87.3),
/// infinity above (x > 88.7), NaN for NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, the first with enough zeros that n times it is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting it rounds to an integer, which then sits in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.336_54, 88.722_84);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    // Minimax polynomial of (e^r - 1 - r) / r^2 on that interval (Cephes' expf).
    let mut poly = 1.987_569_1e-4;
    poly = poly * r + 1.398_2e-3;
    poly = poly * r + 8.333_452e-3;
    poly = poly * r + 4.166_579_6e-2;
    poly = poly * r + 1.666_666_5e-1;
    poly = poly * r + 5e-1;
    let fraction = poly * r * r + r + 1.0;
    // 2^n in two factors: n reaches 128, which one exponent cannot hold.
    // Wrapping, for a NaN leaves arbitrary bits here.
    let integer = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    let half = integer >> 1;
    let power = |n: i32| f32::from_bits(n.wrapping_add(127).cast_unsigned() << 23);
    let result = fraction * power(half) * power(integer.wrapping_sub(half));
    if x < -87.336_54 {
        0.0
    } else if x > 88.722_84 {
        f32::INFINITY
    } else {
        // NaN passes through the clamp and the arithmetic.
        result
    }
}

/// `tanh(x)` within 3e-7 of the true value; NaN for NaN.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (1.0 + exp(2.0 * x))
}

#[cfg(test)]
mod tests {
    use super::{exp, tanh};

    #[test]
    fn the_tangent_is_within_its_error_everywhere() {
        for bits in (0..20.0_f32.to_bits()).step_by(1009) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let error = (f64::from(tanh(x)) - f64::from(x).tanh()).abs();
                assert!(error <= 3e-7, "{x}: {error:e}");
            }
        }
        assert_eq!((tanh(f32::INFINITY), tanh(f32::NEG_INFINITY), tanh(0.0)), (1.0, -1.0, 0.0));
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn within_two_units_in_the_last_place_everywhere() {
        let mut worst = 0.0_f64;
        // Every 1009th float of both signs up to the clamps.
        for bits in (0..89.0_f32.to_bits()).step_by(1009) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let (got, wanted) = (exp(x), f64::from(x).exp());
                if x > 88.722_84 {
                    assert_eq!(got, f32::INFINITY, "{x}");
                } else if x < -87.336_54 {
                    assert_eq!(got, 0.0, "{x}");
                } else {
                    let near = wanted as f32;
                    let unit = f64::from(f32::from_bits(near.to_bits() + 1)) - f64::from(near);
                    worst = worst.max((f64::from(got) - wanted).abs() / unit);
                }
            }
        }
        assert!(worst <= 2.0, "{worst} units");
    }

    #[test]
    fn limits_are_exact() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
