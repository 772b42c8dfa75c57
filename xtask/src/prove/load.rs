//! Thousands of requests from 64 clients against the real server and the default model, some of which leave midway.

use std::io::{BufRead, BufReader, Read};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::json;

use super::serving::Server;
use super::{Facts, memory};
use crate::{command, fixtures, run as run_tool};

const CLIENTS: usize = 64;
const REQUESTS: usize = 4000;

/// Every tenth client leaves after its first piece of text.
const LEAVES: usize = 10;

/// Resident memory may grow by this much from a quarter of the requests on: what allocators keep for themselves. Pages
/// of keys and values are promised from the start but resident only once they were used, so all are used before.
const GROWTH_MAX: f64 = 0.03;

/// Upper bounds of the histograms' buckets.
const HEALTH_MS: &[f64] = &[0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0];
const FIRST_MS: &[f64] = &[50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0];

pub(super) fn run() -> Result<Facts> {
    fixtures::run(false)?;
    run_tool(&mut command("cargo", &["build", "--release", "--package", "fornax"]))?;
    let binary = memory::target_dir()?.join("release/fornax");
    let args = ["--context", "512", "--parallel", "16", "--max-queue", "256"];
    let server = Server::start(&binary, &args, "")?;
    let pages = server.use_every_page()?;
    let tally = Tally::default();
    let next = AtomicUsize::new(0);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let asking = scope.spawn(|| ask_health(&server, &over, &tally));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= REQUESTS {
                            return Ok(());
                        }
                        request(&server, index, &tally)?;
                        if index.is_multiple_of(REQUESTS / 100) {
                            tally.memory.lock().expect("no holder panics").push((index, server.resident()?));
                        }
                    }
                })
            })
            .collect();
        let ended: Vec<Result<()>> =
            clients.into_iter().map(|client| client.join().expect("clients do not panic")).collect();
        over.store(true, Ordering::Relaxed);
        asking.join().expect("it does not panic")?;
        ended.into_iter().collect()
    })?;

    let health = server.settled()?;
    let growth = tally.growth();
    ensure!(growth <= GROWTH_MAX, "resident memory grew by {:.1} %", growth * 100.0);
    let drained = drain(&server)?;
    let mut health_times = tally.health.lock().expect("no holder panics").clone();
    let mut first_times = tally.first.lock().expect("no holder panics").clone();
    let memory = tally.memory.lock().expect("no holder panics").last().map_or(0, |(_, bytes)| *bytes);
    Ok(vec![
        ("model", "SmolLM2-135M-Instruct Q4_1, --context 512 --parallel 16 --max-queue 256".to_owned()),
        ("requests", format!("{REQUESTS} by {CLIENTS} clients, two in three streamed")),
        ("pages, all used before", pages.to_string()),
        ("left midway", tally.left.load(Ordering::Relaxed).to_string()),
        ("answered whole", tally.whole.load(Ordering::Relaxed).to_string()),
        ("errors", "0".to_owned()),
        ("pages in use at the end", health["kv"]["pages_used"].to_string()),
        ("resident memory at the end", format!("{} MiB", memory >> 20)),
        ("its growth after the first quarter", format!("{:.1} %", growth * 100.0)),
        ("/health all the while (50, 90, 99 %, most)", percentiles(&mut health_times)),
        ("/health, counts by milliseconds up to", histogram(&health_times, HEALTH_MS)),
        ("time to first token (50, 90, 99 %, most)", percentiles(&mut first_times)),
        ("time to first token, counts by milliseconds up to", histogram(&first_times, FIRST_MS)),
        ("SIGTERM with streams under way", drained),
    ])
}

/// What was seen.
#[derive(Default)]
struct Tally {
    whole: AtomicUsize,
    left: AtomicUsize,
    health: Mutex<Vec<Duration>>,
    first: Mutex<Vec<Duration>>,
    /// (requests begun, resident bytes).
    memory: Mutex<Vec<(usize, u64)>>,
}

