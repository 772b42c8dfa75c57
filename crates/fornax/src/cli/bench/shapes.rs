//! `fornax bench --shapes`: the sizes and formats that people use, in one go. The models are random, made one after the
//! other and removed again.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fornax::Error;
use fornax::random_model::{Shape, Types, write_repeating};
use serde::Serialize;

use super::args::Bench;
use super::load::Clients;
use super::measured::{Figures, Inside, Rates, Setup, Traffic};
use super::{DeviceReport, Load, figures, named_shape, named_types, options};
use crate::cli::failure::Failure;
use crate::cli::interrupt::Interrupt;
use crate::cli::meter::{Meter, megabytes};
use crate::cli::{device, output};

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    /// Measured with the first of the models.
    #[serde(flatten)]
    device: DeviceReport,
    models: Vec<Model>,
}

#[derive(Debug, Serialize)]
struct Model {
    shape: &'static str,
    quant: String,
    /// The first time, kernels may have to be compiled.
    first_load_seconds: f64,
    load: Load,
    #[serde(flatten)]
    figures: Figures,
}

/// Measures every shape in every type; what does not fit is refused with its numbers.
pub(crate) fn shapes(
    args: &Bench,
    names: &[String],
    setup: &Setup,
    clients: &Clients,
    interrupt: &Interrupt,
) -> anyhow::Result<()> {
    let shapes = names.iter().map(|name| named_shape("--shapes", name));
    let shapes = shapes.collect::<Result<Vec<&Shape>, Failure>>()?;
    let types = args.types.iter().map(|name| Ok((name.to_lowercase(), named_types("--types", name)?)));
    let types = types.collect::<Result<Vec<(String, Types)>, Failure>>()?;
    let folder = tempfile::Builder::new().prefix("fornax-bench-").tempdir_in(room(args.model.as_deref()));
    let folder = folder.map_err(|error| Failure::unwritable(&room(args.model.as_deref()), &error))?;
    let mut report: Option<Report> = None;
    for shape in shapes {
        for (quant, types) in &types {
            let path = folder.path().join(format!("{}-{quant}.gguf", shape.name));
            make(&path, (shape, *types), interrupt)?;
            let device = report.as_ref().map(|report| report.device.rates);
            let (device, model) = measure(&path, (shape, quant), args, (setup, clients, interrupt), device)?;
            std::fs::remove_file(&path).map_err(|error| Failure::unwritable(&path, &error))?;
            let is_first = report.is_none();
            let report = report.get_or_insert(Report { device, models: Vec::new() });
            if !args.output.json {
                let mut out = io::stdout().lock();
                if is_first {
                    out.write_all(report.device.words().as_bytes())?;
                }
                out.write_all(block(&model)?.as_bytes())?;
                out.flush()?;
            }
            report.models.push(model);
        }
    }
    match report {
        Some(report) if args.output.json => output::json(&report),
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

fn make(path: &Path, (shape, types): (&Shape, Types), interrupt: &Interrupt) -> anyhow::Result<()> {
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

/// `rates` are those of an earlier model, where there is one.
fn measure(
    path: &Path,
    (shape, quant): (&Shape, &str),
    args: &Bench,
    (setup, clients, interrupt): (&Setup, &Clients, &Interrupt),
    rates: Option<Rates>,
) -> anyhow::Result<(DeviceReport, Model)> {
    let options = options(path, args, setup)?;
    let started = Instant::now();
    drop(device::open(options.clone())?);
    let first_load_seconds = started.elapsed().as_secs_f64();
    let (model, taken) = device::open_timed(options)?;
    let rates = match rates {
        Some(rates) => rates,
        None => {
            device::announce(model.device(), &args.device)?;
            Rates::measure(&model)?
        }
    };
    let inside = Inside { model: &model, traffic: Traffic::of(path, &model)?, rates };
    let load = Load::of(taken, &inside);
    let figures = figures(args, setup, inside, clients, interrupt)?;
    let report = DeviceReport::of(&model, args, rates);
    let model = Model { shape: shape.name, quant: quant.to_owned(), first_load_seconds, load, figures };
    Ok((report, model))
}

fn block(model: &Model) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let Model { shape, quant, first_load_seconds, load, figures } = model;
    write!(out, "\n{shape} {quant}: first loaded in {first_load_seconds:.2} s, then {}", load.words())?;
    out.push_str(&figures.table()?);
    Ok(out)
}
