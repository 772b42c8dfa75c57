//! Latent attention: a layer keeps one row a token, of which it makes the keys and values of all heads.
//!
//! Queries may come through a low rank of their own. What a head's keys and values are made by is never multiplied with the
//! rows: queries go through the one before they attend, what they have read goes through the other afterwards.

use std::ops::Range;

use fornax_compute::{
    Backend, Error, HeadProducts, Heads, LatentAttention, LatentHeads, Linear, Memory, Norm, NormKind,
    Purpose, Rope, Rows,
};

use crate::decoder::{Activations, branch_off, norm};
use crate::facts::{Facts, QkRows};
use crate::join::{Join, Meeting};
use crate::layers::HEADS;
use crate::loader::{Changes, Loader};
use crate::names::Tensor;
use crate::source::{Key, Source, bad};

/// A layer of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentConfig {
    /// Query heads.
    pub heads: usize,
    /// Values that queries are made of, where that is not the residual stream itself.
    pub query_rank: Option<usize>,
    /// Values of a row that keys and values are made of.
    pub latent: usize,
    /// Values of a head's query, and of its keys, that stay as they are.
    pub kept: usize,
    /// Values behind them that turn with the position.
    pub turned: usize,
    /// Values of a head's values.
    pub value: usize,
    /// How the rows that turn lie in the file.
    pub rows: QkRows,
}

/// Added to the mean square in the norms of latent values and of what queries are made of: whatever the model's own is.
const NORM_EPS: f32 = 1e-6;

/// Values under one key in each container.
mod key {
    use crate::source::Key;

    const fn key(gguf: &'static str, hugging_face: &'static str) -> Key {
        Key { gguf, hugging_face }
    }

    pub(super) const LATENT: Key = key("attention.kv_lora_rank", "kv_lora_rank");
    pub(super) const QUERY_RANK: Key = key("attention.q_lora_rank", "q_lora_rank");
    pub(super) const TURNED: Key = key("rope.dimension_count", "qk_rope_head_dim");
    /// In GGUF with the turned values, in Hugging Face files without.
    pub(super) const KEY: Key = key("attention.key_length_mla", "qk_nope_head_dim");
    pub(super) const VALUE: Key = key("attention.value_length_mla", "v_head_dim");
    /// What GGUF files say that were made before keys and values were told apart from rows.
    pub(super) const KEY_BEFORE: Key = key("attention.key_length", "");
    pub(super) const VALUE_BEFORE: Key = key("attention.value_length", "");
}

/// The most values of a head's key. No model comes near, and a row of a head's matrix has to fit where a thread computes.
const KEY_MAX: usize = 1 << 14;

impl LatentConfig {
    /// What all layers of such a model have.
    pub(crate) fn read(source: &Source<'_>, facts: &Facts) -> Result<Option<LatentConfig>, crate::Error> {
        if !facts.latent {
            return Ok(None);
        }
        let (turned, container_rows) = (source.size(key::TURNED)?, facts.rows_of(source));
        let or = |key: Key, before: Key| match (source, source.opt_size(key)?) {
            (Source::Gguf { .. }, None) => source.size(before),
            (_, Some(size)) => Ok(size),
            (Source::HuggingFace { .. }, None) => source.size(key),
        };
        let (key, value) = (or(key::KEY, key::KEY_BEFORE)?, or(key::VALUE, key::VALUE_BEFORE)?);
        if key > KEY_MAX {
            return Err(bad(&source.spelling(key::KEY), key, &format!("at most {KEY_MAX}")));
        }
        let (kept, rows) = match source {
            Source::Gguf { .. } => match key.checked_sub(turned).filter(|kept| *kept > 0) {
                Some(kept) => (kept, container_rows),
                None => {
                    let wanted = format!("more than the {turned} values that turn");
                    return Err(bad(&source.spelling(key::KEY), key, &wanted));
                }
            },
            Source::HuggingFace { json, .. } => match json.opt_bool("rope_interleave")? {
                Some(false) => (key, QkRows::Halves),
                Some(true) | None => (key, container_rows),
            },
        };
        Ok(Some(LatentConfig {
            heads: source.size(HEADS)?,
            query_rank: source.opt_size(key::QUERY_RANK)?,
            latent: source.size(key::LATENT)?,
            kept,
            turned,
            value,
            rows,
        }))
    }

    /// What attention is told.
    pub(crate) fn shape(&self) -> LatentHeads {
        LatentHeads { query: self.heads, latent: self.latent, turned: self.turned }
    }

    /// Values of a head's query.
    pub(crate) fn query(&self) -> usize {
        self.kept + self.turned
    }

    /// Queries as rotation takes them: what turns comes first in each head.
    fn queries(&self) -> Heads {
        Heads { query: self.heads, kv: 0, dim: self.query() }
    }

    /// Of a row what turns, as rotation takes it.
    fn row(&self) -> Heads {
        Heads { query: 1, kv: 0, dim: self.turned }
    }

    /// The stored row of a turned value.
    fn stored(&self, at: usize) -> usize {
        match self.rows {
            QkRows::Halves => at,
            QkRows::Pairs => at % (self.turned / 2) * 2 + at / (self.turned / 2),
        }
    }
}

