//! How fast a model runs here, measured through the engine, beside what the memory of this machine can do.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fornax::random_model::{self, SHAPES, Shape, Types};
use fornax::{Completion, Device, Error, Fornax, Part, Request, Sampling};
use fornax_format::{Checkpoint, View};
use serde::Serialize;

use super::args::{Bench, DeviceArgs};
use super::failure::Failure;
use super::interrupt::Interrupt;
use super::meter::{Meter, megabytes};
use super::output::binary;
use super::{device, locate, output, shapes};

/// What `--json` prints. Rates are tokens per second.
#[derive(Debug, Serialize)]
struct Report {
    model: PathBuf,
    device: String,
    threads: usize,
    activations: &'static str,
    kv_dtype: String,
    /// What all threads together read from memory, measured in this run; of a GPU, what it copies inside its own memory,
    /// read and written bytes together.
    memory_bytes_per_second: f64,
    /// From pinned memory of the host to a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    upload_bytes_per_second: Option<f64>,
    load: Load,
    prefill: Vec<Prefill>,
    decode: Vec<Decode>,
    prefix: Prefix,
}

#[derive(Debug, Serialize)]
struct Load {
    seconds: f64,
    file_bytes: u64,
    bytes_per_second: f64,
    allocated_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Prefill {
    tokens: usize,
    tokens_per_second: f64,
    operations_per_second: f64,
}

#[derive(Debug, Serialize)]
pub(super) struct Decode {
    streams: usize,
    /// Tokens before the first that is timed.
    prompt: usize,
    /// Of all streams together.
    pub(super) tokens_per_second: f64,
    /// Weights once a step for all streams, and each stream's keys and values.
    pub(super) bytes_per_token: f64,
    pub(super) memory_rate_percent: f64,
    operations_per_second: f64,
}

/// The same long prompt twice.
#[derive(Debug, Serialize)]
struct Prefix {
    tokens: usize,
    cached_tokens: usize,
    first_ms: f64,
    again_ms: f64,
}

/// Streams that are decoded together.
const STREAMS: [usize; 3] = [1, 4, 16];
/// Lengths of prompts.
const PREFILL: [usize; 2] = [128, 512];
/// The prompt that is asked about twice.
const PREFIX: usize = 1024;
/// What stands before the answer that is timed.
pub(super) const PROMPT: usize = 16;
/// And before that of a long conversation, which is timed where the context has room: always on a GPU.
pub(super) const LONG_PROMPT: usize = 8000;

pub(crate) fn bench(args: &Bench) -> anyhow::Result<()> {
    if let Some(shape) = &args.make_random {
        return make_random(args, shape);
    }
    if let Some(names) = &args.shapes {
        return shapes::shapes(args, names);
    }
    let path = locate::locate(args.model.as_deref())?;
    let interrupt = Interrupt::install()?;
    let options = |context| -> anyhow::Result<_> {
        Ok(device::options(&path, &args.device)?.context(context).parallel(16).drafts(false))
    };
    let [long, short] = contexts(&path, &args.device, args.tokens)?;
    let (mut options, shorter) = (options(long)?, options(short)?);
    if !options.plan()?.plan.fits() {
        options = shorter;
    }
    let planned = options.plan()?;
    if !planned.plan.fits() {
        return Err(planned.refusal().into());
    }
    let started = Instant::now();
    let model = device::open(options)?;
    let load = started.elapsed();
    device::announce(model.device(), &args.device)?;
    let bench = Measured { model: &model, interrupt: &interrupt, traffic: traffic(&path)?, seed: 0 };
    let report = interrupt.during(|| bench.report(&path, args, load))?;
    if args.json {
        return output::json(&report);
    }
    io::stdout().lock().write_all(table(&report)?.as_bytes())?;
    Ok(())
}

/// Tokens of a request: what the longest measurement takes, and what the others take, if the model knows that many.
pub(super) fn contexts(path: &Path, args: &DeviceArgs, tokens: usize) -> anyhow::Result<[usize; 2]> {
    if let Some(context) = args.context {
        return Ok([context; 2]);
    }
    let trained = device::options(path, args)?.memory_limit(u64::MAX).plan()?.plan.context_trained;
    let short = PREFIX + PROMPT;
    let long = if device::named(&args.device)? == Device::Cpu { short } else { LONG_PROMPT };
    Ok([long, short].map(|longest| trained.min(longest + tokens)))
}

/// What a token moves and takes, from the table of tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traffic {
    pub(super) file_bytes: u64,
    /// Bytes of the weights that every step reads.
    weight_bytes: u64,
    /// Multiplications and additions of a token.
    operations: u64,
}

