//! `fornax imatrix`: how much the columns of a model's matrices count.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fornax::importance::{Measuring, measure};
use fornax::units::binary;
use fornax::{Activations, OpenOptions};
use serde_json::json;

use super::args::positive;
use super::interrupt::Interrupt;
use super::meter::Meter;
use super::{locate, output};

/// Measure on a text how much each column of a model's matrices counts
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax imatrix model-f16.gguf imatrix.gguf --file calibration.txt
  fornax quantize model-f16.gguf small.gguf --to Q2_K_S --importance imatrix.gguf

The text is cut into chunks of --context tokens, each of which is computed on its own and begins with a BOS token where the \
tokenizer adds one. The file holds, for each matrix of a layer, the sums of squares of what it was multiplied by, as llama.cpp's \
llama-imatrix writes them. What exists is not replaced.")]
pub(crate) struct Imatrix {
    /// The GGUF file that will be quantised: best in F16, BF16 or F32
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// The file to make
    #[arg(value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// The text; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Tokens of a chunk
    #[arg(long, value_name = "N", default_value = "512", value_parser = positive)]
    pub(crate) context: usize,
    /// The most chunks [default: the whole text]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) chunks: Option<usize>,
    /// CPU threads [default: one per processor that the process may use, of one memory node]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) threads: Option<usize>,
    /// Print JSON: {path, bytes, chunks, matrices, unused}
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn imatrix(args: &Imatrix) -> anyhow::Result<()> {
    let measuring = Measuring {
        text: output::text_of(&args.file)?,
        source: args.file.display().to_string(),
        chunk: args.context,
        chunks: args.chunks,
    };
    let path = locate::locate(Some(&args.model))?;
    let mut options = OpenOptions::new(&path).activations(Activations::Float);
    if let Some(threads) = args.threads {
        options = options.threads(threads);
    }
    let interrupt = Interrupt::install()?;
    let mut meter = Meter::new(Duration::from_millis(500));
    let made = interrupt.during(|| {
        measure(&path, options, &measuring, &args.out, &mut |done, total| {
            meter.show("measuring", (done, total), &format!("{done} of {total}"));
            interrupt.flow()
        })
    })?;
    let mut out = io::stdout().lock();
    if args.json {
        let told = json!({"path": args.out, "bytes": made.bytes, "chunks": made.chunks,
            "matrices": made.matrices, "unused": made.unused});
        writeln!(out, "{told}")?;
        return Ok(());
    }
    let unused = match made.unused {
        0 => String::new(),
        unused => format!("; {unused} matrices of experts that no token went to: give more text"),
    };
    let (out_path, bytes) = (args.out.display(), binary(made.bytes));
    writeln!(out, "{out_path}: {bytes}, {} matrices, {} chunks{unused}", made.matrices, made.chunks)?;
    Ok(())
}
