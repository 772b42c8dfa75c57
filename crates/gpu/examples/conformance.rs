//! Runs the conformance suite on a GPU: `conformance [DEVICE [KERNEL_FOLDER [WORDS]]]`. Prints every failed case and a
//! table. WORDS names cases, as `fornax doctor --only` does: for tools that make everything slow. With WORDS each case
//! is printed as it ends.

#![expect(clippy::print_stdout, reason = "an example talks to a person")]

use std::collections::BTreeMap;
use std::time::Instant;

use fornax_compute::conformance::{self, CaseResult, Op, Reference, Report, Subject};
use fornax_compute::cpu::Activations;
use fornax_gpu::{Cuda, CudaOptions, CudaRing, CudaRingOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let device = args.next().map_or(Ok(0), |device| device.parse())?;
    let kernel_folder: Option<std::path::PathBuf> = args.next().map(Into::into);
    let words = args.next().unwrap_or_default();
    println!("{}", fornax_gpu::probe(device)?.words());
    println!("nvrtc {}", fornax_gpu::compiler()?);
    let started = Instant::now();
    let ring = CudaRingOptions { device, memory_limit: None, kernel_folder: kernel_folder.clone() };
    let ring = CudaRing::new(&ring)?;
    let cuda = Cuda::new(CudaOptions { device, kernel_folder, ..CudaOptions::default() })?;
    println!("opened in {:.2} s", started.elapsed().as_secs_f64());
    // (passed, failed, worst)
    let mut table: BTreeMap<String, (usize, usize, f64)> = BTreeMap::new();
    let mut shown = 0;
    let mut on_case = |result: &CaseResult| {
        let row = table.entry(result.op.to_string()).or_default();
        match &result.outcome {
            Ok(error) => {
                if !words.is_empty() {
                    println!("{result}");
                }
                row.0 += 1;
                row.2 = row.2.max(*error);
            }
            Err(_) => {
                row.1 += 1;
                shown += 1;
                if shown <= 60 {
                    println!("{result}");
                }
            }
        }
    };
    let reference = &Reference::new(Activations::Half)?;
    let subject = Subject { backend: &cuda, sizes: cuda.sizes(), reference, invariant: true };
    let chosen = |op: Op, case: &str| conformance::named(&words, op, case);
    let report = conformance::run_where(&chosen, &subject, &mut on_case);
    let exact = match chosen(Op::Ring, "") {
        true => conformance::run_ring(&ring, &mut on_case),
        false => Report::default(),
    };
    println!("operation   passed  failed  worst error");
    for (op, (passed, failed, worst)) in &table {
        println!("{op:<10} {passed:>7} {failed:>7}  {worst:.1e}");
    }
    println!(
        "{} passed, {} failed in {:.1} s",
        report.passed + exact.passed,
        report.failed.len() + exact.failed.len(),
        started.elapsed().as_secs_f64()
    );
    let failed = report.failed.len() + exact.failed.len();
    if failed == 0 { Ok(()) } else { Err("the device does not conform".into()) }
}
