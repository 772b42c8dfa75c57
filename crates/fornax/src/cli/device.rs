//! From `--device` and its companions to an open model.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use fornax::{Activations, Code, Evaluator, Fornax, KvDType, OpenOptions};

use super::args::{self, DeviceArgs};
use super::failure::Failure;
use super::machine;
use super::meter::{Meter, megabytes};

/// Refuses every device but the CPU, by name. Nothing falls back to another device than the one asked for.
pub(crate) fn check(name: &str) -> Result<(), Failure> {
    match name {
        "auto" | "cpu" => Ok(()),
        _ if name.split(',').all(is_device) => Err(Failure::new(
            Code::DeviceUnavailable,
            format!("device {name} is not available: this build computes on the cpu only; use --device cpu"),
        )),
        _ => Err(Failure::usage(format!("--device {name:?} is no device; use auto or cpu"))),
    }
}

fn is_device(name: &str) -> bool {
    let (kind, index) = name.split_once(':').unwrap_or((name, "0"));
    matches!(kind, "cpu" | "cuda" | "hip") && index.parse::<u16>().is_ok()
}

/// The options that the flags stand for.
pub(crate) fn options(path: &Path, args: &DeviceArgs) -> anyhow::Result<OpenOptions> {
    check(&args.device)?;
    let mut options = OpenOptions::new(path).activations(match args.activations {
        args::Activations::Float => Activations::Float,
        args::Activations::Int8 => Activations::Integer,
    });
    if let Some(name) = &args.kv_dtype {
        options = options.kv_dtype(kv_dtype(name)?);
    }
    if let Some(context) = args.context {
        options = options.context(context);
    }
    if let Some(threads) = args.threads {
        options = options.threads(threads);
    }
    // What the machine has free is a limit too: beyond it everything else on the machine suffers.
    if let Some(limit) = args.memory_limit.or_else(machine::memory_available) {
        options = options.memory_limit(limit);
    }
    Ok(options)
}

/// Loads the model, showing progress where that takes a while.
pub(crate) fn open(options: OpenOptions) -> Result<Fornax, fornax::Error> {
    let mut meter = Meter::new(Duration::from_secs(2));
    options.open_with(&mut |done, total| meter.show("loading:", (done, total), &megabytes(done, total)))
}

/// Opens it for its logits alone, `rows` of them computed at once.
pub(crate) fn evaluator(options: OpenOptions, rows: usize) -> Result<Evaluator, fornax::Error> {
    let mut meter = Meter::new(Duration::from_secs(2));
    options.evaluator(rows, &mut |done, total| meter.show("loading:", (done, total), &megabytes(done, total)))
}

/// Says once what `auto` chose and why. Commands call it when nothing stands in the way of computing any more, so that
/// a refusal stays the only line.
pub(crate) fn announce(threads: usize, args: &DeviceArgs) -> io::Result<()> {
    if args.device != "auto" {
        return Ok(());
    }
    writeln!(io::stderr(), "device: cpu, {threads} threads (auto: this build has no other)")
}

fn kv_dtype(name: &str) -> Result<KvDType, Failure> {
    match name {
        "f32" => Ok(KvDType::F32),
        "f16" => Ok(KvDType::F16),
        "bf16" => Ok(KvDType::BF16),
        _ => Err(Failure::usage(format!(
            "--kv-dtype {name} is not available on the cpu; use f32, f16 or bf16"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_are_not_built_in_are_unavailable_and_others_are_misspelt() {
        let check = |name: &str, wanted: &str| {
            let got = super::check(name).err().map(|failure| failure.code().to_string()).unwrap_or_default();
            assert_eq!(got, wanted, "{name}");
        };
        check("auto", "");
        check("cpu", "");
        check("cuda:0", "DEVICE_UNAVAILABLE");
        check("cuda:0,cuda:1", "DEVICE_UNAVAILABLE");
        check("hip:0", "DEVICE_UNAVAILABLE");
        check("cuda:0,cpu", "DEVICE_UNAVAILABLE");
        check("gpu", "INVALID_INPUT");
        check("", "INVALID_INPUT");
    }

    #[test]
    fn kv_types_of_other_devices_are_refused_by_name() {
        assert_eq!(kv_dtype("bf16").unwrap(), KvDType::BF16);
        assert!(kv_dtype("q8_0").unwrap_err().to_string().contains("q8_0"));
        assert!(kv_dtype("fp8").unwrap_err().to_string().contains("fp8"));
    }
}
