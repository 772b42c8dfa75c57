//! What each layer of a model is made of, read from its checkpoint: layers of one model may differ.

use fornax_compute::{Heads, Routing, Shares, WeightPlace};
use fornax_format::{Array, Value};

use crate::facts::{RotaryRule, ShareRule, WindowRule};
use crate::names::Tensor;
use crate::recurrent::{self, ConvConfig, DeltaConfig};
use crate::source::{Json, Key, Source, bad};
use crate::{Error, Facts};

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// What mixes positions.
    pub mixer: Mixer,
    /// What each position takes for itself.
    pub feed_forward: FeedForward,
    /// Where its experts' weights lie, where it has some. No file says it: whoever plans the memory does.
    pub experts_at: WeightPlace,
}

/// What mixes the positions of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    /// Softmax attention over keys and values of earlier positions.
    Attention(AttentionConfig),
    /// The gated delta rule.
    Delta(DeltaConfig),
    /// A gated short convolution.
    Conv(ConvConfig),
}

/// A layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionConfig {
    /// Its heads. The head size need not be `hidden / heads`.
    pub heads: Heads,
    /// How many positions a query sees, its own included; all where there is none.
    pub window: Option<u32>,
    /// How many positions a query of an encoder sees on each side of its own; all where there is none.
    pub reach: Option<u32>,
    /// Which rotary positions it has.
    pub rotary: Rotary,
    /// The layer whose keys and values it reads: an earlier one with the same heads of them and the same window. It then has
    /// queries of its own and nothing else, and no room in the cache.
    pub keys_of: Option<usize>,
}

impl AttentionConfig {
    /// What its own products yield: its heads, without those of keys and values where it reads another layer's.
    pub(crate) fn own_heads(&self) -> Heads {
        if self.keys_of.is_some() { Heads { kv: 0, ..self.heads } } else { self.heads }
    }
}

/// Which of a model's rotary positions a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotary {
    /// None: its queries and keys stay as they are.
    None,
    /// [`Config::rope`](crate::Config::rope).
    Model,
    /// [`Config::window_rope`](crate::Config::window_rope).
    Window,
}

/// A layer's feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForward {
    /// Every token takes all of it.
    Dense {
        /// Its inner width.
        ffn: usize,
    },
    /// A router chooses experts for each token.
    Mixture(Mixture),
}

/// The experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    /// How many there are, and how they are chosen.
    pub routing: Routing,
    /// Inner width of one.
    pub ffn: usize,
    /// Inner width of the expert that every token takes, where there is one.
    pub shared_ffn: Option<usize>,
}

/// What layers of one group of keys and values have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvShape {
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    pub(crate) window: Option<u32>,
}

impl LayerConfig {
    /// Its attention, where it attends.
    pub fn attention(&self) -> Option<&AttentionConfig> {
        match &self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::Delta(_) | Mixer::Conv(_) => None,
        }
    }

    pub(crate) fn kv_shape(&self) -> Option<KvShape> {
        let AttentionConfig { heads, window, keys_of, .. } = *self.attention()?;
        keys_of.is_none().then_some(KvShape { heads: heads.kv, dim: heads.dim, window })
    }
}

impl FeedForward {
    /// Its experts, where it has some.
    pub fn mixture(&self) -> Option<Mixture> {
        match self {
            FeedForward::Dense { .. } => None,
            FeedForward::Mixture(mixture) => Some(*mixture),
        }
    }

    /// Inner width of what every token takes; 0 where there are none but experts.
    pub fn ffn(&self) -> usize {
        match self {
            FeedForward::Dense { ffn } => *ffn,
            FeedForward::Mixture(mixture) => mixture.shared_ffn.unwrap_or(0),
        }
    }
}

/// Heads of keys and values.
pub(crate) const HEADS_KV: Key = Key { gguf: "attention.head_count_kv", hugging_face: "num_key_value_heads" };

/// Values under one key in each container.
mod key {
    use crate::source::Key;

    const fn key(gguf: &'static str, hugging_face: &'static str) -> Key {
        Key { gguf, hugging_face }
    }

    pub(super) const LAYERS: Key = key("block_count", "num_hidden_layers");
    pub(super) const LAYERS_AHEAD: Key = key("nextn_predict_layers", "");
    pub(super) const FFN: Key = key("feed_forward_length", "intermediate_size");
    pub(super) const EXPERTS: Key = key("expert_count", "num_local_experts");
    /// What older files call it.
    pub(super) const NUM_EXPERTS: Key = key("expert_count", "num_experts");
    pub(super) const EXPERTS_CHOSEN: Key = key("expert_used_count", "num_experts_per_tok");
    pub(super) const EXPERT_FFN: Key = key("expert_feed_forward_length", "moe_intermediate_size");
    pub(super) const SHARED_FFN: Key =
        key("expert_shared_feed_forward_length", "shared_expert_intermediate_size");
    /// Layers before the first that has experts.
    pub(super) const FIRST_DENSE: Key = key("leading_dense_block_count", "first_k_dense_replace");
    pub(super) const HEADS: Key = key("attention.head_count", "num_attention_heads");
    pub(super) const HEADS_KV: Key = super::HEADS_KV;
    pub(super) const HEAD_DIM: Key = key("attention.key_length", "head_dim");
    pub(super) const WINDOW: Key = key("attention.sliding_window", "sliding_window");
    pub(super) const WINDOW_PATTERN: Key = key("attention.sliding_window_pattern", "sliding_window_pattern");
}

