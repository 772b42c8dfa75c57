//! How well a model predicts a text. The definition is in the command's help.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fornax::{Device, Error, Private, Request};
use fornax_text::Special;
use serde::Serialize;

use super::args::ModelArg;
use super::device::DeviceArgs;
use super::failure::Failure;
use super::interrupt::Interrupt;
use super::meter::Meter;
use super::{device, locate, output};

/// Measure how well a model predicts a text
///
/// The text is tokenized as a whole and cut into consecutive windows of --context tokens (with a BOS token in front
/// of each, inside that length, where the tokenizer adds one). Within a window every token is predicted from those
/// before it; a window's first token is predicted only from a BOS token and is not counted where there is none. The
/// perplexity is exp of the mean negative log-likelihood of the counted tokens.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax perplexity --file wiki.test.raw --context 512
  fornax perplexity ./model.gguf --file book.txt --kv-dtype f32 --activations float --json")]
pub(crate) struct Perplexity {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// The text; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Compute it as private inference does: weights of 8 bits, exact products of whole numbers, all on this machine
    #[arg(long, conflicts_with = "activations")]
    pub(crate) w8: bool,
    /// Print JSON: {perplexity, nll, tokens, windows, context}
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

/// Rows of logits computed at once.
const ROWS: usize = 32;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Measure {
    perplexity: f64,
    /// Mean negative log-likelihood of a counted token, in nats.
    nll: f64,
    /// Tokens that were counted.
    tokens: usize,
    windows: usize,
    context: usize,
}

pub(crate) fn perplexity(args: &Perplexity) -> anyhow::Result<()> {
    let text = output::text_of(&args.file)?;
    let path = locate::locate(args.model.name())?;
    let interrupt = Interrupt::install()?;
    let mut options = device::options(&path, &args.device)?.logit_rows(ROWS);
    if args.w8 {
        options = options.device(Device::Cpu).private(Private::Reference);
    }
    let model = device::open(options)?;
    let context = model.context();
    let tokenizer = model.text().tokenizer().ok_or(Error::NoTokenizer)?;
    let tokens = tokenizer.encode(&text, Special::AsText).map_err(Error::from)?;
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    let fresh = context - bos.iter().len();
    if tokens.len() + bos.iter().len() < 2 || fresh == 0 {
        let message = format!(
            "{} tokens in windows of {context} leave nothing to predict; give more text",
            tokens.len()
        );
        return Err(Failure::usage(message).into());
    }
    device::announce(model.device(), &args.device)?;
    let mut nll = Vec::with_capacity(tokens.len());
    let mut meter = Meter::new(Duration::from_secs(2));
    for window in tokens.chunks(fresh) {
        let window: Vec<u32> = bos.into_iter().chain(window.iter().copied()).collect();
        // The last window may hold a single token, which nothing comes before.
        if window.len() > 1 {
            let request =
                Request { max_tokens: Some(0), prompt_logprobs: Some(0), ..Request::tokens(window) };
            let scored = interrupt.during(|| model.complete(&request, &mut |_| interrupt.flow()))?;
            let logprobs = scored.prompt_logprobs.iter().filter_map(|(_, opinion)| opinion.logprob);
            nll.extend(logprobs.map(|logprob| -f64::from(logprob)));
        }
        let (done, total) = (nll.len() as u64, tokens.len() as u64);
        meter.show("predicting:", (done, total), &format!("{done} of {total} tokens"));
    }
    drop(meter);
    let mean = nll.iter().sum::<f64>() / nll.len() as f64;
    let windows = tokens.len().div_ceil(fresh);
    let measure = Measure { perplexity: mean.exp(), nll: mean, tokens: nll.len(), windows, context };
    if args.json {
        return output::json(&measure);
    }
    let Measure { perplexity, tokens, windows, .. } = measure;
    writeln!(
        io::stdout(),
        "perplexity {perplexity:.4} over {tokens} tokens in {windows} windows of {context}"
    )?;
    Ok(())
}