/// What of a matrix's rows is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LatentPart {
    /// All heads' queries: of each first what turns, which files have last.
    Queries,
    /// What latent values are made by. What the turned ones are made by lies behind it.
    Rows,
    /// What is made by the rows behind it.
    Turned,
    /// What each head's keys are made by. Files in GGUF have it transposed and apart, others beside what its values are made
    /// by, head after head.
    Keys,
    /// What each head's values are made by.
    Values,
}

impl LatentPart {
    /// How many rows the stored matrix has where it is not the weight's own, and which are meant, in their order.
    pub(crate) fn rows(self, latent: &LatentConfig) -> Option<(usize, Vec<usize>)> {
        let (kept, turned, query) = (latent.kept, latent.turned, latent.query());
        let turns = |first: usize| (0..turned).map(move |at| first + latent.stored(at));
        match self {
            LatentPart::Queries => {
                let of_head =
                    |first: usize| turns(first + kept).chain(first..first + kept).collect::<Vec<_>>();
                let rows = (0..latent.heads).flat_map(|head| of_head(head * query)).collect();
                Some((latent.heads * query, rows))
            }
            LatentPart::Rows => Some((latent.latent + turned, (0..latent.latent).collect())),
            LatentPart::Turned => Some((latent.latent + turned, turns(latent.latent).collect())),
            LatentPart::Keys | LatentPart::Values => None,
        }
    }

    /// A head's rows of the matrix that has what its keys and its values are made by.
    pub(crate) fn of_head(self, latent: &LatentConfig, head: usize) -> Range<usize> {
        let first = head * (latent.kept + latent.value);
        match self {
            LatentPart::Values => first + latent.kept..first + latent.kept + latent.value,
            _ => first..first + latent.kept,
        }
    }
}

/// What a layer of latent attention is computed in.
pub(crate) struct LatentRoom<M: Memory> {
    narrow: Option<[M::Buf; 2]>, // (tokens, query rank): what queries are made of, and its norm
    queries: M::Buf,             // (tokens, heads x query): of each head what turns, then what stays
    row: M::Buf,                 // (tokens, latent)
    latent: M::Buf,              // (tokens, latent): its norm
    turned: M::Buf,              // (tokens, turned)
    absorbed: M::Buf,            // (tokens, heads x latent)
    read: M::Buf,                // (tokens, heads x latent)
    values: M::Buf,              // (tokens, heads x value)
}

impl<M: Memory> LatentRoom<M> {
    pub(crate) fn alloc(
        memory: &M,
        latent: &LatentConfig,
        tokens_max: usize,
    ) -> Result<LatentRoom<M>, Error> {
        let tokens = |columns| memory.alloc(Purpose::Activations, tokens_max, columns);
        Ok(LatentRoom {
            narrow: match latent.query_rank {
                Some(rank) => Some([tokens(rank)?, tokens(rank)?]),
                None => None,
            },
            queries: tokens(latent.heads * latent.query())?,
            row: tokens(latent.latent)?,
            latent: tokens(latent.latent)?,
            turned: tokens(latent.turned)?,
            absorbed: tokens(latent.heads * latent.latent)?,
            read: tokens(latent.heads * latent.latent)?,
            values: tokens(latent.heads * latent.value)?,
        })
    }
}

pub(crate) struct Latent<M: Memory> {
    norm: Option<Norm<M::Buf>>, // (hidden)
    narrow: Option<Narrow<M>>,  // where queries have a low rank
    queries: M::Weight,         // (heads x query) x (query rank, or hidden)
    rows: M::Weight,            // (latent) x (hidden)
    row_norm: Norm<M::Buf>,     // (latent)
    turned: M::Weight,          // (turned) x (hidden)
    keys: M::Weight,            // (heads, latent, kept)
    values: M::Weight,          // (heads, value, latent)
    output: M::Weight,          // (hidden, heads x value)
    output_changes: Changes<M>,
    config: LatentConfig,
    attention: LatentAttention,
    temperature: Option<fornax_compute::Temperature>,
    /// Which of the step's buffers are as wide.
    room: usize,
    join: Join<M>,
}

/// What queries of a low rank are made by.
struct Narrow<M: Memory> {
    weight: M::Weight,  // (query rank) x (hidden)
    norm: Norm<M::Buf>, // (query rank)
}

