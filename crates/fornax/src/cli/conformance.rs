//! The device against the scalar reference, operation by operation.

use std::io::{self, Write};

use fornax::{Cases, Code, Device};
use fornax_compute::conformance::{CaseResult, Op};

use super::failure::Failure;

/// Cases of one operation.
struct Count {
    op: Op,
    passed: usize,
    failed: usize,
    /// The largest error of a passed case.
    worst: f64,
}

/// Runs the suite, or the cases that `only` names, on a device, and prints a table of each part; fails if any case did.
pub(crate) fn conformance(device: Device, only: &str, out: &mut impl Write) -> anyhow::Result<()> {
    let kernel_folder = super::locate::cache_dir().ok().map(|cache| cache.join("kernels"));
    let mut failed = 0;
    let mut printed = Ok(());
    device.conformance(kernel_folder, only, &mut |title, cases| {
        if printed.is_ok() {
            printed = suite(out, title, cases).map(|count| failed += count);
        }
    })?;
    printed?;
    if failed > 0 {
        let message =
            format!("{device} fails {failed} cases; its results cannot be trusted: report this output");
        return Err(Failure::new(Code::Internal, message).into());
    }
    Ok(())
}

/// Runs cases and prints a table; failures are printed as they come. How many there were.
fn suite(out: &mut impl Write, title: &str, cases: &mut Cases<'_>) -> io::Result<usize> {
    writeln!(out, "\n{title}")?;
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
    cases(&mut on_case);
    printed?;
    let mut total = 0;
    for Count { op, passed, failed, worst } in counts {
        writeln!(out, "  {op:<10} {passed:>7} {failed:>7}  {worst:.1e}")?;
        total += failed;
    }
    Ok(total)
}
