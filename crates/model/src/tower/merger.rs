//! How several patches become a row that the language model reads.

use fornax_compute::{Backend, Error, Memory, Norm, NormKind, Pointwise, Rows};

use super::config::TowerConfig;
use super::facts::{Ending, Part};
use super::layer::Layer;
use super::weights::Weights;
use super::{Room, batch};

/// Its weights.
pub(super) enum Merger<M: Memory> {
    /// Side by side through two layers.
    Layers {
        norm: Option<Norm<M::Buf>>, // (merged)
        up: Box<Layer<M>>,          // (merged, merged)
        down: Box<Layer<M>>,        // (out, merged)
    },
    /// Their mean through one.
    Mean {
        /// What each value of a mean is multiplied by, and what is added to it: on the host, where means are taken.
        factors: Vec<f32>, // (hidden)
        terms: Vec<f32>,           // (hidden)
        norm: Norm<M::Buf>,        // (hidden)
        projection: Box<Layer<M>>, // (out, hidden)
    },
}

impl<M: Memory> Merger<M> {
    /// Of the patches behind the last block.
    pub(super) fn load(
        weights: &mut Weights<'_, M>,
        config: &TowerConfig,
    ) -> Result<Merger<M>, crate::Error> {
        let TowerConfig { hidden, out, facts, .. } = *config;
        let merged = config.merged();
        let grows = match facts.ending {
            Ending::Merged => {
                return Ok(Merger::Layers {
                    norm: None,
                    up: Box::new(weights.layer(Part::MergerUp, 0, merged, merged)?),
                    down: Box::new(weights.layer(Part::MergerDown, 0, out, merged)?),
                });
            }
            Ending::Pooled { grows } => grows,
        };
        let root = if grows { (hidden as f32).sqrt() } else { 1.0 };
        let factors = weights.opt_table(Part::MeanScale, hidden)?.unwrap_or_else(|| vec![1.0; hidden]);
        let bias = weights.opt_table(Part::MeanBias, hidden)?.unwrap_or_else(|| vec![0.0; hidden]);
        let (norm, projection) = match facts.name_of(Part::MeanNorm) {
            // Where Gemma 3 has a norm with weights, the layer's matrix lies on its side.
            Some(_) => (
                weights.norm(NormKind::Rms, Part::MeanNorm, 0, hidden)?,
                weights.turned(Part::Projection, out, hidden)?,
            ),
            None => (weights.bare_norm(hidden)?, weights.layer(Part::Projection, 0, out, hidden)?),
        };
        Ok(Merger::Mean {
            terms: bias.iter().zip(&factors).map(|(bias, factor)| -bias * factor).collect(),
            factors: factors.iter().map(|factor| factor * root).collect(),
            norm,
            projection: Box::new(projection),
        })
    }

    /// Of the patches behind the block of a level.
    pub(super) fn of_level(
        weights: &mut Weights<'_, M>,
        config: &TowerConfig,
        at: usize,
    ) -> Result<Merger<M>, crate::Error> {
        let merged = config.merged();
        Ok(Merger::Layers {
            norm: Some(weights.norm(NormKind::Layer, Part::LevelNorm, at, merged)?),
            up: Box::new(weights.layer(Part::LevelUp, at, merged, merged)?),
            down: Box::new(weights.layer(Part::LevelDown, at, config.out, merged)?),
        })
    }
}

impl<B: Backend> Merger<B> {
    /// The rows that patches become, those of a row one behind the other: (count, out).
    pub(super) fn rows_of(
        &self,
        backend: &B,
        patches: &[f32],
        count: usize,
        r: &mut Room<B>,
    ) -> Result<Vec<f32>, Error> {
        let (step, tokens) = (backend.begin(&batch(count, &[]))?, Rows::Tokens);
        match self {
            Merger::Layers { norm, up, down } => {
                backend.write(&mut r.merged, 0, patches)?;
                let read = match norm {
                    Some(norm) => {
                        backend.norm(&step, tokens, norm, &r.merged, &mut r.normed)?;
                        &mut r.normed
                    }
                    None => &mut r.merged,
                };
                up.forward(backend, &step, read, &mut r.above)?;
                backend.pointwise(&step, tokens, Pointwise::Gelu, &mut r.above)?;
                down.forward(backend, &step, &mut r.above, &mut r.out)?;
            }
            Merger::Mean { factors, terms, norm, projection } => {
                backend.write(&mut r.merged, 0, &means(patches, count, factors, terms))?;
                backend.norm(&step, tokens, norm, &r.merged, &mut r.above)?;
                projection.forward(backend, &step, &mut r.above, &mut r.out)?;
            }
        }
        let rows = backend.read(&r.out, 0, count)?;
        backend.finish(step)?;
        Ok(rows)
    }
}

/// Of the patches of each row their mean, times the factors, plus the terms: (count, hidden).
fn means(patches: &[f32], count: usize, factors: &[f32], terms: &[f32]) -> Vec<f32> {
    let hidden = factors.len();
    let of_row = patches.chunks_exact(patches.len() / count);
    let share = hidden as f32 / (patches.len() / count) as f32;
    let mean = |row: &[f32]| -> Vec<f32> {
        let mut sums = vec![0.0; hidden];
        for patch in row.chunks_exact(hidden) {
            sums.iter_mut().zip(patch).for_each(|(sum, value)| *sum += value);
        }
        let weighed = sums.iter().zip(factors.iter().zip(terms));
        weighed.map(|(sum, (factor, term))| sum * share * factor + term).collect()
    };
    of_row.flat_map(mean).collect()
}