/// All layers. `heads` are those of every layer; `windows_rotate` tells whether layers with a window have rotary positions of
/// their own.
pub(crate) fn read(
    source: &Source<'_>,
    facts: &Facts,
    (hidden, heads): (usize, Heads),
    windows_rotate: bool,
) -> Result<Vec<LayerConfig>, Error> {
    let count = count(source)?;
    let recurrent = recurrent::read(source, facts, hidden, count)?;
    let windows = windows(source, facts, count)?;
    let feed_forwards = feed_forwards(source, facts, hidden, count)?;
    let rotates = rotates(source, facts, &windows)?;
    let attention = |window: Option<u32>, rotates: bool| AttentionConfig {
        heads,
        window: window.filter(|_| !facts.encoder),
        // An encoder's window lies around a query, half of it on each side.
        reach: window.filter(|_| facts.encoder).map(|window| window / 2),
        rotary: match window {
            _ if !rotates => Rotary::None,
            Some(_) if windows_rotate => Rotary::Window,
            _ => Rotary::Model,
        },
        keys_of: None,
    };
    let layer =
        |(((window, rotates), recurrent), feed_forward): ((_, Option<Mixer>), FeedForward)| LayerConfig {
            mixer: recurrent.unwrap_or_else(|| Mixer::Attention(attention(window, rotates))),
            feed_forward,
            experts_at: WeightPlace::Device,
        };
    Ok(windows.into_iter().zip(rotates).zip(recurrent).zip(feed_forwards).map(layer).collect())
}

/// Which layers rotate.
fn rotates(source: &Source<'_>, facts: &Facts, windows: &[Option<u32>]) -> Result<Vec<bool>, Error> {
    let layers = windows.len();
    let n = match facts.rotary {
        RotaryRule::EveryLayer => return Ok(vec![true; layers]),
        RotaryRule::Windows => {
            let none = windows.iter().all(Option::is_none);
            return Ok(windows.iter().map(|window| none || window.is_some()).collect());
        }
        RotaryRule::AllButEvery(n) => u64::from(n),
    };
    let all_but_every = |n: u64| (1..=layers as u64).map(|layer| !layer.is_multiple_of(n)).collect();
    let Source::HuggingFace { json, .. } = source else { return Ok(all_but_every(n)) };
    if let Some(listed) = json.opt_u64s("no_rope_layers")? {
        // One stands for a layer that rotates, whatever the key's name says.
        if listed.len() != layers {
            let wanted = format!("one for each of the {layers} layers");
            return Err(bad("no_rope_layers", format!("{} values", listed.len()), &wanted));
        }
        return Ok(listed.iter().map(|rotates| *rotates != 0).collect());
    }
    let interval = json.opt_u64("no_rope_layer_interval")?.unwrap_or(n);
    Ok(all_but_every(interval.max(1)))
}

/// Layers that only guess ahead.
pub(crate) fn ahead(source: &Source<'_>) -> Result<u64, Error> {
    match source {
        Source::Gguf { .. } => Ok(source.opt_whole(key::LAYERS_AHEAD)?.unwrap_or(0)),
        Source::HuggingFace { .. } => Ok(0),
    }
}

/// Layers without those that only guess ahead: GGUF files count these among them.
fn count(source: &Source<'_>) -> Result<usize, Error> {
    let (all, ahead) = (source.size(key::LAYERS)?, ahead(source)?);
    let left = usize::try_from(ahead).ok().and_then(|ahead| all.checked_sub(ahead)).filter(|left| *left > 0);
    left.ok_or_else(|| {
        bad(&source.spelling(key::LAYERS_AHEAD), ahead, &format!("fewer than the {all} layers"))
    })
}

