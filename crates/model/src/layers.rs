//! What each layer of a model is made of, read from its checkpoint: layers of one model may differ.

use fornax_compute::{Heads, Routing, Shares, WeightPlace};
use fornax_format::{Array, Checkpoint, Value};

use crate::facts::{RotaryRule, ShareRule, WindowRule};
use crate::loader::{stored_name, tensor};
use crate::names::Tensor;
use crate::recurrent::{self, ConvConfig, DeltaConfig};
use crate::source::{Json, Key, SIZE_MAX, Source, bad};
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
    /// Which rotary positions it has.
    pub rotary: Rotary,
    /// The layer whose keys and values it reads: an earlier one with the same heads of them and the same window. It then has
    /// queries of its own and nothing else, and no room in the cache.
    pub keys_of: Option<usize>,
    /// Whether its keys are its values, too, before either is normalised: there is one weight for both.
    pub keys_are_values: bool,
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

/// The heads of layers without a window, and of those with one.
#[derive(Clone, Copy)]
pub(crate) struct LayerHeads {
    pub(crate) full: Heads,
    pub(crate) window: Heads,
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
    /// Of layers with a window, where those have heads of their own; GGUF has the others' under the common key.
    pub(super) const WINDOW_HEAD_DIM: Key = key("attention.key_length_swa", "");
    /// Layers at the end that read the keys of earlier ones.
    pub(super) const SHARING_KEYS: Key = key("attention.shared_kv_layers", "num_kv_shared_layers");
    pub(super) const WINDOW: Key = key("attention.sliding_window", "sliding_window");
    pub(super) const WINDOW_PATTERN: Key = key("attention.sliding_window_pattern", "sliding_window_pattern");
}

