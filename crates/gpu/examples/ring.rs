//! Times exact products mod 2^32 on a GPU, copies to and from the host included: `ring [DEVICE [KERNEL_FOLDER]]`. The
//! shapes are those of a model of 1.5B.

#![expect(clippy::print_stdout, reason = "an example talks to a person")]

use std::time::Instant;

use fornax_compute::Ring;
use fornax_gpu::{CudaRing, CudaRingOptions};

/// (rows, columns) of QKV, output, gate and up, down, head.
const SHAPES: [(usize, usize); 5] =
    [(2048, 1536), (1536, 1536), (17_920, 1536), (1536, 8960), (151_936, 1536)];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let device = args.next().map_or(Ok(0), |device| device.parse())?;
    let options = CudaRingOptions { device, memory_limit: None, kernel_folder: args.next().map(Into::into) };
    let ring = CudaRing::new(&options)?;
    println!("{:>8} {:>8} {:>6} {:>9} {:>9} {:>9}", "rows", "columns", "tokens", "us", "GB/s", "TOPS");
    for (rows, columns) in SHAPES {
        let weights: Vec<i8> = (0..rows * columns).map(|at| ((at * 7919) >> 3) as i8).collect();
        let matrix = ring.matrix(rows, columns, &weights)?;
        for tokens in [1, 8, 16, 512] {
            let x: Vec<u32> =
                (0..tokens * columns).map(|at| (at as u32).wrapping_mul(2_654_435_769)).collect();
            let mut out = vec![0; tokens * rows];
            let mut best = f64::MAX;
            for _ in 0..20 {
                let start = Instant::now();
                ring.multiply(&matrix, &x, tokens, &mut out)?;
                best = best.min(start.elapsed().as_secs_f64());
            }
            let operations = 2.0 * (rows * columns * tokens) as f64;
            println!(
                "{rows:>8} {columns:>8} {tokens:>6} {:>9.1} {:>9.1} {:>9.2}",
                best * 1e6,
                weights.len() as f64 / best / 1e9,
                operations / best / 1e12
            );
        }
    }
    Ok(())
}
