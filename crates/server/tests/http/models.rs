//! Several models behind one server: loaded when they are asked for, gone when there is no room or no use.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use fornax_engine::{Engine, EngineOptions, Runner};
use fornax_server::{Code, Failed, Keeper, Offer, Progress, Server, ServerOptions};
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    sync::{mpsc as tokio_mpsc, oneshot},
    task::JoinHandle,
};

use crate::{
    client::{self, Response, get, post, request},
    world::{Script, Setup, card, in_time, keeping, served, until},
};

/// Bytes that all models together may take.
const BUDGET: u64 = 100;

/// A model that says its own name.
#[derive(Default)]
struct Fake {
    name: &'static str,
    bytes: u64,
    /// Each load waits for a word, until the other end is gone.
    gate: Option<mpsc::Receiver<()>>,
    /// Each step waits for a word, until the other end is gone.
    steps: Option<mpsc::Receiver<()>>,
    /// Loads that fail before one succeeds.
    failures: usize,
    preload: bool,
}

/// What became of a model.
#[derive(Clone, Default)]
struct Seen {
    loads: Arc<AtomicUsize>,
    /// Loaded and not yet freed.
    alive: Arc<AtomicUsize>,
}

impl Seen {
    fn counts(&self) -> (usize, usize) {
        (self.loads.load(Ordering::SeqCst), self.alive.load(Ordering::SeqCst))
    }
}

/// Frees the engine as the binary does: it waits for its thread.
struct Freed(Option<std::thread::JoinHandle<()>>, Arc<AtomicUsize>);

impl Drop for Freed {
    fn drop(&mut self) {
        self.0.take().unwrap().join().unwrap();
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

fn offer(fake: Fake) -> (Offer, Seen) {
    let Fake { name, bytes, gate, steps, failures, preload } = fake;
    let seen = Seen::default();
    let (loads, alive) = (Arc::clone(&seen.loads), Arc::clone(&seen.alive));
    let (gate, steps, failures) = (Mutex::new(gate), Mutex::new(steps), AtomicUsize::new(failures));
    let mut own = card(name);
    own.aliases = vec![format!("{name}-alias")];
    let offered = own.clone();
    let load = move |_, progress: &tokio::sync::watch::Sender<Progress>| {
        loads.fetch_add(1, Ordering::SeqCst);
        progress.send_replace(Progress { stage: "weights".to_owned(), bytes: 1, bytes_total: 4 });
        if let Some(gate) = &*gate.lock().unwrap() {
            gate.recv().unwrap_or_default();
        }
        if failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Err(Failed { code: Code::ModelCorrupt, message: "tensor x is short".into() });
        }
        let mut script = Script::new(name.to_owned());
        script.gate = steps.lock().unwrap().take().map(Mutex::new);
        let began = Instant::now();
        let options = EngineOptions::new(4096, Arc::new(move || began.elapsed()));
        let build = move || Ok::<_, Failed>(Box::new(script) as Box<dyn Runner>);
        let (engine, thread) = Engine::spawn(build, options).unwrap();
        alive.fetch_add(1, Ordering::SeqCst);
        let mut served = served(
            engine,
            Setup::default().template,
            own.clone(),
            Keeper::new(Freed(Some(thread), Arc::clone(&alive))),
        );
        served.planned_bytes = bytes;
        Ok(served)
    };
    let plan = move |room: fornax_server::Room| {
        if room.taken + bytes <= BUDGET {
            return Ok(());
        }
        let message = format!("it needs {bytes} bytes, but {} may be used", BUDGET - room.taken);
        Err(Failed { code: Code::ModelDoesNotFit, message })
    };
    let offer = Offer { card: offered, context: 4096, preload, plan: Box::new(plan), load: Box::new(load) };
    (offer, seen)
}

/// A server of several models.
struct Many {
    address: SocketAddr,
    seen: Vec<Seen>,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), fornax_server::Error>>,
    _reload: tokio_mpsc::Sender<()>,
}

