//! What the device can do at most, measured: what other figures are shares of.

use std::path::PathBuf;

use fornax_compute::{Error, Purpose};

use crate::abi::Constant;
use crate::arena::Arena;
use crate::driver::{Arg, CUDA, Device, Event, Launch, Pinned};
use crate::program::{Key, Programs};

/// Larger than any cache of a device, several times: what is copied where there is room for it twice. Where a model has
/// taken most of the memory, it is less, but never less than is larger than a cache.
const COPY_MAX: usize = 1 << 30;
const COPY_MIN: usize = 128 << 20;
/// As the loader pins.
const PINNED_BYTES: usize = 64 << 20;
/// The first warms up; the best counts.
const ROUNDS: usize = 6;

/// Threads of a block of `rate.cu`, one block for each multiprocessor, and rounds of its loop: some milliseconds.
const THREADS: u32 = 256;
const MATRIX_ROUNDS: i32 = 4096;

pub(crate) const CONSTANTS: &[Constant] = &[Constant::new("rate.cu", "THREADS", THREADS as usize)];

/// Bytes or operations a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Of copying inside the device: bytes read and bytes written together.
    pub copy: f64,
    /// From pinned memory of the host to the device.
    pub host_to_device: f64,
    /// Multiplications and additions of the matrix units, f16 with sums in f32, from operands that are there already:
    /// more than any product of a model can have.
    pub matrix: f64,
}

/// How much is copied where this much memory is free: twice as much fits and leaves half.
fn copied_bytes(free: u64) -> usize {
    let fitting = usize::try_from(free / 4).unwrap_or(COPY_MAX);
    fitting.clamp(COPY_MIN, COPY_MAX) & !0xffff
}

/// Measures a device: takes up to two gigabytes of it for some milliseconds. The kernel that multiplies is kept in the
/// folder.
pub fn rates(ordinal: usize, kernel_folder: Option<PathBuf>) -> Result<Rates, Error> {
    let device = Device::open(&CUDA, ordinal)?;
    let arena = Arena::new(device.clone(), device.memory_free);
    let best = |body: &mut dyn FnMut() -> Result<(), Error>| -> Result<f64, Error> {
        let (start, end) = (Event::new(&device)?, Event::new(&device)?);
        let mut best = f32::MAX;
        for _ in 0..ROUNDS {
            start.record()?;
            body()?;
            end.record()?;
            end.wait("measure rates")?;
            best = best.min(end.since(&start)?);
        }
        Ok(f64::from(best) / 1e3)
    };
    let bytes = copied_bytes(device.memory_free);
    let piece = || arena.cut(Purpose::Workspace, bytes as u64);
    let (from, to) = (piece()?, piece()?);
    device.fill("measure rates", from.pointer(), 0x5a, bytes)?;
    let copied = best(&mut || device.copy("measure rates", to.pointer(), from.pointer(), bytes))?;
    let pinned = Pinned::new(&device, PINNED_BYTES)?;
    let sent = best(&mut || device.write_pinned("measure rates", to.pointer(), pinned.room()))?;

    let programs = Programs::new(&device, kernel_folder)?;
    let function = programs.function(&Key::plain("rate.cu"), "matrix_rate")?;
    let blocks = u32::try_from(device.abilities().multiprocessors).expect("a chip's");
    let args = [Arg::Pointer(to.pointer()), Arg::Int(MATRIX_ROUNDS)];
    let launch =
        Launch { function, grid: [blocks, 1, 1], block: THREADS, shared: 0, cluster: 1, args: &args };
    let multiplied = best(&mut || device.launch("measure rates", &launch))?;
    // As `rate.cu` says: two warpgroups of 64 x 256 x 64, or eight warps of sixteen times 16 x 8 x 16.
    let products = if device.abilities().wgmma { 2 * 64 * 256 * 64 } else { 8 * 16 * 16 * 8 * 16 };
    let operations = 2.0 * f64::from(products) * f64::from(MATRIX_ROUNDS) * f64::from(blocks);
    Ok(Rates {
        copy: 2.0 * bytes as f64 / copied,
        host_to_device: PINNED_BYTES as f64 / sent,
        matrix: operations / multiplied,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_measured_beside_a_model_that_left_little_memory() {
        assert_eq!(copied_bytes(140 << 30), COPY_MAX);
        // A mixture with room for 256 streams had left half a gigabyte.
        assert_eq!(copied_bytes(512 << 20), 128 << 20);
        assert_eq!(copied_bytes(0), COPY_MIN);
    }

    #[test]
    fn a_device_that_does_not_exist_is_refused_by_name() {
        let refused = rates(77, None).unwrap_err();
        assert!(
            matches!(&refused, Error::DeviceUnavailable { device, .. } if device == "cuda:77"),
            "{refused}"
        );
    }
}
