//! Functions that the model may call, out of a file as OpenAI's clients write them.

use std::path::Path;

use fornax::{Choice, Definition, Tools};
use serde::Deserialize;
use serde_json::Value;

use super::super::failure::Failure;
use super::super::output;

/// An entry of the list: a tool around a function, or the function alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Tool { function: Function },
    Function(Function),
}

#[derive(Deserialize)]
struct Function {
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
    #[serde(default)]
    strict: bool,
}

/// Reads and checks them.
pub(super) fn read(path: &Path) -> Result<Option<Tools>, Failure> {
    let wrong = |what: String| Failure::usage(format!("--tools {}: {what}; correct it", path.display()));
    let entries: Vec<Entry> = serde_json::from_str(&output::text_of(path)?)
        .map_err(|error| wrong(format!("is no list of functions: {error}")))?;
    let definitions: Vec<Definition> = entries
        .into_iter()
        .map(|entry| {
            let (Entry::Tool { function } | Entry::Function(function)) = entry;
            let Function { name, description, parameters, strict } = function;
            Definition { name, description, parameters, strict }
        })
        .collect();
    Tools::new(&definitions, &Choice::Auto).map_err(|faults| {
        let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
        wrong(faults.join("; "))
    })
}

#[cfg(test)]
mod tests {

    #[test]
    fn tools_are_read_in_both_forms_and_what_is_wrong_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tools.json");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            super::read(&path).map(|tools| tools.is_some()).map_err(|failure| failure.to_string())
        };
        let both = r#"[{"type": "function", "function": {"name": "a"}}, {"name": "b", "strict": true}]"#;
        assert_eq!(read(both), Ok(true));
        assert_eq!(read("[]"), Ok(false));
        assert!(read("{}").unwrap_err().contains("is no list of functions"));
        let twice = read(r#"[{"name": "a"}, {"name": "a"}]"#).unwrap_err();
        assert!(twice.contains("tool 1, its name: is the name of another tool"), "{twice}");
    }
}
