//! What this machine has and what is missing, in words.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::Path;
use std::process::Stdio;

use clap::Args;
use fornax_compute::cpu::Simd;

use fornax::machine;

use super::{conformance, device, locate, models, output};

/// Say what this machine has and what is missing
///
/// Nothing is downloaded and the network is not tried.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax doctor
  fornax doctor --report         a block to paste into a bug report
  fornax doctor --conformance    check every operation of the device against the reference
  fornax doctor --conformance --only \"matmul Q4_K,sample,!many tokens\"")]
pub(crate) struct Doctor {
    /// Run the conformance suite on the device and print the counts of each operation
    #[arg(long)]
    pub(crate) conformance: bool,
    /// Only cases whose operation and words hold one of these, with commas between; ! in front leaves cases out
    #[arg(long, value_name = "WORDS", requires = "conformance")]
    pub(crate) only: Option<String>,
    /// Print a block to paste into a report
    #[arg(long)]
    pub(crate) report: bool,
    /// Which device to look at: auto, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: String,
}

/// How a thing stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Fine,
    Missing,
    /// Nobody looked.
    Unknown,
}

impl State {
    fn of(fine: bool) -> State {
        if fine { State::Fine } else { State::Missing }
    }

    fn mark(self) -> &'static str {
        match self {
            State::Fine => "ok",
            State::Missing => "missing",
            State::Unknown => "unknown",
        }
    }
}

/// One thing looked at.
struct Finding {
    what: &'static str,
    state: State,
    words: String,
}

pub(crate) fn doctor(args: &Doctor) -> anyhow::Result<()> {
    let device = device::named(&args.device)?;
    let describes = device.describe();
    // A device that was asked for by name and cannot be used is an error; otherwise it is one finding among others.
    if args.device != "auto" {
        describes.map_err(anyhow::Error::from)?;
    }
    let findings = findings();
    let mut out = io::stdout().lock();
    if args.report {
        writeln!(out, "```text\nfornax {}", env!("CARGO_PKG_VERSION"))?;
        writeln!(out, "{}-{}", std::env::consts::ARCH, std::env::consts::OS)?;
    }
    for Finding { what, state, words } in &findings {
        writeln!(out, "{:<7}  {what:<10}  {words}", state.mark())?;
    }
    let only = args.only.as_deref().unwrap_or_default();
    let conforms = if args.conformance { conformance::conformance(device, only, &mut out) } else { Ok(()) };
    if args.report {
        writeln!(out, "```")?;
    }
    conforms
}

fn findings() -> Vec<Finding> {
    let mut findings = vec![processor(), memory()];
    findings.extend(fornax::Device::numbered().map(gpu));
    findings.extend(cache());
    findings.push(python());
    findings.push(Finding {
        what: "network",
        state: State::Unknown,
        words: "not tried; `fornax pull smollm2` tells whether models can be fetched".to_owned(),
    });
    findings
}

fn processor() -> Finding {
    let name =
        machine::processor().unwrap_or_else(|| format!("unnamed {} processor", std::env::consts::ARCH));
    let cores = machine::cores().map_or("an unknown number of".to_owned(), |cores| cores.to_string());
    let simd = Simd::detect();
    let vectors = match simd {
        Simd::Scalar => "no AVX2, FMA and F16C: scalar code is used, many times slower".to_owned(),
        _ => format!("{} code is used", simd.name()),
    };
    Finding {
        what: "cpu",
        state: State::of(simd != Simd::Scalar),
        words: format!("{name}, {cores} threads at once; {vectors}"),
    }
}

fn memory() -> Finding {
    match (machine::memory_total(), machine::memory_available()) {
        (Some(total), Some(available)) => Finding {
            what: "memory",
            state: State::Fine,
            words: format!("{} in all, {} available", output::bytes(total), output::bytes(available)),
        },
        _ => Finding {
            what: "memory",
            state: State::Missing,
            words: "this system does not say how much there is; use --memory-limit".to_owned(),
        },
    }
}

fn gpu(device: fornax::Device) -> Finding {
    match device.describe() {
        Ok(words) => Finding { what: "gpu", state: State::Fine, words: format!("{device}: {words}") },
        Err(error) => Finding { what: "gpu", state: State::Missing, words: error.to_string() },
    }
}

fn cache() -> Vec<Finding> {
    let cache = match locate::cache_dir() {
        Ok(cache) => cache,
        Err(error) => {
            return vec![Finding { what: "cache", state: State::Missing, words: error.to_string() }];
        }
    };
    let writable = writable(&cache);
    let state = match &writable {
        Ok(()) => "can be written".to_owned(),
        Err(error) => format!("cannot be written ({error}); set FORNAX_CACHE to a folder that can"),
    };
    let files = models::files(&cache).unwrap_or_default();
    let names: Vec<String> =
        files.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned())).collect();
    let held = if names.is_empty() {
        "none yet; the first `fornax run` fetches smollm2".to_owned()
    } else {
        names.join(", ")
    };
    vec![
        Finding {
            what: "cache",
            state: State::of(writable.is_ok()),
            words: format!("{} {state}", cache.display()),
        },
        Finding { what: "models", state: State::Fine, words: held },
    ]
}

/// Whether a file can be made in the folder, or in the nearest folder above it that exists.
fn writable(folder: &Path) -> io::Result<()> {
    let existing = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"));
    tempfile::tempfile_in(existing).map(drop)
}

fn python() -> Finding {
    let asked = || {
        let empty = tempfile::tempdir()?;
        let mut pip = fornax::catalog::pip(OsStr::new("python3"), empty.path());
        pip.arg("--version").stdin(Stdio::null()).output()
    };
    let found = asked();
    let (fine, words) = match found {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            let version: Vec<&str> = text.split_whitespace().take(2).collect();
            (true, format!("python3 with {}", version.join(" ")))
        }
        Ok(_) => (false, "python3 has no pip module, which fetches the default model where no hub can be reached; install python3-pip".to_owned()),
        Err(error) => (false, format!("python3 cannot be started ({error}); with pip it fetches the default model where no hub can be reached")),
    };
    Finding { what: "python", state: State::of(fine), words }
}
