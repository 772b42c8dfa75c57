//! The hub over HTTP: what a repository holds, and the bytes of its files.
//!
//! Redirects are followed here and not by the client: the token goes to the hub's own host and to nobody else, and the
//! headers of the hub's own answer say what a file is, whoever serves its bytes.

use std::io::Read as _;
use std::time::Duration;

use serde::Deserialize;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::{Agent, Body};

use super::cache::is_commit;
use super::reference::is_safe_path;
use super::{HubError, Options, Reference};

/// How long a connection may take, and how long nothing may come before it counts as cut.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Ends circles of redirects.
const REDIRECTS_MAX: usize = 8;

/// Longer requests for patience are told to the user instead of slept through.
const PATIENCE_MAX: Duration = Duration::from_secs(90);

/// A list of files is some hundred bytes for each; the largest repositories have some thousand.
const INFO_BYTES_MAX: u64 = 32 << 20;

/// The hub at an endpoint.
#[derive(Debug)]
pub(super) struct Remote<'o> {
    options: &'o Options,
    agent: Agent,
}

/// What a revision holds.
#[derive(Debug)]
pub(super) struct Repository {
    /// The commit that the revision is now.
    pub(super) commit: String,
    pub(super) files: Vec<Listed>,
}

/// One file of a repository, as far as the list tells.
#[derive(Clone, Debug)]
pub(super) struct Listed {
    pub(super) name: String,
    pub(super) identity: Option<Identity>,
}

/// What a file is: its length and its checksum, which is also the name of its blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) etag: String,
    pub(super) bytes: u64,
}

impl Identity {
    fn new(etag: &str, bytes: Option<u64>) -> Option<Identity> {
        let etag = etag.trim_start_matches("W/").trim_matches('"').to_ascii_lowercase();
        let is_hash = matches!(etag.len(), 40 | 64) && etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_hash.then_some(Identity { etag, bytes: bytes? })
    }
}

/// A failed attempt.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) error: HubError,
    pub(super) retry: Retry,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retry {
    /// It would fail again.
    Never,
    /// After a pause that grows.
    Soon,
    /// When the hub said.
    After(Duration),
}

