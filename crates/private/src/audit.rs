//! Judges recorded views: whether what a party saw is what the claim says it sees.
//!
//! No test of samples proves secrecy; the proof is in docs/private.md. These checks find the mistakes that break it:
//! frames that carry what they must not, places of the mask stream taken twice, pads used twice, both shares in one
//! view, seeds that can be guessed from what is public, words that are not uniform. Each has a negative control among
//! this crate's tests, which must fail.

use std::collections::{HashMap, HashSet};

use sha2::{Digest, Sha256};

use crate::Error;
use crate::frame::{Awaited, Draw, FrameError, Info, Party, Reply, RequestOne, RequestZero, Shapes, Share};
use crate::mask::{Masks, Pads, SEED_BYTES, Seed, random};
use crate::transcript::{Connection, Transcript};

/// One check and how it went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked for.
    pub check: &'static str,
    /// Whether it is as it should be.
    pub passed: bool,
    /// The figures.
    pub detail: String,
}

/// How far from its mean a statistic may be, in standard deviations: chance exceeds it once in twenty million.
const SIGMAS: f64 = 5.5;

/// Words that the battery needs: five for each value of a byte.
const WORDS_LEAST: usize = 5 * 256;

/// Messages of one matrix that are compared with each other.
const MESSAGES: usize = 24;
/// Words of two messages that are compared.
const COMPARED: usize = 64;
/// Words that two sessions must have in common for a comparison: of fewer, chance makes some alike.
const OVERLAP_LEAST: u64 = 16;

/// Judges views of one or both parties, recorded in one conversation or in several.
pub fn audit(transcripts: &[Transcript]) -> Result<Vec<Finding>, Error> {
    let mut findings = Vec::new();
    let views = transcripts.iter().map(View::read).collect::<Result<Vec<_>, _>>()?;
    for (transcript, view) in transcripts.iter().zip(&views) {
        findings.extend(view.judge(transcript.party)?);
    }
    findings.extend(seeds_elsewhere(transcripts, &views));
    Ok(findings)
}

/// What one party saw, in its own terms.
struct View {
    connections: Vec<Seen>,
    /// Why a connection's bytes could not be read as what this party may be asked.
    illegible: Vec<String>,
}

#[derive(Default)]
struct Seen {
    info: Option<Info>,
    sessions: Vec<u64>,
    seeds: Vec<[u8; SEED_BYTES]>,
    draws: Vec<Draw>,
    shares: Vec<Share>,
}

impl View {
    fn read(transcript: &Transcript) -> Result<View, Error> {
        let mut view = View { connections: Vec::new(), illegible: Vec::new() };
        for (index, connection) in transcript.connections.iter().enumerate() {
            let mut seen = Seen::default();
            match seen.read(transcript.party, connection) {
                // A connection that broke ends inside a frame.
                Ok(()) | Err(FrameError::Io(_)) => {}
                Err(error) => view.illegible.push(format!("connection {}: {error}", index + 1)),
            }
            view.connections.push(seen);
        }
        Ok(view)
    }

    fn judge(&self, party: Party) -> Result<Vec<Finding>, Error> {
        let draws: usize = self.connections.iter().map(|seen| seen.draws.len()).sum();
        let mut findings = vec![
            Finding {
                check: match party {
                    Party::Zero => "party 0 is sent blinded words and no seed",
                    Party::One => "party 1 is sent seeds and no words",
                },
                passed: self.illegible.is_empty() && draws > 0,
                detail: if self.illegible.is_empty() {
                    format!("{draws} products in {} connections", self.connections.len())
                } else {
                    self.illegible.join("; ")
                },
            },
            self.counters(),
            self.guessed(party)?,
        ];
        match party {
            Party::Zero => {
                findings.extend([self.pairs(true), self.pairs(false)]);
                findings.extend(self.reconnections());
                let words: Vec<u32> = self.shares().flat_map(|share| share.words.iter().copied()).collect();
                findings.extend(battery(&words));
                findings.push(simulated(&words)?);
            }
            Party::One => findings.push(self.seeds()),
        }
        Ok(findings)
    }

    fn shares(&self) -> impl Iterator<Item = &Share> {
        self.connections.iter().flat_map(|seen| &seen.shares)
    }

