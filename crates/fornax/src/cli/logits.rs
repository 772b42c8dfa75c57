//! What the model thinks comes next.

use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Context;
use fornax::{Fornax, Prompt};
use serde::Serialize;

use super::args::Logits;
use super::failure::Failure;
use super::interrupt::Interrupt;
use super::{device, generate, locate, output};

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
    let path = locate::locate(args.model.as_deref())?;
    let interrupt = Interrupt::install()?;
    let options = device::options(&path, &args.device)?;
    match &args.out {
        Some(out) => {
            let mut model = options.logit_rows(ROWS).open()?;
            write_all(&mut model, &prompt, out, args.json, &interrupt)
        }
        None => show_top(&mut options.open()?, &prompt, args, &interrupt),
    }
}

fn show_top(model: &mut Fornax, prompt: &Prompt, args: &Logits, interrupt: &Interrupt) -> anyhow::Result<()> {
    let tokens = model.prompt_tokens(prompt)?;
    let mut row = Vec::new();
    interrupt.during(|| {
        model.logits(&tokens, true, &mut |_, logits| {
            row.extend_from_slice(logits);
            interrupt.flow()
        })
    })?;
    let opinion = Opinion { top: top(model, &row, args.top as usize) };
    if args.json {
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
fn top(model: &Fornax, row: &[f32], count: usize) -> Vec<Candidate> {
    let row = &row[..model.vocab()];
    let normalizer = log_sum_exp(row);
    let mut order: Vec<usize> = (0..row.len()).collect();
    let count = count.min(order.len());
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    order[..count]
        .iter()
        .map(|&token| Candidate {
            token: token as u32,
            piece: model.tokenizer().map(|tokenizer| tokenizer.piece(token as u32)).unwrap_or_default(),
            logit: row[token],
            logprob: f64::from(row[token]) - normalizer,
        })
        .collect()
}

/// The logarithm of the sum of the exponentials, summed in double precision.
pub(crate) fn log_sum_exp(row: &[f32]) -> f64 {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + row.iter().map(|&logit| (f64::from(logit) - max).exp()).sum::<f64>().ln()
}

/// Writes the logits after every token. The file has another name until it is complete.
fn write_all(
    model: &mut Fornax,
    prompt: &Prompt,
    out: &Path,
    json: bool,
    interrupt: &Interrupt,
) -> anyhow::Result<()> {
    let tokens = model.prompt_tokens(prompt)?;
    let unwritable = |error: io::Error| Failure::unwritable(out, &error);
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = BufWriter::new(tempfile::NamedTempFile::new_in(folder).map_err(unwritable)?);
    let mut written = Ok(());
    let columns = model.config().vocab;
    let computed = interrupt.during(|| {
        model.logits(&tokens, false, &mut |_, row| {
            written = row.iter().try_for_each(|logit| file.write_all(&logit.to_le_bytes()));
            if written.is_err() { ControlFlow::Break(()) } else { interrupt.flow() }
        })
    });
    written.map_err(unwritable)?;
    computed?;
    let file = file.into_inner().map_err(|error| unwritable(error.into_error()))?;
    file.persist(out).map_err(|error| unwritable(error.error)).context("naming the file")?;
    if json {
        return output::json(&Written { out, rows: tokens.len(), columns });
    }
    writeln!(io::stdout(), "{} rows of {columns} written to {}", tokens.len(), out.display())?;
    Ok(())
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
