//! Configuration values by key, from either container, with errors that spell the key as the container does.

use std::fmt::Display;
use std::ops::RangeInclusive;

use fornax_format::{Checkpoint, Metadata};
use serde_json::Value;

use crate::{Error, Facts};

/// No real model comes near, and products of three sizes stay far below 64 bits.
pub(crate) const SIZE_MAX: usize = 1 << 20;

/// One configuration value in both containers. GGUF keys have the architecture before them.
#[derive(Clone, Copy)]
pub(crate) struct Key {
    pub(crate) gguf: &'static str,
    pub(crate) hugging_face: &'static str,
}

/// Where values are read from.
pub(crate) enum Source<'a> {
    Gguf { metadata: &'a Metadata, architecture: &'static str },
    HuggingFace { json: Json<'a>, facts: &'a Facts },
}

impl<'a> Source<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint, facts: &'a Facts) -> Result<Source<'a>, Error> {
        match checkpoint {
            Checkpoint::Gguf(gguf) => match facts.gguf {
                Some(architecture) => Ok(Source::Gguf { metadata: gguf.metadata(), architecture }),
                None => Err(Error::Unsupported {
                    what: format!("a GGUF file with architecture {:?}", facts.name),
                    supported: "a Hugging Face directory".to_owned(),
                }),
            },
            Checkpoint::HuggingFace(model) => {
                let json = Json::new("", model.config())?;
                let text = if facts.not_text.is_empty() { None } else { json.opt_object("text_config")? };
                Ok(Source::HuggingFace { json: text.unwrap_or(json), facts })
            }
        }
    }

    /// The key as this container spells it.
    pub(crate) fn spelling(&self, key: Key) -> String {
        match self {
            Source::Gguf { architecture, .. } => format!("{architecture}.{}", key.gguf),
            Source::HuggingFace { json, .. } => json.spelling(self.own(key)),
        }
    }

    /// The architecture's own name for a key of config.json.
    pub(crate) fn own(&self, key: Key) -> &'static str {
        match self {
            Source::Gguf { .. } => key.hugging_face,
            Source::HuggingFace { facts, .. } => facts.own(key.hugging_face),
        }
    }

    /// The architecture's own number where config.json does not have the key.
    fn default(&self, key: Key) -> Option<f64> {
        let Source::HuggingFace { facts, .. } = self else { return None };
        facts.defaults.iter().find(|(name, _)| *name == key.hugging_face).map(|(_, number)| *number)
    }

    /// A whole number.
    pub(crate) fn opt_whole(&self, key: Key) -> Result<Option<u64>, Error> {
        Ok(match self {
            Source::Gguf { metadata, .. } => metadata.opt_u64(&self.spelling(key))?,
            Source::HuggingFace { json, .. } => {
                #[expect(clippy::cast_sign_loss, reason = "the table's own numbers of things")]
                let default = || self.default(key).map(|number| number as u64);
                let said = json.opt_same_u64(self.own(key))?;
                // Newer files of an architecture with names of its own may have everyone's.
                said.map_or_else(|| json.opt_same_u64(key.hugging_face), |said| Ok(Some(said)))?
                    .or_else(default)
            }
        })
    }

    /// A number of things, of which there is at least one.
    pub(crate) fn size(&self, key: Key) -> Result<usize, Error> {
        self.opt_size(key)?.ok_or_else(|| Error::MissingKey { key: self.spelling(key) })
    }

    pub(crate) fn opt_size(&self, key: Key) -> Result<Option<usize>, Error> {
        let Some(size) = self.opt_whole(key)? else { return Ok(None) };
        match usize::try_from(size) {
            Ok(size) if (1..=SIZE_MAX).contains(&size) => Ok(Some(size)),
            _ => Err(bad(&self.spelling(key), size, &format!("1 to {SIZE_MAX}"))),
        }
    }

    /// A number of positions, which may be huge.
    pub(crate) fn positions(&self, key: Key) -> Result<u32, Error> {
        let positions = self.opt_whole(key)?.ok_or_else(|| Error::MissingKey { key: self.spelling(key) })?;
        match u32::try_from(positions) {
            Ok(positions) if positions > 0 => Ok(positions),
            _ => Err(bad(&self.spelling(key), positions, "at least 1 and below 2^32")),
        }
    }

    /// A finite number.
    pub(crate) fn number(&self, key: Key) -> Result<f64, Error> {
        self.opt_number(key)?.ok_or_else(|| Error::MissingKey { key: self.spelling(key) })
    }

    pub(crate) fn opt_number(&self, key: Key) -> Result<Option<f64>, Error> {
        match self {
            Source::Gguf { metadata, .. } => opt_f32(metadata, &self.spelling(key)),
            Source::HuggingFace { json, .. } => {
                let said = json.opt_f64(self.own(key))?;
                Ok(said
                    .map_or_else(|| json.opt_f64(key.hugging_face), |said| Ok(Some(said)))?
                    .or(self.default(key)))
            }
        }
    }
}

