//! What is in a model, without loading it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use fornax::Error;
use fornax_compute::{KvKind, Scores};
use fornax_format::{Checkpoint, HuggingFace, View};
use fornax_model::{Config, Mixture};
use fornax_text::Tokenizer;
use serde::Serialize;
use serde_json::{Map, json};

use super::args::ModelArg;
use super::{locate, output};

/// Show what is in a model: metadata, architecture facts, tensors, tokenizer, chat template
///
/// Nothing is loaded, and of a model of the hub only headers are fetched: vocabulary-only files and architectures that
/// cannot be computed yet are shown too.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax inspect
  fornax inspect ./model.gguf --json
  fornax inspect ./Qwen2.5-0.5B-Instruct")]
pub(crate) struct Inspect {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Print JSON, with every array in full
    #[arg(long)]
    pub(crate) json: bool,
}

/// Everything that `--json` prints.
#[derive(Debug, Serialize)]
struct Inspection {
    files: Vec<PathBuf>,
    file_bytes: u64,
    container: &'static str,
    /// As the file names it; absent where it does not.
    architecture: Option<String>,
    name: Option<String>,
    /// Values of all tensors.
    parameters: u64,
    /// The numbers that the model is computed by, or why it cannot be computed.
    facts: serde_json::Value,
    /// What the tokenizer is, or why it cannot be used.
    tokenizer: serde_json::Value,
    chat_template: Option<String>,
    metadata: Map<String, serde_json::Value>,
    tensors: Vec<Tensor>,
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    dtype: &'static str,
    /// Slowest dimension first: (rows, columns).
    shape: Vec<usize>,
    bytes: usize,
}

pub(crate) fn inspect(args: &Inspect) -> anyhow::Result<()> {
    let outline = locate::outline(args.model.name())?;
    let inspection = Inspection::of(&Checkpoint::open(&outline.path).map_err(Error::from)?)?;
    if args.json {
        return output::json(&inspection);
    }
    io::stdout().lock().write_all(inspection.text(&outline.name)?.as_bytes())?;
    Ok(())
}

impl Inspection {
    fn of(checkpoint: &Checkpoint) -> anyhow::Result<Inspection> {
        let tensors: Vec<View<'_>> = match checkpoint {
            Checkpoint::Gguf(gguf) => gguf.tensors().collect(),
            Checkpoint::HuggingFace(directory) => directory.weights().tensors().collect(),
        };
        let parameters = tensors.iter().map(|view| view.values() as u64).sum();
        let tensors = tensors.into_iter().map(Tensor::from).collect();
        Ok(match checkpoint {
            Checkpoint::Gguf(gguf) => {
                let metadata = gguf.metadata();
                let string = |key: &str| metadata.opt_str(key).map(|value| value.map(str::to_owned));
                Inspection {
                    files: gguf.files().to_vec(),
                    file_bytes: gguf.file_bytes(),
                    container: "gguf",
                    architecture: string("general.architecture").map_err(Error::from)?,
                    name: string("general.name").map_err(Error::from)?,
                    parameters,
                    facts: facts(checkpoint),
                    tokenizer: tokenizer(checkpoint),
                    chat_template: string("tokenizer.chat_template").map_err(Error::from)?,
                    metadata: metadata
                        .iter()
                        .map(|(key, value)| Ok((key.to_owned(), serde_json::to_value(value)?)))
                        .collect::<anyhow::Result<_>>()?,
                    tensors,
                }
            }
            Checkpoint::HuggingFace(directory) => Inspection {
                files: directory.weights().files().to_vec(),
                file_bytes: directory.weights().file_bytes(),
                container: "safetensors",
                architecture: architecture(directory),
                name: directory.directory().file_name().map(|name| name.to_string_lossy().into_owned()),
                parameters,
                facts: facts(checkpoint),
                tokenizer: tokenizer(checkpoint),
                chat_template: directory.chat_template().map(str::to_owned),
                metadata: directory.config().as_object().cloned().unwrap_or_default(),
                tensors,
            },
        })
    }

    fn text(&self, name: &str) -> Result<String, std::fmt::Error> {
        let mut out = String::new();
        writeln!(out, "{}", output::line(name))?;
        let container =
            format!("{} in {} file(s), {}", self.container, self.files.len(), output::bytes(self.file_bytes));
        writeln!(out, "container     {container}")?;
        writeln!(out, "architecture  {}", output::line(self.architecture.as_deref().unwrap_or("not named")))?;
        writeln!(out, "name          {}", output::line(self.name.as_deref().unwrap_or("-")))?;
        writeln!(out, "parameters    {} in {} tensors", self.parameters, self.tensors.len())?;
        for (title, facts) in [("model", &self.facts), ("tokenizer", &self.tokenizer)] {
            writeln!(out, "\n{title}")?;
            for (key, value) in facts.as_object().into_iter().flatten() {
                writeln!(out, "  {:<44} {}", output::line(key), output::line(&shortened(value)))?;
            }
        }
        writeln!(out, "\nmetadata")?;
        for (key, value) in &self.metadata {
            writeln!(out, "  {:<44} {}", output::line(key), output::line(&shortened(value)))?;
        }
        writeln!(out, "\ntensors")?;
        for tensor in &self.tensors {
            let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
            let name = output::line(&tensor.name);
            writeln!(out, "  {name:<44} {:<8} {}", tensor.dtype, shape.join(" x "))?;
        }
        if let Some(template) = &self.chat_template {
            let lines: Vec<String> = template.lines().map(output::line).collect();
            writeln!(out, "\nchat template\n{}", lines.join("\n"))?;
        }
        Ok(out)
    }
}

