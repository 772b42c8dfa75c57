//! Layers that keep a state of a sequence in place of its keys and values: which they are, how large their states, and what
//! they are computed in.

use fornax_compute::{
    DeltaHeads, GateOrder, KeySharing, Memory, PAGE_TOKENS, Purpose, ScanHeads, TAPS_MAX, channel_values,
    conv_values,
};
use fornax_format::{Array, Value};

use crate::facts::{Recurrent, ScanLayers};
use crate::layers::Mixer;
use crate::loader::Loader;
use crate::names::Tensor;
use crate::source::{Json, Key, Source, bad};
use crate::{Error, Facts, Limits};

/// A layer of the gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaConfig {
    /// Its heads.
    pub heads: DeltaHeads,
    /// Inputs that its convolution sees.
    pub taps: usize,
}

/// A layer of a gated short convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvConfig {
    /// Its channels.
    pub channels: usize,
    /// Inputs that it sees.
    pub taps: usize,
}

/// A layer of the selective scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanConfig {
    /// Its heads.
    pub heads: ScanHeads,
    /// Inputs that its convolution sees.
    pub taps: usize,
    /// Whether the convolution's sums begin with a bias.
    pub conv_bias: bool,
    /// Whether what comes out is normalised, group by group.
    pub normed: bool,
    /// Whether it is normalised before it is gated.
    pub gates: GateOrder,
}

/// A layer of the selective scan of Mamba-1, whose channels decay value by value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChannelScanConfig {
    /// Its channels: columns of its matrix.
    pub channels: usize,
    /// Values of a key or query: its rows.
    pub state: usize,
    /// Values that the channels' steps are made of.
    pub rank: usize,
    /// Inputs that its convolution sees.
    pub taps: usize,
    /// Whether the convolution's sums begin with a bias.
    pub conv_bias: bool,
    /// What normalises steps, keys and queries.
    pub norms: StepNorms,
}

/// What normalises the steps, keys and queries of a [`ChannelScanConfig`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepNorms {
    /// Nothing.
    None,
    /// Norms with weights.
    Weighted,
    /// Norms without weights, which may have an epsilon of their own.
    Plain {
        /// It, where it is not the model's.
        eps: Option<f32>,
    },
}

impl ScanConfig {
    /// Values that come out of it.
    pub(crate) fn values(&self) -> usize {
        self.heads.heads * self.heads.dim
    }
}

/// Columns of what such a layer is computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateWidths {
    mixed: usize,
    convolved: usize,
    read: usize,
    /// Values that steps are made of, and those of a key; none where steps come with what is mixed.
    rank: usize,
    state: usize,
}

/// What steps, keys and queries of a [`ChannelScanConfig`] are computed in.
pub(crate) struct StepRoom<M: Memory> {
    pub(crate) inputs: [InputRoom<M>; 3], // what steps are made of, keys, queries
    pub(crate) steps: M::Buf,             // (tokens, channels)
}

/// One of them, and the norm of it.
pub(crate) struct InputRoom<M: Memory> {
    pub(crate) raw: M::Buf,    // (tokens, rank), or (tokens, state)
    pub(crate) normed: M::Buf, // the same
}

/// What a layer with a state is computed in.
pub(crate) struct StateRoom<M: Memory> {
    pub(crate) mixed: M::Buf,        // (tokens, what reads the residual stream)
    pub(crate) convolved: M::Buf,    // (tokens, channels of the convolution)
    pub(crate) read: Option<M::Buf>, // (tokens, what is read from matrices), where there are some
    pub(crate) steps: Option<StepRoom<M>>,
}

impl<M: Memory> StateRoom<M> {
    pub(crate) fn alloc(
        memory: &M,
        widths: StateWidths,
        limits: Limits,
    ) -> Result<StateRoom<M>, fornax_compute::Error> {
        let tokens = |columns| memory.alloc(Purpose::Activations, limits.tokens_max, columns);
        Ok(StateRoom {
            mixed: tokens(widths.mixed)?,
            convolved: tokens(widths.convolved)?,
            read: if widths.read > 0 { Some(tokens(widths.read)?) } else { None },
            steps: match widths.rank {
                0 => None,
                rank => {
                    let own = |columns| -> Result<_, fornax_compute::Error> {
                        Ok(InputRoom { raw: tokens(columns)?, normed: tokens(columns)? })
                    };
                    let inputs = [own(rank)?, own(widths.state)?, own(widths.state)?];
                    Some(StepRoom { inputs, steps: tokens(widths.convolved)? })
                }
            },
        })
    }
}

