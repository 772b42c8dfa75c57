//! What a GGUF file says of its model: which keys, by architecture, and in the order of llama.cpp's converter.

use std::collections::HashSet;

use fornax_compute::{NormKind, Scores};
use fornax_format::{Array, Checkpoint, Value};

use crate::config::key;
use crate::layers::key as of_layers;
use crate::source::{Json, Key, Source};
use crate::{Config, Error, Facts, Rotary, Scaling};

/// What a file says of its model.
#[derive(Debug, Default, PartialEq)]
pub struct Pairs {
    /// What comes before the type of its tensors.
    pub before: Vec<(String, Value)>,
    /// What comes after it.
    pub after: Vec<(String, Value)>,
}

/// An architecture that can be exported.
pub(super) struct Converted {
    /// Its name in the table of facts.
    pub(super) facts: &'static str,
    /// What GGUF files call it.
    pub(super) architecture: &'static str,
    /// What it says beside what all say.
    says: &'static [Said],
}

/// Something that only some architectures say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    VocabSize,
    RotaryDims,
    /// The window, where there is one.
    Window,
    /// The window, and 0 where there is none.
    WindowOrNone,
    /// Which layers have it, where not all have.
    WindowPattern,
    SoftCaps,
    Multipliers,
    LogitScale,
    Unscaled,
    LongRope,
    HeadsKv,
    Parallel,
    ExpertFfn,
    SharedFfn,
    SharedCount,
    FirstDense,
    Gating,
    SharesOfChosen,
    RoutedScale,
    /// How falcon's matrix of queries, keys and values lies.
    Layout,
    /// The epsilon of layer norms, here and not where the others have it.
    LayerEps,
    /// Nothing of the rotary base where it is the usual one, nor of other norms.
    UsualBase,
    /// How texts become vectors, where the directory says it.
    Pooling,
    /// That there are no layers which only guess ahead: they are left out.
    NoneAhead,
}

/// Every architecture that can be exported.
pub(super) const CONVERTED: &[Converted] = {
    use Said::*;
    const fn converted(facts: &'static str, architecture: &'static str, says: &'static [Said]) -> Converted {
        Converted { facts, architecture, says }
    }
    &[
        converted("llama", "llama", &[VocabSize, RotaryDims]),
        converted("mistral", "llama", &[VocabSize, RotaryDims]),
        converted("mixtral", "llama", &[VocabSize, RotaryDims]),
        converted("qwen2", "qwen2", &[Pooling]),
        converted("qwen2moe", "qwen2moe", &[ExpertFfn, SharedFfn]),
        converted("qwen3", "qwen3", &[Pooling]),
        converted("qwen3moe", "qwen3moe", &[ExpertFfn]),
        converted("olmo2", "olmo2", &[Window, WindowPattern]),
        converted("phi3", "phi3", &[LongRope, RotaryDims, WindowOrNone]),
        converted("gemma", "gemma", &[UsualBase]),
        converted("gemma2", "gemma2", &[UsualBase, SoftCaps, Window]),
        converted("gemma3", "gemma3", &[Window]),
        converted("granite", "granite", &[VocabSize, RotaryDims, Multipliers]),
        converted("gpt2", "gpt2", &[]),
        converted("gpt-oss", "gpt-oss", &[Window, ExpertFfn]),
        converted("starcoder", "starcoder", &[HeadsKv]),
        converted("starcoder2", "starcoder2", &[]),
        converted("smollm3", "smollm3", &[VocabSize, RotaryDims]),
        converted("glm4", "glm4", &[RotaryDims]),
        converted("ernie4.5", "ernie4_5", &[]),
        converted("exaone4", "exaone4", &[VocabSize, Window, WindowPattern]),
        converted("hunyuan-moe", "hunyuan-moe", &[SharedFfn, ExpertFfn, SharedCount]),
        converted("seed-oss", "seed_oss", &[]),
        converted("command-r", "command-r", &[LogitScale, Unscaled]),
        converted("cohere2", "cohere2", &[LogitScale, Window, VocabSize, RotaryDims, Unscaled]),
        converted("phi2", "phi2", &[UsualBase, HeadsKv, RotaryDims]),
        converted("stablelm", "stablelm", &[UsualBase, RotaryDims, Parallel]),
        converted("gptneox", "gptneox", &[UsualBase, RotaryDims, Parallel]),
        converted("falcon", "falcon", &[UsualBase, Layout, HeadsKv]),
        converted("olmoe", "olmoe", &[]),
        converted("arcee", "arcee", &[VocabSize, RotaryDims]),
        converted("nemotron", "nemotron", &[VocabSize, LayerEps, RotaryDims, Unscaled]),
        converted("jais2", "jais2", &[RotaryDims]),
        converted(
            "glm4moe",
            "glm4moe",
            &[RotaryDims, ExpertFfn, SharedCount, FirstDense, Gating, RoutedScale, SharesOfChosen, NoneAhead],
        ),
        converted("minimax-m2", "minimax-m2", &[Gating, ExpertFfn, RotaryDims]),
        converted("dots1", "dots1", &[ExpertFfn, FirstDense, SharedCount, RoutedScale, SharesOfChosen]),
        converted("hy-v3", "hy_v3", &[ExpertFfn, SharedFfn, SharesOfChosen, RoutedScale, Gating]),
    ]
};