    /// Every place of every stream is taken once, and none is left out.
    fn counters(&self) -> Finding {
        let (mut wrong, mut compared) = (Vec::new(), 0);
        for (index, seen) in self.connections.iter().enumerate() {
            let Some(shapes) = seen.info.as_ref().map(|info| &info.dims) else { continue };
            let mut next = 0;
            for draw in &seen.draws {
                compared += 1;
                if draw.counter != next {
                    wrong.push(format!(
                        "connection {}: counter {} where {next} is next",
                        index + 1,
                        draw.counter
                    ));
                    break;
                }
                next += draw.pad_words(shapes) as u64;
            }
        }
        let detail =
            if wrong.is_empty() { format!("{compared} products in order") } else { wrong.join("; ") };
        let passed = wrong.is_empty() && compared > 0;
        Finding { check: "no place of a mask stream is taken twice", passed, detail }
    }

    /// Messages of one matrix whose difference, or whose sum, is as small as activations are.
    fn pairs(&self, difference: bool) -> Finding {
        let mut by_matrix: HashMap<u32, Vec<&[u32]>> = HashMap::new();
        let mut rows = Vec::new();
        for seen in &self.connections {
            let Some(shapes) = seen.info.as_ref().map(|info| &info.dims) else { continue };
            for share in &seen.shares {
                let columns = shapes.columns(share.draw.matrix as usize);
                rows.extend(share.words.chunks_exact(columns).map(|row| (share.draw.matrix, row)));
            }
        }
        for (matrix, row) in rows {
            let rows = by_matrix.entry(matrix).or_default();
            if rows.len() < MESSAGES {
                rows.push(row);
            }
        }
        let (mut compared, mut close) = (0, Vec::new());
        for (matrix, rows) in &by_matrix {
            for (index, row) in rows.iter().enumerate() {
                for other in &rows[..index] {
                    compared += 1;
                    if is_close(row, other, difference) {
                        close.push(*matrix);
                    }
                }
            }
        }
        close.sort_unstable();
        close.dedup();
        let check = if difference {
            "no two messages share a pad"
        } else {
            "no two messages are shares of one input"
        };
        let detail = if close.is_empty() {
            format!("{compared} pairs compared")
        } else {
            format!("pairs that give activations away, with matrices {:?}", &close[..close.len().min(8)])
        };
        Finding { check, passed: close.is_empty() && compared > 0, detail }
    }

    /// The same places of different sessions' streams have different pads. `None` of a single session, which has nobody
    /// to repeat.
    fn reconnections(&self) -> Option<Finding> {
        let sessions: Vec<&[Share]> = self
            .connections
            .iter()
            .map(|seen| &seen.shares[..])
            .filter(|shares| !shares.is_empty())
            .collect();
        if sessions.len() < 2 {
            return None;
        }
        let (mut compared, mut close) = (0, 0);
        for pair in sessions.windows(2) {
            for (one, other) in overlaps(pair[0], pair[1]) {
                compared += 1;
                close += usize::from(is_close(one, other, true));
            }
        }
        Some(Finding {
            check: "no session repeats another one's masks",
            // Where nothing could be compared, nothing is known: that is not the same as being right.
            passed: close == 0 && compared > 0,
            detail: format!("{compared} places of {} sessions compared, {close} alike", sessions.len()),
        })
    }

    /// Seeds come once for each session and never again.
    fn seeds(&self) -> Finding {
        let seeds: Vec<_> = self.connections.iter().flat_map(|seen| &seen.seeds).collect();
        let different: HashSet<_> = seeds.iter().collect();
        let one_each =
            self.connections.iter().all(|seen| seen.seeds.len() == usize::from(!seen.draws.is_empty()));
        Finding {
            check: "every session has a seed of its own",
            passed: different.len() == seeds.len() && one_each && !seeds.is_empty(),
            detail: format!("{} seeds, {} different", seeds.len(), different.len()),
        }
    }

