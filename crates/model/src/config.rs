//! The numbers of one model, read from its checkpoint and checked.

use std::ops::Range;

use fornax_compute::{
    GROUP_MAX, GROUP_VALUES_MAX, Glu, Heads, KvGroup, KvKind, KvLayer, Need, NormKind, Pointwise, Pooling,
    ScanHeads, Temperature, WeightPlace,
};
use fornax_format::{Array, Checkpoint, Value};

use crate::facts::{
    AttentionScale, BiasRule, EmbeddingScale, FirstPosition, LogitScale, ParallelRule, TemperatureRule,
};
use crate::latent::LatentConfig;
use crate::layers::{self, AttentionConfig, KvShape, LayerConfig, Mixer, Mixture};
use crate::loader::{stored_name, tensor};
use crate::names::{Tensor, When};
use crate::recurrent::{StateWidths, checkpoint_every};
use crate::rope::score_growth;
use crate::source::{Json, Key, Source, bad, within};
use crate::{Error, Facts, Rope, Scaling, Stage, TowerConfig};

/// Everything about a model that its code does not already say.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The architecture's row.
    pub facts: Facts,
    /// Blocks, first to last.
    pub layers: Vec<LayerConfig>,
    /// Whether the file has further layers behind them, which only guess ahead and are not computed.
    pub ahead: bool,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the embedding: a tokenizer may know fewer.
    pub vocab: usize,
    /// Positions the model was made for.
    pub context: u32,
    /// Rows of its table of positions that are no position's and come first.
    pub first_position: usize,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Rotary positions.
    pub rope: Rope,
    /// Rotary positions of layers with [`Rotary::Window`](crate::Rotary::Window).
    pub window_rope: Option<Rope>,
    /// By rotating pair, which section of a position turns it; empty where positions have one. Tokens are at the same place in
    /// all of them, so it matters only where something else is given.
    pub sections: Vec<u8>,
    /// Where rows are given in place of tokens, how many layers add what lies behind a row's own values; `None` where only
    /// tokens are read.
    pub levels: Option<usize>,
    /// Whether logits are taken with the embedding.
    pub tied: bool,
    /// Whether the feed-forward of a layer reads what its attention reads, and both are added together.
    pub parallel: bool,
    /// Whether queries and keys are normalised where files of one architecture differ in it.
    pub qk_norm: bool,
    /// Whether Q, K and V have biases.
    pub qkv_bias: bool,
    /// Whether the output of attention has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward has biases.
    pub mlp_bias: bool,
    /// Multiplies query-key products.
    pub attention_scale: f32,
    /// How queries grow with their positions.
    pub temperature: Option<Temperature>,
    /// Whether the choice of experts has a correction where files of one architecture differ in it.
    pub corrected: bool,
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
    /// Multipliers of the parts of a layer.
    pub scales: Scales,
    /// What each layer reads of its tokens beside the residual stream; `None` of most models.
    pub layer_inputs: Option<LayerInputs>,
    /// The activation of the feed-forward.
    pub glu: Glu,
    /// The activation of a feed-forward without gates.
    pub function: Pointwise,
    /// The same by layer, where each has its own.
    pub xielu: Vec<Pointwise>,
    /// Kinds of token that the embedding tells apart; 0 where it does not.
    pub token_types: usize,
    /// How an encoder makes one vector of a text; `None` of decoders.
    pub pooling: Option<Pooling>,
    /// Whether an encoder reads two texts together and has a head that tells how well they fit.
    pub ranks: bool,
    /// What the first of two dense layers behind an encoder's pooled vector makes; 0 where there are none.
    pub dense: usize,
    /// Room for adapters that come while the model is loaded. No file says so: it is none until somebody asks for it.
    pub adapter_room: AdapterRoom,
}

/// How many adapters may come while a model is loaded, and how large they may be: so much memory is planned for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterRoom {
    /// Adapters at once.
    pub adapters: usize,
    /// The largest rank of one.
    pub rank: usize,
}

/// Embeddings that layers have of their own: one table, a row of which is what all layers read of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerInputs {
    /// Values that a layer reads.
    pub width: usize,
    /// Where the table lies. It is larger than all other weights together, and a token reads one row of it, so it is never
    /// copied into a device's own memory.
    pub table_at: WeightPlace,
}

/// Values under one key in each container.
pub(crate) mod key {
    use crate::source::Key;

    const fn key(gguf: &'static str, hugging_face: &'static str) -> Key {
        Key { gguf, hugging_face }
    }

