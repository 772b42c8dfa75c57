//! Decoding at one stream, and a prompt, with random weights of a real shape: `decode SHAPE FORMAT CONTEXT
//! [KERNEL_FOLDER [eager] [kv_fp8] [one] [load=N] [files=FOLDER] [operations=N] [prompt=N] [streams=N] [lasting=N]
//! [sample=N]]`, where SHAPE is 7b, 0.5b (Qwen2.5) or 135m (SmolLM2) and FORMAT is bf16, q8_0, fp8, q4_k_m, q6_k or
//! q4_1; keys and values are f16, or 8-bit floats. Prints how long loading took, each kind of operation alone for one
//! token and several, prompts and steps of many streams, and the whole step of one, with the bytes that it moves; where
//! numbers of tokens are named, those alone, as a profiler wants them. Weights come from memory, or with `files` from a
//! file in that folder, which is written where it is not there: `load=N` loads them N times and ends. `sample=N`
//! chooses tokens for N rows of random logits and needs no weights. `lasting=N` decodes N streams as long as a card
//! takes to become warm. With `one` only what one stream does, and what a step takes less without each kind of
//! operation.

#![expect(clippy::print_stdout, reason = "an example talks to a person")]

use std::fs;
use std::io::{self, Seek as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use fornax_compute::{
    Attention, Backend, Batch, Error, Glu, Heads, KvDType, KvGroup, KvKind, KvLayer, KvSpec, Linear, Memory,
    Norm, PAGE_TOKENS, PageId, Part, Purpose, Rope, Row, Rows, SampleRow, Sampling, Sizes, SplitMix64, Token,
};
use fornax_format::{DType, Gguf, View};
use fornax_gpu::{Buf, Cuda, CudaOptions, CudaSizes, Kv, Weight};

/// Tokens of the prompts, the last the longest.
const PROMPTS: [usize; 3] = [128, 512, 2048];
const PROMPT: usize = 2048;
/// And of the steps whose operations are measured.
const MEASURED: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, PROMPT];
/// Streams that decode together, and the tokens that each has behind it.
const STREAMS: [usize; 5] = [8, 32, 64, 128, 256];
const STREAMS_MAX: usize = 256;
const BEHIND: usize = 128;
/// How long `lasting` takes.
const LASTING: Duration = Duration::from_secs(2);

#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    hidden: usize,
    heads: Heads,
    ffn: usize,
    vocab: usize,
}

struct Layer {
    attention_norm: Norm<Buf>,
    qkv: Weight,
    qkv_bias: Buf,
    output: Weight,
    mlp_norm: Norm<Buf>,
    gate_up: Weight,
    down: Weight,
}

struct Model {
    shape: Shape,
    /// Bytes of QKV, output, gate and up, down (on the average) and the head.
    bytes: [usize; 5],
    kv_dtype: KvDType,
    embedding: Weight,
    head: Weight,
    norm: Norm<Buf>,
    rope: Rope<Buf>,
    layers: Vec<Layer>,
    residual: Buf,
    branch: Buf,
    qkv: Buf,
    attended: Buf,
    gate_up: Buf,
    gated: Buf,
    wanted: Buf,
    wanted_normed: Buf,
    logits: Buf,
}

/// Random bytes that are valid blocks of every type: scales stay small. Floats are nearly normal, as trained ones are:
/// the power that products take, and with it the clock of a card that is at its limit, depends on the bits of their
/// operands.
fn random_blocks(dtype: DType, values: usize) -> Vec<u8> {
    let mut bytes = vec![0; dtype.bytes_for(values).expect("whole blocks")];
    let scales: &[usize] = match dtype {
        DType::BF16 => &[],
        DType::Q8_0 => &[1],
        DType::Q6_K => &[209],
        _ => &[1, 3],
    };
    // The upper byte of an f16 of about 0.002.
    let exponent = 0x18;
    let normal: Vec<[u8; 2]> = (0..=u16::MAX).map(|bits| normal_bf16(bits).to_le_bytes()).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = (bytes.len() / dtype.block_bytes()).div_ceil(threads) * dtype.block_bytes();
    std::thread::scope(|scope| {
        for (seed, bytes) in (1u64..).zip(bytes.chunks_mut(each)) {
            let normal = &normal;
            scope.spawn(move || {
                let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                for eight in bytes.chunks_mut(8) {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    eight.copy_from_slice(&state.to_le_bytes()[..eight.len()]);
                }
                if dtype == DType::BF16 {
                    for value in bytes.chunks_exact_mut(2) {
                        value.copy_from_slice(&normal[usize::from(value[0]) << 8 | usize::from(value[1])]);
                    }
                }
                for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                    if dtype == DType::MXFP8 {
                        block[0] = 112;
                        continue;
                    }
                    if dtype == DType::FP8_A8 {
                        block[..4].copy_from_slice(&2.0f32.powi(-12).to_le_bytes());
                        block[4..]
                            .iter_mut()
                            .for_each(|code| *code = normal_float8(normal[usize::from(*code)]));
                        continue;
                    }
                    for &at in scales {
                        block[at] = exponent | block[at] & 0x80;
                    }
                }
            });
        }
    });
    bytes
}

