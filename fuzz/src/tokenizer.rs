//! Files `tokenizer.json` from strangers, with texts for each to cut into tokens.

use std::fs;
use std::path::Path;

use fornax_format::Checkpoint;
use fornax_text::{Error, Special, Tokenizer};

/// Makes a folder a model that has nothing but a tokenizer.
pub fn prepare(folder: &Path) {
    let header = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let weights = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    fs::write(folder.join("model.safetensors"), weights).expect("the folder can be written");
    fs::write(folder.join("config.json"), "{}").expect("the folder can be written");
}

/// Opens a file as the tokenizer of the folder.
pub fn open(folder: &Path, file: &[u8]) -> Result<Tokenizer, Error> {
    fs::write(folder.join("tokenizer.json"), file).expect("the folder can be written");
    Tokenizer::open(&Checkpoint::open(folder).expect("it has weights and a configuration"))
}

/// Opens the file, encodes and decodes. Whether all of that could be done.
pub fn tokenizer(folder: &Path, file: &[u8]) -> bool {
    let Ok(tokenizer) = open(folder, file) else { return false };
    let mut whole = true;
    for text in ["", "ab <x> ba\n12 é▁a", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"] {
        for special in [Special::AsText, Special::Parse] {
            // What a file makes of its own tokens may be nonsense; that ids exist may not.
            let Ok(tokens) = tokenizer.encode_prompt(text, special) else {
                whole = false;
                continue;
            };
            let known = tokens.iter().filter(|&&id| (id as usize) < tokenizer.vocab_len());
            let known: Vec<u32> = known.copied().collect();
            tokenizer.decode(&known);
        }
    }
    whole
}
