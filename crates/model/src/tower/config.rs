//! What a checkpoint says of its tower.

use fornax_format::{Checkpoint, Gguf, HuggingFace, Metadata};

use super::facts::{Beginning, Ending, Part, Positions, Rotary, TowerFacts};
use super::head::HeadLayout;
use crate::source::{Json, SIZE_MAX, bad, within};
use crate::{Config, Error};

/// Sizes of a tower, and where its tensors are.
#[derive(Clone, Debug, PartialEq)]
pub struct TowerConfig {
    pub(super) facts: &'static TowerFacts,
    /// Values of a patch's row.
    pub hidden: usize,
    /// Inner width of the feed-forward.
    pub ffn: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Blocks.
    pub blocks: usize,
    /// Pixels on a side of a patch.
    pub patch: usize,
    /// Patches on a side of what becomes one row.
    pub merge: usize,
    /// Learned positions on a side of their square, or along each axis.
    pub positions: usize,
    /// Values of a row that the language model reads.
    pub out: usize,
    /// Blocks whose rows go into the first layers of the language model, one behind the other.
    pub levels: Vec<usize>,
    /// What norms add to the variance.
    pub norm_eps: f32,
    /// What the language model multiplies rows by before anything else: they are divided by it, since it is not meant
    /// for them.
    pub(super) multiplied: f32,
    /// What the container calls its tensors.
    pub(super) spelling: Spelling,
}

/// How tensors are named.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Spelling {
    /// Behind these beginnings, in the model's own files.
    HuggingFace(&'static Beginning),
    /// As llama.cpp names them, in this file of those beside the model's.
    Gguf(usize),
}

/// More is no tower of today, and products of what is read stay far below 64 bits.
const PATCH_MAX: usize = 64;
const MERGE_MAX: usize = 8;
const BLOCKS_MAX: usize = 512;
const LEVELS_MAX: usize = 16;

/// Where a model's rows of patches are and what is known of it besides.
struct Beside<'a> {
    facts: &'static TowerFacts,
    config: &'a Config,
}

impl TowerConfig {
    /// The tower that a checkpoint has beside a model whose architecture has one; `None` where there is none, as in a GGUF
    /// file without the one beside it.
    pub fn read(checkpoint: &Checkpoint, config: &Config) -> Result<Option<TowerConfig>, Error> {
        let Some(facts) = config.facts.tower else { return Ok(None) };
        let beside = Beside { facts, config };
        let tower = match checkpoint {
            Checkpoint::HuggingFace(model) => {
                let json = Json::new("", model.config())?;
                match (json.opt_object("vision_config")?, beside.beginning(model)) {
                    (Some(vision), Some(beginning)) => Some(beside.of_json(&json, &vision, beginning)?),
                    // A directory of the language model alone.
                    _ => None,
                }
            }
            Checkpoint::Gguf(gguf) => {
                let sees = |file: &&Gguf| {
                    let architecture = file.metadata().opt_str("general.architecture").ok().flatten();
                    architecture == Some("clip")
                        && opt_bool(file.metadata(), "clip.has_vision_encoder") != Some(false)
                };
                match gguf.beside().iter().position(|file| sees(&file)) {
                    Some(at) => Some(beside.of_gguf(gguf, at)?),
                    None => None,
                }
            }
        };
        let Some(tower) = tower else { return Ok(None) };
        tower.check(config)?;
        if config.facts.sections.is_some() && config.sections.is_empty() {
            return Err(Error::MissingKey { key: "mrope_section".to_owned() });
        }
        Ok(Some(tower))
    }

    fn check(&self, config: &Config) -> Result<(), Error> {
        let wrong = |key: &str, got: String, wanted: String| Err(bad(key, got, &wanted));
        let turns = if self.facts.rotary.is_some() { 4 } else { 1 };
        if !self.hidden.is_multiple_of(self.heads) || !(self.hidden / self.heads).is_multiple_of(turns) {
            let wanted = "heads of a multiple of four values";
            return wrong(
                self.facts.keys.heads,
                format!("{} of {} values", self.heads, self.hidden),
                wanted.to_owned(),
            );
        }
        if self.out != config.hidden {
            return wrong(
                "out_hidden_size",
                self.out.to_string(),
                format!("the language model's {}", config.hidden),
            );
        }
        if self.levels.len() > LEVELS_MAX.min(config.layers.len()) {
            return wrong(
                "deepstack_visual_indexes",
                self.levels.len().to_string(),
                "at most the layers".to_owned(),
            );
        }
        let ascend = self.levels.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascend || self.levels.last().is_some_and(|last| *last >= self.blocks) {
            return wrong(
                "deepstack_visual_indexes",
                format!("{:?}", self.levels),
                "blocks, ascending".to_owned(),
            );
        }
        if self.facts.positions == Positions::Square && !self.positions.is_multiple_of(self.merge) {
            return wrong(
                "mm_tokens_per_image",
                format!("rows of {} patches on a side of {}", self.merge, self.positions),
                "whole rows".to_owned(),
            );
        }
        Ok(())
    }

