//! Devices by name, and the one place that knows which backend computes on each.
//!
//! A backend is an arm of [`Device::kind`] and a file beside this one, which says everything that differs: how the
//! device is described, what it takes and has free, how it is opened, what its conformance is held against. All else,
//! here and in the command line, is written once over [`Kind`] and [`Arm`](place::Arm).

mod cpu;
mod cuda;
mod place;
mod private;

use std::fmt;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fornax_compute::conformance::CaseResult;
use fornax_compute::cpu::{Activations, Watch};
use fornax_private::{Server, ServerOptions};

use crate::Error;
use crate::private::{Private, RingOptions};

pub use place::Loading;
pub(crate) use place::{Forward, Held, Place, Wish};
#[cfg(test)]
pub(crate) use {
    cpu::CpuArm,
    cuda::CudaArm,
    place::{Arm, planned},
};

/// A device, by the name that the user has for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU, as the driver counts them.
    Cuda(usize),
}

/// The devices of each kind by their number, in the order in which they are looked for.
const KINDS: [fn(usize) -> Device; 2] = [Device::Cuda, |_| Device::Cpu];

/// What the user decides about a backend.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// The model, for whoever reads it again.
    pub(crate) model: PathBuf,
    pub(crate) kernel_folder: Option<PathBuf>,
    pub(crate) context: Option<usize>,
    /// Free bytes of a device that is not looked at: for plans of one that is not here.
    pub(crate) assumed_bytes: Option<u64>,
    pub(crate) private: Option<Private>,
    pub(crate) activations: Activations,
    pub(crate) threads: Option<usize>,
    /// Where inputs of products are counted.
    pub(crate) watch: Option<Arc<Watch>>,
}

/// A kind of device: all that the program asks of one without knowing which it is.
trait Kind {
    /// What the user calls it.
    fn name(&self) -> &'static str;

    /// Whether a machine may have several, told apart by a number.
    fn is_numbered(&self) -> bool;

    /// What it is, in words, or what is missing to use it.
    fn describe(&self, ordinal: usize) -> Result<String, Error>;

    /// It as a place for models.
    fn place(&self, ordinal: usize, setup: &Setup) -> Box<dyn Place>;

    /// Serves one party's share of a model's exact products.
    fn serve_ring(&self, ordinal: usize, share: Share) -> Result<Server, Error>;

    /// Compares its operations with the reference: see [`Device::conformance`].
    fn conformance(
        &self,
        ordinal: usize,
        kernel_folder: Option<PathBuf>,
        only: &str,
        suite: &mut Suite<'_>,
    ) -> Result<(), Error>;

    /// Bytes that are free on it now; `None` where the caller knows better.
    fn free_bytes(&self, ordinal: usize) -> Result<Option<u64>, Error>;

    /// Measures how fast it is; `None` where the caller can do so himself.
    fn rates(&self, ordinal: usize, kernel_folder: Option<PathBuf>) -> Result<Option<DeviceRates>, Error>;
}

/// One party's share of a model's products.
struct Share {
    model: PathBuf,
    ring: RingOptions,
    listener: TcpListener,
    options: ServerOptions,
}

/// A suite of the conformance run: it is handed a title, and its cases to be called with what is told of each.
pub type Suite<'a> = dyn FnMut(&str, &mut Cases<'_>) + 'a;

/// Runs cases, telling of each.
pub type Cases<'a> = dyn FnMut(&mut dyn FnMut(&CaseResult)) + 'a;

/// How fast a device with memory of its own is, by measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceRates {
    /// Copying inside it: bytes read and bytes written together, in a second.
    pub copy: f64,
    /// Bytes a second from pinned memory of the host.
    pub host_to_device: f64,
    /// Multiplications and additions of its tensor cores in f16, in a second.
    pub matrix: f64,
}

