//! Texts into vectors.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fornax::{Error, Fornax};
use fornax_engine::of_length_one;
use fornax_text::Special;
use serde::Serialize;

use super::args::ModelArg;
use super::device::{CapacityArgs, Pooling};
use super::failure::Failure;
use super::interrupt::Interrupt;
use super::meter::Meter;
use super::{device, locate, output};

/// Turn texts into vectors that tell how alike they are
///
/// A vector for each text, in their order, at length one unless --raw: encoders pool as their files say; of a decoder
/// it is what its head would read after the last token. Without --json or --out each vector is a line, a JSON array.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax embed --text \"A cat sleeps.\" --text \"A kitten naps.\" --json
  fornax embed ./model.gguf --lines questions.txt --parallel 8 > vectors.ndjson
  fornax embed ./model.gguf --file a.txt --file b.txt --out vectors.f32")]
pub(crate) struct Embed {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) source: EmbedSource,
    /// Leave the vectors as long as the model makes them
    #[arg(long)]
    pub(crate) raw: bool,
    /// How an encoder makes one vector of a text [default: as its files say]
    #[arg(long, value_enum)]
    pub(crate) pooling: Option<Pooling>,
    /// Write rows of little-endian f32 to a file
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub(crate) out: Option<PathBuf>,
    /// Print JSON: {dimensions, embeddings, usage: {prompt_tokens}}
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) capacity: CapacityArgs,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(crate) struct EmbedSource {
    /// A text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) text: Vec<String>,
    /// A file that is one text; - is standard input; may be given several times
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Vec<PathBuf>,
    /// A file of which every line is a text; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) lines: Option<PathBuf>,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Embeddings {
    dimensions: usize,
    embeddings: Vec<Vec<f32>>,
    usage: Usage,
}

#[derive(Debug, Serialize)]
struct Usage {
    prompt_tokens: usize,
}

pub(crate) fn embed(args: &Embed) -> anyhow::Result<()> {
    let texts = texts(&args.source)?;
    let path = locate::locate(args.model.name())?;
    let interrupt = Interrupt::install()?;
    let mut options = device::options(&path, &args.capacity.device)?.parallel(args.capacity.parallel);
    if let Some(pooling) = args.pooling {
        options = options.pooling(pooling.of_model());
    }
    let model = device::open(options)?;
    let prompts = prompts(&model, &texts)?;
    device::announce(model.device(), &args.capacity.device)?;
    let mut embeddings = interrupt.during(|| {
        let mut meter = Meter::new(Duration::from_secs(2));
        model.embed(&prompts, &mut |done| {
            let (done, total) = (done as u64, prompts.len() as u64);
            meter.show("embedding:", (done, total), &format!("{done} of {total} texts"));
            interrupt.flow()
        })
    })?;
    if !args.raw {
        embeddings = embeddings.into_iter().map(of_length_one).collect();
    }
    if let Some(path) = &args.out {
        let unwritable = |error: io::Error| Failure::unwritable(path, &error);
        let mut out = BufWriter::new(File::create(path).map_err(unwritable)?);
        for value in embeddings.iter().flatten() {
            out.write_all(&value.to_le_bytes()).map_err(unwritable)?;
        }
        out.into_inner().map_err(|error| unwritable(error.into_error()))?;
        return Ok(());
    }
    if args.json {
        let prompt_tokens = prompts.iter().map(Vec::len).sum();
        let dimensions = embeddings.first().map_or(0, Vec::len);
        return output::json(&Embeddings { dimensions, embeddings, usage: Usage { prompt_tokens } });
    }
    let mut out = BufWriter::new(io::stdout().lock());
    for embedding in &embeddings {
        serde_json::to_writer(&mut out, embedding)?;
        writeln!(out)?;
    }
    out.flush()?;
    Ok(())
}

/// The texts that the flags name, each with its place for people.
fn texts(source: &EmbedSource) -> anyhow::Result<Vec<(String, String)>> {
    let mut texts = Vec::new();
    for (number, text) in (1..).zip(&source.text) {
        texts.push((format!("--text {number}"), text.clone()));
    }
    for path in &source.file {
        texts.push((path.display().to_string(), output::text_of(path)?));
    }
    if let Some(path) = &source.lines {
        let lines = output::text_of(path)?;
        let lines = (1..).zip(lines.lines());
        texts.extend(
            lines.map(|(number, line)| (format!("line {number} of {}", path.display()), line.to_owned())),
        );
    }
    if texts.is_empty() {
        return Err(
            Failure::usage("there is no text to embed; give one with --text, --file or --lines").into()
        );
    }
    Ok(texts)
}

/// Every text in tokens, before any of them is computed: what is wrong with one is said with its place.
fn prompts(model: &Fornax, texts: &[(String, String)]) -> anyhow::Result<Vec<Vec<u32>>> {
    let tokenizer = model.text().tokenizer().ok_or(Error::NoTokenizer)?;
    let mut prompts = Vec::with_capacity(texts.len());
    for (place, text) in texts {
        let tokens = tokenizer.encode_prompt(text, Special::AsText).map_err(Error::from)?;
        if tokens.is_empty() {
            return Err(
                Failure::usage(format!("{place} is empty; every text needs at least one token")).into()
            );
        }
        if tokens.len() > model.context() {
            let (prompt, context) = (tokens.len(), model.context());
            let message =
                format!("{place} has {prompt} tokens; the context holds {context}: cut it into parts");
            return Err(Failure::new(fornax::Code::PromptTooLong, message).into());
        }
        prompts.push(tokens);
    }
    Ok(prompts)
}
