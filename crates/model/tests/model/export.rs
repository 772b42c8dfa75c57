//! Models of Hugging Face directories as GGUF files hold them, beside the files that llama.cpp's converter made of the same
//! directories (`tests/fixtures/make.py` ran it).

use fornax_compute::cpu::{Cpu, CpuOptions, dequantize};
use fornax_compute::landing::quantize_row;
use fornax_format::{Checkpoint, DType};
use fornax_model::{Config, Error, Facts, export, exportable};

use crate::fixture::{Container, folder, open};

/// Keys that others write, and the type of the tensors, which is the caller's to choose.
fn is_of_model(key: &str) -> bool {
    !key.starts_with("general.") && !key.starts_with("tokenizer.")
}

fn dequantized(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_values()];
    dequantize(dtype, bytes, &mut values).unwrap();
    values
}

/// What of a case differs from the converter's file.
fn differences(case: &str) -> Vec<String> {
    let (directory, gguf) = (open(case, Container::HuggingFace), open(case, Container::Gguf));
    let (config, of_gguf) = (Config::read(&directory).unwrap(), Config::read(&gguf).unwrap());
    let Checkpoint::Gguf(gguf) = &gguf else { panic!("{case} is a GGUF file") };
    let memory = Cpu::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
    let mut wrong = Vec::new();
    for difference in config.differences(&of_gguf) {
        wrong.push(format!("means another model: {difference}"));
    }
    export(&directory, &config, &memory, |export| -> Result<(), Error> {
        let names: Vec<&str> = export.tensors().iter().map(|tensor| &*tensor.name).collect();
        let wanted: Vec<&str> = gguf.tensors().map(|view| view.name).collect();
        if names != wanted {
            wrong.push(format!("tensors {names:?}, wanted {wanted:?}"));
        }
        for tensor in export.tensors() {
            let Some(view) = gguf.tensor(&tensor.name) else { continue };
            if view.shape != tensor.shape {
                wrong.push(format!("{} has shape {:?}, wanted {:?}", tensor.name, tensor.shape, view.shape));
                continue;
            }
            let mut values = Vec::new();
            export.visit(tensor, &mut |row| -> Result<(), Error> {
                values.extend_from_slice(row);
                Ok(())
            })?;
            let mut bytes = vec![0; view.bytes.len()];
            quantize_row(view.dtype, &values, None, &mut bytes);
            // Blocks of four bits may be written in two ways that mean the same.
            let alike = || {
                tensor.kept.is_some()
                    && dequantized(view.dtype, &bytes) == dequantized(view.dtype, view.bytes)
            };
            if bytes != view.bytes && !alike() {
                wrong.push(format!("{} holds other values", tensor.name));
            }
        }
        let pairs = export.pairs()?;
        let pairs: Vec<_> = pairs.before.iter().chain(&pairs.after).collect();
        let wanted: Vec<_> = gguf.metadata().iter().filter(|(key, _)| is_of_model(key)).collect();
        for (key, value) in &wanted {
            if !pairs.iter().any(|(own, said)| own == key && said == *value) {
                wrong.push(format!("{key} is not {value:?}"));
            }
        }
        for (key, value) in &pairs {
            if !wanted.iter().any(|(other, _)| other == key) {
                wrong.push(format!("{key} is {value:?}, and should not be there"));
            }
        }
        let own: Vec<&str> = pairs.iter().map(|(key, _)| &**key).collect();
        let others: Vec<&str> = wanted.iter().map(|(key, _)| *key).collect();
        if wrong.is_empty() && own != others {
            wrong.push(format!("keys come as {own:?}, wanted {others:?}"));
        }
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{case}: {error}"));
    wrong
}

/// What is known to be otherwise, by the beginnings of what is said: keys that the converter of the family writes in an order of
/// their own, and layers that only guess ahead, which are left out.
const KNOWN: [(&str, &str); 13] = [
    ("phi3", "keys come as"),
    ("starcoder", "keys come as"),
    ("hunyuan-moe", "keys come as"),
    ("gemma", "keys come as"),
    ("gemma2", "keys come as"),
    ("phi", "keys come as"),
    ("gpt-neox", "keys come as"),
    ("gpt-neox-serial", "keys come as"),
    ("stablelm", "keys come as"),
    ("falcon", "keys come as"),
    ("glm4-moe", "tensors"),
    ("glm4-moe", "glm4moe.block_count is not"),
    ("glm4-moe", "glm4moe.nextn_predict_layers is not"),
];

#[test]
fn models_are_written_as_the_converter_writes_them() {
    let mut compared = Vec::new();
    let mut all = String::new();
    for entry in std::fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        if !path.is_dir() || !path.with_extension("gguf").is_file() {
            continue;
        }
        let case = path.file_name().unwrap().to_str().unwrap();
        let facts = Config::read(&open(case, Container::HuggingFace)).unwrap().facts.name;
        if !exportable().any(|name| name == facts) {
            continue;
        }
        let is_known = |wrong: &String| KNOWN.iter().any(|(of, what)| *of == case && wrong.starts_with(what));
        for wrong in differences(case).into_iter().filter(|wrong| !is_known(wrong)) {
            all += &format!("{case}: {wrong}\n");
        }
        compared.push(facts);
    }
    assert!(all.is_empty(), "{all}");
    for name in exportable() {
        let no_file = Facts::TABLE.iter().any(|facts| facts.name == name && facts.gguf.is_none());
        assert!(no_file || compared.contains(&name), "{name} is compared with nothing");
    }
}
