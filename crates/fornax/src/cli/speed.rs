//! How fast this machine reads its memory, which is what a token of an answer waits for.

use std::thread;
use std::time::Instant;

use fornax::Device;

/// Read by all threads together: far more than caches hold, and done in a fraction of a second.
const BYTES: usize = 256 << 20;

/// Rounds, of which the best counts: what else runs only ever slows one down.
const ROUNDS: usize = 3;

/// Bytes a second that the device reads, measured now; `None` where that cannot be.
pub(crate) fn bytes_per_second(device: Device) -> Option<f64> {
    match device {
        Device::Cpu => Some(memory()),
        // Copying counts what is read and what is written.
        _ => {
            let kernels = super::locate::cache_dir().ok().map(|cache| cache.join("kernels"));
            device.rates(kernels).ok().flatten().map(|rates| rates.copy)
        }
    }
}

fn memory() -> f64 {
    let threads = fornax::machine::cores().unwrap_or(1);
    let data = vec![1_u64; BYTES / size_of::<u64>()];
    let share = data.len().div_ceil(threads);
    let mut best: f64 = 0.0;
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let sum: u64 = thread::scope(|scope| {
            let sums: Vec<_> =
                data.chunks(share).map(|part| scope.spawn(move || part.iter().sum::<u64>())).collect();
            sums.into_iter().map(|sum| sum.join().unwrap_or_default()).sum()
        });
        // Looked at, so that nothing of it is left out.
        if std::hint::black_box(sum) == data.len() as u64 {
            best = best.max(BYTES as f64 / began.elapsed().as_secs_f64().max(1e-9));
        }
    }
    best
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_rate_is_that_of_a_memory() {
        let rate = super::memory();
        // From a tenth of the slowest memory to a hundred times the fastest.
        assert!((1e8..1e14).contains(&rate), "{rate}");
    }
}
