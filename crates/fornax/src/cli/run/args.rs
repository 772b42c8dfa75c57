//! The flags of `fornax run`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::device::{CapacityArgs, DraftArg, KvDiskArgs};
use crate::cli::sampling::SamplingArgs;

/// Chat in the terminal, or answer one PROMPT
///
/// With PROMPT the answer is printed as it is made and the command ends. Without it every line read from standard
/// input is a message; an empty line is skipped and the end of input ends the chat. The model's own chat template is
/// used. Text typed by a user never becomes a control token.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  fornax run                                   chat with the default model
  fornax run \"Why is the sky blue?\"            answer once
  fornax run ./model.gguf \"Translate: chat\"    answer once with a model of your own
  echo \"Name a colour\" | fornax run smollm2    a chat read from a pipe, a message a line
  fornax run \"Summarise this:\" < report.txt    what a pipe carries is added to the prompt
  fornax run ./Qwen3-VL-2B -i photo.jpg \"What is this?\"

In the chat /help lists commands; \"\"\" begins and ends several lines, Alt-Enter begins another. \
One positional is a MODEL if it is an existing path, a name of `fornax list --available`, hf:... or word/word; \
a single word that is none of these is refused, and anything else is the PROMPT. \
Sampling defaults to temperature 0.7 and top-p 0.95.")]
pub(crate) struct Run {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    /// What to answer; without it, chat
    pub(crate) prompt: Option<String>,
    /// Use this Jinja file as the chat template instead of the model's own
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub(crate) chat_template_file: Option<PathBuf>,
    /// What the model is told beforehand
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) system: Option<String>,
    /// Show the model this picture (JPEG, PNG, WebP or GIF) with the first message; may be given several times
    #[arg(short, long, value_name = "FILE")]
    pub(crate) image: Vec<PathBuf>,
    /// Tell the model of the functions in this file, a JSON list as OpenAI's clients write it; its calls are shown, and
    /// in a chat /result answers them
    #[arg(long, value_name = "FILE")]
    pub(crate) tools: Option<PathBuf>,
    /// Let the model think for at most this many tokens; then it answers. Thoughts are shown on a terminal only
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) thinking_budget: Option<usize>,
    /// Keep nothing of what is typed; otherwise it is in the file `history` of the cache folder
    #[arg(long)]
    pub(crate) no_history: bool,
    #[command(flatten)]
    pub(crate) capacity: CapacityArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArg,
    #[command(flatten)]
    pub(crate) kv_disk: KvDiskArgs,
    /// Print the memory that was planned and allocated
    #[arg(long, help_heading = "Model")]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}
