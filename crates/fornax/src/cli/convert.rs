//! `fornax convert`: a GGUF file of a model in safetensors.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use fornax::convert::{Converting, TYPES, convert as convert_model};
use fornax::quantize::Mix;
use fornax::units::binary;
use serde_json::json;

use super::args::positive;
use super::interrupt::Interrupt;
use super::locate;
use super::meter::Meter;
use super::quantize::of_types;

/// Make a GGUF file of a model in safetensors
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax convert ./Qwen3-0.6B qwen3-0.6b.gguf
  fornax convert Qwen/Qwen3-0.6B qwen3-0.6b.gguf --to Q8_0
  fornax quantize qwen3-0.6b.gguf qwen3-0.6b-q4_k_m.gguf

Names, numbers, tokenizer and chat template are written as llama.cpp's converter writes them. A \
model that the file could not say, or a tokenizer that would cut texts otherwise in it, is refused. What exists is not replaced.")]
pub(crate) struct Convert {
    /// A Hugging Face directory, or a model of the hub
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// The file to make
    #[arg(value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// The type of matrices: F32, F16, BF16 or Q8_0 [default: the one most of them are stored in]
    #[arg(long, value_name = "TYPE", value_parser = mix)]
    pub(crate) to: Option<Mix>,
    /// What the file calls the model [default: the directory's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// CPU threads [default: one per processor]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) threads: Option<usize>,
    /// Print JSON: {path, architecture, type, bytes, tensors, tokenizer}
    #[arg(long)]
    pub(crate) json: bool,
}

fn mix(text: &str) -> Result<Mix, String> {
    let known = || format!("known types: {}; fornax quantize makes the others", TYPES.join(", "));
    Mix::named(text).filter(|mix| TYPES.contains(&mix.name())).ok_or_else(known)
}

pub(crate) fn convert(args: &Convert) -> anyhow::Result<()> {
    let path = locate::locate(Some(&args.model))?;
    let threads = args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    // The folder of a model of the hub is called by its commit.
    let name = args.name.clone().or_else(|| hub_name(&args.model));
    let converting = Converting { to: args.to, name, threads };
    let interrupt = Interrupt::install()?;
    let mut meter = Meter::new(Duration::from_millis(500));
    let made = interrupt.during(|| {
        convert_model(&path, &args.out, &converting, &mut |done, total| {
            meter.show("converting", (done, total), &format!("{} of {}", binary(done), binary(total)));
            interrupt.flow()
        })
    })?;
    let mut out = io::stdout().lock();
    if args.json {
        let told = json!({"path": args.out, "architecture": made.architecture, "type": made.to,
            "bytes": made.bytes, "tensors": of_types(&made.types), "tokenizer": made.tokenizer});
        writeln!(out, "{told}")?;
        return Ok(());
    }
    let types: Vec<String> = made.types.iter().map(|(dtype, count)| format!("{count} {dtype}")).collect();
    let without = if made.tokenizer { "" } else { ", without a tokenizer: the directory has none" };
    writeln!(
        out,
        "{}: {}, {} ({}){without}",
        args.out.display(),
        binary(made.bytes),
        made.architecture,
        types.join(", ")
    )?;
    Ok(())
}

/// The last word of a reference to the hub; `None` where a path was typed.
fn hub_name(typed: &str) -> Option<String> {
    let name = typed.split(['@', ':']).next()?.rsplit('/').next()?;
    (!Path::new(typed).exists() && !name.is_empty()).then(|| name.to_owned())
}
