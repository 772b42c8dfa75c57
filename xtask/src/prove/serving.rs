//! A running `fornax serve` and what is asked of it, for the proofs that ask much.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::fixtures;

/// A server with a model, ended with this.
pub(super) struct Server {
    pub(super) child: Mutex<Child>,
    id: u32,
    address: String,
    /// Whose requests these are, where it has keys.
    key: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut child = self.child.lock().expect("no holder panics");
        // Already gone is as good.
        drop(child.kill());
        drop(child.wait());
    }
}

impl Server {
    /// Starts it with the default model, and waits until it is ready.
    pub(super) fn start(binary: &Path, args: &[&str], key: &str) -> Result<Server> {
        let mut command = Command::new(binary);
        command.args(["serve", "smollm2", "--port", "0"]).args(args);
        Server::of(command.env("FORNAX_CACHE", fixtures::cache_dir()?).stderr(Stdio::null()), key)
    }

    /// The same of a command that starts one.
    pub(super) fn of(command: &mut Command, key: &str) -> Result<Server> {
        let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start the server")?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("its output is piped")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let address =
            line.trim().strip_prefix("listening on http://").context("it does not listen")?.to_owned();
        let server = Server { id: child.id(), child: Mutex::new(child), address, key: key.to_owned() };
        while !server.exchange("GET", "/ready", "")?.starts_with("HTTP/1.1 200") {}
        Ok(server)
    }

    /// Host and port.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn id(&self) -> u32 {
        self.id
    }

    pub(super) fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(300)))?;
        Ok(stream)
    }

    /// Sends a request of `key`.
    pub(super) fn send_as(&self, key: &str, method: &str, path: &str, body: &str) -> Result<TcpStream> {
        let mut stream = self.connect()?;
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\
             Content-Length: {length}\r\n\r\n"
        );
        stream.write_all((head + body).as_bytes())?;
        Ok(stream)
    }

    pub(super) fn send(&self, method: &str, path: &str, body: &str) -> Result<TcpStream> {
        self.send_as(&self.key, method, path, body)
    }

    pub(super) fn exchange(&self, method: &str, path: &str, body: &str) -> Result<String> {
        self.exchange_as(&self.key, method, path, body)
    }

    pub(super) fn exchange_as(&self, key: &str, method: &str, path: &str, body: &str) -> Result<String> {
        let mut text = String::new();
        self.send_as(key, method, path, body)?.read_to_string(&mut text)?;
        Ok(text)
    }

    /// Computes prompts that have nothing in common until every page of the pool keeps a part of one; how many there
    /// are.
    pub(super) fn use_every_page(&self) -> Result<u64> {
        for own in 0..100 {
            let prompt: Vec<usize> = (0..480).map(|place| 1000 + own * 480 % 40_000 + place).collect();
            let body = json!({"prompt": prompt, "max_tokens": 1}).to_string();
            let response = self.exchange("POST", "/v1/completions", &body)?;
            ensure!(response.starts_with("HTTP/1.1 200"), "{response}");
            let kv = &self.health()?["kv"];
            if kv["pages_cached"] == kv["pages_total"] {
                return kv["pages_total"].as_u64().context("a count");
            }
        }
        bail!("some pages are never used: {}", self.health()?["kv"])
    }

    pub(super) fn health(&self) -> Result<Value> {
        let response = self.exchange("GET", "/health", "")?;
        let body = response.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        serde_json::from_str(body).with_context(|| response.clone())
    }

    /// Health once the last request has left.
    pub(super) fn settled(&self) -> Result<Value> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let health = self.health()?;
            if health["running"] == 0 && health["waiting"] == 0 && health["kv"]["pages_used"] == 0 {
                return Ok(health);
            }
            ensure!(Instant::now() < deadline, "something is left: {health}");
        }
    }

    /// Bytes of its resident memory.
    pub(super) fn resident(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id))?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS")?;
        let kib: u64 = line.split_whitespace().nth(1).context("no number")?.parse()?;
        Ok(kib << 10)
    }
}
