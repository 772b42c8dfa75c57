//! Rotary positions: which frequencies a head's pairs turn with, by base and scaling.

use std::f64::consts::TAU;

use fornax_format::{Checkpoint, DType};

use crate::layers::LayerHeads;
use crate::loader::{stored_name, tensor};
use crate::names::Tensor;
use crate::source::{Json, Key, Source, bad, opt_f32, within};
use crate::{Error, Facts};

/// Rotary positions of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Pair `i` of `n` turns by `base^(-i/n)` radians per position before scaling.
    pub base: f64,
    /// Values of a head that rotate; the others stay.
    pub dims: usize,
    /// How the frequencies were changed to reach a longer context.
    pub scaling: Scaling,
    /// What each pair's frequency is divided by, where the checkpoint has that; else empty.
    pub factors: Vec<f32>,
    /// The same for contexts longer than the original one; `None` where it makes no difference.
    pub long: Option<LongFactors>,
    /// The longest sequence that will be asked for, which decides between the two.
    pub context: u32,
}

/// Divisors of the frequencies in long contexts.
#[derive(Clone, Debug, PartialEq)]
pub struct LongFactors {
    /// One for each pair.
    pub factors: Vec<f32>,
    /// The context up to which the others hold.
    pub original_context: u32,
}

/// How frequencies were changed to reach a longer context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// Not at all.
    None,
    /// All are divided.
    Linear {
        /// By this.
        factor: f64,
    },
    /// Those of long waves are divided, those of short waves stay, and between them it is smooth.
    Llama3 {
        /// What long waves are divided by.
        factor: f64,
        /// Waves longer than the original context over this are long.
        low_freq_factor: f64,
        /// Waves shorter than the original context over this are short.
        high_freq_factor: f64,
        /// The context before scaling.
        original_context: f64,
    },
    /// Those that turn often within the original context stay, those that turn seldom are divided, with a ramp over
    /// the pairs between; and rotated values grow.
    Yarn {
        /// What seldom turning pairs are divided by.
        factor: f64,
        /// The context before scaling.
        original_context: f64,
        /// Pairs with at least this many turns stay.
        beta_fast: f64,
        /// Pairs with at most this many turns are divided.
        beta_slow: f64,
        /// Whether the ramp begins and ends at whole pairs.
        truncate: bool,
        /// Multiplies sine and cosine.
        magnitude: f64,
    },
    /// They are divided by the factors, and rotated values grow.
    Long {
        /// Multiplies sine and cosine.
        magnitude: f64,
    },
}

/// The kinds of scaling, for messages.
const SUPPORTED: &str = "linear, llama3, yarn, longrope";
/// A number that is divided by, or is a count; the upper end only keeps results finite.
const POSITIVE: std::ops::RangeInclusive<f64> = 1e-6..=1e12;

impl Rope {
    /// Radians per position of each rotating pair.
    pub fn frequencies(&self) -> Vec<f32> {
        let pairs = self.dims / 2;
        let ramp = self.yarn_ramp();
        let factors = match &self.long {
            Some(long) if self.context > long.original_context => &long.factors,
            _ => &self.factors,
        };
        let frequency = |pair: usize| {
            let stored = factors.get(pair).map_or(1.0, |factor| f64::from(*factor));
            let plain = self.base.powf(-(pair as f64) / pairs as f64) / stored;
            let scaled = match self.scaling {
                Scaling::None | Scaling::Long { .. } => plain,
                Scaling::Linear { factor } => plain / factor,
                Scaling::Llama3 {
                    factor,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_context,
                } => {
                    let turns = original_context * plain / TAU;
                    if turns > high {
                        plain
                    } else if turns < low {
                        plain / factor
                    } else {
                        let smooth = (turns - low) / (high - low);
                        (1.0 - smooth) * plain / factor + smooth * plain
                    }
                }
                Scaling::Yarn { factor, .. } => {
                    let divided = ((pair as f64 - ramp.0) / (ramp.1 - ramp.0)).clamp(0.0, 1.0);
                    divided * plain / factor + (1.0 - divided) * plain
                }
            };
            scaled as f32
        };
        (0..pairs).map(frequency).collect()
    }

    /// Multiplies sine and cosine.
    pub fn magnitude(&self) -> f32 {
        match self.scaling {
            Scaling::Yarn { magnitude, .. } | Scaling::Long { magnitude } => magnitude as f32,
            _ => 1.0,
        }
    }

