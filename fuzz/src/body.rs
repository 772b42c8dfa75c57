//! Bodies of every API, sent to a server that runs.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Somebody who sends one request after the other, over one connection as long as the server keeps it.
pub struct Caller {
    server: SocketAddr,
    connection: Option<TcpStream>,
    /// What came and was not read yet.
    left: Vec<u8>,
}

impl Caller {
    pub fn new(server: SocketAddr) -> Caller {
        Caller { server, connection: None, left: Vec::new() }
    }

    /// Sends the input, whose first line is a route and whose rest is a body. Whether it was accepted; a server that
    /// answers nothing whole, or by a fault of its own, fails.
    pub fn body(&mut self, data: &[u8]) -> bool {
        let line = data.iter().position(|&byte| byte == b'\n').unwrap_or(data.len());
        let path: String =
            String::from_utf8_lossy(&data[..line]).chars().filter(char::is_ascii_graphic).collect();
        let body = data.get(line + 1..).unwrap_or_default();
        let kind = if path == "/v1/files" { "multipart/form-data; boundary=B" } else { "application/json" };
        let length = body.len();
        let mut request = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
        )
        .into_bytes();
        request.extend(body);
        let kept = self.connection.is_some();
        let (status, text) = match self.exchange(&request) {
            Some(answer) => answer,
            // A connection that was kept may have been closed meanwhile.
            None if kept => self.exchange(&request).expect("a server answers"),
            None => panic!("no answer to {:?}", String::from_utf8_lossy(data)),
        };
        let shown = || {
            format!(
                "{:?} was answered {status}: {}",
                String::from_utf8_lossy(data),
                String::from_utf8_lossy(&text)
            )
        };
        assert!((200..600).contains(&status) && !(500..=502).contains(&status), "{}", shown());
        if status >= 400 && status != 405 && !text.is_empty() {
            assert!(std::str::from_utf8(&text).is_ok(), "{}", shown());
        }
        // An error in a stream of events has a status of 200.
        assert!(!text.windows(10).any(|window| window == b"\"INTERNAL\""), "{}", shown());
        (200..300).contains(&status)
    }

    /// The status and the body of a whole answer.
    fn exchange(&mut self, request: &[u8]) -> Option<(u16, Vec<u8>)> {
        if self.connection.is_none() {
            let stream = TcpStream::connect(self.server).expect("the server listens");
            stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time can be set");
            stream.set_nodelay(true).expect("an option can be set");
            (self.connection, self.left) = (Some(stream), Vec::new());
        }
        let answer = self.send(request).and_then(|()| self.answer());
        if answer.is_none() {
            self.connection = None;
        }
        answer
    }

    fn send(&mut self, request: &[u8]) -> Option<()> {
        self.connection.as_mut()?.write_all(request).ok()
    }

    fn answer(&mut self) -> Option<(u16, Vec<u8>)> {
        let head = loop {
            match self.left.windows(4).position(|window| window == b"\r\n\r\n") {
                Some(end) => break String::from_utf8(self.take(end + 4)?).ok()?.to_ascii_lowercase(),
                None => self.more()?,
            }
        };
        let status = head.get(9..12)?.parse().ok()?;
        let header = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        let body = match header("content-length") {
            Some(length) => {
                let length = length.parse().ok()?;
                self.take(length)?
            }
            None if header("transfer-encoding") == Some("chunked") => self.chunks()?,
            None => Vec::new(),
        };
        if header("connection") == Some("close") {
            self.connection = None;
        }
        Some((status, body))
    }

    fn chunks(&mut self) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let end = loop {
                match self.left.windows(2).position(|window| window == b"\r\n") {
                    Some(end) => break end,
                    None => self.more()?,
                }
            };
            let size = usize::from_str_radix(std::str::from_utf8(&self.left[..end]).ok()?, 16).ok()?;
            self.take(end + 2)?;
            let mut chunk = self.take(size + 2)?;
            chunk.truncate(size);
            body.append(&mut chunk);
            if size == 0 {
                return Some(body);
            }
        }
    }

    /// The next bytes.
    fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.left.len() < count {
            self.more()?;
        }
        let rest = self.left.split_off(count);
        Some(std::mem::replace(&mut self.left, rest))
    }

    fn more(&mut self) -> Option<()> {
        let mut bytes = [0; 16 << 10];
        let count = self.connection.as_mut()?.read(&mut bytes).ok().filter(|&count| count > 0)?;
        self.left.extend_from_slice(&bytes[..count]);
        Some(())
    }
}
