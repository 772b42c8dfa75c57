//! A client of a server's completions, as plain as one can be: what it measures is the server.

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context as _, anyhow, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::load::{Ask, Timeline};
use crate::cli::failure::Failure;

/// The longest head of a response that is one.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Where a server listens.
#[derive(Clone, Debug)]
pub(super) struct Wire {
    /// As clients name it.
    host: String,
    address: SocketAddr,
}

impl Wire {
    /// A server by its address.
    pub(super) fn new(address: SocketAddr) -> Wire {
        Wire { host: address.to_string(), address }
    }

    /// A server by its URL.
    pub(super) async fn find(url: &str) -> anyhow::Result<Wire> {
        let wrong =
            || Failure::usage(format!("--http {url:?} is no server; one looks like http://127.0.0.1:8080"));
        let host = url.strip_prefix("http://").ok_or_else(wrong)?.trim_end_matches('/');
        if host.is_empty() || host.contains('/') {
            return Err(wrong().into());
        }
        let named = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
        let found = tokio::net::lookup_host(&named).await.ok().and_then(|mut found| found.next());
        let address =
            found.ok_or_else(|| Failure::usage(format!("--http {url:?}: nobody is called {host}")))?;
        Ok(Wire { host: host.to_owned(), address })
    }

    /// What a path answers, as JSON.
    pub(super) async fn get(&self, path: &str) -> anyhow::Result<Value> {
        let mut answer = self.send(&format!("GET {path}"), "").await?;
        let mut body = Vec::new();
        while let Some(bytes) = answer.more().await? {
            body.extend(bytes);
        }
        Ok(serde_json::from_slice(&body)?)
    }

    /// Streams one answer.
    pub(super) async fn ask(&self, ask: &Ask) -> anyhow::Result<Timeline> {
        let body = json!({
            "prompt": ask.prompt,
            "max_tokens": ask.tokens,
            "seed": ask.seed,
            "temperature": 1,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let body = body.to_string();
        let sent = Instant::now();
        let mut answer = self.send("POST /v1/completions", &body).await?;
        let mut lines = Vec::new();
        let (mut came, mut tokens) = (Vec::with_capacity(ask.tokens), None);
        while let Some(bytes) = answer.more().await? {
            lines.extend(bytes);
            let Some(end) = lines.iter().rposition(|&byte| byte == b'\n') else { continue };
            let now = Instant::now();
            for line in lines[..end].split(|&byte| byte == b'\n') {
                match line.strip_prefix(b"data: ") {
                    Some(b"[DONE]") => {
                        let tokens = tokens.context("the server did not count its tokens")?;
                        return Ok(Timeline { sent, came, tokens, cached_tokens: 0 });
                    }
                    Some(event) => {
                        let event: Event = serde_json::from_slice(event)?;
                        if let Some(error) = event.error {
                            bail!("the server ended an answer with {error}");
                        }
                        if event.choices.iter().any(|choice| !choice.text.is_empty()) {
                            came.push(now);
                        }
                        tokens = event.usage.map(|usage| usage.completion_tokens).or(tokens);
                    }
                    // Comments that keep the connection alive, and the empty lines between events.
                    None => {}
                }
            }
            lines.drain(..=end);
        }
        bail!("the server closed before the answer was whole")
    }

    /// Sends a request and reads the head of its answer.
    async fn send(&self, what: &str, body: &str) -> anyhow::Result<Answer> {
        let unreachable =
            |error| Failure::usage(format!("cannot reach http://{}: {error}; is a server there?", self.host));
        let mut stream = TcpStream::connect(self.address).await.map_err(unreachable)?;
        stream.set_nodelay(true)?;
        let head = format!(
            "{what} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            self.host,
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes()).await?;
        let mut bytes = Vec::new();
        let end = loop {
            if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
                break end;
            }
            if bytes.len() > HEAD_BYTES_MAX || stream.read_buf(&mut bytes).await? == 0 {
                bail!("{} does not speak HTTP", self.host);
            }
        };
        let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
        let is_chunked = head.contains("transfer-encoding: chunked");
        bytes.drain(..end + 4);
        let mut answer = Answer { stream, bytes, chunks: is_chunked.then(Chunks::default), ended: false };
        let status = head.split(' ').nth(1).unwrap_or_default();
        if status != "200" {
            let mut said = Vec::new();
            while let Some(bytes) = answer.more().await? {
                said.extend(bytes);
            }
            return Err(anyhow!(
                "http://{} answered {status}: {}",
                self.host,
                String::from_utf8_lossy(&said)
            ));
        }
        Ok(answer)
    }
}

/// The parts of an event that are looked at.
#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: String,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: usize,
}