/// Of 16 random bits the bits of a BF16: the sum of four of them at a time, nearly normal with a deviation of 0.015.
fn normal_bf16(bits: u16) -> u16 {
    let mut random = SplitMix64(u64::from(bits));
    let sum: f32 = (0..4).map(|_| random.below(1 << 20) as f32 / (1 << 20) as f32 - 0.5).sum();
    (((sum * 0.026).to_bits() + 0x8000) >> 16) as u16
}

/// The 8-bit float at or below 2^12 times a BF16 of such size; small ones are zero.
fn normal_float8(value: [u8; 2]) -> u8 {
    let bits = u16::from_le_bytes(value);
    let code = (bits >> 4 & 0x7ff).saturating_sub((120 - 12) << 3).min(126);
    code as u8 | (bits >> 8 & 0x80) as u8
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [shape_name, format, context, folder @ ..] = &args[..] else {
        return Err("decode SHAPE FORMAT CONTEXT [KERNEL_FOLDER]".into());
    };
    let shape = match shape_name.as_str() {
        "7b" => Shape {
            layers: 28,
            hidden: 3584,
            heads: Heads { query: 28, kv: 4, dim: 128 },
            ffn: 18944,
            vocab: 152_064,
        },
        "0.5b" => Shape {
            layers: 24,
            hidden: 896,
            heads: Heads { query: 14, kv: 2, dim: 64 },
            ffn: 4864,
            vocab: 151_936,
        },
        "135m" => Shape {
            layers: 30,
            hidden: 576,
            heads: Heads { query: 9, kv: 3, dim: 64 },
            ffn: 1536,
            vocab: 49_152,
        },
        _ => return Err("SHAPE is 7b, 0.5b or 135m".into()),
    };
    let context: usize = context.parse()?;
    // Rows of 896 are no whole superblocks: such files hold Q5_0 where larger ones hold Q4_K, and Q8_0 for Q6_K.
    let narrow = !shape.hidden.is_multiple_of(256);
    let (usual, head, more) = match format.as_str() {
        "bf16" => (DType::BF16, DType::BF16, DType::BF16),
        "q8_0" => (DType::Q8_0, DType::Q8_0, DType::Q8_0),
        "fp8" => (DType::MXFP8, DType::MXFP8, DType::MXFP8),
        // Files keep the head as it was.
        "fp8_a8" => (DType::FP8_A8, DType::BF16, DType::FP8_A8),
        "q6_k" => (DType::Q6_K, DType::Q6_K, DType::Q6_K),
        "q4_1" => (DType::Q4_1, DType::Q8_0, DType::Q4_1),
        "q4_k_m" if narrow => (DType::Q5_0, DType::Q8_0, DType::Q8_0),
        "q4_k_m" => (DType::Q4_K, DType::Q6_K, DType::Q6_K),
        _ => return Err("FORMAT is bf16, q8_0, fp8, fp8_a8, q4_k_m, q6_k or q4_1".into()),
    };
    let graphs = !folder.iter().any(|word| word == "eager");
    let one = folder.iter().any(|word| word == "one");
    let only = folder.iter().filter_map(|word| word.split_once('=')).collect::<Vec<_>>();
    let longest = only.iter().filter_map(|(_, number)| number.parse().ok()).fold(PROMPT, usize::max);
    let options = CudaOptions {
        tokens_max: longest,
        slots: STREAMS_MAX,
        kernel_folder: folder.first().map(Into::into),
        graphs,
        ..CudaOptions::default()
    };
    let rows = only.iter().filter(|(word, _)| *word == "sample").map(|(_, rows)| rows.parse());
    let rows = rows.collect::<Result<Vec<usize>, _>>()?;
    if !rows.is_empty() {
        let cuda = Cuda::new(options)?;
        return Ok(rows.into_iter().try_for_each(|rows| choosing(&cuda, shape.vocab, rows))?);
    }
    let word = |wanted: &str| only.iter().find(|(word, _)| *word == wanted).map(|(_, value)| *value);
    let path = word("files").map(|folder| Path::new(folder).join(format!("{shape_name}-{format}.gguf")));
    let stored = Files::new(&shape, (usual, head, more), path.as_deref())?;
    // Each time as a process does it: the device opened, memory pinned, kernels loaded.
    if let Some(loads) = word("load") {
        for _ in 0..loads.parse()? {
            let started = Instant::now();
            let cuda = Cuda::new(options.clone())?;
            print!("opened in {:.3} s, ", started.elapsed().as_secs_f64());
            Loaded::new(&cuda, &shape, &stored)?;
        }
        return Ok(());
    }
    let started = Instant::now();
    let cuda = Cuda::new(options)?;
    println!("{}: opened in {:.2} s", fornax_gpu::probe(0)?.words(), started.elapsed().as_secs_f64());
    let kv_dtype = if folder.iter().any(|word| word == "kv_fp8") { KvDType::F8 } else { KvDType::F16 };
    let only: Vec<(&str, &str)> = only.into_iter().filter(|(word, _)| *word != "files").collect();
    run(&cuda, shape, &stored, (context, longest, kv_dtype), (one, &only))
}

/// A kind of weight.
struct Stored {
    name: &'static str,
    dtype: DType,
    rows: usize,
    columns: usize,
    /// For all layers; empty where each has its own in a file.
    bytes: Vec<u8>,
}

