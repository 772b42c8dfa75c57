//! The log: segments that are written one after the other and go oldest first.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sha2::{Digest, Sha256};

use crate::{
    Error,
    record::{self, HEAD_BYTES, Head, SEGMENT_BYTES, segment_head},
    seal::{Key, Seal},
};

/// Bytes of a segment, unless all of them together may take little.
const SEGMENT_BYTES_MAX: u64 = 64 << 20;

/// Segments that what may be taken is divided into at least: one of them goes at a time.
const SEGMENTS_MIN: u64 = 8;

const LOCK: &str = "lock";
const ABOUT: &str = "about";

/// A store that is open for writing. Reads and writes may come from several threads; of writers there is one.
pub struct Store {
    folder: PathBuf,
    identity: [u8; 32],
    seal: Seal,
    bytes_max: u64,
    state: Mutex<State>,
    /// Held as long as the store is open.
    _lock: File,
}

struct State {
    segments: BTreeMap<u64, Segment>,
    index: HashMap<[u8; 32], Place>,
    bytes: u64,
    /// Number of the segment that is written.
    writing: Option<u64>,
}

struct Segment {
    file: Arc<File>,
    path: PathBuf,
    bytes: u64,
}

#[derive(Clone, Copy)]
struct Place {
    segment: u64,
    at: u64,
    bytes: u64,
    /// Whether it has been read since it was written.
    wanted: bool,
}

/// What was there when a store was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Records that can be read.
    pub records: usize,
    /// Segments that end in the middle of a record: what lies before that is kept.
    pub torn: Vec<PathBuf>,
    /// Files of that name that are something else; they are left alone.
    pub foreign: Vec<PathBuf>,
}

/// A store as it lies on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its folder.
    pub folder: PathBuf,
    /// What was said of it when it was made.
    pub about: String,
    /// Bytes of its segments.
    pub bytes: u64,
    /// Whether a process has it open.
    pub in_use: bool,
}

impl Store {
    /// Opens the store of what `identity` says in `folder`, or makes it; with a key it is another one than without. Its
    /// segments may take `bytes_max` together. `about` is for people who look at the folder.
    pub fn open(
        folder: &Path,
        identity: &str,
        about: &str,
        key: Option<&Key>,
        bytes_max: u64,
    ) -> Result<(Store, Found), Error> {
        let identity: [u8; 32] = match key {
            None => Sha256::digest(identity).into(),
            Some(key) => Sha256::new().chain_update(identity).chain_update(key.id()).finalize().into(),
        };
        let folder = folder.join(hex(&identity[..12]));
        // Keys and values tell what was said: they are for their owner alone.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(Error::io(&folder))?;
        let lock = lock(&folder)?;
        let about_path = folder.join(ABOUT);
        create_whole(&about_path, about.as_bytes()).map_err(Error::io(&about_path))?;
        let mut found = Found::default();
        let mut state = State { segments: BTreeMap::new(), index: HashMap::new(), bytes: 0, writing: None };
        for entry in fs::read_dir(&folder).map_err(Error::io(&folder))? {
            let path = entry.map_err(Error::io(&folder))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.ends_with(".new") {
                // Begun and never finished: nobody else writes here.
                fs::remove_file(&path).map_err(Error::io(&path))?;
            } else if let Some(number) = segment_number(name) {
                match scan(&path, &identity, number, &mut state.index) {
                    Ok(Some(Scanned { segment, records, torn })) => {
                        found.records += records;
                        found.torn.extend(torn.then(|| path.clone()));
                        state.bytes += segment.bytes;
                        state.segments.insert(number, segment);
                    }
                    Ok(None) => found.foreign.push(path),
                    Err(error) => return Err(Error::Io { path, error }),
                }
            }
        }
        let seal = Seal::new(key);
        let store = Store { folder, identity, seal, bytes_max, state: Mutex::new(state), _lock: lock };
        store.make_room(0).map_err(Error::io(&store.folder))?;
        Ok((store, found))
    }

    /// Whether there is a record of this name.
    pub fn holds(&self, name: &[u8]) -> bool {
        self.state().index.contains_key(&self.seal.name(name))
    }

