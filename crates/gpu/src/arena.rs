//! Device memory in a few large slabs, cut into pieces that know their purpose.
//!
//! Many small allocations are slow, and hang some drivers; so memory is taken from the driver in slabs and cut here.
//! Every piece is counted by purpose when it is cut and uncounted when it is dropped. Pieces hold an `Rc` of their
//! arena: the compiler ties them to one thread.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use fornax_compute::{Error, Purpose, Usage};

use crate::driver::Device;

/// The alignment of pieces, and what their sizes are rounded up to: a kernel may load 16 bytes at a time, and the
/// memory system serves 128.
pub(crate) const ALIGN: u64 = 256;
/// Bytes that are taken from the driver at a time for smaller pieces.
const SLAB_BYTES: u64 = 32 << 20;

/// Where slabs come from: a device, or a fake for tests.
pub(crate) trait Slabs {
    /// `bytes` of memory, or `None` where there is none left.
    fn take(&self, bytes: u64) -> Result<Option<u64>, Error>;
    /// Gives a slab back.
    fn give(&self, pointer: u64);
}

impl Slabs for Device {
    fn take(&self, bytes: u64) -> Result<Option<u64>, Error> {
        match usize::try_from(bytes) {
            Ok(bytes) => self.alloc(bytes),
            Err(_) => Ok(None),
        }
    }

    fn give(&self, pointer: u64) {
        self.free(pointer);
    }
}

/// All memory of one device.
pub(crate) struct Arena {
    slabs: RefCell<Vec<Slab>>,
    source: Rc<dyn Slabs>,
    usage: RefCell<Usage>,
    limit: u64,
    /// Counts cuts and drops: a recorded graph holds addresses, so it is stale once this number has changed.
    generation: Cell<u64>,
}

struct Slab {
    start: u64,
    bytes: u64,
    /// The only purpose of its pieces, where the slab was taken for one.
    kept_for: Option<Purpose>,
    /// (offset, bytes) of free stretches, in order, never adjacent.
    free: Vec<(u64, u64)>,
}

impl Arena {
    pub(crate) fn new(source: Rc<dyn Slabs>, limit: u64) -> Rc<Arena> {
        Rc::new(Arena {
            slabs: RefCell::default(),
            source,
            usage: RefCell::default(),
            limit,
            generation: Cell::new(0),
        })
    }

    /// Bytes in use by purpose.
    pub(crate) fn usage(&self) -> Usage {
        *self.usage.borrow()
    }

