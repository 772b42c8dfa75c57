//! A runner without a model, for the simulation and for the tests of whoever talks to an engine.
//!
//! It writes (token, position) into pages and makes the next token a hash of what it reads back through the page
//! tables. A page given to two sequences, a stale prefix, a wrong table, a lost token: each changes the hash.

use std::collections::VecDeque;

use fornax_compute::{
    Batch, Error, KvGroup, Output, PAGE_TOKENS, PageId, Row, SampleFault, SampleRow, Sampled, Token,
};

use crate::{runner::Runner, scheduler::StepLimits};

/// What goes wrong in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `launch` returns an error.
    Launch,
    /// `sample` returns an error.
    Sample,
    /// `collect` returns an error.
    Collect,
    /// `launch` panics.
    Panic,
    /// The first sampled row's logits are not numbers.
    NotANumber,
    /// `collect` finds the device gone.
    DeviceLost,
}

/// What a [`Fake`] pretends to be.
pub struct FakeOptions {
    /// Its KV groups.
    pub groups: Vec<KvGroup>,
    /// Its bounds.
    pub limits: StepLimits,
    /// Steps in flight beyond the one being put together.
    pub depth: usize,
    /// Tokens that exist.
    pub vocab: u32,
    /// Asked once per launched step what goes wrong in it.
    pub faults: Box<dyn FnMut() -> Option<Fault>>,
}

/// See the module.
pub struct Fake {
    options: FakeOptions,
    /// By group and page.
    pages: Vec<Vec<[Entry; PAGE_TOKENS]>>,
    /// The token last sampled for each slot.
    slots: Vec<Option<u32>>,
    steps: VecDeque<FakeStep>,
}

/// (token, position) as written; `None` was never written.
type Entry = Option<(u32, u32)>;

struct FakeStep {
    /// One hash per wanted position.
    hashes: Vec<u64>,
    fault: Option<Fault>,
    sampled: Vec<Sampled>,
}

impl Fake {
    /// A runner with empty pages.
    pub fn new(options: FakeOptions) -> Fake {
        let pages = options.groups.iter().map(|group| vec![[None; PAGE_TOKENS]; group.pages]).collect();
        let slots = vec![None; options.limits.slots];
        Fake { options, pages, slots, steps: VecDeque::new() }
    }

    fn write(&mut self, row: &Row, tokens: &[Token]) {
        for (position, token) in (row.start..).zip(tokens) {
            let token = match *token {
                Token::Known(token) => token,
                Token::Sampled(slot) => self.slots[slot as usize].expect("sampled before it is fed"),
            };
            for (pages, table) in self.pages.iter_mut().zip(&row.pages) {
                let page = table[position as usize / PAGE_TOKENS];
                assert_ne!(page, PageId::TRASH, "a live position has a page");
                pages[page.0 as usize][position as usize % PAGE_TOKENS] = Some((token, position));
            }
        }
    }

    /// Reads everything that a query at `position` sees, group after group.
    fn read(&self, row: &Row, position: u32) -> u64 {
        let mut hash = Hash::new();
        for (group, (pages, table)) in self.options.groups.iter().zip(self.pages.iter().zip(&row.pages)) {
            for seen in first_seen(group.window, position)..=position {
                let page = table[seen as usize / PAGE_TOKENS];
                match pages[page.0 as usize][seen as usize % PAGE_TOKENS] {
                    Some((token, at)) => hash.add(token, at),
                    None => hash.add(u32::MAX, u32::MAX),
                }
            }
        }
        hash.0
    }
}

impl Runner for Fake {
    fn launch(&mut self, batch: &Batch) -> Result<(), Error> {
        assert!(
            batch.tokens.len() <= self.options.limits.tokens_max
                && batch.wanted() <= self.options.limits.wanted_max
        );
        assert!(self.steps.len() <= self.options.depth, "no more steps in flight than promised");
        let fault = (self.options.faults)();
        match fault {
            Some(Fault::Launch) => return Err(failure("launch")),
            Some(Fault::Panic) => panic!("a panic on purpose"),
            _ => {}
        }
        let mut tokens = &batch.tokens[..];
        for row in &batch.rows {
            let (own, rest) = tokens.split_at(row.len as usize);
            self.write(row, own);
            tokens = rest;
        }
        let mut hashes = Vec::new();
        for row in &batch.rows {
            let end = row.start + row.len;
            hashes.extend((end - row.wanted..end).map(|position| self.read(row, position)));
        }
        self.steps.push_back(FakeStep { hashes, fault, sampled: Vec::new() });
        Ok(())
    }

    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<(), Error> {
        let step = self.steps.back_mut().expect("sample follows launch");
        if step.fault == Some(Fault::Sample) {
            self.steps.pop_back();
            return Err(failure("sample"));
        }
        for (index, row) in rows.iter().enumerate() {
            let hash = step.hashes[row.wanted as usize];
            let broken = index == 0 && step.fault == Some(Fault::NotANumber);
            let fault = broken.then_some(SampleFault::Logits);
            if let Some(given) = row.given {
                let logprob = Some(score(hash, given.token));
                let (token, mu) = (given.token, row.mirostat_mu);
                step.sampled.push(Sampled { token, logprob, top: Vec::new(), mu, fault });
                continue;
            }
            let mut token = chosen(hash, row.sampling.temperature, row.seed, row.position, row.vocab);
            if let Some(mask) = row.mask {
                token = nearest(token, mask, row.vocab);
            }
            step.sampled.push(Sampled { token, logprob: None, top: Vec::new(), mu: row.mirostat_mu, fault });
            self.slots[row.slot as usize] = Some(token);
        }
        Ok(())
    }

