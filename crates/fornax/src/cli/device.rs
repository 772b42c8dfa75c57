//! From `--device` and its companions to an open model.

use std::io::{self, Write};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use fornax::{Code, Device, Evaluator, Fornax, KvDType, KvDisk, Loading, OpenOptions, QUANTS, machine};
use fornax_format::DType;

use super::args::{Threads, byte_size, positive, threads};
use super::failure::Failure;
use super::meter::{Meter, megabytes};

/// Where a model is computed, and how many requests at once.
#[derive(Clone, Debug, Args)]
pub(crate) struct CapacityArgs {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// Requests computed at once; the cache holds a whole context for each
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true, value_parser = positive, help_heading = "Model")]
    pub(crate) parallel: usize,
}

/// A model that drafts.
#[derive(Clone, Debug, Args)]
pub(crate) struct DraftArg {
    /// A smaller model with the same tokens, which guesses what comes next: answers are the same, and often faster
    #[arg(long, value_name = "MODEL", help_heading = "Model")]
    pub(crate) draft: Option<String>,
}

impl DraftArg {
    /// The options with the model that was named, which is fetched where it has to be.
    pub(crate) fn apply(&self, options: OpenOptions) -> anyhow::Result<OpenOptions> {
        Ok(match &self.draft {
            Some(name) => options.draft(super::locate::locate(Some(name))?),
            None => options,
        })
    }
}

/// Where pages of prompts are kept beyond the memory.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Cache")]
pub(crate) struct KvDiskArgs {
    /// Keep what was read of prompts in this folder too, so that it need not be computed again after a restart; on
    /// the CPU
    #[arg(long, value_name = "DIR")]
    pub(crate) kv_disk: Option<std::path::PathBuf>,
    /// Bytes that each model may take there; the oldest go first, and what was read since it was written stays longer
    #[arg(long, value_name = "BYTES", value_parser = byte_size, default_value = "8GiB", requires = "kv_disk")]
    pub(crate) kv_disk_bytes: u64,
    /// Seal it with the content of this file, of at least 32 random bytes: without it nobody can read it
    #[arg(long, value_name = "FILE", requires = "kv_disk")]
    pub(crate) kv_disk_key: Option<std::path::PathBuf>,
}

impl KvDiskArgs {
    /// The options with the disk that was named. What goes wrong there is told by `tell`.
    pub(crate) fn apply(&self, options: OpenOptions, tell: fn(&str)) -> Result<OpenOptions, fornax::Error> {
        let Some(folder) = &self.kv_disk else { return Ok(options) };
        let disk = KvDisk::new(folder, self.kv_disk_bytes, tell);
        Ok(options.kv_disk(match &self.kv_disk_key {
            Some(key) => disk.sealed(key)?,
            None => disk,
        }))
    }
}

/// Tells of a disk on standard error.
pub(crate) fn tell_of_disk(what: &str) {
    // Nobody reading it is no reason to stop.
    drop(writeln!(io::stderr(), "note: {what}"));
}

/// Where and how the model is computed.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct DeviceArgs {
    /// Where to compute: auto (the first GPU that can be used, else the CPU), cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: String,
    /// Most tokens of one request, prompt and answer together [default: what the model was trained for]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// CPU threads: a number, or auto for one per core, of which as many compute single tokens as are fastest when the
    /// model is loaded [default: auto]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = threads)]
    pub(crate) threads: Option<Threads>,
    /// Bring the matrices of a safetensors model into this type while loading: q8_0, fp8 or q4_k [default: as stored]
    #[arg(long, value_name = "QUANT")]
    pub(crate) quant: Option<String>,
    /// How keys and values are stored: f32, f16, bf16, q8_0 or fp8 [default: f16; f32 with --activations float]
    #[arg(long, value_name = "DTYPE")]
    pub(crate) kv_dtype: Option<String>,
    /// How activations enter matrix products with quantised weights [default: int8 on the CPU, float on a GPU]
    #[arg(long, value_enum)]
    pub(crate) activations: Option<Activations>,
    /// Refuse to use more memory than this: bytes, or with KiB, MiB, GiB [default: what the machine has]
    #[arg(long, value_name = "BYTES", value_parser = byte_size)]
    pub(crate) memory_limit: Option<u64>,
    /// Load a model that reads images without what reads them
    #[arg(long)]
    pub(crate) no_images: bool,
    /// Most tokens that an image becomes; larger ones are shrunk [default: 1024]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive, conflicts_with = "no_images")]
    pub(crate) image_tokens: Option<usize>,
    /// The file that reads images for a GGUF model; one in the model's own folder is found without this
    #[arg(long, value_name = "FILE", conflicts_with = "no_images")]
    pub(crate) mmproj: Option<std::path::PathBuf>,
    /// Same tokens whatever else runs; always so, on the CPU and on GPUs
    #[arg(long)]
    pub(crate) deterministic: bool,
}

