//! What lies on the device (rows of activations, weights, pages), and how many bytes each of these takes.

use std::fmt;
use std::rc::Rc;

use fornax_compute::operands::Operand;
use fornax_compute::{
    Error, KvDType, KvGroup, KvKind, KvLayer, KvSpec, Need, PAGE_TOKENS, Part, Purpose, Sizes,
};

use crate::CudaOptions;
use crate::abi::{Constant, Layout, layout};
use crate::arena::{Arena, Piece, rounded};
use crate::driver::{Device, Pinned};
use crate::layout::{Format, PART_BYTES, PLANES, TILE_COLUMNS, TILE_ROWS};
use crate::ops::{slices, steps};
use crate::step;

/// The longest row of a weight: sixteen of them in f32 are one slot of the upload's ring.
pub(crate) const COLUMNS_MAX: usize = 1 << 18;
/// The longest vector: an adapter's matrix is one, of rank 512 beside 32,768 columns.
const VECTOR_MAX: usize = 1 << 24;

/// The types of keys and values that the kernels of attention, and those that write pages, support.
const KV_DTYPES: [KvDType; 4] = [KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::F8];

/// Room for prepared rows: 20,000 columns for each token of the largest step, up to 96 MB. Rows that do not fit are
/// done in several passes; one row always fits.
pub(crate) fn formed_bytes(tokens_max: usize) -> u64 {
    (tokens_max as u64).saturating_mul(40 << 10).clamp(2 << 20, 96 << 20)
}

/// Partial results of attention over long contexts: one stream of 28 heads of 128 with 262,144 keys.
pub(crate) const PARTIALS_BYTES: u64 = 64 << 20;
/// Counters of blocks that share a token's keys: one for each token and K/V head of a small step.
pub(crate) const TICKETS: usize = 4096;

/// Rows of f32: on this backend every activation has full precision in memory.
pub struct Buf {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    piece: Piece,
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
    pub(crate) fn new(
        arena: &Rc<Arena>,
        sizes: &CudaSizes,
        purpose: Purpose,
        rows: usize,
        columns: usize,
    ) -> Result<Buf, Error> {
        Ok(Buf { rows, columns, piece: arena.cut(purpose, sizes.buf_bytes(purpose, rows, columns))? })
    }

    pub(crate) fn pointer(&self) -> u64 {
        self.piece.pointer()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.piece.bytes()
    }
}

/// A matrix in the planes of `layout`, parts stacked by output rows.
pub struct Weight {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) parts: Vec<WeightPart>,
    home: Home,
}

/// Whose memory a weight lies in.
enum Home {
    Device(Piece),
    /// A few rows of it are read through the bus.
    Host(Pinned),
}

/// Consecutive output rows of one format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightPart {
    pub(crate) format: Format,
    /// Its first output row.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Where its planes begin in the weight.
    pub(crate) planes: [u64; PLANES],
    /// Where it is a shard of a weight: how many of the whole weight's slices (K) fall to it.
    pub(crate) slices: Option<usize>,
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
            write!(f, ", {} {:?}", part.rows, part.format)?;
        }
        f.write_str(")")
    }
}

/// A part as kernels take it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct DevicePart {
    planes: [u64; PLANES],
    rows: i32,
    columns: i32,
    groups: i32,
    /// Tiles of 16 rows before the place where the planes begin, less those that follow `rows` in the part. So the
    /// tiles of `rows` less this number are what the part has from there on (`row_tiles_left` in prelude.cuh).
    row_tile: i32,
}

pub(crate) const LAYOUTS: &[Layout] = &[
    layout!(DevicePart, "Part" in "prelude.cuh", { planes: codes high scales mins, rows, columns, groups, row_tile }),
];
pub(crate) const CONSTANTS: &[Constant] = &[Constant::new("kv.cuh", "PAGE_TOKENS", PAGE_TOKENS)];

