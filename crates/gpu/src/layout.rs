//! How weights lie on the device: planes of tiles.
//!
//! A tile is 16 rows x 128 columns, in the order in which the tensor-core instruction takes it: a warp's loads are 512
//! contiguous bytes, 16 for each lane. Lane 4g + t holds rows g and g + 8, and of each 32 columns the octet from 8t on.
//! Codes of an octet lie in a word as pairs of neighbours, 16 bits apart, so that one mask makes two f16 of them.
//! Codes, their upper bits, scales and minima are planes of their own, each tile after tile: columns first, then the
//! next 16 rows. Bytes stay as many as in the file, but for rows rounded up to 16 and columns to 128 with zeros.
//!
//! BF16 becomes f16 when all of a part is there, times a power of two that brings the largest value to [2^13, 2^14):
//! products multiply f16. What is at least 2^-31 of the largest stays exact. So do the scales of Q4_0, Q5_0, Q8_0,
//! Q4_K, Q5_K and Q6_K, times a power of two that makes good for codes in the low bits of an f16
//! (`quant/superblocks.cuh`).
//!
//! The rarer formats (`Coded`) are all brought into one form on their way in, which takes six bits for a value (Q2_K
//! eight): codes of four bits for integers out of a table, with an f32 scale for each 16 values. Nothing is rounded.
//!
//! The kernels' side of this is `kernels/quant/`. Files are in other orders, so rows are packed on their way in, by
//! `kernels/pack.cu`; what it does is specified by `pack_row` below.

use fornax_compute::cpu::{Run, Runs};
use fornax_format::DType;

pub(crate) const TILE_ROWS: usize = 16;
pub(crate) const TILE_COLUMNS: usize = 128;

/// Codes, upper bits, scales, minima; what a format does not have is empty.
pub(crate) const PLANES: usize = 4;
/// Bytes that a part keeps once, for all of its rows.
pub(crate) const PART_BYTES: u64 = 8;

/// A stored type that the kernels know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(non_camel_case_types, reason = "the names of the formats")]
pub(crate) enum Format {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
    MXFP8,
    FP8_128,
    /// The bytes of FP8_128, multiplied by rows of 8-bit floats.
    FP8_A8,
    /// One of the rarer formats, which share their kernels.
    Coded(DType),
}

impl Format {
    /// `None` where there are no kernels for the type.
    pub(crate) fn of(dtype: DType) -> Option<Format> {
        Some(match dtype {
            DType::F32 => Format::F32,
            DType::F16 => Format::F16,
            DType::BF16 => Format::BF16,
            DType::Q4_0 => Format::Q4_0,
            DType::Q4_1 => Format::Q4_1,
            DType::Q5_0 => Format::Q5_0,
            DType::Q5_1 => Format::Q5_1,
            DType::Q8_0 => Format::Q8_0,
            DType::Q4_K => Format::Q4_K,
            DType::Q5_K => Format::Q5_K,
            DType::Q6_K => Format::Q6_K,
            DType::MXFP8 => Format::MXFP8,
            DType::FP8_128 => Format::FP8_128,
            DType::FP8_A8 => Format::FP8_A8,
            other => Format::Coded(Runs::of(other).map(|_| other)?),
        })
    }

    /// Its table and whether it has minima, where it is one of the rarer ones.
    pub(crate) fn runs(self) -> Option<Runs> {
        match self {
            Format::Coded(dtype) => Runs::of(dtype),
            _ => None,
        }
    }

    /// The defines that its header needs.
    pub(crate) fn defines(self) -> Vec<String> {
        let Some(runs) = self.runs() else { return Vec::new() };
        let words = runs.table.as_chunks::<4>().0.iter();
        let word = |four: &[i8; 4]| u32::from_le_bytes(four.map(i8::cast_unsigned));
        let mut defines: Vec<String> =
            words.enumerate().map(|(at, four)| format!("TABLE{at}={:#010x}u", word(four))).collect();
        defines.push(format!("HAS_MINS={}", i32::from(runs.mins)));
        defines
    }

