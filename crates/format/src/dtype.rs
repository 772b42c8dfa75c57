//! Element types of stored tensors, with the block geometry that turns a value count into a byte count.

use std::fmt;

/// How the values of a stored tensor are encoded.
///
/// Every type that ggml or safetensors can name is here, computable or not: a file with a rare type still parses, and
/// the load, which knows what the backend can compute, refuses it by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(
    non_camel_case_types,
    missing_docs,
    reason = "the field's own names; each is documented by the ggml format"
)]
pub enum DType {
    F32,
    F16,
    BF16,
    F64,
    I8,
    I16,
    I32,
    I64,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
    U8,
    U16,
    U32,
    U64,
    Bool,
    /// 8-bit float, 4 exponent bits, 3 mantissa bits, no infinities.
    F8_E4M3,
    /// 8-bit float, 5 exponent bits, 2 mantissa bits.
    F8_E5M2,
    /// 8-bit exponent without sign or mantissa: the scale of the microscaling formats.
    F8_E8M0,
    F8_E4M3FNUZ,
    F8_E5M2FNUZ,
    /// 4-bit float, two values in a byte.
    F4,
    /// 6-bit float, four values in three bytes.
    F6_E2M3,
    /// 6-bit float, four values in three bytes.
    F6_E3M2,
    /// A pair of 32-bit floats.
    C64,
    /// Four bits, as GPTQ packs them: see [`Packing`](crate::Packing).
    GPTQ_4,
    /// Four bits, as AWQ packs them: see [`Packing`](crate::Packing).
    AWQ_4,
    /// Two bits, as GPTQ packs them.
    GPTQ_2,
    /// Three bits, as GPTQ packs them.
    GPTQ_3,
    /// Eight bits, as GPTQ packs them.
    GPTQ_8,
    /// One bit along words of 32, as compressed-tensors packs them.
    PACKED_1,
    /// Two bits along words of 32, as compressed-tensors and MLX pack them.
    PACKED_2,
    /// Three bits.
    PACKED_3,
    /// Four bits.
    PACKED_4,
    /// Five bits.
    PACKED_5,
    /// Six bits.
    PACKED_6,
    /// Seven bits.
    PACKED_7,
    /// Eight bits.
    PACKED_8,
    /// Four bits, as bitsandbytes packs them: nf4 and fp4.
    BNB_4,
    /// 32 8-bit floats that share a power of two: what `--quant fp8` makes of float matrices; files have it nowhere.
    MXFP8,
    /// 8-bit floats as in FP8 checkpoints, of which 128 of a row share an f32 scale that lies before them: what such
    /// matrices land in ([`Packing`](crate::Packing)); no tensor of a file lies so.
    FP8_128,
    /// The same bytes, for matrices that are multiplied with activations rounded to 8-bit floats.
    FP8_A8,
}

