//! The committed checkpoints (`tests/fixtures/make.py` makes them) and ways to spoil them.

use std::fs;
use std::path::{Path, PathBuf};

use fornax_format::{Checkpoint, Gguf};
use serde_json::Value;

/// A container of a fixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Container {
    Gguf,
    HuggingFace,
}

/// Every checkpoint there is.
pub(crate) const ALL: &[(&str, Container)] = &[
    ("llama", Container::Gguf),
    ("llama", Container::HuggingFace),
    ("llama-bias", Container::Gguf),
    ("llama-bias", Container::HuggingFace),
    ("llama3", Container::Gguf),
    ("llama3", Container::HuggingFace),
    ("linear", Container::Gguf),
    ("linear", Container::HuggingFace),
    ("yarn", Container::Gguf),
    ("yarn", Container::HuggingFace),
    ("mistral", Container::HuggingFace),
    ("qwen2", Container::Gguf),
    ("qwen2", Container::HuggingFace),
    ("qwen2-window", Container::HuggingFace),
    ("mixtral", Container::Gguf),
    ("mixtral", Container::HuggingFace),
    ("qwen2moe", Container::Gguf),
    ("qwen2moe", Container::HuggingFace),
    ("qwen3moe", Container::Gguf),
    ("qwen3moe", Container::HuggingFace),
    ("qwen2moe-dense", Container::HuggingFace),
    ("qwen3moe-sparse", Container::HuggingFace),
    ("gpt-oss", Container::Gguf),
    ("gpt-oss", Container::HuggingFace),
    ("gpt-oss-float", Container::Gguf),
    ("gpt-oss-float", Container::HuggingFace),
    ("qwen3", Container::Gguf),
    ("qwen3", Container::HuggingFace),
    ("olmo2", Container::Gguf),
    ("olmo2", Container::HuggingFace),
    ("phi3", Container::Gguf),
    ("phi3", Container::HuggingFace),
    ("phi3-short", Container::HuggingFace),
    ("gemma2", Container::Gguf),
    ("gemma2", Container::HuggingFace),
    ("gemma3", Container::Gguf),
    ("gemma3", Container::HuggingFace),
    ("gemma3-images", Container::HuggingFace),
    ("gemma4", Container::Gguf),
    ("gemma4", Container::HuggingFace),
    ("gemma4-images", Container::HuggingFace),
    ("gemma4-unified", Container::HuggingFace),
    ("gemma4-e", Container::Gguf),
    ("gemma4-e", Container::HuggingFace),
    ("gemma4-experts", Container::Gguf),
    ("gemma4-experts", Container::HuggingFace),
    ("starcoder2", Container::Gguf),
    ("starcoder2", Container::HuggingFace),
    ("granite", Container::Gguf),
    ("granite", Container::HuggingFace),
    ("gpt2", Container::Gguf),
    ("gpt2", Container::HuggingFace),
    ("smollm3", Container::Gguf),
    ("smollm3", Container::HuggingFace),
    ("smollm3-listed", Container::HuggingFace),
    ("olmo3", Container::Gguf),
    ("olmo3", Container::HuggingFace),
    ("glm4", Container::Gguf),
    ("glm4", Container::HuggingFace),
    ("seed-oss", Container::Gguf),
    ("seed-oss", Container::HuggingFace),
    ("exaone4", Container::Gguf),
    ("exaone4", Container::HuggingFace),
    ("exaone4-full", Container::Gguf),
    ("exaone4-full", Container::HuggingFace),
    ("hunyuan-dense", Container::Gguf),
    ("hunyuan-dense", Container::HuggingFace),
    ("ernie4-5", Container::Gguf),
    ("ernie4-5", Container::HuggingFace),
    ("ernie4-5-bias", Container::HuggingFace),
    ("gemma", Container::Gguf),
    ("gemma", Container::HuggingFace),
    ("cohere", Container::Gguf),
    ("cohere", Container::HuggingFace),
    ("cohere2", Container::Gguf),
    ("cohere2", Container::HuggingFace),
    ("phi", Container::Gguf),
    ("phi", Container::HuggingFace),
    ("stablelm", Container::Gguf),
    ("stablelm", Container::HuggingFace),
    ("gpt-neox", Container::Gguf),
    ("gpt-neox", Container::HuggingFace),
    ("gpt-neox-serial", Container::Gguf),
    ("gpt-neox-serial", Container::HuggingFace),
    ("falcon", Container::Gguf),
    ("falcon", Container::HuggingFace),
    ("olmoe", Container::Gguf),
    ("olmoe", Container::HuggingFace),
    ("glm", Container::Gguf),
    ("glm", Container::HuggingFace),
    ("starcoder", Container::Gguf),
    ("starcoder", Container::HuggingFace),
    ("starcoder-heads", Container::HuggingFace),
    ("helium", Container::HuggingFace),
    ("hunyuan-moe", Container::Gguf),
    ("hunyuan-moe", Container::HuggingFace),
    ("qwen35", Container::Gguf),
    ("qwen35", Container::HuggingFace),
    ("qwen35moe", Container::Gguf),
    ("qwen35moe", Container::HuggingFace),
    ("qwen3next", Container::Gguf),
    ("qwen3next", Container::HuggingFace),
    ("lfm2", Container::Gguf),
    ("lfm2", Container::HuggingFace),
    ("granite-hybrid", Container::Gguf),
    ("granite-hybrid", Container::HuggingFace),
    ("granite-hybrid-dense", Container::Gguf),
    ("granite-hybrid-dense", Container::HuggingFace),
    ("granite-hybrid-rope", Container::HuggingFace),
    ("lfm2-moe", Container::Gguf),
    ("lfm2-moe", Container::HuggingFace),
    ("glm4-moe", Container::Gguf),
    ("glm4-moe", Container::HuggingFace),
    ("glm4-moe-air", Container::Gguf),
    ("glm4-moe-air", Container::HuggingFace),
    ("solar-open", Container::Gguf),
    ("solar-open", Container::HuggingFace),
    ("minimax-m2", Container::Gguf),
    ("minimax-m2", Container::HuggingFace),
    ("ernie4-5-moe", Container::Gguf),
    ("ernie4-5-moe", Container::HuggingFace),
    ("ernie4-5-moe-middle", Container::HuggingFace),
    ("dots1", Container::Gguf),
    ("dots1", Container::HuggingFace),
    ("exaone-moe", Container::Gguf),
    ("exaone-moe", Container::HuggingFace),
    ("hy-v3", Container::Gguf),
    ("hy-v3", Container::HuggingFace),
    ("mamba2", Container::Gguf),
    ("mamba2", Container::HuggingFace),
    ("nemotron-h", Container::Gguf),
    ("nemotron-h", Container::HuggingFace),
    ("nemotron-h-moe", Container::Gguf),
    ("nemotron-h-moe", Container::HuggingFace),
    ("nemotron-h-latent", Container::Gguf),
    ("nemotron-h-latent", Container::HuggingFace),
    ("nemotron-h-both", Container::HuggingFace),
    ("jamba", Container::Gguf),
    ("jamba", Container::HuggingFace),
    ("jamba-dense", Container::HuggingFace),
    ("mamba", Container::Gguf),
    ("mamba", Container::HuggingFace),
    ("falcon-mamba", Container::Gguf),
    ("falcon-mamba", Container::HuggingFace),
    ("falcon-mamba-inner", Container::HuggingFace),
    ("falcon-h1", Container::Gguf),
    ("falcon-h1", Container::HuggingFace),
    ("falcon-h1-norm", Container::HuggingFace),
    ("arcee", Container::Gguf),
    ("arcee", Container::HuggingFace),
    ("nemotron", Container::Gguf),
    ("nemotron", Container::HuggingFace),
    ("jais2", Container::Gguf),
    ("jais2", Container::HuggingFace),
    ("opt", Container::HuggingFace),
    ("hyperclovax", Container::HuggingFace),
    ("cwm", Container::HuggingFace),
    ("vaultgemma", Container::HuggingFace),
    ("llama4", Container::HuggingFace),
    ("llama4-long", Container::Gguf),
    ("llama4-long", Container::HuggingFace),
    ("llama4-full", Container::Gguf),
    ("llama4-full", Container::HuggingFace),
    ("apertus", Container::Gguf),
    ("apertus", Container::HuggingFace),
    ("ministral3", Container::Gguf),
    ("ministral3", Container::HuggingFace),
    ("mistral3-images", Container::HuggingFace),
    ("ministral3-images", Container::HuggingFace),
    ("kimi-k25", Container::HuggingFace),
    ("deepseek-v2", Container::Gguf),
    ("deepseek-v2", Container::HuggingFace),
    ("deepseek-v2-before", Container::Gguf),
    ("deepseek-v2-lite", Container::Gguf),
    ("deepseek-v2-lite", Container::HuggingFace),
    ("deepseek-v2-unnamed", Container::HuggingFace),
    ("deepseek-v3", Container::Gguf),
    ("deepseek-v3", Container::HuggingFace),
    ("deepseek-v3-unsaid", Container::HuggingFace),
    ("deepseek-v3-halves", Container::HuggingFace),
    ("kimi-k2", Container::HuggingFace),
    ("glm4-moe-lite", Container::Gguf),
    ("glm4-moe-lite", Container::HuggingFace),
    ("mistral4", Container::Gguf),
    ("mistral4", Container::HuggingFace),
    ("youtu", Container::Gguf),
    ("youtu", Container::HuggingFace),
];

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

