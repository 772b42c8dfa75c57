//! GGUF files in other types, tensor by tensor as llama.cpp's own tool makes them: the same choice of types, the same
//! blocks, the same order, so that the files are the same to the byte.

use std::collections::HashMap;
use std::fs::Permissions;
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;

use fornax_compute::cpu::dequantize;
use fornax_compute::landing::quantize_row;
use fornax_format::write::{ALIGNMENT, Planned, header};
use fornax_format::{DType, Gguf, Metadata, Value, View};

use crate::Error;
use crate::units::binary;

/// What a file's matrices become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    name: &'static str,
    usual: DType,
    size: Size,
    /// What the file says of itself in `general.file_type`.
    file_type: u32,
}

/// How many tensors of a mix are in better types than the usual one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    /// The head alone.
    Plain,
    Small,
    Medium,
}

const fn mix(name: &'static str, usual: DType, size: Size, file_type: u32) -> Mix {
    Mix { name, usual, size, file_type }
}

/// Every mix, by the names and numbers that llama.cpp gives them.
const MIXES: [Mix; 13] = [
    mix("F32", DType::F32, Size::Plain, 0),
    mix("F16", DType::F16, Size::Plain, 1),
    mix("BF16", DType::BF16, Size::Plain, 32),
    mix("Q8_0", DType::Q8_0, Size::Plain, 7),
    mix("Q6_K", DType::Q6_K, Size::Plain, 18),
    mix("Q5_K_M", DType::Q5_K, Size::Medium, 17),
    mix("Q5_K_S", DType::Q5_K, Size::Small, 16),
    mix("Q5_1", DType::Q5_1, Size::Plain, 9),
    mix("Q5_0", DType::Q5_0, Size::Plain, 8),
    mix("Q4_K_M", DType::Q4_K, Size::Medium, 15),
    mix("Q4_K_S", DType::Q4_K, Size::Small, 14),
    mix("Q4_1", DType::Q4_1, Size::Plain, 3),
    mix("Q4_0", DType::Q4_0, Size::Plain, 2),
];

impl Mix {
    /// By its name; `Q4_K` and `Q5_K` mean the medium ones.
    pub fn named(name: &str) -> Option<Mix> {
        let name = match name.to_ascii_uppercase().as_str() {
            "Q4_K" => "Q4_K_M".to_owned(),
            "Q5_K" => "Q5_K_M".to_owned(),
            other => other.to_owned(),
        };
        MIXES.into_iter().find(|mix| mix.name == name)
    }

    /// The names that are known.
    pub fn names() -> impl Iterator<Item = &'static str> {
        MIXES.iter().map(|mix| mix.name)
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    fn is_quantised(self) -> bool {
        !matches!(self.usual, DType::F32 | DType::F16 | DType::BF16)
    }
}

/// Why a file cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    /// The model is no GGUF file.
    #[error("{} is no GGUF file; quantising reads GGUF files", path.display())]
    NotGguf {
        /// The model.
        path: PathBuf,
    },
    /// Something of it cannot be carried over.
    #[error("{what} cannot be quantised")]
    Unsupported {
        /// What it is.
        what: String,
    },
    /// A matrix that lost precision already.
    #[error(
        "tensor {tensor} is {dtype}: what it lost stays lost, and more is lost on top. Quantise the original, or allow it with \
         --allow-requantize"
    )]
    Requantized {
        /// The matrix.
        tensor: String,
        /// Its type.
        dtype: DType,
    },
    /// An importance matrix that is not of this model.
    #[error("the importance matrix has {got} values for {tensor}, wanted {wanted}")]
    Importance {
        /// The matrix.
        tensor: String,
        /// How many it has.
        got: usize,
        /// How many columns there are, of all experts.
        wanted: usize,
    },
    /// The disk has no room for it.
    #[error("{} needs {}, and its disk has {} left", path.display(), binary(*.needed), binary(*.free))]
    DiskFull {
        /// The file that was to be made.
        path: PathBuf,
        /// Its size.
        needed: u64,
        /// What is left.
        free: u64,
    },
    /// It cannot be written.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// The file that was to be made.
        path: PathBuf,
        /// Why.
        reason: io::Error,
    },
}

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
    fn of(&self, tensor: &str, wanted: usize) -> Result<Option<&[f32]>, Error> {
        match self.columns.get(tensor) {
            Some(columns) if columns.len() != wanted => {
                let (tensor, got) = (tensor.to_owned(), columns.len());
                Err(QuantizeError::Importance { tensor, got, wanted }.into())
            }
            columns => Ok(columns.map(Vec::as_slice)),
        }
    }
}

