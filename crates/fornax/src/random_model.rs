//! A model of random weights in the shape of a real one: as large and as fast, for measuring where no model is at hand.
//!
//! It has no tokenizer and takes token ids, or one whose words mean nothing. What it says means nothing either way.

use std::fs::{File, Permissions};
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use fornax_compute::SplitMix64;
use fornax_format::write::{self as gguf, ALIGNMENT, Planned};
use fornax_format::{Array, DType, Value};
use half::{bf16, f16};

/// A decoder by its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The model that has this shape.
    pub name: &'static str,
    architecture: &'static str,
    layers: u32,
    hidden: u32,
    ffn: u32,
    heads: u32,
    heads_kv: u32,
    head_dim: u32,
    vocab: u32,
    context: u32,
    rope_base: u32,
    tied: bool,
    qkv_bias: bool,
    /// Whether each head's query and key are normalised.
    qk_norm: bool,
    /// What stands in place of attention in all layers but every fourth.
    delta: Option<Delta>,
    experts: Option<Mixture>,
}

impl Shape {
    /// The same for another context.
    #[must_use]
    pub const fn with_context(self, context: u32) -> Shape {
        Shape { context, ..self }
    }
}

/// Layers of the gated delta rule: heads and the sizes of a query, key and value. Attention of such a model has gates,
/// and rotates a quarter of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Delta {
    key: u32,
    value: u32,
    dim: u32,
}

/// Inputs that the convolution in front of the delta rule sees.
const TAPS: u32 = 4;
/// Every how manyth layer of a hybrid attends.
const ATTENDS: u32 = 4;

/// Experts of every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mixture {
    count: u32,
    chosen: u32,
    ffn: u32,
    /// Whether there is one more that every token takes.
    shared: bool,
}