/// Which of the step's rooms a layer computes in.
pub(crate) fn state_room<M>(loader: &Loader<'_, M>, layer: usize) -> usize {
    let own = loader.config.layers[layer].mixer.widths();
    let rooms = loader.config.state_widths(loader.stage);
    rooms.iter().position(|other| Some(*other) == own).expect("the layer's own is there")
}

impl Mixer {
    /// Bytes of a layer's state; nothing of attention.
    pub(crate) fn state_bytes(&self) -> Option<usize> {
        let values = match self {
            Mixer::Attention(_) | Mixer::Latent(_) | Mixer::None => return None,
            Mixer::Delta(DeltaConfig { heads, taps }) => {
                conv_values(heads.columns(), *taps).saturating_add(heads.state_values())
            }
            Mixer::Conv(ConvConfig { channels, taps }) => conv_values(*channels, *taps),
            Mixer::Scan(ScanConfig { heads, taps, .. })
            | Mixer::Beside(_, ScanConfig { heads, taps, .. }) => {
                conv_values(heads.columns(), *taps).saturating_add(heads.state_values())
            }
            Mixer::ChannelScan(ChannelScanConfig { channels, state, taps, .. }) => {
                conv_values(*channels, *taps).saturating_add(channel_values(*state, *channels))
            }
        };
        Some(values.saturating_mul(size_of::<f32>()))
    }

    pub(crate) fn widths(&self) -> Option<StateWidths> {
        let (rank, state) = (0, 0);
        match self {
            Mixer::Attention(_) | Mixer::Latent(_) | Mixer::None => None,
            Mixer::Delta(DeltaConfig { heads, .. }) => {
                let (convolved, read) = (heads.columns(), heads.value * heads.dim_v);
                Some(StateWidths { mixed: convolved + read + 2 * heads.value, convolved, read, rank, state })
            }
            Mixer::Conv(ConvConfig { channels, .. }) => {
                Some(StateWidths { mixed: 3 * channels, convolved: *channels, read: 0, rank, state })
            }
            Mixer::Scan(scan) | Mixer::Beside(_, scan) => {
                let (convolved, read) = (scan.heads.columns(), scan.values());
                let mixed = convolved + read + scan.heads.heads;
                Some(StateWidths { mixed, convolved, read, rank, state })
            }
            Mixer::ChannelScan(ChannelScanConfig { channels, state, rank, .. }) => Some(StateWidths {
                mixed: 2 * channels,
                convolved: *channels,
                read: *channels,
                rank: *rank,
                state: *state,
            }),
        }
    }
}

/// Tokens from one checkpoint of a sequence's states to the next: so many that they take about as much memory as the keys
/// and values of the tokens between, but no fewer and no more than these. More of them would leave less room for what every
/// prefix needs; with fewer, a hit saves less than it could.
pub(crate) fn checkpoint_every(state_bytes: usize, token_bytes: usize) -> usize {
    const LEAST: usize = 8 * PAGE_TOKENS;
    const MOST: usize = 128 * PAGE_TOKENS;
    let even = state_bytes.checked_div(token_bytes).unwrap_or(MOST);
    even.next_multiple_of(PAGE_TOKENS).clamp(LEAST, MOST)
}

/// Values under one key in each container.
mod key {
    use crate::source::Key;

    const fn key(gguf: &'static str, hugging_face: &'static str) -> Key {
        Key { gguf, hugging_face }
    }

