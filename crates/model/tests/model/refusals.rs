//! Files with one thing wrong: each is refused before anything is loaded, by name.

use fornax_compute::{Counting, Error as ComputeError, KvGroup, KvSpec, Need, Part, Purpose, Sizes};
use fornax_format::{Checkpoint, DType};
use fornax_model::{Config, Error, Limits, measure};
use serde_json::{Value, json};

use crate::fixture::{Container, Number, add_key, open, open_gguf, open_hugging_face, path, rename, set_u32};

/// A backend that computes floats only, and lacks what is listed.
pub(crate) struct Floats(pub(crate) &'static [Need]);

impl Sizes for Floats {
    fn supports(&self, need: Need) -> Result<(), ComputeError> {
        if self.0.contains(&need) {
            return Err(ComputeError::Unsupported { what: need.to_string(), backend: "floats" });
        }
        Ok(())
    }

    fn weight_bytes(&self, parts: &[Part<'_>]) -> Result<u64, ComputeError> {
        for part in parts {
            if !matches!(part.view.dtype, DType::F32 | DType::F16 | DType::BF16) {
                let tensor = part.view.name.to_owned();
                return Err(ComputeError::DType { tensor, dtype: part.view.dtype, backend: "floats" });
            }
        }
        Ok(parts.iter().map(|part| part.view.bytes.len() as u64).sum())
    }

    fn vector_bytes(&self, parts: &[Part<'_>]) -> Result<u64, ComputeError> {
        Ok(parts.iter().map(|part| 4 * part.view.values() as u64).sum())
    }

    fn buf_bytes(&self, _: Purpose, rows: usize, columns: usize) -> u64 {
        4 * (rows * columns) as u64
    }

    fn page_bytes(&self, _: &KvSpec, _: &KvGroup) -> u64 {
        0
    }

    fn workspace_bytes(&self) -> u64 {
        0
    }
}

fn load(checkpoint: &Checkpoint) -> Result<(), Error> {
    load_on(checkpoint, Floats(&[]))
}

fn load_on(checkpoint: &Checkpoint, floats: Floats) -> Result<(), Error> {
    let config = Config::read(checkpoint)?;
    let limits = Limits { tokens_max: 8, wanted_max: 2 };
    measure(checkpoint, &config, &Counting::new(floats), limits)
}

fn check(checkpoint: Checkpoint, wanted: &str) {
    let error = load(&checkpoint).unwrap_err().to_string();
    assert!(error.contains(wanted), "{error:?} does not say {wanted:?}");
}

fn gguf(case: &str, change: impl FnOnce(&mut Vec<u8>), wanted: &str) {
    check(open_gguf(case, change), wanted);
}

fn config_json(case: &str, change: impl FnOnce(&mut Value), wanted: &str) {
    check(open_hugging_face(case, change, |_| {}), wanted);
}

/// config.json with some keys set; null removes the key.
fn with(case: &str, keys: Value, wanted: &str) {
    let change = |config: &mut Value| {
        for (key, value) in keys.as_object().unwrap() {
            match value {
                Value::Null => config.as_object_mut().unwrap().remove(key).map(drop).unwrap(),
                value => config[key] = value.clone(),
            }
        }
    };
    config_json(case, change, wanted);
}

#[test]
fn the_fixtures_themselves_load() {
    // These are no floats.
    let blocks = |entry: &(&str, Container)| {
        let (case, container) = *entry;
        case == "gpt-oss" || (case == "linear" && container == Container::Gguf)
    };
    for (case, container) in crate::fixture::ALL.iter().filter(|entry| !blocks(entry)) {
        load(&open(case, *container)).unwrap();
    }
}

#[test]
fn an_architecture_that_is_not_there_is_named_with_those_that_are() {
    let wanted = "architecture \"llamb\" is not supported; supported: llama, qwen2";
    let change = |bytes: &mut Vec<u8>| {
        let key = b"general.architecture";
        let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
        // The key, its type, the length of the string.
        let at = at + key.len() + 4 + 8;
        assert_eq!(&bytes[at..at + 5], b"llama");
        bytes[at + 4] = b'b';
    };
    gguf("llama", change, wanted);
    with(
        "llama",
        json!({"model_type": "zamba"}),
        "model_type \"zamba\", which needs state-space layers, is not supported; supported: llama, mistral",
    );
    with("llama", json!({"model_type": null, "architectures": null}), "\"model_type\" is missing");
    let class = json!({"architectures": ["LlamaForSequenceClassification"]});
    with("llama", class, "\"LlamaForSequenceClassification\" is not supported");
}

#[test]
fn a_missing_key_is_named() {
    for key in [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ] {
        // Of `head_count` and `head_count_kv` only the first is followed by its type.
        let typed = |name: &str| format!("{name}{}", if key.ends_with("epsilon") { '\x06' } else { '\x04' });
        let other = format!("{}_", &key[..key.len() - 1]);
        gguf("llama", |bytes| rename(bytes, &typed(key), &typed(&other)), &format!("key {key:?} is missing"));
    }
    for key in [
        "num_hidden_layers",
        "max_position_embeddings",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "rms_norm_eps",
    ] {
        with("llama", json!({key: null}), &format!("key {key:?} is missing"));
    }
    let scaling = |kind: &str| json!({"rope_scaling": {"rope_type": kind, "rope_theta": 1e4}});
    with("llama", scaling("linear"), "key \"rope_scaling.factor\" is missing");
    with("llama", scaling("llama3"), "key \"rope_scaling.factor\" is missing");
    with("llama", scaling("yarn"), "key \"rope_scaling.factor\" is missing");
    with(
        "qwen2-window",
        json!({"layer_types": null, "max_window_layers": null}),
        "\"max_window_layers\" is missing",
    );
    gguf(
        "linear",
        |bytes| rename(bytes, "llama.rope.scaling.factor", "llama.rope.scaling.facto_"),
        "scaling.factor\"",
    );
}

#[test]
fn a_value_that_cannot_be_meant_is_named() {
    let set = |key: &'static str, value| move |bytes: &mut Vec<u8>| set_u32(bytes, key, value);
    gguf("llama", set("llama.context_length", 0), "key \"llama.context_length\" is 0, wanted at least 1");
    gguf("llama", set("llama.block_count", 0), "key \"llama.block_count\" is 0, wanted 1 to");
    gguf("llama", set("llama.embedding_length", u32::MAX), "key \"llama.embedding_length\" is 4294967295");
    gguf("llama", set("llama.attention.head_count_kv", 3), "is 3, wanted a divisor of the 4 query heads");
    gguf("llama", set("llama.attention.value_length", 8), "value_length\" is 8, wanted the key length 16");
    gguf("llama", set("llama.rope.dimension_count", 18), "is 18, wanted at most the head size 16");
    gguf("llama", set("llama.rope.dimension_count", 15), "is 15, wanted an even number");
    gguf("llama", set("llama.rope.freq_base", f32::NAN.to_bits()), "\"llama.rope.freq_base\" is NaN");
    gguf("llama", set("llama.rope.freq_base", 0), "\"llama.rope.freq_base\" is 0");
    gguf("linear", set("llama.rope.scaling.factor", 0), "\"llama.rope.scaling.factor\" is 0");

    with("llama", json!({"max_position_embeddings": 0}), "\"max_position_embeddings\" is 0");
    with("llama", json!({"num_key_value_heads": 3}), "is 3, wanted a divisor of the 4 query heads");
    with(
        "llama",
        json!({"num_attention_heads": 6, "head_dim": null}),
        "is 6, wanted a divisor of the hidden size 64",
    );
    with("llama", json!({"hidden_size": "64"}), "\"hidden_size\" is \"64\", wanted a whole number");
    with("llama", json!({"rms_norm_eps": -1.0}), "\"rms_norm_eps\" is -1");
    with("llama", json!({"rope_parameters": {"rope_theta": 0.0}}), "\"rope_theta\" is 0");
    with("llama", json!({"rope_parameters": 7}), "\"rope_parameters\" is 7, wanted an object");
    with("mistral", json!({"sliding_window": 0}), "\"sliding_window\" is 0, wanted at least 1");
    with(
        "qwen2-window",
        json!({"layer_types": ["full_attention"]}),
        "is 1 types, wanted one for each of the 3 layers",
    );
    gguf("llama3", |bytes| spoil_first_value(bytes, "rope_freqs.weight"), "holds 0 at 0, wanted a positive");
}

/// Writes zero over the first value of the first tensor of the data section, which this one is.
fn spoil_first_value(bytes: &mut [u8], tensor: &str) {
    let checkpoint = open("llama3", Container::Gguf);
    let Checkpoint::Gguf(gguf) = &checkpoint else { unreachable!() };
    let stored = gguf.tensor(tensor).unwrap().bytes;
    let at = bytes.windows(stored.len()).position(|window| window == stored).unwrap();
    bytes[at..at + 4].fill(0);
}

#[test]
fn layers_and_states_that_contradict_the_file_are_refused_by_name() {
    let types = |types: [&str; 3]| json!({"layer_types": types});
    let (attends, keeps) = ("full_attention", "linear_attention");
    with(
        "qwen3next",
        types([attends, attends, keeps]),
        "tensor \"model.layers.0.self_attn.q_proj.weight\" is missing",
    );
    with(
        "qwen3next",
        types([keeps, keeps, keeps]),
        "tensor \"model.layers.1.linear_attn.conv1d.weight\" is missing",
    );
    with(
        "qwen3next",
        types([keeps, attends, "mamba"]),
        "layer type \"mamba\" is not supported; supported: full_attention, linear_attention",
    );
    with("lfm2", types([attends, "conv", keeps]), "layer type \"linear_attention\" is not supported");
    let few = json!({"layer_types": [keeps, attends]});
    with("qwen3next", few, "key \"layer_types\" is 2 layers, wanted one for each of the 3 layers");
    with("qwen3next", json!({"linear_num_value_heads": 3}), "is 3, wanted a multiple of the 2 key heads");
    with(
        "qwen3next",
        json!({"linear_conv_kernel_dim": 9}),
        "\"linear_conv_kernel_dim\" is 9, wanted at most 8",
    );
    with("qwen3next", json!({"linear_key_head_dim": null}), "key \"linear_key_head_dim\" is missing");
    with(
        "qwen3next",
        json!({"linear_value_head_dim": 16}),
        "tensor \"model.layers.0.linear_attn.conv1d.weight\" has shape [96, 1, 4], wanted [112, 1, 4]",
    );
    let scans = "granite-hybrid";
    with(scans, json!({"mamba_n_heads": 3}), "key \"mamba_n_groups\" is 2, wanted a divisor of the 3 heads");
    with(
        scans,
        json!({"mamba_d_state": 10}),
        "tensor \"model.layers.0.mamba.in_proj.weight\" has shape [212, 40], wanted [204, 40]",
    );
    with(scans, json!({"mamba_d_conv": 9}), "\"mamba_d_conv\" is 9, wanted at most 8");
    with(scans, json!({"mamba_proj_bias": true}), "mamba_proj_bias true is not supported");
    with(scans, json!({"time_step_limit": [0.0, 0.1]}), "time_step_limit [0.0,0.1] is not supported");
    with(scans, json!({"position_embedding_type": "alibi"}), "position_embedding_type \"alibi\" is not");
    with(
        scans,
        types(["mamba", "conv", "mamba"]),
        "layer type \"conv\" is not supported; supported: full_attention, mamba, linear_attention",
    );
    let pattern = |letters: &str| json!({"hybrid_override_pattern": letters});
    with(
        "nemotron-h",
        pattern("M-*MX"),
        "layer type \"X\" is not supported; supported: full_attention, mamba",
    );
    with("nemotron-h", pattern("M-*ME"), "key \"n_routed_experts\" is missing");
    with("nemotron-h-moe", json!({"n_routed_experts": 0}), "\"n_routed_experts\" is 0, wanted 1 to");
    with("jamba", json!({"mamba_dt_rank": 6}), "x_proj.weight\" has shape [29, 80], wanted [30, 80]");
    with("jamba", json!({"mamba_expand": 3}), "in_proj.weight\" has shape [160, 40], wanted [240, 40]");
    with("jamba", json!({"attn_layer_offset": 3}), "\"attn_layer_offset\" is 3, wanted below the period 3");
    with(
        "jamba",
        json!({"expert_layer_offset": 2}),
        "\"expert_layer_offset\" is 2, wanted below the period 2",
    );
    with(
        "jamba",
        json!({"attn_layer_period": 2}),
        "tensor \"model.layers.3.self_attn.q_proj.weight\" is missing",
    );
    with(
        "jamba",
        json!({"num_experts": 1}),
        "tensor \"model.layers.1.feed_forward.gate_proj.weight\" is missing",
    );
    with("mamba", json!({"use_bias": true}), "use_bias true is not supported");
    with("mamba", json!({"state_size": null}), "key \"state_size\" is missing");
    let rank = |bytes: &mut Vec<u8>| set_u32(bytes, "mamba.ssm.time_step_rank", 4);
    gguf("mamba", rank, "tensor \"blk.0.ssm_x.weight\" has shape [27, 80], wanted [28, 80]");
    with("nemotron-h-moe", pattern("MEM*-"), "tensor \"backbone.layers.4.mixer.up_proj.weight\" is missing");
    with(
        "nemotron-h-moe",
        json!({"n_routed_experts": 9}),
        "tensor \"backbone.layers.1.mixer.gate.weight\" has shape [8, 40], wanted [9, 40]",
    );
    with(
        "nemotron-h-latent",
        json!({"moe_latent_size": 24}),
        "tensor \"backbone.layers.1.mixer.fc1_latent_proj.weight\" has shape [20, 40], wanted [24, 40]",
    );
    let without = json!({"moe_latent_size": null});
    with("nemotron-h-latent", without, "has shape [24, 20], wanted [24, 40]");
    with("nemotron-h", pattern("M-*M"), "is 4 layers, wanted one for each of the 5 layers");
    with("nemotron-h", pattern("M-MM-"), "tensor \"backbone.layers.2.mixer.in_proj.weight\" is missing");
    let inner = |bytes: &mut Vec<u8>| set_u32(bytes, "granitehybrid.ssm.inner_size", 81);
    gguf(scans, inner, "\"granitehybrid.ssm.inner_size\" is 81, wanted a multiple of the 4 heads");
    let size = |bytes: &mut Vec<u8>| set_u32(bytes, "qwen35.ssm.inner_size", 81);
    gguf("qwen35", size, "\"qwen35.ssm.inner_size\" is 81, wanted a multiple of the 4 value heads");
    let every = |bytes: &mut Vec<u8>| set_u32(bytes, "qwen35.full_attention_interval", 3);
    gguf("qwen35", every, "tensor \"blk.2.attn_q.weight\" is missing");
    let ahead = |bytes: &mut Vec<u8>| set_u32(bytes, "qwen35.nextn_predict_layers", 4);
    gguf("qwen35", ahead, "\"qwen35.nextn_predict_layers\" is 4, wanted fewer than the 4 layers");
}

#[test]
fn a_checkpoint_of_another_model_is_refused_by_what_it_lacks() {
    // The configuration of one with the weights of another.
    let check_of = |config: &str, weights: &str, wanted: &str| {
        let other = std::fs::read(path(config, Container::HuggingFace).join("config.json")).unwrap();
        let other: Value = serde_json::from_slice(&other).unwrap();
        check(open_hugging_face(weights, |json| *json = other, |_| {}), wanted);
    };
    for (config, weights, wanted) in [
        ("qwen35", "lfm2", "tensor \"model.norm.weight\" is missing"),
        ("nemotron-h", "nemotron-h-moe", "tensor \"backbone.layers.2.mixer.q_proj.weight\" is missing"),
        ("nemotron-h-moe", "nemotron-h", "tensor \"backbone.layers.3.mixer.q_proj.weight\" is missing"),
        ("mamba", "falcon-mamba", "tensor \"backbone.layers.0.mixer.x_proj.weight\" has shape [29, 80]"),
        ("mamba", "jamba", "tensor \"backbone.embeddings.weight\" is missing"),
        (
            "mamba2",
            "nemotron-h",
            "key \"vocab_size\" is 112, wanted the 104 rows of backbone.embeddings.weight",
        ),
    ] {
        check_of(config, weights, wanted);
    }
}

#[test]
fn a_hybrid_is_refused_by_what_its_backend_lacks() {
    for (case, need) in [
        ("qwen35", Need::States),
        ("lfm2", Need::ShortConv),
        ("qwen35", Need::DeltaRule),
        ("qwen35", Need::GatedNorm),
        ("qwen35", Need::SigmoidGate),
        ("granite-hybrid", Need::SelectiveScan),
        ("falcon-h1", Need::GatedNorm),
        ("granite-hybrid", Need::GatedNorm),
        ("granite-hybrid-dense", Need::ShortConv),
        ("nemotron-h-moe", Need::PlainExperts),
        ("jamba", Need::ChannelScan),
        ("mamba", Need::GatedNorm),
    ] {
        let said = load_on(&open(case, Container::Gguf), Floats(leaked(need))).unwrap_err().to_string();
        assert_eq!(said, format!("{need} is not available on floats"), "{case}");
    }
    assert!(load_on(&open("lfm2", Container::Gguf), Floats(&[Need::DeltaRule, Need::SigmoidGate])).is_ok());
}

fn leaked(need: Need) -> &'static [Need] {
    vec![need].leak()
}

#[test]
fn what_is_not_computed_is_refused_and_not_ignored() {
    with(
        "llama",
        json!({"hidden_act": "relu2"}),
        "hidden_act \"relu2\" is not supported; supported: silu, gelu",
    );
    with(
        "llama",
        json!({"quantization_config": {"quant_method": "mxfp4"}}),
        "method \"mxfp4\" is not supported",
    );
    with(
        "deepseek-v2",
        json!({"topk_method": "noaux_tc"}),
        "topk_method \"noaux_tc\" is not supported; supported: greedy, group_limited_greedy",
    );
    with("youtu", json!({"qk_nope_head_dim": 16385}), "at most 16384");
    with("llama", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5 is not supported");
    let dynamic = json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}});
    with(
        "llama",
        dynamic,
        "rope scaling \"dynamic\" is not supported; supported: linear, llama3, yarn, longrope",
    );
    let nested = json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}});
    with("llama", nested, "rotation of its own for \"full_attention\" is not supported");
    let layers = json!({"layer_types": ["full_attention", "linear_attention", "full_attention"]});
    with("qwen2-window", layers, "layer type \"linear_attention\" is not supported");
    let add = |key: &'static str, number: Number| move |bytes: &mut Vec<u8>| add_key(bytes, key, number);
    gguf(
        "qwen2",
        add("qwen2.expert_count", Number::U32(8)),
        "a mixture of experts (qwen2.expert_count 8) is not",
    );
    gguf("llama", add("llama.expert_count", Number::U32(8)), "key \"llama.expert_used_count\" is missing");
    let many = |bytes: &mut Vec<u8>| set_u32(bytes, "llama.expert_used_count", 6);
    gguf("mixtral", many, "key \"llama.expert_used_count\" is 6, wanted at most the 5 experts");
    let absent = |bytes: &mut Vec<u8>| rename(bytes, "blk.1.ffn_up_exps.weight", "blk.1.ffn_up_exp_.weight");
    gguf("mixtral", absent, "tensor \"blk.1.ffn_up_exps.weight\" is missing");
    with(
        "mixtral",
        json!({"num_local_experts": 6}),
        "tensor \"model.layers.0.block_sparse_moe.gate.weight\" has shape [5, 64]",
    );
    with(
        "qwen3moe",
        json!({"mlp_only_layers": [1]}),
        "tensor \"model.layers.1.mlp.gate_proj.weight\" is missing",
    );
    with(
        "qwen2moe",
        json!({"decoder_sparse_step": 2}),
        "tensor \"model.layers.0.mlp.gate_proj.weight\" is missing",
    );
    with(
        "qwen2moe",
        json!({"decoder_sparse_step": 0}),
        "key \"decoder_sparse_step\" is 0, wanted at least 1",
    );
    with("qwen3moe", json!({"mlp_only_layers": 1}), "key \"mlp_only_layers\" is 1, wanted a list of whole");
    with(
        "qwen2moe-dense",
        json!({"mlp_only_layers": []}),
        "tensor \"model.layers.0.mlp.gate.weight\" is missing",
    );
    with(
        "mixtral",
        json!({"first_k_dense_replace": 1}),
        "a layer without experts in the mixtral architecture is not supported",
    );
    let dense = add("qwen2moe.leading_dense_block_count", Number::U32(1));
    gguf("qwen2moe", dense, "tensor \"blk.0.ffn_gate.weight\" is missing");
    with("gpt-oss", json!({"swiglu_limit": 6.0}), "swiglu_limit 6 is not supported; supported: 7");
    with(
        "gpt-oss",
        json!({"intermediate_size": 64}),
        "mlp.experts.gate_up_proj_blocks\" has shape [4, 64, 2, 16]",
    );
    let ext = add("llama.rope.scaling.yarn_ext_factor", Number::F32(0.5));
    gguf("yarn", ext, "llama.rope.scaling.yarn_ext_factor 0.5 is not supported");
    let log = add("llama.rope.scaling.yarn_log_multiplier", Number::F32(0.1));
    gguf("yarn", log, "llama.rope.scaling.yarn_log_multiplier 0.1 is not supported");
    // What changes nothing is let through.
    load(&open_gguf("yarn", add("llama.rope.scaling.yarn_ext_factor", Number::F32(1.0)))).unwrap();
    load(&open_gguf("llama", add("llama.expert_count", Number::U32(0)))).unwrap();
}

