//! What each server sees: that it says nothing, and that the tests which say so fail where it would.

use std::path::Path;
use std::sync::{Arc, Mutex};

use fornax_private::audit::{Finding, audit};
use fornax_private::frame::{Awaited, Draw, Info, Party, Reply, RequestZero, Share};
use fornax_private::mask::{Masks, Pads, SEED_BYTES, Seed};
use fornax_private::{ClientOptions, Connection, Opening, Transcript};

use crate::between::{Action, Between};
use crate::rig::{ANSWER, PROMPT, Rig, options, serve};

const CASE: &str = "llama.gguf";
/// As long as [`PROMPT`], and different everywhere.
const OTHER: &[u32] = &[90, 1, 2, 77, 31, 8, 55];
const OTHER_ANSWER: &[u32] = &[66, 9, 4, 27];

/// Both parties' transcripts under a recorded name.
pub(crate) fn read(record: &Path) -> [Transcript; 2] {
    [0, 1].map(|party| {
        let path = format!("{}.party{party}", record.display());
        Transcript::read(Path::new(&path)).unwrap()
    })
}

/// Seeds that a test knows.
fn seeded(seed: u8) -> Opening {
    Box::new(move || {
        let masks = Masks::new(&Seed::new([seed; SEED_BYTES]));
        Ok((Seed::new([seed; SEED_BYTES]), Box::new(masks)))
    })
}

/// What both parties see of a conversation.
fn views(prompt: &[u32], answer: &[u32], opening: Option<Opening>) -> [Transcript; 2] {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("view");
    let servers = serve(CASE);
    let options = ClientOptions { record: Some(record.clone()), ..options(&servers) };
    let mut rig = match opening {
        Some(opening) => Rig::with_masks(CASE, options, opening).unwrap(),
        None => Rig::private(CASE, options).unwrap(),
    };
    rig.talk(prompt, answer).unwrap();
    drop(rig);
    read(&record)
}

/// Party 0's messages, and what it was told of the server.
fn shares(view: &Transcript) -> (Info, Vec<Share>) {
    let connection = &view.connections[0];
    let Ok(Reply::Info(info)) = Reply::read(&mut &connection.down[..], Awaited::Control, Vec::new()) else {
        panic!("info comes first")
    };
    let mut up = connection.up.as_slice();
    let mut shares = Vec::new();
    while !up.is_empty() {
        if let RequestZero::Linear(share) = RequestZero::read(&mut up, &info.dims).unwrap() {
            shares.push(share);
        }
    }
    (*info, shares)
}

/// The words of all messages, and the mask stream under them.
fn words(view: &Transcript, seed: u8) -> (Vec<u32>, Vec<u32>) {
    let words: Vec<u32> = shares(view).1.into_iter().flat_map(|share| share.words).collect();
    let mut masks = vec![0; words.len()];
    Masks::new(&Seed::new([seed; SEED_BYTES])).draw(&mut masks).unwrap();
    (words, masks)
}

#[test]
fn party_1_sees_the_same_bytes_whatever_is_asked() {
    let [_, first] = views(PROMPT, ANSWER, Some(seeded(5)));
    let [_, second] = views(OTHER, OTHER_ANSWER, Some(seeded(5)));
    assert_eq!(first.connections[0].up, second.connections[0].up);
    // What it answers follows from that alone; only the server's own random number differs.
    let products = |view: &Transcript| {
        let down = view.connections[0].down.clone();
        let len = u32::from_le_bytes([down[0], down[1], down[2], down[3]]) as usize + 5;
        down[len..].to_vec()
    };
    assert_eq!(products(&first), products(&second));
    assert!(products(&first).len() > 10_000);
}

/// Pads that were chosen beforehand.
struct Chosen {
    words: Vec<u32>,
    at: usize,
}

impl Pads for Chosen {
    fn draw(&mut self, pad: &mut [u32]) -> Result<u64, fornax_private::Error> {
        pad.copy_from_slice(&self.words[self.at..][..pad.len()]);
        self.at += pad.len();
        Ok((self.at - pad.len()) as u64)
    }

    fn position(&self) -> u64 {
        self.at as u64
    }
}