/// The body of a response as it comes.
struct Answer {
    stream: TcpStream,
    /// What was read and not yet taken.
    bytes: Vec<u8>,
    chunks: Option<Chunks>,
    ended: bool,
}

impl Answer {
    /// The next bytes of the body; `None` at its end.
    async fn more(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        loop {
            if !self.bytes.is_empty() {
                let bytes = std::mem::take(&mut self.bytes);
                let Some(chunks) = &mut self.chunks else { return Ok(Some(bytes)) };
                let body = chunks.body(&bytes)?;
                self.ended |= chunks.ended;
                if !body.is_empty() {
                    return Ok(Some(body));
                }
            }
            if self.ended || self.stream.read_buf(&mut self.bytes).await? == 0 {
                return Ok(None);
            }
        }
    }
}

/// Takes the frame of a chunked body away, wherever its bytes are cut.
#[derive(Debug, Default)]
struct Chunks {
    /// Bytes of the chunk that are still to come, its line break included.
    left: usize,
    /// The line of the next chunk's size, as far as it has come.
    size: Vec<u8>,
    ended: bool,
}

impl Chunks {
    fn body(&mut self, mut bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
        let mut body = Vec::with_capacity(bytes.len());
        while !bytes.is_empty() && !self.ended {
            if self.left > 0 {
                let (some, rest) = bytes.split_at(bytes.len().min(self.left));
                // The last two bytes of a chunk are its line break.
                body.extend(&some[..some.len().min(self.left.saturating_sub(2))]);
                self.left -= some.len();
                bytes = rest;
                continue;
            }
            let (byte, rest) = (bytes[0], &bytes[1..]);
            bytes = rest;
            if byte != b'\n' {
                self.size.push(byte);
                continue;
            }
            let line = String::from_utf8_lossy(&self.size).trim().to_owned();
            let digits = line.split(';').next().unwrap_or_default();
            let size = usize::from_str_radix(digits, 16).ok().and_then(|size| size.checked_add(2));
            self.left = size.with_context(|| format!("{line:?} is no size of a chunk"))?;
            self.ended = self.left == 2;
            self.size.clear();
        }
        Ok(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_read_wherever_they_are_cut() {
        let sent = b"5\r\nhello\r\n1;x=y\r\n,\r\nA\r\n 0123\r\n567\r\n0\r\n\r\n";
        for cut in 1..sent.len() {
            let mut chunks = Chunks::default();
            let mut body = Vec::new();
            for part in sent.chunks(cut) {
                body.extend(chunks.body(part).unwrap());
            }
            assert_eq!(
                (String::from_utf8_lossy(&body).as_ref(), chunks.ended),
                ("hello, 0123\r\n567", true),
                "{cut}"
            );
        }
        assert!(Chunks::default().body(b"five\r\n").is_err());
        assert!(Chunks::default().body(b"ffffffffffffffff\r\n").is_err());
    }

    #[tokio::test]
    async fn what_is_no_server_is_refused() {
        for url in ["https://127.0.0.1:1", "127.0.0.1:8080", "http://", "http://127.0.0.1:1/v1"] {
            let refused = Wire::find(url).await.unwrap_err().to_string();
            assert!(refused.contains("is no server"), "{refused}");
        }
        let wire = Wire::find("http://127.0.0.1:1/").await.unwrap();
        assert_eq!((&*wire.host, wire.address.port()), ("127.0.0.1:1", 1));
        assert!(
            wire.get("/health").await.unwrap_err().to_string().contains("cannot reach http://127.0.0.1:1")
        );
    }
}
