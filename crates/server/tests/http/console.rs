//! The console: its files, and what its live view is told.

use std::fs;

use fornax_server::{Progress, ServerOptions};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::{
    client::{get, post, raw, request},
    world::{Setup, World},
};

const KEY: &str = "first-key-0123456789";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_are_open_and_what_they_show_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    fs::write(&file, KEY).unwrap();
    let options = ServerOptions { api_key_file: Some(file), ..Default::default() };
    let world = World::ready(Setup { options, ..Setup::default() }).await;
    for (path, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/console/jobs", "text/html; charset=utf-8"),
        ("/console/files", "text/html; charset=utf-8"),
        ("/console/face.svg", "image/svg+xml"),
        ("/console/manifest.webmanifest", "application/manifest+json"),
        ("/console/temml.js", "text/javascript; charset=utf-8"),
        ("/console/licences.txt", "text/plain; charset=utf-8"),
        ("/console/main.js", "text/javascript; charset=utf-8"),
        ("/console/style.css", "text/css; charset=utf-8"),
    ] {
        let page = get(world.address, path).await;
        assert_eq!((page.status, page.header("content-type")), (200, Some(kind)), "{path}");
        let policy = page.header("content-security-policy").unwrap();
        assert!(policy.contains("script-src 'self';") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    }
    for path in ["/console/live", "/console/else", "/console/../keys"] {
        assert_eq!(get(world.address, path).await.status, 401, "{path}");
    }
    let bearer = format!("Bearer {KEY}");
    let with_key =
        async |path| raw(world.address, &request("GET", path, &[("Authorization", &bearer)], b"")).await;
    assert_eq!(with_key("/console/live").await.json()["status"], "ready");
    assert_eq!(with_key("/console/else").await.status, 404);
}

/// The letters of a map, a page each.
fn pages(live: &Value) -> String {
    let map = live["kv"][0]["map"].as_str().unwrap();
    let mut pages = String::new();
    let starts: Vec<usize> =
        map.match_indices(char::is_alphabetic).map(|(at, _)| at).chain([map.len()]).collect();
    for run in starts.windows(2) {
        let (letter, count) = map[run[0]..run[1]].split_at(1);
        pages.push_str(&letter.repeat(count.parse().unwrap()));
    }
    pages
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_live_view_has_every_page_and_every_request() {
    let (world, gate) = World::gated(Setup { slots: 1, ..Setup::default() }).await;
    let ask = |prompt: String| {
        let address = world.address;
        tokio::spawn(async move {
            post(address, "/v1/completions", &json!({"prompt": prompt, "max_tokens": 50})).await
        })
    };
    let first = ask("a".repeat(100));
    world.until_stepping().await;
    let second = ask("b".repeat(40));
    // The first waits too, as long as its first step is not collected.
    world.until("/health", |_| world.engine.stats().tokens_waiting % 100 == 40).await;
    // A step at a time, until it is seen how both stand.
    let mut live = Value::Null;
    for _ in 0..200 {
        live = get(world.address, "/console/live").await.json();
        if live["requests"].as_array().is_some_and(|requests| requests.len() == 2)
            && live["requests"][0]["tokens"] != 0
        {
            break;
        }
        gate.send(()).unwrap();
    }
    let requests = &live["requests"];
    assert_eq!(
        (&requests[0]["state"], &requests[0]["prompt_tokens"]),
        (&json!("running"), &json!(100)),
        "{live}"
    );
    assert_eq!(
        (&requests[1]["state"], &requests[1]["prompt_tokens"]),
        (&json!("waiting"), &json!(40)),
        "{live}"
    );
    assert_eq!((&requests[0]["tokens_max"], &requests[1]["tokens"]), (&json!(50), &json!(0)), "{live}");
    assert_ne!(requests[0]["id"], requests[1]["id"]);
    // 100 tokens and those that were chosen take four pages of 32.
    let held = pages(&live);
    assert_eq!((held.len(), held.matches('h').count()), (1024, 4), "{live}");
    assert_eq!((&live["page_tokens"], &live["devices"][0]["bytes"]["weights"]), (&json!(32), &json!(1000)));
    drop(gate);
    assert_eq!((first.await.unwrap().status, second.await.unwrap().status), (200, 200));
    // An engine at rest is seen at rest: three full pages of the first prompt stay findable, and one of the second.
    world.until("/console/live", |live| live.json()["requests"] == json!([])).await;
    let live = get(world.address, "/console/live").await.json();
    let rest = pages(&live);
    assert_eq!((rest.matches('h').count(), rest.matches('c').count()), (0, 4), "{live}");
    assert_eq!((&live["kv"][0]["pages_cached"], &live["running"]), (&json!(4), &json!(0)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_live_view_tells_how_far_loading_is() {
    let (loaded, load) = oneshot::channel();
    let world = World::listening(Setup { load: Some(load), ..Setup::default() }).await;
    assert_eq!(get(world.address, "/console/live").await.json()["status"], "starting");
    world.progress.send(Progress { stage: "weights".into(), bytes: 50, bytes_total: 100 }).unwrap();
    let wanted = json!({"stage": "weights", "bytes": 50, "bytes_total": 100});
    world.until("/console/live", |live| live.json()["loading"] == wanted).await;
    loaded.send(Ok(())).unwrap();
    world.until("/console/live", |live| live.json()["status"] == "ready").await;
    let live = get(world.address, "/console/live").await.json();
    assert_eq!((live.get("loading"), &live["model"]), (None, &json!("script")));
    assert_eq!(live["models"], json!([{"id": "script", "state": "loaded", "running": 0, "waiting": 0}]));
}