/// From party 0's messages for one prompt, masks are computed under which another prompt makes the very same messages.
/// So they cannot tell the two apart, whatever is computed from them.
#[test]
fn party_0_sees_the_same_bytes_for_another_prompt_under_other_masks() {
    let [first, _] = views(PROMPT, ANSWER, Some(seeded(5)));
    let [second, _] = views(OTHER, OTHER_ANSWER, Some(seeded(6)));
    let ((sent, masks), (other_sent, other_masks)) = (words(&first, 5), words(&second, 6));
    let inputs: Vec<u32> = sent.iter().zip(&masks).map(|(sent, mask)| sent.wrapping_add(*mask)).collect();
    let others: Vec<u32> =
        other_sent.iter().zip(&other_masks).map(|(sent, mask)| sent.wrapping_add(*mask)).collect();
    assert_ne!(inputs, others, "the prompts differ");
    let chosen: Vec<u32> = masks
        .iter()
        .zip(inputs.iter().zip(&others))
        .map(|(mask, (input, other))| mask.wrapping_add(other.wrapping_sub(*input)))
        .collect();
    // Party 1 answers for the chosen masks like party 1 would, had the cipher given them.
    let equivocated = equivocate(chosen);
    assert!(equivocated.connections[0].up == first.connections[0].up, "the messages differ");
}

/// Runs the other prompt under chosen masks. Both parties are party 0 here in what they compute: the second one is sent
/// the chosen masks themselves, by somebody who stands where party 1 would.
fn equivocate(chosen: Vec<u32>) -> Transcript {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("view");
    let servers = serve(CASE);
    let one = crate::views::fixed_masks(chosen.clone());
    let options =
        ClientOptions { record: Some(record.clone()), party1: format!("tcp://{}", one), ..options(&servers) };
    let opening: Opening =
        Box::new(move || Ok((Seed::new([5; SEED_BYTES]), Box::new(Chosen { words: chosen.clone(), at: 0 }))));
    let mut rig = Rig::with_masks(CASE, options, opening).unwrap();
    rig.talk(OTHER, OTHER_ANSWER).unwrap();
    drop(rig);
    let path = format!("{}.party0", record.display());
    Transcript::read(Path::new(&path)).unwrap()
}

/// A party 1 whose masks are those given, not those of the seed.
fn fixed_masks(masks: Vec<u32>) -> std::net::SocketAddr {
    use std::net::TcpListener;

    use fornax_private::frame::{PROTOCOL, RequestOne, VERSION};

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        use std::io::Write;
        let loaded = crate::rig::loaded(CASE).unwrap();
        let matrices = crate::rig::matrices(CASE);
        let (mut socket, _) = listener.accept().unwrap();
        let mut at = 0;
        let mut out = Vec::new();
        while let Ok(request) = RequestOne::read(&mut socket, &loaded.shapes) {
            out.clear();
            match request {
                RequestOne::Info => Reply::Info(Box::new(Info {
                    protocol: PROTOCOL.to_owned(),
                    version: VERSION,
                    party: 1,
                    ring_bits: 32,
                    weights: loaded.weights.clone(),
                    dims: loaded.shapes.clone(),
                    positions_max: 1 << 20,
                    leaks: Vec::new(),
                    assumes: Vec::new(),
                    demo_single_host: true,
                    instance: "fixed".to_owned(),
                }))
                .write(&mut out),
                RequestOne::Open { .. } => Reply::Opened { session: 1 }.write(&mut out),
                RequestOne::Linear(draws) => {
                    for draw in draws {
                        let matrix = &matrices[draw.matrix as usize];
                        let pad = &masks[at..][..draw.pad_words(&loaded.shapes)];
                        at += pad.len();
                        Reply::Product { counter: draw.counter, words: ring(matrix, pad) }.write(&mut out);
                    }
                }
                RequestOne::Close => return,
            }
            socket.write_all(&out).unwrap();
        }
    });
    address
}

/// The product mod 2^32, in 64 bits.
fn ring(matrix: &fornax_private::Matrix, words: &[u32]) -> Vec<u32> {
    let mut out = Vec::new();
    for x in words.chunks_exact(matrix.columns) {
        for row in matrix.weights.chunks_exact(matrix.columns) {
            let sum =
                row.iter().zip(x).fold(0_i64, |sum, (&w, &x)| sum.wrapping_add(i64::from(w) * i64::from(x)));
            out.push(u32::try_from(sum.rem_euclid(1 << 32)).unwrap());
        }
    }
    out
}