impl Device {
    /// The one arm of a backend: its kind, and which of them.
    fn kind(self) -> (&'static dyn Kind, usize) {
        match self {
            Device::Cpu => (&cpu::Processor, 0),
            Device::Cuda(ordinal) => (&cuda::Nvidia, ordinal),
        }
    }

    /// The first of each kind of which a machine may have several, whether it is there or not.
    pub fn numbered() -> impl Iterator<Item = Device> {
        KINDS.iter().map(|device| device(0)).filter(|device| device.kind().0.is_numbered())
    }

    /// The device that is called so, whether it is there or not.
    pub fn named(name: &str) -> Option<Device> {
        let (kind, ordinal) = match name.split_once(':') {
            Some((kind, ordinal)) => (kind, Some(usize::from(ordinal.parse::<u16>().ok()?))),
            None => (name, None),
        };
        let devices = KINDS.iter().map(|device| device(ordinal.unwrap_or(0)));
        devices.map(|device| (device, device.kind().0)).find_map(|(device, found)| {
            (found.name() == kind && (found.is_numbered() || ordinal.is_none())).then_some(device)
        })
    }

    /// The first GPU that can be used, else the CPU; and why.
    pub fn auto() -> (Device, String) {
        let mut missing = String::new();
        for device in KINDS.iter().map(|device| device(0)).filter(|&device| device != Device::Cpu) {
            match device.describe() {
                Ok(words) => return (device, words),
                Err(error) => missing = error.to_string(),
            }
        }
        (Device::Cpu, missing)
    }

    /// What it is, in words, or what is missing to use it.
    pub fn describe(self) -> Result<String, Error> {
        let (kind, ordinal) = self.kind();
        kind.describe(ordinal)
    }

    /// Compares its operations with the scalar reference, those that `only` names, suite by suite.
    pub fn conformance(
        self,
        kernel_folder: Option<PathBuf>,
        only: &str,
        suite: &mut Suite<'_>,
    ) -> Result<(), Error> {
        let (kind, ordinal) = self.kind();
        kind.conformance(ordinal, kernel_folder, only, suite)
    }

    /// Measures a device that has memory of its own.
    pub fn rates(self, kernel_folder: Option<PathBuf>) -> Result<Option<DeviceRates>, Error> {
        let (kind, ordinal) = self.kind();
        kind.rates(ordinal, kernel_folder)
    }

    /// What its kind is called.
    pub(crate) fn kind_name(self) -> &'static str {
        self.kind().0.name()
    }

    /// Bytes that are free on it now; `None` where it has none of its own to ask for.
    pub fn free_bytes(self) -> Result<Option<u64>, Error> {
        let (kind, ordinal) = self.kind();
        kind.free_bytes(ordinal)
    }

    /// It as a place for a model.
    pub(crate) fn place(self, setup: &Setup) -> Box<dyn Place> {
        let (kind, ordinal) = self.kind();
        kind.place(ordinal, setup)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind() {
            (kind, ordinal) if kind.is_numbered() => write!(f, "{}:{ordinal}", kind.name()),
            (kind, _) => f.write_str(kind.name()),
        }
    }
}

/// Loads the matrices of the model at `path` on a device and serves one party's share of its products.
pub fn serve_private(
    path: &Path,
    device: Device,
    ring: RingOptions,
    listener: TcpListener,
    options: ServerOptions,
) -> Result<Server, Error> {
    let (kind, ordinal) = device.kind();
    kind.serve_ring(ordinal, Share { model: path.to_owned(), ring, listener, options })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_by_the_name_that_it_shows() {
        for device in [Device::Cpu, Device::Cuda(0), Device::Cuda(11)] {
            assert_eq!(Device::named(&device.to_string()), Some(device));
        }
        assert_eq!(Device::named("cuda"), Some(Device::Cuda(0)));
        for wrong in ["", "cpu:0", "cuda:", "cuda:x", "cuda:70000", "cuda:0,cuda:1", "gpu", "auto"] {
            assert_eq!(Device::named(wrong), None, "{wrong}");
        }
    }
}
