//! A tower's tensors by their names in both containers.

use std::collections::HashSet;

use fornax_compute::cpu::expand_rows;
use fornax_compute::{Linear, Memory, Norm, NormKind, Part};
use fornax_format::{Checkpoint, DType, View};

use super::config::{Spelling, TowerConfig};
use crate::Error;

/// Hands a tower its weights.
pub(super) struct Weights<'a, M> {
    checkpoint: &'a Checkpoint,
    config: &'a TowerConfig,
    pub(super) memory: &'a M,
    /// The tensors that were asked for.
    known: HashSet<String>,
    progress: &'a mut dyn FnMut(u64),
}

/// A linear layer, or a norm: what stands before `weight` and `bias`.
#[derive(Clone, Copy)]
pub(super) enum Name {
    Patch,
    AttentionNorm(usize),
    Qkv(usize),
    AttentionOutput(usize),
    MlpNorm(usize),
    Up(usize),
    Down(usize),
    MergerNorm,
    MergerUp,
    MergerDown,
    /// Which of the levels.
    LevelNorm(usize),
    LevelUp(usize),
    LevelDown(usize),
}

impl Name {
    fn spelt(self, config: &TowerConfig) -> String {
        let level = |at: usize| config.levels[at];
        match config.spelling {
            Spelling::HuggingFace(beginning) => {
                let own = match self {
                    Name::Patch => "patch_embed.proj".to_owned(),
                    Name::AttentionNorm(block) => format!("blocks.{block}.norm1"),
                    Name::Qkv(block) => format!("blocks.{block}.attn.qkv"),
                    Name::AttentionOutput(block) => format!("blocks.{block}.attn.proj"),
                    Name::MlpNorm(block) => format!("blocks.{block}.norm2"),
                    Name::Up(block) => format!("blocks.{block}.mlp.linear_fc1"),
                    Name::Down(block) => format!("blocks.{block}.mlp.linear_fc2"),
                    Name::MergerNorm => "merger.norm".to_owned(),
                    Name::MergerUp => "merger.linear_fc1".to_owned(),
                    Name::MergerDown => "merger.linear_fc2".to_owned(),
                    Name::LevelNorm(at) => format!("deepstack_merger_list.{at}.norm"),
                    Name::LevelUp(at) => format!("deepstack_merger_list.{at}.linear_fc1"),
                    Name::LevelDown(at) => format!("deepstack_merger_list.{at}.linear_fc2"),
                };
                format!("{beginning}{own}")
            }
            Spelling::Gguf(_) => match self {
                Name::Patch => "v.patch_embd".to_owned(),
                Name::AttentionNorm(block) => format!("v.blk.{block}.ln1"),
                Name::Qkv(block) => format!("v.blk.{block}.attn_qkv"),
                Name::AttentionOutput(block) => format!("v.blk.{block}.attn_out"),
                Name::MlpNorm(block) => format!("v.blk.{block}.ln2"),
                Name::Up(block) => format!("v.blk.{block}.ffn_up"),
                Name::Down(block) => format!("v.blk.{block}.ffn_down"),
                Name::MergerNorm => "v.post_ln".to_owned(),
                Name::MergerUp => "mm.0".to_owned(),
                Name::MergerDown => "mm.2".to_owned(),
                Name::LevelNorm(at) => format!("v.deepstack.{}.norm", level(at)),
                Name::LevelUp(at) => format!("v.deepstack.{}.fc1", level(at)),
                Name::LevelDown(at) => format!("v.deepstack.{}.fc2", level(at)),
            },
        }
    }
}

/// A product and what is added to it.
pub(super) struct Layer<M: Memory> {
    pub(super) weight: M::Weight,
    pub(super) bias: M::Buf,
}

impl<M: Memory> Layer<M> {
    pub(super) fn linear(&self) -> Linear<'_, M> {
        Linear { weight: &self.weight, bias: Some(&self.bias) }
    }
}