/// One row per type, in the order of the enum: (type, ggml id where it has one, name, values per block, bytes per
/// block).
const TABLE: &[(DType, Option<u32>, &str, usize, usize)] = {
    use DType::*;
    &[
        (F32, Some(0), "F32", 1, 4),
        (F16, Some(1), "F16", 1, 2),
        (BF16, Some(30), "BF16", 1, 2),
        (F64, Some(28), "F64", 1, 8),
        (I8, Some(24), "I8", 1, 1),
        (I16, Some(25), "I16", 1, 2),
        (I32, Some(26), "I32", 1, 4),
        (I64, Some(27), "I64", 1, 8),
        (Q4_0, Some(2), "Q4_0", 32, 18),
        (Q4_1, Some(3), "Q4_1", 32, 20),
        (Q5_0, Some(6), "Q5_0", 32, 22),
        (Q5_1, Some(7), "Q5_1", 32, 24),
        (Q8_0, Some(8), "Q8_0", 32, 34),
        // Two f16 and 32 bytes in ggml's C, whose word counts; the `gguf` Python package says 40, as if they were f32.
        (Q8_1, Some(9), "Q8_1", 32, 36),
        (Q2_K, Some(10), "Q2_K", 256, 84),
        (Q3_K, Some(11), "Q3_K", 256, 110),
        (Q4_K, Some(12), "Q4_K", 256, 144),
        (Q5_K, Some(13), "Q5_K", 256, 176),
        (Q6_K, Some(14), "Q6_K", 256, 210),
        (Q8_K, Some(15), "Q8_K", 256, 292),
        (IQ1_S, Some(19), "IQ1_S", 256, 50),
        (IQ1_M, Some(29), "IQ1_M", 256, 56),
        (IQ2_XXS, Some(16), "IQ2_XXS", 256, 66),
        (IQ2_XS, Some(17), "IQ2_XS", 256, 74),
        (IQ2_S, Some(22), "IQ2_S", 256, 82),
        (IQ3_XXS, Some(18), "IQ3_XXS", 256, 98),
        (IQ3_S, Some(21), "IQ3_S", 256, 110),
        (IQ4_NL, Some(20), "IQ4_NL", 32, 18),
        (IQ4_XS, Some(23), "IQ4_XS", 256, 136),
        (TQ1_0, Some(34), "TQ1_0", 256, 54),
        (TQ2_0, Some(35), "TQ2_0", 256, 66),
        (MXFP4, Some(39), "MXFP4", 32, 17),
        (NVFP4, Some(40), "NVFP4", 64, 36),
        (Q1_0, Some(41), "Q1_0", 128, 18),
        (Q2_0, Some(42), "Q2_0", 64, 18), // newer than the Python package
        (U8, None, "U8", 1, 1),
        (U16, None, "U16", 1, 2),
        (U32, None, "U32", 1, 4),
        (U64, None, "U64", 1, 8),
        (Bool, None, "BOOL", 1, 1),
        (F8_E4M3, None, "F8_E4M3", 1, 1),
        (F8_E5M2, None, "F8_E5M2", 1, 1),
        (F8_E8M0, None, "F8_E8M0", 1, 1),
        (F8_E4M3FNUZ, None, "F8_E4M3FNUZ", 1, 1),
        (F8_E5M2FNUZ, None, "F8_E5M2FNUZ", 1, 1),
        (F4, None, "F4", 2, 1),
        (F6_E2M3, None, "F6_E2M3", 4, 3),
        (F6_E3M2, None, "F6_E3M2", 4, 3),
        (C64, None, "C64", 1, 8),
        (GPTQ_4, None, "GPTQ_4", 8, 4),
        (AWQ_4, None, "AWQ_4", 8, 4),
        (GPTQ_2, None, "GPTQ_2", 16, 4),
        (GPTQ_3, None, "GPTQ_3", 32, 12),
        (GPTQ_8, None, "GPTQ_8", 4, 4),
        (PACKED_1, None, "PACKED_1", 32, 4),
        (PACKED_2, None, "PACKED_2", 16, 4),
        (PACKED_3, None, "PACKED_3", 32, 12),
        (PACKED_4, None, "PACKED_4", 8, 4),
        (PACKED_5, None, "PACKED_5", 32, 20),
        (PACKED_6, None, "PACKED_6", 16, 12),
        (PACKED_7, None, "PACKED_7", 32, 28),
        (PACKED_8, None, "PACKED_8", 4, 4),
        (BNB_4, None, "BNB_4", 2, 1),
        (MXFP8, None, "MXFP8", 32, 33),
        (FP8_128, None, "FP8_128", 128, 132),
        (FP8_A8, None, "FP8_A8", 128, 132),
    ]
};

impl DType {
    /// Every type, in the order of the table above.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|row| row.0)
    }

    /// The type that GGUF files write as `id`. Ids of types that ggml removed (4, 5, 31-33, 36-38) have none.
    pub fn from_ggml(id: u32) -> Option<DType> {
        TABLE.iter().find(|row| row.1 == Some(id)).map(|row| row.0)
    }

    /// The id that GGUF files write for this type, if they can.
    pub fn ggml_id(self) -> Option<u32> {
        self.row().1
    }

    /// The name as files and people write it: `Q4_K`, `BF16`.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Values in one block; 1 for plain types.
    pub fn block_values(self) -> usize {
        self.row().3
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.row().4
    }

    /// Bytes of `values` consecutive values; `None` when they do not fill whole blocks or the product overflows.
    pub fn bytes_for(self, values: usize) -> Option<usize> {
        let (block_values, block_bytes) = (self.block_values(), self.block_bytes());
        if !values.is_multiple_of(block_values) {
            return None;
        }
        (values / block_values).checked_mul(block_bytes)
    }

    fn row(self) -> &'static (DType, Option<u32>, &'static str, usize, usize) {
        &TABLE[self as usize]
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_found_by_its_own_row_and_id() {
        for (position, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, position, "{} is not where the enum has it", row.2);
            assert_eq!(row.0.ggml_id().and_then(DType::from_ggml), row.1.map(|_| row.0));
        }
        assert_eq!(DType::all().count(), TABLE.len());
    }

    #[test]
    fn ids_that_ggml_removed_or_never_gave_have_no_type() {
        for id in [4, 5, 31, 32, 33, 36, 37, 38, 43, u32::MAX] {
            assert_eq!(DType::from_ggml(id), None, "{id}");
        }
    }

    #[test]
    fn bytes_are_counted_in_whole_blocks() {
        assert_eq!(DType::Q4_K.bytes_for(512), Some(288));
        assert_eq!(DType::Q4_K.bytes_for(0), Some(0));
        assert_eq!(DType::Q4_K.bytes_for(255), None);
        assert_eq!(DType::Q8_1.bytes_for(32), Some(36));
        assert_eq!(DType::Q2_0.bytes_for(64), Some(18));
        assert_eq!(DType::F64.bytes_for(usize::MAX / 4), None);
    }
}
