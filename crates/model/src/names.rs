//! The table of weights: canonical name, spelling in each container, shape, and what loading does to the rows.

use crate::facts::QkRows;
use crate::{Config, Facts};

/// A weight by its place in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the table below says what each one is")]
pub enum Tensor {
    Embedding,
    OutputNorm,
    Output,
    RopeFactors,
    AttentionNorm,
    Query,
    Key,
    Value,
    AttentionOutput,
    QueryBias,
    KeyBias,
    ValueBias,
    AttentionOutputBias,
    MlpNorm,
    Gate,
    Up,
    Down,
    GateBias,
    UpBias,
    DownBias,
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
    /// The feed-forward's inner size.
    Ffn,
    /// Rotating pairs of a head.
    Pairs,
}

/// Whether a model has the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is a field of the configuration")]
pub enum When {
    Always,
    Untied,
    QkvBias,
    OutputBias,
    MlpBias,
    RopeFactors,
}

/// What loading does to the stored rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transform {
    /// Nothing.
    Keep,
    /// Puts the rows that rotate together where rotation wants them, if the container has another order.
    QkRows,
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
    /// Its name in GGUF, after `blk.N.` where it is a layer's.
    pub gguf: &'static str,
    /// Its name in a Hugging Face checkpoint, after `model.layers.N.` where it is a layer's; `None` where config.json
    /// has it instead.
    pub hugging_face: Option<&'static str>,
    /// Slowest dimension first.
    pub shape: &'static [Dim],
    /// Whether a model has it.
    pub when: When,
    /// What loading does to its rows.
    pub transform: Transform,
}

/// The weights of a decoder with gated feed-forward, as llama.cpp and transformers name them.
#[rustfmt::skip] // A table: one line per weight.
pub const DECODER: &[Name] = {
    use Dim::{Ffn, Hidden, Kv, Pairs, Query, Vocab};
    use Owner::{Layer, Model};
    use Tensor as T;
    use Transform::{Keep, QkRows};
    use When::{Always, MlpBias, OutputBias, QkvBias, RopeFactors, Untied};
    &[
        name(T::Embedding, Model, "token_embd.weight", Some("model.embed_tokens.weight"), (&[Vocab, Hidden], Always, Keep)),
        name(T::OutputNorm, Model, "output_norm.weight", Some("model.norm.weight"), (&[Hidden], Always, Keep)),
        name(T::Output, Model, "output.weight", Some("lm_head.weight"), (&[Vocab, Hidden], Untied, Keep)),
        name(T::RopeFactors, Model, "rope_freqs.weight", None, (&[Pairs], RopeFactors, Keep)),

        name(T::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
        name(T::Query, Layer, "attn_q.weight", Some("self_attn.q_proj.weight"), (&[Query, Hidden], Always, QkRows)),
        name(T::Key, Layer, "attn_k.weight", Some("self_attn.k_proj.weight"), (&[Kv, Hidden], Always, QkRows)),
        name(T::Value, Layer, "attn_v.weight", Some("self_attn.v_proj.weight"), (&[Kv, Hidden], Always, Keep)),
        name(T::AttentionOutput, Layer, "attn_output.weight", Some("self_attn.o_proj.weight"), (&[Hidden, Query], Always, Keep)),
        name(T::QueryBias, Layer, "attn_q.bias", Some("self_attn.q_proj.bias"), (&[Query], QkvBias, QkRows)),
        name(T::KeyBias, Layer, "attn_k.bias", Some("self_attn.k_proj.bias"), (&[Kv], QkvBias, QkRows)),
        name(T::ValueBias, Layer, "attn_v.bias", Some("self_attn.v_proj.bias"), (&[Kv], QkvBias, Keep)),
        name(T::AttentionOutputBias, Layer, "attn_output.bias", Some("self_attn.o_proj.bias"), (&[Hidden], OutputBias, Keep)),

        name(T::MlpNorm, Layer, "ffn_norm.weight", Some("post_attention_layernorm.weight"), (&[Hidden], Always, Keep)),
        name(T::Gate, Layer, "ffn_gate.weight", Some("mlp.gate_proj.weight"), (&[Ffn, Hidden], Always, Keep)),
        name(T::Up, Layer, "ffn_up.weight", Some("mlp.up_proj.weight"), (&[Ffn, Hidden], Always, Keep)),
        name(T::Down, Layer, "ffn_down.weight", Some("mlp.down_proj.weight"), (&[Hidden, Ffn], Always, Keep)),
        name(T::GateBias, Layer, "ffn_gate.bias", Some("mlp.gate_proj.bias"), (&[Ffn], MlpBias, Keep)),
        name(T::UpBias, Layer, "ffn_up.bias", Some("mlp.up_proj.bias"), (&[Ffn], MlpBias, Keep)),
        name(T::DownBias, Layer, "ffn_down.bias", Some("mlp.down_proj.bias"), (&[Hidden], MlpBias, Keep)),
    ]
};

const fn name(
    tensor: Tensor,
    owner: Owner,
    gguf: &'static str,
    hugging_face: Option<&'static str>,
    (shape, when, transform): (&'static [Dim], When, Transform),
) -> Name {
    Name { tensor, owner, gguf, hugging_face, shape, when, transform }
}

/// Ends of Hugging Face tensor names that hold no weight: old versions of transformers stored the frequencies that
/// they compute from config.json.
pub(crate) const NOT_WEIGHTS: &[&str] = &[".rotary_emb.inv_freq"];

impl Facts {
    /// The table's row of a weight.
    pub(crate) fn row(&self, tensor: Tensor) -> &'static Name {
        self.names
            .iter()
            .find(|name| name.tensor == tensor)
            .expect("every weight has its row; checked by a test")
    }
}

impl When {
    pub(crate) fn holds(self, config: &Config) -> bool {
        match self {
            When::Always => true,
            When::Untied => !config.tied,
            When::QkvBias => config.qkv_bias,
            When::OutputBias => config.output_bias,
            When::MlpBias => config.mlp_bias,
            When::RopeFactors => !config.rope.factors.is_empty(),
        }
    }
}

impl Dim {
    pub(crate) fn size(self, config: &Config) -> usize {
        match self {
            Dim::Vocab => config.vocab,
            Dim::Hidden => config.hidden,
            Dim::Query => config.heads.query * config.heads.dim,
            Dim::Kv => config.heads.kv * config.heads.dim,
            Dim::Ffn => config.ffn,
            Dim::Pairs => config.rope.dims / 2,
        }
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
    fn every_row_is_found_under_its_own_name() {
        for facts in Facts::TABLE {
            for name in facts.names {
                assert_eq!(facts.row(name.tensor), name);
            }
        }
    }
}
