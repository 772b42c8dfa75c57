//! A store behind two threads: one writes, one reads, and nobody waits for either.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use fornax_compute::PageCopy;
use fornax_engine::{Fetched, PageName, Tier, TierStats};

use crate::{Error, Found, Key, Store};

/// Copies that wait to be written may take this many bytes; what comes then is let go of.
const WAITING_BYTES_MAX: u64 = 64 << 20;

/// Where pages are kept.
#[derive(Clone)]
pub struct DiskOptions {
    /// The folder of all stores.
    pub folder: PathBuf,
    /// Bytes that one model's may take.
    pub bytes_max: u64,
    /// What they are sealed with.
    pub key: Option<Key>,
}

/// Pages of one model on a disk.
pub struct Disk {
    shared: Arc<Shared>,
    /// `None` only while it is dropped.
    writes: Option<Sender<(PageName, Arc<PageCopy>)>>,
    reads: Option<Sender<(u64, Vec<PageName>)>>,
    arrivals: Receiver<Fetched>,
    /// What was asked for and has not come: how many pages by ticket.
    asked: HashMap<u64, usize>,
    tickets: u64,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    store: Store,
    /// Copies on their way to the disk, which can be read as if they were there.
    waiting: Mutex<HashMap<PageName, Arc<PageCopy>>>,
    waiting_bytes: AtomicU64,
    /// Why nothing is kept any more. It is told once.
    off: Mutex<Option<String>>,
    tell: Box<dyn Fn(&str) + Send + Sync>,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    pages_written: AtomicU64,
    bytes_written: AtomicU64,
    pages_read: AtomicU64,
    bytes_read: AtomicU64,
    pages_dropped: AtomicU64,
    pages_broken: AtomicU64,
    /// What reading has taken.
    read_us: AtomicU64,
}

impl Disk {
    /// Opens the store of what `identity` says. `tell` is told once if the disk fails, by one of the threads.
    pub fn open(
        options: &DiskOptions,
        identity: &str,
        about: &str,
        tell: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<(Disk, Found), Error> {
        let key = options.key.as_ref();
        let (store, found) = Store::open(&options.folder, identity, about, key, options.bytes_max)?;
        let shared = Arc::new(Shared {
            store,
            waiting: Mutex::default(),
            waiting_bytes: AtomicU64::new(0),
            off: Mutex::new(None),
            tell: Box::new(tell),
            counts: Counts::default(),
        });
        let (writes, to_write) = channel();
        let (reads, to_read) = channel();
        let (arrive, arrivals) = channel();
        let (writer, reader) = (Arc::clone(&shared), Arc::clone(&shared));
        let begin = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let thread = thread::Builder::new().name(name.to_owned()).spawn(work);
            thread.map_err(Error::io(&options.folder))
        };
        let threads = vec![
            begin("kv-writer", Box::new(move || writer.write(&to_write)))?,
            begin("kv-reader", Box::new(move || reader.read(&to_read, &arrive)))?,
        ];
        let (writes, reads, asked) = (Some(writes), Some(reads), HashMap::new());
        Ok((Disk { shared, writes, reads, arrivals, asked, tickets: 0, threads }, found))
    }

    /// Where its store lies.
    pub fn folder(&self) -> &std::path::Path {
        self.shared.store.folder()
    }
}

impl Tier for Disk {
    fn holds(&self, name: &PageName) -> bool {
        if self.shared.is_off() {
            return false;
        }
        self.shared.waiting().contains_key(name) || self.shared.store.holds(&bytes(name))
    }

    fn keep(&mut self, name: PageName, copy: PageCopy) {
        if !self.takes() {
            self.shared.counts.pages_dropped.fetch_add(1, Relaxed);
            return;
        }
        let copy = Arc::new(copy);
        self.shared.waiting_bytes.fetch_add(size(&copy), Relaxed);
        self.shared.waiting().insert(name, Arc::clone(&copy));
        if let Some(writes) = &self.writes {
            // A writer that is gone has said why.
            writes.send((name, copy)).unwrap_or_default();
        }
    }

    fn takes(&self) -> bool {
        !self.shared.is_off() && self.shared.waiting_bytes.load(Relaxed) < WAITING_BYTES_MAX
    }

    fn fetch(&mut self, names: Vec<PageName>) -> u64 {
        self.tickets += 1;
        self.asked.insert(self.tickets, names.len());
        if let Some(reads) = &self.reads {
            reads.send((self.tickets, names)).unwrap_or_default();
        }
        self.tickets
    }

