//! The models on disk: `pull`, `list`, `rm`.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use fornax::Code;
use fornax::catalog;
use fornax::hub::{self, Name, nearest};
use serde::Serialize;

use super::failure::Failure;
use super::locate;
use super::{output, shelf};

/// Fetch a model of the catalog or of the Hugging Face hub
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax pull smollm2
  fornax pull Qwen/Qwen2.5-0.5B-Instruct-GGUF           its Q4_K_M file, or what comes nearest
  fornax pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0      a quantisation
  fornax pull hf:owner/name@v1.0:folder/file.gguf       a file of a revision
  fornax pull https://huggingface.co/owner/name         an address

The path of the model is printed. A fetch that was stopped goes on where it was; files are checked against the hub's \
checksums. Models of the catalog lie in $FORNAX_CACHE, else $XDG_CACHE_HOME/fornax, else ~/.cache/fornax; those of the \
hub where its Python library keeps them ($HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub). HF_ENDPOINT, \
HF_TOKEN (or the token that `hf auth login` kept) and HF_HUB_OFFLINE are honoured.")]
pub(crate) struct Pull {
    /// A name that `fornax list` shows, or a hub reference
    #[arg(value_name = "REF")]
    pub(crate) reference: String,
}

/// List the models that can be named and those on disk
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax list
  fornax list --available      models of the hub with short names, and which of them fit this machine
  fornax list --json")]
pub(crate) struct List {
    /// Print JSON: {cache, models: [{name, file, path, bytes, on_disk, description, licence}]}
    #[arg(long)]
    pub(crate) json: bool,
    /// List what can be fetched by a short name, whether it fits here, and how fast it will be
    #[arg(long)]
    pub(crate) available: bool,
}

/// Remove a model from disk
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax rm smollm2
  fornax rm owner/name      all of a hub repository that is on disk")]
pub(crate) struct Rm {
    /// A name, a file or a repository that `fornax list` shows
    pub(crate) name: String,
}

pub(crate) fn pull(args: &Pull) -> anyhow::Result<()> {
    let path = match Name::parse(&args.reference) {
        Name::Catalog(entry) => locate::pull(entry, &locate::cache_dir()?)?,
        Name::Hub(text) => locate::pull_hub(&locate::hub()?, &hub::Reference::parse(&text)?)?,
        Name::Path(path) => {
            let message =
                format!("{} is already here; names and hub references can be pulled", path.display());
            return Err(Failure::usage(message).into());
        }
        Name::Unknown(name) => return Err(unknown(&name).into()),
    };
    writeln!(io::stdout(), "{}", path.display())?;
    Ok(())
}

/// One line of the list.
#[derive(Debug, Serialize)]
struct Row {
    /// The catalog name or the hub reference; absent for a file that only lies in the folder.
    name: Option<String>,
    file: String,
    path: PathBuf,
    bytes: u64,
    on_disk: bool,
    description: Option<&'static str>,
    licence: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct Listing {
    cache: PathBuf,
    models: Vec<Row>,
}

pub(crate) fn list(args: &List) -> anyhow::Result<()> {
    let cache = locate::cache_dir()?;
    if args.available {
        return shelf::list(args.json);
    }
    let listing = Listing { models: rows(&cache)?, cache };
    if args.json {
        return output::json(&listing);
    }
    let mut out = io::stdout().lock();
    for row in &listing.models {
        let name = row.name.as_ref().unwrap_or(&row.file);
        let state = if row.on_disk { "on disk" } else { "not fetched" };
        writeln!(
            out,
            "{name:<24} {:>9}  {state:<11}  {}",
            output::bytes(row.bytes),
            row.description.unwrap_or("-")
        )?;
    }
    writeln!(out, "cache: {}", listing.cache.display())?;
    writeln!(out, "more with `fornax list --available`")?;
    Ok(())
}

/// What the catalog offers, whatever else is in the folder, and what is there of the hub.
fn rows(cache: &Path) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for entry in catalog::ENTRIES {
        let on_disk = entry.installed(cache).is_some();
        if entry.public || on_disk {
            rows.push(Row {
                name: Some(entry.name.to_owned()),
                file: entry.file.to_owned(),
                path: entry.path(cache),
                bytes: entry.bytes,
                on_disk,
                description: Some(entry.description),
                licence: Some(entry.licence),
            });
        }
    }
    for path in files(cache)? {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if rows.iter().all(|row| row.file.split('/').next() != Some(&file)) {
            let bytes = fs::metadata(&path).map(|metadata| metadata.len()).unwrap_or(0);
            rows.push(Row { name: None, file, path, bytes, on_disk: true, description: None, licence: None });
        }
    }
    // An environment that names no folder of the hub has no models there.
    let hub = locate::hub().map(|hub| hub.locals()).unwrap_or_default();
    rows.extend(hub.into_iter().map(|(reference, local)| Row {
        name: Some(reference.to_string()),
        file: local.name,
        path: local.path,
        bytes: local.bytes,
        on_disk: true,
        description: None,
        licence: None,
    }));
    Ok(rows)
}

