//! The CPU backend passes the conformance suite, backends that are wrong on purpose do not, and the scalar reference
//! that the suite compares with is itself held against other people's code.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod experts;
mod golden;
mod mutants;

use fornax_compute::conformance::{self, Op, Report, Subject};
use fornax_compute::cpu::{Activations, Cpu, CpuOptions, Simd};

fn cpu(simd: Simd, activations: Activations, threads: usize) -> Cpu {
    Cpu::new(CpuOptions { simd, activations, threads, ..CpuOptions::default() }).unwrap()
}

/// Weights with other orders of sums on a device: a CPU has one order, and reading thousands of rows without vectors takes a
/// minute.
fn large(op: Op, case: &str) -> bool {
    op == Op::Invariance && case.contains("x512: ")
}

/// Judges a backend by the specification of its kind of activations.
fn report(cpu: &Cpu, simd: Simd, activations: Activations) -> Report {
    let subject = Subject { backend: cpu, sizes: cpu.sizes(), activations, invariant: true };
    let chosen = |op: Op, case: &str| simd != Simd::Scalar || !large(op, case);
    conformance::run_where(&chosen, &subject, &mut |_| ()).unwrap()
}

fn conforms(activations: Activations) {
    for simd in Simd::present() {
        for threads in [1, 2] {
            let report = report(&cpu(simd, activations, threads), simd, activations);
            let failed: Vec<String> = report.failed.iter().map(ToString::to_string).collect();
            assert!(report.conforms(), "{simd:?} {activations:?} {threads}:\n{}", failed.join("\n"));
            assert!(report.passed > 400, "only {} cases ran", report.passed);
        }
    }
}

#[test]
fn cpu_conforms_with_float_activations() {
    conforms(Activations::Float);
}

#[test]
fn cpu_conforms_with_integer_activations() {
    conforms(Activations::Integer);
}
