//! The table of architecture facts: everything that makes one architecture differ from another, as plain data.
//!
//! Code asks a fact; it never asks which architecture it is. A fact that is not flipped by a test is not here.

use fornax_compute::{GateOrder, Glu, KeySharing, NormKind, Pointwise, Scores, Shares};

use crate::arch::{NOT_YET, TABLE};
use crate::source::Source;
use crate::{Error, Name, Rotary, TowerFacts};

/// One architecture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// What people call it.
    pub name: &'static str,
    /// `general.architecture` in GGUF; `None` where GGUF files say that they are another architecture.
    pub gguf: Option<&'static str>,
    /// `model_type` in config.json.
    pub model_types: &'static [&'static str],
    /// `architectures` in config.json. Other classes of the same type (classifiers, encoders) compute other things.
    pub classes: &'static [&'static str],
    /// Keys of config.json that this architecture calls otherwise: (what others call it, its own).
    pub keys: &'static [(&'static str, &'static str)],
    /// Numbers that config.json leaves out where they are the architecture's own.
    pub defaults: &'static [(&'static str, f64)],
    /// What stands before a layer's number in the names of a Hugging Face file.
    pub layers: &'static str,
    /// Other beginnings of names in Hugging Face files: (what the table says, what is there), tried in order.
    pub beginnings: &'static [(&'static str, &'static str)],
    /// Beginnings of names in Hugging Face files of what is beside the model that is computed: what reads images or
    /// sounds, what classifiers read. Files with the former have the text model's configuration under `text_config`.
    pub not_text: &'static [&'static str],
    /// Where each weight is stored, and how. What is not in these tables the architecture does not have: norms before a
    /// branch or behind it, norms of queries and keys, sinks, gates, learned positions.
    pub names: &'static [&'static [Name]],
    /// The order of Q and K rows in GGUF.
    pub gguf_qk_rows: QkRows,
    /// The same in Hugging Face files, most of which have halves.
    pub hugging_face_qk_rows: QkRows,
    /// What rows are divided by in norms.
    pub norm: NormKind,
    /// Whether Hugging Face files hold the weights of norms less one. GGUF files never do.
    pub norm_less_one: bool,
    /// Whether it encodes: positions see each other in both directions, and there is no head; a text becomes one vector.
    pub encoder: bool,
    /// Where the table of learned positions begins in Hugging Face files.
    pub first_position: FirstPosition,
    /// What stands between the two matrices of a head that tells how well two texts fit. A cap of one is the hyperbolic
    /// tangent.
    pub head_function: Pointwise,
    /// Which projections have biases.
    pub bias: BiasRule,
    /// Which layers have an attention window.
    pub window: WindowRule,
    /// Rotary base where the configuration does not say: files older than the key.
    pub rope_base: f64,
    /// Whether yarn's ramp begins and ends at whole pairs. GGUF does not say; config.json does where it does not.
    pub yarn_truncates: bool,
    /// The share of a head that rotates where config.json does not have `partial_rotary_factor`; `None` where the
    /// architecture has no such key, and all of a head rotates.
    pub partial_rotary: Option<f64>,
    /// The share of a head's pairs that turn in layers without a window where config.json does not say; the others stand still,
    /// and the frequencies are those of a whole head. `None` where there is no such rotation.
    pub proportional_rotary: Option<f64>,
    /// How many pairs each section of a position turns (time, height, width) where the configuration does not say: of models
    /// that read images. Sections take pairs in turns. `None` where positions have one section.
    pub sections: Option<[u64; 3]>,
    /// What reads images beside it; `None` of models that read text alone, and where it is not computed.
    pub tower: Option<&'static TowerFacts>,
    /// Which layers read an image in both directions.
    pub looks_ahead: LookAhead,
    /// Which layers rotate.
    pub rotary: RotaryRule,
    /// Rotary base of layers with a window where they have their own and the configuration does not say.
    pub window_rope_base: Option<f64>,
    /// The head size of layers without a window where the configuration does not say. Those with a window then have heads of
    /// their own, and the others' keys may be their values, too. `None` where all layers have the same heads.
    pub full_head_dim: Option<usize>,
    /// Whether queries and keys are normalised after they are rotated instead of before.
    pub norms_rotated: bool,
    /// Whether values are normalised, by no weights.
    pub norms_values: bool,
    /// Whether the feed-forward reads what attention reads, and both are added to the residual stream together.
    pub parallel: ParallelRule,
    /// Query-key products are multiplied by this.
    pub attention_scale: AttentionScale,
    /// Caps on attention's scores and on logits where the configuration does not say; `None` where there are none.
    pub soft_caps: Option<SoftCaps>,
    /// What the embedding is multiplied by.
    pub embedding_scale: EmbeddingScale,
    /// Whether the configuration has multipliers for embedding, branches and attention.
    pub multipliers: bool,
    /// Whether config.json has a multiplier for what goes into each part and for what comes out of it. Weights of GGUF files
    /// are multiplied already.
    pub part_multipliers: bool,
    /// What the configuration's number for logits does.
    pub logit_scale: LogitScale,
    /// How many times the hidden size the feed-forward's inner width is where the configuration does not say.
    pub ffn_of_hidden: Option<usize>,
    /// Whether the feed-forward is made of experts, and what their weights are shares of.
    pub experts: Option<ShareRule>,
    /// What a router's logits become. GGUF files may say so, too.
    pub scores: Scores,
    /// What keeps the sum of the chosen experts' scores from zero.
    pub floor: Floor,
    /// Whether files of the same type may have no experts; they count none.
    pub dense_too: bool,
    /// The activation of the feed-forward where the configuration does not say: GGUF never does.
    pub glu: Glu,
    /// The activation of a feed-forward without gates where it is none of gelu's.
    pub function: Option<Pointwise>,
    /// What some layers have in place of attention.
    pub recurrent: Option<Recurrent>,
    /// Whether windows are chunks that a query sees nothing before.
    pub chunks: bool,
    /// Whether queries and keys of layers that rotate are normalised by no weights, where files of the architecture say so.
    pub unit_norms: bool,
    /// Whether a token's weights multiply what its experts read.
    pub weighs_inputs: bool,
    /// Whether each layer's feed-forward has a function of its own, whose numbers are weights.
    pub xielu: bool,
    /// Whether attention is latent.
    pub latent: bool,
    /// How queries grow with their positions, if they do.
    pub temperature: Option<TemperatureRule>,
    /// Whether a group of experts is as good as its two best ones together: `None` says where scores are no softmax.
    pub groups_by_two: Option<bool>,
    /// Whether experts are chosen of groups only where config.json names that way to choose (`topk_method`).
    pub groups_named: bool,
}

