//! Servers that lie: every kind of wrong answer is found, nothing is computed from it, and the liar is named.

use std::time::Duration;

use fornax_private::ClientOptions;

use crate::between::{Action, Between, Change};
use crate::rig::{ANSWER, PROMPT, Rig, bits, options, rounds, serve};

const CASE: &str = "llama.gguf";
/// The product that goes wrong: in the second step of a tiny model.
const WHEN: usize = 13;

/// Party `party` does `change` to its answers: the client's error says `said`, and nothing more is computed.
fn check(party: usize, change: impl FnMut(usize, Vec<u8>) -> Action + Send + 'static, said: &str) {
    check_within(Duration::from_secs(60), party, change, said);
}

/// The same with a client that waits so long for each answer.
fn check_within(
    timeout: Duration,
    party: usize,
    change: impl FnMut(usize, Vec<u8>) -> Action + Send + 'static,
    said: &str,
) {
    let servers = serve(CASE);
    let change: Change = Box::new(change);
    let between = Between::start(servers[party].address(), change);
    let mut options = ClientOptions { timeout, ..options(&servers) };
    *(if party == 0 { &mut options.party0 } else { &mut options.party1 }) = between.url();
    let mut rig = Rig::private(CASE, options).unwrap();
    let error = rig.talk(PROMPT, ANSWER).unwrap_err();
    assert!(error.to_string().contains(said), "party {party}: {error}");
    let is_integrity = matches!(error, fornax_compute::Error::Integrity { .. });
    assert_eq!(is_integrity, !said.contains("did not answer"), "{error:?}");
    if is_integrity {
        rig.restart();
        let again = rig.step(PROMPT).unwrap_err().to_string();
        assert!(again.contains("no more is sent") && again.contains(said), "{again}");
    }
}

fn at(
    when: usize,
    change: impl Fn(&mut Vec<u8>) + Send + 'static,
) -> impl FnMut(usize, Vec<u8>) -> Action + Send {
    move |number, mut frame| {
        if number == when {
            change(&mut frame);
        }
        Action::Send(frame)
    }
}

#[test]
fn one_flipped_word_of_either_party_aborts_and_names_it() {
    for party in [0, 1] {
        let said = format!("party {party} answered the product with matrix");
        for bit in [0, 13, 31] {
            // The words begin behind head and counter.
            check(party, at(WHEN, move |frame| frame[13 + 40 + bit / 8] ^= 1 << (bit % 8)), &said);
        }
    }
}

#[test]
fn a_replayed_answer_is_found() {
    for party in [0, 1] {
        let (mut earlier, step) = (Vec::new(), rounds(CASE));
        // The answer of a step ago, which has the same length: of the same matrix.
        let replay = move |number: usize, frame: Vec<u8>| {
            if number == step + 5 {
                earlier.clone_from(&frame);
            }
            Action::Send(if number == 2 * step + 5 { earlier.clone() } else { frame })
        };
        check(party, replay, &format!("party {party} broke the protocol: a product with counter"));
    }
}

#[test]
fn a_replayed_answer_under_the_right_counter_is_found() {
    for party in [0, 1] {
        let (mut earlier, step) = (Vec::new(), rounds(CASE));
        let replay = move |number: usize, mut frame: Vec<u8>| {
            if number == step + 5 {
                earlier.clone_from(&frame);
            }
            if number == 2 * step + 5 {
                frame[13..].copy_from_slice(&earlier[13..]);
            }
            Action::Send(frame)
        };
        check(party, replay, &format!("party {party} answered the product with matrix"));
    }
}

#[test]
fn reordered_answers_are_found() {
    // Only party 1 has several answers under way, and that from the second step on.
    let (mut held, step) = (Vec::new(), rounds(CASE));
    let swap = move |number: usize, frame: Vec<u8>| {
        if number == step + 3 {
            held = frame;
            return Action::Send(Vec::new());
        }
        Action::Send(if number == step + 4 { [frame, std::mem::take(&mut held)].concat() } else { frame })
    };
    check(1, swap, "party 1 broke the protocol");
}

