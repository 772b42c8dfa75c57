//! Adapters from strangers: configuration and weights, read, checked against a model and measured.

use std::fs;
use std::path::{Path, PathBuf};

use fornax_compute::Counting;
use fornax_compute::cpu::{CpuOptions, CpuSizes};
use fornax_format::{AdapterFiles, Checkpoint};
use fornax_model::{Adapter, Config, Limits, measure_with};

/// Stands between the configuration and the weights.
pub const SEPARATOR: &[u8] = b"\xffFILE\xff";

/// A tiny model that adapters may be for, and a folder that they are written to.
pub struct Bench {
    checkpoint: Checkpoint,
    config: Config,
    folder: PathBuf,
}

impl Bench {
    /// `model` is a Hugging Face directory.
    pub fn new(model: &Path, folder: PathBuf) -> Bench {
        let checkpoint = Checkpoint::open(model).expect("the model is there");
        let config = Config::read(&checkpoint).expect("the model is known");
        Bench { checkpoint, config, folder }
    }

    /// Reads the input as `adapter_config.json` and `adapter_model.safetensors`. Whether the model takes it.
    pub fn adapter(&self, data: &[u8]) -> bool {
        let at = data.windows(SEPARATOR.len()).position(|window| window == SEPARATOR);
        let (config, weights) = match at {
            Some(at) => (&data[..at], &data[at + SEPARATOR.len()..]),
            None => (data, &[][..]),
        };
        fs::write(self.folder.join("adapter_config.json"), config).expect("the folder can be written");
        fs::write(self.folder.join("adapter_model.safetensors"), weights).expect("the folder can be written");
        let files = match AdapterFiles::open(&self.folder) {
            Ok(files) => files,
            Err(error) => return said(&error.to_string()),
        };
        let adapter = match Adapter::new("stranger", files) {
            Ok(adapter) => adapter,
            Err(error) => return said(&error.to_string()),
        };
        assert!(adapter.rank() > 0);
        let memory = Counting::new(CpuSizes::new(&CpuOptions { threads: 1, ..CpuOptions::default() }));
        let limits = Limits { tokens_max: 8, wanted_max: 2 };
        match measure_with(&self.checkpoint, &self.config, &[adapter], &memory, limits) {
            Ok(()) => {
                // Tiny as model and adapter are: what was asked for is of the order of what was sent.
                assert!(fornax_compute::Memory::usage(&memory).total() < 64 << 20);
                true
            }
            Err(error) => said(&error.to_string()),
        }
    }
}

/// A refusal says something, in one line that no terminal obeys.
fn said(message: &str) -> bool {
    assert!(!message.is_empty() && !message.contains(char::is_control), "{message:?}");
    false
}