impl DevicePart {
    /// The same with this many rows: of one expert, where the part has several.
    pub(crate) fn with_rows(self, rows: usize) -> DevicePart {
        let tiles = |rows: i32| rows.cast_unsigned().div_ceil(TILE_ROWS as u32).cast_signed();
        let rows = int(rows);
        DevicePart { rows, row_tile: self.row_tile + tiles(rows) - tiles(self.rows), ..self }
    }
}

impl WeightPart {
    /// Tiles side by side.
    pub(crate) fn groups(&self) -> usize {
        self.columns.div_ceil(TILE_COLUMNS)
    }

    /// Tiles below each other.
    pub(crate) fn row_tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// How many of a whole weight's slices this shard of it has, or why it cannot be a shard. Sums have the whole
    /// weight's order, so a shard has whole slices, all of the same size.
    fn slices_of(&self, [rows, columns]: [usize; 2]) -> Result<usize, String> {
        let whole = WeightPart { rows, columns, slices: None, ..*self };
        let slices = slices(&whole);
        if columns == self.columns {
            return Ok(slices);
        }
        let each = columns / slices;
        let alike = steps(&whole).is_multiple_of(slices) && columns.is_multiple_of(slices);
        if alike && self.columns.is_multiple_of(each) && self.columns > 0 && self.columns < columns {
            Ok(self.columns / each)
        } else {
            Err(format!("{} of {columns} columns, which are summed in {slices} slices", self.columns))
        }
    }

    /// Bytes of each plane for 16 rows.
    pub(crate) fn row_tile_bytes(&self) -> [usize; PLANES] {
        self.format.tile_bytes().map(|bytes| bytes * self.groups())
    }
}

impl Weight {
    pub(crate) fn new(arena: &Rc<Arena>, sizes: &CudaSizes, parts: &[Part<'_>]) -> Result<Weight, Error> {
        let (placed, bytes) = sizes.placed(parts)?;
        Ok(Weight::at(Home::Device(arena.cut(Purpose::Weights, bytes)?), placed))
    }

    /// A table in the host's memory, which kernels read rows of.
    pub(crate) fn in_host(
        device: &Rc<Device>,
        sizes: &CudaSizes,
        parts: &[Part<'_>],
    ) -> Result<Weight, Error> {
        let (placed, bytes) = sizes.placed(parts)?;
        let bytes = usize::try_from(bytes).expect("a file was as large");
        Ok(Weight::at(Home::Host(Pinned::new(device, bytes)?), placed))
    }

    fn at(home: Home, parts: Vec<WeightPart>) -> Weight {
        let rows = parts.iter().map(|part| part.rows).sum();
        Weight { rows, columns: parts.first().map_or(0, |part| part.columns), parts, home }
    }

    /// Where it begins, for kernels.
    pub(crate) fn pointer(&self) -> u64 {
        match &self.home {
            Home::Device(piece) => piece.pointer(),
            Home::Host(pinned) => pinned.pointer(),
        }
    }

    /// Where a plane of a part lies.
    pub(crate) fn plane(&self, part: &WeightPart, plane: usize) -> u64 {
        self.pointer() + part.planes[plane]
    }

    /// A part as kernels take it.
    pub(crate) fn device_part(&self, part: &WeightPart) -> DevicePart {
        self.device_part_from(part, 0)
    }

    /// The same from this many times 16 rows on.
    pub(crate) fn device_part_from(&self, part: &WeightPart, row_tile: usize) -> DevicePart {
        let before = part.row_tile_bytes().map(|bytes| (row_tile * bytes) as u64);
        DevicePart {
            planes: std::array::from_fn(|plane| self.plane(part, plane) + before[plane]),
            rows: int(part.rows),
            columns: int(part.columns),
            groups: int(part.groups()),
            row_tile: int(row_tile),
        }
    }

    /// Where a part keeps what belongs to all of its rows.
    pub(crate) fn whole(&self, part: &WeightPart) -> Option<u64> {
        let plane = part.format.part_plane()?;
        Some(self.plane(part, plane) + (part.row_tile_bytes()[plane] * part.row_tiles()) as u64)
    }
}

/// The pages of all groups. Inside a group: (layer, page, K then V, head, token, dim), so that what attention reads of
/// one page for one head is contiguous; of states (layer, state, its values).
pub struct Kv {
    pub(crate) dtype: KvDType,
    groups: Vec<(KvGroup, Piece)>,
}

impl fmt::Debug for Kv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kv({}, {:?})", self.dtype, self.groups.iter().map(|(group, _)| group).collect::<Vec<_>>())
    }
}