    /// Bytes of a row as it is sent.
    pub(crate) fn sent_bytes(self, row_bytes: usize) -> usize {
        match self {
            Format::Coded(dtype) => {
                row_bytes / dtype.block_bytes() * dtype.block_values() / 16 * self.run_bytes()
            }
            Format::MXFP8 => row_bytes / 33 * 34,
            _ => row_bytes,
        }
    }

    /// Whether rows are sent as they are stored.
    pub(crate) fn sends_as_stored(self) -> bool {
        !matches!(self, Format::MXFP8 | Format::Coded(_))
    }

    /// Writes stored rows as they are sent: for each 16 values their codes, two to a byte, the scale and the minimum.
    /// MXFP8 is sent as Q8_0 lies in files, an f16 before each 32 codes.
    pub(crate) fn send(self, stored: &[u8], to: &mut [u8]) {
        if self == Format::MXFP8 {
            for ([exponent, codes @ ..], to) in
                stored.as_chunks::<33>().0.iter().zip(to.as_chunks_mut::<34>().0)
            {
                to[..2].copy_from_slice(&float8_factor(*exponent).to_le_bytes());
                to[2..].copy_from_slice(codes);
            }
            return;
        }
        let Format::Coded(dtype) = self else { return to.copy_from_slice(stored) };
        let runs = self.runs().expect("a format of codes");
        // A block has at most sixteen runs.
        let mut room = [Run::default(); 16];
        let room = &mut room[..dtype.block_values() / 16];
        let blocks = to.chunks_exact_mut(room.len() * self.run_bytes());
        for (stored, to) in stored.chunks_exact(dtype.block_bytes()).zip(blocks) {
            runs.read(stored, room);
            for (run, to) in room.iter().zip(to.chunks_exact_mut(self.run_bytes())) {
                for (byte, two) in to.iter_mut().zip(run.codes.as_chunks::<2>().0) {
                    *byte = two[0] | two[1] << 4;
                }
                to[8..12].copy_from_slice(&run.scale.to_le_bytes());
                if runs.mins {
                    to[12..].copy_from_slice(&run.min.to_le_bytes());
                }
            }
        }
    }

    /// Bytes of 16 values as they are sent.
    fn run_bytes(self) -> usize {
        12 + 4 * usize::from(self.runs().is_some_and(|runs| runs.mins))
    }

    /// The device header that reads it.
    pub(crate) fn header(self) -> &'static str {
        match self {
            Format::F32 => "quant/f32.cuh",
            Format::F16 => "quant/f16.cuh",
            Format::BF16 => "quant/bf16.cuh",
            Format::Q4_0 => "quant/q4_0.cuh",
            Format::Q4_1 => "quant/q4_1.cuh",
            Format::Q5_0 => "quant/q5_0.cuh",
            Format::Q5_1 => "quant/q5_1.cuh",
            Format::Q8_0 => "quant/q8_0.cuh",
            Format::Q4_K => "quant/q4_k.cuh",
            Format::Q5_K => "quant/q5_k.cuh",
            Format::Q6_K => "quant/q6_k.cuh",
            Format::MXFP8 => "quant/mxfp8.cuh",
            Format::FP8_128 => "quant/fp8_128.cuh",
            Format::FP8_A8 => "quant/fp8_a8.cuh",
            Format::Coded(_) => "quant/coded.cuh",
        }
    }

    /// Whether products with it take activations as 8-bit floats. Only Hopper's kernels of several rows do.
    pub(crate) fn takes_floats8(self) -> bool {
        self == Format::FP8_A8
    }

    /// Columns of activations that lie in 128 bytes.
    pub(crate) fn piece_columns(self) -> usize {
        if self.takes_floats8() { 128 } else { 64 }
    }

    /// Columns that one step of its product takes.
    pub(crate) fn step_columns(self) -> usize {
        match self {
            Format::Q4_K | Format::Q5_K | Format::Q6_K => 256,
            _ => 128,
        }
    }

    /// Bytes of one step of its product: a warp copies them at once.
    pub(crate) fn step_bytes(self) -> usize {
        self.tile_bytes().iter().sum::<usize>() * self.step_columns() / TILE_COLUMNS
    }

    /// The plane behind which a part keeps something as a whole, `PART_BYTES`: the largest magnitude of its values or
    /// scales, and the inverse of the power of two that they are multiplied by.
    pub(crate) fn part_plane(self) -> Option<usize> {
        match self {
            Format::BF16 => Some(2),
            Format::Q4_0 | Format::Q5_0 | Format::Q8_0 | Format::Q4_K | Format::Q5_K | Format::Q6_K => {
                Some(3)
            }
            _ => None,
        }
    }

    /// Bytes of each plane of a tile.
    pub(crate) fn tile_bytes(self) -> [usize; PLANES] {
        match self {
            Format::F32 => [8192, 0, 0, 0],
            Format::F16 | Format::BF16 => [4096, 0, 0, 0],
            Format::Q8_0 | Format::MXFP8 => [2048, 0, 128, 0],
            Format::FP8_128 | Format::FP8_A8 => [2048, 0, 64, 0],
            Format::Q4_0 | Format::Q4_K => [1024, 0, 128, 0],
            Format::Q4_1 => [1024, 0, 128, 128],
            Format::Q5_0 | Format::Q5_K => [1024, 256, 128, 0],
            Format::Q5_1 => [1024, 256, 128, 128],
            Format::Q6_K => [1024, 512, 128, 16],
            Format::Coded(_) => [1024, 0, 512, if self.run_bytes() == 16 { 512 } else { 0 }],
        }
    }
}