impl Stored {
    fn new(name: &'static str, dtype: DType, rows: usize, columns: usize) -> Stored {
        Stored { name, dtype, rows, columns, bytes: Vec::new() }
    }

    fn len(&self) -> usize {
        self.dtype.bytes_for(self.rows * self.columns).expect("whole blocks")
    }
}

/// The weights of a model.
struct Files {
    qkv: Stored,
    output: Stored,
    gate_up: Stored,
    /// Half of the layers hold a better down projection, as in Q4_K_M.
    down: [Stored; 2],
    head: Stored,
    file: Option<Gguf>,
}

impl Files {
    fn new(
        shape: &Shape,
        (usual, head, more): (DType, DType, DType),
        path: Option<&Path>,
    ) -> Result<Files, Box<dyn std::error::Error>> {
        let mut files = Files {
            qkv: Stored::new("qkv", usual, shape.heads.qkv_columns(), shape.hidden),
            output: Stored::new("output", usual, shape.hidden, shape.heads.query * shape.heads.dim),
            gate_up: Stored::new("gate_up", usual, 2 * shape.ffn, shape.hidden),
            down: [usual, more].map(|dtype| Stored::new("down", dtype, shape.hidden, shape.ffn)),
            head: Stored::new("head", head, shape.vocab, shape.hidden),
            file: None,
        };
        let is_there = path.is_some_and(Path::exists);
        if !is_there {
            files
                .each_mut()
                .into_iter()
                .for_each(|kind| kind.bytes = random_blocks(kind.dtype, kind.rows * kind.columns));
        }
        if let Some(path) = path {
            if !is_there {
                files.write(shape, path)?;
            }
            files.each_mut().into_iter().for_each(|kind| kind.bytes = Vec::new());
            files.file = Some(Gguf::open(path)?);
        }
        Ok(files)
    }

    fn each_mut(&mut self) -> [&mut Stored; 6] {
        let [down, better] = &mut self.down;
        [&mut self.qkv, &mut self.output, &mut self.gate_up, down, better, &mut self.head]
    }

    fn of_layer(&self, layer: usize) -> [&Stored; 4] {
        [&self.qkv, &self.output, &self.gate_up, &self.down[layer % 2]]
    }

    fn view<'f>(&'f self, kind: &'f Stored, layer: usize) -> View<'f> {
        match &self.file {
            Some(file) => file.tensor(&format!("{layer}.{}", kind.name)).expect("written"),
            None => View::new("random", kind.dtype, vec![kind.rows, kind.columns], &kind.bytes)
                .expect("whole blocks"),
        }
    }

    /// As a GGUF file, every layer by itself.
    fn write(&self, shape: &Shape, path: &Path) -> io::Result<()> {
        const ALIGNMENT: usize = 32;
        let layers = (0..shape.layers).flat_map(|layer| self.of_layer(layer).map(|kind| (layer, kind)));
        let tensors: Vec<(usize, &Stored)> = [(0, &self.head)].into_iter().chain(layers).collect();
        let counts = [tensors.len() as u64, 0].map(u64::to_le_bytes).concat();
        let mut header = [&b"GGUF"[..], &3u32.to_le_bytes(), &counts].concat();
        let mut places = Vec::new();
        let mut end = 0;
        for (layer, kind) in &tensors {
            let name = format!("{layer}.{}", kind.name);
            let id = kind.dtype.ggml_id();
            let id = id.ok_or_else(|| io::Error::other(format!("no file holds {}", kind.dtype)))?;
            header.extend((name.len() as u64).to_le_bytes());
            header.extend(name.as_bytes());
            header.extend(2u32.to_le_bytes());
            header.extend([kind.columns, kind.rows].map(|count| (count as u64).to_le_bytes()).concat());
            header.extend(id.to_le_bytes());
            header.extend(u64::to_le_bytes(end));
            places.push(end);
            end += kind.len().next_multiple_of(ALIGNMENT) as u64;
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT), 0);
        // Under its name once it is whole.
        let begun = path.with_extension("part");
        let file = fs::File::create(&begun)?;
        file.set_len(header.len() as u64 + end)?;
        (&file).write_all(&header)?;
        // By several threads: it may be gigabytes.
        let tensors: Vec<(&Stored, u64)> =
            tensors.iter().zip(places).map(|((_, kind), at)| (*kind, at)).collect();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let write = |tensors: &[(&Stored, u64)]| -> io::Result<()> {
            let mut file = fs::File::options().write(true).open(&begun)?;
            for (kind, at) in tensors {
                file.seek(io::SeekFrom::Start(header.len() as u64 + at))?;
                file.write_all(&kind.bytes)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads =
                tensors.chunks(tensors.len().div_ceil(threads)).map(|tensors| scope.spawn(|| write(tensors)));
            let threads: Vec<_> = threads.collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
        })?;
        fs::rename(begun, path)
    }

    /// What a plan would say of the weights.
    fn weights_bytes(&self, sizes: &CudaSizes, shape: &Shape) -> Result<u64, Error> {
        let weight = |view: View<'_>| sizes.weight_bytes(&[Part::from(view)]);
        let vector = |values| sizes.buf_bytes(Purpose::Weights, 1, values);
        let mut bytes = weight(embedded(&self.view(&self.head, 0)))? + weight(self.view(&self.head, 0))?;
        for layer in 0..shape.layers {
            for kind in self.of_layer(layer) {
                bytes += weight(self.view(kind, layer))?;
            }
            bytes += 2 * vector(shape.hidden) + vector(shape.heads.qkv_columns());
        }
        Ok(bytes)
    }
}