pub(crate) fn path(case: &str, container: Container) -> PathBuf {
    match container {
        Container::Gguf => folder().join(format!("{case}.gguf")),
        Container::HuggingFace => folder().join(case),
    }
}

pub(crate) fn open(case: &str, container: Container) -> Checkpoint {
    Checkpoint::open(&path(case, container)).unwrap()
}

/// What transformers computes of a case.
pub(crate) struct Golden {
    pub(crate) tokens: Vec<u32>,
    /// (tokens, vocab)
    pub(crate) logits: Vec<Vec<f32>>,
}

impl Golden {
    pub(crate) fn read(case: &str) -> Golden {
        // Another way of writing the same file.
        let folder = folder().join(case.trim_end_matches("-before"));
        let json: Value = serde_json::from_slice(&fs::read(folder.join("golden.json")).unwrap()).unwrap();
        let tokens: Vec<u32> = serde_json::from_value(json["tokens"].clone()).unwrap();
        let bytes = fs::read(folder.join("golden.bin")).unwrap();
        let row = bytes.len() / tokens.len();
        let logit = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
        let logits = bytes.chunks_exact(row).map(|row| row.chunks_exact(4).map(logit).collect()).collect();
        Golden { tokens, logits }
    }
}

/// A GGUF fixture with its bytes changed.
pub(crate) fn open_gguf(case: &str, change: impl FnOnce(&mut Vec<u8>)) -> Checkpoint {
    let mut bytes = fs::read(path(case, Container::Gguf)).unwrap();
    change(&mut bytes);
    Checkpoint::Gguf(Gguf::from_bytes(vec![bytes]).unwrap())
}

