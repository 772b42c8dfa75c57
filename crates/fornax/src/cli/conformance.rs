//! The device against the scalar reference, operation by operation.

use std::io::{self, Write};

use fornax::{Code, Device, Error};
use fornax_compute::conformance::{self, CaseResult, Op, Reference, Report, Subject};
use fornax_compute::cpu::{Activations, Cpu, CpuOptions, CpuRing, CpuRingOptions};
use fornax_gpu::{Cuda, CudaOptions, CudaRing, CudaRingOptions};

use super::failure::Failure;

/// Cases of one operation.
struct Count {
    op: Op,
    passed: usize,
    failed: usize,
    /// The largest error of a passed case.
    worst: f64,
}

/// Runs the suite, or the cases that `only` names, on a device, on the CPU in both activation modes, and prints a table of
/// each; fails if any case did.
pub(crate) fn conformance(device: Device, only: &str, out: &mut impl Write) -> anyhow::Result<()> {
    let mut failed = 0;
    let chosen = |op: Op, case: &str| conformance::named(only, op, case);
    let exact = chosen(Op::Ring, "");
    match device {
        Device::Cpu => {
            for (name, activations) in [("float", Activations::Float), ("int8", Activations::Integer)] {
                let options = CpuOptions { activations, ..CpuOptions::default() };
                writeln!(out, "\nconformance of cpu ({}, {name} activations)", options.simd.name())?;
                let cpu = Cpu::new(options).map_err(Error::from)?;
                let reference = &Reference::new(activations).map_err(Error::from)?;
                let subject = Subject { backend: &cpu, sizes: cpu.sizes(), reference, invariant: true };
                failed += suite(out, |on_case| conformance::run_where(&chosen, &subject, on_case))?;
            }
            if exact {
                writeln!(out, "\nexact products mod 2^32 of {device}")?;
                let ring = CpuRing::new(&CpuRingOptions::default()).map_err(Error::from)?;
                failed += suite(out, |on_case| conformance::run_ring(&ring, on_case))?;
            }
        }
        Device::Cuda(ordinal) => {
            let kernel_folder = super::locate::cache_dir().ok().map(|cache| cache.join("kernels"));
            let folder = kernel_folder.clone();
            let options = CudaOptions { device: ordinal, kernel_folder, ..CudaOptions::default() };
            writeln!(out, "\nconformance of {device} (half activations)")?;
            let cuda = Cuda::new(options).map_err(Error::from)?;
            let reference = &Reference::new(Activations::Half).map_err(Error::from)?;
            let subject = Subject { backend: &cuda, sizes: cuda.sizes(), reference, invariant: true };
            failed += suite(out, |on_case| conformance::run_where(&chosen, &subject, on_case))?;
            if exact {
                writeln!(out, "\nexact products mod 2^32 of {device}")?;
                let options = CudaRingOptions { device: ordinal, memory_limit: None, kernel_folder: folder };
                let ring = CudaRing::new(&options).map_err(Error::from)?;
                failed += suite(out, |on_case| conformance::run_ring(&ring, on_case))?;
            }
        }
    }
    if failed > 0 {
        let message =
            format!("{device} fails {failed} cases; its results cannot be trusted: report this output");
        return Err(Failure::new(Code::Internal, message).into());
    }
    Ok(())
}

/// Runs cases and prints a table; failures are printed as they come. How many there were.
fn suite(
    out: &mut impl Write,
    run: impl FnOnce(&mut dyn FnMut(&CaseResult)) -> Report,
) -> anyhow::Result<usize> {
    writeln!(out, "  operation   passed  failed  worst error")?;
    let mut counts: Vec<Count> = Vec::new();
    let mut printed: io::Result<()> = Ok(());
    let mut on_case = |result: &CaseResult| {
        let at = counts.iter().position(|count| count.op == result.op).unwrap_or_else(|| {
            counts.push(Count { op: result.op, passed: 0, failed: 0, worst: 0.0 });
            counts.len() - 1
        });
        match result.outcome {
            Ok(error) => {
                counts[at].passed += 1;
                counts[at].worst = counts[at].worst.max(error);
            }
            Err(_) => {
                counts[at].failed += 1;
                if printed.is_ok() {
                    printed = writeln!(out, "  {result}");
                }
            }
        }
    };
    run(&mut on_case);
    printed?;
    let mut total = 0;
    for Count { op, passed, failed, worst } in counts {
        writeln!(out, "  {op:<10} {passed:>7} {failed:>7}  {worst:.1e}")?;
        total += failed;
    }
    Ok(total)
}