    /// The pairs between which yarn goes from leaving frequencies to dividing them.
    fn yarn_ramp(&self) -> (f64, f64) {
        let Scaling::Yarn { original_context, beta_fast, beta_slow, truncate, .. } = self.scaling else {
            return (0.0, 1.0);
        };
        let dims = self.dims as f64;
        // The pair that makes this many turns within the original context.
        let pair = |turns: f64| dims * (original_context / (turns * TAU)).ln() / (2.0 * self.base.ln());
        let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        // The upper bound counts values, not pairs; the reference implementations do so.
        (low, high) = (low.max(0.0), high.min(dims - 1.0));
        (low, if low == high { high + 0.001 } else { high })
    }

    /// The model's rotation, and that of layers with a window where they have their own.
    pub(crate) fn read(
        source: &Source<'_>,
        checkpoint: &Checkpoint,
        facts: &Facts,
        heads: LayerHeads,
        context: u32,
    ) -> Result<(Rope, Option<Rope>), Error> {
        let head_dim = heads.full.dim;
        if facts.has(Tensor::Positions) {
            return Ok((Rope::plain(facts.rope_base, 0, context), None));
        }
        let rope = match source {
            Source::Gguf { .. } => Rope::read_gguf(source, checkpoint, facts, head_dim, context)?,
            Source::HuggingFace { json, .. } => Rope::read_hugging_face(json, facts, head_dim, context)?,
        };
        if !rope.dims.is_multiple_of(2) {
            return Err(bad("the number of rotating values of a head", rope.dims, "an even number"));
        }
        for factors in
            [Some(&rope.factors), rope.long.as_ref().map(|long| &long.factors)].into_iter().flatten()
        {
            if !factors.is_empty()
                && factors.len() != rope.dims / 2
                && matches!(source, Source::HuggingFace { .. })
            {
                let wanted = format!("one for each of the {} rotating pairs", rope.dims / 2);
                return Err(bad(
                    "short_factor or long_factor",
                    format!("{} factors", factors.len()),
                    &wanted,
                ));
            }
        }
        // Heads of their own rotate whole; where all layers have the same heads, as much of them.
        let dims = if facts.full_head_dim.is_some() { heads.window.dim } else { rope.dims };
        let of_windows = |default| rope.of_windows(source, facts, default, dims);
        Ok((rope.clone(), facts.window_rope_base.map(of_windows).transpose()?))
    }

    /// Unscaled.
    fn plain(base: f64, dims: usize, context: u32) -> Rope {
        Rope { base, dims, scaling: Scaling::None, factors: Vec::new(), long: None, context }
    }

    /// The rotation of layers with a window beside this one: nearer positions need no scaling.
    fn of_windows(
        &self,
        source: &Source<'_>,
        facts: &Facts,
        default: f64,
        dims: usize,
    ) -> Result<Rope, Error> {
        const DIMS: Key = Key { gguf: "rope.dimension_count_swa", hugging_face: "" };
        let said = if let Source::Gguf { .. } = source { source.opt_size(DIMS)? } else { None };
        if let Some(other) = said.filter(|other| *other != dims) {
            return Err(bad(&source.spelling(DIMS), other, &format!("{dims}")));
        }
        let base = match source {
            Source::Gguf { .. } => source.opt_number(Key { gguf: "rope.freq_base_swa", hugging_face: "" })?,
            Source::HuggingFace { json, .. } => {
                let own = layer_kind(json, "sliding_attention")?;
                match own.map(|own| own.opt_f64("rope_theta")).transpose()?.flatten() {
                    Some(base) => Some(base),
                    None => json.opt_f64(facts.own("rope_local_base_freq"))?,
                }
            }
        };
        let base = within("the rotary base of layers with a window", base.unwrap_or(default), 1.001..=1e12)?;
        Ok(Rope::plain(base, dims, self.context))
    }

