//! `cargo xtask`: checks, fixtures, tests and proofs of the project itself.
//!
//! What a contributor or CI runs is here and nowhere else. It knows the workspace's files and tools; the product
//! never knows it.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool talks to its user")]

mod bench_peers;
mod check;
mod dist;
mod docs;
mod fixtures;
mod house;
mod models;
mod phases;
mod prove;
mod python;
mod schema_suite;
mod source;
mod test;
mod wheel;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

/// Checks, fixtures, tests and proofs of Fornax.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Formatting, lints, docs, licences, and the rules of this house
    Check,
    /// Fetch the models that tests use into the cache folder of the binary
    Fixtures {
        /// Also those that only proofs use
        #[arg(long)]
        all: bool,
    },
    /// Fetch what is needed, then run every test
    Test {
        /// Only tests whose name contains this
        filter: Option<String>,
    },
    /// Build the binary that is shipped, and its packages: an archive, a Debian package, their checksums
    Dist {
        /// Link by zig against glibc 2.28, for older systems than this one
        #[arg(long)]
        portable: bool,
    },
    /// Build the Python wheel, library and binary in one, into target/wheels
    Wheel {
        /// For this machine alone, by the profile of the tests; otherwise for every Linux with glibc 2.28
        #[arg(long)]
        local: bool,
    },
    /// Compare with llama.cpp, taking turns, and write the table into docs/performance-figures.md
    BenchPeers(bench_peers::BenchPeers),
    /// Write docs/models.md anew from the table of architectures and its tests' checkpoints
    Models,
    /// Run one full-scale proof and record it in docs/proofs.md
    Prove {
        /// Which one
        #[arg(required_unless_present = "list")]
        name: Option<String>,
        /// Say which there are
        #[arg(long)]
        list: bool,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.task {
        Task::Check => check::run_all(),
        Task::Fixtures { all } => fixtures::run(all),
        Task::Test { filter } => test::run(filter.as_deref()),
        Task::Models => models::write(),
        Task::Dist { portable } => dist::run_all(portable),
        Task::Wheel { local: true } => wheel::build(wheel::Audience::ThisMachine).map(drop),
        Task::Wheel { local: false } => wheel::build(wheel::Audience::Everybody).map(drop),
        Task::BenchPeers(args) => bench_peers::bench(&args),
        Task::Prove { name: Some(name), list: false } => prove::run(&name),
        Task::Prove { .. } => prove::list(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the workspace, from where every tool is started.
fn root() -> PathBuf {
    let xtask = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().map(PathBuf::from).unwrap_or(xtask)
}

/// A tool started at the root of the workspace.
fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(root());
    // `cargo run`, which started this, told it about the package xtask. Build scripts would see that, run again (ring's
    // does), and everything that depends on them would be compiled again.
    for (name, _) in std::env::vars_os() {
        let name_text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|prefix| name_text.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a tool to its end; what it prints is seen as it comes.
fn run(command: &mut Command) -> Result<()> {
    let line = shown(command);
    let status = command.status().with_context(|| format!("cannot start `{line}`"))?;
    anyhow::ensure!(status.success(), "`{line}` failed ({status})");
    Ok(())
}

/// What a tool prints.
fn output(command: &mut Command) -> Result<String> {
    let line = shown(command);
    let output = command.output().with_context(|| format!("cannot start `{line}`"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "`{line}` failed ({}): {}", output.status, error.trim());
    String::from_utf8(output.stdout).with_context(|| format!("`{line}` printed something that is not text"))
}

/// A command as a person would type it.
fn shown(command: &Command) -> String {
    let args = command.get_args().map(|arg| arg.to_string_lossy());
    std::iter::once(command.get_program().to_string_lossy()).chain(args).collect::<Vec<_>>().join(" ")
}
