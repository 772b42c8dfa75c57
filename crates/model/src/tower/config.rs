//! What a checkpoint says of its tower.

use fornax_format::{Checkpoint, Gguf, Metadata};

use crate::source::{Json, SIZE_MAX, bad};
use crate::{Config, Error};

/// Sizes of a tower, and where its tensors are.
#[derive(Clone, Debug, PartialEq)]
pub struct TowerConfig {
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
    /// Learned positions on a side of their square.
    pub positions: usize,
    /// Values of a row that the language model reads.
    pub out: usize,
    /// Blocks whose rows go into the first layers of the language model, one behind the other.
    pub levels: Vec<usize>,
    /// What norms add to the variance.
    pub norm_eps: f32,
    /// What the container calls its tensors.
    pub(super) spelling: Spelling,
}

/// How tensors are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Behind this beginning, in the model's own files.
    HuggingFace(&'static str),
    /// As llama.cpp names them, in this file of those beside the model's.
    Gguf(usize),
}

/// The projector's name in GGUF.
const PROJECTOR: &str = "qwen3vl_merger";

/// Beginnings of the tensors' names in Hugging Face directories.
const BEGINNINGS: [&str; 2] = ["model.visual.", "visual."];

/// More is no tower of today, and products of what is read stay far below 64 bits.
const PATCH_MAX: usize = 64;
const MERGE_MAX: usize = 8;
const BLOCKS_MAX: usize = 512;
const LEVELS_MAX: usize = 16;

impl TowerConfig {
    /// The tower that a checkpoint has beside a model whose architecture has one; `None` where there is none, as in a GGUF
    /// file without the one beside it.
    pub fn read(checkpoint: &Checkpoint, config: &Config) -> Result<Option<TowerConfig>, Error> {
        if config.facts.sections.is_none() {
            return Ok(None);
        }
        let tower = match checkpoint {
            Checkpoint::HuggingFace(model) => {
                let json = Json::new("", model.config())?;
                let vision = json.opt_object("vision_config")?;
                let names = || model.weights().tensors().map(|view| view.name.to_owned());
                let there = |beginning: &&&str| names().any(|name| name.starts_with(**beginning));
                match (vision, BEGINNINGS.iter().find(there)) {
                    (Some(vision), Some(beginning)) => {
                        Some(TowerConfig::of_json(&vision, Spelling::HuggingFace(beginning))?)
                    }
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
                    Some(at) => Some(TowerConfig::of_metadata(gguf.beside()[at].metadata(), at)?),
                    None => None,
                }
            }
        };
        let Some(tower) = tower else { return Ok(None) };
        tower.check(config)?;
        if config.sections.is_empty() {
            return Err(Error::MissingKey { key: "mrope_section".to_owned() });
        }
        Ok(Some(tower))
    }

    fn of_json(json: &Json<'_>, spelling: Spelling) -> Result<TowerConfig, Error> {
        const ACTIVATION: &str = "gelu_pytorch_tanh";
        let size = |key: &str, default: Option<usize>, most: usize| match (json.opt_u64(key)?, default) {
            (None, Some(default)) => Ok(default),
            (None, None) => Err(Error::MissingKey { key: format!("vision_config.{key}") }),
            (Some(size), _) => sized(&format!("vision_config.{key}"), size, most),
        };
        for (key, wanted) in [("in_channels", 3), ("temporal_patch_size", 2)] {
            if let Some(said) = json.opt_u64(key)?.filter(|said| *said != wanted) {
                return Err(bad(&format!("vision_config.{key}"), said, &wanted.to_string()));
            }
        }
        if let Some(said) = json.opt_str("hidden_act")?.filter(|said| *said != ACTIVATION) {
            return Err(bad("vision_config.hidden_act", said, ACTIVATION));
        }
        if let Some(rope) = json.opt_object("rope_parameters")?
            && let Some(base) = rope.opt_f64("rope_theta")?.filter(|base| *base != super::ROPE_BASE)
        {
            return Err(bad("vision_config.rope_parameters.rope_theta", base, &super::ROPE_BASE.to_string()));
        }
        let blocks = size("depth", None, BLOCKS_MAX)?;
        let levels = json.opt_u64s("deepstack_visual_indexes")?.unwrap_or_default();
        let levels = levels.iter().map(|level| usize::try_from(*level).unwrap_or(usize::MAX)).collect();
        Ok(TowerConfig {
            hidden: size("hidden_size", None, SIZE_MAX)?,
            ffn: size("intermediate_size", None, SIZE_MAX)?,
            heads: size("num_heads", None, SIZE_MAX)?,
            blocks,
            patch: size("patch_size", Some(16), PATCH_MAX)?,
            merge: size("spatial_merge_size", Some(2), MERGE_MAX)?,
            positions: side(
                "vision_config.num_position_embeddings",
                json.opt_u64("num_position_embeddings")?.unwrap_or(2304),
            )?,
            out: size("out_hidden_size", None, SIZE_MAX)?,
            levels,
            norm_eps: 1e-6,
            spelling,
        })
    }

    fn of_metadata(metadata: &Metadata, file: usize) -> Result<TowerConfig, Error> {
        let projector = match metadata.opt_str("clip.vision.projector_type")? {
            Some(projector) => projector,
            None => metadata.str("clip.projector_type")?,
        };
        if projector != PROJECTOR {
            return Err(Error::Unsupported {
                what: format!("images by the projector {projector:?}"),
                supported: format!("{PROJECTOR:?} (Qwen3-VL and Qwen3.5)"),
            });
        }
        let size = |key: &str, most: usize| {
            let key = format!("clip.vision.{key}");
            sized(&key, metadata.u64(&key)?, most)
        };
        let patch = size("patch_size", PATCH_MAX)?;
        let blocks = size("block_count", BLOCKS_MAX)?;
        let levels = match metadata.get("clip.vision.is_deepstack_layers") {
            None => Vec::new(),
            Some(fornax_format::Value::Array(fornax_format::Array::Bool(layers))) => {
                layers.iter().enumerate().filter(|(_, is)| **is).map(|(at, _)| at).collect()
            }
            Some(other) => {
                return Err(bad("clip.vision.is_deepstack_layers", other.type_name(), "a list of booleans"));
            }
        };
        let eps = metadata.f32("clip.vision.attention.layer_norm_epsilon")?;
        Ok(TowerConfig {
            hidden: size("embedding_length", SIZE_MAX)?,
            ffn: size("feed_forward_length", SIZE_MAX)?,
            heads: size("attention.head_count", SIZE_MAX)?,
            blocks,
            patch,
            merge: match metadata.opt_u64("clip.vision.spatial_merge_size")? {
                Some(merge) => sized("clip.vision.spatial_merge_size", merge, MERGE_MAX)?,
                None => 2,
            },
            positions: (size("image_size", SIZE_MAX)? / patch).max(1),
            out: size("projection_dim", SIZE_MAX)?,
            levels,
            norm_eps: crate::source::within(
                "clip.vision.attention.layer_norm_epsilon",
                f64::from(eps),
                0.0..=1.0,
            )? as f32,
            spelling: Spelling::Gguf(file),
        })
    }

    fn check(&self, config: &Config) -> Result<(), Error> {
        let wrong = |key: &str, got: String, wanted: String| Err(bad(key, got, &wanted));
        if !self.hidden.is_multiple_of(self.heads) || !(self.hidden / self.heads).is_multiple_of(4) {
            let wanted = "heads of a multiple of four values";
            return wrong(
                "num_heads",
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
