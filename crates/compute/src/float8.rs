//! Floats of 8 bits, "e4m3": a sign, four bits of exponent (bias 7), three of mantissa, no infinities. Several of them
//! share a power of two, given by its exponent + 127 in a byte (255: NaN), which brings the largest near the end of
//! their range. A code is relative, so one power does for many: what is 2^-14 of the largest still has its three bits.

/// The largest value; the code above it, all ones, is never written.
const MOST: f32 = 448.0;

/// What a code stands for. All ones, NaN in files that others wrote, is 480 here.
#[inline(always)]
pub(crate) fn value(code: u8) -> f32 {
    // As the bits of an f32, subnormals included, it is too small by the difference of the biases.
    let bits = u32::from(code & 0x7f) << 20 | u32::from(code & 0x80) << 24;
    f32::from_bits(bits) * 2.0f32.powi(120)
}

/// The nearest code, ties to even; what lies beyond the largest becomes the largest.
pub(crate) fn code(value: f32) -> u8 {
    let magnitude = value.abs().min(MOST);
    let bits = magnitude.to_bits();
    let code = if magnitude < 2.0f32.powi(-6) {
        // Steps of 2^-9: eight of them are the first that is not subnormal.
        #[expect(clippy::cast_sign_loss, reason = "a magnitude")]
        let steps = (magnitude * 512.0).round_ties_even() as u8;
        steps
    } else {
        (((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)) as u8
    };
    code | (u8::from(value.is_sign_negative()) << 7)
}

/// The power of two that a byte stands for.
#[inline(always)]
pub(crate) fn power(exponent: u8) -> f32 {
    match exponent {
        0 => 2.0f32.powi(-127),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// The smallest power of two whose 448-fold no value exceeds, and no less than 2^-126; NaN where one is not finite.
pub(crate) fn exponent(values: &[f32]) -> u8 {
    // As bits, magnitudes order like the values, with infinity and then NaN above every finite one.
    let most = values.iter().map(|value| value.to_bits() & 0x7fff_ffff).max().unwrap_or_default();
    if most >= 0x7f80_0000 {
        return 255;
    }
    let above = u32::from(most & 0x007f_ffff > 0x0060_0000);
    ((most >> 23) + above).saturating_sub(8).max(1) as u8
}

/// Values as codes beside the exponent that [`exponent`] gives them all; panics unless there is a code for each.
pub(crate) fn encode(values: &[f32], exponent: u8, codes: &mut [u8]) {
    assert_eq!(values.len(), codes.len(), "a code for each value");
    if exponent == 255 {
        return codes.fill(0);
    }
    let inverse = power(254 - exponent);
    for (to, value) in codes.iter_mut().zip(values) {
        *to = code(value * inverse);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What make_float8.py wrote with the `ml_dtypes` package.
    fn golden() -> serde_json::Value {
        serde_json::from_str(include_str!("../tests/quant/float8.json")).unwrap()
    }

    #[test]
    fn every_code_and_every_power_has_the_value_that_ml_dtypes_gives() {
        let golden = golden();
        let check = |name: &str, value: fn(u8) -> f32, else_: fn(u8) -> bool| {
            let all = golden[name].as_array().unwrap();
            assert_eq!(all.len(), 256);
            for (code, want) in (0..=255).zip(all) {
                let got = value(code);
                match want.as_u64() {
                    Some(bits) => assert_eq!(u64::from(got.to_bits()), bits, "{name} {code}"),
                    None => assert!(else_(code), "{name} {code}: {got}"),
                }
            }
        };
        check("values", value, |code| code & 127 == 127 && value(code).abs() == 480.0);
        check("powers", power, |exponent| exponent == 255 && power(exponent).is_nan());
    }

    #[test]
    fn numbers_become_the_code_that_ml_dtypes_gives() {
        let golden = golden();
        let all = golden["rounded"].as_array().unwrap();
        assert!(all.len() > 1000);
        for pair in all {
            let [bits, want] = [0, 1].map(|at| pair[at].as_u64().unwrap());
            let number = f32::from_bits(u32::try_from(bits).unwrap());
            assert_eq!(u64::from(code(number)), want, "{number:e}");
        }
    }

    #[test]
    fn the_largest_of_many_fills_their_range_and_what_is_not_finite_makes_all_nan() {
        for most in [1e-20f32, 0.3, 1.0, 1.75, 1.76, 3.0, 448.0, 449.0, 3e38] {
            let values = [most / 3.0, -most, most / 1000.0];
            let (shared, mut codes) = (exponent(&values), [0; 3]);
            encode(&values, shared, &mut codes);
            let largest = value(codes[1]).abs();
            assert!((224.0..=448.0).contains(&largest), "{most}: {largest}");
            for (code, wanted) in codes.iter().zip(values) {
                let got = value(*code) * power(shared);
                assert!((got - wanted).abs() <= wanted.abs() / 16.0, "{most}: {wanted} became {got}");
            }
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(exponent(&[1.0, bad]), 255);
        }
        // What is too small for the smallest power has fewer bits, or none.
        let mut codes = [9; 2];
        let shared = exponent(&[0.0, -0.0]);
        encode(&[0.0, -0.0], shared, &mut codes);
        assert_eq!((shared, codes), (1, [0, 0x80]));
    }
}
