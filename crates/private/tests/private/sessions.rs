//! Many sessions: at once, one after the other, and over TLS.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use fornax_private::frame::Party;
use fornax_private::{Client, ClientOptions, Parties, Server, ServerOptions, server_tls};

use crate::rig::{ANSWER, PROMPT, Rig, bits, loaded, options, serve, serve_with};

const CASE: &str = "qwen2.gguf";

#[test]
fn clients_at_once_get_their_own_answers() {
    let servers = serve(CASE);
    let options = options(&servers);
    let prompts: Vec<Vec<u32>> =
        (1..7).map(|i| PROMPT.iter().map(|token| (token * i) % 128).collect()).collect();
    thread::scope(|scope| {
        for prompt in &prompts {
            let options = options.clone();
            scope.spawn(move || {
                let got = Rig::private(CASE, options).unwrap().talk(prompt, ANSWER).unwrap();
                let wanted = Rig::reference(CASE).talk(prompt, ANSWER).unwrap();
                assert_eq!(bits(&got), bits(&wanted));
            });
        }
    });
    let (_, products) = servers[0].batched();
    assert_eq!(products, 6 * 5 * 9, "every product was computed once");
}

/// Bytes that this process holds.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn a_thousand_sessions_leave_memory_as_it_was() {
    let servers = serve(CASE);
    let parties = || fornax_private::Parties::connect(options(&servers)).unwrap();
    let session = |index: usize| {
        let mut client = fornax_private::Client::new(parties(), crate::rig::recompute(CASE));
        for matrix in crate::rig::matrices(CASE).iter() {
            fornax_private::Products::add(&mut client, matrix.clone()).unwrap();
        }
        client.ready().unwrap();
        // Some are dropped in the middle of a step.
        if index.is_multiple_of(3) {
            let x = vec![1; crate::rig::matrices(CASE)[0].columns];
            let mut out = vec![0; crate::rig::matrices(CASE)[0].rows];
            fornax_private::Products::begin(&mut client, 1, 1).unwrap();
            fornax_private::Products::multiply(&mut client, 0, fornax_compute::Rows::Tokens, &x, &mut out)
                .unwrap();
        }
    };
    (0..100).for_each(session);
    let before = resident();
    (0..1000).for_each(session);
    let grown = resident().saturating_sub(before);
    assert!(grown < 16 << 20, "{grown} bytes more");
    // The last ones end when their threads have read that they do.
    while servers.iter().any(|server| server.sessions() > 0) {
        thread::yield_now();
    }
}

#[test]
fn a_session_that_is_used_up_is_followed_by_another() {
    let servers = [Party::Zero, Party::One]
        .map(|party| serve_with(CASE, ServerOptions { positions_max: 8, ..ServerOptions::new(party) }));
    let mut rig = Rig::private(CASE, options(&servers)).unwrap();
    let got = rig.talk(PROMPT, ANSWER).unwrap();
    assert_eq!(bits(&got), bits(&Rig::reference(CASE).talk(PROMPT, ANSWER).unwrap()));
    assert_eq!(rig.backend.with_products(|client| client.stats().snapshot().sessions), 2);
    let error = rig.step(&[1; 9]).unwrap_err().to_string();
    assert!(error.contains("the session was opened for 8 positions; 9 are beyond it"), "{error}");
}

#[test]
fn sessions_beyond_the_limit_are_turned_away() {
    let servers = [Party::Zero, Party::One]
        .map(|party| serve_with(CASE, ServerOptions { sessions_max: 1, ..ServerOptions::new(party) }));
    let first = Rig::private(CASE, options(&servers)).unwrap();
    let error = Rig::private(CASE, options(&servers)).err().unwrap().to_string();
    assert_eq!(error, "party 0 refused: 1 sessions are open already, and no more are allowed");
    drop(first);
}