#[test]
fn a_choice_of_experts_that_cannot_be_is_refused() {
    with("glm4-moe", json!({"n_group": 3}), "key \"n_group\" is 3, wanted equal groups of the 8 experts");
    with("glm4-moe", json!({"n_group": 8}), "key \"n_group\" is 8, wanted equal groups of the 8 experts");
    let few = "key \"topk_group\" is 1, wanted 2 to 4, for 3 experts of 4 groups";
    with("glm4-moe", json!({"topk_group": 1}), few);
    with("glm4-moe", json!({"topk_group": 5}), "key \"topk_group\" is 5, wanted 2 to 4");
    with("dots1", json!({"n_routed_experts": 1025}), "is 2 of 1025 experts, wanted at most 1024");
    with("dots1", json!({"routed_scaling_factor": -1.0}), "key \"routed_scaling_factor\" is -1");
    with(
        "hy-v3",
        json!({"mlp_layer_types": ["dense"]}),
        "key \"mlp_layer_types\" is 1 types, wanted one for each",
    );
    with(
        "hy-v3",
        json!({"mlp_layer_types": ["dense", "sparse", "thin"]}),
        "is \"thin\", wanted dense or sparse",
    );
    with(
        "ernie4-5-moe",
        json!({"moe_layer_interval": 0}),
        "key \"moe_layer_interval\" is 0, wanted at least 1",
    );
    let past = "tensor \"model.layers.2.mlp.gate.weight\" is missing";
    with("ernie4-5-moe-middle", json!({"moe_layer_end_index": -1}), past);
    with(
        "minimax-m2",
        json!({"rotary_dim": 13}),
        "key \"rotary_dim\" is 13, wanted an even number of at most 12",
    );
    let gating = |bytes: &mut Vec<u8>| set_u32(bytes, "glm4moe.expert_gating_func", 9);
    gguf("glm4-moe", gating, "key \"glm4moe.expert_gating_func\" is 9, wanted 0 to 4");
}

