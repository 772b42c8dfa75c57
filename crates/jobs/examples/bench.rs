//! How fast jobs are accepted and taken: `cargo run --release -p fornax-jobs --example bench -- DATABASE`, where
//! DATABASE is a new file or `postgres://…`. Every submit is on disk before it counts.
#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a tool for the terminal that stops at the first surprise"
)]

use std::time::{Duration, Instant};

use fornax_jobs::{NewJob, Outcome, Policy, Store, StoreOptions};
use serde_json::json;

/// Jobs of a long queue.
const QUEUE: usize = 100_000;

/// Jobs taken and finished for each figure.
const TAKEN: usize = 500;

fn job() -> NewJob {
    NewJob {
        model: "m".to_owned(),
        owner: "o".to_owned(),
        shares: false,
        input: json!({"messages": [{"role": "user", "content": "x".repeat(1000)}]}),
        webhook: None,
        policy: Policy::default(),
        idempotency_key: None,
    }
}

async fn submit(store: &Store, clients: usize, count: usize) -> f64 {
    let began = Instant::now();
    let clients = (0..clients).map(|client| {
        let store = store.clone();
        let own = count / clients + usize::from(client < count % clients);
        tokio::spawn(async move {
            for _ in 0..own {
                store.submit(job()).await.unwrap();
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    count as f64 / began.elapsed().as_secs_f64()
}

/// Jobs taken and completed in a second, one after the other.
async fn take(store: &Store) -> f64 {
    let began = Instant::now();
    for _ in 0..TAKEN {
        let claim = store.claim("m", "bench").await.unwrap().unwrap();
        let outcome = Outcome::Completed(json!({"success": true, "output": "x".repeat(200)}));
        assert!(store.finish(&claim, outcome, Duration::ZERO).await.unwrap());
    }
    TAKEN as f64 / began.elapsed().as_secs_f64()
}

#[tokio::main]
async fn main() {
    let database = std::env::args().nth(1).expect("a database");
    let store =
        Store::open(StoreOptions { queue_max: 1_000_000, ..StoreOptions::new(database) }).await.unwrap();
    for (clients, count) in [(1, 500), (16, 4000), (256, 10_000)] {
        println!("{clients} clients: {:.0} durable submits a second", submit(&store, clients, count).await);
    }
    while store.claim("m", "bench").await.unwrap().is_some() {}
    submit(&store, 64, 2 * TAKEN).await;
    println!("a queue of {}: {:.0} jobs taken and completed a second", 2 * TAKEN, take(&store).await);
    let rate = submit(&store, 256, QUEUE).await;
    println!("filling the queue to {QUEUE}: {rate:.0} durable submits a second");
    println!("a queue of {QUEUE}: {:.0} durable submits a second", submit(&store, 256, 10_000).await);
    println!("a queue of {QUEUE}: {:.0} jobs taken and completed a second", take(&store).await);
    let began = Instant::now();
    let counts = store.counts("m").await.unwrap();
    println!("counting {counts:?}: {:.1} ms", began.elapsed().as_secs_f64() * 1e3);
}
