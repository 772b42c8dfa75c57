//! Random inputs from a seed: values, orders, and stored tensors made of valid blocks.

use std::fmt;

use fornax_format::{DType, View};
use half::{bf16, f16};

use crate::{PageId, Part, SplitMix64};

use super::Failure;

/// The inputs of a case.
pub(super) struct Random(SplitMix64);

impl Random {
    /// The inputs of a case are those of its name (FNV-1a), so that cases neither share nor shift them.
    pub(super) fn of(case: impl fmt::Display) -> Random {
        let name = case.to_string();
        let seed = name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        });
        Random(SplitMix64(seed))
    }

    fn bits(&mut self) -> u64 {
        self.0.bits()
    }

    /// Below `limit`.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0.below(limit)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 24) as f32
    }

    /// Roughly normal: mean 0, standard deviation 1.
    pub(super) fn value(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.unit()).sum();
        (sum - 2.0) * 3f32.sqrt()
    }

    pub(super) fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.value()).collect()
    }

    /// A random order of `0..count`.
    pub(super) fn order(&mut self, count: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count as u32).collect();
        for last in (1..count).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }

    /// Every page but the trash page, in random order.
    pub(super) fn pages(&mut self, pages: usize) -> Vec<PageId> {
        self.order(pages - 1).into_iter().map(|page| PageId(page + 1)).collect()
    }
}

/// Every type that a weight may have.
pub const WEIGHT_TYPES: [DType; 29] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::IQ1_S,
    DType::IQ1_M,
    DType::IQ2_XXS,
    DType::IQ2_XS,
    DType::IQ2_S,
    DType::IQ3_XXS,
    DType::IQ3_S,
    DType::IQ4_NL,
    DType::IQ4_XS,
    DType::TQ1_0,
    DType::TQ2_0,
    DType::MXFP4,
    DType::NVFP4,
    DType::MXFP8,
    DType::FP8_128,
    DType::FP8_A8,
];

/// The bytes of a stored tensor.
pub(super) struct Stored {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    /// A matrix of valid blocks: any quants, and scales that make values of size about one.
    pub(super) fn matrix(random: &mut Random, dtype: DType, rows: usize, columns: usize) -> Stored {
        Stored::new(random, dtype, vec![rows, columns])
    }

    /// A vector of valid blocks.
    pub(super) fn vector(random: &mut Random, dtype: DType, values: usize) -> Stored {
        Stored::new(random, dtype, vec![values])
    }

    /// The same with quants at the ends of their ranges, where narrow sums overflow.
    pub(super) fn extreme(mut self, random: &mut Random) -> Stored {
        for block in self.bytes.chunks_exact_mut(self.dtype.block_bytes()) {
            block.fill([0x00, 0xFF, 0x80, 0x7F][random.below(4)]);
            put_scales(random, self.dtype, block);
        }
        self
    }

    fn new(random: &mut Random, dtype: DType, shape: Vec<usize>) -> Stored {
        let blocks = shape.iter().product::<usize>() / dtype.block_values();
        let mut bytes = Vec::with_capacity(blocks * dtype.block_bytes());
        for _ in 0..blocks {
            push_block(random, dtype, &mut bytes);
        }
        Stored { dtype, shape, bytes }
    }

    pub(super) fn view(&self) -> Result<View<'_>, Failure> {
        View::new("random", self.dtype, self.shape.clone(), &self.bytes)
            .map_err(|error| Failure(format!("the suite made a wrong tensor: {error}")))
    }

    pub(super) fn part(&self) -> Result<Part<'_>, Failure> {
        Ok(Part::from(self.view()?))
    }
}

/// Where the f16 scales are in a block, and how large they are for values of about one; everything else is
/// quants and small integer scales, of which any bytes are valid.
fn scales(dtype: DType) -> (&'static [usize], f32) {
    match dtype {
        DType::Q4_0 => (&[0], 0.2),
        DType::Q4_1 => (&[0, 2], 0.1),
        DType::Q5_0 => (&[0], 0.1),
        DType::Q5_1 => (&[0, 2], 0.05),
        DType::Q8_0 | DType::IQ4_NL => (&[0], 0.015),
        DType::Q2_K => (&[80, 82], 0.05),
        DType::Q3_K => (&[108], 0.02),
        DType::Q4_K => (&[0, 2], 0.003),
        DType::Q5_K => (&[0, 2], 0.0015),
        DType::Q6_K => (&[208], 0.001),
        DType::IQ1_S | DType::IQ1_M => (&[0], 0.1),
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => (&[0], 0.015),
        DType::IQ3_XXS | DType::IQ3_S => (&[0], 0.005),
        DType::IQ4_XS => (&[0], 0.0005),
        DType::TQ1_0 => (&[52], 1.0),
        DType::TQ2_0 => (&[64], 1.0),
        _ => unreachable!("{dtype} is no block type with f16 scales"),
    }
}

fn put_scales(random: &mut Random, dtype: DType, block: &mut [u8]) {
    match dtype {
        // Powers of two from 1/4 to 1.
        DType::MXFP4 => return block[0] = 126 + random.below(3) as u8,
        // The same, times the largest.
        DType::MXFP8 => return block[0] = 117 + random.below(3) as u8,
        DType::FP8_128 | DType::FP8_A8 => {
            // Of either sign, beside floats of up to 480.
            let sign = if random.below(2) == 0 { 1.0 } else { -1.0 };
            let scale: f32 = sign * (0.5 + random.unit()) / 480.0;
            if dtype == DType::FP8_A8 {
                // All ones are no number to tensor cores; landing leaves none.
                block[4..].iter_mut().filter(|code| **code & 127 == 127).for_each(|code| *code &= 0xfe);
            }
            return block[..4].copy_from_slice(&scale.to_le_bytes());
        }
        DType::NVFP4 => return block[..4].fill_with(|| 0x28 + random.below(24) as u8),
        _ => {}
    }
    let (scales, size) = scales(dtype);
    for &at in scales {
        let sign = if random.below(2) == 0 { 1.0 } else { -1.0 };
        let scale = f16::from_f32(sign * size * (0.5 + random.unit()));
        if dtype == DType::IQ1_M {
            // Four bits above each of the last four words.
            for (word, byte) in block[49..].iter_mut().step_by(2).enumerate() {
                *byte = *byte & 15 | ((scale.to_bits() >> (4 * word) & 15) as u8) << 4;
            }
        } else {
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
}

fn push_block(random: &mut Random, dtype: DType, bytes: &mut Vec<u8>) {
    match dtype {
        DType::F32 => return bytes.extend(random.value().to_le_bytes()),
        DType::F16 => return bytes.extend(f16::from_f32(random.value()).to_le_bytes()),
        DType::BF16 => return bytes.extend(bf16::from_f32(random.value()).to_le_bytes()),
        _ => {}
    }
    let start = bytes.len();
    bytes.extend((0..dtype.block_bytes()).map(|_| random.bits() as u8));
    put_scales(random, dtype, &mut bytes[start..]);
}
