//! Weights on their way in: rows are packed by several threads into pinned memory, and copied from there while the next
//! are packed.

use std::rc::Rc;

use fornax_compute::{Error, Part};

use crate::driver::{Device, Event, Pinned};
use crate::layout::{PLANES, TILE_ROWS};
use crate::memory::{Weight, WeightPart};

/// Pinning takes 0.2 to 0.3 s for each gigabyte: little is pinned, and used again and again.
const SLOTS: usize = 4;
const SLOT_BYTES: usize = 16 << 20;
/// Beyond this many threads the copy is the slowest.
const THREADS_MAX: usize = 8;
/// Less than this is packed sooner than a thread starts.
const THREAD_BYTES: usize = 256 << 10;

/// Pinned memory in turns.
pub(crate) struct Ring {
    slots: Vec<(Pinned, Event)>,
    next: usize,
    threads: usize,
}

impl Ring {
    pub(crate) fn new(device: &Rc<Device>) -> Result<Ring, Error> {
        let slot = |_| Ok((Pinned::new(device, SLOT_BYTES)?, Event::new(device)?));
        let slots = (0..SLOTS).map(slot).collect::<Result<_, Error>>()?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Ring { slots, next: 0, threads: cores.min(THREADS_MAX) })
    }

    /// Sends the stored rows of a weight's parts to their planes.
    pub(crate) fn upload(
        &mut self,
        device: &Device,
        weight: &Weight,
        parts: &[Part<'_>],
    ) -> Result<(), Error> {
        for part in &weight.parts {
            let rows = Stored::new(parts, part);
            let row_tile = part.row_tile_bytes();
            let row_tile_bytes: usize = row_tile.iter().sum();
            let at_once = (SLOT_BYTES / row_tile_bytes).max(1);
            let tiles = part.row_tiles();
            for start in (0..tiles).step_by(at_once) {
                let count = at_once.min(tiles - start);
                let (pinned, event) = &mut self.slots[self.next];
                self.next = (self.next + 1) % SLOTS;
                event.wait("upload")?;
                pack(&rows, part, start, count, self.threads, pinned.bytes_mut());
                let mut at = 0;
                for (plane, bytes) in row_tile.iter().enumerate() {
                    let to = weight.plane(part, plane) + (start * bytes) as u64;
                    device.write_pinned("upload", to, pinned, at, count * bytes)?;
                    at += count * bytes;
                }
                event.record()?;
            }
        }
        Ok(())
    }
}

/// The stored rows of a weight's part, whichever tensors they come from.
pub(crate) struct Stored<'a> {
    /// (first output row, tensor)
    parts: Vec<(usize, &'a Part<'a>)>,
    row_bytes: usize,
    rows: usize,
}

impl<'a> Stored<'a> {
    pub(crate) fn new(parts: &'a [Part<'a>], of: &WeightPart) -> Stored<'a> {
        let mut first = 0;
        let mut within = Vec::new();
        for part in parts {
            let rows = part.rows.as_ref().map_or(part.view.shape[0], Vec::len);
            if (of.first..of.first + of.rows).contains(&first) && rows > 0 {
                within.push((first - of.first, part));
            }
            first += rows;
        }
        let row_bytes =
            within.first().map_or(0, |(_, part)| part.view.bytes.len() / part.view.shape[0].max(1));
        Stored { parts: within, row_bytes, rows: of.rows }
    }

    /// The bytes of an output row; `None` beyond the last.
    pub(crate) fn row(&self, row: usize) -> Option<&'a [u8]> {
        if row >= self.rows {
            return None;
        }
        let at = self.parts.partition_point(|(first, _)| *first <= row) - 1;
        let (first, part) = self.parts[at];
        let stored = part.rows.as_ref().map_or(row - first, |order| order[row - first] as usize);
        Some(&part.view.bytes[stored * self.row_bytes..][..self.row_bytes])
    }
}

/// Packs `count` times 16 rows, plane after plane, into the beginning of `room`.
fn pack(rows: &Stored<'_>, part: &WeightPart, start: usize, count: usize, threads: usize, room: &mut [u8]) {
    let row_tile = part.row_tile_bytes();
    let mut rest = &mut room[..row_tile.iter().sum::<usize>() * count];
    let threads = (rest.len() / THREAD_BYTES).clamp(1, threads).min(count);
    let mut planes: [&mut [u8]; PLANES] = row_tile.map(|bytes| {
        let (plane, others) = std::mem::take(&mut rest).split_at_mut(bytes * count);
        rest = others;
        plane
    });
    std::thread::scope(|scope| {
        let mut first = 0;
        for thread in 0..threads {
            let end = count * (thread + 1) / threads;
            let mine = std::array::from_fn(|plane| {
                let (mine, others) =
                    std::mem::take(&mut planes[plane]).split_at_mut((end - first) * row_tile[plane]);
                planes[plane] = others;
                mine
            });
            let tiles = start + first..start + end;
            let work = move || pack_tiles(rows, part, tiles, mine);
            if thread + 1 == threads {
                work();
            } else {
                scope.spawn(work);
            }
            first = end;
        }
    });
}

fn pack_tiles(
    rows: &Stored<'_>,
    part: &WeightPart,
    tiles: std::ops::Range<usize>,
    mut planes: [&mut [u8]; PLANES],
) {
    let row_tile = part.row_tile_bytes();
    for (at, tile) in tiles.enumerate() {
        let mut mine: [&mut [u8]; PLANES] = planes.each_mut().map(|plane| &mut plane[..]);
        for (plane, bytes) in mine.iter_mut().zip(row_tile) {
            *plane = &mut std::mem::take(plane)[at * bytes..(at + 1) * bytes];
        }
        let whole =
            part.columns.is_multiple_of(crate::layout::TILE_COLUMNS) && (tile + 1) * TILE_ROWS <= part.rows;
        if !whole {
            mine.iter_mut().for_each(|plane| plane.fill(0));
        }
        for row in 0..TILE_ROWS {
            if let Some(stored) = rows.row(tile * TILE_ROWS + row) {
                part.format.pack_row(row, stored, &mut mine);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use fornax_format::{DType, View};

    use super::*;
    use crate::layout::Format;

    #[test]
    fn any_number_of_threads_packs_the_same_bytes_from_stacked_and_reordered_parts() {
        let bytes: Vec<u8> =
            (0..80 * 256).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut first = Part::from(View::new("a", DType::BF16, vec![48, 128], &bytes[..48 * 256]).unwrap());
        first.rows = Some((0..48).rev().collect());
        let second = Part::from(View::new("b", DType::BF16, vec![32, 128], &bytes[48 * 256..]).unwrap());
        let parts = [first, second];
        let part = WeightPart { format: Format::BF16, first: 0, rows: 80, columns: 128, planes: [0; PLANES] };
        let stored = Stored::new(&parts, &part);
        assert_eq!(stored.row(0), Some(&bytes[47 * 256..48 * 256]));
        assert_eq!(stored.row(48), Some(&bytes[48 * 256..49 * 256]));
        assert_eq!(stored.row(79), Some(&bytes[79 * 256..]));
        assert_eq!(stored.row(80), None);
        let packed = |threads| {
            let mut room = vec![0xaa; 5 * 4096];
            pack(&stored, &part, 0, 5, threads, &mut room);
            room
        };
        let one = packed(1);
        assert!([2, 3, 8].iter().all(|&threads| packed(threads) == one));
        // Row 0 is stored row 47: its first 32 values lie in the first lanes.
        assert_eq!(one[..64], bytes[47 * 256..][..64]);
    }
}