#[test]
fn what_a_backend_does_not_have_is_refused_before_anything_is_loaded() {
    let check = |case, needs: &[Need]| {
        let checkpoint = open(case, Container::HuggingFace);
        assert_eq!(Config::read(&checkpoint).unwrap().needs(), needs, "{case}");
        for need in needs {
            let floats = Floats(std::slice::from_ref(Box::leak(Box::new(*need))));
            let error = load_on(&checkpoint, floats).unwrap_err().to_string();
            assert_eq!(error, format!("{need} is not available on floats"), "{case}");
        }
    };
    check("llama", &[]);
    check("qwen3", &[Need::QkNorm]);
    check("phi3", &[]);
    check("gemma2", &[Need::Pointwise, Need::Gelu, Need::SoftCap]);
    check("gemma3", &[Need::QkNorm, Need::Pointwise, Need::Gelu]);
    let gemma4 = [Need::QkNorm, Need::Pointwise, Need::Gelu];
    check("gemma4", &gemma4);
    let own = [Need::SharedKeys, Need::LayerEmbeddings, Need::HostTables];
    check("gemma4-e", &[&gemma4[..], &own].concat());
    check("gemma4-experts", &[&gemma4[..], &[Need::Experts, Need::ExpertScales]].concat());
    check("granite", &[Need::Pointwise]);
    check("gpt2", &[Need::LayerNorm, Need::Positions, Need::Pointwise]);
    let bert = [Need::LayerNorm, Need::Positions, Need::Pointwise, Need::BothDirections, Need::Pooling];
    check("bert", &bert);
    let modernbert = [Need::LayerNorm, Need::Gelu, Need::BothDirections, Need::Reach, Need::Pooling];
    check("modernbert", &modernbert);
    // Nothing of the list is asked of what does not need it.
    load_on(&open("llama", Container::Gguf), Floats(&Need::ALL)).unwrap();
}

