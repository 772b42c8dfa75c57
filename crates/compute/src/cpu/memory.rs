//! Host memory as a device: every byte counted by purpose where it is allocated, and uncounted where it is dropped.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use fornax_format::{DType, View};

use super::disjoint::Disjoint;
use super::pool::Pool;
use super::quant::{self, Format, GROUP, Simd};
use super::{ACTIVATION_SCRATCH_BYTES, COLUMNS_MAX, CpuOptions, NAME, THREAD_SCRATCH_VALUES, latent, step};
use crate::landing::{Content, land};
use crate::operands::Operand;
use crate::{
    Error, KvDType, KvGroup, KvKind, KvLayer, KvSpec, LatentHeads, Need, PAGE_TOKENS, PageCopy, PageId, Part,
    Purpose, Sizes, Usage, WeightPlace,
};

/// A cache line, and enough for any vector load.
const ALIGN: usize = 64;

/// Whose bytes are in use, and how many may be.
#[derive(Debug)]
pub(super) struct Ledger {
    usage: Mutex<Usage>,
    limit: u64,
    /// Where the next weights go.
    chunk: Mutex<Chunk>,
}

impl Ledger {
    pub(super) fn new(limit: u64) -> Arc<Ledger> {
        Arc::new(Ledger { usage: Mutex::default(), limit, chunk: Mutex::default() })
    }

    pub(super) fn usage(&self) -> Usage {
        *lock(&self.usage)
    }

    /// Counts bytes until the result is dropped, or refuses them.
    pub(super) fn count(self: &Arc<Self>, purpose: Purpose, bytes: u64) -> Result<Counted, Error> {
        let mut usage = lock(&self.usage);
        if bytes > self.limit.saturating_sub(usage.total()) {
            return Err(self.out_of_memory(purpose, bytes, usage.total()));
        }
        usage.add(purpose, bytes);
        Ok(Counted { ledger: Arc::clone(self), purpose, bytes })
    }

    fn out_of_memory(&self, purpose: Purpose, wanted: u64, used: u64) -> Error {
        Error::OutOfMemory { purpose, wanted, used, limit: self.limit }
    }
}

/// A panic while bytes were counted left them counted or not: both are numbers.
fn lock<T>(counted: &Mutex<T>) -> MutexGuard<'_, T> {
    counted.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes that count as used while this lives.
#[derive(Debug)]
pub(super) struct Counted {
    ledger: Arc<Ledger>,
    purpose: Purpose,
    bytes: u64,
}

impl Drop for Counted {
    fn drop(&mut self) {
        lock(&self.ledger.usage).subtract(self.purpose, self.bytes);
    }
}

/// Bytes of a large page. Weights lie in these, so that what is streamed from end to end misses the address cache
/// rarely and is read ahead without a break.
const LARGE_PAGE: usize = 2 << 20;
/// Weights share allocations of this size: most are smaller than a large page. What is not used of it is never touched,
/// and so takes no memory.
const CHUNK_BYTES: usize = 64 << 20;

/// Memory of the system's, zeroed, given back when nobody has a part of it any more.
#[derive(Debug)]
struct Allocation {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: memory of its own, reached through its users alone, which have different parts of it.
unsafe impl Send for Allocation {}
// SAFETY: as above; an allocation by itself reads and writes nothing.
unsafe impl Sync for Allocation {}

impl Allocation {
    fn new(bytes: usize) -> Option<Arc<Allocation>> {
        // Aligned by its users and not by the allocator: for more than a word's alignment that zeroes by writing, which
        // makes every page resident before anything is stored there.
        let layout = Layout::from_size_align(bytes, size_of::<u64>()).ok().filter(|_| bytes > 0)?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Arc::new(Allocation { start, layout }))
    }

