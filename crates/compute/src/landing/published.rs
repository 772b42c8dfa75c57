//! Float rows in the types of GGUF files, bit by bit as llama.cpp's own tool writes them, with and without an importance
//! matrix. What `--quant` makes while a model is loaded is in `quantize.rs`: nobody compares its bits.
//!
//! Sums are in f32 and in the order of the columns, since their last bits decide which of two codes is nearer. Searches try
//! the same scales in the same order, and the first that is best wins.

use fornax_format::DType;
use half::{bf16, f16};

use super::quantize_q8_0;

/// Types that [`quantize_row`] writes.
pub const WRITTEN: [DType; 18] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::Q2_K,
    DType::Q3_K,
    DType::IQ4_NL,
    DType::IQ4_XS,
    DType::TQ1_0,
    DType::TQ2_0,
    DType::MXFP4,
];

/// A magnitude below which a group is zero.
const NOTHING: f32 = 1e-15;

/// Writes one row. `importance` says how much each column counts; floats, Q8_0, ternary types and MXFP4 have no use for it.
///
/// Panics where the type is none of [`WRITTEN`], the row does not fill its blocks, or lengths differ.
pub fn quantize_row(dtype: DType, values: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    assert_eq!(dtype.bytes_for(values.len()), Some(out.len()), "a row of {dtype}");
    assert!(importance.is_none_or(|importance| importance.len() == values.len()), "one for each column");
    match dtype {
        DType::F32 => out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(to, v)| *to = v.to_le_bytes()),
        DType::F16 => {
            let halves = out.as_chunks_mut().0.iter_mut();
            halves.zip(values).for_each(|(to, &value)| *to = f16::from_f32(value).to_le_bytes());
        }
        DType::BF16 => {
            let brains = out.as_chunks_mut().0.iter_mut();
            brains.zip(values).for_each(|(to, &value)| *to = bf16::from_f32(value).to_le_bytes());
        }
        DType::Q8_0 => quantize_q8_0(values, out),
        DType::Q4_0 => {
            small::<18>(values, importance, out, |block, weights, out| signed(block, 8, weights, out))
        }
        DType::Q5_0 => {
            small::<22>(values, importance, out, |block, weights, out| signed(block, 16, weights, out))
        }
        DType::Q4_1 => {
            small::<20>(values, importance, out, |block, weights, out| offset(block, 15, weights, out))
        }
        DType::Q5_1 => {
            small::<24>(values, importance, out, |block, weights, out| offset(block, 31, weights, out))
        }
        DType::Q4_K => {
            super_blocks::<144>(values, importance, out, |block, weights, out| min_k(block, 15, weights, out))
        }
        DType::Q5_K => {
            super_blocks::<176>(values, importance, out, |block, weights, out| min_k(block, 31, weights, out))
        }
        DType::Q6_K => super_blocks::<210>(values, importance, out, q6_k),
        DType::Q2_K => super_blocks::<84>(values, importance, out, q2_k),
        DType::Q3_K => super_blocks::<110>(values, importance, out, q3_k),
        DType::IQ4_XS => super_blocks::<136>(values, importance, out, iq4_xs),
        DType::IQ4_NL => {
            let blocks = values.as_chunks::<32>().0.iter().zip(out.as_chunks_mut().0);
            for (index, (block, out)) in blocks.enumerate() {
                iq4_nl(block, importance.map(|importance| &importance[32 * index..][..32]), out);
            }
        }
        DType::TQ1_0 => super_blocks::<54>(values, None, out, |block, _, out| tq1_0(block, out)),
        DType::TQ2_0 => super_blocks::<66>(values, None, out, |block, _, out| tq2_0(block, out)),
        DType::MXFP4 => {
            let blocks = values.as_chunks::<32>().0.iter().zip(out.as_chunks_mut().0);
            blocks.for_each(|(block, out)| mxfp4(block, out));
        }
        other => panic!("{other} is not written"),
    }
}

/// Blocks of 32. With an importance matrix each value's weight also grows with its size, beside the mean of its row.
fn small<const BYTES: usize>(
    values: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
    write: impl Fn(&[f32; 32], Option<&[f32; 32]>, &mut [u8; BYTES]),
) {
    let mean = sum_of_squares(values) / values.len() as f32;
    for (index, (block, out)) in values.as_chunks::<32>().0.iter().zip(out.as_chunks_mut().0).enumerate() {
        let weights = importance.map(|importance| weighted(&importance[32 * index..], block, mean));
        write(block, weights.as_ref(), out);
    }
}