/// Every shape that can be made.
pub const SHAPES: [Shape; 12] = [
    Shape {
        name: "tiny",
        architecture: "llama",
        layers: 2,
        hidden: 256,
        ffn: 512,
        heads: 4,
        heads_kv: 2,
        head_dim: 64,
        vocab: 1024,
        context: 2048,
        rope_base: 10_000,
        tied: true,
        qkv_bias: false,
        qk_norm: false,
        delta: None,
        experts: None,
    },
    Shape {
        name: "smollm2-135m",
        architecture: "llama",
        layers: 30,
        hidden: 576,
        ffn: 1536,
        heads: 9,
        heads_kv: 3,
        head_dim: 64,
        vocab: 49_152,
        context: 8192,
        rope_base: 100_000,
        tied: true,
        qkv_bias: false,
        qk_norm: false,
        delta: None,
        experts: None,
    },
    Shape {
        name: "qwen2.5-0.5b",
        architecture: "qwen2",
        layers: 24,
        hidden: 896,
        ffn: 4864,
        heads: 14,
        heads_kv: 2,
        head_dim: 64,
        vocab: 151_936,
        context: 32_768,
        rope_base: 1_000_000,
        tied: true,
        qkv_bias: true,
        qk_norm: false,
        delta: None,
        experts: None,
    },
    Shape {
        name: "qwen2.5-1.5b",
        architecture: "qwen2",
        layers: 28,
        hidden: 1536,
        ffn: 8960,
        heads: 12,
        heads_kv: 2,
        head_dim: 128,
        vocab: 151_936,
        context: 32_768,
        rope_base: 1_000_000,
        tied: true,
        qkv_bias: true,
        qk_norm: false,
        delta: None,
        experts: None,
    },
    Shape {
        name: "qwen2.5-7b",
        architecture: "qwen2",
        layers: 28,
        hidden: 3584,
        ffn: 18_944,
        heads: 28,
        heads_kv: 4,
        head_dim: 128,
        vocab: 152_064,
        context: 32_768,
        rope_base: 1_000_000,
        tied: false,
        qkv_bias: true,
        qk_norm: false,
        delta: None,
        experts: None,
    },
    Shape {
        name: "llama3-70b",
        architecture: "llama",
        layers: 80,
        hidden: 8192,
        ffn: 28_672,
        heads: 64,
        heads_kv: 8,
        head_dim: 128,
        vocab: 128_256,
        context: 8192,
        rope_base: 500_000,
        tied: false,
        qkv_bias: false,
        qk_norm: false,
        delta: None,
        experts: None,
    },
    Shape {
        name: "qwen3-30b-a3b",
        architecture: "qwen3moe",
        layers: 48,
        hidden: 2048,
        ffn: 6144,
        heads: 32,
        heads_kv: 4,
        head_dim: 128,
        vocab: 151_936,
        context: 32_768,
        rope_base: 1_000_000,
        tied: false,
        qkv_bias: false,
        qk_norm: true,
        delta: None,
        experts: Some(Mixture { count: 128, chosen: 8, ffn: 768, shared: false }),
    },
    Shape {
        name: "tiny-hybrid",
        architecture: "qwen35",
        layers: 4,
        hidden: 256,
        ffn: 512,
        heads: 4,
        heads_kv: 2,
        head_dim: 64,
        vocab: 1024,
        context: 2048,
        rope_base: 10_000_000,
        tied: true,
        qkv_bias: false,
        qk_norm: true,
        delta: Some(Delta { key: 2, value: 4, dim: 128 }),
        experts: None,
    },
    Shape {
        name: "tiny-hybrid-moe",
        architecture: "qwen35moe",
        layers: 4,
        hidden: 256,
        ffn: 256,
        heads: 4,
        heads_kv: 2,
        head_dim: 64,
        vocab: 1024,
        context: 2048,
        rope_base: 10_000_000,
        tied: false,
        qkv_bias: false,
        qk_norm: true,
        delta: Some(Delta { key: 2, value: 4, dim: 128 }),
        experts: Some(Mixture { count: 16, chosen: 4, ffn: 256, shared: true }),
    },
    Shape {
        name: "qwen3.5-4b",
        architecture: "qwen35",
        layers: 32,
        hidden: 2560,
        ffn: 9216,
        heads: 16,
        heads_kv: 4,
        head_dim: 256,
        vocab: 248_320,
        context: 262_144,
        rope_base: 10_000_000,
        tied: true,
        qkv_bias: false,
        qk_norm: true,
        delta: Some(Delta { key: 16, value: 32, dim: 128 }),
        experts: None,
    },
    Shape {
        name: "qwen3.6-27b",
        architecture: "qwen35",
        layers: 64,
        hidden: 5120,
        ffn: 17_408,
        heads: 24,
        heads_kv: 4,
        head_dim: 256,
        vocab: 248_320,
        context: 262_144,
        rope_base: 10_000_000,
        tied: false,
        qkv_bias: false,
        qk_norm: true,
        delta: Some(Delta { key: 16, value: 48, dim: 128 }),
        experts: None,
    },
    Shape {
        name: "qwen3.6-35b-a3b",
        architecture: "qwen35moe",
        layers: 40,
        hidden: 2048,
        ffn: 512,
        heads: 16,
        heads_kv: 2,
        head_dim: 256,
        vocab: 248_320,
        context: 262_144,
        rope_base: 10_000_000,
        tied: false,
        qkv_bias: false,
        qk_norm: true,
        delta: Some(Delta { key: 16, value: 32, dim: 128 }),
        experts: Some(Mixture { count: 256, chosen: 8, ffn: 512, shared: true }),
    },
];

/// A tensor of the file.
struct Tensor {
    name: String,
    columns: usize,
    /// None for a vector.
    rows: Option<usize>,
    /// How many matrices these rows are of, where there are several.
    stacked: Option<usize>,
    dtype: DType,
}

impl Tensor {
    fn bytes(&self) -> usize {
        let values = self.columns * self.rows.unwrap_or(1);
        self.dtype.bytes_for(values).expect("the type fits the columns")
    }

    /// As a file's header lists it.
    fn planned(&self) -> Planned {
        let rows = self.rows.map(|rows| rows / self.stacked.unwrap_or(1));
        let shape = [self.stacked, rows, Some(self.columns)].into_iter().flatten().collect();
        Planned { name: self.name.clone(), dtype: self.dtype, shape }
    }
}

/// What a model's matrices are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Types {
    usual: DType,
    /// For what llama.cpp's mixtures treat better: the head, and in half of the layers values and what leads back from
    /// the feed-forward part.
    better: DType,
}

impl Types {
    /// The mixture that most files have.
    pub const Q4_K_M: Types = Types { usual: DType::Q4_K, better: DType::Q6_K };

