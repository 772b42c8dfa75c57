//! Low-rank adapters in PEFT's layout: what their configuration means, and which product each of their pairs changes.

use std::collections::HashSet;

use fornax_compute::{LowRank, Memory, Part, RANK_MAX};
use fornax_format::{AdapterFiles, View};
use serde_json::Value;

use crate::config::distinct;
use crate::facts::QkRows;
use crate::names::{Name, Owner, Tensor, Transform};
use crate::source::one_line;
use crate::{Config, Error};

/// An adapter for a model: small matrices whose product is added to some of its products.
#[derive(Debug)]
pub struct Adapter {
    name: String,
    files: AdapterFiles,
    rank: usize,
    scale: f32,
    /// What it says it was trained on.
    base: Option<String>,
}

/// Why an adapter cannot be had.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AdapterFault {
    /// A key of adapter_config.json that is missing, or whose value cannot be had.
    #[error("{key} is {got}, wanted {wanted}")]
    Key {
        /// The key.
        key: &'static str,
        /// Its value.
        got: String,
        /// What can be had.
        wanted: &'static str,
    },
    /// A tensor that changes nothing that can be changed.
    #[error(
        "tensor {tensor:?} changes nothing of the {architecture} architecture that can be changed: {changeable}"
    )]
    Tensor {
        /// The tensor.
        tensor: String,
        /// The architecture of the model.
        architecture: &'static str,
        /// What can be changed.
        changeable: String,
    },
    /// A matrix whose other half is not there.
    #[error("tensor {tensor:?} is missing")]
    Half {
        /// The one that is not there.
        tensor: String,
    },
    /// A shape that is not this model's.
    #[error("tensor {tensor:?} has shape {got:?}, wanted {wanted:?}: it is for another model")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape.
        got: Vec<usize>,
        /// The shape that would change this model.
        wanted: Vec<usize>,
    },
    /// Another model than the one it was trained on.
    #[error("it was trained on {trained:?}, and this model is {served:?}")]
    Base {
        /// What it says.
        trained: String,
        /// What the model says of itself.
        served: String,
    },
    /// Nothing in it.
    #[error("it has no tensors")]
    Empty,
    /// More than there is room for.
    #[error("its rank is {rank}; there is room for adapters of rank {most}")]
    Rank {
        /// Its rank.
        rank: usize,
        /// The largest that there is room for.
        most: usize,
    },
    /// A model that was loaded without room for adapters that come later.
    #[error("the model was loaded without room for adapters that come later")]
    NoRoom,
    /// An encoder.
    #[error("{architecture} is an encoder; adapters are for decoders")]
    Encoder {
        /// The architecture of the model.
        architecture: &'static str,
    },
}

/// What adapters may change, in the order in which it lies in the model.
const CHANGEABLE: [Tensor; 9] = [
    Tensor::Query,
    Tensor::Key,
    Tensor::Value,
    Tensor::Qkv,
    Tensor::AttentionOutput,
    Tensor::Gate,
    Tensor::Up,
    Tensor::GateUp,
    Tensor::Down,
];

/// What stands before a model's own names.
const PREFIX: &str = "base_model.model.";

/// What each key has to be for the adapter to be what is computed here. Others are about training.
const FIXED: &[(&str, &str)] = &[
    ("use_dora", "false (DoRA is not supported)"),
    ("use_qalora", "false"),
    ("use_bdlora", "false"),
    ("lora_bias", "false"),
    ("fan_in_fan_out", "false"),
    ("modules_to_save", "nothing: whole modules beside an adapter are not supported"),
    ("rank_pattern", "nothing: every matrix has the same rank"),
    ("alpha_pattern", "nothing: every matrix has the same alpha"),
    ("layer_replication", "nothing"),
    ("target_parameters", "nothing: parameters of experts cannot be changed"),
    ("trainable_token_indices", "nothing: embeddings cannot be changed"),
    ("alora_invocation_tokens", "nothing"),
    ("arrow_config", "nothing"),
    ("kasa_config", "nothing"),
    ("velora_config", "nothing"),
    ("monteclora_config", "nothing"),
];

impl Adapter {
    /// Reads the configuration of an adapter that requests call `name`.
    pub fn new(name: impl Into<String>, files: AdapterFiles) -> Result<Adapter, Error> {
        let name = name.into();
        match read(files.config()) {
            Ok((rank, scale)) => {
                let base = files.config()["base_model_name_or_path"].as_str().map(str::to_owned);
                Ok(Adapter { name, files, rank, scale, base })
            }
            Err(fault) => Err(Error::Adapter { adapter: name, fault }),
        }
    }