    /// Advice to the system, whose refusal changes nothing.
    fn ask_for_large_pages(&self) {
        #[cfg(target_os = "linux")]
        {
            let skipped = self.start.align_offset(LARGE_PAGE);
            let bytes = self.layout.size().saturating_sub(skipped) / LARGE_PAGE * LARGE_PAGE;
            // SAFETY: whole pages inside this allocation.
            unsafe {
                let start = self.start.as_ptr().wrapping_add(skipped);
                libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE);
            }
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, given back once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// An allocation that weights fill one after the other.
#[derive(Debug, Default)]
struct Chunk {
    /// Kept by the weights in it alone.
    allocation: Weak<Allocation>,
    /// Bytes of it that are taken.
    used: usize,
}

impl Chunk {
    /// Room for some bytes at an aligned address: here, or in a new allocation.
    fn take(&mut self, bytes: usize) -> Option<(NonNull<u8>, Arc<Allocation>)> {
        if let Some(allocation) = self.allocation.upgrade()
            && let Some(start) = self.place(&allocation, bytes, ALIGN)
        {
            return Some((start, allocation));
        }
        let allocation = Allocation::new(bytes.max(CHUNK_BYTES).checked_add(LARGE_PAGE)?)?;
        allocation.ask_for_large_pages();
        self.used = 0;
        let start = self.place(&allocation, bytes, LARGE_PAGE)?;
        self.allocation = Arc::downgrade(&allocation);
        Some((start, allocation))
    }

    fn place(&mut self, allocation: &Allocation, bytes: usize, align: usize) -> Option<NonNull<u8>> {
        // SAFETY: `used` is at most the allocation's size.
        let next = unsafe { allocation.start.add(self.used) };
        let from = self.used.checked_add(next.align_offset(align))?;
        let to = from.checked_add(bytes)?;
        if to > allocation.layout.size() {
            return None;
        }
        self.used = to;
        // SAFETY: as above, and `from` is at most `to`.
        Some(unsafe { allocation.start.add(from) })
    }
}

/// Counted, aligned memory of its own. In builds with debug assertions it starts as NaN in every float type, so that
/// reading what no operation wrote is seen.
pub(super) struct Block {
    /// Its first address, aligned.
    start: NonNull<u8>,
    bytes: usize,
    /// What it lies in; nothing for an empty block.
    _allocation: Option<Arc<Allocation>>,
    /// Dropped after the memory is given back.
    _counted: Counted,
}

// SAFETY: no other block has its bytes, and `bytes_mut` takes it mutably.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    pub(super) fn new(ledger: &Arc<Ledger>, purpose: Purpose, bytes: u64) -> Result<Block, Error> {
        let counted = ledger.count(purpose, bytes)?;
        let refused = || ledger.out_of_memory(purpose, bytes, ledger.usage().total() - bytes);
        let bytes = usize::try_from(bytes).map_err(|_| refused())?;
        let mut block = Block { start: NonNull::dangling(), bytes, _allocation: None, _counted: counted };
        if bytes > 0 {
            let (start, allocation) = match purpose {
                Purpose::Weights => lock(&ledger.chunk).take(bytes),
                _ => bytes.checked_add(ALIGN).and_then(Allocation::new).map(|allocation| {
                    // SAFETY: the next aligned address is less than ALIGN bytes on, and it is ALIGN bytes larger.
                    (unsafe { allocation.start.add(allocation.start.align_offset(ALIGN)) }, allocation)
                }),
            }
            .ok_or_else(refused)?;
            (block.start, block._allocation) = (start, Some(allocation));
        }
        if cfg!(debug_assertions) {
            block.bytes_mut().fill(0xff);
        }
        Ok(block)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `start` is valid for `bytes` bytes (or dangling for none) and initialised; no other block has them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// The block as values of a plain type; its alignment covers every vector width.
    pub(super) fn values<T: bytemuck::AnyBitPattern>(&self) -> &[T] {
        let bytes = self.bytes();
        bytemuck::cast_slice(&bytes[..bytes.len() - bytes.len() % size_of::<T>()])
    }

    /// The same, to write.
    pub(super) fn values_mut<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        let whole = self.bytes - self.bytes % size_of::<T>();
        bytemuck::cast_slice_mut(&mut self.bytes_mut()[..whole])
    }
}

/// Rows of f32: on this backend every activation has full precision.
pub struct Buf {
    pub(super) rows: usize,
    pub(super) columns: usize,
    block: Block,
}

impl Operand for Buf {
    fn rows(&self) -> usize {
        self.rows
    }

    fn columns(&self) -> usize {
        self.columns
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} x {})", self.rows, self.columns)
    }
}

impl Buf {
    pub(super) fn new(
        ledger: &Arc<Ledger>,
        sizes: &CpuSizes,
        purpose: Purpose,
        rows: usize,
        columns: usize,
    ) -> Result<Buf, Error> {
        let block = Block::new(ledger, purpose, sizes.buf_bytes(purpose, rows, columns))?;
        Ok(Buf { rows, columns, block })
    }

    /// One row of f32 made of stored vectors.
    pub(super) fn vector(ledger: &Arc<Ledger>, sizes: &CpuSizes, parts: &[Part<'_>]) -> Result<Buf, Error> {
        let lengths = parts.iter().map(|part| sizes.vector_values(part)).collect::<Result<Vec<_>, _>>()?;
        let mut buf = Buf::new(ledger, sizes, Purpose::Weights, 1, lengths.iter().sum())?;
        let mut out = buf.values_mut();
        for (part, len) in parts.iter().zip(lengths) {
            let (here, rest) = out.split_at_mut(len);
            let dequantize = sizes.format(&part.view)?.dequantize;
            match &part.rows {
                None => dequantize(part.view.bytes, here),
                Some(rows) => {
                    let mut stored = vec![0.0; part.view.shape.iter().product()];
                    dequantize(part.view.bytes, &mut stored);
                    for (value, &row) in here.iter_mut().zip(rows) {
                        *value = stored[row as usize];
                    }
                }
            }
            part.view.release();
            out = rest;
        }
        Ok(buf)
    }

    /// Its rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// All rows, one after the other.
    pub fn values(&self) -> &[f32] {
        &self.block.values()[..self.rows * self.columns]
    }

    /// The same, to write.
    pub fn values_mut(&mut self) -> &mut [f32] {
        let values = self.rows * self.columns;
        &mut self.block.values_mut()[..values]
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.values()[row * self.columns..][..self.columns]
    }
}

/// A matrix in the types of its file, parts stacked by output rows. Where there are vector kernels, rows are packed in
/// groups of sixteen as these read them.
pub struct Weight {
    /// Output rows of all parts.
    pub(super) rows: usize,
    /// Values of one row.
    pub(super) columns: usize,
    parts: Vec<WeightPart>,
    block: Block,
    /// The tensors it is stacked of, each once, where somebody counts what they are multiplied by; else none.
    pub(super) names: Vec<Box<str>>,
}

/// A weight as threads share it.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) parts: &'a [WeightPart],
    bytes: &'a [u8],
}

