//! Latent attention: the keys and values of all heads are made of one row a token, and that row is all the cache keeps.
//!
//! A row is latent values, which are normalised, and behind them values that turn with the position
//! ([`KvKind::Latent`](crate::KvKind)). A head's keys are a matrix times the latent values, then the turned ones; its values
//! are another matrix times the latent ones. Neither is ever made: a query goes through the transpose of the first matrix
//! before it meets the rows, and what it has read of the latent values goes through the second one afterwards
//! ([`head_products`](crate::Backend::head_products)). So a row is a key that all heads share, and its first values are
//! the value that they share. It is done in this way for prompts and for single tokens, so that a token's bits do not
//! depend on how it came in.

use crate::{KvLayer, Memory};

/// Heads of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LatentHeads {
    /// Query heads.
    pub query: usize,
    /// Values of a row that keys and values are made of.
    pub latent: usize,
    /// Values behind them that turn with the position.
    pub turned: usize,
}

impl LatentHeads {
    /// Values of a row.
    pub fn width(&self) -> usize {
        self.latent + self.turned
    }
}

/// What latent attention needs beside its data.
#[derive(Clone, Copy, Debug)]
pub struct LatentAttention {
    /// The layer's heads.
    pub heads: LatentHeads,
    /// Where the layer's rows are; the group knows its window.
    pub layer: KvLayer,
    /// Multiplies the products of queries with rows.
    pub scale: f32,
}

/// A matrix for each head, which multiplies that head's share of a row.
#[derive(Debug)]
pub struct HeadProducts<'a, M: Memory + ?Sized> {
    /// How many heads there are.
    pub heads: usize,
    /// (heads, out, in), uploaded by [`upload_heads`](Memory::upload_heads).
    pub weight: &'a M::Weight,
    /// Where what is multiplied begins in a head's share of a row.
    pub column: usize,
}
