//! The KV cache seen from outside: groups of layers, pages of tokens.

use std::fmt;

use crate::Error;

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

/// What a group of layers keeps of the positions it has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvKind {
    /// Keys and values of every token, each of its own width.
    Pairs {
        /// K/V heads per layer; queries share them, they are never expanded.
        heads: usize,
        /// Values of a head's key.
        dim_k: usize,
        /// Values of a head's value.
        dim_v: usize,
    },
    /// One row of every token, from which keys and values are made anew.
    Latent {
        /// Values of the row.
        width: usize,
    },
    /// One state of a sequence, whatever its length. A page is then a whole state, and belongs to no 32 tokens: each
    /// sequence has one that its steps go on from, the others are checkpoints that prefixes are found by.
    State {
        /// Bytes of one layer's state.
        bytes: usize,
        /// Tokens from one checkpoint to the next; a multiple of [`PAGE_TOKENS`].
        every: usize,
    },
}

impl KvKind {
    /// Keys and values of one width.
    pub fn pairs(heads: usize, dim: usize) -> KvKind {
        KvKind::Pairs { heads, dim_k: dim, dim_v: dim }
    }

    /// Heads and their width, where keys and values have the same.
    pub fn heads(&self) -> Option<(usize, usize)> {
        match *self {
            KvKind::Pairs { heads, dim_k, dim_v } if dim_k == dim_v => Some((heads, dim_k)),
            _ => None,
        }
    }

    /// Whether it is a state of a sequence, which has no page for every 32 tokens.
    pub fn is_state(&self) -> bool {
        matches!(self, KvKind::State { .. })
    }
}

impl fmt::Display for KvKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvKind::Pairs { heads, dim_k, dim_v } => {
                write!(f, "a cache of {heads} heads with keys of {dim_k} and values of {dim_v}")
            }
            KvKind::Latent { width } => write!(f, "a cache of one latent row of {width} a token"),
            KvKind::State { bytes, .. } => write!(f, "a cache of one state of {bytes} bytes a sequence"),
        }
    }
}

/// Layers that share one page table: the same kind and the same window, so the same pages live and die together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// Layers in the group.
    pub layers: usize,
    /// What they keep.
    pub kind: KvKind,
    /// A query sees this many positions, its own included; `None` sees all.
    pub window: Option<u32>,
    /// Pages in the pool, the trash page included.
    pub pages: usize,
}

impl KvGroup {
    /// Bytes of one page over all layers; saturates, and what saturates is refused by any limit.
    pub fn page_bytes(&self, dtype: KvDType) -> u64 {
        let layer = match self.kind {
            KvKind::Pairs { heads, dim_k, dim_v } => dtype
                .bytes_of(dim_k)
                .saturating_add(dtype.bytes_of(dim_v))
                .saturating_mul(heads)
                .saturating_mul(PAGE_TOKENS),
            KvKind::Latent { width } => dtype.bytes_of(width).saturating_mul(PAGE_TOKENS),
            // States are sums over all that was read: they keep the precision that their model says.
            KvKind::State { bytes, .. } => bytes,
        };
        (layer as u64).saturating_mul(self.layers as u64)
    }
}

/// A page, or a state, as bytes outside of its cache: to move it to another device, to a disk, or to another machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageCopy {
    bytes: Vec<u8>,
    /// Of the layout and the bytes.
    fingerprint: u64,
}

impl PageCopy {
    /// The bytes of a page in a cache whose pages lie like this.
    pub fn new(layout: &str, bytes: Vec<u8>) -> PageCopy {
        let fingerprint = fingerprint(layout, &bytes);
        PageCopy { bytes, fingerprint }
    }

    /// Bytes as they were, and the fingerprint that they had, from wherever they were kept.
    pub fn from_parts(bytes: Vec<u8>, fingerprint: u64) -> PageCopy {
        PageCopy { bytes, fingerprint }
    }

    /// The bytes and their fingerprint, for whoever keeps them.
    pub fn parts(&self) -> (&[u8], u64) {
        (&self.bytes, self.fingerprint)
    }

