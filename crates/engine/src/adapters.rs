//! Adapters that come and go while the engine runs: by what number requests name them, and in which place they lie.
//!
//! A number is given once. So a request that was let in keeps its adapter whatever is loaded after it, and pages that
//! one adapter has computed are never found by another that was given its place: the prefix cache knows the number.

use std::sync::mpsc;

use fornax_model::{Adapter, AdapterRoom};

use crate::{event::Failure, request::Refusal};

/// What is to be done between two steps.
pub(crate) enum AdapterChange {
    Load {
        adapter: Box<Adapter>,
        /// Told its number. A sender that is gone says that the engine is.
        told: mpsc::SyncSender<Result<u32, AdapterRefusal>>,
    },
    Unload {
        number: u32,
    },
}

/// Why an adapter cannot be loaded now.
#[derive(Debug, thiserror::Error)]
pub enum AdapterRefusal {
    /// All places are taken.
    #[error(
        "there is room for {places} adapters beside those of the start, and {taken} are loaded; unload one first"
    )]
    Full {
        /// Places for adapters that come later.
        places: usize,
        /// Those that are taken.
        taken: usize,
    },
    /// All places are taken, some by adapters that were unloaded and that requests still use.
    #[error(
        "there is room for {places} adapters beside those of the start; {leaving} were unloaded and are used by requests \
         under way"
    )]
    Leaving {
        /// Places for adapters that come later.
        places: usize,
        /// Those that will be free.
        leaving: usize,
    },
    /// It cannot be had, or is not for this model.
    #[error(transparent)]
    Unfit(#[from] fornax_model::Error),
    /// The device did not take it.
    #[error(transparent)]
    Failed(Failure),
    /// The engine takes nothing any more.
    #[error(transparent)]
    Engine(#[from] Refusal),
}

/// The places behind the adapters that the runner was made with.
pub(crate) struct Adapters {
    /// Adapters that the runner was made with: their numbers are their places.
    fixed: u32,
    places: Vec<Option<Loaded>>,
    next: u32,
}

struct Loaded {
    number: u32,
    /// Whether it was unloaded, and stays for the requests that have it.
    leaving: bool,
}

impl Adapters {
    pub(crate) fn new(fixed: u32, room: AdapterRoom) -> Adapters {
        Adapters { fixed, places: (0..room.adapters).map(|_| None).collect(), next: fixed }
    }

    /// The place of an adapter by its number.
    pub(crate) fn place(&self, number: u32) -> u32 {
        if number < self.fixed {
            return number;
        }
        let at = self.places.iter().position(|loaded| loaded.as_ref().is_some_and(|it| it.number == number));
        self.device_place(at.expect("an adapter stays as long as a request has it"))
    }

    /// A place that nobody has, or why there is none.
    pub(crate) fn free(&self) -> Result<usize, AdapterRefusal> {
        let places = self.places.len();
        self.places.iter().position(Option::is_none).ok_or_else(|| {
            match self.places.iter().flatten().filter(|loaded| loaded.leaving).count() {
                0 => AdapterRefusal::Full { places, taken: places },
                leaving => AdapterRefusal::Leaving { places, leaving },
            }
        })
    }

    /// A place as the runner counts.
    pub(crate) fn device_place(&self, at: usize) -> u32 {
        self.fixed + u32::try_from(at).expect("a command line says how many")
    }

    /// An adapter lies there from now on. Its number.
    pub(crate) fn loaded(&mut self, at: usize) -> u32 {
        let number = self.next;
        self.next = number.checked_add(1).expect("nobody loads four thousand million adapters");
        self.places[at] = Some(Loaded { number, leaving: false });
        number
    }

    /// It goes as soon as no request has it.
    pub(crate) fn leave(&mut self, number: u32) {
        for loaded in self.places.iter_mut().flatten().filter(|loaded| loaded.number == number) {
            loaded.leaving = true;
        }
    }

    /// A place whose adapter was unloaded and has no requests any more.
    pub(crate) fn left(&self, has_requests: impl Fn(u32) -> bool) -> Option<usize> {
        let left = |loaded: &Loaded| loaded.leaving && !has_requests(loaded.number);
        self.places.iter().position(|loaded| loaded.as_ref().is_some_and(left))
    }

    /// Nothing lies there any more.
    pub(crate) fn cleared(&mut self, at: usize) {
        self.places[at] = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_given_once_and_a_place_is_free_when_nobody_has_its_adapter() {
        let mut adapters = Adapters::new(2, AdapterRoom { adapters: 2, rank: 8 });
        assert_eq!((adapters.place(0), adapters.place(1)), (0, 1));
        let load = |adapters: &mut Adapters| {
            let at = adapters.free().unwrap();
            adapters.loaded(at)
        };
        let (first, second) = (load(&mut adapters), load(&mut adapters));
        assert_eq!((first, second), (2, 3));
        assert_eq!((adapters.place(first), adapters.place(second)), (2, 3));
        assert!(matches!(adapters.free(), Err(AdapterRefusal::Full { places: 2, taken: 2 })));
        adapters.leave(first);
        assert_eq!(adapters.left(|number| number == first), None, "a request has it");
        assert!(matches!(adapters.free(), Err(AdapterRefusal::Leaving { places: 2, leaving: 1 })));
        assert_eq!(adapters.place(first), 2);
        let at = adapters.left(|_| false).unwrap();
        adapters.cleared(at);
        let third = load(&mut adapters);
        assert_eq!((third, adapters.place(third)), (4, 2), "another number in the same place");
    }
}
