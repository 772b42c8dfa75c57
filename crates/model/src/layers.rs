//! What each layer of a model is made of, read from its checkpoint: layers of one model may differ.

use fornax_compute::{Groups, Heads, KvKind, ROUTED_MAX, Routing, Scores, Shares, WeightPlace};
use fornax_format::{Array, Checkpoint, Value};

use crate::facts::{Floor, Recurrent, RotaryRule, ScanLayers, ShareRule, WindowRule};
use crate::latent::LatentConfig;
use crate::loader::{stored_name, tensor};
use crate::names::{Name, Tensor, When};
use crate::recurrent::{self, ChannelScanConfig, ConvConfig, DeltaConfig, Kind, ScanConfig};
use crate::source::{Json, Key, SIZE_MAX, Source, bad, within};
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mixer {
    /// Softmax attention over keys and values of earlier positions.
    Attention(AttentionConfig),
    /// Softmax attention over one row of each earlier position, of which keys and values are made.
    Latent(LatentConfig),
    /// The gated delta rule.
    Delta(DeltaConfig),
    /// A gated short convolution.
    Conv(ConvConfig),
    /// The selective scan.
    Scan(ScanConfig),
    /// The selective scan of Mamba-1.
    ChannelScan(ChannelScanConfig),
    /// Attention and the selective scan, each of what the other reads.
    Beside(AttentionConfig, ScanConfig),
    /// Nothing: the layer is a feed-forward alone.
    None,
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
    /// How long the chunks are that a query sees nothing before; none where there are none. The window is as long.
    pub chunk: Option<u32>,
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForward {
    /// Every token takes all of it.
    Dense {
        /// Its inner width.
        ffn: usize,
    },
    /// A router chooses experts for each token.
    Mixture(Mixture),
    /// There is none: the layer mixes positions alone.
    None,
}

/// The experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// How many there are, and how they are chosen.
    pub routing: Routing,
    /// Inner width of one.
    pub ffn: usize,
    /// Inner width of the expert that every token takes, where there is one.
    pub shared_ffn: Option<usize>,
    /// Width of what the chosen experts read and add up to, where it is not the residual stream's: a matrix makes it of what
    /// the layer reads, and another makes of their sum what the layer adds.
    pub narrow: Option<usize>,
}

/// What layers of one group of keys and values have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvShape {
    pub(crate) kind: KvKind,
    pub(crate) window: Option<u32>,
}

impl LayerConfig {
    /// Its attention, where it attends.
    pub fn attention(&self) -> Option<&AttentionConfig> {
        match &self.mixer {
            Mixer::Attention(attention) | Mixer::Beside(attention, _) => Some(attention),
            Mixer::Latent(_)
            | Mixer::Delta(_)
            | Mixer::Conv(_)
            | Mixer::Scan(_)
            | Mixer::ChannelScan(_)
            | Mixer::None => None,
        }
    }

    /// Its latent attention, where it has that.
    pub fn latent(&self) -> Option<&LatentConfig> {
        match &self.mixer {
            Mixer::Latent(latent) => Some(latent),
            _ => None,
        }
    }

    /// Its selective scan, where it has one.
    pub(crate) fn scan(&self) -> Option<&ScanConfig> {
        match &self.mixer {
            Mixer::Scan(scan) | Mixer::Beside(_, scan) => Some(scan),
            Mixer::Attention(_)
            | Mixer::Latent(_)
            | Mixer::Delta(_)
            | Mixer::Conv(_)
            | Mixer::ChannelScan(_)
            | Mixer::None => None,
        }
    }

    /// Its selective scan by channels, where it has one.
    pub(crate) fn channel_scan(&self) -> Option<&ChannelScanConfig> {
        if let Mixer::ChannelScan(scan) = &self.mixer { Some(scan) } else { None }
    }

    pub(crate) fn kv_shape(&self) -> Option<KvShape> {
        if let Some(latent) = self.latent() {
            return Some(KvShape { kind: KvKind::Latent { width: latent.shape().width() }, window: None });
        }
        let AttentionConfig { heads, window, keys_of, .. } = *self.attention()?;
        keys_of.is_none().then_some(KvShape { kind: KvKind::pairs(heads.kv, heads.dim), window })
    }
}

