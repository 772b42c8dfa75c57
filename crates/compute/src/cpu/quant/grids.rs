//! The lattices of the IQ formats: a stored index chooses several values at once, a point of the lattice.
//!
//! The points are data of the `gguf` package; `make_grids.py` writes them. A point is given as indices into the
//! format's magnitudes.

/// One u16 for each point, lattice after lattice.
static POINTS: &[u8; 9216] = include_bytes!("grids.bin");

/// The points of one format.
#[derive(Clone, Copy)]
pub(super) struct Lattice {
    /// Its first point.
    first: usize,
}

pub(super) const IQ2_XXS: Lattice = Lattice { first: 0 };
pub(super) const IQ2_XS: Lattice = Lattice { first: 256 };
pub(super) const IQ2_S: Lattice = Lattice { first: 768 };
pub(super) const IQ1_S: Lattice = Lattice { first: 1792 };
pub(super) const IQ3_XXS: Lattice = Lattice { first: 3840 };
pub(super) const IQ3_S: Lattice = Lattice { first: 4096 };

impl Lattice {
    /// A point of eight indices below four.
    #[inline]
    pub(super) fn eight(self, index: usize) -> [u8; 8] {
        let bits = self.bits(index);
        std::array::from_fn(|i| (bits >> (2 * i) & 3) as u8)
    }

    /// A point of four indices below eight.
    #[inline]
    pub(super) fn four(self, index: usize) -> [u8; 4] {
        let bits = self.bits(index);
        std::array::from_fn(|i| (bits >> (4 * i) & 7) as u8)
    }

    fn bits(self, index: usize) -> u16 {
        let at = 2 * (self.first + index);
        u16::from_le_bytes([POINTS[at], POINTS[at + 1]])
    }
}

/// Eight signs of which seven are stored: there are always evenly many negative ones. Bit i is value i's.
#[inline]
pub(super) fn even_signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | (seven.count_ones() as u8 & 1) << 7
}
