//! What is read from checkpoints whose numbers `make.py` chose.

use fornax_compute::{Heads, KvKind, KvLayer};
use fornax_model::{Config, FeedForward, LayerConfig, LookAhead, Rotary, Scaling};

use crate::fixture::{ALL, Container, Number, add_key, open, open_gguf, open_hugging_face};

#[test]
fn both_containers_of_a_model_say_the_same() {
    for case in [
        "llama",
        "llama-bias",
        "linear",
        "yarn",
        "qwen2",
        "qwen3",
        "olmo2",
        "phi3",
        "gemma2",
        "gemma3",
        "granite",
        "gpt2",
        "glm4-moe",
        "minimax-m2",
        "gemma4",
        "gemma4-e",
        "llama4-full",
    ] {
        let mut gguf = Config::read(&open(case, Container::Gguf)).unwrap();
        let hugging_face = Config::read(&open(case, Container::HuggingFace)).unwrap();
        // GGUF numbers have 32 bits.
        assert!((gguf.rope.base - hugging_face.rope.base).abs() <= 1e-6 * gguf.rope.base, "{case}");
        gguf.rope.base = hugging_face.rope.base;
        // What divides by as much as a GGUF file can say turns no further than what stands still.
        for (divisor, other) in gguf.rope.factors.iter_mut().zip(&hugging_face.rope.factors) {
            *divisor = if *divisor == 1e30 { f32::INFINITY } else { *divisor };
            assert_eq!(divisor, other, "{case}");
        }
        if let (Scaling::Long { magnitude }, Scaling::Long { magnitude: other }) =
            (&mut gguf.rope.scaling, hugging_face.rope.scaling)
        {
            assert!((*magnitude - other).abs() <= 1e-6, "{case}");
            *magnitude = other;
        }
        // GGUF does not say it. The large models read images so in layers with a window, and this is as one of them.
        if case == "gemma4" {
            assert_eq!(
                (gguf.looks_ahead, hugging_face.looks_ahead),
                (LookAhead::InWindows, LookAhead::Never)
            );
            gguf.looks_ahead = hugging_face.looks_ahead;
        }
        assert_eq!(gguf, hugging_face, "{case}");
    }
}

#[test]
fn what_config_json_leaves_out_is_what_transformers_means() {
    let read = |case, change: &dyn Fn(&mut serde_json::Value)| {
        Config::read(&open_hugging_face(case, change, |_| {})).unwrap()
    };
    let without = |case, keys: &[&str]| {
        read(case, &|json| keys.iter().for_each(|key| drop(json.as_object_mut().unwrap().remove(*key))))
    };
    let scale = |config: &Config| config.mixture().unwrap().routing.scale;
    assert_eq!(scale(&without("glm4-moe-lite", &["routed_scaling_factor"])), 1.8);
    assert_eq!(scale(&without("mistral4", &["routed_scaling_factor"])), 1.0);
    let config = without("glm4-moe-lite", &["n_group", "topk_group"]);
    assert_eq!(config.mixture().unwrap().routing.groups, None);

    // Chunks are in the layers that rotate.
    let chunks = |config: &Config| {
        let layers = config.layers.iter().map(|layer| layer.attention().unwrap());
        layers.map(|layer| (layer.chunk, layer.rotary != Rotary::None)).collect::<Vec<_>>()
    };
    let (full, chunked) = ((None, false), |size| (Some(size), true));
    let config = without("llama4", &["layer_types", "no_rope_layers", "attention_chunk_size"]);
    assert_eq!(chunks(&config), [chunked(8192), chunked(8192), chunked(8192), full]);
    let config = read("llama4", &|json| {
        json.as_object_mut().unwrap().remove("layer_types");
        json["no_rope_layers"] = serde_json::json!([]);
        json["no_rope_layer_interval"] = 2.into();
    });
    assert_eq!(chunks(&config), [chunked(20), full, chunked(20), full]);
    let config = read("llama4", &|json| {
        json.as_object_mut().unwrap().remove("layer_types");
        json["no_rope_layers"] = serde_json::json!([0, 1, 1, 0]);
    });
    assert_eq!(chunks(&config), [full, chunked(20), chunked(20), full]);
}

