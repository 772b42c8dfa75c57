//! The numbers of one model, read from its checkpoint and checked.

use fornax_compute::{Glu, Heads, KvGroup, KvKind, KvLayer, Need, NormKind, Pooling, Routing, Shares};
use fornax_format::{Array, Checkpoint, Value};

use crate::facts::{AttentionScale, BiasRule, EmbeddingScale, ShareRule, WindowRule};
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
    /// Inner width of the feed-forward that every token takes; 0 where there are none but experts.
    pub ffn: usize,
    /// The experts, where the feed-forward is made of them.
    pub mixture: Option<Mixture>,
    /// Rows of the embedding: a tokenizer may know fewer.
    pub vocab: usize,
    /// Positions the model was made for.
    pub context: u32,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Rotary positions.
    pub rope: Rope,
    /// Rotary positions of layers with a window, where they have their own.
    pub window_rope: Option<Rope>,
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
    /// Scaled query-key products bend towards this.
    pub attention_cap: Option<f32>,
    /// Multiplies the embedding.
    pub embedding_scale: f32,
    /// Multiplies what a branch adds to the residual stream.
    pub residual_scale: f32,
    /// Multiplies logits.
    pub logit_scale: f32,
    /// Logits bend towards this.
    pub logit_cap: Option<f32>,
    /// The activation of the feed-forward.
    pub glu: Glu,
    /// Kinds of token that the embedding tells apart; 0 where it does not.
    pub token_types: usize,
    /// How an encoder makes one vector of a text; `None` of decoders.
    pub pooling: Option<Pooling>,
    /// Whether an encoder reads two texts together and has a head that tells how well they fit.
    pub ranks: bool,
}

/// The experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    /// How many there are, and how they are chosen.
    pub routing: Routing,
    /// Inner width of one.
    pub ffn: usize,
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
    pub(super) const EXPERTS: Key = key("expert_count", "num_local_experts");
    /// What older files call it.
    pub(super) const NUM_EXPERTS: Key = key("expert_count", "num_experts");
    pub(super) const EXPERTS_CHOSEN: Key = key("expert_used_count", "num_experts_per_tok");
    pub(super) const EXPERT_FFN: Key = key("expert_feed_forward_length", "moe_intermediate_size");
    pub(super) const SHARED_FFN: Key =
        key("expert_shared_feed_forward_length", "shared_expert_intermediate_size");
    pub(super) const HEADS: Key = key("attention.head_count", "num_attention_heads");
    pub(super) const HEADS_KV: Key = key("attention.head_count_kv", "num_key_value_heads");
    pub(super) const HEAD_DIM: Key = key("attention.key_length", "head_dim");
    pub(super) const CONTEXT: Key = key("context_length", "max_position_embeddings");
    pub(super) const RMS_NORM_EPS: Key = key("attention.layer_norm_rms_epsilon", "rms_norm_eps");
    pub(super) const LAYER_NORM_EPS: Key = key("attention.layer_norm_epsilon", "layer_norm_eps");
    pub(super) const WINDOW: Key = key("attention.sliding_window", "sliding_window");
    pub(super) const WINDOW_PATTERN: Key = key("attention.sliding_window_pattern", "sliding_window_pattern");
    pub(super) const ATTENTION_SCALE: Key = key("attention.scale", "attention_multiplier");
    pub(super) const EMBEDDING_SCALE: Key = key("embedding_scale", "embedding_multiplier");
    pub(super) const RESIDUAL_SCALE: Key = key("residual_scale", "residual_multiplier");
    pub(super) const LOGITS_SCALING: Key = key("logit_scale", "logits_scaling");
    pub(super) const ATTENTION_CAP: Key = key("attn_logit_softcapping", "attn_logit_softcapping");
    pub(super) const LOGIT_CAP: Key = key("final_logit_softcapping", "final_logit_softcapping");
}

