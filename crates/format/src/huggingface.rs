//! A model directory as the Hugging Face hub lays it out.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::map::Map;
use crate::packing::Quantization;
use crate::safetensors::{SINGLE, Safetensors};
use crate::{DType, Error, json};

/// Configuration, tokenizer files and weights of one directory. What the configuration means is not known here.
#[derive(Debug)]
pub struct HuggingFace {
    directory: PathBuf,
    config: Value,
    generation_config: Option<Value>,
    tokenizer_config: Option<Value>,
    preprocessor_config: Option<Value>,
    tokenizer_json: Option<PathBuf>,
    chat_template: Option<String>,
    pooling: Option<Value>,
    dense: Vec<Dense>,
    weights: Safetensors,
}

/// The name of the file that makes a directory a model.
pub(crate) const CONFIG: &str = "config.json";

/// Configurations are some kilobytes, those of tokenizers with many added tokens a little over a megabyte. Parsed
/// JSON can take thirty times the room of its text, so this bounds what a hostile document can claim.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
const TOKENIZER_CONFIG_BYTES_MAX: u64 = 8 << 20;
const CHAT_TEMPLATE_BYTES_MAX: u64 = 1 << 20;

/// A matrix behind the pooled vector of sentence-transformers, with nothing added and nothing done to what it makes. It is the
/// tensor `linear.weight` in a folder of its own; here it has the folder before its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dense {
    /// Its folder.
    pub folder: String,
    /// Values it reads.
    pub inputs: usize,
    /// Values it makes.
    pub outputs: usize,
}

/// What `modules.json` names behind the model.
#[derive(Debug, Default)]
struct Modules {
    /// The pooling module's configuration.
    pooling: Option<Value>,
    dense: Vec<Dense>,
}

impl Modules {
    fn read(directory: &Path) -> Result<Modules, Error> {
        let file = directory.join("modules.json");
        let listed: Option<Value> = json::read_if_there(&file, CONFIG_BYTES_MAX)?;
        let listed = listed.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let mut modules = Modules::default();
        for module in listed {
            let Some(kind) = module["type"].as_str() else { continue };
            // A folder of this directory and nothing else.
            let folder = module["path"]
                .as_str()
                .filter(|path| Path::new(path).file_name().is_some_and(|name| name == *path));
            let config = || match folder {
                Some(folder) => json::read_if_there(&directory.join(folder).join(CONFIG), CONFIG_BYTES_MAX),
                None => Ok(None),
            };
            let refuse = || Err(Error::Module { module: kind.to_owned() }.at(&file));
            match kind.rsplit('.').next().unwrap_or_default() {
                // A vector's length is up to who asks for it.
                "Transformer" | "Normalize" => {}
                "Pooling" if modules.pooling.is_none() => modules.pooling = config()?,
                "Pooling" => {}
                "Dense" => match config()?.as_ref().and_then(|config| Dense::of(folder?, config)) {
                    Some(dense) => modules.dense.push(dense),
                    None => return refuse(),
                },
                _ => return refuse(),
            }
        }
        Ok(modules)
    }
}

impl Dense {
    /// `None` where it does more than multiply.
    fn of(folder: &str, config: &Value) -> Option<Dense> {
        let function = config["activation_function"].as_str().unwrap_or("Identity");
        let plain = function.ends_with("Identity") && config["bias"] == Value::Bool(false);
        let size = |key: &str| usize::try_from(config[key].as_u64()?).ok();
        let (inputs, outputs) = (size("in_features")?, size("out_features")?);
        plain.then(|| Dense { folder: folder.to_owned(), inputs, outputs })
    }
}

impl HuggingFace {
    /// Opens the directory: `config.json` and the weights must be there, the other files may be.
    pub fn open(directory: &Path) -> Result<HuggingFace, Error> {
        HuggingFace::open_with(directory, directory)
    }

    /// Opens the directory with the weights at `weights`, which may be one file of several in it.
    pub(crate) fn open_with(directory: &Path, weights: &Path) -> Result<HuggingFace, Error> {
        let config = json::read_if_there(&directory.join(CONFIG), CONFIG_BYTES_MAX)?;
        let config = config.ok_or_else(|| Error::ConfigMissing.at(weights))?;
        let generation_config =
            json::read_if_there(&directory.join("generation_config.json"), CONFIG_BYTES_MAX)?;
        let tokenizer_config: Option<Value> =
            json::read_if_there(&directory.join("tokenizer_config.json"), TOKENIZER_CONFIG_BYTES_MAX)?;
        let preprocessor_config =
            json::read_if_there(&directory.join("preprocessor_config.json"), CONFIG_BYTES_MAX)?;
        let preprocessor_config = match preprocessor_config {
            Some(config) => Some(config),
            None => processor_of_images(directory)?,
        };
        let tokenizer_json = Some(directory.join("tokenizer.json")).filter(|path| path.is_file());
        let chat_template = match template_file(&directory.join("chat_template.jinja"))? {
            Some(template) => Some(template),
            None => tokenizer_config.as_ref().and_then(template_in).map(str::to_owned),
        };
        let Modules { pooling, dense } = Modules::read(directory)?;
        let mut weights = Safetensors::open(weights)?;
        for Dense { folder, .. } in &dense {
            weights.add(&directory.join(folder).join(SINGLE), &format!("{folder}."))?;
        }
        let quantization = match Quantization::of(&config).map_err(|error| error.at(directory))? {
            Some(quantization) => Some(quantization),
            None => Quantization::beside(directory)?,
        };
        if let Some(quantization) = quantization {
            weights.read_as(quantization).map_err(|error| error.at(directory))?;
        }
        let directory = directory.to_path_buf();
        Ok(HuggingFace {
            directory,
            config,
            generation_config,
            tokenizer_config,
            preprocessor_config,
            tokenizer_json,
            chat_template,
            pooling,
            dense,
            weights,
        })
    }

