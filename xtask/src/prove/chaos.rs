//! Ten keys on one server, one of them hostile: what it sends is what attackers found, all of it at random and without
//! a pause. The other nine ask what people ask, all the while.
//!
//! Quiet spells and hostile ones take turns, so that both meet whatever else the machine does: what is compared is the
//! middle one of the 99th percentiles of the hostile spells with that of the quiet ones. How much of the machine other
//! programs took is written down beside it.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::load::percentiles;
use super::serving::Server;
use super::{Facts, memory};
use crate::{command, fixtures, run as run_tool};

/// How long the hostile key asks in all, in seconds, where it is not half an hour; a quarter of that more is quiet.
const SECONDS: &str = "FORNAX_CHAOS_SECONDS";
const SECONDS_DEFAULT: u64 = 1800;

/// A server that is built already.
const BINARY: &str = "FORNAX_CHAOS_BINARY";

/// A GGUF file in place of the default model: of the same shape, where that cannot be fetched.
const MODEL: &str = "FORNAX_CHAOS_MODEL";

/// Processors for the server alone, as `taskset` has them, where the callers are to have others.
const SERVER_CORES: &str = "FORNAX_CHAOS_SERVER_CORES";

const HONEST: usize = 9;

/// Connections that the hostile key has open at a time.
const HOSTILE: usize = 8;

/// Pairs of a quiet spell and a hostile one.
const ROUNDS: u32 = 10;

/// Between two requests of an honest key, so that quiet means quiet.
const PAUSE: Duration = Duration::from_millis(1500);

/// The slowest of a hundred honest requests may take so many times what it takes without the hostile key.
const SLOWER_MAX: f64 = 2.0;

/// Resident memory may grow by this much from the second quarter of the run to its last.
const GROWTH_MAX: f64 = 0.05;