    /// The record of this name: `None` where there is none, or none that is what was written (it is forgotten then).
    pub fn read(&self, name: &[u8]) -> io::Result<Option<(Vec<u8>, u64)>> {
        let name = self.seal.name(name);
        let (file, place) = {
            let mut state = self.state();
            let Some(place) = state.index.get_mut(&name) else { return Ok(None) };
            place.wanted = true;
            let place = *place;
            let segment = state.segments.get(&place.segment).expect("its records go with a segment");
            (Arc::clone(&segment.file), place)
        };
        let mut bytes = vec![0; usize::try_from(place.bytes).expect("as long as was written")];
        let whole = match file.read_exact_at(&mut bytes, place.at) {
            Ok(()) => record::read(&self.seal, &name, bytes),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
            Err(error) => return Err(error),
        };
        if whole.is_none() {
            self.state().index.remove(&name);
        }
        Ok(whole)
    }

    /// Writes a record; `false` where it is too large for the store, or there already. Called by one thread at a time.
    pub fn write(&self, name: &[u8], content: &[u8], fingerprint: u64) -> io::Result<bool> {
        let name = self.seal.name(name);
        if self.state().index.contains_key(&name) {
            return Ok(false);
        }
        let Some(record) = record::written(&self.seal, name, fingerprint, content) else { return Ok(false) };
        self.append(name, &record, false)
    }

    fn append(&self, name: [u8; 32], record: &[u8], wanted: bool) -> io::Result<bool> {
        let bytes = record.len() as u64;
        if bytes + SEGMENT_BYTES as u64 > self.segment_max() {
            return Ok(false);
        }
        self.make_room(bytes + SEGMENT_BYTES as u64)?;
        self.push(name, record, wanted)?;
        Ok(true)
    }

    /// Writes behind what was written last, in a new segment where the last one is full.
    fn push(&self, name: [u8; 32], record: &[u8], wanted: bool) -> io::Result<()> {
        let bytes = record.len() as u64;
        let (number, file, at) = match self.writing(bytes) {
            Some(writing) => writing,
            None => self.begin()?,
        };
        file.write_all_at(record, at)?;
        let mut state = self.state();
        state.bytes += bytes;
        state.segments.get_mut(&number).expect("being written").bytes = at + bytes;
        state.index.insert(name, Place { segment: number, at, bytes, wanted });
        Ok(())
    }

    /// The segment that is written, if so many bytes have room in it.
    fn writing(&self, bytes: u64) -> Option<(u64, Arc<File>, u64)> {
        let state = self.state();
        let number = state.writing?;
        let segment = &state.segments[&number];
        let fits = segment.bytes + bytes <= self.segment_max();
        fits.then(|| (number, Arc::clone(&segment.file), segment.bytes))
    }

    /// Begins a segment. It has its name only when its head is whole.
    fn begin(&self) -> io::Result<(u64, Arc<File>, u64)> {
        let number = self.state().segments.last_key_value().map_or(0, |(number, _)| number + 1);
        let path = self.folder.join(segment_name(number));
        let file = Arc::new(create_whole(&path, &segment_head(&self.identity))?);
        let at = SEGMENT_BYTES as u64;
        let mut state = self.state();
        state.bytes += at;
        state.segments.insert(number, Segment { file: Arc::clone(&file), path, bytes: at });
        state.writing = Some(number);
        Ok((number, file, at))
    }

    /// Lets the oldest segments go until so many bytes more have room. Of what is in them, records that were read since
    /// they were written are written once more, as far as half of a segment.
    fn make_room(&self, bytes: u64) -> io::Result<()> {
        loop {
            let (segment, mut wanted) = {
                let mut state = self.state();
                if state.bytes + bytes <= self.bytes_max {
                    return Ok(());
                }
                let Some((number, segment)) = state.segments.pop_first() else { return Ok(()) };
                state.bytes -= segment.bytes;
                state.writing = state.writing.filter(|writing| *writing != number);
                let own = |place: &Place| place.segment == number;
                let wanted: Vec<([u8; 32], Place)> = state
                    .index
                    .iter()
                    .filter(|(_, place)| own(place) && place.wanted)
                    .map(|(n, p)| (*n, *p))
                    .collect();
                state.index.retain(|_, place| !own(place));
                (segment, wanted)
            };
            fs::remove_file(&segment.path).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
            wanted.sort_unstable_by_key(|(_, place)| place.at);
            let mut left = self.segment_max() / 2;
            for (name, place) in wanted {
                let Some(rest) = left.checked_sub(place.bytes) else { break };
                left = rest;
                let mut record = vec![0; usize::try_from(place.bytes).expect("as long as was written")];
                if segment.file.read_exact_at(&mut record, place.at).is_ok() {
                    self.push(name, &record, false)?;
                }
            }
        }
    }