fn facts(checkpoint: &Checkpoint) -> serde_json::Value {
    let config = match Config::read(checkpoint) {
        Ok(config) => config,
        Err(error) => return json!({"unsupported": error.to_string()}),
    };
    let windows: BTreeSet<u32> = config.layers.iter().filter_map(|layer| layer.attention()?.window).collect();
    // Layers may differ: what is shown is the first one's, and the widest feed-forward.
    let heads = config.layers.iter().find_map(|layer| layer.attention()).map(|attention| attention.heads);
    let latent = config.layers.iter().find_map(|layer| layer.latent());
    let mut facts = json!({
        "architecture": config.facts.name,
        "layers": config.layers.len(),
        "hidden": config.hidden,
        "heads": heads.map(|heads| heads.query).or(latent.map(|latent| latent.heads)),
        "kv_heads": heads.map(|heads| heads.kv),
        "head_dim": heads.map(|heads| heads.dim),
        "ffn": config.layers.iter().map(|layer| layer.feed_forward.ffn()).max(),
        "vocab": config.vocab,
        "context": config.context,
        "norm_eps": config.norm_eps,
        "rope_base": config.rope.base,
        "rope_dims": config.rope.dims,
        "rope_scaling": format!("{:?}", config.rope.scaling),
        "tied_embeddings": config.tied,
        "qkv_bias": config.qkv_bias,
        "output_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "attention_windows": windows,
    });
    if let Some(latent) = latent {
        facts["latent_row"] = json!(latent.latent + latent.turned);
    }
    if let Some(long) = &config.rope.long {
        // Chosen once for all requests: keys turned by one set do not meet queries turned by the other.
        facts["rope_long_factors"] = json!(format!("where --context is above {}", long.original_context));
    }
    let mut states = config.kv_groups(0).into_iter().filter_map(|group| match group.kind {
        KvKind::State { bytes, every } => Some((group.layers, bytes, every)),
        KvKind::Pairs { .. } | KvKind::Latent { .. } => None,
    });
    if let Some((layers, bytes, every)) = states.next() {
        let all = states.fold((layers, layers * bytes), |all, (layers, bytes, _)| {
            (all.0 + layers, all.1 + layers * bytes)
        });
        facts["states"] =
            json!({"layers": all.0, "bytes_a_sequence": all.1, "tokens_between_checkpoints": every});
    }
    if let Some(inputs) = config.layer_inputs {
        // On a processor that is its own memory.
        facts["layer_embeddings"] = json!({
            "width": inputs.width,
            "values": config.vocab * config.layers.len() * inputs.width,
            "table": "in the host's memory, read row by row",
        });
    }
    let beside = config.not_computed(checkpoint);
    if !beside.is_empty() {
        facts["not_computed"] = json!(beside);
    }
    if let Some(Mixture { routing, ffn, narrow, .. }) = config.mixture() {
        let scores = match routing.scores {
            Scores::Softmax => "softmax",
            Scores::Sigmoid => "sigmoid",
            Scores::SqrtSoftplus => "sqrt-softplus",
        };
        facts["experts"] =
            json!({"count": routing.experts, "chosen": routing.chosen, "ffn": ffn, "scores": scores});
        if let Some(groups) = routing.groups {
            facts["experts"]["groups"] = json!({"count": groups.count, "chosen": groups.chosen});
        }
        if let Some(width) = narrow {
            facts["experts"]["width"] = json!(width);
        }
        if routing.scale != 1.0 {
            facts["experts"]["scale"] = json!(routing.scale);
        }
    }
    facts
}

fn tokenizer(checkpoint: &Checkpoint) -> serde_json::Value {
    let tokenizer = match Tokenizer::open(checkpoint) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return json!({"unsupported": error.to_string()}),
    };
    let named = |id: u32| json!({"id": id, "piece": tokenizer.piece(id)});
    json!({
        "tokens": tokenizer.vocab_len(),
        "bos": tokenizer.bos().map(named),
        "adds_bos": tokenizer.add_bos(),
        "eos": tokenizer.eos().map(named),
        "end_tokens": tokenizer.end_tokens().iter().copied().map(named).collect::<Vec<_>>(),
    })
}

/// The first of the architectures that a configuration names.
fn architecture(directory: &HuggingFace) -> Option<String> {
    let named =
        directory.config().get("model_type").or_else(|| directory.config().get("architectures")?.get(0))?;
    named.as_str().map(str::to_owned)
}

/// A value in one line, for people.
fn shortened(value: &serde_json::Value) -> String {
    const CHARACTERS_MAX: usize = 60;
    const ELEMENTS_SHOWN: usize = 4;
    if let serde_json::Value::Array(elements) = value
        && elements.len() > ELEMENTS_SHOWN
    {
        let shown: Vec<String> = elements[..ELEMENTS_SHOWN].iter().map(shortened).collect();
        return format!("[{}, ...] ({} elements)", shown.join(", "), elements.len());
    }
    let text = value.to_string();
    match text.char_indices().nth(CHARACTERS_MAX) {
        Some((at, _)) => format!("{}... ({} characters)", &text[..at], text.chars().count()),
        None => text,
    }
}

impl From<View<'_>> for Tensor {
    fn from(view: View<'_>) -> Tensor {
        Tensor {
            name: view.name.to_owned(),
            dtype: view.dtype.name(),
            bytes: view.bytes.len(),
            shape: view.shape,
        }
    }
}
