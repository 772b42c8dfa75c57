//! A client that shows exactly what came over the wire.

use std::net::SocketAddr;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// A whole response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
    /// The body ended where the server said it would.
    pub(crate) whole: bool,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.body))
    }

    /// The data of each event.
    pub(crate) fn events(&self) -> Vec<Value> {
        let lines = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        lines.map(|data| serde_json::from_str(data).unwrap_or_else(|_| json!(data))).collect()
    }

    /// The body without what differs from run to run.
    pub(crate) fn transcript(&self) -> String {
        let mut out = format!("{}\n", self.status);
        match self.header("content-type") {
            Some("application/json") => {
                let mut value = self.json();
                redact(&mut value);
                out += &serde_json::to_string_pretty(&value).unwrap();
            }
            _ => {
                for line in self.body.lines() {
                    match line.strip_prefix("data: ").map(serde_json::from_str::<Value>) {
                        Some(Ok(mut value)) => {
                            redact(&mut value);
                            out += &format!("data: {value}\n");
                        }
                        _ => out += &format!("{line}\n"),
                    }
                }
            }
        }
        out
    }
}

/// Replaces what differs from run to run.
fn redact(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match name.as_str() {
                    "id" | "created" | "created_at" | "call_id" | "item_id" | "started_at"
                    | "tokens_per_sec" | "decode_time_ms" | "uptime" | "system_fingerprint" | "version"
                    | "idle_seconds" => *value = json!(format!("[{name}]")),
                    _ => redact(value),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(redact),
        _ => {}
    }
}

/// Sends a request as it is and reads until the server closes.
pub(crate) async fn raw(address: SocketAddr, request: &[u8]) -> Response {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // A server that refuses may close before all is sent.
    drop(stream.write_all(request).await);
    read(&mut stream).await
}

/// The bytes of a request.
pub(crate) fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut request = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        request += "Host: localhost\r\n";
    }
    for (name, value) in headers {
        request += &format!("{name}: {value}\r\n");
    }
    if method != "GET" {
        request += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
    }
    let mut bytes = (request + "\r\n").into_bytes();
    bytes.extend(body);
    bytes
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> Response {
    raw(address, &request("GET", path, &[], b"")).await
}

pub(crate) async fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    raw(address, &request("POST", path, &[], body.to_string().as_bytes())).await
}

/// Reads a response to its end.
pub(crate) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Response {
    let mut bytes = Vec::new();
    // A reset after the response is the server's right.
    drop(stream.read_to_end(&mut bytes).await);
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a response has a head");
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head[9..12].parse().unwrap();
    let rest = &bytes[end + 4..];
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let (body, whole) = if chunked { dechunked(rest) } else { (rest.to_vec(), true) };
    Response { status, head, body: String::from_utf8(body).unwrap(), whole }
}

fn dechunked(mut bytes: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        if size == 0 {
            return (body, true);
        }
        let Some(chunk) = bytes.get(end + 2..end + 2 + size) else { break };
        body.extend(chunk);
        bytes = bytes.get(end + 4 + size..).unwrap_or_default();
    }
    (body, false)
}