fn failed(findings: &[Finding]) -> Vec<&'static str> {
    findings.iter().filter(|finding| !finding.passed).map(|finding| finding.check).collect()
}

#[test]
fn real_views_pass_every_check() {
    let both = views(PROMPT, ANSWER, None);
    let findings = audit(&both).unwrap();
    assert_eq!(failed(&findings), [""; 0], "{findings:#?}");
    assert!(findings.len() >= 12, "{findings:#?}");
}

/// A view in which a simulator that knows only the shape wrote all words passes as well: the checks cannot tell.
#[test]
fn simulated_views_pass_every_check() {
    let [zero, _] = views(PROMPT, ANSWER, None);
    let simulated = broken(&zero, |_, _, words| {
        let mut seed = [0; SEED_BYTES];
        getrandom_fill(&mut seed);
        Masks::new(&Seed::new(seed)).draw(words).unwrap();
        Vec::new()
    });
    let findings = audit(&[simulated]).unwrap();
    assert_eq!(failed(&findings), [""; 0], "{findings:#?}");
}

fn getrandom_fill(bytes: &mut [u8]) {
    getrandom::fill(bytes).unwrap();
}

/// Party 0's view with other words: `change(index, message, words)` rewrites them and may add messages behind.
fn broken(
    view: &Transcript,
    mut change: impl FnMut(usize, &Draw, &mut Vec<u32>) -> Vec<Vec<u32>>,
) -> Transcript {
    let (info, shares) = shares(view);
    let mut up = Vec::new();
    RequestZero::Info.write(&mut up);
    RequestZero::Open { version: 1, positions_max: 1000 }.write(&mut up);
    let mut counter = 0;
    for (index, mut share) in shares.into_iter().enumerate() {
        let more = change(index, &share.draw, &mut share.words);
        for words in [vec![share.words], more].concat() {
            let draw = Draw { counter, ..share.draw };
            counter += draw.pad_words(&info.dims) as u64;
            RequestZero::Linear(Share { draw, words }).write(&mut up);
        }
    }
    let mut down = Vec::new();
    Reply::Info(Box::new(info)).write(&mut down);
    Reply::Opened { session: 4711 }.write(&mut down);
    Transcript { party: Party::Zero, connections: vec![Connection { up, down }] }
}