impl From<HubError> for Failed {
    fn from(error: HubError) -> Failed {
        Failed { error, retry: Retry::Never }
    }
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl<'o> Remote<'o> {
    pub(super) fn new(options: &'o Options) -> Remote<'o> {
        let config = Agent::config_builder()
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(SILENCE_MAX))
            .timeout_per_read(Some(SILENCE_MAX))
            .user_agent(concat!("fornax/", env!("CARGO_PKG_VERSION")))
            // Ranges and checksums are of the bytes as they are stored.
            .accept_encoding("identity")
            .build();
        Remote { options, agent: config.into() }
    }

    /// What the revision of `reference` holds.
    pub(super) fn repository(&self, reference: &Reference) -> Result<Repository, HubError> {
        let Reference { repo, revision, .. } = reference;
        let revision = revision.replace('/', "%2F");
        let url = format!("{}/api/models/{repo}/revision/{revision}?blobs=true", self.options.endpoint);
        let protocol = |reason: String| HubError::Protocol { host: host(&url).to_owned(), reason };
        let bytes = self.persist(|| {
            let mut response = self.get(&url, None, false)?;
            self.judge(&response, reference, None)?;
            let read = response.body_mut().with_config().limit(INFO_BYTES_MAX).read_to_vec();
            read.map_err(|error| unreachable(&url, &error))
        })?;
        let info: Info = serde_json::from_slice(&bytes).map_err(|error| protocol(error.to_string()))?;
        if !is_commit(&info.sha) {
            return Err(protocol(format!("{:?} is no commit", info.sha)));
        }
        let mut files = Vec::with_capacity(info.siblings.len());
        for Sibling { rfilename, size, blob_id, lfs } in info.siblings {
            if !is_safe_path(&rfilename) {
                return Err(HubError::UnsafeName { repo: repo.clone(), name: rfilename });
            }
            let identity = match lfs {
                Some(Lfs { sha256: Some(sha256), size: own }) => Identity::new(&sha256, own.or(size)),
                Some(_) => None,
                None => blob_id.and_then(|id| Identity::new(&id, size)),
            };
            files.push(Listed { name: rfilename, identity });
        }
        Ok(Repository { commit: info.sha.to_ascii_lowercase(), files })
    }

    /// What a file is, asked of the file itself: not every mirror lists it.
    pub(super) fn identity(
        &self,
        reference: &Reference,
        commit: &str,
        name: &str,
    ) -> Result<Identity, HubError> {
        let url = self.file_url(reference, commit, name);
        self.persist(|| {
            let response = self.get(&url, None, true)?;
            let headers = response.headers();
            self.judge(&response, reference, Some(name))?;
            let length = header(headers, "x-linked-size").or_else(|| header(headers, "content-length"));
            let etag = header(headers, "x-linked-etag").or_else(|| header(headers, "etag"));
            let identity = etag.and_then(|etag| Identity::new(etag, length?.parse().ok()));
            let reason = format!("{name} has no checksum");
            Ok(identity.ok_or_else(|| HubError::Protocol { host: host(&url).to_owned(), reason })?)
        })
    }

    /// The bytes of a file from `start` on. The answer may be the whole file all the same.
    pub(super) fn bytes(
        &self,
        reference: &Reference,
        commit: &str,
        name: &str,
        start: u64,
    ) -> Result<Response<Body>, Failed> {
        let range = (start > 0).then(|| format!("bytes={start}-"));
        let response = self.get(&self.file_url(reference, commit, name), range, false)?;
        if response.status() != StatusCode::RANGE_NOT_SATISFIABLE {
            self.judge(&response, reference, Some(name))?;
        }
        Ok(response)
    }

    /// The first bytes of a file, `length` of them where it has this many. A server that knows no ranges sends all; no
    /// more than wanted is read.
    pub(super) fn beginning(
        &self,
        reference: &Reference,
        commit: &str,
        name: &str,
        length: u64,
    ) -> Result<Vec<u8>, HubError> {
        let url = self.file_url(reference, commit, name);
        self.persist(|| {
            let range = format!("bytes=0-{}", length.saturating_sub(1));
            let mut response = self.get(&url, Some(range), false)?;
            self.judge(&response, reference, Some(name))?;
            let mut bytes = Vec::new();
            let read = response.body_mut().as_reader().take(length).read_to_end(&mut bytes);
            read.map_err(|error| cut(&url, error.to_string()))?;
            Ok(bytes)
        })
    }

    fn file_url(&self, reference: &Reference, commit: &str, name: &str) -> String {
        let name = escaped(name);
        format!("{}/{}/resolve/{commit}/{name}", self.options.endpoint, reference.repo)
    }

    /// One request with its redirects. With `own`, those that lead away from the hub are not followed: what a file is
    /// stands in the hub's own answer.
    fn get(&self, url: &str, range: Option<String>, own: bool) -> Result<Response<Body>, Failed> {
        let mut url = url.to_owned();
        for _ in 0..REDIRECTS_MAX {
            let mut request = if own { self.agent.head(&url) } else { self.agent.get(&url) };
            if let Some(token) = &self.options.token
                && origin(&url) == origin(&self.options.endpoint)
            {
                request = request.header("authorization", format!("Bearer {}", token.0));
            }
            if let Some(range) = &range {
                request = request.header("range", range);
            }
            let response = request.call().map_err(|error| unreachable(&url, &error))?;
            if !response.status().is_redirection() || response.status() == StatusCode::NOT_MODIFIED {
                return Ok(response);
            }
            let next = header(response.headers(), "location").and_then(|location| joined(&url, location));
            let Some(next) = next else {
                let reason = "a redirect leads nowhere".to_owned();
                return Err(HubError::Protocol { host: host(&url).to_owned(), reason }.into());
            };
            if own && origin(&next) != origin(&self.options.endpoint) {
                return Ok(response);
            }
            url = next;
        }
        let reason = "redirects lead in a circle".to_owned();
        Err(HubError::Protocol { host: host(&url).to_owned(), reason }.into())
    }

    /// Turns a status that means no into what it means.
    fn judge(
        &self,
        response: &Response<Body>,
        reference: &Reference,
        file: Option<&str>,
    ) -> Result<(), Failed> {
        let status = response.status();
        if status.is_success() || status.is_redirection() {
            return Ok(());
        }
        let headers = response.headers();
        let (endpoint, repo) = (self.options.endpoint.clone(), reference.repo.clone());
        let has_token = self.options.token.is_some();
        let host = host(&endpoint).to_owned();
        let code = header(headers, "x-error-code").unwrap_or_default();
        Err(match (status.as_u16(), code) {
            // Without a token the hub does not tell what is missing from what is private.
            (_, "RepoNotFound") => HubError::NoRepository { repo, endpoint, has_token }.into(),
            (_, "RevisionNotFound") => {
                HubError::NoRevision { repo, revision: reference.revision.clone() }.into()
            }
            (401 | 403, _) => HubError::Unauthorized { repo, endpoint, has_token }.into(),
            (404, _) => match file {
                Some(file) => HubError::NoFile { repo, file: file.to_owned(), there: Vec::new() }.into(),
                None => HubError::NoRepository { repo, endpoint, has_token }.into(),
            },
            (429, _) => {
                let said = header(headers, "retry-after").and_then(|text| text.trim().parse().ok());
                let wait = Duration::from_secs(said.unwrap_or(10));
                let retry = if wait > PATIENCE_MAX { Retry::Never } else { Retry::After(wait) };
                Failed { error: HubError::RateLimited { host, wait }, retry }
            }
            (status, _) => {
                let what = file.map_or_else(|| repo.clone(), |file| format!("{repo}/{file}"));
                let retry = if status >= 500 || status == 408 { Retry::Soon } else { Retry::Never };
                Failed { error: HubError::Status { host, status, what }, retry }
            }
        })
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.options.endpoint
    }

    /// Tries until it works, fails for good, or has failed too often.
    fn persist<T>(&self, mut attempt: impl FnMut() -> Result<T, Failed>) -> Result<T, HubError> {
        let mut failures = 0;
        loop {
            match attempt() {
                Ok(done) => return Ok(done),
                Err(failed) => {
                    failures += 1;
                    self.wait(failed, failures)?;
                }
            }
        }
    }

    /// Waits as long as a failure asks for, the `failures`th in a row; the error, if it is the last.
    pub(super) fn wait(&self, failed: Failed, failures: u32) -> Result<(), HubError> {
        if failures >= self.options.attempts {
            return Err(failed.error);
        }
        let wait = match failed.retry {
            Retry::Never => return Err(failed.error),
            Retry::Soon => Duration::from_secs(1 << (failures - 1)),
            Retry::After(wait) => wait,
        };
        (self.options.pause)(wait);
        Ok(())
    }
}

pub(super) fn unreachable(url: &str, error: &ureq::Error) -> Failed {
    cut(url, error.to_string())
}

/// A connection that could not be made, or broke.
pub(super) fn cut(url: &str, reason: String) -> Failed {
    Failed { error: HubError::Unreachable { host: host(url).to_owned(), reason }, retry: Retry::Soon }
}

pub(super) fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Scheme, host and port of an address.
fn origin(url: &str) -> &str {
    let after = url.find("://").map_or(0, |at| at + 3);
    &url[..url[after..].find('/').map_or(url.len(), |at| after + at)]
}

pub(super) fn host(url: &str) -> &str {
    let origin = origin(url);
    origin.split_once("://").map_or(origin, |(_, host)| host)
}

/// Where a redirect leads. From an encrypted address it never leads to one in the clear.
fn joined(base: &str, location: &str) -> Option<String> {
    let lower = location.to_ascii_lowercase();
    if lower.starts_with("https://") || (lower.starts_with("http://") && base.starts_with("http://")) {
        return Some(location.to_owned());
    }
    if let Some(rest) = location.strip_prefix("//") {
        return Some(format!("{}://{rest}", base.split_once("://")?.0));
    }
    location.starts_with('/').then(|| format!("{}{location}", origin(base)))
}

/// A file's name as part of an address.
fn escaped(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
                out.push(char::from(byte))
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_joined_and_never_leave_encryption() {
        let check = |base: &str, location: &str, wanted: Option<&str>| {
            assert_eq!(joined(base, location).as_deref(), wanted, "{base} {location}");
        };
        check("https://hub/a/b?x", "/c?d", Some("https://hub/c?d"));
        check("https://hub", "//cdn/c", Some("https://cdn/c"));
        check("https://hub/a", "https://cdn/c", Some("https://cdn/c"));
        check("https://hub/a", "http://cdn/c", None);
        check("http://hub:80/a", "http://cdn/c", Some("http://cdn/c"));
        check("https://hub/a", "c", None);
    }

    #[test]
    fn a_token_s_host_is_compared_whole() {
        assert_eq!(origin("https://hub.co/a"), "https://hub.co");
        assert_ne!(origin("https://hub.co.evil/a"), origin("https://hub.co"));
        assert_ne!(origin("https://hub.co:8443/a"), origin("https://hub.co"));
        assert_ne!(origin("http://hub.co/a"), origin("https://hub.co"));
        assert_eq!(host("https://hub.co:1/a"), "hub.co:1");
    }

    #[test]
    fn names_are_escaped_and_checksums_recognised() {
        assert_eq!(escaped("a b/ü%.gguf"), "a%20b/%C3%BC%25.gguf");
        let sha = "a".repeat(64);
        let read = |etag: &str| Identity::new(etag, Some(1)).map(|identity| identity.etag);
        assert_eq!(read(&format!("\"{sha}\"")), Some(sha.clone()));
        assert_eq!(read(&format!("W/\"{}\"", "B".repeat(40))), Some("b".repeat(40)));
        assert_eq!(read("../../x"), None);
        assert_eq!(read("1234"), None);
        assert_eq!(Identity::new(&sha, None), None);
    }
}
