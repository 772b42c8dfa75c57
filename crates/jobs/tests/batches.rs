//! Batches and files, with a model that does what each request says, on both databases.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::{future::pending, sync::Arc, time::Duration};

use common::databases;
use fornax_code::Code;
use fornax_jobs::{
    Answer, Batch, BatchAnswer, BatchRequest, BatchState, Failure, Model, NewBatch, NewFile, Page, Question,
    Runner, RunnerOptions, State, Store, StoreOptions,
};
use serde_json::{Value, json};
use tokio::{sync::watch, task::JoinHandle};

/// Does what a request says.
struct Obedient;

impl Model for Obedient {
    fn facts(&self) -> (String, String) {
        ("obedient".to_owned(), "F32".to_owned())
    }

    async fn answer(&self, _: &str, _: Question, _: impl Fn(&str) + Send + Sync) -> Result<Answer, Failure> {
        Err(Failure::new(Code::Internal, "generate", "nobody asks"))
    }

    async fn respond(&self, _: &str, route: &str, body: Value) -> Result<Value, Failure> {
        match body["do"].as_str().unwrap() {
            "say" => Ok(json!({"route": route, "said": body["what"]})),
            "refuse" => Err(Failure::new(Code::PromptTooLong, "prepare", "9 tokens; 8 fit")),
            _ => pending().await,
        }
    }
}

/// A store with a runner on it.
struct World {
    store: Store,
    stop: watch::Sender<bool>,
    running: JoinHandle<usize>,
}

impl World {
    fn on(store: Store) -> World {
        let (stop, stopped) = watch::channel(false);
        let options = RunnerOptions {
            poll: Duration::from_millis(20),
            patience: Duration::from_millis(50),
            ..RunnerOptions::default()
        };
        let runner = Runner::new(store.clone(), Arc::new(Obedient), "m", options);
        World { store, stop, running: tokio::spawn(runner.run(stopped)) }
    }

    async fn stopped(self) -> usize {
        self.stop.send_replace(true);
        self.running.await.unwrap()
    }
}

fn batch(requests: &[(&str, &str)]) -> NewBatch {
    let request = |(custom_id, verb): &(&str, &str)| BatchRequest {
        model: "m".to_owned(),
        custom_id: (*custom_id).to_owned(),
        body: json!({"do": verb, "what": custom_id}).to_string(),
    };
    NewBatch {
        owner: "o".to_owned(),
        route: "/talk".to_owned(),
        input_file: "file-1".to_owned(),
        completion_window: "24h".to_owned(),
        window_us: 86_400_000_000,
        metadata: json!({"a": "b"}),
        requests: requests.iter().map(request).collect(),
        errors: Vec::new(),
        shares: false,
        idempotency_key: None,
    }
}

