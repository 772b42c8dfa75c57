//! A model of a Hugging Face directory as a GGUF file holds it: the tables of names read from one container and written for
//! the other.

use std::collections::HashMap;

use fornax_compute::cpu::expand_rows;
use fornax_compute::{Memory, Part};
use fornax_format::{Checkpoint, DType, View};

use crate::export::pairs::CONVERTED;
use crate::loader::{BLOCKS, Loader, Stored, expected, numbers, parts, stored_name, tensor_names};
use crate::names::{Name, Owner, Tensor, Transform};
use crate::{Config, Dim, Error, Rope, Scaling, Stage};

mod pairs;

pub use pairs::Pairs;

/// A model on its way into a GGUF file.
pub struct Export<'a, M> {
    loader: Loader<'a, M>,
    checkpoint: &'a Checkpoint,
    tensors: Vec<Exported>,
}

/// A tensor of the GGUF file.
#[derive(Debug)]
pub struct Exported {
    /// Its name there.
    pub name: String,
    /// Slowest dimension first.
    pub shape: Vec<usize>,
    /// The type that holds it as it is stored, where that is no float: it is kept whatever others become.
    pub kept: Option<DType>,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// A weight of the checkpoint.
    Weight {
        /// Its row of the table.
        row: &'static Name,
        layer: usize,
        /// How many experts it is of, where it is of experts.
        experts: Option<usize>,
    },
    /// What the checkpoint has in its configuration.
    Values(Vec<f32>),
}

/// Architectures that can be exported, by their names in the table of facts.
pub fn exportable() -> impl Iterator<Item = &'static str> {
    CONVERTED.iter().map(|converted| converted.facts)
}