/// The heads of every layer.
pub(crate) fn heads(source: &Source<'_>, hidden: usize) -> Result<Heads, Error> {
    let query = source.size(key::HEADS)?;
    let listed = kv_heads_listed(source)?;
    let kv = match (listed, source) {
        (Some(kv), _) => kv,
        (None, Source::HuggingFace { json, .. }) if one_kv_head(json)? => 1,
        (None, _) => source.opt_size(key::HEADS_KV)?.unwrap_or(query),
    };
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

/// Whether all queries share one head of keys and values, as files older than the number of such heads say it.
fn one_kv_head(json: &Json<'_>) -> Result<bool, Error> {
    Ok(json.opt_bool("multi_query")? == Some(true)
        && json.opt_bool("new_decoder_architecture")? != Some(true))
}

/// The heads of keys and values where a GGUF file lists them: those of layers that attend are all the same, the others have
/// none.
fn kv_heads_listed(source: &Source<'_>) -> Result<Option<usize>, Error> {
    let Source::Gguf { metadata, .. } = source else { return Ok(None) };
    let key = source.spelling(key::HEADS_KV);
    let counts: Vec<i64> = match metadata.get(&key) {
        Some(Value::Array(Array::I32(counts))) => counts.iter().map(|count| i64::from(*count)).collect(),
        Some(Value::Array(Array::U32(counts))) => counts.iter().map(|count| i64::from(*count)).collect(),
        _ => return Ok(None),
    };
    let mut some = counts.iter().filter(|count| **count > 0);
    match some.next() {
        Some(first) if some.all(|other| other == first) => Ok(usize::try_from(*first).ok()),
        Some(_) => Err(bad(&key, "several numbers of heads", "one for all layers that attend")),
        None => Err(bad(&key, "no heads in any layer", "a layer that attends")),
    }
}

fn feed_forwards(
    source: &Source<'_>,
    facts: &Facts,
    hidden: usize,
    layers: usize,
) -> Result<Vec<FeedForward>, Error> {
    let Some(mixture) = mixture(source, facts)? else {
        return Ok(vec![FeedForward::Dense { ffn: ffn(source, facts, hidden)? }; layers]);
    };
    let mut all = vec![FeedForward::Mixture(mixture); layers];
    let dense = dense_layers(source, layers)?;
    if dense.contains(&true) {
        if !facts.has(Tensor::Down) {
            return Err(Error::Unsupported {
                what: format!("a layer without experts in the {} architecture", facts.name),
                supported: "experts in every layer".to_owned(),
            });
        }
        let ffn = ffn(source, facts, hidden)?;
        for (layer, _) in all.iter_mut().zip(dense).filter(|(_, dense)| *dense) {
            *layer = FeedForward::Dense { ffn };
        }
    }
    Ok(all)
}

/// Which layers of a mixture have no experts. The keys are listened to whatever the architecture: a file that has one which
/// does not hold for it lacks the tensors that follow from the key, and is refused.
fn dense_layers(source: &Source<'_>, layers: usize) -> Result<Vec<bool>, Error> {
    let first = source.opt_whole(key::FIRST_DENSE)?.unwrap_or(0);
    let (mut every, mut listed) = (1, Vec::new());
    if let Source::HuggingFace { json, .. } = source {
        every = json.opt_u64(SPARSE_STEP)?.unwrap_or(1);
        if every == 0 {
            return Err(bad(&json.spelling(SPARSE_STEP), every, "at least 1"));
        }
        listed = json.opt_u64s("mlp_only_layers")?.unwrap_or_default();
    }
    let dense = |layer: u64| layer < first || listed.contains(&layer) || !(layer + 1).is_multiple_of(every);
    Ok((0..layers as u64).map(dense).collect())
}

/// Every n-th layer has experts: n.
const SPARSE_STEP: &str = "decoder_sparse_step";

/// The inner width. Where the configuration does not have it, some architectures' is four times the hidden size.
fn ffn(source: &Source<'_>, facts: &Facts, hidden: usize) -> Result<usize, Error> {
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
    // Files older than their own keys have these widths under the dense one's.
    let width = |key| source.opt_size(key)?.map_or_else(|| source.size(key::FFN), Ok);
    let shared_ffn = facts.has(Tensor::SharedUp).then(|| width(key::SHARED_FFN)).transpose()?;
    let ffn = width(key::EXPERT_FFN)?;
    Ok(Some(Mixture { routing: Routing { experts, chosen, shares }, ffn, shared_ffn }))
}

/// What config.json calls the kind of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayerType {
    Full,
    Sliding,
}

impl LayerType {
    /// Every `n`-th layer sees everything, the others have the window.
    fn all_but_every(n: u32, layers: usize) -> Vec<LayerType> {
        let kind = |layer: u32| if layer.is_multiple_of(n) { LayerType::Full } else { LayerType::Sliding };
        (1..).take(layers).map(kind).collect()
    }

    /// The first of every `n` layers sees everything, the others have the window.
    fn all_but_first_of(n: u32, layers: usize) -> Vec<LayerType> {
        let kind = |layer: u32| if layer.is_multiple_of(n) { LayerType::Full } else { LayerType::Sliding };
        (0..).take(layers).map(kind).collect()
    }
}