pub(super) fn traffic(path: &Path) -> Result<Traffic, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let (tensors, file_bytes): (Vec<View<'_>>, u64) = match &checkpoint {
        Checkpoint::Gguf(gguf) => (gguf.tensors().collect(), gguf.file_bytes()),
        Checkpoint::HuggingFace(model) => (model.weights().tensors().collect(), model.weights().file_bytes()),
    };
    let is = |view: &View<'_>, names: [&str; 2]| names.contains(&view.name);
    let untied = tensors.iter().any(|view| is(view, ["output.weight", "lm_head.weight"]));
    let mut traffic = Traffic { file_bytes, weight_bytes: 0, operations: 0 };
    for view in &tensors {
        // One row of an embedding is looked up; where the head is tied, all of it is multiplied by.
        if untied && is(view, ["token_embd.weight", "model.embed_tokens.weight"]) {
            continue;
        }
        traffic.weight_bytes += view.bytes.len() as u64;
        if view.shape.len() > 1 {
            traffic.operations += 2 * view.values() as u64;
        }
    }
    Ok(traffic)
}

/// A model under measurement.
pub(super) struct Measured<'a> {
    pub(super) model: &'a Fornax,
    pub(super) interrupt: &'a Interrupt,
    pub(super) traffic: Traffic,
    /// Counts prompts, so that none is found in the cache.
    pub(super) seed: u64,
}