impl Kv {
    pub(crate) fn new(arena: &Rc<Arena>, sizes: &CudaSizes, spec: &KvSpec) -> Result<Kv, Error> {
        sizes.keeps(spec)?;
        let groups = spec.groups.iter().map(|group| {
            let bytes = (group.pages as u64).saturating_mul(sizes.page_bytes(spec, group));
            Ok((group.clone(), arena.cut(Purpose::Kv, bytes)?))
        });
        Ok(Kv { dtype: spec.dtype, groups: groups.collect::<Result<_, Error>>()? })
    }

    /// The group that a layer belongs to; panics if there is no such layer.
    pub(crate) fn group(&self, layer: KvLayer) -> &KvGroup {
        let (group, _) = &self.groups[layer.group];
        assert!(layer.layer < group.layers, "layer {} of a group of {} layers", layer.layer, group.layers);
        group
    }

    /// Where a layer's pages begin.
    pub(crate) fn pages(&self, layer: KvLayer) -> u64 {
        let group = self.group(layer);
        let layer_bytes = group.pages as u64 * group.page_bytes(self.dtype) / group.layers as u64;
        self.groups[layer.group].1.pointer() + layer.layer as u64 * layer_bytes
    }

    /// Where each group's memory is, and how much.
    pub(crate) fn memory(&self) -> impl Iterator<Item = (u64, u64)> {
        self.groups.iter().map(|(_, piece)| (piece.pointer(), piece.bytes()))
    }
}

/// The sizes of everything on this backend: a plan counts by them, and the allocator allocates by them.
#[derive(Clone, Debug)]
pub struct CudaSizes {
    name: &'static str,
    workspace_bytes: u64,
}

impl CudaSizes {
    /// The sizes of a backend made with these options.
    pub fn new(options: &CudaOptions) -> CudaSizes {
        let slot =
            step::slot_bytes(options).iter().fold(0u64, |sum, bytes| sum.saturating_add(rounded(*bytes)));
        let slots = (options.depth as u64).saturating_add(1).saturating_mul(slot);
        let rest =
            rounded(formed_bytes(options.tokens_max)) + rounded(PARTIALS_BYTES) + rounded(TICKETS as u64 * 4);
        let rows = |bytes: usize| rounded((options.slots as u64).saturating_mul(bytes as u64));
        let sampled = rows(4).saturating_add(rows(step::BINS_BYTES));
        let workspace_bytes = slots.saturating_add(rest).saturating_add(sampled);
        CudaSizes { name: "cuda", workspace_bytes }
    }