    fn read_gguf(
        source: &Source<'_>,
        checkpoint: &Checkpoint,
        facts: &Facts,
        head_dim: usize,
        context: u32,
    ) -> Result<Rope, Error> {
        const BASE: Key = Key { gguf: "rope.freq_base", hugging_face: "" };
        const DIMS: Key = Key { gguf: "rope.dimension_count", hugging_face: "" };
        let base = within(
            &source.spelling(BASE),
            source.opt_number(BASE)?.unwrap_or(facts.rope_base),
            1.001..=1e12,
        )?;
        let dims = source.opt_size(DIMS)?.unwrap_or(head_dim);
        if dims > head_dim {
            return Err(bad(&source.spelling(DIMS), dims, &format!("at most the head size {head_dim}")));
        }
        let factors = |tensor| stored_factors(checkpoint, facts, tensor);
        let (short, long) = (factors(Tensor::RopeFactors)?, factors(Tensor::RopeFactorsLong)?);
        if long.is_empty() {
            let scaling = scaling_of_gguf(source, facts, context)?;
            return Ok(Rope { scaling, factors: short, ..Rope::plain(base, dims, context) });
        }
        const ORIGINAL: Key = Key { gguf: "rope.scaling.original_context_length", hugging_face: "" };
        const MAGNITUDE: Key = Key { gguf: "rope.scaling.attn_factor", hugging_face: "" };
        let magnitude = source.opt_number(MAGNITUDE)?.unwrap_or(1.0);
        Ok(Rope {
            scaling: Scaling::Long { magnitude: within(&source.spelling(MAGNITUDE), magnitude, POSITIVE)? },
            factors: short,
            long: Some(LongFactors { factors: long, original_context: source.positions(ORIGINAL)? }),
            ..Rope::plain(base, dims, context)
        })
    }

    fn read_hugging_face(
        json: &Json<'_>,
        facts: &Facts,
        head_dim: usize,
        context: u32,
    ) -> Result<Rope, Error> {
        // Older files: rope_theta outside and rope_scaling; newer ones: all of it in rope_parameters, and there by the
        // kind of layer where kinds differ.
        let scaling = match json.opt_object("rope_scaling")? {
            Some(scaling) => Some(scaling),
            None => json.opt_object("rope_parameters")?,
        };
        let nested = scaling.and_then(|scaling| scaling.nested());
        let scaling = match (nested, facts.window_rope_base) {
            (None, _) => scaling,
            (Some(kind), None) => {
                return Err(Error::Unsupported {
                    what: format!("rotation of its own for {kind:?}"),
                    supported: "one for all layers".to_owned(),
                });
            }
            (Some(_), Some(_)) => layer_kind(json, "full_attention")?,
        };
        if let Some(share) = facts.proportional_rotary {
            return proportional(scaling.as_ref(), facts, share, (head_dim, context));
        }
        let partial = match facts.latent {
            true => whole_of_turned(&[Some(*json), scaling], head_dim)?,
            false => partial_rotary(&[Some(*json), scaling], facts)?,
        };
        #[expect(clippy::cast_sign_loss, reason = "neither factor is negative")]
        let dims = match rotary_dim(json, facts, head_dim)? {
            Some(dims) => dims,
            None => (head_dim as f64 * partial) as usize,
        };
        let inside = scaling.map(|scaling| scaling.opt_f64("rope_theta")).transpose()?.flatten();
        let base = match inside {
            Some(base) => base,
            None => json.opt_f64(facts.own("rope_theta"))?.unwrap_or(facts.rope_base),
        };
        let base = within("rope_theta", base, 1.001..=1e12)?;
        let plain = Rope::plain(base, dims, context);
        let Some(scaling) = scaling else { return Ok(plain) };
        match kind(&scaling)? {
            Some("longrope" | "su") => return long_rope(json, &scaling, plain),
            Some("dynamic") => return stretched(&scaling, plain),
            _ => {}
        }
        Ok(Rope { scaling: scaling_of_json(json, &scaling, context)?, ..plain })
    }
}

