//! Every fact is flipped, and the flip must show: either the load refuses, or log-probabilities move by at least ten
//! times the bound that the right fact keeps. So no fact is untested, and none is here that does not matter.

use fornax_compute::{
    DeltaHeads, GateOrder, Glu, Groups, Heads, KeySharing, NormKind, Pointwise, Routing, ScanHeads, Scores,
    Shares, Temperature,
};
use fornax_format::Checkpoint;
use fornax_model::{
    AttentionConfig, AttentionScale, BiasRule, ChannelScanConfig, Config, ConvConfig, DeltaConfig, Dim,
    EmbeddingScale, Facts, FeedForward, FirstPosition, Floor, Inner, Interleave, LatentConfig, LayerConfig,
    LayerInputs, LogitScale, Mixer, Mixture, Name, Owner, ParallelRule, Portion, QkRows, Recurrent, Rope,
    Rotary, RotaryRule, Scales, Scaling, ScanConfig, ScanLayers, ScanScales, ShareRule, StepNorms,
    TemperatureRule, Tensor, Transform, When, WindowRule,
};
use serde_json::Value;

use crate::fixture::Container::{Gguf, HuggingFace};
use crate::fixture::{Container, Golden, open, open_gguf, open_hugging_face, rename};
use crate::golden::BOUND;
use crate::rig::{Mode, Rig, Room, distance, logits};

/// How a flip must show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shows {
    /// In the numbers.
    Numbers,
    /// In a refusal to load.
    Refusal,
}
use Shows::{Numbers, Refusal};

/// Loads by `config`, and checks that the outcome differs from golden as it must.
fn check(what: &str, case: &str, checkpoint: &Checkpoint, config: &Config, shows: Shows) {
    let golden = Golden::read(case);
    let len = golden.tokens.len();
    let room = Room { tokens_max: len, sequences: 1, context: len };
    match (Rig::new(checkpoint, config, Mode::float(), room), shows) {
        (Err(_), Refusal) => {}
        (Err(error), Numbers) => panic!("{case}: {what}: refused: {error}"),
        (Ok(_), Refusal) => panic!("{case}: {what}: loaded"),
        (Ok(mut rig), Numbers) => {
            let moved = distance(&logits(&mut rig, &golden.tokens, len), &golden.logits);
            println!("{case}: {what}: {moved:.3}");
            assert!(moved >= 10.0 * BOUND, "{case}: {what}: {moved:e}");
        }
    }
}

/// The names of a struct's fields, or of an enum variant's. Does not compile when one is left out.
macro_rules! fields {
    ($($path:ident)::+ { $($field:ident),* $(,)? }) => {{
        let _all_are_named = |value| matches!(value, $($path)::+ { $($field: _),* });
        [$(stringify!($field)),*]
    }};
}

/// A field, the fixture that is loaded with it changed, and how that must show.
type Flip<T> = (&'static str, &'static str, Container, Shows, fn(&mut T));

/// Checks that each field has its flip, and runs them all.
fn check_all<T: 'static>(
    fields: &[&str],
    untested: &[&str],
    flips: &[Flip<T>],
    flip: impl Fn(&Checkpoint, fn(&mut T)) -> Result<Config, fornax_model::Error>,
) {
    for field in fields {
        let flipped = flips.iter().any(|(name, ..)| name == field);
        assert!(flipped != untested.contains(field), "{field} has no flip, or has one and is excused");
    }
    for (field, case, container, shows, change) in flips {
        assert!(fields.contains(field), "{field} is no field");
        let checkpoint = open(case, *container);
        match (flip(&checkpoint, *change), shows) {
            (Ok(config), shows) => {
                check(&format!("{container:?} {field}"), case, &checkpoint, &config, *shows)
            }
            (Err(_), Refusal) => {}
            (Err(error), Numbers) => panic!("{case}: {field}: refused: {error}"),
        }
    }
}

