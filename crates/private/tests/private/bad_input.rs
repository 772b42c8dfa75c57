//! What is refused, and in which words.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use fornax_private::frame::{Awaited, Draw, Party, Reply, RequestOne, RequestZero, Share};
use fornax_private::mask::{SEED_BYTES, Seed};
use fornax_private::{ClientOptions, Parties, Server, ServerOptions};

use crate::between::{Action, Between};
use crate::rig::{PROMPT, Rig, options, serve, serve_with, url};

const CASE: &str = "llama.gguf";

fn refused(options: ClientOptions) -> String {
    Rig::private(CASE, options).err().expect("refused").to_string()
}

#[test]
fn servers_with_other_weights_are_refused() {
    let [zero, one] = serve(CASE);
    let other = serve_with("llama3.gguf", ServerOptions::new(Party::One));
    let mixed = ClientOptions { demo_single_host: true, ..ClientOptions::new(url(&zero), url(&other)) };
    let error = refused(mixed);
    assert!(error.starts_with("party 0 has weights ") && error.contains(", party 1 has "), "{error}");
    drop(one);
    let both = serve("llama3.gguf");
    let error = refused(options(&both));
    assert!(error.starts_with("this client has weights ") && error.contains(", party 0 has "), "{error}");
}

#[test]
fn parties_that_are_the_same_or_the_wrong_way_round_are_refused() {
    let servers = serve(CASE);
    let [zero, one] = [url(&servers[0]), url(&servers[1])];
    let with = |party0: &str, party1: &str| ClientOptions {
        demo_single_host: true,
        ..ClientOptions::new(party0, party1)
    };
    assert!(refused(with(&zero, &zero)).starts_with("party 0 and party 1 are the same server"));
    assert_eq!(refused(with(&one, &zero)), format!("{one} serves party 1, not party 0"));
    // The same server behind another address.
    let between = Between::start(servers[0].address(), Box::new(|_, frame| Action::Send(frame)));
    assert_eq!(
        refused(with(&zero, &between.url())),
        format!("{} serves party 0, not party 1", between.url())
    );
}

#[test]
fn without_being_told_one_host_is_refused() {
    let servers = serve(CASE);
    let error = refused(ClientOptions { demo_single_host: false, ..options(&servers) });
    assert!(error.starts_with("party 0 and party 1 are on one host, 127.0.0.1"), "{error}");
    assert!(servers[0].info().demo_single_host, "the server says so too");
}

/// A connection without a client's manners.
struct Raw(TcpStream);

impl Raw {
    fn new(server: &Server) -> Raw {
        Raw(TcpStream::connect(server.address()).unwrap())
    }

    fn send(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut out = Vec::new();
        write(&mut out);
        self.0.write_all(&out).unwrap();
    }

    fn reply(&mut self) -> Reply {
        Reply::read(&mut self.0, Awaited::Control, Vec::new()).unwrap()
    }

    fn refusal(&mut self) -> String {
        let Reply::Refused(reason) = self.reply() else { panic!("refused") };
        let mut rest = Vec::new();
        // The connection ends with a refusal.
        self.0.read_to_end(&mut rest).unwrap_or_default();
        assert!(rest.is_empty());
        reason
    }
}

fn linear(counter: u64, matrix: u32, rows: u32, words: usize) -> RequestZero {
    RequestZero::Linear(Share { draw: Draw { counter, matrix, rows }, words: vec![1; words] })
}