#[test]
fn a_missing_tensor_is_named() {
    let missing = |name: &str| format!("tensor {name:?} is missing");
    for name in ["token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"] {
        let other = format!("{}_", &name[..name.len() - 1]);
        gguf("llama", |bytes| rename(bytes, name, &other), &missing(name));
    }
    gguf(
        "qwen2",
        |bytes| rename(bytes, "blk.1.attn_k.bias", "blk.1.attn_k.bia_"),
        &missing("blk.1.attn_k.bias"),
    );
    for name in ["model.norm.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"] {
        let other = format!("{}_", &name[..name.len() - 1]);
        let checkpoint = open_hugging_face("llama", |_| {}, |bytes| rename(bytes, name, &other));
        check(checkpoint, &missing(name));
    }
    with("llama", json!({"attention_bias": true}), &missing("model.layers.0.self_attn.q_proj.bias"));
}

#[test]
fn a_tensor_without_a_place_is_named_and_not_left_out() {
    with("llama-bias", json!({"mlp_bias": false}), "has no place in the llama architecture");
    with("llama", json!({"num_hidden_layers": 1}), "tensor \"model.layers.1.");
    // The head of a tied model and stored frequencies say nothing new.
    load(&open_hugging_face("llama", |config| config["tie_word_embeddings"] = true.into(), |_| {})).unwrap();
}

