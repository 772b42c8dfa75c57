//! Runners with a model that does what its question says, on both databases.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::{
    future::{Future, pending},
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::databases;
use fornax_code::Code;
use fornax_jobs::{
    Answer, Body, Failure, Finish, Job, Model, NewJob, Policy, Question, Runner, RunnerOptions, State, Store,
    Usage, WebhookOptions, Webhooks, signature,
};
use serde_json::{Value, json};
use tokio::{sync::watch, task::JoinHandle};

/// Does what the last words of its question say: `say X`, `cut X`, `break`, `refuse`, `wait`.
#[derive(Default)]
struct Obedient {
    asked: Mutex<Vec<String>>,
    /// Answers under way, and the most there were at a time.
    running: AtomicUsize,
    most: AtomicUsize,
}

impl Model for Obedient {
    fn facts(&self) -> (String, String) {
        ("obedient".to_owned(), "F32".to_owned())
    }

    async fn answer(
        &self,
        _: &str,
        question: Question,
        hears: impl Fn(&str) + Send + Sync,
    ) -> Result<Answer, Failure> {
        let text = match &question.body {
            Body::Completion(body) => body["prompt"].as_str().unwrap().to_owned(),
            Body::Chat(body) => {
                body["messages"].as_array().unwrap().last().unwrap()["content"].as_str().unwrap().to_owned()
            }
        };
        self.asked.lock().unwrap().push(text.clone());
        let now = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        let _leave = Leave(&self.running);
        let (verb, rest) = text.split_once(' ').unwrap_or((&text, ""));
        let usage = Usage { prompt: 10, cached: 4, completion: rest.len() };
        match verb {
            "say" => {
                hears(rest);
                tokio::task::yield_now().await;
                Ok(Answer { text: rest.to_owned(), usage, seed: 7, ..Answer::default() })
            }
            "cut" => {
                Ok(Answer { text: rest.to_owned(), finish: Finish::Truncated, usage, ..Answer::default() })
            }
            "break" => Err(Failure::retryable(Code::Internal, "generate", "the step panicked")),
            "refuse" => Err(Failure::new(Code::PromptTooLong, "prepare", "9 tokens; 8 fit")),
            _ => {
                hears("begun");
                pending().await
            }
        }
    }

    async fn respond(&self, _: &str, _: &str, _: Value) -> Result<Value, Failure> {
        Err(Failure::new(Code::Internal, "generate", "nobody asks"))
    }
}

struct Leave<'a>(&'a AtomicUsize);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A store with a runner on it.
struct World {
    store: Store,
    model: Arc<Obedient>,
    stop: watch::Sender<bool>,
    running: JoinHandle<usize>,
}

fn quick() -> RunnerOptions {
    RunnerOptions {
        // A worker that lives must not be silent for so long on a busy machine: it would lose its jobs.
        lease: Duration::from_secs(1),
        poll: Duration::from_millis(20),
        patience: Duration::from_millis(50),
        items: 3,
        ..RunnerOptions::default()
    }
}

impl World {
    fn on(store: Store) -> World {
        let (stop, stopped) = watch::channel(false);
        let model = Arc::new(Obedient::default());
        let runner = Runner::new(store.clone(), Arc::clone(&model), "m", quick());
        World { store, model, stop, running: tokio::spawn(runner.run(stopped)) }
    }

    async fn submit(&self, input: Value, policy: Policy) -> String {
        submit(&self.store, input, policy, None).await
    }

    /// Submits and waits for the end.
    async fn ended(&self, input: Value) -> Value {
        let id = self.submit(input, Policy::default()).await;
        until(&self.store, &id, |job| job.state.is_final()).await.status()
    }

    async fn stopped(self) -> usize {
        self.stop.send_replace(true);
        self.running.await.unwrap()
    }
}

async fn submit(store: &Store, input: Value, policy: Policy, webhook: Option<String>) -> String {
    let (model, owner, idempotency_key) = ("m".to_owned(), "o".to_owned(), None);
    store
        .submit(NewJob { model, owner, shares: false, input, webhook, policy, idempotency_key })
        .await
        .unwrap()
        .id
}

async fn until(store: &Store, id: &str, wanted: impl Fn(&Job) -> bool) -> Job {
    let mut changes = store.changes();
    let waiting = async {
        loop {
            let job = store.get(id).await.unwrap().unwrap();
            if wanted(&job) {
                return job;
            }
            // Having missed some changes is a reason to look, too.
            drop(changes.recv().await);
        }
    };
    tokio::time::timeout(Duration::from_secs(30), waiting).await.expect("it never was")
}