impl Measured<'_> {
    fn report(mut self, path: &Path, args: &Bench, load: Duration) -> Result<Report, Error> {
        let (memory, upload) = self.rates()?;
        let prefill = PREFILL.into_iter().filter(|&tokens| tokens < self.model.context());
        let prefill = prefill.collect::<Vec<_>>().into_iter().map(|tokens| self.prefill(tokens));
        let prefill = prefill.collect::<Result<_, Error>>()?;
        let mut decode = Vec::new();
        let prompt = PROMPT.min(self.model.context() / 2);
        for streams in STREAMS {
            decode.push(self.decode(streams, prompt, args.tokens, memory)?);
        }
        if self.model.context() >= LONG_PROMPT + args.tokens {
            decode.push(self.decode(1, LONG_PROMPT, args.tokens, memory)?);
        }
        let prefix = self.prefix()?;
        Ok(Report {
            model: path.to_owned(),
            device: self.model.kind().to_string(),
            threads: self.model.threads(),
            activations: args.device.activations_on(self.model.kind()).name(),
            kv_dtype: self.model.kv_dtype().to_string(),
            memory_bytes_per_second: memory,
            upload_bytes_per_second: upload,
            load: Load {
                seconds: load.as_secs_f64(),
                bytes_per_second: self.traffic.file_bytes as f64 / load.as_secs_f64(),
                file_bytes: self.traffic.file_bytes,
                allocated_bytes: self.model.memory().allocated.total(),
            },
            prefill,
            decode,
            prefix,
        })
    }

    /// Bytes a second that the device's memory moves, and that are sent to a GPU.
    pub(super) fn rates(&self) -> Result<(f64, Option<f64>), Error> {
        Ok(match self.model.kind() {
            Device::Cpu => (memory_rate(self.model.threads()), None),
            Device::Cuda(ordinal) => {
                let rates = fornax_gpu::rates(ordinal)?;
                (rates.copy, Some(rates.host_to_device))
            }
        })
    }

    /// A prompt that was never asked about before.
    fn prompt(&mut self, tokens: usize) -> Vec<u32> {
        self.seed += 1;
        let vocab = self.model.text().vocab() as u64;
        let mix =
            |at: u64| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32).wrapping_add(self.seed * 7919) % vocab;
        (0..tokens as u64).map(|at| mix(at + 1) as u32).collect()
    }

    /// The best of two: the first one pages weights in.
    fn prefill(&mut self, tokens: usize) -> Result<Prefill, Error> {
        let mut rate = 0f64;
        for _ in 0..2 {
            let request = Request { max_tokens: Some(1), ..Request::tokens(self.prompt(tokens)) };
            let answers = self.finish(vec![request])?;
            rate = answers.iter().map(Completion::prompt_tokens_per_second).fold(rate, f64::max);
        }
        Ok(Prefill {
            tokens,
            tokens_per_second: rate,
            operations_per_second: rate * self.traffic.operations as f64,
        })
    }

    pub(super) fn decode(
        &mut self,
        streams: usize,
        prompt: usize,
        tokens: usize,
        memory: f64,
    ) -> Result<Decode, Error> {
        let tokens = tokens.min(self.model.context() - prompt);
        // At a temperature: what a random model says greedily repeats itself, which is not what models are for.
        let sampling = Sampling { temperature: 1.0, ..Sampling::greedy() };
        let requests = (0..streams).map(|stream| Request {
            max_tokens: Some(tokens),
            ignore_eos: true,
            seed: Some(stream as u64),
            sampling: sampling.clone(),
            ..Request::tokens(self.prompt(prompt))
        });
        let requests = requests.collect();
        let answers = self.finish(requests)?;
        // From the first token of the last stream to begin until the first stream is done, all of them run.
        let begun = answers.iter().map(|answer| answer.timings.first_token).max().unwrap_or_default();
        let ended = answers.iter().map(|answer| answer.timings.first_token + answer.timings.decode).min();
        let together = ended.unwrap_or_default().saturating_sub(begun).as_secs_f64().max(f64::MIN_POSITIVE);
        let within = |answer: &Completion| {
            let each = answer.timings.decode.as_secs_f64() / (tokens.max(2) - 1) as f64;
            together / each.max(f64::MIN_POSITIVE)
        };
        let rate = answers.iter().map(within).sum::<f64>() / together;
        let kv = self.model.plan().kv_token_bytes as f64 * (prompt as f64 + tokens as f64 / 2.0);
        let bytes = self.traffic.weight_bytes as f64 / streams as f64 + kv;
        Ok(Decode {
            streams,
            prompt,
            tokens_per_second: rate,
            bytes_per_token: bytes,
            memory_rate_percent: 100.0 * bytes * rate / memory,
            operations_per_second: rate * self.traffic.operations as f64,
        })
    }

    fn prefix(&mut self) -> Result<Prefix, Error> {
        let tokens = PREFIX.min(self.model.context() - 1);
        let prompt = self.prompt(tokens);
        let ask = || Request { max_tokens: Some(1), ..Request::tokens(prompt.clone()) };
        let milliseconds = |answers: &[Completion]| {
            answers.first().map(|answer| answer.timings.first_token.as_secs_f64() * 1e3)
        };
        let first = self.finish(vec![ask()])?;
        let again = self.finish(vec![ask()])?;
        Ok(Prefix {
            tokens,
            cached_tokens: again.first().map_or(0, |answer| answer.cached_tokens),
            first_ms: milliseconds(&first).unwrap_or_default(),
            again_ms: milliseconds(&again).unwrap_or_default(),
        })
    }

    /// Submits all at once and waits for all, each on its own thread so that its times are its own.
    fn finish(&self, requests: Vec<Request>) -> Result<Vec<Completion>, Error> {
        let answers = requests.iter().map(|request| self.model.submit(request));
        let answers = answers.collect::<Result<Vec<_>, _>>()?;
        std::thread::scope(|scope| {
            let threads: Vec<_> = answers
                .into_iter()
                .flatten()
                .map(|mut answer| {
                    scope.spawn(move || {
                        loop {
                            match answer.next_within(Duration::from_millis(50)) {
                                Ok(None) => return Err(Error::Cancelled),
                                Ok(Some(part)) => {
                                    if let Part::End(completion) = part? {
                                        return Ok(completion);
                                    }
                                }
                                Err(_) => {}
                            }
                            if self.interrupt.asked() {
                                return Err(Error::Cancelled);
                            }
                        }
                    })
                })
                .collect();
            let joined = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            joined.collect()
        })
    }
}

/// Bytes a second that all threads together read of a block larger than any cache: the best of three passes.
fn memory_rate(threads: usize) -> f64 {
    const WORDS: usize = (256 << 20) / size_of::<u64>();
    let block: Vec<u64> = (0..WORDS as u64).collect();
    let pass = || {
        let started = Instant::now();
        let sum = std::thread::scope(|scope| {
            let parts = block.chunks(WORDS.div_ceil(threads.max(1)));
            let sums: Vec<_> = parts.map(|part| scope.spawn(move || sum(part))).collect();
            sums.into_iter().fold(0u64, |all, sum| all.wrapping_add(sum.join().unwrap_or_default()))
        });
        std::hint::black_box(sum);
        started.elapsed().as_secs_f64()
    };
    let best = (0..3).map(|_| pass()).fold(f64::INFINITY, f64::min);
    (WORDS * size_of::<u64>()) as f64 / best
}

