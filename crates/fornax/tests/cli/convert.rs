//! `fornax convert`, beside llama.cpp's converter, which made the GGUF files of the tiny checkpoints.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use fornax::convert::{Converting, convert};
use fornax::quantize::Mix;
use fornax_format::{Gguf, Value};
use fornax_model::exportable;

use crate::fornax;
use crate::tiny::fixtures;

/// The tokenizers that the checkpoints were converted with (`make.py` beside them).
fn tokenizers() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/convert")
}

/// A checkpoint's directory with the tokenizer of its GGUF file beside its weights.
fn with_tokenizer(case: &str, files: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixtures().join(case)).unwrap() {
        let path = entry.unwrap().path();
        std::os::unix::fs::symlink(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    for file in files {
        fs::copy(tokenizers().join(file), folder.path().join(file)).unwrap();
    }
    folder
}

/// The names of keys and tensors in which two files differ.
fn differences(made: &Gguf, wanted: &Gguf) -> Vec<String> {
    let pairs = |gguf: &Gguf| -> BTreeMap<String, Value> {
        gguf.metadata().iter().map(|(key, value)| (key.to_owned(), value.clone())).collect()
    };
    let (own, others) = (pairs(made), pairs(wanted));
    let keys = own.keys().chain(others.keys().filter(|key| !own.contains_key(*key)));
    let mut names: Vec<String> = keys.filter(|key| own.get(*key) != others.get(*key)).cloned().collect();
    let of = |gguf: &Gguf| gguf.tensors().map(|view| view.name.to_owned()).collect::<Vec<_>>();
    if of(made) != of(wanted) {
        names.push("the order of tensors".to_owned());
    }
    names.extend(
        made.tensors()
            .filter(|view| wanted.tensor(view.name).as_ref() != Some(view))
            .map(|view| view.name.to_owned()),
    );
    let order = |gguf: &Gguf| gguf.metadata().iter().map(|(key, _)| key.to_owned()).collect::<Vec<_>>();
    if names.is_empty() && order(made) != order(wanted) {
        names.push("the order of keys".to_owned());
    }
    names
}

#[test]
fn files_are_those_of_the_converter() {
    let known: BTreeMap<String, Vec<String>> =
        serde_json::from_slice(&fs::read(tokenizers().join("differences.json")).unwrap()).unwrap();
    let mut found = BTreeMap::new();
    let mut same = 0;
    let exported: Vec<_> = exportable().collect();
    let mut cases: Vec<PathBuf> =
        fs::read_dir(fixtures()).unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.sort();
    for path in cases.iter().filter(|path| path.is_dir() && path.with_extension("gguf").is_file()) {
        let case = path.file_name().unwrap().to_str().unwrap();
        let gguf = path.with_extension("gguf");
        let wanted = Gguf::open(&gguf).unwrap();
        let config = fornax_model::Config::read(&fornax_format::Checkpoint::open(path).unwrap()).unwrap();
        let files: &[&str] = match wanted.metadata().opt_str("tokenizer.ggml.model").unwrap() {
            Some("llama") => &["tokenizer.model"],
            Some("gpt2") => &["tokenizer.json", "tokenizer_config.json"],
            _ => continue,
        };
        let tokens = wanted.metadata().strings("tokenizer.ggml.tokens").unwrap();
        // Some were made with more special tokens; their models are compared where models are tested.
        if !exported.contains(&config.facts.name)
            || !["<unk>", "<pad>"].contains(&&*tokens[0])
            || tokens[3].starts_with('<')
        {
            continue;
        }
        let folder = with_tokenizer(case, files);
        let out = folder.path().join("made.gguf");
        let to = match wanted.metadata().opt_u32("general.file_type").unwrap() {
            Some(0) => "F32",
            Some(7) => "Q8_0",
            Some(32) => "BF16",
            _ => "F16",
        };
        let converting = Converting { to: Mix::named(to), name: Some(case.to_owned()), threads: 2 };
        let made = convert(folder.path(), &out, &converting, &mut |_, _| ControlFlow::Continue(()));
        let made = made.unwrap_or_else(|error| panic!("{case}: {error}"));
        assert!(made.tokenizer && made.bytes == fs::metadata(&out).unwrap().len());
        if fs::read(&out).unwrap() == fs::read(&gguf).unwrap() {
            same += 1;
            continue;
        }
        found.insert(case.to_owned(), differences(&Gguf::open(&out).unwrap(), &wanted));
    }
    assert_eq!(found, known, "{}", serde_json::to_string_pretty(&found).unwrap());
    assert!(same >= 25, "{same} files are the same to the byte");
}

#[test]
fn what_would_mean_another_model_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.gguf");
    let check = |model: &Path, wanted: &[&str]| {
        fornax(["convert", model.to_str().unwrap(), out.to_str().unwrap()]).fails(
            4,
            "MODEL_UNSUPPORTED",
            wanted,
        );
        assert!(!out.exists());
    };
    // The architecture that Mistral has in GGUF knows no window.
    check(&fixtures().join("mistral"), &["architecture llama would mean another model", "cannot say layers"]);
    check(&fixtures().join("bert"), &["exporting the architecture \"bert\"", "llama, mistral, mixtral"]);
    // GGUF cannot say of such a tokenizer that a space comes first.
    let spaced = with_tokenizer("gpt2", &["tokenizer.json", "tokenizer_config.json"]);
    let path = spaced.path().join("tokenizer.json");
    let json = fs::read_to_string(&path).unwrap();
    fs::write(&path, json.replace("\"add_prefix_space\": false", "\"add_prefix_space\": true")).unwrap();
    check(spaced.path(), &["a tokenizer that cuts", "cannot be written into a GGUF file"]);
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_converted_model_computes_what_the_directory_does() {
    let folder = with_tokenizer("llama3", &["tokenizer.model"]);
    let out = folder.path().join("made.gguf");
    let (from, to) = (folder.path().to_str().unwrap(), out.to_str().unwrap());
    let told = fornax(["convert", from, to, "--to", "Q8_0", "--name", "Small", "--json"]).json();
    assert_eq!(
        (&told["architecture"], &told["type"], &told["tokenizer"]),
        (&"llama".into(), &"Q8_0".into(), &true.into())
    );
    assert!(told["tensors"]["Q8_0"].as_u64().unwrap() > 10, "{told}");
    let shown = fornax(["inspect", to]).stdout;
    assert!(shown.contains("Small"), "{shown}");
    // What exists stays.
    fornax(["convert", from, to]).fails(2, "INVALID_INPUT", &["made.gguf"]);
    let (tokens, _) = crate::tiny::tokens("llama3");
    let logits = |model: &str| {
        let shown =
            fornax(["logits", model, "--tokens", &tokens, "--top", "1", "--activations", "float", "--json"])
                .json();
        (shown["top"][0]["token"].clone(), shown["top"][0]["logprob"].as_f64().unwrap())
    };
    let whole = folder.path().join("whole.gguf");
    assert_eq!(fornax(["convert", from, whole.to_str().unwrap(), "--to", "F32"]).code, Some(0));
    let (of_directory, of_file) =
        (logits(fixtures().join("llama3").to_str().unwrap()), logits(whole.to_str().unwrap()));
    assert_eq!(of_directory.0, of_file.0);
    assert!((of_directory.1 - of_file.1).abs() < 1e-5, "{of_directory:?} {of_file:?}");
}
