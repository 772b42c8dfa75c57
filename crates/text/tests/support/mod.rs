//! What the tests share: where models lie, how a test says that it cannot run, and vocabularies made by hand.
#![expect(dead_code, unreachable_pub, reason = "a module that every test file includes and uses a part of")]

use std::path::{Path, PathBuf};

use fornax_format::{Checkpoint, Gguf};
use fornax_text::{Error, Tokenizer};

/// The folder with the llama.cpp vocabularies and vectors, which lie beside the repository, not in it.
pub fn vectors() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden/tokenizers");
    folder.is_dir().then_some(folder)
}

/// The cache folder that the binary also uses.
fn cache() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("FORNAX_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("fornax")))
        .or_else(|| set("HOME").map(|folder| folder.join(".cache/fornax")))
}

/// A folder with chat templates of other projects, under licences that this work does not take.
pub fn templates() -> Option<PathBuf> {
    std::env::var_os("FORNAX_TEMPLATES").map(PathBuf::from)
}

/// A tokenizer of bytes with a start and an end.
pub fn bytes_tokenizer() -> Tokenizer {
    let printable = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff).chain(0x100..=0x143);
    let bytes: Vec<String> = printable.map(|c| char::from_u32(c).unwrap().to_string()).collect();
    let mut tokens: Vec<(&str, i32)> = bytes.iter().map(|byte| (byte.as_str(), NORMAL)).collect();
    tokens.extend([("<BOS>", CONTROL), ("<EOS>", CONTROL)]);
    Vocabulary::default()
        .str("general.architecture", "llama")
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "gpt-2")
        .tokens(&tokens)
        .strings("tokenizer.ggml.merges", &[])
        .u32("tokenizer.ggml.bos_token_id", u32::try_from(tokens.len() - 2).unwrap())
        .u32("tokenizer.ggml.eos_token_id", u32::try_from(tokens.len() - 1).unwrap())
        .tokenizer()
        .unwrap()
}

/// A model file in the cache folder that the binary also uses.
pub fn model(file: &str) -> Option<Checkpoint> {
    let path = cache()?.join("models").join(file);
    path.is_file().then(|| Checkpoint::open(&path).unwrap())
}

pub const SMOLLM2: &str = "smollm2-135m-instruct-q4_1.gguf";
pub const QWEN: &str = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf";

/// The default model, which `cargo xtask fixtures` fetches: its absence is a failure, not a skip.
pub fn smollm2() -> Checkpoint {
    model(SMOLLM2).expect("run `cargo xtask fixtures` first: the default model is not in the cache folder")
}

/// Says that a test could not run.
pub fn skip(test: &str, reason: &str) {
    println!("SKIP {test}: {reason}");
}

/// Repository-relative JSON.
pub fn json(path: &str) -> serde_json::Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// GGUF metadata written by hand: header and key-value pairs, no tensors.
#[derive(Default)]
pub struct Vocabulary {
    pairs: Vec<u8>,
    count: u64,
}

pub const NORMAL: i32 = 1;
pub const UNKNOWN: i32 = 2;
pub const CONTROL: i32 = 3;
pub const USER_DEFINED: i32 = 4;
pub const BYTE: i32 = 6;

impl Vocabulary {
    fn key(mut self, key: &str, kind: u32) -> Self {
        self.count += 1;
        self.pairs.extend((key.len() as u64).to_le_bytes());
        self.pairs.extend(key.as_bytes());
        self.pairs.extend(kind.to_le_bytes());
        self
    }

    pub fn str(mut self, key: &str, value: &str) -> Self {
        self = self.key(key, 8);
        self.pairs.extend((value.len() as u64).to_le_bytes());
        self.pairs.extend(value.as_bytes());
        self
    }

    pub fn u32(mut self, key: &str, value: u32) -> Self {
        self = self.key(key, 4);
        self.pairs.extend(value.to_le_bytes());
        self
    }

    pub fn bool(mut self, key: &str, value: bool) -> Self {
        self = self.key(key, 7);
        self.pairs.push(u8::from(value));
        self
    }

    pub fn strings(mut self, key: &str, values: &[&str]) -> Self {
        self = self.key(key, 9);
        self.pairs.extend(8u32.to_le_bytes());
        self.pairs.extend((values.len() as u64).to_le_bytes());
        for value in values {
            self.pairs.extend((value.len() as u64).to_le_bytes());
            self.pairs.extend(value.as_bytes());
        }
        self
    }

    pub fn i32s(mut self, key: &str, values: &[i32]) -> Self {
        self = self.key(key, 9);
        self.pairs.extend(5u32.to_le_bytes());
        self.pairs.extend((values.len() as u64).to_le_bytes());
        self.pairs.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self
    }

    pub fn f32s(mut self, key: &str, values: &[f32]) -> Self {
        self = self.key(key, 9);
        self.pairs.extend(6u32.to_le_bytes());
        self.pairs.extend((values.len() as u64).to_le_bytes());
        self.pairs.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self
    }

    /// Tokens with their kinds.
    pub fn tokens(self, tokens: &[(&str, i32)]) -> Self {
        let (texts, kinds): (Vec<&str>, Vec<i32>) = tokens.iter().copied().unzip();
        self.strings("tokenizer.ggml.tokens", &texts).i32s("tokenizer.ggml.token_type", &kinds)
    }

    pub fn gguf(self) -> Gguf {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend(0u64.to_le_bytes());
        file.extend(self.count.to_le_bytes());
        file.extend(self.pairs);
        Gguf::from_bytes(vec![file]).unwrap()
    }

    pub fn tokenizer(self) -> Result<Tokenizer, Error> {
        Tokenizer::from_gguf(self.gguf().metadata())
    }
}