/// In eight sums, so that additions do not wait for each other.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; 8];
    for eight in words.as_chunks::<8>().0 {
        for (sum, word) in sums.iter_mut().zip(eight) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

fn table(report: &Report) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let Report { device, threads, activations, kv_dtype, load, prefix, .. } = report;
    writeln!(out, "{}", report.model.display())?;
    writeln!(out, "{device}, {threads} threads, {activations} activations, keys and values in {kv_dtype}")?;
    let memory = report.memory_bytes_per_second / 1e9;
    match report.upload_bytes_per_second {
        None => writeln!(out, "memory read at {memory:.1} GB/s in this run")?,
        Some(upload) => writeln!(
            out,
            "in this run memory copied at {memory:.0} GB/s, pinned memory sent to the device at {:.1} GB/s",
            upload / 1e9
        )?,
    }
    let (file, allocated) = (binary(load.file_bytes), binary(load.allocated_bytes));
    writeln!(
        out,
        "loaded in {:.2} s ({:.1} GB/s): {file} of files, {allocated} allocated",
        load.seconds,
        load.bytes_per_second / 1e9
    )?;
    writeln!(out, "\n                      tok/s     MB/token  of memory     GOP/s")?;
    for Prefill { tokens, tokens_per_second, operations_per_second } in &report.prefill {
        let (name, operations) = (format!("prefill {tokens}"), operations_per_second / 1e9);
        writeln!(out, "{name:<16} {tokens_per_second:>10.1} {:>12} {:>10} {operations:>9.1}", "", "")?;
    }
    for decode in &report.decode {
        let name = match decode.prompt {
            LONG_PROMPT => format!("decode at {LONG_PROMPT}"),
            _ => format!("decode x {}", decode.streams),
        };
        let (rate, megabytes) = (decode.tokens_per_second, decode.bytes_per_token / 1e6);
        let percent = format!("{:.1} %", decode.memory_rate_percent);
        let operations = decode.operations_per_second / 1e9;
        writeln!(out, "{name:<16} {rate:>10.1} {megabytes:>12.2} {percent:>10} {operations:>9.1}")?;
    }
    writeln!(
        out,
        "\na prompt of {} tokens: {:.1} ms to the first token, {:.1} ms when {} of them are cached",
        prefix.tokens, prefix.first_ms, prefix.again_ms, prefix.cached_tokens
    )?;
    Ok(out)
}

/// A shape that random models are made in.
pub(super) fn named_shape(flag: &str, name: &str) -> Result<&'static Shape, Failure> {
    SHAPES.iter().find(|known| known.name == name).ok_or_else(|| {
        let names = SHAPES.map(|shape| shape.name).join(", ");
        Failure::usage(format!("{flag} {name:?} is no shape; use one of {names}"))
    })
}

/// Writes a model of random weights.
fn make_random(args: &Bench, shape: &str) -> anyhow::Result<()> {
    let shape = named_shape("--make-random", shape)?;
    let quant = args.device.quant.as_deref().unwrap_or_default();
    let types = Types::named(quant).ok_or_else(|| {
        let names = Types::names().join(", ");
        Failure::usage(format!("--quant {quant:?} cannot be made; use one of {names}"))
    })?;
    let default = format!("{}-{}.gguf", shape.name, quant.to_lowercase());
    let path = PathBuf::from(args.model.as_ref().unwrap_or(&default));
    if path.exists() {
        return Err(
            Failure::usage(format!("{} exists; remove it or name another file", path.display())).into()
        );
    }
    let interrupt = Interrupt::install()?;
    let mut meter = Meter::new(Duration::from_secs(2));
    let written = interrupt.during(|| {
        random_model::write(&path, shape, types, args.seed, &mut |done, total| {
            meter.show("writing:", (done, total), &megabytes(done, total));
            if interrupt.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    });
    drop(meter);
    match written {
        Ok(()) => {}
        Err(_) if interrupt.asked() => return Err(Error::Cancelled.into()),
        Err(error) => return Err(Failure::unwritable(&path, &error).into()),
    }
    writeln!(io::stdout(), "{}", path.display())?;
    Ok(())
}
