//! Cases that follow from their numbers, for tests that any compiler builds: seeds that are changed at random.
//!
//! libFuzzer finds more, because coverage guides it; this finds what is near the seeds, in every run of the tests.
//! Tests include this file by its path.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// Numbers that follow from the number of the case, so that a case can be repeated (splitmix64).
pub struct Random(u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % bound.max(1) as u64).expect("it is below a usize")
    }

    pub fn of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// Runs `few` cases, or as many as FORNAX_FUZZ_CASES says and FORNAX_FUZZ_SECONDS leaves time for, and says how many
/// there were, how many were accepted and how many were a second. FORNAX_FUZZ_FIRST is the number of the first; the
/// file FORNAX_FUZZ_LAST has the number of the one that was begun last, also where it ended the process.
pub fn cases(name: &str, few: u64, mut case: impl FnMut(Random) -> bool) {
    let set = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let (first, count) = (set("FORNAX_FUZZ_FIRST").unwrap_or(0), set("FORNAX_FUZZ_CASES").unwrap_or(few));
    let limit = set("FORNAX_FUZZ_SECONDS").map_or(Duration::MAX, Duration::from_secs);
    let mut last = std::env::var_os("FORNAX_FUZZ_LAST")
        .map(|path| File::create(path).expect("the file of the last case can be written"));
    let (mut done, mut accepted, mut slowest) = (0, 0_u64, (Duration::ZERO, 0));
    let began = Instant::now();
    while done < count && (done == 0 || began.elapsed() < limit) {
        let (number, start) = (first + done, Instant::now());
        let _named = Named { name, number };
        if let Some(last) = &mut last {
            let written = last.seek(SeekFrom::Start(0)).and_then(|_| write!(last, "{number:020}"));
            written.expect("the file of the last case can be written");
        }
        accepted += u64::from(case(Random(number)));
        slowest = slowest.max((start.elapsed(), number));
        done += 1;
    }
    let seconds = began.elapsed().as_secs_f64();
    let of_all = format!("{accepted} of {done} cases of {name} from {first} on were accepted");
    assert!(done == 1 || accepted > 0 && accepted < done, "{of_all}: the changes are no test");
    // A caller waits for half a minute at most; a machine may be ten times as slow as it should be.
    assert!(slowest.0 < Duration::from_secs(30), "case {} of {name} took {:?}", slowest.1, slowest.0);
    // Said of cases that passed alone.
    println!(
        "FUZZ {name}: {done} cases in {seconds:.1} s, {accepted} of them accepted, {:.0} a second, the slowest {:.0} ms",
        done as f64 / seconds,
        slowest.0.as_secs_f64() * 1000.0
    );
}

/// A case, named where it fails.
struct Named<'a> {
    name: &'a str,
    number: u64,
}

impl Drop for Named<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("case {} of {} failed", self.number, self.name);
        }
    }
}

/// What is in the files of a folder of seeds, in the order of their names.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find_map(|folder| {
        let seeds = folder.join("fuzz/seeds").join(target);
        seeds.is_dir().then_some(seeds)
    });
    let folder = folder.unwrap_or_else(|| panic!("there are no seeds of {target}"));
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .expect("seeds can be read")
        .map(|file| file.expect("seeds can be read").path())
        .collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("seeds can be read")).collect()
}

/// One of the seeds after a few changes: bytes, stretches and numbers of it, parts of other seeds, and words.
pub fn changed(random: &mut Random, seeds: &[Vec<u8>], words: &[&[u8]]) -> Vec<u8> {
    /// Longer ones are only slower.
    const BYTES_MAX: usize = 1 << 16;
    const EDGES: [u32; 8] = [0, 1, 0x7f, 0xff, 0x8000, 0x7fff_ffff, 0x8000_0000, u32::MAX];
    let mut data = random.of(seeds).clone();
    for _ in 0..=random.below(5) {
        let at = random.below(data.len() + 1);
        let end = (at + 1 + random.below(24)).min(data.len());
        match random.below(9) {
            0 if at < data.len() => data[at] ^= 1 << random.below(8),
            1 if at < data.len() => data[at] = u8::try_from(random.below(256)).expect("it is a byte"),
            2 => drop(data.drain(at..end.max(at))),
            3 if data.len() < BYTES_MAX => {
                let again = data[at..end.max(at)].repeat(1 << random.below(8));
                data.splice(at..at, again);
            }
            4 if at + 4 <= data.len() => data[at..at + 4].copy_from_slice(&random.of(&EDGES).to_le_bytes()),
            5 => {
                let other = random.of(seeds);
                let from = random.below(other.len() + 1);
                let to = (from + random.below(64)).min(other.len());
                data.splice(at..at, other[from..to].iter().copied());
            }
            _ if !words.is_empty() => {
                // In place of a word rather than beside it, as often as not.
                let until = data[at..].iter().position(|byte| !byte.is_ascii_alphanumeric());
                let until = at + until.filter(|_| random.below(2) == 0).unwrap_or(0);
                data.splice(at..until, random.of(words).iter().copied());
            }
            _ => data.truncate(at),
        }
    }
    data.truncate(BYTES_MAX);
    data
}