/// Consecutive output rows of one type.
pub(super) struct WeightPart {
    pub(super) format: Format,
    pub(super) rows: usize,
    /// Bytes of a stored row, or of a group.
    unit_bytes: usize,
    /// Where its first row or group lies in the weight's block.
    offset: usize,
}

impl WeightPart {
    /// Groups of sixteen rows, the last one perhaps incomplete.
    pub(super) fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP)
    }
}

impl Operand for Weight {
    fn rows(&self) -> usize {
        self.rows
    }

    fn columns(&self) -> usize {
        self.columns
    }
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weight({} x {}", self.rows, self.columns)?;
        for part in &self.parts {
            write!(f, ", {} {}", part.rows, part.format.dtype)?;
        }
        f.write_str(")")
    }
}

impl Weight {
    /// Copies the parts' rows out of their file, in their final order and layout.
    pub(super) fn new(
        ledger: &Arc<Ledger>,
        sizes: &CpuSizes,
        pool: &Pool,
        parts: &[Part<'_>],
    ) -> Result<Weight, Error> {
        let mut block = Block::new(ledger, Purpose::Weights, sizes.weight_bytes(parts)?)?;
        let (mut rows, mut columns, mut offset) = (0, 0, 0);
        let mut placed = Vec::with_capacity(parts.len());
        for part in parts {
            let shape = sizes.shape(part)?;
            let bytes = &mut block.bytes_mut()[offset..][..shape.bytes];
            place(pool, part, &shape, bytes);
            // The copy is the weight now: the file's pages need not stay beside it.
            part.view.release();
            let Placed { format, rows: part_rows, unit_bytes, .. } = shape;
            placed.push(WeightPart { format, rows: part_rows, unit_bytes, offset });
            rows += shape.rows;
            columns = shape.columns;
            offset += shape.bytes;
        }
        Ok(Weight { rows, columns, parts: placed, block, names: Vec::new() })
    }

    /// Remembers the names of the tensors that it is stacked of.
    pub(super) fn named(&mut self, parts: &[Part<'_>]) {
        for part in parts {
            if !self.names.iter().any(|name| **name == *part.view.name) {
                self.names.push(part.view.name.into());
            }
        }
    }

    /// Whether it is `count` matrices of the same rows, stacked part by part.
    pub(super) fn is_stack_of(&self, count: usize) -> bool {
        count > 0
            && self.parts.len().is_multiple_of(count)
            && self
                .parts
                .chunks(self.parts.len() / count)
                .all(|parts| parts.iter().map(|part| part.rows).sum::<usize>() == self.rows / count)
    }

    pub(super) fn matrix(&self) -> Matrix<'_> {
        Matrix { rows: self.rows, columns: self.columns, parts: &self.parts, bytes: self.block.bytes() }
    }
}

/// Expands whole stored blocks into as many values as they hold; `None` if the type is not computed here. Panics if the
/// lengths do not match.
pub fn dequantize(dtype: DType, stored: &[u8], out: &mut [f32]) -> Option<()> {
    (quant::format(dtype, Simd::Scalar)?.dequantize)(stored, out);
    Some(())
}

/// The output rows of a stored matrix as f32, one after the other: `visit(row, values)`. For whoever makes something
/// else of a weight than a product on this backend.
pub fn expand_rows(
    part: &Part<'_>,
    visit: impl FnMut(usize, &[f32]) -> Result<(), Error>,
) -> Result<(), Error> {
    land(std::slice::from_ref(part), Content::Values, |parts| expand_landed(&parts[0], visit))
}

fn expand_landed(
    part: &Part<'_>,
    mut visit: impl FnMut(usize, &[f32]) -> Result<(), Error>,
) -> Result<(), Error> {
    let (dtype, stored, columns) = crate::memory::matrix_shape(part)?;
    let refused = || Error::DType { tensor: part.view.name.to_owned(), dtype, backend: NAME };
    let dequantize = quant::format(dtype, Simd::Scalar).ok_or_else(refused)?.dequantize;
    let row_bytes = part.view.bytes.len() / stored.max(1);
    let mut values = vec![0.0; columns];
    for row in 0..part.rows.as_ref().map_or(stored, Vec::len) {
        let from = part.rows.as_ref().map_or(row, |order| order[row] as usize);
        dequantize(&part.view.bytes[from * row_bytes..][..row_bytes], &mut values);
        visit(row, &values)?;
    }
    Ok(())
}

/// Copies one part's rows: groups packed by all threads, or rows as they are stored.
fn place(pool: &Pool, part: &Part<'_>, shape: &Placed, bytes: &mut [u8]) {
    let stored = |row: usize| {
        let row = part.rows.as_ref().map_or(row, |order| order[row] as usize);
        &part.view.bytes[row * shape.row_bytes..][..shape.row_bytes]
    };
    let Some(kernels) = shape.format.kernels else {
        for (row, to) in bytes.chunks_exact_mut(shape.row_bytes).take(shape.rows).enumerate() {
            to.copy_from_slice(stored(row));
        }
        return;
    };
    let bytes = Disjoint::new(bytes);
    pool.for_each(shape.rows.div_ceil(GROUP), |_, groups| {
        for group in groups {
            // SAFETY: the pool hands out each group once.
            let to = unsafe { bytes.part(group * shape.unit_bytes..(group + 1) * shape.unit_bytes) };
            let rows = group * GROUP..shape.rows.min((group + 1) * GROUP);
            if rows.len() < GROUP || !shape.columns.is_multiple_of(2) {
                to.fill(0);
            }
            (kernels.pack)(&mut rows.map(stored), shape.columns, to);
        }
    });
}

impl<'a> Matrix<'a> {
    /// One of `count` matrices that were stacked part by part.
    pub(super) fn stacked(&self, index: usize, count: usize) -> Matrix<'a> {
        let parts = self.parts.len() / count;
        Matrix { rows: self.rows / count, parts: &self.parts[index * parts..][..parts], ..*self }
    }

