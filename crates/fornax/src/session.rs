//! One sequence on one device: what drives a model until the engine serves many.
//!
//! It has one rule: what is computed catches up with the tokens, a chunk at a time. So a long prompt, the next token
//! and a second question in the same chat are the same thing.

use fornax_compute::{Backend, Batch, KvSpec, PAGE_TOKENS, PageId, Row, SampleRow, Sampled, Token};
use fornax_model::Model;

use crate::Error;

/// A model with its cache, and the tokens whose keys and values are in it.
pub(crate) struct Session<B: Backend> {
    backend: B,
    model: Box<dyn Model<B>>,
    kv: B::Kv,
    /// Page tables by KV group; the sequence owns every page but the trash page.
    tables: Vec<Vec<PageId>>,
    computed: Vec<u32>,
    limits: SessionLimits,
}

/// The sizes that a session was made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionLimits {
    /// Tokens of the whole sequence.
    pub(crate) context: usize,
    /// Tokens of one step.
    pub(crate) tokens: usize,
    /// Logit rows of one step.
    pub(crate) wanted: usize,
}

/// The only sequence there is.
const SLOT: u32 = 0;

/// Pages of one group for a sequence of `context` tokens, the trash page included.
pub(crate) fn pages_for(context: usize) -> usize {
    context.div_ceil(PAGE_TOKENS) + 1
}

impl<B: Backend> Session<B> {
    /// Allocates the cache; the model is already loaded on `backend`.
    pub(crate) fn new(
        backend: B,
        model: Box<dyn Model<B>>,
        spec: &KvSpec,
        limits: SessionLimits,
    ) -> Result<Session<B>, Error> {
        let kv = backend.alloc_kv(spec)?;
        let tables = spec.groups.iter().map(|group| (1..group.pages as u32).map(PageId).collect()).collect();
        Ok(Session { backend, model, kv, tables, computed: Vec::new(), limits })
    }

    pub(crate) fn backend(&self) -> &B {
        &self.backend
    }

    pub(crate) fn limits(&self) -> SessionLimits {
        self.limits
    }

    /// Forgets what does not lead to `tokens`, and at least the last of them: its logits are wanted again.
    pub(crate) fn rewind(&mut self, tokens: &[u32]) {
        let common = self.computed.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        self.computed.truncate(common.min(tokens.len().saturating_sub(1)));
    }

    /// How many tokens are computed.
    pub(crate) fn computed(&self) -> usize {
        self.computed.len()
    }

    /// Computes one chunk towards `tokens`; once it reaches their end, chooses the next one.
    pub(crate) fn sample<'r>(
        &mut self,
        tokens: &[u32],
        row: impl FnOnce(u32) -> SampleRow<'r>,
    ) -> Result<Option<Sampled>, Error> {
        let chunk = self.chunk(tokens, self.limits.tokens);
        let last = self.computed.len() + chunk.len() == tokens.len();
        let row = last.then(|| row(tokens.len() as u32));
        let mut sampled = self.step(chunk, u32::from(last), row.as_slice())?;
        match sampled.pop() {
            Some(sampled) if sampled.fault.is_some() => {
                Err(Error::NumericFault { position: tokens.len() - 1 })
            }
            sampled => Ok(sampled),
        }
    }

    /// Computes one chunk towards `tokens` and returns the logits after each of its last tokens that fit: (rows,
    /// vocabulary). With `all` these are all tokens of the chunk, else the last token of `tokens` only.
    pub(crate) fn logits(&mut self, tokens: &[u32], all: bool) -> Result<Vec<f32>, Error> {
        let most = if all { self.limits.wanted.min(self.limits.tokens) } else { self.limits.tokens };
        let chunk = self.chunk(tokens, most);
        let last = self.computed.len() + chunk.len() == tokens.len();
        let wanted = if all { chunk.len() } else { usize::from(last) };
        self.step(chunk, wanted as u32, &[])?;
        Ok(self.backend.read(self.model.logits(), 0, wanted)?)
    }

    fn chunk<'t>(&self, tokens: &'t [u32], most: usize) -> &'t [u32] {
        let rest = &tokens[self.computed.len()..];
        &rest[..rest.len().min(most)]
    }

    /// One step over `chunk`, whose last `wanted` positions want logits.
    fn step(&mut self, chunk: &[u32], wanted: u32, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, Error> {
        let end = self.computed.len() + chunk.len();
        assert!(!chunk.is_empty() && end <= self.limits.context, "chunk {} of {end}", chunk.len());
        let pages = end.div_ceil(PAGE_TOKENS);
        let mut batch = Batch::default();
        batch.push(
            Row {
                slot: SLOT,
                start: self.computed.len() as u32,
                len: chunk.len() as u32,
                pages: self.tables.iter().map(|table| table[..pages].to_vec()).collect(),
                wanted,
            },
            chunk.iter().map(|&token| Token::Known(token)),
        );
        let mut step = self.backend.begin(&batch)?;
        let (backend, model, kv) = (&self.backend, &mut self.model, &mut self.kv);
        backend.record(&step, &mut || model.forward(backend, kv, &step))?;
        if !rows.is_empty() {
            backend.sample(&mut step, model.logits(), rows)?;
        }
        let output = backend.finish(step)?;
        self.computed.extend_from_slice(chunk);
        Ok(output.sampled)
    }
}