/// Which layers read the rows of an image in both directions; text they all read in one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookAhead {
    /// None.
    Never,
    /// All.
    Everywhere,
    /// Those with a window, if config.json says so (`use_bidirectional_attention`); of files that cannot say it, of
    /// models whose layers have no inputs of their own.
    InWindows,
}

/// How queries grow with their positions, where the file says it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TemperatureRule {
    /// How much where a GGUF file does not say: its converter leaves out what every model of the architecture has.
    pub gguf_beta: Option<f64>,
    /// Whether only those of layers that do not rotate grow.
    pub unrotated: bool,
}

/// What some layers have in place of attention, and which: as the file lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recurrent {
    /// The gated delta rule. Where layers are not listed, every n-th attends: the fourth, or what the file says.
    DeltaRule {
        /// How value heads share key heads in GGUF. In Hugging Face files neighbours do.
        gguf: KeySharing,
    },
    /// A gated short convolution. Where layers are not listed, all attend.
    ShortConv,
    /// The selective scan. Where layers are not listed, none attends.
    Scan {
        /// Whether a norm comes before its gates.
        gates: GateOrder,
        /// Where scans are.
        layers: ScanLayers,
    },
    /// The selective scan of Mamba-1. Where layers are not listed, none attends.
    ChannelScan,
}