/// The share of a head that rotates: what the last of the objects says that says something.
fn partial_rotary(objects: &[Option<Json<'_>>], facts: &Facts) -> Result<f64, Error> {
    let mut share = facts.partial_rotary.unwrap_or(1.0);
    for object in objects.iter().flatten() {
        for key in ["partial_rotary_factor", facts.own("partial_rotary_factor")] {
            let Some(said) = object.opt_f64(key)? else { continue };
            if facts.partial_rotary.is_none() && said != 1.0 {
                return Err(Error::Unsupported {
                    what: format!("{} {said}", object.spelling(key)),
                    supported: "1".to_owned(),
                });
            }
            share = within(&object.spelling(key), said, 1e-6..=1.0)?;
        }
    }
    Ok(share)
}

/// Of latent attention all that turns is counted apart, and files may say again which share of a head it is.
fn whole_of_turned(objects: &[Option<Json<'_>>], turned: usize) -> Result<f64, Error> {
    let kept = objects.iter().flatten().find_map(|object| object.opt_u64("qk_nope_head_dim").transpose());
    let head = kept.transpose()?.unwrap_or(0) as f64 + turned as f64;
    for object in objects.iter().flatten() {
        let key = "partial_rotary_factor";
        let Some(said) = object.opt_f64(key)?.filter(|said| *said != 1.0) else { continue };
        if (said * head).round() != turned as f64 {
            let what = format!("{} {said}", object.spelling(key));
            return Err(Error::Unsupported { what, supported: format!("{} or 1", turned as f64 / head) });
        }
    }
    Ok(1.0)
}

/// The part of a head that rotates where a file counts it.
fn rotary_dim(json: &Json<'_>, facts: &Facts, head_dim: usize) -> Result<Option<usize>, Error> {
    let key = "rotary_dim";
    let Some(dims) = json.opt_u64(key)?.filter(|_| facts.partial_rotary.is_some()) else { return Ok(None) };
    match usize::try_from(dims) {
        Ok(dims) if dims <= head_dim && dims.is_multiple_of(2) => Ok(Some(dims)),
        _ => Err(bad(&json.spelling(key), dims, &format!("an even number of at most {head_dim}"))),
    }
}

/// The first pairs of a head turn as if all did, the others stand still.
fn proportional(
    json: Option<&Json<'_>>,
    facts: &Facts,
    share: f64,
    (head_dim, context): (usize, u32),
) -> Result<Rope, Error> {
    let number = |key: &str, or: f64| {
        Ok::<_, Error>(json.map(|json| json.opt_f64(key)).transpose()?.flatten().unwrap_or(or))
    };
    if let Some(other) = json.map(kind).transpose()?.flatten().filter(|kind| *kind != "proportional") {
        let what = format!("rope scaling {other:?}");
        return Err(Error::Unsupported { what, supported: "proportional".to_owned() });
    }
    let base = within("rope_theta", number("rope_theta", facts.rope_base)?, 1.001..=1e12)?;
    let factor = within("factor", number("factor", 1.0)?, POSITIVE)?;
    let share = within("partial_rotary_factor", number("partial_rotary_factor", share)?, 0.0..=1.0)?;
    #[expect(clippy::cast_sign_loss, reason = "the share is not negative")]
    let turning = (share * head_dim as f64 / 2.0) as usize;
    let divisor = |pair: usize| if pair < turning { 1.0 } else { f32::INFINITY };
    Ok(Rope {
        scaling: if factor == 1.0 { Scaling::None } else { Scaling::Linear { factor } },
        factors: (0..head_dim / 2).map(divisor).collect(),
        ..Rope::plain(base, head_dim, context)
    })
}

/// Files that say "dynamic" and have an alpha mean a larger base, whatever the sequence's length.
fn stretched(json: &Json<'_>, plain: Rope) -> Result<Rope, Error> {
    let Some(alpha) = json.opt_f64("alpha")?.filter(|alpha| *alpha != 0.0) else {
        return Err(unsupported("dynamic"));
    };
    let alpha = within(&json.spelling("alpha"), alpha, POSITIVE)?;
    let dims = plain.dims as f64;
    Ok(Rope {
        base: within("rope_theta", plain.base * alpha.powf(dims / (dims - 2.0)), 1.001..=1e12)?,
        ..plain
    })
}

/// What rope_parameters says of one kind of layer.
fn layer_kind<'a>(json: &Json<'a>, kind: &'static str) -> Result<Option<Json<'a>>, Error> {
    let Some(parameters) = json.opt_object("rope_parameters")? else { return Ok(None) };
    parameters.opt_object(kind)
}

fn kind<'a>(json: &Json<'a>) -> Result<Option<&'a str>, Error> {
    Ok(match json.opt_str("rope_type")? {
        Some(kind) => Some(kind),
        None => json.opt_str("type")?,
    })
}

/// Factors for short and for long contexts.
fn long_rope(config: &Json<'_>, json: &Json<'_>, plain: Rope) -> Result<Rope, Error> {
    let factors = |key: &str| -> Result<Vec<f32>, Error> {
        let missing = || Error::MissingKey { key: json.spelling(key) };
        let numbers = json.opt_f64s(key)?.ok_or_else(missing)?;
        let checked = numbers.into_iter().map(|number| within(&json.spelling(key), number, POSITIVE));
        checked.map(|number| number.map(|number| number as f32)).collect()
    };
    let key = "original_max_position_embeddings";
    let original = json.opt_u64(key)?.or(config.opt_u64(key)?);
    let original = original.ok_or_else(|| Error::MissingKey { key: json.spelling(key) })?;
    let original_context = u32::try_from(original).ok().filter(|original| *original > 1);
    let original_context = original_context.ok_or_else(|| bad(key, original, "at least 2 and below 2^32"))?;
    let original = f64::from(original_context);
    let factor = json.opt_f64("factor")?.unwrap_or(f64::from(plain.context) / original);
    let grown = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
    let magnitude = json.opt_f64("attention_factor")?.unwrap_or(grown);
    Ok(Rope {
        scaling: Scaling::Long { magnitude: within("attention_factor", magnitude, POSITIVE)? },
        factors: factors("short_factor")?,
        long: Some(LongFactors { factors: factors("long_factor")?, original_context }),
        ..plain
    })
}

