//! The device against the scalar reference, operation by operation.

use std::io::{self, Write};

use fornax::{Code, Error};
use fornax_compute::conformance::{self, CaseResult, Op, Subject};
use fornax_compute::cpu::{Activations, Cpu, CpuOptions};

use super::failure::Failure;

/// Cases of one operation.
struct Count {
    op: Op,
    passed: usize,
    failed: usize,
    /// The largest error of a passed case.
    worst: f64,
}

/// Runs the suite in both activation modes and prints a table of each; fails if any case did.
pub(crate) fn conformance(out: &mut impl Write) -> anyhow::Result<()> {
    let mut failed = 0;
    for (name, activations) in [("float", Activations::Float), ("int8", Activations::Integer)] {
        let options = CpuOptions { activations, ..CpuOptions::default() };
        let simd = options.simd.name();
        writeln!(out, "\nconformance of cpu ({simd}, {name} activations)")?;
        writeln!(out, "  operation   passed  failed  worst error")?;
        for Count { op, passed, failed: bad, worst } in suite(options, out)? {
            writeln!(out, "  {op:<10} {passed:>7} {bad:>7}  {worst:.1e}")?;
            failed += bad;
        }
    }
    if failed > 0 {
        let message =
            format!("the cpu fails {failed} cases; its results cannot be trusted: report this output");
        return Err(Failure::new(Code::Internal, message).into());
    }
    Ok(())
}

/// Runs every case; failures are printed as they come.
fn suite(options: CpuOptions, out: &mut impl Write) -> anyhow::Result<Vec<Count>> {
    let cpu = Cpu::new(options).map_err(Error::from)?;
    let activations = cpu.options().activations;
    let subject = Subject { backend: &cpu, sizes: cpu.sizes(), activations, invariant: true };
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
    conformance::run(&subject, &mut on_case).map_err(Error::from)?;
    printed?;
    Ok(counts)
}
