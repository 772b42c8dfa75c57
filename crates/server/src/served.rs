//! The loaded model, as whoever loaded it hands it over.

use std::{collections::BTreeMap, sync::Arc, thread};

use fornax_chat::Sight;
use fornax_engine::Handle;
use fornax_form::Grammars;
use fornax_text::{ChatTemplate, Tokenizer};
use serde::Serialize;
use serde_json::Value;
use tokio::sync::watch;
use utoipa::ToSchema;

use crate::app::Failed;

/// Everything that routes need of a model. Made by the binary, which alone knows files and backends.
pub struct Served {
    /// The way into the engine. Dropping the last one drains and stops it.
    pub engine: Handle,
    /// Shared with every answer under way.
    pub tokenizer: Arc<Tokenizer>,
    /// Or why there is no chat.
    pub template: Arc<Result<ChatTemplate, fornax_text::Error>>,
    /// Whether it may be asked anew in the middle of an answer ([`fornax_chat::Model::asks_anew`]).
    pub asks_anew: bool,
    /// What looks at pictures for it, or why it reads none.
    pub sight: Result<Arc<dyn Sight>, &'static str>,
    /// Compiles schemas, regular expressions and grammars.
    pub grammars: Arc<Grammars>,
    /// What the model is.
    pub card: ModelCard,
    /// The devices it is on.
    pub devices: Vec<Device>,
    /// The memory plan that it was loaded by.
    pub plan: Value,
    /// How long loading took, in seconds.
    pub load_seconds: f64,
    /// Bytes that it takes of what all models together may.
    pub planned_bytes: u64,
    /// Loads an adapter beside it while it runs; `None` where the operator has not allowed that.
    pub load_adapter: Option<LoadAdapter>,
    /// What holds its memory.
    pub keeper: Keeper,
}

/// Loads an adapter under a name, from where a client says that it lies, if it may come from there. Returns the number that
/// the engine knows it by. May block.
pub type LoadAdapter = Box<dyn Fn(&str, &str) -> Result<u32, Failed> + Send + Sync>;

/// What holds a model's memory. Dropped, it frees it on a thread of its own (an engine ends its last step first, and
/// gigabytes take a moment), and says when that is done.
pub struct Keeper {
    held: Option<Box<dyn Send + Sync>>,
    freed: watch::Sender<bool>,
}

impl Keeper {
    /// Keeps what holds the memory.
    pub fn new(held: impl Send + Sync + 'static) -> Keeper {
        Keeper { held: Some(Box::new(held)), freed: watch::Sender::new(false) }
    }

    /// Hears true when all is free.
    pub(crate) fn freed(&self) -> watch::Receiver<bool> {
        self.freed.subscribe()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let (held, freed) = (self.held.take(), self.freed.clone());
        // Where no thread can be had, the closure is dropped here, and what it holds with it.
        let freeing = thread::Builder::new().name("unload".to_owned()).spawn(move || {
            drop(held);
            freed.send_replace(true);
        });
        drop(freeing);
    }
}

/// What a model is, for clients and operators.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// The name that clients ask for; the first of all names.
    pub name: String,
    /// Further names for it.
    pub aliases: Vec<String>,
    /// Adapters that it is loaded with, in the order in which the engine knows them. Each is a name that clients ask for.
    pub adapters: Vec<String>,
    /// Where it came from: a path or a catalog name.
    pub reference: String,
    /// Its architecture.
    pub architecture: String,
    /// How its weights are stored.
    pub quant: String,
    /// What it is on disk.
    pub files: ModelFiles,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
}

/// The files of a model, as clients list them.
#[derive(Clone, Debug, Default)]
pub struct ModelFiles {
    /// `gguf` or `safetensors`.
    pub format: &'static str,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Numbers that its weights hold.
    pub parameters: u64,
    /// Tells them from other files: 64 hexadecimal digits.
    pub digest: String,
}

impl ModelCard {
    /// Whether a client may call the model so.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        name == self.name || self.aliases.iter().any(|alias| alias == name)
    }
}

/// Memory of one device, as its allocator counts it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Device {
    /// Its name, as `cpu` or `cuda:0`.
    pub name: String,
    /// Bytes for each purpose.
    pub bytes: BTreeMap<String, u64>,
}

impl Device {
    /// All its bytes.
    pub fn total(&self) -> u64 {
        self.bytes.values().sum()
    }
}

impl Served {
    /// Why it reads no pictures; `None` where it does.
    pub(crate) fn blind(&self) -> Option<&'static str> {
        self.sight.as_ref().err().copied()
    }

    /// Bytes on all devices.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.devices.iter().map(Device::total).sum()
    }
}