fn super_blocks<const BYTES: usize>(
    values: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
    write: impl Fn(&[f32; 256], Option<&[f32; 256]>, &mut [u8; BYTES]),
) {
    for (index, (block, out)) in values.as_chunks::<256>().0.iter().zip(out.as_chunks_mut().0).enumerate() {
        let own = importance.map(|importance| {
            <&[f32; 256]>::try_from(&importance[256 * index..][..256]).expect("as long as the row")
        });
        write(block, own, out);
    }
}

fn sum_of_squares(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |sum, value| sum + value * value)
}

/// Weights of values: what the matrix says, times the root of `mean` + the value's square.
fn weighted<const N: usize>(importance: &[f32], values: &[f32; N], mean: f32) -> [f32; N] {
    std::array::from_fn(|i| importance[i] * (mean + values[i] * values[i]).sqrt())
}

/// The nearest whole number, halves to even.
fn nearest(value: f32) -> i32 {
    value.round_ties_even() as i32
}

/// The low byte of a code: codes are from zero on, but for what a rounding puts below.
#[expect(clippy::cast_sign_loss, reason = "the low byte is meant")]
fn byte(code: i32) -> u8 {
    code as u8
}

/// value = scale * (code - middle), where the codes are from 0 to twice the middle - 1.
fn signed<const BYTES: usize>(
    values: &[f32; 32],
    middle: i32,
    weights: Option<&[f32; 32]>,
    out: &mut [u8; BYTES],
) {
    let (scale, codes) = match weights {
        Some(weights) => signed_fit(values, middle, Some(weights)),
        None => {
            // The value of the largest magnitude becomes the lowest code, which has no counterpart above.
            let most = largest(values);
            let scale = most / -(middle as f32);
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            let half = middle as f32 + 0.5;
            let codes = values.map(|value| byte(((value * inverse + half) as i32).min(2 * middle - 1)));
            (scale, codes)
        }
    };
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    write_codes(&codes, &mut out[2..]);
}

/// value = scale * code + least, where the codes are from 0 to `most`.
fn offset<const BYTES: usize>(
    values: &[f32; 32],
    most: i32,
    weights: Option<&[f32; 32]>,
    out: &mut [u8; BYTES],
) {
    let (scale, least, codes) = match weights {
        Some(weights) => {
            let fit = offset_fit(
                values,
                weights,
                Search { most, first: -0.9, step: 0.05, steps: 36, squares: true },
            );
            (fit.scale, -fit.below, fit.codes)
        }
        None => {
            let least =
                values.iter().fold(f32::MAX, |least, &value| if value < least { value } else { least });
            let largest =
                values.iter().fold(-f32::MAX, |most, &value| if value > most { value } else { most });
            let scale = (largest - least) / most as f32;
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            let codes = values.map(|value| byte((((value - least) * inverse + 0.5) as i32).min(most)));
            (scale, least, codes)
        }
    };
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    out[2..4].copy_from_slice(&f16::from_f32(least).to_le_bytes());
    write_codes(&codes, &mut out[4..]);
}

/// 32 codes of four bits, or of five with the upper ones first.
fn write_codes(codes: &[u8; 32], out: &mut [u8]) {
    let upper =
        codes.iter().enumerate().fold(0u32, |upper, (i, code)| upper | (u32::from(*code) >> 4 & 1) << i);
    let out = match out.len() {
        20 => {
            out[..4].copy_from_slice(&upper.to_le_bytes());
            &mut out[4..]
        }
        _ => out,
    };
    for (i, out) in out.iter_mut().enumerate() {
        *out = codes[i] & 15 | (codes[i + 16] & 15) << 4;
    }
}

/// The first value of the largest magnitude.
fn largest(values: &[f32]) -> f32 {
    let (mut most, mut magnitude) = (0.0f32, 0.0f32);
    for &value in values {
        if magnitude < value.abs() {
            (most, magnitude) = (value, value.abs());
        }
    }
    most
}

