//! GGUF files of models in Hugging Face directories, as llama.cpp's converter makes them.

use std::ops::ControlFlow;
use std::path::Path;
use std::thread;

use fornax_compute::cpu::{Cpu, CpuOptions};
use fornax_compute::landing::quantize_row;
use fornax_format::write::Planned;
use fornax_format::{Checkpoint, DType, Gguf, HuggingFace, Value};
use fornax_model::{Config, Export, Exported, export};
use fornax_text::gguf_pairs;

use crate::Error;
use crate::new_file::{NewFile, types_of};
use crate::quantize::Mix;

/// The types that matrices may be written in.
pub const TYPES: [&str; 4] = ["F32", "F16", "BF16", "Q8_0"];

/// Why a model cannot be converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// What was made would be read as something else.
    #[error(
        "a GGUF file of the architecture {architecture} would mean another model than this one: it cannot say {what}"
    )]
    Means {
        /// What the file would say that it is.
        architecture: &'static str,
        /// What differs.
        what: String,
    },
}

/// What a model is to become.
#[derive(Clone, Debug, Default)]
pub struct Converting {
    /// The type of its matrices; `None` is the one that most of them are stored in.
    pub to: Option<Mix>,
    /// What the file calls the model; `None` is the directory's name.
    pub name: Option<String>,
    /// Threads.
    pub threads: usize,
}

/// What was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// Bytes of the file.
    pub bytes: u64,
    /// What the file says that it is.
    pub architecture: &'static str,
    /// The type of its matrices.
    pub to: &'static str,
    /// How many tensors are in each type, in the order in which they first come.
    pub types: Vec<(DType, usize)>,
    /// Whether it has a tokenizer. A directory without one makes a file without one.
    pub tokenizer: bool,
}

/// Makes `out` of the model in the directory at `path`. It has its name only once it is complete; what exists is not replaced. What
/// it says is read again before any weight is written. `progress` is told the bytes written and all bytes, and stops it by breaking.
pub fn convert(
    path: &Path,
    out: &Path,
    converting: &Converting,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Converted, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let config = Config::read(&checkpoint)?;
    let memory = Cpu::new(CpuOptions { threads: 1, ..CpuOptions::default() })?;
    export(&checkpoint, &config, &memory, |export| -> Result<Converted, Error> {
        let Checkpoint::HuggingFace(directory) = &checkpoint else { unreachable!("export refuses others") };
        let mix = converting.to.unwrap_or_else(|| stored_mix(directory));
        let planned: Vec<Planned> = export.tensors().iter().map(|tensor| plan(tensor, mix)).collect();
        let tokenizer = gguf_pairs(directory, config.vocab)?;
        let name = converting.name.clone().unwrap_or_else(|| name_of(directory));
        let (has_tokenizer, pairs) = (tokenizer.is_some(), pairs(export, name, mix, tokenizer, &planned)?);
        let mut file = NewFile::create(out, &pairs, &planned, progress)?;
        let mut tensors = export.tensors().iter().zip(&planned).peekable();
        // What is read with the configuration comes first; then it can be told whether the file means this model.
        while let Some((tensor, planned)) = tensors.next_if(|(tensor, _)| tensor.is_of_configuration()) {
            write(export, tensor, planned, converting.threads, &mut file)?;
            file.end(planned)?;
        }
        check(export.architecture(), &config, file.as_if_whole()?)?;
        for (tensor, planned) in tensors {
            write(export, tensor, planned, converting.threads, &mut file)?;
            file.end(planned)?;
        }
        Ok(Converted {
            bytes: file.finish()?,
            architecture: export.architecture(),
            to: mix.name(),
            types: types_of(&planned),
            tokenizer: has_tokenizer,
        })
    })
}

/// Reads the beginning of the file again.
fn check(architecture: &'static str, config: &Config, written: &Path) -> Result<(), Error> {
    let written = Checkpoint::Gguf(Gguf::open(written)?);
    let differences = config.differences(&Config::read(&written)?);
    match differences.is_empty() {
        true => Ok(()),
        false => Err(ConvertError::Means { architecture, what: differences.join(", ") }.into()),
    }
}

/// The float type that most bytes of the matrices are stored in; F16 where they are quantised.
fn stored_mix(directory: &HuggingFace) -> Mix {
    let bytes = |dtype: DType| {
        let views = directory.weights().tensors().filter(|view| view.dtype == dtype && view.shape.len() > 1);
        views.map(|view| view.bytes.len()).sum::<usize>()
    };
    let [full, half, brain] = [DType::F32, DType::F16, DType::BF16].map(bytes);
    let name = match () {
        () if full > half && full > brain => "F32",
        () if brain > half => "BF16",
        () => "F16",
    };
    Mix::named(name).expect("one of the types that are known")
}

fn name_of(directory: &HuggingFace) -> String {
    let path = directory.directory().canonicalize();
    let name = path.ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    name.unwrap_or_else(|| "model".to_owned())
}

/// Ends of names of small tables, and of what chooses experts: llama.cpp keeps them in F32.
const IN_FULL: [&str; 4] =
    ["ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight", "token_types.weight"];

