//! What the device's memory can do at most, measured: what other figures are shares of.

use fornax_compute::{Error, Purpose};

use crate::arena::Arena;
use crate::driver::{Device, Event, Pinned};

/// Larger than any cache of a device, several times.
const COPY_BYTES: usize = 1 << 30;
/// As the loader pins.
const PINNED_BYTES: usize = 64 << 20;
/// The first warms up; the best counts.
const ROUNDS: usize = 6;

/// Bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Of copying inside the device: bytes read and bytes written together.
    pub copy: f64,
    /// From pinned memory of the host to the device.
    pub host_to_device: f64,
}

/// Measures a device: takes two gigabytes of it for some milliseconds.
pub fn rates(ordinal: usize) -> Result<Rates, Error> {
    let device = Device::open(ordinal)?;
    let arena = Arena::new(device.clone(), device.found.memory_free);
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
    let piece = || arena.cut(Purpose::Workspace, COPY_BYTES as u64);
    let (from, to) = (piece()?, piece()?);
    device.fill("measure rates", from.pointer(), 0x5a, COPY_BYTES)?;
    let copied = best(&mut || device.copy("measure rates", to.pointer(), from.pointer(), COPY_BYTES))?;
    let pinned = Pinned::new(&device, PINNED_BYTES)?;
    let sent = best(&mut || device.write_pinned("measure rates", to.pointer(), &pinned, 0, PINNED_BYTES))?;
    Ok(Rates { copy: 2.0 * COPY_BYTES as f64 / copied, host_to_device: PINNED_BYTES as f64 / sent })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_does_not_exist_is_refused_by_name() {
        let refused = rates(77).unwrap_err();
        assert!(
            matches!(&refused, Error::DeviceUnavailable { device, .. } if device == "cuda:77"),
            "{refused}"
        );
    }
}