/// Everything in the folder of models, in order; none where there is no folder yet.
pub(crate) fn files(cache: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let folder = catalog::models_dir(cache);
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Failure::unreadable(&folder, &error).into()),
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    Ok(paths)
}

pub(crate) fn rm(args: &Rm) -> anyhow::Result<()> {
    let cache = locate::cache_dir()?;
    let known = hub::shelf::find(&args.name).and_then(|known| hub::Reference::parse(known.reference).ok());
    // Only whole repositories go.
    let known = known.map(|reference| hub::Reference { want: hub::Want::Any, ..reference });
    let reference = known.or_else(|| hub::Reference::parse(&args.name).ok());
    let path = match (catalog::find(&args.name), reference) {
        (Some(entry), _) => entry.place(&cache),
        (None, Some(reference)) => repository(&reference)?,
        // Only names of files in the folder: a path could reach out of it.
        (None, None) => files(&cache)?
            .into_iter()
            .find(|path| path.file_name().is_some_and(|file| file == args.name.as_str()))
            .ok_or_else(|| unknown(&args.name))?,
    };
    let metadata = match fs::metadata(&path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let message = format!("{} is not on disk; see `fornax list`", args.name);
            return Err(Failure::new(Code::ModelNotFound, message).into());
        }
        Err(error) => return Err(Failure::unreadable(&path, &error).into()),
    };
    let bytes = if metadata.is_dir() { bytes_below(&path) } else { metadata.len() };
    if metadata.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }
        .map_err(|error| Failure::unwritable(&path, &error))
        .context("removing a model")?;
    writeln!(io::stdout(), "removed {} ({})", path.display(), output::bytes(bytes))?;
    Ok(())
}

/// The folder of a repository of the hub. Its files are shared between its models and revisions, so it goes as a whole.
fn repository(reference: &hub::Reference) -> anyhow::Result<PathBuf> {
    if reference.want != hub::Want::Any {
        let message = format!("only whole repositories are removed; use `fornax rm {}`", reference.repo);
        return Err(Failure::usage(message).into());
    }
    Ok(locate::hub()?.repository_path(reference))
}

/// What a folder takes; links to its own files count nothing.
fn bytes_below(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .filter_map(|entry| Some((entry.path(), entry.path().symlink_metadata().ok()?)))
        .map(|(path, metadata)| match metadata.is_dir() {
            true => bytes_below(&path),
            false if metadata.is_file() => metadata.len(),
            false => 0,
        })
        .sum()
}

fn unknown(name: &str) -> Failure {
    let nearest = nearest::words(name, locate::hub().ok().as_ref());
    Failure::new(Code::ModelNotFound, format!("no model is called {name:?}{nearest}; see `fornax list`"))
}
