//! A device opened ahead of whoever will use it: the driver takes some tenths of a second to make a context, while
//! other things are read, and each time again where nobody holds it between two who look at it.

use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;

use crate::driver::{CUDA, Device};

/// Holds a device open, from some time after [`begin`](Opening::begin) until it is dropped.
#[derive(Debug)]
pub struct Opening {
    /// Dropped to let the thread go.
    held: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Opening {
    /// Begins to open the device, on a thread of its own. Why it cannot be opened is told to whoever opens it himself.
    pub fn begin(ordinal: usize) -> Opening {
        let (held, wait) = mpsc::channel();
        let open = move || {
            let device = Device::open(&CUDA, ordinal);
            // Nothing is ever sent: it ends when the other end is dropped.
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
        // It has nothing to tell, and the driver must not be left in the midst of a call at the end of the process.
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
