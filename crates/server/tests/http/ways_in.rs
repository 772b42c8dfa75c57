//! Keys, origins, identities, limits of what may come in.

use std::{fs, time::Duration};

use fornax_server::ServerOptions;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    client::{self, get, post, raw, request},
    world::{Setup, World, in_time, keeping},
};

const KEY: &str = "first-key-0123456789";
const OTHER: &str = "other-key-0123456789";

fn with(options: ServerOptions) -> Setup {
    Setup { options, ..Setup::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_keys_every_route_needs_one_but_the_word_of_health() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    fs::write(&file, format!("{KEY}\n")).unwrap();
    let world =
        World::ready(with(ServerOptions { api_key_file: Some(file.clone()), ..Default::default() })).await;
    let status = async |path: &str, key: Option<&str>| {
        let bearer = key.map(|key| format!("Bearer {key}"));
        let headers: Vec<(&str, &str)> =
            bearer.iter().map(|bearer| ("Authorization", bearer.as_str())).collect();
        let response = raw(world.address, &request("GET", path, &headers, b"")).await;
        (response.status, response.body.contains("pages_total"))
    };
    for path in ["/v1/models", "/metrics", "/openapi.json", "/loading", "/anything"] {
        assert_eq!(status(path, None).await.0, 401, "{path}");
        assert_eq!(status(path, Some("wrong-key-0123456789")).await.0, 401, "{path}");
        assert_ne!(status(path, Some(KEY)).await.0, 401, "{path}");
    }
    assert_eq!(status("/health", None).await, (200, false));
    assert_eq!(status("/health", Some(KEY)).await, (200, true));
    assert_eq!(status("/ready", None).await.0, 200);
    // A key is enough from anywhere: it proves what Host and Origin would.
    let headers =
        [("Host", "evil.example"), ("Origin", "https://evil.example"), ("Authorization", "Bearer x")];
    assert_eq!(raw(world.address, &request("GET", "/v1/models", &headers, b"")).await.status, 401);

    fs::write(&file, format!("{OTHER}\n")).unwrap();
    world.reload.send(()).await.unwrap();
    in_time(async { while status("/v1/models", Some(OTHER)).await.0 != 200 {} }).await;
    assert_eq!(status("/v1/models", Some(KEY)).await.0, 401);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_has_only_so_many_requests_at_a_time() {
    let options = ServerOptions { per_key_max: 1, ..Default::default() };
    let (world, gate) = World::gated(with(options)).await;
    let body = json!({"prompt": "a", "stream": true}).to_string();
    let mut first = TcpStream::connect(world.address).await.unwrap();
    first.write_all(&request("POST", "/v1/completions", &[], body.as_bytes())).await.unwrap();
    let mut byte = [0];
    first.peek(&mut byte).await.unwrap();
    let second = post(world.address, "/v1/completions", &json!({"prompt": "b"})).await;
    assert_eq!((second.status, second.header("retry-after")), (429, Some("1")));
    assert_eq!(second.json()["error"]["code"], "QUEUE_FULL");
    drop(gate);
    let first = client::read(&mut first).await;
    assert!(first.body.ends_with("data: [DONE]\n\n"));
    assert_eq!(post(world.address, "/v1/completions", &json!({"prompt": "b"})).await.status, 200);
}

/// What only waits holds a connection and looks at the store again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_counts_as_a_request_too() {
    let options = ServerOptions { per_key_max: 1, ..Default::default() };
    let folder = tempfile::tempdir().unwrap();
    let (world, gate) = World::gated(keeping(folder.path(), with(options))).await;
    let accepted = post(world.address, "/v2/default/run", &json!({"input": {"prompt": "a"}})).await.json();
    let stream = format!("/v2/default/stream/{}", accepted["id"].as_str().unwrap());
    let asked = json!({"input": {"prompt": "b"}}).to_string();
    let lines = [("Accept", "application/x-ndjson")];
    for waits in
        [request("GET", &stream, &lines, b""), request("POST", "/v2/default/runsync", &[], asked.as_bytes())]
    {
        let mut first = TcpStream::connect(world.address).await.unwrap();
        first.write_all(&waits).await.unwrap();
        // Nothing comes of it before the gate opens, but it is seen to be there.
        in_time(async {
            loop {
                let second = raw(world.address, &request("GET", "/props", &[], b"")).await;
                match second.status {
                    429 => break assert_eq!(second.json()["error"]["code"], "QUEUE_FULL"),
                    other => assert_eq!(other, 200, "{}", second.body),
                }
            }
        })
        .await;
        for other in [
            request("GET", &stream, &lines, b""),
            request("GET", "/slots", &[], b""),
            request("PUT", "/v2/default/schemas/a", &[], b"{}"),
            request("POST", "/v2/default/run", &[], asked.as_bytes()),
        ] {
            let refused = raw(world.address, &other).await;
            assert_eq!(refused.status, 429, "{}", refused.body);
        }
        // Whoever leaves is not counted any more.
        drop(first);
        in_time(async { while get(world.address, "/props").await.status != 200 {} }).await;
    }
    drop(gate);
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_keys_pages_of_other_sites_are_turned_away() {
    let options = ServerOptions { cors_origins: vec!["https://app.example".into()], ..Default::default() };
    let world = World::ready(with(options)).await;
    let check = async |headers: &[(&str, &str)], status: u16| {
        let response = raw(world.address, &request("GET", "/v1/models", headers, b"")).await;
        assert_eq!(response.status, status, "{headers:?}");
        response
    };
    check(&[("Host", "evil.example")], 403).await;
    check(&[("Origin", "https://evil.example")], 403).await;
    let allowed = check(&[("Origin", "https://app.example")], 200).await;
    assert_eq!(allowed.header("access-control-allow-origin"), Some("https://app.example"));
    let headers = [("Origin", "https://app.example"), ("Access-Control-Request-Method", "POST")];
    let preflight = raw(world.address, &request("OPTIONS", "/v1/chat/completions", &headers, b"")).await;
    assert_eq!(preflight.status, 200);
    assert!(preflight.header("access-control-allow-methods").unwrap().contains("POST"));
    // The headers that clients in a page send by themselves, and any other, only from pages that may call.
    let wanted = "anthropic-version,authorization,content-type,x-api-key,x-stainless-os";
    for (origin, allowed) in
        [("https://app.example", Some("https://app.example")), ("https://evil.example", None)]
    {
        let headers = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "POST"),
            ("Access-Control-Request-Headers", wanted),
        ];
        let preflight = raw(world.address, &request("OPTIONS", "/v1/messages", &headers, b"")).await;
        assert_eq!(preflight.header("access-control-allow-origin"), allowed);
        if allowed.is_some() {
            assert_eq!(preflight.header("access-control-allow-headers"), Some(wanted));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_response_carries_its_ids() {
    let world = World::ready(Setup::default()).await;
    let headers = [("X-Request-Id", "mine-1"), ("X-Correlation-ID", "yours-2")];
    for path in ["/v1/models", "/nothing"] {
        let response = raw(world.address, &request("GET", path, &headers, b"")).await;
        assert_eq!(response.header("x-request-id"), Some("mine-1"));
        assert_eq!(response.header("x-correlation-id"), Some("yours-2"));
    }
    let made = get(world.address, "/v1/models").await;
    assert_eq!(made.header("x-request-id").unwrap().len(), 32);
    let headers = [("X-Request-Id", "two words"), ("X-Correlation-ID", &*"x".repeat(200))];
    let replaced = raw(world.address, &request("GET", "/v1/models", &headers, b"")).await;
    assert_eq!(replaced.header("x-request-id").unwrap().len(), 32);
    assert_eq!(replaced.header("x-correlation-id").unwrap().len(), 32);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_too_much_is_refused_with_a_clear_status() {
    let options = ServerOptions { body_bytes_max: 1 << 20, ..Default::default() };
    let world = World::ready(with(options)).await;
    let large = json!({"prompt": "x".repeat(10 << 20)}).to_string();
    let response = raw(world.address, &request("POST", "/v1/completions", &[], large.as_bytes())).await;
    assert_eq!((response.status, response.json()["error"]["code"].clone()), (413, json!("BODY_TOO_LARGE")));
    // Of unknown length: refused when there is too much of it.
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    for _ in 0..40 {
        let chunk = [b"10000\r\n".to_vec(), vec![b' '; 1 << 16], b"\r\n".to_vec()].concat();
        if stream.write_all(&chunk).await.is_err() {
            break;
        }
    }
    assert_eq!(client::read(&mut stream).await.status, 413);

    let many: Vec<(String, String)> = (0..200).map(|index| (format!("X-{index}"), "y".into())).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(raw(world.address, &request("GET", "/health", &many, b"")).await.status, 431);
    let long = "y".repeat(200 << 10);
    assert_eq!(raw(world.address, &request("GET", "/health", &[("X", &long)], b"")).await.status, 431);
    assert_eq!(get(world.address, "/health").await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stops_sending_is_let_go() {
    // Longer than a busy machine may let pass between a connection and what is sent on it.
    let options = ServerOptions { read_timeout: Duration::from_secs(1), ..Default::default() };
    let world = World::ready(with(options)).await;
    let check = async |sent: &str, status: Option<u16>| {
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let got = answer.get(9..12).and_then(|status| status.parse().ok());
        assert_eq!(got, status, "{sent}");
    };
    let body =
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{";
    tokio::join!(check("", None), check("GET /health HT", None), check(body, Some(408)));
}

#[tokio::test]
async fn what_would_be_open_to_everybody_or_is_misspelt_does_not_start() {
    let bind = async |address: &str| tokio::net::TcpListener::bind(address).await.unwrap();
    let error = async |address: &str, options: ServerOptions| {
        fornax_server::Server::new(bind(address).await, options, Vec::new()).await.err().unwrap().to_string()
    };
    assert!(error("0.0.0.0:0", ServerOptions::default()).await.contains("--api-key-file"));
    let origin = ServerOptions { cors_origins: vec!["app.example/".into()], ..Default::default() };
    assert!(error("127.0.0.1:0", origin).await.contains("is no origin"));
    let keys = ServerOptions { api_key_file: Some("missing-file".into()), ..Default::default() };
    assert!(error("127.0.0.1:0", keys).await.contains("missing-file"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_spoken_with_the_certificate_that_is_there_now() {
    use std::sync::Arc;

    use fornax_server::TlsFiles;
    use tokio_rustls::{
        TlsConnector,
        rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName},
    };

    let folder = tempfile::tempdir().unwrap();
    let files = TlsFiles { cert: folder.path().join("cert.pem"), key: folder.path().join("key.pem") };
    let write = || {
        let identity = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        fs::write(&files.cert, identity.cert.pem()).unwrap();
        fs::write(&files.key, identity.signing_key.serialize_pem()).unwrap();
        identity.cert.der().clone()
    };
    let old = write();
    let world =
        World::listening(with(ServerOptions { tls: Some(files.clone()), ..Default::default() })).await;
    let health = async |trusted: &tokio_rustls::rustls::pki_types::CertificateDer<'static>| {
        let mut roots = RootCertStore::empty();
        roots.add(trusted.clone()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let socket = TcpStream::connect(world.address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, socket).await.ok()?;
        stream.write_all(&request("GET", "/health", &[], b"")).await.unwrap();
        Some(client::read(&mut stream).await.status)
    };
    assert_eq!(health(&old).await, Some(200));
    // Who does not speak TLS gets no answer.
    let mut plain = TcpStream::connect(world.address).await.unwrap();
    plain.write_all(&request("GET", "/health", &[], b"")).await.unwrap();
    let mut bytes = Vec::new();
    drop(plain.read_to_end(&mut bytes).await);
    assert!(!bytes.starts_with(b"HTTP"));

    let new = write();
    world.reload.send(()).await.unwrap();
    in_time(async { while health(&new).await != Some(200) {} }).await;
    assert_eq!(health(&old).await, None);
    // A broken file leaves what works.
    fs::write(&files.key, "no key").unwrap();
    world.reload.send(()).await.unwrap();
    assert_eq!(health(&new).await, Some(200));
    let error = fornax_server::Server::new(
        tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap(),
        ServerOptions { tls: Some(files.clone()), ..Default::default() },
        Vec::new(),
    );
    assert!(error.await.err().unwrap().to_string().contains("key.pem"));
}