    pub(crate) const HIDDEN: Key = key("embedding_length", "hidden_size");
    pub(crate) const CONTEXT: Key = key("context_length", "max_position_embeddings");
    pub(crate) const RMS_NORM_EPS: Key = key("attention.layer_norm_rms_epsilon", "rms_norm_eps");
    pub(crate) const LAYER_NORM_EPS: Key = key("attention.layer_norm_epsilon", "layer_norm_eps");
    pub(crate) const ATTENTION_SCALE: Key = key("attention.scale", "attention_multiplier");
    pub(crate) const EMBEDDING_SCALE: Key = key("embedding_scale", "embedding_multiplier");
    pub(crate) const RESIDUAL_SCALE: Key = key("residual_scale", "residual_multiplier");
    pub(crate) const LOGITS_SCALING: Key = key("logit_scale", "logits_scaling");
    pub(crate) const LOGIT_SCALE: Key = key("logit_scale", "logit_scale");
    pub(crate) const LAYER_INPUT: Key =
        key("embedding_length_per_layer_input", "hidden_size_per_layer_input");
    pub(crate) const ATTENTION_CAP: Key = key("attn_logit_softcapping", "attn_logit_softcapping");
    pub(crate) const LOGIT_CAP: Key = key("final_logit_softcapping", "final_logit_softcapping");
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
                let text = json.opt_object("text_config")?;
                let of_text = text.map(|text| text.opt_str("model_type")).transpose()?.flatten();
                let model_type = json.opt_str("model_type")?;
                Facts::of_hugging_face(model_type.map(|own| of_wrapped(own, of_text)), &classes)?
            }
        };
        Config::with_facts(checkpoint, facts)
    }

    /// Reads the configuration by the given facts.
    pub fn with_facts(checkpoint: &Checkpoint, facts: &Facts) -> Result<Config, Error> {
        let source = Source::new(checkpoint, facts)?;
        refuse_what_is_not_computed(&source, facts)?;
        let hidden = source.size(key::HIDDEN)?;
        let windows = layers::windows(&source, facts)?;
        let heads = layers::heads(&source, facts, hidden, &windows)?;
        let first_position = first_position(&source, facts)?;
        let context = positions(&source, facts, first_position)?;
        let biases = biases(&source, checkpoint, facts)?;
        let (rope, window_rope) = Rope::read(&source, checkpoint, facts, heads, context)?;
        let rotate = window_rope.is_some();
        let mut layers = layers::read((&source, checkpoint), facts, (hidden, heads), &windows, rotate)?;
        // Files in GGUF do not say it otherwise.
        let norm = stored(checkpoint, facts, Tensor::StateNorm);
        if matches!(source, Source::Gguf { .. }) && tensor(checkpoint, &norm).is_none() {
            let mixers = layers.iter_mut().map(|layer| &mut layer.mixer);
            mixers.for_each(|mixer| {
                if let Mixer::Beside(_, scan) = mixer {
                    scan.normed = false;
                }
            });
        }
        let temperature = temperature(&source, facts, rope.scaling)?;
        let sections = sections(&source, facts, rope.dims / 2)?;
        let scales = Scales::read(&source, facts)?;
        let multipliers = multipliers(&source, facts, hidden)?;
        let xielu = xielu(&source, checkpoint, facts, layers.len())?;
        let caps = facts.soft_caps;
        Ok(Config {
            facts: *facts,
            hidden,
            vocab: vocab(&source, checkpoint, facts)?,
            context,
            first_position,
            norm_eps: norm_eps(&source, facts)?,
            rope,
            window_rope,
            sections,
            levels: None,
            tied: tied(&source, checkpoint, facts)?,
            parallel: parallel(&source, facts)?,
            qk_norm: qk_norm(&source, checkpoint, facts)?,
            qkv_bias: biases.qkv,
            output_bias: biases.output,
            mlp_bias: biases.mlp,
            attention_scale: attention_scale(&source, facts, heads.full, &layers, hidden)? * scales.scores,
            temperature,
            corrected: corrected(checkpoint, facts),
            scales: scales.parts,
            layers,
            ahead: layers::ahead(&source)? > 0,
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
            layer_inputs: layer_inputs(&source, facts)?,
            glu: glu(&source, facts)?,
            function: match xielu.first() {
                Some(first) => *first,
                None => function(&source, facts)?,
            },
            xielu,
            token_types: token_types(&source, facts)?,
            pooling: pooling(&source, checkpoint, facts)?,
            ranks: ranks(&source, checkpoint, facts)?,
            dense: dense(&source, checkpoint, facts, hidden)?,
            adapter_room: AdapterRoom::default(),
        })
    }

    /// Says that rows are given in place of tokens, as this tower makes them.
    pub fn see(&mut self, tower: &TowerConfig) {
        self.levels = Some(tower.levels.len());
    }

    /// Values of a row that may be given in place of a token; `None` where only tokens are read.
    pub fn given(&self) -> Option<usize> {
        self.levels.map(|levels| self.hidden * (1 + levels))
    }

    /// Sections of a position that are told apart: one where only tokens are read.
    pub fn position_sections(&self) -> usize {
        let sections = self.sections.iter().max().map_or(1, |last| usize::from(*last) + 1);
        if self.levels.is_some() { sections } else { 1 }
    }

    /// Says that no sequence will be longer: some models rotate otherwise in long contexts.
    pub fn limit_context(&mut self, context: u32) {
        self.rope.context = context.min(self.context);
    }

    /// Says how an encoder is to pool, whatever its files say.
    pub fn pool_by(&mut self, pooling: Pooling) -> Result<(), Error> {
        match &mut self.pooling {
            Some(own) if !self.ranks => {
                *own = pooling;
                Ok(())
            }
            None if pooling == Pooling::Last => Ok(()),
            own => Err(Error::Unsupported {
                what: format!("pooling {pooling:?} of what is no encoder of single texts").to_lowercase(),
                supported: if own.is_some() { "none".to_owned() } else { "last".to_owned() },
            }),
        }
    }

    /// Says where the experts' weights of some layers lie.
    pub fn place_experts(&mut self, layers: Range<usize>, place: WeightPlace) {
        let count = self.layers.len();
        let layers = &mut self.layers[layers.start.min(count)..layers.end.min(count)];
        let with_experts = layers.iter_mut().filter(|layer| layer.feed_forward.mixture().is_some());
        with_experts.for_each(|layer| layer.experts_at = place);
    }

    /// The experts of the first layer that has some.
    pub fn mixture(&self) -> Option<Mixture> {
        self.layers.iter().find_map(|layer| layer.feed_forward.mixture())
    }

    /// Whether the feed-forward has gates.
    pub fn gated(&self) -> bool {
        self.facts.gated()
    }

    /// What the model needs that not every backend has.
    pub fn needs(&self) -> Vec<Need> {
        let table_at = self.layer_inputs.map(|inputs| inputs.table_at);
        let scaled = self.embedding_scale != 1.0 || self.residual_scale != 1.0 || self.logit_scale != 1.0;
        let needs = [
            (Need::LayerNorm, self.facts.norm == NormKind::Layer),
            (Need::QkNorm, self.qk_norm),
            (Need::Positions, self.facts.has(Tensor::Positions)),
            (
                Need::Pointwise,
                scaled
                    || self.ranks
                    || self.logit_cap.is_some()
                    || (self.facts.has(Tensor::Down) && !self.gated()),
            ),
            (Need::Gelu, self.gated() && matches!(self.glu, Glu::Gelu | Glu::GeluTanh)),
            (Need::SoftCap, self.attention_cap.is_some()),
            (Need::Sinks, self.facts.has(Tensor::Sinks)),
            (Need::Experts, self.mixture().is_some()),
            (Need::GivenRows, self.levels.is_some()),
            (Need::Sections, self.position_sections() > 1),
            (Need::BothDirections, self.pooling.is_some()),
            (
                Need::Reach,
                self.layers.iter().any(|layer| layer.attention().is_some_and(|it| it.reach.is_some())),
            ),
            (Need::Pooling, self.pooling.is_some()),
            (Need::States, !self.state_sizes().is_empty()),
            (Need::ShortConv, !self.state_sizes().is_empty()),
            (Need::SelectiveScan, self.layers.iter().any(|layer| layer.scan().is_some())),
            (Need::ChannelScan, self.layers.iter().any(|layer| layer.channel_scan().is_some())),
            (Need::ColumnFactors, self.scales.gate != 1.0 || self.scales.scan_inputs != ScanScales::ONES),
            (Need::DeltaRule, self.layers.iter().any(|layer| matches!(layer.mixer, Mixer::Delta(_)))),
            (
                Need::GatedNorm,
                self.facts.has(Tensor::StateNorm)
                    || self.layers.iter().any(|layer| layer.channel_scan().is_some()),
            ),
            (Need::SigmoidGate, self.facts.has(Tensor::AttentionGate)),
            (Need::ExpertScales, self.mixture().is_some() && self.facts.has(Tensor::ExpertScales)),
            (Need::PlainExperts, self.mixture().is_some() && !self.gated()),
            (Need::SharedKeys, (0..self.layers.len()).any(|layer| self.keys_of(layer).is_some())),
            (Need::Latent, self.layers.iter().any(|layer| layer.latent().is_some())),
            (Need::Temperature, self.temperature.is_some()),
            (
                Need::Chunks,
                self.layers.iter().any(|layer| layer.attention().is_some_and(|it| it.chunk.is_some())),
            ),
            (Need::WeighedInputs, self.facts.weighs_inputs && self.mixture().is_some()),
            (Need::Xielu, !self.xielu.is_empty()),
            (Need::WideGroups, self.layers.iter().filter_map(LayerConfig::attention).any(is_wide)),
            (Need::LayerEmbeddings, self.layer_inputs.is_some()),
            (Need::HostTables, table_at == Some(WeightPlace::Host)),
            (Need::FileWeights, table_at == Some(WeightPlace::File)),
        ];
        let places = distinct(self.layers.iter().filter_map(|layer| layer.experts_at.need()));
        needs.into_iter().filter(|(_, asked)| *asked).map(|(need, _)| need).chain(places).collect()
    }

    /// The groups of layers that share pages, each with `pages` pages: the layers of one have the same heads of keys and
    /// values and the same window. Behind them those that keep states of one size; a page is then a whole state.
    pub fn kv_groups(&self, pages: usize) -> Vec<KvGroup> {
        self.stage_kv_groups(&Stage::whole(self), pages)
    }

    /// The same groups with the layers of a stage alone, perhaps none: a batch has the same page tables for every stage.
    pub fn stage_kv_groups(&self, stage: &Stage, pages: usize) -> Vec<KvGroup> {
        let own = &self.layers[stage.layers.clone()];
        let group = |shape: &KvShape| KvGroup {
            layers: own.iter().filter(|layer| layer.kv_shape() == Some(*shape)).count(),
            kind: shape.kind,
            window: shape.window,
            pages,
        };
        let every = self.checkpoint_every();
        let states = |&bytes: &usize| KvGroup {
            layers: own.iter().filter(|layer| layer.mixer.state_bytes() == Some(bytes)).count(),
            kind: KvKind::State { bytes, every },
            window: None,
            pages,
        };
        self.kv_shapes().iter().map(group).chain(self.state_sizes().iter().map(states)).collect()
    }

    /// Tokens from one checkpoint of a sequence's states to the next.
    fn checkpoint_every(&self) -> usize {
        let states = self.layers.iter().filter_map(|layer| layer.mixer.state_bytes());
        // Keys and values as they are usually kept: two bytes each.
        let values = |kind: KvKind| match kind {
            KvKind::Pairs { heads, dim_k, dim_v } => heads * (dim_k + dim_v),
            KvKind::Latent { width } => width,
            KvKind::State { .. } => 0,
        };
        let tokens = self.layers.iter().filter_map(LayerConfig::kv_shape).map(|shape| 2 * values(shape.kind));
        checkpoint_every(states.fold(0, usize::saturating_add), tokens.sum())
    }

    /// The layer whose keys and values a layer reads, where it has none of its own.
    pub(crate) fn keys_of(&self, layer: usize) -> Option<usize> {
        self.layers[layer].attention()?.keys_of
    }

    /// Where the keys and values that a layer reads are within [`kv_groups`](Config::kv_groups).
    pub fn kv_layer(&self, layer: usize) -> KvLayer {
        self.stage_kv_layer(&Stage::whole(self), layer)
    }

    /// The same within [`stage_kv_groups`](Config::stage_kv_groups).
    pub(crate) fn stage_kv_layer(&self, stage: &Stage, layer: usize) -> KvLayer {
        let layer = self.keys_of(layer).unwrap_or(layer);
        let shape = self.layers[layer].kv_shape();
        let group = self.kv_shapes().iter().position(|other| Some(*other) == shape);
        let before = &self.layers[stage.layers.start..layer];
        KvLayer {
            group: group.expect("every layer's shape has its group"),
            layer: before.iter().filter(|other| other.kv_shape() == shape).count(),
        }
    }

    /// Where a layer's states are within [`stage_kv_groups`](Config::stage_kv_groups).
    pub(crate) fn stage_state_layer(&self, stage: &Stage, layer: usize) -> KvLayer {
        let bytes = self.layers[layer].mixer.state_bytes();
        let group = self.state_sizes().iter().position(|other| Some(*other) == bytes);
        let before = &self.layers[stage.layers.start..layer];
        KvLayer {
            group: self.kv_shapes().len() + group.expect("every layer's state has its group"),
            layer: before.iter().filter(|other| other.mixer.state_bytes() == bytes).count(),
        }
    }

    /// The heads that products of a stage's layers yield, each once: attention of each has buffers of its own widths.
    pub(crate) fn heads(&self, stage: &Stage) -> Vec<Heads> {
        let attending = self.layers[stage.layers.clone()].iter().filter_map(LayerConfig::attention);
        distinct(attending.map(AttentionConfig::own_heads))
    }

    /// The latent attention of a stage's layers, each kind once.
    pub(crate) fn latents(&self, stage: &Stage) -> Vec<LatentConfig> {
        distinct(self.layers[stage.layers.clone()].iter().filter_map(LayerConfig::latent).copied())
    }

    /// The widths of a stage's layers with states, each once.
    pub(crate) fn state_widths(&self, stage: &Stage) -> Vec<StateWidths> {
        distinct(self.layers[stage.layers.clone()].iter().filter_map(|layer| layer.mixer.widths()))
    }

    /// Inner widths of what every token takes in a stage's layers, each once.
    pub(crate) fn ffns(&self, stage: &Stage) -> Vec<usize> {
        distinct(
            self.layers[stage.layers.clone()]
                .iter()
                .map(|layer| layer.feed_forward.ffn())
                .filter(|ffn| *ffn > 0),
        )
    }

    /// The experts that a stage's layers have, each kind once.
    pub(crate) fn mixtures(&self, stage: &Stage) -> Vec<Mixture> {
        distinct(self.layers[stage.layers.clone()].iter().filter_map(|layer| layer.feed_forward.mixture()))
    }

    /// What groups are told apart by, in the order of their first layers.
    fn kv_shapes(&self) -> Vec<KvShape> {
        distinct(self.layers.iter().filter_map(LayerConfig::kv_shape))
    }

    /// Bytes of the layers' states, each size once.
    fn state_sizes(&self) -> Vec<usize> {
        distinct(self.layers.iter().filter_map(|layer| layer.mixer.state_bytes()))
    }
}

