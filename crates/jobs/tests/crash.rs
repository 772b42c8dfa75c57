//! Workers killed at random moments lose no accepted job and complete none twice.
//!
//! The test starts itself again as a worker that submits, runs and tells of jobs, and kills it, as often as
//! `FORNAX_KILLS` says.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test stops at the first surprise and says what it did"
)]

mod common;

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use common::{Database, databases};
use fornax_jobs::{
    Answer, Body, Error, Failure, Model, NewJob, Policy, Question, Runner, RunnerOptions, State, Store,
    StoreOptions, WebhookOptions, Webhooks,
};
use serde_json::{Value, json};
use tokio::sync::watch;

const TEST: &str = "workers_killed_at_random_moments_lose_nothing_and_complete_nothing_twice";

/// Jobs that a worker submits before it only works.
const JOBS: usize = 12;

/// A worker is killed within so many milliseconds from when it is open.
const LIFE_MS: u64 = 250;

/// Says what it was asked, after a while that depends on it.
struct Echo;

impl Model for Echo {
    fn facts(&self) -> (String, String) {
        ("echo".to_owned(), "F32".to_owned())
    }

    fn check(&self, _: &Question) -> Result<(), Failure> {
        Ok(())
    }

    async fn answer(
        &self,
        question: Question,
        hears: impl Fn(&str) + Send + Sync,
    ) -> Result<Answer, Failure> {
        let text = match &question.body {
            Body::Completion(body) => body["prompt"].as_str().unwrap().to_owned(),
            Body::Chat(body) => body["messages"][0]["content"].as_str().unwrap().to_owned(),
        };
        hears(&text);
        tokio::time::sleep(Duration::from_millis(text.len() as u64 % 17)).await;
        Ok(Answer { text, ..Answer::default() })
    }
}

/// Numbers that look random and are the same for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

fn job(key: &str, port: &str) -> NewJob {
    // Every third job is a batch.
    let is_batch = key.bytes().map(u64::from).sum::<u64>().is_multiple_of(3);
    let input = match is_batch {
        true => {
            json!({"items": [{"id": "a", "text": format!("a {key}")}, {"id": "b", "text": format!("b {key}")}]})
        }
        false => json!({"prompt": format!("done {key}")}),
    };
    NewJob {
        model: "m".to_owned(),
        owner: "o".to_owned(),
        input,
        webhook: Some(format!("http://127.0.0.1:{port}/{key}")),
        policy: Policy::default(),
        idempotency_key: Some(key.to_owned()),
    }
}

/// What the output of a job has to be.
fn is_right(key: &str, output: &Value) -> bool {
    match &output["output"] {
        Value::String(text) => *text == format!("done {key}"),
        items => items[0]["output"] == format!("a {key}") && items[1]["output"] == format!("b {key}"),
    }
}

fn webhooks() -> Webhooks {
    let hosts = vec!["127.0.0.1".to_owned()];
    Webhooks::new(WebhookOptions { hosts, allow_private: true, secret: b"secret".to_vec() })
}

/// Works until `stop` says so.
fn begin(store: &Store, stop: &watch::Sender<bool>) -> Vec<tokio::task::JoinHandle<()>> {
    let options = RunnerOptions {
        lease: Duration::from_millis(500),
        poll: Duration::from_millis(50),
        ..RunnerOptions::default()
    };
    let runner = Runner::new(store.clone(), Arc::new(Echo), "m", options).run(stop.subscribe());
    let sender = webhooks().run(store.clone(), stop.subscribe());
    let runner = async {
        runner.await;
    };
    vec![tokio::spawn(runner), tokio::spawn(sender)]
}

/// The life of a worker: it submits jobs, saying before and after, and works until it is killed.
async fn work(database: &str, port: &str, round: &str) {
    let store = Store::open(StoreOptions::new(database)).await.unwrap();
    println!("open");
    let _tasks = begin(&store, &watch::Sender::new(false));
    for n in 0..JOBS {
        let key = format!("{round}-{n}");
        println!("submitting {key}");
        let submitted = store.submit(job(&key, port)).await.unwrap();
        println!("accepted {key} {}", submitted.id);
    }
    std::future::pending::<()>().await;
}

/// By job, every body that came.
type Heard = BTreeMap<String, Vec<String>>;

/// Hears webhooks.
fn listen() -> (u16, Arc<Mutex<Heard>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let heard: Arc<Mutex<Heard>> = Arc::default();
    let writes = Arc::clone(&heard);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A sender that was killed midway is heard again.
            if let Some(body) = hear(stream) {
                let told: Value = serde_json::from_str(&body).unwrap();
                let id = told["id"].as_str().unwrap().to_owned();
                writes.lock().unwrap().entry(id).or_default().push(body);
            }
        }
    });
    (port, heard)
}

fn hear(mut stream: TcpStream) -> Option<String> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
            length = value.trim().parse().ok()?;
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").ok()?;
    String::from_utf8(body).ok()
}

/// What the killed workers said.
#[derive(Default)]
struct Said {
    /// Key and id of every job whose submit returned.
    accepted: Vec<(String, String)>,
    /// Workers killed between the beginning and the end of a submit.
    in_submit: usize,
}

