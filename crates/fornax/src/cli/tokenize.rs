//! Text into token ids and pieces, without weights.

use std::io::{self, Write};

use fornax::Error;
use fornax_format::Checkpoint;
use fornax_text::{Special, Tokenizer};
use serde::Serialize;

use super::args::Tokenize;
use super::failure::Failure;
use super::{locate, output};

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Tokens {
    tokens: Vec<Token>,
}

#[derive(Debug, Serialize)]
struct Token {
    id: u32,
    /// The token's text; bytes that are no whole character show as U+FFFD.
    piece: String,
}

pub(crate) fn tokenize(args: &Tokenize) -> anyhow::Result<()> {
    let text = match (&args.source.text, &args.source.file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => output::text_of(path)?,
        (None, None) => String::new(),
    };
    let path = locate::locate(args.model.as_deref())?;
    let checkpoint = Checkpoint::open(&path).map_err(Error::from)?;
    let tokenizer = Tokenizer::open(&checkpoint).map_err(Error::from)?;
    let special = if args.special { Special::Parse } else { Special::AsText };
    let mut ids = tokenizer.encode(&text, special).map_err(Error::from)?;
    if args.bos {
        let missing = || Failure::usage("the model has no BOS token; leave out --bos");
        ids.insert(0, tokenizer.bos().ok_or_else(missing)?);
    }
    let tokens = ids.into_iter().map(|id| Token { id, piece: tokenizer.piece(id) }).collect();
    if args.json {
        return output::json(&Tokens { tokens });
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    for Token { id, piece } in &tokens {
        writeln!(out, "{id:>8}  {piece:?}")?;
    }
    out.flush()?;
    Ok(())
}