fn scaling_of_json(config: &Json<'_>, json: &Json<'_>, context: u32) -> Result<Scaling, Error> {
    let number = |key: &str| within(&json.spelling(key), json.f64(key)?, POSITIVE);
    // A zero counts as not given, as in the reference.
    let or = |key: &str, default: f64| {
        let given = json.opt_f64(key)?.filter(|number| *number != 0.0);
        given.map_or(Ok(default), |number| within(&json.spelling(key), number, POSITIVE))
    };
    let original_context = || {
        let key = "original_max_position_embeddings";
        let given = match config.opt_f64(key)? {
            Some(given) => Some(given),
            None => json.opt_f64(key)?,
        };
        within(key, given.unwrap_or(f64::from(context)), POSITIVE)
    };
    match kind(json)?.unwrap_or("default") {
        "default" => Ok(Scaling::None),
        "linear" => Ok(Scaling::Linear { factor: number("factor")? }),
        "llama3" => Ok(Scaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_context: original_context()?,
        }),
        "yarn" => {
            let original_context = original_context()?;
            let null = json.has("factor") && json.get("factor").is_none();
            let factor = if null { f64::from(context) / original_context } else { number("factor")? };
            let mscale = (or("mscale", 0.0)?, or("mscale_all_dim", 0.0)?);
            let magnitude = match json.opt_f64("attention_factor")? {
                Some(magnitude) => within(&json.spelling("attention_factor"), magnitude, POSITIVE)?,
                None if mscale.0 != 0.0 && mscale.1 != 0.0 => {
                    yarn_magnitude(factor, mscale.0) / yarn_magnitude(factor, mscale.1)
                }
                None => yarn_magnitude(factor, 1.0),
            };
            Ok(Scaling::Yarn {
                factor,
                original_context,
                beta_fast: or("beta_fast", 32.0)?,
                beta_slow: or("beta_slow", 1.0)?,
                truncate: json.opt_bool("truncate")?.unwrap_or(true),
                magnitude,
            })
        }
        other => Err(unsupported(other)),
    }
}