    /// The bytes of one group of a part.
    pub(super) fn group(&self, part: &WeightPart, group: usize) -> &'a [u8] {
        assert!(group < part.groups(), "group {group} of {} rows", part.rows);
        &self.bytes[part.offset + group * part.unit_bytes..][..part.unit_bytes]
    }

    /// The stored bytes of one row of a part.
    pub(super) fn stored(&self, part: &WeightPart, row: usize) -> &'a [u8] {
        assert!(row < part.rows && part.format.kernels.is_none(), "row {row} of {} rows", part.rows);
        &self.bytes[part.offset + row * part.unit_bytes..][..part.unit_bytes]
    }

    /// A row's values, by its index over all parts.
    pub(super) fn expand_row(&self, mut row: usize, out: &mut [f32]) {
        /// Columns at a time: 16 KB of the stack.
        const CHUNK: usize = 256;
        let mut parts = self.parts.iter();
        let part = loop {
            let part = parts.next().expect("a row of the weight");
            if row < part.rows {
                break part;
            }
            row -= part.rows;
        };
        let Some(kernels) = part.format.kernels else {
            return (part.format.dequantize)(self.stored(part, row), out);
        };
        let (group, mut values) = (self.group(part, row / GROUP), [[0.0; GROUP]; CHUNK]);
        for (chunk, out) in out.chunks_mut(CHUNK).enumerate() {
            let values = &mut values[..out.len()];
            kernels.dequantize(group, self.columns, chunk * CHUNK, values);
            for (out, values) in out.iter_mut().zip(values) {
                *out = values[row % GROUP];
            }
        }
    }
}

/// The pages of all groups. Inside a group: (layer, page, K then V, head, token, dim), or (layer, page, token, width) of
/// latent rows, so that what attention reads of one page for one head is contiguous.
pub struct Kv {
    pub(super) dtype: KvDType,
    groups: Vec<(KvGroup, Block)>,
}

impl fmt::Debug for Kv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kv({}, {:?})", self.dtype, self.groups.iter().map(|(group, _)| group).collect::<Vec<_>>())
    }
}

impl Kv {
    pub(super) fn new(ledger: &Arc<Ledger>, sizes: &CpuSizes, spec: &KvSpec) -> Result<Kv, Error> {
        sizes.keeps(spec)?;
        let groups = spec.groups.iter().map(|group| {
            let bytes = (group.pages as u64).saturating_mul(sizes.page_bytes(spec, group));
            Ok((group.clone(), Block::new(ledger, Purpose::Kv, bytes)?))
        });
        Ok(Kv { dtype: spec.dtype, groups: groups.collect::<Result<_, Error>>()? })
    }

    /// The group that a layer belongs to; panics if there is no such layer.
    pub(super) fn group(&self, layer: KvLayer) -> &KvGroup {
        let (group, _) = &self.groups[layer.group];
        assert!(layer.layer < group.layers, "layer {} of a group of {} layers", layer.layer, group.layers);
        group
    }

    /// A page of all layers as bytes.
    pub(super) fn copy_out(&self, group: usize, page: PageId) -> Result<PageCopy, Error> {
        let mut bytes = Vec::new();
        for range in self.page_ranges(group, page)? {
            bytes.extend_from_slice(&self.groups[group].1.bytes()[range]);
        }
        Ok(PageCopy::new(&self.layout(group), bytes))
    }

    /// The reverse, of a cache of the same layout.
    pub(super) fn copy_in(&mut self, group: usize, page: PageId, copy: &PageCopy) -> Result<(), Error> {
        let ranges = self.page_ranges(group, page)?;
        let mut bytes = copy.bytes(&self.layout(group))?;
        for range in ranges {
            let (own, rest) = bytes.split_at(range.len());
            self.groups[group].1.bytes_mut()[range].copy_from_slice(own);
            bytes = rest;
        }
        Ok(())
    }