#[test]
fn every_fact_of_an_architecture_matters() {
    let fields = fields!(Facts {
        name,
        gguf,
        model_types,
        classes,
        keys,
        defaults,
        layers,
        beginnings,
        not_text,
        names,
        gguf_qk_rows,
        hugging_face_qk_rows,
        norm,
        norm_less_one,
        encoder,
        first_position,
        head_function,
        bias,
        window,
        rope_base,
        yarn_truncates,
        partial_rotary,
        proportional_rotary,
        sections,
        tower,
        looks_ahead,
        rotary,
        window_rope_base,
        full_head_dim,
        norms_rotated,
        norms_values,
        parallel,
        attention_scale,
        soft_caps,
        embedding_scale,
        multipliers,
        part_multipliers,
        logit_scale,
        ffn_of_hidden,
        experts,
        scores,
        floor,
        dense_too,
        glu,
        function,
        recurrent,
        chunks,
        unit_norms,
        weighs_inputs,
        xielu,
        latent,
        temperature,
        groups_by_two,
        groups_named,
    });
    // A label; what finds the row, which the table's own tests flip; two with tests of their own below; those of encoders
    // beside; what matters where images are read (`images.rs`).
    let elsewhere = [
        "name",
        "model_types",
        "classes",
        "names",
        "rope_base",
        "encoder",
        "head_function",
        "sections",
        "tower",
        "looks_ahead",
    ];
    check_all::<Facts>(
        &fields,
        &elsewhere,
        &[
            ("gguf", "llama", Gguf, Refusal, |facts| facts.gguf = Some("qwen2")),
            ("gguf_qk_rows", "llama", Gguf, Numbers, |facts| facts.gguf_qk_rows = QkRows::Halves),
            ("gguf_qk_rows", "llama-bias", Gguf, Numbers, |facts| facts.gguf_qk_rows = QkRows::Halves),
            ("gguf_qk_rows", "qwen2", Gguf, Numbers, |facts| facts.gguf_qk_rows = QkRows::Pairs),
            ("bias", "qwen2", Gguf, Refusal, |facts| facts.bias = BiasRule::Never),
            ("bias", "qwen2", HuggingFace, Refusal, |facts| facts.bias = BiasRule::Configured),
            ("bias", "llama", Gguf, Refusal, |facts| facts.bias = BiasRule::Qkv),
            ("bias", "llama-bias", Gguf, Refusal, |facts| facts.bias = BiasRule::Qkv),
            ("window", "mistral", HuggingFace, Numbers, |facts| facts.window = WindowRule::Never),
            ("window", "qwen2-window", HuggingFace, Numbers, |facts| facts.window = WindowRule::Never),
            ("window", "qwen2-window", HuggingFace, Numbers, |facts| {
                facts.window = WindowRule::EveryLayer(Some(1))
            }),
            ("window", "mistral", HuggingFace, Numbers, |facts| facts.window = WindowRule::SomeLayers),
            ("window", "mistral", HuggingFace, Numbers, |facts| facts.window = WindowRule::AllButEvery(2)),
            ("function", "arcee", Gguf, Numbers, |facts| facts.function = Some(Pointwise::Relu)),
            ("function", "arcee", Gguf, Refusal, |facts| facts.function = None),
            ("first_position", "opt", HuggingFace, Refusal, |facts| {
                facts.first_position = FirstPosition::Zero
            }),
            ("norm_less_one", "nemotron", HuggingFace, Numbers, |facts| facts.norm_less_one = false),
            ("partial_rotary", "nemotron", HuggingFace, Refusal, |facts| facts.partial_rotary = None),
            ("window", "cwm", HuggingFace, Numbers, |facts| facts.window = WindowRule::Never),
            ("logit_scale", "hyperclovax", HuggingFace, Numbers, |facts| {
                facts.logit_scale = LogitScale::Divides
            }),
            ("layers", "llama", HuggingFace, Refusal, |facts| facts.layers = "layers"),
            ("keys", "gpt2", HuggingFace, Refusal, |facts| facts.keys = &[]),
            ("keys", "gemma2", HuggingFace, Numbers, |facts| {
                facts.keys = &[];
                facts.glu = Glu::Silu;
            }),
            ("defaults", "gemma3-images", HuggingFace, Refusal, |facts| facts.defaults = &[]),
            ("defaults", "gemma3-images", HuggingFace, Numbers, |facts| {
                facts.defaults = &[
                    ("query_pre_attn_scalar", 24.0),
                    ("rms_norm_eps", 1e-6),
                    ("max_position_embeddings", 131072.0),
                ]
            }),
            ("beginnings", "gpt2", HuggingFace, Refusal, |facts| facts.beginnings = &[]),
            ("beginnings", "gemma3-images", HuggingFace, Refusal, |facts| facts.beginnings = &[]),
            ("not_text", "gemma3-images", HuggingFace, Refusal, |facts| facts.not_text = &[]),
            ("layers", "gpt2", HuggingFace, Refusal, |facts| facts.layers = "model.layers"),
            ("norm_less_one", "gemma2", HuggingFace, Numbers, |facts| facts.norm_less_one = false),
            ("norm_less_one", "gemma3", HuggingFace, Numbers, |facts| facts.norm_less_one = false),
            ("bias", "gpt2", HuggingFace, Refusal, |facts| facts.bias = BiasRule::Never),
            ("window", "gemma2", Gguf, Numbers, |facts| facts.window = WindowRule::AllButEvery(3)),
            ("window", "gemma3", Gguf, Numbers, |facts| facts.window = WindowRule::AllButEvery(5)),
            ("window", "phi3", HuggingFace, Numbers, |facts| facts.window = WindowRule::Never),
            ("partial_rotary", "phi3", HuggingFace, Refusal, |facts| facts.partial_rotary = None),
            ("chunks", "llama4", HuggingFace, Numbers, |facts| facts.chunks = false),
            ("unit_norms", "llama4", HuggingFace, Numbers, |facts| facts.unit_norms = false),
            ("unit_norms", "llama4-long", Gguf, Numbers, |facts| facts.unit_norms = false),
            ("weighs_inputs", "llama4", HuggingFace, Numbers, |facts| facts.weighs_inputs = false),
            ("weighs_inputs", "llama4-long", Gguf, Numbers, |facts| facts.weighs_inputs = false),
            ("temperature", "llama4", HuggingFace, Numbers, |facts| facts.temperature = None),
            ("xielu", "apertus", HuggingFace, Refusal, |facts| facts.xielu = false),
            ("latent", "deepseek-v3", Gguf, Refusal, |facts| facts.latent = false),
            ("latent", "deepseek-v2-lite", HuggingFace, Refusal, |facts| facts.latent = false),
            ("temperature", "mistral4", Gguf, Numbers, |facts| facts.temperature = None),
            ("temperature", "mistral4", HuggingFace, Numbers, |facts| facts.temperature = None),
            ("temperature", "ministral3", Gguf, Numbers, |facts| {
                facts.temperature = Some(TemperatureRule { gguf_beta: None, unrotated: true })
            }),
            ("temperature", "ministral3", HuggingFace, Numbers, |facts| facts.temperature = None),
            ("groups_by_two", "deepseek-v2", HuggingFace, Numbers, |facts| facts.groups_by_two = Some(true)),
            ("groups_by_two", "deepseek-v3", Gguf, Numbers, |facts| facts.groups_by_two = Some(false)),
            ("groups_named", "deepseek-v2-unnamed", HuggingFace, Numbers, |facts| facts.groups_named = false),
            ("defaults", "deepseek-v2-unnamed", HuggingFace, Refusal, |facts| facts.defaults = &[]),
            ("defaults", "deepseek-v3-unsaid", HuggingFace, Numbers, |facts| {
                facts.defaults = &[("first_k_dense_replace", 3.0), ("routed_scaling_factor", 2.5)]
            }),
            ("defaults", "deepseek-v3-unsaid", HuggingFace, Refusal, |facts| {
                facts.defaults = &[("n_group", 8.0), ("topk_group", 4.0), ("routed_scaling_factor", 2.5)]
            }),
            ("keys", "falcon-mamba-inner", HuggingFace, Refusal, |facts| {
                facts.keys = &[
                    ("mamba_d_state", "state_size"),
                    ("mamba_d_conv", "conv_kernel"),
                    ("mamba_expand", "expand"),
                    ("rms_norm_eps", "layer_norm_epsilon"),
                ]
            }),
            ("rotary", "llama4-full", Gguf, Numbers, |facts| facts.rotary = RotaryRule::Never),
            ("attention_scale", "deepseek-v3", Gguf, Numbers, |facts| {
                facts.attention_scale = AttentionScale::HeadSize
            }),
            ("attention_scale", "youtu", HuggingFace, Numbers, |facts| {
                facts.attention_scale = AttentionScale::HeadSize
            }),
            ("gguf_qk_rows", "deepseek-v2", Gguf, Numbers, |facts| facts.gguf_qk_rows = QkRows::Halves),
            ("hugging_face_qk_rows", "glm4-moe-lite", HuggingFace, Numbers, |facts| {
                facts.hugging_face_qk_rows = QkRows::Halves
            }),
            ("scores", "deepseek-v2", HuggingFace, Numbers, |facts| facts.scores = Scores::Sigmoid),
            ("scores", "kimi-k2", HuggingFace, Numbers, |facts| facts.scores = Scores::Softmax),
            ("recurrent", "qwen35", Gguf, Refusal, |facts| facts.recurrent = None),
            ("recurrent", "lfm2", HuggingFace, Refusal, |facts| facts.recurrent = None),
            ("recurrent", "qwen35", Gguf, Numbers, |facts| {
                facts.recurrent = Some(Recurrent::DeltaRule { gguf: KeySharing::Neighbours })
            }),
            ("recurrent", "qwen3next", Gguf, Numbers, |facts| {
                facts.recurrent = Some(Recurrent::DeltaRule { gguf: KeySharing::Turns })
            }),
            ("recurrent", "granite-hybrid", Gguf, Refusal, |facts| facts.recurrent = None),
            ("recurrent", "granite-hybrid", HuggingFace, Numbers, |facts| {
                facts.recurrent =
                    Some(Recurrent::Scan { gates: GateOrder::NormFirst, layers: ScanLayers::InPlace })
            }),
            ("recurrent", "nemotron-h", Gguf, Refusal, |facts| {
                facts.recurrent =
                    Some(Recurrent::Scan { gates: GateOrder::GatesFirst, layers: ScanLayers::InPlace })
            }),
            ("recurrent", "falcon-h1", HuggingFace, Refusal, |facts| {
                facts.recurrent =
                    Some(Recurrent::Scan { gates: GateOrder::GatesFirst, layers: ScanLayers::InPlace })
            }),
            ("part_multipliers", "falcon-h1", HuggingFace, Numbers, |facts| facts.part_multipliers = false),
            ("gguf_qk_rows", "falcon-h1", Gguf, Numbers, |facts| facts.gguf_qk_rows = QkRows::Pairs),
            ("logit_scale", "falcon-h1", HuggingFace, Numbers, |facts| facts.logit_scale = LogitScale::None),
            ("rotary", "nemotron-h", HuggingFace, Numbers, |facts| facts.rotary = RotaryRule::EveryLayer),
            ("function", "nemotron-h", Gguf, Numbers, |facts| facts.function = Some(Pointwise::Relu)),
            ("keys", "nemotron-h", HuggingFace, Refusal, |facts| facts.keys = &[]),
            ("keys", "nemotron-h-moe", HuggingFace, Refusal, |facts| {
                facts.keys = &facts.keys[..facts.keys.len() - 1]
            }),
            ("keys", "mamba", HuggingFace, Refusal, |facts| facts.keys = &[]),
            ("defaults", "mamba", HuggingFace, Refusal, |facts| facts.defaults = &[]),
            ("recurrent", "jamba", Gguf, Refusal, |facts| facts.recurrent = None),
            ("rotary", "jamba", HuggingFace, Numbers, |facts| facts.rotary = RotaryRule::EveryLayer),
            ("dense_too", "jamba-dense", HuggingFace, Refusal, |facts| facts.dense_too = false),
            ("experts", "jamba", Gguf, Numbers, |facts| facts.experts = Some(ShareRule::OfChosen)),
            ("gguf", "nemotron-h-moe", Gguf, Refusal, |facts| facts.gguf = Some("nemotron_h")),
            ("not_text", "nemotron-h-latent", HuggingFace, Refusal, |facts| facts.not_text = &[]),
            ("function", "nemotron-h-moe", Gguf, Numbers, |facts| facts.function = Some(Pointwise::Relu)),
            ("scores", "nemotron-h-moe", HuggingFace, Numbers, |facts| facts.scores = Scores::Softmax),
            ("floor", "nemotron-h-moe", Gguf, Numbers, |facts| facts.floor = Floor::Added(0.5)),
            ("experts", "nemotron-h-moe", HuggingFace, Refusal, |facts| facts.experts = None),
            ("experts", "nemotron-h-latent", Gguf, Numbers, |facts| {
                facts.experts = Some(ShareRule::OfChosen)
            }),
            ("keys", "mamba2", HuggingFace, Refusal, |facts| facts.keys = &[]),
            ("defaults", "mamba2", HuggingFace, Refusal, |facts| facts.defaults = &[]),
            ("rotary", "granite-hybrid", Gguf, Numbers, |facts| facts.rotary = RotaryRule::EveryLayer),
            ("rotary", "granite-hybrid-dense", HuggingFace, Numbers, |facts| {
                facts.rotary = RotaryRule::EveryLayer
            }),
            ("rotary", "granite-hybrid-rope", HuggingFace, Numbers, |facts| {
                facts.rotary = RotaryRule::AllButEvery(2)
            }),
            ("keys", "granite-hybrid", HuggingFace, Refusal, |facts| facts.keys = &[]),
            ("window_rope_base", "gemma3", Gguf, Numbers, |facts| facts.window_rope_base = None),
            ("window_rope_base", "gemma3-images", HuggingFace, Numbers, |facts| {
                facts.window_rope_base = Some(1000.0)
            }),
            ("window_rope_base", "olmo3", Gguf, Numbers, |facts| facts.window_rope_base = None),
            ("window_rope_base", "olmo3", HuggingFace, Numbers, |facts| facts.window_rope_base = Some(500.0)),
            ("window", "olmo3", Gguf, Numbers, |facts| facts.window = WindowRule::EveryLayer(None)),
            ("window", "olmo3", HuggingFace, Numbers, |facts| facts.window = WindowRule::Never),
            ("proportional_rotary", "gemma4", HuggingFace, Refusal, |facts| facts.proportional_rotary = None),
            ("full_head_dim", "gemma4", Gguf, Refusal, |facts| facts.full_head_dim = None),
            ("full_head_dim", "gemma4-images", HuggingFace, Refusal, |facts| facts.full_head_dim = None),
            ("norms_values", "gemma4", Gguf, Numbers, |facts| facts.norms_values = false),
            ("norms_values", "gemma4-images", HuggingFace, Numbers, |facts| facts.norms_values = false),
            ("defaults", "gemma4-unified", HuggingFace, Refusal, |facts| facts.defaults = &[]),
            ("norms_values", "qwen3", HuggingFace, Numbers, |facts| facts.norms_values = true),
            ("attention_scale", "gemma4", HuggingFace, Numbers, |facts| {
                facts.attention_scale = AttentionScale::HeadSize
            }),
            ("dense_too", "gemma4", Gguf, Refusal, |facts| facts.dense_too = false),
            ("dense_too", "gemma4-e", HuggingFace, Refusal, |facts| facts.dense_too = false),
            ("experts", "gemma4-experts", HuggingFace, Refusal, |facts| facts.experts = None),
            ("experts", "gemma4-experts", Gguf, Numbers, |facts| {
                facts.experts =
                    Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfAll })
            }),
            ("rotary", "smollm3", Gguf, Numbers, |facts| facts.rotary = RotaryRule::EveryLayer),
            ("rotary", "smollm3", Gguf, Numbers, |facts| facts.rotary = RotaryRule::AllButEvery(3)),
            ("rotary", "smollm3-listed", HuggingFace, Numbers, |facts| facts.rotary = RotaryRule::Windows),
            ("rotary", "exaone4", Gguf, Numbers, |facts| facts.rotary = RotaryRule::EveryLayer),
            ("rotary", "exaone4-full", HuggingFace, Numbers, |facts| {
                facts.rotary = RotaryRule::AllButEvery(2)
            }),
            ("rotary", "cohere2", HuggingFace, Numbers, |facts| facts.rotary = RotaryRule::EveryLayer),
            ("hugging_face_qk_rows", "glm4", HuggingFace, Numbers, |facts| {
                facts.hugging_face_qk_rows = QkRows::Halves
            }),
            ("hugging_face_qk_rows", "ernie4-5", HuggingFace, Numbers, |facts| {
                facts.hugging_face_qk_rows = QkRows::Halves
            }),
            ("hugging_face_qk_rows", "cohere2", HuggingFace, Numbers, |facts| {
                facts.hugging_face_qk_rows = QkRows::Halves
            }),
            ("hugging_face_qk_rows", "llama", HuggingFace, Numbers, |facts| {
                facts.hugging_face_qk_rows = QkRows::Pairs
            }),
            ("gguf_qk_rows", "glm4", Gguf, Numbers, |facts| facts.gguf_qk_rows = QkRows::Halves),
            ("gguf_qk_rows", "smollm3", Gguf, Numbers, |facts| facts.gguf_qk_rows = QkRows::Halves),
            ("gguf_qk_rows", "cohere", Gguf, Numbers, |facts| facts.gguf_qk_rows = QkRows::Halves),
            ("norms_rotated", "hunyuan-dense", Gguf, Numbers, |facts| facts.norms_rotated = false),
            ("norms_rotated", "qwen3", HuggingFace, Numbers, |facts| facts.norms_rotated = true),
            ("parallel", "cohere", Gguf, Numbers, |facts| facts.parallel = ParallelRule::Never),
            ("parallel", "gpt-neox", HuggingFace, Numbers, |facts| facts.parallel = ParallelRule::Never),
            ("keys", "hunyuan-moe", HuggingFace, Refusal, |facts| facts.keys = &[]),
            ("parallel", "gpt-neox-serial", Gguf, Numbers, |facts| facts.parallel = ParallelRule::Always),
            ("partial_rotary", "stablelm", HuggingFace, Refusal, |facts| facts.partial_rotary = None),
            ("logit_scale", "cohere", Gguf, Numbers, |facts| facts.logit_scale = LogitScale::Divides),
            ("logit_scale", "granite", Gguf, Numbers, |facts| facts.logit_scale = LogitScale::Multiplies),
            ("logit_scale", "cohere2", HuggingFace, Numbers, |facts| facts.logit_scale = LogitScale::None),
            ("bias", "seed-oss", HuggingFace, Refusal, |facts| facts.bias = BiasRule::Configured),
            ("bias", "glm4", HuggingFace, Refusal, |facts| facts.bias = BiasRule::Never),
            ("keys", "ernie4-5-bias", HuggingFace, Refusal, |facts| facts.keys = &[]),
            ("keys", "gpt-neox-serial", HuggingFace, Numbers, |facts| {
                facts.keys = &[("partial_rotary_factor", "rotary_pct")];
                facts.rope_base = 500.0;
            }),
            ("embedding_scale", "gemma", Gguf, Numbers, |facts| facts.embedding_scale = EmbeddingScale::One),
            ("scores", "glm4-moe", HuggingFace, Numbers, |facts| facts.scores = Scores::Softmax),
            ("scores", "dots1", Gguf, Numbers, |facts| facts.scores = Scores::Softmax),
            ("scores", "ernie4-5-moe", Gguf, Numbers, |facts| facts.scores = Scores::Sigmoid),
            ("scores", "minimax-m2", HuggingFace, Numbers, |facts| facts.scores = Scores::SqrtSoftplus),
            ("floor", "lfm2-moe", HuggingFace, Numbers, |facts| facts.floor = Floor::Added(0.5)),
            ("floor", "hy-v3", Gguf, Numbers, |facts| facts.floor = Floor::Least(4.0)),
            ("floor", "ernie4-5-moe", Gguf, Numbers, |facts| facts.floor = Floor::Least(0.9)),
            ("keys", "ernie4-5-moe", HuggingFace, Refusal, |facts| facts.keys = &[]),
            ("partial_rotary", "glm4-moe-air", HuggingFace, Refusal, |facts| facts.partial_rotary = None),
            ("experts", "glm4-moe-air", Gguf, Numbers, |facts| facts.experts = Some(ShareRule::OfChosen)),
            ("experts", "olmoe", Gguf, Numbers, |facts| facts.experts = Some(ShareRule::OfChosen)),
            ("attention_scale", "gemma3-images", HuggingFace, Numbers, |facts| {
                facts.attention_scale = AttentionScale::HeadSize
            }),
            ("attention_scale", "gemma2", Gguf, Numbers, |facts| {
                facts.attention_scale = AttentionScale::PreAttentionScalar { layers: 3 }
            }),
            ("soft_caps", "gemma2", Gguf, Numbers, |facts| facts.soft_caps = None),
            ("embedding_scale", "gemma2", HuggingFace, Numbers, |facts| {
                facts.embedding_scale = EmbeddingScale::One
            }),
            ("multipliers", "granite", HuggingFace, Numbers, |facts| facts.multipliers = false),
            ("multipliers", "granite", Gguf, Numbers, |facts| facts.multipliers = false),
            ("ffn_of_hidden", "gpt2", HuggingFace, Refusal, |facts| facts.ffn_of_hidden = None),
            ("ffn_of_hidden", "gpt2", HuggingFace, Refusal, |facts| facts.ffn_of_hidden = Some(3)),
            ("glu", "gemma2", Gguf, Numbers, |facts| facts.glu = Glu::Silu),
            ("glu", "gpt2", Gguf, Refusal, |facts| facts.glu = Glu::Silu),
            ("norm", "llama", HuggingFace, Refusal, |facts| facts.norm = NormKind::Layer),
            ("norm_less_one", "llama", HuggingFace, Numbers, |facts| facts.norm_less_one = true),
            ("glu", "llama", Gguf, Numbers, |facts| facts.glu = Glu::Gelu),
            ("glu", "gpt-oss", Gguf, Numbers, |facts| facts.glu = Glu::Silu),
            ("glu", "gpt-oss-float", HuggingFace, Numbers, |facts| facts.glu = Glu::Silu),
            ("window", "gpt-oss", Gguf, Numbers, |facts| facts.window = WindowRule::EveryLayer(None)),
            ("yarn_truncates", "gpt-oss", Gguf, Numbers, |facts| facts.yarn_truncates = true),
            ("yarn_truncates", "yarn", Gguf, Numbers, |facts| facts.yarn_truncates = false),
            ("experts", "mixtral", Gguf, Refusal, |facts| facts.experts = None),
            ("experts", "mixtral", HuggingFace, Refusal, |facts| facts.experts = None),
            ("experts", "mixtral", HuggingFace, Numbers, |facts| {
                facts.experts =
                    Some(ShareRule::Configured { gguf: Shares::OfChosen, hugging_face: Shares::OfAll })
            }),
            ("experts", "qwen2moe", HuggingFace, Numbers, |facts| facts.experts = Some(ShareRule::OfChosen)),
            ("experts", "qwen2moe", Gguf, Numbers, |facts| {
                facts.experts =
                    Some(ShareRule::Configured { gguf: Shares::OfChosen, hugging_face: Shares::OfAll })
            }),
            ("experts", "qwen3moe", Gguf, Numbers, |facts| {
                facts.experts =
                    Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfAll })
            }),
        ],
        |checkpoint, change| {
            let mut facts = Config::read(checkpoint)?.facts;
            change(&mut facts);
            Config::with_facts(checkpoint, &facts)
        },
    );
}