impl FeedForward {
    /// Its experts, where it has some.
    pub fn mixture(&self) -> Option<Mixture> {
        match self {
            FeedForward::Dense { .. } | FeedForward::None => None,
            FeedForward::Mixture(mixture) => Some(*mixture),
        }
    }

    /// Inner width of what every token takes; 0 where there are none but experts.
    pub fn ffn(&self) -> usize {
        match self {
            FeedForward::Dense { ffn } => *ffn,
            FeedForward::Mixture(mixture) => mixture.shared_ffn.unwrap_or(0),
            FeedForward::None => 0,
        }
    }
}

/// The inner width of the feed-forward.
pub(crate) const FFN: Key = Key { gguf: "feed_forward_length", hugging_face: "intermediate_size" };

/// How many experts a layer has.
pub(crate) const EXPERTS: Key = Key { gguf: "expert_count", hugging_face: "num_local_experts" };

/// The heads of layers without a window, and of those with one.
#[derive(Clone, Copy)]
pub(crate) struct LayerHeads {
    pub(crate) full: Heads,
    pub(crate) window: Heads,
}

/// Query heads.
pub(crate) const HEADS: Key = Key { gguf: "attention.head_count", hugging_face: "num_attention_heads" };

/// Heads of keys and values.
pub(crate) const HEADS_KV: Key = Key { gguf: "attention.head_count_kv", hugging_face: "num_key_value_heads" };

/// Values under one key in each container.
pub(crate) mod key {
    use crate::source::Key;

    const fn key(gguf: &'static str, hugging_face: &'static str) -> Key {
        Key { gguf, hugging_face }
    }

