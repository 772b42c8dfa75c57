//! What the engine drives.

use fornax_compute::{Batch, Error, KvGroup, Output, PageCopy, PageId, SampleRow};
use fornax_model::{Adapter, AdapterFault, AdapterRoom};

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
    /// How many steps may be in flight while the next one is put together: 0 when launching is computing, 1 on a
    /// device, more where several devices follow each other.
    fn depth(&self) -> usize;
    /// Whether a sampled token is fed back on its own device: `Token::Sampled` may name a token of the step before,
    /// which is not collected yet. Otherwise a sequence waits until its token is known.
    fn feeds_back(&self) -> bool {
        true
    }
    /// Whether a sequence may go back: the next row of a sequence may start before the end of its last one, as if the
    /// positions in between had not been computed. Keys and values are simply written again; a state cannot forget, so
    /// where there are states nothing is drafted, unless a runner keeps enough of them.
    fn rewinds(&self) -> bool {
        !self.groups().iter().any(|group| group.kind.is_state())
    }
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
    /// Whether the model reads two texts together and an embedding is one number, how well they fit: what is added to
    /// the positions of the second.
    fn pairs(&self) -> Option<u32> {
        None
    }
    /// Adapters that it was made with: rows of a batch name them by their place. The places behind them are for
    /// adapters that come later.
    fn adapters(&self) -> u32 {
        0
    }
    /// Room for adapters that come later.
    fn adapter_room(&self) -> AdapterRoom {
        AdapterRoom::default()
    }
    /// Loads an adapter into a place for those that come later, or empties the place. No step is in flight. What fails
    /// leaves the place as it was.
    fn set_adapter(&mut self, place: u32, adapter: Option<&Adapter>) -> Result<(), fornax_model::Error> {
        let _ = place;
        let adapter = adapter.map_or_else(String::new, |adapter| adapter.name().to_owned());
        Err(fornax_model::Error::Adapter { adapter, fault: AdapterFault::NoRoom })
    }
    /// Values of a row that may be given in place of a token; `None` where only tokens are read.
    fn given(&self) -> Option<usize> {
        None
    }
    /// Sections of a position: 1, or more where rows of given content have a place of several dimensions.
    fn sections(&self) -> usize {
        1
    }
    /// The runner of a smaller model that drafts for this one, with the same tokens; given away once.
    fn drafter(&mut self) -> Option<Box<dyn Runner>> {
        None
    }
    /// A page, or a state, as bytes. No step that writes to it is in flight.
    fn copy_out(&mut self, group: usize, page: PageId) -> Result<PageCopy, Error> {
        let _ = (group, page);
        Err(Error::Unsupported { what: "copying pages out".to_owned(), backend: "this runner" })
    }
    /// Places such bytes where no step in flight reads or writes; those of another cache are refused.
    fn copy_in(&mut self, group: usize, page: PageId, copy: &PageCopy) -> Result<(), Error> {
        let _ = (group, page, copy);
        Err(Error::Unsupported { what: "copying pages in".to_owned(), backend: "this runner" })
    }
}
