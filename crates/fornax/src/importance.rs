//! Importance matrices: how much each column of each matrix counts, measured on a text and kept as llama.cpp keeps it.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use fornax_compute::cpu::{Seen, Watch, dequantize};
use fornax_format::write::Planned;
use fornax_format::{Array, DType, Gguf, Value, View};
use fornax_text::Special;

use crate::new_file::NewFile;
use crate::quantize::{QuantizeError, unsupported};
use crate::{Device, Error, OpenOptions};

/// How much each column of each matrix counts: the mean squares of what was multiplied by it.
#[derive(Debug, Default)]
pub struct Importance {
    /// By tensor; of matrices of several experts one after the other.
    columns: HashMap<String, Vec<f32>>,
}

impl Importance {
    /// Reads a matrix as llama.cpp's tool writes it into a GGUF file.
    pub fn open(path: &Path) -> Result<Importance, Error> {
        let gguf = Gguf::open(path)?;
        let mut columns = HashMap::new();
        for sums in gguf.tensors() {
            let Some(tensor) = sums.name.strip_suffix(".in_sum2") else { continue };
            let counts = gguf.tensor(&format!("{tensor}.counts"));
            let counts = counts.ok_or_else(|| {
                unsupported(format!("{}: {tensor}.counts is missing, so it", path.display()))
            })?;
            let (sums, counts) = (floats(&sums)?, floats(&counts)?);
            if counts.is_empty() || !sums.len().is_multiple_of(counts.len()) {
                return Err(unsupported(format!("{}: the counts of {tensor}", path.display())));
            }
            let each = sums.len() / counts.len();
            let mean = |(at, sum): (usize, &f32)| match counts[at / each] {
                // An expert that nothing went to: all columns count alike.
                count if count <= 0.0 => 1.0,
                count => sum / count,
            };
            columns.insert(tensor.to_owned(), sums.iter().enumerate().map(mean).collect());
        }
        if columns.is_empty() {
            return Err(unsupported(format!(
                "{} holds no importance matrix, with which a file",
                path.display()
            )));
        }
        Ok(Importance { columns })
    }

    /// The columns of a tensor, of which there are so many.
    pub(crate) fn of(&self, tensor: &str, wanted: usize) -> Result<Option<&[f32]>, Error> {
        match self.columns.get(tensor) {
            Some(columns) if columns.len() != wanted => {
                let (tensor, got) = (tensor.to_owned(), columns.len());
                Err(QuantizeError::Importance { tensor, got, wanted }.into())
            }
            columns => Ok(columns.map(Vec::as_slice)),
        }
    }
}

/// What an importance matrix is measured on.
#[derive(Clone, Debug)]
pub struct Measuring {
    /// The text.
    pub text: String,
    /// What the file calls the text.
    pub source: String,
    /// Tokens of a chunk, each of which is computed on its own.
    pub chunk: usize,
    /// The most chunks; `None` takes the whole text.
    pub chunks: Option<usize>,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Bytes of the file.
    pub bytes: u64,
    /// Chunks of the text.
    pub chunks: usize,
    /// Matrices that the file tells of.
    pub matrices: usize,
    /// Experts that no token went to.
    pub unused: usize,
}

/// Computes a text with a model on the processor and writes into `out` what its matrices were multiplied by. What is left of the
/// text behind the last whole chunk is not computed. `progress` is told the chunks computed and all of them, and stops it by
/// breaking.
pub fn measure(
    path: &Path,
    options: OpenOptions,
    measuring: &Measuring,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Measured, Error> {
    if !path.is_file() {
        return Err(QuantizeError::NotGguf { path: path.to_owned() }.into());
    }
    if out.exists() {
        let reason = std::io::ErrorKind::AlreadyExists.into();
        return Err(crate::NewFileError::Write { path: out.to_owned(), reason }.into());
    }
    // Before the work: whether the folder takes a file.
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    tempfile::tempfile_in(folder)
        .map_err(|reason| crate::NewFileError::Write { path: out.to_owned(), reason })?;
    let watch = Arc::new(Watch::default());
    let options = options.device(Device::Cpu).context(measuring.chunk).watch(watch.clone());
    let mut evaluator = options.evaluator(1, &mut |_| {})?;
    let tokenizer = evaluator.text().tokenizer().ok_or(Error::NoTokenizer)?;
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    let mut tokens: Vec<u32> = bos.into_iter().collect();
    tokens.extend(tokenizer.encode(&measuring.text, Special::AsText)?);
    let all = tokens.len() / measuring.chunk;
    let chunks = measuring.chunks.map_or(all, |most| all.min(most));
    if chunks == 0 {
        return Err(QuantizeError::ShortText { tokens: tokens.len(), chunk: measuring.chunk }.into());
    }
    for (done, chunk) in tokens.chunks_exact(measuring.chunk).take(chunks).enumerate() {
        let mut chunk = chunk.to_vec();
        if let Some(bos) = bos {
            chunk[0] = bos;
        }
        let cancelled = |flow: ControlFlow<()>| match flow {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Cancelled),
        };
        cancelled(progress(done as u64, chunks as u64))?;
        evaluator.logits(&chunk, true, &mut |_, _| ControlFlow::Continue(()))?;
    }
    drop(evaluator);
    write(&watch.seen(), measuring, chunks, out, &mut |_, _| progress(chunks as u64, chunks as u64))
}

fn write(
    seen: &BTreeMap<Box<str>, Seen>,
    measuring: &Measuring,
    chunks: usize,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Measured, Error> {
    // What a layer multiplies by: the head and the embedding have types of their own.
    let of_layers: Vec<(&str, &Seen)> = seen
        .iter()
        .map(|(name, seen)| (&**name, seen))
        .filter(|(name, _)| name.starts_with("blk."))
        .collect();
    let count = |count: usize| Value::U32(u32::try_from(count).unwrap_or(u32::MAX));
    let pairs = [
        ("general.type", Value::String("imatrix".to_owned())),
        ("imatrix.datasets", Value::Array(Array::String(vec![measuring.source.clone()]))),
        ("imatrix.chunk_count", count(chunks)),
        ("imatrix.chunk_size", count(measuring.chunk)),
    ]
    .map(|(key, value)| (key.to_owned(), value));
    let mut planned = Vec::with_capacity(2 * of_layers.len());
    let mut values: Vec<Vec<f32>> = Vec::with_capacity(2 * of_layers.len());
    let mut unused = 0;
    for (name, Seen { sums, counts }) in &of_layers {
        let plan = |what: &str, shape: [usize; 2]| {
            let (name, shape) = (format!("{name}.{what}"), shape.to_vec());
            Planned { name, dtype: DType::F32, shape }
        };
        planned.push(plan("in_sum2", [counts.len(), sums.len() / counts.len()]));
        planned.push(plan("counts", [counts.len(), 1]));
        values.push(sums.iter().map(|sum| *sum as f32).collect());
        values.push(counts.iter().map(|count| *count as f32).collect());
        unused += counts.iter().filter(|count| **count == 0).count();
    }
    let mut file = NewFile::create(out, &pairs, &planned, progress)?;
    for (planned, values) in planned.iter().zip(&values) {
        file.write(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())?;
        file.end(planned)?;
    }
    Ok(Measured { bytes: file.finish()?, chunks, matrices: of_layers.len(), unused })
}

fn floats(view: &View<'_>) -> Result<Vec<f32>, Error> {
    let mut values = vec![0.0; view.values()];
    dequantize(view.dtype, view.bytes, &mut values)
        .ok_or_else(|| unsupported(format!("tensor {} of {}", view.name, view.dtype)))?;
    Ok(values)
}
