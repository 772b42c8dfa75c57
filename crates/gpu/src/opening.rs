//! A device that is opened ahead of its use. The driver takes some tenths of a second to make a context, which other
//! work can hide; and it would take them again each time that nothing holds the device between two uses.

use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;

use crate::driver::{CUDA, Device};

/// Holds a device open, from some time after [`begin`](Opening::begin) until it is dropped.
#[derive(Debug)]
pub struct Opening {
    /// Dropped to let the thread end.
    held: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Opening {
    /// Begins to open the device on its own thread. If that fails, the reason is reported to the next who opens it.
    pub fn begin(ordinal: usize) -> Opening {
        let (held, wait) = mpsc::channel();
        let open = move || {
            let device = Device::open(&CUDA, ordinal);
            // Nothing is ever sent: the wait ends when the other end is dropped.
            wait.recv().ok();
            drop(device);
        };
        let thread = std::thread::Builder::new().name("open-device".to_owned()).spawn(open);
        Opening { held: Some(held), thread: thread.ok() }
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.held.take();
        // There is nothing to report, and the process must not end while the driver is in the middle of a call.
        self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_when_it_is_dropped_whether_there_is_a_device_or_not() {
        for ordinal in [0, 77] {
            drop(Opening::begin(ordinal));
        }
    }
}
