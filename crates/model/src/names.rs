//! The table of weights: canonical name, spelling in each container, shape, and what loading does to the rows.

use std::ops::Range;

use fornax_compute::{DeltaHeads, Heads, ScanHeads};

use crate::facts::QkRows;
use crate::latent::LatentPart;
use crate::relaid::Interleave;
use crate::{
    ChannelScanConfig, Config, ConvConfig, DeltaConfig, Facts, FeedForward, LatentConfig, LayerConfig, Mixer,
    ScanConfig,
};

/// A weight by its place in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the table below says what each one is")]
pub enum Tensor {
    Embedding,
    Positions,
    TokenTypes,
    EmbeddingNorm,
    EmbeddingNormBias,
    Pooler,
    PoolerBias,
    PoolerNorm,
    Classifier,
    ClassifierBias,
    DenseUp,
    DenseDown,
    OutputNorm,
    OutputNormBias,
    Output,
    OutputBias,
    RopeFactors,
    RopeFactorsLong,
    AttentionNorm,
    AttentionNormBias,
    Qkv,
    QkvBias,
    Query,
    Key,
    Value,
    AttentionOutput,
    QueryBias,
    KeyBias,
    ValueBias,
    AttentionOutputBias,
    QueryNorm,
    KeyNorm,
    Sinks,
    AttentionPostNorm,
    AttentionSumNorm,
    AttentionSumNormBias,
    MlpNorm,
    MlpNormBias,
    GateUp,
    Gate,
    Up,
    Down,
    GateBias,
    UpBias,
    DownBias,
    MlpPostNorm,
    LayerScale,
    LayerTable,
    LayerProjection,
    LayerProjectionNorm,
    LayerGate,
    LayerUp,
    LayerPostNorm,
    RouterScale,
    ExpertScales,
    ExpertsNorm,
    ExpertsPostNorm,
    SharedPostNorm,
    Router,
    RouterBias,
    RouterCorrection,
    ExpertGate,
    ExpertUp,
    ExpertDown,
    ExpertGateBias,
    ExpertUpBias,
    ExpertDownBias,
    SharedRouter,
    SharedGate,
    SharedUp,
    SharedDown,
    ExpertsNarrow,
    ExpertsWiden,
    MlpSumNorm,
    MlpSumNormBias,
    AttentionGate,
    DeltaQkv,
    DeltaGate,
    DeltaBeta,
    DeltaDecay,
    ConvMixed,
    Conv,
    ConvBias,
    ConvOutput,
    ScanChannels,
    ScanGate,
    ScanStep,
    StepIn,
    StepOut,
    ScanKeys,
    ScanQueries,
    StepNorm,
    ScanKeyNorm,
    ScanQueryNorm,
    StateRates,
    StateRate,
    StateBias,
    StateSkip,
    StateNorm,
    StateOutput,
    QueryDown,
    QueryDownNorm,
    QueryUp,
    LatentRows,
    LatentTurned,
    LatentNorm,
    LatentKeys,
    LatentValues,
    XieluPositive,
    XieluNegative,
    XieluBeta,
    XieluEps,
}

impl Tensor {
    /// Whether it makes keys or values.
    pub(crate) fn is_of_keys(self) -> bool {
        use Tensor::*;
        matches!(self, Key | KeyBias | KeyNorm | Value | ValueBias)
    }

    /// Whether it is read with the configuration: numbers that others leave to their metadata.
    pub(crate) fn is_of_configuration(self) -> bool {
        use Tensor::*;
        matches!(self, RopeFactors | RopeFactorsLong | XieluPositive | XieluNegative | XieluBeta | XieluEps)
    }

    /// Whether it is the weight of a norm.
    fn is_norm(self) -> bool {
        use Tensor::*;
        matches!(
            self,
            OutputNorm | AttentionNorm | QueryNorm | KeyNorm | AttentionPostNorm | MlpNorm | MlpPostNorm
        )
    }
}

