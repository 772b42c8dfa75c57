//! What belongs to one process.

use std::mem::forget;

/// The process that made something.
#[derive(Clone, Copy)]
pub(crate) struct Home(u32);

impl Home {
    /// This one.
    pub(crate) fn here() -> Home {
        Home(std::process::id())
    }

    /// Whether this is still it, and no child.
    pub(crate) fn is_here(self) -> bool {
        self.0 == std::process::id()
    }
}

/// Something that lives on threads. A child of `fork` has the memory and none of the threads: what is asked of them
/// there is never answered, and dropping it would wait for ever, so there it is out of reach and left alone.
pub(crate) struct Owned<T> {
    /// `None` only while it is dropped.
    value: Option<T>,
    home: Home,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Owned<T> {
        Owned { value: Some(value), home: Home::here() }
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
        self.home.is_here()
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            forget(self.value.take());
        }
    }
}
