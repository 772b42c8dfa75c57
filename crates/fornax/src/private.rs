//! Private inference, wired to model files: whose weights the servers multiply by, and what the client checks with.

use std::cell::RefCell;
use std::fmt;
use std::path::{Path, PathBuf};

use fornax_compute::Ring;
use fornax_format::Checkpoint;
use fornax_model::{Config, Limits};
use fornax_private::{ClientOptions, Collector, Fingerprint, Loaded, Matrix};

use crate::Error;

/// Who multiplies for a model that is opened for private inference.
#[derive(Clone, Debug)]
pub enum Private {
    /// Two servers, neither of which learns what.
    Parties(ClientOptions),
    /// This machine: the same integers in the open. The reference that private inference is bit-equal to.
    Reference,
}

impl fmt::Display for Private {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Private::Parties(parties) => {
                write!(f, "products by {} and {}", parties.party0, parties.party1)?;
                if parties.demo_single_host { f.write_str(" (one host: no privacy)") } else { Ok(()) }
            }
            Private::Reference => f.write_str("products of integers"),
        }
    }
}

/// How a server multiplies.
#[derive(Clone, Debug, Default)]
pub struct RingOptions {
    /// CPU threads; by default one for each core.
    pub threads: Option<usize>,
    /// Where a GPU's compiled kernels are kept.
    pub kernel_folder: Option<PathBuf>,
}

/// Every matrix of a model file on a ring, through the model's own loader.
pub(crate) fn loaded<R: Ring>(path: &Path, ring: R) -> Result<Loaded<R>, Error> {
    let (mut fingerprint, mut matrices) = (Fingerprint::default(), Vec::new());
    collect(path, |_, matrix| {
        fingerprint.add(&matrix);
        matrices.push(ring.matrix(matrix.rows, matrix.columns, &matrix.weights)?);
        Ok(())
    })?;
    let (shapes, weights) = fingerprint.finish();
    Ok(Loaded { ring, matrices, shapes, weights })
}

/// One matrix of a model file, to find out who answered wrongly.
pub(crate) fn matrix(path: &Path, number: usize) -> Result<Matrix, fornax_private::Error> {
    let found = RefCell::new(None);
    let unreadable =
        |what: String| fornax_private::Error::Transcript { path: path.display().to_string(), what };
    let keep = |index, matrix| {
        if index == number {
            *found.borrow_mut() = Some(matrix);
        }
        Ok(())
    };
    collect(path, keep).map_err(|error| unreadable(error.to_string()))?;
    found.take().ok_or_else(|| unreadable(format!("there is no matrix {number}")))
}

fn collect(
    path: &Path,
    visit: impl FnMut(usize, Matrix) -> Result<(), fornax_compute::Error>,
) -> Result<(), Error> {
    let checkpoint = Checkpoint::open(path)?;
    let config = Config::read(&checkpoint)?;
    let limits = Limits { tokens_max: 1, wanted_max: 1 };
    Ok(fornax_model::measure(&checkpoint, &config, &Collector::new(visit), limits)?)
}