fn check<F: Future<Output = ()>>(test: &str, scenario: impl Fn(World) -> F) {
    for database in databases(test) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            scenario(World::on(Store::open(database.options()).await.unwrap())).await;
        });
    }
}

fn number() -> Value {
    json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
}

#[test]
fn a_result_is_whole_and_valid_or_it_is_a_failure_with_its_name() {
    check("a_result_is_whole_and_valid_or_it_is_a_failure_with_its_name", async |world| {
        let status = world.ended(json!({"prompt": "say {\"n\":1}", "schema": number()})).await;
        let output = &status["output"];
        assert_eq!((&status["status"], &output["success"]), (&json!("COMPLETED"), &json!(true)));
        assert_eq!((&output["output"], &output["metadata"]["schema"]), (&json!({"n": 1}), &json!("inline")));
        let usage = json!({"prompt": 10, "cached": 4, "completion": 7});
        assert_eq!((&output["metadata"]["usage"], &output["metadata"]["seed"]), (&usage, &json!(7)));
        assert_eq!(world.ended(json!({"prompt": "say hello"})).await["output"]["output"], "hello");

        let failing = [
            (json!({"prompt": "cut {\"n\":1}", "schema": number()}), "OUTPUT_TRUNCATED", "generate"),
            (json!({"prompt": "say {\"n\":1.5}", "schema": number()}), "INTERNAL", "validate"),
            (json!({"prompt": "say ", "schema": number()}), "INTERNAL", "validate"),
            (json!({"prompt": "say {\"n\":1} and more", "schema": number()}), "INTERNAL", "validate"),
            (json!({"prompt": "refuse"}), "PROMPT_TOO_LONG", "prepare"),
            (json!({"prompt": "cut by a form"}), "OUTPUT_TRUNCATED", "generate"),
            (json!({"nothing": 1}), "INVALID_INPUT", "submit"),
        ];
        for (input, code, stage) in failing {
            let status = world.ended(input.clone()).await;
            let output = &status["output"];
            assert_eq!((&status["status"], &output["success"]), (&json!("FAILED"), &json!(false)), "{input}");
            assert_eq!((&output["code"], &output["stage"]), (&json!(code), &json!(stage)), "{input}");
        }
        let older = json!({"endpoint": "/prompt", "data": {"prompt": "say yes", "context": "c"}});
        assert_eq!(world.ended(older).await["output"]["output"], "yes");
        assert_eq!(
            world.ended(json!({"endpoint": "/health"})).await["output"]["output"]["status"],
            "healthy"
        );
    });
}

#[test]
fn a_batch_has_a_result_or_an_error_for_each_item_in_order() {
    check("a_batch_has_a_result_or_an_error_for_each_item_in_order", async |world| {
        let texts = ["say {\"n\":0}", "cut {", "say {\"n\":2}", "refuse", "say {\"n\":4}", "say {}"];
        let items: Vec<Value> =
            texts.iter().enumerate().map(|(n, text)| json!({"id": format!("i{n}"), "text": text})).collect();
        let input = json!({"shared_prefix": "p", "items": items, "schema": number()});
        let id = world.submit(input, Policy::default()).await;
        let status = until(&world.store, &id, |job| job.state.is_final()).await.status();
        let output = &status["output"];
        assert_eq!((&status["status"], &output["success"]), (&json!("COMPLETED"), &json!(false)));
        let results = output["output"].as_array().unwrap();
        let ids: Vec<&str> = results.iter().map(|result| result["id"].as_str().unwrap()).collect();
        assert_eq!(ids, ["i0", "i1", "i2", "i3", "i4", "i5"]);
        let codes: Vec<Option<&str>> = results.iter().map(|result| result["code"].as_str()).collect();
        let wanted = [None, Some("OUTPUT_TRUNCATED"), None, Some("PROMPT_TOO_LONG"), None, Some("INTERNAL")];
        assert_eq!(codes, wanted);
        assert_eq!(output["metadata"]["items"], json!({"completed": 3, "failed": 3}));
        assert_eq!(output["metadata"]["usage"]["cached"], 12);
        let streamed = world.store.take_chunks(&id).await.unwrap();
        let streamed: Vec<&Value> = streamed.iter().map(|chunk| &chunk.body["id"]).collect();
        assert_eq!(streamed, ["i0", "i1", "i2", "i3", "i4", "i5"]);
        assert!(world.model.most.load(Ordering::SeqCst) <= 3);
        // The first one alone, so that what all share is computed once.
        assert_eq!(world.model.asked.lock().unwrap()[0], texts[0]);

        let none = json!({"items": [{"id": "a", "text": "refuse"}, {"id": "b", "text": "refuse"}]});
        let status = world.ended(none).await;
        assert_eq!(
            (&status["status"], &status["output"]["code"]),
            (&json!("FAILED"), &json!("PROMPT_TOO_LONG"))
        );
        assert_eq!(status["output"]["diagnostics"]["items"].as_array().unwrap().len(), 2);
    });
}

