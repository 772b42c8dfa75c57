//! A configuration file as flags: its keys are their names, so that there is one parser and one set of rules.

use std::ffi::OsString;
use std::path::Path;

use clap::{CommandFactory, Parser};
use toml::Value;

use super::args::{Cli, Command};
use super::failure::Failure;
use super::output;

/// The command line with the flags of its `--config` file in front of its own. Without one, and where the command line
/// is wrong by itself, it comes back as it is.
pub(crate) fn expanded(args: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    let Ok(Cli { command: Command::Serve(serve) }) = Cli::try_parse_from(&args) else { return Ok(args) };
    let Some(path) = &serve.config else { return Ok(args) };
    let table: toml::Table = output::text_of(path)?.parse().map_err(|error: toml::de::Error| {
        Failure::usage(format!("{} is not TOML: {}", path.display(), error.message()))
    })?;
    let command = Cli::command();
    let known = command.find_subcommand("serve").expect("it was just parsed");
    let is_given = |flag: &str| {
        let word = format!("--{flag}");
        args.iter()
            .filter_map(|arg| arg.to_str())
            .any(|arg| arg.strip_prefix(&word).is_some_and(|rest| rest.is_empty() || rest.starts_with('=')))
    };
    let mut merged = args[..2].to_vec();
    let mut models = Vec::new();
    for (key, value) in &table {
        if key == "model" {
            models = match value {
                Value::Array(items) => {
                    items.iter().map(|item| text(path, key, item)).collect::<Result<_, _>>()?
                }
                one => vec![text(path, key, one)?],
            };
        } else if key == "config" || !known.get_arguments().any(|arg| arg.get_long() == Some(key)) {
            return Err(wrong(path, key, "is no flag of `fornax serve`").into());
        } else if !is_given(key) {
            merged.extend(flags(path, key, value)?.into_iter().map(OsString::from));
        }
    }
    merged.extend_from_slice(&args[2..]);
    if serve.models.is_empty() {
        merged.extend(models.into_iter().map(OsString::from));
    }
    Ok(merged)
}

/// A key and its value as they would be typed.
fn flags(path: &Path, key: &str, value: &Value) -> Result<Vec<String>, Failure> {
    match value {
        Value::Boolean(true) => Ok(vec![format!("--{key}")]),
        Value::Boolean(false) => Ok(Vec::new()),
        Value::Array(items) => {
            let flag = |item| Ok(format!("--{key}={}", text(path, key, item)?));
            items.iter().map(flag).collect()
        }
        one => Ok(vec![format!("--{key}={}", text(path, key, one)?)]),
    }
}

fn text(path: &Path, key: &str, value: &Value) -> Result<String, Failure> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        _ => Err(wrong(path, key, "must be a string, a number, true, false, or a list of strings")),
    }
}

fn wrong(path: &Path, key: &str, what: &str) -> Failure {
    Failure::usage(format!("{}: `{key}` {what}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_flags_say_and_the_command_line_wins() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("serve.toml");
        let file = file.to_str().unwrap();
        let check = |text: &str, args: &[&str], wanted: Result<&[&str], &str>| {
            std::fs::write(file, text).unwrap();
            let typed =
                ["fornax", "serve", "--config", file].iter().chain(args).map(OsString::from).collect();
            match (expanded(typed), wanted) {
                (Ok(got), Ok(wanted)) => {
                    let own = ["--config", file];
                    let got: Vec<&str> = got.iter().map(|arg| arg.to_str().unwrap()).collect();
                    let rest: Vec<&str> = got.into_iter().filter(|arg| !own.contains(arg)).collect();
                    assert_eq!(rest, wanted, "{text}");
                }
                (Err(error), Err(wanted)) => assert!(error.to_string().contains(wanted), "{error}"),
                (got, wanted) => panic!("{text}: {got:?} instead of {wanted:?}"),
            }
        };
        check("", &[], Ok(&["fornax", "serve"]));
        check(
            "port = 9000\nmetrics-open = true\ndeterministic = false\nmodel = \"m.gguf\"",
            &["--parallel", "2"],
            Ok(&["fornax", "serve", "--metrics-open", "--port=9000", "--parallel", "2", "m.gguf"]),
        );
        check("port = 9000\nmodel = \"a\"", &["--port=1", "b"], Ok(&["fornax", "serve", "--port=1", "b"]));
        check(
            "model = [\"a\", \"b=c.gguf\"]\nidle-unload = 60",
            &[],
            Ok(&["fornax", "serve", "--idle-unload=60", "a", "b=c.gguf"]),
        );
        check("model = [[1]]", &[], Err("`model` must be"));
        check(
            "cors-origin = [\"http://a\", \"http://b\"]\ndrain-timeout = 1.5",
            &[],
            Ok(&[
                "fornax",
                "serve",
                "--cors-origin=http://a",
                "--cors-origin=http://b",
                "--drain-timeout=1.5",
            ]),
        );
        check("colour = 1", &[], Err("`colour` is no flag"));
        check("config = \"other.toml\"", &[], Err("`config` is no flag"));
        check("port = [[1]]", &[], Err("`port` must be"));
        check("port =", &[], Err("is not TOML"));
    }
}