/// The type of the model that reads text where a file's own type only says what sees images beside it.
fn of_wrapped<'a>(own: &'a str, text: Option<&'a str>) -> &'a str {
    match own {
        "mistral3" | "kimi_k25" => text.unwrap_or(own),
        _ => own,
    }
}

/// Whether more queries read a head of keys than every backend has attention of.
fn is_wide(attention: &AttentionConfig) -> bool {
    let Heads { query, kv, dim } = attention.heads;
    query / kv > GROUP_MAX || query / kv * dim > GROUP_VALUES_MAX
}

/// Each of them once, in the order in which they come.
pub(crate) fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut once = Vec::new();
    for one in all {
        if !once.contains(&one) {
            once.push(one);
        }
    }
    once
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

fn norm_eps(source: &Source<'_>, facts: &Facts) -> Result<f32, Error> {
    let key = match facts.norm {
        NormKind::Rms => key::RMS_NORM_EPS,
        NormKind::Layer => key::LAYER_NORM_EPS,
    };
    let said = match (source, source.opt_number(key)?) {
        // The converter writes either norm's under this one where config.json calls it `norm_eps`.
        (Source::Gguf { .. }, None) => source.opt_number(key::RMS_NORM_EPS)?,
        (_, said) => said,
    };
    let said = said.ok_or_else(|| Error::MissingKey { key: source.spelling(key) })?;
    // Above one it would drown what it guards; zero is a choice some models make.
    let eps = within(&source.spelling(key), said, 0.0..=1.0)?;
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
        Source::HuggingFace { json, .. } => {
            // Of a model within another the whole says it, since the head is the whole's.
            let whole = match checkpoint {
                Checkpoint::HuggingFace(model) => {
                    Json::new("config.json", model.config())?.opt_bool("tie_word_embeddings")?
                }
                Checkpoint::Gguf(_) => None,
            };
            // What only embeds may leave its head out, whatever it says.
            let embeds = match checkpoint {
                Checkpoint::HuggingFace(model) => model.pooling().is_some(),
                Checkpoint::Gguf(_) => false,
            };
            let said = whole.or(json.opt_bool("tie_word_embeddings")?);
            Ok((absent && embeds) || said.unwrap_or(absent))
        }
    }
}

