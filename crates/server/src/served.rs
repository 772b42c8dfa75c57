//! The loaded model, as whoever loaded it hands it over.

use std::{collections::BTreeMap, sync::Arc};

use fornax_engine::{Grammars, Handle};
use fornax_text::{ChatTemplate, Tokenizer};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// Everything that routes need of a model. Made by the binary, which alone knows files and backends.
pub struct Served {
    /// The way into the engine. Dropping the last one drains and stops it.
    pub engine: Handle,
    /// Shared with every answer under way.
    pub tokenizer: Arc<Tokenizer>,
    /// Or why there is no chat.
    pub template: Arc<Result<ChatTemplate, fornax_text::Error>>,
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
}

/// What a model is, for clients and operators.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// The name that clients ask for; the first of all names.
    pub name: String,
    /// Where it came from: a path or a catalog name.
    pub reference: String,
    /// Its architecture.
    pub architecture: String,
    /// How its weights are stored.
    pub quant: String,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
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
    /// Bytes on all devices.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.devices.iter().map(Device::total).sum()
    }

    /// Whether a client may call the model so.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        name == self.card.name
    }
}
