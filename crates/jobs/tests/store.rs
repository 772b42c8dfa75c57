//! The rules of the store, each on both databases.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::{future::Future, time::Duration};

use common::{Database, databases};
use fornax_code::Code;
use fornax_jobs::{Chunk, Claim, Error, Failure, Job, NewJob, Outcome, Policy, State, Store, StoreOptions};
use serde_json::{Value, json};

const MODEL: &str = "m";

/// Runs a scenario on each database, with an empty queue.
fn check<F: Future<Output = ()>>(
    test: &str,
    change: impl Fn(&mut StoreOptions),
    scenario: impl Fn(Store, StoreOptions) -> F,
) {
    for database in databases(test) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let mut options = database.options();
        change(&mut options);
        runtime.block_on(async {
            let store = Store::open(options.clone()).await.unwrap();
            scenario(store, options).await;
        });
    }
}

fn new(input: Value) -> NewJob {
    NewJob {
        model: MODEL.to_owned(),
        owner: "somebody".to_owned(),
        shares: false,
        input,
        webhook: None,
        policy: Policy::default(),
        idempotency_key: None,
    }
}

async fn submit(store: &Store, job: NewJob) -> String {
    store.submit(job).await.unwrap().id
}

async fn claim(store: &Store) -> Claim {
    store.claim(MODEL, "worker").await.unwrap().expect("a job waits")
}

async fn get(store: &Store, id: &str) -> Job {
    store.get(id).await.unwrap().expect("it is kept")
}

async fn finish(store: &Store, claim: &Claim, outcome: Outcome) -> bool {
    store.finish(claim, outcome, Duration::from_millis(5)).await.unwrap()
}

fn completed(value: Value) -> Outcome {
    Outcome::Completed(json!({"success": true, "output": value}))
}

fn broken() -> Outcome {
    Outcome::Failed(Failure::retryable(Code::Internal, "generate", "the step panicked"))
}

/// Ids of the newest jobs, and whether their outputs come along.
async fn listed(store: &Store, owner: Option<&str>, state: Option<State>) -> Vec<(String, bool)> {
    let jobs = store.list(MODEL, owner, state, 100).await.unwrap();
    jobs.into_iter().map(|job| (job.id, job.output.is_some())).collect()
}

async fn timeline(store: &Store, id: &str) -> Vec<String> {
    store.timeline(id).await.unwrap().into_iter().map(|event| event.event).collect()
}

#[test]
fn a_job_is_completed_once_by_who_holds_it() {
    check(
        "a_job_is_completed_once_by_who_holds_it",
        |_| {},
        async |store, _| {
            let id = submit(&store, new(json!({"prompt": "a\u{0}b"}))).await;
            assert_eq!(id.len(), 12 + 32);
            let first = claim(&store).await;
            assert_eq!((first.job.state, first.job.attempts), (State::Running, 1));
            assert_eq!(
                serde_json::from_str::<Value>(&first.job.input).unwrap(),
                json!({"prompt": "a\u{0}b"})
            );
            assert!(store.claim(MODEL, "other").await.unwrap().is_none(), "nobody else gets it");
            assert!(store.claim("other model", "other").await.unwrap().is_none());
            // The first worker is thought to be gone, and is not.
            assert!(store.recover(&first.lease, None).await.unwrap());
            let second = claim(&store).await;
            assert_eq!(second.job.attempts, 2);
            assert!(!finish(&store, &first, completed(json!("late"))).await, "its lease is another's");
            assert!(!store.add_chunk(&first, &Chunk { n: 0, body: json!("late") }, false).await.unwrap());
            assert!(finish(&store, &second, completed(json!("in time"))).await);
            assert!(!finish(&store, &second, completed(json!("twice"))).await, "once is enough");
            let job = get(&store, &id).await;
            let status = job.status();
            assert_eq!((job.state, &status["output"]["output"]), (State::Completed, &json!("in time")));
            assert_eq!((&status["status"], &status["executionTime"]), (&json!("COMPLETED"), &json!(5)));
            let wanted = ["submitted", "started", "worker lost, to be tried again", "started", "completed"];
            assert_eq!(timeline(&store, &id).await, wanted);
        },
    );
}

