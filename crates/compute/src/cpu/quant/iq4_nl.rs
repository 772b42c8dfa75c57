//! IQ4_NL: 32 values in 18 bytes, codes that stand for sixteen integers, closer together near zero;
//! value = scale * table\[code\].

use super::lanes::Lanes;
use super::nibbles::{self, Block};
use super::packed::packed_kernels;
use super::{Format, Simd, f16};
use fornax_format::DType;

/// What the codes stand for, in IQ4_XS, too.
pub(super) const TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// An f16.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Scale([u8; 2]);

impl nibbles::Scale for Scale {
    const TABLE: [i8; 16] = TABLE;

    #[inline]
    fn value(&self) -> f32 {
        f16(self.0)
    }

    fn packed(&self) -> [u8; 2] {
        self.0
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(scales: *const u8) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { L::halves(scales) }
    }
}

pub(super) fn format(simd: Simd) -> Format {
    nibbles::format::<Scale>(DType::IQ4_NL, packed_kernels!(simd, quantised Block<Scale>))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(IQ4_NL, "iq4_nl.bin");
}
