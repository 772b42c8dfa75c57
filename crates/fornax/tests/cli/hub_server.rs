//! A server that speaks as much of the hub's API as a fetch asks for, and a second one that serves its large files, as
//! a content delivery network does. Failures are told to it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::json;
use sha2::{Digest, Sha256};

/// The only commit of the repository.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub(crate) const REPO: &str = "owner/name";

/// Files as large as this are served by the other host, under their SHA-256.
const LARGE: usize = 1000;

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    /// The host of large files, not the hub.
    pub(crate) away: bool,
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) range: Option<usize>,
    /// The last byte that is wanted, where only some are.
    pub(crate) last: Option<usize>,
    pub(crate) token: Option<String>,
}

/// An answer in the place of the right one.
#[derive(Clone, Debug)]
pub(crate) enum Wrong {
    /// The right answer, whose connection breaks after this many bytes of its body.
    Cut(usize),
    /// A status with headers.
    Status(u16, &'static [(&'static str, &'static str)]),
    /// The whole file, whatever range was asked for.
    Whole,
    /// These bytes as the whole file.
    Bytes(Vec<u8>),
    /// This text as the list of files.
    List(String),
}

type Script = Box<dyn FnMut(&Asked) -> Option<Wrong> + Send>;

struct Shared {
    files: BTreeMap<String, Vec<u8>>,
    script: Mutex<Script>,
    asked: Mutex<Vec<Asked>>,
    /// Whether the list says what files are; mirrors do not always.
    lists_identities: bool,
    away: String,
}

/// The hub and its other host, each on a port of its own.
pub(crate) struct Server {
    pub(crate) endpoint: String,
    shared: Arc<Shared>,
}

impl Server {
    /// Serves `files` as the main branch of [`REPO`]; `script` may answer otherwise.
    pub(crate) fn new(
        files: &[(&str, &[u8])],
        script: impl FnMut(&Asked) -> Option<Wrong> + Send + 'static,
    ) -> Server {
        Server::start(files, script, true)
    }

    /// The same without sizes and checksums in its list.
    pub(crate) fn terse(files: &[(&str, &[u8])]) -> Server {
        Server::start(files, |_| None, false)
    }

