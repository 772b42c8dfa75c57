//! `fornax bench --shapes`: decoding and loading at the sizes and in the formats that people use, in one go. The models are
//! random, made one after the other and removed again.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fornax::random_model::{Shape, Types, write_repeating};
use fornax::{Error, Fornax};
use serde::Serialize;

use super::args::Bench;
use super::bench::{Decode, LONG_PROMPT, Measured, PROMPT, contexts, named_shape, traffic};
use super::failure::Failure;
use super::interrupt::Interrupt;
use super::meter::{Meter, megabytes};
use super::{device, output};

const TYPES: [&str; 4] = ["bf16", "q8_0", "q4_k_m", "q6_k"];

/// What `--json` prints. Rates are bytes or tokens per second.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    /// As in the report of one model, measured with the first of them.
    memory_bytes_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    upload_bytes_per_second: Option<f64>,
    models: Vec<Model>,
}

#[derive(Debug, Serialize)]
struct Model {
    shape: &'static str,
    quant: &'static str,
    file_bytes: u64,
    /// The first time, kernels may have to be compiled.
    first_load_seconds: f64,
    load_seconds: f64,
    load_bytes_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    upload_rate_percent: Option<f64>,
    short: Decode,
    /// Where the context has room.
    #[serde(skip_serializing_if = "Option::is_none")]
    long: Option<Decode>,
}

/// Measures every shape in every type; what does not fit is refused with its numbers.
pub(crate) fn shapes(args: &Bench, names: &[String]) -> anyhow::Result<()> {
    let shapes = names.iter().map(|name| named_shape("--shapes", name));
    let shapes = shapes.collect::<Result<Vec<&Shape>, Failure>>()?;
    let interrupt = Interrupt::install()?;
    let folder = tempfile::Builder::new().prefix("fornax-bench-").tempdir_in(room(args.model.as_deref()));
    let folder = folder.map_err(|error| Failure::unwritable(&room(args.model.as_deref()), &error))?;
    let mut report: Option<Report> = None;
    for shape in shapes {
        for quant in TYPES {
            let path = folder.path().join(format!("{}-{quant}.gguf", shape.name));
            make(&path, (shape, quant), &interrupt)?;
            let model = measure(&path, (shape, quant), args, &interrupt, &mut report)?;
            if let Some(report) = &mut report {
                if !args.json {
                    let mut out = io::stdout().lock();
                    if report.models.is_empty() {
                        out.write_all(head(report)?.as_bytes())?;
                    }
                    out.write_all(line(&model)?.as_bytes())?;
                    out.flush()?;
                }
                report.models.push(model);
            }
            std::fs::remove_file(&path).map_err(|error| Failure::unwritable(&path, &error))?;
        }
    }
    match report {
        Some(report) if args.json => output::json(&report),
        _ => Ok(()),
    }
}

/// Where the files go: memory, where the system has a folder of it, so that no disk is measured.
fn room(folder: Option<&str>) -> PathBuf {
    let memory = Path::new("/dev/shm");
    match folder {
        Some(folder) => PathBuf::from(folder),
        None if memory.is_dir() => memory.to_owned(),
        None => std::env::temp_dir(),
    }
}

fn make(path: &Path, (shape, quant): (&Shape, &str), interrupt: &Interrupt) -> anyhow::Result<()> {
    let types = Types::named(quant).expect("a known type");
    let mut meter = Meter::new(Duration::from_secs(2));
    let written = interrupt.during(|| {
        write_repeating(path, shape, types, &mut |done, total| {
            meter.show("writing:", (done, total), &megabytes(done, total));
            if interrupt.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    });
    match written {
        Err(_) if interrupt.asked() => Err(Error::Cancelled.into()),
        written => Ok(written.map_err(|error| Failure::unwritable(path, &error))?),
    }
}

fn measure(
    path: &Path,
    (shape, quant): (&Shape, &'static str),
    args: &Bench,
    interrupt: &Interrupt,
    report: &mut Option<Report>,
) -> anyhow::Result<Model> {
    let [context, _] = contexts(path, &args.device, args.tokens)?;
    let options = || -> anyhow::Result<_> {
        Ok(device::options(path, &args.device)?.context(context).parallel(1).drafts(false))
    };
    let planned = options()?.plan()?;
    if !planned.plan.fits() {
        return Err(planned.refusal().into());
    }
    let open = || -> anyhow::Result<(Fornax, f64)> {
        let options = options()?;
        let started = Instant::now();
        Ok((device::open(options)?, started.elapsed().as_secs_f64()))
    };
    let (first, first_load_seconds) = open()?;
    drop(first);
    let (model, load_seconds) = open()?;
    let traffic = traffic(path)?;
    let mut bench = Measured { model: &model, interrupt, traffic, seed: 0 };
    let report = match report {
        Some(report) => report,
        None => {
            device::announce(model.device(), &args.device)?;
            let (memory_bytes_per_second, upload_bytes_per_second) = bench.rates()?;
            let device = model.kind().to_string();
            report.insert(Report {
                device,
                memory_bytes_per_second,
                upload_bytes_per_second,
                models: Vec::new(),
            })
        }
    };
    let memory = report.memory_bytes_per_second;
    interrupt.during(|| {
        // The first answer warms up: its steps are run and recorded.
        bench.decode(1, PROMPT, args.tokens, memory)?;
        let short = bench.decode(1, PROMPT, args.tokens, memory)?;
        let long = match model.context() >= LONG_PROMPT + args.tokens {
            true => Some(bench.decode(1, LONG_PROMPT, args.tokens, memory)?),
            false => None,
        };
        let load_bytes_per_second = traffic.file_bytes as f64 / load_seconds;
        Ok(Model {
            shape: shape.name,
            quant,
            file_bytes: traffic.file_bytes,
            first_load_seconds,
            load_seconds,
            load_bytes_per_second,
            upload_rate_percent: report
                .upload_bytes_per_second
                .map(|rate| 100.0 * load_bytes_per_second / rate),
            short,
            long,
        })
    })
}

fn head(report: &Report) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let memory = report.memory_bytes_per_second / 1e9;
    match report.upload_bytes_per_second {
        None => writeln!(out, "{}; memory read at {memory:.1} GB/s in this run", report.device)?,
        Some(upload) => writeln!(
            out,
            "{}; in this run memory copied at {memory:.0} GB/s, pinned memory sent to the device at {:.1} GB/s",
            report.device,
            upload / 1e9
        )?,
    }
    writeln!(
        out,
        "\n                       first    load        of    decode  GB/token        of  behind {LONG_PROMPT}        of"
    )?;
    writeln!(
        out,
        "                      load s       s    upload     tok/s              memory        tok/s    memory"
    )?;
    Ok(out)
}

fn line(model: &Model) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let name = format!("{} {}", model.shape, model.quant);
    let upload = model.upload_rate_percent.map_or(String::new(), |percent| format!("{percent:.1} %"));
    let percent = |decode: &Decode| format!("{:.1} %", decode.memory_rate_percent);
    writeln!(
        out,
        "{name:<20} {:>7.2} {:>7.2} {upload:>9} {:>9.1} {:>9.3} {:>9} {:>12} {:>9}",
        model.first_load_seconds,
        model.load_seconds,
        model.short.tokens_per_second,
        model.short.bytes_per_token / 1e9,
        percent(&model.short),
        model.long.as_ref().map_or(String::new(), |long| format!("{:.1}", long.tokens_per_second)),
        model.long.as_ref().map_or(String::new(), percent),
    )?;
    Ok(out)
}