fn plan(tensor: &Exported, mix: Mix) -> Planned {
    let Exported { name, shape, .. } = tensor;
    let last_words = |end: &&str| {
        let before = name.strip_suffix(*end);
        before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
    };
    let in_full = shape.len() < 2
        || name.ends_with("_norm.weight")
        || !name.ends_with(".weight")
        || IN_FULL.iter().any(last_words);
    let fills = shape.last().is_some_and(|columns| columns.is_multiple_of(mix.usual.block_values()));
    let dtype = match tensor.kept {
        Some(kept) => kept,
        None if in_full => DType::F32,
        None if fills => mix.usual,
        None => DType::F16,
    };
    Planned { name: name.clone(), dtype, shape: shape.clone() }
}

/// What the file says: of itself, of the model, of the tokenizer.
fn pairs(
    export: &Export<'_, Cpu>,
    name: String,
    mix: Mix,
    tokenizer: Option<Vec<(String, Value)>>,
    planned: &[Planned],
) -> Result<Vec<(String, Value)>, Error> {
    let of_model = export.pairs()?;
    let text = |key: &str, text: String| (key.to_owned(), Value::String(text));
    let number = |key: &str, number: u32| (key.to_owned(), Value::U32(number));
    let mut pairs = vec![
        text("general.architecture", export.architecture().to_owned()),
        text("general.type", "model".to_owned()),
        text("general.name", name),
        text("general.size_label", size_label(planned)),
    ];
    pairs.extend(of_model.before);
    // What has experts in four bits says so, whatever the rest is in.
    let experts = planned.iter().any(|tensor| tensor.dtype == DType::MXFP4);
    let kind = if experts { Mix::named("MXFP4_MOE").unwrap_or(mix) } else { mix };
    pairs.push(number("general.file_type", kind.file_type));
    pairs.extend(of_model.after);
    pairs.push(number("general.quantization_version", 2));
    pairs.extend(tokenizer.unwrap_or_else(|| vec![text("tokenizer.ggml.model", "none".to_owned())]));
    Ok(pairs)
}

/// How many weights there are, for people: of experts how many, and how large a model with one of them would be.
fn size_label(planned: &[Planned]) -> String {
    let of_experts = |tensor: &&Planned| tensor.name.contains("_exps.") && tensor.shape.len() > 2;
    let values = |tensor: &Planned| tensor.shape.iter().product::<usize>();
    let shared: usize = planned.iter().filter(|tensor| !of_experts(tensor)).map(values).sum();
    let experts: Vec<&Planned> = planned.iter().filter(of_experts).collect();
    let one: usize = experts.iter().map(|tensor| values(tensor) / tensor.shape[0].max(1)).sum();
    let count = experts.iter().map(|tensor| tensor.shape[0]).sum::<usize>() / experts.len().max(1);
    let label = rounded((shared + one) as f64);
    if count > 0 { format!("{count}x{label}") } else { label }
}

/// A number of weights in two digits.
fn rounded(weights: f64) -> String {
    let (scaled, unit) = match () {
        () if weights > 1e12 => (weights * 1e-12, 'T'),
        () if weights > 1e9 => (weights * 1e-9, 'B'),
        () if weights > 1e6 => (weights * 1e-6, 'M'),
        () => (weights * 1e-3, 'K'),
    };
    let digits = scaled.round_ties_even().to_string();
    let fraction = 2usize.saturating_sub(digits.trim_start_matches('0').len());
    format!("{scaled:.fraction$}{unit}")
}

/// Bytes of values that are held at once.
const SLAB_BYTES: usize = 64 << 20;

/// Writes one tensor.
fn write(
    export: &Export<'_, Cpu>,
    tensor: &Exported,
    planned: &Planned,
    threads: usize,
    file: &mut NewFile<'_>,
) -> Result<(), Error> {
    let mut slab: Vec<f32> = Vec::new();
    let mut columns = 1;
    export.visit(tensor, &mut |row: &[f32]| -> Result<(), Error> {
        columns = row.len();
        slab.extend_from_slice(row);
        if size_of_val(&slab[..]) >= SLAB_BYTES {
            file.write(&quantized(&slab, columns, planned.dtype, threads))?;
            slab.clear();
        }
        Ok(())
    })?;
    file.write(&quantized(&slab, columns, planned.dtype, threads))
}

/// Rows in another type, made on several threads.
fn quantized(values: &[f32], columns: usize, dtype: DType, threads: usize) -> Vec<u8> {
    let each = dtype.bytes_for(columns).expect("planned in whole blocks");
    let rows = values.len() / columns.max(1);
    let mut out = vec![0; rows * each];
    let share = rows.div_ceil(threads.max(1)).max(1);
    thread::scope(|scope| {
        for (values, out) in values.chunks(share * columns).zip(out.chunks_mut(share * each)) {
            scope.spawn(move || {
                let rows = values.chunks_exact(columns).zip(out.chunks_exact_mut(each));
                rows.for_each(|(row, out)| quantize_row(dtype, row, None, out));
            });
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_said_in_two_digits() {
        let check = |weights: f64, wanted: &str| assert_eq!(rounded(weights), wanted);
        check(66_432.0, "66K");
        check(7_241_732_096.0, "7.2B");
        check(134_515_008.0, "135M");
        check(999_999.0, "1000K");
        check(596_049_920.0, "596M");
    }
}