pub(super) fn of(facts: &Facts) -> Option<&'static Converted> {
    CONVERTED.iter().find(|converted| converted.facts == facts.name)
}

/// A list of pairs that is being made.
struct Writing<'a> {
    architecture: &'static str,
    config: &'a Config,
    source: &'a Source<'a>,
    says: &'static [Said],
    pairs: Vec<(String, Value)>,
    /// The keys so far: none comes twice.
    keys: HashSet<String>,
}

pub(super) fn pairs(checkpoint: &Checkpoint, config: &Config) -> Result<Pairs, Error> {
    let facts = &config.facts;
    let Some(converted) = of(facts) else { return Ok(Pairs::default()) };
    let source = Source::new(checkpoint, facts)?;
    let Converted { architecture, says, .. } = *converted;
    let (pairs, keys) = (Vec::new(), HashSet::new());
    let mut writing = Writing { architecture, config, source: &source, says, pairs, keys };
    writing.shape()?;
    writing.rotation()?;
    writing.norms_and_experts()?;
    let before = std::mem::take(&mut writing.pairs);
    let pooling = match checkpoint {
        Checkpoint::HuggingFace(directory) => directory.pooling(),
        Checkpoint::Gguf(_) => None,
    };
    for said in says {
        writing.say(*said, pooling)?;
    }
    Ok(Pairs { before, after: writing.pairs })
}