/// GGUF files show it.
fn qk_norm(source: &Source<'_>, checkpoint: &Checkpoint, facts: &Facts) -> Result<bool, Error> {
    if facts.unit_norms {
        return match source {
            // They do not say it; of the two models that there are the one with more experts has none.
            Source::Gguf { .. } => Ok(source.opt_whole(layers::EXPERTS)? != Some(128)),
            Source::HuggingFace { json, .. } => Ok(json.opt_bool("use_qk_norm")?.unwrap_or(true)),
        };
    }
    match (facts.row(Tensor::QueryNorm), source) {
        (None, _) => Ok(false),
        (Some(row), _) if row.when != When::QkNorm => Ok(true),
        (_, Source::Gguf { .. }) => {
            Ok(tensor(checkpoint, &stored(checkpoint, facts, Tensor::QueryNorm)).is_some())
        }
        (_, Source::HuggingFace { json, .. }) => Ok(json.opt_bool("use_qk_norm")?.unwrap_or(false)),
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
        (rule @ (BiasRule::Configured | BiasRule::QkvConfigured), Source::HuggingFace { json, .. }) => {
            let said = |key| Ok::<_, Error>(json.opt_bool(facts.own(key))?.unwrap_or(false));
            let output = if rule == BiasRule::Configured { "attention_bias" } else { "attention_out_bias" };
            Biases { qkv: said("attention_bias")?, output: said(output)?, mlp: said("mlp_bias")? }
        }
        (BiasRule::Configured | BiasRule::QkvConfigured, Source::Gguf { .. }) => Biases {
            qkv: has(Tensor::QueryBias),
            output: has(Tensor::AttentionOutputBias),
            mlp: has(Tensor::DownBias),
        },
    })
}

