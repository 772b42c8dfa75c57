//! Which model is meant where none is named: the default, or what somebody at a terminal has chosen once.

use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::Path;

use fornax::catalog;
use fornax::hub::{self, shelf};
use fornax::machine;

use super::failure::Failure;
use super::{locate, output};

/// What was chosen, in the cache folder.
const FILE: &str = "default-model";

/// Models that are proposed, from the smallest on: beyond these a first answer is long in coming.
const PROPOSED: [&str; 5] = ["qwen3-0.6b", "qwen3-1.7b", "llama3.2-3b", "gemma3-4b", "qwen3-4b"];

/// The model to use: as named, else as chosen earlier or now. Programs, which have no terminal, get the default always.
pub(crate) fn model(named: Option<&str>) -> anyhow::Result<String> {
    if let Some(named) = named {
        return Ok(named.to_owned());
    }
    if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        return Ok(catalog::DEFAULT.to_owned());
    }
    let file = locate::cache_dir()?.join(FILE);
    if let Some(chosen) = remembered(&file) {
        return Ok(chosen);
    }
    let available = machine::memory_available().unwrap_or(0);
    let fits = PROPOSED
        .iter()
        .filter_map(|name| shelf::find(name))
        .filter(|known| known.memory_bytes() <= available);
    let fitting: Vec<_> = fits.collect();
    let mut err = io::stderr().lock();
    writeln!(err, "Which model shall `fornax run` use where none is named?")?;
    let default = catalog::find(catalog::DEFAULT).map_or(0, |entry| entry.bytes);
    writeln!(err, "  1  {:<14} {:>9}  small, for a first try", catalog::DEFAULT, output::bytes(default))?;
    for (number, known) in (2..).zip(&fitting) {
        writeln!(
            err,
            "  {number}  {:<14} {:>9}  {}",
            known.name,
            output::bytes(known.bytes),
            known.description
        )?;
    }
    write!(err, "Number [1]: ")?;
    err.flush()?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    let names: Vec<&str> =
        std::iter::once(catalog::DEFAULT).chain(fitting.iter().map(|known| known.name)).collect();
    let chosen = answer(&line, &names)?;
    writeln!(err, "{chosen} from now on; to choose again, remove {}", file.display())?;
    if let Err(error) = file
        .parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(&file, format!("{chosen}\n")))
    {
        writeln!(err, "it is not remembered: {error}")?;
    }
    Ok(chosen.to_owned())
}

/// A choice that still names a model.
fn remembered(file: &Path) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let name = text.trim();
    (!name.is_empty() && !matches!(hub::Name::parse(name), hub::Name::Unknown(_))).then(|| name.to_owned())
}

/// What was typed: a number of the list, a name of it, or nothing for the first.
fn answer<'n>(line: &str, names: &[&'n str]) -> Result<&'n str, Failure> {
    let text = line.trim();
    let by_number = || text.parse::<usize>().ok()?.checked_sub(1).and_then(|at| names.get(at));
    let by_name = || names.iter().find(|name| name.eq_ignore_ascii_case(text));
    let found = if text.is_empty() { names.first() } else { by_number().or_else(by_name) };
    found.copied().ok_or_else(|| {
        Failure::usage(format!(
            "{text:?} is none of them; type a number of the list, or name a MODEL: fornax run MODEL"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_a_number_a_name_or_nothing() {
        let names = ["smollm2", "qwen3-0.6b"];
        let check =
            |line: &str, wanted: Option<&str>| assert_eq!(answer(line, &names).ok(), wanted, "{line:?}");
        check("\n", Some("smollm2"));
        check("2\n", Some("qwen3-0.6b"));
        check(" QWEN3-0.6B ", Some("qwen3-0.6b"));
        check("0", None);
        check("3", None);
        check("mistral", None);
    }

    #[test]
    fn what_was_chosen_is_remembered_as_long_as_it_names_a_model() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        assert_eq!(remembered(&file), None);
        fs::write(&file, "qwen3-4b\n").unwrap();
        assert_eq!(remembered(&file).as_deref(), Some("qwen3-4b"));
        fs::write(&file, "gone\n").unwrap();
        assert_eq!(remembered(&file), None);
    }

    #[test]
    fn what_is_proposed_exists() {
        assert!(PROPOSED.iter().all(|name| shelf::find(name).is_some()));
    }
}
