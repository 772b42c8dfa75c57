//! Text into token ids and pieces, without weights.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use fornax::Error;
use fornax_format::Checkpoint;
use fornax_text::{Special, Tokenizer};
use serde::Serialize;

use super::args::{JsonArg, ModelArg};
use super::failure::Failure;
use super::{locate, output};

/// Turn text into token ids and pieces
///
/// No BOS is added unless --bos; control tokens written in the text stay text unless --special. No weights are
/// loaded, so vocabulary-only files work. --json prints {tokens: [{id, piece}]}.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax tokenize --text \"Hello world\"
  fornax tokenize ./model.gguf --file chapter.txt --json
  fornax tokenize --special --text \"<|im_start|>user\"")]
pub(crate) struct Tokenize {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) source: TextSource,
    /// Put the tokenizer's BOS token in front
    #[arg(long)]
    pub(crate) bos: bool,
    /// Parse control tokens written in the text
    #[arg(long)]
    pub(crate) special: bool,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct TextSource {
    /// The text
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) text: Option<String>,
    /// Read the text from a file; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}

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
    let path = locate::locate(args.model.name())?;
    let checkpoint = Checkpoint::open(&path).map_err(Error::from)?;
    let tokenizer = Tokenizer::open(&checkpoint).map_err(Error::from)?;
    let special = if args.special { Special::Parse } else { Special::AsText };
    let mut ids = tokenizer.encode(&text, special).map_err(Error::from)?;
    if args.bos {
        let missing = || Failure::usage("the model has no BOS token; leave out --bos");
        ids.insert(0, tokenizer.bos().ok_or_else(missing)?);
    }
    let tokens = ids.into_iter().map(|id| Token { id, piece: tokenizer.piece(id) }).collect();
    if args.output.json {
        return output::json(&Tokens { tokens });
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    for Token { id, piece } in &tokens {
        writeln!(out, "{id:>8}  {piece:?}")?;
    }
    out.flush()?;
    Ok(())
}
