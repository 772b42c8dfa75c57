//! The table of towers: everything that makes one family's differ from another's, as plain data.

use fornax_compute::{Glu, NormKind, Pointwise};

/// One family of towers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TowerFacts {
    /// What people call it.
    pub(crate) name: &'static str,
    /// `clip.projector_type` in GGUF.
    pub(super) projector: &'static str,
    /// What its tensors' names begin with in Hugging Face files, tried in order.
    pub(super) beginnings: &'static [Beginning],
    /// What config.json calls its sizes.
    pub(super) keys: Keys,
    /// What its tensors are called. What is not there is not computed: biases, norms behind a branch, gates.
    pub(super) names: &'static [Row],
    /// What rows are divided by in the norms of its blocks.
    pub(super) norm: NormKind,
    /// What a first layer reads.
    pub(super) reads: Reads,
    /// What a patch is told of where it is before the blocks.
    pub(super) positions: Positions,
    /// How queries and keys turn by where their patches are.
    pub(super) rotary: Option<Rotary>,
    /// What query-key products are multiplied by.
    pub(super) scale: Scale,
    /// What stands in the feed-forward of a block.
    pub(super) function: Function,
    /// How patches become rows.
    pub(super) ending: Ending,
    /// Patches on a side of a row where files do not say.
    pub(super) merge: usize,
}

/// What names begin with in a Hugging Face file: those of the tower, and those of what lies between it and the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Beginning {
    pub(super) tower: &'static str,
    pub(super) beside: &'static str,
}

/// Sizes under `vision_config`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Keys {
    pub(super) blocks: &'static str,
    pub(super) heads: &'static str,
    pub(super) activation: &'static str,
    /// Added to the variance in norms; `None` where it is always the same.
    pub(super) eps: Option<&'static str>,
    /// Patches on a side of a row; `None` where it follows from the number of rows of a picture.
    pub(super) merge: Option<&'static str>,
}

/// How the first layer's columns lie in a Hugging Face file. They are colours, and in each of them the pixels of a
/// patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reads {
    /// The same for two frames that follow each other.
    TwoFrames,
    /// As they are.
    Picture,
    /// Pixels, and of each its colours.
    Pixels,
}

/// What is added to a patch for where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Positions {
    /// What was learned for a square, stretched over the picture.
    Stretched,
    /// What was learned for a square, which every picture is.
    Square,
    /// What was learned for its column, and what was learned for its row.
    ByAxis,
}

/// Half of a head's pairs turn by the row of a patch, and half by its column.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rotary {
    /// What angles are powers of.
    pub(super) base: f64,
    /// Where the pairs lie in a head.
    pub(super) pairs: Pairs,
}

/// Where pairs that turn lie in a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pairs {
    /// First and second of each half a head apart; the first half turns by rows.
    Together,
    /// Each half of a head has its own, the first one those that turn by columns.
    ByHalf,
}

/// What query-key products are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    /// One over the root of a head's values.
    RootOfHead,
    /// Nothing.
    One,
}

/// What stands between the layers of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Function {
    Plain(Pointwise),
    Gated(Glu),
}

/// How the patches of a row become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// Side by side they go through two layers.
    Merged,
    /// They become their mean, which is normalised and goes through one layer.
    Pooled {
        /// Whether the mean is multiplied by the root of its values.
        grows: bool,
    },
}

/// A linear layer, a norm or a table: what stands before `weight` and `bias`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Patch,
    Positions,
    AttentionNorm,
    Qkv,
    Query,
    Key,
    Value,
    QueryNorm,
    KeyNorm,
    AttentionOutput,
    AttentionPostNorm,
    MlpNorm,
    Gate,
    Up,
    Down,
    MlpPostNorm,
    /// Of patches, behind the last block.
    LastNorm,
    /// Subtracted from a mean, and what it is then multiplied by.
    MeanBias,
    MeanScale,
    MergerUp,
    MergerDown,
    LevelNorm,
    LevelUp,
    LevelDown,
    /// Of means.
    MeanNorm,
    Projection,
}

/// A part and what it is called; `{}` stands for the number of its block or level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) part: Part,
    /// Whether it lies between the tower and the model.
    pub(super) beside: bool,
    pub(super) hugging_face: &'static str,
    pub(super) gguf: &'static str,
}