    fn arrived(&mut self, wait: Duration) -> Option<Fetched> {
        let arrived = if wait.is_zero() {
            self.arrivals.try_recv().map_err(|error| error == TryRecvError::Disconnected)
        } else {
            self.arrivals.recv_timeout(wait).map_err(|error| error == RecvTimeoutError::Disconnected)
        };
        match arrived {
            Ok(fetched) => {
                self.asked.remove(&fetched.ticket);
                Some(fetched)
            }
            // Whoever waits for a reader that is gone is told that there is nothing.
            Err(true) => {
                let (&ticket, &pages) = self.asked.iter().next()?;
                self.asked.remove(&ticket);
                Some(Fetched { ticket, pages: vec![None; pages] })
            }
            Err(false) => None,
        }
    }

    fn seconds(&self, pages: usize) -> Option<f64> {
        let counts = &self.shared.counts;
        let read = counts.pages_read.load(Relaxed);
        (read > 0).then(|| counts.read_us.load(Relaxed) as f64 / 1e6 / read as f64 * pages as f64)
    }

    fn stats(&self) -> TierStats {
        let (counts, (pages, bytes)) = (&self.shared.counts, self.shared.store.counts());
        TierStats {
            name: "disk",
            pages,
            bytes,
            bytes_max: self.shared.store.bytes_max(),
            pages_waiting: self.shared.waiting().len() as u64,
            pages_written: counts.pages_written.load(Relaxed),
            bytes_written: counts.bytes_written.load(Relaxed),
            pages_read: counts.pages_read.load(Relaxed),
            bytes_read: counts.bytes_read.load(Relaxed),
            pages_dropped: counts.pages_dropped.load(Relaxed),
            pages_broken: counts.pages_broken.load(Relaxed),
            off: self.shared.off().clone(),
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // What waits is still written: the threads end when nothing is left.
        (self.writes, self.reads) = (None, None);
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

impl Shared {
    fn write(&self, to_write: &Receiver<(PageName, Arc<PageCopy>)>) {
        for (name, copy) in to_write {
            let (content, fingerprint) = copy.parts();
            if !self.is_off() {
                match self.store.write(&bytes(&name), content, fingerprint) {
                    Ok(true) => {
                        self.counts.pages_written.fetch_add(1, Relaxed);
                        self.counts.bytes_written.fetch_add(content.len() as u64, Relaxed);
                    }
                    Ok(false) => drop(self.counts.pages_dropped.fetch_add(1, Relaxed)),
                    Err(error) => self.fails("write", &error),
                }
            }
            self.waiting().remove(&name);
            self.waiting_bytes.fetch_sub(size(&copy), Relaxed);
        }
        if !self.is_off()
            && let Err(error) = self.store.sync()
        {
            self.fails("write", &error);
        }
    }

    fn read(&self, to_read: &Receiver<(u64, Vec<PageName>)>, arrive: &Sender<Fetched>) {
        for (ticket, names) in to_read {
            let began = Instant::now();
            let pages: Vec<Option<PageCopy>> = names.iter().map(|name| self.page(name)).collect();
            let elapsed = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.counts.read_us.fetch_add(elapsed, Relaxed);
            if arrive.send(Fetched { ticket, pages }).is_err() {
                return;
            }
        }
    }

    fn page(&self, name: &PageName) -> Option<PageCopy> {
        let waiting = self.waiting().get(name).map(|copy| PageCopy::clone(copy));
        let copy = waiting.or_else(|| {
            let known = self.store.holds(&bytes(name));
            match self.store.read(&bytes(name)) {
                Ok(Some((content, fingerprint))) => Some(PageCopy::from_parts(content, fingerprint)),
                Ok(None) => {
                    self.counts.pages_broken.fetch_add(u64::from(known), Relaxed);
                    None
                }
                Err(error) => {
                    self.fails("read", &error);
                    None
                }
            }
        })?;
        self.counts.pages_read.fetch_add(1, Relaxed);
        self.counts.bytes_read.fetch_add(size(&copy), Relaxed);
        Some(copy)
    }

    fn fails(&self, act: &str, error: &std::io::Error) {
        let mut off = self.off();
        if off.is_none() {
            let folder = self.store.folder().display();
            let reason =
                format!("cannot {act} {folder}: {error}; pages are kept in memory alone from here on");
            (self.tell)(&reason);
            *off = Some(reason);
        }
    }

    fn is_off(&self) -> bool {
        self.off().is_some()
    }

    fn off(&self) -> MutexGuard<'_, Option<String>> {
        self.off.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<PageName, Arc<PageCopy>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn bytes(name: &PageName) -> [u8; 36] {
    let mut bytes = [0; 36];
    bytes[..32].copy_from_slice(&name.path.0);
    bytes[32..].copy_from_slice(&name.group.to_le_bytes());
    bytes
}

fn size(copy: &PageCopy) -> u64 {
    copy.parts().0.len() as u64
}
