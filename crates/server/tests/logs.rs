//! No log carries what was asked or answered. In a process of its own: what is written there is everybody's.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

#[path = "http/client.rs"]
#[expect(dead_code, reason = "shared with the other tests")]
mod client;
#[path = "http/world.rs"]
#[expect(dead_code, reason = "shared with the other tests")]
mod world;

use std::{
    io::Write,
    sync::{Arc, Mutex},
};

use serde_json::json;

#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logs_tell_requests_and_none_of_their_text() {
    let page = Page::default();
    let writer = page.clone();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();

    let world = world::World::ready(world::Setup::saying("an answer of mine")).await;
    let secret = "a question of yours";
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": secret}]})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": secret}], "stream": true})),
        ("/v1/completions", json!({"prompt": secret, "guided_regex": "("})),
        ("/v1/completions", json!({"prompt": secret, "temperature": secret})),
        ("/v1/completions", json!({"prompt": secret, "model": secret})),
        ("/execute", json!({"job_id": "j1", "prompt": secret, "stop": [secret]})),
        ("/tokenize", json!({"content": secret, "extra": secret})),
    ] {
        client::post(world.address, path, &body).await;
    }
    world.stopped().await.unwrap();

    let log = String::from_utf8(page.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("/v1/chat/completions") && log.contains("\"status\":400"), "{log}");
    for word in ["question", "answer"] {
        assert!(!log.contains(word), "{log}");
    }
}
