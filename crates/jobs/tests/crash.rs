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
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use common::{Database, databases};
use fornax_jobs::{
    Answer, BatchAnswer, BatchRequest, BatchState, Body, Error, Failure, Model, NewBatch, NewJob, Page,
    Policy, Question, Runner, RunnerOptions, State, Store, StoreOptions, WebhookOptions, Webhooks,
};
use serde_json::{Value, json};
use tokio::sync::watch;

const TEST: &str = "workers_killed_at_random_moments_lose_nothing_and_complete_nothing_twice";

/// Jobs that a worker submits before it only works.
const JOBS: usize = 12;

/// A worker is killed within this many milliseconds from when it is open.
const LIFE_MS: u64 = 250;

/// Says what it was asked, after a while that depends on it.
struct Echo {
    /// This much longer.
    pause: Duration,
}

impl Model for Echo {
    fn facts(&self) -> (String, String) {
        ("echo".to_owned(), "F32".to_owned())
    }

    async fn answer(
        &self,
        _: &str,
        question: Question,
        hears: impl Fn(&str) + Send + Sync,
    ) -> Result<Answer, Failure> {
        let text = match &question.body {
            Body::Completion(body) => body["prompt"].as_str().unwrap().to_owned(),
            Body::Chat(body) => body["messages"][0]["content"].as_str().unwrap().to_owned(),
        };
        hears(&text);
        tokio::time::sleep(self.pause + Duration::from_millis(text.len() as u64 % 17)).await;
        Ok(Answer { text, ..Answer::default() })
    }

    async fn respond(&self, _: &str, route: &str, body: Value) -> Result<Value, Failure> {
        tokio::time::sleep(self.pause).await;
        Ok(json!({"route": route, "said": body["say"]}))
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
        shares: false,
        input,
        webhook: Some(format!("http://127.0.0.1:{port}/{key}")),
        policy: Policy::default(),
        idempotency_key: Some(key.to_owned()),
    }
}

/// Lines of each batch.
const LINES: usize = 5;

fn batch(key: &str) -> NewBatch {
    let request = |line: usize| BatchRequest {
        model: "m".to_owned(),
        custom_id: format!("{key} {line}"),
        body: json!({"say": format!("{key} {line}")}).to_string(),
    };
    NewBatch {
        owner: "o".to_owned(),
        route: "/talk".to_owned(),
        input_file: "file-1".to_owned(),
        completion_window: "24h".to_owned(),
        window_us: 86_400_000_000,
        metadata: json!({}),
        requests: (0..LINES).map(request).collect(),
        errors: Vec::new(),
        shares: false,
        idempotency_key: Some(key.to_owned()),
    }
}