impl DeviceArgs {
    /// How activations are computed on a device: as asked for, or its default.
    pub(crate) fn activations_on(&self, device: Device) -> Activations {
        match device {
            Device::Cpu => self.activations.unwrap_or(Activations::Int8),
            _ if self.activations == Some(Activations::Fp8) => Activations::Fp8,
            _ => Activations::Float,
        }
    }
}

/// How activations meet quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Activations {
    /// Full precision
    Float,
    /// Rounded to integers, 32 to a scale; faster
    Int8,
    /// Rounded to 8-bit floats, a row to a scale, where weights are 8-bit floats (or become them by --quant fp8)
    Fp8,
}

impl Activations {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Activations::Float => "float",
            Activations::Int8 => "int8",
            Activations::Fp8 => "fp8",
        }
    }
}

/// How the vectors of a text's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pooling {
    /// Their mean
    Mean,
    /// The first
    Cls,
    /// The last
    Last,
}

impl Pooling {
    pub(crate) fn of_model(self) -> fornax::Pooling {
        match self {
            Pooling::Mean => fornax::Pooling::Mean,
            Pooling::Cls => fornax::Pooling::First,
            Pooling::Last => fornax::Pooling::Last,
        }
    }
}

/// The device that a name stands for; `auto` takes the first that can be used. Nothing falls back to another device
/// than the one asked for.
pub(crate) fn named(name: &str) -> Result<Device, Failure> {
    if name == "auto" {
        return Ok(auto().0);
    }
    Device::named(name).ok_or_else(|| {
        if !name.is_empty() && name.split(',').all(is_device) {
            Failure::new(
                Code::DeviceUnavailable,
                format!(
                    "device {name} is not available: this build computes on one device, cpu or cuda:N; use --device cpu"
                ),
            )
        } else {
            Failure::usage(format!("--device {name:?} is no device; use auto, cpu or cuda:0"))
        }
    })
}

/// What `auto` chooses, and why. Found out once: it opens a device and tries its compiler.
pub(crate) fn auto() -> &'static (Device, String) {
    static AUTO: OnceLock<(Device, String)> = OnceLock::new();
    AUTO.get_or_init(Device::auto)
}

fn is_device(name: &str) -> bool {
    let (kind, index) = name.split_once(':').unwrap_or((name, "0"));
    matches!(kind, "cpu" | "cuda" | "hip") && index.parse::<u16>().is_ok()
}

/// The options that the flags stand for.
pub(crate) fn options(path: &Path, args: &DeviceArgs) -> anyhow::Result<OpenOptions> {
    let device = named(&args.device)?;
    let mut options = OpenOptions::new(path).device(device);
    if device != Device::Cpu {
        // What a device does not know is refused, not ignored; a device that was not asked for by name takes all.
        let asked = args.device != "auto";
        if asked && args.activations == Some(Activations::Int8) {
            return Err(Failure::usage(format!(
                "--activations int8 is for the cpu; on {device} they are float"
            ))
            .into());
        }
        if asked && args.threads.is_some() {
            return Err(Failure::usage(format!("--threads is for the cpu; {device} has its own")).into());
        }
        if let Ok(cache) = super::locate::cache_dir() {
            options = options.kernel_folder(cache.join("kernels"));
        }
    }
    if let Some(activations) = args.activations {
        options = match activations {
            Activations::Float => options.activations(fornax::Activations::Float),
            Activations::Int8 => options.activations(fornax::Activations::Integer),
            Activations::Fp8 => options.floats8(true),
        };
    }
    options = options.images(!args.no_images);
    if let Some(tokens) = args.image_tokens {
        options = options.image_tokens(tokens);
    }
    if let Some(path) = &args.mmproj {
        options = options.projector(path);
    }
    if let Some(name) = &args.kv_dtype {
        options = options.kv_dtype(kv_dtype(name)?);
    }
    if let Some(name) = &args.quant {
        options = options.quantize(quant(name)?);
    }
    if let Some(context) = args.context {
        options = options.context(context);
    }
    if let Some(Threads::Counts(counts)) = &args.threads {
        let [threads] = counts[..] else {
            let counts = counts.len();
            let message = format!("--threads takes one number here, not {counts}; bench compares several");
            return Err(Failure::usage(message).into());
        };
        options = options.threads(threads);
    }
    // What the machine has free is a limit too: beyond it everything else on the machine suffers.
    let available = || if device == Device::Cpu { machine::memory_available() } else { None };
    if let Some(limit) = args.memory_limit.or_else(available) {
        options = options.memory_limit(limit);
    }
    Ok(options)
}

