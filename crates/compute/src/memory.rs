//! Device memory by purpose, and the counting memory that makes a plan from it.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;

use fornax_format::{DType, View};

use crate::landing::{Content, land};
use crate::{Attention, Error, Glu, KvGroup, KvSpec, LatentAttention};

/// What bytes are for. Plan, health and allocator all report by these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Purpose {
    /// Model weights.
    Weights,
    /// Keys and values.
    Kv,
    /// The residual stream: full precision on every backend.
    Residual,
    /// Other activations: the backend's working precision.
    Activations,
    /// Rows of logits: f32.
    Logits,
    /// The backend's own scratch, and its step slots.
    Workspace,
}

impl Purpose {
    /// Every purpose, in report order.
    pub const ALL: [Purpose; 6] = [
        Purpose::Weights,
        Purpose::Kv,
        Purpose::Residual,
        Purpose::Activations,
        Purpose::Logits,
        Purpose::Workspace,
    ];
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Purpose::Weights => "weights",
            Purpose::Kv => "kv",
            Purpose::Residual => "residual",
            Purpose::Activations => "activations",
            Purpose::Logits => "logits",
            Purpose::Workspace => "workspace",
        })
    }
}

/// Bytes in use by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    bytes: [u64; Purpose::ALL.len()],
}

impl Usage {
    /// Counts `bytes` more for `purpose`.
    pub fn add(&mut self, purpose: Purpose, bytes: u64) {
        self.bytes[purpose as usize] += bytes;
    }

    /// Counts `bytes` fewer for `purpose`.
    pub fn subtract(&mut self, purpose: Purpose, bytes: u64) {
        let counted = &mut self.bytes[purpose as usize];
        *counted = counted.checked_sub(bytes).expect("freed more than was counted");
    }

    /// This and another's together.
    pub fn and(mut self, other: &Usage) -> Usage {
        for (bytes, more) in self.bytes.iter_mut().zip(other.bytes) {
            *bytes += more;
        }
        self
    }

    /// Bytes for one purpose.
    pub fn bytes(&self, purpose: Purpose) -> u64 {
        self.bytes[purpose as usize]
    }

    /// Bytes for all purposes.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

/// Where a weight lies while it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightPlace {
    /// In the memory of the device that multiplies by it.
    #[default]
    Device,
    /// In the host's memory, beside a device that has its own.
    Host,
    /// In its file, from which it is read when it is needed.
    File,
}

impl WeightPlace {
    /// What a backend must have for weights there that it multiplies by.
    pub fn need(self) -> Option<Need> {
        match self {
            WeightPlace::Device => None,
            WeightPlace::Host => Some(Need::HostWeights),
            WeightPlace::File => Some(Need::FileWeights),
        }
    }
}

/// A stored tensor on its way into a weight.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    /// The stored values: (rows, columns), or (values) for a vector.
    pub view: View<'a>,
    /// For each output row, the stored row it takes; `None` keeps the stored order. Containers differ in the row
    /// order of Q and K; the order of rows is settled here, once, so that operations know one order only.
    pub rows: Option<Vec<u32>>,
    /// The columns it takes, in whole blocks; `None` takes all. They are cut out on the way in (`landing.rs`), so a backend
    /// sees a matrix of fewer columns.
    pub columns: Option<Range<usize>>,
    /// Rows and columns of the weight that this is a shard of. A backend whose order of summation follows from a weight's
    /// shape takes it from here, so that a shard is summed as the same columns of the whole are.
    pub whole: Option<[usize; 2]>,
    /// Where the weight is to lie; the same for all its parts.
    pub place: WeightPlace,
}

impl<'a> From<View<'a>> for Part<'a> {
    fn from(view: View<'a>) -> Self {
        Part { view, rows: None, columns: None, whole: None, place: WeightPlace::Device }
    }
}

/// Query heads of a head of keys, and values of all these, up to which every backend has attention.
pub const GROUP_MAX: usize = 16;
/// The values.
pub const GROUP_VALUES_MAX: usize = 2048;

