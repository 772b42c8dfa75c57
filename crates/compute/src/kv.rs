//! The KV cache seen from outside: groups of layers, pages of tokens.

use std::fmt;

/// Tokens in one page. 16 doubles the page tables and halves the contiguous run; 64 loses up to 63 tokens of a
/// prefix hit and wastes half a page more per sequence.
pub const PAGE_TOKENS: usize = 32;

/// A page's number within its KV group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

impl PageId {
    /// Page 0 of every group belongs to nobody: padding rows write there, and page-table entries that a window has
    /// dropped point there. It is never read.
    pub const TRASH: PageId = PageId(0);
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the field's own")]
pub enum KvDType {
    F32,
    F16,
    BF16,
    /// Codes of 8 bits; 32 values of a head, or what is left at its end, share an f16 scale.
    Q8_0,
    /// Floats of 8 bits (e4m3); all values of a head share a power of two, a byte.
    F8,
}

/// Values of a head that share a scale in [`KvDType::Q8_0`].
pub const KV_BLOCK: usize = 32;

impl KvDType {
    /// Every one.
    pub const ALL: [KvDType; 5] = [KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::Q8_0, KvDType::F8];

    /// Bytes of one token's keys, or values, of a head of `dim` values.
    pub fn bytes_of(self, dim: usize) -> usize {
        match self {
            KvDType::F32 => 4 * dim,
            KvDType::F16 | KvDType::BF16 => 2 * dim,
            KvDType::Q8_0 => dim + 2 * dim.div_ceil(KV_BLOCK),
            KvDType::F8 => dim + 1,
        }
    }
}

impl fmt::Display for KvDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvDType::F32 => "f32",
            KvDType::F16 => "f16",
            KvDType::BF16 => "bf16",
            KvDType::Q8_0 => "q8_0",
            KvDType::F8 => "fp8",
        })
    }
}

/// Layers that share one page table: the same heads and the same window, so the same pages live and die together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// Layers in the group.
    pub layers: usize,
    /// K/V heads per layer; queries share them, they are never expanded.
    pub heads: usize,
    /// Values per head.
    pub dim: usize,
    /// A query sees this many positions, its own included; `None` sees all.
    pub window: Option<u32>,
    /// Pages in the pool, the trash page included.
    pub pages: usize,
}

/// Everything needed to size and allocate a KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSpec {
    /// One pool and one page table per group.
    pub groups: Vec<KvGroup>,
    /// Storage type of keys and values.
    pub dtype: KvDType,
}

/// Where a layer keeps its keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    /// Index into [`KvSpec::groups`].
    pub group: usize,
    /// Index among the group's layers.
    pub layer: usize,
}