impl Many {
    async fn listening(options: ServerOptions, fakes: Vec<Fake>) -> Many {
        let (offers, seen) = fakes.into_iter().map(offer).unzip();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Server::new(listener, options, offers).await.unwrap();
        let (stop, stopped) = oneshot::channel();
        let (reload, reload_asked) = tokio_mpsc::channel(1);
        let address = server.address();
        let running = tokio::spawn(server.run(async { drop(stopped.await) }, reload_asked));
        Many { address, seen, stop, running, _reload: reload }
    }

    async fn ready(options: ServerOptions, fakes: Vec<Fake>) -> Many {
        let many = Many::listening(options, fakes).await;
        many.until("/ready", |response| response.status == 200).await;
        many
    }

    async fn until(&self, path: &str, wanted: impl Fn(&Response) -> bool) {
        until(self.address, path, wanted).await;
    }

    async fn until_state(&self, model: usize, state: &str) {
        self.until("/v1/models", |response| response.json()["data"][model]["state"] == state).await;
    }

    async fn ask(&self, model: &str) -> Response {
        post(self.address, "/v1/completions", &json!({"model": model, "prompt": "a"})).await
    }

    /// Asks a model, and sees that it was this one that answered.
    async fn answers(&self, model: &str, name: &str) {
        let answer = self.ask(model).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let answer = answer.json();
        assert_eq!((&answer["model"], &answer["choices"][0]["text"]), (&json!(name), &json!(name)));
    }

    async fn states(&self) -> Vec<String> {
        let models = get(self.address, "/v1/models").await.json();
        let models = models["data"].as_array().unwrap().iter();
        models.map(|model| model["state"].as_str().unwrap().to_owned()).collect()
    }

    /// Begins to ask, and does not wait.
    async fn begun(&self, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream
            .write_all(&request("POST", "/v1/completions", &[], body.to_string().as_bytes()))
            .await
            .unwrap();
        stream
    }

    async fn stopped(self) {
        drop(self.stop);
        in_time(self.running).await.unwrap().unwrap();
        for seen in self.seen {
            assert_eq!(seen.counts().1, 0, "all memory is free when the server has stopped");
        }
    }
}