/// A scale and codes (0 to twice the middle - 1) of least squared error, among scales that put the largest magnitude up
/// to 0.9 steps beside the end. Without weights, a value's weight is its square.
fn signed_fit<const N: usize>(values: &[f32; N], middle: i32, weights: Option<&[f32; N]>) -> (f32, [u8; N]) {
    let most = largest(values);
    if most.abs() < NOTHING {
        return (0.0, [0; N]);
    }
    let code = |inverse: f32, i: usize| nearest(inverse * values[i]).clamp(-middle, middle - 1);
    let weight = |i: usize| weights.map_or(values[i] * values[i], |weights| weights[i]);
    let sums = |inverse: f32| {
        let (mut products, mut squares) = (0.0f32, 0.0f32);
        for (i, value) in values.iter().enumerate() {
            let (code, weight) = (code(inverse, i) as f32, weight(i));
            products += weight * value * code;
            squares += weight * code * code;
        }
        (products, squares)
    };
    let mut chosen = -(middle as f32) / most;
    let (products, squares) = sums(chosen);
    let mut scale = if squares == 0.0 { 0.0 } else { products / squares };
    let mut best = scale * products;
    for tenths in (-9..=9).filter(|tenths| *tenths != 0) {
        let inverse = -(middle as f32 + 0.1 * tenths as f32) / most;
        let (products, squares) = sums(inverse);
        if squares > 0.0 && products * products > best * squares {
            chosen = inverse;
            scale = products / squares;
            best = scale * products;
        }
    }
    (scale, std::array::from_fn(|i| byte(code(chosen, i) + middle)))
}

/// Which scales are tried: as if the codes went up to `most` + `first` + a number of steps.
#[derive(Clone, Copy)]
struct Search {
    most: i32,
    first: f32,
    step: f32,
    steps: i32,
    /// Whether errors count by their squares; else by their sizes.
    squares: bool,
}

/// value = scale * code - below.
struct OffsetFit<const N: usize> {
    scale: f32,
    below: f32,
    codes: [u8; N],
}

/// Scale, minimum (never above zero) and codes of least weighted error among those tried.
fn offset_fit<const N: usize>(values: &[f32; N], weights: &[f32; N], search: Search) -> OffsetFit<N> {
    let Search { most, first, step, steps, squares: by_squares } = search;
    let (mut least, mut largest) = (values[0], values[0]);
    let (mut weight_sum, mut value_sum) = (weights[0], weights[0] * values[0]);
    for (&value, &weight) in values.iter().zip(weights).skip(1) {
        if value < least {
            least = value;
        }
        if value > largest {
            largest = value;
        }
        weight_sum += weight;
        value_sum += weight * value;
    }
    if least > 0.0 {
        least = 0.0;
    }
    if largest <= least {
        return OffsetFit { scale: 0.0, below: -least, codes: [0; N] };
    }
    // From the minimum found so far.
    let codes_from = |inverse: f32, least: f32| {
        values.map(|value| byte(nearest(inverse * (value - least)).clamp(0, most)))
    };
    let error = |codes: &[u8; N], scale: f32, least: f32| {
        let mut sum = 0.0f32;
        for ((&value, &weight), &code) in values.iter().zip(weights).zip(codes) {
            let difference = scale * f32::from(code) + least - value;
            sum += weight * if by_squares { difference * difference } else { difference.abs() };
        }
        sum
    };
    let inverse = most as f32 / (largest - least);
    let mut scale = 1.0 / inverse;
    let mut codes = codes_from(inverse, least);
    let mut best = error(&codes, scale, least);
    for at in 0..=steps {
        let inverse = (first + step * at as f32 + most as f32) / (largest - least);
        let tried = codes_from(inverse, least);
        let (mut sum, mut squares, mut products) = (0.0f32, 0.0f32, 0.0f32);
        for ((&value, &weight), &code) in values.iter().zip(weights).zip(&tried) {
            let code = f32::from(code);
            sum += weight * code;
            squares += weight * code * code;
            products += weight * code * value;
        }
        let determinant = weight_sum * squares - sum * sum;
        if determinant > 0.0 {
            let mut own_scale = (weight_sum * products - value_sum * sum) / determinant;
            let mut own_least = (squares * value_sum - sum * products) / determinant;
            if own_least > 0.0 {
                own_least = 0.0;
                own_scale = products / squares;
            }
            let found = error(&tried, own_scale, own_least);
            if found < best {
                (codes, best, scale, least) = (tried, found, own_scale, own_least);
            }
        }
    }
    OffsetFit { scale, below: -least, codes }
}