/// Loads the model, showing progress where that takes a while.
pub(crate) fn open(options: OpenOptions) -> Result<Fornax, fornax::Error> {
    open_timed(options).map(|(model, _)| model)
}

/// How long loading took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) all: Duration,
    /// From the first weight to the last.
    pub(crate) weights: Duration,
}

pub(crate) fn open_timed(options: OpenOptions) -> Result<(Fornax, Taken), fornax::Error> {
    let mut meter = Meter::new(Duration::from_secs(2));
    let started = Instant::now();
    let (mut first, mut last) = (None, started);
    let model = options.open_with(&mut |loading| {
        if matches!(loading, Loading::Weights { .. }) {
            last = Instant::now();
            first.get_or_insert(last);
        }
        show(&mut meter, loading);
    })?;
    Ok((model, Taken { all: started.elapsed(), weights: last.duration_since(first.unwrap_or(started)) }))
}

/// Opens it for its logits alone, `rows` of them computed at once.
pub(crate) fn evaluator(options: OpenOptions, rows: usize) -> Result<Evaluator, fornax::Error> {
    let mut meter = Meter::new(Duration::from_secs(2));
    options.evaluator(rows, &mut |loading| show(&mut meter, loading))
}

fn show(meter: &mut Meter, loading: Loading) {
    match loading {
        Loading::Weights { bytes, total } => {
            meter.show("loading:", (bytes, total), &megabytes(bytes, total));
        }
        Loading::Kernels { compiled, total } => {
            let amount = format!("{compiled} of {total} kernels");
            meter.show("compiling:", (compiled as u64, total as u64), &amount);
        }
    }
}

/// Says once what `auto` chose and why. Commands call it when nothing stands in the way of computing any more, so that
/// a refusal stays the only line.
pub(crate) fn announce(device: &str, args: &DeviceArgs) -> io::Result<()> {
    if args.device != "auto" {
        return Ok(());
    }
    let (_, why) = auto();
    writeln!(io::stderr(), "device: {device} (auto: {why})")
}

/// What `--quant` can bring matrices into.
fn quant(name: &str) -> Result<DType, Failure> {
    let known = QUANTS.iter().find(|(known, _)| *known == name);
    known.map(|(_, dtype)| *dtype).ok_or_else(|| {
        Failure::usage(format!("--quant {name:?} is no type to quantise to; use q8_0, fp8 or q4_k"))
    })
}

fn kv_dtype(name: &str) -> Result<KvDType, Failure> {
    match name {
        "f32" => Ok(KvDType::F32),
        "f16" => Ok(KvDType::F16),
        "bf16" => Ok(KvDType::BF16),
        "q8_0" => Ok(KvDType::Q8_0),
        "fp8" => Ok(KvDType::F8),
        _ => Err(Failure::usage(format!(
            "--kv-dtype {name} is not available; use f32, f16, bf16, q8_0 or fp8"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_known_by_name_unavailable_or_misspelt() {
        assert_eq!(named("cpu").ok(), Some(Device::Cpu));
        assert_eq!(named("cuda:3").ok(), Some(Device::Cuda(3)));
        assert_eq!(named("cuda").ok(), Some(Device::Cuda(0)));
        let check = |name: &str, wanted: &str| {
            let got = named(name).err().map(|failure| failure.code().to_string()).unwrap_or_default();
            assert_eq!(got, wanted, "{name}");
        };
        check("cuda:0,cuda:1", "DEVICE_UNAVAILABLE");
        check("hip:0", "DEVICE_UNAVAILABLE");
        check("cuda:0,cpu", "DEVICE_UNAVAILABLE");
        check("gpu", "INVALID_INPUT");
        check("cuda:x", "INVALID_INPUT");
        check("", "INVALID_INPUT");
    }

    #[test]
    fn types_are_known_by_the_name_that_they_show_and_others_are_refused_by_theirs() {
        for dtype in KvDType::ALL {
            assert_eq!(kv_dtype(&dtype.to_string()).unwrap(), dtype);
        }
        assert!(kv_dtype("fp4").unwrap_err().to_string().contains("--kv-dtype fp4"));
        assert_eq!(quant("fp8").unwrap(), DType::MXFP8);
        assert!(quant("fp4").unwrap_err().to_string().contains("\"fp4\""));
    }
}
