//! A smaller model that guesses what the larger one will say.
//!
//! It has a runner and pages of its own, and reads what was said as the larger model does: a guess is sampled with the
//! random numbers, parameters and form of the position that it is for, so that two models that agree about a position
//! choose the same token there. Whatever it guesses, or whether it works at all, changes no token.

use std::{collections::HashMap, sync::Arc};

use fornax_compute::{Batch, PAGE_TOKENS, Row, SampleRow, Sampling, Token};

use crate::{
    Clock, EngineOptions,
    engine::guarded,
    grammar::Grammar,
    pace::Pace,
    pages::{Pages, Tables},
    prefix::Units,
    request::Request,
    runner::Runner,
    sequence::SequenceId,
};

/// Fewest tokens that are worth a step of their own while the model catches up with a long text.
const CHUNK_MIN: usize = 16;

/// A model that drafts, and what it has read of each sequence.
pub(crate) struct DraftModel {
    runner: Box<dyn Runner>,
    pages: Pages,
    read: HashMap<SequenceId, Read>,
    /// Positions that its pages are planned for.
    context: usize,
    pace: Pace,
    clock: Clock,
}

/// What is kept of a sequence.
struct Read {
    tables: Tables,
    /// Leading tokens of the text whose keys and values are there.
    known: usize,
    /// Guesses read behind them: they stay where they become the text.
    guesses: Vec<u32>,
}

/// A sequence that wants a guess.
pub(crate) struct Wanted {
    pub(crate) id: SequenceId,
    /// Its slot, the same in both models.
    pub(crate) slot: u32,
    /// What was said so far.
    pub(crate) text: Vec<u32>,
    /// Tokens that it would like guessed.
    pub(crate) count: usize,
    pub(crate) request: Arc<Request>,
    pub(crate) seed: u64,
    /// The position of the first guessed token, which fixes its random numbers.
    pub(crate) position: usize,
    /// Tokens said so far.
    pub(crate) generated: usize,
    /// The form, as far as the text has got.
    pub(crate) form: Option<Grammar>,
    /// Whether a guess ends where the form leaves no choice.
    pub(crate) forces: bool,
}

/// What was guessed of a sequence; nothing while its text is still being read.
pub(crate) struct Guess {
    pub(crate) id: SequenceId,
    pub(crate) tokens: Vec<u32>,
}

/// A sequence whose guess is under way.
struct Guessing {
    wanted: Wanted,
    sampling: Sampling,
    tokens: Vec<u32>,
    /// What the next step reads: the text's missing tokens, then one guess after the other.
    next: Vec<u32>,
    /// Where that begins.
    start: usize,
    /// Whether its text is only read further.
    catches_up: bool,
    done: bool,
}

impl DraftModel {
    pub(crate) fn new(runner: Box<dyn Runner>, options: &EngineOptions) -> DraftModel {
        let groups = runner.groups();
        let pages = groups.iter().filter(|group| group.window.is_none()).map(|group| group.pages - 1).min();
        let context = pages.unwrap_or(usize::MAX).saturating_mul(PAGE_TOKENS).min(options.context);
        DraftModel {
            pages: Pages::new(groups),
            read: HashMap::new(),
            context,
            pace: Pace::new(0.0),
            clock: Arc::clone(&options.clock),
            runner,
        }
    }

    /// Seconds for a step and for each of its tokens, once that is known.
    pub(crate) fn pace(&self) -> Option<(f64, f64)> {
        self.pace.fit()
    }

    /// Positions that it can read.
    pub(crate) fn context(&self) -> usize {
        self.context
    }

    /// Tokens of a text of this sequence that are still to be read.
    pub(crate) fn missing(&self, id: SequenceId, text: &[u32]) -> usize {
        text.len() - self.read.get(&id).map_or(0, |read| read.agrees(text))
    }

    /// Gives back what sequences held that have no seat any more.
    pub(crate) fn retain(&mut self, seated: impl Fn(SequenceId) -> bool) {
        let gone: Vec<SequenceId> = self.read.keys().copied().filter(|&id| !seated(id)).collect();
        for id in gone {
            self.forget(id);
        }
    }