/// A line of a batch's files: what it was asked, and what was said or went wrong.
fn line(answer: &BatchAnswer) -> String {
    json!([answer.custom_id, answer.output["response"]["said"], answer.output["code"]]).to_string()
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
fn begin(store: &Store, pause: Duration, stop: &watch::Sender<bool>) -> Vec<tokio::task::JoinHandle<()>> {
    let options = RunnerOptions {
        lease: Duration::from_millis(500),
        poll: Duration::from_millis(50),
        ..RunnerOptions::default()
    };
    let runner = Runner::new(store.clone(), Arc::new(Echo { pause }), "m", options).run(stop.subscribe());
    let sender = webhooks().run(store.clone(), stop.subscribe());
    let runner = async {
        runner.await;
    };
    let (settler, mut stopped) = (store.clone(), stop.subscribe());
    let settler = async move {
        while !*stopped.borrow() {
            settler.settle_batches(line).await.unwrap();
            tokio::select! {
                _ = stopped.changed() => {}
                () = tokio::time::sleep(Duration::from_millis(20)) => {}
            }
        }
    };
    vec![tokio::spawn(runner), tokio::spawn(sender), tokio::spawn(settler)]
}

/// The life of a worker: it submits jobs, saying before and after, and works until it is killed.
async fn work(database: &str, port: &str, round: &str, pause: Duration) {
    let store = Store::open(StoreOptions::new(database)).await.unwrap();
    println!("open");
    let _tasks = begin(&store, pause, &watch::Sender::new(false));
    for n in 0..JOBS {
        let key = format!("{round}-{n}");
        println!("submitting {key}");
        let submitted = store.submit(job(&key, port)).await.unwrap();
        println!("accepted {key} {}", submitted.id);
    }
    println!("beginning {round}");
    let begun = store.begin_batch(batch(round)).await.unwrap();
    println!("begun {round} {}", begun.id);
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
    /// Key and id of every batch that was begun.
    begun: Vec<(String, String)>,
    /// Workers killed between the beginning and the end of a submit.
    in_submit: usize,
}

impl Said {
    fn add(&mut self, lines: &[String]) {
        let words = |verb: &'static str| lines.iter().filter_map(move |line| line.strip_prefix(verb));
        let accepted = words("accepted ").filter_map(|line| line.split_once(' '));
        let before = self.accepted.len();
        self.accepted.extend(accepted.map(|(key, id)| (key.to_owned(), id.to_owned())));
        let begun = words("begun ").filter_map(|line| line.split_once(' '));
        self.begun.extend(begun.map(|(key, id)| (key.to_owned(), id.to_owned())));
        self.in_submit += usize::from(words("submitting ").count() > self.accepted.len() - before);
    }
}

/// A worker's process.
struct Worker {
    child: Child,
    hears: mpsc::Receiver<String>,
    reader: thread::JoinHandle<()>,
}

impl Worker {
    /// Starts one and waits until it has the database open.
    fn start(database: &Database, port: u16, round: &str, pause: Duration) -> Worker {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([TEST, "--exact", "--nocapture"])
            .env("FORNAX_CRASH_DATABASE", &database.url)
            .env("FORNAX_CRASH_PORT", port.to_string())
            .env("FORNAX_CRASH_ROUND", round)
            .env("FORNAX_CRASH_PAUSE", pause.as_millis().to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (lines, hears) = mpsc::channel();
        let reader = thread::spawn(move || {
            stdout.lines().map_while(Result::ok).for_each(|line| lines.send(line).unwrap())
        });
        let opened = hears.iter().any(|line| line == "open");
        assert!(opened, "a worker never opened the store");
        Worker { child, hears, reader }
    }

    /// Kills it; what it said since it had the database open.
    fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.reader.join().unwrap();
        self.hears.try_iter().collect()
    }
}

/// Kills so many workers, each after a random time, while as many as `beside` others work on the same queue. Who is
/// left goes on.
fn kill_workers(
    database: &Database,
    kills: u64,
    beside: usize,
    port: u16,
    random: &mut Random,
) -> (Said, Vec<Worker>) {
    let mut said = Said::default();
    // Those who are not alone hold jobs long enough to be killed with them.
    let pause = Duration::from_millis(if beside > 0 { 250 } else { 0 });
    let mut workers: Vec<Worker> =
        (0..beside).map(|n| Worker::start(database, port, &format!("beside{n}"), pause)).collect();
    for round in 0..kills {
        workers.push(Worker::start(database, port, &round.to_string(), pause));
        // The moment is the point of the test.
        thread::sleep(Duration::from_millis(random.below(LIFE_MS)));
        let unlucky = random.below(workers.len() as u64) as usize;
        said.add(&workers.swap_remove(unlucky).kill());
    }
    (said, workers)
}

async fn all_ended(store: &Store) -> bool {
    let counts = store.counts("m").await.unwrap();
    let newest = Page { after: None, newest_first: true, most: 1_000_000 };
    let batches = store.batches("o", newest).await.unwrap();
    counts.of(State::Queued) + counts.of(State::Running) == 0
        && batches.iter().all(|batch| batch.ended_us.is_some())
}

#[test]
fn workers_killed_at_random_moments_lose_nothing_and_complete_nothing_twice() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    if let Ok(database) = env::var("FORNAX_CRASH_DATABASE") {
        let read = |name| env::var(name).unwrap();
        let pause = Duration::from_millis(read("FORNAX_CRASH_PAUSE").parse().unwrap());
        let (port, round) = (read("FORNAX_CRASH_PORT"), read("FORNAX_CRASH_ROUND"));
        return runtime.block_on(work(&database, &port, &round, pause));
    }
    let kills = env::var("FORNAX_KILLS").map_or(8, |kills| kills.parse().unwrap());
    let seed = env::var("FORNAX_CRASH_SEED").map_or(1, |seed| seed.parse().unwrap());
    for database in databases(TEST) {
        let (port, heard) = listen();
        let (said, _) = kill_workers(&database, kills, 0, port, &mut Random(seed));
        runtime.block_on(async {
            let store = Store::open(database.options()).await.unwrap();
            let stop = watch::Sender::new(false);
            let tasks = begin(&store, Duration::ZERO, &stop);
            until_ended(&store).await;
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

#[test]
fn workers_that_share_a_queue_take_over_what_killed_ones_held() {
    let name = "workers_that_share_a_queue_take_over_what_killed_ones_held";
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for database in databases(name).into_iter().filter(Database::is_postgres) {
        let (port, heard) = listen();
        let (mut said, left) = kill_workers(&database, 6, 3, port, &mut Random(2));
        runtime.block_on(async {
            // Nobody works here: the three who are left do.
            let store = Store::open(database.options()).await.unwrap();
            until_ended(&store).await;
            left.into_iter().for_each(|worker| said.add(&worker.kill()));
            let heard = heard.lock().unwrap().clone();
            let (jobs, attempts) = check(&database, &store, &said, &heard, port).await;
            assert!(attempts > jobs, "some of {jobs} jobs were held by who was killed");
        });
    }
}

/// Waits until every job has ended and is told of.
async fn until_ended(store: &Store) {
    let ending = async {
        while !all_ended(store).await || store.deliveries_waiting().await.unwrap() > 0 {
            // Other processes do the work: only the database tells.
        }
    };
    tokio::time::timeout(Duration::from_secs(300), ending).await.expect("all jobs end and are told of");
}

/// How many jobs there are, and how many attempts they took.
async fn check(database: &Database, store: &Store, said: &Said, heard: &Heard, port: u16) -> (usize, usize) {
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
    let (lines, lost) = check_batches(store, said).await;
    let other = NewJob { input: json!({"prompt": "other"}), ..job(&said.accepted[0].0, "1") };
    assert!(matches!(store.submit(other).await, Err(Error::KeyReused)));
    let name = if database.is_postgres() { "PostgreSQL" } else { "SQLite" };
    let repeated: usize = heard.values().map(|bodies| bodies.len() - 1).sum();
    println!(
        "{name}: {} accepted, {} kept, {completed} completed once, {exhausted} given up after 3 lost attempts, {attempts} \
         attempts, {} workers killed in a submit, {} webhooks told and {repeated} told again; {} batches begun, {lines} \
         lines answered once, {lost} given up",
        said.accepted.len(),
        jobs.len(),
        said.in_submit,
        heard.len(),
        said.begun.len(),
    );
    (jobs.len(), attempts)
}

/// Every batch has each of its lines once, answered or given up. How many are the one and the other.
async fn check_batches(store: &Store, said: &Said) -> (usize, usize) {
    let newest = Page { after: None, newest_first: true, most: 1_000_000 };
    let batches = store.batches("o", newest).await.unwrap();
    for (key, id) in &said.begun {
        assert!(batches.iter().any(|batch| batch.id == *id), "a batch that was begun is lost");
        assert_eq!(store.begin_batch(batch(key)).await.unwrap().id, *id, "its key is another's");
    }
    let (mut answered, mut lost) = (0, 0);
    for batch in &batches {
        assert_eq!(batch.state, BatchState::Completed, "{batch:?}");
        let mut ids = BTreeSet::new();
        for (file, is_answer) in [(&batch.output_file, true), (&batch.error_file, false)] {
            let Some(file) = file else { continue };
            for line in store.file_text(file).await.unwrap().lines() {
                let line: Value = serde_json::from_str(line).unwrap();
                assert!(ids.insert(line[0].to_string()), "a line was answered twice: {line}");
                match is_answer {
                    true => assert_eq!(line[1], line[0]),
                    false => assert_eq!(line[2], "ATTEMPTS_EXHAUSTED"),
                }
                answered += usize::from(is_answer);
                lost += usize::from(!is_answer);
            }
        }
        assert_eq!(ids.len(), LINES, "{batch:?}");
        let lines = i64::try_from(LINES).unwrap();
        assert_eq!((batch.completed + batch.failed, batch.requests), (lines, lines));
    }
    (answered, lost)
}