const fn row(part: Part, hugging_face: &'static str, gguf: &'static str) -> Row {
    Row { part, beside: false, hugging_face, gguf }
}

const fn beside(part: Part, hugging_face: &'static str, gguf: &'static str) -> Row {
    Row { part, beside: true, hugging_face, gguf }
}

/// Of Qwen3-VL and Qwen3.5.
pub(crate) const QWEN3: TowerFacts = TowerFacts {
    name: "Qwen vision",
    projector: "qwen3vl_merger",
    beginnings: &[
        Beginning { tower: "model.visual.", beside: "model.visual." },
        Beginning { tower: "visual.", beside: "visual." },
    ],
    keys: Keys {
        blocks: "depth",
        heads: "num_heads",
        activation: "hidden_act",
        eps: None,
        merge: Some("spatial_merge_size"),
    },
    names: &[
        row(Part::Patch, "patch_embed.proj", "v.patch_embd"),
        row(Part::Positions, "pos_embed", "v.position_embd"),
        row(Part::AttentionNorm, "blocks.{}.norm1", "v.blk.{}.ln1"),
        row(Part::Qkv, "blocks.{}.attn.qkv", "v.blk.{}.attn_qkv"),
        row(Part::AttentionOutput, "blocks.{}.attn.proj", "v.blk.{}.attn_out"),
        row(Part::MlpNorm, "blocks.{}.norm2", "v.blk.{}.ln2"),
        row(Part::Up, "blocks.{}.mlp.linear_fc1", "v.blk.{}.ffn_up"),
        row(Part::Down, "blocks.{}.mlp.linear_fc2", "v.blk.{}.ffn_down"),
        row(Part::LastNorm, "merger.norm", "v.post_ln"),
        row(Part::MergerUp, "merger.linear_fc1", "mm.0"),
        row(Part::MergerDown, "merger.linear_fc2", "mm.2"),
        row(Part::LevelNorm, "deepstack_merger_list.{}.norm", "v.deepstack.{}.norm"),
        row(Part::LevelUp, "deepstack_merger_list.{}.linear_fc1", "v.deepstack.{}.fc1"),
        row(Part::LevelDown, "deepstack_merger_list.{}.linear_fc2", "v.deepstack.{}.fc2"),
    ],
    norm: NormKind::Layer,
    reads: Reads::TwoFrames,
    positions: Positions::Stretched,
    rotary: Some(Rotary { base: 10_000.0, pairs: Pairs::Together }),
    scale: Scale::RootOfHead,
    function: Function::Plain(Pointwise::GeluTanh),
    ending: Ending::Merged,
    merge: 2,
};

/// SigLIP as Gemma 3 has it.
pub(crate) const GEMMA3: TowerFacts = TowerFacts {
    name: "Gemma 3 vision",
    projector: "gemma3",
    beginnings: &[
        Beginning { tower: "vision_tower.vision_model.", beside: "multi_modal_projector." },
        Beginning { tower: "model.vision_tower.vision_model.", beside: "model.multi_modal_projector." },
        Beginning { tower: "vision_tower.", beside: "multi_modal_projector." },
        Beginning { tower: "model.vision_tower.", beside: "model.multi_modal_projector." },
    ],
    keys: Keys {
        blocks: "num_hidden_layers",
        heads: "num_attention_heads",
        activation: "hidden_act",
        eps: Some("layer_norm_eps"),
        merge: None,
    },
    names: &[
        row(Part::Patch, "embeddings.patch_embedding", "v.patch_embd"),
        row(Part::Positions, "embeddings.position_embedding", "v.position_embd"),
        row(Part::AttentionNorm, "encoder.layers.{}.layer_norm1", "v.blk.{}.ln1"),
        row(Part::Query, "encoder.layers.{}.self_attn.q_proj", "v.blk.{}.attn_q"),
        row(Part::Key, "encoder.layers.{}.self_attn.k_proj", "v.blk.{}.attn_k"),
        row(Part::Value, "encoder.layers.{}.self_attn.v_proj", "v.blk.{}.attn_v"),
        row(Part::AttentionOutput, "encoder.layers.{}.self_attn.out_proj", "v.blk.{}.attn_out"),
        row(Part::MlpNorm, "encoder.layers.{}.layer_norm2", "v.blk.{}.ln2"),
        row(Part::Up, "encoder.layers.{}.mlp.fc1", "v.blk.{}.ffn_up"),
        row(Part::Down, "encoder.layers.{}.mlp.fc2", "v.blk.{}.ffn_down"),
        row(Part::LastNorm, "post_layernorm", "v.post_ln"),
        beside(Part::MeanNorm, "mm_soft_emb_norm", "mm.soft_emb_norm"),
        beside(Part::Projection, "mm_input_projection", "mm.input_projection"),
    ],
    norm: NormKind::Layer,
    reads: Reads::Picture,
    positions: Positions::Square,
    rotary: None,
    scale: Scale::RootOfHead,
    function: Function::Plain(Pointwise::GeluTanh),
    ending: Ending::Pooled { grows: false },
    merge: 4,
};