    /// What requests call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The rank of its matrices.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Bytes of its file.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.weights().tensors().map(|view| view.bytes.len() as u64).sum()
    }

    /// Refuses an adapter that is not for this model, before anything is loaded. `served` is what the model says that it
    /// is, where it says so.
    pub(crate) fn check(&self, config: &Config, served: Option<&str>) -> Result<(), Error> {
        let refuse = |fault| Err(Error::Adapter { adapter: self.name.clone(), fault });
        if config.pooling.is_some() {
            return refuse(AdapterFault::Encoder { architecture: config.facts.name });
        }
        if let (Some(trained), Some(served)) = (&self.base, served)
            && is_hub_name(trained)
            && is_hub_name(served)
            && trained != served
        {
            return refuse(AdapterFault::Base { trained: trained.clone(), served: served.to_owned() });
        }
        let mut known = HashSet::new();
        for layer in 0..config.layers.len() {
            for row in changeable(config, layer) {
                let Some(pair) = self.pair(config, row, layer)? else { continue };
                known.extend([pair.down.name.to_owned(), pair.up.name.to_owned()]);
            }
        }
        let other = self.files.weights().tensors().find(|view| !known.contains(view.name));
        match other {
            Some(view) => {
                let rows = distinct((0..config.layers.len()).flat_map(|layer| changeable(config, layer)));
                let names = rows.iter().filter_map(|row| row.hugging_face?.strip_suffix(".weight"));
                refuse(AdapterFault::Tensor {
                    tensor: view.name.to_owned(),
                    architecture: config.facts.name,
                    changeable: names.collect::<Vec<_>>().join(", "),
                })
            }
            None if known.is_empty() => refuse(AdapterFault::Empty),
            None => Ok(()),
        }
    }

    /// The matrices that change one weight, if there are any.
    fn pair(&self, config: &Config, row: &Name, layer: usize) -> Result<Option<Pair<'_>>, Error> {
        let Some(own) = row.hugging_face.and_then(|name| name.strip_suffix(".weight")) else {
            return Ok(None);
        };
        let name = |half: &str| format!("{PREFIX}{}.{layer}.{own}.lora_{half}.weight", config.facts.layers);
        let find = |half: &str| self.files.weights().tensor(&name(half));
        let fault = |fault| Error::Adapter { adapter: self.name.clone(), fault };
        let (down, up) = match (find("A"), find("B")) {
            (None, None) => return Ok(None),
            (Some(down), Some(up)) => (down, up),
            (None, Some(_)) => return Err(fault(AdapterFault::Half { tensor: name("A") })),
            (Some(_), None) => return Err(fault(AdapterFault::Half { tensor: name("B") })),
        };
        let [outputs, inputs] = [row.shape[0].size(config, layer), row.shape[1].size(config, layer)];
        for (view, wanted) in [(&down, [self.rank, inputs]), (&up, [outputs, self.rank])] {
            if view.shape[..] != wanted {
                let (tensor, got) = (view.name.to_owned(), view.shape.clone());
                return Err(fault(AdapterFault::Shape { tensor, got, wanted: wanted.to_vec() }));
            }
        }
        Ok(Some(Pair { down, up, outputs }))
    }

    /// What it adds to the product with the weights of `tensors`, which are stacked by their rows.
    pub(crate) fn changes<M: Memory>(
        &self,
        config: &Config,
        memory: &M,
        tensors: &[Tensor],
        layer: usize,
    ) -> Result<Vec<LowRank<M::Buf>>, Error> {
        let mut changes = Vec::new();
        let mut column = 0;
        for tensor in tensors {
            let Some(row) = config.facts.row(*tensor).filter(|row| row.when.holds(config, layer)) else {
                continue;
            };
            let columns = row.shape[0].size(config, layer);
            let changeable = changeable(config, layer).any(|other| other == row);
            if changeable && let Some(pair) = self.pair(config, row, layer)? {
                changes.push(LowRank {
                    down: memory.upload_vector(&[flat(&pair.down)?])?,
                    up: memory.upload_vector(&[flat(&pair.up)?])?,
                    rank: self.rank,
                    scale: self.scale,
                    column,
                    columns: pair.outputs,
                });
            }
            column += columns;
        }
        Ok(changes)
    }
}

/// What adapters that come while a model is loaded are checked against.
pub(crate) struct Later {
    pub(crate) config: Config,
    /// What the model says that it is.
    pub(crate) served: Option<String>,
}

impl Later {
    /// Refuses an adapter that is not for this model, or larger than the room for it.
    pub(crate) fn check(&self, adapter: &Adapter) -> Result<(), Error> {
        let (rank, most) = (adapter.rank, self.config.adapter_room.rank);
        if rank > most {
            return Err(Error::Adapter {
                adapter: adapter.name.clone(),
                fault: AdapterFault::Rank { rank, most },
            });
        }
        adapter.check(&self.config, self.served.as_deref())
    }
}