/// Which layers have a selective scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanLayers {
    /// Those that do not attend.
    InPlace,
    /// Each layer is one branch alone: a scan, attention, or a feed-forward.
    Alone,
    /// All, beside attention: what both say of the residual stream is added to it.
    Beside,
}

/// Which row of a table of positions is the first position's. GGUF files leave out those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstPosition {
    /// The first.
    Zero,
    /// The one behind that of the padding token's number. Those before it are counted among the positions.
    BehindPadding,
    /// The third. Those before it are not counted.
    Third,
}

/// How the rows of a head's Q and K follow each other, which decides the rows that rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkRows {
    /// Row `i` rotates with row `i + dim / 2`: what every backend computes.
    Halves,
    /// Row `2i` rotates with row `2i + 1`: the rows are put into halves when they are loaded.
    Pairs,
}

/// Which projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BiasRule {
    /// None has.
    Never,
    /// Q, K and V have, the others have not.
    Qkv,
    /// All have.
    Always,
    /// `attention_bias` (Q, K, V and output) and `mlp_bias` in config.json; in GGUF the tensors that are there.
    Configured,
    /// The same, but the output has its own key, `attention_out_bias`.
    QkvConfigured,
}

/// Which layers rotate queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryRule {
    /// All.
    EveryLayer,
    /// All but every `n`-th, unless config.json lists them (`no_rope_layers`) or has another `n`
    /// (`no_rope_layer_interval`).
    AllButEvery(u32),
    /// Those with a window; all where no layer has one.
    Windows,
    /// None.
    Never,
    /// All if `position_embedding_type` is `rope`, else none; in GGUF, `rope.scaling.finetuned` says so.
    Configured,
}

/// Whether both branches of a layer read the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParallelRule {
    /// The feed-forward reads what attention has added to.
    Never,
    /// Both read the residual stream as it was.
    Always,
    /// `use_parallel_residual` says, in both containers; where it does not, they do.
    Configured,
}

/// What the configuration's number for logits does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitScale {
    /// There is none.
    None,
    /// Logits are divided by `logits_scaling`.
    Divides,
    /// Logits are multiplied by `logit_scale`.
    Multiplies,
}

/// Which layers have an attention window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowRule {
    /// No layer, whatever config.json says.
    Never,
    /// `sliding_window` holds for every layer; null means none, and this one where the key is missing.
    EveryLayer(Option<u32>),
    /// Every `n`-th layer sees everything, the others have the window; unless `layer_types` or a pattern says which.
    AllButEvery(u32),
    /// The first of every `n` layers sees everything, the others have the window; unless `layer_types` or a pattern says
    /// which.
    AllButFirstOf(u32),
    /// `layer_types` says which, else the layers from `max_window_layers` on; all of it only if `use_sliding_window`.
    SomeLayers,
}

/// What the weights of a token's experts are shares of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareRule {
    /// Of the chosen experts.
    OfChosen,
    /// Of the chosen experts if `norm_topk_prob` in config.json or `expert_weights_norm` in GGUF says so, else of all.
    Configured {
        /// What files in GGUF mean that do not say.
        gguf: Shares,
        /// What config.json means that does not say.
        hugging_face: Shares,
    },
}

/// What keeps the sum of the chosen experts' scores from zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Floor {
    /// Nothing.
    None,
    /// This is added.
    Added(f32),
    /// It is at least this, or what `moe_norm_min` in config.json says.
    Least(f32),
}

/// What query-key products are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionScale {
    /// One.
    One,
    /// One over the root of the head size.
    HeadSize,
    /// One over the root of the size of a head's keys, which turn in part, times how much yarn lets scores grow.
    KeySize,
    /// One over the root of `query_pre_attn_scalar`. GGUF does not have the key: there it is the head size, but in the
    /// model with this many layers hidden size over heads.
    PreAttentionScalar {
        /// Layers of the largest model of the family.
        layers: usize,
    },
}

/// Values that bend towards a bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftCaps {
    /// Of attention's scores.
    pub attention: Option<f64>,
    /// Of logits.
    pub logits: Option<f64>,
}

