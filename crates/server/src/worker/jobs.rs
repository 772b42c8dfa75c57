//! Jobs under way, by the names that a scheduler gave them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

use crate::front::keys::Tenant;

/// A job's name among those of its tenant.
type Name = (Tenant, String);

/// All jobs under way. Bounded by the requests that are let in: a job leaves when its work does.
#[derive(Clone, Default)]
pub(crate) struct Jobs {
    /// Short accesses from many requests; there is nothing to wait for inside.
    running: Arc<Mutex<HashMap<Name, watch::Sender<bool>>>>,
}

impl Jobs {
    /// Enters a job; `None` if one of that name is under way.
    pub(crate) fn enter(&self, tenant: &Tenant, id: &str) -> Option<(Entry, watch::Receiver<bool>)> {
        let name = (tenant.clone(), id.to_owned());
        let mut running = self.lock();
        if running.contains_key(&name) {
            return None;
        }
        let (sender, receiver) = watch::channel(false);
        running.insert(name.clone(), sender);
        Some((Entry { jobs: self.clone(), name }, receiver))
    }

    /// Cancels a job. One that is not there, or not there any more, is as cancelled as it can be.
    pub(crate) fn cancel(&self, tenant: &Tenant, id: &str) {
        if let Some(cancelled) = self.lock().get(&(tenant.clone(), id.to_owned())) {
            cancelled.send_replace(true);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Name, watch::Sender<bool>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A job's place. Dropping it makes the name free.
pub(crate) struct Entry {
    jobs: Jobs,
    name: Name,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.jobs.lock().remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_job_at_a_time_and_cancelling_is_idempotent() {
        let (jobs, tenant, other) = (Jobs::default(), Some("ours".into()), Some("theirs".into()));
        let (entry, cancelled) = jobs.enter(&tenant, "a").unwrap();
        assert!(jobs.enter(&tenant, "a").is_none());
        let (_other, other_cancelled) = jobs.enter(&tenant, "b").unwrap();
        jobs.cancel(&tenant, "a");
        jobs.cancel(&tenant, "a");
        jobs.cancel(&tenant, "unknown");
        // Another's job may have the same name, and is another job.
        let (_theirs, theirs_cancelled) = jobs.enter(&other, "b").unwrap();
        jobs.cancel(&other, "b");
        assert!(*theirs_cancelled.borrow());
        assert!(*cancelled.borrow() && !*other_cancelled.borrow());
        drop(entry);
        jobs.cancel(&tenant, "a");
        let (_entry, cancelled) = jobs.enter(&tenant, "a").unwrap();
        assert!(!*cancelled.borrow());
        assert_eq!(jobs.lock().len(), 3);
    }
}