impl<'a, M: Memory> Weights<'a, M> {
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        config: &'a TowerConfig,
        memory: &'a M,
        progress: &'a mut dyn FnMut(u64),
    ) -> Weights<'a, M> {
        Weights { checkpoint, config, memory, known: HashSet::new(), progress }
    }

    /// A linear layer of this shape.
    pub(super) fn layer(&mut self, name: Name, rows: usize, columns: usize) -> Result<Layer<M>, Error> {
        let name = name.spelt(self.config);
        let view = self.view(format!("{name}.weight"), &[rows, columns])?;
        let bytes = view.bytes.len() as u64;
        let weight = self.memory.upload(&[Part::from(view.clone())])?;
        view.release();
        (self.progress)(bytes);
        Ok(Layer { weight, bias: self.vector(format!("{name}.bias"), rows)? })
    }

    /// A norm of rows of so many values.
    pub(super) fn norm(&mut self, name: Name, columns: usize) -> Result<Norm<M::Buf>, Error> {
        let name = name.spelt(self.config);
        Ok(Norm {
            kind: NormKind::Layer,
            weight: self.vector(format!("{name}.weight"), columns)?,
            bias: Some(self.vector(format!("{name}.bias"), columns)?),
            eps: self.config.norm_eps,
        })
    }

    /// What makes rows of patches. The files have it for two frames that follow each other; those of a still picture are the
    /// same, so the sum of both is all that is needed.
    pub(super) fn patches(&mut self) -> Result<Layer<M>, Error> {
        let TowerConfig { hidden, patch, spelling, .. } = *self.config;
        let name = Name::Patch.spelt(self.config);
        let plane = patch * patch;
        let frames: Vec<Vec<f32>> = match spelling {
            Spelling::HuggingFace(_) => {
                vec![self.numbers(format!("{name}.weight"), &[hidden, 3, 2, patch, patch])?]
            }
            Spelling::Gguf(_) => ["weight", "weight.1"]
                .iter()
                .map(|end| self.numbers(format!("{name}.{end}"), &[hidden, 3, patch, patch]))
                .collect::<Result<_, _>>()?,
        };
        let sums: Vec<f32> = match &frames[..] {
            // (hidden, colours, frames, pixels)
            [both] => both
                .chunks_exact(2 * plane)
                .flat_map(|pair| {
                    pair[..plane].iter().zip(&pair[plane..]).map(|(first, second)| first + second)
                })
                .collect(),
            [first, second] => first.iter().zip(second).map(|(first, second)| first + second).collect(),
            _ => unreachable!("one tensor or two"),
        };
        let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        let view = View::new("patches", DType::F32, vec![hidden, 3 * plane], &bytes)?;
        let weight = self.memory.upload(&[Part::from(view)])?;
        Ok(Layer { weight, bias: self.vector(format!("{name}.bias"), hidden)? })
    }

    /// The learned positions, (positions x positions, hidden).
    pub(super) fn positions(&mut self) -> Result<Vec<f32>, Error> {
        let TowerConfig { hidden, positions, spelling, .. } = *self.config;
        let name = match spelling {
            Spelling::HuggingFace(beginning) => format!("{beginning}pos_embed.weight"),
            Spelling::Gguf(_) => "v.position_embd.weight".to_owned(),
        };
        self.numbers(name, &[positions * positions, hidden])
    }

    /// Refuses tensors of the tower that nobody asked for: leaving one out would compute another one.
    pub(super) fn finish(self) -> Result<(), Error> {
        let unknown = |name: &str| !self.known.contains(name);
        let unknown = match (self.config.spelling, self.checkpoint) {
            (Spelling::Gguf(file), Checkpoint::Gguf(gguf)) => {
                gguf.beside()[file].tensors().map(|view| view.name).find(|name| unknown(name))
            }
            (Spelling::HuggingFace(beginning), Checkpoint::HuggingFace(model)) => {
                let mut names = model.weights().tensors().map(|view| view.name);
                names.find(|name| name.starts_with(beginning) && unknown(name))
            }
            _ => None,
        };
        match unknown {
            Some(name) => Err(Error::UnknownTensor { tensor: name.to_owned(), architecture: "Qwen vision" }),
            None => Ok(()),
        }
    }

    fn vector(&mut self, name: String, values: usize) -> Result<M::Buf, Error> {
        let view = self.view(name, &[values])?;
        Ok(self.memory.upload_vector(&[Part::from(view)])?)
    }

    /// The numbers of a tensor; of a plan, as many zeros.
    fn numbers(&mut self, name: String, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let view = self.view(name, shape)?;
        if !self.memory.reads() {
            return Ok(vec![0.0; shape.iter().product()]);
        }
        let row = View::new(view.name, view.dtype, vec![1, view.values()], view.bytes)?;
        let mut numbers = Vec::new();
        expand_rows(&Part::from(row), |_, values| {
            numbers.extend_from_slice(values);
            Ok(())
        })?;
        view.release();
        Ok(numbers)
    }

    /// A tensor as it lies in its file: nothing of a tower is brought into another type.
    fn view(&mut self, name: String, shape: &[usize]) -> Result<View<'a>, Error> {
        let found = match (self.config.spelling, self.checkpoint) {
            (Spelling::Gguf(file), Checkpoint::Gguf(gguf)) => gguf.beside()[file].tensor(&name),
            (Spelling::HuggingFace(_), Checkpoint::HuggingFace(model)) => model.weights().tensor(&name),
            _ => None,
        };
        let Some(mut view) = found else { return Err(Error::MissingTensor { tensor: name }) };
        if view.shape != shape {
            return Err(Error::TensorShape { tensor: name, got: view.shape, wanted: shape.to_vec() });
        }
        view.lands = None;
        self.known.insert(name);
        Ok(view)
    }
}