    pub(super) const KEY_HEADS: Key = key("ssm.group_count", "linear_num_key_heads");
    pub(super) const VALUE_HEADS: Key = key("ssm.time_step_rank", "linear_num_value_heads");
    pub(super) const KEY_DIM: Key = key("ssm.state_size", "linear_key_head_dim");
    pub(super) const VALUE_DIM: Key = key("", "linear_value_head_dim");
    pub(super) const INNER: Key = key("ssm.inner_size", "");
    pub(super) const TAPS: Key = key("ssm.conv_kernel", "linear_conv_kernel_dim");
    pub(super) const SCAN_HEADS: Key = key("ssm.time_step_rank", "mamba_n_heads");
    pub(super) const SCAN_GROUPS: Key = key("ssm.group_count", "mamba_n_groups");
    pub(super) const SCAN_STATE: Key = key("ssm.state_size", "mamba_d_state");
    pub(super) const SCAN_DIM: Key = key("", "mamba_d_head");
    pub(super) const SCAN_INNER: Key = key("", "mamba_d_ssm");
    pub(super) const SCAN_EXPAND: Key = key("", "mamba_expand");
    pub(super) const SCAN_TAPS: Key = key("ssm.conv_kernel", "mamba_d_conv");
    pub(super) const SCAN_RANK: Key = key("ssm.time_step_rank", "mamba_dt_rank");
    /// Whether steps, keys and queries are normalised by no weights.
    pub(super) const STEP_NORMS: Key = key("ssm.dt_b_c_rms", "");
    pub(super) const STEP_EPS: Key = key("", "mixer_rms_eps");
    pub(super) const SHORT_TAPS: Key = key("shortconv.l_cache", "conv_L_cache");
    /// Every n-th layer attends: n.
    pub(super) const INTERVAL: Key = key("full_attention_interval", "full_attention_interval");
}

/// What each layer is, and what stands in place of attention in those that keep a state.
pub(crate) struct Layers {
    pub(crate) kinds: Vec<Kind>,
    keeps: Option<Mixer>,
}

impl Layers {
    /// What a layer has in place of attention; nothing where it attends.
    pub(crate) fn in_place(&self, layer: usize) -> Option<Mixer> {
        match self.kinds[layer] {
            Kind::Attends => None,
            Kind::Keeps => self.keeps,
            Kind::Feeds | Kind::Routes => Some(Mixer::None),
        }
    }
}

pub(crate) fn read(
    source: &Source<'_>,
    facts: &Facts,
    hidden: usize,
    layers: usize,
) -> Result<Layers, Error> {
    let Some(rule) = facts.recurrent else {
        return Ok(Layers { kinds: vec![Kind::Attends; layers], keeps: None });
    };
    let mixer = match rule {
        Recurrent::DeltaRule { gguf } => Mixer::Delta(delta(source, gguf)?),
        Recurrent::ShortConv => {
            Mixer::Conv(ConvConfig { channels: hidden, taps: taps(source, key::SHORT_TAPS)? })
        }
        Recurrent::Scan { gates, layers } => Mixer::Scan(scan(source, (gates, layers), hidden)?),
        Recurrent::ChannelScan => Mixer::ChannelScan(channel_scan(source, facts, hidden)?),
    };
    Ok(Layers { kinds: kinds(source, rule, layers)?, keeps: Some(mixer) })
}

/// How many layers config.json lists, where it says their number in no other way.
pub(crate) fn layers_listed(json: &Json<'_>) -> Result<Option<usize>, Error> {
    for key in LISTS {
        if let Some(types) = json.opt_strs(key)? {
            return Ok(Some(types.len()));
        }
    }
    Ok(json.opt_str(PATTERN)?.map(|pattern| pattern.chars().count()))
}

/// Keys of config.json under which layers are listed, by name and by letter.
const LISTS: [&str; 2] = ["layer_types", "layers_block_type"];
const PATTERN: &str = "hybrid_override_pattern";

fn taps(source: &Source<'_>, key: Key) -> Result<usize, Error> {
    let taps = source.size(key)?;
    if taps > TAPS_MAX {
        return Err(bad(&source.spelling(key), taps, &format!("at most {TAPS_MAX}")));
    }
    Ok(taps)
}