/// Whole numbers up to `most` for values that are not negative, and what they are multiples of: first the best spacing among
/// some, then one number after the other is moved where that helps.
fn whole_fit<const N: usize>(values: &[f32; N], weights: &[f32; N], most: i32) -> (f32, [u8; N]) {
    let largest = values.iter().fold(0.0f32, |large, &value| if value > large { value } else { large });
    if largest < NOTHING {
        return (0.0, [0; N]);
    }
    let error = |inverse: f32, bound: i32| {
        let scale = 1.0 / inverse;
        let mut sum = 0.0f32;
        for (&value, &weight) in values.iter().zip(weights) {
            let difference = value - scale * nearest(inverse * value).min(bound) as f32;
            sum += weight * difference * difference;
        }
        sum
    };
    let mut inverse = most as f32 / largest;
    let mut best = error(inverse, i32::MAX);
    for tenths in (-4..=4).filter(|tenths| *tenths != 0) {
        let own = (0.1 * tenths as f32 + most as f32) / largest;
        let found = error(own, most);
        if found < best {
            (best, inverse) = (found, own);
        }
    }
    let mut codes = values.map(|value| byte(nearest(inverse * value).min(most)));
    let (mut products, mut squares) = (0.0f32, 0.0f32);
    for ((&value, &weight), &code) in values.iter().zip(weights).zip(&codes) {
        products += weight * value * f32::from(code);
        squares += weight * f32::from(code) * f32::from(code);
    }
    for _ in 0..5 {
        let mut moved = false;
        for i in 0..N {
            let (value, weight, code) = (values[i], weights[i], f32::from(codes[i]));
            let mut other_products = products - weight * value * code;
            let mut other_squares = squares - weight * code * code;
            if other_products > 0.0 && other_squares > 0.0 {
                let own = nearest(value * other_squares / other_products).min(most);
                if own != i32::from(codes[i]) {
                    other_products += weight * value * own as f32;
                    other_squares += weight * own as f32 * own as f32;
                    if other_products * other_products * squares > products * products * other_squares {
                        codes[i] = byte(own);
                        (products, squares, moved) = (other_products, other_squares, true);
                    }
                }
            }
        }
        if !moved {
            break;
        }
    }
    (if squares > 0.0 { products / squares } else { 0.0 }, codes)
}

/// Q4_K and Q5_K: 8 groups of 32 values, each with a scale and a minimum of six bits beside two f16.
fn min_k<const BYTES: usize>(
    values: &[f32; 256],
    most: i32,
    importance: Option<&[f32; 256]>,
    out: &mut [u8; BYTES],
) {
    let groups = values.as_chunks::<32>().0;
    let mean = 2.0 * sum_of_squares(values) / 256.0;
    let mut weight_sums = [0.0f32; 8];
    let fits: Vec<OffsetFit<32>> = groups
        .iter()
        .enumerate()
        .map(|(group, values)| match importance {
            Some(importance) => {
                let weights = weighted(&importance[32 * group..], values, mean);
                weight_sums[group] = weights.iter().fold(0.0, |sum, weight| sum + weight);
                offset_fit(
                    values,
                    &weights,
                    Search { most, first: -0.9, step: 0.05, steps: 36, squares: true },
                )
            }
            None => {
                let root = (sum_of_squares(values) / 32.0).sqrt();
                let weights = values.map(|value| root + value.abs());
                let search = match most {
                    15 => Search { most, first: -1.0, step: 0.1, steps: 20, squares: true },
                    _ => Search { most, first: -0.5, step: 0.1, steps: 15, squares: true },
                };
                offset_fit(values, &weights, search)
            }
        })
        .collect();
    let (scales, mins): ([f32; 8], [f32; 8]) =
        (std::array::from_fn(|i| fits[i].scale), std::array::from_fn(|i| fits[i].below));
    let (step, steps, min_step, min_steps) = match importance {
        Some(_) => {
            let (step, steps) = whole_fit(&scales, &weight_sums, 63);
            let (min_step, min_steps) = whole_fit(&mins, &weight_sums, 63);
            (step, steps, min_step, min_steps)
        }
        None => {
            let sixths = |values: &[f32; 8]| {
                let most = values.iter().fold(0.0f32, |most, &value| if value > most { value } else { most });
                let inverse = if most > 0.0 { 63.0 / most } else { 0.0 };
                // As a byte of what may be below zero by a rounding.
                let codes = values.map(|value| byte(nearest(inverse * value)).min(63));
                (most / 63.0, codes)
            };
            let ((step, steps), (min_step, min_steps)) = (sixths(&scales), sixths(&mins));
            (step, steps, min_step, min_steps)
        }
    };
    let (step, min_step) = (f16::from_f32(step), f16::from_f32(min_step));
    out[..2].copy_from_slice(&step.to_le_bytes());
    out[2..4].copy_from_slice(&min_step.to_le_bytes());
    for i in 0..4 {
        out[4 + i] = steps[i] | steps[4 + i] >> 4 << 6;
        out[8 + i] = min_steps[i] | min_steps[4 + i] >> 4 << 6;
        out[12 + i] = steps[4 + i] & 15 | min_steps[4 + i] << 4;
    }
    let mut codes: Vec<[u8; 32]> = fits.iter().map(|fit| fit.codes).collect();
    for (group, codes) in codes.iter_mut().enumerate() {
        let scale = step.to_f32() * f32::from(steps[group]);
        // Of a group without a scale the codes stay as they were found.
        if scale != 0.0 {
            let below = min_step.to_f32() * f32::from(min_steps[group]);
            *codes = groups[group].map(|value| byte(nearest((value + below) / scale).clamp(0, most)));
        }
    }
    let low = out.len() - 128;
    out[16..low].fill(0);
    for (pair, codes) in codes.as_chunks::<2>().0.iter().enumerate() {
        for i in 0..32 {
            out[low + 32 * pair + i] = codes[0][i] & 15 | (codes[1][i] & 15) << 4;
            if most > 15 {
                out[16 + i] |= (codes[0][i] >> 4 | codes[1][i] >> 4 << 1) << (2 * pair);
            }
        }
    }
}