    /// Changes whenever a piece is cut or dropped.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.get()
    }

    /// Takes this many bytes from the driver at a time, for pieces of one purpose. They are counted when pieces are
    /// cut. Nothing is taken where the limit or the driver does not allow it.
    pub(crate) fn reserve(&self, purpose: Purpose, bytes: u64) -> Result<(), Error> {
        let bytes = rounded(bytes);
        if bytes > self.limit.saturating_sub(self.usage().total()) {
            return Ok(());
        }
        if let Some(start) = self.source.take(bytes)? {
            self.add(start, bytes, Some(purpose));
        }
        Ok(())
    }

    fn add(&self, start: u64, bytes: u64, kept_for: Option<Purpose>) {
        self.slabs.borrow_mut().push(Slab { start, bytes, kept_for, free: vec![(0, bytes)] });
    }

    /// A piece of at least `bytes`, counted until it is dropped.
    pub(crate) fn cut(self: &Rc<Self>, purpose: Purpose, bytes: u64) -> Result<Piece, Error> {
        let used = self.usage().total();
        let refused = || Error::OutOfMemory { purpose, wanted: bytes, used, limit: self.limit };
        let rounded = rounded(bytes);
        if rounded > self.limit.saturating_sub(used) {
            return Err(refused());
        }
        let pointer = match self.cut_existing(purpose, rounded) {
            Some(pointer) => pointer,
            None => {
                let slab = rounded.max(SLAB_BYTES);
                let taken = self.source.take(slab)?;
                // A driver without room for a whole slab may have room for the piece.
                let (start, bytes) = match taken {
                    Some(start) => (start, slab),
                    None => (self.source.take(rounded)?.ok_or_else(refused)?, rounded),
                };
                self.add(start, bytes, None);
                self.cut_existing(purpose, rounded).expect("a new slab holds the piece it was taken for")
            }
        };
        self.usage.borrow_mut().add(purpose, rounded);
        self.generation.set(self.generation.get() + 1);
        Ok(Piece { arena: Rc::clone(self), purpose, pointer, bytes: rounded })
    }

    /// The first stretch that is long enough; slabs for this purpose come first.
    fn cut_existing(&self, purpose: Purpose, bytes: u64) -> Option<u64> {
        let mut slabs = self.slabs.borrow_mut();
        let mut cut = |kept_for| {
            slabs.iter_mut().filter(|slab| slab.kept_for == kept_for).find_map(|slab| {
                let at = slab.free.iter().position(|(_, free)| *free >= bytes)?;
                let (offset, free) = slab.free[at];
                if free == bytes {
                    slab.free.remove(at);
                } else {
                    slab.free[at] = (offset + bytes, free - bytes);
                }
                Some(slab.start + offset)
            })
        };
        cut(Some(purpose)).or_else(|| cut(None))
    }

    fn join(&self, pointer: u64, bytes: u64) {
        let mut slabs = self.slabs.borrow_mut();
        let inside = |slab: &Slab| (slab.start..slab.start + slab.bytes).contains(&pointer);
        let Some(index) = slabs.iter().position(inside) else { return };
        let slab = &mut slabs[index];
        let offset = pointer - slab.start;
        let at = slab.free.partition_point(|(free, _)| *free < offset);
        slab.free.insert(at, (offset, bytes));
        // Merge with the next stretch, then with the one before.
        for first in [at, at.wrapping_sub(1)] {
            if let (Some(&(a, a_bytes)), Some(&(b, b_bytes))) =
                (slab.free.get(first), slab.free.get(first.wrapping_add(1)))
                && a + a_bytes == b
            {
                slab.free[first] = (a, a_bytes + b_bytes);
                slab.free.remove(first + 1);
            }
        }
        // A slab that was taken for one large piece goes back with it; small slabs are kept.
        if slab.free == [(0, slab.bytes)] && (slab.bytes > SLAB_BYTES || slab.kept_for.is_some()) {
            let slab = slabs.swap_remove(index);
            self.source.give(slab.start);
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for slab in self.slabs.get_mut().drain(..) {
            self.source.give(slab.start);
        }
    }
}

/// Bytes that a piece of this size takes; a size that overflows is refused by any limit.
pub(crate) fn rounded(bytes: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX)
}

/// A stretch of device memory.
pub(crate) struct Piece {
    arena: Rc<Arena>,
    purpose: Purpose,
    pointer: u64,
    bytes: u64,
}

impl Piece {
    /// Where it lies on the device.
    pub(crate) fn pointer(&self) -> u64 {
        self.pointer
    }