fn attention_scale(
    source: &Source<'_>,
    facts: &Facts,
    heads: Heads,
    layers: &[LayerConfig],
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
        (AttentionScale::One, _) => Ok(1.0),
        (AttentionScale::HeadSize, _) => Ok(head_size),
        (AttentionScale::KeySize, _) => {
            let latent = layers.iter().find_map(LayerConfig::latent);
            let size = latent.map_or(heads.dim, LatentConfig::query);
            Ok((score_growth(source, facts, source.positions(key::CONTEXT)?)? / (size as f64).sqrt()) as f32)
        }
        (AttentionScale::PreAttentionScalar { .. }, Source::HuggingFace { .. }) => {
            let scalar = Key { gguf: "", hugging_face: "query_pre_attn_scalar" };
            Ok(root(within(&source.spelling(scalar), source.number(scalar)?, 1e-6..=1e9)?))
        }
        (AttentionScale::PreAttentionScalar { layers: largest }, _) if layers.len() == largest => {
            Ok(root((hidden / heads.query) as f64))
        }
        (AttentionScale::PreAttentionScalar { .. }, _) => Ok(head_size),
    }
}

/// How queries grow with their positions: by the length before yarn, unless a GGUF file has another.
fn temperature(source: &Source<'_>, facts: &Facts, scaling: Scaling) -> Result<Option<Temperature>, Error> {
    const BETA: Key = Key { gguf: "attention.temperature_scale", hugging_face: "llama_4_scaling_beta" };
    const LENGTH: Key = Key { gguf: "attention.temperature_length", hugging_face: "" };
    let Some(rule) = facts.temperature else { return Ok(None) };
    if rule.unrotated {
        return unrotated_temperature(source, facts, rule);
    }
    let beta = match source {
        Source::Gguf { .. } => source.opt_number(BETA)?.or(rule.gguf_beta),
        Source::HuggingFace { json, .. } => {
            let parameters = match json.opt_object("rope_parameters")? {
                Some(parameters) => Some(parameters),
                None => json.opt_object("rope_scaling")?,
            };
            parameters.map(|parameters| parameters.opt_f64(BETA.hugging_face)).transpose()?.flatten()
        }
    };
    // Zero is none.
    let Some(beta) = beta.filter(|beta| *beta != 0.0) else { return Ok(None) };
    let beta = within(&source.spelling(BETA), beta, 0.0..=1e3)? as f32;
    let said = if let Source::Gguf { .. } = source { source.opt_number(LENGTH)? } else { None };
    let length = match (said, scaling) {
        (Some(length), _) => length,
        (None, Scaling::Yarn { original_context, .. }) => original_context,
        (None, _) => {
            return Err(Error::Unsupported {
                what: format!("{} {beta} without yarn", source.spelling(BETA)),
                supported: "yarn, whose original context is its length".to_owned(),
            });
        }
    };
    let length = within("the length by which queries grow", length, 1.0..=f64::from(u32::MAX))?;
    #[expect(clippy::cast_sign_loss, reason = "it is at least one")]
    let length = length as u32;
    Ok(Some(Temperature { beta, length, offset: 0 }))
}

/// The same of models in which layers that do not rotate alone have it. GGUF files do not say it: all have the same.
fn unrotated_temperature(
    source: &Source<'_>,
    facts: &Facts,
    rule: TemperatureRule,
) -> Result<Option<Temperature>, Error> {
    let (beta, length) = (rule.gguf_beta.unwrap_or(0.0), 8192);
    if layers::has_no_chunks(source, facts)? {
        return Ok(None);
    }
    let Source::HuggingFace { json, .. } = source else {
        return Ok(Some(Temperature { beta: beta as f32, length, offset: 1 }));
    };
    // Some files have a number for it.
    if json.get("attn_temperature_tuning").is_some_and(|tuned| *tuned == false || *tuned == 0) {
        return Ok(None);
    }
    let beta = within("attn_scale", json.opt_f64("attn_scale")?.unwrap_or(beta), 0.0..=1e3)? as f32;
    let said = json.opt_u64("floor_scale")?.unwrap_or(u64::from(length));
    let length = u32::try_from(said).ok().filter(|length| *length > 0);
    let length = length.ok_or_else(|| bad("floor_scale", said, "at least 1 and below 2^32"))?;
    Ok(Some(Temperature { beta, length, offset: 1 }))
}