    /// Guesses what follows each of these, reading at most `chunk` tokens of a text first: one that is longer is
    /// guessed another time.
    pub(crate) fn guess(&mut self, wanted: Vec<Wanted>, chunk: usize) -> Result<Vec<Guess>, String> {
        let limits = self.runner.limits();
        let chunk = chunk.max(CHUNK_MIN);
        let mut tokens_left = limits.tokens_max;
        let mut guessing: Vec<Guessing> = Vec::new();
        for wanted in wanted {
            let longest = chunk.min(tokens_left);
            if guessing.len() == limits.wanted_max || longest == 0 {
                break;
            }
            if let Some(one) = self.begin(wanted, longest) {
                tokens_left -= one.next.len();
                guessing.push(one);
            }
        }
        while guessing.iter().any(|one| !one.done) {
            self.step(&mut guessing)?;
        }
        Ok(guessing.into_iter().map(Guessing::end).collect())
    }

    /// Covers what is about to be read, unless there is no room for it.
    fn begin(&mut self, wanted: Wanted, longest: usize) -> Option<Guessing> {
        let id = wanted.id;
        if wanted.text.len() + wanted.count > self.context {
            return None;
        }
        let units = Units { tokens: &wanted.text, pieces: &[] };
        if !self.read.contains_key(&id) {
            let (tables, known, _) = self.pages.find(None, &wanted.request.salt, units);
            self.read.insert(id, Read { tables, known, guesses: Vec::new() });
        }
        let read = self.read.get_mut(&id)?;
        read.known = read.agrees(&wanted.text).min(wanted.text.len() - 1);
        read.guesses.clear();
        let start = read.known;
        let missing = wanted.text.len() - start;
        let catches_up = missing > longest;
        let len = missing.min(longest);
        let guesses = if catches_up { 0 } else { wanted.count - 1 };
        if !self.pages.grow(&mut read.tables, start + len + guesses) {
            self.forget(id);
            return None;
        }
        let next = wanted.text[start..start + len].to_vec();
        let sampling = Sampling { top_logprobs: None, ..wanted.request.sampling.clone() };
        Some(Guessing { wanted, sampling, tokens: Vec::new(), next, start, catches_up, done: false })
    }

    /// Computes what each reads next, and one token of each guess.
    fn step(&mut self, guessing: &mut [Guessing]) -> Result<(), String> {
        let mut batch = Batch::default();
        batch.sections.resize(self.runner.sections() - 1, Vec::new());
        let mut under_way: Vec<&mut Guessing> = guessing.iter_mut().filter(|one| !one.done).collect();
        // A form that gives up ends its own guess; the others go on.
        let mut masks = Vec::with_capacity(under_way.len());
        under_way.retain_mut(|one| match one.mask() {
            Ok(mask) => {
                masks.push(mask);
                true
            }
            Err(_) => {
                one.done = true;
                false
            }
        });
        if under_way.is_empty() {
            return Ok(());
        }
        for one in &under_way {
            let read = self.read.get_mut(&one.wanted.id).expect("begun");
            let row = Row {
                slot: one.wanted.slot,
                start: small(one.start),
                len: small(one.next.len()),
                pages: read.tables.lend(),
                wanted: u32::from(!one.catches_up),
            };
            batch.push(row, one.next.iter().copied().map(Token::Known));
            batch.adapters.push(None);
        }
        let positions = batch.positions.clone();
        batch.sections.iter_mut().for_each(|section| section.clone_from(&positions));
        let began = (self.clock)();
        let asked: Vec<usize> = (0..under_way.len()).filter(|&at| !under_way[at].catches_up).collect();
        let texts: Vec<Vec<u32>> = asked.iter().map(|&at| under_way[at].history()).collect();
        let inputs = asked.iter().zip(&texts).zip(0..);
        let inputs: Vec<SampleRow<'_>> = inputs
            .map(|((&at, text), wanted)| {
                under_way[at].input(wanted, text, masks[at].as_deref(), self.runner.vocab())
            })
            .collect();
        let computed = guarded(|| {
            self.runner.launch(&batch)?;
            self.runner.sample(&inputs)?;
            self.runner.collect()
        });
        for (one, row) in under_way.iter().zip(batch.rows) {
            self.read.get_mut(&one.wanted.id).expect("begun").tables.take_back(row.pages);
        }
        drop(inputs);
        let output = computed.map_err(|failed| failed.failure.to_string())?;
        let elapsed = (self.clock)().saturating_sub(began);
        self.pace.observe(batch.tokens.len(), elapsed.as_secs_f64());
        if output.sampled.len() != asked.len() {
            return Err(format!("{} answers to {} questions", output.sampled.len(), asked.len()));
        }
        for one in &mut under_way {
            let read = self.read.get_mut(&one.wanted.id).expect("begun");
            let end = one.start + one.next.len();
            if one.tokens.is_empty() {
                // The text: whatever is guessed behind it, this was said.
                read.known = end;
                self.pages.commit(&mut read.tables, Units { tokens: &one.wanted.text[..end], pieces: &[] });
            } else {
                read.guesses.append(&mut one.next);
            }
            one.start = end;
            one.done = one.catches_up;
        }
        for (at, answer) in asked.into_iter().zip(output.sampled) {
            match answer.fault {
                None => under_way[at].take(answer.token),
                // It may see another fault than the larger model, or one where that has none.
                Some(_) => under_way[at].done = true,
            }
        }
        Ok(())
    }