/// Hands `run` the checkpoint as a GGUF file holds it. A container or an architecture that is not exported is refused, and so is
/// a checkpoint that could not be loaded. `memory` says how weights are read; nothing is uploaded to it.
pub fn export<M: Memory, R, E: From<Error>>(
    checkpoint: &Checkpoint,
    config: &Config,
    memory: &M,
    run: impl FnOnce(&Export<'_, M>) -> Result<R, E>,
) -> Result<R, E> {
    let facts = &config.facts;
    if matches!(checkpoint, Checkpoint::Gguf(_)) {
        let what = "exporting a GGUF file".to_owned();
        return Err(Error::Unsupported { what, supported: "a Hugging Face directory".to_owned() }.into());
    }
    if pairs::of(facts).is_none() {
        let supported = exportable().collect::<Vec<_>>().join(", ");
        let what = format!("exporting the architecture {:?}", facts.name);
        return Err(Error::Unsupported { what, supported }.into());
    }
    let (stage, mut silent) = (Stage::whole(config), |_, _| {});
    let loader = Loader::new(checkpoint, (config, &stage), &[], memory, &mut silent)?;
    let tensors = tensors(checkpoint, config)?;
    run(&Export { loader, checkpoint, tensors })
}

impl Exported {
    /// Whether the checkpoint has it in its configuration.
    pub fn is_of_configuration(&self) -> bool {
        matches!(self.content, Content::Values(_))
    }
}

impl<M: Memory> Export<'_, M> {
    /// What the file says that it is.
    pub fn architecture(&self) -> &'static str {
        pairs::of(&self.loader.config.facts).map_or("", |converted| converted.architecture)
    }

    /// The tensors in the order of the file: what comes of the configuration, then as the checkpoint has them.
    pub fn tensors(&self) -> &[Exported] {
        &self.tensors
    }

    /// What the file says of the model, under complete keys.
    pub fn pairs(&self) -> Result<Pairs, Error> {
        pairs::pairs(self.checkpoint, self.loader.config)
    }

    /// Visits the values of a tensor, in order, in rows of the fastest dimension or whole.
    pub fn visit<E: From<Error>>(
        &self,
        tensor: &Exported,
        visit: &mut dyn FnMut(&[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Content::Weight { row, layer, experts } = tensor.content else {
            let Content::Values(values) = &tensor.content else { return Ok(()) };
            return visit(values);
        };
        for expert in 0..experts.unwrap_or(1) {
            let mut stored = self.loader.one(row.tensor, layer, experts.map(|_| expert))?;
            self.order(&mut stored, layer);
            self.read(&stored, visit)?;
            stored.part.view.release();
        }
        Ok(())
    }

    /// Rows that rotate are stored in the order of the file, and were asked for in that of every backend.
    fn order(&self, stored: &mut Stored<'_>, layer: usize) {
        let config = self.loader.config;
        let (Transform::QkRows, Some(attention)) = (stored.row.transform, config.layers[layer].attention())
        else {
            return;
        };
        let rows = stored.part.view.shape[0];
        let Some(of_file) = config.facts.gguf_qk_rows.to_halves(rows, attention.heads.dim, config.rope.dims)
        else {
            return;
        };
        let asked = |row: usize| stored.part.rows.as_ref().map_or(row as u32, |rows| rows[row]);
        let mut ordered = vec![0; rows];
        of_file.iter().enumerate().for_each(|(row, place)| ordered[*place as usize] = asked(row));
        stored.part.rows = Some(ordered);
    }

    fn read<E: From<Error>>(
        &self,
        stored: &Stored<'_>,
        visit: &mut dyn FnMut(&[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let facts = &self.loader.config.facts;
        let parts = parts(std::slice::from_ref(stored))?;
        let part = &parts[0];
        if part.view.shape.len() == 1 {
            let mut values = numbers(part)?;
            if let Some(rows) = &part.rows {
                values = rows.iter().map(|row| values[*row as usize]).collect();
            }
            if stored.row.is_less_one(facts) {
                values.iter_mut().for_each(|value| *value += 1.0);
            }
            return visit(&values);
        }
        let mut error = None;
        let matrix = matrix(part)?;
        expand_rows(matrix.as_ref().unwrap_or(part), |_, values| {
            if error.is_none() {
                error = visit(values).err();
            }
            Ok(())
        })
        .map_err(Error::from)?;
        error.map_or(Ok(()), Err)
    }
}

/// What has more than two dimensions, as rows of the fastest one.
fn matrix<'a>(part: &Part<'a>) -> Result<Option<Part<'a>>, Error> {
    let view = &part.view;
    let Some((&columns, slower @ [_, _, ..])) = view.shape.split_last() else { return Ok(None) };
    let shape = vec![slower.iter().product(), columns];
    Ok(Some(Part::from(View::new(view.name, view.dtype, shape, view.bytes)?)))
}

/// The tensors that the file has, in its order.
fn tensors(checkpoint: &Checkpoint, config: &Config) -> Result<Vec<Exported>, Error> {
    let facts = &config.facts;
    let places: HashMap<&str, usize> =
        tensor_names(checkpoint).into_iter().enumerate().map(|(place, name)| (name, place)).collect();
    let mut placed = Vec::new();
    let mut first = Vec::new();
    for (number, row) in facts.rows().enumerate() {
        let layers = if row.owner == Owner::Layer { config.layers.len() } else { 1 };
        for layer in 0..layers {
            let name = match row.owner {
                Owner::Model => row.gguf.to_owned(),
                Owner::Layer => format!("blk.{layer}.{}", row.gguf),
            };
            if let Some(values) = of_configuration(row.tensor, &config.rope) {
                let shape = vec![values.len()];
                first.push(Exported { name, shape, kept: None, content: Content::Values(values) });
                continue;
            }
            if !row.when.holds(config, layer) || row.gguf.is_empty() {
                continue;
            }
            let Some(stored) = stored_name(checkpoint, facts, row, layer) else { continue };
            if !is_carried(row.transform) {
                return Err(Error::Unsupported {
                    what: format!("exporting tensor {stored:?}"),
                    supported: "tensors whose rows every container has".to_owned(),
                });
            }
            let shape: Vec<usize> = row.shape.iter().map(|dim| dim.size(config, layer)).collect();
            let experts =
                (row.shape.first() == Some(&Dim::Experts) && is_of_experts(row.tensor)).then(|| shape[0]);
            let names = expected(checkpoint, config, (row, layer), stored);
            let place = names.iter().filter_map(|expected| places.get(&*expected.name)).max();
            let in_blocks = names.first().is_some_and(|expected| expected.name.ends_with(BLOCKS));
            let kept = in_blocks.then_some(DType::MXFP4);
            let content = Content::Weight { row, layer, experts };
            let exported = Exported { name, shape, kept, content };
            // The converter writes what stays in blocks first.
            let place = (!in_blocks, place.copied().unwrap_or_default(), number);
            placed.push((place, exported));
        }
    }
    // The converter writes the factors of long contexts first.
    first.sort_by(|a: &Exported, b| a.name.cmp(&b.name));
    placed.sort_by_key(|(place, _)| *place);
    Ok(first.into_iter().chain(placed.into_iter().map(|(_, tensor)| tensor)).collect())
}

/// Whether each expert has a matrix, or a vector, of its own; routers have a row for each.
fn is_of_experts(tensor: Tensor) -> bool {
    use Tensor::*;
    matches!(tensor, ExpertGate | ExpertUp | ExpertDown | ExpertGateBias | ExpertUpBias | ExpertDownBias)
}

/// Whether loading leaves rows as GGUF files have them, but for the order of those that rotate.
fn is_carried(transform: Transform) -> bool {
    use Transform::*;
    matches!(
        transform,
        Keep | QkRows
            | FromFirst
            | Ungrouped
            | Transposed
            | Alternate(_)
            | AlternateRows(_)
            | TransposedRows(_)
            | Stacked(..)
            | Below(_)
    )
}

/// What GGUF files have as tensors and Hugging Face directories in config.json.
fn of_configuration(tensor: Tensor, rope: &Rope) -> Option<Vec<f32>> {
    match (tensor, rope.scaling) {
        (Tensor::RopeFactors, Scaling::Llama3 { .. }) => Some(llama3_factors(rope)),
        (Tensor::RopeFactors, _) if !rope.factors.is_empty() => Some(rope.factors.clone()),
        (Tensor::RopeFactorsLong, _) => rope.long.as_ref().map(|long| long.factors.clone()),
        _ => None,
    }
}

/// What the frequencies of Llama 3 are divided by: in f32 as the converter computes it, so that the bits are the same.
fn llama3_factors(rope: &Rope) -> Vec<f32> {
    let Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } = rope.scaling else {
        return Vec::new();
    };
    let (factor, low, high) = (factor as f32, low_freq_factor as f32, high_freq_factor as f32);
    let (original, dims) = (original_context as f32, rope.dims as f32);
    let (longest, shortest) = (original / low, original / high);
    let of_pair = |pair: usize| {
        let frequency = 1.0 / (rope.base as f32).powf((2 * pair) as f32 / dims);
        let wave = std::f32::consts::TAU / frequency;
        match () {
            () if wave < shortest => 1.0,
            () if wave > longest => factor,
            () => {
                let smooth = (original / wave - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        }
    };
    (0..rope.dims / 2).map(of_pair).collect()
}

impl Config {
    /// In what another configuration would compute something else, by its fields. Numbers that went through f32 may differ by
    /// its last bits.
    pub fn differences(&self, other: &Config) -> Vec<&'static str> {
        let near = |a: f32, b: f32| (a - b).abs() <= 1e-6 * a.abs().max(b.abs());
        let turn_alike = |a: &Rope, b: &Rope| {
            let (own, others) = (a.frequencies(), b.frequencies());
            own.len() == others.len()
                && own.iter().zip(&others).all(|(a, b)| near(*a, *b))
                && near(a.magnitude(), b.magnitude())
                && a.long.as_ref().map(|long| long.original_context)
                    == b.long.as_ref().map(|long| long.original_context)
        };
        let windows = match (&self.window_rope, &other.window_rope) {
            (Some(own), Some(other)) => turn_alike(own, other),
            (None, None) => true,
            _ => false,
        };
        let scales = [
            (self.norm_eps, other.norm_eps),
            (self.attention_scale, other.attention_scale),
            (self.embedding_scale, other.embedding_scale),
            (self.residual_scale, other.residual_scale),
            (self.logit_scale, other.logit_scale),
        ];
        let same = [
            ("layers", self.layers == other.layers),
            ("hidden", self.hidden == other.hidden),
            ("vocab", self.vocab == other.vocab),
            ("context", self.context == other.context),
            ("rotary positions", turn_alike(&self.rope, &other.rope) && windows),
            ("sections of positions", self.sections == other.sections),
            ("the head's weight", self.tied == other.tied),
            ("parallel branches", self.parallel == other.parallel),
            ("norms of queries and keys", self.qk_norm == other.qk_norm),
            (
                "biases",
                (self.qkv_bias, self.output_bias, self.mlp_bias)
                    == (other.qkv_bias, other.output_bias, other.mlp_bias),
            ),
            ("scales and the norms' epsilon", scales.iter().all(|(a, b)| near(*a, *b))),
            ("temperature", self.temperature == other.temperature),
            ("the correction of routing", self.corrected == other.corrected),
            ("caps", (self.attention_cap, self.logit_cap) == (other.attention_cap, other.logit_cap)),
            ("scales of parts", self.scales == other.scales),
            ("inputs of layers", self.layer_inputs == other.layer_inputs),
            ("the activation", (self.glu, self.function) == (other.glu, other.function)),
            ("pooling", (self.pooling, self.ranks, self.dense) == (other.pooling, other.ranks, other.dense)),
        ];
        same.into_iter().filter(|(_, same)| !same).map(|(what, _)| what).collect()
    }
}
