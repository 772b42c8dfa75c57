//! What a model is on disk, as clients list it.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use fornax_format::Checkpoint;
use fornax_server::ModelFiles;
use sha2::{Digest, Sha256};

/// Of each file so many places are looked at, and so many bytes at each: reading all of a large model would hold up the
/// start.
const PLACES: u64 = 32;
const PLACE_BYTES: u64 = 32 << 10;

/// The files of the model at `path`; what of them cannot be read is left out, since loading the model says so.
pub(super) fn of(path: &Path) -> ModelFiles {
    let Ok(checkpoint) = Checkpoint::open(path) else { return ModelFiles::default() };
    let (format, files, parameters) = match &checkpoint {
        Checkpoint::Gguf(gguf) => {
            ("gguf", gguf.files().to_vec(), gguf.tensors().map(|view| view.values() as u64).sum())
        }
        Checkpoint::HuggingFace(directory) => (
            "safetensors",
            directory.weights().files().to_vec(),
            directory.weights().tensors().map(|view| view.values() as u64).sum(),
        ),
    };
    let mut digest = Sha256::new();
    let mut bytes = 0;
    for file in &files {
        bytes += take(file, &mut digest).unwrap_or(0);
    }
    let digest = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    ModelFiles { format, bytes, parameters, digest }
}

/// Adds a file's length and what stands at places all over it; how long it is.
fn take(path: &Path, digest: &mut Sha256) -> io::Result<u64> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    digest.update(length.to_le_bytes());
    for place in 0..PLACES {
        file.seek(SeekFrom::Start(length / PLACES * place))?;
        let mut bytes = Vec::new();
        file.by_ref().take(PLACE_BYTES).read_to_end(&mut bytes)?;
        digest.update(&bytes);
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_anywhere_among_the_places_makes_another_digest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        let mut bytes = vec![7; 1 << 20];
        let digest_of = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let mut digest = Sha256::new();
            assert_eq!(take(&path, &mut digest).unwrap(), bytes.len() as u64);
            digest.finalize()
        };
        let before = digest_of(&bytes);
        assert_eq!(digest_of(&bytes), before);
        bytes[777_777] = 8;
        assert_ne!(digest_of(&bytes), before);
        bytes.truncate(1 << 19);
        assert_ne!(digest_of(&bytes), before);
    }
}
