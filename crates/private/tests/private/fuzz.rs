//! Frames that somebody changed at random, for their readers and for servers that run.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use fornax_private::ServerOptions;
use fornax_private::frame::Party;

use crate::rig::{PROMPT, Rig, options, serve_with};

#[path = "../../../../fuzz/src/frame.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod frame;
#[path = "../../../../fuzz/src/mutate.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod mutate;

const WORDS: &[&[u8]] = &[
    b"\x00\x00\x00\x00\x01",
    b"\x08\x00\x00\x00\x02\x01\x00\x00\x00\x05\x00\x00\x00",
    b"\x00\x00\x00\x01\x03",
    b"\x10\x00\x00\x00\x03",
    b"\x00\x00\x00\x00\x00\x00\x00\x00",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x00\x00\x00\x00\x04",
    b"\x01\x00\x00\x00",
    b"\x02\x00\x00\x00",
    b"\x03\x00\x00\x00",
    b"\"dims\":[[0,0]]",
    b"4294967296",
    b"\xc3",
];

#[test]
fn changed_frames_are_read_as_what_they_are_or_refused() {
    let seeds = mutate::seeds("frame");
    for seed in &seeds {
        assert!(frame::frame(seed));
    }
    mutate::cases("frames", 100_000, |mut random| frame::frame(&mutate::changed(&mut random, &seeds, WORDS)));
}

#[test]
fn changed_frames_end_their_own_session_alone() {
    const CASE: &str = "llama.gguf";
    let server =
        |party| serve_with(CASE, ServerOptions { demo_single_host: true, ..ServerOptions::new(party) });
    let servers = [server(Party::Zero), server(Party::One)];
    let seeds = mutate::seeds("frame");
    mutate::cases("sessions", 300, |mut random| {
        let data = mutate::changed(&mut random, &seeds, WORDS);
        let Some((&reader, bytes)) = data.split_first() else { return false };
        let mut stream = TcpStream::connect(servers[usize::from(reader % 2)].address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        // Whoever is refused may be hung up on before all is sent.
        drop(stream.write_all(bytes));
        drop(stream.shutdown(Shutdown::Write));
        let mut answer = Vec::new();
        drop(stream.read_to_end(&mut answer));
        answer.get(4).is_some_and(|byte| *byte != 132)
    });
    let mut rig = Rig::private(CASE, options(&servers)).unwrap();
    assert!(rig.step(PROMPT).is_ok(), "an honest client is served as before");
}