#[test]
fn every_number_of_a_configuration_matters() {
    let fields = fields!(Config {
        facts,
        layers,
        ahead,
        hidden,
        vocab,
        context,
        first_position,
        norm_eps,
        rope,
        window_rope,
        sections,
        levels,
        looks_ahead,
        tied,
        parallel,
        qk_norm,
        qkv_bias,
        output_bias,
        mlp_bias,
        attention_scale,
        temperature,
        corrected,
        attention_cap,
        embedding_scale,
        residual_scale,
        logit_scale,
        logit_cap,
        scales,
        layer_inputs,
        glu,
        function,
        xielu,
        token_types,
        pooling,
        ranks,
        dense,
        adapter_room,
    });
    // Facts, rope, scales, encoders, what images are read by and room for adapters have their own tests. The context
    // bounds requests and computes nothing.
    let untested = [
        "facts",
        "rope",
        "sections",
        "levels",
        "looks_ahead",
        "context",
        "first_position",
        "scales",
        "token_types",
        "pooling",
        "ranks",
        "dense",
        "adapter_room",
    ];
    check_all::<Config>(
        &fields,
        &untested,
        &[
            ("function", "nemotron", Gguf, Numbers, |config| config.function = Pointwise::Gelu),
            ("layers", "llama", Gguf, Refusal, |config| config.layers.truncate(1)),
            ("ahead", "qwen35", Gguf, Refusal, |config| config.ahead = false),
            ("hidden", "llama", Gguf, Refusal, |config| config.hidden = 32),
            ("vocab", "llama", Gguf, Refusal, |config| config.vocab = 127),
            ("norm_eps", "llama", Gguf, Numbers, |config| config.norm_eps = 1e-5),
            ("norm_eps", "qwen2", Gguf, Numbers, |config| config.norm_eps = 1e-5),
            ("tied", "llama", HuggingFace, Numbers, |config| config.tied = true),
            ("tied", "llama", Gguf, Refusal, |config| config.tied = true),
            ("tied", "qwen2", Gguf, Refusal, |config| config.tied = false),
            ("parallel", "gpt-neox", Gguf, Numbers, |config| config.parallel = false),
            ("parallel", "llama", Gguf, Numbers, |config| config.parallel = true),
            ("qk_norm", "glm4-moe", Gguf, Refusal, |config| config.qk_norm = false),
            ("qk_norm", "glm4-moe-air", HuggingFace, Refusal, |config| config.qk_norm = true),
            ("temperature", "mistral4", HuggingFace, Numbers, |config| config.temperature = None),
            ("temperature", "deepseek-v3", Gguf, Numbers, |config| {
                config.temperature = Some(Temperature { beta: 0.1, length: 16, offset: 0 })
            }),
            ("xielu", "apertus", Gguf, Numbers, |config| config.xielu.reverse()),
            ("xielu", "apertus", HuggingFace, Numbers, |config| config.xielu.clear()),
            ("corrected", "deepseek-v3", Gguf, Refusal, |config| config.corrected = false),
            ("corrected", "deepseek-v3", HuggingFace, Refusal, |config| config.corrected = false),
            ("attention_scale", "deepseek-v3", HuggingFace, Numbers, |config| {
                // Without what yarn lets scores grow by.
                config.attention_scale = 1.0 / 20f32.sqrt()
            }),
            ("ahead", "glm4-moe", HuggingFace, Refusal, |config| config.ahead = false),
            ("ahead", "nemotron-h-latent", Gguf, Refusal, |config| config.ahead = false),
            ("qkv_bias", "qwen2", Gguf, Refusal, |config| config.qkv_bias = false),
            ("qkv_bias", "llama", HuggingFace, Refusal, |config| config.qkv_bias = true),
            ("output_bias", "llama-bias", Gguf, Refusal, |config| config.output_bias = false),
            ("output_bias", "qwen2", HuggingFace, Refusal, |config| config.output_bias = true),
            ("mlp_bias", "llama-bias", HuggingFace, Refusal, |config| config.mlp_bias = false),
            ("attention_scale", "llama-bias", Gguf, Numbers, |config| config.attention_scale = 0.25),
            ("attention_scale", "qwen2", Gguf, Numbers, |config| config.attention_scale *= 1.05),
            ("attention_cap", "qwen2", Gguf, Numbers, |config| config.attention_cap = Some(2.0)),
            ("window_rope", "mistral", HuggingFace, Numbers, |config| {
                config.window_rope = Some(Rope { base: 100.0, ..config.rope.clone() });
                each(config, |attention| attention.rotary = Rotary::Window);
            }),
            ("embedding_scale", "llama", Gguf, Numbers, |config| config.embedding_scale = 1.1),
            ("residual_scale", "llama", Gguf, Numbers, |config| config.residual_scale = 0.9),
            ("logit_scale", "llama", Gguf, Numbers, |config| config.logit_scale = 0.9),
            ("logit_cap", "llama", Gguf, Numbers, |config| config.logit_cap = Some(5.0)),
            ("attention_cap", "gemma2", Gguf, Numbers, |config| config.attention_cap = None),
            ("attention_cap", "gemma2", HuggingFace, Numbers, |config| config.attention_cap = Some(4.5)),
            ("logit_cap", "gemma2", Gguf, Numbers, |config| config.logit_cap = None),
            ("window_rope", "gemma3", Gguf, Numbers, |config| config.window_rope = None),
            ("window_rope", "gemma4", Gguf, Numbers, |config| config.window_rope = None),
            ("logit_cap", "gemma4", HuggingFace, Numbers, |config| config.logit_cap = None),
            ("layer_inputs", "gemma4-e", Gguf, Refusal, |config| config.layer_inputs = None),
            ("embedding_scale", "granite", Gguf, Numbers, |config| config.embedding_scale = 1.0),
            ("residual_scale", "granite", Gguf, Numbers, |config| config.residual_scale = 1.0),
            ("residual_scale", "granite-hybrid", HuggingFace, Numbers, |config| config.residual_scale = 1.0),
            ("attention_scale", "granite", Gguf, Numbers, |config| config.attention_scale = 0.25),
            ("logit_scale", "granite", HuggingFace, Numbers, |config| config.logit_scale = 1.0),
            ("norm_eps", "gpt2", HuggingFace, Numbers, |config| config.norm_eps = 1e-5),
            ("glu", "llama", Gguf, Numbers, |config| config.glu = Glu::Gelu),
            ("glu", "llama", Gguf, Numbers, |config| config.glu = Glu::GeluTanh),
        ],
        flip_config,
    );
}

