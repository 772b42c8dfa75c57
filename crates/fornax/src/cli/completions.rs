//! Completion scripts for shells.

use std::io::{self, Write};

use clap::{Args, CommandFactory};

use super::args::Cli;

/// Print a completion script for a shell
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax completions bash > ~/.local/share/bash-completion/completions/fornax
  fornax completions zsh > ~/.zfunc/_fornax
  fornax completions fish > ~/.config/fish/completions/fornax.fish")]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

pub(crate) fn completions(args: &Completions) -> anyhow::Result<()> {
    // Generated whole first: the generator panics on a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "fornax", &mut script);
    io::stdout().write_all(&script)?;
    Ok(())
}