    pub(crate) const LAYERS: Key = key("block_count", "num_hidden_layers");
    pub(crate) const LAYERS_AHEAD: Key = key("nextn_predict_layers", "num_nextn_predict_layers");
    pub(crate) const FFN: Key = super::FFN;
    pub(crate) const EXPERTS: Key = super::EXPERTS;
    /// What older files call it.
    pub(crate) const NUM_EXPERTS: Key = key("expert_count", "num_experts");
    pub(crate) const EXPERTS_CHOSEN: Key = key("expert_used_count", "num_experts_per_tok");
    pub(crate) const EXPERT_FFN: Key = key("expert_feed_forward_length", "moe_intermediate_size");
    pub(crate) const SHARED_FFN: Key =
        key("expert_shared_feed_forward_length", "shared_expert_intermediate_size");
    /// How many experts wide it is where its own width is not there.
    pub(crate) const SHARED_COUNT: Key = key("expert_shared_count", "n_shared_experts");
    /// Layers before the first that has experts.
    pub(crate) const FIRST_DENSE: Key = key("leading_dense_block_count", "first_k_dense_replace");
    /// Every n-th layer has experts: n.
    pub(crate) const SPARSE_STEP: Key = key("interleave_moe_layer_step", "decoder_sparse_step");
    pub(crate) const GROUPS: Key = key("expert_group_count", "n_group");
    pub(crate) const GROUPS_CHOSEN: Key = key("expert_group_used_count", "topk_group");
    pub(crate) const ROUTED_SCALE: Key = key("expert_weights_scale", "routed_scaling_factor");
    pub(crate) const NARROW: Key = key("moe_latent_size", "moe_latent_size");
    pub(crate) const SUM_MIN: Key = key("", "moe_norm_min");
    pub(crate) const HEADS: Key = super::HEADS;
    pub(crate) const HEADS_KV: Key = super::HEADS_KV;
    pub(crate) const HEAD_DIM: Key = key("attention.key_length", "head_dim");
    /// Of layers with a window, where those have heads of their own; GGUF has the others' under the common key.
    pub(crate) const WINDOW_HEAD_DIM: Key = key("attention.key_length_swa", "");
    /// Layers at the end that read the keys of earlier ones.
    pub(crate) const SHARING_KEYS: Key = key("attention.shared_kv_layers", "num_kv_shared_layers");
    pub(crate) const WINDOW: Key = key("attention.sliding_window", "sliding_window");
    pub(crate) const WINDOW_PATTERN: Key = key("attention.sliding_window_pattern", "sliding_window_pattern");
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
    if heads.full.query == 0 && (recurrent.kinds.contains(&Kind::Attends) || is_beside(facts)) {
        return Err(Error::MissingKey { key: source.spelling(key::HEADS) });
    }
    let scans = match facts.recurrent {
        Some(Recurrent::Scan { layers, .. }) => Some(layers),
        _ => None,
    };
    let latent = LatentConfig::read(source, facts)?;
    let keys_of = keys_of(source, windows)?;
    let feed_forwards = match scans {
        Some(ScanLayers::Alone) => alone((source, checkpoint), facts, hidden, &recurrent.kinds)?,
        _ => feed_forwards(source, checkpoint, facts, hidden, &keys_of)?,
    };
    let rotates = rotates(source, facts, windows)?;
    let mut layers = Vec::with_capacity(count);
    for (layer, feed_forward) in feed_forwards.into_iter().enumerate() {
        let window = windows[layer];
        let attention = AttentionConfig {
            heads: if window.is_some() { heads.window } else { heads.full },
            window: window.filter(|_| !facts.encoder),
            // An encoder's window lies around a query, half of it on each side.
            reach: window.filter(|_| facts.encoder).map(|window| window / 2),
            chunk: window.filter(|_| facts.chunks),
            rotary: match window {
                _ if !rotates[layer] => Rotary::None,
                Some(_) if windows_rotate => Rotary::Window,
                _ => Rotary::Model,
            },
            keys_of: keys_of[layer],
            keys_are_values: facts.full_head_dim.is_some()
                && window.is_none()
                && keys_of[layer].is_none()
                && keys_are_values(source, checkpoint, facts, layer)?,
        };
        layers.push(LayerConfig {
            mixer: match recurrent.in_place(layer) {
                None => latent.map_or(Mixer::Attention(attention), Mixer::Latent),
                Some(Mixer::Scan(scan)) if scans == Some(ScanLayers::Beside) => {
                    Mixer::Beside(attention, scan)
                }
                Some(mixer) => mixer,
            },
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

/// Whether attention is beside selective scans.
fn is_beside(facts: &Facts) -> bool {
    matches!(facts.recurrent, Some(Recurrent::Scan { layers: ScanLayers::Beside, .. }))
}

/// Which layers rotate.
fn rotates(source: &Source<'_>, facts: &Facts, windows: &[Option<u32>]) -> Result<Vec<bool>, Error> {
    let layers = windows.len();
    let n = match facts.rotary {
        RotaryRule::EveryLayer => return Ok(vec![true; layers]),
        RotaryRule::Never => return Ok(vec![false; layers]),
        RotaryRule::Windows => {
            let none = windows.iter().all(Option::is_none);
            return Ok(windows.iter().map(|window| none || window.is_some()).collect());
        }
        RotaryRule::Configured => return Ok(vec![is_rotary(source)?; layers]),
        RotaryRule::AllButEvery(n) => u64::from(n),
    };
    if has_no_chunks(source, facts)? {
        return Ok(vec![true; layers]);
    }
    all_but_every(source, layers, n)
}

/// Whether a GGUF file says that it has no chunks, though its architecture has. Then all layers rotate, and no queries grow.
pub(crate) fn has_no_chunks(source: &Source<'_>, facts: &Facts) -> Result<bool, Error> {
    match source {
        Source::Gguf { metadata, .. } if facts.chunks => {
            Ok(metadata.opt_u32(&source.spelling(key::WINDOW))? == Some(0))
        }
        _ => Ok(false),
    }
}

/// Which layers rotate where all but every `n`-th do, unless config.json says otherwise.
fn all_but_every(source: &Source<'_>, layers: usize, n: u64) -> Result<Vec<bool>, Error> {
    let all_but_every = |n: u64| (1..=layers as u64).map(|layer| !layer.is_multiple_of(n)).collect();
    let Source::HuggingFace { json, .. } = source else { return Ok(all_but_every(n)) };
    // An empty list is none.
    if let Some(listed) = json.opt_u64s("no_rope_layers")?.filter(|listed| !listed.is_empty()) {
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

/// Whether a file that may say so says that layers rotate.
fn is_rotary(source: &Source<'_>) -> Result<bool, Error> {
    match source {
        Source::Gguf { metadata, .. } => {
            let key = source.spelling(Key { gguf: "rope.scaling.finetuned", hugging_face: "" });
            Ok(metadata.opt_bool(&key)?.unwrap_or(true))
        }
        Source::HuggingFace { json, .. } => match json.opt_str("position_embedding_type")? {
            Some("rope") => Ok(true),
            None | Some("nope") => Ok(false),
            Some(other) => Err(Error::Unsupported {
                what: format!("position_embedding_type {other:?}"),
                supported: "rope, nope".to_owned(),
            }),
        },
    }
}

/// Layers that only guess ahead.
pub(crate) fn ahead(source: &Source<'_>) -> Result<u64, Error> {
    Ok(source.opt_whole(key::LAYERS_AHEAD)?.unwrap_or(0))
}

/// Layers without those that only guess ahead: GGUF files count these among them.
fn count(source: &Source<'_>) -> Result<usize, Error> {
    if let Source::HuggingFace { json, .. } = source {
        return match (source.opt_size(key::LAYERS)?, recurrent::layers_listed(json)?) {
            (None, Some(listed)) if listed > 0 => Ok(listed),
            _ => source.size(key::LAYERS),
        };
    }
    let all = source.size(key::LAYERS)?;
    let ahead = ahead(source)?;
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
    if let Some(latent) = LatentConfig::read(source, facts)? {
        // What turns of them, which is what rotation asks for.
        let heads = Heads { query: latent.heads, kv: latent.heads, dim: latent.turned };
        return Ok(LayerHeads { full: heads, window: heads });
    }
    // Where all layers keep states there may be none.
    let scans = matches!(facts.recurrent, Some(Recurrent::Scan { .. } | Recurrent::ChannelScan));
    if scans && source.opt_whole(key::HEADS)?.unwrap_or(0) == 0 {
        let none = Heads { query: 0, kv: 0, dim: 0 };
        return Ok(LayerHeads { full: none, window: none });
    }
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

/// The heads of keys and values of some layers where a GGUF file lists them: those of layers that attend are all the same,
/// the others have none.
fn kv_heads_listed(source: &Source<'_>, chosen: &dyn Fn(usize) -> bool) -> Result<Option<usize>, Error> {
    let Some(counts) = whole_numbers(source, key::HEADS_KV) else { return Ok(None) };
    let key = source.spelling(key::HEADS_KV);
    let own: Vec<i64> =
        (0..).zip(counts).filter(|(layer, _)| chosen(*layer)).map(|(_, count)| count).collect();
    match (one_but_zero(&own), own.iter().any(|count| *count > 0)) {
        (Some(kv), _) => Ok(Some(kv)),
        (None, true) => Err(bad(&key, "several numbers of heads", "one for all layers that attend")),
        (None, false) => Err(bad(&key, "no heads in any layer", "a layer that attends")),
    }
}

/// The numbers of all layers where a GGUF file lists them.
pub(crate) fn whole_numbers(source: &Source<'_>, key: Key) -> Option<Vec<i64>> {
    let Source::Gguf { metadata, .. } = source else { return None };
    match metadata.get(&source.spelling(key)) {
        Some(Value::Array(Array::I32(list))) => Some(list.iter().map(|one| i64::from(*one)).collect()),
        Some(Value::Array(Array::U32(list))) => Some(list.iter().map(|one| i64::from(*one)).collect()),
        _ => None,
    }
}

/// The number of all layers that have another one than zero.
fn one_but_zero(list: &[i64]) -> Option<usize> {
    let mut some = list.iter().filter(|one| **one > 0);
    let first = some.next()?;
    usize::try_from(*first).ok().filter(|_| some.all(|other| other == first))
}

fn feed_forwards(
    source: &Source<'_>,
    checkpoint: &Checkpoint,
    facts: &Facts,
    hidden: usize,
    keys_of: &[Option<usize>],
) -> Result<Vec<FeedForward>, Error> {
    let layers = keys_of.len();
    if facts.experts.is_none() && !facts.has(Tensor::Down) {
        return Ok(vec![FeedForward::None; layers]);
    }
    let Some(mixture) = mixture(source, checkpoint, facts)? else {
        let dense = ffns(source, facts, hidden, keys_of)?.into_iter().map(|ffn| FeedForward::Dense { ffn });
        return Ok(dense.collect());
    };
    let mut all = vec![FeedForward::Mixture(mixture); layers];
    let dense = dense_layers(source, checkpoint, facts, layers)?;
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

/// The same where each layer is one branch alone.
fn alone(
    (source, checkpoint): (&Source<'_>, &Checkpoint),
    facts: &Facts,
    hidden: usize,
    kinds: &[Kind],
) -> Result<Vec<FeedForward>, Error> {
    let mut feeds = FeedForward::None;
    if kinds.contains(&Kind::Feeds) {
        feeds = FeedForward::Dense { ffn: ffn(source, facts, hidden)? };
    }
    let mut routes = FeedForward::None;
    if kinds.contains(&Kind::Routes) {
        // Nothing else says how many there are.
        source.size(key::EXPERTS)?;
        routes = mixture(source, checkpoint, facts)?.map_or(FeedForward::None, FeedForward::Mixture);
    }
    let of = |kind: &Kind| match kind {
        Kind::Feeds => feeds,
        Kind::Routes => routes,
        Kind::Attends | Kind::Keeps => FeedForward::None,
    };
    Ok(kinds.iter().map(of).collect())
}

/// Which layers of a mixture have no experts. The keys are listened to whatever the architecture: a file that has one which
/// does not hold for it lacks the tensors that follow from the key, and is refused.
fn dense_layers(
    source: &Source<'_>,
    checkpoint: &Checkpoint,
    facts: &Facts,
    layers: usize,
) -> Result<Vec<bool>, Error> {
    let (first, every) = (source.opt_whole(key::FIRST_DENSE)?, source.opt_whole(key::SPARSE_STEP)?);
    if let (None, None, Source::Gguf { .. }) = (first, every, source) {
        // The file shows it.
        let routes = |layer: usize| {
            let name = facts.row(Tensor::Router).and_then(|row| stored_name(checkpoint, facts, row, layer));
            name.is_some_and(|name| tensor(checkpoint, &name).is_some())
        };
        let dense: Vec<bool> = (0..layers).map(|layer| !routes(layer)).collect();
        // Where layers have neither a router nor what stands in its place, it is the router that they lack.
        let feeds = |layer: usize| {
            let name = facts.row(Tensor::Down).and_then(|row| stored_name(checkpoint, facts, row, layer));
            name.is_some_and(|name| tensor(checkpoint, &name).is_some())
        };
        return Ok((0..layers).map(|layer| dense[layer] && feeds(layer)).collect());
    }
    let (first, every) = (first.unwrap_or(0), every.unwrap_or(1));
    if every == 0 {
        return Err(bad(&source.spelling(key::SPARSE_STEP), every, "at least 1"));
    }
    let (mut last, mut listed) = (u64::MAX, Vec::new());
    if let Source::HuggingFace { json, .. } = source {
        if let Some(types) = mlp_types(json, layers)? {
            return Ok(types);
        }
        if let Some(sparse) = json.opt_u64s("moe_layers")? {
            return Ok((0..layers as u64).map(|layer| !sparse.contains(&layer)).collect());
        }
        if let Some(period) = json.opt_u64("expert_layer_period")? {
            let offset = json.opt_u64("expert_layer_offset")?.unwrap_or(0);
            if offset >= period {
                return Err(bad("expert_layer_offset", offset, &format!("below the period {period}")));
            }
            return Ok((0..layers as u64).map(|layer| layer % period != offset).collect());
        }
        listed = json.opt_u64s("mlp_only_layers")?.unwrap_or_default();
        // The last layer with experts, or -1 for the last of all.
        let end = json.opt_f64("moe_layer_end_index")?.filter(|last| *last >= 0.0);
        #[expect(clippy::cast_sign_loss, reason = "not below zero")]
        let end = end.map(|last| last as u64);
        last = end.unwrap_or(last);
    }
    let dense = |layer: u64| {
        layer < first || layer > last || listed.contains(&layer) || !(layer + 1).is_multiple_of(every)
    };
    Ok((0..layers as u64).map(dense).collect())
}

/// The same where config.json says it layer by layer.
fn mlp_types(json: &Json<'_>, layers: usize) -> Result<Option<Vec<bool>>, Error> {
    let Some(types) = json.opt_strs("mlp_layer_types")? else { return Ok(None) };
    if types.len() != layers {
        let wanted = format!("one for each of the {layers} layers");
        return Err(bad("mlp_layer_types", format!("{} types", types.len()), &wanted));
    }
    let dense = |kind: &str| match kind {
        "dense" => Ok(true),
        "sparse" => Ok(false),
        other => Err(bad("mlp_layer_types", format!("{other:?}"), "dense or sparse")),
    };
    types.into_iter().map(dense).collect::<Result<_, _>>().map(Some)
}

/// The inner widths of dense layers: of some models those that share keys have wider ones.
fn ffns(
    source: &Source<'_>,
    facts: &Facts,
    hidden: usize,
    keys_of: &[Option<usize>],
) -> Result<Vec<usize>, Error> {
    let twice = match source {
        Source::Gguf { .. } => {
            // Some layers of a hybrid have none; the others have the same.
            let Some(listed) = whole_numbers(source, key::FFN).filter(|listed| !listed.contains(&0)) else {
                return Ok(vec![ffn(source, facts, hidden)?; keys_of.len()]);
            };
            let size = |ffn: &i64| usize::try_from(*ffn).ok().filter(|ffn| (1..=SIZE_MAX).contains(ffn));
            let sizes: Option<Vec<usize>> = listed.iter().map(size).collect();
            let sizes = sizes.filter(|sizes| sizes.len() == keys_of.len());
            let wanted = format!("a size for each of the {} layers", keys_of.len());
            return sizes.ok_or_else(|| bad(&source.spelling(key::FFN), format!("{listed:?}"), &wanted));
        }
        Source::HuggingFace { json, .. } => json.opt_bool("use_double_wide_mlp")?.unwrap_or(false),
    };
    let ffn = ffn(source, facts, hidden)?;
    Ok(keys_of.iter().map(|keys_of| if twice && keys_of.is_some() { 2 * ffn } else { ffn }).collect())
}

/// The inner width. Where the configuration does not have it, some architectures' is four times the hidden size.
fn ffn(source: &Source<'_>, facts: &Facts, hidden: usize) -> Result<usize, Error> {
    if let Some(ffn) = whole_numbers(source, key::FFN).and_then(|list| one_but_zero(&list)) {
        return Ok(ffn);
    }
    match (source.opt_size(key::FFN)?, facts.ffn_of_hidden) {
        (Some(ffn), _) => Ok(ffn),
        (None, Some(times)) => Ok(times * hidden),
        (None, None) => Err(Error::MissingKey { key: source.spelling(key::FFN) }),
    }
}

fn mixture(source: &Source<'_>, checkpoint: &Checkpoint, facts: &Facts) -> Result<Option<Mixture>, Error> {
    let Some(rule) = facts.experts else { return Ok(None) };
    // One architecture's files may have experts or not.
    let none = facts.has(Tensor::Down) && source.opt_whole(key::EXPERTS)? == Some(0);
    if none || facts.dense_too && is_dense(source)? {
        return Ok(None);
    }
    let experts = source.opt_size(key::EXPERTS)?.map_or_else(|| source.size(key::NUM_EXPERTS), Ok)?;
    let chosen = source.size(key::EXPERTS_CHOSEN)?;
    if chosen > experts {
        let wanted = format!("at most the {experts} experts");
        return Err(bad(&source.spelling(key::EXPERTS_CHOSEN), chosen, &wanted));
    }
    if experts > ROUTED_MAX {
        let key = source.spelling(key::EXPERTS_CHOSEN);
        return Err(bad(&key, format!("{chosen} of {experts} experts"), &format!("at most {ROUTED_MAX}")));
    }
    // Files older than their own keys have these widths under the dense one's.
    let width = |key| source.opt_size(key)?.map_or_else(|| source.size(key::FFN), Ok);
    let ffn = width(key::EXPERT_FFN)?;
    let shared_ffn = match (source.opt_size(key::SHARED_FFN)?, source.opt_whole(key::SHARED_COUNT)?) {
        _ if !facts.has(Tensor::SharedUp) => None,
        (Some(ffn), _) => Some(ffn),
        (None, Some(count)) => usize::try_from(count).ok().map(|count| count.saturating_mul(ffn)),
        // Without a share of its own it is as wide as the others.
        (None, None) if !facts.has(Tensor::SharedRouter) => Some(ffn),
        (None, None) => Some(source.size(key::FFN)?),
    };
    let shared_ffn = shared_ffn.filter(|ffn| *ffn > 0);
    let routing = routing((source, checkpoint), facts, rule, (experts, chosen))?;
    let narrow = match facts.has(Tensor::ExpertsNarrow) {
        true => source.opt_size(key::NARROW)?,
        false => None,
    };
    Ok(Some(Mixture { routing, ffn, shared_ffn, narrow }))
}

/// How experts are chosen and weighed.
fn routing(
    (source, checkpoint): (&Source<'_>, &Checkpoint),
    facts: &Facts,
    rule: ShareRule,
    (experts, chosen): (usize, usize),
) -> Result<Routing, Error> {
    let (mut scores, mut of_chosen) = (facts.scores, None);
    if let Source::Gguf { metadata, architecture } = source {
        of_chosen = metadata.opt_bool(&format!("{architecture}.expert_weights_norm"))?;
        let key = format!("{architecture}.expert_gating_func");
        match metadata.opt_u32(&key)?.unwrap_or(0) {
            0 => scores = corrected_scores(checkpoint, facts).unwrap_or(scores),
            1 => scores = Scores::Softmax,
            2 => scores = Scores::Sigmoid,
            // A softmax over the chosen alone.
            3 => (scores, of_chosen) = (Scores::Softmax, Some(true)),
            4 => scores = Scores::SqrtSoftplus,
            other => return Err(bad(&key, other, "0 to 4")),
        }
    }
    let shares = match (rule, source) {
        (ShareRule::OfChosen, _) => Shares::OfChosen,
        (ShareRule::Configured { gguf, .. }, Source::Gguf { .. }) => shares(of_chosen, gguf),
        (ShareRule::Configured { hugging_face, .. }, Source::HuggingFace { json, .. }) => {
            shares(json.opt_bool("norm_topk_prob")?, hugging_face)
        }
    };
    let (added, least) = match facts.floor {
        Floor::None => (0.0, 0.0),
        Floor::Added(added) => (added, 0.0),
        Floor::Least(least) => {
            let said =
                if let Source::Gguf { .. } = source { None } else { source.opt_number(key::SUM_MIN)? };
            (0.0, said.map_or(least, |said| said as f32))
        }
    };
    // Zero is none.
    let scale = source.opt_number(key::ROUTED_SCALE)?.filter(|scale| *scale != 0.0).unwrap_or(1.0);
    let scale = within(&source.spelling(key::ROUTED_SCALE), scale, 1e-6..=1e6)? as f32;
    let groups = groups(source, facts, scores, (experts, chosen))?;
    Ok(Routing { scores, groups, added, least, scale, ..Routing::plain(experts, chosen, shares) })
}

/// The scores of a GGUF file that does not say them, of an architecture whose models differ: those with a correction of the
/// choice add it to sigmoids, and the others, which are older, have shares.
fn corrected_scores(checkpoint: &Checkpoint, facts: &Facts) -> Option<Scores> {
    let row = facts.row(Tensor::RouterCorrection).filter(|row| row.when == When::Corrected)?;
    Some(if is_in_a_layer(checkpoint, facts, row) { Scores::Sigmoid } else { Scores::Softmax })
}

/// Whether a layer of a GGUF file has the weight. The first layers may have no experts.
pub(crate) fn is_in_a_layer(checkpoint: &Checkpoint, facts: &Facts, row: &Name) -> bool {
    let Checkpoint::Gguf(gguf) = checkpoint else { return false };
    let end = stored_name(checkpoint, facts, row, 0).unwrap_or_default();
    let end = end.strip_prefix("blk.0").unwrap_or(&end);
    gguf.tensors().any(|view| view.name.starts_with("blk.") && view.name.ends_with(end))
}

fn shares(of_chosen: Option<bool>, missing: Shares) -> Shares {
    match of_chosen {
        None => missing,
        Some(true) => Shares::OfChosen,
        Some(false) => Shares::OfAll,
    }
}

/// The groups that experts are chosen of; none where all of them are.
fn groups(
    source: &Source<'_>,
    facts: &Facts,
    scores: Scores,
    (experts, chosen): (usize, usize),
) -> Result<Option<Groups>, Error> {
    let Some(count) = source.opt_size(key::GROUPS)?.filter(|count| *count > 1) else { return Ok(None) };
    let of_groups = source.opt_size(key::GROUPS_CHOSEN)?.unwrap_or(count);
    if let Source::HuggingFace { json, .. } = source {
        const GROUPED: &str = "group_limited_greedy";
        match json.opt_str("topk_method")? {
            Some("greedy") => return Ok(None),
            None if facts.groups_named => return Ok(None),
            Some(other) if facts.groups_named && other != GROUPED => {
                return Err(Error::Unsupported {
                    what: format!("topk_method {other:?}"),
                    supported: format!("greedy, {GROUPED}"),
                });
            }
            _ => {}
        }
    }
    // Groups were ranked by their best expert as long as scores were a softmax.
    let by_two = facts.groups_by_two.unwrap_or(scores != Scores::Softmax);
    if !experts.is_multiple_of(count) || experts / count <= usize::from(by_two) {
        let wanted = format!("equal groups of the {experts} experts");
        return Err(bad(&source.spelling(key::GROUPS), count, &wanted));
    }
    let enough = chosen.div_ceil(experts / count);
    if !(enough..=count).contains(&of_groups) {
        let wanted = format!("{enough} to {count}, for {chosen} experts of {count} groups");
        return Err(bad(&source.spelling(key::GROUPS_CHOSEN), of_groups, &wanted));
    }
    Ok((of_groups < count).then_some(Groups { count, chosen: of_groups, by_two }))
}

/// Whether a file counts no experts, or says that it has none.
fn is_dense(source: &Source<'_>) -> Result<bool, Error> {
    if let Source::HuggingFace { json, .. } = source
        && let Some(has) = json.opt_bool("enable_moe_block")?
    {
        return Ok(!has);
    }
    let experts = source
        .opt_whole(key::EXPERTS)?
        .map_or_else(|| source.opt_whole(key::NUM_EXPERTS), |it| Ok(Some(it)))?;
    // One alone is chosen by nobody.
    Ok(experts.is_none_or(|experts| experts <= 1))
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

/// How long chunks are where the file does not say.
const CHUNK: u32 = 8192;

/// Each layer's window.
pub(crate) fn windows(source: &Source<'_>, facts: &Facts) -> Result<Vec<Option<u32>>, Error> {
    let layers = count(source)?;
    let every = |window: Option<u32>| Ok(vec![window; layers]);
    let some = |window: u32, types: Vec<LayerType>| {
        Ok(types.into_iter().map(|kind| (kind == LayerType::Sliding).then_some(window)).collect())
    };
    let json = match source {
        Source::Gguf { metadata, .. } => {
            // Zero is none. Chunks are not said: they are as long in every model.
            let window = metadata.opt_u32(&source.spelling(key::WINDOW))?;
            let window = window.or(facts.chunks.then_some(CHUNK)).filter(|window| *window > 0);
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
            if let (true, RotaryRule::AllButEvery(n)) = (facts.chunks, facts.rotary) {
                // Layers that rotate have chunks.
                let kind = |rotates| if rotates { LayerType::Sliding } else { LayerType::Full };
                return some(
                    window,
                    all_but_every(source, layers, u64::from(n))?.into_iter().map(kind).collect(),
                );
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
        "sliding_attention" | "chunked_attention" => Ok(LayerType::Sliding),
        other => Err(Error::Unsupported {
            what: format!("layer type {other:?}"),
            supported: "full_attention, sliding_attention, chunked_attention".to_owned(),
        }),
    };
    types.into_iter().map(kind).collect::<Result<_, _>>().map(Some)
}