/// The tokens that are looked up.
fn embedded<'f>(head: &View<'f>) -> View<'f> {
    head.rows(0..64).expect("a larger vocabulary")
}

/// A model's weights on the device.
struct Loaded {
    embedding: Weight,
    head: Weight,
    layers: Vec<Layer>,
    bytes: usize,
}

impl Loaded {
    fn new(cuda: &Cuda, shape: &Shape, files: &Files) -> Result<Loaded, Error> {
        let columns = shape.heads.qkv_columns();
        let started = Instant::now();
        cuda.reserve(Purpose::Weights, files.weights_bytes(cuda.sizes(), shape)?)?;
        let mut bytes = 0;
        let mut upload = |view: View<'_>| -> Result<Weight, Error> {
            bytes += view.bytes.len();
            cuda.upload(&[Part::from(view)])
        };
        let head = files.view(&files.head, 0);
        let (embedding, head) = (upload(embedded(&head))?, upload(head)?);
        let mut layers = Vec::new();
        for layer in 0..shape.layers {
            let [qkv, output, gate_up, down] = files.of_layer(layer).map(|kind| files.view(kind, layer));
            layers.push(Layer {
                attention_norm: norm(cuda, shape)?,
                qkv: upload(qkv)?,
                qkv_bias: cuda.upload_values(&vec![0.1; columns])?,
                output: upload(output)?,
                mlp_norm: norm(cuda, shape)?,
                gate_up: upload(gate_up)?,
                down: upload(down)?,
            });
        }
        cuda.time(&mut || Ok(()))?;
        let seconds = started.elapsed().as_secs_f64();
        let times = cuda.upload_times();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        println!(
            "loaded {:.2} GB in {seconds:.3} s: {:.1} GB/s; {} parts; ms: memory {:.1}, kernels {:.1}, pinning {:.1}, waiting for rows {:.1}, for \
             slots {:.1}, launching {:.1}, checking {:.1}",
            bytes as f64 / 1e9,
            bytes as f64 / 1e9 / seconds,
            times.parts,
            ms(times.memory),
            ms(times.kernels),
            ms(times.pinning),
            ms(times.gathering),
            ms(times.slots),
            ms(times.launching),
            ms(times.checking)
        );
        Ok(Loaded { embedding, head, layers, bytes })
    }
}

fn norm(cuda: &Cuda, shape: &Shape) -> Result<Norm<Buf>, Error> {
    Ok(Norm::rms(cuda.upload_values(&vec![1.0; shape.hidden])?, 1e-6))
}