#[test]
fn another_version_is_refused_by_the_server_and_by_the_client() {
    let servers = serve(CASE);
    let mut raw = Raw::new(&servers[0]);
    raw.send(|out| RequestZero::Open { version: 2, positions_max: 1 }.write(out));
    assert_eq!(raw.refusal(), "this is blind2 1, not 2");
    let mut raw = Raw::new(&servers[1]);
    let seed = Seed::new([0; SEED_BYTES]);
    raw.send(|out| RequestOne::Open { version: 0, positions_max: 1, seed }.write(out));
    assert_eq!(raw.refusal(), "this is blind2 1, not 0");

    // A server of another time, in what it says of itself.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut info = servers[0].info().clone();
    info.version = 7;
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut out = Vec::new();
        Reply::Info(Box::new(info)).write(&mut out);
        socket.write_all(&out).unwrap();
        drop(socket.read_to_end(&mut out));
    });
    let options = ClientOptions { party0: format!("tcp://{address}"), ..options(&servers) };
    let error = Parties::connect(options).err().unwrap().to_string();
    assert!(
        error.starts_with("party 0 speaks blind2 7 in a ring of 32 bits, this client speaks blind2 1"),
        "{error}"
    );
}

#[test]
fn a_session_beyond_its_positions_is_ended() {
    let servers = serve(CASE);
    let columns = crate::rig::matrices(CASE)[0].columns;
    let mut raw = Raw::new(&servers[0]);
    raw.send(|out| RequestZero::Open { version: 1, positions_max: 3 }.write(out));
    assert_eq!(raw.reply(), Reply::Opened { session: 1 });
    raw.send(|out| linear(0, 0, 4, 4 * columns).write(out));
    assert_eq!(raw.refusal(), "the session was opened for 3 positions; 4 are beyond it");
    let mut raw = Raw::new(&servers[0]);
    raw.send(|out| RequestZero::Open { version: 1, positions_max: u32::MAX }.write(out));
    assert_eq!(raw.refusal(), "a session may have 1048576 positions, not 4294967295");
}

#[test]
fn a_counter_that_is_not_next_is_refused_by_both_parties() {
    let servers = serve(CASE);
    let columns = crate::rig::matrices(CASE)[0].columns;
    let mut raw = Raw::new(&servers[0]);
    raw.send(|out| RequestZero::Open { version: 1, positions_max: 9 }.write(out));
    raw.reply();
    raw.send(|out| linear(0, 0, 1, columns).write(out));
    let rows = crate::rig::matrices(CASE)[0].rows;
    Reply::read(&mut raw.0, Awaited::Product { words: rows }, Vec::new()).unwrap();
    // Again, as somebody would who tries to have a pad used twice.
    raw.send(|out| linear(0, 0, 1, columns).write(out));
    assert_eq!(raw.refusal(), format!("a product with counter 0, {columns} is next"));
    let mut raw = Raw::new(&servers[1]);
    let seed = Seed::new([0; SEED_BYTES]);
    raw.send(|out| RequestOne::Open { version: 1, positions_max: 9, seed }.write(out));
    raw.reply();
    raw.send(|out| RequestOne::Linear(vec![Draw { counter: 5, matrix: 0, rows: 1 }]).write(out));
    assert_eq!(raw.refusal(), "a product with counter 5, 0 is next");
}

#[test]
fn frames_that_are_not_what_they_announce_are_refused() {
    let servers = serve(CASE);
    let columns = crate::rig::matrices(CASE)[0].columns;
    let mut raw = Raw::new(&servers[0]);
    raw.send(|out| linear(0, 0, 1, columns + 1).write(out));
    let reason = raw.refusal();
    let (said, is) = (16 + 4 * (columns + 1), 16 + 4 * columns);
    assert_eq!(reason, format!("a frame of kind 3 announces {said} bytes, its content is {is}"));
    let mut raw = Raw::new(&servers[0]);
    raw.send(|out| out.extend_from_slice(&[255, 255, 255, 255, 3]));
    assert_eq!(raw.refusal(), "a frame of kind 3 announces 4294967295 bytes, at most 16777216 are allowed");
    let mut raw = Raw::new(&servers[1]);
    raw.send(|out| out.extend_from_slice(&[0, 0, 0, 0, 99]));
    assert_eq!(raw.refusal(), "a frame of kind 99 does not belong here");
    let mut raw = Raw::new(&servers[0]);
    raw.send(|out| linear(0, 0, 1, columns).write(out));
    assert_eq!(raw.refusal(), "open a session first");
    // The server goes on serving others.
    Rig::private(CASE, options(&servers)).unwrap().step(PROMPT).unwrap();
}