#[test]
fn a_batch_goes_on_behind_the_items_that_are_finished() {
    check("a_batch_goes_on_behind_the_items_that_are_finished", async |world| {
        let items = json!([{"id": "a", "text": "say 1"}, {"id": "b", "text": "break"}]);
        let id = world.submit(json!({"items": items}), Policy::default()).await;
        let job = until(&world.store, &id, |job| job.state.is_final()).await;
        assert_eq!((job.state, job.attempts), (State::Failed, 3), "a poison item stops after its attempts");
        let asked = world.model.asked.lock().unwrap().clone();
        assert_eq!(asked.iter().filter(|text| *text == "say 1").count(), 1, "{asked:?}");
        assert_eq!(asked.iter().filter(|text| *text == "break").count(), 3);
    });
}

#[test]
fn an_attempt_ends_when_its_time_is_over_or_nobody_wants_it() {
    check("an_attempt_ends_when_its_time_is_over_or_nobody_wants_it", async |world| {
        let policy = Policy { execution_timeout_ms: Some(30), ..Policy::default() };
        let id = world.submit(json!({"prompt": "wait"}), policy).await;
        let job = until(&world.store, &id, |job| job.state.is_final()).await;
        assert_eq!(
            (job.state, &job.status()["output"]["code"]),
            (State::TimedOut, &json!("EXECUTION_TIMEOUT"))
        );
        assert!(job.execution_us >= 30_000);

        let id = world.submit(json!({"prompt": "wait"}), Policy::default()).await;
        until(&world.store, &id, |job| job.state == State::Running).await;
        while world.model.running.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        world.store.cancel(&id).await.unwrap();
        while world.model.running.load(Ordering::SeqCst) > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(world.store.get(&id).await.unwrap().unwrap().state, State::Cancelled);

        // Told to stop, it returns what does not end in time.
        let id = world.submit(json!({"prompt": "wait"}), Policy::default()).await;
        until(&world.store, &id, |job| job.state == State::Running).await;
        let store = world.store.clone();
        assert_eq!(world.stopped().await, 1);
        let job = store.get(&id).await.unwrap().unwrap();
        assert_eq!((job.state, job.attempts), (State::Queued, 0));
    });
}

#[test]
fn jobs_of_a_worker_that_died_are_taken_over_after_its_lease() {
    let test = "jobs_of_a_worker_that_died_are_taken_over_after_its_lease";
    check(test, async |world| {
        let texts = ["wait", "wait", "say done"];
        let mut ids = Vec::new();
        for text in texts {
            ids.push(world.submit(json!({"prompt": text}), Policy::default()).await);
        }
        for id in &ids[..2] {
            until(&world.store, id, |job| job.state == State::Running).await;
        }
        until(&world.store, &ids[2], |job| job.state == State::Completed).await;
        // A worker that gives signs of life is left alone, for longer than a lease.
        let other = World::on(world.store.clone());
        while world.store.leases().await.unwrap().iter().any(|(_, signs)| *signs < 5) {
            tokio::task::yield_now().await;
        }
        for id in &ids[..2] {
            assert_eq!(world.store.get(id).await.unwrap().unwrap().attempts, 1);
        }
        world.running.abort();
        for id in &ids[..2] {
            let job = until(&other.store, id, |job| job.attempts == 2).await;
            assert_eq!(job.state, State::Running);
        }
        assert_eq!(other.store.get(&ids[2]).await.unwrap().unwrap().attempts, 1);
    });
}

/// Answers each request with the next status, and says what it was sent.
fn listener(statuses: Vec<&'static str>) -> (u16, std::sync::mpsc::Receiver<(String, String)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (said, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for status in statuses {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
                    length = value.trim().parse().unwrap();
                }
                if line.trim().is_empty() {
                    break;
                }
                head += &line;
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let location = "Location: http://127.0.0.1:1/elsewhere\r\n";
            write!(stream, "HTTP/1.1 {status}\r\n{location}Content-Length: 0\r\nConnection: close\r\n\r\n")
                .unwrap();
            said.send((head, String::from_utf8(body).unwrap())).unwrap();
        }
    });
    (port, heard)
}