#[test]
fn jobs_are_taken_in_order_and_the_unimportant_last() {
    check(
        "jobs_are_taken_in_order_and_the_unimportant_last",
        |_| {},
        async |store, _| {
            let low = Policy { low_priority: true, ..Policy::default() };
            let mut wanted = Vec::new();
            let last = submit(&store, NewJob { policy: low, ..new(json!(0)) }).await;
            for n in 1..10 {
                wanted.push(submit(&store, new(json!(n))).await);
            }
            wanted.push(last);
            for id in wanted {
                assert_eq!(claim(&store).await.job.id, id);
            }
        },
    );
}

#[test]
fn a_poison_job_stops_after_its_attempts() {
    check(
        "a_poison_job_stops_after_its_attempts",
        |options| options.attempts_max = 2,
        async |store, _| {
            let id = submit(&store, new(json!(1))).await;
            for _ in 0..2 {
                let claim = claim(&store).await;
                assert!(
                    store.recover(&claim.lease, Some(7)).await.is_ok_and(|taken| !taken),
                    "it gave a sign since"
                );
                assert!(store.recover(&claim.lease, Some(0)).await.unwrap());
            }
            let job = get(&store, &id).await;
            assert_eq!(
                (job.state, &job.status()["output"]["code"]),
                (State::Failed, &json!("ATTEMPTS_EXHAUSTED"))
            );

            // What fails and may be tried again is tried again after a pause; what cannot succeed is not.
            let id = submit(&store, new(json!(2))).await;
            assert!(finish(&store, &claim(&store).await, broken()).await);
            assert_eq!(get(&store, &id).await.state, State::Queued);
            assert!(store.claim(MODEL, "worker").await.unwrap().is_none(), "not before the pause is over");
            let id = submit(&store, new(json!(3))).await;
            let claim = claim(&store).await;
            assert!(finish(&store, &claim, Outcome::Failed(Failure::truncated(7))).await);
            let status = get(&store, &id).await.status();
            assert_eq!((&status["status"], &status["output"]["attempt"]), (&json!("FAILED"), &json!(1)));
            assert_eq!(
                status["error"],
                "OUTPUT_TRUNCATED: the answer was cut after 7 tokens, before it was whole"
            );
        },
    );
}

#[test]
fn a_worker_that_stops_returns_what_it_took_and_no_attempt_is_lost() {
    let test = "a_worker_that_stops_returns_what_it_took_and_no_attempt_is_lost";
    check(
        test,
        |_| {},
        async |store, _| {
            let id = submit(&store, new(json!(1))).await;
            let claim = claim(&store).await;
            assert_eq!(store.beat("worker").await.unwrap(), [claim.lease.as_str()]);
            assert!(finish(&store, &claim, Outcome::Returned).await);
            let job = get(&store, &id).await;
            assert_eq!((job.state, job.attempts), (State::Queued, 0));
            assert!(store.beat("worker").await.unwrap().is_empty());
        },
    );
}

#[test]
fn the_same_key_is_the_same_job() {
    check(
        "the_same_key_is_the_same_job",
        |_| {},
        async |store, _| {
            let keyed = |input, key: &str| NewJob { idempotency_key: Some(key.to_owned()), ..new(input) };
            let first = store.submit(keyed(json!(1), "k")).await.unwrap();
            let again = store.submit(keyed(json!(1), "k")).await.unwrap();
            assert!(first.is_new && !again.is_new && first.id == again.id);
            assert!(matches!(store.submit(keyed(json!(2), "k")).await, Err(Error::KeyReused)));
            let other = NewJob { owner: "another".to_owned(), ..keyed(json!(2), "k") };
            assert!(store.submit(other).await.unwrap().is_new, "keys are their owner's");
            // All at once, too.
            let many = (0..20).map(|_| {
                let (store, job) = (store.clone(), keyed(json!(3), "at once"));
                tokio::spawn(async move { store.submit(job).await.unwrap() })
            });
            let mut new = 0;
            for submitted in many.collect::<Vec<_>>() {
                new += i32::from(submitted.await.unwrap().is_new);
            }
            assert_eq!(new, 1);
            assert_eq!(store.counts(MODEL).await.unwrap().of(State::Queued), 3);
        },
    );
}

