//! GGUF files in other types, tensor by tensor as llama.cpp's own tool makes them: the same choice of types, the same
//! blocks, the same order, so that the files are the same to the byte.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::thread;

use fornax_compute::cpu::dequantize;
use fornax_compute::landing::quantize_row;
use fornax_format::write::{ALIGNMENT, Planned};
use fornax_format::{DType, Gguf, Metadata, Value, View};

use crate::Error;
use crate::importance::Importance;
use crate::new_file::{NewFile, types_of};

/// What a file's matrices become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    name: &'static str,
    pub(crate) usual: DType,
    size: Size,
    /// What the file says of itself in `general.file_type`.
    pub(crate) file_type: u32,
}

/// How many tensors of a mix are in better types than the usual one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    /// The head alone.
    Plain,
    Small,
    Medium,
    Large,
}

const fn mix(name: &'static str, usual: DType, size: Size, file_type: u32) -> Mix {
    Mix { name, usual, size, file_type }
}

/// Every mix, by the names and numbers that llama.cpp gives them.
const MIXES: [Mix; 23] = [
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
    mix("IQ4_NL", DType::IQ4_NL, Size::Plain, 25),
    mix("IQ4_XS", DType::IQ4_XS, Size::Plain, 30),
    mix("Q3_K_L", DType::Q3_K, Size::Large, 13),
    mix("Q3_K_M", DType::Q3_K, Size::Medium, 12),
    mix("Q3_K_S", DType::Q3_K, Size::Small, 11),
    mix("Q2_K", DType::Q2_K, Size::Medium, 10),
    mix("Q2_K_S", DType::Q2_K, Size::Small, 21),
    mix("TQ2_0", DType::TQ2_0, Size::Plain, 37),
    mix("TQ1_0", DType::TQ1_0, Size::Plain, 36),
    mix("MXFP4_MOE", DType::MXFP4, Size::Plain, 38),
];

