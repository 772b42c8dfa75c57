//! The operations of a device.

use crate::{
    Batch, ChannelInputs, ChannelScan, DeltaRule, Error, GatedNorm, HeadProducts, KvLayer, LatentAttention,
    Memory, Need, PageCopy, PageId, SampleRow, Sampled, SelectiveScan, ShortConv,
};

/// Which rows of the step an operation runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Every token of the batch.
    Tokens,
    /// Only the positions that want logits.
    Wanted,
}

/// Head counts of one attention layer. A fused QKV row is `query` heads, then `kv` key heads, then `kv` value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub query: usize,
    /// Key/value heads; `query` is a multiple of it.
    pub kv: usize,
    /// Values per head.
    pub dim: usize,
}

impl Heads {
    /// Columns of a fused QKV row.
    pub fn qkv_columns(&self) -> usize {
        (self.query + 2 * self.kv) * self.dim
    }
}

/// What a norm divides by, and whether it centres.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Values over the root of their mean square.
    Rms,
    /// Values less their mean, over their standard deviation.
    Layer,
}

/// Normalisation of a row.
#[derive(Debug)]
pub struct Norm<Buf> {
    /// What the row is divided by.
    pub kind: NormKind,
    /// One weight per column.
    pub weight: Buf,
    /// Added behind the weight: one value per column.
    pub bias: Option<Buf>,
    /// Added to the mean square, or to the variance.
    pub eps: f32,
}

impl<Buf> Norm<Buf> {
    /// By the root mean square, without a bias.
    pub fn rms(weight: Buf, eps: f32) -> Norm<Buf> {
        Norm { kind: NormKind::Rms, weight, bias: None, eps }
    }
}

/// Norms of queries and keys before they are rotated, and of values. The number of weights says what is normalised at once:
/// a head, with the same weights for all of them, or all heads together.
#[derive(Debug)]
pub struct QkNorm<Buf> {
    /// Of the query heads.
    pub query: Norm<Buf>,
    /// Of the key heads.
    pub key: Norm<Buf>,
    /// Of the value heads, which few models normalise.
    pub value: Option<Norm<Buf>>,
}

/// Rotary embedding. Pairs are split halves: value `i` rotates with value `i + n` where `n` is the number of
/// frequencies; weights of models that pair neighbours have their rows reordered at load.
#[derive(Debug)]
pub struct Rope<Buf> {
    /// Radians per position for each pair; fewer than `dim / 2` leave the rest of a head unrotated.
    pub frequencies: Buf,
    /// How many frequencies there are.
    pub pairs: usize,
    /// Multiplies sine and cosine (yarn's attention factor); 1 elsewhere.
    pub magnitude: f32,
    /// By pair, which section of a token's position turns it ([`Batch::sections`]; 0 is [`Batch::positions`]). Empty where
    /// that is the first for all of them; where a batch has no further sections, it is so, too.
    pub sections: Vec<u8>,
}

/// How much queries grow with their positions, which keeps attention sharp in long contexts: a query at position `p` is
/// multiplied by `1 + beta * ln(1 + n)`, where `n` is how many whole lengths fit into `p + offset`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// How much it grows.
    pub beta: f32,
    /// The length, in positions; at least one.
    pub length: u32,
    /// Added to positions.
    pub offset: u32,
}

impl Temperature {
    /// What queries at a position are multiplied by.
    pub fn at(&self, position: u32) -> f32 {
        let lengths = (u64::from(position) + u64::from(self.offset)) / u64::from(self.length);
        (1.0 + f64::from(self.beta) * (lengths as f64).ln_1p()) as f32
    }
}

/// What attention over pages needs beside its data.
#[derive(Clone, Copy, Debug)]
pub struct Attention<Buf> {
    /// The layer's heads.
    pub heads: Heads,
    /// Where the layer's pages are; the group knows its window.
    pub layer: KvLayer,
    /// Multiplies query-key products.
    pub scale: f32,
    /// Scaled products `s` become `cap * tanh(s / cap)`.
    pub soft_cap: Option<f32>,
    /// One logit per query head that takes its share of the softmax and adds nothing to the output.
    pub sinks: Option<Buf>,
    /// Whether a query sees its own position and those before it only. Otherwise it sees every position up to its row's
    /// last: such rows hold their whole sequence.
    pub causal: bool,
    /// Whether a query sees as far as the batch says ([`Batch::lasts`](crate::Batch)), where it says it; layers of one
    /// model may differ in it.
    pub ahead: bool,
    /// How many positions before its own, and how many behind it, a query sees that is not causal; all of its row where there
    /// is none. Its group has no window then.
    pub reach: Option<u32>,
    /// Where sequences are cut into chunks of so many positions, and a query sees nothing before its own. Its group has a window
    /// that is as long, so that pages which nobody sees any more go.
    pub chunk: Option<u32>,
}

