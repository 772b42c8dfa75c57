//! A runner without a model, for the simulation and for the tests of whoever talks to an engine.
//!
//! It writes (token, position) into pages and makes the next token a hash of what it reads back through the page
//! tables. A page given to two sequences, a stale prefix, a wrong table, a lost token: each changes the hash. A state
//! is such a hash itself, carried from row to row through the states and checkpoints that the batch names.

use std::collections::VecDeque;

use fornax_compute::{
    Batch, Error, GivenRows, KvGroup, Output, PAGE_TOKENS, PageCopy, PageId, Row, RowState, SampleFault,
    SampleRow, Sampled, SplitMix64, Token,
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
    drafter: Option<Box<dyn Runner>>,
    /// How often in a hundred it chooses another token than it should.
    mistakes: Option<(SplitMix64, usize)>,
    rewinds: bool,
    feeds_back: bool,
    given: Option<usize>,
    sections: usize,
    /// By group that has pages and page.
    pages: Vec<Vec<[Entry; PAGE_TOKENS]>>,
    /// By group of states and page: the hash after each position.
    states: Vec<Vec<Vec<u64>>>,
    /// Scratch of the checks.
    seen: Vec<u32>,
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
        let paged = options.groups.iter().filter(|group| !group.kind.is_state());
        let pages = paged.map(|group| vec![[None; PAGE_TOKENS]; group.pages]).collect();
        let with_states = options.groups.iter().filter(|group| group.kind.is_state());
        let states = with_states.map(|group| vec![Vec::new(); group.pages]).collect();
        let slots = vec![None; options.limits.slots];
        Fake {
            drafter: None,
            mistakes: None,
            rewinds: !options.groups.iter().any(|group| group.kind.is_state()),
            feeds_back: true,
            given: None,
            sections: 1,
            seen: Vec::new(),
            steps: VecDeque::new(),
            options,
            pages,
            states,
            slots,
        }
    }

    /// The same, with another one that drafts for it.
    pub fn with_drafter(self, drafter: Fake) -> Fake {
        Fake { drafter: Some(Box::new(drafter)), ..self }
    }

    /// The same, choosing another token than it should so many times in a hundred.
    pub fn mistaken(self, seed: u64, percent: usize) -> Fake {
        Fake { mistakes: Some((SplitMix64(seed), percent)), ..self }
    }

    /// The same, keeping so much of every state that sequences can go back.
    pub fn rewinding(self) -> Fake {
        Fake { rewinds: true, ..self }
    }

    /// The same, not feeding sampled tokens back by itself.
    pub fn without_feedback(self) -> Fake {
        Fake { feeds_back: false, ..self }
    }

    /// The same, taking rows of this many values in place of tokens.
    pub fn with_given(self, columns: usize) -> Fake {
        Fake { given: Some(columns), ..self }
    }

    /// The same, with positions of this many sections.
    pub fn with_sections(self, sections: usize) -> Fake {
        Fake { sections, ..self }
    }

    /// What a token stands for.
    fn word(&self, token: Token, given: &GivenRows) -> u32 {
        match token {
            Token::Known(token) => token,
            Token::Sampled(slot) => {
                assert!(self.feeds_back, "a token that is not known is fed");
                self.slots[slot as usize].expect("sampled before it is fed")
            }
            Token::Given(row) => word(&given.values[row as usize * given.columns..][..given.columns]),
        }
    }

    /// Goes on with a sequence's state.
    fn advance(&mut self, group: usize, start: usize, words: &[u32], row: &RowState) {
        let mut state = match row.from {
            Some(from) => self.states[group][from.0 as usize].clone(),
            None => Vec::new(),
        };
        if self.rewinds {
            state.truncate(start);
        }
        assert_eq!(state.len(), start, "a state is of the positions before the row");
        for (position, &word) in (small(start)..).zip(words) {
            let mut hash = state.last().map_or_else(Hash::new, |&hash| Hash(hash));
            hash.add(word, position);
            state.push(hash.0);
        }
        for &(after, page) in &row.saves {
            assert_ne!(page, PageId::TRASH, "a checkpoint has a page");
            self.states[group][page.0 as usize] = state[..after as usize].to_vec();
        }
        assert_ne!(row.to, PageId::TRASH, "a state has a page");
        self.states[group][row.to.0 as usize] = state;
    }

    fn write(&mut self, row: &Row, words: &[u32]) {
        for (position, &token) in (row.start..).zip(words) {
            for (pages, table) in self.pages.iter_mut().zip(&row.pages) {
                let page = table[position as usize / PAGE_TOKENS];
                assert_ne!(page, PageId::TRASH, "a live position has a page");
                pages[page.0 as usize][position as usize % PAGE_TOKENS] = Some((token, position));
            }
        }
    }

    /// Reads everything that a query at `position` sees, group after group.
    fn read(&self, row: &Row, states: &[RowState], position: u32) -> u64 {
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
        for (pages, state) in self.states.iter().zip(states) {
            hash.add_hash(pages[state.to.0 as usize][position as usize]);
        }
        hash.0
    }

    fn layout(&self, group: usize) -> String {
        format!("fake {:?}", self.options.groups[group].kind)
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
        let limits = self.options.limits;
        batch.check(limits.tokens_max, limits.slots, &mut self.seen).expect("a batch that is right");
        assert_eq!(batch.sections.len() + 1, self.sections, "every section of the positions");
        let places = batch.rows.iter().flat_map(|row| row.start..row.start + row.len);
        let words = places.zip(&batch.tokens).enumerate().map(|(at, (place, &token))| {
            let sections = batch.sections.iter().map(|section| section[at]);
            rotated(
                self.word(token, &batch.given),
                place,
                std::iter::once(batch.positions[at]).chain(sections),
            )
        });
        let mut words: Vec<u32> = words.collect();
        let mut first = 0;
        for row in batch.rows.iter().filter(|_| !batch.lasts.is_empty()) {
            // Each reads what is behind it as it was, so the earlier ones change first.
            for at in first..first + row.len as usize {
                let behind = (batch.lasts[at] - row.start) as usize + first;
                words[at] = ahead(&words[at..=behind]);
            }
            first += row.len as usize;
        }
        let mut words = &words[..];
        let mut states = batch.states.iter();
        for row in &batch.rows {
            let (own, rest) = words.split_at(row.len as usize);
            self.write(row, own);
            for (group, state) in states.next().into_iter().flatten().enumerate() {
                self.advance(group, row.start as usize, own, state);
            }
            words = rest;
        }
        let mut hashes = Vec::new();
        for (index, row) in batch.rows.iter().enumerate() {
            let states = batch.states.get(index).map_or(&[][..], |states| states);
            assert_eq!(states.len(), self.states.len(), "a row has all its states");
            let end = row.start + row.len;
            hashes.extend((end - row.wanted..end).map(|position| self.read(row, states, position)));
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
            if let Some((dice, percent)) = &mut self.mistakes
                && dice.below(100) < *percent
            {
                token = (token + 1) % row.vocab;
            }
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

    fn feeds_back(&self) -> bool {
        self.feeds_back
    }

    fn rewinds(&self) -> bool {
        self.rewinds
    }

    fn given(&self) -> Option<usize> {
        self.given
    }

    fn sections(&self) -> usize {
        self.sections
    }

    fn drafter(&mut self) -> Option<Box<dyn Runner>> {
        self.drafter.take()
    }

    fn copy_out(&mut self, group: usize, page: PageId) -> Result<PageCopy, Error> {
        let bytes = match group.checked_sub(self.pages.len()) {
            Some(group) => {
                self.states[group][page.0 as usize].iter().flat_map(|hash| hash.to_le_bytes()).collect()
            }
            None => {
                let words =
                    |entry: &Entry| entry.map_or([u32::MAX; 2], |(token, position)| [token, position]);
                let words = self.pages[group][page.0 as usize].iter().flat_map(words);
                words.flat_map(u32::to_le_bytes).collect()
            }
        };
        Ok(PageCopy::new(&self.layout(group), bytes))
    }

    fn copy_in(&mut self, group: usize, page: PageId, copy: &PageCopy) -> Result<(), Error> {
        let bytes = copy.bytes(&self.layout(group))?;
        let words =
            bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
        match group.checked_sub(self.pages.len()) {
            Some(group) => self.states[group][page.0 as usize] = words.collect(),
            None => {
                for (entry, word) in self.pages[group][page.0 as usize].iter_mut().zip(words) {
                    let (token, position) = (word as u32, (word >> 32) as u32);
                    *entry = (position != u32::MAX).then_some((token, position));
                }
            }
        }
        Ok(())
    }
}

/// What a given row counts as, in the place of a token.
pub fn word(row: &[f32]) -> u32 {
    let mut hash = Hash::new();
    row.iter().for_each(|value| hash.add(value.to_bits(), 0));
    (hash.0 >> 32) as u32
}

/// What a token counts as that is rotated by these: the token, where they are all its place.
pub fn rotated(word: u32, place: u32, rotations: impl Iterator<Item = u32> + Clone) -> u32 {
    if rotations.clone().all(|rotation| rotation == place) {
        return word;
    }
    let mut hash = Hash::new();
    rotations.for_each(|rotation| hash.add(word, rotation));
    (hash.0 >> 32) as u32
}

/// What a token counts as that sees all of these, the first of which it is.
pub fn ahead(words: &[u32]) -> u32 {
    let [word, behind @ ..] = words else { return 0 };
    if behind.is_empty() {
        return *word;
    }
    let mut hash = Hash::new();
    behind.iter().for_each(|other| hash.add(*word, *other));
    (hash.0 >> 32) as u32
}

/// The token a [`Fake`] must choose after `tokens`, told without any pages.
pub fn next_token(tokens: &[u32], groups: &[KvGroup], temperature: f32, seed: u64, vocab: u32) -> u32 {
    let position = u32::try_from(tokens.len()).expect("short");
    chosen(seen(tokens, groups), temperature, seed, position, vocab)
}

/// How likely a [`Fake`] must call `token` after `tokens`, told without any pages.
pub fn logprob(tokens: &[u32], groups: &[KvGroup], token: u32) -> f32 {
    score(seen(tokens, groups), token)
}

/// What a [`Fake`] must make of `tokens`, told without any pages.
pub fn embedding(tokens: &[u32], groups: &[KvGroup]) -> Vec<f32> {
    parts(seen(tokens, groups))
}

/// A hash in numbers that hold it exactly.
fn parts(hash: u64) -> Vec<f32> {
    (0..4).map(|part| (hash >> (16 * part) & 0xffff) as f32).collect()
}

/// The hash of everything that the last of `tokens` sees.
fn seen(tokens: &[u32], groups: &[KvGroup]) -> u64 {
    let position = small(tokens.len() - 1);
    let mut hash = Hash::new();
    for group in groups {
        let mut state = Hash::new();
        let to = if group.kind.is_state() { &mut state } else { &mut hash };
        for seen in first_seen(group.window, position)..=position {
            to.add(tokens[seen as usize], seen);
        }
        if group.kind.is_state() {
            hash.add_hash(state.0);
        }
    }
    hash.0
}

fn small(value: usize) -> u32 {
    u32::try_from(value).expect("short")
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
        self.add_hash(word);
    }

    fn add_hash(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[cfg(test)]
mod tests {
    use fornax_compute::KvKind;

    use super::*;

    #[test]
    fn what_was_copied_out_reads_the_same_in_another_page_and_in_no_other_cache() {
        let group = |kind| KvGroup { layers: 1, kind, window: None, pages: 5 };
        let kinds = [KvKind::pairs(1, 1), KvKind::Latent { width: 1 }, KvKind::State { bytes: 1, every: 32 }];
        let limits = StepLimits { tokens_max: 64, wanted_max: 1, slots: 1 };
        let groups = kinds.map(group).to_vec();
        let mut fake = Fake::new(FakeOptions {
            groups: groups.clone(),
            limits,
            depth: 0,
            vocab: 40,
            faults: Box::new(|| None),
        });
        let tokens: Vec<u32> = (0..40).map(|token| token * 7 % 40).collect();
        let hash = |fake: &mut Fake, start: u32, end: u32, pages: [u32; 2], state: u32| {
            let table = pages.map(PageId).to_vec();
            let mut batch = Batch::default();
            let row = Row { slot: 0, start, len: end - start, pages: vec![table.clone(), table], wanted: 1 };
            batch.push(row, tokens[start as usize..end as usize].iter().map(|&token| Token::Known(token)));
            let from = (start > 0).then_some(PageId(state));
            batch.states = vec![vec![RowState { from, to: PageId(state), saves: Vec::new() }]];
            fake.launch(&batch).unwrap();
            fake.steps.pop_front().unwrap().hashes[0]
        };
        hash(&mut fake, 0, 39, [1, 2], 1);
        for (group, page, to) in [(0, 1, 3), (0, 2, 4), (1, 1, 3), (1, 2, 4), (2, 1, 2)] {
            let copy = fake.copy_out(group, PageId(page)).unwrap();
            fake.copy_in(group, PageId(to), &copy).unwrap();
            let other = fake.copy_in((group + 1) % 3, PageId(to), &copy);
            assert!(matches!(other, Err(Error::PageCopy { .. })), "group {group}: {other:?}");
        }
        let wanted = seen(&tokens, &groups);
        assert_eq!(hash(&mut fake, 39, 40, [3, 4], 2), wanted);
        let mut empty =
            Fake::new(FakeOptions { groups, limits, depth: 0, vocab: 40, faults: Box::new(|| None) })
                .rewinding();
        assert_ne!(hash(&mut empty, 0, 39, [1, 2], 1), wanted);
    }
}
