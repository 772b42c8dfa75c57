//! The CPU backend passes the conformance suite, backends that are wrong on purpose do not, and the scalar reference
//! that the suite compares with is itself held against other people's code.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]
#![expect(clippy::print_stdout, reason = "says what ran, with --nocapture")]

mod experts;
mod golden;
mod mutants;

use fornax_compute::conformance::{self, Op, Reference, Report, Subject};
use fornax_compute::cpu::{Activations, Cpu, CpuOptions, Simd};

fn cpu(simd: Simd, activations: Activations, threads: usize) -> Cpu {
    Cpu::new(CpuOptions { simd, activations, threads, ..CpuOptions::default() }).unwrap()
}

/// Weights with other orders of sums on a device: a CPU has one order, and reading thousands of rows without vectors,
/// or under an emulator, takes minutes. The fastest level has them, once.
fn large(op: Op, case: &str) -> bool {
    let rows = |word: &str| word.split_once('x').and_then(|(rows, _)| rows.parse().ok());
    op == Op::Invariance && case.split(' ').filter_map(rows).any(|rows: usize| rows >= 1000)
}

/// Judges a backend by the specification of its kind of activations.
fn report(cpu: &Cpu, reference: &Reference, has_large: bool) -> Report {
    let subject = Subject { backend: cpu, sizes: cpu.sizes(), reference, invariant: true };
    let chosen = |op: Op, case: &str| has_large || !large(op, case);
    conformance::run_where(&chosen, &subject, &mut |_| ())
}

/// Levels to run, by their names, where not all of them are wanted: an emulator makes everything slow.
const LEVELS: &str = "FORNAX_TEST_LEVELS";

fn conforms(activations: Activations) {
    let named = std::env::var(LEVELS).ok();
    let wanted =
        |simd: &Simd| named.as_ref().is_none_or(|names| names.split(',').any(|name| name == simd.name()));
    // All of them on one thread and on two, some of them on two.
    let threads: &[usize] = if named.is_some() { &[2] } else { &[1, 2] };
    let reference = Reference::new(activations).unwrap();
    for simd in Simd::present().filter(wanted) {
        for &threads in threads {
            let fastest = simd == Simd::detect() && threads == 2 && named.is_none();
            let report = report(&cpu(simd, activations, threads), &reference, fastest);
            let failed: Vec<String> = report.failed.iter().map(ToString::to_string).collect();
            assert!(report.conforms(), "{simd:?} {activations:?} {threads}:\n{}", failed.join("\n"));
            assert!(report.passed > 400, "only {} cases ran", report.passed);
            println!("conforms: {} {activations:?} {} cases", simd.name(), report.passed);
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