fn run(
    cuda: &Cuda,
    shape: Shape,
    files: &Files,
    (context, longest, kv_dtype): (usize, usize, KvDType),
    (one, only): (bool, &[(&str, &str)]),
) -> Result<(), Box<dyn std::error::Error>> {
    let columns = shape.heads.qkv_columns();
    let Loaded { embedding, head, layers, bytes } = Loaded::new(cuda, &shape, files)?;

    let tokens = |columns| cuda.alloc(Purpose::Activations, longest, columns);
    let frequencies: Vec<f32> =
        (0..shape.heads.dim / 2).map(|i| 1e6f32.powf(-2.0 * i as f32 / shape.heads.dim as f32)).collect();
    let mut model = Model {
        norm: norm(cuda, &shape)?,
        rope: Rope {
            frequencies: cuda.upload_values(&frequencies)?,
            pairs: frequencies.len(),
            magnitude: 1.0,
            sections: Vec::new(),
        },
        residual: cuda.alloc(Purpose::Residual, longest, shape.hidden)?,
        branch: tokens(shape.hidden)?,
        qkv: tokens(columns)?,
        attended: tokens(shape.heads.query * shape.heads.dim)?,
        gate_up: tokens(2 * shape.ffn)?,
        gated: tokens(shape.ffn)?,
        wanted: cuda.alloc(Purpose::Residual, STREAMS_MAX, shape.hidden)?,
        wanted_normed: tokens(shape.hidden)?,
        logits: cuda.alloc(Purpose::Logits, STREAMS_MAX, shape.vocab)?,
        embedding,
        head,
        layers,
        shape,
        kv_dtype,
        bytes: [
            files.qkv.len(),
            files.output.len(),
            files.gate_up.len(),
            (files.down[0].len() + files.down[1].len()) / 2,
            files.head.len(),
        ],
    };
    let pages = ((context + 1024).max(longest).div_ceil(PAGE_TOKENS) + 1)
        .max(STREAMS_MAX * (BEHIND / PAGE_TOKENS + 1) + 1);
    let group = KvGroup {
        layers: model.shape.layers,
        kind: KvKind::pairs(model.shape.heads.kv, model.shape.heads.dim),
        window: None,
        pages,
    };
    let mut kv = cuda.alloc_kv(&KvSpec { groups: vec![group], dtype: kv_dtype })?;
    if one {
        remember(cuda, &mut model, &mut kv, &[(0, 1, context)])?;
        operations(cuda, &mut model, &mut kv, 1)?;
        steps(cuda, &mut model, &mut kv, (context, bytes), ("greedy", &Sampling::greedy()))?;
        return Ok(without_each(cuda, &mut model, &mut kv, context)?);
    }
    let chosen = |name: &str, all: &[usize]| -> Vec<usize> {
        let named = only.iter().filter(|(word, _)| *word == name);
        let named = named.filter_map(|(_, number)| number.parse().ok()).collect();
        if only.is_empty() { all.to_vec() } else { named }
    };
    for tokens in chosen("operations", &MEASURED) {
        operations(cuda, &mut model, &mut kv, tokens)?;
    }
    for tokens in chosen("prompt", &PROMPTS) {
        let ms = whole(cuda, &mut model, &mut kv, &prompt_batch(tokens))?;
        println!("prompt of {tokens}: {ms:.3} ms on the device: {:.0} tokens/s", tokens as f32 / ms * 1e3);
    }
    let pages = BEHIND / PAGE_TOKENS + 1;
    let behind: Vec<_> = (0..STREAMS_MAX).map(|slot| (slot, 1 + slot * pages, BEHIND)).collect();
    remember(cuda, &mut model, &mut kv, &behind)?;
    for streams in chosen("streams", &STREAMS) {
        let ms = whole(cuda, &mut model, &mut kv, &streams_batch(streams))?;
        println!("{streams} streams: {ms:.3} ms on the device: {:.0} tokens/s", streams as f32 / ms * 1e3);
    }
    for streams in chosen("lasting", &[]) {
        lasting(cuda, &mut model, &mut kv, streams)?;
    }
    if !only.is_empty() {
        return Ok(());
    }

    remember(cuda, &mut model, &mut kv, &[(0, 1, context)])?;
    let hot = Sampling { temperature: 0.8, ..Sampling::default() };
    let cut = Sampling { top_k: 50, top_p: 0.95, min_p: 0.02, ..hot.clone() };
    let penalised = Sampling { repetition_penalty: 1.1, presence_penalty: 0.5, ..cut.clone() };
    for (name, sampling) in [
        ("greedy", Sampling::greedy()),
        ("temperature", hot),
        ("top-k, top-p, min-p", cut),
        ("penalties", penalised),
    ] {
        steps(cuda, &mut model, &mut kv, (context, bytes), (name, &sampling))?;
    }
    Ok(())
}

/// Choosing tokens of this many rows, nearly normal logits, ones that few tokens rule, and ones near each other.
fn choosing(cuda: &Cuda, vocab: usize, rows: usize) -> Result<(), Error> {
    let mut logits = cuda.alloc(Purpose::Logits, STREAMS_MAX, vocab)?;
    let plain = Sampling::default;
    let ways = [
        ("greedy", Sampling::greedy()),
        ("temperature 1", plain()),
        ("min-p 0.05", Sampling { min_p: 0.05, ..plain() }),
        ("top-k 40", Sampling { top_k: 40, ..plain() }),
        ("top-p 0.95", Sampling { top_p: 0.95, ..plain() }),
        ("top-k 40, top-p 0.95, min-p 0.05", Sampling { top_k: 40, top_p: 0.95, min_p: 0.05, ..plain() }),
    ];
    for (spread_name, spread) in [("normal", 1.0), ("peaked", 3.0), ("near", 0.01)] {
        let mut random = SplitMix64(7);
        let mut uniform = || random.below(1 << 20) as f32 / (1 << 20) as f32 - 0.5;
        // Other rows are the first one rotated: random numbers take the host long.
        let mut row: Vec<f32> =
            (0..vocab).map(|_| (0..12).map(|_| uniform()).sum::<f32>() * spread).collect();
        for at in 0..rows {
            row.rotate_left(997);
            cuda.write(&mut logits, at, &row)?;
        }
        for (name, sampling) in &ways {
            let (mut device, mut host, mut all) = (Vec::new(), Vec::new(), Vec::new());
            let mut sum = 0;
            for round in 0..24 {
                let asked: Vec<SampleRow<'_>> = (0..rows as u32)
                    .map(|at| SampleRow {
                        wanted: at,
                        slot: at,
                        position: round,
                        seed: u64::from(at),
                        ..SampleRow::plain(vocab as u32, sampling)
                    })
                    .collect();
                let mut step = cuda.begin(&streams_batch(rows))?;
                let began = Instant::now();
                let time = cuda.time(&mut || {
                    let began = Instant::now();
                    cuda.sample(&mut step, &logits, &asked)?;
                    host.push(began.elapsed().as_secs_f32() * 1e6);
                    Ok(())
                })?;
                let chosen = cuda.finish(step)?;
                sum = chosen.sampled.iter().fold(sum, |sum, one| sum + u64::from(one.token));
                all.push(began.elapsed().as_secs_f32() * 1e6);
                device.push(time * 1e3);
            }
            let median = |mut times: Vec<f32>| {
                times.sort_by(f32::total_cmp);
                times[times.len() / 2]
            };
            println!(
                "choosing {rows:>3} rows, {spread_name}, {name}: {:.1} us from first to last, host {:.1}, with waiting {:.1} \
                 (tokens add up to {sum})",
                median(device),
                median(host),
                median(all)
            );
        }
    }
    Ok(())
}