/// Real activations under broken protection: the audit must find each.
#[test]
fn negative_controls_fail() {
    let [zero, one] = views(PROMPT, ANSWER, Some(seeded(5)));
    let (sent, masks) = words(&zero, 5);
    let inputs: Vec<u32> = sent.iter().zip(&masks).map(|(sent, mask)| sent.wrapping_add(*mask)).collect();
    /// The activations of each message in turn.
    struct Inputs(Vec<u32>, usize);
    impl Inputs {
        fn next(&mut self, count: usize) -> Vec<u32> {
            self.1 += count;
            self.0[self.1 - count..self.1].to_vec()
        }
    }
    let inputs = || Inputs(inputs.clone(), 0);
    let blinded = |inputs: &[u32], pad: &[u32]| -> Vec<u32> {
        inputs.iter().zip(pad).map(|(input, pad)| input.wrapping_sub(*pad)).collect()
    };
    let check = |name: &str, view: Transcript, wanted: &str| {
        let findings = audit(std::slice::from_ref(&view)).unwrap();
        assert!(failed(&findings).contains(&wanted), "{name}: {findings:#?}");
    };

    let mut x = inputs();
    let off = broken(&zero, |_, _, words| {
        *words = x.next(words.len());
        Vec::new()
    });
    check("mask off", off, "words are uniform (chi-squared of bytes)");

    let mut x = inputs();
    let reused = broken(&zero, |_, _, words| {
        let mut pad = vec![0; words.len()];
        Masks::new(&Seed::new([9; SEED_BYTES])).draw(&mut pad).unwrap();
        *words = blinded(&x.next(words.len()), &pad);
        Vec::new()
    });
    check("pad reused", reused, "no two messages share a pad");

    let (mut x, mut seed) = (inputs(), [0; SEED_BYTES]);
    seed[..8].copy_from_slice(&4711_u64.to_le_bytes());
    let mut stream = Masks::new(&Seed::new(seed));
    let guessable = broken(&zero, |_, _, words| {
        let mut pad = vec![0; words.len()];
        stream.draw(&mut pad).unwrap();
        *words = blinded(&x.next(words.len()), &pad);
        Vec::new()
    });
    check("seed from the session id", guessable, "the seed does not follow from what is public");

    let mut x = inputs();
    let floats = broken(&zero, |index, _, words| {
        let mut pad = vec![0; words.len()];
        Masks::new(&Seed::new([u8::try_from(index % 256).unwrap(); SEED_BYTES])).draw(&mut pad).unwrap();
        let share = |(input, pad): (u32, &u32)| {
            (input.cast_signed() as f32 / 65536.0 - pad.cast_signed() as f32 / 1e6).to_bits()
        };
        *words = x.next(words.len()).into_iter().zip(&pad).map(share).collect();
        Vec::new()
    });
    check("float shares", floats, "words are uniform (chi-squared of bytes)");

    let (mut x, mut stream) = (inputs(), Masks::new(&Seed::new([8; SEED_BYTES])));
    let both = broken(&zero, |_, _, words| {
        let mut pad = vec![0; words.len()];
        stream.draw(&mut pad).unwrap();
        *words = blinded(&x.next(words.len()), &pad);
        vec![pad]
    });
    check("both shares to one server", both, "no two messages are shares of one input");

    // The same by a frame that party 0 cannot be sent: the other party's, with its seed.
    let seeds = Transcript { party: Party::Zero, connections: one.connections.clone() };
    check("the seed to party 0", seeds, "party 0 is sent blinded words and no seed");

    let mut twice = zero.clone();
    twice.connections.push(zero.connections[0].clone());
    check("the same masks after a reconnection", twice, "no session repeats another one's masks");

    let seed = one.connections[0].clone();
    let again = Transcript { party: Party::One, connections: vec![seed.clone(), seed] };
    check("the same seed after a reconnection", again, "every session has a seed of its own");

    let mut back = zero.clone();
    let (info, messages) = shares(&zero);
    let mut up = Vec::new();
    for share in [&messages[0], &messages[1], &messages[0]] {
        RequestZero::Linear(share.clone()).write(&mut up);
    }
    let mut down = Vec::new();
    Reply::Info(Box::new(info)).write(&mut down);
    back.connections = vec![Connection { up, down }];
    check("a counter that goes back", back, "no place of a mask stream is taken twice");
}

/// Raw sockets, written down by somebody else than the client: no token is in them, in any way that numbers are
/// written.
#[test]
fn the_sockets_contain_no_token() {
    let servers = serve(CASE);
    let pass = || Box::new(|_, frame| Action::Send(frame));
    let between = [0, 1].map(|party| Between::start(servers[party].address(), pass()));
    let options = ClientOptions { party0: between[0].url(), party1: between[1].url(), ..options(&servers) };
    let mut rig = Rig::private(CASE, options).unwrap();
    rig.talk(PROMPT, ANSWER).unwrap();
    drop(rig);
    let tokens = [PROMPT, ANSWER].concat();
    let bytes = |write: fn(&u32) -> Vec<u8>| tokens[..7].iter().flat_map(write).collect::<Vec<u8>>();
    let text = |separator: &str| {
        let words: Vec<String> = tokens[..4].iter().map(u32::to_string).collect();
        words.join(separator).into_bytes()
    };
    let written = [
        bytes(|token| token.to_le_bytes().to_vec()),
        bytes(|token| token.to_be_bytes().to_vec()),
        bytes(|token| u64::from(*token).to_le_bytes().to_vec()),
        bytes(|token| (*token as u16).to_le_bytes().to_vec()),
        bytes(|token| (*token as u16).to_be_bytes().to_vec()),
        bytes(|token| vec![*token as u8]),
        bytes(|token| (*token as f32).to_le_bytes().to_vec()),
        text(","),
        text(", "),
        text(" "),
    ];
    let mut streams: Vec<(String, Arc<Mutex<Vec<u8>>>)> = Vec::new();
    for (party, between) in between.iter().enumerate() {
        streams.push((format!("to party {party}"), Arc::clone(&between.up)));
        streams.push((format!("from party {party}"), Arc::clone(&between.down)));
    }
    for (name, stream) in streams {
        let stream = stream.lock().unwrap();
        assert!(stream.len() > 300, "{name}: {} bytes", stream.len());
        for written in &written {
            assert!(!stream.windows(written.len()).any(|window| window == written), "{name}: {written:?}");
        }
    }
}