    /// Values of a row that it makes of each token of a picture.
    pub fn columns(&self) -> usize {
        self.out * (1 + self.levels.len())
    }

    /// Values of a patch: of each pixel red, green and blue.
    pub fn patch_values(&self) -> usize {
        3 * self.patch * self.patch
    }

    /// `clip.projector_type` of such towers in GGUF, by which families are told apart.
    pub fn projector(&self) -> &'static str {
        self.facts.projector
    }

    /// Patches on each side of every picture, if all are alike.
    pub fn square(&self) -> Option<usize> {
        (self.facts.positions == Positions::Square).then_some(self.positions)
    }

    /// The shape of what was learned for places.
    pub(super) fn table(&self) -> Vec<usize> {
        match self.facts.positions {
            Positions::Stretched | Positions::Square => vec![self.positions * self.positions, self.hidden],
            Positions::ByAxis => vec![2, self.positions, self.hidden],
        }
    }

    pub(super) fn head_layout(&self) -> HeadLayout {
        HeadLayout::new(self.hidden / self.heads, self.facts.rotary.map(|Rotary { pairs, .. }| pairs))
    }

    /// Values that the patches of a row become before the last layers.
    pub(super) fn merged(&self) -> usize {
        match self.facts.ending {
            Ending::Merged => self.hidden * self.merge * self.merge,
            Ending::Pooled { .. } => self.hidden,
        }
    }
}