#[test]
fn cancel_retry_and_purge_leave_explained_states() {
    check(
        "cancel_retry_and_purge_leave_explained_states",
        |_| {},
        async |store, _| {
            let id = submit(&store, new(json!(1))).await;
            let taken = claim(&store).await;
            assert_eq!(store.cancel(&id).await.unwrap().state, State::Cancelled);
            assert_eq!(store.cancel(&id).await.unwrap().state, State::Cancelled, "however often");
            assert!(!finish(&store, &taken, completed(json!(1))).await, "too late");
            let refused = store.retry(&id).await.unwrap_err();
            assert!(matches!(refused, Error::WrongState { state: State::Cancelled, .. }), "{refused}");
            assert!(matches!(store.cancel("unknown").await, Err(Error::NotFound)));
            assert!(matches!(store.retry("unknown").await, Err(Error::NotFound)));

            let id = submit(&store, new(json!(2))).await;
            let claim = claim(&store).await;
            store.add_chunk(&claim, &Chunk { n: 0, body: json!("x") }, true).await.unwrap();
            finish(&store, &claim, Outcome::Failed(Failure::truncated(1))).await;
            let job = store.retry(&id).await.unwrap();
            assert_eq!((job.state, job.attempts, job.retries, job.output), (State::Queued, 0, 1, None));
            assert!(store.chunks(&id, 0).await.unwrap().is_empty());

            for n in 0..3 {
                submit(&store, new(json!(n))).await;
            }
            let theirs = submit(&store, NewJob { owner: "another".to_owned(), ..new(json!(3)) }).await;
            assert_eq!(store.purge(MODEL, "somebody").await.unwrap(), 4);
            assert_eq!(get(&store, &theirs).await.state, State::Queued, "it is another's");
            assert_eq!(store.counts(MODEL).await.unwrap().of(State::Cancelled), 5);
            assert_eq!(timeline(&store, &id).await.last().unwrap(), "purged");
        },
    );
}

#[test]
fn a_queue_has_an_end_and_makes_room() {
    check(
        "a_queue_has_an_end_and_makes_room",
        |options| options.queue_max = 3,
        async |store, _| {
            for n in 0..3 {
                submit(&store, new(json!(n))).await;
            }
            for _ in 0..2 {
                let full = store.submit(new(json!(3))).await.unwrap_err();
                assert!(matches!(full, Error::QueueFull { waiting: 3, max: 3 }), "{full}");
            }
            claim(&store).await;
            submit(&store, new(json!(3))).await;
            assert!(store.submit(new(json!(4))).await.is_err());
        },
    );
}

/// A job of eight megabytes is a line to submit again and again, and what has ended is kept for a day.
#[test]
fn one_owners_jobs_leave_others_room_on_the_disk() {
    check(
        "one_owners_jobs_leave_others_room_on_the_disk",
        |options| options.job_bytes_max = 1000,
        async |store, _| {
            let job = |owner: &str, length: usize| NewJob {
                owner: owner.to_owned(),
                shares: true,
                // With the quotes around it.
                ..new(json!("x".repeat(length - 2)))
            };
            let first = submit(&store, job("a", 600)).await;
            // What has ended is still kept.
            store.cancel(&first).await.unwrap();
            submit(&store, job("a", 400)).await;
            let full = store.submit(job("a", 3)).await.unwrap_err();
            assert!(matches!(full, Error::BytesFull { bytes: 1000, max: 1000 }), "{full}");
            submit(&store, job("b", 1000)).await;
            submit(&store, NewJob { shares: false, ..job("a", 5000) }).await;
        },
    );
}