#[test]
fn every_fact_of_a_layer_matters() {
    check_all::<Config>(
        &fields!(LayerConfig { mixer, feed_forward, experts_at }),
        // It moves bytes and no numbers: the plan's tests look at those.
        &["experts_at"],
        &[
            ("mixer", "qwen35", Gguf, Refusal, |config| config.layers.swap(0, 1)),
            ("mixer", "lfm2", HuggingFace, Refusal, |config| config.layers.swap(1, 2)),
            ("mixer", "nemotron-h", Gguf, Refusal, |config| config.layers[1].mixer = config.layers[0].mixer),
            ("feed_forward", "nemotron-h", HuggingFace, Refusal, |config| {
                config.layers[1].feed_forward = FeedForward::None
            }),
            ("feed_forward", "nemotron-h-moe", Gguf, Refusal, |config| {
                config.layers[1].feed_forward = FeedForward::None
            }),
            ("feed_forward", "nemotron-h-both", HuggingFace, Refusal, |config| {
                config.layers[3].feed_forward = config.layers[1].feed_forward
            }),
            ("mixer", "granite-hybrid", Gguf, Refusal, |config| config.layers.swap(0, 1)),
            ("mixer", "jamba", HuggingFace, Refusal, |config| config.layers.swap(1, 3)),
            ("feed_forward", "jamba", Gguf, Refusal, |config| config.layers.swap(2, 3)),
            ("feed_forward", "llama", Gguf, Refusal, |config| {
                config.layers[1].feed_forward = FeedForward::Dense { ffn: 32 }
            }),
            ("feed_forward", "qwen2moe-dense", HuggingFace, Refusal, |config| {
                config.layers[0].feed_forward = config.layers[1].feed_forward
            }),
            ("feed_forward", "qwen3moe-sparse", HuggingFace, Refusal, |config| config.layers.reverse()),
            ("feed_forward", "mixtral", Gguf, Refusal, |config| {
                config.layers[1].feed_forward = FeedForward::Dense { ffn: 48 }
            }),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(AttentionConfig { heads, window, reach, chunk, rotary, keys_of, keys_are_values }),
        &["reach"],
        &[
            ("heads", "llama", Gguf, Refusal, |config| attention(config, 1).heads.kv = 4),
            ("heads", "qwen2", HuggingFace, Numbers, |config| {
                // The same weights cut into fewer and larger heads.
                each(config, |attention| attention.heads = Heads { query: 2, kv: 1, dim: 32 });
                config.rope.dims = 32;
            }),
            ("window", "mistral", HuggingFace, Numbers, |config| {
                each(config, |attention| attention.window = Some(19))
            }),
            ("window", "mistral", HuggingFace, Numbers, |config| {
                each(config, |attention| attention.window = Some(21))
            }),
            ("window", "llama", Gguf, Numbers, |config| {
                each(config, |attention| attention.window = Some(40))
            }),
            ("window", "qwen2-window", HuggingFace, Numbers, |config| config.layers.reverse()),
            ("window", "qwen2-window", HuggingFace, Numbers, |config| attention(config, 1).window = None),
            ("window", "gemma2", Gguf, Numbers, |config| {
                let last = config.layers.len() - 1;
                attention(config, 1).window = Some(20);
                attention(config, last).window = None;
            }),
            ("chunk", "llama4", HuggingFace, Numbers, |config| attention(config, 1).chunk = None),
            ("chunk", "llama4", HuggingFace, Numbers, |config| attention(config, 0).chunk = Some(19)),
            ("rotary", "llama4", HuggingFace, Numbers, |config| attention(config, 3).rotary = Rotary::Model),
            ("rotary", "smollm3", Gguf, Numbers, |config| attention(config, 3).rotary = Rotary::Model),
            ("rotary", "llama", Gguf, Numbers, |config| attention(config, 1).rotary = Rotary::None),
            ("rotary", "gemma3", Gguf, Numbers, |config| attention(config, 0).rotary = Rotary::Model),
            ("rotary", "gemma3", HuggingFace, Numbers, |config| attention(config, 5).rotary = Rotary::Window),
            ("keys_of", "llama", Gguf, Numbers, |config| attention(config, 1).keys_of = Some(0)),
            ("keys_of", "qwen2", HuggingFace, Numbers, |config| attention(config, 1).keys_of = Some(0)),
            ("keys_of", "qwen3", HuggingFace, Numbers, |config| attention(config, 1).keys_of = Some(0)),
            ("keys_of", "gemma4-e", Gguf, Numbers, |config| attention(config, 3).keys_of = Some(0)),
            ("keys_of", "gemma4-e", HuggingFace, Refusal, |config| attention(config, 4).keys_of = None),
            ("keys_are_values", "gemma4", Gguf, Refusal, |config| {
                attention(config, 1).keys_are_values = false
            }),
            ("keys_are_values", "gemma4-images", HuggingFace, Refusal, |config| {
                attention(config, 1).keys_are_values = true
            }),
            ("keys_of", "llama", Gguf, Refusal, |config| attention(config, 0).keys_of = Some(1)),
            ("keys_of", "gemma3", Gguf, Refusal, |config| attention(config, 5).keys_of = Some(0)),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(LayerInputs { width, table_at }),
        // It moves bytes and no numbers.
        &["table_at"],
        &[("width", "gemma4-e", HuggingFace, Refusal, |config| {
            config.layer_inputs = config.layer_inputs.map(|inputs| LayerInputs { width: 12, ..inputs })
        })],
        flip_config,
    );
    check_all::<Config>(
        &fields!(LatentConfig { heads, query_rank, latent, kept, turned, value, rows }),
        &[],
        &[
            ("heads", "deepseek-v2", Gguf, Refusal, |config| latent(config).heads = 2),
            ("query_rank", "deepseek-v3", Gguf, Refusal, |config| latent(config).query_rank = None),
            ("query_rank", "deepseek-v2-lite", HuggingFace, Refusal, |config| {
                latent(config).query_rank = Some(28)
            }),
            ("latent", "deepseek-v2", HuggingFace, Refusal, |config| latent(config).latent = 18),
            ("kept", "deepseek-v2", Gguf, Refusal, |config| latent(config).kept = 10),
            ("turned", "deepseek-v2", HuggingFace, Refusal, |config| latent(config).turned = 4),
            ("value", "deepseek-v2", Gguf, Refusal, |config| latent(config).value = 12),
            ("rows", "deepseek-v3", Gguf, Numbers, |config| latent(config).rows = QkRows::Halves),
            ("rows", "deepseek-v3-halves", HuggingFace, Numbers, |config| {
                latent(config).rows = QkRows::Pairs
            }),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(DeltaConfig { heads, taps }),
        // They have their own list below.
        &["heads"],
        &[("taps", "qwen35", Gguf, Refusal, |config| delta(config).taps = 3)],
        flip_config,
    );
    check_all::<Config>(
        &fields!(DeltaHeads { key, value, dim_k, dim_v, sharing }),
        &[],
        &[
            ("key", "qwen35", HuggingFace, Refusal, |config| delta(config).heads.key = 1),
            ("key", "qwen35moe", HuggingFace, Numbers, |config| {
                // The same weights cut into fewer and larger heads.
                each_delta(config, |delta| (delta.heads.key, delta.heads.dim_k) = (1, 24))
            }),
            ("value", "qwen35", Gguf, Refusal, |config| delta(config).heads.value = 2),
            ("dim_k", "qwen35", HuggingFace, Refusal, |config| delta(config).heads.dim_k = 10),
            ("dim_v", "qwen35", HuggingFace, Refusal, |config| delta(config).heads.dim_v = 24),
            ("sharing", "qwen35", HuggingFace, Numbers, |config| {
                each_delta(config, |delta| delta.heads.sharing = KeySharing::Turns)
            }),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(ConvConfig { channels, taps }),
        &[],
        &[
            ("channels", "lfm2", Gguf, Refusal, |config| conv(config).channels = 32),
            ("taps", "lfm2", HuggingFace, Refusal, |config| conv(config).taps = 4),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(ScanConfig { heads, taps, conv_bias, normed, gates }),
        // They have their own list below.
        &["heads"],
        &[
            ("taps", "granite-hybrid", Gguf, Refusal, |config| scan(config).taps = 3),
            ("conv_bias", "granite-hybrid", Gguf, Refusal, |config| scan(config).conv_bias = false),
            ("conv_bias", "granite-hybrid-rope", HuggingFace, Refusal, |config| {
                scan(config).conv_bias = true
            }),
            ("normed", "granite-hybrid", Gguf, Refusal, |config| scan(config).normed = false),
            ("normed", "falcon-h1", HuggingFace, Refusal, |config| scan(config).normed = true),
            ("gates", "falcon-h1-norm", HuggingFace, Numbers, |config| {
                scan(config).gates = GateOrder::GatesFirst
            }),
            ("gates", "granite-hybrid", Gguf, Numbers, |config| scan(config).gates = GateOrder::NormFirst),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(ChannelScanConfig { channels, state, rank, taps, conv_bias, norms }),
        &[],
        &[
            ("channels", "mamba", Gguf, Refusal, |config| channels(config).channels = 64),
            ("state", "jamba", HuggingFace, Refusal, |config| channels(config).state = 10),
            // As many rows in all, cut elsewhere.
            ("state", "falcon-mamba", Gguf, Refusal, |config| {
                (channels(config).state, channels(config).rank) = (11, 7)
            }),
            ("rank", "jamba", Gguf, Refusal, |config| channels(config).rank = 4),
            ("taps", "mamba", HuggingFace, Refusal, |config| channels(config).taps = 3),
            ("conv_bias", "mamba", Gguf, Refusal, |config| channels(config).conv_bias = false),
            ("conv_bias", "jamba-dense", HuggingFace, Refusal, |config| channels(config).conv_bias = true),
            ("norms", "jamba", Gguf, Numbers, |config| channels(config).norms = StepNorms::None),
            ("norms", "mamba", HuggingFace, Numbers, |config| {
                channels(config).norms = StepNorms::Plain { eps: None }
            }),
            ("norms", "falcon-mamba", Gguf, Numbers, |config| channels(config).norms = StepNorms::None),
            ("norms", "falcon-mamba", HuggingFace, Numbers, |config| {
                channels(config).norms = StepNorms::Plain { eps: Some(0.5) }
            }),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(Scales { attention, scan, mlp, gate, scan_inputs }),
        // They have their own list below.
        &["scan_inputs"],
        &[
            ("attention", "falcon-h1", HuggingFace, Numbers, |config| config.scales.attention = 1.0),
            ("scan", "falcon-h1", HuggingFace, Numbers, |config| config.scales.scan = 1.0),
            ("mlp", "falcon-h1", HuggingFace, Numbers, |config| config.scales.mlp = 1.0),
            ("gate", "falcon-h1", HuggingFace, Numbers, |config| config.scales.gate = 1.0),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(ScanScales { gates, values, keys, queries, steps }),
        &[],
        &[
            ("gates", "falcon-h1", HuggingFace, Numbers, |config| config.scales.scan_inputs.gates = 1.0),
            ("values", "falcon-h1", HuggingFace, Numbers, |config| config.scales.scan_inputs.values = 1.0),
            ("keys", "falcon-h1", HuggingFace, Numbers, |config| config.scales.scan_inputs.keys = 1.0),
            ("queries", "falcon-h1", HuggingFace, Numbers, |config| config.scales.scan_inputs.queries = 2.0),
            ("steps", "falcon-h1", HuggingFace, Numbers, |config| config.scales.scan_inputs.steps = 1.0),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(ScanHeads { heads, groups, dim, state }),
        &[],
        &[
            ("heads", "granite-hybrid", HuggingFace, Refusal, |config| scan(config).heads.heads = 2),
            ("groups", "granite-hybrid", HuggingFace, Numbers, |config| {
                // The same weights cut into fewer and larger groups.
                (scan(config).heads.groups, scan(config).heads.state) = (1, 24)
            }),
            ("dim", "granite-hybrid", Gguf, Refusal, |config| scan(config).heads.dim = 24),
            ("state", "granite-hybrid", HuggingFace, Refusal, |config| scan(config).heads.state = 10),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(Routing { experts, chosen, scores, groups, shares, added, least, scale }),
        &[],
        &[
            ("experts", "dots1", Gguf, Refusal, |config| mixture(config).routing.experts = 5),
            ("chosen", "minimax-m2", Gguf, Numbers, |config| mixture(config).routing.chosen = 3),
            ("scores", "exaone-moe", Gguf, Numbers, |config| {
                mixture(config).routing.scores = Scores::SqrtSoftplus
            }),
            ("groups", "glm4-moe", Gguf, Numbers, |config| mixture(config).routing.groups = None),
            ("groups", "glm4-moe", HuggingFace, Numbers, |config| {
                mixture(config).routing.groups = Some(Groups { count: 4, chosen: 2, by_two: false })
            }),
            ("groups", "dots1", HuggingFace, Numbers, |config| {
                mixture(config).routing.groups = Some(Groups { count: 3, chosen: 1, by_two: true })
            }),
            ("shares", "hy-v3", Gguf, Numbers, |config| mixture(config).routing.shares = Shares::OfAll),
            ("added", "lfm2-moe", Gguf, Numbers, |config| mixture(config).routing.added = 0.3),
            ("least", "solar-open", HuggingFace, Numbers, |config| mixture(config).routing.least = 3.0),
            ("scale", "hy-v3", HuggingFace, Numbers, |config| mixture(config).routing.scale = 1.0),
            ("scale", "exaone-moe", Gguf, Numbers, |config| mixture(config).routing.scale = 2.0),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(Mixture { routing, ffn, shared_ffn, narrow }),
        &[],
        &[
            ("narrow", "nemotron-h-latent", Gguf, Refusal, |config| mixture(config).narrow = None),
            ("narrow", "nemotron-h-latent", HuggingFace, Refusal, |config| mixture(config).narrow = Some(24)),
            ("narrow", "nemotron-h-moe", HuggingFace, Refusal, |config| mixture(config).narrow = Some(40)),
            ("shared_ffn", "nemotron-h-moe", Gguf, Refusal, |config| mixture(config).shared_ffn = Some(24)),
            ("ffn", "nemotron-h-moe", HuggingFace, Refusal, |config| mixture(config).ffn = 40),
            ("routing", "nemotron-h-both", HuggingFace, Numbers, |config| {
                mixture(config).routing.groups = None
            }),
            ("shared_ffn", "hunyuan-moe", Gguf, Refusal, |config| mixture(config).shared_ffn = Some(16)),
            ("shared_ffn", "qwen2moe", Gguf, Refusal, |config| mixture(config).shared_ffn = Some(40)),
            ("routing", "mixtral", Gguf, Refusal, |config| mixture(config).routing.experts = 4),
            ("routing", "qwen3moe", HuggingFace, Refusal, |config| mixture(config).routing.experts = 7),
            ("routing", "mixtral", Gguf, Numbers, |config| mixture(config).routing.chosen = 1),
            ("routing", "qwen2moe", Gguf, Numbers, |config| mixture(config).routing.chosen = 4),
            ("routing", "qwen3moe", Gguf, Numbers, |config| mixture(config).routing.shares = Shares::OfAll),
            ("routing", "qwen2moe", HuggingFace, Numbers, |config| {
                mixture(config).routing.shares = Shares::OfChosen
            }),
            ("ffn", "qwen2moe", Gguf, Refusal, |config| mixture(config).ffn = 56),
        ],
        flip_config,
    );
}

fn attention(config: &mut Config, layer: usize) -> &mut AttentionConfig {
    match &mut config.layers[layer].mixer {
        Mixer::Attention(attention) => attention,
        other => panic!("{other:?}"),
    }
}

/// The latent attention of the first layer.
fn latent(config: &mut Config) -> &mut LatentConfig {
    match &mut config.layers[0].mixer {
        Mixer::Latent(latent) => latent,
        other => panic!("{other:?}"),
    }
}

/// The delta rule of the first layer.
fn delta(config: &mut Config) -> &mut DeltaConfig {
    match &mut config.layers[0].mixer {
        Mixer::Delta(delta) => delta,
        other => panic!("{other:?}"),
    }
}

/// Changes the delta rule of every layer that has it.
fn each_delta(config: &mut Config, change: fn(&mut DeltaConfig)) {
    let mixers = config.layers.iter_mut().map(|layer| &mut layer.mixer);
    mixers.for_each(|mixer| {
        if let Mixer::Delta(delta) = mixer {
            change(delta);
        }
    });
}

/// The short convolution of the first layer.
fn conv(config: &mut Config) -> &mut ConvConfig {
    match &mut config.layers[0].mixer {
        Mixer::Conv(conv) => conv,
        other => panic!("{other:?}"),
    }
}

/// The selective scan of Mamba-1 of the first layer.
fn channels(config: &mut Config) -> &mut ChannelScanConfig {
    match &mut config.layers[0].mixer {
        Mixer::ChannelScan(scan) => scan,
        other => panic!("{other:?}"),
    }
}

/// The selective scan of the first layer.
fn scan(config: &mut Config) -> &mut ScanConfig {
    match &mut config.layers[0].mixer {
        Mixer::Scan(scan) | Mixer::Beside(_, scan) => scan,
        other => panic!("{other:?}"),
    }
}

/// Changes the attention of every layer.
fn each(config: &mut Config, change: fn(&mut AttentionConfig)) {
    (0..config.layers.len()).for_each(|layer| change(attention(config, layer)));
}

/// The experts of the last layer.
fn mixture(config: &mut Config) -> &mut Mixture {
    match &mut config.layers.last_mut().unwrap().feed_forward {
        FeedForward::Mixture(mixture) => mixture,
        FeedForward::Dense { .. } | FeedForward::None => panic!("no experts"),
    }
}

fn flip_config(checkpoint: &Checkpoint, change: fn(&mut Config)) -> Result<Config, fornax_model::Error> {
    let mut config = Config::read(checkpoint)?;
    change(&mut config);
    Ok(config)
}

#[test]
fn every_number_of_rotation_matters() {
    check_all::<Config>(
        &fields!(Rope { base, dims, scaling, factors, long, context }),
        &[],
        &[
            ("dims", "phi3", Gguf, Refusal, |config| config.rope.dims = 16),
            ("scaling", "phi3", Gguf, Numbers, |config| config.rope.scaling = Scaling::None),
            ("long", "phi3", Gguf, Refusal, |config| config.rope.long = None),
            ("long", "phi3", HuggingFace, Numbers, |config| config.rope.long = None),
            ("context", "phi3", Gguf, Numbers, |config| config.limit_context(40)),
            ("context", "phi3-short", HuggingFace, Numbers, |config| config.rope.context = 129),
            ("base", "llama", Gguf, Numbers, |config| config.rope.base = 500000.0),
            ("base", "qwen2", HuggingFace, Numbers, |config| config.rope.base = 10000.0),
            ("dims", "llama", HuggingFace, Numbers, |config| config.rope.dims = 8),
            ("dims", "llama", Gguf, Numbers, |config| config.rope.dims = 14),
            ("scaling", "linear", Gguf, Numbers, |config| config.rope.scaling = Scaling::None),
            ("scaling", "llama3", HuggingFace, Numbers, |config| config.rope.scaling = Scaling::None),
            ("scaling", "yarn", Gguf, Numbers, |config| config.rope.scaling = Scaling::None),
            ("scaling", "llama", Gguf, Numbers, |config| {
                config.rope.scaling = Scaling::Linear { factor: 2.0 }
            }),
            ("factors", "llama3", Gguf, Numbers, |config| config.rope.factors.fill(1.0)),
            ("factors", "gemma4", Gguf, Numbers, |config| config.rope.factors.fill(1.0)),
            ("factors", "gemma4", HuggingFace, Numbers, |config| config.rope.factors.fill(1.0)),
            ("factors", "llama3", Gguf, Numbers, |config| config.rope.factors.reverse()),
        ],
        flip_config,
    );
}

#[test]
fn every_parameter_of_every_scaling_matters() {
    // Does not compile when a kind of scaling is added without its list below.
    let (Scaling::None
    | Scaling::Linear { .. }
    | Scaling::Llama3 { .. }
    | Scaling::Yarn { .. }
    | Scaling::Long { .. }) = Scaling::None;

    /// A flip of the scaling by a closure that panics on another kind.
    macro_rules! set {
        ($variant:ident.$field:ident = $value:expr) => {
            |config| match &mut config.rope.scaling {
                Scaling::$variant { $field, .. } => *$field = $value,
                other => panic!("{other:?}"),
            }
        };
    }
    check_all::<Config>(
        &fields!(Scaling::Linear { factor }),
        &[],
        &[
            ("factor", "linear", Gguf, Numbers, set!(Linear.factor = 2.6)),
            ("factor", "linear", HuggingFace, Numbers, set!(Linear.factor = 0.4)),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }),
        &[],
        &[
            ("factor", "llama3", HuggingFace, Numbers, set!(Llama3.factor = 4.0)),
            ("low_freq_factor", "llama3", HuggingFace, Numbers, set!(Llama3.low_freq_factor = 0.5)),
            ("high_freq_factor", "llama3", HuggingFace, Numbers, set!(Llama3.high_freq_factor = 8.0)),
            ("original_context", "llama3", HuggingFace, Numbers, set!(Llama3.original_context = 256.0)),
        ],
        flip_config,
    );
    check_all::<Config>(
        &fields!(Scaling::Long { magnitude }),
        &[],
        &[("magnitude", "phi3", Gguf, Numbers, set!(Long.magnitude = 1.0))],
        flip_config,
    );
    check_all::<Config>(
        &fields!(Scaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, magnitude }),
        &[],
        &[
            ("factor", "yarn", Gguf, Numbers, set!(Yarn.factor = 3.0)),
            ("original_context", "yarn", Gguf, Numbers, set!(Yarn.original_context = 128.0)),
            ("beta_fast", "yarn", Gguf, Numbers, set!(Yarn.beta_fast = 32.0)),
            ("beta_slow", "yarn", Gguf, Numbers, set!(Yarn.beta_slow = 1.0)),
            ("truncate", "yarn", Gguf, Numbers, set!(Yarn.truncate = false)),
            ("magnitude", "yarn", Gguf, Numbers, set!(Yarn.magnitude = 1.0)),
        ],
        flip_config,
    );
}

#[test]
fn the_rotary_base_of_files_that_do_not_say_is_the_architectures() {
    // Each of these has the base that is its architecture's, so without the key it is still the same model.
    let without_key = |json: &mut Value| {
        for key in ["rope_theta", "rope_parameters"] {
            json.as_object_mut().unwrap().remove(key);
        }
    };
    let key = ("llama.rope.freq_base", "llama.rope.freq_bas_");
    for (case, checkpoint) in [
        ("llama", open_hugging_face("llama", without_key, |_| {})),
        ("mistral", open_hugging_face("mistral", without_key, |_| {})),
        ("qwen2-window", open_hugging_face("qwen2-window", without_key, |_| {})),
        ("llama", open_gguf("llama", |bytes| rename(bytes, key.0, key.1))),
    ] {
        let config = Config::read(&checkpoint).unwrap();
        let golden = Golden::read(case);
        let len = golden.tokens.len();
        let room = Room { tokens_max: len, sequences: 1, context: len };
        let mut rig = Rig::new(&checkpoint, &config, Mode::float(), room).unwrap();
        let error = distance(&logits(&mut rig, &golden.tokens, len), &golden.logits);
        assert!(error <= BOUND, "{case}: {error:e}");

        let facts = Facts { rope_base: 100000.0, ..config.facts };
        let flipped = Config::with_facts(&checkpoint, &facts).unwrap();
        check("rope_base", case, &checkpoint, &flipped, Numbers);
    }
}

/// The configuration of a fixture by a changed table of names.
fn renamed(checkpoint: &Checkpoint, change: impl FnOnce(&mut [Name])) -> Config {
    let mut config = Config::read(checkpoint).unwrap();
    let mut names = config.facts.names.concat();
    change(&mut names);
    config.facts.names = vec![&*names.leak()].leak();
    config
}

#[test]
fn two_weights_of_one_shape_cannot_be_exchanged() {
    let mut exchanged = 0;
    for (case, container) in [
        ("llama", Gguf),
        ("llama", HuggingFace),
        ("llama-bias", Gguf),
        ("qwen2", HuggingFace),
        ("qwen3", Gguf),
        ("olmo2", HuggingFace),
        ("gemma2", Gguf),
        ("gpt2", HuggingFace),
        ("mixtral", HuggingFace),
        ("qwen2moe", Gguf),
        ("qwen2moe-dense", HuggingFace),
        ("gpt-oss", Gguf),
        ("qwen35", Gguf),
        ("qwen35moe", HuggingFace),
        ("lfm2", HuggingFace),
        ("granite-hybrid", Gguf),
        ("granite-hybrid-dense", Gguf),
        ("glm4-moe", HuggingFace),
        ("mamba2", Gguf),
        ("nemotron-h", Gguf),
        ("nemotron-h-moe", Gguf),
        ("jamba", Gguf),
        ("falcon-h1", Gguf),
        ("gemma4-e", HuggingFace),
        ("gemma4-experts", Gguf),
    ] {
        let checkpoint = open(case, container);
        let config = Config::read(&checkpoint).unwrap();
        let names = config.facts.names.concat();
        // Some layers have none of their own, and miss what they would be exchanged for.
        let shared = |name: &Name| case == "gemma4-e" && name.tensor == Tensor::KeyNorm;
        let there = |name: &Name| has(&checkpoint, name) && holds(&config, name) && !shared(name);
        for (a, b) in (0..names.len()).flat_map(|b| (0..b).map(move |a| (a, b))) {
            let same = (names[a].shape, names[a].owner) == (names[b].shape, names[b].owner);
            // No layer has both.
            if let (When::Dense, When::Mixture | When::Shared) = (names[a].when, names[b].when) {
                continue;
            }
            // Shares of one tensor.
            let same =
                same && names[a].gguf != names[b].gguf && names[a].hugging_face != names[b].hugging_face;
            // Keys and queries meet value by value: what one is multiplied by could as well multiply the other.
            let meet = (names[b].tensor, names[a].tensor) == (Tensor::ScanQueryNorm, Tensor::ScanKeyNorm);
            if !same || meet || !there(&names[a]) || !there(&names[b]) {
                continue;
            }
            let flipped = renamed(&checkpoint, |names| {
                let (gguf, hugging_face) = (names[a].gguf, names[a].hugging_face);
                (names[a].gguf, names[a].hugging_face) = (names[b].gguf, names[b].hugging_face);
                (names[b].gguf, names[b].hugging_face) = (gguf, hugging_face);
            });
            let what = format!("{container:?} {:?} and {:?} exchanged", names[a].tensor, names[b].tensor);
            check(&what, case, &checkpoint, &flipped, Numbers);
            exchanged += 1;
        }
    }
    assert!(exchanged >= 15, "{exchanged}");
}

#[test]
fn every_transform_matters() {
    for (case, container) in [("llama-bias", Gguf), ("llama", Gguf)] {
        let checkpoint = open(case, container);
        let names = Config::read(&checkpoint).unwrap().facts.names.concat();
        // Only rows that are heads have another order.
        let heads = |name: &Name| matches!(name.shape[0], Dim::Query | Dim::Kv) && has(&checkpoint, name);
        for index in (0..names.len()).filter(|index| heads(&names[*index])) {
            let flipped = renamed(&checkpoint, |names| {
                names[index].transform = match names[index].transform {
                    Transform::QkRows => Transform::Keep,
                    _ => Transform::QkRows,
                }
            });
            check(&format!("{:?} transformed", names[index].tensor), case, &checkpoint, &flipped, Numbers);
        }
    }
}

#[test]
fn every_name_and_every_shape_matters() {
    let cases = [
        ("llama-bias", Gguf),
        ("llama", HuggingFace),
        ("llama3", Gguf),
        ("mixtral", HuggingFace),
        ("gpt-oss", Gguf),
        ("gpt-oss", HuggingFace),
        ("qwen2moe", Gguf),
        ("qwen2moe-dense", HuggingFace),
        ("qwen35", Gguf),
        ("qwen3next", HuggingFace),
        ("lfm2", Gguf),
        ("granite-hybrid", Gguf),
        ("granite-hybrid-dense", Gguf),
        ("glm4-moe", Gguf),
        ("ernie4-5-moe", HuggingFace),
        ("mamba2", Gguf),
        ("nemotron-h", Gguf),
        ("nemotron-h-latent", Gguf),
        ("jamba", Gguf),
        ("falcon-h1", Gguf),
        ("gemma4-e", Gguf),
        ("gemma4-experts", HuggingFace),
    ];
    for (case, container) in cases {
        let checkpoint = open(case, container);
        let config = Config::read(&checkpoint).unwrap();
        let names = config.facts.names.concat();
        let there = |name: &Name| has(&checkpoint, name) && holds(&config, name);
        for index in (0..names.len()).filter(|index| there(&names[*index])) {
            let what = |kind: &str| format!("{:?} under another {kind}", names[index].tensor);
            let flipped = renamed(&checkpoint, |names| {
                (names[index].gguf, names[index].hugging_face) = ("nothing", Some("nothing"));
            });
            check(&what("name"), case, &checkpoint, &flipped, Refusal);
            let flipped = renamed(&checkpoint, |names| names[index].shape = &[Dim::Vocab, Dim::Vocab]);
            check(&what("shape"), case, &checkpoint, &flipped, Refusal);
            let flipped = renamed(&checkpoint, |names| {
                names[index].owner = match names[index].owner {
                    Owner::Model => Owner::Layer,
                    Owner::Layer => Owner::Model,
                }
            });
            check(&what("owner"), case, &checkpoint, &flipped, Refusal);
        }
    }
}

/// Whether some layer has what layers without experts have, or those with some: both may call a tensor theirs.
fn holds(config: &Config, name: &Name) -> bool {
    let mixes = |layer: &LayerConfig| layer.feed_forward.mixture().is_some();
    match name.when {
        When::Dense => !config.layers.iter().all(mixes),
        When::Mixture => config.layers.iter().any(mixes),
        _ => true,
    }
}

/// Whether a checkpoint has the weight, in some of its first layers.
fn has(checkpoint: &Checkpoint, name: &Name) -> bool {
    let layers = match name.owner {
        Owner::Model => vec![String::new()],
        Owner::Layer => (0..3).map(|layer| format!("{layer}.")).collect(),
    };
    layers.iter().any(|layer| match checkpoint {
        Checkpoint::Gguf(gguf) => {
            let before = if name.owner == Owner::Layer { "blk." } else { "" };
            gguf.tensor(&format!("{before}{layer}{}", name.gguf)).is_some()
        }
        Checkpoint::HuggingFace(model) => name.hugging_face.is_some_and(|stored| {
            let befores = match name.owner {
                Owner::Model => ["", "transformer."],
                Owner::Layer => ["model.layers.", "transformer.h."],
            };
            let stored = stored.replace("{}", "0");
            let there = |before: &str, end: &str| {
                model.weights().tensor(&format!("{before}{layer}{stored}{end}")).is_some()
            };
            befores.iter().any(|before| there(before, "") || there(before, "_blocks"))
        }),
    })
}

#[test]
fn every_turn_of_a_matrix_matters() {
    let other = |one: Interleave| Interleave { at: (one.at + 1) % one.of, ..one };
    for (case, container, wanted) in [
        ("gpt-oss", HuggingFace, 4),
        ("gpt-oss-float", HuggingFace, 4),
        ("qwen35moe", HuggingFace, 4),
        ("qwen3next", HuggingFace, 4),
        ("granite-hybrid", HuggingFace, 4),
        ("jamba", HuggingFace, 4),
        ("falcon-mamba", Gguf, 4),
        ("gemma4-experts", HuggingFace, 2),
        ("gemma4-experts", Gguf, 2),
    ] {
        let checkpoint = open(case, container);
        let names = Config::read(&checkpoint).unwrap().facts.names.concat();
        let mut exchanged = 0;
        for (index, name) in names.iter().enumerate() {
            let transform = match name.transform {
                Transform::AlternateRows(one) if one.of > 1 => Transform::AlternateRows(other(one)),
                Transform::Alternate(one) => Transform::Alternate(other(one)),
                Transform::HeadShare(turn) => Transform::HeadShare(other(turn)),
                Transform::Below(turn) if name.when == When::Mixture => Transform::Below(other(turn)),
                Transform::Stacked(turn, apart) if turn.of > 1 => Transform::Stacked(other(turn), apart),
                Transform::StackedInBoth(turn, apart) => Transform::StackedInBoth(other(turn), apart),
                Transform::Inner(Inner::Values) => Transform::Inner(Inner::Gates),
                Transform::Inner(Inner::Gates) => Transform::Inner(Inner::Values),
                Transform::Inner(Inner::Keys) => Transform::Inner(Inner::Queries),
                Transform::Inner(Inner::Queries) => Transform::Inner(Inner::Keys),
                Transform::KeyHeads(Portion::Betas) => Transform::KeyHeads(Portion::Decays),
                Transform::KeyHeads(Portion::Decays) => Transform::KeyHeads(Portion::Betas),
                _ => continue,
            };
            let flipped = renamed(&checkpoint, |names| names[index].transform = transform);
            check(&format!("{:?} exchanged", name.tensor), case, &checkpoint, &flipped, Numbers);
            let flipped = renamed(&checkpoint, |names| names[index].transform = Transform::Keep);
            check(&format!("{:?} kept", name.tensor), case, &checkpoint, &flipped, Refusal);
            exchanged += 1;
        }
        assert_eq!(exchanged, wanted, "{case}");
    }
}

#[test]
fn decay_rates_are_stored_as_logarithms_in_one_container_only() {
    let checkpoint = open("qwen35moe", HuggingFace);
    let flipped = renamed(&checkpoint, |names| {
        let rate = names.iter_mut().find(|name| name.transform == Transform::NegativeExp).unwrap();
        rate.transform = Transform::Keep;
    });
    check("rates as they are stored", "qwen35moe", &checkpoint, &flipped, Numbers);
}