/// What the embedding is multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmbeddingScale {
    /// Nothing, or what the multipliers say.
    One,
    /// The root of the hidden size.
    RootOfHidden,
}

impl Facts {
    /// Whether queries of a layer with these rotary positions grow, where there is something that they grow by.
    pub(crate) fn grows(&self, rotary: Rotary) -> bool {
        self.temperature.is_some_and(|rule| !rule.unrotated || rotary == Rotary::None)
    }

    /// The order of Q and K rows in this container.
    pub(crate) fn rows_of(&self, source: &Source<'_>) -> QkRows {
        match source {
            Source::Gguf { .. } => self.gguf_qk_rows,
            Source::HuggingFace { .. } => self.hugging_face_qk_rows,
        }
    }

    /// Every architecture that can be loaded.
    pub const TABLE: &[Facts] = TABLE;

    /// The architecture's own name for a key of config.json.
    pub(crate) fn own(&self, key: &'static str) -> &'static str {
        self.keys.iter().find(|(others, _)| *others == key).map_or(key, |(_, own)| own)
    }

    /// The row of a GGUF file by its `general.architecture`, and by whether it counts experts: one architecture's files
    /// may have them or not.
    pub fn of_gguf(architecture: &str, experts: bool) -> Result<&'static Facts, Error> {
        let named = || Facts::TABLE.iter().filter(|facts| facts.gguf == Some(architecture));
        named()
            .find(|facts| facts.experts.is_some() == experts)
            .or_else(|| named().next())
            .ok_or_else(|| unknown("architecture", architecture, |facts| facts.gguf.as_slice()))
    }

    /// The row of a config.json by its `model_type`, or by its `architectures` where there is no type.
    pub fn of_hugging_face(model_type: Option<&str>, classes: &[&str]) -> Result<&'static Facts, Error> {
        let named = |facts: &&Facts| classes.iter().any(|class| facts.classes.contains(class));
        // Some share their type with others, and only their classes tell them apart.
        let alone = |facts: &&Facts| facts.model_types.is_empty() && named(facts);
        let known = |facts: &&Facts| match model_type {
            Some(model_type) => facts.model_types.contains(&model_type),
            // Of what holds another model, only the type says which.
            None => named(facts) && Facts::TABLE.iter().filter(named).count() == 1,
        };
        let mut all = Facts::TABLE.iter();
        let Some(facts) = all.clone().find(alone).or_else(|| all.find(known)) else {
            return Err(match (model_type, classes) {
                (Some(model_type), _) => unknown("model_type", model_type, |facts| facts.model_types),
                (None, [_, ..]) if Facts::TABLE.iter().any(|facts| named(&facts)) => {
                    Error::MissingKey { key: "model_type".to_owned() }
                }
                (None, [class, ..]) => unsupported(format!("architecture {class:?}"), |facts| facts.classes),
                (None, []) => Error::MissingKey { key: "model_type".to_owned() },
            });
        };
        match classes {
            [first, ..] if !classes.iter().any(|class| facts.classes.contains(class)) => {
                Err(unsupported(format!("architecture {first:?}"), |facts| facts.classes))
            }
            _ => Ok(facts),
        }
    }
}