    /// Seeds that somebody who knows only what is public would try.
    fn guessed(&self, party: Party) -> Result<Finding, Error> {
        let mut guessed = Vec::new();
        let mut tried = 0;
        for (index, seen) in self.connections.iter().enumerate() {
            // Without a session there is nothing that a guess could be right about.
            if seen.seeds.is_empty() && seen.shares.is_empty() {
                continue;
            }
            for (name, seed) in guesses(seen) {
                tried += 1;
                let right = match party {
                    Party::One => seen.seeds.contains(&seed),
                    Party::Zero => seen.shares.first().is_some_and(|share| unmasks(seed, share)),
                };
                if right {
                    guessed.push(format!("connection {}: {name}", index + 1));
                }
            }
        }
        let detail = if guessed.is_empty() { format!("{tried} guesses") } else { guessed.join("; ") };
        Ok(Finding {
            check: "the seed does not follow from what is public",
            passed: guessed.is_empty() && tried > 0,
            detail,
        })
    }
}

impl Seen {
    fn read(&mut self, party: Party, connection: &Connection) -> Result<(), FrameError> {
        let mut down = connection.down.as_slice();
        while !down.is_empty() {
            match self.reply(&mut down) {
                Err(FrameError::Io(_)) => break,
                result => result?,
            }
        }
        let unknown = Shapes::default();
        let shapes = self.info.as_ref().map_or(&unknown, |info| &info.dims).clone();
        let mut up = connection.up.as_slice();
        while !up.is_empty() {
            match party {
                Party::Zero => match RequestZero::read(&mut up, &shapes)? {
                    RequestZero::Linear(share) => {
                        self.draws.push(share.draw);
                        self.shares.push(share);
                    }
                    RequestZero::Info | RequestZero::Open { .. } | RequestZero::Close => {}
                },
                Party::One => match RequestOne::read(&mut up, &shapes)? {
                    RequestOne::Open { seed, .. } => self.seeds.push(*seed.bytes()),
                    RequestOne::Linear(draws) => self.draws.extend(draws),
                    RequestOne::Info | RequestOne::Close => {}
                },
            }
        }
        Ok(())
    }

    /// A reply. Products are as long as they say here: what they should be is the client's business.
    fn reply(&mut self, down: &mut &[u8]) -> Result<(), FrameError> {
        let announced = down.get(..4).map_or(0, |len| u32::from_le_bytes([len[0], len[1], len[2], len[3]]));
        let product = Awaited::Product { words: (announced as usize).saturating_sub(8) / 4 };
        let mut ahead = *down;
        match Reply::read(&mut ahead, Awaited::Control, Vec::new()) {
            Ok(Reply::Info(info)) => self.info = Some(*info),
            Ok(Reply::Opened { session }) => self.sessions.push(session),
            Ok(_) => {}
            Err(FrameError::Kind { .. }) => {
                ahead = *down;
                Reply::read(&mut ahead, product, Vec::new()).map(drop)?;
            }
            Err(error) => return Err(error),
        }
        *down = ahead;
        Ok(())
    }
}

/// Whether two rows' difference or sum is small in many places: one word in 256 is, by chance.
fn is_close(row: &[u32], other: &[u32], difference: bool) -> bool {
    const SMALL: u32 = 1 << 23;
    let len = row.len().min(other.len()).min(COMPARED);
    let together = |(&a, &b): (&u32, &u32)| if difference { a.wrapping_sub(b) } else { a.wrapping_add(b) };
    let words = row[..len].iter().zip(other).map(together);
    let small = words.filter(|word| word.cast_signed().unsigned_abs() < SMALL).count();
    small >= 8.max(len / 4)
}

/// Seeds made of the session's number, the server's number or the weights' hash in the ways that come to mind first.
fn guesses(seen: &Seen) -> Vec<(String, [u8; SEED_BYTES])> {
    let mut public: Vec<(String, Vec<u8>)> = vec![("zeros".to_owned(), Vec::new())];
    for session in &seen.sessions {
        public.push((format!("session {session}"), session.to_le_bytes().to_vec()));
        public.push((format!("session {session}, big-endian"), session.to_be_bytes().to_vec()));
        public.push((format!("session {session}, as text"), session.to_string().into_bytes()));
    }
    if let Some(info) = &seen.info {
        public.push(("the server's instance".to_owned(), info.instance.clone().into_bytes()));
        public.push(("the weights' hash".to_owned(), info.weights.sha256.clone().into_bytes()));
    }
    let mut guesses = Vec::new();
    for (name, bytes) in public {
        let mut padded = [0; SEED_BYTES];
        let len = bytes.len().min(SEED_BYTES);
        padded[..len].copy_from_slice(&bytes[..len]);
        guesses.push((name.clone(), padded));
        if !bytes.is_empty() {
            let repeated: Vec<u8> = bytes.iter().copied().cycle().take(SEED_BYTES).collect();
            guesses.push((format!("{name}, repeated"), repeated.try_into().unwrap_or(padded)));
        }
        guesses.push((format!("SHA-256 of {name}"), Sha256::digest(&bytes).into()));
    }
    guesses
}