impl Mix {
    /// By its name; `Q3_K`, `Q4_K` and `Q5_K` mean the medium ones.
    pub fn named(name: &str) -> Option<Mix> {
        let name = match name.to_ascii_uppercase().as_str() {
            "Q3_K" => "Q3_K_M".to_owned(),
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
    /// A text that fills no chunk.
    #[error("{tokens} tokens fill no chunk of {chunk}; give more text, or smaller chunks (--context)")]
    ShortText {
        /// Its tokens.
        tokens: usize,
        /// Tokens of a chunk.
        chunk: usize,
    },
    /// A type that comes out of no use without an importance matrix.
    #[error("{mix} needs an importance matrix (--importance): without one it is of no use")]
    NeedsImportance {
        /// The mix.
        mix: &'static str,
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
    let mut file = NewFile::create(out, &pairs, &planned, progress)?;
    for (view, tensor) in views.iter().zip(&planned) {
        if view.dtype == tensor.dtype {
            view.bytes.chunks(SLAB_BYTES).try_for_each(|part| file.write(part))?;
        } else {
            let matrix = Matrix::of(view, tensor.dtype, quantizing)?;
            for first in (0..matrix.rows).step_by(matrix.rows_at_once()) {
                file.write(&matrix.quantized(first, quantizing.threads)?)?;
            }
        }
        view.release();
        file.end(tensor)?;
    }
    let bytes = file.finish()?;
    Ok(Quantized { bytes, bytes_before: gguf.file_bytes(), types: types_of(&planned) })
}

/// Bytes that are made or copied at once.
const SLAB_BYTES: usize = 64 << 20;

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
    /// Whether four query heads or more share the same values.
    shares_four: bool,
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
            shares_four: heads.is_some_and(|heads| heads >= 4 * heads_kv.unwrap_or(heads).max(1)),
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
    let mix = quantizing.mix;
    if (mix.usual, mix.size) == (DType::Q2_K, Size::Small) && quantizing.importance.is_none() {
        return Err(QuantizeError::NeedsImportance { mix: mix.name }.into());
    }
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
            DType::IQ4_XS => DType::IQ4_NL,
            DType::Q2_K | DType::Q3_K | DType::TQ1_0 | DType::TQ2_0 => DType::Q4_0,
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
        let (is_k2, is_k3) = (usual == DType::Q2_K, usual == DType::Q3_K);
        let uneven = matches!(usual, DType::IQ4_NL | DType::IQ4_XS);
        // Of the others the middle sizes keep some matrices in Q6_K.
        let medium = size == Size::Medium && matches!(usual, DType::Q4_K | DType::Q5_K);
        let middle = size == Size::Medium;
        match Kind::of(view.name) {
            Kind::Output => self.head(columns),
            Kind::Embedding if model.is_tied => self.head(columns),
            _ if usual == DType::MXFP4 => match view.shape[..] {
                [experts, _, _] if experts > 1 => usual,
                _ => DType::Q8_0,
            },
            Kind::Embedding if matches!(usual, DType::TQ1_0 | DType::TQ2_0) => DType::Q4_K,
            Kind::Values => {
                let at = self.values;
                self.values += 1;
                let mut chosen = match () {
                    () if is_k2 && model.shares_four => DType::Q4_K,
                    () if is_k2 && middle => DType::Q3_K,
                    () if is_k3 && middle && at < 2 => DType::Q5_K,
                    () if is_k3 && middle => DType::Q4_K,
                    () if is_k3 && size == Size::Large => DType::Q5_K,
                    () if uneven && model.shares_four => DType::Q5_K,
                    () if medium && more_bits(at, model.value_count) => DType::Q6_K,
                    () if is_k4 && size == Size::Small && at < 4 => DType::Q5_K,
                    () => usual,
                };
                if model.shares_values && matches!(chosen, DType::Q3_K | DType::Q4_K) {
                    chosen = DType::Q5_K;
                }
                if eight { DType::Q8_0 } else { chosen }
            }
            Kind::Keys if eight => DType::Q8_0,
            Kind::AttentionOutput if model.is_falcon => match size {
                Size::Large => DType::Q4_K,
                _ => usual,
            },
            Kind::AttentionOutput if eight => match (usual, size) {
                (DType::Q4_K | DType::IQ4_NL | DType::IQ4_XS, _)
                | (DType::Q2_K, Size::Medium)
                | (DType::Q3_K, Size::Small | Size::Medium) => DType::Q5_K,
                _ => usual,
            },
            Kind::AttentionOutput => match (usual, size) {
                (DType::Q2_K, Size::Medium) => DType::Q3_K,
                (DType::Q3_K, Size::Medium) => DType::Q4_K,
                (DType::Q3_K, Size::Large) => DType::Q5_K,
                _ => usual,
            },
            Kind::FfnDown => {
                // Experts of one layer may be several tensors, so there the name tells.
                let at = match model.experts > 1 {
                    true => layer(view.name).map_or(0, |layer| layer as usize),
                    false => self.downs,
                };
                self.downs += 1;
                let more = more_bits(at, model.layers);
                match () {
                    () if is_k2 && middle => DType::Q3_K,
                    () if is_k2 && at < model.layers / 8 => DType::Q4_K,
                    () if is_k3 && middle && at < model.layers / 16 => DType::Q5_K,
                    () if is_k3 && middle && model.is_falcon && !more => DType::Q3_K,
                    () if is_k3 && middle => DType::Q4_K,
                    () if is_k3 && size == Size::Large && model.is_falcon => DType::Q4_K,
                    () if is_k3 && size == Size::Large => DType::Q5_K,
                    () if uneven && self.quantizing.importance.is_none() && at < model.layers / 8 => {
                        DType::Q5_K
                    }
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
            () if matches!(usual, DType::Q8_0 | DType::MXFP4) => DType::Q8_0,
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

pub(crate) fn unsupported(what: String) -> Error {
    QuantizeError::Unsupported { what }.into()
}