fn delta(source: &Source<'_>, gguf: KeySharing) -> Result<DeltaConfig, Error> {
    let (key, value) = (source.size(key::KEY_HEADS)?, source.size(key::VALUE_HEADS)?);
    if !value.is_multiple_of(key) {
        let wanted = format!("a multiple of the {key} key heads");
        return Err(bad(&source.spelling(key::VALUE_HEADS), value, &wanted));
    }
    let dim_k = source.size(key::KEY_DIM)?;
    let (dim_v, sharing) = match source {
        Source::HuggingFace { .. } => (source.size(key::VALUE_DIM)?, KeySharing::Neighbours),
        Source::Gguf { .. } => {
            let inner = source.size(key::INNER)?;
            if !inner.is_multiple_of(value) {
                let wanted = format!("a multiple of the {value} value heads");
                return Err(bad(&source.spelling(key::INNER), inner, &wanted));
            }
            (inner / value, gguf)
        }
    };
    let heads = DeltaHeads { key, value, dim_k, dim_v, sharing };
    Ok(DeltaConfig { heads, taps: taps(source, key::TAPS)? })
}

fn scan(
    source: &Source<'_>,
    (gates, layers): (GateOrder, ScanLayers),
    hidden: usize,
) -> Result<ScanConfig, Error> {
    let (heads, groups) = (source.size(key::SCAN_HEADS)?, source.opt_size(key::SCAN_GROUPS)?.unwrap_or(1));
    if !heads.is_multiple_of(groups) {
        let wanted = format!("a divisor of the {heads} heads");
        return Err(bad(&source.spelling(key::SCAN_GROUPS), groups, &wanted));
    }
    let of_heads = |values: usize, key: Key| match values.is_multiple_of(heads) {
        true => Ok(values / heads),
        false => Err(bad(&source.spelling(key), values, &format!("a multiple of the {heads} heads"))),
    };
    let (dim, conv_bias) = match source {
        // Files of llama.cpp always have one.
        Source::Gguf { .. } => (of_heads(source.size(key::INNER)?, key::INNER)?, true),
        Source::HuggingFace { json, facts } => {
            refuse_other_scans(source, json)?;
            let said = json.get(source.own(key::SCAN_DIM)).filter(|dim| dim.as_str() != Some("auto"));
            let dim = match said {
                Some(_) => source.size(key::SCAN_DIM)?,
                None => {
                    let expand = source.opt_size(key::SCAN_EXPAND)?.unwrap_or(2);
                    let inner = source.opt_size(key::SCAN_INNER)?.unwrap_or(expand.saturating_mul(hidden));
                    of_heads(inner, key::SCAN_HEADS)?
                }
            };
            (dim, json.opt_bool(facts.own("mamba_conv_bias"))?.unwrap_or(true))
        }
    };
    let heads = ScanHeads { heads, groups, dim, state: source.size(key::SCAN_STATE)? };
    let (mut normed, mut gates) = (true, gates);
    if let (Source::HuggingFace { json, .. }, ScanLayers::Beside) = (source, layers) {
        normed = json.opt_bool("mamba_rms_norm")?.unwrap_or(false);
        if json.opt_bool("mamba_norm_before_gate")?.unwrap_or(true) {
            gates = GateOrder::NormFirst;
        }
    }
    Ok(ScanConfig { heads, taps: taps(source, key::SCAN_TAPS)?, conv_bias, normed, gates })
}