    /// Where a page of a group lies, layer after layer.
    fn page_ranges(&self, group: usize, page: PageId) -> Result<Vec<std::ops::Range<usize>>, Error> {
        crate::batch::below("group", group, self.groups.len())?;
        let (group, _) = &self.groups[group];
        crate::batch::below("page", page.0 as usize, group.pages)?;
        let Geometry { page_bytes, layer_bytes, .. } = Geometry::new(group, self.dtype);
        let start = |layer| layer * layer_bytes + page.0 as usize * page_bytes;
        Ok((0..group.layers).map(|layer| start(layer)..start(layer) + page_bytes).collect())
    }

    /// What the bytes of a page depend on beside what was computed.
    fn layout(&self, group: usize) -> String {
        let KvGroup { layers, kind, .. } = &self.groups[group].0;
        format!("{NAME} {} {layers} {kind:?} {PAGE_TOKENS}", self.dtype)
    }

    /// One layer's states, and values of one.
    pub(super) fn states_mut(&mut self, layer: KvLayer) -> (&mut [f32], usize) {
        let geometry = Geometry::new(self.group(layer), self.dtype);
        let (each, all) = (geometry.page_bytes / size_of::<f32>(), geometry.layer_bytes / size_of::<f32>());
        (&mut self.groups[layer.group].1.values_mut()[layer.layer * all..][..all], each)
    }

    /// One layer's pages.
    pub(super) fn pages(&self, layer: KvLayer) -> Pages<'_> {
        let group = self.group(layer);
        let geometry = Geometry::new(group, self.dtype);
        let bytes = self.groups[layer.group].1.bytes();
        Pages { geometry, bytes: &bytes[layer.layer * geometry.layer_bytes..][..geometry.layer_bytes] }
    }

    /// One layer's pages, to write.
    pub(super) fn pages_mut(&mut self, layer: KvLayer) -> (Geometry, &mut [u8]) {
        let geometry = Geometry::new(self.group(layer), self.dtype);
        let bytes = self.groups[layer.group].1.bytes_mut();
        (geometry, &mut bytes[layer.layer * geometry.layer_bytes..][..geometry.layer_bytes])
    }
}

/// Where things lie inside one layer's pages, in bytes. A page of latent rows is as one of keys of a single head.
#[derive(Clone, Copy)]
pub(super) struct Geometry {
    /// One token's keys or values of one head.
    pub(super) token_bytes: usize,
    /// One head's keys or values of one page.
    pub(super) head_bytes: usize,
    /// All heads' keys, or all heads' values, of one page.
    half_bytes: usize,
    page_bytes: usize,
    layer_bytes: usize,
}

impl Geometry {
    fn new(group: &KvGroup, dtype: KvDType) -> Geometry {
        if let KvKind::State { bytes, .. } = group.kind {
            let layer_bytes = group.pages * bytes;
            return Geometry { token_bytes: 0, head_bytes: 0, half_bytes: 0, page_bytes: bytes, layer_bytes };
        }
        if let KvKind::Latent { width } = group.kind {
            let token_bytes = dtype.bytes_of(width);
            let page_bytes = PAGE_TOKENS * token_bytes;
            let layer_bytes = group.pages * page_bytes;
            return Geometry { token_bytes, head_bytes: page_bytes, half_bytes: 0, page_bytes, layer_bytes };
        }
        let (heads, dim) = group.kind.heads().expect("refused when it was allocated");
        let token_bytes = dtype.bytes_of(dim);
        let head_bytes = PAGE_TOKENS * token_bytes;
        let half_bytes = heads * head_bytes;
        let page_bytes = 2 * half_bytes;
        Geometry { token_bytes, head_bytes, half_bytes, page_bytes, layer_bytes: group.pages * page_bytes }
    }

    /// Where one head's keys of a page begin.
    pub(super) fn keys(&self, page: PageId, head: usize) -> usize {
        page.0 as usize * self.page_bytes + head * self.head_bytes
    }

    /// Where one head's values of a page begin.
    pub(super) fn values(&self, page: PageId, head: usize) -> usize {
        self.keys(page, head) + self.half_bytes
    }
}

/// One layer's pages.
#[derive(Clone, Copy)]
pub(super) struct Pages<'a> {
    geometry: Geometry,
    bytes: &'a [u8],
}

impl<'a> Pages<'a> {
    /// One head's keys of a page, (PAGE_TOKENS, dim), or all of a page of latent rows.
    pub(super) fn keys(&self, page: PageId, head: usize) -> &'a [u8] {
        &self.bytes[self.geometry.keys(page, head)..][..self.geometry.head_bytes]
    }

    /// One head's values of a page: (PAGE_TOKENS, dim).
    pub(super) fn values(&self, page: PageId, head: usize) -> &'a [u8] {
        &self.bytes[self.geometry.values(page, head)..][..self.geometry.head_bytes]
    }
}