/// Rows and columns of those of the tensors that an adapter may change in a layer.
pub(crate) fn matrices(config: &Config, tensors: &[Tensor], layer: usize) -> Vec<[usize; 2]> {
    if config.pooling.is_some() {
        return Vec::new();
    }
    let rows =
        tensors.iter().filter_map(|tensor| changeable(config, layer).find(|row| row.tensor == *tensor));
    rows.filter(|row| row.hugging_face.is_some())
        .map(|row| [row.shape[0].size(config, layer), row.shape[1].size(config, layer)])
        .collect()
}

/// The two matrices beside one weight.
struct Pair<'a> {
    down: View<'a>, // (rank, in)
    up: View<'a>,   // (out, rank)
    outputs: usize,
}

/// The rows of the model's tables that an adapter may change in a layer.
fn changeable(config: &Config, layer: usize) -> impl Iterator<Item = &'static Name> {
    config.facts.rows().filter(move |row| {
        row.owner == Owner::Layer
            && CHANGEABLE.contains(&row.tensor)
            && row.when.holds(config, layer)
            && match row.transform {
                Transform::Keep => true,
                // An adapter's rows are taken as they are.
                Transform::QkRows => config.facts.hugging_face_qk_rows == QkRows::Halves,
                _ => false,
            }
    })
}

/// A matrix as one row.
fn flat<'a>(view: &View<'a>) -> Result<Part<'a>, Error> {
    Ok(Part::from(View::new(view.name, view.dtype, vec![view.values()], view.bytes)?))
}

/// `owner/name`, as the hub has it; a path of somebody's machine says nothing.
fn is_hub_name(name: &str) -> bool {
    name.split('/').filter(|part| !part.is_empty()).count() == 2
        && name.matches('/').count() == 1
        && !name.starts_with('.')
}

/// The rank and the scale of a configuration that is one of those computed here.
fn read(config: &Value) -> Result<(usize, f32), AdapterFault> {
    let wrong = |key, wanted| AdapterFault::Key { key, got: one_line(&config[key]), wanted };
    if config["peft_type"] != "LORA" {
        return Err(wrong("peft_type", "\"LORA\""));
    }
    if !(config["bias"].is_null() || config["bias"] == "none") {
        return Err(wrong("bias", "\"none\""));
    }
    let is_nothing = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    if let Some((key, wanted)) = FIXED.iter().find(|(key, _)| !is_nothing(&config[*key])) {
        return Err(wrong(key, wanted));
    }
    // Others change the weights that the adapter stands beside.
    let start = &config["init_lora_weights"];
    if !(start.is_null() || start.is_boolean() || start == "gaussian") {
        return Err(wrong("init_lora_weights", "true, false or \"gaussian\""));
    }
    let rank = config["r"].as_u64().and_then(|rank| usize::try_from(rank).ok());
    let rank = rank.filter(|rank| (1..=RANK_MAX).contains(rank)).ok_or(wrong("r", "1 to 512"))?;
    let alpha = config["lora_alpha"].as_f64().filter(|alpha| alpha.is_finite());
    let alpha = alpha.ok_or(wrong("lora_alpha", "a number"))?;
    let over = match config["use_rslora"].as_bool().unwrap_or(false) {
        true => (rank as f64).sqrt(),
        false => rank as f64,
    };
    Ok((rank, (alpha / over) as f32))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_configuration_says_its_rank_and_scale_or_what_cannot_be_had_of_it() {
        let good = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": false,
            "modules_to_save": null, "rank_pattern": {}, "init_lora_weights": true});
        assert_eq!(read(&good), Ok((4, 2.0)));
        let with = |key: &str, value: Value| {
            let mut config = good.clone();
            config[key] = value;
            read(&config)
        };
        assert_eq!(with("use_rslora", json!(true)), Ok((4, 4.0)));
        let check = |key: &str, value: Value, words: &str| {
            let said = with(key, value).unwrap_err().to_string();
            assert!(said.starts_with(words), "{said}");
        };
        check("peft_type", json!("IA3"), "peft_type is \"IA3\", wanted \"LORA\"");
        check("bias", json!("all"), "bias is \"all\"");
        check("bias", json!("n\u{7f}\u{9b}2J"), "bias is \"n\\u{7f}\\u{9b}2J\"");
        check("use_dora", json!(true), "use_dora is true, wanted false (DoRA is not supported)");
        check("modules_to_save", json!(["lm_head"]), "modules_to_save is [\"lm_head\"]");
        check("rank_pattern", json!({"q_proj": 8}), "rank_pattern is {\"q_proj\":8}");
        check("init_lora_weights", json!("pissa"), "init_lora_weights is \"pissa\"");
        check("r", json!(513), "r is 513, wanted 1 to 512");
        check("r", Value::Null, "r is null");
        check("lora_alpha", json!("8"), "lora_alpha is \"8\"");
    }

    #[test]
    fn a_path_is_no_name_of_the_hub() {
        assert!(is_hub_name("org/model"));
        for other in ["/data/model", "./model", "model", "a/b/c", "org/"] {
            assert!(!is_hub_name(other), "{other}");
        }
    }
}
