//! A low-rank adapter as PEFT lays it out: a directory with its configuration and its weights.

use std::path::Path;

use serde_json::Value;

use crate::{Error, Safetensors, json};

/// The configuration and the weights of one adapter. What they mean is not known here.
#[derive(Debug)]
pub struct AdapterFiles {
    config: Value,
    weights: Safetensors,
}

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Some kilobytes; see the same bound of a model's own configuration.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

impl AdapterFiles {
    /// What a directory must have.
    pub const NAMES: [&str; 2] = [CONFIG, WEIGHTS];

    /// Opens the directory: both files must be there.
    pub fn open(directory: &Path) -> Result<AdapterFiles, Error> {
        let config = json::read(&directory.join(CONFIG), CONFIG_BYTES_MAX)?;
        Ok(AdapterFiles { config, weights: Safetensors::open(&directory.join(WEIGHTS))? })
    }

    /// `adapter_config.json`.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `adapter_model.safetensors`.
    pub fn weights(&self) -> &Safetensors {
        &self.weights
    }
}