/// What an 8-bit float read as an f16, which is 2^8 too small, is multiplied by: 2^8 times the power of two that
/// `exponent` stands for. Infinite from 2^16 on, of weights that f16 does not hold; zero below what f16 has.
fn float8_factor(exponent: u8) -> u16 {
    match exponent {
        0..95 => 0,
        95..105 => 1 << (exponent - 95),
        105..135 => u16::from(exponent - 104) << 10,
        135..255 => 0x7c00,
        255 => 0x7e00,
    }
}

#[cfg(test)]
impl Format {
    /// How many bits words of codes are rotated left by.
    fn rotation(self) -> u32 {
        if matches!(self, Format::Q4_0 | Format::Q5_0 | Format::Q4_K | Format::Q5_K) { 2 } else { 0 }
    }

    /// Packs one stored row into its place in the planes of its 16 rows, which are zero before.
    pub(crate) fn pack_row(self, row: usize, stored: &[u8], planes: &mut [&mut [u8]; PLANES]) {
        let place = Row { half: row / 8, lane: row % 8 * 4, row };
        match self {
            Format::F32 => {
                for (tile, values) in stored.chunks(TILE_COLUMNS * 4).enumerate() {
                    planes[0][tile * 8192 + row * 512..][..values.len()].copy_from_slice(values);
                }
            }
            Format::F16 | Format::BF16 => {
                for (block, values) in stored.chunks(64).enumerate() {
                    let at = block * 1024 + place.half * 512 + place.lane * 16;
                    planes[0][at..][..values.len()].copy_from_slice(values);
                }
            }
            Format::Q8_0 | Format::MXFP8 => {
                let mut sent = vec![0; self.sent_bytes(stored.len())];
                self.send(stored, &mut sent);
                let higher = if self == Format::Q8_0 { 0x80 } else { 0 };
                for (block, stored) in sent.chunks_exact(34).enumerate() {
                    place.put_scale(block, &stored[..2], planes[2]);
                    let at = block / 2 * 1024 + place.half * 512 + place.lane * 16 + block % 2 * 8;
                    for (t, octet) in stored[2..].chunks_exact(8).enumerate() {
                        for (to, code) in planes[0][at + t * 16..][..8].iter_mut().zip(octet) {
                            *to = code ^ higher;
                        }
                    }
                }
            }
            Format::FP8_128 | Format::FP8_A8 => {
                for (tile, stored) in stored.chunks_exact(132).enumerate() {
                    planes[2][tile * 64 + row * 4..][..4].copy_from_slice(&stored[..4]);
                    for (block, stored) in stored[4..].chunks_exact(32).enumerate() {
                        let at = tile * 2048
                            + block / 2 * 1024
                            + place.half * 512
                            + place.lane * 16
                            + block % 2 * 8;
                        for (t, octet) in stored.chunks_exact(8).enumerate() {
                            planes[0][at + t * 16..][..8].copy_from_slice(octet);
                        }
                    }
                }
            }
            Format::Q4_0 | Format::Q4_1 | Format::Q5_0 | Format::Q5_1 => {
                let mins = 2 * usize::from(matches!(self, Format::Q4_1 | Format::Q5_1));
                let bits = 4 * usize::from(matches!(self, Format::Q5_0 | Format::Q5_1));
                for (block, stored) in stored.chunks_exact(2 + mins + bits + 16).enumerate() {
                    let (scales, rest) = stored.split_at(2 + mins);
                    let (high, low) = rest.split_at(bits);
                    place.put_scale(block, &scales[..2], planes[2]);
                    if mins > 0 {
                        place.put_scale(block, &scales[2..], planes[3]);
                    }
                    for t in 0..4 {
                        // Low halves are the first 16 values, high halves the others.
                        let bytes = octet(&low[t % 2 * 8..]) >> (t / 2 * 4);
                        place.put_nibbles(block, t, bytes, planes[0]);
                        place.rotate_nibbles(block, t, self.rotation(), planes[0]);
                        if bits > 0 {
                            place.put_bits(block, t, high[t], planes[1]);
                        }
                    }
                }
            }
            Format::Q4_K | Format::Q5_K => {
                let bits = if self == Format::Q5_K { 32 } else { 0 };
                for (super_block, stored) in stored.chunks_exact(16 + bits + 128).enumerate() {
                    let (header, rest) = stored.split_at(16);
                    let (high, low) = rest.split_at(bits);
                    planes[2][super_block * 256 + row * 16..][..16].copy_from_slice(header);
                    for block in 0..8 {
                        let index = super_block * 8 + block;
                        for t in 0..4 {
                            let bytes = octet(&low[block / 2 * 32 + t * 8..]) >> (block % 2 * 4);
                            place.put_nibbles(index, t, bytes, planes[0]);
                            place.rotate_nibbles(index, t, self.rotation(), planes[0]);
                            if bits > 0 {
                                let bits = octet(&high[t * 8..]) >> block & 0x0101_0101_0101_0101;
                                // Byte i's bit becomes bit i of the top byte.
                                let packed = (bits.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
                                place.put_bits(index, t, packed, planes[1]);
                            }
                        }
                    }
                }
            }
            Format::Q6_K => {
                for (super_block, stored) in stored.chunks_exact(210).enumerate() {
                    let (low, high) = (&stored[..128], &stored[128..192]);
                    planes[2][super_block * 256 + row * 16..][..16].copy_from_slice(&stored[192..208]);
                    planes[3][super_block * 32 + row * 2..][..2].copy_from_slice(&stored[208..]);
                    for block in 0..8 {
                        let (half, within) = (block / 4, block % 4 * 32);
                        let index = super_block * 8 + block;
                        for t in 0..4 {
                            let bytes = octet(&low[half * 64 + within % 64 + 8 * t..]) >> (within / 64 * 4);
                            place.put_nibbles(index, t, bytes, planes[0]);
                            let bytes = octet(&high[half * 32 + 8 * t..]) >> (within / 32 * 2);
                            place.put_pairs(index, t, bytes, planes[1]);
                        }
                    }
                }
            }
            Format::Coded(_) => {
                let mut sent = vec![0; self.sent_bytes(stored.len())];
                self.send(stored, &mut sent);
                let run_bytes = self.run_bytes();
                for (block, two) in sent.chunks_exact(2 * run_bytes).enumerate() {
                    for t in 0..4 {
                        let bytes = &two[t / 2 * run_bytes + t % 2 * 4..][..4];
                        let codes = bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]);
                        let codes =
                            codes.enumerate().fold(0, |all, (i, code)| all | u64::from(code) << (8 * i));
                        place.put_nibbles(block, t, codes, planes[0]);
                    }
                    for (run, bytes) in two.chunks_exact(run_bytes).enumerate() {
                        let at = block / 4 * 512 + row * 32 + (block % 4 * 2 + run) * 4;
                        planes[2][at..][..4].copy_from_slice(&bytes[8..12]);
                        if run_bytes == 16 {
                            planes[3][at..][..4].copy_from_slice(&bytes[12..]);
                        }
                    }
                }
            }
        }
    }
}