    fn hidden(&mut self, wanted: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        let step = self.steps.back().expect("hidden follows launch");
        let broken = step.fault == Some(Fault::NotANumber);
        let row = |&row: &u32| if broken { vec![f32::NAN] } else { parts(step.hashes[row as usize]) };
        Ok(wanted.iter().map(row).collect())
    }

    fn collect(&mut self) -> Result<Output, Error> {
        let step = self.steps.pop_front().expect("collect follows launch");
        match step.fault {
            Some(Fault::Collect) => Err(failure("collect")),
            Some(Fault::DeviceLost) => {
                Err(Error::DeviceLost { backend: "fake", reason: "unplugged on purpose".to_owned() })
            }
            _ => Ok(Output { sampled: step.sampled }),
        }
    }

    fn reset(&mut self) {
        self.steps.clear();
    }

    fn depth(&self) -> usize {
        self.options.depth
    }

    fn limits(&self) -> StepLimits {
        self.options.limits
    }

    fn groups(&self) -> &[KvGroup] {
        &self.options.groups
    }

    fn vocab(&self) -> u32 {
        self.options.vocab
    }
}

/// The token a [`Fake`] must choose after `tokens`, told without any pages.
pub fn next_token(tokens: &[u32], windows: &[Option<u32>], temperature: f32, seed: u64, vocab: u32) -> u32 {
    let position = u32::try_from(tokens.len()).expect("short");
    chosen(seen(tokens, windows), temperature, seed, position, vocab)
}

/// How likely a [`Fake`] must call `token` after `tokens`, told without any pages.
pub fn logprob(tokens: &[u32], windows: &[Option<u32>], token: u32) -> f32 {
    score(seen(tokens, windows), token)
}

/// What a [`Fake`] must make of `tokens`, told without any pages.
pub fn embedding(tokens: &[u32], windows: &[Option<u32>]) -> Vec<f32> {
    parts(seen(tokens, windows))
}

/// A hash in numbers that hold it exactly.
fn parts(hash: u64) -> Vec<f32> {
    (0..4).map(|part| (hash >> (16 * part) & 0xffff) as f32).collect()
}

/// The hash of everything that the last of `tokens` sees.
fn seen(tokens: &[u32], windows: &[Option<u32>]) -> u64 {
    let position = u32::try_from(tokens.len() - 1).expect("short");
    let mut hash = Hash::new();
    for &window in windows {
        for seen in first_seen(window, position)..=position {
            hash.add(tokens[seen as usize], seen);
        }
    }
    hash.0
}

fn score(hash: u64, token: u32) -> f32 {
    let mut hash = Hash(hash);
    hash.add(token, 0);
    -((hash.0 >> 40) as f32)
}

fn chosen(hash: u64, temperature: f32, seed: u64, position: u32, vocab: u32) -> u32 {
    let mut hash = Hash(hash);
    if temperature > 0.0 {
        hash.add(seed as u32, (seed >> 32) as u32);
        hash.add(position, 0);
    }
    (hash.0 >> 32) as u32 % vocab
}

/// The first allowed token from `token` on, around the end.
pub(crate) fn nearest(token: u32, mask: &[u32], vocab: u32) -> u32 {
    let allowed = |token: &u32| mask[*token as usize / 32] >> (token % 32) & 1 == 1;
    (token..vocab).chain(0..token).find(allowed).expect("a mask allows something")
}

fn first_seen(window: Option<u32>, position: u32) -> u32 {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

fn failure(call: &str) -> Error {
    Error::Unsupported { what: format!("{call} on purpose"), backend: "fake" }
}

/// A 64-bit multiply-and-rotate hash: order and position matter, speed does.
struct Hash(u64);

impl Hash {
    fn new() -> Hash {
        Hash(0x243f_6a88_85a3_08d3)
    }

    fn add(&mut self, a: u32, b: u32) {
        let word = u64::from(a) << 32 | u64::from(b);
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