impl Beside<'_> {
    /// What the names of a directory's tensors begin with.
    fn beginning(&self, model: &HuggingFace) -> Option<&'static Beginning> {
        let first = self.facts.name_of(Part::Patch)?.hugging_face;
        let there = |beginning: &&Beginning| {
            let name = format!("{}{first}.weight", beginning.tower);
            model.weights().tensor(&name).is_some()
        };
        self.facts.beginnings.iter().find(there)
    }

    fn of_json(
        &self,
        whole: &Json<'_>,
        json: &Json<'_>,
        beginning: &'static Beginning,
    ) -> Result<TowerConfig, Error> {
        let (facts, keys) = (self.facts, self.facts.keys);
        let size = |key: &str, default: Option<usize>, most: usize| match (json.opt_u64(key)?, default) {
            (None, Some(default)) => Ok(default),
            (None, None) => Err(Error::MissingKey { key: format!("vision_config.{key}") }),
            (Some(size), _) => sized(&format!("vision_config.{key}"), size, most),
        };
        let heads = size(keys.heads, None, SIZE_MAX)?;
        let hidden = size("hidden_size", None, SIZE_MAX)?;
        let head = (hidden / heads) as u64;
        for (key, wanted) in [
            ("in_channels", 3),
            ("num_channels", 3),
            ("temporal_patch_size", 2),
            ("num_key_value_heads", heads as u64),
            ("head_dim", head),
        ] {
            if let Some(said) = json.opt_u64(key)?.filter(|said| *said != wanted) {
                return Err(bad(&format!("vision_config.{key}"), said, &wanted.to_string()));
            }
        }
        const ACTIVATION: &str = "gelu_pytorch_tanh";
        if let Some(said) = json.opt_str(keys.activation)?.filter(|said| *said != ACTIVATION) {
            return Err(bad(&format!("vision_config.{}", keys.activation), said, ACTIVATION));
        }
        if let (Some(rope), Some(rotary)) = (json.opt_object("rope_parameters")?, facts.rotary)
            && let Some(base) = rope.opt_f64("rope_theta")?.filter(|base| *base != rotary.base)
        {
            let key = "vision_config.rope_parameters.rope_theta";
            return Err(bad(key, base, &rotary.base.to_string()));
        }
        let patch = size("patch_size", Some(16), PATCH_MAX)?;
        let levels = json.opt_u64s("deepstack_visual_indexes")?.unwrap_or_default();
        let levels = levels.iter().map(|level| usize::try_from(*level).unwrap_or(usize::MAX)).collect();
        let positions = match facts.positions {
            Positions::Stretched => side(
                "vision_config.num_position_embeddings",
                json.opt_u64("num_position_embeddings")?.unwrap_or(2304),
            )?,
            Positions::Square => size("image_size", Some(224), SIZE_MAX)? / patch,
            Positions::ByAxis => size("position_embedding_size", Some(10_240), SIZE_MAX)?,
        };
        let merge = match keys.merge {
            Some(key) => size(key, Some(facts.merge), MERGE_MAX)?,
            None => {
                let key = "mm_tokens_per_image";
                let rows = side(key, whole.opt_u64(key)?.unwrap_or(256))?;
                match positions / rows {
                    merge if (1..=MERGE_MAX).contains(&merge) && merge * rows == positions => merge,
                    _ => {
                        return Err(bad(
                            key,
                            rows * rows,
                            &format!("rows of {positions} x {positions} patches"),
                        ));
                    }
                }
            }
        };
        let eps = keys.eps.map(|key| json.opt_f64(key)).transpose()?.flatten().unwrap_or(1e-6);
        Ok(TowerConfig {
            facts,
            hidden,
            ffn: size("intermediate_size", None, SIZE_MAX)?,
            heads,
            blocks: size(keys.blocks, None, BLOCKS_MAX)?,
            patch,
            merge,
            positions,
            out: match json.opt_u64("out_hidden_size")? {
                Some(out) => sized("vision_config.out_hidden_size", out, SIZE_MAX)?,
                None => self.config.hidden,
            },
            levels,
            norm_eps: within("vision_config.layer_norm_eps", eps, 0.0..=1.0)? as f32,
            multiplied: self.config.embedding_scale,
            spelling: Spelling::HuggingFace(beginning),
        })
    }

    fn of_gguf(&self, gguf: &Gguf, at: usize) -> Result<TowerConfig, Error> {
        let (facts, file) = (self.facts, &gguf.beside()[at]);
        let metadata = file.metadata();
        let projector = match metadata.opt_str("clip.vision.projector_type")? {
            Some(projector) => projector,
            None => metadata.str("clip.projector_type")?,
        };
        if projector != facts.projector {
            return Err(Error::Unsupported {
                what: format!("images by the projector {projector:?}"),
                supported: format!("{:?} ({}) beside this model", facts.projector, facts.name),
            });
        }
        let size = |key: &str, most: usize| {
            let key = format!("clip.vision.{key}");
            sized(&key, metadata.u64(&key)?, most)
        };
        let patch = size("patch_size", PATCH_MAX)?;
        let levels = match metadata.get("clip.vision.is_deepstack_layers") {
            None => Vec::new(),
            Some(fornax_format::Value::Array(fornax_format::Array::Bool(layers))) => {
                layers.iter().enumerate().filter(|(_, is)| **is).map(|(at, _)| at).collect()
            }
            Some(other) => {
                return Err(bad("clip.vision.is_deepstack_layers", other.type_name(), "a list of booleans"));
            }
        };
        let positions = match facts.positions {
            Positions::Stretched | Positions::Square => (size("image_size", SIZE_MAX)? / patch).max(1),
            // Only the table itself says how long it is.
            Positions::ByAxis => {
                let name = facts.name_of(Part::Positions).map_or("", |row| row.gguf);
                let missing = || Error::MissingTensor { tensor: format!("{name}.weight") };
                let table = file.tensor(&format!("{name}.weight")).ok_or_else(missing)?;
                sized(name, table.shape.get(1).map_or(0, |size| *size as u64), SIZE_MAX)?
            }
        };
        let mut merge = facts.merge;
        for key in ["clip.vision.spatial_merge_size", "clip.vision.projector.scale_factor"] {
            if let Some(said) = metadata.opt_u64(key)? {
                merge = sized(key, said, MERGE_MAX)?;
            }
        }
        let key = "clip.vision.attention.layer_norm_epsilon";
        let eps = f64::from(metadata.f32(key)?);
        Ok(TowerConfig {
            facts,
            hidden: size("embedding_length", SIZE_MAX)?,
            ffn: size("feed_forward_length", SIZE_MAX)?,
            heads: size("attention.head_count", SIZE_MAX)?,
            blocks: size("block_count", BLOCKS_MAX)?,
            patch,
            merge,
            positions,
            out: size("projection_dim", SIZE_MAX)?,
            levels,
            norm_eps: within(key, eps, 0.0..=1.0)? as f32,
            multiplied: self.config.embedding_scale,
            spelling: Spelling::Gguf(at),
        })
    }
}

fn opt_bool(metadata: &Metadata, key: &str) -> Option<bool> {
    metadata.opt_bool(key).ok().flatten()
}

fn sized(key: &str, size: u64, most: usize) -> Result<usize, Error> {
    match usize::try_from(size) {
        Ok(size) if (1..=most).contains(&size) => Ok(size),
        _ => Err(bad(key, size, &format!("1 to {most}"))),
    }
}

/// The side of a square of so many places.
fn side(key: &str, places: u64) -> Result<usize, Error> {
    let side = places.isqrt();
    if side * side != places {
        return Err(bad(key, places, "a square"));
    }
    sized(key, side, SIZE_MAX)
}