/// A dimension, by what the configuration calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    /// Rows of the embedding.
    Vocab,
    /// The residual stream.
    Hidden,
    /// Query heads times head size.
    Query,
    /// Key/value heads times head size.
    Kv,
    /// Query heads and twice the key/value heads, times head size.
    Qkv,
    /// Query heads.
    Heads,
    /// The head size.
    Head,
    /// The inner size of what every token takes: the dense feed-forward, or the shared expert.
    Ffn,
    /// Gate and up.
    TwoFfn,
    /// Rotating pairs of a head.
    Pairs,
    /// Positions the model was made for.
    Context,
    /// Rows of the table of positions: those, and what is before the first.
    Positions,
    /// What the first dense layer behind pooling makes.
    Dense,
    /// Experts.
    Experts,
    /// An expert's inner size.
    ExpertFfn,
    /// What an expert reads, and what it adds.
    ExpertWidth,
    /// What a layer reads of its token's own embedding.
    LayerInput,
    /// The same of all layers.
    LayerInputs,
    /// One; files may leave it out before another dimension.
    One,
    /// Kinds of token.
    TokenTypes,
    /// Inputs that a short convolution sees.
    Taps,
    /// Channels of a gated short convolution.
    ConvChannels,
    /// What it reads: three times as many.
    ConvMixed,
    /// Queries, keys and values of the delta rule.
    DeltaChannels,
    /// Its values: value heads times their size.
    DeltaValues,
    /// Its value heads.
    DeltaHeads,
    /// The size of one.
    DeltaHead,
    /// Values, keys and queries of the selective scan.
    ScanChannels,
    /// Its values: heads times their size.
    ScanValues,
    /// Its heads.
    ScanHeads,
    /// What queries of latent attention are made of.
    QueryRank,
    /// All its queries.
    LatentQuery,
    /// Its heads.
    LatentHeads,
    /// What its keys and values are made of.
    Latent,
    /// What of a row turns.
    LatentTurned,
    /// What of a head's keys does not turn.
    LatentKept,
    /// A head's values.
    LatentValue,
    /// The values of all heads.
    LatentValues,
    /// Channels of the selective scan of Mamba-1.
    Inner,
    /// Values of its keys and queries.
    InnerState,
    /// Values that its steps are made of.
    InnerRank,
}

/// Whether a model, or one of its layers, has the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is a field of the configuration, or of a layer's")]
pub enum When {
    Always,
    Untied,
    QkvBias,
    OutputBias,
    MlpBias,
    Dense,
    Mixture,
    Shared,
    Narrow,
    QkNorm,
    RopeFactors,
    LongRopeFactors,
    Ranks,
    Attends,
    /// It attends, and its values have a weight of their own.
    Values,
    Delta,
    Conv,
    Scan,
    ScanConvBias,
    ScanNorm,
    ChannelScan,
    ChannelConvBias,
    Mixes,
    Feeds,
    BehindFirst,
    DenseLayers,
    LayerInputs,
    Latent,
    /// Its attention is latent, and queries have a low rank.
    QueryRank,
    /// Its attention is latent, and queries have none.
    NoQueryRank,
    /// It has experts, and their choice a correction.
    Corrected,
}

/// What loading does to the stored rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transform {
    /// Nothing.
    Keep,
    /// Leaves out the rows of a table of positions before the first position's.
    FromFirst,
    /// Puts the rows that rotate together where rotation wants them, if the container has another order.
    QkRows,
    /// Puts queries before keys before values where Hugging Face files have, for each head of keys and values, its queries,
    /// its keys and its values.
    Ungrouped,
    /// Exchanges rows and columns in Hugging Face files.
    Transposed,
    /// Takes every n-th value of a vector in Hugging Face files.
    Alternate(Interleave),
    /// Takes every n-th row of experts' matrices. Hugging Face files hold them transposed as floats, or in order as blocks
    /// of four bits: `_blocks` and `_scales` behind the name.
    AlternateRows(Interleave),
    /// Takes one of so many of experts' matrices, which lie behind each other. Hugging Face files hold them transposed.
    TransposedRows(Interleave),
    /// Takes of each head's rows one of so many equal shares.
    HeadShare(Interleave),
    /// Takes rows of a matrix that lies key head by key head.
    KeyHeads(Portion),
    /// Takes one of so many matrices that lie below each other for each expert of a Hugging Face file. Where that tensor is
    /// not there, each expert has one of its own under the other name.
    Stacked(Interleave, &'static str),
    /// The same in both containers; where that tensor is not in a GGUF file, all experts have one under the other name.
    StackedInBoth(Interleave, &'static str),
    /// Minus e to the power of each value, in Hugging Face files.
    NegativeExp,
    /// Takes one of so many matrices that lie below each other in Hugging Face files.
    Below(Interleave),
    /// Takes a stretch of the rows of a matrix of the selective scan.
    Stretch(Stretch),
    /// Takes a stretch of the rows of a matrix of the selective scan of Mamba-1.
    Inner(Inner),
    /// A vector that lies group by group, as rows of a matrix, in GGUF.
    Groups,
    /// Takes rows of a matrix of latent attention.
    Latent(LatentPart),
}

/// What of the rows of the selective scan's matrix is meant: first are the gates, then what is convolved, then steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch {
    /// The gates.
    Gates,
    /// What is convolved: values, keys, queries.
    Channels,
    /// How long a step is.
    Steps,
}

