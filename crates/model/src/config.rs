//! The numbers of one model, read from its checkpoint and checked.

use fornax_compute::{Glu, Heads, KvGroup, KvLayer};
use fornax_format::Checkpoint;

use crate::facts::{BiasRule, WindowRule};
use crate::loader::{stored_name, tensor};
use crate::names::Tensor;
use crate::source::{Json, Key, Source, bad, within};
use crate::{Error, Facts, Rope};

/// Everything about a model that its code does not already say.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The architecture's row.
    pub facts: Facts,
    /// Blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Attention heads of every layer. The head size need not be `hidden / heads`.
    pub heads: Heads,
    /// Inner width of the feed-forward.
    pub ffn: usize,
    /// Rows of the embedding: a tokenizer may know fewer.
    pub vocab: usize,
    /// Positions the model was made for.
    pub context: u32,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Rotary positions.
    pub rope: Rope,
    /// Whether logits are taken with the embedding.
    pub tied: bool,
    /// Whether Q, K and V have biases.
    pub qkv_bias: bool,
    /// Whether the output of attention has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward has biases.
    pub mlp_bias: bool,
    /// Each layer's attention window: how many positions a query sees, its own included.
    pub windows: Vec<Option<u32>>,
    /// Multiplies query-key products.
    pub attention_scale: f32,
    /// The activation of the feed-forward.
    pub glu: Glu,
}

/// Values under one key in each container.
mod key {
    use crate::source::Key;

    const fn key(gguf: &'static str, hugging_face: &'static str) -> Key {
        Key { gguf, hugging_face }
    }

    pub(super) const LAYERS: Key = key("block_count", "num_hidden_layers");
    pub(super) const HIDDEN: Key = key("embedding_length", "hidden_size");
    pub(super) const FFN: Key = key("feed_forward_length", "intermediate_size");
    pub(super) const HEADS: Key = key("attention.head_count", "num_attention_heads");
    pub(super) const HEADS_KV: Key = key("attention.head_count_kv", "num_key_value_heads");
    pub(super) const HEAD_DIM: Key = key("attention.key_length", "head_dim");
    pub(super) const CONTEXT: Key = key("context_length", "max_position_embeddings");
    pub(super) const NORM_EPS: Key = key("attention.layer_norm_rms_epsilon", "rms_norm_eps");
}

impl Config {
    /// Reads the configuration of a checkpoint whose architecture is in the table of facts.
    pub fn read(checkpoint: &Checkpoint) -> Result<Config, Error> {
        let facts = match checkpoint {
            Checkpoint::Gguf(gguf) => Facts::of_gguf(gguf.metadata().str("general.architecture")?)?,
            Checkpoint::HuggingFace(model) => {
                let json = Json::new("config.json", model.config())?;
                let classes = json.opt_strs("architectures")?.unwrap_or_default();
                Facts::of_hugging_face(json.opt_str("model_type")?, &classes)?
            }
        };
        Config::with_facts(checkpoint, facts)
    }

    /// Reads the configuration by the given facts.
    pub fn with_facts(checkpoint: &Checkpoint, facts: &Facts) -> Result<Config, Error> {
        let source = Source::new(checkpoint, facts)?;
        refuse_what_is_not_computed(&source)?;
        let layers = source.size(key::LAYERS)?;
        let hidden = source.size(key::HIDDEN)?;
        let heads = heads(&source, hidden)?;
        let context = source.positions(key::CONTEXT)?;
        let biases = biases(&source, checkpoint, facts)?;
        Ok(Config {
            facts: *facts,
            layers,
            hidden,
            heads,
            ffn: source.size(key::FFN)?,
            vocab: vocab(&source, checkpoint, facts)?,
            context,
            norm_eps: norm_eps(&source)?,
            rope: Rope::read(&source, checkpoint, facts, heads.dim, context)?,
            tied: tied(&source, checkpoint, facts)?,
            qkv_bias: biases.qkv,
            output_bias: biases.output,
            mlp_bias: biases.mlp,
            windows: windows(&source, facts, layers)?,
            attention_scale: attention_scale(&source, heads.dim)?,
            glu: glu(&source, facts)?,
        })
    }

    /// The groups of layers that share pages, each with `pages` pages: one for the layers that see everything, one for
    /// each window.
    pub fn kv_groups(&self, pages: usize) -> Vec<KvGroup> {
        let group = |window: &Option<u32>| KvGroup {
            layers: self.windows.iter().filter(|other| *other == window).count(),
            heads: self.heads.kv,
            dim: self.heads.dim,
            window: *window,
            pages,
        };
        self.group_windows().iter().map(group).collect()
    }