/// Words of two sessions that were blinded with the same places of their mask streams. A session that was cut inside a
/// step goes on with another matrix, so places are compared and not messages.
fn overlaps<'s>(one: &'s [Share], other: &'s [Share]) -> Vec<(&'s [u32], &'s [u32])> {
    let end = |share: &Share| share.draw.counter + share.words.len() as u64;
    let (mut i, mut j, mut found) = (0, 0, Vec::new());
    while let (Some(a), Some(b)) = (one.get(i), other.get(j)) {
        let start = a.draw.counter.max(b.draw.counter);
        let len = end(a).min(end(b)).saturating_sub(start);
        if len >= OVERLAP_LEAST {
            let part = |share: &'s Share| {
                let from = usize::try_from(start - share.draw.counter).unwrap_or(usize::MAX);
                &share.words[from..][..usize::try_from(len).unwrap_or(0)]
            };
            found.push((part(a), part(b)));
        }
        if end(a) <= end(b) { i += 1 } else { j += 1 }
    }
    found
}

/// Whether the stream of a seed makes small numbers of a session's first message.
fn unmasks(seed: [u8; SEED_BYTES], share: &Share) -> bool {
    let mut pad = vec![0; share.words.len()];
    let drawn = Masks::new(&Seed::new(seed)).draw(&mut pad);
    drawn.is_ok() && is_close(&share.words, &pad, false)
}

/// No seed of party 1 is in what party 0 was sent, where both views are given.
fn seeds_elsewhere(transcripts: &[Transcript], views: &[View]) -> Option<Finding> {
    let seeds: Vec<_> =
        views.iter().flat_map(|view| &view.connections).flat_map(|seen| &seen.seeds).collect();
    let zero: Vec<&Connection> = transcripts
        .iter()
        .filter(|transcript| transcript.party == Party::Zero)
        .flat_map(|transcript| &transcript.connections)
        .collect();
    if seeds.is_empty() || zero.is_empty() {
        return None;
    }
    let holds = |seed: &&&[u8; SEED_BYTES]| {
        zero.iter().any(|connection| connection.up.windows(SEED_BYTES).any(|window| window == **seed))
    };
    let found = seeds.iter().filter(holds).count();
    Some(Finding {
        check: "no seed of party 1 is in party 0's view",
        passed: found == 0,
        detail: format!("{} seeds looked for, {found} found", seeds.len()),
    })
}

/// Whether words look uniform and independent: bytes (chi-squared), bits, neighbours (serial correlation).
pub fn battery(words: &[u32]) -> Vec<Finding> {
    let enough = words.len() >= WORDS_LEAST;
    let finding = |check, statistics: Vec<(String, f64)>| {
        let worst = statistics.into_iter().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
        let (name, sigmas) = worst.unwrap_or_default();
        Finding {
            check,
            passed: enough && sigmas.abs() <= SIGMAS,
            detail: if enough {
                format!("{} words; worst: {name}, {sigmas:.2} standard deviations", words.len())
            } else {
                format!("{} words are too few to judge, {WORDS_LEAST} are needed", words.len())
            },
        }
    };
    let bytes = (0..4).map(|lane| (format!("byte {lane}"), chi_squared(&histogram(words, lane))));
    let count = words.len().max(1) as f64;
    let bits = (0..32).map(|bit| {
        let ones = words.iter().filter(|word| *word >> bit & 1 == 1).count() as f64;
        (format!("bit {bit}"), (ones - count / 2.0) / (count / 4.0).sqrt())
    });
    let neighbours = (1..=8).map(|lag| (format!("distance {lag}"), correlation(words, lag) * count.sqrt()));
    vec![
        finding("words are uniform (chi-squared of bytes)", bytes.collect()),
        finding("bits are balanced", bits.collect()),
        finding("words are independent (serial correlation)", neighbours.collect()),
    ]
}