/// What this backend takes for each thing: the plan counts with it and the allocator allocates by it.
#[derive(Clone, Debug)]
pub struct CpuSizes {
    simd: Simd,
    workspace_bytes: u64,
}

/// A part seen as a matrix.
struct Placed {
    format: Format,
    rows: usize,
    columns: usize,
    /// Bytes of a row in the file.
    row_bytes: usize,
    /// Bytes of a row, or of a group of rows, in memory.
    unit_bytes: usize,
    /// Bytes of all rows in memory, up to where the next part may begin.
    bytes: usize,
}

impl CpuSizes {
    /// The sizes of a backend made with these options.
    pub fn new(options: &CpuOptions) -> CpuSizes {
        let scratch = options
            .threads
            .saturating_mul(THREAD_SCRATCH_VALUES * size_of::<f32>())
            .saturating_add(ACTIVATION_SCRATCH_BYTES);
        let slot_bytes = step::slot_bytes(options.tokens_max, options.slots);
        let steps = options.depth.saturating_add(1).saturating_mul(slot_bytes);
        CpuSizes { simd: options.simd, workspace_bytes: scratch.saturating_add(steps) as u64 }
    }

    fn format(&self, view: &View<'_>) -> Result<Format, Error> {
        quant::format(view.dtype, self.simd).ok_or_else(|| Error::DType {
            tensor: view.name.to_owned(),
            dtype: view.dtype,
            backend: NAME,
        })
    }

    fn shape(&self, part: &Part<'_>) -> Result<Placed, Error> {
        let (dtype, stored_rows, columns) = crate::memory::matrix_shape(part)?;
        let format = self.format(&part.view)?;
        if columns > COLUMNS_MAX {
            return Err(wrong_shape(part, vec![0, COLUMNS_MAX]));
        }
        let whole = || wrong_shape(part, vec![0, columns.max(1).next_multiple_of(dtype.block_values())]);
        let row_bytes = dtype.bytes_for(columns).filter(|&bytes| bytes > 0).ok_or_else(whole)?;
        let rows = self.selected_rows(part, stored_rows)?;
        let (units, unit_bytes) = match format.kernels {
            Some(kernels) => (rows.div_ceil(GROUP), (kernels.group_bytes)(columns)),
            None => (rows, row_bytes),
        };
        let bytes = units
            .checked_mul(unit_bytes)
            .and_then(|bytes| bytes.checked_next_multiple_of(ALIGN))
            .ok_or_else(|| wrong_shape(part, vec![0, columns]))?;
        Ok(Placed { format, rows, columns, row_bytes, unit_bytes, bytes })
    }

    /// Values that a part adds to a vector: each is a row of its own.
    fn vector_values(&self, part: &Part<'_>) -> Result<usize, Error> {
        let values = part.view.shape.iter().product::<usize>();
        let block_values = self.format(&part.view)?.dtype.block_values();
        if !values.is_multiple_of(block_values) {
            return Err(wrong_shape(part, vec![values.next_multiple_of(block_values)]));
        }
        self.selected_rows(part, values)
    }

    /// How many rows the part yields, after what holds for matrices and vectors alike.
    fn selected_rows(&self, part: &Part<'_>, stored_rows: usize) -> Result<usize, Error> {
        let stored_bytes = part.view.dtype.bytes_for(part.view.shape.iter().product());
        assert_eq!(stored_bytes, Some(part.view.bytes.len()), "a view of {} holds its bytes", part.view.name);
        let Some(rows) = &part.rows else { return Ok(stored_rows) };
        assert!(rows.iter().all(|&row| (row as usize) < stored_rows), "row order of {}", part.view.name);
        Ok(rows.len())
    }
}

fn wrong_shape(part: &Part<'_>, wanted: Vec<usize>) -> Error {
    Error::TensorShape { tensor: part.view.name.to_owned(), got: part.view.shape.clone(), wanted }
}

impl Sizes for CpuSizes {
    fn weight_bytes(&self, parts: &[Part<'_>]) -> Result<u64, Error> {
        let (mut bytes, mut columns) = (0, None);
        for part in parts {
            let shape = self.shape(part)?;
            let columns = *columns.get_or_insert(shape.columns);
            if shape.columns != columns {
                return Err(wrong_shape(part, vec![0, columns]));
            }
            bytes += shape.bytes as u64;
        }
        Ok(bytes)
    }

    fn vector_bytes(&self, parts: &[Part<'_>]) -> Result<u64, Error> {
        let values = parts.iter().map(|part| self.vector_values(part)).sum::<Result<usize, _>>()?;
        Ok(self.buf_bytes(Purpose::Weights, 1, values))
    }

    fn buf_bytes(&self, _purpose: Purpose, rows: usize, columns: usize) -> u64 {
        let values = (rows as u64).saturating_mul(columns as u64);
        // What overflows is refused by any limit.
        values.saturating_mul(4).checked_next_multiple_of(ALIGN as u64).unwrap_or(u64::MAX)
    }

    fn supports(&self, need: Need) -> Result<(), Error> {
        match need {
            Need::FileWeights => Err(Error::Unsupported { what: need.to_string(), backend: NAME }),
            _ => Ok(()),
        }
    }

    fn lies(&self, place: WeightPlace) -> WeightPlace {
        if place == WeightPlace::Host { WeightPlace::Device } else { place }
    }

    fn keeps(&self, spec: &KvSpec) -> Result<(), Error> {
        // Values of a state are f32.
        let keeps = |kind: KvKind| match kind {
            KvKind::State { bytes, .. } => bytes.is_multiple_of(size_of::<f32>()),
            // How much of the row is latent is not known here, so it is all of it.
            KvKind::Latent { width } => {
                width <= THREAD_SCRATCH_VALUES && {
                    let heads = LatentHeads { query: 1, latent: width, turned: 0 };
                    latent::scratch_values(heads, 1) <= THREAD_SCRATCH_VALUES
                }
            }
            KvKind::Pairs { .. } => kind.heads().is_some(),
        };
        match spec.groups.iter().find(|group| !keeps(group.kind)) {
            None => Ok(()),
            Some(group) => Err(Error::Unsupported { what: group.kind.to_string(), backend: NAME }),
        }
    }

    fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }
}

#[cfg(test)]
mod tests {
    use fornax_format::DType;