/// Each layer's window.
fn windows(source: &Source<'_>, facts: &Facts, layers: usize) -> Result<Vec<Option<u32>>, Error> {
    let every = |window: Option<u32>| Ok(vec![window; layers]);
    let some = |window: u32, types: Vec<LayerType>| {
        Ok(types.into_iter().map(|kind| (kind == LayerType::Sliding).then_some(window)).collect())
    };
    let json = match source {
        Source::Gguf { metadata, .. } => {
            // Zero is none.
            let window = metadata.opt_u32(&source.spelling(key::WINDOW))?.filter(|window| *window > 0);
            return match (window, facts.window) {
                (Some(window), WindowRule::AllButEvery(n)) => {
                    let types = gguf_pattern(source, layers, LayerType::all_but_every)?;
                    some(window, types.unwrap_or_else(|| LayerType::all_but_every(n, layers)))
                }
                (Some(window), WindowRule::AllButFirstOf(n)) => {
                    let types = gguf_pattern(source, layers, LayerType::all_but_first_of)?;
                    some(window, types.unwrap_or_else(|| LayerType::all_but_first_of(n, layers)))
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
        WindowRule::EveryLayer(_) | WindowRule::AllButEvery(_) | WindowRule::AllButFirstOf(_)
            if given && null =>
        {
            every(None)
        }
        WindowRule::EveryLayer(_) => every(Some(source.positions(key::WINDOW)?)),
        // Neither the file nor the architecture has one.
        WindowRule::AllButEvery(_) | WindowRule::AllButFirstOf(_)
            if source.opt_whole(key::WINDOW)?.is_none() =>
        {
            every(None)
        }
        WindowRule::AllButEvery(n) | WindowRule::AllButFirstOf(n) => {
            let window = source.positions(key::WINDOW)?;
            if let Some(types) = layer_types(json, layers)? {
                return some(window, types);
            }
            let n = json
                .opt_u64(source.own(key::WINDOW_PATTERN))?
                .and_then(|n| u32::try_from(n).ok())
                .unwrap_or(n)
                .max(1);
            some(
                window,
                match facts.window {
                    WindowRule::AllButFirstOf(_) => LayerType::all_but_first_of(n, layers),
                    _ => LayerType::all_but_every(n, layers),
                },
            )
        }
        WindowRule::SomeLayers => {
            if !json.opt_bool("use_sliding_window")?.unwrap_or(false) || null {
                return every(None);
            }
            let window = source.positions(key::WINDOW)?;
            if let Some(types) = layer_types(json, layers)? {
                return some(window, types);
            }
            let Some(full) = json.opt_u64("max_window_layers")? else {
                return Err(Error::MissingKey { key: "max_window_layers".to_owned() });
            };
            let kind = |layer| if layer < full { LayerType::Full } else { LayerType::Sliding };
            some(window, (0..layers as u64).map(kind).collect())
        }
    }
}

/// The layers' types where a GGUF file says them: layer by layer, or every how many one has no window.
fn gguf_pattern(
    source: &Source<'_>,
    layers: usize,
    every: fn(u32, usize) -> Vec<LayerType>,
) -> Result<Option<Vec<LayerType>>, Error> {
    let Source::Gguf { metadata, .. } = source else { return Ok(None) };
    let key = source.spelling(key::WINDOW_PATTERN);
    match metadata.get(&key) {
        None => Ok(None),
        Some(Value::Array(Array::Bool(pattern))) if pattern.len() == layers => {
            let kind = |&windowed: &bool| if windowed { LayerType::Sliding } else { LayerType::Full };
            Ok(Some(pattern.iter().map(kind).collect()))
        }
        Some(Value::Array(Array::Bool(pattern))) => {
            let wanted = format!("one for each of the {layers} layers");
            Err(bad(&key, format!("{} values", pattern.len()), &wanted))
        }
        Some(_) => {
            let n = metadata.opt_u32(&key)?.unwrap_or(0).max(1);
            Ok(Some(every(n, layers)))
        }
    }
}

/// The layers' types where config.json says them layer by layer.
fn layer_types(json: &Json<'_>, layers: usize) -> Result<Option<Vec<LayerType>>, Error> {
    let Some(types) = json.opt_strs("layer_types")? else { return Ok(None) };
    if types.len() != layers {
        let wanted = format!("one for each of the {layers} layers");
        return Err(bad("layer_types", format!("{} types", types.len()), &wanted));
    }
    let kind = |kind: &str| match kind {
        "full_attention" => Ok(LayerType::Full),
        "sliding_attention" => Ok(LayerType::Sliding),
        other => Err(Error::Unsupported {
            what: format!("layer type {other:?}"),
            supported: "full_attention, sliding_attention".to_owned(),
        }),
    };
    types.into_iter().map(kind).collect::<Result<_, _>>().map(Some)
}