#[test]
fn owners_take_turns_and_leave_each_other_room_in_the_queue() {
    check(
        "owners_take_turns_and_leave_each_other_room_in_the_queue",
        |options| options.queue_max = 8,
        async |store, _| {
            let of =
                |owner: &str, n: usize| NewJob { owner: owner.to_owned(), shares: true, ..new(json!(n)) };
            for n in 0..4 {
                submit(&store, of("flood", n)).await;
            }
            let full = store.submit(of("flood", 4)).await.unwrap_err();
            assert!(matches!(full, Error::ShareFull { waiting: 4 }), "{full}");
            for n in 0..2 {
                submit(&store, of("honest", n)).await;
            }
            let low = Policy { low_priority: true, ..Policy::default() };
            submit(&store, NewJob { policy: low, ..of("patient", 0) }).await;
            let mut taken = Vec::new();
            while let Some(claim) = store.claim(MODEL, "worker").await.unwrap() {
                taken.push(claim.job.owner.clone());
                if taken.len() < 4 {
                    finish(&store, &claim, completed(json!(1))).await;
                }
            }
            // One after the other while there is one at a time; what is unimportant comes last whosever it is.
            let turns = ["flood", "honest", "flood", "honest", "flood", "flood", "patient"];
            assert_eq!(taken, turns);
        },
    );
}

#[test]
fn what_waited_too_long_times_out_and_old_results_are_forgotten() {
    let test = "what_waited_too_long_times_out_and_old_results_are_forgotten";
    check(
        test,
        |options| options.retention = Duration::ZERO,
        async |store, _| {
            let policy = Policy { ttl_ms: Some(0), ..Policy::default() };
            let webhook = Some("http://hooks.example/".to_owned());
            let id = submit(&store, NewJob { policy, webhook, ..new(json!(1)) }).await;
            assert!(store.claim(MODEL, "worker").await.unwrap().is_none(), "it is not begun");
            store.sweep().await.unwrap();
            let delivery = store.next_delivery(|_| Duration::from_secs(60)).await.unwrap().unwrap();
            let told: Value = serde_json::from_str(&delivery.body).unwrap();
            assert_eq!(
                (&told["status"], &told["output"]["code"]),
                (&json!("TIMED_OUT"), &json!("TTL_EXPIRED"))
            );
            assert_eq!((told["id"].as_str(), delivery.attempt), (Some(id.as_str()), 1));
            assert!(store.next_delivery(|_| Duration::ZERO).await.unwrap().is_none(), "it is under way");
            store.sweep().await.unwrap();
            assert!(store.get(&id).await.unwrap().is_none());
            assert!(store.timeline(&id).await.unwrap().is_empty());
            store.end_delivery(&delivery, true).await.unwrap();
        },
    );
}

#[test]
fn chunks_are_handed_out_once_and_finished_items_survive_an_attempt() {
    let test = "chunks_are_handed_out_once_and_finished_items_survive_an_attempt";
    check(
        test,
        |_| {},
        async |store, _| {
            let id = submit(&store, new(json!(1))).await;
            let first = claim(&store).await;
            let chunk = |n| Chunk { n, body: json!({"index": n}) };
            for n in [0, 1] {
                assert!(store.add_chunk(&first, &chunk(n), true).await.unwrap());
            }
            assert!(store.add_chunk(&first, &chunk(3), true).await.unwrap());
            assert_eq!(store.take_chunks(&id).await.unwrap(), [chunk(0), chunk(1)], "in order, without gaps");
            assert!(store.take_chunks(&id).await.unwrap().is_empty());
            assert!(store.recover(&first.lease, None).await.unwrap());
            let second = claim(&store).await;
            assert_eq!(store.chunks(&id, 0).await.unwrap(), [chunk(0), chunk(1)]);
            assert_eq!(store.finished_items(&id).await.unwrap(), [chunk(0), chunk(1), chunk(3)]);
            assert!(store.add_chunk(&second, &chunk(1), true).await.unwrap(), "an item is written once");
            assert_eq!(store.chunks(&id, 1).await.unwrap(), [chunk(1)]);
            assert!(store.add_chunk(&second, &chunk(2), true).await.unwrap());
            assert_eq!(store.take_chunks(&id).await.unwrap(), [chunk(2), chunk(3)]);

            // The text of an attempt that was lost is not part of the next one's.
            let id = submit(&store, new(json!(2))).await;
            let first = claim(&store).await;
            store.add_chunk(&first, &chunk(0), false).await.unwrap();
            assert_eq!(store.take_chunks(&id).await.unwrap().len(), 1);
            store.recover(&first.lease, None).await.unwrap();
            let second = claim(&store).await;
            assert!(store.chunks(&id, 0).await.unwrap().is_empty());
            store.add_chunk(&second, &chunk(0), false).await.unwrap();
            assert_eq!(store.take_chunks(&id).await.unwrap(), [chunk(0)]);
        },
    );
}