/// What of the rows of the matrices of the selective scan of Mamba-1 is meant: one has what is convolved, then the gates; the
/// other what steps are made of, then keys, then queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inner {
    /// What is convolved.
    Values,
    /// The gates.
    Gates,
    /// What steps are made of.
    Steps,
    /// Keys.
    Keys,
    /// Queries.
    Queries,
}

/// What of a key head's rows in a matrix of the delta rule is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Portion {
    /// In Hugging Face files rows are a query, a key, values, gates. GGUF files have first all queries, then all keys, then
    /// all values, in a matrix of their own: what this asks for.
    Qkv,
    /// The gates among the same rows. GGUF files have them in a matrix of their own.
    Gates,
    /// Rows are betas, then decays, one for each value head, in both containers: these are the betas.
    Betas,
    /// The decays.
    Decays,
}

/// Whose weight it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The model has one.
    Model,
    /// Each layer has one.
    Layer,
}

/// One weight in both containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    /// The weight.
    pub tensor: Tensor,
    /// Whose it is; a layer's name begins with the layer.
    pub owner: Owner,
    /// Its name in GGUF, after `blk.N.` where it is a layer's; empty where the file's metadata has it instead.
    pub gguf: &'static str,
    /// Its name in a Hugging Face checkpoint, after `model.layers.N.` where it is a layer's; `None` where config.json
    /// has it instead. `{}` is the number of an expert, which then has a tensor of its own.
    pub hugging_face: Option<&'static str>,
    /// Slowest dimension first.
    pub shape: &'static [Dim],
    /// Whether a model has it.
    pub when: When,
    /// What loading does to its rows.
    pub transform: Transform,
}

/// A model's ends, as llama.cpp and transformers name them.
#[rustfmt::skip] // A table: one line per weight.
pub(crate) const ENDS: &[Name] = {
    use Dim::{Hidden, Pairs, Vocab};
    use Owner::Model;
    use Tensor as T;
    use Transform::Keep;
    use When::{Always, RopeFactors, Untied};
    &[
        name(T::Embedding, Model, "token_embd.weight", Some("model.embed_tokens.weight"), (&[Vocab, Hidden], Always, Keep)),
        name(T::OutputNorm, Model, "output_norm.weight", Some("model.norm.weight"), (&[Hidden], Always, Keep)),
        name(T::Output, Model, "output.weight", Some("lm_head.weight"), (&[Vocab, Hidden], Untied, Keep)),
        name(T::RopeFactors, Model, "rope_freqs.weight", None, (&[Pairs], RopeFactors, Keep)),
    ]
};

/// The biases of the norms around the branches, and of the last one.
#[rustfmt::skip]
pub(crate) const NORM_BIASES: &[Name] = {
    use Dim::Hidden;
    use Owner::{Layer, Model};
    use Tensor as T;
    use Transform::Keep;
    use When::Always;
    &[
        name(T::OutputNormBias, Model, "output_norm.bias", Some("model.norm.bias"), (&[Hidden], Always, Keep)),
        name(T::AttentionNormBias, Layer, "attn_norm.bias", Some("input_layernorm.bias"), (&[Hidden], Always, Keep)),
        name(T::MlpNormBias, Layer, "ffn_norm.bias", Some("post_attention_layernorm.bias"), (&[Hidden], Always, Keep)),
    ]
};