/// What each layer's feed-forward has in place of a function that all share. Numbers of Hugging Face files are tensors.
fn xielu(
    source: &Source<'_>,
    checkpoint: &Checkpoint,
    facts: &Facts,
    layers: usize,
) -> Result<Vec<Pointwise>, Error> {
    if !facts.xielu {
        return Ok(Vec::new());
    }
    let listed = |key: &str, tensor: Tensor| -> Result<Vec<f32>, Error> {
        let numbers = match source {
            Source::Gguf { metadata, .. } => {
                let key = format!("xielu.{key}");
                match metadata.get(&key) {
                    Some(Value::Array(Array::F32(all))) => all.clone(),
                    Some(_) => vec![metadata.opt_f32(&key)?.unwrap_or(f32::NAN); layers],
                    None => return Err(Error::MissingKey { key }),
                }
            }
            Source::HuggingFace { .. } => (0..layers)
                .map(|layer| crate::loader::number(checkpoint, facts, tensor, layer))
                .collect::<Result<_, _>>()?,
        };
        match numbers.iter().find(|number| !number.is_finite()) {
            Some(other) => Err(bad(&format!("xielu.{key}"), other, "finite numbers")),
            None if numbers.len() == layers => Ok(numbers),
            None => {
                Err(bad(&format!("xielu.{key}"), format!("{} numbers", numbers.len()), "one for each layer"))
            }
        }
    };
    let softplus = |x: f32| f64::from(x).exp().ln_1p() as f32;
    let (positive, negative) =
        (listed("alpha_p", Tensor::XieluPositive)?, listed("alpha_n", Tensor::XieluNegative)?);
    let (beta, eps) = (listed("beta", Tensor::XieluBeta)?, listed("eps", Tensor::XieluEps)?);
    Ok((0..layers)
        .map(|layer| Pointwise::Xielu {
            positive: softplus(positive[layer]),
            negative: beta[layer] + softplus(negative[layer]),
            beta: beta[layer],
            eps: eps[layer],
        })
        .collect())
}

/// Whether the choice of experts has a correction; GGUF files of architectures whose models differ in it show it.
fn corrected(checkpoint: &Checkpoint, facts: &Facts) -> bool {
    let Some(row) = facts.row(Tensor::RouterCorrection) else { return false };
    match checkpoint {
        Checkpoint::Gguf(_) if row.when == When::Corrected => layers::is_in_a_layer(checkpoint, facts, row),
        _ => true,
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
        logits: logit_scale(source, facts)? as f32,
    })
}

/// What the parts of a layer are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales {
    /// What attention adds to the residual stream.
    pub attention: f32,
    /// What a selective scan adds.
    pub scan: f32,
    /// What the feed-forward adds.
    pub mlp: f32,
    /// Its gates.
    pub gate: f32,
    /// What goes into a selective scan.
    pub scan_inputs: ScanScales,
}

/// What goes into a selective scan is multiplied by these.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScanScales {
    /// The gates.
    pub gates: f32,
    /// The values.
    pub values: f32,
    /// The keys.
    pub keys: f32,
    /// The queries.
    pub queries: f32,
    /// How long steps are.
    pub steps: f32,
}

impl ScanScales {
    /// Nothing is changed.
    pub const ONES: ScanScales = ScanScales { gates: 1.0, values: 1.0, keys: 1.0, queries: 1.0, steps: 1.0 };

    /// The factor of each column, in the order in which a layer computes them.
    pub(crate) fn columns(&self, heads: ScanHeads) -> Vec<f32> {
        let (values, shared) = (heads.heads * heads.dim, heads.groups * heads.state);
        [
            vec![self.values; values],
            vec![self.keys; shared],
            vec![self.queries; shared],
            vec![self.gates; values],
            vec![self.steps; heads.heads],
        ]
        .concat()
    }
}

/// The scales, and what scores of attention are multiplied by besides.
struct ReadScales {
    parts: Scales,
    scores: f32,
}

impl Scales {
    const ONES: Scales =
        Scales { attention: 1.0, scan: 1.0, mlp: 1.0, gate: 1.0, scan_inputs: ScanScales::ONES };

    fn read(source: &Source<'_>, facts: &Facts) -> Result<ReadScales, Error> {
        let none = ReadScales { parts: Scales::ONES, scores: 1.0 };
        let Source::HuggingFace { json, .. } = source else { return Ok(none) };
        if !facts.part_multipliers {
            return Ok(none);
        }
        let one = |key: &str| -> Result<f32, Error> {
            let number = json.opt_f64(key)?.unwrap_or(1.0);
            Ok(within(&json.spelling(key), number, -1e6..=1e6)? as f32)
        };
        let list = |key: &str, count: usize| -> Result<Vec<f32>, Error> {
            let Some(list) = json.opt_f64s(key)? else { return Ok(vec![1.0; count]) };
            if list.len() != count {
                return Err(bad(&json.spelling(key), format!("{} numbers", list.len()), &count.to_string()));
            }
            let number = |number: f64| Ok(within(&json.spelling(key), number, -1e6..=1e6)? as f32);
            list.into_iter().map(number).collect()
        };
        let (input, mlp) = (one("attention_in_multiplier")?, list("mlp_multipliers", 2)?);
        let scans = list("ssm_multipliers", 5)?;
        let of_scan = one("ssm_in_multiplier")?;
        Ok(ReadScales {
            parts: Scales {
                // Values are multiplied by what goes in, and what comes out is linear in them.
                attention: input * one("attention_out_multiplier")?,
                scan: one("ssm_out_multiplier")?,
                mlp: mlp[1],
                gate: mlp[0],
                scan_inputs: ScanScales {
                    gates: of_scan * scans[0],
                    values: of_scan * scans[1],
                    keys: of_scan * scans[2],
                    queries: of_scan * scans[3],
                    steps: of_scan * scans[4],
                },
            },
            scores: input * input * one("key_multiplier")?,
        })
    }
}

/// What logits are multiplied by; zero is none.
fn logit_scale(source: &Source<'_>, facts: &Facts) -> Result<f64, Error> {
    let said = |key| Ok::<_, Error>(source.opt_number(key)?.filter(|number| *number != 0.0).unwrap_or(1.0));
    match facts.logit_scale {
        LogitScale::None => Ok(1.0),
        LogitScale::Divides => Ok(1.0 / said(key::LOGITS_SCALING)?),
        LogitScale::Multiplies => said(key::LOGIT_SCALE),
    }
}