/// What a file is to become.
#[derive(Debug)]
pub struct Quantizing {
    /// The types.
    pub mix: Mix,
    /// How much columns count, where that is known.
    pub importance: Option<Importance>,
    /// Whether matrices that are quantised already are quantised once more.
    pub requantize: bool,
    /// Threads.
    pub threads: usize,
}

/// What was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantized {
    /// Bytes of the file.
    pub bytes: u64,
    /// Bytes of the file it was made of.
    pub bytes_before: u64,
    /// How many tensors are in each type, in the order in which they first come.
    pub types: Vec<(DType, usize)>,
}

/// Makes `out` of the GGUF file at `path`. It has its name only once it is complete; what exists is not replaced.
/// `progress` is told the bytes written and all bytes, and stops it by breaking.
pub fn quantize(
    path: &Path,
    out: &Path,
    quantizing: &Quantizing,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Quantized, Error> {
    if !path.is_file() {
        return Err(QuantizeError::NotGguf { path: path.to_owned() }.into());
    }
    let gguf = Gguf::open(path)?;
    let mut views: Vec<View<'_>> = gguf.tensors().collect();
    // The order in which llama.cpp goes through them, and so the order of its files.
    views.sort_by(|a, b| (layer(a.name), a.name).cmp(&(layer(b.name), b.name)));
    let model = Model::of(gguf.metadata(), &views)?;
    let planned = plan(&views, &model, quantizing)?;
    let pairs = metadata(gguf.metadata(), quantizing.mix)?;
    let header = header(pairs.iter().map(|(key, value)| (&**key, value)), &planned)?;
    let mut total = header.len() as u64;
    for tensor in &planned {
        total += tensor.padded_bytes()? as u64;
    }
    let wrong = |reason: io::Error| Error::from(QuantizeError::Write { path: out.to_owned(), reason });
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    check_room(folder, out, total)?;
    if out.exists() {
        return Err(wrong(io::ErrorKind::AlreadyExists.into()));
    }
    // Gone with its contents where something fails; without a name until it is whole.
    let file = tempfile::Builder::new()
        .prefix(".fornax-")
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)
        .map_err(wrong)?;
    let mut to = BufWriter::with_capacity(1 << 20, file);
    to.write_all(&header).map_err(wrong)?;
    let mut written = header.len() as u64;
    for (view, tensor) in views.iter().zip(&planned) {
        let pad = tensor.padded_bytes()? - tensor.bytes()?;
        if view.dtype == tensor.dtype {
            for part in view.bytes.chunks(SLAB_BYTES) {
                to.write_all(part).map_err(wrong)?;
                written += part.len() as u64;
                report(progress, written, total).map_err(wrong)?;
            }
        } else {
            let matrix = Matrix::of(view, tensor.dtype, quantizing)?;
            for first in (0..matrix.rows).step_by(matrix.rows_at_once()) {
                let bytes = matrix.quantized(first, quantizing.threads)?;
                to.write_all(&bytes).map_err(wrong)?;
                written += bytes.len() as u64;
                report(progress, written, total).map_err(wrong)?;
            }
        }
        view.release();
        to.write_all(&[0; ALIGNMENT][..pad]).map_err(wrong)?;
        written += pad as u64;
    }
    let file = to.into_inner().map_err(|error| wrong(error.into_error()))?;
    file.as_file().sync_all().map_err(wrong)?;
    file.persist_noclobber(out).map_err(|error| wrong(error.error))?;
    let mut types: Vec<(DType, usize)> = Vec::new();
    for tensor in &planned {
        match types.iter_mut().find(|(dtype, _)| *dtype == tensor.dtype) {
            Some((_, count)) => *count += 1,
            None => types.push((tensor.dtype, 1)),
        }
    }
    Ok(Quantized { bytes: total, bytes_before: gguf.file_bytes(), types })
}

