//! A part of a model that is loaded for itself: the layers of a pipeline are on several devices.

use std::ops::Range;

use crate::names::{Name, Owner, Tensor};
use crate::{Config, Error};

/// Which part of a model: perhaps the embedding, some layers, perhaps the head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Whether tokens come in here; otherwise the rows that another stage has left
    /// ([`Model::residual`](crate::Model::residual)).
    pub embeds: bool,
    /// The layers, by their numbers in the model.
    pub layers: Range<usize>,
    /// Whether logits come out.
    pub heads: bool,
}

impl Stage {
    /// All of a model.
    pub fn whole(config: &Config) -> Stage {
        Stage { embeds: true, layers: 0..config.layers.len(), heads: true }
    }

    /// The stages of a model that is cut before each of these layers, which ascend.
    pub fn cut(config: &Config, before: &[usize]) -> Result<Vec<Stage>, Error> {
        let layers = config.layers.len();
        let ends: Vec<usize> = [0].iter().chain(before).chain(&[layers]).copied().collect();
        if !ends.is_sorted_by(|a, b| a < b) {
            let what = format!("a model of {layers} layers cut before layers {before:?}");
            return Err(Error::Unsupported {
                what,
                supported: format!("ascending layers from 1 to {}", layers - 1),
            });
        }
        let stage = |ends: &[usize]| Stage {
            embeds: ends[0] == 0,
            layers: ends[0]..ends[1],
            heads: ends[1] == layers,
        };
        Ok(ends.windows(2).map(stage).collect())
    }

    /// Whether the stage needs a weight of the model, or of a layer.
    pub(crate) fn needs(&self, config: &Config, row: &Name, layer: usize) -> bool {
        match (row.owner, row.tensor) {
            (Owner::Layer, tensor) if tensor.is_of_keys() && config.keys_of(layer).is_some() => false,
            (Owner::Layer, _) => self.layers.contains(&layer),
            (Owner::Model, Tensor::Embedding) => self.embeds || (self.heads && config.tied),
            (
                Owner::Model,
                Tensor::Positions
                | Tensor::TokenTypes
                | Tensor::EmbeddingNorm
                | Tensor::EmbeddingNormBias
                | Tensor::LayerTable
                | Tensor::LayerProjection
                | Tensor::LayerProjectionNorm,
            ) => self.embeds,
            // Every stage rotates.
            (Owner::Model, Tensor::RopeFactors | Tensor::RopeFactorsLong) => true,
            (Owner::Model, _) => self.heads,
        }
    }
}