impl<M: Memory> Latent<M> {
    pub(crate) fn load(
        loader: &mut Loader<'_, M>,
        layer: usize,
        latent: &LatentConfig,
    ) -> Result<Latent<M>, crate::Error> {
        let config = loader.config;
        let own_norm = |loader: &mut Loader<'_, M>, tensor| -> Result<_, crate::Error> {
            let weight = loader.vector(&[tensor], layer)?;
            Ok(Norm { kind: NormKind::Rms, weight, bias: None, eps: NORM_EPS })
        };
        let attention = LatentAttention {
            heads: latent.shape(),
            layer: config.stage_kv_layer(loader.stage, layer),
            scale: config.attention_scale,
        };
        loader.memory.foresee_latent(&attention);
        Ok(Latent {
            norm: norm(loader, Tensor::AttentionNorm, None, layer)?,
            narrow: match latent.query_rank {
                Some(_) => Some(Narrow {
                    weight: loader.weight(&[Tensor::QueryDown], layer)?,
                    norm: own_norm(loader, Tensor::QueryDownNorm)?,
                }),
                None => None,
            },
            queries: match latent.query_rank {
                Some(_) => loader.weight(&[Tensor::QueryUp], layer)?,
                None => loader.weight(&[Tensor::Query], layer)?,
            },
            rows: loader.weight(&[Tensor::LatentRows], layer)?,
            row_norm: own_norm(loader, Tensor::LatentNorm)?,
            turned: loader.weight(&[Tensor::LatentTurned], layer)?,
            keys: loader.of_heads(Tensor::LatentKeys, layer, latent.heads)?,
            values: loader.of_heads(Tensor::LatentValues, layer, latent.heads)?,
            output: loader.weight(&[Tensor::AttentionOutput], layer)?,
            output_changes: loader.changes(&[Tensor::AttentionOutput], layer)?,
            config: *latent,
            attention,
            temperature: config.temperature,
            room: config
                .latents(loader.stage)
                .iter()
                .position(|other| other == latent)
                .expect("the layer's own is there"),
            join: Join::load(loader, Tensor::AttentionPostNorm, layer)?,
        })
    }
}

impl<B: Backend> Latent<B> {
    /// What adapters change of it.
    pub(crate) fn changes(&mut self) -> &mut Changes<B> {
        &mut self.output_changes
    }

    /// `residual` += attention of it.
    pub(crate) fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        rope: Option<&Rope<B::Buf>>,
        kv: &mut B::Kv,
        a: &mut Activations<B>,
    ) -> Result<(), Error> {
        let config = &self.config;
        let x = branch_off(backend, step, self.norm.as_ref(), &a.residual, &mut a.branch)?;
        let LatentRoom { narrow, queries, row, latent, turned, absorbed, read, values } =
            &mut a.latent[self.room];
        match (&self.narrow, narrow) {
            (Some(own), Some([narrow, normed])) => {
                backend.linear(step, Rows::Tokens, &own.weight, None, x, narrow)?;
                backend.norm(step, Rows::Tokens, &own.norm, narrow, normed)?;
                backend.linear(step, Rows::Tokens, &self.queries, None, normed, queries)?;
            }
            _ => backend.linear(step, Rows::Tokens, &self.queries, None, x, queries)?,
        }
        backend.linear(step, Rows::Tokens, &self.rows, None, x, row)?;
        backend.norm(step, Rows::Tokens, &self.row_norm, row, latent)?;
        backend.linear(step, Rows::Tokens, &self.turned, None, x, turned)?;
        if let Some(rope) = rope {
            backend.rope(step, config.queries(), rope, queries)?;
            backend.rope(step, config.row(), rope, turned)?;
        }
        if let Some(temperature) = self.temperature {
            let columns = config.heads * config.query();
            backend.scale_by_position(step, temperature, columns, queries)?;
        }
        backend.latent_write(step, &self.attention, latent, turned, kv)?;
        let keys = HeadProducts { heads: config.heads, weight: &self.keys, column: config.turned };
        backend.head_products(step, &keys, queries, absorbed)?;
        backend.latent_attention(step, &self.attention, queries, absorbed, kv, read)?;
        let own_values = HeadProducts { heads: config.heads, weight: &self.values, column: 0 };
        backend.head_products(step, &own_values, read, values)?;
        let output = Linear { weight: &self.output, bias: None };
        let meeting = Meeting { branch: &mut a.branch, room: &mut a.room, residual: &mut a.residual };
        self.join.linear(backend, step, output, &self.output_changes, values, meeting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENT: LatentConfig = LatentConfig {
        heads: 2,
        query_rank: None,
        latent: 3,
        kept: 2,
        turned: 4,
        value: 5,
        rows: QkRows::Pairs,
    };

    #[test]
    fn what_turns_comes_first_and_in_halves() {
        let queries = vec![2, 4, 3, 5, 0, 1, 8, 10, 9, 11, 6, 7];
        assert_eq!(LatentPart::Queries.rows(&LATENT), Some((12, queries)));
        assert_eq!(LatentPart::Rows.rows(&LATENT), Some((7, vec![0, 1, 2])));
        assert_eq!(LatentPart::Turned.rows(&LATENT), Some((7, vec![3, 5, 4, 6])));
        let halves = LatentConfig { rows: QkRows::Halves, ..LATENT };
        assert_eq!(LatentPart::Turned.rows(&halves), Some((7, vec![3, 4, 5, 6])));
    }

    #[test]
    fn a_heads_keys_and_values_are_made_by_neighbours() {
        assert_eq!(LatentPart::Keys.of_head(&LATENT, 1), 7..9);
        assert_eq!(LatentPart::Values.of_head(&LATENT, 1), 9..14);
    }
}