/// Gemma 4's.
pub(crate) const GEMMA4: TowerFacts = TowerFacts {
    name: "Gemma 4 vision",
    projector: "gemma4v",
    beginnings: &[
        Beginning { tower: "model.vision_tower.", beside: "model.embed_vision." },
        Beginning { tower: "vision_tower.", beside: "embed_vision." },
    ],
    keys: Keys {
        blocks: "num_hidden_layers",
        heads: "num_attention_heads",
        activation: "hidden_activation",
        eps: Some("rms_norm_eps"),
        merge: Some("pooling_kernel_size"),
    },
    names: &[
        row(Part::Patch, "patch_embedder.input_proj", "v.patch_embd"),
        row(Part::Positions, "patch_embedder.position_embedding_table", "v.position_embd"),
        row(Part::AttentionNorm, "encoder.layers.{}.input_layernorm", "v.blk.{}.ln1"),
        row(Part::Query, "encoder.layers.{}.self_attn.q_proj", "v.blk.{}.attn_q"),
        row(Part::Key, "encoder.layers.{}.self_attn.k_proj", "v.blk.{}.attn_k"),
        row(Part::Value, "encoder.layers.{}.self_attn.v_proj", "v.blk.{}.attn_v"),
        row(Part::QueryNorm, "encoder.layers.{}.self_attn.q_norm", "v.blk.{}.attn_q_norm"),
        row(Part::KeyNorm, "encoder.layers.{}.self_attn.k_norm", "v.blk.{}.attn_k_norm"),
        row(Part::AttentionOutput, "encoder.layers.{}.self_attn.o_proj", "v.blk.{}.attn_out"),
        row(Part::AttentionPostNorm, "encoder.layers.{}.post_attention_layernorm", "v.blk.{}.attn_post_norm"),
        row(Part::MlpNorm, "encoder.layers.{}.pre_feedforward_layernorm", "v.blk.{}.ln2"),
        row(Part::Gate, "encoder.layers.{}.mlp.gate_proj", "v.blk.{}.ffn_gate"),
        row(Part::Up, "encoder.layers.{}.mlp.up_proj", "v.blk.{}.ffn_up"),
        row(Part::Down, "encoder.layers.{}.mlp.down_proj", "v.blk.{}.ffn_down"),
        row(Part::MlpPostNorm, "encoder.layers.{}.post_feedforward_layernorm", "v.blk.{}.ffn_post_norm"),
        row(Part::MeanBias, "std_bias", "v.std_bias"),
        row(Part::MeanScale, "std_scale", "v.std_scale"),
        beside(Part::Projection, "embedding_projection", "mm.input_projection"),
    ],
    norm: NormKind::Rms,
    reads: Reads::Pixels,
    positions: Positions::ByAxis,
    rotary: Some(Rotary { base: 100.0, pairs: Pairs::ByHalf }),
    scale: Scale::One,
    function: Function::Gated(Glu::GeluTanh),
    ending: Ending::Pooled { grows: true },
    merge: 3,
};

impl TowerFacts {
    /// What a part is called; `None` where the family does not have it.
    pub(super) fn name_of(&self, part: Part) -> Option<&'static Row> {
        self.names.iter().find(|row| row.part == part)
    }
}