    fn start(
        files: &[(&str, &[u8])],
        script: impl FnMut(&Asked) -> Option<Wrong> + Send + 'static,
        lists_identities: bool,
    ) -> Server {
        let (hub, away) =
            (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            files: files.iter().map(|&(name, bytes)| (name.to_owned(), bytes.to_vec())).collect(),
            script: Mutex::new(Box::new(script)),
            asked: Mutex::new(Vec::new()),
            lists_identities,
            away: url(&away),
        });
        let endpoint = url(&hub);
        for (listener, is_away) in [(hub, false), (away, true)] {
            let shared = Arc::clone(&shared);
            // They end with the test's process.
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let shared = Arc::clone(&shared);
                    std::thread::spawn(move || shared.answer(stream, is_away));
                }
            });
        }
        Server { endpoint, shared }
    }

    /// All requests so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.shared.asked.lock().unwrap().clone()
    }

    /// Requests for the bytes of large files.
    pub(crate) fn fetches(&self) -> Vec<Asked> {
        self.asked().into_iter().filter(|asked| asked.away).collect()
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What Git calls these bytes, said by Git itself.
pub(crate) fn git_hash(bytes: &[u8]) -> String {
    let mut git = Command::new("git")
        .args(["hash-object", "--stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    git.stdin.take().unwrap().write_all(bytes).unwrap();
    String::from_utf8(git.wait_with_output().unwrap().stdout).unwrap().trim().to_owned()
}

impl Shared {
    fn answer(&self, stream: TcpStream, away: bool) {
        let Some(asked) = read(&stream, away) else { return };
        let wrong = (self.script.lock().unwrap())(&asked);
        self.asked.lock().unwrap().push(asked.clone());
        let (mut status, mut headers, mut body) = self.right(&asked, matches!(wrong, Some(Wrong::Whole)));
        let mut cut = None;
        match wrong {
            Some(Wrong::Cut(bytes)) => cut = Some(bytes),
            Some(Wrong::Status(other, more)) => {
                (status, body) = (other, Vec::new());
                headers = more.iter().map(|(name, value)| format!("{name}: {value}")).collect();
            }
            Some(Wrong::Bytes(bytes)) => body = bytes,
            Some(Wrong::List(text)) => (status, headers, body) = (200, Vec::new(), text.into_bytes()),
            Some(Wrong::Whole) | None => {}
        }
        if !headers.iter().any(|header| header.starts_with("content-length")) {
            headers.push(format!("content-length: {}", body.len()));
        }
        let head = format!("HTTP/1.1 {status} X\r\nconnection: close\r\n{}\r\n\r\n", headers.join("\r\n"));
        let body =
            if asked.method == "HEAD" { &[][..] } else { &body[..cut.unwrap_or(body.len()).min(body.len())] };
        let mut stream = stream;
        // A client that has gone has seen enough.
        drop(stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)));
    }

    fn right(&self, asked: &Asked, whole: bool) -> (u16, Vec<String>, Vec<u8>) {
        let path = asked.path.split('?').next().unwrap();
        if path == format!("/api/models/{REPO}/revision/main") {
            return (200, Vec::new(), self.list().into_bytes());
        }
        if asked.away {
            let bytes = self.files.values().find(|bytes| path == format!("/{}", sha256(bytes))).unwrap();
            let Some(start) = asked.range.filter(|_| !whole) else { return (200, Vec::new(), bytes.clone()) };
            let last = asked.last.unwrap_or(usize::MAX).min(bytes.len() - 1);
            let range = format!("content-range: bytes {start}-{last}/{}", bytes.len());
            return (206, vec![range], bytes[start..=last].to_vec());
        }
        let file =
            [COMMIT, "main"].iter().find_map(|at| path.strip_prefix(&format!("/{REPO}/resolve/{at}/")));
        match file.and_then(|file| self.files.get(file)) {
            Some(bytes) if bytes.len() >= LARGE => {
                let sha = sha256(bytes);
                let location = format!("location: {}/{sha}", self.away);
                let etag = format!("x-linked-etag: \"{sha}\"");
                let size = format!("x-linked-size: {}", bytes.len());
                (302, vec![location, etag, size, format!("x-repo-commit: {COMMIT}")], Vec::new())
            }
            Some(bytes) => {
                let etag = format!("etag: \"{}\"", git_hash(bytes));
                let length = format!("content-length: {}", bytes.len());
                (200, vec![etag, length, format!("x-repo-commit: {COMMIT}")], bytes.clone())
            }
            None => (404, vec!["x-error-code: EntryNotFound".to_owned()], Vec::new()),
        }
    }

    fn list(&self) -> String {
        let sibling = |(name, bytes): (&String, &Vec<u8>)| match (self.lists_identities, bytes.len() >= LARGE)
        {
            (false, _) => json!({"rfilename": name}),
            (true, true) => json!({
                "rfilename": name,
                "size": bytes.len(),
                "blobId": "f".repeat(40),
                "lfs": {"sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 134},
            }),
            (true, false) => json!({"rfilename": name, "size": bytes.len(), "blobId": git_hash(bytes)}),
        };
        let siblings: Vec<_> = self.files.iter().map(sibling).collect();
        json!({"id": REPO, "sha": COMMIT, "gated": false, "siblings": siblings}).to_string()
    }
}

fn read(stream: &TcpStream, away: bool) -> Option<Asked> {
    let mut lines = BufReader::new(stream.take(1 << 16)).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut asked = Asked { away, method, path, range: None, last: None, token: None };
    for line in lines {
        let line = line.ok()?;
        if line.is_empty() {
            return Some(asked);
        }
        let (name, value) = line.split_once(": ")?;
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let (first, last) = value.strip_prefix("bytes=")?.split_once('-')?;
                (asked.range, asked.last) = (first.parse().ok(), last.parse().ok());
            }
            "authorization" => asked.token = Some(value.to_owned()),
            _ => {}
        }
    }
    None
}

/// Everything below a folder, links as what they are, sorted.
pub(crate) fn tree(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.symlink_metadata().unwrap().is_dir() {
                folders.push(path);
            } else {
                found.push(path.strip_prefix(folder).unwrap().display().to_string());
            }
        }
    }
    found.sort();
    found
}