/// 16 groups of 16 values, each with a scale of eight bits beside an f16.
fn q6_k(values: &[f32; 256], importance: Option<&[f32; 256]>, out: &mut [u8; 210]) {
    let groups = values.as_chunks::<16>().0;
    let weights = importance.map(|importance| importance.as_chunks::<16>().0);
    let fits: Vec<(f32, [u8; 16])> = groups
        .iter()
        .enumerate()
        .map(|(group, values)| signed_fit(values, 32, weights.map(|weights| &weights[group])))
        .collect();
    let scales: Vec<f32> = fits.iter().map(|(scale, _)| *scale).collect();
    let most = largest(&scales);
    if most.abs() < NOTHING {
        out.fill(0);
        return;
    }
    let inverse = -128.0 / most;
    let step = f16::from_f32(1.0 / inverse);
    let steps: Vec<i8> = scales.iter().map(|scale| nearest(inverse * scale).min(127) as i8).collect();
    let mut codes = [0u8; 256];
    for (group, codes) in codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = step.to_f32() * f32::from(steps[group]);
        *codes = match scale == 0.0 {
            true => fits[group].1,
            false => groups[group].map(|value| byte(nearest(value / scale).clamp(-32, 31) + 32)),
        };
    }
    for half in 0..2 {
        let codes = &codes[128 * half..][..128];
        for i in 0..32 {
            out[64 * half + i] = codes[i] & 15 | (codes[i + 64] & 15) << 4;
            out[64 * half + 32 + i] = codes[i + 32] & 15 | (codes[i + 96] & 15) << 4;
            out[128 + 32 * half + i] =
                codes[i] >> 4 | codes[i + 32] >> 4 << 2 | codes[i + 64] >> 4 << 4 | codes[i + 96] >> 4 << 6;
        }
    }
    out[192..208].iter_mut().zip(&steps).for_each(|(out, step)| *out = step.cast_unsigned());
    out[208..].copy_from_slice(&step.to_le_bytes());
}