#[test]
fn webhooks_are_signed_and_tried_until_they_arrive() {
    check("webhooks_are_signed_and_tried_until_they_arrive", async |world| {
        // A redirect is not followed: it is a failure like any other.
        let (port, heard) = listener(vec!["302 Found", "200 OK"]);
        let hosts = vec!["127.0.0.1".to_owned()];
        let options = WebhookOptions { hosts, allow_private: true, secret: b"secret".to_vec() };
        let url = format!("http://127.0.0.1:{port}/done");
        let id =
            submit(&world.store, json!({"prompt": "say hi"}), Policy::default(), Some(url.clone())).await;
        until(&world.store, &id, |job| job.state.is_final()).await;

        // Somebody without leave to call private addresses calls none.
        let careful = Webhooks::new(WebhookOptions { allow_private: false, ..options.clone() });
        assert_eq!(careful.check(&url).unwrap_err().code, Code::WebhookRefused);

        // The first delivery is claimed by a sender that dies: it is due again, and nothing is lost.
        let lost = world.store.next_delivery(|_| Duration::ZERO).await.unwrap().unwrap();
        assert_eq!(lost.attempt, 1);
        for attempt in 2..4 {
            let delivery = world.store.next_delivery(|_| Duration::ZERO).await.unwrap().unwrap();
            assert_eq!((delivery.attempt, &delivery.id), (attempt, &lost.id));
            let sender = Arc::new(Webhooks::new(options.clone()));
            let arrived = fornax_jobs::deliver(&sender, &world.store, delivery).await;
            let (head, body) = heard.recv().unwrap();
            let head = head.to_ascii_lowercase();
            let header = |name: &str| {
                let line = head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
                line.unwrap_or_else(|| panic!("{name} in {head}")).trim().to_owned()
            };
            let sent_s: u64 = header("x-fornax-timestamp").parse().unwrap();
            let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
            assert!((now_s - 600..=now_s).contains(&sent_s), "{sent_s} is not the present, {now_s}");
            assert_eq!(header("x-fornax-delivery"), lost.id);
            assert_eq!(header("x-fornax-signature"), signature(b"secret", sent_s, &lost.id, &body));
            let told: Value = serde_json::from_str(&body).unwrap();
            assert_eq!((&told["id"], &told["output"]["output"]), (&json!(id), &json!("hi")));
            assert_eq!(arrived, attempt == 3);
        }
        assert!(world.store.next_delivery(|_| Duration::ZERO).await.unwrap().is_none(), "it has arrived");
        let timeline = world.store.timeline(&id).await.unwrap();
        assert_eq!(timeline.last().unwrap().event, "webhook delivered");
    });
}

#[test]
fn a_host_that_never_answers_does_not_hold_up_the_others() {
    check("a_host_that_never_answers_does_not_hold_up_the_others", async |world| {
        // Its queue takes the connection, and nobody ever reads from it.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let stuck = format!("http://127.0.0.1:{}/", silent.local_addr().unwrap().port());
        let (port, heard) = listener(vec!["200 OK"]);
        for url in [stuck, format!("http://127.0.0.1:{port}/")] {
            let id = submit(&world.store, json!({"prompt": "say hi"}), Policy::default(), Some(url)).await;
            until(&world.store, &id, |job| job.state.is_final()).await;
        }
        let hosts = vec!["127.0.0.1".to_owned()];
        let sender = Webhooks::new(WebhookOptions { hosts, allow_private: true, secret: Vec::new() });
        let (_stop, stopped) = watch::channel(false);
        let sending = tokio::spawn(sender.run(world.store.clone(), stopped));
        let (mut connected, _) = tokio::task::spawn_blocking(move || silent.accept().unwrap()).await.unwrap();
        let told = tokio::task::spawn_blocking(move || heard.recv().unwrap()).await.unwrap();
        assert!(told.1.contains("hi"));
        // The other is still being waited for: a sender that had given up would have hung up.
        connected.set_nonblocking(true).unwrap();
        let ended = connected.read_to_end(&mut Vec::new());
        assert_eq!(ended.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        while world.store.deliveries_waiting().await.unwrap() != 1 {
            tokio::task::yield_now().await;
        }
        sending.abort();
    });
}