    /// How long it is.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.arena.usage.borrow_mut().subtract(self.purpose, self.bytes);
        self.arena.join(self.pointer, self.bytes);
        self.arena.generation.set(self.arena.generation.get() + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver with this many bytes, which counts what it has given out.
    struct Fake {
        left: Cell<u64>,
        next: Cell<u64>,
        out: RefCell<Vec<(u64, u64)>>,
    }

    impl Slabs for Fake {
        fn take(&self, bytes: u64) -> Result<Option<u64>, Error> {
            let Some(left) = self.left.get().checked_sub(bytes) else { return Ok(None) };
            self.left.set(left);
            let start = self.next.get();
            self.next.set(start + bytes + 4096);
            self.out.borrow_mut().push((start, bytes));
            Ok(Some(start))
        }

        fn give(&self, pointer: u64) {
            let mut out = self.out.borrow_mut();
            let at = out.iter().position(|(start, _)| *start == pointer).expect("given out before");
            self.left.set(self.left.get() + out.remove(at).1);
        }
    }

    fn arena(bytes: u64, limit: u64) -> (Rc<Fake>, Rc<Arena>) {
        let fake =
            Rc::new(Fake { left: Cell::new(bytes), next: Cell::new(1 << 20), out: RefCell::default() });
        (Rc::clone(&fake), Arena::new(fake, limit))
    }

    #[test]
    fn pieces_never_overlap_and_all_of_them_come_back() {
        let (fake, arena) = arena(1 << 40, u64::MAX);
        let mut pieces: Vec<Piece> = Vec::new();
        let mut state = 1u64;
        for round in 0..2000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let random = state >> 33;
            if random % 5 < 3 {
                let bytes = [1, 300, 70_000, 5 << 20, 40 << 20][(random / 7 % 5) as usize];
                pieces.push(arena.cut(Purpose::Activations, bytes).unwrap());
            } else if !pieces.is_empty() {
                drop(pieces.swap_remove((random / 7) as usize % pieces.len()));
            }
            if round % 50 == 0 {
                let mut ranges: Vec<_> =
                    pieces.iter().map(|p| (p.pointer(), p.pointer() + p.bytes())).collect();
                ranges.sort_unstable();
                assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "round {round}");
                let slabs = fake.out.borrow();
                for (start, end) in ranges {
                    assert!(slabs.iter().any(|(slab, bytes)| *slab <= start && end <= slab + bytes));
                }
            }
        }
        assert_eq!(arena.usage().total(), pieces.iter().map(Piece::bytes).sum::<u64>());
        pieces.clear();
        assert_eq!(arena.usage(), Usage::default());
        // Only slabs of the usual size are kept, each in one stretch.
        assert!(arena.slabs.borrow().iter().all(|slab| slab.free == [(0, SLAB_BYTES)]));
        drop(arena);
        assert!(fake.out.borrow().is_empty());
    }

    #[test]
    fn what_is_reserved_is_taken_once_and_cut_for_its_purpose_alone() {
        let (fake, arena) = arena(1 << 40, u64::MAX);
        let sizes = [5 << 20, 300, 40 << 20, 1, 70_000];
        arena.reserve(Purpose::Weights, sizes.iter().map(|bytes| rounded(*bytes)).sum()).unwrap();
        assert_eq!(arena.usage(), Usage::default(), "nothing is counted before it is cut");
        let cut = |purpose, bytes| arena.cut(purpose, bytes).unwrap();
        let mut weights = Vec::new();
        for bytes in sizes {
            // As a load does: something of another purpose between two weights, soon gone.
            let _between = cut(Purpose::Workspace, 1 << 20);
            weights.push(cut(Purpose::Weights, bytes));
        }
        assert_eq!(fake.out.borrow().len(), 2, "the reserved slab, and one for the rest");
        let beyond = cut(Purpose::Weights, 100);
        assert_eq!(fake.out.borrow().len(), 2, "what was not foreseen is cut as always");
        weights.clear();
        assert_eq!(fake.out.borrow().len(), 1, "what was reserved goes back with the last of it");
        drop(beyond);
        let (fake, arena) = super::tests::arena(1 << 20, 1 << 19);
        arena.reserve(Purpose::Weights, 1 << 20).unwrap();
        arena.reserve(Purpose::Weights, 1 << 21).unwrap();
        assert!(fake.out.borrow().is_empty(), "neither above the limit nor above what there is");
    }

    #[test]
    fn a_limit_and_an_empty_driver_refuse_with_their_numbers() {
        let (_, arena) = arena(1 << 30, 1000);
        let _held = arena.cut(Purpose::Weights, 512).unwrap();
        let refused = arena.cut(Purpose::Kv, 600).err().expect("512 of 1000 are in use").to_string();
        assert_eq!(refused, "out of memory for kv: 600 bytes wanted, 512 of 1000 bytes in use");
        let (_, small) = super::tests::arena(1 << 20, u64::MAX);
        assert!(small.cut(Purpose::Kv, 1 << 19).is_ok(), "no room for a slab, but for the piece");
        assert!(matches!(small.cut(Purpose::Kv, 1 << 21), Err(Error::OutOfMemory { wanted: 2097152, .. })));
    }

    #[test]
    fn cutting_and_dropping_are_noticed_by_recorded_graphs() {
        let (_, arena) = arena(1 << 30, u64::MAX);
        let before = arena.generation();
        let piece = arena.cut(Purpose::Logits, 8).unwrap();
        let held = arena.generation();
        drop(piece);
        assert!(before != held && held != arena.generation());
    }
}
