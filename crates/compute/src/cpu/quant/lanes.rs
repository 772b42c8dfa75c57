//! What a set of vector instructions does for the kernels: sixteen weight rows, or keys, or values, side by side.
//!
//! The kernels and the formats are written once over this trait; a level of [`Simd`](super::Simd) implements it. The
//! functions carry no instructions of their own until they are inlined into a function compiled for the level, which is
//! why every implementation is `#[inline(always)]` or a thin `#[inline]` function with the features.

/// Sixteen rows, one lane each.
///
/// # Safety
///
/// Of all its functions: the processor has the level's instructions, and a pointer may be read, or written, for as much
/// as the function says; alignment is not needed.
pub(crate) trait Lanes: 'static {
    /// Two integers of 16 bits for each row: codes, or codes still packed.
    type Pairs: Copy;
    /// One i32 for each row.
    type Ints: Copy;
    /// One f32 for each row.
    type Floats: Copy;
    /// The most activation rows that a kernel takes at once: as many as its sums fit the registers.
    const WIDTH_MAX: usize;
    /// The most activation rows whose sums fit the registers, where a kernel takes more of them in turns.
    const SUMS_MAX: usize = Self::WIDTH_MAX;

    /// 64 bytes: for each row in turn two integers.
    unsafe fn pairs(from: *const u8) -> Self::Pairs;
    unsafe fn and(x: Self::Pairs, mask: u16) -> Self::Pairs;
    /// Each integer shifted left.
    unsafe fn shl<const BITS: u32>(x: Self::Pairs) -> Self::Pairs;
    /// Each integer shifted right, zeros coming in.
    unsafe fn shr<const BITS: u32>(x: Self::Pairs) -> Self::Pairs;
    /// Each integer shifted right, its sign coming in.
    unsafe fn sar<const BITS: u32>(x: Self::Pairs) -> Self::Pairs;
    /// Each integer shifted right by a number known only at run time.
    unsafe fn shr_by(x: Self::Pairs, bits: usize) -> Self::Pairs;
    /// `x | (y & mask)`
    unsafe fn or_masked(x: Self::Pairs, y: Self::Pairs, mask: u16) -> Self::Pairs;
    unsafe fn sub(x: Self::Pairs, y: u16) -> Self::Pairs;
    /// Each integer, below 16, replaced by what the table has there.
    unsafe fn lookup(x: Self::Pairs, table: &[i8; 16]) -> Self::Pairs;

    /// Asks for the line of the cache at this address, which need not be readable.
    unsafe fn prefetch(from: *const u8);
    unsafe fn no_ints() -> Self::Ints;
    /// `sum` + the product of each row's pair with one pair of activations, exact.
    unsafe fn dot(sum: Self::Ints, x: Self::Pairs, activations: *const i16) -> Self::Ints;
    /// The first integer of each pair.
    unsafe fn first(x: Self::Pairs) -> Self::Ints;
    /// The second integer of each pair.
    unsafe fn second(x: Self::Pairs) -> Self::Ints;
    unsafe fn to_floats(x: Self::Ints) -> Self::Floats;

    /// Sixteen f32.
    unsafe fn floats(from: *const f32) -> Self::Floats;
    /// Sixteen f16.
    unsafe fn halves(from: *const u8) -> Self::Floats;
    /// Sixteen u8.
    unsafe fn bytes(from: *const u8) -> Self::Floats;
    /// Sixteen i8.
    unsafe fn signed_bytes(from: *const u8) -> Self::Floats;
    /// Sixteen bf16.
    unsafe fn brains(from: *const u8) -> Self::Floats;
    /// The first bf16 of each pair.
    unsafe fn first_brain(x: Self::Pairs) -> Self::Floats;
    /// The second bf16 of each pair.
    unsafe fn second_brain(x: Self::Pairs) -> Self::Floats;
    unsafe fn store(x: Self::Floats, to: *mut f32);
    /// One number for all rows.
    unsafe fn splat(x: *const f32) -> Self::Floats;
    unsafe fn add(x: Self::Floats, y: Self::Floats) -> Self::Floats;
    unsafe fn mul(x: Self::Floats, y: Self::Floats) -> Self::Floats;
    unsafe fn negated(x: Self::Floats) -> Self::Floats;
    /// `x * y + z`, rounded once.
    unsafe fn fma(x: Self::Floats, y: Self::Floats, z: Self::Floats) -> Self::Floats;
}