/// A Hugging Face fixture with config.json and the bytes of its weights changed.
pub(crate) fn open_hugging_face(
    case: &str,
    change_config: impl FnOnce(&mut Value),
    change_weights: impl Fn(&mut Vec<u8>),
) -> Checkpoint {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(path(case, Container::HuggingFace)).unwrap() {
        let from = entry.unwrap().path();
        let mut bytes = fs::read(&from).unwrap();
        if from.extension().is_some_and(|extension| extension == "safetensors") {
            change_weights(&mut bytes);
        }
        fs::write(copy.path().join(from.file_name().unwrap()), bytes).unwrap();
    }
    let config = copy.path().join("config.json");
    let mut value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    change_config(&mut value);
    fs::write(&config, value.to_string()).unwrap();
    Checkpoint::open(copy.path()).unwrap()
}

/// Renames a key or tensor in place: both names have the same length, and the old one is there once.
pub(crate) fn rename(bytes: &mut [u8], from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let at = position(bytes, from.as_bytes());
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
}

/// Sets a 32-bit metadata value of a GGUF file.
pub(crate) fn set_u32(bytes: &mut [u8], key: &str, value: u32) {
    // The key, four bytes of type, the value.
    let at = position(bytes, key.as_bytes()) + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// A metadata value to add.
pub(crate) enum Number {
    U32(u32),
    F32(f32),
}

/// Adds a key to a GGUF file, and a second one that keeps the tensors where their alignment wants them.
pub(crate) fn add_key(bytes: &mut Vec<u8>, key: &str, number: Number) {
    let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let (kind, value) = match number {
        Number::U32(number) => (4_u32, number.to_le_bytes()),
        Number::F32(number) => (6_u32, number.to_le_bytes()),
    };
    let mut pairs = [string(key), kind.to_le_bytes().to_vec(), value.to_vec(), string("filler")].concat();
    pairs.extend(8_u32.to_le_bytes());
    let filler = 32 - (pairs.len() + 8) % 32;
    pairs.extend(string(&"-".repeat(filler)));
    // Magic, version and the number of tensors, then the number of pairs.
    let count = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
    bytes[16..24].copy_from_slice(&(count + 2).to_le_bytes());
    bytes.splice(24..24, pairs);
}

/// Where the text begins, which is there once.
pub(crate) fn position(bytes: &[u8], wanted: &[u8]) -> usize {
    let mut found = bytes.windows(wanted.len()).enumerate().filter(|(_, window)| *window == wanted);
    let (at, _) = found.next().expect("the fixture has what is to be spoiled");
    assert!(found.next().is_none(), "{} is there twice", String::from_utf8_lossy(wanted));
    at
}
