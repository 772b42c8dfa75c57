//! How the threads of a launch are laid out.

/// The blocks of a launch, and what each of them has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: [usize; 3],
    /// Threads of a block.
    pub(crate) threads: usize,
    /// Dynamic shared memory of a block, in bytes.
    pub(crate) shared: usize,
    /// Blocks, neighbours in the third dimension, that see each other's shared memory.
    pub(crate) cluster: usize,
}

impl Grid {
    /// Blocks without clusters and without dynamic shared memory.
    pub(crate) fn new(blocks: [usize; 3], threads: usize) -> Grid {
        Grid { blocks, threads, shared: 0, cluster: 1 }
    }

    pub(crate) fn with_shared(self, shared: usize) -> Grid {
        Grid { shared, ..self }
    }

    pub(crate) fn in_clusters(self, cluster: usize) -> Grid {
        Grid { cluster, ..self }
    }
}