impl<Buf> Attention<Buf> {
    /// Causal, with neither cap nor sinks.
    pub fn causal(heads: Heads, layer: KvLayer, scale: f32) -> Attention<Buf> {
        Attention {
            heads,
            layer,
            scale,
            soft_cap: None,
            sinks: None,
            causal: true,
            ahead: true,
            reach: None,
            chunk: None,
        }
    }
}

/// The activation inside a gated feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Glu {
    /// `silu(gate) * up`.
    Silu,
    /// `gelu(gate) * up`.
    Gelu,
    /// Like `Gelu`, by its approximation with tanh.
    GeluTanh,
    /// `gate * sigmoid(1.702 gate) * (up + 1)`, of a gate of at most 7 and an up of -7 to 7.
    Clamped,
}

/// A function of each value alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pointwise {
    /// Times this.
    Scale(f32),
    /// `cap * tanh(x / cap)`.
    SoftCap(f32),
    /// `x` times the probability that a standard normal number is less.
    Gelu,
    /// The approximation of `Gelu` with tanh.
    GeluTanh,
    /// `x` where it is above zero, else zero.
    Relu,
    /// The square of that.
    ReluSquared,
    /// Above zero `positive * x^2 + beta * x`; else `negative * (e^min(x, eps) - 1 - x) + beta * x`.
    Xielu {
        /// Of the square.
        positive: f32,
        /// Of the exponential.
        negative: f32,
        /// Of the value itself.
        beta: f32,
        /// What the exponential's argument is at most; below zero.
        eps: f32,
    },
}

/// How the rows of a sequence become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first.
    First,
    /// The last.
    Last,
}

/// A weight with its bias.
#[derive(Debug)]
pub struct Linear<'a, M: Memory + ?Sized> {
    /// (out, in)
    pub weight: &'a M::Weight,
    /// (out)
    pub bias: Option<&'a M::Buf>,
}

/// How a token's experts are chosen: those with the largest scores; among equal scores those with the lowest numbers. A
/// correction may be added to the scores for the choice; weights are made of the scores as they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts there are; at most [`ROUTED_MAX`].
    pub experts: usize,
    /// How many of them a token takes.
    pub chosen: usize,
    /// What a router's logits become.
    pub scores: Scores,
    /// The groups that the experts are in, if they are.
    pub groups: Option<Groups>,
    /// What the weights of the chosen are shares of.
    pub shares: Shares,
    /// Added to what [`Shares::OfChosen`] divides by.
    pub added: f32,
    /// What it divides by is at least this.
    pub least: f32,
    /// Multiplies the weights.
    pub scale: f32,
}

impl Routing {
    /// Scores by softmax, and nothing else.
    pub const fn plain(experts: usize, chosen: usize, shares: Shares) -> Routing {
        let (scores, groups) = (Scores::Softmax, None);
        Routing { experts, chosen, scores, groups, shares, added: 0.0, least: 0.0, scale: 1.0 }
    }

    /// Whether the choice takes more than the order of the logits.
    pub fn chooses_by_score(&self, corrected: bool) -> bool {
        corrected || self.groups.is_some()
    }

    /// Whether weights take the scores of all experts.
    pub fn weighs_by_all(&self) -> bool {
        self.shares == Shares::OfAll || self.added != 0.0 || self.least != 0.0
    }
}

/// The most experts that a router chooses from.
pub const ROUTED_MAX: usize = 1024;

/// What a router's logits become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// `1 / (1 + exp(-logit))`, each alone.
    Sigmoid,
    /// The root of `ln(1 + exp(logit))`, each alone.
    SqrtSoftplus,
}