/// 16 groups of 16 values, each with a scale and a minimum of four bits beside two f16.
fn q2_k(values: &[f32; 256], importance: Option<&[f32; 256]>, out: &mut [u8; 84]) {
    const MOST: i32 = 3;
    let groups = values.as_chunks::<16>().0;
    let mean = sum_of_squares(values) / 256.0;
    let mut weight_sums = [0.0f32; 16];
    let fit = |group: usize, weight_sum: &mut f32| match importance {
        Some(importance) => {
            let weights = weighted(&importance[16 * group..], &groups[group], mean);
            *weight_sum = weights.iter().fold(0.0, |sum, weight| sum + weight);
            let search = Search { most: MOST, first: -0.9, step: 0.05, steps: 36, squares: true };
            offset_fit(&groups[group], &weights, search)
        }
        None => {
            let search = Search { most: MOST, first: -0.5, step: 0.1, steps: 15, squares: false };
            offset_fit(&groups[group], &groups[group].map(f32::abs), search)
        }
    };
    let fits: [OffsetFit<16>; 16] = std::array::from_fn(|group| fit(group, &mut weight_sums[group]));
    let (scales, mins): ([f32; 16], [f32; 16]) =
        (std::array::from_fn(|i| fits[i].scale), std::array::from_fn(|i| fits[i].below));
    let fifteenths = |values: &[f32; 16]| {
        let most = values.iter().fold(0.0f32, |most, &value| if value > most { value } else { most });
        let inverse = if most > 0.0 { 15.0 / most } else { 0.0 };
        (most / 15.0, values.map(|value| byte(nearest(inverse * value))))
    };
    let ((step, steps), (min_step, min_steps)) = match importance {
        Some(_) => (whole_fit(&scales, &weight_sums, 15), whole_fit(&mins, &weight_sums, 15)),
        None => (fifteenths(&scales), fifteenths(&mins)),
    };
    let (step, min_step) = (f16::from_f32(step), f16::from_f32(min_step));
    let mut codes = [0u8; 256];
    for (group, codes) in codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // As they lie in the block: four bits each.
        let both = steps[group] | min_steps[group] << 4;
        out[group] = both;
        let scale = step.to_f32() * f32::from(both & 15);
        *codes = match scale == 0.0 {
            true => fits[group].codes,
            false => {
                let below = min_step.to_f32() * f32::from(both >> 4);
                groups[group].map(|value| byte(nearest((value + below) / scale).clamp(0, MOST)))
            }
        };
    }
    write_pairs_of_bits(&codes, &mut out[16..80]);
    out[80..82].copy_from_slice(&step.to_le_bytes());
    out[82..].copy_from_slice(&min_step.to_le_bytes());
}

/// Codes of two bits: of each half of a block four stretches of 32 values share bytes.
fn write_pairs_of_bits(codes: &[u8; 256], out: &mut [u8]) {
    for (half, codes) in codes.as_chunks::<128>().0.iter().enumerate() {
        for i in 0..32 {
            out[32 * half + i] = codes[i] | codes[i + 32] << 2 | codes[i + 64] << 4 | codes[i + 96] << 6;
        }
    }
}

/// 16 groups of 16 values, each with a scale of six bits beside an f16.
fn q3_k(values: &[f32; 256], importance: Option<&[f32; 256]>, out: &mut [u8; 110]) {
    let groups = values.as_chunks::<16>().0;
    let mean = 2.0 * sum_of_squares(values) / 256.0;
    let mut weight_sums = [0.0f32; 16];
    let fits: [(f32, [u8; 16]); 16] = std::array::from_fn(|group| match importance {
        Some(importance) => {
            let weights = weighted(&importance[16 * group..], &groups[group], mean);
            weight_sums[group] = weights.iter().fold(0.0, |sum, weight| sum + weight);
            signed_fit(&groups[group], 4, Some(&weights))
        }
        None => eighths_fit(&groups[group]),
    });
    let scales: [f32; 16] = std::array::from_fn(|group| fits[group].0);
    let (step, steps) = match importance {
        Some(_) => signed_fit(&scales, 32, Some(&weight_sums)),
        None => {
            let most = largest(&scales);
            let inverse = -32.0 / most;
            match most == 0.0 {
                true => (0.0, [0; 16]),
                false => {
                    let code = |scale: f32| byte(nearest(inverse * scale).clamp(-32, 31) + 32);
                    (1.0 / inverse, scales.map(code))
                }
            }
        }
    };
    let step = f16::from_f32(step);
    out.fill(0);
    let mut codes = [0u8; 256];
    for (group, codes) in codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let stored = steps[group];
        out[96 + group % 8] |= (stored & 15) << (group / 8 * 4);
        out[104 + group % 4] |= stored >> 4 << (group / 4 * 2);
        let scale = step.to_f32() * (f32::from(stored) - 32.0);
        *codes = match scale == 0.0 {
            true => fits[group].1,
            false => groups[group].map(|value| byte(nearest(value / scale).clamp(-4, 3) + 4)),
        };
    }
    for (at, code) in codes.iter_mut().enumerate() {
        out[at % 32] |= *code >> 2 << (at / 32);
        *code &= 3;
    }
    write_pairs_of_bits(&codes, &mut out[32..96]);
    out[108..].copy_from_slice(&step.to_le_bytes());
}

