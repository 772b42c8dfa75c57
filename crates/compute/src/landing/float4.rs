//! A matrix of 4-bit floats whose runs have scales of one byte: NVFP4 and MXFP4 as safetensors files have them.

use fornax_format::{DType, Float4 as Packed, RunScale, View};

use super::float8;

pub(super) struct Float4<'v> {
    columns: usize,
    bytes: &'v [u8],
    packed: &'v Packed<'v>,
}

/// The values of the codes from 0 to 7; those behind them are the same with a sign.
const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

impl<'v> Float4<'v> {
    pub(super) fn new(view: &'v View<'v>, packed: &'v Packed<'v>) -> Float4<'v> {
        Float4 { columns: view.shape[1], bytes: view.bytes, packed }
    }

    /// The smallest type that holds its values exactly. NVFP4 has no factor for a whole matrix: it has the values only
    /// where each scale with the factor is an 8-bit float itself.
    pub(super) fn landing(&self) -> DType {
        match self.packed.scale {
            RunScale::Power if self.columns.is_multiple_of(32) => DType::MXFP4,
            RunScale::Power => DType::F32,
            RunScale::Times(_) | RunScale::Over(_) => {
                let mut used = [false; 256];
                self.packed.scales.bytes.iter().for_each(|&byte| used[usize::from(byte)] = true);
                let whole = self.columns.is_multiple_of(64);
                let scales = (0..=255u8).filter(|&byte| used[usize::from(byte)]);
                match whole && scales.into_iter().all(|byte| unsigned(self.scale(byte)).is_some()) {
                    true => DType::NVFP4,
                    false => DType::F32,
                }
            }
        }
    }

    /// What a byte of the scales means.
    fn scale(&self, byte: u8) -> f32 {
        match self.packed.scale {
            RunScale::Power => match byte {
                255 => f32::NAN,
                // The smallest is below what an f32 has with all its bits.
                0 => f32::from_bits(0x0040_0000),
                exponent => f32::from_bits(u32::from(exponent) << 23),
            },
            RunScale::Times(factor) => float8(byte) * factor.value(),
            RunScale::Over(factor) => float8(byte) / factor.value(),
        }
    }

    /// Rows from `first` on, as many as `out` has room for.
    pub(super) fn write(&self, dtype: DType, first: usize, out: &mut [u8]) {
        let row_bytes = dtype.bytes_for(self.columns).expect("checked before");
        let run = self.packed.scale.run();
        for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes)) {
            let stored = &self.bytes[row * self.columns / 2..][..self.columns / 2];
            let code = |column: usize| stored[column / 2] >> (column % 2 * 4) & 15;
            let runs = self.columns / run;
            let scales = &self.packed.scales.bytes[(self.packed.first_row + row) * runs..][..runs];
            match dtype {
                DType::MXFP4 => {
                    for (block, out) in out.as_chunks_mut::<17>().0.iter_mut().enumerate() {
                        out[0] = scales[block];
                        for (i, out) in out[1..].iter_mut().enumerate() {
                            *out = code(block * 32 + i) | code(block * 32 + i + 16) << 4;
                        }
                    }
                }
                DType::NVFP4 => {
                    for (block, out) in out.as_chunks_mut::<36>().0.iter_mut().enumerate() {
                        let (own, codes) = out.split_at_mut(4);
                        for (run, own) in own.iter_mut().enumerate() {
                            let scale = self.scale(scales[block * 4 + run]);
                            *own = unsigned(scale).expect("it lands here where all are");
                        }
                        for (i, out) in codes.iter_mut().enumerate() {
                            let at = block * 64 + i / 8 * 16 + i % 8;
                            *out = code(at) | code(at + 8) << 4;
                        }
                    }
                }
                _ => {
                    for (column, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
                        let (code, scale) = (code(column), self.scale(scales[column / run]));
                        let value = VALUES[usize::from(code & 7)] * scale;
                        *out = if code & 8 == 0 { value } else { -value }.to_le_bytes();
                    }
                }
            }
        }
    }
}

/// The 8-bit float of that value as NVFP4 has scales: without a sign, and 127 is none.
fn unsigned(value: f32) -> Option<u8> {
    (0..127u8).find(|&byte| crate::float8::value(byte).to_bits() == value.to_bits())
}