/// All layers, whose windows and heads are known. `windows_rotate` tells whether layers with a window have rotary positions of
/// their own.
pub(crate) fn read(
    (source, checkpoint): (&Source<'_>, &Checkpoint),
    facts: &Facts,
    (hidden, heads): (usize, LayerHeads),
    windows: &[Option<u32>],
    windows_rotate: bool,
) -> Result<Vec<LayerConfig>, Error> {
    let count = windows.len();
    let recurrent = recurrent::read(source, facts, hidden, count)?;
    let keys_of = keys_of(source, windows)?;
    let feed_forwards = feed_forwards(source, facts, hidden, &keys_of)?;
    let rotates = rotates(source, facts, windows)?;
    let mut layers = Vec::with_capacity(count);
    for (layer, (recurrent, feed_forward)) in recurrent.into_iter().zip(feed_forwards).enumerate() {
        let attention = AttentionConfig {
            heads: if windows[layer].is_some() { heads.window } else { heads.full },
            window: windows[layer],
            rotary: match windows[layer] {
                _ if !rotates[layer] => Rotary::None,
                Some(_) if windows_rotate => Rotary::Window,
                _ => Rotary::Model,
            },
            keys_of: keys_of[layer],
            keys_are_values: facts.full_head_dim.is_some()
                && windows[layer].is_none()
                && keys_of[layer].is_none()
                && keys_are_values(source, checkpoint, facts, layer)?,
        };
        layers.push(LayerConfig {
            mixer: recurrent.unwrap_or(Mixer::Attention(attention)),
            feed_forward,
            experts_at: WeightPlace::Device,
        });
    }
    Ok(layers)
}

/// For each layer the one whose keys it reads: of those that share, the last of the others with the same window.
fn keys_of(source: &Source<'_>, windows: &[Option<u32>]) -> Result<Vec<Option<usize>>, Error> {
    let sharing = source.opt_whole(key::SHARING_KEYS)?.unwrap_or(0);
    let refused = |wanted: &str| bad(&source.spelling(key::SHARING_KEYS), sharing, wanted);
    let first = usize::try_from(sharing).ok().and_then(|sharing| windows.len().checked_sub(sharing));
    let first = first.ok_or_else(|| refused(&format!("at most the {} layers", windows.len())))?;
    let (own, others) = windows.split_at(first);
    let of = |window: &Option<u32>| {
        let found = own.iter().rposition(|other| other == window);
        found.map(Some).ok_or_else(|| refused("before them a layer with the same window"))
    };
    own.iter().map(|_| Ok(None)).chain(others.iter().map(of)).collect()
}

/// Whether a layer without a window has one weight for keys and values: config.json says it, in GGUF the tensor is not there.
fn keys_are_values(
    source: &Source<'_>,
    checkpoint: &Checkpoint,
    facts: &Facts,
    layer: usize,
) -> Result<bool, Error> {
    match source {
        Source::HuggingFace { json, .. } => Ok(json.opt_bool("attention_k_eq_v")?.unwrap_or(false)),
        Source::Gguf { .. } => {
            let name = facts.row(Tensor::Value).and_then(|row| stored_name(checkpoint, facts, row, layer));
            Ok(name.is_some_and(|name| tensor(checkpoint, &name).is_none()))
        }
    }
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

/// The heads of layers with these windows.
pub(crate) fn heads(
    source: &Source<'_>,
    facts: &Facts,
    hidden: usize,
    windows: &[Option<u32>],
) -> Result<LayerHeads, Error> {
    let Some(default) = facts.full_head_dim else {
        let heads = common_heads(source, hidden, kv_heads_listed(source, &|_| true)?)?;
        return Ok(LayerHeads { full: heads, window: heads });
    };
    let of_full = kv_heads_listed(source, &|layer| windows.get(layer) == Some(&None))?;
    let common = common_heads(source, hidden, of_full)?;
    let heads = match source {
        Source::Gguf { .. } => {
            let kv = kv_heads_listed(source, &|layer| matches!(windows.get(layer), Some(Some(_))))?;
            let dim = source.opt_size(key::WINDOW_HEAD_DIM)?.unwrap_or(common.dim);
            LayerHeads { full: common, window: Heads { kv: kv.unwrap_or(common.kv), dim, ..common } }
        }
        Source::HuggingFace { json, .. } => {
            LayerHeads { full: full_heads(json, default, common, windows)?, window: common }
        }
    };
    for own in [heads.full, heads.window] {
        check_kv_heads(source, own)?;
    }
    Ok(heads)
}

/// What config.json says of the heads of layers without a window, beside those of all: layer by layer, or under keys of their
/// own.
fn full_heads(
    json: &Json<'_>,
    default: usize,
    common: Heads,
    windows: &[Option<u32>],
) -> Result<Heads, Error> {
    const LAYERS: &str = "per_layer_config";
    let size = |json: &Json<'_>, key: &str, or: usize| -> Result<usize, Error> {
        let Some(said) = json.opt_u64(key)? else { return Ok(or) };
        let size = usize::try_from(said).ok().filter(|size| (1..=SIZE_MAX).contains(size));
        size.ok_or_else(|| bad(&json.spelling(key), said, &format!("1 to {SIZE_MAX}")))
    };
    let Some(listed) = json.opt_object(LAYERS)? else {
        let one_weight = json.opt_bool("attention_k_eq_v")?.unwrap_or(false);
        let kv = if one_weight { size(json, "num_global_key_value_heads", common.kv)? } else { common.kv };
        return Ok(Heads { kv, dim: size(json, "global_head_dim", default)?, ..common });
    };
    let mut full = None;
    for (layer, window) in windows.iter().enumerate() {
        let own = match listed.get(&layer.to_string()) {
            None => common,
            Some(own) => {
                let own = Json::new(LAYERS, own)?;
                let kv = size(&own, HEADS_KV.hugging_face, common.kv)?;
                Heads { kv, dim: size(&own, key::HEAD_DIM.hugging_face, common.dim)?, ..common }
            }
        };
        let alike = if window.is_some() { common } else { *full.get_or_insert(own) };
        if own != alike {
            let got = format!("{} heads of {} in layer {layer}", own.kv, own.dim);
            return Err(bad(LAYERS, got, "the same in all layers with a window, and in all without"));
        }
    }
    Ok(full.unwrap_or(common))
}

fn check_kv_heads(source: &Source<'_>, Heads { query, kv, .. }: Heads) -> Result<(), Error> {
    if query.is_multiple_of(kv) {
        return Ok(());
    }
    let wanted = format!("a divisor of the {query} query heads");
    Err(bad(&source.spelling(key::HEADS_KV), kv, &wanted))
}

/// The heads that a file says without telling layers apart, but for those of keys and values that it may have listed.
fn common_heads(source: &Source<'_>, hidden: usize, listed: Option<usize>) -> Result<Heads, Error> {
    let query = source.size(key::HEADS)?;
    let kv = match (listed, source) {
        (Some(kv), _) => kv,
        (None, Source::HuggingFace { json, .. }) if one_kv_head(json)? => 1,
        (None, _) => source.opt_size(key::HEADS_KV)?.unwrap_or(query),
    };
    check_kv_heads(source, Heads { query, kv, dim: 0 })?;
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

/// The heads of keys and values of some layers where a GGUF file lists them: those of layers that attend are all the same, the
/// others have none.
fn kv_heads_listed(source: &Source<'_>, chosen: &dyn Fn(usize) -> bool) -> Result<Option<usize>, Error> {
    let Source::Gguf { metadata, .. } = source else { return Ok(None) };
    let key = source.spelling(key::HEADS_KV);
    let counts: Vec<i64> = match metadata.get(&key) {
        Some(Value::Array(Array::I32(counts))) => counts.iter().map(|count| i64::from(*count)).collect(),
        Some(Value::Array(Array::U32(counts))) => counts.iter().map(|count| i64::from(*count)).collect(),
        _ => return Ok(None),
    };
    let own = counts.iter().enumerate().filter(|(layer, _)| chosen(*layer)).map(|(_, count)| count);
    let mut some = own.filter(|count| **count > 0);
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
    keys_of: &[Option<usize>],
) -> Result<Vec<FeedForward>, Error> {
    let layers = keys_of.len();
    let Some(mixture) = mixture(source, facts)? else {
        let dense = ffns(source, facts, hidden, keys_of)?.into_iter().map(|ffn| FeedForward::Dense { ffn });
        return Ok(dense.collect());
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

/// The inner widths of dense layers: of some models those that share keys have wider ones.
fn ffns(
    source: &Source<'_>,
    facts: &Facts,
    hidden: usize,
    keys_of: &[Option<usize>],
) -> Result<Vec<usize>, Error> {
    let twice = match source {
        Source::Gguf { metadata, .. } => {
            let key = source.spelling(key::FFN);
            let listed: Vec<i64> = match metadata.get(&key) {
                Some(Value::Array(Array::I32(listed))) => listed.iter().map(|ffn| i64::from(*ffn)).collect(),
                Some(Value::Array(Array::U32(listed))) => listed.iter().map(|ffn| i64::from(*ffn)).collect(),
                _ => return Ok(vec![ffn(source, facts, hidden)?; keys_of.len()]),
            };
            let size = |ffn: &i64| usize::try_from(*ffn).ok().filter(|ffn| (1..=SIZE_MAX).contains(ffn));
            let sizes: Option<Vec<usize>> = listed.iter().map(size).collect();
            let sizes = sizes.filter(|sizes| sizes.len() == keys_of.len());
            let wanted = format!("a size for each of the {} layers", keys_of.len());
            return sizes.ok_or_else(|| bad(&key, format!("{listed:?}"), &wanted));
        }
        Source::HuggingFace { json, .. } => json.opt_bool("use_double_wide_mlp")?.unwrap_or(false),
    };
    let ffn = ffn(source, facts, hidden)?;
    Ok(keys_of.iter().map(|keys_of| if twice && keys_of.is_some() { 2 * ffn } else { ffn }).collect())
}

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
    if facts.dense_too && is_dense(source)? {
        return Ok(None);
    }
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

/// Whether a file counts no experts, or says that it has none.
fn is_dense(source: &Source<'_>) -> Result<bool, Error> {
    let has = match source {
        Source::HuggingFace { json, .. } => json.opt_bool("enable_moe_block")?.unwrap_or(false),
        Source::Gguf { .. } => source.opt_whole(key::EXPERTS)?.is_some_and(|experts| experts > 0),
    };
    Ok(!has)
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
}

/// Each layer's window.
pub(crate) fn windows(source: &Source<'_>, facts: &Facts) -> Result<Vec<Option<u32>>, Error> {
    let layers = count(source)?;
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
                    let types = gguf_pattern(source, layers)?;
                    some(window, types.unwrap_or_else(|| LayerType::all_but_every(n, layers)))
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
        // Neither the file nor the architecture has one.
        WindowRule::AllButEvery(_) if source.opt_whole(key::WINDOW)?.is_none() => every(None),
        WindowRule::AllButEvery(n) => {
            let window = source.positions(key::WINDOW)?;
            if let Some(types) = layer_types(json, layers)? {
                return some(window, types);
            }
            let n = json
                .opt_u64(key::WINDOW_PATTERN.hugging_face)?
                .and_then(|n| u32::try_from(n).ok())
                .unwrap_or(n);
            some(window, LayerType::all_but_every(n.max(1), layers))
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
fn gguf_pattern(source: &Source<'_>, layers: usize) -> Result<Option<Vec<LayerType>>, Error> {
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
            Ok(Some(LayerType::all_but_every(n, layers)))
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
