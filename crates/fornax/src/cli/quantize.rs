//! `fornax quantize`: a GGUF file in another type.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fornax::importance::Importance;
use fornax::quantize::{Mix, Quantizing, quantize as quantize_file};
use fornax::units::binary;
use fornax_format::DType;
use serde_json::json;

use super::args::positive;
use super::interrupt::Interrupt;
use super::locate;
use super::meter::Meter;

/// Make a GGUF file of another type
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax quantize model-f16.gguf model-q4_k_m.gguf
  fornax quantize model-bf16.gguf small.gguf --to Q4_0 --importance imatrix.gguf

Files are the same to the byte as those of llama.cpp's llama-quantize: which tensors get which type (of Q4_K_M, the head and half \
of the values in Q6_K), their order, their blocks. The file gets its name when it is complete, and what exists is not \
replaced.")]
pub(crate) struct Quantize {
    /// The GGUF file to read: best in F16, BF16 or F32
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// The file to make
    #[arg(value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q5_1, Q5_0, Q4_K_M, Q4_K_S, Q4_1, Q4_0, IQ4_NL, IQ4_XS, Q3_K_L, Q3_K_M,
    /// Q3_K_S, Q2_K, Q2_K_S, TQ2_0, TQ1_0 or MXFP4_MOE
    #[arg(long, value_name = "TYPE", default_value = "Q4_K_M", value_parser = mix)]
    pub(crate) to: Mix,
    /// How much each column counts: an importance matrix as llama.cpp's llama-imatrix writes it into a GGUF file
    #[arg(long, value_name = "FILE")]
    pub(crate) importance: Option<PathBuf>,
    /// Quantise once more what is quantised already, which loses more than quantising the original
    #[arg(long)]
    pub(crate) allow_requantize: bool,
    /// CPU threads [default: one per processor]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) threads: Option<usize>,
    /// Print JSON: {path, type, bytes, bytes_before, tensors}
    #[arg(long)]
    pub(crate) json: bool,
}

fn mix(text: &str) -> Result<Mix, String> {
    Mix::named(text).ok_or_else(|| format!("known types: {}", Mix::names().collect::<Vec<_>>().join(", ")))
}

pub(crate) fn quantize(args: &Quantize) -> anyhow::Result<()> {
    let path = locate::locate(Some(&args.model))?;
    let importance = args.importance.as_deref().map(Importance::open).transpose()?;
    let threads = args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let quantizing = Quantizing { mix: args.to, importance, requantize: args.allow_requantize, threads };
    let interrupt = Interrupt::install()?;
    let mut meter = Meter::new(Duration::from_millis(500));
    let made = interrupt.during(|| {
        quantize_file(&path, &args.out, &quantizing, &mut |done, total| {
            meter.show("quantising", (done, total), &format!("{} of {}", binary(done), binary(total)));
            interrupt.flow()
        })
    })?;
    let mut out = io::stdout().lock();
    if args.json {
        let told = json!({"path": args.out, "type": args.to.name(), "bytes": made.bytes,
            "bytes_before": made.bytes_before, "tensors": of_types(&made.types)});
        writeln!(out, "{told}")?;
    } else {
        let types: Vec<String> = made.types.iter().map(|(dtype, count)| format!("{count} {dtype}")).collect();
        writeln!(
            out,
            "{}: {}, from {} ({})",
            args.out.display(),
            binary(made.bytes),
            binary(made.bytes_before),
            types.join(", ")
        )?;
    }
    Ok(())
}

/// How many tensors are in each type, as JSON.
pub(crate) fn of_types(types: &[(DType, usize)]) -> serde_json::Map<String, serde_json::Value> {
    types.iter().map(|(dtype, count)| (dtype.to_string(), json!(count))).collect()
}