impl Tally {
    /// By how much the median of the last quarter is above that of the second.
    fn growth(&self) -> f64 {
        let memory = self.memory.lock().expect("no holder panics");
        let median = |from: usize, to: usize| {
            let within = memory.iter().filter(|(index, _)| (from..to).contains(index));
            let mut bytes: Vec<u64> = within.map(|(_, bytes)| *bytes).collect();
            bytes.sort_unstable();
            bytes.get(bytes.len() / 2).copied().unwrap_or(1) as f64
        };
        median(REQUESTS * 3 / 4, REQUESTS) / median(REQUESTS / 4, REQUESTS / 2) - 1.0
    }
}

/// One request, read to its end or left.
fn request(server: &Server, index: usize, tally: &Tally) -> Result<()> {
    let (streams, leaves) = (!index.is_multiple_of(3), index % LEAVES == 7);
    let body = json!({
        "messages": [{"role": "user", "content": format!("Tell me about the number {}.", index % 97)}],
        "max_tokens": 4 + index % 24,
        "temperature": if index.is_multiple_of(2) { 0.0 } else { 1.0 },
        "seed": index,
        "stream": streams,
    });
    let began = Instant::now();
    let stream = server.send("POST", "/v1/chat/completions", &body.to_string())?;
    if leaves && !streams {
        // Nothing shows how far a whole answer is: it waits or is being computed by now.
        std::thread::sleep(Duration::from_millis(100));
        tally.left.fetch_add(1, Ordering::Relaxed);
        return Ok(());
    }
    let mut reader = BufReader::new(stream);
    let mut text = String::new();
    while reader.read_line(&mut text)? > 0 {
        if text.contains("\"delta\":{\"content\"") {
            tally.first.lock().expect("no holder panics").push(began.elapsed());
            break;
        }
    }
    if leaves {
        tally.left.fetch_add(1, Ordering::Relaxed);
        return Ok(());
    }
    reader.read_to_string(&mut text)?;
    let ended = if streams { "data: [DONE]" } else { "\"finish_reason\":\"" };
    ensure!(text.starts_with("HTTP/1.1 200") && text.contains(ended), "request {index}: {text}");
    tally.whole.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Stops the server while it answers: what is under way ends well, and so does the process.
fn drain(server: &Server) -> Result<String> {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": true, "stream": true});
    let mut streams = Vec::new();
    for _ in 0..8 {
        let mut stream = server.send("POST", "/v1/completions", &body.to_string())?;
        let mut first = [0; 1];
        stream.read_exact(&mut first)?;
        streams.push(stream);
    }
    run_tool(Command::new("kill").arg("-TERM").arg(server.id().to_string()))?;
    for mut stream in streams {
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        ensure!(text.contains("data: [DONE]"), "a stream was cut: {text}");
    }
    let status = server.child.lock().expect("no holder panics").wait()?;
    if !status.success() {
        bail!("the server ended with {status}");
    }
    Ok("8 of 8 finished, exit 0".to_owned())
}

/// Asks for health all the while.
fn ask_health(server: &Server, over: &AtomicBool, tally: &Tally) -> Result<()> {
    while !over.load(Ordering::Relaxed) {
        let began = Instant::now();
        let health = server.health()?;
        tally.health.lock().expect("no holder panics").push(began.elapsed());
        ensure!(health["status"] == "ready", "{health}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

pub(super) fn percentiles(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let at = |percent: usize| {
        let index = (times.len() * percent / 100).min(times.len().saturating_sub(1));
        times.get(index).map_or("none".to_owned(), |time| format!("{:.1} ms", time.as_secs_f64() * 1e3))
    };
    [50, 90, 99, 100].map(at).join(", ")
}

/// Counts by upper bound; what is beyond the last is told as more.
fn histogram(times: &[Duration], bounds_ms: &[f64]) -> String {
    let mut counts = vec![0; bounds_ms.len() + 1];
    for time in times {
        let milliseconds = time.as_secs_f64() * 1e3;
        counts[bounds_ms.partition_point(|bound| *bound < milliseconds)] += 1;
    }
    let bounds = bounds_ms.iter().map(f64::to_string).chain(["more".to_owned()]);
    let buckets: Vec<String> = bounds.zip(counts).map(|(bound, count)| format!("{bound}: {count}")).collect();
    buckets.join(", ")
}