/// Something that not every model asks for and not every backend has. Loading asks for all of it first, so that a model
/// is refused before it is loaded and not in the middle of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Need {
    /// [`NormKind::Layer`](crate::NormKind), or a norm with a bias.
    LayerNorm,
    /// [`qk_norm`](crate::Backend::qk_norm).
    QkNorm,
    /// [`add_positions`](crate::Backend::add_positions).
    Positions,
    /// [`pointwise`](crate::Backend::pointwise).
    Pointwise,
    /// [`Glu::Gelu`](crate::Glu) and its approximation.
    Gelu,
    /// A cap on attention's scores.
    SoftCap,
    /// Attention sinks.
    Sinks,
    /// Attention that is not causal.
    BothDirections,
    /// [`Attention::reach`](crate::Attention).
    Reach,
    /// [`pool`](crate::Backend::pool).
    Pooling,
    /// [`route`](crate::Backend::route), [`experts`](crate::Backend::experts) and
    /// [`add_gated`](crate::Backend::add_gated), and [`Glu::Clamped`](crate::Glu).
    Experts,
    /// [`low_rank`](crate::Backend::low_rank).
    LowRank,
    /// [`Batch::given`](crate::Batch), and [`add_given`](crate::Backend::add_given).
    GivenRows,
    /// [`Batch::sections`](crate::Batch), and [`Rope::sections`](crate::Rope).
    Sections,
    /// [`Batch::lasts`](crate::Batch).
    LastSeen,
    /// [`Batch::states`](crate::Batch).
    States,
    /// [`short_conv`](crate::Backend::short_conv).
    ShortConv,
    /// [`delta_rule`](crate::Backend::delta_rule).
    DeltaRule,
    /// [`selective_scan`](crate::Backend::selective_scan).
    SelectiveScan,
    /// [`channel_scan`](crate::Backend::channel_scan).
    ChannelScan,
    /// [`scale_columns`](crate::Backend::scale_columns).
    ColumnFactors,
    /// [`gated_norm`](crate::Backend::gated_norm).
    GatedNorm,
    /// [`sigmoid_gate`](crate::Backend::sigmoid_gate).
    SigmoidGate,
    /// [`attention`](crate::Backend::attention) of rows that hold queries alone.
    SharedKeys,
    /// Attention of more than [`GROUP_MAX`] query heads, or more than [`GROUP_VALUES_MAX`] of their values, to a head of keys.
    WideGroups,
    /// [`glu_beside`](crate::Backend::glu_beside).
    LayerEmbeddings,
    /// [`scale_chosen`](crate::Backend::scale_chosen).
    ExpertScales,
    /// [`Between::Function`](crate::Between).
    PlainExperts,
    /// [`head_products`](crate::Backend::head_products), [`latent_write`](crate::Backend::latent_write) and
    /// [`latent_attention`](crate::Backend::latent_attention).
    Latent,
    /// [`scale_by_position`](crate::Backend::scale_by_position).
    Temperature,
    /// [`Attention::chunk`](crate::Attention).
    Chunks,
    /// [`Experts::weighs_inputs`](crate::Experts).
    WeighedInputs,
    /// [`Pointwise::Xielu`](crate::Pointwise).
    Xielu,
    /// Products with weights of type FP8_A8.
    Floats8,
    /// [`clamp`](crate::Backend::clamp).
    Clamp,
    /// [`WeightPlace::Host`] of a table whose rows are looked up.
    HostTables,
    /// [`WeightPlace::Host`] of what is multiplied by.
    HostWeights,
    /// [`WeightPlace::File`].
    FileWeights,
}