/// Bytes that are made or copied at once.
const SLAB_BYTES: usize = 64 << 20;

fn report(progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>, done: u64, total: u64) -> io::Result<()> {
    match progress(done, total) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(io::ErrorKind::Interrupted.into()),
    }
}

/// A matrix on its way into another type.
struct Matrix<'a> {
    view: &'a View<'a>,
    dtype: DType,
    rows: usize,
    columns: usize,
    /// Rows of one expert, which have columns of their own in the importance matrix.
    rows_each: usize,
    importance: Option<&'a [f32]>,
}

impl<'a> Matrix<'a> {
    fn of(view: &'a View<'a>, dtype: DType, quantizing: &'a Quantizing) -> Result<Matrix<'a>, Error> {
        let columns = view.shape.last().copied().unwrap_or(1);
        let rows = view.values().checked_div(columns).unwrap_or(0);
        let experts = if view.shape.len() > 2 { view.shape[0] } else { 1 };
        let importance = match &quantizing.importance {
            Some(importance) => importance.of(view.name, columns * experts)?,
            None => None,
        };
        let rows_each = rows.checked_div(experts).unwrap_or(rows).max(1);
        Ok(Matrix { view, dtype, rows, columns, rows_each, importance })
    }

    fn row_bytes(&self, dtype: DType) -> usize {
        dtype.bytes_for(self.columns).expect("planned in whole blocks")
    }

    fn rows_at_once(&self) -> usize {
        (SLAB_BYTES / self.row_bytes(DType::F32).max(1)).max(1)
    }

    /// Rows from `first` on, as many as are made at once, on several threads.
    fn quantized(&self, first: usize, threads: usize) -> Result<Vec<u8>, Error> {
        let count = self.rows_at_once().min(self.rows - first);
        let each = self.row_bytes(self.dtype);
        let mut out = vec![0; count * each];
        let share = count.div_ceil(threads.max(1)).max(1);
        let known = thread::scope(|scope| {
            let working: Vec<_> = out
                .chunks_mut(share * each)
                .enumerate()
                .map(|(index, out)| scope.spawn(move || self.write(first + index * share, out)))
                .collect();
            working.into_iter().all(|thread| thread.join().unwrap_or(false))
        });
        match known {
            true => Ok(out),
            false => Err(unsupported(format!("tensor {} of {}", self.view.name, self.view.dtype))),
        }
    }

    /// Rows from `first` on, as many as `out` has room for; `false` where their type cannot be read.
    fn write(&self, first: usize, out: &mut [u8]) -> bool {
        let (stored, each) = (self.row_bytes(self.view.dtype), self.row_bytes(self.dtype));
        let mut values = vec![0.0; self.columns];
        for (row, out) in (first..).zip(out.chunks_exact_mut(each)) {
            if dequantize(self.view.dtype, &self.view.bytes[row * stored..][..stored], &mut values).is_none()
            {
                return false;
            }
            let expert = row / self.rows_each;
            let importance = self.importance.map(|all| &all[expert * self.columns..][..self.columns]);
            quantize_row(self.dtype, &values, importance, out);
        }
        true
    }
}

/// What of a model decides its types.
struct Model {
    layers: usize,
    experts: u64,
    is_falcon: bool,
    /// Whether eight query heads share the same values in a model of 80 layers: its values are small and get better types.
    shares_values: bool,
    is_tied: bool,
    value_count: usize,
}

impl Model {
    fn of(metadata: &Metadata, views: &[View<'_>]) -> Result<Model, Error> {
        let architecture = metadata.str("general.architecture")?;
        let own = |key: &str| metadata.opt_u64(&format!("{architecture}.{key}"));
        let layers = own("block_count")?.and_then(|layers| usize::try_from(layers).ok()).unwrap_or(0);
        // Several models have a number of heads for each layer; then it is none of those meant below.
        let heads = own("attention.head_count").ok().flatten();
        let heads_kv = own("attention.head_count_kv").ok().flatten();
        let named = |name: &str| views.iter().any(|view| view.name == name);
        Ok(Model {
            layers,
            experts: own("expert_count")?.unwrap_or(0),
            is_falcon: architecture == "falcon",
            shares_values: layers == 80
                && match architecture {
                    "llama" => heads != heads_kv,
                    "qwen2" => true,
                    _ => false,
                },
            is_tied: !named("output.weight"),
            value_count: views.iter().filter(|view| Kind::of(view.name) == Kind::Values).count(),
        })
    }
}

/// What a tensor does, as far as its type depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Output,
    Embedding,
    /// Values, and what holds them beside other things.
    Values,
    Keys,
    AttentionOutput,
    FfnDown,
    Other,
}

impl Kind {
    fn of(name: &str) -> Kind {
        let has = |part: &str| name.contains(part);
        match name {
            "output.weight" => Kind::Output,
            "token_embd.weight" | "per_layer_token_embd.weight" => Kind::Embedding,
            _ if has("attn_qkv.weight") || has("attn_kv_b.weight") || has("attn_v.weight") => Kind::Values,
            _ if has("attn_k.weight") => Kind::Keys,
            _ if has("attn_q.weight") => Kind::Other,
            _ if has("attn_output.weight") => Kind::AttentionOutput,
            _ if has("ffn_up") || has("ffn_gate") => Kind::Other,
            _ if has("ffn_down") => Kind::FfnDown,
            _ => Kind::Other,
        }
    }
}

/// The layer that a tensor's name says; those of none come first.
fn layer(name: &str) -> Option<u32> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// Names of matrices that stay as they are: what chooses experts, small convolutions, tables of positions.
const KEPT: [&str; 23] = [
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    "time_mix_w",
    "time_mix_v",
    "time_mix_a",
    "time_mix_g",
    "time_mix_decay_w",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
    ".position_embd",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
];

fn is_quantized(view: &View<'_>) -> bool {
    view.shape.len() >= 2
        && view.name.ends_with("weight")
        && !KEPT.iter().any(|part| view.name.contains(part))
        && !["position_embd.weight", "token_types.weight"].contains(&view.name)
}

/// What every tensor becomes.
fn plan(views: &[View<'_>], model: &Model, quantizing: &Quantizing) -> Result<Vec<Planned>, Error> {
    let mut chooser = Chooser { model, quantizing, values: 0, downs: 0 };
    let mut planned = Vec::with_capacity(views.len());
    for view in views {
        let dtype = if is_quantized(view) { chooser.choose(view) } else { view.dtype };
        let floats = matches!(view.dtype, DType::F32 | DType::F16 | DType::BF16);
        if dtype != view.dtype && !floats && !quantizing.requantize {
            let (tensor, dtype) = (view.name.to_owned(), view.dtype);
            return Err(QuantizeError::Requantized { tensor, dtype }.into());
        }
        planned.push(Planned { name: view.name.to_owned(), dtype, shape: view.shape.clone() });
    }
    Ok(planned)
}

/// Chooses the types of matrices one after the other, as llama.cpp does.
struct Chooser<'a> {
    model: &'a Model,
    quantizing: &'a Quantizing,
    /// How many matrices of values have come.
    values: usize,
    /// How many matrices that lead back from the feed-forward part.
    downs: usize,
}

impl Chooser<'_> {
    fn choose(&mut self, view: &View<'_>) -> DType {
        let mix = self.quantizing.mix;
        if !mix.is_quantised() {
            return mix.usual;
        }
        let columns = view.shape.last().copied().unwrap_or(1);
        let chosen = self.better(view, columns);
        if columns.is_multiple_of(chosen.block_values()) {
            return chosen;
        }
        let smaller = match chosen {
            DType::Q4_K => DType::Q5_0,
            DType::Q5_K => DType::Q5_1,
            DType::Q6_K => DType::Q8_0,
            other => other,
        };
        if columns.is_multiple_of(smaller.block_values()) { smaller } else { DType::F16 }
    }