/// A scale and codes (0 to 7) by squares: from those of the largest magnitude on one code after the other is moved where that
/// helps.
fn eighths_fit(values: &[f32; 16]) -> (f32, [u8; 16]) {
    let most = largest(values);
    if most.abs() < NOTHING {
        return (0.0, [0; 16]);
    }
    let inverse = -4.0 / most;
    let mut codes = values.map(|value| nearest(inverse * value).clamp(-4, 3));
    let (mut products, mut squares) = (0.0f32, 0.0f32);
    for (value, code) in values.iter().zip(&codes) {
        let (weight, code) = (value * value, *code as f32);
        products += weight * value * code;
        squares += weight * code * code;
    }
    for _ in 0..5 {
        let mut moved = false;
        for (value, code) in values.iter().zip(&mut codes) {
            let weight = value * value;
            let mut other_products = products - weight * value * *code as f32;
            if other_products > 0.0 {
                let mut other_squares = squares - weight * *code as f32 * *code as f32;
                let own = nearest(value * other_squares / other_products).clamp(-4, 3);
                if own != *code {
                    other_products += weight * value * own as f32;
                    other_squares += weight * own as f32 * own as f32;
                    let better =
                        other_products * other_products * squares > products * products * other_squares;
                    if other_squares > 0.0 && better {
                        *code = own;
                        (products, squares, moved) = (other_products, other_squares, true);
                    }
                }
            }
        }
        if !moved {
            break;
        }
    }
    (if squares > 0.0 { products / squares } else { 0.0 }, codes.map(|code| byte(code + 4)))
}

/// What codes of four bits stand for in IQ4_NL and IQ4_XS.
const UNEVEN: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The code whose value is nearest; of two the higher one.
fn nearest_uneven(value: f32) -> u8 {
    let of = |code: u8| f32::from(UNEVEN[usize::from(code)]);
    match (0u8..16).find(|code| value < of(*code)) {
        None => 15,
        Some(0) => 0,
        Some(above) if value - of(above - 1) < of(above) - value => above - 1,
        Some(above) => above,
    }
}

/// The scale of least weighted squared error, among those that put the largest magnitude near the lowest code's value.
fn uneven_scale(values: &[f32; 32], weights: &[f32; 32]) -> f32 {
    let most = largest(values);
    if most.abs() < NOTHING {
        return 0.0;
    }
    let lowest = f32::from(UNEVEN[0]);
    let sums = |inverse: f32| {
        let (mut products, mut squares) = (0.0f32, 0.0f32);
        for (value, weight) in values.iter().zip(weights) {
            let code = f32::from(UNEVEN[usize::from(nearest_uneven(inverse * value))]);
            products += weight * code * value;
            squares += weight * code * code;
        }
        (products, squares)
    };
    let (products, squares) = sums(1.0 / (-most / lowest));
    let mut scale = if squares > 0.0 { products / squares } else { 0.0 };
    let mut best = scale * products;
    for beside in -7..=7 {
        let (products, squares) = sums((beside as f32 + lowest) / most);
        if squares > 0.0 && products * products > best * squares {
            scale = products / squares;
            best = scale * products;
        }
    }
    scale
}

/// How much values count: by the matrix, or by their squares.
fn uneven_weights(values: &[f32; 32], importance: Option<&[f32]>, mean: f32) -> [f32; 32] {
    match importance {
        Some(importance) => weighted(importance, values, mean),
        None => values.map(|value| value * value),
    }
}

/// 32 codes of four bits, the second half in the upper ones.
fn write_halves(codes: &[u8; 32], out: &mut [u8]) {
    out.iter_mut().enumerate().for_each(|(i, out)| *out = codes[i] | codes[i + 16] << 4);
}

fn iq4_nl(values: &[f32; 32], importance: Option<&[f32]>, out: &mut [u8; 18]) {
    let mean = sum_of_squares(values) * (2.0 / 32.0);
    let scale = uneven_scale(values, &uneven_weights(values, importance, mean));
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    write_halves(&values.map(|value| nearest_uneven(inverse * value)), &mut out[2..]);
}