/// Where a row lies among the lanes.
#[cfg(test)]
struct Row {
    half: usize,
    /// The lane of its first octet.
    lane: usize,
    row: usize,
}

#[cfg(test)]
impl Row {
    /// The f16 of a 32-column block.
    fn put_scale(&self, block: usize, bytes: &[u8], plane: &mut [u8]) {
        plane[block / 4 * 128 + self.row * 8 + block % 4 * 2..][..2].copy_from_slice(bytes);
    }

    /// Eight codes, each in the low half of a byte.
    fn put_nibbles(&self, block: usize, t: usize, bytes: u64, plane: &mut [u8]) {
        let at = block / 4 * 1024 + self.half * 512 + (self.lane + t) * 16 + block % 4 * 4;
        put_field(&mut plane[at..], pairs(bytes), u32::MAX, 0);
    }

    /// Rotates what `put_nibbles` has put.
    fn rotate_nibbles(&self, block: usize, t: usize, by: u32, plane: &mut [u8]) {
        let at = block / 4 * 1024 + self.half * 512 + (self.lane + t) * 16 + block % 4 * 4;
        let rotated = word(&plane[at..]).rotate_left(by);
        plane[at..][..4].copy_from_slice(&rotated.to_le_bytes());
    }

    /// Eight upper bits, value i's in bit i; the four blocks of a tile share a word.
    fn put_bits(&self, block: usize, t: usize, bits: u8, plane: &mut [u8]) {
        let at = block / 4 * 256 + self.half * 128 + (self.lane + t) * 4;
        for i in 0..8 {
            put_field(&mut plane[at..], u32::from(bits >> i & 1), 1, upper_bit(block % 4, i));
        }
    }

