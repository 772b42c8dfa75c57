//! Jobs under way, by the names that a scheduler gave them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

/// All jobs under way. Bounded by the requests that are let in: a job leaves when its work does.
#[derive(Clone, Default)]
pub(crate) struct Jobs {
    /// Short accesses from many requests; there is nothing to wait for inside.
    running: Arc<Mutex<HashMap<String, watch::Sender<bool>>>>,
}

impl Jobs {
    /// Enters a job; `None` if one of that name is under way.
    pub(crate) fn enter(&self, id: &str) -> Option<(Entry, watch::Receiver<bool>)> {
        let mut running = self.lock();
        if running.contains_key(id) {
            return None;
        }
        let (sender, receiver) = watch::channel(false);
        running.insert(id.to_owned(), sender);
        Some((Entry { jobs: self.clone(), id: id.to_owned() }, receiver))
    }

    /// Cancels a job. One that is not there, or not there any more, is as cancelled as it can be.
    pub(crate) fn cancel(&self, id: &str) {
        if let Some(cancelled) = self.lock().get(id) {
            cancelled.send_replace(true);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, watch::Sender<bool>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A job's place. Dropping it makes the name free.
pub(crate) struct Entry {
    jobs: Jobs,
    id: String,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.jobs.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_job_at_a_time_and_cancelling_is_idempotent() {
        let jobs = Jobs::default();
        let (entry, cancelled) = jobs.enter("a").unwrap();
        assert!(jobs.enter("a").is_none());
        let (_other, other_cancelled) = jobs.enter("b").unwrap();
        jobs.cancel("a");
        jobs.cancel("a");
        jobs.cancel("unknown");
        assert!(*cancelled.borrow() && !*other_cancelled.borrow());
        drop(entry);
        jobs.cancel("a");
        let (_entry, cancelled) = jobs.enter("a").unwrap();
        assert!(!*cancelled.borrow());
        assert_eq!(jobs.lock().len(), 2);
    }
}