/// The whole step, token after token, as the engine does it: begin, record, sample, finish.
fn steps(
    cuda: &Cuda,
    model: &mut Model,
    kv: &mut Kv,
    (context, bytes): (usize, usize),
    (name, sampling): (&str, &Sampling),
) -> Result<(), Error> {
    let pages = (context + 1024).div_ceil(PAGE_TOKENS) + 1;
    let history: Vec<u32> = (0..context as u32).map(|at| at * 7919 % 50_000).collect();
    let mut times = Vec::new();
    let (warm, measured) = (20, 200);
    let mut launch = |round: usize, times: Option<&mut Vec<f32>>| -> Result<_, Error> {
        let position = (context + round) as u32;
        let mut batch = Batch::default();
        let table = (1..pages as u32).map(PageId).collect();
        let token = if round == 0 { Token::Known(1) } else { Token::Known(round as u32 % 64) };
        batch.push(Row { slot: 0, start: position, len: 1, pages: vec![table], wanted: 1 }, [token]);
        let mut step = cuda.begin(&batch)?;
        let mut body = || cuda.record(&step, &mut || forward(cuda, model, kv, &step, None));
        match times {
            Some(times) => times.push(cuda.time(&mut body)?),
            None => body()?,
        }
        let row = SampleRow {
            position,
            history: &history,
            generated: context as u32 / 2,
            ..SampleRow::plain(model.shape.vocab as u32, sampling)
        };
        cuda.sample(&mut step, &model.logits, &[row])?;
        Ok(step)
    };
    let mut start = Instant::now();
    for round in 0..warm + measured {
        if round == warm {
            start = Instant::now();
            times.clear();
        }
        let step = launch(round, Some(&mut times))?;
        cuda.finish(step)?;
    }
    let wall = start.elapsed().as_secs_f64() / f64::from(measured as u32);
    // As the engine does it: the next step is launched before a step's token is read.
    let mut last = None;
    for round in 0..warm + measured {
        if round == warm {
            start = Instant::now();
        }
        if let Some(step) = last.replace(launch(round, None)?) {
            cuda.finish(step)?;
        }
    }
    if let Some(step) = last {
        cuda.finish(step)?;
    }
    let ahead = start.elapsed().as_secs_f64() / f64::from(measured as u32);
    times.sort_by(f32::total_cmp);
    let median = times[times.len() / 2];
    let head_bytes = model.kv_dtype.bytes_of(model.shape.heads.dim);
    let moved = bytes as f64 + (context * model.shape.layers * model.shape.heads.kv * 2 * head_bytes) as f64;
    println!(
        "step at context {context}: {median:.3} ms on the device (best {:.3}), {:.3} ms with sampling ({name}) and host: {:.0} \
         tokens/s, {:.0} with the next step launched before; {:.2} GB moved, {:.2} TB/s",
        times[0],
        wall * 1e3,
        1.0 / wall,
        1.0 / ahead,
        moved / 1e9,
        moved / 1e12 / (f64::from(median) / 1e3)
    );
    Ok(())
}

/// Steps of this many streams as the engine makes them, for so long that the card's clock is what its power allows: the
/// first ones and the others, without and with choosing tokens.
fn lasting(cuda: &Cuda, model: &mut Model, kv: &mut Kv, streams: usize) -> Result<(), Error> {
    let sampling = Sampling { temperature: 1.0, ..Sampling::greedy() };
    for chooses in [false, true] {
        // Compiled and recorded; then until the clock has recovered.
        whole(cuda, model, kv, &streams_batch(streams))?;
        std::thread::sleep(Duration::from_secs(1));
        let (mut last, mut ends) = (None, Vec::new());
        let started = Instant::now();
        while started.elapsed() < LASTING || ends.len() < 4 {
            let mut step = cuda.begin(&streams_batch(streams))?;
            cuda.record(&step, &mut || forward(cuda, model, kv, &step, None))?;
            if chooses {
                let plain = SampleRow::plain(model.shape.vocab as u32, &sampling);
                let position = ends.len() as u32;
                let row = |at: u32| SampleRow {
                    wanted: at,
                    slot: at,
                    position,
                    seed: u64::from(at),
                    ..plain.clone()
                };
                let rows: Vec<SampleRow<'_>> = (0..streams as u32).map(row).collect();
                cuda.sample(&mut step, &model.logits, &rows)?;
            }
            if let Some(step) = last.replace(step) {
                cuda.finish(step)?;
                ends.push(started.elapsed().as_secs_f32() * 1e3);
            }
        }
        if let Some(step) = last {
            cuda.finish(step)?;
        }
        let each = |from: usize, to: usize| (ends[to] - ends[from]) / (to - from) as f32;
        let (early, late) = (each(0, ends.len().min(10) - 1), each(ends.len() / 2, ends.len() - 1));
        println!(
            "{streams} streams for {} s{}: {early:.3} ms a step at first, {late:.3} later: {:.0} tokens/s",
            LASTING.as_secs(),
            if chooses { ", choosing tokens at temperature 1" } else { "" },
            streams as f32 / late * 1e3
        );
    }
    Ok(())
}