#[test]
fn silent_connections_shut_nobody_out_and_are_closed() {
    let [zero, one] = [Party::Zero, Party::One].map(|party| {
        let arrival = Duration::from_millis(if party == Party::Zero { 600_000 } else { 100 });
        let limits =
            ServerOptions { sessions_max: 1, per_address_max: 100, arrival, ..ServerOptions::new(party) };
        serve_with(CASE, limits)
    });
    let servers = [zero, one];
    // As many as may wait at all, but for the client that comes after them.
    let silent: Vec<Raw> = (0..31).map(|_| Raw::new(&servers[0])).collect();
    while servers[0].connections() < silent.len() {
        std::thread::yield_now();
    }
    Rig::private(CASE, options(&servers)).unwrap().step(PROMPT).unwrap();
    // Party 1 does not wait so long.
    for mut raw in (0..31).map(|_| Raw::new(&servers[1])) {
        assert_eq!(raw.0.read_to_end(&mut Vec::new()).unwrap_or(0), 0);
    }
}

#[test]
fn who_keeps_talking_and_opens_nothing_is_late_all_the_same() {
    let arrival = Duration::from_millis(100);
    let server = serve_with(CASE, ServerOptions { arrival, ..ServerOptions::new(Party::Zero) });
    let mut raw = Raw::new(&server);
    let mut info = Vec::new();
    RequestZero::Info.write(&mut info);
    let mut answered = 0;
    while raw.0.write_all(&info).is_ok() && Reply::read(&mut raw.0, Awaited::Control, Vec::new()).is_ok() {
        answered += 1;
    }
    assert!(answered > 0);
    // Whoever has a session may take as long as it likes between products.
    let mut raw = Raw::new(&server);
    raw.send(|out| RequestZero::Open { version: 1, positions_max: 1 }.write(out));
    assert_eq!(raw.reply(), Reply::Opened { session: 1 });
    let mut late = Raw::new(&server);
    assert_eq!(late.0.read_to_end(&mut Vec::new()).unwrap_or(0), 0, "more than the deadline has passed");
    raw.send(|out| RequestZero::Info.write(out));
    assert!(matches!(raw.reply(), Reply::Info(_)));
}

#[test]
fn one_address_has_so_many_connections_and_no_more() {
    let server = serve_with(CASE, ServerOptions { per_address_max: 2, ..ServerOptions::new(Party::Zero) });
    let mut kept: Vec<Raw> = (0..2).map(|_| Raw::new(&server)).collect();
    while server.connections() < 2 {
        std::thread::yield_now();
    }
    assert_eq!(Raw::new(&server).0.read_to_end(&mut Vec::new()).unwrap_or(0), 0, "closed");
    for raw in &mut kept {
        raw.send(|out| RequestZero::Info.write(out));
        assert!(matches!(raw.reply(), Reply::Info(_)));
    }
}

#[test]
fn a_small_frame_that_asks_for_hours_of_work_is_refused() {
    let servers = serve(CASE);
    let shapes = &servers[1].info().dims;
    let (mut draws, mut counter) = (Vec::new(), 0);
    for _ in 0..2000 {
        let draw = Draw { counter, matrix: 0, rows: u32::try_from(shapes.rows_max(0)).unwrap() };
        counter += draw.pad_words(shapes) as u64;
        draws.push(draw);
    }
    let mut raw = Raw::new(&servers[1]);
    let seed = Seed::new([0; SEED_BYTES]);
    raw.send(|out| RequestOne::Open { version: 1, positions_max: 1 << 20, seed }.write(out));
    raw.reply();
    raw.send(|out| RequestOne::Linear(draws).write(out));
    let refusal = raw.refusal();
    assert!(
        refusal.starts_with("one frame asks for ") && refusal.contains(" multiplications, "),
        "{refusal}"
    );
    assert_eq!(servers[1].batched().1, 0, "nothing of it was computed");
}
