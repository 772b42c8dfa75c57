//! Layers that keep a state of a sequence in place of its keys and values: which they are, how large their states, and what
//! they are computed in.

use fornax_compute::{DeltaHeads, KeySharing, Memory, PAGE_TOKENS, Purpose, TAPS_MAX, conv_values};
use fornax_format::{Array, Value};

use crate::facts::Recurrent;
use crate::layers::Mixer;
use crate::loader::Loader;
use crate::source::{Key, Source, bad};
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

/// Columns of what such a layer is computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateWidths {
    mixed: usize,
    convolved: usize,
    read: usize,
}

/// What a layer with a state is computed in.
pub(crate) struct StateRoom<M: Memory> {
    pub(crate) mixed: M::Buf,        // (tokens, what reads the residual stream)
    pub(crate) convolved: M::Buf,    // (tokens, channels of the convolution)
    pub(crate) read: Option<M::Buf>, // (tokens, what is read from matrices), where there are some
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
            Mixer::Attention(_) => return None,
            Mixer::Delta(DeltaConfig { heads, taps }) => {
                conv_values(heads.columns(), *taps).saturating_add(heads.state_values())
            }
            Mixer::Conv(ConvConfig { channels, taps }) => conv_values(*channels, *taps),
        };
        Some(values.saturating_mul(size_of::<f32>()))
    }

    pub(crate) fn widths(&self) -> Option<StateWidths> {
        match self {
            Mixer::Attention(_) => None,
            Mixer::Delta(DeltaConfig { heads, .. }) => {
                let (convolved, read) = (heads.columns(), heads.value * heads.dim_v);
                Some(StateWidths { mixed: convolved + read + 2 * heads.value, convolved, read })
            }
            Mixer::Conv(ConvConfig { channels, .. }) => {
                Some(StateWidths { mixed: 3 * channels, convolved: *channels, read: 0 })
            }
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
    pub(super) const SHORT_TAPS: Key = key("shortconv.l_cache", "conv_L_cache");
    /// Every n-th layer attends: n.
    pub(super) const INTERVAL: Key = key("full_attention_interval", "full_attention_interval");
}

/// What stands in place of attention in some layers, and in which; nothing where all attend.
pub(crate) fn read(
    source: &Source<'_>,
    facts: &Facts,
    hidden: usize,
    layers: usize,
) -> Result<Vec<Option<Mixer>>, Error> {
    let Some(rule) = facts.recurrent else { return Ok(vec![None; layers]) };
    let mixer = match rule {
        Recurrent::DeltaRule { gguf } => Mixer::Delta(delta(source, gguf)?),
        Recurrent::ShortConv => {
            Mixer::Conv(ConvConfig { channels: hidden, taps: taps(source, key::SHORT_TAPS)? })
        }
    };
    let attends = attends(source, rule, layers)?;
    Ok(attends.into_iter().map(|attends| (!attends).then_some(mixer)).collect())
}

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

/// Which layers attend: as the file lists them, or as its period says.
fn attends(source: &Source<'_>, rule: Recurrent, layers: usize) -> Result<Vec<bool>, Error> {
    let other = match rule {
        Recurrent::DeltaRule { .. } => "linear_attention",
        Recurrent::ShortConv => "conv",
    };
    let listed = |key: &str, count: usize, list: Vec<bool>| match count == layers {
        true => Ok(list),
        false => {
            let wanted = format!("one for each of the {layers} layers");
            Err(bad(key, format!("{count} layers"), &wanted))
        }
    };
    match source {
        Source::HuggingFace { json, .. } => {
            if let Some(types) = json.opt_strs("layer_types")? {
                let attends = |kind: &&str| match *kind {
                    "full_attention" => Ok(true),
                    kind if kind == other => Ok(false),
                    kind => Err(Error::Unsupported {
                        what: format!("layer type {kind:?}"),
                        supported: format!("full_attention, {other}"),
                    }),
                };
                let list = types.iter().map(attends).collect::<Result<_, _>>()?;
                return listed("layer_types", types.len(), list);
            }
            if let Some(attending) = json.opt_u64s("full_attn_idxs")? {
                return Ok((0..layers as u64).map(|layer| attending.contains(&layer)).collect());
            }
        }
        Source::Gguf { metadata, .. } => {
            let key = source.spelling(crate::layers::HEADS_KV);
            let counts = match metadata.get(&key) {
                Some(Value::Array(Array::I32(counts))) => {
                    Some(counts.iter().map(|count| *count > 0).collect())
                }
                Some(Value::Array(Array::U32(counts))) => {
                    Some(counts.iter().map(|count| *count > 0).collect())
                }
                _ => None,
            };
            if let Some(list) = counts {
                let list: Vec<bool> = list;
                return listed(&key, list.len(), list);
            }
            let key = source.spelling(Key { gguf: "attention.recurrent_layers", hugging_face: "" });
            if let Some(Value::Array(Array::Bool(recurrent))) = metadata.get(&key) {
                let list: Vec<bool> = recurrent.iter().take(layers).map(|recurrent| !recurrent).collect();
                return listed(&key, list.len(), list);
            }
        }
    }
    match rule {
        Recurrent::DeltaRule { .. } => {
            let every = source.opt_size(key::INTERVAL)?.unwrap_or(4);
            Ok((1..=layers).map(|layer| layer.is_multiple_of(every)).collect())
        }
        Recurrent::ShortConv => Ok(vec![true; layers]),
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