#[test]
fn rope_factors_of_gguf_divide_as_llama3_scaling_does() {
    let gguf = Config::read(&open("llama3", Container::Gguf)).unwrap().rope;
    let hugging_face = Config::read(&open("llama3", Container::HuggingFace)).unwrap().rope;
    assert_eq!(gguf.scaling, Scaling::None);
    assert_eq!(gguf.factors.len(), 8);
    for (ours, theirs) in gguf.frequencies().iter().zip(hugging_face.frequencies()) {
        assert!((ours / theirs - 1.0).abs() < 1e-6, "{ours} {theirs}");
    }
}

#[test]
fn numbers_are_those_of_the_file() {
    let config = Config::read(&open("llama-bias", Container::Gguf)).unwrap();
    assert_eq!(config.facts.name, "llama");
    assert_eq!((config.layers.len(), config.hidden, config.vocab), (2, 64, 128));
    for layer in &config.layers {
        assert_eq!(layer.attention().unwrap().heads, Heads { query: 4, kv: 2, dim: 24 });
        assert_eq!(layer.feed_forward, FeedForward::Dense { ffn: 64 });
    }
    assert_eq!((config.context, config.norm_eps, config.rope.base), (256, 0.03, 500000.0));
    assert!(config.tied && config.qkv_bias && config.output_bias && config.mlp_bias);

    let config = Config::read(&open("yarn", Container::HuggingFace)).unwrap();
    assert!(!config.tied && !config.qkv_bias && !config.output_bias && !config.mlp_bias);
    let Scaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } = config.rope.scaling
    else {
        panic!("{:?}", config.rope.scaling);
    };
    assert_eq!((factor, original_context, beta_fast, beta_slow, truncate), (4.0, 32.0, 2.0, 0.5, true));
}

#[test]
fn layers_with_a_window_form_their_own_group() {
    let config = Config::read(&open("qwen2-window", Container::HuggingFace)).unwrap();
    assert_eq!(windows(&config), [None, Some(24), Some(24)]);
    let groups = config.kv_groups(9);
    let summary: Vec<_> = groups.iter().map(|group| (group.layers, group.window, group.pages)).collect();
    assert_eq!(summary, [(1, None, 9), (2, Some(24), 9)]);
    let layers: Vec<_> = (0..3).map(|layer| config.kv_layer(layer)).collect();
    let at = |group, layer| KvLayer { group, layer };
    assert_eq!(layers, [at(0, 0), at(1, 0), at(1, 1)]);

    let of = |case| windows(&Config::read(&open(case, Container::HuggingFace)).unwrap());
    assert_eq!(of("mistral"), [Some(20); 2]);
    assert_eq!(of("qwen2"), [None; 2]);
}

#[test]
fn layers_with_states_form_groups_behind_the_others() {
    let (attends, keeps) = (KvKind::pairs(1, 24), |bytes| KvKind::State { bytes, every: 256 });
    let groups = |case, container| {
        let config = Config::read(&open(case, container)).unwrap();
        let groups = config.kv_groups(9);
        groups.iter().map(|group| (group.layers, group.kind, group.pages)).collect::<Vec<_>>()
    };
    for container in [Container::Gguf, Container::HuggingFace] {
        // Three inputs of two key heads of 12, twice, and four value heads of 20; then their matrices, which fill 32
        // columns.
        let state = 4 * (3 * (2 * 2 * 12 + 4 * 20) + 4 * 12 * 32);
        assert_eq!(groups("qwen35", container), [(1, attends, 9), (2, keeps(state), 9)]);
        // Values of four heads of 20, two keys and two queries of 12; then the heads' matrices.
        let scan = 4 * (3 * (4 * 20 + 2 * 2 * 12) + 4 * 12 * 32);
        let one = KvKind::pairs(1, 20);
        assert_eq!(groups("granite-hybrid", container), [(1, one, 9), (2, keeps(scan), 9)]);
        assert_eq!(groups("lfm2", container), [(1, KvKind::pairs(2, 16), 9), (2, keeps(4 * 2 * 64), 9)]);
    }
    let config = Config::read(&open("qwen35", Container::Gguf)).unwrap();
    assert_eq!(config.kv_layer(1), KvLayer { group: 0, layer: 0 });
}