    /// The bytes, for a cache of the same layout. Others would read them as something else.
    pub fn bytes(&self, layout: &str) -> Result<&[u8], Error> {
        let (got, wanted) = (self.fingerprint, fingerprint(layout, &self.bytes));
        if got == wanted { Ok(&self.bytes) } else { Err(Error::PageCopy { got, wanted }) }
    }
}

/// FNV-1a, which is the same on every machine and in every version.
fn fingerprint(layout: &str, bytes: &[u8]) -> u64 {
    let all = layout.bytes().chain([0]).chain(bytes.iter().copied());
    all.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Everything needed to size and allocate a KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSpec {
    /// One pool and one page table per group. Groups of states come last: a group's number is then its table's place in
    /// [`Row::pages`](crate::Row), or behind those its state's in [`Row::states`](crate::Row).
    pub groups: Vec<KvGroup>,
    /// Storage type of keys and values.
    pub dtype: KvDType,
}

impl KvSpec {
    /// Refuses, by name, groups that are not keys and values of one width: what a backend says that has kernels for no
    /// others.
    pub fn pairs_only(&self, backend: &'static str) -> Result<(), Error> {
        match self.groups.iter().find(|group| group.kind.heads().is_none()) {
            None => Ok(()),
            Some(group) => Err(Error::Unsupported { what: group.kind.to_string(), backend }),
        }
    }
}

/// Where a layer keeps its keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    /// Index into [`KvSpec::groups`].
    pub group: usize,
    /// Index among the group's layers.
    pub layer: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Counting, Memory, Purpose, Sizes,
        cpu::{Cpu, CpuOptions, CpuSizes},
    };

    const KINDS: [KvKind; 5] = [
        KvKind::Pairs { heads: 3, dim_k: 64, dim_v: 64 },
        KvKind::Pairs { heads: 3, dim_k: 192, dim_v: 128 },
        KvKind::Latent { width: 576 },
        KvKind::State { bytes: 1000, every: 256 },
        // Values of four bytes do not fit.
        KvKind::State { bytes: 1001, every: 256 },
    ];

    fn spec(kind: KvKind) -> KvSpec {
        KvSpec { groups: vec![KvGroup { layers: 2, kind, window: None, pages: 5 }], dtype: KvDType::F16 }
    }

    /// The sizes of a backend that has every kind.
    struct All(CpuSizes);

    impl Sizes for All {
        fn weight_bytes(&self, parts: &[crate::Part<'_>]) -> Result<u64, Error> {
            self.0.weight_bytes(parts)
        }

        fn buf_bytes(&self, purpose: Purpose, rows: usize, columns: usize) -> u64 {
            self.0.buf_bytes(purpose, rows, columns)
        }

        fn workspace_bytes(&self) -> u64 {
            0
        }
    }

    #[test]
    fn a_plan_sizes_every_kind() {
        let bytes = KINDS.map(|kind| {
            let counting = Counting::new(All(CpuSizes::new(&CpuOptions::default())));
            counting.alloc_kv(&spec(kind)).unwrap();
            counting.usage().bytes(Purpose::Kv)
        });
        let tokens = 5 * 32 * 2 * 2;
        assert_eq!(bytes, [tokens * 3 * 128, tokens * 3 * 320, tokens * 576, 5 * 2 * 1000, 5 * 2 * 1001]);
    }

    #[test]
    fn a_backend_without_kernels_for_a_kind_refuses_it_by_name_when_planned_and_when_allocated() {
        let options = CpuOptions { threads: 1, ..CpuOptions::default() };
        let counting = Counting::new(CpuSizes::new(&options));
        let cpu = Cpu::new(options).unwrap();
        let said = KINDS.map(|kind| {
            let planned = counting.alloc_kv(&spec(kind)).map_err(|error| error.to_string());
            let allocated = cpu.alloc_kv(&spec(kind)).map(drop).map_err(|error| error.to_string());
            assert_eq!(planned, allocated);
            planned
        });
        let lacks = |what: &str| Err(format!("{what} is not available on cpu"));
        assert_eq!(
            said,
            [
                Ok(()),
                lacks("a cache of 3 heads with keys of 192 and values of 128"),
                Ok(()),
                Ok(()),
                lacks("a cache of one state of 1001 bytes a sequence"),
            ]
        );
    }
}