#[test]
fn a_full_disk_refuses_a_job_and_keeps_the_others() {
    let database = Database::sqlite();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let options = StoreOptions { bytes_max: Some(400_000), ..database.options() };
        let store = Store::open(options.clone()).await.unwrap();
        let kept = submit(&store, new(json!("small"))).await;
        let full = store.submit(new(json!("x".repeat(600_000)))).await.unwrap_err();
        assert!(matches!(full, Error::DiskFull), "{full}");
        assert_eq!(store.counts(MODEL).await.unwrap().of(State::Queued), 1, "nothing half-written");
        submit(&store, new(json!("small again"))).await;
        assert_eq!(get(&store, &kept).await.state, State::Queued);
    });
}

#[test]
fn a_file_belongs_to_one_process_and_running_jobs_wait_again_after_a_crash() {
    let database = Database::sqlite();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let store = Store::open(database.options()).await.unwrap();
        assert!(matches!(Store::open(database.options()).await, Err(Error::InUse { .. })));
        let id = submit(&store, new(json!(1))).await;
        let claim = claim(&store).await;
        store.close().await;
        drop((store, claim));
        let reopened = Store::open(database.options()).await.unwrap();
        let job = get(&reopened, &id).await;
        assert_eq!((job.state, job.attempts), (State::Queued, 1));
    });
    let open = |path: &str| runtime.block_on(Store::open(StoreOptions::new(path)));
    assert!(matches!(open("/dev/null/jobs.db"), Err(Error::Open(_))));
    for address in ["postgres://somebody:secret@%2Fnowhere/x", "Postgres://somebody:secret@%2Fnowhere/x"] {
        let refused = open(address).err().unwrap().to_string();
        assert!(!refused.contains("secret"), "{refused}");
    }
    let folder = tempfile::tempdir().unwrap();
    let unknown = format!("mysql://somebody:secret@{}", folder.path().display());
    let refused = open(&unknown).err().unwrap().to_string();
    assert!(refused.contains("mysql://") && !refused.contains("secret"), "{refused}");
}

#[cfg(unix)]
#[test]
fn nobody_else_can_read_the_database() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jobs.db");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let store = Store::open(StoreOptions::new(path.to_str().unwrap())).await.unwrap();
        submit(&store, new(json!("a prompt"))).await;
        let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap()).collect();
        assert!(files.iter().any(|file| file.file_name() == "jobs.db-wal"), "{files:?}");
        for file in files {
            let mode = file.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{:?} has mode {mode:o}", file.file_name());
        }
    });
}