    /// Where each part lies in a weight, and how long the weight is. Parts of one format that follow each other at
    /// whole tiles become one.
    pub(crate) fn placed(&self, parts: &[Part<'_>]) -> Result<(Vec<WeightPart>, u64), Error> {
        let mut placed: Vec<WeightPart> = Vec::with_capacity(parts.len());
        // Of each, the rows and columns of what it is a shard of.
        let mut wholes: Vec<[usize; 2]> = Vec::with_capacity(parts.len());
        for part in parts {
            let (format, rows, columns) = self.shape(part)?;
            let whole = part.whole.unwrap_or([rows, columns]);
            if let Some(first) = placed.first().filter(|first| first.columns != columns) {
                return Err(wrong_shape(part, vec![0, first.columns]));
            }
            match placed.last_mut() {
                Some(last) if last.format == format && last.rows.is_multiple_of(TILE_ROWS) => {
                    last.rows += rows;
                    let [whole_rows, _] = wholes.last_mut().expect("one for each that was placed");
                    *whole_rows += whole[0];
                }
                last => {
                    let first = last.map_or(0, |last| last.first + last.rows);
                    placed.push(WeightPart {
                        format,
                        first,
                        rows,
                        columns,
                        planes: [0; PLANES],
                        slices: None,
                    });
                    wholes.push(whole);
                }
            }
        }
        if parts.iter().any(|part| part.whole.is_some()) {
            for (part, whole) in placed.iter_mut().zip(wholes) {
                part.slices = Some(part.slices_of(whole).map_err(|what| {
                    let what = format!("tensor {}: {what}", parts[0].view.name);
                    Error::Unsupported { what, backend: self.name }
                })?);
            }
        }
        let mut bytes = 0u64;
        for part in &mut placed {
            let (tiles, plane_bytes) = (part.row_tiles() as u64, part.row_tile_bytes());
            for (index, (at, plane)) in part.planes.iter_mut().zip(plane_bytes).enumerate() {
                *at = bytes;
                let whole = if part.format.part_plane() == Some(index) { PART_BYTES } else { 0 };
                let plane = (plane as u64).saturating_mul(tiles).saturating_add(whole);
                bytes = bytes.saturating_add(if plane == 0 { 0 } else { rounded(plane) });
            }
        }
        Ok((placed, bytes))
    }

    /// Format, rows and columns of a part seen as a matrix.
    fn shape(&self, part: &Part<'_>) -> Result<(Format, usize, usize), Error> {
        let [stored_rows, columns] = part.view.shape[..] else {
            return Err(wrong_shape(part, vec![0, 0]));
        };
        let dtype = part.view.dtype;
        let format = Format::of(dtype).ok_or_else(|| Error::DType {
            tensor: part.view.name.to_owned(),
            dtype,
            backend: self.name,
        })?;
        // Eight rows of 8-bit floats are prepared at once.
        let columns_max = if format.takes_floats8() { COLUMNS_MAX / 2 } else { COLUMNS_MAX };
        if columns > columns_max {
            return Err(wrong_shape(part, vec![0, columns_max]));
        }
        if columns == 0 || !columns.is_multiple_of(dtype.block_values()) {
            return Err(wrong_shape(part, vec![0, columns.max(1).next_multiple_of(dtype.block_values())]));
        }
        Ok((format, self.selected_rows(part, stored_rows)?, columns))
    }

    /// How many rows the part yields, after what holds for matrices and vectors alike.
    fn selected_rows(&self, part: &Part<'_>, stored_rows: usize) -> Result<usize, Error> {
        let Some(rows) = &part.rows else { return Ok(stored_rows) };
        assert!(rows.iter().all(|&row| (row as usize) < stored_rows), "row order of {}", part.view.name);
        Ok(rows.len())
    }

    /// Values that a part adds to a vector: each is a row of its own.
    pub(crate) fn vector_values(&self, part: &Part<'_>) -> Result<usize, Error> {
        let values = part.view.shape.iter().product::<usize>();
        let dtype = part.view.dtype;
        if Format::of(dtype).is_none() {
            return Err(Error::DType { tensor: part.view.name.to_owned(), dtype, backend: self.name });
        }
        if !values.is_multiple_of(dtype.block_values()) || values > VECTOR_MAX {
            return Err(wrong_shape(
                part,
                vec![values.next_multiple_of(dtype.block_values()).min(VECTOR_MAX)],
            ));
        }
        self.selected_rows(part, values)
    }
}

fn wrong_shape(part: &Part<'_>, wanted: Vec<usize>) -> Error {
    Error::TensorShape { tensor: part.view.name.to_owned(), got: part.view.shape.clone(), wanted }
}

/// A count as kernels take it.
pub(crate) fn int(count: usize) -> i32 {
    i32::try_from(count).expect("what kernels count is below 2^31")
}

impl Sizes for CudaSizes {
    fn weight_bytes(&self, parts: &[Part<'_>]) -> Result<u64, Error> {
        Ok(rounded(self.placed(parts)?.1))
    }

    fn vector_bytes(&self, parts: &[Part<'_>]) -> Result<u64, Error> {
        let values = parts.iter().map(|part| self.vector_values(part)).sum::<Result<usize, _>>()?;
        Ok(self.buf_bytes(Purpose::Weights, 1, values))
    }

    fn buf_bytes(&self, _purpose: Purpose, rows: usize, columns: usize) -> u64 {
        rounded((rows as u64).saturating_mul(columns as u64).saturating_mul(4))
    }

    fn supports(&self, need: Need) -> Result<(), Error> {
        match need {
            Need::GivenRows
            | Need::Sections
            | Need::LastSeen
            | Need::SharedKeys
            | Need::Reach
            | Need::WideGroups
            | Need::LayerEmbeddings
            | Need::ExpertScales
            | Need::Clamp
            | Need::HostTables
            | Need::HostWeights
            | Need::FileWeights => Err(Error::Unsupported { what: need.to_string(), backend: self.name }),
            _ => Ok(()),
        }
    }

    fn keeps(&self, spec: &KvSpec) -> Result<(), Error> {
        // Keys and values of one width, latent rows, and states of whole values of f32.
        let has = |kind: &KvKind| match *kind {
            KvKind::State { bytes, .. } => bytes.is_multiple_of(size_of::<f32>()),
            KvKind::Latent { .. } => true,
            KvKind::Pairs { .. } => kind.heads().is_some(),
        };
        if let Some(group) = spec.groups.iter().find(|group| !has(&group.kind)) {
            return Err(Error::Unsupported { what: group.kind.to_string(), backend: self.name });
        }
        let dtype = spec.dtype;
        if KV_DTYPES.contains(&dtype) {
            return Ok(());
        }
        Err(Error::KvDType { dtype, backend: self.name, possible: &KV_DTYPES })
    }

    fn kv_bytes(&self, spec: &KvSpec) -> u64 {
        let bytes = spec
            .groups
            .iter()
            .map(|group| rounded(self.page_bytes(spec, group).saturating_mul(group.pages as u64)));
        bytes.fold(0, u64::saturating_add)
    }

    fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }
}

#[cfg(test)]
mod tests {
    use fornax_format::{DType, View};