    use super::*;
    use crate::cpu::{Cpu, CpuOptions};
    use crate::{Backend, Counting, KvKind, Memory};

    fn view<'a>(name: &'a str, dtype: DType, shape: &[usize], bytes: &'a [u8]) -> View<'a> {
        View::new(name, dtype, shape.to_vec(), bytes).unwrap()
    }

    fn f32_bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[expect(dead_code, reason = "held, so that it stays counted")]
    struct Loaded<M: Memory> {
        weight: M::Weight,
        bufs: Vec<M::Buf>,
        kv: M::Kv,
    }

    /// What a model does when it loads: one of everything, of odd sizes.
    fn load<M: Memory>(memory: &M) -> Result<Loaded<M>, Error> {
        let (q8, f16, f32) = (vec![1; 34 * 2 * 3], vec![1; 2 * 5 * 64], vec![0; 4 * 7]);
        let mut first = Part::from(view("a", DType::Q8_0, &[3, 64], &q8));
        first.rows = Some(vec![2, 0]);
        let weight = memory.upload(&[first, view("b", DType::F16, &[5, 64], &f16).into()])?;
        let bufs = vec![
            memory.upload_vector(&[view("c", DType::F32, &[7], &f32).into()])?,
            memory.upload_values(&[1.0; 9])?,
            memory.alloc(Purpose::Residual, 3, 17)?,
            memory.alloc(Purpose::Logits, 1, 1000)?,
        ];
        let group = |layers, pages| KvGroup { layers, kind: KvKind::pairs(3, 10), window: None, pages };
        let kv = memory.alloc_kv(&KvSpec { groups: vec![group(2, 5), group(1, 3)], dtype: KvDType::F16 })?;
        Ok(Loaded { weight, bufs, kv })
    }

    #[test]
    fn the_plan_is_what_is_allocated_and_dropping_gives_it_back() {
        for (threads, tokens_max, slots, depth) in [(1, 1, 1, 0), (2, 512, 16, 1), (3, 7, 100, 2)] {
            let options = CpuOptions { threads, tokens_max, slots, depth, ..CpuOptions::default() };
            let counting = Counting::new(CpuSizes::new(&options));
            let cpu = Cpu::new(options).unwrap();
            let empty = cpu.usage();
            assert_eq!(empty, counting.usage());
            load(&counting).unwrap();
            let loaded = load(&cpu).unwrap();
            assert_eq!(cpu.usage(), counting.usage());
            assert!(Purpose::ALL.iter().filter(|&&purpose| cpu.usage().bytes(purpose) > 0).count() >= 5);
            drop(loaded);
            assert_eq!(cpu.usage(), empty);
        }
    }

    #[test]
    fn a_limit_is_kept_to_the_byte_and_before_allocating() {
        let options = CpuOptions::default();
        let counting = Counting::new(CpuSizes::new(&options));
        load(&counting).unwrap();
        let needed = counting.usage().total();
        let limited = |limit| Cpu::new(CpuOptions { memory_limit: Some(limit), ..options.clone() }).unwrap();
        assert!(load(&limited(needed)).is_ok());
        let short = limited(needed - 1);
        let Err(Error::OutOfMemory { purpose: Purpose::Kv, wanted, used, limit }) = load(&short) else {
            panic!("one byte short")
        };
        assert_eq!((used + wanted, limit), (needed, needed - 1));
        // Nothing of a refused load stays.
        assert_eq!(short.usage(), limited(needed).usage());
    }

    #[test]
    fn sizes_beyond_the_machine_are_refused_not_aborted() {
        let cpu = Cpu::new(CpuOptions { memory_limit: Some(u64::MAX), ..CpuOptions::default() }).unwrap();
        for (rows, columns) in [(usize::MAX, usize::MAX), (1 << 40, 1 << 20), (1 << 30, 1 << 31)] {
            let refused = cpu.alloc(Purpose::Activations, rows, columns);
            assert!(matches!(refused, Err(Error::OutOfMemory { purpose: Purpose::Activations, .. })));
        }
        let usage = cpu.usage();
        assert_eq!(usage.bytes(Purpose::Activations), 0);
    }