/// One sequence from its beginning.
fn prompt_batch(tokens: usize) -> Batch {
    let mut batch = Batch::default();
    let table = (1..=tokens.div_ceil(PAGE_TOKENS) as u32).map(PageId).collect();
    let row = Row { slot: 0, start: 0, len: tokens as u32, pages: vec![table], wanted: 1 };
    batch.push(row, (0..tokens).map(|at| Token::Known(at as u32 % 64)));
    batch
}

/// Computes what sequences have behind them: of each its slot, its first page and its tokens. Without it attention
/// would be over what memory held before, which with debug assertions is NaN, and products of NaN take less power than
/// those of numbers.
fn remember(
    cuda: &Cuda,
    model: &mut Model,
    kv: &mut Kv,
    sequences: &[(usize, usize, usize)],
) -> Result<(), Error> {
    let mut batch = Batch::default();
    let mut compute = |batch: &mut Batch| -> Result<(), Error> {
        let step = cuda.begin(batch)?;
        forward(cuda, model, kv, &step, None)?;
        cuda.finish(step)?;
        *batch = Batch::default();
        Ok(())
    };
    for &(slot, first, tokens) in sequences {
        for start in (0..tokens).step_by(PROMPT) {
            let len = (tokens - start).min(PROMPT);
            if batch.tokens.len() + len > PROMPT {
                compute(&mut batch)?;
            }
            let pages = (start + len).div_ceil(PAGE_TOKENS);
            let table = (first..first + pages).map(|page| PageId(page as u32)).collect();
            let row = Row {
                slot: slot as u32,
                start: start as u32,
                len: len as u32,
                pages: vec![table],
                wanted: 1,
            };
            batch.push(row, (start..start + len).map(|at| Token::Known((at * 31 + slot * 17) as u32 % 64)));
        }
    }
    compute(&mut batch)
}

/// A token of each of this many sequences.
fn streams_batch(streams: usize) -> Batch {
    let mut batch = Batch::default();
    let pages = BEHIND / PAGE_TOKENS + 1;
    for slot in 0..streams {
        let table = (0..pages).map(|page| PageId((1 + slot * pages + page) as u32)).collect();
        let row = Row { slot: slot as u32, start: BEHIND as u32, len: 1, pages: vec![table], wanted: 1 };
        batch.push(row, [Token::Known(slot as u32 % 64)]);
    }
    batch
}

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Qkv,
    Attend,
    Output,
    GateUp,
    Down,
    Head,
}

/// What a step of one stream takes less where a kind of operation is left out: what it adds beside those around it.
fn without_each(cuda: &Cuda, model: &mut Model, kv: &mut Kv, context: usize) -> Result<(), Error> {
    let mut batch = Batch::default();
    let table = (1..=context.div_ceil(PAGE_TOKENS) as u32 + 1).map(PageId).collect();
    batch.push(
        Row { slot: 0, start: context as u32, len: 1, pages: vec![table], wanted: 1 },
        [Token::Known(1)],
    );
    let mut all = 0.0;
    use Kind::{Attend, Down, GateUp, Head, Output, Qkv};
    for left_out in [None, Some(Qkv), Some(Attend), Some(Output), Some(GateUp), Some(Down), Some(Head)] {
        // A new allocation makes the last recording worthless.
        let _new = cuda.alloc(Purpose::Activations, 1, 4)?;
        let mut times = Vec::new();
        for round in 0..60 {
            let step = cuda.begin(&batch)?;
            let time =
                cuda.time(&mut || cuda.record(&step, &mut || forward(cuda, model, kv, &step, left_out)))?;
            cuda.finish(step)?;
            if round >= 20 {
                times.push(time * 1e3);
            }
        }
        times.sort_by(f32::total_cmp);
        let median = times[times.len() / 2];
        match left_out {
            None => all = median,
            Some(kind) => {
                let count = if kind == Head { 1 } else { model.layers.len() };
                println!(
                    "without {kind:?}: {median:.1} us, {:.2} us less for each",
                    (all - median) / count as f32
                );
            }
        }
    }
    println!("with all: {all:.1} us");
    Ok(())
}

/// Milliseconds of a step, all of it.
fn whole(cuda: &Cuda, model: &mut Model, kv: &mut Kv, batch: &Batch) -> Result<f32, Error> {
    let mut times = Vec::new();
    for _ in 0..8 {
        let step = cuda.begin(batch)?;
        times.push(cuda.time(&mut || cuda.record(&step, &mut || forward(cuda, model, kv, &step, None)))?);
        cuda.finish(step)?;
    }
    times.sort_by(f32::total_cmp);
    Ok(times[times.len() / 2])
}