    use super::*;

    /// What a shard's one part is placed as; of matrices whose values nobody reads.
    fn placed(
        dtype: DType,
        [rows, columns]: [usize; 2],
        whole: Option<[usize; 2]>,
    ) -> Result<WeightPart, Error> {
        let bytes = vec![0; rows * dtype.bytes_for(columns).unwrap()];
        let view = View::new("w", dtype, vec![rows, columns], &bytes).unwrap();
        let sizes = CudaSizes::new(&CudaOptions::default());
        sizes.placed(&[Part { whole, ..Part::from(view) }]).map(|(parts, _)| parts[0])
    }

    #[test]
    fn the_slices_of_a_shard_are_the_whole_weights() {
        let slices_of = |shape, whole| slices(&placed(DType::BF16, shape, whole).unwrap());
        // Half of the rows would have more.
        let whole = [16_896, 256];
        assert_eq!((slices_of(whole, None), slices_of([8448, 256], None)), (1, 2));
        assert_eq!(slices_of([8448, 256], Some(whole)), 1);
        // And half of the columns as many as all.
        let whole = [2048, 8192];
        assert_eq!((slices_of(whole, None), slices_of([2048, 4096], None)), (8, 8));
        for (columns, wanted) in [(4096, 4), (2048, 2), (1024, 1), (7168, 7), (8192, 8)] {
            assert_eq!(slices_of([2048, columns], Some(whole)), wanted, "{columns} columns");
        }
        // Within a slice, or of slices that are not alike.
        for (columns, whole) in [(512, whole), (1536, whole), (9472, [512, 18_944])] {
            let refused = placed(DType::BF16, [whole[0], columns], Some(whole)).unwrap_err().to_string();
            let wanted = format!("tensor w: {columns} of {} columns, which are summed in 8 slices", whole[1]);
            assert!(refused.starts_with(&wanted), "{refused}");
        }
    }
}