/// A finite number of GGUF metadata.
pub(crate) fn opt_f32(metadata: &Metadata, key: &str) -> Result<Option<f64>, Error> {
    match metadata.opt_f32(key)? {
        Some(number) if !number.is_finite() => Err(bad(key, number, "a finite number")),
        number => Ok(number.map(f64::from)),
    }
}

/// `number` if it lies in the range, else the error that names `key`.
pub(crate) fn within(key: &str, number: f64, range: RangeInclusive<f64>) -> Result<f64, Error> {
    if range.contains(&number) {
        return Ok(number);
    }
    Err(bad(key, number, &format!("{} to {}", range.start(), range.end())))
}

pub(crate) fn bad(key: &str, got: impl Display, wanted: &str) -> Error {
    Error::BadKey { key: key.to_owned(), got: one_line(got), wanted: wanted.to_owned() }
}

/// What a file says, as a line that no terminal obeys: JSON writes out only some of the control characters.
pub(crate) fn one_line(said: impl Display) -> String {
    let mut line = String::new();
    for character in said.to_string().chars() {
        match character.is_control() {
            true => line.extend(character.escape_unicode()),
            false => line.push(character),
        }
    }
    line
}

/// An object of config.json. A null is an absent key, as in Python.
#[derive(Clone, Copy)]
pub(crate) struct Json<'a> {
    /// What stands before a key in messages: the object's own name and a dot.
    path: &'static str,
    object: &'a Value,
}

impl<'a> Json<'a> {
    pub(crate) fn new(path: &'static str, object: &'a Value) -> Result<Json<'a>, Error> {
        match object {
            Value::Object(_) => Ok(Json { path, object }),
            other => Err(bad(path, other, "an object")),
        }
    }

    pub(crate) fn spelling(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.object.get(key).is_some()
    }

    /// The first key whose value is an object itself.
    pub(crate) fn nested(&self) -> Option<&'a str> {
        let (key, _) = self.object.as_object()?.iter().find(|(_, value)| value.is_object())?;
        Some(key)
    }

    /// The object under `key`.
    pub(crate) fn opt_object(&self, key: &'static str) -> Result<Option<Json<'a>>, Error> {
        self.get(key).map(|value| Json::new(key, value)).transpose()
    }

    pub(crate) fn opt_u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.read(key, "a whole number", Value::as_u64)
    }

    /// A number, or a list of one number again and again, as some files have it layer by layer.
    pub(crate) fn opt_same_u64(&self, key: &str) -> Result<Option<u64>, Error> {
        match self.get(key).and_then(Value::as_array) {
            Some(all) => {
                let first = all.first().filter(|first| all.iter().all(|other| other == *first));
                let same = first.and_then(Value::as_u64);
                same.map(Some)
                    .ok_or_else(|| bad(&self.spelling(key), self.object[key].clone(), "one whole number"))
            }
            None => self.opt_u64(key),
        }
    }

    pub(crate) fn opt_u64s(&self, key: &str) -> Result<Option<Vec<u64>>, Error> {
        self.read(key, "a list of whole numbers", |value| {
            value.as_array()?.iter().map(Value::as_u64).collect()
        })
    }

    pub(crate) fn opt_f64(&self, key: &str) -> Result<Option<f64>, Error> {
        self.read(key, "a number", Value::as_f64)
    }

    pub(crate) fn opt_f64s(&self, key: &str) -> Result<Option<Vec<f64>>, Error> {
        self.read(key, "a list of numbers", |value| value.as_array()?.iter().map(Value::as_f64).collect())
    }

    pub(crate) fn f64(&self, key: &str) -> Result<f64, Error> {
        self.opt_f64(key)?.ok_or_else(|| Error::MissingKey { key: self.spelling(key) })
    }

    pub(crate) fn opt_bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(crate) fn opt_str(&self, key: &str) -> Result<Option<&'a str>, Error> {
        self.read(key, "a string", Value::as_str)
    }

    pub(crate) fn opt_strs(&self, key: &str) -> Result<Option<Vec<&'a str>>, Error> {
        self.read(key, "a list of strings", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    fn read<T>(
        &self,
        key: &str,
        wanted: &str,
        pick: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match pick(value) {
            Some(picked) => Ok(Some(picked)),
            None => Err(bad(&self.spelling(key), value, wanted)),
        }
    }
}