fn kill_workers(database: &Database, kills: u64, port: u16, random: &mut Random) -> Said {
    let mut said = Said::default();
    for round in 0..kills {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([TEST, "--exact", "--nocapture"])
            .env("FORNAX_CRASH_DATABASE", &database.url)
            .env("FORNAX_CRASH_PORT", port.to_string())
            .env("FORNAX_CRASH_ROUND", round.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (lines, hears) = mpsc::channel();
        let reader = thread::spawn(move || {
            stdout.lines().map_while(Result::ok).for_each(|line| lines.send(line).unwrap())
        });
        let mut all = Vec::new();
        while let Ok(line) = hears.recv() {
            all.push(line);
            if all.last().is_some_and(|line| line == "open") {
                break;
            }
        }
        // The moment is the point of the test.
        thread::sleep(Duration::from_millis(random.below(LIFE_MS)));
        child.kill().unwrap();
        child.wait().unwrap();
        reader.join().unwrap();
        all.extend(hears.try_iter());
        assert!(all.iter().any(|line| line == "open"), "a worker never opened the store: {all:?}");
        let words = |verb: &'static str| all.iter().filter_map(move |line| line.strip_prefix(verb));
        let accepted = words("accepted ").filter_map(|line| line.split_once(' '));
        let before = said.accepted.len();
        said.accepted.extend(accepted.map(|(key, id)| (key.to_owned(), id.to_owned())));
        said.in_submit += usize::from(words("submitting ").count() > said.accepted.len() - before);
    }
    said
}

async fn all_ended(store: &Store) -> bool {
    let counts = store.counts("m").await.unwrap();
    counts.of(State::Queued) + counts.of(State::Running) == 0
}

#[test]
fn workers_killed_at_random_moments_lose_nothing_and_complete_nothing_twice() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    if let Ok(database) = env::var("FORNAX_CRASH_DATABASE") {
        let read = |name| env::var(name).unwrap();
        return runtime.block_on(work(&database, &read("FORNAX_CRASH_PORT"), &read("FORNAX_CRASH_ROUND")));
    }
    let kills = env::var("FORNAX_KILLS").map_or(8, |kills| kills.parse().unwrap());
    let seed = env::var("FORNAX_CRASH_SEED").map_or(1, |seed| seed.parse().unwrap());
    for database in databases(TEST) {
        let (port, heard) = listen();
        let said = kill_workers(&database, kills, port, &mut Random(seed));
        runtime.block_on(async {
            let store = Store::open(database.options()).await.unwrap();
            let stop = watch::Sender::new(false);
            let tasks = begin(&store, &stop);
            let ending = async {
                while !all_ended(&store).await || store.deliveries_waiting().await.unwrap() > 0 {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(300), ending)
                .await
                .expect("all jobs end and are told of");
            stop.send_replace(true);
            for task in tasks {
                task.await.unwrap();
            }
            let heard = heard.lock().unwrap().clone();
            check(&database, &store, &said, &heard, port).await;
            println!("seed: {seed}");
            println!("kills: {kills}");
        });
    }
}

async fn check(database: &Database, store: &Store, said: &Said, heard: &Heard, port: u16) {
    let mut jobs = Vec::new();
    for job in store.list("m", None, None, 1_000_000).await.unwrap() {
        jobs.push(store.get(&job.id).await.unwrap().unwrap());
    }
    let (mut completed, mut exhausted, mut attempts) = (0, 0, 0);
    let ids: BTreeSet<&str> = jobs.iter().map(|job| job.id.as_str()).collect();
    for job in &jobs {
        let status = job.status();
        let key = job.webhook.as_ref().unwrap().rsplit('/').next().unwrap();
        let events = store.timeline(&job.id).await.unwrap();
        let count = |name: &str| events.iter().filter(|event| event.event == name).count();
        attempts += count("started");
        match job.state {
            State::Completed => {
                completed += 1;
                assert!(is_right(key, &status["output"]), "{status}");
            }
            State::Failed => {
                exhausted += 1;
                assert_eq!(
                    (&status["output"]["code"], job.attempts),
                    (&json!("ATTEMPTS_EXHAUSTED"), 3),
                    "{status}"
                );
            }
            _ => panic!("not explained: {status}"),
        }
        assert_eq!((count("submitted"), count("completed") + count("failed")), (1, 1), "{events:?}");
        let told = heard.get(&job.id).unwrap_or_else(|| panic!("nobody was told of {status}"));
        let wanted = status.to_string();
        assert!(told.iter().all(|body| *body == wanted), "{told:?} {status}");
    }
    for (key, id) in &said.accepted {
        assert!(ids.contains(id.as_str()), "an accepted job is lost");
        let again = store.submit(job(key, &port.to_string())).await;
        assert!(again.is_ok_and(|again| again.id == *id && !again.is_new), "its key is another's");
    }
    let other = NewJob { input: json!({"prompt": "other"}), ..job(&said.accepted[0].0, "1") };
    assert!(matches!(store.submit(other).await, Err(Error::KeyReused)));
    let name = if database.is_postgres() { "PostgreSQL" } else { "SQLite" };
    let repeated: usize = heard.values().map(|bodies| bodies.len() - 1).sum();
    println!(
        "{name}: {} accepted, {} kept, {completed} completed once, {exhausted} given up after 3 lost attempts, {attempts} \
         attempts, {} workers killed in a submit, {} webhooks told and {repeated} told again",
        said.accepted.len(),
        jobs.len(),
        said.in_submit,
        heard.len(),
    );
}