/// 8 groups of 32 values, each with a scale of six bits beside an f16.
fn iq4_xs(values: &[f32; 256], importance: Option<&[f32; 256]>, out: &mut [u8; 136]) {
    let groups = values.as_chunks::<32>().0;
    let mean = sum_of_squares(values) * (2.0 / 256.0);
    let scales: [f32; 8] = std::array::from_fn(|group| {
        let importance = importance.map(|importance| &importance[32 * group..][..32]);
        uneven_scale(&groups[group], &uneven_weights(&groups[group], importance, mean))
    });
    let step = -largest(&scales) / 32.0;
    let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
    out.fill(0);
    out[..2].copy_from_slice(&f16::from_f32(step).to_le_bytes());
    for (group, values) in groups.iter().enumerate() {
        let code = nearest(inverse * scales[group]).clamp(-32, 31);
        let scale = step * code as f32;
        let own = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let stored = byte(code + 32);
        out[2 + group / 4] |= stored >> 4 << (group % 4 * 2);
        out[4 + group / 2] |= (stored & 15) << (group % 2 * 4);
        write_halves(&values.map(|value| nearest_uneven(own * value)), &mut out[8 + 16 * group..][..16]);
    }
}

/// The largest magnitude, and minus one, zero or one for each value: 0, 1 or 2 as they are written.
fn ternary(values: &[f32; 256]) -> (f32, [u8; 256]) {
    let most = largest(values).abs();
    let inverse = if most == 0.0 { 0.0 } else { 1.0 / most };
    (most, values.map(|value| byte((value * inverse).round() as i32 + 1)))
}

/// Five digits to a byte, as the upper bits of a fraction.
fn tq1_0(values: &[f32; 256], out: &mut [u8; 54]) {
    let (most, digits) = ternary(values);
    let packed = |digits: [u8; 5]| {
        let number = digits.iter().fold(0u16, |number, digit| number * 3 + u16::from(*digit));
        byte(i32::from((number * 256).div_ceil(243)))
    };
    let runs = [(0, 32, 0), (32, 16, 160)];
    for (to, count, first) in runs {
        for i in 0..count {
            out[to + i] = packed(std::array::from_fn(|digit| digits[first + digit * count + i]));
        }
    }
    for i in 0..4 {
        // The last digit of these is none.
        let own = |digit| if digit < 4 { digits[240 + digit * 4 + i] } else { 0 };
        out[48 + i] = packed(std::array::from_fn(own));
    }
    out[52..].copy_from_slice(&f16::from_f32(most).to_le_bytes());
}

fn tq2_0(values: &[f32; 256], out: &mut [u8; 66]) {
    let (most, digits) = ternary(values);
    write_pairs_of_bits(&digits, &mut out[..64]);
    out[64..].copy_from_slice(&f16::from_f32(most).to_le_bytes());
}

/// 32 values of four bits and a power of two.
fn mxfp4(values: &[f32; 32], out: &mut [u8; 17]) {
    // Twice the values, with a scale of half the power.
    const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
    let most = largest(values).abs();
    let power = if most > 0.0 { byte(most.log2().floor() as i32 - 2 + 127) } else { 0 };
    let scale = match power {
        0 | 1 => f32::from_bits(0x0020_0000 << power),
        power => f32::from_bits((u32::from(power) - 1) << 23),
    };
    let code = |value: f32| {
        let mut best = (0, f32::INFINITY);
        for (code, doubled) in (0u8..).zip(DOUBLED) {
            let error = (f32::from(doubled) * scale - value).abs();
            if error < best.1 {
                best = (code, error);
            }
        }
        best.0
    };
    out[0] = power;
    write_halves(&values.map(code), &mut out[1..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows, and what llama.cpp's library makes of them (make_published.py): without an importance matrix and with one.
    #[test]
    fn every_type_is_bit_by_bit_what_llama_cpp_writes() {
        let file = include_bytes!("../../tests/packed/published.bin");
        const ROWS: usize = 24;
        const COLUMNS: usize = 512;
        let (floats, mut rest) = file.split_at(4 * (ROWS + 1) * COLUMNS);
        let floats: Vec<f32> = floats.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let (rows, importance) = floats.split_at(ROWS * COLUMNS);
        for dtype in WRITTEN.into_iter().skip(3) {
            let each = dtype.bytes_for(COLUMNS).unwrap();
            for importance in [None, Some(importance)] {
                let wanted;
                (wanted, rest) = rest.split_at(ROWS * each);
                for (row, wanted) in wanted.chunks(each).enumerate() {
                    let mut got = vec![0; each];
                    quantize_row(dtype, &rows[row * COLUMNS..][..COLUMNS], importance, &mut got);
                    let weighted = importance.is_some();
                    let at = got.iter().zip(wanted).position(|(got, wanted)| got != wanted);
                    assert_eq!(at, None, "{dtype}, row {row}, with an importance matrix: {weighted}");
                }
            }
        }
        assert!(rest.is_empty());
    }
}
