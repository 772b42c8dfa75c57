//! What belongs to one process.

use std::mem::forget;

/// Something that lives on threads. A child of `fork` has the memory and none of the threads: what is asked of them
/// there is never answered, and dropping it would wait for ever, so there it is out of reach and left alone.
pub(crate) struct Owned<T> {
    /// `None` only while it is dropped.
    value: Option<T>,
    process: u32,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Owned<T> {
        Owned { value: Some(value), process: std::process::id() }
    }

    /// It, in the process that made it.
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.is_here())
    }

    /// The same, to change it.
    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        let is_here = self.is_here();
        self.value.as_mut().filter(|_| is_here)
    }

    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            forget(self.value.take());
        }
    }
}