    /// Where a layer's keys and values are within [`kv_groups`](Config::kv_groups).
    pub fn kv_layer(&self, layer: usize) -> KvLayer {
        let window = self.windows[layer];
        let group = self.group_windows().iter().position(|other| *other == window);
        KvLayer {
            group: group.expect("every layer's window has its group"),
            layer: self.windows[..layer].iter().filter(|other| **other == window).count(),
        }
    }

    /// The windows that occur, in the order of their first layers.
    fn group_windows(&self) -> Vec<Option<u32>> {
        let mut windows = Vec::new();
        for window in &self.windows {
            if !windows.contains(window) {
                windows.push(*window);
            }
        }
        windows
    }
}

fn heads(source: &Source<'_>, hidden: usize) -> Result<Heads, Error> {
    let query = source.size(key::HEADS)?;
    let kv = source.opt_size(key::HEADS_KV)?.unwrap_or(query);
    if !query.is_multiple_of(kv) {
        let wanted = format!("a divisor of the {query} query heads");
        return Err(bad(&source.spelling(key::HEADS_KV), kv, &wanted));
    }
    let dim = match source.opt_size(key::HEAD_DIM)? {
        Some(dim) => dim,
        None if hidden.is_multiple_of(query) => hidden / query,
        None => {
            let wanted =
                format!("a divisor of the hidden size {hidden}, or {}", source.spelling(key::HEAD_DIM));
            return Err(bad(&source.spelling(key::HEADS), query, &wanted));
        }
    };
    if let Source::Gguf { .. } = source {
        let value_length = Key { gguf: "attention.value_length", hugging_face: "" };
        match source.opt_size(value_length)? {
            Some(other) if other != dim => {
                let wanted = format!("the key length {dim}");
                return Err(bad(&source.spelling(value_length), other, &wanted));
            }
            _ => {}
        }
    }
    Ok(Heads { query, kv, dim })
}

/// Rows of the embedding. Where the file also counts its vocabulary, the two must not contradict each other.
fn vocab(source: &Source<'_>, checkpoint: &Checkpoint, facts: &Facts) -> Result<usize, Error> {
    let name = stored_name(checkpoint, facts.row(Tensor::Embedding), 0).unwrap_or_default();
    let view = tensor(checkpoint, &name).ok_or(Error::MissingTensor { tensor: name.clone() })?;
    let rows = match view.shape[..] {
        [rows, _] if rows > 0 && u32::try_from(rows).is_ok() => rows,
        _ => {
            let wanted = vec![0, source.size(key::HIDDEN)?];
            return Err(Error::TensorShape { tensor: name, got: view.shape, wanted });
        }
    };
    match source {
        Source::Gguf { metadata, .. } => {
            let tokens = "tokenizer.ggml.tokens";
            match metadata.opt_strings(tokens)?.map(<[String]>::len) {
                Some(count) if count > rows => {
                    Err(bad(tokens, format!("{count} tokens"), &format!("at most the {rows} rows of {name}")))
                }
                _ => Ok(rows),
            }
        }
        Source::HuggingFace(json) => match json.opt_u64("vocab_size")? {
            Some(count) if count != rows as u64 => {
                Err(bad("vocab_size", count, &format!("the {rows} rows of {name}")))
            }
            _ => Ok(rows),
        },
    }
}

fn norm_eps(source: &Source<'_>) -> Result<f32, Error> {
    // Above one it would drown what it guards; zero is a choice some models make.
    let eps = within(&source.spelling(key::NORM_EPS), source.number(key::NORM_EPS)?, 0.0..=1.0)?;
    Ok(eps as f32)
}

/// GGUF leaves the head out of a tied model; config.json says it, and where it does not, the file shows it.
fn tied(source: &Source<'_>, checkpoint: &Checkpoint, facts: &Facts) -> Result<bool, Error> {
    let name = stored_name(checkpoint, facts.row(Tensor::Output), 0).unwrap_or_default();
    let absent = tensor(checkpoint, &name).is_none();
    match source {
        Source::Gguf { .. } => Ok(absent),
        Source::HuggingFace(json) => Ok(json.opt_bool("tie_word_embeddings")?.unwrap_or(absent)),
    }
}

struct Biases {
    qkv: bool,
    output: bool,
    mlp: bool,
}

fn biases(source: &Source<'_>, checkpoint: &Checkpoint, facts: &Facts) -> Result<Biases, Error> {
    // The first layer decides; a later one that differs is a missing or an unknown tensor.
    let has = |tensor_| {
        stored_name(checkpoint, facts.row(tensor_), 0).is_some_and(|name| tensor(checkpoint, &name).is_some())
    };
    Ok(match (facts.bias, source) {
        (BiasRule::Never, _) => Biases { qkv: false, output: false, mlp: false },
        (BiasRule::Qkv, _) => Biases { qkv: true, output: false, mlp: false },
        (BiasRule::Configured, Source::HuggingFace(json)) => {
            let attention = json.opt_bool("attention_bias")?.unwrap_or(false);
            Biases { qkv: attention, output: attention, mlp: json.opt_bool("mlp_bias")?.unwrap_or(false) }
        }
        (BiasRule::Configured, Source::Gguf { .. }) => Biases {
            qkv: has(Tensor::QueryBias),
            output: has(Tensor::AttentionOutputBias),
            mlp: has(Tensor::DownBias),
        },
    })
}