    fn forget(&mut self, id: SequenceId) {
        if let Some(read) = self.read.remove(&id) {
            self.pages.release(read.tables);
        }
    }

    /// Checks the books.
    pub(crate) fn assert_consistent(&self) {
        self.pages.assert_consistent();
    }

    /// Pages that some sequence has.
    pub(crate) fn referenced(&self) -> usize {
        self.pages.counts().iter().map(|group| group.referenced).sum()
    }
}

impl Read {
    /// Leading tokens of this text whose keys and values are there.
    fn agrees(&self, text: &[u32]) -> usize {
        let behind = text.get(self.known..).unwrap_or_default();
        let same = behind.iter().zip(&self.guesses).take_while(|(said, guessed)| said == guessed);
        self.known.min(text.len()) + same.count()
    }
}

impl Guessing {
    /// What stands before the token that is guessed next, if a parameter looks at it.
    fn history(&self) -> Vec<u32> {
        if !self.sampling.needs_history() {
            return Vec::new();
        }
        [&self.wanted.text[..], &self.tokens].concat()
    }

    /// What the form allows there.
    /// Which tokens the form allows next, where there is a form and a token is guessed.
    fn mask(&mut self) -> Result<Option<Vec<u32>>, String> {
        if self.catches_up {
            return Ok(None);
        }
        self.wanted.form.as_mut().map(|form| form.mask()).transpose()
    }

    fn input<'a>(
        &'a self,
        wanted: u32,
        history: &'a [u32],
        mask: Option<&'a [u32]>,
        vocab: u32,
    ) -> SampleRow<'a> {
        let guessed = self.tokens.len();
        SampleRow {
            wanted,
            slot: self.wanted.slot,
            position: small(self.wanted.position + guessed),
            seed: self.wanted.seed,
            vocab,
            sampling: &self.sampling,
            history,
            generated: small(self.wanted.generated + guessed),
            mask,
            given: None,
            mirostat_mu: self.sampling.mirostat_start(),
        }
    }

    /// Takes a guessed token; the guess is over where nothing can follow it.
    fn take(&mut self, token: u32) {
        self.tokens.push(token);
        self.next = vec![token];
        self.done = self.tokens.len() >= self.wanted.count || self.sampling.end_tokens.contains(&token);
        if let Some(form) = &mut self.wanted.form
            && !self.done
        {
            self.done = goes_on(form, token, self.wanted.forces).is_none();
        }
    }

    fn end(self) -> Guess {
        Guess { id: self.wanted.id, tokens: self.tokens }
    }
}

/// Moves a copy of a form on by a guessed token. `None` where the guess ends with it: the form refuses it or is over
/// behind it, or `forces` the next token, which nobody is asked about.
pub(crate) fn goes_on(form: &mut Grammar, token: u32, forces: bool) -> Option<()> {
    form.accept(token).ok()?;
    let ends = form.is_over() || forces && !form.forced().is_empty();
    (!ends).then_some(())
}

/// How many tokens of a guess can be asked about one after the other under a form.
pub(crate) fn fitting(form: &Grammar, guess: &[u32], end_tokens: &[u32], forces: bool) -> usize {
    let mut form = form.copied();
    for (index, &token) in guess.iter().enumerate() {
        // What ends the answer is asked about, but nothing follows it.
        if end_tokens.contains(&token) {
            return index;
        }
        if goes_on(&mut form, token, forces).is_none() {
            return index;
        }
    }
    guess.len()
}

fn small(value: usize) -> u32 {
    u32::try_from(value).expect("positions are bounded by the context")
}