fn fake(name: &'static str, bytes: u64) -> Fake {
    Fake { name, bytes, ..Fake::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_chooses_its_model_which_is_loaded_then() {
    let many = Many::ready(ServerOptions::default(), vec![fake("one", 40), fake("two", 40)]).await;
    assert_eq!(many.states().await, ["loaded", "unloaded"]);
    many.answers("one", "one").await;
    let unnamed = post(many.address, "/v1/completions", &json!({"prompt": "a"})).await.json();
    assert_eq!(unnamed["choices"][0]["text"], "one");
    assert_eq!(many.seen[1].counts(), (0, 0));
    many.answers("two", "two").await;
    many.answers("two-alias", "two").await;
    assert_eq!(many.states().await, ["loaded", "loaded"]);
    assert_eq!((many.seen[0].counts(), many.seen[1].counts()), ((1, 1), (1, 1)));

    let unknown = many.ask("three").await;
    assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("MODEL_NOT_FOUND")));
    let said = unknown.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(said.ends_with(r#"this server has "one", "one-alias", "two", "two-alias""#), "{said}");
    let one = get(many.address, "/v1/models/two-alias").await.json();
    assert_eq!((&one["id"], &one["aliases"]), (&json!("two"), &json!(["two-alias"])));

    let execute = json!({"job_id": "j", "model": "two", "prompt": "a"});
    let events = post(many.address, "/execute", &execute).await.events();
    assert_eq!(events[0]["model"], "two");
    let tokens = post(many.address, "/tokenize", &json!({"model": "two", "content": "ab"})).await.json();
    assert_eq!(tokens["tokens"], json!([97, 98]));
    let page = get(many.address, "/metrics").await.body;
    for wanted in [
        "vllm:generation_tokens_total{engine=\"0\",model_name=\"two\"} 14",
        "fornax_model_loads_total{model_name=\"one\"} 1",
        "fornax_model_state{model_name=\"two\",state=\"loaded\"} 1",
        "vllm:request_success_total{engine=\"0\",model_name=\"two\",finished_reason=\"stop\"} 3",
    ] {
        assert!(page.contains(wanted), "{page}");
    }
    many.stopped().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_requests_load_a_model_once_and_both_are_answered() {
    let (load, gate) = mpsc::channel();
    let slow = Fake { gate: Some(gate), ..fake("slow", 40) };
    let many = Many::ready(ServerOptions::default(), vec![fake("one", 40), slow]).await;
    let mut first = many.begun(&json!({"model": "slow", "prompt": "a"})).await;
    let mut second = many.begun(&json!({"model": "slow", "prompt": "b"})).await;
    let leaves = many.begun(&json!({"model": "slow", "prompt": "c"})).await;
    many.until("/health", |health| {
        health.json()["models"][1]["progress"]["bytes"] == 1 && health.json()["status"] == "ready"
    })
    .await;
    let page = get(many.address, "/metrics").await.body;
    assert!(page.contains("fornax_model_load_ratio{model_name=\"slow\"} 0.25"), "{page}");
    drop(leaves);
    // Others are answered meanwhile.
    many.answers("one", "one").await;
    load.send(()).unwrap();
    for stream in [&mut first, &mut second] {
        assert_eq!(client::read(stream).await.json()["choices"][0]["text"], "slow");
    }
    assert_eq!(many.seen[1].counts(), (1, 1));
    many.until("/health", |health| health.json()["models"][1]["requests"] == 0).await;
    many.stopped().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_model_is_looked_at_by_its_name_and_not_loaded_by_that() {
    let (load, gate) = mpsc::channel();
    let slow = Fake { gate: Some(gate), ..fake("slow", 40) };
    let broken = Fake { failures: 1, ..fake("broken", 40) };
    let many = Many::ready(ServerOptions::default(), vec![fake("one", 40), slow, broken]).await;
    let live = async |name: &str| get(many.address, &format!("/console/live?model={name}")).await;
    let unnamed = get(many.address, "/console/live").await.json();
    assert_eq!(unnamed["model"], "one");
    let models = [("one", "loaded"), ("slow", "unloaded"), ("broken", "unloaded")];
    let models = models.map(|(id, state)| json!({"id": id, "state": state, "running": 0, "waiting": 0}));
    assert_eq!(unnamed["models"], json!(models));
    let before = live("slow").await.json();
    assert_eq!(
        (before.get("model"), before.get("loading"), &before["status"]),
        (None, None, &json!("ready"))
    );
    assert_eq!(many.seen[1].counts(), (0, 0));

    let mut first = many.begun(&json!({"model": "slow", "prompt": "a"})).await;
    let wanted = json!({"stage": "weights", "bytes": 1, "bytes_total": 4});
    many.until("/console/live?model=slow-alias", |live| live.json()["loading"] == wanted).await;
    assert_eq!(live("one").await.json().get("loading"), None);
    load.send(()).unwrap();
    assert_eq!(client::read(&mut first).await.json()["choices"][0]["text"], "slow");
    assert_eq!(live("slow").await.json()["model"], "slow");
    assert_eq!(get(many.address, "/console/live").await.json()["model"], "one");

    assert_ne!(many.ask("broken").await.status, 200);
    let failed = live("broken").await.json();
    assert!(failed["error"].as_str().is_some_and(|error| !error.is_empty()), "{failed}");
    assert_eq!(live("one").await.json().get("error"), None);
    let unknown = live("three").await;
    assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("MODEL_NOT_FOUND")));
    assert_eq!(get(many.address, "/console/live?model=a&model=b").await.status, 400);
    many.stopped().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_longest_unused_makes_way_and_one_in_use_never_does() {
    let (step, steps) = mpsc::channel();
    let busy = Fake { steps: Some(steps), ..fake("one", 40) };
    for _ in 0..2 {
        step.send(()).unwrap();
    }
    let many = Many::ready(
        ServerOptions::default(),
        vec![busy, fake("two", 40), fake("three", 40), fake("all", 90)],
    )
    .await;
    many.answers("two", "two").await;
    // It streams, and waits for its step.
    let mut running = many.begun(&json!({"model": "one", "prompt": "a", "stream": true})).await;
    many.until("/health", |health| health.json()["models"][0]["requests"] == 1).await;
    // The first is older and in use: the second goes.
    many.answers("three", "three").await;
    assert_eq!(many.states().await, ["loaded", "unloaded", "loaded", "unloaded"]);
    assert_eq!(many.seen[1].counts(), (1, 0));
    // Nothing that may go would be enough: nothing goes.
    let refused = many.ask("all").await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("5")));
    let error = &refused.json()["error"];
    assert_eq!((&error["code"], &error["retryable"]), (&json!("MODEL_DOES_NOT_FIT"), &json!(true)));
    assert_eq!(
        error["message"],
        "it needs 90 bytes, but 60 may be used; 40 bytes are taken by models in use: \"one\""
    );
    assert_eq!(many.states().await, ["loaded", "unloaded", "loaded", "failed"]);
    many.answers("three", "three").await;
    drop(step);
    let finished = client::read(&mut running).await;
    assert!(finished.body.ends_with("data: [DONE]\n\n"), "{}", finished.body);
    // Now all may go, and do.
    many.until("/health", |health| health.json()["models"][0]["requests"] == 0).await;
    many.answers("all", "all").await;
    assert_eq!(many.states().await, ["unloaded", "unloaded", "unloaded", "loaded"]);
    many.stopped().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_fails_is_told_to_who_waits_and_tried_again() {
    let (load, gate) = mpsc::channel();
    let bad = Fake { gate: Some(gate), failures: 1, ..fake("bad", 40) };
    let many = Many::ready(ServerOptions::default(), vec![fake("one", 40), bad]).await;
    let mut waiting = Vec::new();
    for _ in 0..2 {
        waiting.push(many.begun(&json!({"model": "bad", "prompt": "a"})).await);
    }
    many.until_state(1, "loading").await;
    load.send(()).unwrap();
    // The first is told of the failure; whoever came later may have begun the next load.
    load.send(()).unwrap();
    let mut codes = Vec::new();
    for stream in &mut waiting {
        let answer = client::read(stream).await;
        codes.push((answer.status, answer.json()["error"]["code"].clone()));
    }
    assert!(codes.contains(&(500, json!("MODEL_CORRUPT"))), "{codes:?}");
    drop(load);
    many.answers("bad", "bad").await;
    many.answers("one", "one").await;
    assert_eq!(many.seen[1].counts(), (2, 1));
    let page = get(many.address, "/metrics").await.body;
    assert!(page.contains("fornax_model_load_failures_total{model_name=\"bad\"} 1"), "{page}");
    many.stopped().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_model_is_unloaded_and_comes_back_and_no_counter_goes_back() {
    // Longer than whoever waited for a model takes to wake up and use it: else it may be loaded twice for one request.
    let options = ServerOptions { idle_unload: Some(Duration::from_millis(500)), ..Default::default() };
    let many = Many::ready(options, vec![fake("one", 40), fake("two", 40)]).await;
    for round in 1..=3 {
        many.answers("two", "two").await;
        many.until_state(1, "unloaded").await;
        assert_eq!(many.seen[1].counts(), (round, 0));
        // A token for each letter, the end, and two of the test.
        let page = get(many.address, "/metrics").await.body;
        let line = format!("vllm:generation_tokens_total{{engine=\"0\",model_name=\"two\"}} {}", round * 6);
        assert!(page.contains(&line), "{line} {page}");
    }
    // The first of all goes too, and readiness stays: the next request finds a server.
    many.until_state(0, "unloaded").await;
    assert_eq!(get(many.address, "/ready").await.status, 200);
    assert!(
        get(many.address, "/metrics").await.body.contains("fornax_load_seconds{model_name=\"one\"} 0.25")
    );
    many.answers("one", "one").await;
    many.stopped().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_sleeps_when_nobody_uses_it_and_wakes_for_the_next_request() {
    let many = Many::ready(ServerOptions::default(), vec![fake("one", 40), fake("two", 40)]).await;
    let sleeping = async |model: &str| {
        let told = get(many.address, &format!("/is_sleeping?model={model}")).await;
        told.json()["is_sleeping"].as_bool().unwrap()
    };
    let loaded = post(many.address, "/models/load", &json!({"model": "two"})).await;
    assert_eq!((loaded.status, loaded.json()), (200, json!({"success": true})));
    many.until_state(1, "loaded").await;
    assert!(!sleeping("two").await && !sleeping("one").await);
    for round in 1..=20 {
        let asleep = post(many.address, "/sleep?level=1&model=two", &json!({})).await;
        assert_eq!((asleep.status, asleep.json()), (200, json!({"is_sleeping": true})));
        assert_eq!((many.seen[1].counts(), sleeping("two").await), ((round, 0), true));
        let awake = match round % 2 {
            0 => post(many.address, "/wake_up?model=two", &json!({})).await.json(),
            _ => {
                many.answers("two", "two").await;
                get(many.address, "/is_sleeping?model=two").await.json()
            }
        };
        assert_eq!((awake, many.seen[1].counts()), (json!({"is_sleeping": false}), (round + 1, 1)));
    }
    let unloaded = post(many.address, "/models/unload", &json!({"model": "two-alias"})).await;
    assert_eq!((unloaded.status, many.seen[1].counts()), (200, (21, 0)));
    // Without a name it is the first; what is no level and no model is refused.
    assert_eq!(post(many.address, "/sleep", &json!({})).await.status, 200);
    assert!(sleeping("one").await);
    for (path, status) in [("/sleep?level=3", 400), ("/sleep?level=deep", 400), ("/sleep?model=none", 404)] {
        assert_eq!(post(many.address, path, &json!({})).await.status, status, "{path}");
    }
    assert_eq!(post(many.address, "/models/load", &json!({"model": "none"})).await.status, 404);
    many.stopped().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_says_how_long_a_model_stays() {
    let many = Many::ready(ServerOptions::default(), vec![fake("one", 40), fake("two", 40)]).await;
    let keep = async |body: Value| post(many.address, "/api/generate", &body).await.json();
    let said =
        keep(json!({"model": "two", "prompt": "a", "raw": true, "stream": false, "keep_alive": 0})).await;
    assert_eq!(said["response"], "two", "{said}");
    many.until_state(1, "unloaded").await;
    // Without a prompt it is only loaded, or let go. The last word counts.
    assert_eq!(keep(json!({"model": "two", "keep_alive": "1h"})).await["done_reason"], "load");
    let running = get(many.address, "/api/ps").await.json();
    assert_eq!(running["models"].as_array().unwrap().len(), 2, "{running}");
    assert_eq!(keep(json!({"model": "two", "keep_alive": "0s"})).await["done_reason"], "unload");
    many.until_state(1, "unloaded").await;
    assert_eq!(many.seen[1].counts(), (2, 0));
    // The other was not spoken of.
    assert_eq!(many.seen[0].counts(), (1, 1));
    many.stopped().await;
}

/// A word of one key unloaded the model that all keys use, as often as it was said.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_keys_are_tenants_none_says_how_long_a_model_stays_for_all() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    let keys = ["alices-key-0123456789", "bobs-key-0123456789"];
    std::fs::write(&file, keys.join("\n")).unwrap();
    let options = ServerOptions { api_key_file: Some(file), ..Default::default() };
    let many = Many::ready(options, vec![fake("one", 40)]).await;
    for number in 0..20 {
        let bearer = format!("Bearer {}", keys[number % 2]);
        let prompt = if number < 10 { json!("a") } else { json!("") };
        let body = json!({"model": "one", "prompt": prompt, "raw": true, "stream": false, "keep_alive": 0});
        let bytes =
            request("POST", "/api/generate", &[("Authorization", &bearer)], body.to_string().as_bytes());
        let said = client::raw(many.address, &bytes).await.json();
        let reason = if number < 10 { "stop" } else { "load" };
        assert_eq!(said["done_reason"], reason, "{said}");
    }
    assert_eq!(many.seen[0].counts(), (1, 1));
    many.stopped().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_for_a_model_ends_with_the_deadline_or_the_server() {
    let (load, gate) = mpsc::channel();
    let slow = Fake { gate: Some(gate), ..fake("slow", 40) };
    let options = ServerOptions { request_timeout: Some(Duration::from_millis(20)), ..Default::default() };
    let many = Many::ready(options, vec![fake("one", 40), slow]).await;
    let late = many.ask("slow").await;
    assert_eq!((late.status, &late.json()["error"]["code"]), (503, &json!("MODEL_NOT_READY")));
    assert!(late.body.contains("not loaded within 0.02 seconds"), "{}", late.body);
    drop(load);
    many.until_state(1, "loaded").await;
    many.stopped().await;

    let (load, gate) = mpsc::channel();
    let slow = Fake { gate: Some(gate), ..fake("slow", 40) };
    let many = Many::ready(ServerOptions::default(), vec![fake("one", 40), slow]).await;
    let mut waiting = many.begun(&json!({"model": "slow", "prompt": "a"})).await;
    many.until_state(1, "loading").await;
    drop(many.stop);
    let refused = client::read(&mut waiting).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!("MODEL_NOT_READY")));
    assert!(refused.body.contains("shutting down"), "{}", refused.body);
    drop(load);
    many.running.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_are_loaded_at_the_start_where_that_is_asked_for() {
    let preloaded = |bytes| vec![fake("one", 40), Fake { preload: true, ..fake("two", bytes) }];
    let many = Many::ready(ServerOptions::default(), preloaded(60)).await;
    assert_eq!(many.states().await, ["loaded", "loaded"]);
    many.stopped().await;
    // None makes way for another: that they do not fit is fatal.
    let many = Many::listening(ServerOptions::default(), preloaded(61)).await;
    let error = many.running.await.unwrap().unwrap_err().to_string();
    assert!(error.starts_with("MODEL_DOES_NOT_FIT: it needs 61 bytes, but 60 may be used"), "{error}");
    assert!(error.ends_with("models in use: \"one\""), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_choose_their_model_by_their_endpoint() {
    let folder = tempfile::tempdir().unwrap();
    let options = keeping(folder.path(), Setup::default()).options;
    let many = Many::ready(options, vec![fake("one", 40), fake("two", 40)]).await;
    for (endpoint, name) in [("default", "one"), ("two", "two"), ("two-alias", "two")] {
        let path = format!("/v2/{endpoint}/runsync");
        let done = post(many.address, &path, &json!({"input": {"prompt": "a"}})).await.json();
        assert_eq!(
            (&done["status"], &done["output"]["metadata"]["model"]),
            (&json!("COMPLETED"), &json!(name))
        );
        assert_eq!(done["output"]["output"], name, "{done}");
    }
    let wrong = post(many.address, "/v2/three/run", &json!({"input": {"prompt": "a"}})).await;
    assert_eq!((wrong.status, &wrong.json()["error"]["code"]), (404, &json!("UNKNOWN_ENDPOINT")));
    let page = get(many.address, "/metrics").await.body;
    assert!(page.contains("fornax_jobs{model_name=\"two\",state=\"COMPLETED\"} 2"), "{page}");
    many.stopped().await;
}