    /// The mix's usual type, or a better one.
    fn better(&mut self, view: &View<'_>, columns: usize) -> DType {
        let Mix { usual, size, .. } = self.quantizing.mix;
        let model = self.model;
        let eight = model.experts == 8;
        let is_k4 = usual == DType::Q4_K;
        let medium = size == Size::Medium;
        match Kind::of(view.name) {
            Kind::Output => self.head(columns),
            Kind::Embedding if model.is_tied => self.head(columns),
            Kind::Values => {
                let at = self.values;
                self.values += 1;
                let mut chosen = match () {
                    () if medium && more_bits(at, model.value_count) => DType::Q6_K,
                    () if is_k4 && size == Size::Small && at < 4 => DType::Q5_K,
                    () => usual,
                };
                if model.shares_values && chosen == DType::Q4_K {
                    chosen = DType::Q5_K;
                }
                if eight { DType::Q8_0 } else { chosen }
            }
            Kind::Keys if eight => DType::Q8_0,
            Kind::AttentionOutput if eight && is_k4 && !model.is_falcon => DType::Q5_K,
            Kind::FfnDown => {
                // Experts of one layer may be several tensors, so there the name tells.
                let at = match model.experts > 1 {
                    true => layer(view.name).map_or(0, |layer| layer as usize),
                    false => self.downs,
                };
                self.downs += 1;
                let more = more_bits(at, model.layers);
                match () {
                    () if is_k4 && medium && model.is_falcon => match () {
                        () if at < model.layers / 16 => DType::Q6_K,
                        () if more => DType::Q5_K,
                        () => usual,
                    },
                    () if medium && more => DType::Q6_K,
                    () if is_k4 && size == Size::Small && !model.is_falcon && at < model.layers / 8 => {
                        DType::Q5_K
                    }
                    () if self.quantizing.importance.is_some() && at < model.layers / 8 => match usual {
                        DType::Q4_0 => DType::Q4_1,
                        DType::Q5_0 => DType::Q5_1,
                        other => other,
                    },
                    () => usual,
                }
            }
            _ => usual,
        }
    }

