//! What mixes positions without keeping all of them: short convolutions, the gated delta rule, the selective scan.
//!
//! Each keeps a state of its sequence ([`KvKind::State`](crate::KvKind)), f32 values that lie as this file says: first the
//! last inputs of the layer's convolution, (taps - 1, channels), the newest last; then its matrices, head after head. The
//! columns of a matrix do not depend on each other. They lie in blocks of [`STATE_LANES`], (rows, lanes), and what is
//! missing at the end of the last block is padding.
//!
//! Every operation goes through a row's tokens one by one, in order, and each sum over a matrix's rows is one fixed tree. So
//! a token's bits do not depend on the chunk that it came in.

use crate::{KvLayer, Norm};

/// Columns of a matrix that lie, and are computed, side by side.
pub const STATE_LANES: usize = 16;

/// The most inputs that a short convolution sees.
pub const TAPS_MAX: usize = 8;

/// A convolution of each channel with its own past.
#[derive(Debug)]
pub struct ShortConv<Buf> {
    /// Where the layer's states are.
    pub layer: KvLayer,
    /// How many channels there are.
    pub channels: usize,
    /// Inputs that an output sees, its own included; at most [`TAPS_MAX`].
    pub taps: usize,
    /// (taps, channels), the oldest input's first, as one row of f32
    pub weight: Buf,
    /// (channels): what sums begin with, where there is one
    pub bias: Option<Buf>,
    /// What is convolved, and what is made of the sum.
    pub form: ConvForm,
}

/// What a short convolution reads and yields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConvForm {
    /// A row begins with the channels; `silu(sum)`.
    Silu,
    /// A row is b, c and x, as many channels each; `c * sum` of the past of `b * x`.
    Gated,
}

/// Heads of the gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaHeads {
    /// Heads of queries and keys.
    pub key: usize,
    /// Heads of values, each with a matrix; a multiple of `key`.
    pub value: usize,
    /// Values of a query or key: rows of a matrix.
    pub dim_k: usize,
    /// Values of a value: its columns.
    pub dim_v: usize,
    /// Which key head a value head reads.
    pub sharing: KeySharing,
}

/// How value heads share key heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeySharing {
    /// Neighbours share one: value head `h` of `n` to a key head reads `h / n`.
    Neighbours,
    /// They take turns: it reads `h` modulo the number of key heads.
    Turns,
}

/// The gated delta rule: a matrix of each value head forgets a share of itself, and learns where it is wrong about a key.
#[derive(Debug)]
pub struct DeltaRule<Buf> {
    /// Where the layer's states are.
    pub layer: KvLayer,
    /// Its heads.
    pub heads: DeltaHeads,
    /// Values of the state that lie before the matrices.
    pub before: usize,
    /// (value heads): less than zero; the matrix keeps `e^(rate * softplus(decay + bias))` of itself.
    pub rate: Buf,
    /// (value heads)
    pub bias: Buf,
}

/// Heads of the selective scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScanHeads {
    /// Heads, each with a matrix.
    pub heads: usize,
    /// Groups of neighbouring heads that share a key and a query (B and C of the papers).
    pub groups: usize,
    /// Values of a head: columns of a matrix.
    pub dim: usize,
    /// Values of a key or query: its rows.
    pub state: usize,
}

/// The selective scan of Mamba-2: a matrix of each head forgets a share of itself and takes in the token's values, both by
/// how long a step the token is.
#[derive(Debug)]
pub struct SelectiveScan<Buf> {
    /// Where the layer's states are.
    pub layer: KvLayer,
    /// Its heads.
    pub heads: ScanHeads,
    /// Values of the state that lie before the matrices.
    pub before: usize,
    /// (heads): less than zero; the matrix keeps `e^(rate * step)` of itself
    pub rate: Buf,
    /// (heads): what is added to steps
    pub bias: Buf,
    /// (heads): the share of the values that goes past the matrix
    pub skip: Buf,
}

/// The selective scan of Mamba-1: one matrix with a column for each channel, each of whose values forgets at a rate of its
/// own. How long a step is, each channel says for itself.
#[derive(Debug)]
pub struct ChannelScan<Buf> {
    /// Where the layer's states are.
    pub layer: KvLayer,
    /// Columns of the matrix.
    pub channels: usize,
    /// Values of a key or query: its rows.
    pub state: usize,
    /// Values of the state that lie before the matrix.
    pub before: usize,
    /// (state, channels), as one row: less than zero; a value of the matrix keeps `e^(rate * step)` of itself
    pub rates: Buf,
    /// (channels): what is added to steps
    pub bias: Buf,
    /// (channels): the share of the values that goes past the matrix
    pub skip: Buf,
}

/// What the selective scan of Mamba-1 reads of the tokens of a step.
#[derive(Debug)]
pub struct ChannelInputs<'a, Buf> {
    /// (tokens, channels)
    pub x: &'a Buf,
    /// (tokens, state)
    pub keys: &'a Buf,
    /// (tokens, state)
    pub queries: &'a Buf,
}

/// A gate for each of a row's values, and perhaps a norm of groups of them.
#[derive(Debug)]
pub struct GatedNorm<Buf> {
    /// By the root mean square, with a weight for each value of a group, or for each of a row; gates alone where there is none.
    pub norm: Option<Norm<Buf>>,
    /// How many values are normalised together.
    pub group: usize,
    /// Where the gates begin in their rows.
    pub column: usize,
    /// Which of both is first.
    pub order: GateOrder,
}

/// Whether a norm comes before its gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GateOrder {
    /// What is normalised is gated.
    NormFirst,
    /// What is gated is normalised.
    GatesFirst,
}

impl ConvForm {
    /// Columns of what is read, at least.
    pub fn columns(self, channels: usize) -> usize {
        match self {
            ConvForm::Silu => channels,
            ConvForm::Gated => 3 * channels,
        }
    }
}

/// Values of a state that a convolution takes.
pub fn conv_values(channels: usize, taps: usize) -> usize {
    taps.saturating_sub(1).saturating_mul(channels)
}

/// Values of a state that the matrix of a [`ChannelScan`] takes.
pub fn channel_values(state: usize, channels: usize) -> usize {
    matrix_values(state, channels)
}

/// Values of a matrix with its padding.
fn matrix_values(rows: usize, columns: usize) -> usize {
    columns.div_ceil(STATE_LANES).saturating_mul(STATE_LANES).saturating_mul(rows)
}

impl DeltaHeads {
    /// Columns of queries, keys and values side by side.
    pub fn columns(&self) -> usize {
        2 * self.key * self.dim_k + self.value * self.dim_v
    }

    /// Values of a state that its matrices take.
    pub fn state_values(&self) -> usize {
        matrix_values(self.dim_k, self.dim_v).saturating_mul(self.value)
    }
}

impl ScanHeads {
    /// Columns of values, keys and queries side by side.
    pub fn columns(&self) -> usize {
        self.heads * self.dim + 2 * self.groups * self.state
    }

    /// Values of a state that its matrices take.
    pub fn state_values(&self) -> usize {
        matrix_values(self.state, self.dim).saturating_mul(self.heads)
    }
}