/// Groups of experts, equal in size, one behind the other. A token's experts are of its best groups; among equal groups
/// the first are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// How many there are.
    pub count: usize,
    /// How many of them a token's experts are of.
    pub chosen: usize,
    /// Whether a group is as good as its two best experts together, and not as its best one.
    pub by_two: bool,
}

/// What an expert's weight is a share of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shares {
    /// Of all there is, which is the score itself: of softmax the weights of the chosen add up to less than one.
    OfAll,
    /// Of the chosen experts' scores: their weights add up to one.
    OfChosen,
}

/// The weights of a layer's experts, each uploaded by [`upload_experts`](Memory::upload_experts).
#[derive(Debug)]
pub struct Experts<'a, M: Memory + ?Sized> {
    /// How many experts there are.
    pub count: usize,
    /// (experts, 2 ffn, hidden): of each expert gate, then up; (experts, ffn, hidden) where there are no gates.
    pub gate_up: &'a M::Weight,
    /// (experts x 2 ffn), or (experts x ffn)
    pub gate_up_bias: Option<&'a M::Buf>,
    /// (experts, hidden, ffn)
    pub down: &'a M::Weight,
    /// (experts x hidden)
    pub down_bias: Option<&'a M::Buf>,
    /// What is between them.
    pub between: Between,
    /// Whether a token's weights multiply what its experts read, and not what they make of it.
    pub weighs_inputs: bool,
}

/// What is between an expert's two products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Between {
    /// Half of the first product gates the other half.
    Gates(Glu),
    /// A function of each value. Not every backend has it ([`Need::PlainExperts`](crate::Need)).
    Function(Pointwise),
}

impl Between {
    /// Columns of the first product where the second reads `ffn`.
    pub const fn columns(self, ffn: usize) -> usize {
        match self {
            Between::Gates(_) => 2 * ffn,
            Between::Function(_) => ffn,
        }
    }
}

/// Room for what experts compute on the way, a row for each expert of each token.
#[derive(Debug)]
pub struct ExpertRoom<Buf> {
    /// (tokens x chosen, hidden)
    pub rows: Buf,
    /// (tokens x chosen, 2 ffn); nobody's business where there are no gates.
    pub gate_up: Buf,
    /// (tokens x chosen, ffn)
    pub gated: Buf,
}

/// What one adapter adds to a product with a weight, or to some of its columns: `scale * up (down x)`.
#[derive(Debug)]
pub struct LowRank<Buf> {
    /// (rank x in), row after row, as one row of f32
    pub down: Buf,
    /// (out x rank), row after row, as one row of f32
    pub up: Buf,
    /// At most [`RANK_MAX`].
    pub rank: usize,
    /// Multiplies the whole.
    pub scale: f32,
    /// The first column of the product that it changes.
    pub column: usize,
    /// How many columns it changes.
    pub columns: usize,
}

/// The largest rank of an adapter.
pub const RANK_MAX: usize = 512;

/// What a finished step yields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// One per sampled row, in the order given to `sample`.
    pub sampled: Vec<Sampled>,
}

/// A device that computes. The required operations are few; fused ones are provided methods made of them, which a
/// backend overrides where that saves a pass over memory, with results inside the same bounds.
///
/// Outputs are fully written over the step's rows; rows beyond them are left alone.
pub trait Backend: Memory {
    /// One of the preallocated slots that hold, on the device, everything of a batch that varies.
    type Step;

    /// A short name for messages: `cpu`, `cuda:0`.
    fn name(&self) -> &'static str;

    /// Checks the batch against what was allocated and places it on the device.
    fn begin(&self, batch: &Batch) -> Result<Self::Step, Error>;
    /// Runs `body`, or replays what an earlier run of the step's bucket recorded. `body` sees only the step, and neither
    /// allocates nor frees: a backend may do several of its operations at once, when the next is known.
    fn record(&self, step: &Self::Step, body: &mut dyn FnMut() -> Result<(), Error>) -> Result<(), Error>;
    /// Waits for this step only and frees its slot.
    fn finish(&self, step: Self::Step) -> Result<Output, Error>;

    /// Copies `values` into `buf` from row `row` on.
    fn write(&self, buf: &mut Self::Buf, row: usize, values: &[f32]) -> Result<(), Error>;
    /// Reads `rows` whole rows from row `row` on.
    fn read(&self, buf: &Self::Buf, row: usize, rows: usize) -> Result<Vec<f32>, Error>;

