//! llama.cpp's tokenizer vectors: each case of a `.inp` file gives the ids on its line of the `.out` file.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and says what it skips"
)]

mod support;

use std::path::Path;

use fornax_format::Checkpoint;
use fornax_text::{Special, Tokenizer};
use support::{QWEN, model, skip, vectors};

fn check(tokenizer: &Tokenizer, folder: &Path, name: &str) {
    let read =
        |end: &str| std::fs::read_to_string(folder.join(format!("ggml-vocab-{name}.gguf.{end}"))).unwrap();
    let (inputs, outputs) = (read("inp"), read("out"));
    let cases: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
    let mut checked = 0;
    for (text, line) in cases.iter().zip(outputs.lines()) {
        let want: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
        let got = tokenizer.encode(text, Special::AsText).unwrap();
        assert_eq!(got, want, "{name}: {text:?}");
        checked += 1;
    }
    assert!(checked >= 40, "{name}: only {checked} cases were read");
}

fn check_vocabulary(test: &str, name: &str) {
    let Some(folder) = vectors() else {
        return skip(test, "the vocabulary files are not beside the repository");
    };
    let file = folder.join(format!("ggml-vocab-{name}.gguf"));
    let tokenizer = Tokenizer::open(&Checkpoint::open(&file).unwrap()).unwrap();
    check(&tokenizer, &folder, name);
}

#[test]
fn gpt_2_gives_the_published_tokens() {
    check_vocabulary("gpt_2_gives_the_published_tokens", "gpt-2");
}

#[test]
fn deepseek_llm_gives_the_published_tokens() {
    check_vocabulary("deepseek_llm_gives_the_published_tokens", "deepseek-llm");
}

#[test]
fn llama_spm_gives_the_published_tokens() {
    check_vocabulary("llama_spm_gives_the_published_tokens", "llama-spm");
}

#[test]
fn phi_3_gives_the_published_tokens() {
    check_vocabulary("phi_3_gives_the_published_tokens", "phi-3");
}

#[test]
fn qwen2_gives_the_published_tokens() {
    let test = "qwen2_gives_the_published_tokens";
    let Some(folder) = vectors() else { return skip(test, "the vector files are not beside the repository") };
    let Some(checkpoint) = model(QWEN) else {
        return skip(test, "the Qwen model is not in the cache folder");
    };
    check(&Tokenizer::open(&checkpoint).unwrap(), &folder, "qwen2");
}

/// `$FORNAX_VOCABULARIES` is a folder of `ggml-vocab-NAME.gguf` files with their vectors, of any family.
#[test]
fn further_vocabularies_give_the_published_tokens() {
    let Some(folder) = std::env::var_os("FORNAX_VOCABULARIES").map(std::path::PathBuf::from) else {
        return skip("further_vocabularies_give_the_published_tokens", "FORNAX_VOCABULARIES names no folder");
    };
    let mut names = 0;
    for entry in std::fs::read_dir(&folder).unwrap().flatten() {
        let file = entry.file_name().into_string().unwrap();
        let name = file.strip_prefix("ggml-vocab-").and_then(|rest| rest.strip_suffix(".gguf.out"));
        let Some(name) = name else { continue };
        let file = folder.join(format!("ggml-vocab-{name}.gguf"));
        let tokenizer = Tokenizer::open(&Checkpoint::open(&file).unwrap()).unwrap();
        check(&tokenizer, &folder, name);
        names += 1;
    }
    assert!(names > 0, "no vectors in {}", folder.display());
}
