//! MXFP4: 32 values in 17 bytes, 4-bit floats with a power of two for their scale; value = scale / 2 * table\[code\].

use super::lanes::Lanes;
use super::nibbles::{self, Block};
use super::packed::packed_kernels;
use super::{Format, Simd};
use fornax_format::DType;

/// Twice the values of a float with two bits of exponent and one of mantissa; the fourth bit is the sign. In NVFP4,
/// too.
pub(super) const TABLE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Two to the power of this less 127.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Exponent(u8);

impl nibbles::Scale for Exponent {
    const TABLE: [i8; 16] = TABLE;

    #[inline]
    fn value(&self) -> f32 {
        let [low, high] = self.packed();
        f32::from_le_bytes([0, 0, low, high])
    }

    /// Half the scale as bf16, which has every power of two that it takes: the lowest two are subnormal.
    #[inline]
    fn packed(&self) -> [u8; 2] {
        let bits = match self.0 {
            0 => 0x20,
            1 => 0x40,
            exponent => u16::from(exponent - 1) << 7,
        };
        bits.to_le_bytes()
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(scales: *const u8) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { L::brains(scales) }
    }
}

pub(super) fn format(simd: Simd) -> Format {
    nibbles::format::<Exponent>(DType::MXFP4, packed_kernels!(simd, quantised Block<Exponent>))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(MXFP4, "mxfp4.bin");
}