fn scaling_of_gguf(source: &Source<'_>, facts: &Facts, context: u32) -> Result<Scaling, Error> {
    let Source::Gguf { metadata, architecture } = source else { return Ok(Scaling::None) };
    let spelling = |key: &str| format!("{architecture}.rope.{key}");
    let opt = |key: &str| {
        let key = spelling(key);
        opt_f32(metadata, &key)?.map(|number| within(&key, number, POSITIVE)).transpose()
    };
    // Files older than `scaling.type` scale linearly by either key.
    let factor = match opt("scaling.factor")? {
        Some(factor) => Some(factor),
        None => opt("scale_linear")?,
    };
    let required = || factor.ok_or_else(|| Error::MissingKey { key: spelling("scaling.factor") });
    match metadata.opt_str(&spelling("scaling.type"))? {
        Some("none") => Ok(Scaling::None),
        None => Ok(factor.map_or(Scaling::None, |factor| Scaling::Linear { factor })),
        Some("linear") => Ok(Scaling::Linear { factor: required()? }),
        Some("yarn") => {
            let key = spelling("scaling.yarn_ext_factor");
            if let Some(value) = metadata.opt_f32(&key)?.filter(|value| *value != 1.0) {
                return Err(Error::Unsupported { what: format!("{key} {value}"), supported: "1".to_owned() });
            }
            let factor = required()?;
            let grown = match log_multiplier(source, facts)? {
                None => yarn_magnitude(factor, 1.0),
                // Rotated values grow by as much as config.json's `mscale` says over what `mscale_all_dim` says. Only the second
                // is there; the first is the same in every model with latent attention, and one in the others.
                Some(_) if facts.latent => 1.0,
                Some(mscale) => yarn_magnitude(factor, 1.0) / yarn_magnitude(factor, mscale),
            };
            let original = metadata.opt_u32(&spelling("scaling.original_context_length"))?.unwrap_or(context);
            // The converter writes config.json's attention_factor under this key: the whole magnitude.
            let whole = opt("scaling.yarn_attn_factor")?.unwrap_or(grown);
            Ok(Scaling::Yarn {
                factor,
                original_context: within(
                    &spelling("scaling.original_context_length"),
                    original.into(),
                    POSITIVE,
                )?,
                beta_fast: opt("scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: opt("scaling.yarn_beta_slow")?.unwrap_or(1.0),
                truncate: facts.yarn_truncates,
                magnitude: whole * opt("scaling.attn_factor")?.unwrap_or(1.0),
            })
        }
        Some(other) => Err(unsupported(other)),
    }
}

/// What GGUF files of some architectures have of config.json's `mscale_all_dim`; those of others may not have it.
fn log_multiplier(source: &Source<'_>, facts: &Facts) -> Result<Option<f64>, Error> {
    const KEY: Key = Key { gguf: "rope.scaling.yarn_log_multiplier", hugging_face: "" };
    let Some(said) = source.opt_number(KEY)?.filter(|said| *said != 0.0) else { return Ok(None) };
    let said = within(&source.spelling(KEY), said, POSITIVE)?;
    match (facts.latent, facts.temperature) {
        // The converter multiplies it there, and there alone.
        (true, _) => Ok(Some(said / 0.1)),
        (false, Some(_)) => Ok(Some(said)),
        (false, None) => {
            let what = format!("{} {}", source.spelling(KEY), said as f32);
            Err(Error::Unsupported { what, supported: "0".to_owned() })
        }
    }
}

/// How much yarn lets scores of attention grow beside rotated values, in models with latent attention.
pub(crate) fn score_growth(source: &Source<'_>, facts: &Facts, context: u32) -> Result<f64, Error> {
    let (factor, mscale) = match source {
        Source::Gguf { .. } => {
            match (scaling_of_gguf(source, facts, context)?, log_multiplier(source, facts)?) {
                (Scaling::Yarn { factor, .. }, Some(mscale)) => (factor, mscale),
                _ => return Ok(1.0),
            }
        }
        Source::HuggingFace { json, .. } => {
            let scaling = match json.opt_object("rope_scaling")? {
                Some(scaling) => Some(scaling),
                None => json.opt_object("rope_parameters")?,
            };
            let Some(scaling) = scaling else { return Ok(1.0) };
            let said = scaling.opt_f64("mscale_all_dim")?.filter(|said| *said != 0.0);
            match (scaling_of_json(json, &scaling, context)?, said) {
                (Scaling::Yarn { factor, .. }, Some(said)) => {
                    (factor, within(&scaling.spelling("mscale_all_dim"), said, POSITIVE)?)
                }
                _ => return Ok(1.0),
            }
        }
    };
    Ok(yarn_magnitude(factor, mscale).powi(2))
}

/// How much yarn lets rotated values grow for a longer context.
fn yarn_magnitude(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

fn unsupported(kind: &str) -> Error {
    Error::Unsupported { what: format!("rope scaling {kind:?}"), supported: SUPPORTED.to_owned() }
}

/// The frequencies' divisors, where the checkpoint stores them as a tensor. Its shape is checked with all others.
fn stored_factors(checkpoint: &Checkpoint, facts: &Facts, wanted: Tensor) -> Result<Vec<f32>, Error> {
    let Some(name) = facts.row(wanted).and_then(|row| stored_name(checkpoint, facts, row, 0)) else {
        return Ok(Vec::new());
    };
    let Some(view) = tensor(checkpoint, &name) else { return Ok(Vec::new()) };
    if view.dtype != DType::F32 {
        return Err(Error::Unsupported {
            what: format!("tensor {name:?} of type {}", view.dtype),
            supported: "F32".to_owned(),
        });
    }
    let (chunks, _) = view.bytes.as_chunks::<4>();
    let factors: Vec<f32> = chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    // Pairs that stand still have one that no position makes up for.
    let fits = |factor: &f32| factor.is_finite() && f64::from(*factor) >= *POSITIVE.start();
    match factors.iter().position(|factor| !fits(factor)) {
        Some(index) => Err(Error::TensorValue {
            tensor: name,
            got: factors[index],
            index,
            wanted: "a positive finite number",
        }),
        None => Ok(factors),
    }
}
