//! The index of a model in several safetensors files: JSON that says which file each tensor lies in.

use std::collections::HashMap;
use std::fmt;
use std::path::{Component, Path};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::{Error, json};

/// Which file each tensor lies in.
pub(super) struct Index {
    /// In the order in which the text first names them.
    pub(super) files: Vec<String>,
    /// Tensors by name, each with its position in `files`.
    pub(super) tensors: Vec<(Box<str>, u32)>,
}

/// As much as for the header of one file; an index says less.
const INDEX_BYTES_MAX: u64 = 100_000_000;
/// Ten times what the largest models are split into.
const SHARDS_MAX: usize = 4096;

impl Index {
    /// Reads an index whose files all lie beside it.
    pub(super) fn parse(bytes: &[u8]) -> Result<Index, Error> {
        let Document { weight_map: index } = json::parse(bytes, INDEX_BYTES_MAX)?;
        match index.files.iter().find(|name| !is_plain(name)) {
            Some(name) => Err(Error::ShardPath { name: name.clone() }),
            None => Ok(index),
        }
    }
}

/// Whether `name` names a file in the index's own directory and nothing else.
fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let single =
        matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name);
    single && !name.contains(char::is_control)
}

/// The document around the index.
#[derive(Deserialize)]
struct Document {
    weight_map: Index,
}

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Index, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Index;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("file names by tensor name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Index, A::Error> {
                let (mut files, mut tensors) = (Vec::<String>::new(), Vec::new());
                let mut positions = HashMap::new();
                while let Some((tensor, file)) = map.next_entry::<Box<str>, String>()? {
                    let next = files.len() as u32;
                    let position = *positions.entry(file).or_insert_with_key(|file| {
                        files.push(file.clone());
                        next
                    });
                    tensors.push((tensor, position));
                    if files.len() > SHARDS_MAX {
                        return Err(A::Error::custom(format_args!("more than {SHARDS_MAX} files")));
                    }
                }
                Ok(Index { files, tensors })
            }
        }
        deserializer.deserialize_map(Names)
    }
}