/// Each kind of operation over all layers in turn, so that no cache holds the next one's weight.
fn operations(cuda: &Cuda, model: &mut Model, kv: &mut Kv, tokens: usize) -> Result<(), Error> {
    let step = cuda.begin(&prompt_batch(tokens))?;
    let Shape { hidden, heads, ffn, .. } = model.shape;
    cuda.write(&mut model.branch, 0, &vec![0.5; tokens * hidden])?;
    cuda.write(&mut model.attended, 0, &vec![0.5; tokens * heads.query * heads.dim])?;
    cuda.write(&mut model.gated, 0, &vec![0.5; tokens * ffn])?;
    let Model {
        layers,
        residual,
        branch,
        attended,
        gated,
        qkv,
        gate_up,
        wanted_normed,
        head,
        logits,
        rope,
        bytes,
        ..
    } = model;
    let weights = |name: &str| match name {
        "qkv" => bytes[0],
        "output" => bytes[1],
        "gate_up" => bytes[2],
        "down" => bytes[3],
        _ => 0,
    };
    let measure = |name: &str, body: &mut dyn FnMut() -> Result<(), Error>| -> Result<(), Error> {
        body()?;
        let mut times = (0..5).map(|_| cuda.time(body)).collect::<Result<Vec<_>, _>>()?;
        times.sort_by(f32::total_cmp);
        let us = f64::from(times[2]) * 1e3 / layers.len() as f64;
        let rate = match weights(name) {
            0 => String::new(),
            bytes => format!(" {:6.2} TB/s", bytes as f64 / us / 1e6),
        };
        println!("{name:<9} {tokens:>4} rows {us:9.2} us{rate}");
        Ok(())
    };
    let rows = Rows::Tokens;
    measure("qkv", &mut || {
        layers.iter().try_for_each(|l| cuda.linear(&step, rows, &l.qkv, Some(&l.qkv_bias), branch, qkv))
    })?;
    measure("attend", &mut || {
        layers.iter().enumerate().try_for_each(|(layer, _)| {
            let shape = Attention::causal(heads, KvLayer { group: 0, layer }, 0.1);
            cuda.attend(&step, &shape, Some(rope), qkv, kv, attended)
        })
    })?;
    measure("attention", &mut || {
        layers.iter().enumerate().try_for_each(|(layer, _)| {
            let shape = Attention::causal(heads, KvLayer { group: 0, layer }, 0.1);
            cuda.attention(&step, &shape, qkv, kv, attended)
        })
    })?;
    measure("output", &mut || {
        layers.iter().try_for_each(|l| cuda.matmul(&step, rows, &l.output, attended, wanted_normed))
    })?;
    measure("gate_up", &mut || {
        layers.iter().try_for_each(|l| cuda.matmul(&step, rows, &l.gate_up, branch, gate_up))
    })?;
    measure("down", &mut || {
        layers.iter().try_for_each(|l| cuda.matmul(&step, rows, &l.down, gated, wanted_normed))
    })?;
    measure("norm", &mut || {
        layers.iter().try_for_each(|l| cuda.norm(&step, rows, &l.mlp_norm, residual, branch))
    })?;
    measure("glu", &mut || layers.iter().try_for_each(|_| cuda.glu(&step, Glu::Silu, gate_up, gated)))?;
    let mut body = || cuda.matmul(&step, Rows::Wanted, head, branch, logits);
    body()?;
    let us = f64::from(cuda.time(&mut body)?) * 1e3;
    println!("head         1 rows {us:9.2} us {:6.2} TB/s", bytes[4] as f64 / us / 1e6);
    cuda.finish(step)?;
    Ok(())
}

/// As the llama family does it.
fn forward(
    cuda: &Cuda,
    m: &mut Model,
    kv: &mut Kv,
    step: &<Cuda as Backend>::Step,
    without: Option<Kind>,
) -> Result<(), Error> {
    let scale = 1.0 / (m.shape.heads.dim as f32).sqrt();
    let has = |kind: Kind| without != Some(kind);
    cuda.embed(step, &m.embedding, &mut m.residual)?;
    for (index, layer) in m.layers.iter().enumerate() {
        let shape = Attention::causal(m.shape.heads, KvLayer { group: 0, layer: index }, scale);
        if has(Kind::Qkv) {
            cuda.norm(step, Rows::Tokens, &layer.attention_norm, &m.residual, &mut m.branch)?;
            cuda.linear(step, Rows::Tokens, &layer.qkv, Some(&layer.qkv_bias), &m.branch, &mut m.qkv)?;
        }
        if has(Kind::Attend) {
            cuda.attend(step, &shape, Some(&m.rope), &mut m.qkv, kv, &mut m.attended)?;
        }
        if has(Kind::Output) {
            let output = Linear { weight: &layer.output, bias: None };
            cuda.linear_add(step, Rows::Tokens, output, &m.attended, &mut m.branch, &mut m.residual)?;
        }
        if has(Kind::GateUp) {
            cuda.norm(step, Rows::Tokens, &layer.mlp_norm, &m.residual, &mut m.branch)?;
            cuda.matmul(step, Rows::Tokens, &layer.gate_up, &m.branch, &mut m.gate_up)?;
            cuda.glu(step, Glu::Silu, &m.gate_up, &mut m.gated)?;
        }
        if has(Kind::Down) {
            let down = Linear { weight: &layer.down, bias: None };
            cuda.linear_add(step, Rows::Tokens, down, &m.gated, &mut m.branch, &mut m.residual)?;
        }
    }
    cuda.gather_wanted(step, &m.residual, &mut m.wanted)?;
    cuda.norm(step, Rows::Wanted, &m.norm, &m.wanted, &mut m.wanted_normed)?;
    if has(Kind::Head) {
        cuda.matmul(step, Rows::Wanted, &m.head, &m.wanted_normed, &mut m.logits)?;
    }
    Ok(())
}