/// Zero and null are none.
fn layer_inputs(source: &Source<'_>, facts: &Facts) -> Result<Option<LayerInputs>, Error> {
    let key = key::LAYER_INPUT;
    let null = matches!(source, Source::HuggingFace { json, .. } if json.has(key.hugging_face) && json.get(key.hugging_face).is_none());
    if !facts.has(Tensor::LayerTable) || null || source.opt_whole(key)?.unwrap_or(0) == 0 {
        return Ok(None);
    }
    Ok(Some(LayerInputs { width: source.size(key)?, table_at: WeightPlace::Host }))
}

fn parallel(source: &Source<'_>, facts: &Facts) -> Result<bool, Error> {
    let said = match (facts.parallel, source) {
        (ParallelRule::Never, _) => return Ok(false),
        (ParallelRule::Always, _) => return Ok(true),
        (ParallelRule::Configured, Source::Gguf { metadata, architecture }) => {
            metadata.opt_bool(&format!("{architecture}.{PARALLEL}"))?
        }
        (ParallelRule::Configured, Source::HuggingFace { json, .. }) => json.opt_bool(PARALLEL)?,
    };
    Ok(said.unwrap_or(true))
}

const PARALLEL: &str = "use_parallel_residual";

fn glu(source: &Source<'_>, facts: &Facts) -> Result<Glu, Error> {
    let key = source.own(Key { gguf: "", hugging_face: "hidden_act" });
    let said = match source {
        Source::Gguf { metadata, architecture } => {
            metadata.opt_str(&format!("{architecture}.hidden_activation"))?
        }
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
        Some("xielu") if facts.xielu => facts.glu,
        // Without gates it is the function below.
        Some("relu" | "relu2") if !facts.gated() => facts.glu,
        Some("silu" | "swish" | "swiglu") => Glu::Silu,
        Some("gelu") => Glu::Gelu,
        Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Glu::GeluTanh,
        Some(other) => {
            let supported = "silu, gelu, gelu_new, gelu_pytorch_tanh".to_owned();
            return Err(Error::Unsupported { what: format!("{key} {other:?}"), supported });
        }
    };
    let own = facts.function.is_some() || facts.xielu;
    if glu == Glu::Silu && facts.has(Tensor::Down) && !facts.gated() && !own {
        let what = "silu without gates".to_owned();
        return Err(Error::Unsupported { what, supported: "gelu, gelu_new, gelu_pytorch_tanh".to_owned() });
    }
    Ok(glu)
}

/// The activation of a feed-forward without gates.
fn function(source: &Source<'_>, facts: &Facts) -> Result<Pointwise, Error> {
    let said = match source {
        Source::Gguf { .. } => None,
        Source::HuggingFace { json, .. } => {
            json.opt_str(source.own(Key { gguf: "", hugging_face: "hidden_act" }))?
        }
    };
    Ok(match (said, facts.function) {
        (Some("relu"), _) => Pointwise::Relu,
        (Some("relu2"), _) => Pointwise::ReluSquared,
        (None, Some(function)) => function,
        _ if glu(source, facts)? == Glu::GeluTanh => Pointwise::GeluTanh,
        _ => Pointwise::Gelu,
    })
}