fn channel_scan(source: &Source<'_>, facts: &Facts, hidden: usize) -> Result<ChannelScanConfig, Error> {
    let weighted = facts.has(Tensor::StepNorm).then_some(StepNorms::Weighted);
    let (channels, rank, conv_bias, plain) = match source {
        // Files of llama.cpp always have a bias.
        Source::Gguf { metadata, .. } => {
            let plain = metadata.opt_bool(&source.spelling(key::STEP_NORMS))?.unwrap_or(false);
            let plain = plain.then_some(StepNorms::Plain { eps: None });
            (source.size(key::INNER)?, source.size(key::SCAN_RANK)?, true, plain)
        }
        Source::HuggingFace { json, .. } => {
            refuse_other_scans(source, json)?;
            let expand = source.opt_size(key::SCAN_EXPAND)?.unwrap_or(2);
            let said = json.get(source.own(key::SCAN_RANK)).filter(|rank| rank.as_str() != Some("auto"));
            let rank = match said {
                Some(_) => source.size(key::SCAN_RANK)?,
                None => hidden.div_ceil(16),
            };
            let eps = source.opt_number(key::STEP_EPS)?;
            let plain = eps.map(|eps| StepNorms::Plain { eps: Some(eps as f32) });
            let conv_bias = json.opt_bool(facts.own("mamba_conv_bias"))?.unwrap_or(true);
            let inner = source.opt_size(key::SCAN_INNER)?.unwrap_or(expand.saturating_mul(hidden));
            (inner, rank, conv_bias, plain)
        }
    };
    Ok(ChannelScanConfig {
        channels,
        state: source.size(key::SCAN_STATE)?,
        rank,
        taps: taps(source, key::SCAN_TAPS)?,
        conv_bias,
        norms: weighted.or(plain).unwrap_or(StepNorms::None),
    })
}

/// Keys of config.json that make of the scan something that is not computed.
fn refuse_other_scans(source: &Source<'_>, json: &Json<'_>) -> Result<(), Error> {
    let own = |key| source.own(Key { gguf: "", hugging_face: key });
    let refuse =
        |what: String, supported: &str| Err(Error::Unsupported { what, supported: supported.to_owned() });
    for bias in [own("mamba_proj_bias"), "projectors_bias"] {
        if json.opt_bool(bias)? == Some(true) {
            return refuse(format!("{bias} true"), "projections without biases");
        }
    }
    // Steps are above zero as they are.
    let limits = own("time_step_limit");
    let Some(limit) = json.get(limits) else { return Ok(()) };
    let within = match limit.as_array().map(Vec::as_slice) {
        Some([least, most]) => {
            let endless = |most: &serde_json::Value| {
                most.is_null()
                    || most["__float__"] == "Infinity"
                    || most.as_str() == Some("inf")
                    || most.as_f64().is_some_and(|most| most >= f64::from(f32::MAX))
            };
            least.as_f64() == Some(0.0) && endless(most)
        }
        _ => false,
    };
    if within { Ok(()) } else { refuse(format!("{limits} {limit}"), "steps without limits") }
}

/// What a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Attends,
    /// It keeps a state.
    Keeps,
    /// It is a feed-forward and nothing else.
    Feeds,
    /// It is a mixture of experts and nothing else.
    Routes,
}

