//! What the model thinks comes next.

use std::fs::Permissions;
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Args;
use fornax::{Evaluator, Text};
use serde::Serialize;
use tempfile::NamedTempFile;

use super::args::{JsonArg, ModelArg, PromptArgs};
use super::device::DeviceArgs;
use super::failure::Failure;
use super::interrupt::Interrupt;
use super::{device, generate, locate, output};

/// Show the logits after a prompt
///
/// --json prints {top: [{token, piece, logit, logprob}]}, most likely first. With --all --out the logits after every
/// token are written as rows of little-endian f32, one row per token, as wide as the vocabulary.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax logits --prompt \"The sky is\" --top 5
  fornax logits --tokens 504,6376,314 --json
  fornax logits --prompt \"The sky is\" --all --out logits.f32")]
pub(crate) struct Logits {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// How many of the most likely tokens to show
    #[arg(long, value_name = "K", default_value = "10", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) top: u32,
    /// Write the logits after every token to --out
    #[arg(long, requires = "out")]
    pub(crate) all: bool,
    /// Where --all writes; the file appears only when it is complete
    #[arg(long, value_name = "FILE", requires = "all")]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: JsonArg,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

/// Rows of logits computed at once with `--all`: enough to read each weight for many tokens, and megabytes for the
/// largest vocabularies.
const ROWS: usize = 32;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Opinion {
    top: Vec<Candidate>,
}

#[derive(Debug, Serialize)]
struct Candidate {
    token: u32,
    piece: String,
    logit: f32,
    logprob: f64,
}

/// What `--all --json` prints.
#[derive(Debug, Serialize)]
struct Written<'a> {
    out: &'a Path,
    rows: usize,
    columns: usize,
}

pub(crate) fn logits(args: &Logits) -> anyhow::Result<()> {
    let prompt = generate::prompt(&args.prompt)?;
    let path = locate::locate(args.model.name())?;
    let interrupt = Interrupt::install()?;
    let options = device::options(&path, &args.device)?;
    let mut model = device::evaluator(options, if args.all { ROWS } else { 1 })?;
    let tokens = model.text().prompt_tokens(&prompt)?;
    model.check(&tokens)?;
    // An interrupt leaves no file half-written, from the moment that there is one.
    interrupt.during(|| {
        // Made before anything is said or computed: a folder that cannot be written is known at once.
        let rows = args.out.as_deref().map(Rows::create).transpose()?;
        device::announce(model.device(), &args.device)?;
        match rows {
            Some(rows) => write_all(&mut model, &tokens, rows, args.output.json, &interrupt),
            None => show_top(&mut model, &tokens, args, &interrupt),
        }
    })
}

fn show_top(
    model: &mut Evaluator,
    tokens: &[u32],
    args: &Logits,
    interrupt: &Interrupt,
) -> anyhow::Result<()> {
    let mut row = Vec::new();
    model.logits(tokens, true, &mut |_, logits| {
        row.extend_from_slice(logits);
        interrupt.flow()
    })?;
    let opinion = Opinion { top: top(model.text(), &row, args.top as usize) };
    if args.output.json {
        return output::json(&opinion);
    }
    let mut out = io::stdout().lock();
    writeln!(out, "   token     logit   logprob  piece")?;
    for Candidate { token, piece, logit, logprob } in &opinion.top {
        writeln!(out, "{token:>8}  {logit:>8.4}  {logprob:>8.4}  {piece:?}")?;
    }
    Ok(())
}

/// The most likely tokens, the lower id first among equals. Rows of the head beyond the vocabulary are padding.
fn top(text: &Text, row: &[f32], count: usize) -> Vec<Candidate> {
    let row = &row[..text.vocab()];
    let normalizer = log_sum_exp(row);
    let mut order: Vec<usize> = (0..row.len()).collect();
    let count = count.min(order.len());
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    order[..count]
        .iter()
        .map(|&token| Candidate {
            token: token as u32,
            piece: text.tokenizer().map(|tokenizer| tokenizer.piece(token as u32)).unwrap_or_default(),
            logit: row[token],
            logprob: f64::from(row[token]) - normalizer,
        })
        .collect()
}

/// The logarithm of the sum of the exponentials, summed in double precision.
fn log_sum_exp(row: &[f32]) -> f64 {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + row.iter().map(|&logit| (f64::from(logit) - max).exp()).sum::<f64>().ln()
}

/// Writes the logits after every token.
fn write_all(
    model: &mut Evaluator,
    tokens: &[u32],
    mut rows: Rows<'_>,
    json: bool,
    interrupt: &Interrupt,
) -> anyhow::Result<()> {
    let (out, columns) = (rows.out, model.columns());
    let mut written = Ok(());
    let computed = model.logits(tokens, false, &mut |_, row| {
        written = rows.write(row);
        if written.is_err() { ControlFlow::Break(()) } else { interrupt.flow() }
    });
    written?;
    computed?;
    rows.finish()?;
    if json {
        return output::json(&Written { out, rows: tokens.len(), columns });
    }
    writeln!(io::stdout(), "{} rows of {columns} written to {}", tokens.len(), out.display())?;
    Ok(())
}

/// A file of f32 rows that has its name only once it is complete.
struct Rows<'a> {
    out: &'a Path,
    file: BufWriter<NamedTempFile>,
}

impl Rows<'_> {
    fn create(out: &Path) -> Result<Rows<'_>, Failure> {
        let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let file = tempfile::Builder::new()
            .prefix(".fornax-")
            // Like any other new file: what the user's mask leaves of it.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder)
            .map_err(|error| Failure::unwritable(out, &error))?;
        Ok(Rows { out, file: BufWriter::new(file) })
    }

    fn write(&mut self, row: &[f32]) -> Result<(), Failure> {
        row.iter()
            .try_for_each(|logit| self.file.write_all(&logit.to_le_bytes()))
            .map_err(|error| Failure::unwritable(self.out, &error))
    }

    fn finish(self) -> Result<(), Failure> {
        let unwritable = |error: io::Error| Failure::unwritable(self.out, &error);
        let file = self.file.into_inner().map_err(|error| unwritable(error.into_error()))?;
        file.persist(self.out).map_err(|error| unwritable(error.error))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_logits_do_not_overflow() {
        assert!((log_sum_exp(&[1000.0, 1000.0]) - (1000.0 + 2f64.ln())).abs() < 1e-12);
        assert!((log_sum_exp(&[-1000.0, 0.0]) - 0.0).abs() < 1e-12);
    }
}
