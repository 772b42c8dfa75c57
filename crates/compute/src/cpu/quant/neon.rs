//! Sixteen rows in four registers of NEON.

use super::lanes::Lanes;
use core::arch::aarch64::*;

/// `WIDTH` is how many activation rows its kernels take at once.
pub(crate) enum Neon<const WIDTH: usize> {}

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

impl<const WIDTH: usize> Lanes for Neon<WIDTH> {
    type Pairs = [int16x8_t; 4];
    type Ints = [int32x4_t; 4];
    type Floats = [float32x4_t; 4];
    const WIDTH_MAX: usize = WIDTH;
    /// Sixteen registers of sums, half of what there are.
    const SUMS_MAX: usize = 4;

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
        let bits = vdupq_n_s16(-(bits.cast_signed() as i16));
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
        let pair = vreinterpret_s16_s32(vdup_n_s32(pair));
        let eight_rows = |[low, high]: [int32x4_t; 2], x, y| {
            // Does not depend on the activations, so it is done once for all of their rows.
            let (first, second) = (vuzp1q_s16(x, y), vuzp2q_s16(x, y));
            let low = vmlal_lane_s16::<0>(low, vget_low_s16(first), pair);
            let high = vmlal_high_lane_s16::<0>(high, first, pair);
            [
                vmlal_lane_s16::<1>(low, vget_low_s16(second), pair),
                vmlal_high_lane_s16::<1>(high, second, pair),
            ]
        };
        let [a, b] = eight_rows([sum[0], sum[1]], x[0], x[1]);
        let [c, d] = eight_rows([sum[2], sum[3]], x[2], x[3]);
        [a, b, c, d]
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
        let from = from.cast::<u16>();
        // SAFETY: the caller has sixteen readable f16.
        let (low, high) = unsafe { (vld1q_u16(from), vld1q_u16(from.add(8))) };
        let ([a, b], [c, d]) = (singles(low), singles(high));
        [a, b, c, d]
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

/// The values of eight f16. Not by intrinsics, which need a type that is not stable.
#[inline]
#[target_feature(enable = "neon")]
fn singles(halves: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high);
    // SAFETY: two instructions of NEON, on registers alone.
    unsafe {
        std::arch::asm!(
            "fcvtl {low:v}.4s, {halves:v}.4h",
            "fcvtl2 {high:v}.4s, {halves:v}.8h",
            halves = in(vreg) halves,
            low = out(vreg) low,
            high = lateout(vreg) high,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    [low, high]
}
