//! A writer that is killed at any moment leaves a store in which nothing wrong is ever read.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::{
    env,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
};

use fornax_disk::Store;

const TEST: &str = "a_killed_writer_leaves_what_it_had_written_and_nothing_else";

/// Where a child of this test writes.
const FOLDER: &str = "FORNAX_DISK_TEST_FOLDER";

/// How often a writer is killed; a proof asks for more.
const KILLS: &str = "FORNAX_DISK_KILLS";

/// Some fifty pages, so that old ones go while new ones are written.
const BYTES_MAX: u64 = 16 << 20;

fn page(number: u64) -> Vec<u8> {
    let word = |at: u64| (number ^ (at << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..40_000 + number % 7 * 100).flat_map(word).collect()
}

fn open(folder: &Path) -> (Store, fornax_disk::Found) {
    Store::open(folder, "a model", "", None, BYTES_MAX).unwrap()
}

/// Writes until somebody ends it, saying which page is written.
fn write_for_ever(folder: &Path) -> ! {
    let (store, _) = open(folder);
    let mut out = std::io::stdout();
    let mut number = (0..).find(|number: &u64| !seen(&store, *number)).unwrap();
    loop {
        store.write(&number.to_le_bytes(), &page(number), number).unwrap();
        writeln!(out, "\nwritten {number}").unwrap();
        out.flush().unwrap();
        number += 1;
    }
}

/// Whether a page is there or has been: numbers are written in order, and the oldest go first.
fn seen(store: &Store, number: u64) -> bool {
    (number..number + 200).any(|later| store.holds(&later.to_le_bytes()))
}

#[test]
fn a_killed_writer_leaves_what_it_had_written_and_nothing_else() {
    if let Ok(folder) = env::var(FOLDER) {
        write_for_ever(Path::new(&folder));
    }
    let kills: u64 = env::var(KILLS).map_or(4, |kills| kills.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let mut torn = 0;
    for kill in 0..kills {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let written = lines.filter_map(|line| line.strip_prefix("written ")?.parse::<u64>().ok());
        let last = written.take(1 + (kill * 7 % 13) as usize).last().unwrap();
        // As `kill -9` does.
        child.kill().unwrap();
        child.wait().unwrap();
        let (store, found) = open(folder.path());
        torn += found.torn.len();
        assert_eq!(found.foreign, Vec::<std::path::PathBuf>::new());
        assert!(store.holds(&last.to_le_bytes()), "kill {kill}: what was said to be written is there");
        let mut read = 0;
        for number in last.saturating_sub(100)..last + 20 {
            if let Some((bytes, fingerprint)) = store.read(&number.to_le_bytes()).unwrap() {
                assert!(bytes == page(number) && fingerprint == number, "kill {kill}: page {number}");
                read += 1;
            }
        }
        assert!(read > 0 && store.counts().1 <= BYTES_MAX, "kill {kill}");
    }
    // Of hundreds, some hit the middle of a record.
    assert!(kills < 100 || torn > 0, "{kills} kills and no torn record");
}
