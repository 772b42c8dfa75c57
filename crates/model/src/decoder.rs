//! What every decoder has around its blocks: embedding, rotation, last norm, head, and the activations.

use fornax_compute::{Backend, Error, Memory, Norm, Purpose, Rope, Rows};

use crate::loader::Loader;
use crate::names::Tensor;
use crate::{Config, Limits};

/// Where tokens come in and logits go out.
pub(crate) struct Ends<M: Memory> {
    pub(crate) embedding: M::Weight, // (vocab, hidden)
    pub(crate) rope: Rope<M::Buf>,   // (rotating pairs of a head)
    norm: Norm<M::Buf>,              // (hidden)
    head: Option<M::Weight>,         // (vocab, hidden); tied models multiply by the embedding
}

impl<M: Memory> Ends<M> {
    pub(crate) fn load(loader: &mut Loader<'_, M>) -> Result<Ends<M>, crate::Error> {
        let config = loader.config;
        Ok(Ends {
            embedding: loader.table(Tensor::Embedding)?,
            rope: Rope {
                frequencies: loader.memory.upload_values(&config.rope.frequencies())?,
                pairs: config.rope.dims / 2,
                magnitude: config.rope.magnitude(),
            },
            norm: norm(loader, Tensor::OutputNorm, 0)?,
            head: if config.tied { None } else { Some(loader.weight(&[Tensor::Output], 0)?) },
        })
    }
}

impl<B: Backend> Ends<B> {
    /// `wanted_normed` = the last norm of the rows that want logits. Of a recorded step too, whose operations may have
    /// been done at once without leaving it.
    pub(crate) fn hidden(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        backend.gather_wanted(step, &a.residual, &mut a.wanted)?;
        backend.rms_norm(step, Rows::Wanted, &self.norm, &a.wanted, &mut a.wanted_normed)
    }

    /// `logits` = head of the last norm of the rows that want logits: only they are worth a vocabulary.
    pub(crate) fn logits(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        self.hidden(backend, step, a)?;
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        backend.matmul(step, Rows::Wanted, head, &a.wanted_normed, &mut a.logits)
    }
}

/// Buffers of one step, allocated once and written anew in every step.
pub(crate) struct Activations<M: Memory> {
    pub(crate) residual: M::Buf,      // (tokens, hidden)
    pub(crate) branch: M::Buf,        // (tokens, hidden): what a branch reads, then what it adds
    pub(crate) qkv: M::Buf,           // (tokens, (query + 2 kv heads) x head size)
    pub(crate) attended: M::Buf,      // (tokens, query heads x head size)
    pub(crate) gate_up: M::Buf,       // (tokens, 2 ffn)
    pub(crate) gated: M::Buf,         // (tokens, ffn)
    pub(crate) wanted: M::Buf,        // (wanted, hidden)
    pub(crate) wanted_normed: M::Buf, // (wanted, hidden)
    pub(crate) logits: M::Buf,        // (wanted, vocab)
}

impl<M: Memory> Activations<M> {
    pub(crate) fn alloc(memory: &M, config: &Config, limits: Limits) -> Result<Activations<M>, Error> {
        let Limits { tokens_max, wanted_max } = limits;
        let tokens = |columns| memory.alloc(Purpose::Activations, tokens_max, columns);
        Ok(Activations {
            residual: memory.alloc(Purpose::Residual, tokens_max, config.hidden)?,
            branch: tokens(config.hidden)?,
            qkv: tokens(config.heads.qkv_columns())?,
            attended: tokens(config.heads.query * config.heads.dim)?,
            gate_up: tokens(2 * config.ffn)?,
            gated: tokens(config.ffn)?,
            wanted: memory.alloc(Purpose::Residual, wanted_max, config.hidden)?,
            wanted_normed: memory.alloc(Purpose::Activations, wanted_max, config.hidden)?,
            logits: memory.alloc(Purpose::Logits, wanted_max, config.vocab)?,
        })
    }
}

/// A layer's norm with the configuration's epsilon.
pub(crate) fn norm<M: Memory>(
    loader: &mut Loader<'_, M>,
    tensor: Tensor,
    layer: usize,
) -> Result<Norm<M::Buf>, crate::Error> {
    Ok(Norm { weight: loader.vector(&[tensor], layer)?, eps: loader.config.norm_eps })
}