impl Need {
    /// Every one.
    pub const ALL: [Need; 38] = [
        Need::LayerNorm,
        Need::QkNorm,
        Need::Positions,
        Need::Pointwise,
        Need::Gelu,
        Need::SoftCap,
        Need::Sinks,
        Need::BothDirections,
        Need::Reach,
        Need::Pooling,
        Need::Experts,
        Need::LowRank,
        Need::GivenRows,
        Need::Sections,
        Need::LastSeen,
        Need::States,
        Need::ShortConv,
        Need::DeltaRule,
        Need::SelectiveScan,
        Need::ChannelScan,
        Need::ColumnFactors,
        Need::GatedNorm,
        Need::SigmoidGate,
        Need::SharedKeys,
        Need::WideGroups,
        Need::LayerEmbeddings,
        Need::ExpertScales,
        Need::PlainExperts,
        Need::Latent,
        Need::Temperature,
        Need::Chunks,
        Need::WeighedInputs,
        Need::Xielu,
        Need::Floats8,
        Need::Clamp,
        Need::HostTables,
        Need::HostWeights,
        Need::FileWeights,
    ];
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Need::LayerNorm => "layer norm",
            Need::QkNorm => "normalising queries and keys",
            Need::Positions => "learned positions",
            Need::Pointwise => "functions of single values (scale, soft cap, gelu)",
            Need::Gelu => "a feed-forward gated by gelu",
            Need::SoftCap => "a soft cap on attention",
            Need::Sinks => "attention sinks",
            Need::BothDirections => "attention in both directions",
            Need::Reach => "attention in both directions to near positions alone",
            Need::Pooling => "pooling",
            Need::Experts => "a mixture of experts",
            Need::LowRank => "low-rank adapters",
            Need::GivenRows => "given rows in place of tokens",
            Need::Sections => "positions of several sections",
            Need::LastSeen => "a last position for each token",
            Need::States => "a state for each sequence",
            Need::ShortConv => "a short convolution",
            Need::DeltaRule => "the gated delta rule",
            Need::SelectiveScan => "a selective scan",
            Need::ChannelScan => "a selective scan by channels",
            Need::ColumnFactors => "a factor for each column",
            Need::GatedNorm => "a gated norm",
            Need::SigmoidGate => "attention with a gate",
            Need::SharedKeys => "attention over the keys of another layer",
            Need::WideGroups => "more than 16 query heads, or 2048 of their values, to a head of keys",
            Need::LayerEmbeddings => "embeddings for each layer",
            Need::ExpertScales => "a scale for each expert",
            Need::PlainExperts => "experts without gates",
            Need::Latent => "latent attention",
            Need::Temperature => "queries scaled by their positions",
            Need::Chunks => "attention in chunks",
            Need::WeighedInputs => "experts whose inputs are weighed",
            Need::Xielu => "a feed-forward of xIELU",
            Need::Floats8 => "products of 8-bit floats with 8-bit floats",
            Need::Clamp => "bounds of each column",
            Need::HostTables => "a table in the host's memory",
            Need::HostWeights => "weights in the host's memory",
            Need::FileWeights => "weights that stay in their file",
        })
    }
}

/// What a weight does in a model, as far as is known when it is loaded: a backend need not get ready for anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Multiplies the rows of tokens.
    Tokens,
    /// The same, gates above their counterparts: [`glu`](crate::Backend::glu) of what it yields comes next, or where
    /// `adapted` in some steps [`low_rank`](crate::Backend::low_rank).
    Gates {
        /// Of this kind.
        glu: Glu,
        /// Whether adapters change what it yields.
        adapted: bool,
    },
    /// Multiplies the rows that want logits.
    Head,
}

/// Owns device memory on one thread. Bytes are counted by purpose where they are allocated.
pub trait Memory {
    /// A matrix ready to be multiplied by: parts stacked by output rows, in the backend's own layout.
    type Weight;
    /// Rows of activations, or one row of f32 for an uploaded vector.
    type Buf;
    /// A KV cache of all groups.
    type Kv;

