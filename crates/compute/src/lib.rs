//! What a step of a model is made of: memory with a purpose, a handful of operations, and the plain data they act on.
//!
//! This crate defines the two traits that every device implements ([`Memory`] and [`Backend`]), the data that crosses
//! them ([`Batch`], [`KvSpec`], [`SampleRow`]), the CPU implementation, and the conformance suite that any
//! implementation must pass unchanged. Beside them stands [`Ring`]: exact products mod 2^32, for private inference.
//!
//! It knows tensors as rows and columns and KV pages by number. It must never know an architecture, a tokenizer, a
//! request, a file name or an environment variable. There is no general tensor library here: an operation exists
//! because a model needs it.
//!
//! **Reduction order.** The order in which an output element is summed never depends on how many rows are in the
//! batch, and attention reduces over blocks aligned to absolute positions, in order. So a row's result is the same
//! bits alone, among others, or split into chunks. The conformance suite checks this bitwise.

mod backend;
mod batch;
pub mod conformance;
pub mod cpu;
mod error;
mod float8;
mod kv;
pub mod landing;
mod latent;
mod memory;
pub mod operands;
mod philox;
mod recurrence;
mod ring;
mod sample;
mod splitmix;

pub use backend::{
    Attention, Backend, Between, ExpertRoom, Experts, Glu, Groups, Heads, Linear, LowRank, Norm, NormKind,
    Output, Pointwise, Pooling, QkNorm, RANK_MAX, ROUTED_MAX, Rope, Routing, Rows, Scores, Shares,
    Temperature,
};
pub use batch::{Batch, GivenRows, Row, RowState, Token};
pub use conformance::WEIGHT_TYPES;
pub use error::Error;
pub use kv::{KV_BLOCK, KvDType, KvGroup, KvKind, KvLayer, KvSpec, PAGE_TOKENS, PageCopy, PageId};
pub use latent::{HeadProducts, LatentAttention, LatentHeads};
pub use memory::{
    Counting, GROUP_MAX, GROUP_VALUES_MAX, Memory, Need, Part, Purpose, Role, Sizes, Usage, WeightPlace,
};
pub use philox::{random_bits, uniform};
pub use recurrence::{
    ChannelInputs, ChannelScan, ConvForm, DeltaHeads, DeltaRule, GateOrder, GatedNorm, KeySharing,
    STATE_LANES, ScanHeads, SelectiveScan, ShortConv, TAPS_MAX, channel_values, conv_values,
};
pub use ring::{Ring, check_weights, check_words};
pub use sample::{
    Change, Given, Mirostat, SampleFault, SampleRow, SampleScratch, Sampled, Sampling, TOP_LOGPROBS_MAX,
    halvings, sample,
};
pub use splitmix::SplitMix64;
