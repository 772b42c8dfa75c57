//! The `fornax` command: parses, runs one command, and ends with one line and an exit code where that fails.
//!
//! Only here is the environment read, only here is anything printed.

mod cli;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use cli::args::{Cli, Command};
use cli::config;
use cli::failure::{self, Report};

fn main() -> ExitCode {
    let parsed = match config::expanded(std::env::args_os().collect()) {
        Ok(args) => Cli::try_parse_from(args),
        Err(error) => return end(failure::report(&error)),
    };
    let cli = match parsed {
        Ok(cli) => cli,
        // Help and version: printed as they are; a closed pipe is nobody's loss.
        Err(error) if !error.use_stderr() => {
            drop(error.print());
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            let typed = std::env::args().nth(1);
            let command = typed.filter(|word| Cli::command().find_subcommand(word).is_some());
            return end(failure::usage_report(&error, command.as_deref()));
        }
    };
    match run(&cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => end(failure::report(&error)),
    }
}

fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Run(args) => cli::run::run(args),
        Command::Serve(args) => cli::serve::serve(args),
        Command::Generate(args) => cli::generate::generate(args),
        Command::Embed(args) => cli::embed::embed(args),
        Command::Private(args) => cli::private::private(args),
        Command::Jobs(args) => cli::jobs::jobs(args),
        Command::Plan(args) => cli::plan::plan(args),
        Command::Inspect(args) => cli::inspect::inspect(args),
        Command::Tokenize(args) => cli::tokenize::tokenize(args),
        Command::Logits(args) => cli::logits::logits(args),
        Command::Perplexity(args) => cli::perplexity::perplexity(args),
        Command::Bench(args) => cli::bench::bench(args),
        Command::Convert(args) => cli::convert::convert(args),
        Command::Quantize(args) => cli::quantize::quantize(args),
        Command::Cache(args) => cli::cache::cache(args),
        Command::Imatrix(args) => cli::imatrix::imatrix(args),
        Command::Pull(args) => cli::models::pull(args),
        Command::List(args) => cli::models::list(args),
        Command::Rm(args) => cli::models::rm(args),
        Command::Doctor(args) => cli::doctor::doctor(args),
        Command::Completions(args) => cli::completions::completions(args),
        Command::CompileForm(args) => cli::trial::compile_form(args),
    }
}

fn end(report: Report) -> ExitCode {
    if let Some(line) = report.line {
        // Nothing can be said to someone who closed standard error.
        drop(writeln!(std::io::stderr(), "{line}"));
    }
    ExitCode::from(report.exit)
}