    /// Eight times two upper bits, each at the bottom of a byte; two blocks share a word.
    fn put_pairs(&self, block: usize, t: usize, bytes: u64, plane: &mut [u8]) {
        let at = block / 4 * 512 + self.half * 256 + (self.lane + t) * 8 + block % 4 / 2 * 4;
        for i in 0..8 {
            put_field(&mut plane[at..], (bytes >> (8 * i)) as u32 & 3, 3, upper_pair(block, i));
        }
    }
}

/// Eight fields of four bits, each at the bottom of a byte: neighbours 16 bits apart, pair behind pair.
#[cfg(test)]
fn pairs(bytes: u64) -> u32 {
    (0..8).fold(0, |word, i| word | ((bytes >> (8 * i)) as u32 & 15) << (i % 2 * 16 + i / 2 * 4))
}

/// Where the upper bit of code i of an octet lies in its word: rotated right by as much as two pairs have in common,
/// pairs are at bits 6 and 10, their second codes 16 further up.
#[cfg(test)]
fn upper_bit(block: usize, i: usize) -> usize {
    let two = block * 2 + i / 4;
    (6 + i / 2 % 2 * 4 + i % 2 * 16 + two % 4 + two / 4 * 8) % 32
}

/// Where two upper bits lie, of two octets in a word: in the same way, pairs from bits 4 and 8 on.
#[cfg(test)]
fn upper_pair(block: usize, i: usize) -> usize {
    (4 + i / 2 % 2 * 4 + i % 2 * 16 + i / 4 * 2 + block % 2 * 8) % 32
}

/// Replaces the bits of a word that `mask`, shifted, covers.
#[cfg(test)]
fn put_field(at: &mut [u8], new: u32, mask: u32, shift: usize) {
    let kept = word(at) & !(mask << shift);
    at[..4].copy_from_slice(&(kept | new << shift).to_le_bytes());
}