#[test]
fn a_client_that_loads_for_longer_than_servers_wait_connects_again() {
    let arrival = Duration::from_millis(200);
    let servers = [Party::Zero, Party::One]
        .map(|party| serve_with(CASE, ServerOptions { arrival, ..ServerOptions::new(party) }));
    let mut client = Client::new(Parties::connect(options(&servers)).unwrap(), crate::rig::recompute(CASE));
    while servers.iter().any(|server| server.connections() > 0) {
        thread::yield_now();
    }
    for matrix in crate::rig::matrices(CASE).iter() {
        fornax_private::Products::add(&mut client, matrix.clone()).unwrap();
    }
    client.ready().unwrap();
    assert_eq!(client.stats().snapshot().sessions, 1);
}

/// A certificate of its own for this name, and its key, as files.
fn identity(folder: &Path, name: &str) -> (PathBuf, PathBuf) {
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (folder.join(format!("{name}.pem")), folder.join(format!("{name}.key")));
    std::fs::write(&certificate, cert.pem()).unwrap();
    std::fs::write(&key, signing_key.serialize_pem()).unwrap();
    (certificate, key)
}

/// Both servers with this identity, for the clients of an authority or for all.
fn serve_tls((certificate, key): &(PathBuf, PathBuf), clients: Option<&Path>) -> [Server; 2] {
    [Party::Zero, Party::One].map(|party| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tls = Some(server_tls(certificate, key, clients).unwrap());
        let options = ServerOptions { tls, demo_single_host: true, ..ServerOptions::new(party) };
        Server::start(listener, options, || loaded(CASE)).unwrap_or_else(|error| panic!("{error}"))
    })
}

fn tls_options(servers: &[Server; 2], ca: &Path) -> ClientOptions {
    let url = |server: &Server| format!("tls://localhost:{}", server.address().port());
    ClientOptions {
        demo_single_host: true,
        ca: Some(ca.to_owned()),
        ..ClientOptions::new(url(&servers[0]), url(&servers[1]))
    }
}

#[test]
fn tls_carries_the_same_and_a_stranger_is_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    let own = identity(folder.path(), "own");
    let (stranger, _) = identity(folder.path(), "stranger");
    let servers = serve_tls(&own, None);
    let got = Rig::private(CASE, tls_options(&servers, &own.0)).unwrap().talk(PROMPT, ANSWER).unwrap();
    assert_eq!(bits(&got), bits(&Rig::reference(CASE).talk(PROMPT, ANSWER).unwrap()));
    let error = Rig::private(CASE, tls_options(&servers, &stranger)).err().unwrap().to_string();
    assert!(error.contains("certificate"), "{error}");
}

#[test]
fn servers_that_want_to_know_who_asks_serve_nobody_else() {
    let folder = tempfile::tempdir().unwrap();
    let own = identity(folder.path(), "own");
    let (known, stranger) = (identity(folder.path(), "known"), identity(folder.path(), "stranger"));
    let servers = serve_tls(&own, Some(&known.0));
    let ask = |identity: Option<&(PathBuf, PathBuf)>| {
        let options = ClientOptions { identity: identity.cloned(), ..tls_options(&servers, &own.0) };
        Rig::private(CASE, options).map(|mut rig| bits(&rig.talk(PROMPT, ANSWER).unwrap()))
    };
    let answer = ask(Some(&known)).unwrap();
    assert_eq!(answer, bits(&Rig::reference(CASE).talk(PROMPT, ANSWER).unwrap()));
    for nobody in [None, Some(&stranger)] {
        let error = ask(nobody).unwrap_err().to_string();
        assert!(error.starts_with("party 0 "), "{error}");
    }
}

#[test]
fn a_server_beyond_this_machine_needs_tls() {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let started = Server::start(listener, ServerOptions::new(Party::Zero), || loaded(CASE));
    let error = started.err().unwrap().to_string();
    assert!(error.contains("is beyond this machine: give a certificate and its key"), "{error}");
}