impl Writing<'_> {
    fn put(&mut self, key: &str, value: Value) {
        let key = format!("{}.{key}", self.architecture);
        if self.keys.insert(key.clone()) {
            self.pairs.push((key, value));
        }
    }

    /// A number of things. None is larger than 32 bits: all were checked when they were read.
    fn count(&mut self, key: &str, count: usize) {
        self.put(key, Value::U32(u32::try_from(count).unwrap_or(u32::MAX)));
    }

    fn number(&mut self, key: &str, number: f32) {
        self.put(key, Value::F32(number));
    }

    /// What config.json says under this key, if it does.
    fn said(&mut self, key: Key) -> Result<bool, Error> {
        let said = self.source.opt_whole(key)?.and_then(|whole| u32::try_from(whole).ok());
        if let Some(whole) = said {
            self.put(key.gguf, Value::U32(whole));
        }
        Ok(said.is_some())
    }

    fn shape(&mut self) -> Result<(), Error> {
        let config = self.config;
        self.count(of_layers::LAYERS.gguf, config.layers.len());
        self.put(key::CONTEXT.gguf, Value::U32(config.context));
        self.count(key::HIDDEN.gguf, config.hidden);
        if !self.said(of_layers::FFN)? {
            let ffn = config.layers.iter().map(|layer| layer.feed_forward.ffn()).find(|ffn| *ffn > 0);
            self.count(of_layers::FFN.gguf, ffn.unwrap_or(0));
        }
        self.said(of_layers::HEADS)?;
        self.said(of_layers::HEADS_KV)?;
        Ok(())
    }

    fn rotation(&mut self) -> Result<(), Error> {
        let Source::HuggingFace { json, .. } = self.source else { return Ok(()) };
        let config = self.config;
        let scaling = match json.opt_object("rope_parameters")? {
            Some(parameters) => Some(parameters),
            None => json.opt_object("rope_scaling")?,
        };
        let of_kind = |kind| scaling.map(|all| all.opt_object(kind)).transpose().map(Option::flatten);
        let full = of_kind("full_attention")?.or(scaling);
        match config.rope.scaling {
            Scaling::Linear { factor } => {
                self.put("rope.scaling.type", Value::String("linear".to_owned()));
                self.number("rope.scaling.factor", factor as f32);
            }
            Scaling::Yarn { factor, original_context, .. } => {
                self.put("rope.scaling.type", Value::String("yarn".to_owned()));
                self.number("rope.scaling.factor", factor as f32);
                #[expect(clippy::cast_sign_loss, reason = "a context is positive")]
                let original = original_context as u32;
                self.put("rope.scaling.original_context_length", Value::U32(original));
                for (said, key) in [
                    ("attention_factor", "rope.scaling.yarn_attn_factor"),
                    ("beta_fast", "rope.scaling.yarn_beta_fast"),
                    ("beta_slow", "rope.scaling.yarn_beta_slow"),
                ] {
                    if let Some(number) = full.map(|full| full.opt_f64(said)).transpose()?.flatten() {
                        self.number(key, number as f32);
                    }
                }
            }
            Scaling::None | Scaling::Llama3 { .. } | Scaling::Long { .. } => {}
        }
        let theta = |object: Option<Json<'_>>| object.map(|it| it.opt_f64("rope_theta")).transpose();
        let outside = json.opt_f64(config.facts.own("rope_theta"))?;
        let usual = self.says.contains(&Said::UsualBase) && config.rope.base == config.facts.rope_base;
        if let Some(base) = theta(full)?.flatten().or(outside).filter(|_| !usual) {
            self.number("rope.freq_base", base as f32);
        }
        let attention = config.layers.iter().filter_map(|layer| layer.attention());
        let mut rotary = attention.map(|attention| attention.rotary);
        if let (Some(windows), true) = (&config.window_rope, rotary.any(|it| it == Rotary::Window)) {
            self.number("rope.freq_base_swa", windows.base as f32);
        }
        Ok(())
    }

    fn norms_and_experts(&mut self) -> Result<(), Error> {
        // Both where config.json has the other's too, unless the family says no more than it must.
        let is_rms = self.config.facts.norm == NormKind::Rms;
        let says_both =
            self.source.opt_number(key::RMS_NORM_EPS)?.is_some() && !self.says.contains(&Said::UsualBase);
        if is_rms || says_both {
            self.number(key::RMS_NORM_EPS.gguf, self.config.norm_eps);
        }
        if !is_rms && !self.says.contains(&Said::LayerEps) {
            self.number(key::LAYER_NORM_EPS.gguf, self.config.norm_eps);
        }
        if let Some(mixture) = self.config.mixture() {
            self.count(of_layers::EXPERTS.gguf, mixture.routing.experts);
            self.count(of_layers::EXPERTS_CHOSEN.gguf, mixture.routing.chosen);
            self.said(of_layers::GROUPS)?;
            self.said(of_layers::GROUPS_CHOSEN)?;
            if let Source::HuggingFace { json, .. } = self.source
                && json.opt_str("scoring_func")?.is_some()
            {
                self.gating();
            }
        }
        let head = self.config.layers.iter().find_map(|layer| layer.attention()).map(|it| it.heads);
        let Some(head) = head else { return Ok(()) };
        let own = head.query * head.dim != self.config.hidden;
        if self.source.opt_whole(of_layers::HEAD_DIM)?.is_some() || own {
            self.count(of_layers::HEAD_DIM.gguf, head.dim);
            self.count("attention.value_length", head.dim);
        }
        Ok(())
    }

    fn gating(&mut self) {
        let mixture = self.config.mixture();
        let sigmoid = mixture.is_some_and(|it| it.routing.scores == Scores::Sigmoid);
        self.put("expert_gating_func", Value::U32(if sigmoid { 2 } else { 1 }));
    }

    fn say(&mut self, said: Said, pooling: Option<&serde_json::Value>) -> Result<(), Error> {
        let config = self.config;
        let mixture = config.mixture();
        let windows = || config.layers.iter().map(|layer| layer.attention().and_then(|it| it.window));
        let window = windows().flatten().next();
        match said {
            Said::VocabSize => self.count("vocab_size", config.vocab),
            Said::RotaryDims => self.count("rope.dimension_count", config.rope.dims),
            Said::Window | Said::WindowOrNone => {
                if window.is_some() || said == Said::WindowOrNone {
                    self.put(of_layers::WINDOW.gguf, Value::U32(window.unwrap_or(0)));
                }
            }
            Said::WindowPattern => {
                if window.is_some() {
                    let pattern = windows().map(|window| window.is_some()).collect();
                    self.put(of_layers::WINDOW_PATTERN.gguf, Value::Array(Array::Bool(pattern)));
                }
            }
            Said::SoftCaps => {
                for (key, cap) in
                    [(key::ATTENTION_CAP, config.attention_cap), (key::LOGIT_CAP, config.logit_cap)]
                {
                    if let Some(cap) = cap {
                        self.number(key.gguf, cap);
                    }
                }
            }
            Said::Multipliers => {
                for key in
                    [key::ATTENTION_SCALE, key::EMBEDDING_SCALE, key::RESIDUAL_SCALE, key::LOGITS_SCALING]
                {
                    if let Some(number) = self.source.opt_number(key)? {
                        self.number(key.gguf, number as f32);
                    }
                }
            }
            Said::LogitScale => self.number(key::LOGIT_SCALE.gguf, config.logit_scale),
            Said::Unscaled => self.put("rope.scaling.type", Value::String("none".to_owned())),
            Said::LongRope => {
                if let (Some(long), Scaling::Long { magnitude }) = (&config.rope.long, config.rope.scaling) {
                    let original = long.original_context;
                    self.number("rope.scaling.attn_factor", magnitude as f32);
                    self.put("rope.scaling.original_context_length", Value::U32(original));
                }
            }
            Said::HeadsKv => {
                let heads = config.layers.iter().find_map(|layer| layer.attention());
                if self.source.opt_whole(of_layers::HEADS_KV)?.is_none() {
                    self.count(of_layers::HEADS_KV.gguf, heads.map_or(0, |it| it.heads.kv));
                }
            }
            Said::Parallel => self.put("use_parallel_residual", Value::Bool(config.parallel)),
            Said::ExpertFfn => self.count(of_layers::EXPERT_FFN.gguf, mixture.map_or(0, |it| it.ffn)),
            Said::SharedFfn => {
                let shared = mixture.and_then(|it| it.shared_ffn);
                self.count(of_layers::SHARED_FFN.gguf, shared.unwrap_or(0));
            }
            Said::SharedCount => {
                if let (false, Some(mixture)) = (self.said(of_layers::SHARED_COUNT)?, mixture) {
                    self.count(of_layers::SHARED_COUNT.gguf, mixture.shared_ffn.unwrap_or(0) / mixture.ffn);
                }
            }
            Said::FirstDense => {
                let dense = config.layers.iter().take_while(|layer| layer.feed_forward.mixture().is_none());
                let dense = dense.count();
                self.count(of_layers::FIRST_DENSE.gguf, dense);
            }
            Said::Gating => self.gating(),
            Said::LayerEps => self.number(key::LAYER_NORM_EPS.gguf, config.norm_eps),
            Said::UsualBase => {}
            Said::NoneAhead => self.count(of_layers::LAYERS_AHEAD.gguf, 0),
            Said::Pooling => {
                let is = |key: &str| pooling.is_some_and(|pooling| pooling[key] == true);
                let ways = [
                    ("pooling_mode_mean_tokens", 1),
                    ("pooling_mode_cls_token", 2),
                    ("pooling_mode_lasttoken", 3),
                ];
                if let Some((_, way)) = ways.into_iter().find(|(key, _)| is(key)) {
                    self.put("pooling_type", Value::U32(way));
                }
            }
            Said::SharesOfChosen => {
                let chosen = mixture.is_some_and(|it| it.routing.shares == fornax_compute::Shares::OfChosen);
                self.put("expert_weights_norm", Value::Bool(chosen));
            }
            Said::RoutedScale => {
                let scale = mixture.map_or(1.0, |it| it.routing.scale);
                self.number(of_layers::ROUTED_SCALE.gguf, scale);
            }
            Said::Layout => self.put("tensor_data_layout", Value::String("jploski".to_owned())),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exported_architecture_is_one_of_the_table() {
        for converted in CONVERTED {
            let facts = Facts::TABLE.iter().find(|facts| facts.name == converted.facts);
            let facts = facts.unwrap_or_else(|| panic!("{} is no architecture", converted.facts));
            let named = facts.gguf.is_none_or(|gguf| gguf == converted.architecture);
            assert!(named, "{}: GGUF calls it otherwise", converted.facts);
            assert!(Facts::TABLE.iter().any(|facts| facts.gguf == Some(converted.architecture)));
        }
    }
}
