//! From named views to weights in memory: every tensor found, its shape checked, its rows put in order, its bytes
//! reported.

use std::collections::HashSet;

use fornax_compute::{Memory, Part};
use fornax_format::{Checkpoint, View};

use crate::names::{self, Name, Owner, Tensor, Transform};
use crate::{Config, Error};

/// Hands a model its weights by their canonical names.
pub(crate) struct Loader<'a, M> {
    pub(crate) config: &'a Config,
    pub(crate) memory: &'a M,
    checkpoint: &'a Checkpoint,
    progress: &'a mut dyn FnMut(u64, u64),
    bytes_done: u64,
    bytes_total: u64,
}

impl<'a, M: Memory> Loader<'a, M> {
    /// Checks that the checkpoint has every tensor of the model, in its shape, and none beside, before any is loaded.
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        config: &'a Config,
        memory: &'a M,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Loader<'a, M>, Error> {
        let mut wanted = HashSet::new();
        let mut bytes_total = 0;
        for row in config.facts.names.iter().filter(|row| row.when.holds(config)) {
            let layers = if row.owner == Owner::Layer { config.layers } else { 1 };
            for layer in 0..layers {
                let Some(name) = stored_name(checkpoint, row, layer) else { continue };
                let view = tensor(checkpoint, &name).ok_or(Error::MissingTensor { tensor: name.clone() })?;
                check_shape(&view, row, config)?;
                // The factors were read with the configuration.
                if row.tensor != Tensor::RopeFactors {
                    bytes_total += view.bytes.len() as u64;
                }
                wanted.insert(name);
            }
        }
        for name in tensor_names(checkpoint) {
            if !wanted.contains(name) && !is_redundant(checkpoint, config, name) {
                let architecture = config.facts.name;
                return Err(Error::UnknownTensor { tensor: name.to_owned(), architecture });
            }
        }
        progress(0, bytes_total);
        Ok(Loader { config, memory, checkpoint, progress, bytes_done: 0, bytes_total })
    }

    /// One weight of tensors stacked by their rows.
    pub(crate) fn weight(&mut self, tensors: &[Tensor], layer: usize) -> Result<M::Weight, Error> {
        let parts = self.parts(tensors, layer)?;
        let weight = self.memory.upload(&parts)?;
        self.report(&parts);
        Ok(weight)
    }

    /// One weight whose rows are looked up, and multiplied by where the model is tied.
    pub(crate) fn table(&mut self, tensor: Tensor) -> Result<M::Weight, Error> {
        let parts = self.parts(&[tensor], 0)?;
        let table = self.memory.upload_table(&parts, self.config.tied)?;
        self.report(&parts);
        Ok(table)
    }

    /// One row of vectors put end to end.
    pub(crate) fn vector(&mut self, tensors: &[Tensor], layer: usize) -> Result<M::Buf, Error> {
        let parts = self.parts(tensors, layer)?;
        let vector = self.memory.upload_vector(&parts)?;
        self.report(&parts);
        Ok(vector)
    }

    /// Like [`vector`](Loader::vector), `None` when the model has no such biases.
    pub(crate) fn bias(&mut self, tensors: &[Tensor], layer: usize) -> Result<Option<M::Buf>, Error> {
        let has = |tensor: &Tensor| self.config.facts.row(*tensor).when.holds(self.config);
        if tensors.iter().all(has) { self.vector(tensors, layer).map(Some) } else { Ok(None) }
    }

    fn parts(&self, tensors: &[Tensor], layer: usize) -> Result<Vec<Part<'a>>, Error> {
        tensors.iter().map(|&tensor| self.part(self.config.facts.row(tensor), layer)).collect()
    }

    fn part(&self, row: &Name, layer: usize) -> Result<Part<'a>, Error> {
        let name = stored_name(self.checkpoint, row, layer).unwrap_or_else(|| row.gguf.to_owned());
        let view = tensor(self.checkpoint, &name).ok_or(Error::MissingTensor { tensor: name })?;
        let (heads, rope) = (self.config.heads, &self.config.rope);
        let rows = match (row.transform, self.checkpoint) {
            (Transform::QkRows, Checkpoint::Gguf(_)) => {
                self.config.facts.gguf_qk_rows.to_halves(view.shape[0], heads.dim, rope.dims)
            }
            _ => None,
        };
        Ok(Part { rows, ..Part::from(view) })
    }

    fn report(&mut self, parts: &[Part<'_>]) {
        self.bytes_done += parts.iter().map(|part| part.view.bytes.len() as u64).sum::<u64>();
        (self.progress)(self.bytes_done, self.bytes_total);
    }
}

/// A stored tensor, whatever the container.
pub(crate) fn tensor<'a>(checkpoint: &'a Checkpoint, name: &str) -> Option<View<'a>> {
    match checkpoint {
        Checkpoint::Gguf(gguf) => gguf.tensor(name),
        Checkpoint::HuggingFace(model) => model.weights().tensor(name),
    }
}

/// The name of a weight in this container; `None` where the container keeps it elsewhere.
pub(crate) fn stored_name(checkpoint: &Checkpoint, row: &Name, layer: usize) -> Option<String> {
    let (layers, name) = match checkpoint {
        Checkpoint::Gguf(_) => ("blk", Some(row.gguf)),
        Checkpoint::HuggingFace(_) => ("model.layers", row.hugging_face),
    };
    name.map(|name| match row.owner {
        Owner::Model => name.to_owned(),
        Owner::Layer => format!("{layers}.{layer}.{name}"),
    })
}

fn tensor_names(checkpoint: &Checkpoint) -> Vec<&str> {
    match checkpoint {
        Checkpoint::Gguf(gguf) => gguf.tensors().map(|view| view.name).collect(),
        Checkpoint::HuggingFace(model) => model.weights().tensors().map(|view| view.name).collect(),
    }
}

/// Tensors that say again what is known: frequencies that follow from config.json, and the head of a Hugging Face
/// model that is declared tied, where the embedding is what counts.
fn is_redundant(checkpoint: &Checkpoint, config: &Config, name: &str) -> bool {
    let Checkpoint::HuggingFace(_) = checkpoint else { return false };
    let head = config.facts.row(Tensor::Output).hugging_face;
    names::NOT_WEIGHTS.iter().any(|end| name.ends_with(end)) || (config.tied && head == Some(name))
}

fn check_shape(view: &View<'_>, row: &Name, config: &Config) -> Result<(), Error> {
    let wanted: Vec<usize> = row.shape.iter().map(|dim| dim.size(config)).collect();
    if view.shape == wanted {
        return Ok(());
    }
    Err(Error::TensorShape { tensor: view.name.to_owned(), got: view.shape.clone(), wanted })
}