#[test]
fn swapped_rows_of_an_answer_are_found() {
    for party in [0, 1] {
        let swap = at(WHEN, |frame| {
            let (a, b) = frame[13..].split_at_mut(4);
            a.swap_with_slice(&mut b[..4]);
        });
        check(party, swap, &format!("party {party} answered the product with matrix"));
    }
}

#[test]
fn truncated_and_prolonged_answers_are_found() {
    for party in [0, 1] {
        let said = format!("party {party} broke the protocol: a frame of kind 131 announces");
        let cut = |frame: &mut Vec<u8>| {
            frame.truncate(frame.len() - 4);
            let len = u32::try_from(frame.len() - 5).unwrap();
            frame[..4].copy_from_slice(&len.to_le_bytes());
        };
        check(party, at(WHEN, cut), &said);
        let prolong = |frame: &mut Vec<u8>| {
            frame.extend_from_slice(&[0; 4]);
            let len = u32::try_from(frame.len() - 5).unwrap();
            frame[..4].copy_from_slice(&len.to_le_bytes());
        };
        check(party, at(WHEN, prolong), &said);
    }
}

#[test]
fn a_frame_of_another_kind_is_found() {
    for party in [0, 1] {
        check(
            party,
            at(WHEN, |frame| frame[4] = 130),
            &format!("party {party} broke the protocol: a frame of kind 130 does not belong here"),
        );
    }
}

#[test]
fn a_delayed_answer_is_told_as_such() {
    for party in [0, 1] {
        let hold = move |number, frame| if number == WHEN { Action::Silence } else { Action::Send(frame) };
        let said = format!("party {party} did not answer within 2 seconds");
        check_within(Duration::from_secs(2), party, hold, &said);
    }
}

#[test]
fn a_broken_connection_is_made_again_with_a_new_seed_and_the_answer_stays_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let wanted = Rig::reference(CASE).talk(PROMPT, ANSWER).unwrap();
    for party in [0, 1] {
        let servers = serve(CASE);
        let cut = move |number, frame: Vec<u8>| match number {
            // Once between frames and once inside one.
            WHEN => Action::Break(Vec::new()),
            30 => Action::Break(frame[..9].to_vec()),
            _ => Action::Send(frame),
        };
        let between = Between::start(servers[party].address(), Box::new(cut));
        let record = folder.path().join(format!("{party}"));
        let mut options = ClientOptions { record: Some(record.clone()), ..options(&servers) };
        *(if party == 0 { &mut options.party0 } else { &mut options.party1 }) = between.url();
        let mut rig = Rig::private(CASE, options).unwrap();
        let got = rig.talk(PROMPT, ANSWER).unwrap();
        assert_eq!(bits(&got), bits(&wanted), "party {party}");
        let sessions = rig.backend.with_products(|client| client.stats().snapshot().sessions);
        assert_eq!(sessions, 3);
        drop(rig);
        let views = crate::views::read(&record);
        let findings = fornax_private::audit::audit(&views).unwrap();
        let reused: Vec<_> = findings
            .iter()
            .filter(|finding| !finding.passed && !finding.detail.contains("too few"))
            .filter(|finding| !finding.check.starts_with("a simulator"))
            .collect();
        assert!(reused.is_empty(), "{reused:?}");
    }
}

#[test]
fn a_server_that_stays_away_is_named() {
    let servers = serve(CASE);
    let [zero, one] = servers;
    let options = options_of([&zero, &one]);
    let mut rig = Rig::private(CASE, options).unwrap();
    rig.step(PROMPT).unwrap();
    let address = one.address();
    drop(one);
    let error = rig.step(&[1]).unwrap_err().to_string();
    assert!(
        error.contains("party 1 refused: the server is stopping") || error.contains(&address.to_string()),
        "{error}"
    );
}

fn options_of(servers: [&fornax_private::Server; 2]) -> ClientOptions {
    ClientOptions {
        demo_single_host: true,
        ..ClientOptions::new(crate::rig::url(servers[0]), crate::rig::url(servers[1]))
    }
}