#[test]
fn the_whole_says_whether_a_model_within_it_is_tied() {
    let tied = |whole: serde_json::Value, text: serde_json::Value| {
        let checkpoint = open_hugging_face(
            "qwen35",
            |json| (json["tie_word_embeddings"], json["text_config"]["tie_word_embeddings"]) = (whole, text),
            |_| {},
        );
        Config::read(&checkpoint).unwrap().tied
    };
    let null = serde_json::Value::Null;
    assert!(tied(true.into(), false.into()) && tied(null, true.into()) && !tied(false.into(), true.into()));
}

#[test]
fn what_is_not_computed_of_a_checkpoint_is_said() {
    let said = |container| {
        let checkpoint = open("qwen35", container);
        Config::read(&checkpoint).unwrap().not_computed(&checkpoint)
    };
    assert_eq!(said(Container::Gguf), ["blk.3."]);
    let mut beside = said(Container::HuggingFace);
    beside.sort();
    assert_eq!(beside, ["model.visual.", "mtp."]);
}

/// Each layer's window.
fn windows(config: &Config) -> Vec<Option<u32>> {
    config.layers.iter().map(|layer| layer.attention().unwrap().window).collect()
}

#[test]
fn caps_that_a_file_does_not_have_are_the_architectures_and_null_is_none() {
    let caps = |change: fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let checkpoint = open_hugging_face("gemma2", |json| change(json.as_object_mut().unwrap()), |_| {});
        let config = Config::read(&checkpoint).unwrap();
        (config.attention_cap, config.logit_cap)
    };
    assert_eq!(caps(|_| {}), (Some(4.0), Some(9.0)));
    let without = |json: &mut serde_json::Map<_, _>| {
        json.retain(|key: &String, _: &mut serde_json::Value| !key.ends_with("softcapping"));
    };
    assert_eq!(caps(without), (Some(50.0), Some(30.0)));
    assert_eq!(
        caps(|json| {
            json["attn_logit_softcapping"] = serde_json::Value::Null;
        }),
        (None, Some(9.0))
    );
}

#[test]
fn windows_alternate_by_period_by_pattern_or_as_they_are_listed() {
    let of = |case, container| windows(&Config::read(&open(case, container)).unwrap());
    let (some, none) = (Some(20), None);
    for container in [Container::Gguf, Container::HuggingFace] {
        assert_eq!(of("gemma2", container), [some, none, some]);
        assert_eq!(of("gemma3", container), [some, some, some, some, some, none, some]);
    }
    assert_eq!(of("gemma3-images", Container::HuggingFace), [some, none, some]);
    let array =
        |bytes: &mut Vec<u8>| add_key(bytes, "gemma3.attention.sliding_window_pattern", Number::U32(3));
    let config = Config::read(&open_gguf("gemma3", array)).unwrap();
    assert_eq!(windows(&config), [some, some, none, some, some, none, some]);
}

#[test]
fn layers_without_experts_are_those_that_the_file_names() {
    let dense = |case| {
        let config = Config::read(&open(case, Container::HuggingFace)).unwrap();
        let ffn = |layer: &LayerConfig| match layer.feed_forward {
            FeedForward::Dense { ffn } => Some(ffn),
            FeedForward::Mixture(_) | FeedForward::None => None,
        };
        config.layers.iter().map(ffn).collect::<Vec<_>>()
    };
    assert_eq!(dense("qwen2moe"), [None; 2]);
    assert_eq!(dense("qwen2moe-dense"), [Some(48), None, None]);
    assert_eq!(dense("qwen3moe-sparse"), [Some(48), Some(48), Some(48), None]);
}

#[test]
fn every_fixture_is_read() {
    for (case, container) in ALL {
        Config::read(&open(case, *container)).unwrap();
    }
}
