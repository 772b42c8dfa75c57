//! What a scheduler sees of its worker.

use std::{
    io::{Read, Write},
    net::TcpListener,
    time::Duration,
};

use fornax_server::{Callback, ServerOptions};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    client::{self, post, raw, request},
    world::{Setup, World, in_time},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_told_from_start_to_end() {
    let world = World::ready(Setup::saying("né ###")).await;
    let body = json!({"job_id": "j1", "prompt": "Once", "max_tokens": 50, "temperature": 0, "seed": 7, "top_p": 0.9,
        "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1});
    insta::assert_snapshot!("job", post(world.address, "/execute", &body).await.transcript());
    let body = json!({"job_id": "j1", "prompt": "Once", "seed": 7, "stop": ["zzz", "##"]});
    insta::assert_snapshot!("job_stopped", post(world.address, "/execute", &body).await.transcript());
    let body = json!({"job_id": "j1", "prompt": "Once", "seed": 7, "max_tokens": 1});
    let events = post(world.address, "/execute", &body).await.events();
    assert_eq!(events.last().unwrap()["stop_reason"], "MAX_TOKENS");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_fails_ends_with_exactly_one_error() {
    let world = World::ready(Setup { fails_at: Some(3), ..Setup::default() }).await;
    let body = json!({"job_id": "j1", "prompt": "Once", "seed": 7});
    insta::assert_snapshot!(post(world.address, "/execute", &body).await.transcript());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wrong_field_of_a_job_is_listed_and_the_prompt_never_repeated() {
    let world = World::ready(Setup { context: 100, ..Setup::default() }).await;
    let body = json!({"prompt": "secret ".repeat(10_000), "max_tokens": 0, "temperature": 3, "top_k": -1,
        "stop": ["a", "b", "c", "d", "e"], "colour": "red"});
    let response = post(world.address, "/execute", &body).await;
    assert!(!response.body.contains("secret"));
    insta::assert_snapshot!(response.transcript());
    let response =
        post(world.address, "/execute", &json!({"job_id": "a", "prompt": "b", "max_tokens": 101})).await;
    let fault = &response.json()["errors"][0];
    assert_eq!(
        (&fault["field"], &fault["constraint"]),
        (&json!("max_tokens"), &json!("an integer from 1 to 100"))
    );
    let response = post(world.address, "/execute", &json!({"job_id": "a", "prompt": "b".repeat(100)})).await;
    let wanted = json!({"code": "PROMPT_TOO_LONG", "message": "the prompt has 100 tokens; the context holds 100",
        "retriable": false});
    assert_eq!((response.status, response.json()), (400, wanted));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_job_ends_at_once_and_its_name_is_free_again() {
    let (world, gate) = World::gated(Setup::saying(&"a".repeat(100))).await;
    // The job's first step.
    gate.send(()).unwrap();
    let body = json!({"job_id": "j1", "prompt": "Once", "max_tokens": 100}).to_string();
    let mut job = TcpStream::connect(world.address).await.unwrap();
    job.write_all(&request("POST", "/execute", &[], body.as_bytes())).await.unwrap();
    world.until("/health", |health| health.json()["running"] == 1).await;

    let twice = raw(world.address, &request("POST", "/execute", &[], body.as_bytes())).await;
    assert_eq!((twice.status, &twice.json()["errors"][0]["field"]), (409, &json!("job_id")));
    for id in ["j1", "j1", "unknown"] {
        assert_eq!(post(world.address, "/cancel", &json!({"job_id": id})).await.status, 202);
    }
    // The gate lets no step end: a stream that waited for one would wait for ever.
    let events = in_time(client::read(&mut job)).await.events();
    let end = events.last().unwrap();
    assert_eq!((&end["type"], &end["stop_reason"]), (&json!("end"), &json!("CANCELLED")));
    let ends = events.iter().filter(|event| event["type"] == "end" || event["type"] == "error").count();
    assert_eq!(ends, 1);
    drop(gate);
    let again = raw(world.address, &request("POST", "/execute", &[], body.as_bytes())).await;
    assert_eq!(again.events().last().unwrap()["stop_reason"], "MAX_TOKENS");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_scheduler_is_called_until_it_answers() {
    let scheduler = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/ready", scheduler.local_addr().unwrap());
    let heard = std::thread::spawn(move || {
        let mut bodies: Vec<Value> = Vec::new();
        for status in ["500 Oh", "503 No", "200 OK"] {
            let (mut stream, _) = scheduler.accept().unwrap();
            let mut request = Vec::new();
            let body = loop {
                let mut bytes = [0; 4096];
                let count = stream.read(&mut bytes).unwrap();
                request.extend(&bytes[..count]);
                let text = String::from_utf8(request.clone()).unwrap();
                let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
                if let Ok(body) = serde_json::from_str(body) {
                    break body;
                }
            };
            bodies.push(body);
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            stream.write_all(answer.as_bytes()).unwrap();
        }
        bodies
    });
    let callback = Callback {
        url,
        worker_id: "worker-1".into(),
        uri: Some("http://worker-1:8080".into()),
        attempts: 5,
        pause: Duration::from_millis(1),
    };
    let options = ServerOptions { callback: Some(callback), ..Default::default() };
    let world = World::ready(Setup { options, ..Setup::default() }).await;
    let bodies = tokio::task::spawn_blocking(move || heard.join().unwrap()).await.unwrap();
    let wanted = json!({"worker_id": "worker-1", "uri": "http://worker-1:8080", "model_ref": "script.gguf",
        "device_bytes": 1024, "context": 4096,
        "capabilities": ["completions", "execute", "streaming", "structured_output", "chat"]});
    assert_eq!(bodies, [wanted.clone(), wanted.clone(), wanted]);
    world.stopped().await.unwrap();
}