/// Settles until a batch has ended.
async fn settled(store: &Store, id: &str) -> Batch {
    let write = |answer: &BatchAnswer| {
        let said = &answer.output["response"]["said"];
        json!({"id": answer.custom_id, "state": answer.state.name(), "said": said, "code": answer.output["code"]})
            .to_string()
    };
    let ending = async {
        loop {
            store.settle_batches(write).await.unwrap();
            let batch = store.batch("o", id).await.unwrap().unwrap();
            if batch.ended_us.is_some() {
                return batch;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), ending).await.expect("the batch ends")
}

async fn lines(store: &Store, file: Option<&str>) -> Vec<Value> {
    let text = store.file_text(file.unwrap()).await.unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_ends_with_every_answer_and_every_error_once_in_the_order_of_its_lines() {
    for database in databases("a_batch_ends_with_every_answer_and_every_error_once_in_the_order_of_its_lines")
    {
        let world = World::on(Store::open(database.options()).await.unwrap());
        let begun =
            world.store.begin_batch(batch(&[("b", "say"), ("x", "refuse"), ("a", "say")])).await.unwrap();
        assert_eq!((begun.state, begun.requests), (BatchState::InProgress, 3));
        let ended = settled(&world.store, &begun.id).await;
        assert_eq!((ended.state, ended.completed, ended.failed), (BatchState::Completed, 2, 1));
        let said = |id: &str| json!({"id": id, "state": "COMPLETED", "said": id, "code": null});
        assert_eq!(lines(&world.store, ended.output_file.as_deref()).await, [said("b"), said("a")]);
        let refused = json!({"id": "x", "state": "FAILED", "said": null, "code": "PROMPT_TOO_LONG"});
        assert_eq!(lines(&world.store, ended.error_file.as_deref()).await, [refused]);
        // The jobs are forgotten, the answers are not; and nobody else sees them.
        assert_eq!(world.store.counts("m").await.unwrap().of(State::Completed), 0);
        assert_eq!(world.store.batch("other", &begun.id).await.unwrap(), None);
        assert_eq!(world.store.file("other", ended.output_file.as_deref().unwrap()).await.unwrap(), None);
        assert!(matches!(
            world.store.cancel_batch("other", &begun.id).await,
            Err(fornax_jobs::Error::NotFound)
        ));
        world.stopped().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_batch_keeps_what_was_answered_and_asks_nothing_more() {
    for database in databases("a_cancelled_batch_keeps_what_was_answered_and_asks_nothing_more") {
        let world = World::on(Store::open(database.options()).await.unwrap());
        let requests: Vec<(String, &str)> =
            (0..20).map(|n| (n.to_string(), if n == 0 { "say" } else { "wait" })).collect();
        let requests: Vec<(&str, &str)> = requests.iter().map(|(id, verb)| (id.as_str(), *verb)).collect();
        let begun = world.store.begin_batch(batch(&requests)).await.unwrap();
        let answered = async {
            while world.store.batch("o", &begun.id).await.unwrap().unwrap().completed == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), answered).await.expect("the first is answered");
        let cancelled = world.store.cancel_batch("o", &begun.id).await.unwrap();
        assert!(cancelled.cancelling_us.is_some(), "{cancelled:?}");
        let ended = settled(&world.store, &begun.id).await;
        assert_eq!((ended.state, ended.completed, ended.failed), (BatchState::Cancelled, 1, 0));
        assert_eq!(lines(&world.store, ended.output_file.as_deref()).await.len(), 1);
        assert_eq!(ended.error_file, None);
        assert_eq!(world.store.cancel_batch("o", &begun.id).await.unwrap(), ended, "it stays as it is");
        world.stopped().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_batch_did_not_ask_in_time_has_expired() {
    for database in databases("what_a_batch_did_not_ask_in_time_has_expired") {
        let store = Store::open(database.options()).await.unwrap();
        let late = NewBatch { window_us: 0, ..batch(&[("a", "say"), ("b", "say")]) };
        let begun = store.begin_batch(late).await.unwrap();
        store.sweep().await.unwrap();
        let ended = settled(&store, &begun.id).await;
        assert_eq!((ended.state, ended.completed, ended.failed), (BatchState::Expired, 0, 2));
        let lines = lines(&store, ended.error_file.as_deref()).await;
        assert!(lines.iter().all(|line| line["code"] == "TTL_EXPIRED"), "{lines:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_is_wrong_too_long_or_begun_twice_asks_nothing_twice() {
    let name = "a_batch_that_is_wrong_too_long_or_begun_twice_asks_nothing_twice";
    for database in databases(name) {
        let options = StoreOptions { queue_max: 3, ..database.options() };
        let store = Store::open(options).await.unwrap();
        let wrong = NewBatch { errors: vec![json!({"line": 1})], ..batch(&[]) };
        let failed = store.begin_batch(wrong).await.unwrap();
        assert_eq!((failed.state, &failed.errors[..]), (BatchState::Failed, &[json!({"line": 1})][..]));
        assert!(failed.ended_us.is_some());
        let keyed = |requests| NewBatch { idempotency_key: Some("key".to_owned()), ..batch(requests) };
        let first = store.begin_batch(keyed(&[("a", "say"), ("b", "say")])).await.unwrap();
        let again = store.begin_batch(keyed(&[("a", "say"), ("b", "say")])).await.unwrap();
        assert_eq!(first.id, again.id);
        let other = NewBatch { metadata: json!({}), ..keyed(&[("a", "say")]) };
        assert!(matches!(store.begin_batch(other).await, Err(fornax_jobs::Error::KeyReused)));
        assert_eq!(store.counts("m").await.unwrap().of(State::Queued), 2);
        let full = store.begin_batch(batch(&[("a", "say"), ("b", "say")])).await;
        assert!(matches!(full, Err(fornax_jobs::Error::QueueFull { waiting: 2, max: 3 })), "{full:?}");
        let page = |after, newest_first| Page { after, newest_first, most: 10 };
        let listed = store.batches("o", page(None, true)).await.unwrap();
        let ids: Vec<&str> = listed.iter().map(|batch| batch.id.as_str()).collect();
        assert_eq!(ids, [first.id.as_str(), failed.id.as_str()], "what was refused left nothing");
        assert_eq!(store.batches("o", page(Some(&failed.id), false)).await.unwrap(), listed[..1]);
        assert_eq!(store.batches("other", page(None, true)).await.unwrap(), []);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_owners_batches_leave_others_room_in_the_queue() {
    for database in databases("one_owners_batches_leave_others_room_in_the_queue") {
        let store = Store::open(StoreOptions { queue_max: 9, ..database.options() }).await.unwrap();
        let shared = |owner: &str, lines: &[(&str, &str)]| {
            let owner = owner.to_owned();
            store.begin_batch(NewBatch { owner, shares: true, ..batch(lines) })
        };
        let three = [("a", "say"), ("b", "say"), ("c", "say")];
        shared("alice", &three).await.unwrap();
        // Six are free; two more leave as many as she has by then, four more would not.
        shared("alice", &three[..1]).await.unwrap();
        let refused = shared("alice", &three).await;
        assert!(matches!(refused, Err(fornax_jobs::Error::ShareFull { waiting: 4 })), "{refused:?}");
        shared("bob", &three).await.unwrap();
        // Each copy of a file's requests is kept, so their bytes are counted as those of jobs are.
        store.close().await;
        drop(store);
        let bounds = StoreOptions { queue_max: 9, job_bytes_max: 20, ..database.options() };
        let store = Store::open(bounds).await.unwrap();
        let dave = NewBatch { owner: "dave".to_owned(), shares: true, ..batch(&three) };
        let refused = store.begin_batch(dave).await;
        assert!(matches!(refused, Err(fornax_jobs::Error::BytesFull { max: 20, .. })), "{refused:?}");
        // Whoever shares with nobody may have all of it.
        let alone = NewBatch { owner: "carol".to_owned(), ..batch(&three[..2]) };
        store.begin_batch(alone).await.unwrap();
        assert_eq!(store.counts("m").await.unwrap().of(State::Queued), 9);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_are_kept_in_parts_and_belong_to_their_owner() {
    for database in databases("files_are_kept_in_parts_and_belong_to_their_owner") {
        let bounds = StoreOptions { files_max: 2, file_bytes_max: 800_001, ..database.options() };
        let store = Store::open(bounds).await.unwrap();
        // More than a part, and characters across its end.
        let text = "aé\n".repeat(200_000);
        let new = |owner: &str, text: &str| NewFile {
            owner: owner.to_owned(),
            name: "a.jsonl".to_owned(),
            purpose: "batch".to_owned(),
            text: text.to_owned(),
        };
        let file = store.put_file(new("o", &text)).await.unwrap();
        assert_eq!(file.bytes, 800_000);
        assert!(store.file_part(&file.id, 3).await.unwrap().is_some(), "it is in several parts");
        assert!(store.file_text(&file.id).await.unwrap() == text);
        assert_eq!(store.file("o", &file.id).await.unwrap(), Some(file.clone()));
        assert_eq!(store.file("other", &file.id).await.unwrap(), None);
        let page = Page { after: None, newest_first: true, most: 10 };
        let second = store.put_file(new("o", "x")).await.unwrap();
        assert_eq!(store.files("o", None, page).await.unwrap(), [second.clone(), file.clone()]);
        assert_eq!(store.files("o", Some("other"), page).await.unwrap(), []);
        let behind = Page { after: Some(&second.id), ..page };
        assert_eq!(store.files("o", Some("batch"), behind).await.unwrap(), std::slice::from_ref(&file));
        assert!(!store.delete_file("other", &file.id).await.unwrap());
        assert!(store.delete_file("o", &file.id).await.unwrap());
        assert!(!store.delete_file("o", &file.id).await.unwrap());
        assert_eq!(store.file_part(&file.id, 0).await.unwrap(), None, "and so is what was in it");
        let full = |answer| matches!(answer, Err(fornax_jobs::Error::FilesFull { files: 2, bytes: 800_001 }));
        assert!(
            full(store.put_file(new("o", &(text.clone() + "x"))).await.map(drop)),
            "its bytes are too many"
        );
        store.put_file(new("o", "x")).await.unwrap();
        assert!(full(store.put_file(new("o", "x")).await.map(drop)), "there are two");
        store.put_file(new("other", "x")).await.unwrap();
        store.close().await;
        let soon = StoreOptions { retention: Duration::ZERO, ..database.options() };
        let store = Store::open(soon).await.unwrap();
        let brief = store.put_file(new("third", "x")).await.unwrap();
        while store.file("third", &brief.id).await.unwrap().is_some() {
            store.sweep().await.unwrap();
        }
        assert_eq!(store.file_part(&brief.id, 0).await.unwrap(), None);
    }
}