/// Norms before each branch.
#[rustfmt::skip]
pub(crate) const PRE_NORMS: &[Name] = {
    use Dim::Hidden;
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::Always;
    &[
        name(T::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
        name(T::MlpNorm, Layer, "ffn_norm.weight", Some("post_attention_layernorm.weight"), (&[Hidden], Always, Keep)),
    ]
};

/// Projections of attention.
#[rustfmt::skip]
pub(crate) const ATTENTION: &[Name] = {
    use Dim::{Hidden, Kv, Query};
    use Owner::Layer;
    use Tensor as T;
    use Transform::{Keep, QkRows};
    use When::{Attends, OutputBias, QkvBias};
    &[
        name(T::Query, Layer, "attn_q.weight", Some("self_attn.q_proj.weight"), (&[Query, Hidden], Attends, QkRows)),
        name(T::Key, Layer, "attn_k.weight", Some("self_attn.k_proj.weight"), (&[Kv, Hidden], Attends, QkRows)),
        name(T::Value, Layer, "attn_v.weight", Some("self_attn.v_proj.weight"), (&[Kv, Hidden], Attends, Keep)),
        name(T::AttentionOutput, Layer, "attn_output.weight", Some("self_attn.o_proj.weight"), (&[Hidden, Query], Attends, Keep)),
        name(T::QueryBias, Layer, "attn_q.bias", Some("self_attn.q_proj.bias"), (&[Query], QkvBias, QkRows)),
        name(T::KeyBias, Layer, "attn_k.bias", Some("self_attn.k_proj.bias"), (&[Kv], QkvBias, QkRows)),
        name(T::ValueBias, Layer, "attn_v.bias", Some("self_attn.v_proj.bias"), (&[Kv], QkvBias, Keep)),
        name(T::AttentionOutputBias, Layer, "attn_output.bias", Some("self_attn.o_proj.bias"), (&[Hidden], OutputBias, Keep)),
    ]
};

/// Norms of queries and keys, head by head.
#[rustfmt::skip]
pub(crate) const QK_NORMS: &[Name] = {
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::Attends;
    &[
        name(T::QueryNorm, Layer, "attn_q_norm.weight", Some("self_attn.q_norm.weight"), (&[Dim::Head], Attends, Keep)),
        name(T::KeyNorm, Layer, "attn_k_norm.weight", Some("self_attn.k_norm.weight"), (&[Dim::Head], Attends, Keep)),
    ]
};

/// Latent attention, as DeepSeek names it.
#[rustfmt::skip]
pub(crate) const LATENT: &[Name] = {
    use Dim::{Hidden, Latent as Rank, LatentHeads, LatentKept, LatentQuery, LatentTurned, LatentValue, LatentValues, QueryRank as Narrow};
    use LatentPart::{Keys, Queries, Rows, Turned, Values};
    use Owner::Layer;
    use Tensor as T;
    use Transform::{Keep, Latent as Part};
    use When::{Latent, NoQueryRank, QueryRank};
    &[
        name(T::Query, Layer, "attn_q.weight", Some("self_attn.q_proj.weight"), (&[LatentQuery, Hidden], NoQueryRank, Part(Queries))),
        name(T::QueryDown, Layer, "attn_q_a.weight", Some("self_attn.q_a_proj.weight"), (&[Narrow, Hidden], QueryRank, Keep)),
        name(T::QueryDownNorm, Layer, "attn_q_a_norm.weight", Some("self_attn.q_a_layernorm.weight"), (&[Narrow], QueryRank, Keep)),
        name(T::QueryUp, Layer, "attn_q_b.weight", Some("self_attn.q_b_proj.weight"), (&[LatentQuery, Narrow], QueryRank, Part(Queries))),
        name(T::LatentRows, Layer, "attn_kv_a_mqa.weight", Some("self_attn.kv_a_proj_with_mqa.weight"), (&[Rank, Hidden], Latent, Part(Rows))),
        name(T::LatentTurned, Layer, "attn_kv_a_mqa.weight", Some("self_attn.kv_a_proj_with_mqa.weight"), (&[LatentTurned, Hidden], Latent, Part(Turned))),
        name(T::LatentNorm, Layer, "attn_kv_a_norm.weight", Some("self_attn.kv_a_layernorm.weight"), (&[Rank], Latent, Keep)),
        name(T::LatentKeys, Layer, "attn_k_b.weight", Some("self_attn.kv_b_proj.weight"), (&[LatentHeads, Rank, LatentKept], Latent, Part(Keys))),
        name(T::LatentValues, Layer, "attn_v_b.weight", Some("self_attn.kv_b_proj.weight"), (&[LatentHeads, LatentValue, Rank], Latent, Part(Values))),
        name(T::AttentionOutput, Layer, "attn_output.weight", Some("self_attn.o_proj.weight"), (&[Hidden, LatentValues], Latent, Keep)),
    ]
};

/// The gated feed-forward.
#[rustfmt::skip]
pub(crate) const MLP: &[Name] = {
    use Dim::{Ffn, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::{Dense, MlpBias};
    &[
        name(T::Gate, Layer, "ffn_gate.weight", Some("mlp.gate_proj.weight"), (&[Ffn, Hidden], Dense, Keep)),
        name(T::Up, Layer, "ffn_up.weight", Some("mlp.up_proj.weight"), (&[Ffn, Hidden], Dense, Keep)),
        name(T::Down, Layer, "ffn_down.weight", Some("mlp.down_proj.weight"), (&[Hidden, Ffn], Dense, Keep)),
        name(T::GateBias, Layer, "ffn_gate.bias", Some("mlp.gate_proj.bias"), (&[Ffn], MlpBias, Keep)),
        name(T::UpBias, Layer, "ffn_up.bias", Some("mlp.up_proj.bias"), (&[Ffn], MlpBias, Keep)),
        name(T::DownBias, Layer, "ffn_down.bias", Some("mlp.down_proj.bias"), (&[Hidden], MlpBias, Keep)),
    ]
};

/// The feed-forward without gates.
pub(crate) const UNGATED: &[Name] = {
    let [_, up, down, _, up_bias, down_bias] = MLP else { panic!() };
    &[*up, *down, *up_bias, *down_bias]
};

/// Experts, as Qwen names them.
#[rustfmt::skip]
pub(crate) const QWEN_EXPERTS: &[Name] = {
    use Dim::{ExpertFfn, Experts, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::Mixture;
    &[
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("mlp.gate.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_exps.weight", Some("mlp.experts.{}.gate_proj.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertUp, Layer, "ffn_up_exps.weight", Some("mlp.experts.{}.up_proj.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("mlp.experts.{}.down_proj.weight"), (&[Experts, Hidden, ExpertFfn], Mixture, Keep)),
    ]
};

/// What is added to scores for the choice, and experts that every token takes as they are, as DeepSeek names them.
#[rustfmt::skip]
pub(crate) const DEEPSEEK_EXPERTS: &[Name] = {
    use Dim::{Experts, Ffn, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::{Mixture, Shared};
    &[
        name(T::RouterCorrection, Layer, "exp_probs_b.bias", Some("mlp.gate.e_score_correction_bias"), (&[Experts], Mixture, Keep)),
        name(T::SharedGate, Layer, "ffn_gate_shexp.weight", Some("mlp.shared_experts.gate_proj.weight"), (&[Ffn, Hidden], Shared, Keep)),
        name(T::SharedUp, Layer, "ffn_up_shexp.weight", Some("mlp.shared_experts.up_proj.weight"), (&[Ffn, Hidden], Shared, Keep)),
        name(T::SharedDown, Layer, "ffn_down_shexp.weight", Some("mlp.shared_experts.down_proj.weight"), (&[Hidden, Ffn], Shared, Keep)),
    ]
};

/// A decoder of the llama family.
pub(crate) const DECODER: &[&[Name]] = &[ENDS, PRE_NORMS, ATTENTION, MLP];

/// A row of a table.
pub(crate) const fn name(
    tensor: Tensor,
    owner: Owner,
    gguf: &'static str,
    hugging_face: Option<&'static str>,
    (shape, when, transform): (&'static [Dim], When, Transform),
) -> Name {
    Name { tensor, owner, gguf, hugging_face, shape, when, transform }
}

/// Ends of Hugging Face tensor names that hold no weight: old versions of transformers stored the frequencies that
/// they compute from config.json, and masks.
pub(crate) const NOT_WEIGHTS: &[&str] =
    &[".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "embeddings.position_ids"];

impl Facts {
    /// Every row of its tables.
    pub fn rows(&self) -> impl Iterator<Item = &'static Name> + use<> {
        self.names.iter().copied().flatten()
    }

    /// The tables' row of a weight; `None` where the architecture does not have it.
    pub(crate) fn row(&self, tensor: Tensor) -> Option<&'static Name> {
        self.rows().find(|name| name.tensor == tensor)
    }

    /// Whether its feed-forward has gates.
    pub(crate) fn gated(&self) -> bool {
        self.has(Tensor::Gate) || self.has(Tensor::GateUp) || self.has(Tensor::ExpertGate)
    }

    /// Whether the architecture has such a weight.
    pub(crate) fn has(&self, tensor: Tensor) -> bool {
        self.row(tensor).is_some()
    }
}

impl When {
    /// Whether this layer has the weight; of the model's own weights, whether the model has it.
    pub(crate) fn holds(self, config: &Config, layer: usize) -> bool {
        let dense = || matches!(config.layers[layer].feed_forward, FeedForward::Dense { .. });
        match self {
            When::Always => true,
            When::Untied => !config.tied,
            When::QkvBias => config.qkv_bias && config.layers[layer].attention().is_some(),
            When::OutputBias => config.output_bias && config.layers[layer].attention().is_some(),
            When::MlpBias => config.mlp_bias && dense(),
            When::Dense => dense(),
            When::Mixture => config.layers[layer].feed_forward.mixture().is_some(),
            When::Shared => {
                let mixture = config.layers[layer].feed_forward.mixture();
                mixture.is_some_and(|mixture| mixture.shared_ffn.is_some())
            }
            When::Narrow => {
                let mixture = config.layers[layer].feed_forward.mixture();
                mixture.is_some_and(|mixture| mixture.narrow.is_some())
            }
            When::QkNorm => config.qk_norm && config.layers[layer].attention().is_some(),
            When::RopeFactors => !config.rope.factors.is_empty(),
            When::LongRopeFactors => config.rope.long.is_some(),
            When::Ranks => config.ranks,
            When::Attends => config.layers[layer].attention().is_some(),
            When::Values => {
                config.layers[layer].attention().is_some_and(|attention| !attention.keys_are_values)
            }
            When::Delta => matches!(config.layers[layer].mixer, Mixer::Delta(_)),
            When::Conv => matches!(config.layers[layer].mixer, Mixer::Conv(_)),
            When::Scan => config.layers[layer].scan().is_some(),
            When::ScanNorm => config.layers[layer].scan().is_some_and(|scan| scan.normed),
            When::Mixes => config.layers[layer].mixer != Mixer::None,
            When::Feeds => config.layers[layer].feed_forward != FeedForward::None,
            When::ChannelScan => config.layers[layer].channel_scan().is_some(),
            When::ChannelConvBias => config.layers[layer].channel_scan().is_some_and(|scan| scan.conv_bias),
            When::ScanConvBias => config.layers[layer].scan().is_some_and(|scan| scan.conv_bias),
            When::BehindFirst => layer > 0,
            When::DenseLayers => config.dense > 0,
            When::LayerInputs => config.layer_inputs.is_some(),
            When::Latent => config.layers[layer].latent().is_some(),
            When::QueryRank => config.layers[layer].latent().is_some_and(|it| it.query_rank.is_some()),
            When::NoQueryRank => config.layers[layer].latent().is_some_and(|it| it.query_rank.is_none()),
            When::Corrected => !dense() && config.corrected,
        }
    }
}

impl Dim {
    /// The size in this layer.
    pub(crate) fn size(self, config: &Config, layer: usize) -> usize {
        let LayerConfig { mixer, feed_forward, .. } = &config.layers[layer];
        let none = Heads { query: 0, kv: 0, dim: 0 };
        let heads = config.layers[layer].attention().map_or(none, |attention| attention.heads);
        let delta = |size: fn(&DeltaConfig) -> usize| match mixer {
            Mixer::Delta(delta) => size(delta),
            _ => 0,
        };
        let conv = |size: fn(&ConvConfig) -> usize| match mixer {
            Mixer::Conv(conv) => size(conv),
            _ => 0,
        };
        let scan = |size: fn(&ScanConfig) -> usize| config.layers[layer].scan().map_or(0, size);
        let latent = |size: fn(&LatentConfig) -> usize| config.layers[layer].latent().map_or(0, size);
        let inner =
            |size: fn(&ChannelScanConfig) -> usize| config.layers[layer].channel_scan().map_or(0, size);
        let mixture = feed_forward.mixture();
        match self {
            Dim::Vocab => config.vocab,
            Dim::Hidden => config.hidden,
            Dim::Query => heads.query * heads.dim,
            Dim::Kv => heads.kv * heads.dim,
            Dim::Qkv => heads.qkv_columns(),
            Dim::Heads => heads.query,
            Dim::Head => heads.dim,
            Dim::Ffn => feed_forward.ffn(),
            Dim::TwoFfn => 2 * feed_forward.ffn(),
            Dim::Pairs => config.rope.dims / 2,
            Dim::Context => config.context as usize,
            Dim::Positions => config.context as usize + config.first_position,
            Dim::Dense => config.dense,
            Dim::Experts => mixture.map_or(0, |mixture| mixture.routing.experts),
            Dim::ExpertFfn => mixture.map_or(0, |mixture| mixture.ffn),
            Dim::ExpertWidth => mixture.map_or(0, |mixture| mixture.narrow.unwrap_or(config.hidden)),
            Dim::LayerInput => config.layer_inputs.map_or(0, |inputs| inputs.width),
            Dim::LayerInputs => config.layer_inputs.map_or(0, |inputs| config.layers.len() * inputs.width),
            Dim::One => 1,
            Dim::TokenTypes => config.token_types,
            Dim::Taps => {
                let taps = delta(|delta| delta.taps) + conv(|conv| conv.taps);
                taps + scan(|scan| scan.taps) + inner(|scan| scan.taps)
            }
            Dim::ConvChannels => conv(|conv| conv.channels),
            Dim::ConvMixed => conv(|conv| 3 * conv.channels),
            Dim::DeltaChannels => delta(|delta| delta.heads.columns()),
            Dim::DeltaValues => delta(|delta| delta.heads.value * delta.heads.dim_v),
            Dim::DeltaHeads => delta(|delta| delta.heads.value),
            Dim::DeltaHead => delta(|delta| delta.heads.dim_v),
            Dim::ScanChannels => scan(|scan| scan.heads.columns()),
            Dim::ScanValues => scan(ScanConfig::values),
            Dim::ScanHeads => scan(|scan| scan.heads.heads),
            Dim::QueryRank => latent(|latent| latent.query_rank.unwrap_or(0)),
            Dim::LatentQuery => latent(|latent| latent.heads * latent.query()),
            Dim::LatentHeads => latent(|latent| latent.heads),
            Dim::Latent => latent(|latent| latent.latent),
            Dim::LatentTurned => latent(|latent| latent.turned),
            Dim::LatentKept => latent(|latent| latent.kept),
            Dim::LatentValue => latent(|latent| latent.value),
            Dim::LatentValues => latent(|latent| latent.heads * latent.value),
            Dim::Inner => inner(|scan| scan.channels),
            Dim::InnerState => inner(|scan| scan.state),
            Dim::InnerRank => inner(|scan| scan.rank),
        }
    }
}

impl Name {
    /// Whether a Hugging Face file holds it less one.
    pub(crate) fn is_less_one(&self, facts: &Facts) -> bool {
        facts.norm_less_one && self.tensor.is_norm()
    }
}

/// For each row of queries, then keys, then values, the row it takes of those that lie by heads of keys and values.
pub(crate) fn ungrouped(heads: Heads) -> Vec<u32> {
    let Heads { query, kv, dim } = heads;
    let sharing = query / kv;
    let stored = |head: usize| match head {
        head if head < query => head / sharing * (sharing + 2) + head % sharing,
        head if head < query + kv => (head - query) * (sharing + 2) + sharing,
        head => (head - query - kv) * (sharing + 2) + sharing + 1,
    };
    let rows = (0..query + 2 * kv).flat_map(|head| (0..dim).map(move |row| stored(head) * dim + row));
    rows.map(|row| u32::try_from(row).expect("sizes are bounded when read")).collect()
}

impl Portion {
    /// How many rows the stored matrix has, and which are meant; `None` where it is stored on its own.
    pub(crate) fn rows(self, heads: DeltaHeads, gguf: bool) -> Option<(usize, Vec<u32>)> {
        let DeltaHeads { key, value, dim_k, dim_v, .. } = heads;
        let shared = value / key * dim_v;
        let key_rows = 2 * (dim_k + shared);
        // The first of some rows, and how many.
        let (own, all): (&[(usize, usize)], usize) = match self {
            Portion::Qkv | Portion::Gates if gguf => return None,
            Portion::Qkv => (&[(0, dim_k), (dim_k, dim_k), (2 * dim_k, shared)], key_rows),
            Portion::Gates => (&[(2 * dim_k + shared, shared)], key_rows),
            Portion::Betas => (&[(0, value / key)], 2 * (value / key)),
            Portion::Decays => (&[(value / key, value / key)], 2 * (value / key)),
        };
        let of_heads = |&(first, count): &(usize, usize)| {
            (0..key).flat_map(move |head| (first..first + count).map(move |row| head * all + row))
        };
        let rows = own.iter().flat_map(of_heads);
        let rows = rows.map(|row| u32::try_from(row).expect("sizes are bounded when read")).collect();
        Some((key * all, rows))
    }
}

impl Stretch {
    /// How many rows the stored matrix has, and which are meant.
    pub(crate) fn rows(self, heads: ScanHeads) -> (usize, Range<usize>) {
        let (values, channels) = (heads.heads * heads.dim, heads.columns());
        let all = values + channels + heads.heads;
        let rows = match self {
            Stretch::Gates => 0..values,
            Stretch::Channels => values..values + channels,
            Stretch::Steps => values + channels..all,
        };
        (all, rows)
    }
}

impl Inner {
    /// How many rows the stored matrix has, and which are meant.
    pub(crate) fn rows(self, scan: &ChannelScanConfig) -> (usize, Range<usize>) {
        let ChannelScanConfig { channels, state, rank, .. } = *scan;
        let (first, second) = (2 * channels, rank + 2 * state);
        match self {
            Inner::Values => (first, 0..channels),
            Inner::Gates => (first, channels..first),
            Inner::Steps => (second, 0..rank),
            Inner::Keys => (second, rank..rank + state),
            Inner::Queries => (second, rank + state..second),
        }
    }
}

impl Interleave {
    /// Of `rows` rows in heads of `dim`, each of which is stored behind the others' shares: the stored rows.
    pub(crate) fn head_share(self, rows: usize, dim: usize) -> Vec<u32> {
        let stored = |row: usize| (row / dim * self.of + self.at) * dim + row % dim;
        (0..rows).map(|row| u32::try_from(stored(row)).expect("sizes are bounded when read")).collect()
    }
}

impl QkRows {
    /// For each of `rows` rows in split halves, the stored row it takes: `None` when they are stored so. Only the
    /// first `rotated` rows of each head of `dim` rows rotate, and only they are reordered.
    pub(crate) fn to_halves(self, rows: usize, dim: usize, rotated: usize) -> Option<Vec<u32>> {
        let stored = |row: usize| {
            let (head, row) = (row / dim * dim, row % dim);
            let half = rotated / 2;
            if row < rotated { head + row % half * 2 + row / half } else { head + row }
        };
        match self {
            QkRows::Halves => None,
            QkRows::Pairs => Some(
                (0..rows)
                    .map(|row| u32::try_from(stored(row)).expect("sizes are bounded when read"))
                    .collect(),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_become_halves_head_by_head_and_unrotated_rows_stay() {
        assert_eq!(QkRows::Halves.to_halves(8, 4, 4), None);
        assert_eq!(QkRows::Pairs.to_halves(8, 4, 4), Some(vec![0, 2, 1, 3, 4, 6, 5, 7]));
        assert_eq!(QkRows::Pairs.to_halves(8, 8, 6), Some(vec![0, 2, 4, 1, 3, 5, 6, 7]));
    }

    #[test]
    fn groups_are_taken_apart_head_by_head() {
        let heads = |query, kv| Heads { query, kv, dim: 2 };
        assert_eq!(ungrouped(heads(2, 2)), [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
        assert_eq!(ungrouped(heads(3, 1)), (0..10).collect::<Vec<u32>>());
    }

    #[test]
    fn shares_of_heads_and_portions_of_key_heads_are_the_stored_rows() {
        assert_eq!(Interleave { of: 2, at: 1 }.head_share(4, 2), [2, 3, 6, 7]);
        let sharing = fornax_compute::KeySharing::Neighbours;
        let heads = DeltaHeads { key: 2, value: 4, dim_k: 1, dim_v: 2, sharing };
        // Of each key head a query, a key, four values and four gates.
        let (all, qkv) = Portion::Qkv.rows(heads, false).unwrap();
        assert_eq!((all, qkv), (20, vec![0, 10, 1, 11, 2, 3, 4, 5, 12, 13, 14, 15]));
        assert_eq!(Portion::Gates.rows(heads, false), Some((20, vec![6, 7, 8, 9, 16, 17, 18, 19])));
        assert_eq!(Portion::Gates.rows(heads, true), None);
        assert_eq!(Portion::Betas.rows(heads, true), Some((8, vec![0, 1, 4, 5])));
        assert_eq!(Portion::Decays.rows(heads, false), Some((8, vec![2, 3, 6, 7])));
    }

    #[test]
    fn stretches_of_a_scan_are_all_of_its_rows() {
        let heads = ScanHeads { heads: 4, groups: 2, dim: 3, state: 5 };
        assert_eq!(Stretch::Gates.rows(heads), (48, 0..12));
        assert_eq!(Stretch::Channels.rows(heads), (48, 12..44));
        assert_eq!(Stretch::Steps.rows(heads), (48, 44..48));
    }

    #[test]
    fn every_row_is_found_under_its_own_name() {
        for facts in Facts::TABLE {
            for name in facts.rows() {
                assert_eq!(facts.row(name.tensor), Some(name), "{}", facts.name);
            }
        }
    }
}