/// The refusal of an architecture, with what it would need where that is known.
fn unknown(kind: &str, spelling: &str, names: impl Fn(&Facts) -> &[&'static str]) -> Error {
    let needs = NOT_YET.iter().find(|(spellings, _)| spellings.contains(&spelling));
    let needs = needs.map_or(String::new(), |(_, needs)| format!(", which needs {needs},"));
    unsupported(format!("{kind} {spelling:?}{needs}"), names)
}

fn unsupported(what: String, names: impl Fn(&Facts) -> &[&'static str]) -> Error {
    let mut supported: Vec<&str> = Vec::new();
    for name in Facts::TABLE.iter().flat_map(|facts| names(facts).to_vec()) {
        if !supported.contains(&name) {
            supported.push(name);
        }
    }
    Error::Unsupported { what, supported: supported.join(", ") }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_spelling_belongs_to_one_row() {
        let spellings = |names: fn(&Facts) -> Vec<&'static str>| {
            let all: Vec<_> = Facts::TABLE.iter().flat_map(names).collect();
            let mut unique = all.clone();
            unique.sort_unstable();
            unique.dedup();
            assert_eq!(unique.len(), all.len(), "{all:?}");
        };
        spellings(|facts| vec![facts.name]);
        spellings(|facts| facts.gguf.filter(|_| facts.experts.is_none()).into_iter().collect());
        spellings(|facts| facts.gguf.filter(|_| facts.experts.is_some()).into_iter().collect());
        spellings(|facts| facts.model_types.to_vec());
        // What holds another model is called the same whichever that is, and the type tells them apart.
        let holds_another = "Mistral3ForConditionalGeneration";
        let own = |class: &&'static str| *class != holds_another;
        let all: Vec<_> = Facts::TABLE.iter().flat_map(|facts| facts.classes).copied().filter(own).collect();
        let unique: BTreeSet<_> = all.iter().collect();
        assert_eq!(unique.len(), all.len(), "{all:?}");
        assert!(matches!(
            Facts::of_hugging_face(None, &[holds_another]).unwrap_err(),
            Error::MissingKey { key } if key == "model_type"
        ));
        assert_eq!(Facts::of_hugging_face(Some("mistral4"), &[holds_another]).unwrap().name, "mistral4");
    }

    #[test]
    fn an_unknown_architecture_is_named_with_what_is_supported() {
        let check = |result: Result<&Facts, Error>, wanted: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.starts_with(wanted), "{error}");
        };
        // The rest of the table follows.
        check(
            Facts::of_gguf("clip", false),
            "architecture \"clip\" is not supported; supported: llama, qwen2, qwen2moe, ",
        );
        check(
            Facts::of_hugging_face(Some("clip"), &["LlamaForCausalLM"]),
            "model_type \"clip\" is not supported; supported: llama, mistral, mixtral, ",
        );
        let classes =
            "LlamaForCausalLM, LLaMAForCausalLM, MistralForCausalLM, Mistral3ForConditionalGeneration, ";
        check(
            Facts::of_hugging_face(Some("llama"), &["LlamaForSequenceClassification"]),
            &format!(
                "architecture \"LlamaForSequenceClassification\" is not supported; supported: {classes}"
            ),
        );
        check(
            Facts::of_hugging_face(None, &["CLIPModel"]),
            &format!("architecture \"CLIPModel\" is not supported; supported: {classes}"),
        );
        check(
            Facts::of_hugging_face(None, &[]),
            "key \"model_type\" is missing from the model's configuration",
        );
    }

    #[test]
    fn what_an_architecture_would_need_is_said_where_it_is_known() {
        let check = |result: Result<&Facts, Error>, wanted: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        };
        check(
            Facts::of_gguf("plamo2", false),
            "\"plamo2\", which needs state-space layers, is not supported",
        );
        check(Facts::of_gguf("rwkv7", false), "\"rwkv7\", which needs recurrent layers, is not");
        check(
            Facts::of_hugging_face(Some("kimi_linear"), &[]),
            "model_type \"kimi_linear\", which needs layers of linear attention",
        );
        check(Facts::of_gguf("deepseek32", true), "\"deepseek32\", which needs attention to positions");
        for (spellings, _) in NOT_YET {
            for spelling in *spellings {
                assert!(
                    Facts::of_gguf(spelling, false).is_err()
                        && Facts::of_hugging_face(Some(spelling), &[]).is_err()
                );
            }
        }
    }

    #[test]
    fn a_known_architecture_is_found_by_type_or_by_class() {
        let name = |model_type, classes: &[&str]| Facts::of_hugging_face(model_type, classes).unwrap().name;
        assert_eq!(name(Some("llama"), &[]), "llama");
        assert_eq!(name(Some("mistral"), &["MistralForCausalLM"]), "mistral");
        assert_eq!(name(None, &["Qwen2ForCausalLM"]), "qwen2");
        assert_eq!(Facts::of_gguf("qwen2", false).unwrap().name, "qwen2");
    }
}