    /// Has everything that was written on the disk.
    pub fn sync(&self) -> io::Result<()> {
        let file = {
            let state = self.state();
            state.writing.map(|number| Arc::clone(&state.segments[&number].file))
        };
        file.map_or(Ok(()), |file| file.sync_data())
    }

    /// Records, and the bytes that all segments take.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.state();
        (state.index.len() as u64, state.bytes)
    }

    /// Bytes that they may take.
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Where it lies.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn segment_max(&self) -> u64 {
        SEGMENT_BYTES_MAX.min(self.bytes_max / SEGMENTS_MIN)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Every store below a folder, by the name of its folder.
pub fn list(folder: &Path) -> Result<Vec<Kept>, Error> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::io(folder))?,
    };
    let mut stores = Vec::new();
    for entry in entries {
        let folder = entry.map_err(Error::io(folder))?.path();
        // What has neither is somebody else's.
        let Ok(about) = fs::read_to_string(folder.join(ABOUT)) else { continue };
        if !folder.join(LOCK).exists() {
            continue;
        }
        let files = segments(&folder)?;
        let bytes = files.iter().filter_map(|path| path.metadata().ok()).map(|file| file.len()).sum();
        let in_use = matches!(lock(&folder), Err(Error::InUse(_)));
        stores.push(Kept { folder, about, bytes, in_use });
    }
    stores.sort_by(|a, b| a.folder.cmp(&b.folder));
    Ok(stores)
}

/// Removes a store that no process has open, and nothing else that lies in its folder.
pub fn clear(store: &Kept) -> Result<(), Error> {
    let folder = &store.folder;
    let held = lock(folder)?;
    for path in segments(folder)?.into_iter().chain([folder.join(ABOUT), folder.join(LOCK)]) {
        fs::remove_file(&path).map_err(Error::io(&path))?;
    }
    drop(held);
    match fs::remove_dir(folder) {
        // Somebody else's files stay where they are.
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed.map_err(Error::io(folder)),
    }
}

fn segments(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::io(folder))? {
        let path = entry.map_err(Error::io(folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if segment_number(name).is_some() || name.ends_with(".new") {
            paths.push(path);
        }
    }
    Ok(paths)
}

struct Scanned {
    segment: Segment,
    records: usize,
    torn: bool,
}

/// Looks at the heads of a segment's records; what they hold is checked when it is read. `None` for what is no
/// segment of this store.
fn scan(
    path: &Path,
    identity: &[u8; 32],
    number: u64,
    index: &mut HashMap<[u8; 32], Place>,
) -> io::Result<Option<Scanned>> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let len = file.metadata()?.len();
    let mut start = [0; SEGMENT_BYTES];
    if len < SEGMENT_BYTES as u64 {
        return Ok(None);
    }
    file.read_exact_at(&mut start, 0)?;
    if start != segment_head(identity) {
        return Ok(None);
    }
    let (mut at, mut records, mut bytes) = (SEGMENT_BYTES as u64, 0, [0; HEAD_BYTES]);
    while at + HEAD_BYTES as u64 <= len {
        file.read_exact_at(&mut bytes, at)?;
        let Some(head) = Head::parse(&bytes).filter(|head| at + head.record_bytes() <= len) else { break };
        let place = Place { segment: number, at, bytes: head.record_bytes(), wanted: false };
        // Of two of one name the newest counts; segments come in any order.
        let newest = index.get(&head.name).is_none_or(|other| (other.segment, other.at) < (number, at));
        if newest {
            index.insert(head.name, place);
        }
        records += 1;
        at += head.record_bytes();
    }
    // Room behind a torn record is taken all the same.
    let segment = Segment { file: Arc::new(file), path: path.to_owned(), bytes: len };
    Ok(Some(Scanned { segment, records, torn: at != len }))
}