fn windows(source: &Source<'_>, facts: &Facts, layers: usize) -> Result<Vec<Option<u32>>, Error> {
    const WINDOW: Key = Key { gguf: "attention.sliding_window", hugging_face: "sliding_window" };
    let every = |window: Option<u32>| Ok(vec![window; layers]);
    let json = match source {
        // Converters do not write the key for these architectures; one who did would mean every layer. Zero is none.
        Source::Gguf { metadata, .. } => {
            return every(metadata.opt_u32(&source.spelling(WINDOW))?.filter(|window| *window > 0));
        }
        Source::HuggingFace(json) => json,
    };
    match facts.window {
        WindowRule::Never => every(None),
        WindowRule::EveryLayer(default) if !json.has(WINDOW.hugging_face) => every(Some(default)),
        WindowRule::EveryLayer(_) if json.get(WINDOW.hugging_face).is_none() => every(None),
        WindowRule::EveryLayer(_) => every(Some(source.positions(WINDOW)?)),
        WindowRule::SomeLayers => {
            if !json.opt_bool("use_sliding_window")?.unwrap_or(false)
                || json.get(WINDOW.hugging_face).is_none()
            {
                return every(None);
            }
            let window = source.positions(WINDOW)?;
            let windowed = windowed_layers(json, layers)?;
            Ok(windowed.into_iter().map(|windowed| windowed.then_some(window)).collect())
        }
    }
}

fn windowed_layers(json: &Json<'_>, layers: usize) -> Result<Vec<bool>, Error> {
    let Some(types) = json.opt_strs("layer_types")? else {
        let Some(full) = json.opt_u64("max_window_layers")? else {
            return Err(Error::MissingKey { key: "max_window_layers".to_owned() });
        };
        return Ok((0..layers as u64).map(|layer| layer >= full).collect());
    };
    if types.len() != layers {
        let wanted = format!("one for each of the {layers} layers");
        return Err(bad("layer_types", format!("{} types", types.len()), &wanted));
    }
    let windowed = |kind: &str| match kind {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(true),
        other => Err(Error::Unsupported {
            what: format!("layer type {other:?}"),
            supported: "full_attention, sliding_attention".to_owned(),
        }),
    };
    types.into_iter().map(windowed).collect()
}

fn attention_scale(source: &Source<'_>, dim: usize) -> Result<f32, Error> {
    let scale = Key { gguf: "attention.scale", hugging_face: "" };
    let stored = match source {
        Source::Gguf { .. } => source.opt_number(scale)?.filter(|scale| *scale != 0.0),
        Source::HuggingFace(_) => None,
    };
    Ok(stored.unwrap_or(1.0 / (dim as f64).sqrt()) as f32)
}

fn glu(source: &Source<'_>, facts: &Facts) -> Result<Glu, Error> {
    let Source::HuggingFace(json) = source else { return Ok(facts.glu) };
    match json.opt_str("hidden_act")? {
        None => Ok(facts.glu),
        Some("silu" | "swish") => Ok(Glu::Silu),
        Some(other) => {
            Err(Error::Unsupported { what: format!("hidden_act {other:?}"), supported: "silu".to_owned() })
        }
    }
}

/// Keys that turn these architectures into something else.
fn refuse_what_is_not_computed(source: &Source<'_>) -> Result<(), Error> {
    let refuse =
        |what: String, supported: &str| Err(Error::Unsupported { what, supported: supported.to_owned() });
    match source {
        Source::Gguf { metadata, architecture } => {
            let experts = format!("{architecture}.expert_count");
            if let Some(count) = metadata.opt_u64(&experts)?.filter(|count| *count > 0) {
                return refuse(format!("a mixture of experts ({experts} {count})"), "dense feed-forward");
            }
            let causal = format!("{architecture}.attention.causal");
            if metadata.opt_bool(&causal)? == Some(false) {
                return refuse(format!("attention in both directions ({causal} false)"), "causal attention");
            }
        }
        Source::HuggingFace(json) => {
            if let Some(quantization) = json.opt_object("quantization_config")? {
                let method = quantization.opt_str("quant_method")?.unwrap_or("unnamed");
                return refuse(
                    format!("quantization_config with method {method:?}"),
                    "F32, F16 and BF16 safetensors, or GGUF",
                );
            }
        }
    }
    Ok(())
}