    /// Stacks parts by output rows into one weight. All parts have the same number of columns; each keeps its type.
    fn upload(&self, parts: &[Part<'_>]) -> Result<Self::Weight, Error>;
    /// The same where it is known what for.
    fn upload_for(&self, role: Role, parts: &[Part<'_>]) -> Result<Self::Weight, Error> {
        let _ = role;
        self.upload(parts)
    }
    /// Like [`upload`](Memory::upload), for a weight whose rows [`embed`](crate::Backend::embed) looks up; `tied` says
    /// that it is multiplied by as well. A backend that keeps what it multiplies by elsewhere keeps tables here.
    fn upload_table(&self, parts: &[Part<'_>], tied: bool) -> Result<Self::Weight, Error> {
        let _ = tied;
        self.upload(parts)
    }
    /// Like [`upload`](Memory::upload), for matrices of which each token is multiplied by a few
    /// ([`experts`](crate::Backend::experts)). `parts` are those of the first expert, then of the second, and so on:
    /// every expert has as many, of the same rows.
    fn upload_experts(&self, parts: &[Part<'_>], experts: usize) -> Result<Self::Weight, Error> {
        let _ = experts;
        self.upload(parts)
    }
    /// The same for matrices of which every head has one ([`head_products`](crate::Backend::head_products)). A backend
    /// that multiplies by them in another way than by experts' prepares for that here.
    fn upload_heads(&self, parts: &[Part<'_>], heads: usize) -> Result<Self::Weight, Error> {
        self.upload_experts(parts, heads)
    }
    /// Concatenates vectors (norm weights, biases) into one row of f32, whatever their stored type.
    fn upload_vector(&self, parts: &[Part<'_>]) -> Result<Self::Buf, Error>;
    /// Places values computed on the host (rotary frequencies) as one row of f32.
    fn upload_values(&self, values: &[f32]) -> Result<Self::Buf, Error>;
    /// Room for `rows` rows of `columns` values. The purpose decides the precision.
    fn alloc(&self, purpose: Purpose, rows: usize, columns: usize) -> Result<Self::Buf, Error>;
    /// Room for all pages of all groups.
    fn alloc_kv(&self, spec: &KvSpec) -> Result<Self::Kv, Error>;
    /// Says what attention will be asked for, before room for keys and values is: a backend may get ready for it meanwhile.
    /// `rotates` tells whether queries and keys are rotated before.
    fn foresee(&self, attention: &Attention<Self::Buf>, rotates: bool) {
        let _ = (attention, rotates);
    }
    /// The same of latent attention.
    fn foresee_latent(&self, attention: &LatentAttention) {
        let _ = attention;
    }
    /// Waits for what was begun while loading and every step needs. `progress` is told how many programs are compiled, and how many
    /// there are.
    fn ready(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<(), Error> {
        let _ = progress;
        Ok(())
    }
    /// Bytes in use, from the allocator itself.
    fn usage(&self) -> Usage;
    /// Whether it looks at the values that it is handed; a plan only counts them, and need not have them laid out.
    fn reads(&self) -> bool {
        true
    }
    /// Refuses what the backend does not have.
    fn supports(&self, need: Need) -> Result<(), Error> {
        let _ = need;
        Ok(())
    }
}

/// How many bytes a backend will take for a thing, known without allocating it. [`Memory`] implementations allocate
/// by these same functions, so a plan made from them cannot drift from reality.
pub trait Sizes {
    /// Bytes of a weight made of these (type, rows, columns) parts, or why it cannot be made.
    fn weight_bytes(&self, parts: &[Part<'_>]) -> Result<u64, Error>;
    /// The same for a table, which may be multiplied by as well.
    fn table_bytes(&self, parts: &[Part<'_>], tied: bool) -> Result<u64, Error> {
        let _ = tied;
        self.weight_bytes(parts)
    }
    /// The same for the matrices of all experts.
    fn experts_bytes(&self, parts: &[Part<'_>], experts: usize) -> Result<u64, Error> {
        let _ = experts;
        self.weight_bytes(parts)
    }
    /// Bytes of `rows` x `columns` values.
    fn buf_bytes(&self, purpose: Purpose, rows: usize, columns: usize) -> u64;
    /// Bytes of the backend's own workspace and step slots.
    fn workspace_bytes(&self) -> u64;

    /// Where a weight with this place lies: on a device whose memory is the host's, the two are one.
    fn lies(&self, place: WeightPlace) -> WeightPlace {
        place
    }

    /// Refuses what the backend does not have: as [`Memory::supports`].
    fn supports(&self, need: Need) -> Result<(), Error> {
        let _ = need;
        Ok(())
    }

    /// Refuses a kind of cache that the backend does not have, and keys and values in a type that it does not keep them in.
    fn keeps(&self, spec: &KvSpec) -> Result<(), Error> {
        let _ = spec;
        Ok(())
    }

    /// Bytes of one page of one group, over all its layers.
    fn page_bytes(&self, spec: &KvSpec, group: &KvGroup) -> u64 {
        group.page_bytes(spec.dtype)
    }

    /// Bytes of one row of f32 made of these vectors, or why it cannot be made.
    fn vector_bytes(&self, parts: &[Part<'_>]) -> Result<u64, Error> {
        let values = |part: &Part<'_>| part.rows.as_ref().map_or(part.view.values(), Vec::len);
        Ok(self.buf_bytes(Purpose::Weights, 1, parts.iter().map(values).sum()))
    }
    /// Bytes of a whole KV cache.
    fn kv_bytes(&self, spec: &KvSpec) -> u64 {
        let bytes =
            spec.groups.iter().map(|group| self.page_bytes(spec, group).saturating_mul(group.pages as u64));
        bytes.fold(0, u64::saturating_add)
    }
}

/// A memory that allocates nothing and counts what a backend would: loading a model on it makes the plan.
pub struct Counting<S> {
    sizes: S,
    usage: RefCell<Usage>,
    host_bytes: Cell<u64>,
}

impl<S: Sizes> Counting<S> {
    /// Counts by a backend's sizes, its workspace included from the start.
    pub fn new(sizes: S) -> Self {
        let mut usage = Usage::default();
        usage.add(Purpose::Workspace, sizes.workspace_bytes());
        Counting { sizes, usage: RefCell::new(usage), host_bytes: Cell::new(0) }
    }

    /// Bytes of weights in the host's memory, beside the device's own.
    pub fn host_bytes(&self) -> u64 {
        self.host_bytes.get()
    }

    fn count_weight(&self, parts: &[Part<'_>], bytes: u64) {
        let place = parts.first().map_or(WeightPlace::Device, |part| part.place);
        match self.sizes.lies(place) {
            WeightPlace::Device => self.count(Purpose::Weights, bytes),
            WeightPlace::Host => self.host_bytes.set(self.host_bytes.get().saturating_add(bytes)),
            WeightPlace::File => {}
        }
    }

    fn count(&self, purpose: Purpose, bytes: u64) {
        self.usage.borrow_mut().add(purpose, bytes);
    }
}

impl<S: Sizes> Memory for Counting<S> {
    type Weight = ();
    type Buf = ();
    type Kv = ();

    fn upload(&self, parts: &[Part<'_>]) -> Result<(), Error> {
        let bytes = land(parts, Content::Room, |parts| self.sizes.weight_bytes(parts))?;
        self.count_weight(parts, bytes);
        Ok(())
    }

    fn upload_table(&self, parts: &[Part<'_>], tied: bool) -> Result<(), Error> {
        let bytes = land(parts, Content::Room, |parts| self.sizes.table_bytes(parts, tied))?;
        self.count_weight(parts, bytes);
        Ok(())
    }

    fn upload_experts(&self, parts: &[Part<'_>], experts: usize) -> Result<(), Error> {
        let bytes = land(parts, Content::Room, |parts| self.sizes.experts_bytes(parts, experts))?;
        self.count_weight(parts, bytes);
        Ok(())
    }

    fn upload_vector(&self, parts: &[Part<'_>]) -> Result<(), Error> {
        self.count(Purpose::Weights, self.sizes.vector_bytes(parts)?);
        Ok(())
    }

    fn upload_values(&self, values: &[f32]) -> Result<(), Error> {
        self.count(Purpose::Weights, self.sizes.buf_bytes(Purpose::Weights, 1, values.len()));
        Ok(())
    }

    fn alloc(&self, purpose: Purpose, rows: usize, columns: usize) -> Result<(), Error> {
        self.count(purpose, self.sizes.buf_bytes(purpose, rows, columns));
        Ok(())
    }

    fn alloc_kv(&self, spec: &KvSpec) -> Result<(), Error> {
        self.sizes.keeps(spec)?;
        self.count(Purpose::Kv, self.sizes.kv_bytes(spec));
        Ok(())
    }

    fn usage(&self) -> Usage {
        *self.usage.borrow()
    }

    fn reads(&self) -> bool {
        false
    }

    fn supports(&self, need: Need) -> Result<(), Error> {
        self.sizes.supports(need)
    }
}

/// Rows and columns of a part seen as a matrix; a vector is one column per value.
pub(crate) fn matrix_shape(part: &Part<'_>) -> Result<(DType, usize, usize), Error> {
    match part.view.shape[..] {
        [rows, columns] => Ok((part.view.dtype, rows, columns)),
        _ => Err(Error::TensorShape {
            tensor: part.view.name.to_owned(),
            got: part.view.shape.clone(),
            wanted: vec![0, 0],
        }),
    }
}