    #[test]
    fn memory_is_aligned_and_poisoned() {
        let cpu = Cpu::new(CpuOptions::default()).unwrap();
        for columns in [1, 3, 1000] {
            let buf = cpu.alloc(Purpose::Activations, 3, columns).unwrap();
            assert_eq!(buf.values().as_ptr().align_offset(ALIGN), 0);
            assert!(!cfg!(debug_assertions) || buf.values().iter().all(|value| value.is_nan()));
        }
    }

    #[test]
    fn rows_are_taken_in_the_order_asked_for() {
        let cpu = Cpu::new(CpuOptions::default()).unwrap();
        let stored: Vec<_> = (0..6 * 4).map(|value| value as f32).collect();
        let bytes = f32_bytes(&stored);
        let mut part = Part::from(view("w", DType::F32, &[6, 4], &bytes));
        part.rows = Some(vec![5, 0, 0, 3]);
        let weight = cpu.upload(&[part]).unwrap();
        assert_eq!((weight.rows, weight.columns), (4, 4));
        for (row, from) in [5, 0, 0, 3].into_iter().enumerate() {
            let mut values = [f32::NAN; 4];
            weight.matrix().expand_row(row, &mut values);
            assert_eq!(values, stored[from * 4..][..4]);
        }
        let mut part = Part::from(view("v", DType::F32, &[24], &bytes));
        part.rows = Some(vec![23, 1]);
        let vector = cpu.upload_vector(&[part, view("u", DType::F32, &[6, 4], &bytes).into()]).unwrap();
        assert_eq!(cpu.read(&vector, 0, 1).unwrap()[..4], [23.0, 1.0, 0.0, 1.0]);
        assert_eq!(vector.columns, 26);
    }

    #[test]
    fn vectors_become_f32_whatever_their_type() {
        let cpu = Cpu::new(CpuOptions::default()).unwrap();
        let half = half::f16::from_f32(1.5).to_le_bytes();
        let brain = half::bf16::from_f32(-2.5).to_le_bytes();
        let mut q8 = half.to_vec();
        q8.extend([2; 32]);
        let parts = [
            view("a", DType::F16, &[1], &half).into(),
            view("b", DType::BF16, &[1], &brain).into(),
            view("c", DType::Q8_0, &[32], &q8).into(),
        ];
        let mut wanted = vec![1.5, -2.5];
        wanted.extend([3.0; 32]);
        assert_eq!(cpu.read(&cpu.upload_vector(&parts).unwrap(), 0, 1).unwrap(), wanted);
    }

    #[test]
    fn a_latent_row_that_no_thread_has_room_for_is_refused_by_the_plan_too() {
        let cpu = Cpu::new(CpuOptions::default()).unwrap();
        let counting = Counting::new(cpu.sizes().clone());
        let spec = |width| {
            let group = KvGroup { layers: 1, kind: KvKind::Latent { width }, window: None, pages: 1 };
            KvSpec { groups: vec![group], dtype: KvDType::F32 }
        };
        // DeepSeek's, and the widest one.
        for width in [576, 4096] {
            assert!(cpu.alloc_kv(&spec(width)).is_ok() && counting.alloc_kv(&spec(width)).is_ok());
        }
        for width in [4097, 1 << 20, usize::MAX] {
            let message = format!("a cache of one latent row of {width} a token is not available on cpu");
            assert_eq!(cpu.alloc_kv(&spec(width)).unwrap_err().to_string(), message);
            assert_eq!(counting.alloc_kv(&spec(width)).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn what_cannot_be_computed_is_refused_by_name_by_the_plan_too() {
        let cpu = Cpu::new(CpuOptions::default()).unwrap();
        let counting = Counting::new(cpu.sizes().clone());
        let check = |parts: &[Part<'_>], message: &str| {
            assert_eq!(cpu.upload(parts).unwrap_err().to_string(), message);
            assert_eq!(counting.upload(parts).unwrap_err().to_string(), message);
        };
        let zeros = vec![0; 4096];
        let part = |dtype: DType, shape: &[usize]| {
            let bytes = dtype.bytes_for(shape.iter().product()).unwrap();
            Part::from(view("blk.0.w", dtype, shape, &zeros[..bytes]))
        };
        check(&[part(DType::I32, &[2, 4])], "tensor blk.0.w: type I32 cannot be computed on cpu yet");
        check(&[part(DType::Q8_1, &[2, 32])], "tensor blk.0.w: type Q8_1 cannot be computed on cpu yet");
        check(&[part(DType::F32, &[4])], "tensor blk.0.w: shape [4], wanted [0, 0]");
        check(
            &[part(DType::F32, &[2, 4]), part(DType::F16, &[2, 8])],
            "tensor blk.0.w: shape [2, 8], wanted [0, 4]",
        );
        let vector = [part(DType::U8, &[4])];
        assert!(cpu.upload_vector(&vector).is_err() && counting.upload_vector(&vector).is_err());
    }
}
