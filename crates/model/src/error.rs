//! The ways reading and loading a model can fail.

use crate::AdapterFault;

/// Why a checkpoint cannot become a model. Each names the key or tensor as its file spells it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something the file asks for that is not implemented: an architecture, a scaling, an activation.
    #[error("{what} is not supported; supported: {supported}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What could have been asked for.
        supported: String,
    },
    /// An adapter that cannot be had, or is not for this model.
    #[error("adapter {adapter:?}: {fault}")]
    Adapter {
        /// What requests call it.
        adapter: String,
        /// Why.
        fault: AdapterFault,
    },
    /// A key that the model cannot be computed without.
    #[error("key {key:?} is missing from the model's configuration")]
    MissingKey {
        /// The key as the container spells it.
        key: String,
    },
    /// A key whose value cannot be meant.
    #[error("key {key:?} is {got}, wanted {wanted}")]
    BadKey {
        /// The key as the container spells it.
        key: String,
        /// Its value.
        got: String,
        /// What would be valid.
        wanted: String,
    },
    /// A tensor that the model cannot be computed without.
    #[error("tensor {tensor:?} is missing from the checkpoint")]
    MissingTensor {
        /// The tensor as the container spells it.
        tensor: String,
    },
    /// A tensor that this architecture has no place for: leaving it out would compute another model.
    #[error("tensor {tensor:?} has no place in the {architecture} architecture")]
    UnknownTensor {
        /// The tensor as the container spells it.
        tensor: String,
        /// The architecture that was read.
        architecture: &'static str,
    },
    /// A tensor whose shape contradicts the configuration.
    #[error("tensor {tensor:?} has shape {got:?}, wanted {wanted:?}")]
    TensorShape {
        /// The tensor as the container spells it.
        tensor: String,
        /// The shape in the file.
        got: Vec<usize>,
        /// The shape that follows from the configuration.
        wanted: Vec<usize>,
    },
    /// A tensor whose values cannot be meant.
    #[error("tensor {tensor:?} holds {got} at {index}, wanted {wanted}")]
    TensorValue {
        /// The tensor as the container spells it.
        tensor: String,
        /// The first offending value.
        got: f32,
        /// Its index.
        index: usize,
        /// What would be valid.
        wanted: &'static str,
    },
    /// The container itself.
    #[error(transparent)]
    Format(#[from] fornax_format::Error),
    /// The backend's memory: it is full, or cannot hold such a tensor.
    #[error(transparent)]
    Compute(#[from] fornax_compute::Error),
}