/// By pair its section: they take turns, the first ones as long as they have pairs left, and what is left over is the first's.
fn sections(source: &Source<'_>, facts: &Facts, pairs: usize) -> Result<Vec<u8>, Error> {
    const SECTIONS: Key = Key { gguf: "rope.dimension_sections", hugging_face: "mrope_section" };
    let Some(default) = facts.sections else { return Ok(Vec::new()) };
    let (name, said) = match source {
        Source::Gguf { metadata, .. } => {
            let name = source.spelling(SECTIONS);
            let said = metadata.opt_u32s(&name)?.map(|said| said.iter().map(|&n| u64::from(n)).collect());
            (name, said)
        }
        Source::HuggingFace { json, .. } => {
            let inside = match json.opt_object("rope_parameters")? {
                None => json.opt_object("rope_scaling")?,
                inside => inside,
            };
            let said = inside.map(|inside| inside.opt_u64s(SECTIONS.hugging_face)).transpose()?.flatten();
            if let Some(false) =
                inside.map(|inside| inside.opt_bool("mrope_interleaved")).transpose()?.flatten()
            {
                return Err(bad("mrope_interleaved", false, "true"));
            }
            (SECTIONS.hugging_face.to_owned(), said)
        }
    };
    // The default is that of the published models; another size of head is said with its own, where images are read.
    let fits = |counts: &[u64; 3]| counts.iter().sum::<u64>() == pairs as u64;
    let counts: Vec<u64> = match said {
        Some(said) => said,
        None if fits(&default) => default.to_vec(),
        None => return Ok(Vec::new()),
    };
    let sum = counts.iter().fold(0u64, |sum, count| sum.saturating_add(*count));
    let others = counts.iter().skip(3).any(|count| *count > 0);
    let (&[_, height, width], false) = (&counts[..counts.len().min(3)], others) else {
        return Err(bad(&name, format!("{counts:?}"), "pairs of time, height and width"));
    };
    if sum != pairs as u64 {
        return Err(bad(&name, format!("{counts:?}"), &format!("{pairs} pairs together")));
    }
    let section = |pair: u64| match pair % 3 {
        1 if pair < 3 * height => 1,
        2 if pair < 3 * width => 2,
        _ => 0,
    };
    Ok((0..pairs as u64).map(section).collect())
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

/// The first position's row of the table of positions.
fn first_position(source: &Source<'_>, facts: &Facts) -> Result<usize, Error> {
    match (facts.first_position, source) {
        (FirstPosition::Zero, _) | (_, Source::Gguf { .. }) => Ok(0),
        (FirstPosition::Third, _) => Ok(2),
        (FirstPosition::BehindPadding, Source::HuggingFace { json, .. }) => {
            let padding = json.opt_u64("pad_token_id")?.unwrap_or(1);
            let first = usize::try_from(padding).ok().and_then(|padding| padding.checked_add(1));
            first.ok_or_else(|| bad("pad_token_id", padding, "a token"))
        }
    }
}

/// Positions the model was made for. Some files count the rows of the table before the first, too.
fn positions(source: &Source<'_>, facts: &Facts, first: usize) -> Result<u32, Error> {
    let all = source.positions(key::CONTEXT)?;
    if facts.first_position != FirstPosition::BehindPadding {
        return Ok(all);
    }
    let left = u32::try_from(first).ok().and_then(|first| all.checked_sub(first)).filter(|left| *left > 0);
    left.ok_or_else(|| bad(&source.spelling(key::CONTEXT), all, &format!("more than the first {first}")))
}

/// Whether the file says that it classifies, which is computed where there is one class: how well two texts fit. A GGUF file
/// has the head.
fn ranks(source: &Source<'_>, checkpoint: &Checkpoint, facts: &Facts) -> Result<bool, Error> {
    let refuse = |labels: usize| {
        Err(Error::Unsupported {
            what: format!("a classifier of {labels} classes"),
            supported: "one class: how well two texts fit".to_owned(),
        })
    };
    let json = match source {
        _ if !facts.encoder => return Ok(false),
        Source::Gguf { metadata, architecture } => {
            let ranks = metadata.opt_u32(&format!("{architecture}.pooling_type"))? == Some(RANKS);
            let head = tensor(checkpoint, &stored(checkpoint, facts, Tensor::Classifier));
            return match head.as_ref().map(|head| &head.shape[..]) {
                Some([labels, _]) if *labels != 1 => refuse(*labels),
                head => Ok(ranks || head.is_some()),
            };
        }
        Source::HuggingFace { json, .. } => json,
    };
    let classes = json.opt_strs("architectures")?.unwrap_or_default();
    if !classes.iter().any(|class| class.ends_with("ForSequenceClassification")) {
        return Ok(false);
    }
    // Where the classes have no names there are two.
    let names = json.get("id2label").and_then(|names| names.as_object()).map(serde_json::Map::len);
    let labels = names.or(json.opt_u64("num_labels")?.and_then(|count| usize::try_from(count).ok()));
    match labels.unwrap_or(2) {
        1 => Ok(true),
        labels => refuse(labels),
    }
}

/// What GGUF files say of how they pool where they rank.
const RANKS: u32 = 4;

/// What the first of two dense layers behind pooling makes.
fn dense(source: &Source<'_>, checkpoint: &Checkpoint, facts: &Facts, hidden: usize) -> Result<usize, Error> {
    let modules = match checkpoint {
        Checkpoint::HuggingFace(model) => model.dense(),
        Checkpoint::Gguf(_) if facts.has(Tensor::DenseUp) => {
            return Ok(source.opt_size(Key { gguf: "dense_2_feat_out", hugging_face: "" })?.unwrap_or(0));
        }
        Checkpoint::Gguf(_) => return Ok(0),
    };
    match modules {
        [] => Ok(0),
        [up, down]
            if facts.has(Tensor::DenseUp)
                && (up.folder.as_str(), down.folder.as_str()) == ("2_Dense", "3_Dense")
                && (up.inputs, down.outputs) == (hidden, hidden)
                && up.outputs == down.inputs =>
        {
            Ok(up.outputs)
        }
        modules => Err(Error::Unsupported {
            what: format!("{} dense layers behind the {} architecture", modules.len(), facts.name),
            supported: "none, or two from the hidden size and back to it of gemma-embedding".to_owned(),
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
                _ if ranks(source, checkpoint, facts)? => ranking_pooling(source, facts)?,
                None | Some(1) => Pooling::Mean,
                Some(2) => Pooling::First,
                Some(3) => Pooling::Last,
                Some(other) => return refuse(format!("{key} {other}")),
            }
        }
        (_, Checkpoint::HuggingFace(_)) if ranks(source, checkpoint, facts)? => {
            ranking_pooling(source, facts)?
        }
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

/// What the head of a model that ranks reads: the first row, unless it may be said.
fn ranking_pooling(source: &Source<'_>, facts: &Facts) -> Result<Pooling, Error> {
    let said = match source {
        // Every file with such a head is read so by those that write them.
        Source::Gguf { .. } if facts.has(Tensor::PoolerNorm) => return Ok(Pooling::Mean),
        Source::Gguf { .. } => None,
        Source::HuggingFace { json, .. } => json.opt_str("classifier_pooling")?,
    };
    match said {
        None | Some("cls") => Ok(Pooling::First),
        Some("mean") => Ok(Pooling::Mean),
        Some(other) => Err(Error::Unsupported {
            what: format!("classifier_pooling {other:?}"),
            supported: "cls, mean".to_owned(),
        }),
    }
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
            let positions = json.opt_str("position_embedding_type")?.filter(|_| facts.has(Tensor::Positions));
            if let Some(kind) = positions.filter(|kind| *kind != "absolute") {
                return refuse(format!("position_embedding_type {kind:?}"), "absolute");
            }
            // Of models that see images it may be a word, which holds for images alone but where it is this one.
            let said = json.get("use_bidirectional_attention");
            let both = said.is_some_and(|both| *both == true || both == "all");
            if both != facts.encoder && (both || facts.model_types.is_empty()) {
                return refuse(
                    format!("use_bidirectional_attention {both} in the {} architecture", facts.name),
                    if facts.encoder { "true" } else { "false" },
                );
            }
            if json.opt_bool("alibi")? == Some(true) {
                return refuse("attention biased by distance (alibi true)".to_owned(), "rotary positions");
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