    /// The type of the head, and of an embedding that is one too.
    fn head(&self, columns: usize) -> DType {
        let usual = self.quantizing.mix.usual;
        match () {
            () if self.model.is_falcon || !columns.is_multiple_of(usual.block_values()) => DType::Q8_0,
            () if usual == DType::Q8_0 => DType::Q8_0,
            () => DType::Q6_K,
        }
    }
}

/// Whether a layer is among the first or the last eighth, or every third between them.
fn more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// The file's own pairs, and what it is now behind them.
fn metadata(metadata: &Metadata, mix: Mix) -> Result<Vec<(String, Value)>, Error> {
    const VERSION: &str = "general.quantization_version";
    const FILE_TYPE: &str = "general.file_type";
    let left_out = [VERSION, FILE_TYPE, "split.no", "split.count", "split.tensors.count"];
    if metadata.opt_u64("general.alignment")?.is_some_and(|alignment| alignment != ALIGNMENT as u64) {
        return Err(unsupported("a file whose general.alignment is not 32".to_owned()));
    }
    let kept = metadata.iter().filter(|(key, _)| !left_out.contains(key));
    let mut pairs: Vec<(String, Value)> = kept.map(|(key, value)| (key.to_owned(), value.clone())).collect();
    pairs.push((VERSION.to_owned(), Value::U32(2)));
    pairs.push((FILE_TYPE.to_owned(), Value::U32(mix.file_type)));
    Ok(pairs)
}

fn floats(view: &View<'_>) -> Result<Vec<f32>, Error> {
    let mut values = vec![0.0; view.values()];
    dequantize(view.dtype, view.bytes, &mut values)
        .ok_or_else(|| unsupported(format!("tensor {} of {}", view.name, view.dtype)))?;
    Ok(values)
}

fn check_room(folder: &Path, out: &Path, needed: u64) -> Result<(), Error> {
    // A system that does not say is believed to have room.
    let Ok(room) = rustix::fs::statvfs(folder) else { return Ok(()) };
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    match free < needed {
        true => Err(QuantizeError::DiskFull { path: out.to_owned(), needed, free }.into()),
        false => Ok(()),
    }
}

fn unsupported(what: String) -> Error {
    QuantizeError::Unsupported { what }.into()
}
