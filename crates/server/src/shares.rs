//! Room that tenants share: turns to prepare, bytes of bodies.
//!
//! Whoever has nothing gets what is free. Whoever has something gets more only as long as that is no more than what is
//! then still free, so one tenant alone takes up to half and leaves the rest for whoever comes next. Among those who
//! wait tenants take turns. Requests without a tenant are all one tenant's and may take everything.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

use crate::front::keys::Tenant;

/// Something that there are so many units of.
pub(crate) struct Shares {
    units: usize,
    /// Held for as long as it takes to count.
    state: Mutex<State>,
}

struct State {
    free: usize,
    /// Those who have or want something; whose turn it is stands first.
    parts: VecDeque<Part>,
}

struct Part {
    tenant: Tenant,
    held: usize,
    waiting: VecDeque<Wish>,
}

struct Wish {
    units: usize,
    granted: oneshot::Sender<Share>,
}

/// Units that somebody has. Dropping it gives them back.
pub(crate) struct Share {
    shares: Arc<Shares>,
    tenant: Tenant,
    units: usize,
}

impl Shares {
    pub(crate) fn new(units: usize) -> Arc<Shares> {
        Arc::new(Shares { units, state: Mutex::new(State { free: units, parts: VecDeque::new() }) })
    }

    /// How many there are, of everybody's.
    pub(crate) fn units(&self) -> usize {
        self.units
    }

    /// Waits for this many units, which must not be more than there are. Whoever stops waiting is forgotten.
    pub(crate) async fn take(self: &Arc<Shares>, tenant: &Tenant, units: usize) -> Share {
        let (granted, grant) = oneshot::channel();
        let grants = {
            let mut state = self.lock();
            state.part(tenant).waiting.push_back(Wish { units, granted });
            self.grants(&mut state)
        };
        hand_over(grants);
        grant.await.expect("wishes are granted or wait as long as there are shares")
    }

    /// So many units, if they can be had at once.
    pub(crate) fn try_take(self: &Arc<Shares>, tenant: &Tenant, units: usize) -> Option<Share> {
        let (granted, mut grant) = oneshot::channel();
        let grants = {
            let mut state = self.lock();
            state.part(tenant).waiting.push_back(Wish { units, granted });
            self.grants(&mut state)
        };
        hand_over(grants);
        // What was not granted is not waited for.
        grant.try_recv().ok()
    }

    /// Everything that can be granted now.
    fn grants(self: &Arc<Shares>, state: &mut State) -> Vec<(oneshot::Sender<Share>, Share)> {
        let mut grants = Vec::new();
        while let Some((tenant, wish)) = state.next() {
            let share = Share { shares: Arc::clone(self), tenant, units: wish.units };
            grants.push((wish.granted, share));
        }
        grants
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Outside the lock: what nobody waits for any more is given back at once, which takes the lock.
fn hand_over(grants: Vec<(oneshot::Sender<Share>, Share)>) {
    for (granted, share) in grants {
        drop(granted.send(share));
    }
}

impl State {
    fn part(&mut self, tenant: &Tenant) -> &mut Part {
        let index = self.parts.iter().position(|part| part.tenant == *tenant).unwrap_or_else(|| {
            self.parts.push_back(Part { tenant: tenant.clone(), held: 0, waiting: VecDeque::new() });
            self.parts.len() - 1
        });
        &mut self.parts[index]
    }

    /// The next wish that can be granted; its tenant then goes behind the others.
    fn next(&mut self) -> Option<(Tenant, Wish)> {
        for index in 0..self.parts.len() {
            let free = self.free;
            let part = &mut self.parts[index];
            part.waiting.retain(|wish| !wish.granted.is_closed());
            let Some(units) = part.waiting.front().map(|wish| wish.units) else { continue };
            if part.tenant.is_some() && part.held > 0 && part.held + units > free {
                continue;
            }
            if units > free {
                // Its turn: whatever is given back is kept for it, or small wishes would pass it for ever.
                return None;
            }
            let wish = part.waiting.pop_front()?;
            part.held += units;
            self.free -= units;
            let part = self.parts.remove(index)?;
            let tenant = part.tenant.clone();
            self.parts.push_back(part);
            return Some((tenant, wish));
        }
        self.parts.retain(|part| part.held > 0 || !part.waiting.is_empty());
        None
    }
}

impl fmt::Debug for Share {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Share").field("units", &self.units).finish_non_exhaustive()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let grants = {
            let mut state = self.shares.lock();
            state.free += self.units;
            state.part(&self.tenant).held -= self.units;
            self.shares.grants(&mut state)
        };
        hand_over(grants);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        pin::{Pin, pin},
        task::{Context, Poll, Waker},
    };

    use super::*;

    fn tenant(name: &str) -> Tenant {
        Some(name.into())
    }

    fn now<T>(future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn one_tenant_leaves_half_and_all_together_have_everything() {
        let shares = Shares::new(8);
        let take = |name: &str| {
            let tenant = tenant(name);
            now(pin!(shares.take(&tenant, 1)))
        };
        let a: Vec<Share> = (0..8).map_while(|_| take("a")).collect();
        let b: Vec<Share> = (0..8).map_while(|_| take("b")).collect();
        assert_eq!((a.len(), b.len()), (4, 2));
        assert!(take("c").is_some(), "there is room for whoever has nothing");
        drop((a, b));
        let everything: Vec<Share> = (0..9).map_while(|_| now(pin!(shares.take(&None, 1)))).collect();
        assert_eq!(everything.len(), 8, "whoever is alone has everything, and nothing was lost");
    }

    #[test]
    fn tenants_take_turns_and_large_wishes_are_not_passed_for_ever() {
        let shares = Shares::new(4);
        let mut held = vec![now(pin!(shares.take(&None, 4))).unwrap()];
        let (a, b) = (tenant("a"), tenant("b"));
        let mut first = Box::pin(shares.take(&a, 1));
        let mut second = Box::pin(shares.take(&a, 1));
        let mut large = Box::pin(shares.take(&b, 3));
        assert!(now(first.as_mut()).is_none() && now(second.as_mut()).is_none());
        assert!(now(large.as_mut()).is_none());
        held.clear();
        let (first, large) = (now(first.as_mut()).unwrap(), now(large.as_mut()).unwrap());
        assert!(now(second.as_mut()).is_none(), "the other one's turn came first");
        drop(large);
        let second = now(second.as_mut()).unwrap();
        // Room is kept for a large wish whose turn it is; once it is gone, others go on.
        let mut whole = Box::pin(shares.take(&b, 4));
        assert!(now(whole.as_mut()).is_none());
        let c = tenant("c");
        let mut small = Box::pin(shares.take(&c, 1));
        assert!(now(small.as_mut()).is_none());
        drop(whole);
        drop(first);
        assert!(now(small.as_mut()).is_some());
        drop(second);
    }
}
