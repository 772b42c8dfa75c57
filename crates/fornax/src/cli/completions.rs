//! Completion scripts for shells.

use std::io::{self, Write};

use clap::CommandFactory;

use super::args::{Cli, Completions};

pub(crate) fn completions(args: &Completions) -> anyhow::Result<()> {
    // Generated whole first: the generator panics on a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "fornax", &mut script);
    io::stdout().write_all(&script)?;
    Ok(())
}