    /// By the name that files have: a type, or `q4_k_m`.
    pub fn named(name: &str) -> Option<Types> {
        if name.eq_ignore_ascii_case("q4_k_m") {
            return Some(Types::Q4_K_M);
        }
        TYPES.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(name)).map(Types::from)
    }

    /// The names that are known.
    pub fn names() -> Vec<String> {
        TYPES.iter().map(|dtype| dtype.name().to_lowercase()).chain(["q4_k_m".to_owned()]).collect()
    }
}

impl From<DType> for Types {
    fn from(dtype: DType) -> Types {
        Types { usual: dtype, better: dtype }
    }
}

/// Writes a GGUF of this shape with its matrices in `quant`, or in the type that llama.cpp falls back to where a row
/// does not fill the blocks. The same seed makes the same file. It has its name only once it is complete. `progress` is
/// told the bytes written and all bytes, and stops it by breaking.
pub fn write(
    path: &Path,
    shape: &Shape,
    quant: impl Into<Types>,
    seed: u64,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> io::Result<()> {
    write_rows(path, shape, quant.into(), Making { seed, distinct: usize::MAX, words: false }, progress)
}

/// The same in less time: a tensor's rows come again after 512 of them, which says less and is as fast to compute with.
/// It has a tokenizer, so that it can be served: bytes, and made-up words for the rest of the vocabulary.
pub fn write_repeating(
    path: &Path,
    shape: &Shape,
    quant: impl Into<Types>,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> io::Result<()> {
    write_rows(path, shape, quant.into(), Making { seed: 0, distinct: 512, words: true }, progress)
}

/// What a file is made like.
#[derive(Clone, Copy)]
struct Making {
    seed: u64,
    /// How many rows of a tensor are drawn before they come again.
    distinct: usize,
    /// Whether it has a tokenizer.
    words: bool,
}

fn write_rows(
    path: &Path,
    shape: &Shape,
    quant: Types,
    Making { seed, distinct, words }: Making,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> io::Result<()> {
    let (tensors, header, total) = outline(shape, quant, words);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::Builder::new()
        .prefix(".fornax-")
        // Like any other new file: what the user's mask leaves of it.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    out.write_all(&header)?;
    let mut written = header.len() as u64;
    let mut random = Random(SplitMix64(seed));
    let mut rows = Vec::new();
    for tensor in &tensors {
        // At most this many bytes are held at once, unless they come again.
        let count = tensor.rows.unwrap_or(1);
        let at_once = if distinct < count { distinct } else { 1 };
        let mut left = count;
        rows.clear();
        while left > 0 {
            if rows.is_empty() || distinct >= count {
                rows.clear();
                for _ in 0..at_once {
                    match tensor.rows {
                        Some(_) => random.row(tensor.dtype, tensor.columns, &mut rows),
                        None if tensor.name.ends_with("norm.weight") => {
                            rows.extend((0..tensor.columns).flat_map(|_| 1f32.to_le_bytes()));
                        }
                        // Shares of a state that are forgotten: below zero.
                        None if tensor.name.ends_with("ssm_a") => {
                            let rates = (0..tensor.columns).map(|_| -0.01 - random.normal().abs());
                            rows.extend(rates.collect::<Vec<_>>().into_iter().flat_map(f32::to_le_bytes));
                        }
                        None => {
                            rows.extend(
                                (0..tensor.columns).flat_map(|_| (random.normal() * 0.1).to_le_bytes()),
                            );
                        }
                    }
                }
            }
            let some = left.min(at_once);
            out.write_all(&rows[..rows.len() / at_once * some])?;
            left -= some;
        }
        out.write_all(&vec![0; tensor.bytes().next_multiple_of(ALIGNMENT) - tensor.bytes()])?;
        written += tensor.bytes().next_multiple_of(ALIGNMENT) as u64;
        if progress(written, total).is_break() {
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
    let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.persist_noclobber(path).map_err(|error| error.error)?;
    Ok(())
}

/// Writes such a file whose header is whole and whose weights are a hole: as large as [`write()`] would make it, on no
/// disk. Enough to plan with. Returns its size.
pub fn write_hole(path: &Path, shape: &Shape, quant: impl Into<Types>) -> io::Result<u64> {
    let (_, header, total) = outline(shape, quant.into(), false);
    let mut file = File::create_new(path)?;
    file.write_all(&header)?;
    file.set_len(total)?;
    Ok(total)
}

/// The tensors of a file, its header, and its size.
fn outline(shape: &Shape, quant: Types, words: bool) -> (Vec<Tensor>, Vec<u8>, u64) {
    let tensors = tensors(shape, quant);
    let header = header(shape, &tensors, words);
    let padded = |tensor: &Tensor| tensor.bytes().next_multiple_of(ALIGNMENT) as u64;
    let total = header.len() as u64 + tensors.iter().map(padded).sum::<u64>();
    (tensors, header, total)
}

fn tensors(shape: &Shape, quant: Types) -> Vec<Tensor> {
    let size = |number: u32| number as usize;
    let (hidden, ffn, vocab) = (size(shape.hidden), size(shape.ffn), size(shape.vocab));
    let query = size(shape.heads * shape.head_dim);
    let kv = size(shape.heads_kv * shape.head_dim);
    // As llama.cpp's mixtures: the first and the last eighth of the layers, and each third between.
    let eighth = shape.layers / 8;
    let better = |layer: u32| layer < eighth || layer >= 7 * shape.layers / 8 || (layer - eighth) % 3 == 2;
    let typed = |better: bool, name: String, columns: usize, rows: usize| Tensor {
        name,
        columns,
        rows: Some(rows),
        stacked: None,
        dtype: fornax_engine::stored_as(if better { quant.better } else { quant.usual }, columns),
    };
    let matrix = |name, columns, rows| typed(false, name, columns, rows);
    let floats =
        |name: String, columns, rows| Tensor { name, columns, rows, stacked: None, dtype: DType::F32 };
    let vector = |name: String, columns| floats(name, columns, None);
    let stacked = |experts: u32, tensor: Tensor| Tensor {
        rows: tensor.rows.map(|rows| rows * size(experts)),
        stacked: Some(size(experts)),
        ..tensor
    };
    let mut tensors = vec![
        typed(shape.tied, "token_embd.weight".to_owned(), hidden, vocab),
        vector("output_norm.weight".to_owned(), hidden),
    ];
    if !shape.tied {
        tensors.push(typed(true, "output.weight".to_owned(), hidden, vocab));
    }
    for layer in 0..shape.layers {
        let name = |name: &str| format!("blk.{layer}.{name}");
        let before_ffn = if shape.delta.is_some() { "post_attention_norm.weight" } else { "ffn_norm.weight" };
        tensors.extend([vector(name("attn_norm.weight"), hidden), vector(name(before_ffn), hidden)]);
        match shape.delta {
            Some(Delta { key, value, dim }) if !(layer + 1).is_multiple_of(ATTENDS) => {
                let (channels, values) = (size((2 * key + value) * dim), size(value * dim));
                tensors.extend([
                    matrix(name("attn_qkv.weight"), hidden, channels),
                    matrix(name("attn_gate.weight"), hidden, values),
                    matrix(name("ssm_beta.weight"), hidden, size(value)),
                    matrix(name("ssm_alpha.weight"), hidden, size(value)),
                    floats(name("ssm_conv1d.weight"), size(TAPS), Some(channels)),
                    vector(name("ssm_a"), size(value)),
                    vector(name("ssm_dt.bias"), size(value)),
                    vector(name("ssm_norm.weight"), size(dim)),
                    matrix(name("ssm_out.weight"), values, hidden),
                ]);
            }
            hybrid => {
                // Half of a hybrid's queries are gates.
                let queries = if hybrid.is_some() { 2 * query } else { query };
                tensors.extend([
                    matrix(name("attn_q.weight"), hidden, queries),
                    matrix(name("attn_k.weight"), hidden, kv),
                    typed(better(layer), name("attn_v.weight"), hidden, kv),
                    matrix(name("attn_output.weight"), query, hidden),
                ]);
                if shape.qk_norm {
                    let each = size(shape.head_dim);
                    tensors.extend(
                        ["attn_q_norm.weight", "attn_k_norm.weight"].map(|norm| vector(name(norm), each)),
                    );
                }
            }
        }
        match shape.experts {
            None => tensors.extend([
                matrix(name("ffn_gate.weight"), hidden, ffn),
                matrix(name("ffn_up.weight"), hidden, ffn),
                typed(better(layer), name("ffn_down.weight"), ffn, hidden),
            ]),
            Some(Mixture { count, ffn, shared, .. }) => {
                let ffn = size(ffn);
                tensors.extend([
                    floats(name("ffn_gate_inp.weight"), hidden, Some(size(count))),
                    stacked(count, matrix(name("ffn_gate_exps.weight"), hidden, ffn)),
                    stacked(count, matrix(name("ffn_up_exps.weight"), hidden, ffn)),
                    stacked(count, typed(better(layer), name("ffn_down_exps.weight"), ffn, hidden)),
                ]);
                if shared {
                    tensors.extend([
                        floats(name("ffn_gate_inp_shexp.weight"), hidden, None),
                        matrix(name("ffn_gate_shexp.weight"), hidden, ffn),
                        matrix(name("ffn_up_shexp.weight"), hidden, ffn),
                        typed(better(layer), name("ffn_down_shexp.weight"), ffn, hidden),
                    ]);
                }
            }
        }
        if shape.qkv_bias {
            tensors.extend([
                vector(name("attn_q.bias"), query),
                vector(name("attn_k.bias"), kv),
                vector(name("attn_v.bias"), kv),
            ]);
        }
    }
    tensors
}

/// Metadata and the list of tensors, up to where data begins.
fn header(shape: &Shape, tensors: &[Tensor], words: bool) -> Vec<u8> {
    let Pairs(pairs) = metadata(shape, words);
    let planned: Vec<Planned> = tensors.iter().map(Tensor::planned).collect();
    let pairs = pairs.iter().map(|(key, value)| (key.as_str(), value));
    gguf::header(pairs, &planned).expect("types of GGUF that fit their columns")
}

fn metadata(shape: &Shape, words: bool) -> Pairs {
    let mut metadata = Pairs(Vec::new());
    metadata.string("general.architecture", shape.architecture);
    metadata.string("general.name", shape.name);
    if words {
        metadata.string("tokenizer.ggml.model", "gpt2");
        metadata.string("tokenizer.ggml.pre", "qwen2");
    }
    let own = |key: &str| format!("{}.{key}", shape.architecture);
    let mut integers = vec![
        ("block_count", shape.layers),
        ("embedding_length", shape.hidden),
        ("feed_forward_length", shape.ffn),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.heads_kv),
        ("attention.key_length", shape.head_dim),
        ("attention.value_length", shape.head_dim),
        ("context_length", shape.context),
    ];
    let rotating = shape.head_dim / 4;
    if let Some(Delta { key, value, dim }) = shape.delta {
        integers.extend([
            ("rope.dimension_count", rotating),
            ("ssm.conv_kernel", TAPS),
            ("ssm.state_size", dim),
            ("ssm.group_count", key),
            ("ssm.time_step_rank", value),
            ("ssm.inner_size", value * dim),
            ("full_attention_interval", ATTENDS),
        ]);
    }
    if let Some(Mixture { count, chosen, ffn, shared }) = shape.experts {
        integers.extend([
            ("expert_count", count),
            ("expert_used_count", chosen),
            ("expert_feed_forward_length", ffn),
        ]);
        if shared {
            integers.push(("expert_shared_feed_forward_length", ffn));
        }
    }
    for (key, value) in integers {
        metadata.put(&own(key), Value::U32(value));
    }
    metadata.put(&own("attention.layer_norm_rms_epsilon"), Value::F32(1e-6));
    #[expect(clippy::cast_precision_loss, reason = "powers of ten that f32 holds")]
    metadata.put(&own("rope.freq_base"), Value::F32(shape.rope_base as f32));
    if shape.delta.is_some() {
        // Of pairs: by time, height and width, about a third each.
        let pairs = rotating / 2;
        let time = pairs.div_ceil(3);
        let height = (pairs - time).div_ceil(2);
        let sections = [time, height, pairs - time - height, 0].map(u32::cast_signed);
        metadata.put(&own("rope.dimension_sections"), Value::Array(Array::I32(sections.to_vec())));
    }
    if words {
        metadata.put("tokenizer.ggml.tokens", Value::Array(Array::String(vocabulary(shape.vocab))));
        metadata.put("tokenizer.ggml.merges", Value::Array(Array::String(Vec::new())));
        metadata.put("tokenizer.ggml.eos_token_id", Value::U32(shape.vocab - 1));
    }
    metadata
}

/// Keys and values in the order of the file.
struct Pairs(Vec<(String, Value)>);

impl Pairs {
    fn put(&mut self, key: &str, value: Value) {
        self.0.push((key.to_owned(), value));
    }

    fn string(&mut self, key: &str, value: &str) {
        self.put(key, Value::String(value.to_owned()));
    }
}

/// Every byte, as byte-level vocabularies spell them, then words with a space before them.
fn vocabulary(tokens: u32) -> Vec<String> {
    let plain = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let spell = |byte: u32| {
        let code = if plain(byte) { Some(byte) } else { others.next() };
        code.and_then(char::from_u32).unwrap_or_default().to_string()
    };
    let bytes = (0..256).map(spell).collect::<Vec<_>>();
    bytes.into_iter().chain((256..).map(|word| format!("\u{120}w{word}"))).take(tokens as usize).collect()
}

struct Random(SplitMix64);

impl Random {
    /// Roughly normal: mean 0, standard deviation 1, from the sixteen-bit parts of one number.
    fn normal(&mut self) -> f32 {
        let bits = self.0.bits();
        let sum: f32 = (0..4).map(|part| ((bits >> (16 * part)) & 0xffff) as f32 / 65_536.0).sum();
        (sum - 2.0) * 3f32.sqrt()
    }

    fn fill(&mut self, out: &mut [u8]) {
        for chunk in out.chunks_mut(8) {
            chunk.copy_from_slice(&self.0.bits().to_le_bytes()[..chunk.len()]);
        }
    }

    /// One row of a matrix, whose values have mean 0 and a standard deviation of one over the root of the columns: what
    /// keeps activations near one from layer to layer.
    fn row(&mut self, dtype: DType, columns: usize, out: &mut Vec<u8>) {
        let deviation = 1.0 / (columns as f32).sqrt();
        if dtype.block_values() == 1 {
            for _ in 0..columns {
                let value = self.normal() * deviation;
                match dtype {
                    DType::F16 => out.extend(f16::from_f32(value).to_le_bytes()),
                    DType::BF16 => out.extend(bf16::from_f32(value).to_le_bytes()),
                    _ => out.extend(value.to_le_bytes()),
                }
            }
            return;
        }
        let begin = out.len();
        out.resize(begin + columns / dtype.block_values() * dtype.block_bytes(), 0);
        for block in out[begin..].chunks_exact_mut(dtype.block_bytes()) {
            self.fill(block);
            scale(dtype, deviation, block);
        }
    }
}

/// The types that a model of random weights can have.
pub const TYPES: [DType; 11] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

/// Gives a block of random quants the scales that make its values `deviation` large and centred. Each scale is a normal
/// f16: the integer scales of the K formats are kept small so that the float ones need not be denormal.
fn scale(dtype: DType, deviation: f32, block: &mut [u8]) {
    let mut half =
        |at: usize, value: f32| block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
    // The standard deviations are those of uniform quants: sqrt((n * n - 1) / 12) for n of them.
    match dtype {
        // d * q, q in -128..128
        DType::Q8_0 => half(0, deviation / 73.9),
        // d * (q - 8), q in 0..16
        DType::Q4_0 => half(0, deviation / 4.61),
        // d * q + m
        DType::Q4_1 => {
            half(0, deviation / 4.61);
            half(2, -7.5 * deviation / 4.61);
        }
        // d * (q - 16), q in 0..32
        DType::Q5_0 => half(0, deviation / 9.23),
        DType::Q5_1 => {
            half(0, deviation / 9.23);
            half(2, -15.5 * deviation / 9.23);
        }
        // d * s * q - m * s with both integer scales the same s in 1..=15, whose root mean square is 9.09
        DType::Q4_K | DType::Q5_K => {
            let (centre, spread) = if dtype == DType::Q4_K { (7.5, 4.61) } else { (15.5, 9.23) };
            let scale = deviation / (9.09 * spread);
            half(0, scale);
            half(2, centre * scale);
            // Six-bit scales below 16 leave their upper bits empty: four low bits in three groups of four bytes.
            for at in 4..8 {
                let (low, high) = (block[at] % 15 + 1, block[at + 4] % 15 + 1);
                block[at] = low;
                block[at + 4] = low;
                block[at + 8] = high | high << 4;
            }
        }
        // d * s * (q - 32), q in 0..64, s in 1..=4, whose root mean square is 2.74
        DType::Q6_K => {
            half(208, deviation / (2.74 * 18.5));
            for byte in &mut block[192..208] {
                *byte = *byte % 4 + 1;
            }
        }
        other => unreachable!("{other} is not among TYPES"),
    }
}

#[cfg(test)]
mod tests {
    use fornax_compute::cpu::{Activations, Cpu, CpuOptions};
    use fornax_compute::{Backend, Batch, Memory, PageId, Part, Purpose, Row, Token};
    use fornax_format::Checkpoint;

    use super::*;
    use crate::{OpenOptions, Request};

    #[test]
    fn every_type_has_sane_values_and_computes() {
        let folder = tempfile::tempdir().unwrap();
        for quant in TYPES {
            let path = folder.path().join(format!("{quant}.gguf"));
            write(&path, &SHAPES[0], quant, 1, &mut |_, _| ControlFlow::Continue(())).unwrap();
            let checkpoint = Checkpoint::open(&path).unwrap();
            let Checkpoint::Gguf(gguf) = &checkpoint else { panic!("{quant}") };
            let view = gguf.tensor("blk.1.ffn_down.weight").unwrap();
            assert_eq!(view.dtype, quant);
            // The table's rows as the backend dequantises them: embedding looks a row up.
            let cpu =
                Cpu::new(CpuOptions { activations: Activations::Float, ..CpuOptions::default() }).unwrap();
            let weight = cpu.upload(&[Part::from(view)]).unwrap();
            let mut out = cpu.alloc(Purpose::Residual, 32, 512).unwrap();
            let mut batch = Batch::default();
            let row = Row { slot: 0, start: 0, len: 32, pages: vec![vec![PageId(1)]], wanted: 0 };
            batch.push(row, (0..32).map(Token::Known));
            let step = cpu.begin(&batch).unwrap();
            cpu.embed(&step, &weight, &mut out).unwrap();
            cpu.finish(step).unwrap();
            let values = cpu.read(&out, 0, 32).unwrap();
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            let square = values.iter().map(|value| value * value).sum::<f32>() / values.len() as f32;
            let deviation = square.sqrt() * 512f32.sqrt();
            // Quants without a middle (-8..8) are half a step off it.
            assert!(mean.abs() * 512f32.sqrt() < 0.15, "{quant}: mean {mean}");
            assert!((0.85..1.15).contains(&deviation), "{quant}: {deviation} of what was wanted");
            let model = OpenOptions::new(&path).open().unwrap();
            let request = Request { max_tokens: Some(4), ..Request::tokens(vec![1, 2, 3]) };
            assert_eq!(model.generate(&request).unwrap().tokens.len(), 4, "{quant}");
        }
    }

    #[test]
    fn hybrids_are_what_the_loader_takes_them_for_and_compute() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["tiny-hybrid", "tiny-hybrid-moe"] {
            let path = folder.path().join(format!("{name}.gguf"));
            let shape = SHAPES.iter().find(|shape| shape.name == name).unwrap();
            write_repeating(&path, shape, Types::Q4_K_M, &mut |_, _| ControlFlow::Continue(())).unwrap();
            let model = OpenOptions::new(&path).open().unwrap();
            let (states, _, _) = model.plan().states().unwrap();
            assert!(states > 0, "{name}");
            let request =
                Request { max_tokens: Some(40), ignore_eos: true, ..Request::tokens(vec![1, 2, 3]) };
            let answer = model.generate(&request).unwrap().tokens;
            // Logits that are no numbers would choose nothing.
            assert!(
                answer.len() == 40 && answer.iter().any(|token| *token != answer[0]),
                "{name}: {answer:?}"
            );
        }
    }

    #[test]
    fn shapes_of_hybrids_have_as_many_weights_as_their_names_say() {
        for (name, billions) in [("qwen3.5-4b", 4.2), ("qwen3.6-27b", 26.9), ("qwen3.6-35b-a3b", 34.7)] {
            let shape = SHAPES.iter().find(|shape| shape.name == name).unwrap();
            let values: usize = tensors(shape, DType::BF16.into())
                .iter()
                .map(|tensor| tensor.columns * tensor.rows.unwrap_or(1))
                .sum();
            assert!((values as f64 / 1e9 - billions).abs() < 0.05, "{name}: {values}");
        }
    }

    #[test]
    fn scales_are_never_denormal() {
        let mut random = Random(SplitMix64(7));
        let widest = SHAPES.iter().map(|shape| shape.ffn).max().unwrap() as usize;
        for quant in TYPES.into_iter().filter(|quant| quant.block_values() > 1) {
            let mut row = Vec::new();
            random.row(quant, widest / 256 * 256, &mut row);
            let places: &[usize] = match quant {
                DType::Q6_K => &[208],
                DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
                _ => &[0],
            };
            for block in row.chunks_exact(quant.block_bytes()) {
                for &at in places {
                    let scale = f16::from_le_bytes([block[at], block[at + 1]]);
                    assert!(scale.is_normal(), "{quant}: {scale}");
                }
            }
        }
    }

    #[test]
    fn a_seed_makes_the_same_file_and_what_exists_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str, seed| {
            let path = folder.path().join(name);
            write(&path, &SHAPES[0], DType::Q4_0, seed, &mut |_, _| ControlFlow::Continue(())).unwrap();
            std::fs::read(path).unwrap()
        };
        let first = make("a", 1);
        assert!(first == make("b", 1) && first != make("c", 2));
        let again =
            write(
                &folder.path().join("a"),
                &SHAPES[0],
                DType::Q4_0,
                3,
                &mut |_, _| ControlFlow::Continue(()),
            );
        assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let stopped =
            write(&folder.path().join("d"), &SHAPES[0], DType::Q4_0, 1, &mut |_, _| ControlFlow::Break(()));
        assert!(stopped.is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3, "nothing half-written");
    }

    #[test]
    fn a_mixture_treats_the_head_and_half_of_the_layers_better() {
        let shape = SHAPES.iter().find(|shape| shape.name == "qwen2.5-7b").unwrap();
        let tensors = tensors(shape, Types::named("Q4_K_M").unwrap());
        let better: Vec<&str> = tensors
            .iter()
            .filter(|tensor| tensor.dtype == DType::Q6_K)
            .map(|tensor| tensor.name.as_str())
            .collect();
        let count = |part: &str| better.iter().filter(|name| name.ends_with(part)).count();
        assert_eq!((count("attn_v.weight"), count("ffn_down.weight"), count("output.weight")), (14, 14, 1));
        assert_eq!(better.len(), 29);
        assert_eq!(Types::named("q4"), None);
    }

    #[test]
    fn rows_that_come_again_make_a_file_of_the_same_size_that_computes() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let go_on = &mut |_: u64, _: u64| ControlFlow::Continue(());
        write(&path("a"), &SHAPES[0], Types::Q4_K_M, 0, go_on).unwrap();
        write_repeating(&path("b"), &SHAPES[0], Types::Q4_K_M, go_on).unwrap();
        let sizes = ["a", "b"].map(|name| std::fs::metadata(path(name)).unwrap().len());
        // The words of its tokenizer are beside the weights.
        assert!((sizes[0]..sizes[0] + 64 * 1024).contains(&sizes[1]), "{sizes:?}");
        let checkpoint = Checkpoint::open(&path("b")).unwrap();
        let Checkpoint::Gguf(gguf) = &checkpoint else { panic!("a GGUF") };
        let table = gguf.tensor("token_embd.weight").unwrap();
        let row = table.bytes.len() / 1024;
        assert!(table.bytes[..512 * row] == table.bytes[512 * row..]);
        assert!(table.bytes[..row] != table.bytes[row..2 * row]);
        let model = OpenOptions::new(path("b")).open().unwrap();
        let request = Request { max_tokens: Some(4), ignore_eos: true, ..Request::text("é 300") };
        assert_eq!(model.generate(&request).unwrap().tokens.len(), 4);
        let tokenizer = model.text().tokenizer().unwrap();
        assert_eq!((tokenizer.vocab_len(), tokenizer.end_tokens()), (1024, &[1023][..]));
        // Bytes and words come back as they went in.
        assert_eq!(tokenizer.decode(&model.text().prompt_tokens(&request.prompt).unwrap()), "é 300");
        assert_eq!(tokenizer.decode(&[300, 301]), " w300 w301");
    }
}
