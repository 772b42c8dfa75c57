//! `fornax cache`: what `--kv-disk` keeps.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use fornax_disk::Kept;
use serde_json::json;

use super::failure::Failure;
use super::output::{self, binary};

/// What --kv-disk keeps: pages of prompts that models have read
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  fornax cache list /var/cache/fornax-kv
  fornax cache clear /var/cache/fornax-kv
  fornax cache clear /var/cache/fornax-kv 8d6f0c1b")]
pub(crate) enum Cache {
    List(List),
    Clear(Clear),
}

/// List the models of which pages are kept
#[derive(Debug, Args)]
pub(crate) struct List {
    /// The folder that --kv-disk was given
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Print JSON: a list of {store, model, bytes, in_use}
    #[arg(long)]
    json: bool,
}

/// Remove what is kept of a model, or of all that no process is using
#[derive(Debug, Args)]
pub(crate) struct Clear {
    /// The folder that --kv-disk was given
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// What `fornax cache list` calls it, or its beginning
    #[arg(value_name = "STORE")]
    store: Option<String>,
}

pub(crate) fn cache(args: &Cache) -> anyhow::Result<()> {
    match args {
        Cache::List(args) => list(args),
        Cache::Clear(args) => clear(args),
    }
}

fn list(args: &List) -> anyhow::Result<()> {
    let stores = fornax_disk::list(&args.folder)?;
    if args.json {
        let facts = |store: &Kept| json!({"store": name(store), "model": store.about, "bytes": store.bytes, "in_use": store.in_use});
        return output::json(&stores.iter().map(facts).collect::<Vec<_>>());
    }
    let mut out = io::stdout().lock();
    for store in &stores {
        let used = if store.in_use { "  in use" } else { "" };
        writeln!(out, "{}  {:>12}  {}{used}", name(store), binary(store.bytes), store.about)?;
    }
    Ok(())
}

fn clear(args: &Clear) -> anyhow::Result<()> {
    let mut stores = fornax_disk::list(&args.folder)?;
    match &args.store {
        Some(wanted) => {
            stores.retain(|store| name(store).starts_with(wanted.as_str()));
            if stores.len() != 1 {
                let folder = args.folder.display();
                let message = format!(
                    "{} stores of {folder} are called {wanted:?}; `fornax cache list {folder}` shows them all",
                    stores.len()
                );
                return Err(Failure::usage(message).into());
            }
        }
        None => stores.retain(|store| !store.in_use),
    }
    let bytes = stores.iter().map(|store| store.bytes).sum();
    stores.iter().try_for_each(fornax_disk::clear)?;
    writeln!(io::stdout(), "{} stores removed, {}", stores.len(), binary(bytes))?;
    Ok(())
}

fn name(store: &Kept) -> String {
    store.folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