impl Config {
    /// Reads the configuration of a checkpoint whose architecture is in the table of facts.
    pub fn read(checkpoint: &Checkpoint) -> Result<Config, Error> {
        let facts = match checkpoint {
            Checkpoint::Gguf(gguf) => {
                let architecture = gguf.metadata().str("general.architecture")?;
                let experts = gguf.metadata().opt_u64(&format!("{architecture}.expert_count"))?;
                Facts::of_gguf(architecture, experts.is_some_and(|experts| experts > 0))?
            }
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
        refuse_what_is_not_computed(&source, facts)?;
        let layers = source.size(key::LAYERS)?;
        let hidden = source.size(key::HIDDEN)?;
        let heads = heads(&source, hidden)?;
        let context = source.positions(key::CONTEXT)?;
        let biases = biases(&source, checkpoint, facts)?;
        let (rope, window_rope) = Rope::read(&source, checkpoint, facts, heads.dim, context)?;
        let multipliers = multipliers(&source, facts, hidden)?;
        let caps = facts.soft_caps;
        Ok(Config {
            facts: *facts,
            layers,
            hidden,
            heads,
            ffn: ffn(&source, facts, hidden)?,
            mixture: mixture(&source, facts)?,
            vocab: vocab(&source, checkpoint, facts)?,
            context,
            norm_eps: norm_eps(&source, facts)?,
            rope,
            window_rope,
            tied: tied(&source, checkpoint, facts)?,
            qkv_bias: biases.qkv,
            output_bias: biases.output,
            mlp_bias: biases.mlp,
            windows: windows(&source, facts, layers)?,
            attention_scale: attention_scale(&source, facts, heads, layers, hidden)?,
            attention_cap: cap(
                &source,
                key::ATTENTION_CAP,
                caps.and_then(|caps| caps.attention),
                caps.is_some(),
            )?,
            embedding_scale: multipliers.embedding,
            residual_scale: multipliers.residual,
            logit_scale: multipliers.logits,
            logit_cap: cap(&source, key::LOGIT_CAP, caps.and_then(|caps| caps.logits), caps.is_some())?,
            glu: glu(&source, facts)?,
            token_types: token_types(&source, facts)?,
            pooling: pooling(&source, checkpoint, facts)?,
            ranks: ranks(&source, facts)?,
        })
    }

    /// Says that no sequence will be longer: some models rotate otherwise in long contexts.
    pub fn limit_context(&mut self, context: u32) {
        self.rope.context = context.min(self.context);
    }

    /// Whether the feed-forward has gates.
    pub fn gated(&self) -> bool {
        self.facts.gated()
    }

    /// What the model needs that not every backend has.
    pub fn needs(&self) -> Vec<Need> {
        let scaled = self.embedding_scale != 1.0 || self.residual_scale != 1.0 || self.logit_scale != 1.0;
        let needs = [
            (Need::LayerNorm, self.facts.norm == NormKind::Layer),
            (Need::QkNorm, self.facts.has(Tensor::QueryNorm)),
            (Need::Positions, self.facts.has(Tensor::Positions)),
            (Need::Pointwise, scaled || self.logit_cap.is_some() || !self.gated()),
            (Need::Gelu, self.gated() && matches!(self.glu, Glu::Gelu | Glu::GeluTanh)),
            (Need::SoftCap, self.attention_cap.is_some()),
            (Need::Sinks, self.facts.has(Tensor::Sinks)),
            (Need::Experts, self.mixture.is_some()),
            (Need::BothDirections, self.pooling.is_some()),
            (Need::Pooling, self.pooling.is_some()),
        ];
        needs.into_iter().filter(|(_, asked)| *asked).map(|(need, _)| need).collect()
    }

    /// The groups of layers that share pages, each with `pages` pages: one for the layers that see everything, one for
    /// each window.
    pub fn kv_groups(&self, pages: usize) -> Vec<KvGroup> {
        let group = |window: &Option<u32>| KvGroup {
            layers: self.windows.iter().filter(|other| *other == window).count(),
            kind: KvKind::pairs(self.heads.kv, self.heads.dim),
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
    let name = stored(checkpoint, facts, Tensor::Embedding);
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
        Source::HuggingFace { json, .. } => match json.opt_u64("vocab_size")? {
            Some(count) if count != rows as u64 => {
                Err(bad(&json.spelling("vocab_size"), count, &format!("the {rows} rows of {name}")))
            }
            _ => Ok(rows),
        },
    }
}

/// The name under which a weight of the model, or of its first layer, is stored; empty where it cannot be.
fn stored(checkpoint: &Checkpoint, facts: &Facts, tensor: Tensor) -> String {
    facts.row(tensor).and_then(|row| stored_name(checkpoint, facts, row, 0)).unwrap_or_default()
}

/// The inner width. Where the configuration does not have it, some architectures' is four times the hidden size.
fn ffn(source: &Source<'_>, facts: &Facts, hidden: usize) -> Result<usize, Error> {
    if facts.experts.is_some() {
        if !facts.has(Tensor::SharedRouter) {
            return Ok(0);
        }
        // Files older than the key have the shared expert's width here.
        return source.opt_size(key::SHARED_FFN)?.map_or_else(|| source.size(key::FFN), Ok);
    }
    match (source.opt_size(key::FFN)?, facts.ffn_of_hidden) {
        (Some(ffn), _) => Ok(ffn),
        (None, Some(times)) => Ok(times * hidden),
        (None, None) => Err(Error::MissingKey { key: source.spelling(key::FFN) }),
    }
}

fn mixture(source: &Source<'_>, facts: &Facts) -> Result<Option<Mixture>, Error> {
    let Some(rule) = facts.experts else { return Ok(None) };
    let experts = source.opt_size(key::EXPERTS)?.map_or_else(|| source.size(key::NUM_EXPERTS), Ok)?;
    let chosen = source.size(key::EXPERTS_CHOSEN)?;
    if chosen > experts {
        let wanted = format!("at most the {experts} experts");
        return Err(bad(&source.spelling(key::EXPERTS_CHOSEN), chosen, &wanted));
    }
    let shares = match (rule, source) {
        (ShareRule::OfChosen, _) => Shares::OfChosen,
        (ShareRule::Configured { gguf }, Source::Gguf { .. }) => gguf,
        (ShareRule::Configured { .. }, Source::HuggingFace { json, .. }) => {
            match json.opt_bool("norm_topk_prob")?.unwrap_or(false) {
                true => Shares::OfChosen,
                false => Shares::OfAll,
            }
        }
    };
    let ffn = source.opt_size(key::EXPERT_FFN)?.map_or_else(|| source.size(key::FFN), Ok)?;
    Ok(Some(Mixture { routing: Routing { experts, chosen, shares }, ffn }))
}

fn norm_eps(source: &Source<'_>, facts: &Facts) -> Result<f32, Error> {
    let key = match facts.norm {
        NormKind::Rms => key::RMS_NORM_EPS,
        NormKind::Layer => key::LAYER_NORM_EPS,
    };
    // Above one it would drown what it guards; zero is a choice some models make.
    let eps = within(&source.spelling(key), source.number(key)?, 0.0..=1.0)?;
    Ok(eps as f32)
}

/// GGUF leaves the head out of a tied model; config.json says it, and where it does not, the file shows it.
fn tied(source: &Source<'_>, checkpoint: &Checkpoint, facts: &Facts) -> Result<bool, Error> {
    if !facts.has(Tensor::Output) {
        return Ok(false);
    }
    let name = stored(checkpoint, facts, Tensor::Output);
    let absent = tensor(checkpoint, &name).is_none();
    match source {
        Source::Gguf { .. } => Ok(absent),
        Source::HuggingFace { json, .. } => Ok(json.opt_bool("tie_word_embeddings")?.unwrap_or(absent)),
    }
}

struct Biases {
    qkv: bool,
    output: bool,
    mlp: bool,
}

fn biases(source: &Source<'_>, checkpoint: &Checkpoint, facts: &Facts) -> Result<Biases, Error> {
    // The first layer decides; a later one that differs is a missing or an unknown tensor.
    let has = |wanted| tensor(checkpoint, &stored(checkpoint, facts, wanted)).is_some();
    Ok(match (facts.bias, source) {
        (BiasRule::Never, _) => Biases { qkv: false, output: false, mlp: false },
        (BiasRule::Qkv, _) => Biases { qkv: true, output: false, mlp: false },
        (BiasRule::Always, _) => Biases { qkv: true, output: true, mlp: true },
        (BiasRule::Configured, Source::HuggingFace { json, .. }) => {
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
    let every = |window: Option<u32>| Ok(vec![window; layers]);
    let some = |window: u32, windowed: Vec<bool>| {
        Ok(windowed.into_iter().map(|windowed| windowed.then_some(window)).collect())
    };
    let all_but_every = |n: u32| (1..).take(layers).map(|layer: u32| !layer.is_multiple_of(n)).collect();
    let json = match source {
        Source::Gguf { metadata, .. } => {
            // Zero is none.
            let window = metadata.opt_u32(&source.spelling(key::WINDOW))?.filter(|window| *window > 0);
            return match (window, facts.window) {
                (Some(window), WindowRule::AllButEvery(n)) => {
                    some(window, gguf_pattern(source, layers)?.unwrap_or_else(|| all_but_every(n)))
                }
                // Converters write the key for others where it holds for every layer.
                (window, _) => every(window),
            };
        }
        Source::HuggingFace { json, .. } => json,
    };
    let (given, null) = (json.has(source.own(key::WINDOW)), json.get(source.own(key::WINDOW)).is_none());
    match facts.window {
        WindowRule::Never => every(None),
        WindowRule::EveryLayer(default) if !given => every(default),
        WindowRule::EveryLayer(_) | WindowRule::AllButEvery(_) if given && null => every(None),
        WindowRule::EveryLayer(_) => every(Some(source.positions(key::WINDOW)?)),
        WindowRule::AllButEvery(n) => {
            let window = source.positions(key::WINDOW)?;
            let n = json
                .opt_u64(key::WINDOW_PATTERN.hugging_face)?
                .and_then(|n| u32::try_from(n).ok())
                .unwrap_or(n);
            some(window, layer_types(json, layers)?.unwrap_or_else(|| all_but_every(n.max(1))))
        }
        WindowRule::SomeLayers => {
            if !json.opt_bool("use_sliding_window")?.unwrap_or(false) || null {
                return every(None);
            }
            let window = source.positions(key::WINDOW)?;
            if let Some(windowed) = layer_types(json, layers)? {
                return some(window, windowed);
            }
            let Some(full) = json.opt_u64("max_window_layers")? else {
                return Err(Error::MissingKey { key: "max_window_layers".to_owned() });
            };
            some(window, (0..layers as u64).map(|layer| layer >= full).collect())
        }
    }
}

/// Which layers have the window, where a GGUF file says it: layer by layer, or every how many one has none.
fn gguf_pattern(source: &Source<'_>, layers: usize) -> Result<Option<Vec<bool>>, Error> {
    let Source::Gguf { metadata, .. } = source else { return Ok(None) };
    let key = source.spelling(key::WINDOW_PATTERN);
    match metadata.get(&key) {
        None => Ok(None),
        Some(Value::Array(Array::Bool(pattern))) if pattern.len() == layers => Ok(Some(pattern.clone())),
        Some(Value::Array(Array::Bool(pattern))) => {
            let wanted = format!("one for each of the {layers} layers");
            Err(bad(&key, format!("{} values", pattern.len()), &wanted))
        }
        Some(_) => {
            let n = metadata.opt_u32(&key)?.unwrap_or(0).max(1);
            Ok(Some((1..).take(layers).map(|layer: u32| !layer.is_multiple_of(n)).collect()))
        }
    }
}

/// Which layers have the window, where config.json says it layer by layer.
fn layer_types(json: &Json<'_>, layers: usize) -> Result<Option<Vec<bool>>, Error> {
    let Some(types) = json.opt_strs("layer_types")? else { return Ok(None) };
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
    types.into_iter().map(windowed).collect::<Result<_, _>>().map(Some)
}

fn attention_scale(
    source: &Source<'_>,
    facts: &Facts,
    heads: Heads,
    layers: usize,
    hidden: usize,
) -> Result<f32, Error> {
    let root = |values: f64| (1.0 / values.sqrt()) as f32;
    // GGUF files of any architecture may have it; zero is none.
    let may_say = facts.multipliers || matches!(source, Source::Gguf { .. });
    let said = if may_say { source.opt_number(key::ATTENTION_SCALE)? } else { None };
    if let Some(scale) = said.filter(|scale| *scale != 0.0) {
        return Ok(scale as f32);
    }
    let head_size = root(heads.dim as f64);
    match (facts.attention_scale, source) {
        (AttentionScale::HeadSize, _) => Ok(head_size),
        (AttentionScale::PreAttentionScalar { .. }, Source::HuggingFace { .. }) => {
            let scalar = Key { gguf: "", hugging_face: "query_pre_attn_scalar" };
            Ok(root(within(&source.spelling(scalar), source.number(scalar)?, 1e-6..=1e9)?))
        }
        (AttentionScale::PreAttentionScalar { layers: largest }, _) if layers == largest => {
            Ok(root((hidden / heads.query) as f64))
        }
        (AttentionScale::PreAttentionScalar { .. }, _) => Ok(head_size),
    }
}

/// A cap of architectures that have caps: what is said, else theirs; null and zero are none.
fn cap(source: &Source<'_>, key: Key, default: Option<f64>, has: bool) -> Result<Option<f32>, Error> {
    if !has {
        return Ok(None);
    }
    let said = source.opt_number(key)?;
    let null =
        matches!(source, Source::HuggingFace { json, .. } if json.has(key.hugging_face)) && said.is_none();
    let cap = if null { None } else { said.or(default).filter(|cap| *cap != 0.0) };
    Ok(cap.map(|cap| within(&source.spelling(key), cap, 1e-6..=1e9)).transpose()?.map(|cap| cap as f32))
}

struct Multipliers {
    embedding: f32,
    residual: f32,
    logits: f32,
}

fn multipliers(source: &Source<'_>, facts: &Facts, hidden: usize) -> Result<Multipliers, Error> {
    let said = |key| match facts.multipliers {
        true => Ok::<_, Error>(source.opt_number(key)?.filter(|number| *number != 0.0).unwrap_or(1.0)),
        false => Ok(1.0),
    };
    let embedding = match facts.embedding_scale {
        EmbeddingScale::One => said(key::EMBEDDING_SCALE)?,
        EmbeddingScale::RootOfHidden => (hidden as f64).sqrt(),
    };
    Ok(Multipliers {
        embedding: embedding as f32,
        residual: said(key::RESIDUAL_SCALE)? as f32,
        logits: (1.0 / said(key::LOGITS_SCALING)?) as f32,
    })
}

fn glu(source: &Source<'_>, facts: &Facts) -> Result<Glu, Error> {
    let key = source.own(Key { gguf: "", hugging_face: "hidden_act" });
    let said = match source {
        Source::Gguf { .. } => None,
        Source::HuggingFace { json, .. } => json.opt_str(key)?,
    };
    if let (Glu::Clamped, Source::HuggingFace { json, .. }) = (facts.glu, source) {
        // The key above names another function than the one that is computed. Its numbers have never been others.
        for (key, number) in [("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)] {
            if let Some(other) = json.opt_f64(key)?.filter(|other| *other != number) {
                let what = format!("{key} {other}");
                return Err(Error::Unsupported { what, supported: number.to_string() });
            }
        }
        return Ok(Glu::Clamped);
    }
    let glu = match said {
        None => facts.glu,
        Some("silu" | "swish") => Glu::Silu,
        Some("gelu") => Glu::Gelu,
        Some("gelu_new" | "gelu_pytorch_tanh") => Glu::GeluTanh,
        Some(other) => {
            let supported = "silu, gelu, gelu_new, gelu_pytorch_tanh".to_owned();
            return Err(Error::Unsupported { what: format!("{key} {other:?}"), supported });
        }
    };
    if glu == Glu::Silu && !facts.gated() {
        let what = "silu without gates".to_owned();
        return Err(Error::Unsupported { what, supported: "gelu, gelu_new, gelu_pytorch_tanh".to_owned() });
    }
    Ok(glu)
}

fn token_types(source: &Source<'_>, facts: &Facts) -> Result<usize, Error> {
    if !facts.has(Tensor::TokenTypes) {
        return Ok(0);
    }
    match source {
        Source::Gguf { metadata, .. } => {
            Ok(metadata.opt_u32("tokenizer.ggml.token_type_count")?.map_or(2, |count| count as usize))
        }
        Source::HuggingFace { json, .. } => {
            Ok(json.opt_u64("type_vocab_size")?.and_then(|count| usize::try_from(count).ok()).unwrap_or(2))
        }
    }
}

/// Whether the file says that it classifies, which is computed where there is one class: how well two texts fit.
fn ranks(source: &Source<'_>, facts: &Facts) -> Result<bool, Error> {
    let Source::HuggingFace { json, .. } = source else { return Ok(false) };
    let classes = json.opt_strs("architectures")?.unwrap_or_default();
    if !facts.encoder || !classes.iter().any(|class| class.ends_with("ForSequenceClassification")) {
        return Ok(false);
    }
    // Where the classes have no names there are two.
    let names = json.get("id2label").and_then(|names| names.as_object()).map(serde_json::Map::len);
    let labels = names.or(json.opt_u64("num_labels")?.and_then(|count| usize::try_from(count).ok()));
    let types = token_types(source, facts)?;
    match (labels.unwrap_or(2), types) {
        (1, 2) => Ok(true),
        (labels, types) => Err(Error::Unsupported {
            what: format!("a classifier of {labels} classes with {types} kinds of token"),
            supported: "one class, two kinds of token: how well two texts fit".to_owned(),
        }),
    }
}

/// Encoders whose files do not say average, as sentence-transformers does.
fn pooling(source: &Source<'_>, checkpoint: &Checkpoint, facts: &Facts) -> Result<Option<Pooling>, Error> {
    if !facts.encoder {
        return Ok(None);
    }
    let refuse =
        |what: String| Err(Error::Unsupported { what, supported: "mean, cls, lasttoken".to_owned() });
    let pooling = match (source, checkpoint) {
        (Source::Gguf { metadata, architecture }, _) => {
            let key = format!("{architecture}.pooling_type");
            match metadata.opt_u32(&key)? {
                None | Some(1) => Pooling::Mean,
                Some(2) => Pooling::First,
                Some(3) => Pooling::Last,
                Some(other) => return refuse(format!("{key} {other}")),
            }
        }
        (_, Checkpoint::HuggingFace(_)) if ranks(source, facts)? => Pooling::First,
        (_, Checkpoint::HuggingFace(model)) => {
            let Some(pooling) = model.pooling() else { return Ok(Some(Pooling::Mean)) };
            let json = Json::new("pooling", pooling)?;
            let known = [
                ("pooling_mode_mean_tokens", "mean", Pooling::Mean),
                ("pooling_mode_cls_token", "cls", Pooling::First),
                ("pooling_mode_lasttoken", "lasttoken", Pooling::Last),
            ];
            // Older files have a key for each way, newer ones the way's name.
            let named = json.opt_str("pooling_mode")?;
            let asked = |(key, name, _): &(&str, &str, Pooling)| {
                named == Some(*name) || json.opt_bool(key).ok().flatten() == Some(true)
            };
            let mut ways = known.into_iter().filter(asked);
            match (ways.next(), ways.next()) {
                (Some((_, _, pooling)), None) => pooling,
                _ => return refuse(format!("pooling {pooling}")),
            }
        }
        (Source::HuggingFace { .. }, Checkpoint::Gguf(_)) => Pooling::Mean,
    };
    Ok(Some(pooling))
}

/// Keys that turn these architectures into something else.
fn refuse_what_is_not_computed(source: &Source<'_>, facts: &Facts) -> Result<(), Error> {
    let refuse =
        |what: String, supported: &str| Err(Error::Unsupported { what, supported: supported.to_owned() });
    match source {
        Source::Gguf { metadata, architecture } => {
            let experts = format!("{architecture}.expert_count");
            let count = metadata.opt_u64(&experts)?.filter(|count| *count > 0 && facts.experts.is_none());
            if let Some(count) = count {
                return refuse(format!("a mixture of experts ({experts} {count})"), "dense feed-forward");
            }
            let causal = format!("{architecture}.attention.causal");
            if metadata.opt_bool(&causal)? == Some(false) && !facts.encoder {
                return refuse(format!("attention in both directions ({causal} false)"), "causal attention");
            }
        }
        Source::HuggingFace { json, .. } => {
            let sparse = json.opt_u64("decoder_sparse_step")?.unwrap_or(1);
            let dense = json
                .get("mlp_only_layers")
                .filter(|layers| layers.as_array().is_none_or(|all| !all.is_empty()));
            if facts.experts.is_some() && (sparse != 1 || dense.is_some()) {
                let what = "layers without experts (decoder_sparse_step, mlp_only_layers)".to_owned();
                return refuse(what, "experts in every layer");
            }
            if let Some(kind) = json.opt_str("position_embedding_type")?.filter(|kind| *kind != "absolute") {
                return refuse(format!("position_embedding_type {kind:?}"), "absolute");
            }
            // The other methods are read, or refused, where tensors are.
            let quantization = json.opt_object("quantization_config")?;
            let method = quantization.map(|quantization| quantization.opt_str("quant_method")).transpose()?;
            if method.flatten() == Some("mxfp4") && facts.experts.is_none() {
                return refuse(
                    "quantization_config with method \"mxfp4\"".to_owned(),
                    "fp8, gptq and awq, or GGUF",
                );
            }
        }
    }
    Ok(())
}
