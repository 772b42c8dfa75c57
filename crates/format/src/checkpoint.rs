//! A model on disk, whatever its container.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::huggingface::CONFIG;
use crate::safetensors::{INDEX, SINGLE};
use crate::{DType, Error, Gguf, HuggingFace};

/// An open model in either container.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one exists per model")]
pub enum Checkpoint {
    /// A GGUF file or split.
    Gguf(Gguf),
    /// A directory with `config.json` and safetensors weights.
    HuggingFace(HuggingFace),
}

impl Checkpoint {
    /// Opens what `path` is: a GGUF file or first shard, a `.safetensors` file with its `config.json` beside it, a
    /// Hugging Face directory, or a directory that holds exactly one GGUF model, perhaps with files beside it.
    pub fn open(path: &Path) -> Result<Checkpoint, Error> {
        let kind = fs::metadata(path).map_err(|error| Error::from(error).at(path))?;
        if kind.is_dir() {
            Checkpoint::open_directory(path)
        } else if kind.is_file() {
            Checkpoint::open_file(path)
        } else {
            Err(Error::NotAFile.at(path))
        }
    }

    /// Brings float matrices into this type when they are loaded. A GGUF file is refused: it is used as it is stored.
    pub fn quantize(&mut self, dtype: DType) -> Result<(), Error> {
        match self {
            Checkpoint::Gguf(_) => Err(Error::QuantizeGguf),
            Checkpoint::HuggingFace(model) => {
                model.quantize(dtype);
                Ok(())
            }
        }
    }

    /// Multiplies weights in 8-bit floats with activations in 8-bit floats: those of the file, and those that
    /// [`Checkpoint::quantize`] brings into MXFP8. Refused where there are none.
    pub fn multiply_floats8(&mut self) -> Result<(), Error> {
        let found = match self {
            Checkpoint::HuggingFace(model) => model.multiply_floats8(),
            Checkpoint::Gguf(_) => false,
        };
        if found { Ok(()) } else { Err(Error::NoFloats8) }
    }

    fn open_file(path: &Path) -> Result<Checkpoint, Error> {
        let mut found = Vec::new();
        let read = File::open(path).and_then(|file| file.take(4).read_to_end(&mut found));
        read.map_err(|error| Error::from(error).at(path))?;
        let has_extension = |wanted: &str| path.extension().is_some_and(|extension| extension == wanted);
        if matches!(&*found, b"GGUF" | b"FUGG") || has_extension("gguf") {
            return Gguf::open(path).map(Checkpoint::Gguf);
        }
        let directory = path.parent().unwrap_or(Path::new(""));
        if path.file_name().is_some_and(|name| name == INDEX) {
            return HuggingFace::open(directory).map(Checkpoint::HuggingFace);
        }
        if has_extension("safetensors") {
            return HuggingFace::open_with(directory, path).map(Checkpoint::HuggingFace);
        }
        Err(Error::NotAModel { found }.at(path))
    }

    fn open_directory(path: &Path) -> Result<Checkpoint, Error> {
        let has = |name: &str| path.join(name).is_file();
        if has(CONFIG) && (has(SINGLE) || has(INDEX)) {
            return HuggingFace::open(path).map(Checkpoint::HuggingFace);
        }
        // Repositories of GGUF files often carry the original config.json, so GGUF is looked for before that file
        // is taken as a promise of safetensors.
        let models = gguf_models(path).map_err(|error| Error::from(error).at(path))?;
        let (beside, models): (Vec<_>, Vec<_>) = models.into_iter().partition(|path| Gguf::is_beside(path));
        match &*models {
            [model] => {
                let mut gguf = Gguf::open(model)?;
                beside.iter().try_for_each(|path| gguf.add(path))?;
                Ok(Checkpoint::Gguf(gguf))
            }
            [first, ..] => {
                let first = first.file_name().unwrap_or_default().to_string_lossy().into_owned();
                Err(Error::SeveralModels { count: models.len(), first }.at(path))
            }
            [] if has(CONFIG) => HuggingFace::open(path).map(Checkpoint::HuggingFace),
            [] => Err(Error::NoModel.at(path)),
        }
    }
}

/// The GGUF files in a directory by name, without the further shards of splits.
fn gguf_models(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut models = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "gguf") && !Gguf::is_further_shard(&path) {
            models.push(path);
        }
    }
    models.sort();
    Ok(models)
}
