//! Sixteen rows in four registers of NEON. Compiled, and not run by any machine of the project yet.

use super::lanes::Lanes;
use core::arch::aarch64::*;

pub(crate) enum Neon {}

/// The same operation on each of the four registers.
macro_rules! each {
    ($($x:ident),+ => $result:expr) => {{
        let mut out = [{ $(let $x = $x[0];)+ $result }; 4];
        for i in 1..4 {
            $(let $x = $x[i];)+
            out[i] = $result;
        }
        out
    }};
}

impl Lanes for Neon {
    type Pairs = [int16x8_t; 4];
    type Ints = [int32x4_t; 4];
    type Floats = [float32x4_t; 4];
    /// Sixteen registers of integer sums, half of what there are.
    const WIDTH_MAX: usize = 4;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn pairs(from: *const u8) -> [int16x8_t; 4] {
        let from = from.cast::<i16>();
        // SAFETY: the caller has 64 readable bytes.
        unsafe { [vld1q_s16(from), vld1q_s16(from.add(8)), vld1q_s16(from.add(16)), vld1q_s16(from.add(24))] }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn and(x: [int16x8_t; 4], mask: u16) -> [int16x8_t; 4] {
        let mask = vdupq_n_s16(mask.cast_signed());
        each!(x => vandq_s16(x, mask))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn shl<const BITS: u32>(x: [int16x8_t; 4]) -> [int16x8_t; 4] {
        let bits = vdupq_n_s16(BITS as i16);
        each!(x => vshlq_s16(x, bits))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn shr<const BITS: u32>(x: [int16x8_t; 4]) -> [int16x8_t; 4] {
        let bits = vdupq_n_s16(-(BITS as i16));
        each!(x => vreinterpretq_s16_u16(vshlq_u16(vreinterpretq_u16_s16(x), bits)))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sar<const BITS: u32>(x: [int16x8_t; 4]) -> [int16x8_t; 4] {
        let bits = vdupq_n_s16(-(BITS as i16));
        each!(x => vshlq_s16(x, bits))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn shr_by(x: [int16x8_t; 4], bits: usize) -> [int16x8_t; 4] {
        let bits = vdupq_n_s16(-(bits as i16));
        each!(x => vreinterpretq_s16_u16(vshlq_u16(vreinterpretq_u16_s16(x), bits)))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn or_masked(x: [int16x8_t; 4], y: [int16x8_t; 4], mask: u16) -> [int16x8_t; 4] {
        let mask = vdupq_n_s16(mask.cast_signed());
        each!(x, y => vorrq_s16(x, vandq_s16(y, mask)))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub(x: [int16x8_t; 4], y: u16) -> [int16x8_t; 4] {
        let y = vdupq_n_s16(y.cast_signed());
        each!(x => vsubq_s16(x, y))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn lookup(x: [int16x8_t; 4], table: &[i8; 16]) -> [int16x8_t; 4] {
        // SAFETY: sixteen readable bytes.
        let table = unsafe { vld1q_s8(table.as_ptr()) };
        // The upper byte of each integer looks up something, too, and makes room for the sign.
        each!(x => {
            let found = vreinterpretq_s16_s8(vqtbl1q_s8(table, vreinterpretq_u8_s16(x)));
            vshrq_n_s16::<8>(vshlq_n_s16::<8>(found))
        })
    }

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: a hint that never faults, reads nothing and changes no register.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{}]", in(reg) from, options(nostack, preserves_flags, readonly));
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn no_ints() -> [int32x4_t; 4] {
        [vdupq_n_s32(0); 4]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn dot(sum: [int32x4_t; 4], x: [int16x8_t; 4], activations: *const i16) -> [int32x4_t; 4] {
        // SAFETY: the caller has two readable integers.
        let pair = unsafe { activations.cast::<i32>().read_unaligned() };
        let pair = vreinterpretq_s16_s32(vdupq_n_s32(pair));
        each!(sum, x => {
            let (low, high) = (vmull_s16(vget_low_s16(x), vget_low_s16(pair)), vmull_high_s16(x, pair));
            vaddq_s32(sum, vpaddq_s32(low, high))
        })
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn first(x: [int16x8_t; 4]) -> [int32x4_t; 4] {
        each!(x => vshrq_n_s32::<16>(vshlq_n_s32::<16>(vreinterpretq_s32_s16(x))))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn second(x: [int16x8_t; 4]) -> [int32x4_t; 4] {
        each!(x => vshrq_n_s32::<16>(vreinterpretq_s32_s16(x)))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn to_floats(x: [int32x4_t; 4]) -> [float32x4_t; 4] {
        each!(x => vcvtq_f32_s32(x))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn floats(from: *const f32) -> [float32x4_t; 4] {
        // SAFETY: the caller has sixteen readable f32.
        unsafe { [vld1q_f32(from), vld1q_f32(from.add(4)), vld1q_f32(from.add(8)), vld1q_f32(from.add(12))] }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn halves(from: *const u8) -> [float32x4_t; 4] {
        // SAFETY: the caller has sixteen readable f16.
        let x = unsafe { wide(from) };
        each!(x => half_to_single(x))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn bytes(from: *const u8) -> [float32x4_t; 4] {
        // SAFETY: the caller has sixteen readable bytes.
        let bytes = unsafe { vld1q_u8(from) };
        let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
        [
            vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
            vcvtq_f32_u32(vmovl_high_u16(low)),
            vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
            vcvtq_f32_u32(vmovl_high_u16(high)),
        ]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn signed_bytes(from: *const u8) -> [float32x4_t; 4] {
        // SAFETY: the caller has sixteen readable bytes.
        let bytes = unsafe { vld1q_s8(from.cast()) };
        let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
        [
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
            vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
            vcvtq_f32_s32(vmovl_high_s16(high)),
        ]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn brains(from: *const u8) -> [float32x4_t; 4] {
        // SAFETY: the caller has sixteen readable bf16.
        let x = unsafe { wide(from) };
        each!(x => vreinterpretq_f32_u32(vshlq_n_u32::<16>(x)))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn first_brain(x: [int16x8_t; 4]) -> [float32x4_t; 4] {
        each!(x => vreinterpretq_f32_s32(vshlq_n_s32::<16>(vreinterpretq_s32_s16(x))))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn second_brain(x: [int16x8_t; 4]) -> [float32x4_t; 4] {
        let mask = vdupq_n_s32(-0x1_0000);
        each!(x => vreinterpretq_f32_s32(vandq_s32(vreinterpretq_s32_s16(x), mask)))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store(x: [float32x4_t; 4], to: *mut f32) {
        for (i, x) in x.into_iter().enumerate() {
            // SAFETY: the caller has sixteen writable f32.
            unsafe { vst1q_f32(to.add(i * 4), x) }
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn splat(x: *const f32) -> [float32x4_t; 4] {
        // SAFETY: the caller has a readable f32.
        [vdupq_n_f32(unsafe { x.read_unaligned() }); 4]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn add(x: [float32x4_t; 4], y: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(x, y => vaddq_f32(x, y))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn mul(x: [float32x4_t; 4], y: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(x, y => vmulq_f32(x, y))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn negated(x: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(x => vnegq_f32(x))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn fma(x: [float32x4_t; 4], y: [float32x4_t; 4], z: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(x, y, z => vfmaq_f32(z, x, y))
    }
}

/// Sixteen integers of 16 bits, widened.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn wide(from: *const u8) -> [uint32x4_t; 4] {
    let from = from.cast::<u16>();
    // SAFETY: the caller has sixteen readable integers.
    let (low, high) = unsafe { (vld1q_u16(from), vld1q_u16(from.add(8))) };
    [vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)]
}

/// The value of f16 bits. Not by the conversion instruction, whose intrinsic needs a type that is not stable: the
/// magnitude moves into place, a product with 2^112 mends its exponent, subnormals included, and what was infinite
/// or NaN gets the largest exponent back.
#[inline]
#[target_feature(enable = "neon")]
fn half_to_single(bits: uint32x4_t) -> float32x4_t {
    let magnitude = vshlq_n_u32::<13>(vandq_u32(bits, vdupq_n_u32(0x7fff)));
    let mended = vmulq_f32(vreinterpretq_f32_u32(magnitude), vdupq_n_f32(f32::from_bits(239 << 23)));
    let infinite = vcgeq_u32(magnitude, vdupq_n_u32(0x7c00 << 13));
    let exponent = vandq_u32(infinite, vdupq_n_u32(0x7f80_0000));
    let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
    vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(vreinterpretq_u32_f32(mended), exponent), sign))
}