/// What layers are: as the file lists them, or as its period says.
fn kinds(source: &Source<'_>, rule: Recurrent, layers: usize) -> Result<Vec<Kind>, Error> {
    let listed = |key: &str, list: Vec<Kind>| match list.len() == layers {
        true => Ok(list),
        false => {
            let wanted = format!("one for each of the {layers} layers");
            Err(bad(key, format!("{} layers", list.len()), &wanted))
        }
    };
    if let Recurrent::Scan { layers: ScanLayers::Beside, .. } = rule {
        return Ok(vec![Kind::Keeps; layers]);
    }
    let or_keeps = |attends: bool| if attends { Kind::Attends } else { Kind::Keeps };
    match source {
        Source::HuggingFace { json, .. } => {
            for key in LISTS {
                if let Some(types) = json.opt_strs(key)? {
                    let kind = |name: &&str| named(rule, name);
                    return listed(key, types.iter().map(kind).collect::<Result<_, _>>()?);
                }
            }
            if let Some(pattern) = json.opt_str(PATTERN)? {
                let kind = |sign: char| named(rule, sign.encode_utf8(&mut [0; 4]));
                return listed(PATTERN, pattern.chars().map(kind).collect::<Result<_, _>>()?);
            }
            if let Some(period) = json.opt_u64("attn_layer_period")? {
                let offset = json.opt_u64("attn_layer_offset")?.unwrap_or(0);
                if offset >= period {
                    return Err(bad("attn_layer_offset", offset, &format!("below the period {period}")));
                }
                return Ok((0..layers as u64).map(|layer| or_keeps(layer % period == offset)).collect());
            }
            if let Some(attending) = json.opt_u64s("full_attn_idxs")? {
                return Ok((0..layers as u64).map(|layer| or_keeps(attending.contains(&layer))).collect());
            }
        }
        Source::Gguf { metadata, .. } => {
            let key = crate::layers::HEADS_KV;
            let fed = crate::layers::whole_numbers(source, crate::layers::FFN).filter(|_| is_alone(rule));
            if let Some(mut heads) = crate::layers::whole_numbers(source, key) {
                // Layers that guess ahead are listed behind the others.
                let ahead = usize::try_from(crate::layers::ahead(source)?).unwrap_or(usize::MAX);
                if heads.len().checked_sub(ahead) == Some(layers) {
                    heads.truncate(layers);
                }
                let experts = source.opt_whole(crate::layers::EXPERTS)?.is_some_and(|experts| experts > 0);
                let feeds = |layer: usize| {
                    fed.as_ref().and_then(|fed| fed.get(layer)).is_some_and(|width| *width > 0)
                };
                let kind = |(layer, heads): (usize, &i64)| match feeds(layer) {
                    true if experts => Kind::Routes,
                    true => Kind::Feeds,
                    false => or_keeps(*heads > 0),
                };
                return listed(&source.spelling(key), heads.iter().enumerate().map(kind).collect());
            }
            let key = source.spelling(Key { gguf: "attention.recurrent_layers", hugging_face: "" });
            if let Some(Value::Array(Array::Bool(recurrent))) = metadata.get(&key) {
                let list: Vec<_> = recurrent.iter().take(layers).map(|keeps| or_keeps(!keeps)).collect();
                return listed(&key, list);
            }
        }
    }
    match rule {
        Recurrent::DeltaRule { .. } => {
            let every = source.opt_size(key::INTERVAL)?.unwrap_or(4);
            Ok((1..=layers).map(|layer| or_keeps(layer.is_multiple_of(every))).collect())
        }
        Recurrent::ShortConv => Ok(vec![Kind::Attends; layers]),
        Recurrent::Scan { .. } | Recurrent::ChannelScan => Ok(vec![Kind::Keeps; layers]),
    }
}

fn is_alone(rule: Recurrent) -> bool {
    matches!(rule, Recurrent::Scan { layers: ScanLayers::Alone, .. })
}

/// What files call a kind of layer.
fn named(rule: Recurrent, name: &str) -> Result<Kind, Error> {
    let (keeps, feeds, routes): (&[&str], &[&str], &[&str]) = match rule {
        Recurrent::DeltaRule { .. } => (&["linear_attention"], &[], &[]),
        Recurrent::ShortConv => (&["conv"], &[], &[]),
        Recurrent::Scan { layers: ScanLayers::Alone, .. } => {
            (&["mamba", "linear_attention", "M"], &["mlp", "-"], &["moe", "E"])
        }
        Recurrent::Scan { .. } | Recurrent::ChannelScan => (&["mamba", "linear_attention"], &[], &[]),
    };
    match name {
        "full_attention" | "attention" => Ok(Kind::Attends),
        "*" if is_alone(rule) => Ok(Kind::Attends),
        name if keeps.contains(&name) => Ok(Kind::Keeps),
        name if feeds.contains(&name) => Ok(Kind::Feeds),
        name if routes.contains(&name) => Ok(Kind::Routes),
        name => Err(Error::Unsupported {
            what: format!("layer type {name:?}"),
            supported: format!("full_attention, {}", [keeps, feeds, routes].concat().join(", ")),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_take_about_as_much_as_the_keys_and_values_between_them() {
        // A 35B-A3B: thirty layers of 32 matrices of 128 x 128, ten of two heads of 256.
        let state = 30 * 4 * (3 * 8192 + 32 * 128 * 128);
        assert_eq!(checkpoint_every(state, 10 * 2 * 2 * 256 * 2), 3232);
        assert_eq!(checkpoint_every(1000, 1000), 256);
        assert_eq!((checkpoint_every(1 << 30, 1), checkpoint_every(1000, 0)), (4096, 4096));
    }
}
