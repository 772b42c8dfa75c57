//! Pages of a model that are kept on a disk: where, and whose they are.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use fornax_compute::KvSpec;
use fornax_disk::{Disk, DiskOptions, Key};
use fornax_engine::Tier;
use fornax_format::{Checkpoint, Gguf, View};
use sha2::{Digest, Sha256};

use crate::Error;
use crate::open::Blueprint;
use crate::sight::Reading;

/// Bytes of a tensor that are looked at, in each of three places.
const LOOKED_AT: usize = 256;

/// Where the pages of cached prompts are kept on a disk, beyond the memory that they have.
#[derive(Clone)]
pub struct KvDisk {
    options: DiskOptions,
    tell: Arc<dyn Fn(&str) + Send + Sync>,
}

impl KvDisk {
    /// Keeps at most so many bytes for a model in `folder`. What goes wrong there is told, and changes nothing else.
    pub fn new(
        folder: impl Into<PathBuf>,
        bytes_max: u64,
        tell: impl Fn(&str) + Send + Sync + 'static,
    ) -> KvDisk {
        let options = DiskOptions { folder: folder.into(), bytes_max, key: None };
        KvDisk { options, tell: Arc::new(tell) }
    }

    /// Seals them with the content of a key file, of at least 32 bytes.
    pub fn sealed(mut self, key: &Path) -> Result<KvDisk, Error> {
        self.options.key = Some(Key::read(key)?);
        Ok(self)
    }

    /// What keeps the pages of this model; `None` where that cannot be used, which has been told.
    pub(crate) fn open(&self, model: &Path, identity: &str) -> Option<Box<dyn Tier>> {
        let tell = Arc::clone(&self.tell);
        let about = model.display().to_string();
        match Disk::open(&self.options, identity, &about, move |reason| tell(reason)) {
            Ok((disk, found)) => {
                for path in &found.torn {
                    (self.tell)(&format!("{} was not written to its end: the rest is used", path.display()));
                }
                for path in &found.foreign {
                    (self.tell)(&format!("{} holds no pages of this model: ignored", path.display()));
                }
                Some(Box::new(disk))
            }
            Err(error) => {
                (self.tell)(&format!("pages are kept in memory alone: {error}"));
                None
            }
        }
    }
}

impl fmt::Debug for KvDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DiskOptions { folder, bytes_max, key } = &self.options;
        let sealed = key.is_some();
        f.debug_struct("KvDisk")
            .field("folder", folder)
            .field("bytes_max", bytes_max)
            .field("sealed", &sealed)
            .finish()
    }
}

/// All that the bits of keys and values depend on, whatever is asked: this build, the processor's instructions, the
/// weights, the numbers of the model, how it reads images, and how a page lies. What it leaves out (threads, requests at once, room)
/// changes no bit.
pub(crate) fn identity(blueprint: &Blueprint) -> String {
    let Blueprint { checkpoint, plan, computing, .. } = blueprint;
    let mut config = blueprint.config.clone();
    config.adapter_room = fornax_model::AdapterRoom::default();
    let KvSpec { groups, dtype } = &plan.kv;
    let groups: Vec<_> = groups.iter().map(|group| (group.layers, group.kind, group.window)).collect();
    let build = (env!("CARGO_PKG_VERSION"), option_env!("FORNAX_COMMIT"), std::env::consts::ARCH);
    let weights = weights(checkpoint);
    let images = blueprint.reading.as_ref().map_or_else(|_| String::new(), Reading::told);
    format!("{build:?} {computing} {weights} {:?} {groups:?} {dtype} {config:?} {images}", plan.stored)
}

/// The weights in a few bytes: of every tensor its name, type and shape and what it holds at its beginning, in its
/// middle and at its end, and when the files were written. To read all of a large model would take longer than most
/// prompts.
fn weights(checkpoint: &Checkpoint) -> String {
    let mut hash = Sha256::new();
    let mut look = |view: View<'_>| {
        hash.update(format!("{} {} {:?};", view.name, view.dtype, view.shape));
        let (len, some) = (view.bytes.len(), LOOKED_AT.min(view.bytes.len()));
        for start in [0, (len - some) / 2, len - some] {
            let mut bytes = [0; LOOKED_AT];
            // A file that cannot be read is refused when it is loaded.
            if view.read_part(&view.bytes[start..start + some], &mut bytes[..some]).is_ok() {
                hash.update(bytes);
            }
        }
    };
    let files: Vec<_> = match checkpoint {
        Checkpoint::Gguf(gguf) => {
            // What reads images may lie in a file of its own.
            let all = || std::iter::once(gguf).chain(gguf.beside());
            all().flat_map(Gguf::tensors).for_each(&mut look);
            all().flat_map(Gguf::files).collect()
        }
        Checkpoint::HuggingFace(model) => {
            model.weights().tensors().for_each(&mut look);
            model.weights().files().iter().collect()
        }
    };
    for file in files {
        let Ok(facts) = fs::metadata(file) else { continue };
        let written = facts.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        hash.update(format!("{} {written:?};", facts.len()));
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