pub(super) fn run() -> Result<Facts> {
    let seconds = match std::env::var(SECONDS) {
        Ok(seconds) => seconds.parse().with_context(|| format!("{SECONDS} is no number"))?,
        Err(_) => SECONDS_DEFAULT,
    };
    let model = std::env::var(MODEL).ok();
    if model.is_none() {
        fixtures::run(false)?;
    }
    let binary = match std::env::var_os(BINARY) {
        Some(binary) => PathBuf::from(binary),
        None => {
            run_tool(&mut command("cargo", &["build", "--release", "--package", "fornax"]))?;
            memory::target_dir()?.join("release/fornax")
        }
    };
    let folder = std::env::temp_dir().join(format!("fornax-chaos-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let proved = proved(&binary, model.as_deref(), &folder, Duration::from_secs(seconds) / ROUNDS);
    std::fs::remove_dir_all(&folder)?;
    proved
}

fn key(number: usize) -> String {
    format!("key-of-caller-number-{number}")
}

/// `spell` is how long a hostile one lasts.
fn proved(binary: &Path, model: Option<&str>, folder: &Path, spell: Duration) -> Result<Facts> {
    let (keys, jobs) = (folder.join("keys"), folder.join("jobs.db"));
    std::fs::write(&keys, (0..=HONEST).map(|number| key(number) + "\n").collect::<String>())?;
    let (keys, jobs) = (keys.to_string_lossy(), jobs.to_string_lossy());
    let args = [
        "--context",
        "1024",
        "--parallel",
        "4",
        "--api-key-file",
        &*keys,
        "--jobs-db",
        &*jobs,
        "--device",
        "cpu",
    ];
    let cores = std::env::var(SERVER_CORES).ok();
    let mut command = match &cores {
        Some(cores) => {
            let mut command = Command::new("taskset");
            command.args(["--cpu-list", cores]).arg(binary);
            command
        }
        None => Command::new(binary),
    };
    let named = model.map_or_else(|| "smollm2".to_owned(), |path| format!("smollm2={path}"));
    command.args(["serve", &named, "--port", "0"]).args(args).stderr(Stdio::null());
    let server = Server::of(command.env("FORNAX_CACHE", fixtures::cache_dir()?), &key(0))?;
    let pages = server.use_every_page()?;
    let (mut quiet, mut chaos) = (Tally::default(), Tally::default());
    let memory = Mutex::new(Vec::new());
    let sent: [AtomicUsize; ATTACKS.len()] = Default::default();
    for round in 0..ROUNDS {
        quiet.spell(&server, || honest_load(&server, spell / 4, &memory))?;
        let over = AtomicBool::new(false);
        let hostile = std::thread::scope(|scope| {
            for thread in 0..HOSTILE {
                let (server, over, sent) = (&server, &over, &sent);
                let seed = u64::from(round) * HOSTILE as u64 + thread as u64 + 1;
                scope.spawn(move || hostile_load(server, seed, over, sent));
            }
            let spell = chaos.spell(&server, || honest_load(&server, spell, &memory));
            over.store(true, Ordering::Relaxed);
            spell
        });
        let status = server.child.lock().expect("no holder panics").try_wait()?;
        ensure!(status.is_none(), "the server is gone: {status:?}");
        hostile?;
        end_jobs(&server)?;
        println!("round {}: quiet {}; hostile {}", round + 1, quiet.last(), chaos.last());
    }
    let health = server.settled()?;
    let growth = growth(&memory.lock().expect("no holder panics"));
    let peak = memory.lock().expect("no holder panics").iter().copied().max().unwrap_or(0);
    let (quiet_99, chaos_99) = (quiet.middle_99(), chaos.middle_99());
    let slower = chaos_99.as_secs_f64() / quiet_99.as_secs_f64().max(1e-9);
    let attacks: Vec<String> = ATTACKS
        .iter()
        .zip(&sent)
        .map(|((name, _), count)| format!("{name} {}", count.load(Ordering::Relaxed)))
        .collect();
    let mut facts = vec![
        (
            "model",
            format!(
                "{}, --context 1024 --parallel 4, ten keys, jobs in SQLite",
                model.unwrap_or("SmolLM2-135M-Instruct Q4_1")
            ),
        ),
        (
            "the server's processors",
            cores.map_or_else(|| "all".to_owned(), |cores| format!("{cores}, its callers' are others")),
        ),
        ("quiet", format!("{ROUNDS} spells of {} s, {}", (spell / 4).as_secs(), quiet.counted())),
        ("hostile", format!("{ROUNDS} spells of {} s, {}", spell.as_secs(), chaos.counted())),
        ("hostile requests by kind", attacks.join(", ")),
        ("honest requests, all of quiet spells (50, 90, 99 %, most)", quiet.said()),
        ("honest requests, all of hostile spells (50, 90, 99 %, most)", chaos.said()),
        ("99th percentiles of the quiet spells", quiet.percentiles_99()),
        ("99th percentiles of the hostile spells", chaos.percentiles_99()),
        ("the middle one of the latter beside that of the former", format!("{slower:.2} times")),
        (
            "other programs' part of the machine's time, quiet and hostile",
            format!("{:.0} %, {:.0} %", quiet.others() * 100.0, chaos.others() * 100.0),
        ),
        (
            "the callers' part of it, who are on the same machine",
            format!("{:.0} %, {:.0} %", quiet.callers() * 100.0, chaos.callers() * 100.0),
        ),
        ("resident memory, most", format!("{} MiB", peak >> 20)),
        ("its growth from the second to the last quarter", format!("{:.1} %", growth * 100.0)),
        ("pages, all used before", pages.to_string()),
        ("pages and places held at the end", format!("{}", health["kv"]["pages_used"])),
    ];
    for (kind, (name, _)) in REQUESTS.iter().enumerate() {
        facts.push((*name, format!("quiet {}; hostile {}", quiet.of(kind), chaos.of(kind))));
    }
    for (name, value) in &facts {
        println!("{name}: {value}");
    }
    ensure!(slower <= SLOWER_MAX, "the slowest of a hundred requests takes {slower:.2} times as long");
    ensure!(growth <= GROWTH_MAX, "resident memory grew by {:.1} %", growth * 100.0);
    Ok(facts)
}

/// Ends the hostile key's jobs, which would go on in the quiet: those that wait, and those that are worked on.
fn end_jobs(server: &Server) -> Result<()> {
    let ask = |method: &str, path: &str| -> Result<Value> {
        let answer = server.exchange_as(&key(HONEST), method, path, "")?;
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        serde_json::from_str(body).with_context(|| format!("{path}: {answer}"))
    };
    ask("POST", "/v2/default/purge-queue")?;
    let jobs = ask("GET", "/v2/default/jobs?limit=100")?;
    for job in jobs["jobs"].as_array().context("a list of jobs")? {
        let id = job["id"].as_str().context("a job has an id")?;
        ask("POST", &format!("/v2/default/cancel/{id}"))?;
    }
    server.settled().map(drop)
}

/// An honest request that was answered whole.
#[derive(Clone, Copy)]
struct Answered {
    /// Which of `REQUESTS`.
    kind: usize,
    took: Duration,
}

/// What was seen of the quiet spells, or of the others.
#[derive(Default)]
struct Tally {
    /// The honest requests, a list for each spell, the quickest first.
    spells: Vec<Vec<Answered>>,
    /// Seconds of processor time: what there was, what was of other programs, and what was of the callers.
    time: f64,
    of_others: f64,
    of_callers: f64,
}

impl Tally {
    fn spell(&mut self, server: &Server, load: impl FnOnce() -> Result<Vec<Answered>>) -> Result<()> {
        let (began, before) = (Instant::now(), Processors::now(server)?);
        let mut answered = load()?;
        answered.sort_unstable_by_key(|answered| answered.took);
        self.time += began.elapsed().as_secs_f64() * std::thread::available_parallelism()?.get() as f64;
        let after = Processors::now(server)?;
        self.of_others += after.others - before.others;
        self.of_callers += after.callers - before.callers;
        self.spells.push(answered);
        Ok(())
    }

    fn each_99(&self) -> Vec<Duration> {
        self.spells.iter().map(|answered| answered[answered.len() * 99 / 100].took).collect()
    }

    /// The middle one of the spells' 99th percentiles.
    fn middle_99(&self) -> Duration {
        let mut each = self.each_99();
        each.sort_unstable();
        each[each.len() / 2]
    }

    fn percentiles_99(&self) -> String {
        let each: Vec<String> =
            self.each_99().iter().map(|time| format!("{:.0}", time.as_secs_f64() * 1e3)).collect();
        format!("{} ms", each.join(", "))
    }

    fn counted(&self) -> String {
        format!("{} honest requests, none failed", self.spells.iter().map(Vec::len).sum::<usize>())
    }

    fn said(&self) -> String {
        percentiles(&mut took(&self.spells.concat()))
    }

    /// The same of one kind of request.
    fn of(&self, kind: usize) -> String {
        let mut answered = self.spells.concat();
        answered.retain(|answered| answered.kind == kind);
        percentiles(&mut took(&answered))
    }

    fn last(&self) -> String {
        percentiles(&mut self.spells.last().map(|answered| took(answered)).unwrap_or_default())
    }

    /// The part of the machine's time that other programs took.
    fn others(&self) -> f64 {
        self.of_others / self.time.max(1e-9)
    }

    /// And the part that the callers took.
    fn callers(&self) -> f64 {
        self.of_callers / self.time.max(1e-9)
    }
}

fn took(answered: &[Answered]) -> Vec<Duration> {
    answered.iter().map(|answered| answered.took).collect()
}

/// Seconds of processor time since the machine began.
struct Processors {
    /// Of neither the server and its processes nor this one.
    others: f64,
    /// Of this one, which asks.
    callers: f64,
}

impl Processors {
    fn now(server: &Server) -> Result<Processors> {
        /// Of the clock in which Linux counts processor time for programs.
        const TICKS_PER_SECOND: f64 = 100.0;
        let sum = |text: &str, fields: std::ops::Range<usize>| -> Result<u64> {
            let fields = text.split_whitespace().skip(fields.start).take(fields.len());
            fields.map(|field| field.parse::<u64>().context("a number")).sum()
        };
        let stat = std::fs::read_to_string("/proc/stat")?;
        let line = stat.lines().next().context("a line of all processors")?;
        // user, nice, system; then idle and waiting; then interrupts.
        let all = sum(line, 1..4)? + sum(line, 6..8)?;
        let of = |process: &str| -> Result<u64> {
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
            // Behind the name, which may have spaces: user, system, and those of children that have ended.
            sum(stat.rsplit_once(')').context("a name")?.1, 11..15)
        };
        let (served, callers) = (of(&server.id().to_string())?, of("self")?);
        let seconds = |ticks: u64| ticks as f64 / TICKS_PER_SECOND;
        Ok(Processors { others: seconds(all.saturating_sub(served + callers)), callers: seconds(callers) })
    }
}

/// By how much the median of the last quarter is above that of the second.
fn growth(memory: &[u64]) -> f64 {
    let median = |from: usize, to: usize| {
        let mut bytes: Vec<u64> = memory.get(from..to).unwrap_or_default().to_vec();
        bytes.sort_unstable();
        bytes.get(bytes.len() / 2).copied().unwrap_or(1) as f64
    };
    let quarter = memory.len() / 4;
    median(3 * quarter, memory.len()) / median(quarter, 2 * quarter) - 1.0
}

/// Every honest key asks, one request after the other, each of which must be answered whole. How long each took;
/// resident memory is noted once a second.
fn honest_load(server: &Server, how_long: Duration, memory: &Mutex<Vec<u64>>) -> Result<Vec<Answered>> {
    let until = Instant::now() + how_long;
    std::thread::scope(|scope| -> Result<Vec<Answered>> {
        let keys: Vec<_> = (0..HONEST)
            .map(|number| {
                scope.spawn(move || -> Result<Vec<Answered>> {
                    let (mut index, mut answered) = (number, Vec::new());
                    while Instant::now() < until {
                        let began = Instant::now();
                        let kind = index % REQUESTS.len();
                        honest_request(server, &key(number), kind, index)?;
                        answered.push(Answered { kind, took: began.elapsed() });
                        index += HONEST;
                        sleep(PAUSE);
                    }
                    Ok(answered)
                })
            })
            .collect();
        while Instant::now() < until && !keys.iter().any(|key| key.is_finished()) {
            memory.lock().expect("no holder panics").push(server.resident()?);
            sleep(Duration::from_secs(1));
        }
        let answered: Result<Vec<_>> =
            keys.into_iter().map(|key| key.join().expect("honest callers do not panic")).collect();
        Ok(answered?.concat())
    })
}

/// What honest keys ask: the path and the body of a request with this content and so many tokens, and what an answer
/// has that is whole.
struct Asked {
    path: &'static str,
    body: Value,
    ended: &'static str,
}

/// One of the kinds of honest requests: how it is called in what is found, and how it is made.
type Kind = (&'static str, fn(&str, usize) -> Asked);

const REQUESTS: [Kind; 5] = [
    ("completions", |content, tokens| Asked {
        path: "/v1/completions",
        body: json!({"prompt": content, "max_tokens": tokens}),
        ended: "\"finish_reason\":\"",
    }),
    ("chats in a stream", |content, tokens| Asked {
        path: "/v1/chat/completions",
        body: json!({"messages": said(content), "max_tokens": tokens, "stream": true}),
        ended: "data: [DONE]",
    }),
    ("messages", |content, tokens| Asked {
        path: "/v1/messages",
        body: json!({"model": "smollm2", "messages": said(content), "max_tokens": tokens}),
        ended: "\"stop_reason\":\"",
    }),
    ("counting tokens", |content, _| Asked {
        path: "/tokenize",
        body: json!({"content": content}),
        ended: "\"count\":",
    }),
    ("chats with a schema", |content, _| {
        let yes_or_no = json!({"type": "object", "properties": {"is_prime": {"type": "boolean"}},
            "required": ["is_prime"], "additionalProperties": false});
        let form = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": yes_or_no}});
        Asked {
            path: "/v1/chat/completions",
            body: json!({"messages": said(content), "max_tokens": 16, "response_format": form}),
            ended: "\"finish_reason\":\"",
        }
    }),
];

fn said(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

fn honest_request(server: &Server, key: &str, kind: usize, index: usize) -> Result<()> {
    let content = format!("Tell me in a few words about the number {index}.");
    let Asked { path, body, ended } = (REQUESTS[kind].1)(&content, 4 + index % 12);
    let text = server.exchange_as(key, "POST", path, &body.to_string())?;
    ensure!(text.starts_with("HTTP/1.1 200") && text.contains(ended), "{path}, request {index}: {text}");
    Ok(())
}

/// Random numbers that are the same every time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap_or(0) % most
    }
}

/// Asks whatever hurts, until it is told to stop. What becomes of it is its own business.
fn hostile_load(server: &Server, seed: u64, over: &AtomicBool, sent: &[AtomicUsize]) {
    let mut dice = Dice(seed);
    while !over.load(Ordering::Relaxed) {
        let kind = dice.below(ATTACKS.len());
        sent[kind].fetch_add(1, Ordering::Relaxed);
        // A refusal may come before all is sent.
        drop((ATTACKS[kind].1)(server, &mut dice));
    }
}

/// One of the ways to hurt.
type Attack = (&'static str, fn(&Server, &mut Dice) -> Result<()>);

const ATTACKS: [Attack; 14] = [
    ("patterns that multiply", |server, dice| {
        let patterns: Vec<Value> = (0..2 + dice.below(39))
            .map(|number| json!({"pattern": format!("^(.*{}.*)*x{number}$", letter(number))}))
            .collect();
        ask(server, dice, "/v1/chat/completions", &with_schema(&json!({"type": "string", "allOf": patterns})))
    }),
    ("grammars that multiply", |server, dice| {
        let count = 2 + dice.below(24);
        let terminals: String =
            (0..count).map(|number| format!("T{number}: /(.*{}.*)*x{number}/\n", letter(number))).collect();
        let join = [" & ", " & ~"][dice.below(2)];
        let all: Vec<String> = (0..count).map(|number| format!("T{number}")).collect();
        let grammar = format!("start: ALL\n{terminals}ALL: {}", all.join(join));
        ask(server, dice, "/v1/completions", &json!({"prompt": "a", "guided_grammar": grammar}))
    }),
    ("schemas that are large", |server, dice| {
        let number = dice.below(1 << 20);
        let values: Vec<String> = (0..9000).map(|value| format!("value {value} of {number}")).collect();
        let inner =
            (0..40).fold(json!({"enum": values}), |inner, _| json!({"type": "array", "items": inner}));
        ask(server, dice, "/v1/chat/completions", &with_schema(&inner))
    }),
    ("repetitions", |server, dice| {
        let (some, many) = (1 + dice.below(1000), 1 + dice.below(1000));
        let regex = format!("((a{{1,{some}}}){{1,{many}}}|(.*b.{{{many}}}))*c");
        ask(server, dice, "/v1/completions", &json!({"prompt": "a", "guided_regex": regex}))
    }),
    ("thousands of fields", |server, dice| {
        static BODIES: OnceLock<Vec<String>> = OnceLock::new();
        let bodies = BODIES.get_or_init(|| {
            let fields =
                |count: usize| (0..count).map(|number| format!("\"k{number}\":0,")).collect::<String>();
            let counts = [10_000, 40_000, 110_000];
            counts.map(|count| format!("{{\"prompt\":\"a\",{}\"seed\":{}}}", fields(count), u64::MAX)).into()
        });
        let body = &bodies[dice.below(bodies.len())];
        send(server, dice, "/v1/completions", body)
    }),
    ("millions of values", |server, dice| {
        let item = ["{\"\":0},", "[1],", "1,", "\"a\","][dice.below(4)];
        let items = item.repeat((7 << 20) / item.len());
        let field = ["prompt", "x"][dice.below(2)];
        let body = format!("{{\"{field}\":[{}]}}", items.trim_end_matches(','));
        send(server, dice, "/v1/completions", &body)
    }),
    ("batches", |server, dice| {
        let items: Vec<Value> = (0..1 + dice.below(4096)).map(|id| json!({"id": id, "text": "x"})).collect();
        let prefix = "p ".repeat(dice.below(1000));
        ask(
            server,
            dice,
            "/v2/default/run",
            &json!({"input": {"shared_prefix": prefix, "items": items, "max_tokens": 2}}),
        )
    }),
    ("texts to tokenize", |server, dice| {
        let word = ["hello world ", "a", " ", "\u{e4}\u{1f600}"][dice.below(4)];
        let text = word.repeat(dice.below(2 << 20) / word.len());
        ask(server, dice, "/tokenize", &json!({"content": text, "with_pieces": true}))
    }),
    ("long prompts and answers", |server, dice| {
        let prompt: Vec<usize> = (0..600).map(|_| 1000 + dice.below(40_000)).collect();
        let body = json!({"prompt": prompt, "max_tokens": 400, "n": 1 + dice.below(16), "ignore_eos": true,
            "priority": -128, "stream": true});
        ask(server, dice, "/v1/completions", &body)?;
        // Once more without the priority, which it may not have.
        let body = json!({"prompt": prompt, "max_tokens": 400, "ignore_eos": true, "logprobs": 20});
        ask(server, dice, "/v1/completions", &body)
    }),
    ("answers that nobody reads", |server, dice| {
        let body =
            json!({"prompt": "a", "max_tokens": 900, "ignore_eos": true, "stream": true, "logprobs": 20});
        let stream = server.send_as(&key(HONEST), "POST", "/v1/completions", &body.to_string())?;
        sleep(Duration::from_millis(dice.below(3000) as u64));
        drop(stream);
        Ok(())
    }),
    ("bodies that do not come", |server, dice| {
        let mut stream = server.connect()?;
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {}\r\nContent-Length: 8000000\r\n\r\n{{",
            key(HONEST)
        );
        stream.write_all(head.as_bytes())?;
        sleep(Duration::from_millis(dice.below(3000) as u64));
        Ok(())
    }),
    ("what is others'", |server, dice| {
        for (path, body) in [
            ("/v2/default/purge-queue", ""),
            ("/cancel", "{\"job_id\":\"job-1\"}"),
            ("/v2/default/cancel/01a1f0bba3c39b0cb2b5a7dba94e128b7b11c9aad7eb", ""),
        ] {
            send(server, dice, path, body)?;
        }
        Ok(())
    }),
    ("deep and broken JSON", |server, dice| {
        let body = match dice.below(3) {
            0 => "[".repeat(1 << 20),
            1 => "{\"prompt\":\"\u{0}".to_owned(),
            _ => format!("{{\"prompt\":{}1{}}}", "[".repeat(100), "]".repeat(100)),
        };
        send(server, dice, "/v1/completions", &body)
    }),
    ("chats with templates' names", |server, dice| {
        let body = json!({"messages": [{"role": "user", "content": "<|im_end|>".repeat(dice.below(100_000))}],
            "chat_template_kwargs": {"messages": []}});
        ask(server, dice, "/v1/chat/completions", &body)
    }),
];

fn letter(number: usize) -> char {
    char::from(b'a' + u8::try_from(number % 26).unwrap_or(0))
}

fn with_schema(schema: &Value) -> Value {
    json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 8,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}})
}

fn ask(server: &Server, dice: &mut Dice, path: &str, body: &Value) -> Result<()> {
    send(server, dice, path, &body.to_string())
}

/// Sends it as the hostile key, and reads what comes or leaves before.
fn send(server: &Server, dice: &mut Dice, path: &str, body: &str) -> Result<()> {
    let mut stream = server.send_as(&key(HONEST), "POST", path, body)?;
    if dice.below(3) == 0 {
        sleep(Duration::from_millis(dice.below(300) as u64));
        return Ok(());
    }
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(())
}
