//! Who is connected: how many of one address, how many that have opened a session, and how many that have said nothing
//! yet. Only sessions count as sessions, so that sockets without one shut nobody out.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Connections without a session, for each session that there may be. Each has a thread until its deadline.
const WAITING_PER_SESSION: usize = 4;

/// The connections of a server.
pub(crate) struct Crowd {
    sessions_max: usize,
    per_address_max: usize,
    count: Mutex<Count>,
}

#[derive(Default)]
struct Count {
    sessions: usize,
    waiting: usize,
    by_address: HashMap<IpAddr, usize>,
}

impl Crowd {
    pub(crate) fn new(sessions_max: usize, per_address_max: usize) -> Crowd {
        Crowd { sessions_max, per_address_max, count: Mutex::default() }
    }

    /// A place for a connection of that address; `None` where it may not have one.
    pub(crate) fn enter(self: &Arc<Crowd>, address: IpAddr) -> Option<Place> {
        let address = network(address);
        let mut count = self.lock();
        let own = count.by_address.get(&address).copied().unwrap_or(0);
        if own >= self.per_address_max || count.waiting >= WAITING_PER_SESSION * self.sessions_max.max(8) {
            return None;
        }
        count.waiting += 1;
        count.by_address.insert(address, own + 1);
        Some(Place { crowd: Arc::clone(self), address, has_session: false })
    }

    pub(crate) fn sessions(&self) -> usize {
        self.lock().sessions
    }

    pub(crate) fn connections(&self) -> usize {
        let count = self.lock();
        count.sessions + count.waiting
    }

    fn lock(&self) -> MutexGuard<'_, Count> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who has one address of a network of IPv6 has all of its /64.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
    }
}

/// A connection's place, given back when it is dropped.
pub(crate) struct Place {
    crowd: Arc<Crowd>,
    address: IpAddr,
    has_session: bool,
}

impl Place {
    /// Counts as a session from here on; whether it may. A connection's second session takes the place of its first.
    pub(crate) fn open_session(&mut self) -> bool {
        let mut count = self.crowd.lock();
        if !self.has_session && count.sessions < self.crowd.sessions_max {
            count.sessions += 1;
            count.waiting -= 1;
            self.has_session = true;
        }
        self.has_session
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut count = self.crowd.lock();
        if self.has_session {
            count.sessions -= 1
        } else {
            count.waiting -= 1
        }
        if let Some(own) = count.by_address.get_mut(&self.address) {
            *own -= 1;
            if *own == 0 {
                count.by_address.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn only_sessions_take_the_places_of_sessions() {
        let crowd = Arc::new(Crowd::new(2, 100));
        let mut silent: Vec<Place> = (0..32).map(|_| crowd.enter(address("192.0.2.1")).unwrap()).collect();
        assert!(crowd.enter(address("192.0.2.2")).is_none(), "each of them has a thread");
        silent.truncate(3);
        let mut guests: Vec<Place> = (0..3).map(|_| crowd.enter(address("192.0.2.2")).unwrap()).collect();
        let opened: Vec<bool> = guests.iter_mut().map(Place::open_session).collect();
        assert_eq!(opened, [true, true, false]);
        assert!(guests[0].open_session(), "the same connection again");
        assert_eq!((crowd.sessions(), crowd.connections()), (2, 6));
        guests.remove(0);
        assert!(guests[1].open_session(), "a place became free");
        drop((silent, guests));
        assert_eq!((crowd.sessions(), crowd.connections(), crowd.lock().by_address.len()), (0, 0, 0));
    }

    #[test]
    fn one_address_has_its_share_and_no_more() {
        let crowd = Arc::new(Crowd::new(64, 2));
        let kept: Vec<Place> = (0..2).map(|_| crowd.enter(address("192.0.2.1")).unwrap()).collect();
        let check = |text: &str, enters: bool| {
            assert_eq!(crowd.enter(address(text)).is_some(), enters, "{text}");
        };
        check("192.0.2.1", false);
        check("::ffff:192.0.2.1", false);
        check("192.0.2.2", true);
        let more: Vec<Place> =
            ["2001:db8::1", "2001:db8::2"].into_iter().map(|it| crowd.enter(address(it)).unwrap()).collect();
        check("2001:db8::ffff:3", false);
        check("2001:db8:0:1::1", true);
        drop((kept, more));
        check("192.0.2.1", true);
    }
}