    /// A page of a group, over all its layers, as bytes. What steps in flight write to it may be missing.
    fn copy_out(&self, kv: &Self::Kv, group: usize, page: PageId) -> Result<PageCopy, Error> {
        let _ = (kv, group, page);
        Err(Error::Unsupported { what: "copying pages out".to_owned(), backend: self.name() })
    }
    /// Places such bytes in a page that no step in flight uses; those of another layout are refused.
    fn copy_in(&self, kv: &mut Self::Kv, group: usize, page: PageId, copy: &PageCopy) -> Result<(), Error> {
        let _ = (kv, group, page, copy);
        Err(Error::Unsupported { what: "copying pages in".to_owned(), backend: self.name() })
    }

    /// `out` = the table's row of each token, or the first values of the given one. (tokens, hidden)
    fn embed(&self, step: &Self::Step, table: &Self::Weight, out: &mut Self::Buf) -> Result<(), Error>;
    /// `out[r][n]` = sum over k of `x[r][k] * weight[n][k]`.
    fn matmul(
        &self,
        step: &Self::Step,
        rows: Rows,
        weight: &Self::Weight,
        x: &Self::Buf,
        out: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// `x` += `vector` in every row.
    fn add_vector(
        &self,
        step: &Self::Step,
        rows: Rows,
        vector: &Self::Buf,
        x: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// `x` += `y`.
    fn add(&self, step: &Self::Step, rows: Rows, y: &Self::Buf, x: &mut Self::Buf) -> Result<(), Error>;
    /// `x` += the table's row of each token's position. (tokens, hidden)
    fn add_positions(&self, step: &Self::Step, table: &Self::Weight, x: &mut Self::Buf) -> Result<(), Error>;
    /// `x` = a function of each of its values.
    fn pointwise(
        &self,
        step: &Self::Step,
        rows: Rows,
        function: Pointwise,
        x: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// Brings every value of `x` within the bounds of its column: those that it is at least, and behind them those
    /// that it is at most, (2 x columns).
    fn clamp(&self, step: &Self::Step, bounds: &Self::Buf, x: &mut Self::Buf) -> Result<(), Error> {
        let _ = (step, bounds, x);
        Err(Error::Unsupported { what: Need::Clamp.to_string(), backend: self.name() })
    }
    /// Every row of `x` times `factors`, column by column.
    fn scale_columns(&self, step: &Self::Step, factors: &Self::Buf, x: &mut Self::Buf) -> Result<(), Error> {
        let _ = (step, factors, x);
        Err(Error::Unsupported { what: Need::ColumnFactors.to_string(), backend: self.name() })
    }
    /// `out` = the norm of `x`, row by row.
    fn norm(
        &self,
        step: &Self::Step,
        rows: Rows,
        norm: &Norm<Self::Buf>,
        x: &Self::Buf,
        out: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// Normalises the query and key heads of each fused QKV row, and perhaps the value heads.
    fn qk_norm(
        &self,
        step: &Self::Step,
        heads: Heads,
        norm: &QkNorm<Self::Buf>,
        qkv: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// Rotates the query and key heads of each fused QKV row by its position.
    fn rope(
        &self,
        step: &Self::Step,
        heads: Heads,
        rope: &Rope<Self::Buf>,
        qkv: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// Stores each row's keys and values in the pages of its position.
    fn kv_write(
        &self,
        step: &Self::Step,
        heads: Heads,
        layer: KvLayer,
        qkv: &Self::Buf,
        kv: &mut Self::Kv,
    ) -> Result<(), Error>;
    /// Attention of each row's queries over its sequence's pages. `out` is (tokens, query heads x dim). `qkv` has fused QKV
    /// rows, or queries alone where the keys are another layer's ([`Need::SharedKeys`](crate::Need)).
    fn attention(
        &self,
        step: &Self::Step,
        attention: &Attention<Self::Buf>,
        qkv: &Self::Buf,
        kv: &Self::Kv,
        out: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// `out` = activation(first half of the row) * second half of the row.
    fn glu(
        &self,
        step: &Self::Step,
        kind: Glu,
        gate_up: &Self::Buf,
        out: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// `x` += sigmoid(`gate`) * `y`, row by row. `gate` has one column.
    fn add_gated(
        &self,
        step: &Self::Step,
        gate: &Self::Buf,
        y: &Self::Buf,
        x: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// Chooses each token's experts. `logits` is (tokens, experts), `correction` (experts). A row of `chosen` is the
    /// numbers of the chosen experts, ascending, then their weights in the same order; its purpose is one of full
    /// precision.
    fn route(
        &self,
        step: &Self::Step,
        routing: &Routing,
        logits: &Self::Buf,
        correction: Option<&Self::Buf>,
        chosen: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// `residual` += for each token the weighted sum of what its chosen experts make of `x`, added up in the order of
    /// the experts' numbers. What `room` holds afterwards is nobody's business.
    fn experts(
        &self,
        step: &Self::Step,
        experts: &Experts<'_, Self>,
        chosen: &Self::Buf,
        x: &Self::Buf,
        room: &mut ExpertRoom<Self::Buf>,
        residual: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// `out` = the rows of `x` that want logits, in batch order.
    fn gather_wanted(&self, step: &Self::Step, x: &Self::Buf, out: &mut Self::Buf) -> Result<(), Error>;
    /// `out` has a row for each position that wants logits, in batch order: its sequence's tokens of this step, pooled.
    fn pool(
        &self,
        step: &Self::Step,
        pooling: Pooling,
        x: &Self::Buf,
        out: &mut Self::Buf,
    ) -> Result<(), Error>;
    /// Chooses one token per row and leaves it in its slot, where `Token::Sampled` of a later step finds it.
    fn sample(&self, step: &mut Self::Step, logits: &Self::Buf, rows: &[SampleRow<'_>]) -> Result<(), Error>;

    /// `out` += what the adapter of each token's sequence ([`Batch::adapters`]) adds to the product of `x`: `changes` has
    /// a list for each adapter. Rows without an adapter are left alone. A backend that does not have it says so
    /// ([`Need::LowRank`](crate::Need)), and models with adapters are refused there.
    fn low_rank(
        &self,
        step: &Self::Step,
        changes: &[Vec<LowRank<Self::Buf>>],
        x: &Self::Buf,
        out: &mut Self::Buf,
    ) -> Result<(), Error> {
        let _ = (step, changes, x, out);
        Err(Error::Unsupported { what: Need::LowRank.to_string(), backend: self.name() })
    }

    /// `out` = the convolution of each channel of `x` with its past, which the row's state has and is left with
    /// ([`Batch::states`]). `x` is (tokens, at least [`ConvForm::columns`](crate::ConvForm)), `out` (tokens, channels).
    fn short_conv(
        &self,
        step: &Self::Step,
        conv: &ShortConv<Self::Buf>,
        x: &Self::Buf,
        kv: &mut Self::Kv,
        out: &mut Self::Buf,
    ) -> Result<(), Error> {
        let _ = (step, conv, x, kv, out);
        Err(Error::Unsupported { what: Need::ShortConv.to_string(), backend: self.name() })
    }

    /// `out` = what each value head's matrix S says about its query, after the row's tokens have changed it one by one:
    ///
    /// ```text
    /// q, k = their values over the root of (the sum of their squares + 1e-6); q over the root of its dimension
    /// S    = S * e^(rate * softplus(decay + bias))
    /// S    = S + k (v - S' k)' * sigmoid(beta)
    /// out  = S' q
    /// ```
    ///
    /// `qkv` is (tokens, queries, keys, values). A row of `mixed` ends with the value heads' betas, then their decays.
    /// `out` is (tokens, value heads x `dim_v`). What `qkv` and the betas and decays hold afterwards is nobody's business.
    fn delta_rule(
        &self,
        step: &Self::Step,
        rule: &DeltaRule<Self::Buf>,
        qkv: &mut Self::Buf,
        mixed: &mut Self::Buf,
        kv: &mut Self::Kv,
        out: &mut Self::Buf,
    ) -> Result<(), Error> {
        let _ = (step, rule, qkv, mixed, kv, out);
        Err(Error::Unsupported { what: Need::DeltaRule.to_string(), backend: self.name() })
    }

    /// `out` = what each head's matrix S says about the token's query, after the row's tokens have changed it one by one:
    ///
    /// ```text
    /// t    = softplus(step + bias)
    /// S    = S * e^(rate * t) + k (v * t)'
    /// out  = S' q + v * skip
    /// ```
    ///
    /// `x` is (tokens, values, keys, queries). A row of `mixed` ends with the heads' steps. `out` is (tokens, heads x `dim`).
    /// What the steps hold afterwards is nobody's business.
    fn selective_scan(
        &self,
        step: &Self::Step,
        scan: &SelectiveScan<Self::Buf>,
        x: &Self::Buf,
        mixed: &mut Self::Buf,
        kv: &mut Self::Kv,
        out: &mut Self::Buf,
    ) -> Result<(), Error> {
        let _ = (step, scan, x, mixed, kv, out);
        Err(Error::Unsupported { what: Need::SelectiveScan.to_string(), backend: self.name() })
    }

    /// Takes each channel of `x` through its column of the row's matrix, token by token: each value of the column keeps
    /// `e^(rate * step)` of itself, with `step = softplus(steps + bias)`, and takes in `step * x` times the key's value.
    /// `out` = what the query reads of the column, and [`ChannelScan::skip`] of `x`. `steps` and `out` are (tokens, channels).
    /// What the steps hold afterwards is nobody's business.
    fn channel_scan(
        &self,
        step: &Self::Step,
        scan: &ChannelScan<Self::Buf>,
        inputs: &ChannelInputs<'_, Self::Buf>,
        steps: &mut Self::Buf,
        kv: &mut Self::Kv,
        out: &mut Self::Buf,
    ) -> Result<(), Error> {
        let _ = (step, scan, inputs, steps, kv, out);
        Err(Error::Unsupported { what: Need::ChannelScan.to_string(), backend: self.name() })
    }

    /// `x` = the norm of each group of its values, times `silu` of the gates, in the order that [`GatedNorm::order`] says.
    /// `gates` has as many columns from [`GatedNorm::column`] on as `x`, and perhaps more.
    fn gated_norm(
        &self,
        step: &Self::Step,
        norm: &GatedNorm<Self::Buf>,
        gates: &Self::Buf,
        x: &mut Self::Buf,
    ) -> Result<(), Error> {
        let _ = (step, norm, gates, x);
        Err(Error::Unsupported { what: Need::GatedNorm.to_string(), backend: self.name() })
    }

    /// `x` = `x` * sigmoid(`gates`), value by value.
    fn sigmoid_gate(&self, step: &Self::Step, gates: &Self::Buf, x: &mut Self::Buf) -> Result<(), Error> {
        let _ = (step, gates, x);
        Err(Error::Unsupported { what: Need::SigmoidGate.to_string(), backend: self.name() })
    }

    /// `gate` = activation(`gate`) * the columns of `up` from `column` on, which is wider. (tokens, columns)
    fn glu_beside(
        &self,
        step: &Self::Step,
        kind: Glu,
        up: &Self::Buf,
        column: usize,
        gate: &mut Self::Buf,
    ) -> Result<(), Error> {
        let _ = (step, kind, up, column, gate);
        Err(Error::Unsupported { what: Need::LayerEmbeddings.to_string(), backend: self.name() })
    }

    /// `out` = the table's row of each token, of a table that is not the model's embedding: where a row is given in
    /// place of a token, that of `stand_in`. (tokens, columns)
    fn look_up(
        &self,
        step: &Self::Step,
        table: &Self::Weight,
        stand_in: u32,
        out: &mut Self::Buf,
    ) -> Result<(), Error> {
        // Where no rows are given there is nothing to stand in for.
        let _ = stand_in;
        self.embed(step, table, out)
    }

    /// `x` += the values of given rows from `column` on, where a row is given in place of a token; other tokens are left
    /// alone. (tokens, hidden)
    fn add_given(&self, step: &Self::Step, column: usize, x: &mut Self::Buf) -> Result<(), Error> {
        let _ = (step, column, x);
        Err(Error::Unsupported { what: Need::GivenRows.to_string(), backend: self.name() })
    }

    /// Multiplies the weights of each token's chosen experts by what `scales` has for these experts.
    fn scale_chosen(
        &self,
        step: &Self::Step,
        scales: &Self::Buf,
        chosen: &mut Self::Buf,
    ) -> Result<(), Error> {
        let _ = (step, scales, chosen);
        Err(Error::Unsupported { what: Need::ExpertScales.to_string(), backend: self.name() })
    }

    /// Multiplies the first `columns` columns of each row of `x` by what [`Temperature::at`] says of its position.
    fn scale_by_position(
        &self,
        step: &Self::Step,
        temperature: Temperature,
        columns: usize,
        x: &mut Self::Buf,
    ) -> Result<(), Error> {
        let _ = (step, temperature, columns, x);
        Err(Error::Unsupported { what: Need::Temperature.to_string(), backend: self.name() })
    }

    /// `out` = for each head the product of its matrix with its share of `x`. `x` is (tokens, heads x each), where a head's
    /// share has the matrix's columns from [`HeadProducts::column`] on, and perhaps others around them; `out` is (tokens,
    /// heads x the matrix's rows).
    fn head_products(
        &self,
        step: &Self::Step,
        products: &HeadProducts<'_, Self>,
        x: &Self::Buf,
        out: &mut Self::Buf,
    ) -> Result<(), Error> {
        let _ = (step, products, x, out);
        Err(Error::Unsupported { what: Need::Latent.to_string(), backend: self.name() })
    }

    /// Stores each token's row in the page of its position: the latent values, (tokens, latent), and the turned ones, (tokens,
    /// turned).
    fn latent_write(
        &self,
        step: &Self::Step,
        attention: &LatentAttention,
        latent: &Self::Buf,
        turned: &Self::Buf,
        kv: &mut Self::Kv,
    ) -> Result<(), Error> {
        let _ = (step, attention, latent, turned, kv);
        Err(Error::Unsupported { what: Need::Latent.to_string(), backend: self.name() })
    }

    /// Attention of each token's queries over its sequence's rows. What a query meets the latent values with is in
    /// `absorbed`, (tokens, query heads x latent); what it meets the turned ones with begins each head's share of `queries`,
    /// (tokens, query heads x at least turned). `out` = what is read of the latent values, (tokens, query heads x latent).
    fn latent_attention(
        &self,
        step: &Self::Step,
        attention: &LatentAttention,
        queries: &Self::Buf,
        absorbed: &Self::Buf,
        kv: &Self::Kv,
        out: &mut Self::Buf,
    ) -> Result<(), Error> {
        let _ = (step, attention, queries, absorbed, kv, out);
        Err(Error::Unsupported { what: Need::Latent.to_string(), backend: self.name() })
    }

    /// `matmul`, then `add_vector` when there is a bias.
    fn linear(
        &self,
        step: &Self::Step,
        rows: Rows,
        weight: &Self::Weight,
        bias: Option<&Self::Buf>,
        x: &Self::Buf,
        out: &mut Self::Buf,
    ) -> Result<(), Error> {
        self.matmul(step, rows, weight, x, out)?;
        match bias {
            Some(bias) => self.add_vector(step, rows, bias, out),
            None => Ok(()),
        }
    }

    /// `residual` += `linear` of `x`. `room` has the residual's shape; what it holds afterwards is nobody's business.
    fn linear_add(
        &self,
        step: &Self::Step,
        rows: Rows,
        linear: Linear<'_, Self>,
        x: &Self::Buf,
        room: &mut Self::Buf,
        residual: &mut Self::Buf,
    ) -> Result<(), Error> {
        self.linear(step, rows, linear.weight, linear.bias, x, room)?;
        self.add(step, rows, room, residual)
    }

    /// `rope` where there is one, `kv_write`, `attention`. What `qkv` holds afterwards is nobody's business.
    fn attend(
        &self,
        step: &Self::Step,
        attention: &Attention<Self::Buf>,
        rope: Option<&Rope<Self::Buf>>,
        qkv: &mut Self::Buf,
        kv: &mut Self::Kv,
        out: &mut Self::Buf,
    ) -> Result<(), Error> {
        if let Some(rope) = rope {
            self.rope(step, attention.heads, rope, qkv)?;
        }
        self.kv_write(step, attention.heads, attention.layer, qkv, kv)?;
        self.attention(step, attention, qkv, kv, out)
    }
}