#[test]
fn a_clock_that_was_set_back_or_forth_moves_no_deadline() {
    for database in databases("a_clock_that_was_set_back_or_forth_moves_no_deadline") {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let hour = 3_600_000_000i64;
            let at = |hours: i64| StoreOptions {
                wall_us: Some(1_000_000 * hour + hours * hour),
                ..database.options()
            };
            let ahead = Store::open(at(24)).await.unwrap();
            let policy = Policy { ttl_ms: Some(3_600_000), ..Policy::default() };
            let id = submit(&ahead, NewJob { policy, ..new(json!(1)) }).await;
            ahead.close().await;
            drop(ahead);
            // The next process sees the day before.
            let behind = Store::open(at(0)).await.unwrap();
            behind.sweep().await.unwrap();
            let claim = claim(&behind).await;
            assert_eq!(claim.job.id, id);
            let next = submit(&behind, new(json!(2))).await;
            assert!(get(&behind, &next).await.created_us > claim.job.created_us);
            assert!(finish(&behind, &claim, completed(json!(1))).await);
            let status = get(&behind, &id).await.status();
            let delay = status["delayTime"].as_i64().unwrap();
            assert!((0..60_000).contains(&delay), "{delay} ms in the queue");
        });
    }
}

#[test]
fn lists_have_the_newest_of_an_owner_without_results() {
    check(
        "lists_have_the_newest_of_an_owner_without_results",
        |_| {},
        async |store, _| {
            let first = submit(&store, new(json!(1))).await;
            finish(&store, &claim(&store).await, completed(json!("large"))).await;
            let second = submit(&store, new(json!(2))).await;
            finish(&store, &claim(&store).await, Outcome::Failed(Failure::truncated(1))).await;
            let other = submit(&store, NewJob { owner: "another".to_owned(), ..new(json!(3)) }).await;
            let all = [(other.clone(), false), (second.clone(), true), (first.clone(), false)];
            assert_eq!(listed(&store, None, None).await, all);
            assert_eq!(listed(&store, Some("somebody"), None).await, all[1..]);
            assert_eq!(listed(&store, Some("another"), None).await, all[..1]);
            assert_eq!(listed(&store, None, Some(State::Completed)).await, all[2..]);
        },
    );
}

#[test]
fn schemas_are_kept_by_name_and_model() {
    check(
        "schemas_are_kept_by_name_and_model",
        |_| {},
        async |store, _| {
            for schema in [json!({"type": "object"}), json!({"type": "array"})] {
                store.put_schema(MODEL, "us", "invoice", &schema).await.unwrap();
                assert_eq!(store.schema(MODEL, "us", "invoice").await.unwrap(), Some(schema));
            }
            assert_eq!(store.schema("other", "us", "invoice").await.unwrap(), None);
            assert_eq!(store.schema(MODEL, "them", "invoice").await.unwrap(), None, "it is another's");
            store.put_schema(MODEL, "them", "invoice", &json!({"const": 0})).await.unwrap();
            assert_ne!(store.schema(MODEL, "us", "invoice").await.unwrap(), Some(json!({"const": 0})));
            // Registered before schemas had owners.
            store.put_schema(MODEL, "", "old", &json!({})).await.unwrap();
            assert_eq!(store.schema(MODEL, "us", "old").await.unwrap(), Some(json!({})));
        },
    );
}

#[test]
fn many_workers_on_one_queue_take_each_job_once() {
    let test = "many_workers_on_one_queue_take_each_job_once";
    check(
        test,
        |_| {},
        async |store, options| {
            for n in 0..200 {
                submit(&store, new(json!(n))).await;
            }
            let is_postgres = options.database.starts_with("postgres");
            let workers = (0..4).map(|worker| {
                let (store, options) = (store.clone(), options.clone());
                tokio::spawn(async move {
                    // Each its own connections, as processes of their own would have.
                    let store = if is_postgres { Store::open(options).await.unwrap() } else { store };
                    let (worker, mut taken) = (format!("worker {worker}"), Vec::new());
                    while let Some(claim) = store.claim(MODEL, &worker).await.unwrap() {
                        assert!(finish(&store, &claim, completed(json!(1))).await);
                        taken.push(claim.job.id);
                    }
                    taken
                })
            });
            let mut taken = Vec::new();
            for worker in workers.collect::<Vec<_>>() {
                taken.extend(worker.await.unwrap());
            }
            taken.sort();
            taken.dedup();
            let counts = store.counts(MODEL).await.unwrap();
            assert_eq!((taken.len(), counts.of(State::Completed), counts.retried), (200, 200, 0));
        },
    );
}
