//! The runner for one backend on the engine's own thread.

use std::collections::VecDeque;

use fornax_compute::{Backend, Batch, Error, KvGroup, Output, PageCopy, PageId, SampleRow};
use fornax_model::{Adapter, AdapterRoom, Model};

use crate::{runner::Runner, scheduler::StepLimits};

/// A model on one backend, on the engine's own thread.
pub struct Local<B: Backend> {
    backend: B,
    model: Box<dyn Model<B>>,
    kv: B::Kv,
    groups: Vec<KvGroup>,
    limits: StepLimits,
    depth: usize,
    vocab: u32,
    given: Option<usize>,
    sections: usize,
    steps: VecDeque<B::Step>,
    drafter: Option<Box<dyn Runner>>,
}

/// What [`Local`] is made of.
pub struct LocalParts<B: Backend> {
    /// The device.
    pub backend: B,
    /// The model loaded on it.
    pub model: Box<dyn Model<B>>,
    /// Its KV cache.
    pub kv: B::Kv,
    /// The groups the cache was allocated with.
    pub groups: Vec<KvGroup>,
    /// The bounds the activations were allocated with.
    pub limits: StepLimits,
    /// Steps the backend can hold beyond the one being put together.
    pub depth: usize,
    /// Tokens the tokenizer has; rows of the head beyond them are padding.
    pub vocab: u32,
}

impl<B: Backend> Local<B> {
    /// Takes over everything the runner owns.
    pub fn new(parts: LocalParts<B>) -> Self {
        let LocalParts { backend, model, kv, groups, limits, depth, vocab } = parts;
        Local {
            backend,
            model,
            kv,
            groups,
            limits,
            depth,
            vocab,
            given: None,
            sections: 1,
            steps: VecDeque::new(),
            drafter: None,
        }
    }

    /// The same, telling so many sections of a position apart.
    pub fn with_sections(self, sections: usize) -> Self {
        Local { sections, ..self }
    }

    /// The same, with a smaller model that drafts for it.
    pub fn with_drafter(self, drafter: Box<dyn Runner>) -> Self {
        Local { drafter: Some(drafter), ..self }
    }

    /// The same, taking rows of this many values in place of tokens: the model's own width, or a multiple of it.
    pub fn with_given(self, columns: usize) -> Self {
        Local { given: Some(columns), ..self }
    }
}

impl<B: Backend> Runner for Local<B> {
    fn launch(&mut self, batch: &Batch) -> Result<(), Error> {
        let step = self.backend.begin(batch)?;
        let (backend, model, kv) = (&self.backend, &mut self.model, &mut self.kv);
        backend.record(&step, &mut || model.forward(backend, kv, &step))?;
        self.steps.push_back(step);
        Ok(())
    }

    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<(), Error> {
        let step = self.steps.back_mut().expect("sample follows launch");
        let sampled = self.backend.sample(step, self.model.logits(), rows);
        if sampled.is_err() {
            drop(self.steps.pop_back());
        }
        sampled
    }

    fn hidden(&mut self, wanted: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        let step = self.steps.back().expect("hidden follows launch");
        let hidden = self.model.hidden(&self.backend, step).and_then(|hidden| {
            let row = |&row: &u32| self.backend.read(hidden, row as usize, 1);
            wanted.iter().map(row).collect()
        });
        if hidden.is_err() {
            drop(self.steps.pop_back());
        }
        hidden
    }

    fn collect(&mut self) -> Result<Output, Error> {
        let step = self.steps.pop_front().expect("collect follows launch");
        self.backend.finish(step)
    }

    fn reset(&mut self) {
        self.steps.clear();
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn limits(&self) -> StepLimits {
        self.limits
    }

    fn groups(&self) -> &[KvGroup] {
        &self.groups
    }

    fn vocab(&self) -> u32 {
        self.vocab
    }

    fn encodes(&self) -> bool {
        self.model.encodes()
    }

    fn pairs(&self) -> Option<u32> {
        self.model.pairs()
    }

    fn adapters(&self) -> u32 {
        self.model.adapters()
    }

    fn adapter_room(&self) -> AdapterRoom {
        self.model.adapter_room()
    }

    fn set_adapter(&mut self, place: u32, adapter: Option<&Adapter>) -> Result<(), fornax_model::Error> {
        self.model.set_adapter(&self.backend, place, adapter)
    }

    fn given(&self) -> Option<usize> {
        self.given
    }

    fn sections(&self) -> usize {
        self.sections
    }

    fn drafter(&mut self) -> Option<Box<dyn Runner>> {
        self.drafter.take()
    }

    fn copy_out(&mut self, group: usize, page: PageId) -> Result<PageCopy, Error> {
        self.backend.copy_out(&self.kv, group, page)
    }

    fn copy_in(&mut self, group: usize, page: PageId, copy: &PageCopy) -> Result<(), Error> {
        self.backend.copy_in(&mut self.kv, group, page, copy)
    }
}