#[test]
fn a_shape_that_contradicts_the_configuration_is_named_with_both() {
    with("llama", json!({"intermediate_size": 65}), "has shape [64, 64], wanted [65, 64]");
    with("llama", json!({"num_attention_heads": 2}), "q_proj.weight\" has shape [64, 64], wanted [32, 64]");
    let wanted = "tensor \"blk.0.ffn_gate.weight\" has shape [64, 64], wanted [96, 64]";
    gguf("llama", |bytes| set_u32(bytes, "llama.feed_forward_length", 96), wanted);
    let wanted = "tensor \"token_embd.weight\" has shape [128, 64], wanted [128, 72]";
    gguf("llama", |bytes| set_u32(bytes, "llama.embedding_length", 72), wanted);
    gguf("llama3", |bytes| set_u32(bytes, "llama.rope.dimension_count", 14), "has shape [8], wanted [7]");
}

#[test]
fn a_vocabulary_that_contradicts_the_embedding_is_named() {
    let wanted = "key \"vocab_size\" is 129, wanted the 128 rows of model.embed_tokens.weight";
    with("llama", json!({"vocab_size": 129}), wanted);
}

#[test]
fn a_type_that_the_backend_cannot_compute_is_named_with_its_tensor() {
    let wanted = "tensor token_embd.weight: type Q8_0 cannot be computed on floats yet";
    check(open("linear", Container::Gguf), wanted);
}
