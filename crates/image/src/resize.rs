//! Resizing with antialiasing, as Pillow does it with bytes: the products are whole numbers, so the same
//! pixels come out on every machine.
//!
//! Each pixel of the result is a weighted sum of those that lie below it: first along rows, then along columns, with a
//! byte in between. When a picture shrinks, the kernel is as much wider as the picture was larger.

use crate::{Picture, Size};

/// Bits behind the point of a weight: a sum of weighted bytes and its sign fit in 32.
const PRECISION: u32 = 32 - 8 - 2;

/// By which weights pixels become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// The nearer of two, the more.
    Bilinear,
    /// The cubic one with the parameter -1/2.
    Bicubic,
}

impl Kernel {
    /// How far it reaches on either side.
    fn reach(self) -> f64 {
        match self {
            Kernel::Bilinear => 1.0,
            Kernel::Bicubic => 2.0,
        }
    }

    fn at(self, x: f64) -> f64 {
        match self {
            Kernel::Bilinear => (1.0 - x.abs()).max(0.0),
            Kernel::Bicubic => bicubic(x),
        }
    }
}

/// The cubic kernel with the parameter -1/2.
fn bicubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// What a pixel of the result is made of.
struct Taps {
    /// The first pixel.
    first: usize,
    /// Of it and those behind it.
    weights: Vec<i32>,
}

/// By pixel along one side.
#[expect(clippy::cast_sign_loss, reason = "what is negative is the edge")]
fn taps(kernel: Kernel, from: u32, to: u32) -> Vec<Taps> {
    let scale = f64::from(from) / f64::from(to);
    let stretch = scale.max(1.0);
    let reach = kernel.reach() * stretch;
    let one = |at: u32| {
        let centre = (f64::from(at) + 0.5) * scale;
        // Truncated as the reference does it; negative ones are the edge.
        let first = (centre - reach + 0.5).max(0.0) as usize;
        let end = ((centre + reach + 0.5).max(0.0) as usize).min(from as usize);
        let weights: Vec<f64> =
            (first..end).map(|x| kernel.at((x as f64 - centre + 0.5) * (1.0 / stretch))).collect();
        let sum: f64 = weights.iter().sum();
        let whole = |weight: &f64| {
            let share = if sum == 0.0 { *weight } else { weight / sum };
            // Away from zero at a half.
            (share * f64::from(1u32 << PRECISION)).round() as i32
        };
        Taps { first, weights: weights.iter().map(whole).collect() }
    };
    (0..to).map(one).collect()
}

/// A sum of weighted bytes as a byte.
fn byte(sum: i32) -> u8 {
    u8::try_from((sum >> PRECISION).clamp(0, 255)).expect("clamped")
}

/// Half of a byte's last bit, so that the shift rounds.
const HALF: i32 = 1 << (PRECISION - 1);

impl Picture {
    /// The same picture in another size.
    pub fn resized(&self, to: Size, kernel: Kernel) -> Picture {
        let from = self.size;
        let wide;
        let across = if from.width == to.width {
            &self.rgb
        } else {
            wide = along_rows(&self.rgb, from, &taps(kernel, from.width, to.width));
            &wide
        };
        let rgb = if from.height == to.height {
            across.clone()
        } else {
            along_columns(across, to.width as usize, &taps(kernel, from.height, to.height))
        };
        Picture { size: to, rgb }
    }
}

/// (height, width, 3) becomes (height, taps, 3).
fn along_rows(rgb: &[u8], from: Size, taps: &[Taps]) -> Vec<u8> {
    let mut out = Vec::with_capacity(from.height as usize * taps.len() * 3);
    for row in rgb.chunks_exact(from.width as usize * 3) {
        for Taps { first, weights } in taps {
            let mut sums = [HALF; 3];
            for (pixel, weight) in row[first * 3..].chunks_exact(3).zip(weights) {
                for (sum, value) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(*value) * weight;
                }
            }
            out.extend(sums.map(byte));
        }
    }
    out
}

/// (height, width, 3) becomes (taps, width, 3).
fn along_columns(rgb: &[u8], width: usize, taps: &[Taps]) -> Vec<u8> {
    let values = width * 3;
    let mut out = Vec::with_capacity(taps.len() * values);
    let mut sums = vec![0; values];
    for Taps { first, weights } in taps {
        sums.fill(HALF);
        for (row, weight) in rgb[first * values..].chunks_exact(values).zip(weights) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += i32::from(*value) * weight;
            }
        }
        out.extend(sums.iter().map(|sum| byte(*sum)));
    }
    out
}
