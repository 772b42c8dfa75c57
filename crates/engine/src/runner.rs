//! What the engine drives.

use fornax_compute::{Batch, Error, KvGroup, Output, SampleRow};

use crate::scheduler::StepLimits;

/// Computes batches, in the order they are launched. A step is two submissions, `launch` and then `sample`, so that
/// what sampling needs can be prepared while the forward pass runs; `collect` yields the oldest step's tokens.
///
/// A runner belongs to the engine's thread. A failed call drops its own step and leaves the others alone.
pub trait Runner {
    /// Starts the forward pass of a batch.
    fn launch(&mut self, batch: &Batch) -> Result<(), Error>;
    /// Chooses tokens from the logits of the step launched last.
    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<(), Error>;
    /// What the model's head reads, in these of the step's rows that want logits; of the step launched last, which it
    /// waits for.
    fn hidden(&mut self, wanted: &[u32]) -> Result<Vec<Vec<f32>>, Error>;
    /// Waits for the oldest step.
    fn collect(&mut self) -> Result<Output, Error>;
    /// Drops all steps in flight, after a panic.
    fn reset(&mut self);
    /// How many steps may be in flight while the next one is put together: 1, or 0 when launching is computing.
    fn depth(&self) -> usize;
    /// Bounds of one step.
    fn limits(&self) -> StepLimits;
    /// The KV pools that were allocated.
    fn groups(&self) -> &[KvGroup];
    /// Tokens that can be chosen.
    fn vocab(&self) -> u32;
    /// Whether the model encodes: a sequence is computed whole in one step, takes no prefix hits, and only embeds.
    fn encodes(&self) -> bool {
        false
    }
    /// Whether the model reads two texts together and an embedding is one number, how well they fit: what is added to the
    /// positions of the second.
    fn pairs(&self) -> Option<u32> {
        None
    }
    /// Adapters that rows of a batch may name.
    fn adapters(&self) -> u32 {
        0
    }
}