fn lock(folder: &Path) -> Result<File, Error> {
    let path = folder.join(LOCK);
    let mut options = OpenOptions::new();
    let file = options.create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file = file.map_err(Error::io(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::InUse(folder.to_owned())),
        Err(TryLockError::Error(error)) => Err(Error::Io { path, error }),
    }
}

/// Makes a file that has its name only when it begins so.
fn create_whole(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    let mut options = OpenOptions::new();
    let mut file = options.create(true).truncate(true).read(true).write(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_data()?;
    fs::rename(&new, path)?;
    Ok(file)
}

fn segment_name(number: u64) -> String {
    format!("{number:016x}.pages")
}

fn segment_number(name: &str) -> Option<u64> {
    let number = name.strip_suffix(".pages").filter(|number| number.len() == 16)?;
    u64::from_str_radix(number, 16).ok()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1 << 20;

    fn open(folder: &Path, key: Option<&Key>, bytes_max: u64) -> (Store, Found) {
        Store::open(folder, "a model", "a model, for people", key, bytes_max).unwrap()
    }

    fn page(number: u8) -> Vec<u8> {
        (0..1000u32).map(|at| (at * 7) as u8 ^ number).collect()
    }

    fn key() -> Key {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), [9; 40]).unwrap();
        Key::read(file.path()).unwrap()
    }

    fn only_segment(folder: &Path) -> PathBuf {
        let stores = list(folder).unwrap();
        let mut paths: Vec<PathBuf> =
            stores.iter().flat_map(|store| segments(&store.folder).unwrap()).collect();
        assert_eq!(paths.len(), 1);
        paths.remove(0)
    }

    #[test]
    fn what_was_written_is_there_after_a_restart_and_only_there() {
        for key in [None, Some(key())] {
            let folder = tempfile::tempdir().unwrap();
            let (store, found) = open(folder.path(), key.as_ref(), BYTES);
            assert_eq!(found, Found::default());
            for number in 0..5 {
                assert!(store.write(&[number], &page(number), u64::from(number)).unwrap());
                assert!(!store.write(&[number], &page(9), 0).unwrap(), "it is there already");
            }
            store.sync().unwrap();
            drop(store);
            let (store, found) = open(folder.path(), key.as_ref(), BYTES);
            assert_eq!((found.records, store.counts().0), (5, 5));
            assert_eq!(store.read(&[3]).unwrap(), Some((page(3), 3)));
            assert!(!store.holds(&[5]) && store.read(&[5]).unwrap().is_none());
            // Another model, and the same one under another key, see nothing of it.
            let others = Store::open(folder.path(), "another", "", key.as_ref(), BYTES).unwrap();
            assert!(!others.0.holds(&[3]));
        }
    }

    #[test]
    fn a_sealed_store_tells_neither_contents_nor_names() {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = open(folder.path(), Some(&key()), BYTES);
        let secret = b"what somebody said to a model".repeat(20);
        store.write(b"a name", &secret, 1).unwrap();
        drop(store);
        let bytes = fs::read(only_segment(folder.path())).unwrap();
        let holds = |needle: &[u8]| bytes.windows(needle.len()).any(|window| window == needle);
        assert!(!holds(&secret[..16]) && !holds(&Sha256::digest(b"a name")[..8]));
        let (open, _) = open(folder.path(), None, BYTES);
        assert!(!open.holds(b"a name"), "without the key it is another store");
    }

    #[test]
    fn a_changed_byte_anywhere_never_becomes_a_page() {
        for key in [None, Some(key())] {
            let folder = tempfile::tempdir().unwrap();
            let (store, _) = open(folder.path(), key.as_ref(), BYTES);
            let pages: Vec<Vec<u8>> = (0..3).map(|number| page(number)[..90].to_vec()).collect();
            for (number, page) in (0..).zip(&pages) {
                store.write(&[number], page, u64::from(number)).unwrap();
            }
            drop(store);
            let path = only_segment(folder.path());
            let whole = fs::read(&path).unwrap();
            for at in 0..whole.len() {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << (at % 8);
                fs::write(&path, &bytes).unwrap();
                let (store, _) = open(folder.path(), key.as_ref(), BYTES);
                let read = (0..3).map(|number| store.read(&[number]).unwrap());
                let wrong = read.zip(&pages).zip(0..).filter_map(|((got, page), number)| {
                    let lost = got.is_none();
                    assert!(lost || got == Some((page.clone(), number)), "byte {at} changed page {number}");
                    lost.then_some(number)
                });
                assert!(wrong.count() > 0, "byte {at} matters to nothing");
            }
        }
    }

    #[test]
    fn a_log_cut_anywhere_keeps_what_lies_before_the_cut() {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = open(folder.path(), None, BYTES);
        for number in 0..3 {
            store.write(&[number], &page(number)[..50], 0).unwrap();
        }
        drop(store);
        let path = only_segment(folder.path());
        let whole = fs::read(&path).unwrap();
        let record = (whole.len() - SEGMENT_BYTES) / 3;
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            let (store, found) = open(folder.path(), None, BYTES);
            let wanted = len.saturating_sub(SEGMENT_BYTES) / record;
            assert_eq!(found.records, wanted, "cut after {len} bytes");
            assert_eq!(found.foreign.len(), usize::from(len < SEGMENT_BYTES));
            for number in 0..3 {
                let there = store.read(&[number]).unwrap().is_some();
                assert_eq!(there, usize::from(number) < wanted);
            }
            // It can be written again, in a segment of its own.
            assert!(store.write(&[7], &page(7), 0).unwrap());
            drop(store);
            for path in segments(&list(folder.path()).unwrap()[0].folder).unwrap() {
                fs::remove_file(path).unwrap();
            }
        }
    }

    #[test]
    fn the_oldest_go_first_and_what_was_read_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = open(folder.path(), None, 64 << 10);
        for number in 0..200 {
            assert!(store.write(&[number], &page(number), 0).unwrap());
            assert!(store.counts().1 <= 64 << 10, "{} bytes", store.counts().1);
            if number >= 3 {
                assert_eq!(store.read(&[3]).unwrap(), Some((page(3), 0)), "after {number}");
            }
        }
        assert!(store.holds(&[199]) && store.holds(&[170]) && !store.holds(&[4]) && !store.holds(&[100]));
        assert!(!store.write(b"large", &[0; 9000], 0).unwrap(), "larger than a segment");
        drop(store);
        let (store, _) = open(folder.path(), None, 16 << 10);
        assert!(store.counts().1 <= 16 << 10, "a smaller bound holds at once");
        assert!(store.holds(&[199]));
    }

    #[test]
    fn one_process_at_a_time_writes_and_what_is_foreign_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = open(folder.path(), None, BYTES);
        store.write(b"1", &page(1), 0).unwrap();
        let again = Store::open(folder.path(), "a model", "", None, BYTES);
        assert!(matches!(again, Err(Error::InUse(_))));
        let kept = list(folder.path()).unwrap().remove(0);
        assert!(kept.in_use && kept.about == "a model, for people" && kept.bytes > 1000);
        assert!(matches!(clear(&kept), Err(Error::InUse(_))));
        drop(store);
        let foreign = kept.folder.join(segment_name(77));
        fs::write(&foreign, "somebody's notes").unwrap();
        let begun = kept.folder.join(segment_name(78) + ".new");
        fs::write(&begun, "half").unwrap();
        let (store, found) = open(folder.path(), None, BYTES);
        assert_eq!((found.foreign, found.records), (vec![foreign.clone()], 1));
        assert!(!begun.exists() && foreign.exists());
        drop(store);
        let notes = kept.folder.join("notes");
        fs::write(&notes, "mine").unwrap();
        clear(&list(folder.path()).unwrap()[0]).unwrap();
        assert!(notes.exists() && list(folder.path()).unwrap().is_empty());
    }
}