#[cfg(test)]
fn octet(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

#[cfg(test)]
fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use fornax_compute::cpu::{Activations, Cpu};
    use fornax_compute::{Backend, Batch, Memory, Purpose, Row as BatchRow, Token, WEIGHT_TYPES};
    use fornax_format::View;
    use half::{bf16, f16};

    use super::*;

    /// Reads one value out of the planes as the kernels' `value` functions do.
    fn value(format: Format, planes: &[Vec<u8>; PLANES], groups: usize, row: usize, column: usize) -> f32 {
        let (tile, half, block) = (row / 16 * groups + column / 128, row % 16 / 8, column % 128 / 32);
        let (lane, i) = (row % 8 * 4 + column % 32 / 8, column % 8);
        let [codes, high, scales, mins] = planes;
        let half_at = |plane: &[u8], at: usize| f16::from_le_bytes([plane[at], plane[at + 1]]).to_f32();
        let nibble = || {
            let word = word(&codes[tile * 1024 + half * 512 + lane * 16 + block * 4..]);
            word.rotate_right(format.rotation()) >> (16 * (i % 2) + 4 * (i / 2)) & 15
        };
        let bit = || {
            let word = word(&high[tile * 256 + half * 128 + lane * 4..]);
            word >> upper_bit(block, i) & 1
        };
        let scale = |plane: &[u8]| half_at(plane, tile * 128 + row % 16 * 8 + block * 2);
        let two = || tile * 4096 + block * 1024 + half * 512 + lane * 16 + i * 2;
        match format {
            Format::F32 => f32::from_bits(word(&codes[tile * 8192 + row % 16 * 512 + column % 128 * 4..])),
            Format::F16 => half_at(codes, two()),
            Format::BF16 => bf16::from_le_bytes([codes[two()], codes[two() + 1]]).to_f32(),
            Format::Q8_0 => {
                let at = tile * 2048 + block / 2 * 1024 + half * 512 + lane * 16 + block % 2 * 8 + i;
                scale(scales) * (f32::from(codes[at]) - 128.0)
            }
            Format::MXFP8 => {
                let at = tile * 2048 + block / 2 * 1024 + half * 512 + lane * 16 + block % 2 * 8 + i;
                let code = u16::from(codes[at]);
                scale(scales) * f16::from_bits((code & 0x80) << 8 | (code & 0x7f) << 7).to_f32()
            }
            Format::FP8_128 | Format::FP8_A8 => {
                let at = tile * 2048 + block / 2 * 1024 + half * 512 + lane * 16 + block % 2 * 8 + i;
                let code = u16::from(codes[at]);
                let scale = f32::from_bits(word(&scales[tile * 64 + row % 16 * 4..]));
                scale * (f16::from_bits((code & 0x80) << 8 | (code & 0x7f) << 7).to_f32() * 256.0)
            }
            Format::Q4_0 => scale(scales) * (nibble() as f32 - 8.0),
            Format::Q4_1 => scale(scales) * nibble() as f32 + scale(mins),
            Format::Q5_0 => scale(scales) * ((nibble() | bit() << 4) as f32 - 16.0),
            Format::Q5_1 => scale(scales) * (nibble() | bit() << 4) as f32 + scale(mins),
            Format::Q4_K | Format::Q5_K => {
                let header = &scales[tile / 2 * 256 + row % 16 * 16..][..16];
                let sub = column % 256 / 32;
                let (s, m) = match sub {
                    0..4 => (header[4 + sub] & 63, header[8 + sub] & 63),
                    _ => (
                        header[sub] >> 6 << 4 | header[8 + sub] & 15,
                        header[4 + sub] >> 6 << 4 | header[8 + sub] >> 4,
                    ),
                };
                let code = nibble() | if format == Format::Q5_K { bit() << 4 } else { 0 };
                half_at(header, 0) * f32::from(s) * code as f32 - half_at(header, 2) * f32::from(m)
            }
            Format::Q6_K => {
                let word = word(&high[tile * 512 + half * 256 + lane * 8 + block / 2 * 4..]);
                let bits = word >> upper_pair(block, i) & 3;
                let code = (nibble() | bits << 4) as f32 - 32.0;
                let sub = scales[tile / 2 * 256 + row % 16 * 16 + column % 256 / 16].cast_signed();
                half_at(mins, tile / 2 * 32 + row % 16 * 2) * f32::from(sub) * code
            }
            Format::Coded(_) => {
                let runs = format.runs().unwrap();
                let at = tile * 512 + row % 16 * 32 + column % 128 / 16 * 4;
                let float = |plane: &[u8]| f32::from_bits(word(&plane[at..]));
                let value = float(scales) * f32::from(runs.table[nibble() as usize]);
                if runs.mins { value - float(mins) } else { value }
            }
        }
    }

    /// What the CPU, which is held against the `gguf` package, makes of the stored rows.
    fn dequantized(dtype: DType, rows: usize, columns: usize, bytes: &[u8]) -> Vec<f32> {
        let cpu = Cpu::reference(Activations::Float).unwrap();
        let table =
            cpu.upload(&[View::new("table", dtype, vec![rows, columns], bytes).unwrap().into()]).unwrap();
        let mut out = cpu.alloc(Purpose::Residual, rows, columns).unwrap();
        let mut batch = Batch::default();
        let row = BatchRow { slot: 0, start: 0, len: rows as u32, pages: vec![], wanted: 0 };
        batch.push(row, (0..rows as u32).map(Token::Known));
        let step = cpu.begin(&batch).unwrap();
        cpu.embed(&step, &table, &mut out).unwrap();
        cpu.read(&out, 0, rows).unwrap()
    }

    #[test]
    fn packed_rows_hold_the_values_of_the_file() {
        for dtype in WEIGHT_TYPES {
            let format = Format::of(dtype).unwrap();
            for columns in [17usize, 32, 96, 256, 576, 768] {
                let (rows, groups) = (37, columns.div_ceil(TILE_COLUMNS));
                let Some(bytes) =
                    dtype.bytes_for(rows * columns).filter(|_| dtype.bytes_for(columns).is_some())
                else {
                    continue;
                };
                let mut state = columns as u64;
                let mut stored: Vec<u8> = std::iter::repeat_with(|| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (state >> 56) as u8
                })
                .take(bytes)
                .collect();
                // Few NaN: the exponents of floats and of most f16 scales are kept small.
                let exponents: &[usize] = match dtype {
                    DType::F32 => &[3],
                    DType::F16 | DType::BF16 | DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => &[1],
                    DType::Q6_K => &[209],
                    _ => &[1, 3],
                };
                for block in stored.chunks_exact_mut(dtype.block_bytes()) {
                    if dtype == DType::MXFP8 {
                        // What an f16 holds times the largest code.
                        block[0] = [255, 95 + block[0] % 40][usize::from(block[1] > 8)];
                        continue;
                    }
                    if matches!(dtype, DType::FP8_128 | DType::FP8_A8) {
                        block[3] &= 0xbf;
                        continue;
                    }
                    exponents.iter().for_each(|&at| block[at] &= 0xbf);
                }
                let tiles = rows.div_ceil(TILE_ROWS);
                let mut planes = format.tile_bytes().map(|bytes| vec![0; bytes * groups * tiles]);
                let row_bytes = bytes / rows;
                for (row, stored) in stored.chunks_exact(row_bytes).enumerate() {
                    let mut mine = planes.each_mut().map(|plane| {
                        let bytes = plane.len() / tiles;
                        &mut plane[row / TILE_ROWS * bytes..][..bytes]
                    });
                    format.pack_row(row % TILE_ROWS, stored, &mut mine);
                }
                let wanted = dequantized(dtype, rows, columns, &stored);
                for (at, wanted) in wanted.iter().enumerate() {
                    let got = value(format, &planes, groups, at / columns, at % columns);
                    let same = got == *wanted || got.is_nan() && wanted.is_nan();
                    assert!(same, "{dtype} row {} column {}: {got}, {wanted}", at / columns, at % columns);
                }
            }
        }
    }
}