    /// The directory that was opened.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// `config.json`.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `generation_config.json`, where it exists.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// `tokenizer_config.json`, where it exists.
    pub fn tokenizer_config(&self) -> Option<&Value> {
        self.tokenizer_config.as_ref()
    }

    /// What is made of pictures before they are read, where it is said: in `preprocessor_config.json`, or in newer
    /// files under `image_processor` in `processor_config.json`.
    pub fn preprocessor_config(&self) -> Option<&Value> {
        self.preprocessor_config.as_ref()
    }

    /// How sentence-transformers makes one vector of a text: the configuration of the pooling module, where there is
    /// one.
    pub fn pooling(&self) -> Option<&Value> {
        self.pooling.as_ref()
    }

    /// The matrices behind the pooled vector, in their order.
    pub fn dense(&self) -> &[Dense] {
        &self.dense
    }

    /// The path of `tokenizer.json`, where it exists.
    pub fn tokenizer_json(&self) -> Option<&Path> {
        self.tokenizer_json.as_deref()
    }

    /// The chat template: `chat_template.jinja`, else the one in `tokenizer_config.json`.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Brings float matrices into this type when they are loaded; rows that do not fill its blocks become Q8_0.
    pub fn quantize(&mut self, dtype: DType) {
        self.weights.quantize(dtype);
    }

    /// Multiplies weights in 8-bit floats with activations in 8-bit floats; whether there are any.
    pub fn multiply_floats8(&mut self) -> bool {
        self.weights.multiply_floats8()
    }

    /// The weights.
    pub fn weights(&self) -> &Safetensors {
        &self.weights
    }
}

/// What `processor_config.json` says of pictures.
fn processor_of_images(directory: &Path) -> Result<Option<Value>, Error> {
    let config: Option<Value> =
        json::read_if_there(&directory.join("processor_config.json"), CONFIG_BYTES_MAX)?;
    Ok(config.and_then(|mut config| config.get_mut("image_processor").map(Value::take)))
}

fn template_file(path: &Path) -> Result<Option<String>, Error> {
    let map = match Map::open(path) {
        Err(error) if matches!(error.fault(), Error::NotFound) => return Ok(None),
        opened => opened?,
    };
    let (len, most) = (map.len(), CHAT_TEMPLATE_BYTES_MAX);
    if len as u64 > most {
        return Err(Error::TooLong { len: len as u64, most }.at(path));
    }
    let text = std::str::from_utf8(&map).map_err(|error| {
        Error::Utf8 { what: "the template", at: 0, len, valid_up_to: error.valid_up_to() }.at(path)
    })?;
    Ok(Some(text.to_owned()))
}

/// The template in a tokenizer's configuration: a string, or a list of named ones whose default is meant.
fn template_in(tokenizer_config: &Value) -> Option<&str> {
    match tokenizer_config.get("chat_template")? {
        Value::String(template) => Some(template),
        Value::Array(named) => {
            let default = named.iter().find(|entry| entry["name"] == "default")?;
            default["template"].as_str()
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_template_of_a_tokenizer_is_a_string_or_the_default_of_several() {
        let default = json!({"name": "default", "template": "yes"});
        for (config, want) in [
            (json!({"chat_template": "yes"}), Some("yes")),
            (json!({"chat_template": [{"name": "tool_use", "template": "no"}, default]}), Some("yes")),
            (json!({"chat_template": [{"name": "tool_use", "template": "no"}]}), None),
            (json!({"chat_template": 1}), None),
            (json!({}), None),
        ] {
            assert_eq!(template_in(&config), want, "{config}");
        }
    }

    #[test]
    fn a_template_file_goes_before_the_configuration() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(directory.path().join(name), bytes).unwrap();
        write("config.json", b"{}");
        write("model.safetensors", b"\x02\0\0\0\0\0\0\0{}");
        write("tokenizer_config.json", br#"{"chat_template": "no"}"#);
        write("chat_template.jinja", b"yes");
        assert_eq!(HuggingFace::open(directory.path()).unwrap().chat_template(), Some("yes"));
        write("chat_template.jinja", &vec![b' '; (1 << 20) + 1]);
        let error = HuggingFace::open(directory.path()).unwrap_err();
        assert!(matches!(error.fault(), Error::TooLong { len: 1_048_577, .. }), "{error}");
    }
}