/// Whether the words can be told from those of a simulator that knows nothing but how many there are.
fn simulated(words: &[u32]) -> Result<Finding, Error> {
    let mut other = vec![0_u32; words.len()];
    random(bytemuck::cast_slice_mut(&mut other))?;
    let mut worst = 0.0_f64;
    for lane in 0..4 {
        let (real, made) = (histogram(words, lane), histogram(&other, lane));
        let terms = real.iter().zip(&made).filter(|(real, made)| **real + **made > 0.0);
        let statistic: f64 = terms.map(|(real, made)| (real - made).powi(2) / (real + made)).sum();
        worst = worst.max(normal(statistic, 255.0).abs());
    }
    Ok(Finding {
        check: "a simulator that knows only the shape makes the same view",
        passed: words.len() >= WORDS_LEAST && worst <= SIGMAS,
        detail: format!("{} words; worst: {worst:.2} standard deviations", words.len()),
    })
}

fn histogram(words: &[u32], lane: u32) -> [f64; 256] {
    let mut counts = [0.0; 256];
    for word in words {
        counts[(word >> (8 * lane) & 0xff) as usize] += 1.0;
    }
    counts
}

/// How far a histogram is from uniform, in standard deviations.
fn chi_squared(counts: &[f64; 256]) -> f64 {
    let mean = counts.iter().sum::<f64>() / 256.0;
    if mean == 0.0 {
        return 0.0;
    }
    normal(counts.iter().map(|count| (count - mean).powi(2) / mean).sum(), 255.0)
}

/// A chi-squared statistic as a normal one (Wilson and Hilferty).
fn normal(statistic: f64, freedom: f64) -> f64 {
    let spread = 2.0 / (9.0 * freedom);
    ((statistic / freedom).cbrt() - (1.0 - spread)) / spread.sqrt()
}

fn correlation(words: &[u32], lag: usize) -> f64 {
    let count = words.len().max(1) as f64;
    let mean = words.iter().map(|word| f64::from(*word)).sum::<f64>() / count;
    let centred = |word: &u32| f64::from(*word) - mean;
    let variance: f64 = words.iter().map(|word| centred(word).powi(2)).sum();
    let shared: f64 = words.iter().zip(words.iter().skip(lag)).map(|(a, b)| centred(a) * centred(b)).sum();
    if variance > 0.0 { shared / variance } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passes(words: &[u32]) -> bool {
        battery(words).iter().all(|finding| finding.passed)
    }

    #[test]
    fn the_battery_passes_the_cipher_and_fails_what_is_not_uniform() {
        let mut words = vec![0; 50_000];
        Masks::new(&Seed::new([3; SEED_BYTES])).draw(&mut words).unwrap();
        assert!(passes(&words), "{:?}", battery(&words));
        type Change = fn(u32) -> u32;
        let failing: [(&str, Change); 4] = [
            ("small numbers", |word| word >> 12),
            ("floats", |word| (word as f32 / 1e9).to_bits()),
            ("a stuck bit", |word| word | 1 << 7),
            ("a byte that never comes", |word| if word & 0xff == 7 { word + 1 } else { word }),
        ];
        for (name, change) in failing {
            let changed: Vec<u32> = words.iter().map(|&word| change(word)).collect();
            assert!(!passes(&changed), "{name}: {:?}", battery(&changed));
        }
        let doubled: Vec<u32> = words.iter().flat_map(|&word| [word, word]).collect();
        assert!(!passes(&doubled), "each word twice");
        assert!(!passes(&words[..100]), "too few to judge is not passed");
    }

    #[test]
    fn no_check_passes_that_compared_nothing() {
        for party in [Party::Zero, Party::One] {
            for connections in [Vec::new(), vec![Connection::default()]] {
                let findings = audit(&[Transcript { party, connections }]).unwrap();
                let passed: Vec<_> = findings.iter().filter(|finding| finding.passed).collect();
                assert!(passed.is_empty() && findings.len() >= 4, "party {party}: {passed:?}");
            }
        }
    }

    #[test]
    fn the_normal_approximation_has_the_published_quantiles() {
        // Chi-squared with 255 degrees of freedom: median 254.33, 99.9 percentile 330.5 (tables).
        assert!(normal(254.33, 255.0).abs() < 0.01);
        assert!((normal(330.5, 255.0) - 3.09).abs() < 0.02);
    }
}
