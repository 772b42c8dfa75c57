//! Seeded lives of an engine: arrivals, cancels, faults, tiny pools, windows, priorities, every depth.
//!
//! A life is a function of its seed, so a failure replays. It ends by checking that every request ended exactly once,
//! that every token is the one the pages should have yielded, and that every page and slot is back.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use fornax_compute::{KvGroup, KvKind, PAGE_TOKENS, PageCopy, Sampling, SplitMix64};

use crate::{
    ContentHash, EndReason, Engine, EngineOptions, Event, Fetched, Grammar, Handle, PageName, Piece,
    QueueLimits, Refusal, Reply, Request, Speculation, StepLimits, Tier, TierStats, Turn,
    automaton::{Automaton, State},
    fake::{Fake, FakeOptions, Fault, ahead, embedding, logprob, nearest, next_token, rotated, word},
};

/// What a life was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Life {
    /// Turns of the loop.
    pub turns: u64,
    /// Choices that were let in.
    pub admitted: u64,
    /// Requests refused because the queue was full.
    pub refused: u64,
    /// Choices that ended with an answer.
    pub answered: u64,
    /// Choices whose reply was dropped.
    pub cancelled: u64,
    /// Choices that failed, on purpose.
    pub failed: u64,
    /// Tokens checked.
    pub tokens: u64,
    /// Prompt tokens whose log-probability was checked.
    pub scored: u64,
    /// Prompts whose embedding was checked.
    pub embedded: u64,
    /// Tokens computed ahead because they were guessed.
    pub drafted: u64,
    /// Of those, the ones that were right.
    pub accepted: u64,
    /// Tokens computed ahead because a model guessed them.
    pub drafted_by_model: u64,
    /// Of those, the ones that were right.
    pub accepted_by_model: u64,
    /// Models that drafted until they failed.
    pub drafters_failed: u64,
    /// Tokens checked under a form.
    pub formed: u64,
    /// Prompt tokens that came from the prefix cache.
    pub cached: u64,
    /// Of those, the ones whose pages were kept elsewhere and brought back.
    pub restored: u64,
    /// Sequences preempted.
    pub preemptions: u64,
    /// Tokens checked where a state is kept.
    pub stateful: u64,
    /// Prompt tokens that came from the prefix cache where a state is kept.
    pub checkpointed: u64,
    /// Tokens checked behind given content.
    pub given: u64,
    /// Those of them behind content that is read in both directions.
    pub whole: u64,
}

impl Life {
    /// Adds another life's counts.
    pub fn add(&mut self, other: &Life) {
        let mine = [
            &mut self.turns,
            &mut self.admitted,
            &mut self.refused,
            &mut self.answered,
            &mut self.cancelled,
            &mut self.failed,
            &mut self.tokens,
            &mut self.scored,
            &mut self.embedded,
            &mut self.drafted,
            &mut self.accepted,
            &mut self.drafted_by_model,
            &mut self.accepted_by_model,
            &mut self.drafters_failed,
            &mut self.formed,
            &mut self.cached,
            &mut self.restored,
            &mut self.preemptions,
            &mut self.stateful,
            &mut self.checkpointed,
            &mut self.given,
            &mut self.whole,
        ];
        let theirs = [
            other.turns,
            other.admitted,
            other.refused,
            other.answered,
            other.cancelled,
            other.failed,
            other.tokens,
            other.scored,
            other.embedded,
            other.drafted,
            other.accepted,
            other.drafted_by_model,
            other.accepted_by_model,
            other.drafters_failed,
            other.formed,
            other.cached,
            other.restored,
            other.preemptions,
            other.stateful,
            other.checkpointed,
            other.given,
            other.whole,
        ];
        for (mine, theirs) in mine.into_iter().zip(theirs) {
            *mine += theirs;
        }
    }
}

/// The token that ends an answer in a life.
const END_TOKEN: u32 = 3;

/// Tokens of a life: each is one character, but for the end token.
const VOCAB: u32 = 40;

/// A form with choices, forced stretches and more than one place to end: `([E-J]{1,12}XYZ)+(KLM[NO]?)?`, where A is
/// token 0.
static FORM: LazyLock<Grammar> = LazyLock::new(|| {
    const LETTERS: usize = 12;
    let token = |letter: u8| u32::from(letter - b'A');
    let edge = |from: u8, to: u8, next: usize| (token(from)..=token(to), next);
    let state = |edges: Vec<_>, may_end| State { edges, may_end };
    // As many states as letters were written; from the first on, X may follow.
    let (x, after_x, k) = (LETTERS + 1, LETTERS + 3, LETTERS + 4);
    let mut states = vec![state(vec![edge(b'E', b'J', 1)], false)];
    for written in 1..LETTERS {
        states.push(state(vec![edge(b'E', b'J', written + 1), edge(b'X', b'X', x)], false));
    }
    states.extend([
        state(vec![edge(b'X', b'X', x)], false),
        state(vec![edge(b'Y', b'Y', x + 1)], false),
        state(vec![edge(b'Z', b'Z', after_x)], false),
        state(vec![edge(b'E', b'J', 1), edge(b'K', b'K', k)], true),
        state(vec![edge(b'L', b'L', k + 1)], false),
        state(vec![edge(b'M', b'M', k + 2)], false),
        state(vec![edge(b'N', b'O', k + 3)], true),
        state(Vec::new(), true),
    ]);
    Box::new(Automaton::new(states, END_TOKEN, VOCAB))
});

/// Lives through `arrivals` requests. Panics, naming what is wrong, if anything is.
pub fn live(seed: u64, arrivals: usize) -> Life {
    let mut dice = Dice::new(seed);
    let world = World::roll(&mut dice);
    let mut life = Life::default();
    match &world.shelf {
        None => life_of(&world, seed, &mut dice, arrivals, &mut life),
        Some(_) => {
            // What one engine kept is there for the next one.
            life_of(&world, seed, &mut dice, arrivals / 2, &mut life);
            life_of(&world, seed ^ 0x5eed, &mut dice, arrivals - arrivals / 2, &mut life);
        }
    }
    life
}

/// The life of one engine.
fn life_of(world: &World, seed: u64, dice: &mut Dice, arrivals: usize, life: &mut Life) {
    let (mut engine, handle) = world.engine(seed);
    let admitted_before = life.admitted;
    let mut open: Vec<Watched> = Vec::new();
    let mut left = arrivals;
    loop {
        while left > 0 && dice.chance(world.arrival_percent) {
            left -= 1;
            world.submit(dice, &handle, &mut open, life);
        }
        let turn = engine.turn();
        life.turns += 1;
        open.retain_mut(|watched| watched.read(world, life));
        if dice.chance(world.cancel_percent) && !open.is_empty() {
            let gone = open.swap_remove(dice.below(open.len()));
            life.cancelled += 1;
            drop(gone);
        }
        if life.turns.is_multiple_of(64) {
            engine.assert_consistent();
        }
        if turn == Turn::Idle && left == 0 {
            break;
        }
    }
    assert!(open.is_empty(), "{} choices never ended", open.len());
    engine.assert_consistent();
    let stats = handle.stats();
    assert_eq!((stats.running, stats.preempted, stats.requests_waiting, stats.tokens_waiting), (0, 0, 0, 0));
    assert!(stats.pages.iter().all(|pages| pages.referenced == 0), "pages left behind: {:?}", stats.pages);
    let ended = stats.ended;
    assert_eq!(
        ended.end_token + ended.form_complete + ended.length + ended.cancelled + ended.failed,
        life.admitted - admitted_before,
        "every choice ends exactly once"
    );
    life.drafted += stats.drafted_tokens;
    life.accepted += stats.accepted_tokens;
    if let Some(drafter) = stats.draft_model {
        life.drafted_by_model += drafter.drafted_tokens;
        life.accepted_by_model += drafter.accepted_tokens;
        life.drafters_failed += u64::from(drafter.failed.is_some());
    }
    life.preemptions += stats.preemptions;
    life.restored += stats.prefix_restored;
    drop(handle);
    engine.run();
}

/// The fixed part of a life.
struct World {
    groups: Vec<KvGroup>,
    limits: StepLimits,
    depth: usize,
    vocab: u32,
    context: usize,
    queue: QueueLimits,
    /// How often a drafted token is not guessed but rolled; 100 and more drafts nothing.
    wrong_draft_percent: u32,
    /// A model that drafts, if there is one.
    drafter: Option<Drafter>,
    /// Where copies of pages are kept, if they are.
    shelf: Option<Shelf>,
    fault_percent: u32,
    cancel_percent: u32,
    arrival_percent: u32,
    /// Sections of a position.
    sections: usize,
    /// Whether sequences can go back although there are states.
    rewinds: bool,
    /// Whether sampled tokens are fed back by the runner.
    feeds_back: bool,
    /// Prompts begin with a piece of one of these, so that prefixes are shared.
    stories: Vec<Story>,
}

/// A model that drafts in a life. It sees what the other one sees, as far as its pages are of the same kinds.
#[derive(Clone, Copy)]
struct Drafter {
    /// How often it guesses another token than it should.
    wrong_percent: usize,
    /// How often one of its steps fails, which is the end of it.
    fault_percent: u32,
    pages: usize,
    tokens_max: usize,
}

/// Keeps copies of pages in memory, and is no better than a disk: copies get lost, or come back as something else.
struct Shelf {
    copies: Arc<Mutex<HashMap<PageName, PageCopy>>>,
    lost_percent: u32,
    broken_percent: u32,
    /// How often it takes no more.
    busy_percent: u32,
    /// How often it is asked before it answers.
    delay: usize,
}

impl Shelf {
    fn tier(&self, seed: u64) -> Box<dyn Tier> {
        let shelf = Shelf { copies: Arc::clone(&self.copies), ..*self };
        Box::new(Shelved {
            shelf,
            dice: RefCell::new(Dice::new(seed ^ 0x7e)),
            asked: VecDeque::new(),
            tickets: 0,
        })
    }
}

/// A [`Shelf`] in one engine's hands.
struct Shelved {
    shelf: Shelf,
    dice: RefCell<Dice>,
    /// What was asked for, and how often it is still put off.
    asked: VecDeque<(u64, Vec<PageName>, usize)>,
    tickets: u64,
}

impl Shelved {
    fn copies(&self) -> MutexGuard<'_, HashMap<PageName, PageCopy>> {
        self.shelf.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tier for Shelved {
    fn holds(&self, name: &PageName) -> bool {
        self.copies().contains_key(name)
    }

    fn keep(&mut self, name: PageName, copy: PageCopy) {
        assert!(self.copies().insert(name, copy).is_none(), "a page is copied once");
    }

    fn takes(&self) -> bool {
        !self.dice.borrow_mut().chance(self.shelf.busy_percent)
    }

    fn fetch(&mut self, names: Vec<PageName>) -> u64 {
        assert!(!names.is_empty(), "nothing is not asked for");
        self.tickets += 1;
        self.asked.push_back((self.tickets, names, self.shelf.delay));
        self.tickets
    }

    fn arrived(&mut self, _: Duration) -> Option<Fetched> {
        let (_, _, delay) = self.asked.front_mut()?;
        if *delay > 0 {
            *delay -= 1;
            return None;
        }
        let (ticket, names, _) = self.asked.pop_front()?;
        let pages = names.iter().map(|name| {
            let mut dice = self.dice.borrow_mut();
            let copy = self.copies().get(name).cloned().filter(|_| !dice.chance(self.shelf.lost_percent))?;
            let (bytes, fingerprint) = copy.parts();
            let mut bytes = bytes.to_vec();
            if dice.chance(self.shelf.broken_percent) {
                let at = dice.below(bytes.len());
                bytes[at] ^= 1 << dice.below(8);
            }
            Some(PageCopy::from_parts(bytes, fingerprint))
        });
        let pages = pages.collect();
        Some(Fetched { ticket, pages })
    }

    fn seconds(&self, _: usize) -> Option<f64> {
        None
    }

    fn stats(&self) -> TierStats {
        TierStats { name: "shelf", pages: self.copies().len() as u64, ..TierStats::default() }
    }
}

/// What prompts begin with.
struct Story {
    tokens: Vec<u32>,
    /// Images for one place in it, of the same length: their placeholders are the same.
    images: [Piece; 2],
}

/// Values of a given row in a life.
const COLUMNS: usize = 2;

impl Story {
    fn roll(dice: &mut Dice, context: usize, sections: usize, whole_max: usize) -> Story {
        let tokens: Vec<u32> = (0..context).map(|_| dice.token(VOCAB)).collect();
        let (at, rows) = (dice.below(context), dice.between(1, 40));
        let rows = rows.min(context - at);
        let spread = dice.chance(50);
        let whole = rows <= whole_max && dice.chance(50);
        let mut image = |hash| Piece {
            at,
            hash: ContentHash([hash; 16]),
            columns: COLUMNS,
            rows: (0..rows * COLUMNS).map(|_| dice.below(1 << 20) as f32).collect(),
            offsets: match spread {
                true => (0..sections).map(|_| (0..rows).map(|_| dice.below(rows) as u32).collect()).collect(),
                false => Vec::new(),
            },
            whole,
        };
        let images = [image(1), image(2)];
        Story { tokens, images }
    }
}

/// What is read stands for: tokens, in the place of some what is given, each with what it is rotated by.
fn words(request: &Request, tokens: &[u32], sections: usize) -> Vec<u32> {
    let mut words = tokens.to_vec();
    for piece in &request.pieces {
        for position in piece.positions() {
            words[position] = word(piece.row(position));
        }
    }
    // Told place by place, from what an image's offsets mean: it may take fewer positions than it has rows.
    let mut saved = 0;
    let mut pieces = request.pieces.iter().peekable();
    for (place, word) in words.iter_mut().enumerate() {
        let mut rotations = vec![place - saved; sections];
        if let Some(piece) = pieces.peek().filter(|piece| piece.at <= place && !piece.offsets.is_empty()) {
            let begin = piece.at - saved;
            let row = place - piece.at;
            rotations = piece.offsets.iter().map(|section| begin + section[row] as usize).collect();
            if place + 1 == piece.positions().end {
                let span = piece.offsets.iter().flatten().max().map_or(0, |&last| last as usize + 1);
                saved += piece.positions().len() - span;
                pieces.next();
            }
        }
        let small = |value: usize| u32::try_from(value).expect("short");
        *word = rotated(*word, small(place), rotations.iter().map(|&rotation| small(rotation)));
    }
    for own in request.pieces.iter().filter(|piece| piece.whole).map(Piece::positions) {
        for place in own.clone() {
            words[place] = ahead(&words[place..own.end]);
        }
    }
    words
}

impl World {
    fn roll(dice: &mut Dice) -> World {
        let context = dice.between(40, 260);
        let pages_needed = context.div_ceil(PAGE_TOKENS);
        let pages = 1 + pages_needed + dice.below(3 * pages_needed);
        let limits = StepLimits {
            tokens_max: dice.between(1, 120),
            wanted_max: dice.between(1, 8),
            slots: dice.between(1, 9),
        };
        let whole_max = limits.tokens_max.saturating_sub(limits.slots - 1);
        let kinds = [
            KvKind::pairs(1, 1),
            KvKind::Pairs { heads: 1, dim_k: 3, dim_v: 2 },
            KvKind::Latent { width: 5 },
        ];
        let kind = *dice.pick(&kinds);
        let group = |window, pages| KvGroup { layers: 1, kind, window, pages };
        let mut groups = vec![group(None, pages)];
        if dice.chance(50) {
            let window = u32::try_from(dice.between(1, 90)).expect("small");
            // What a window and one step can hold at once, or more.
            let least = 2 + (window as usize + limits.tokens_max).div_ceil(PAGE_TOKENS) + 1;
            groups.push(group(Some(window), least + dice.below(pages)));
        }
        if dice.chance(40) {
            // Down to two of them, whatever the slots.
            let kind = KvKind::State { bytes: 8, every: PAGE_TOKENS * dice.between(1, 4) };
            groups.push(KvGroup { layers: 1, kind, window: None, pages: dice.between(3, 20) });
        }
        let sections = if dice.chance(30) { 3 } else { 1 };
        World {
            groups,
            sections,
            limits,
            depth: dice.below(3),
            rewinds: dice.chance(50),
            feeds_back: dice.chance(80),
            vocab: VOCAB,
            context,
            queue: QueueLimits {
                requests_max: dice.between(3, 40),
                tokens_max: dice.between(context, 20 * context),
            },
            wrong_draft_percent: [5, 40, 90, 100][dice.below(4)],
            drafter: dice.chance(40).then(|| Drafter {
                wrong_percent: *dice.pick(&[0, 20, 60]),
                fault_percent: *dice.pick(&[0, 0, 1]),
                pages: 1 + dice.between(1, 3 * pages_needed),
                tokens_max: dice.between(1, 120),
            }),
            shelf: dice.chance(40).then(|| Shelf {
                copies: Arc::default(),
                lost_percent: *dice.pick(&[0, 0, 10, 50]),
                broken_percent: *dice.pick(&[0, 0, 10]),
                busy_percent: *dice.pick(&[0, 30]),
                delay: dice.below(4),
            }),
            fault_percent: if dice.chance(30) { 3 } else { 0 },
            cancel_percent: if dice.chance(50) { 10 } else { 0 },
            arrival_percent: u32::try_from(dice.between(5, 70)).expect("small"),
            stories: (0..3).map(|_| Story::roll(dice, context, sections, whole_max)).collect(),
        }
    }

    fn has_states(&self) -> bool {
        self.groups.iter().any(|group| group.kind.is_state())
    }

    fn engine(&self, seed: u64) -> (Engine, Handle) {
        let mut dice = Dice::new(seed ^ 0x0fau64);
        let percent = self.fault_percent;
        let faults = move || {
            let kinds = [Fault::Launch, Fault::Sample, Fault::Collect, Fault::Panic, Fault::NotANumber];
            dice.chance(percent).then(|| kinds[dice.below(kinds.len())])
        };
        let fake = Fake::new(FakeOptions {
            groups: self.groups.clone(),
            limits: self.limits,
            depth: self.depth,
            vocab: self.vocab,
            faults: Box::new(faults),
        })
        .with_given(COLUMNS)
        .with_sections(self.sections);
        let fake = if self.rewinds { fake.rewinding() } else { fake };
        let fake = if self.feeds_back { fake } else { fake.without_feedback() };
        let fake = match self.drafter {
            Some(drafter) => fake.with_drafter(self.drafter(&drafter, seed)),
            None => fake,
        };
        let options = EngineOptions {
            queue: self.queue,
            speculation: self.speculation(seed),
            tier: self.shelf.as_ref().map(|shelf| shelf.tier(seed)),
            ..EngineOptions::new(self.context, Arc::new(|| Duration::from_secs(1)))
        };
        Engine::new(Box::new(fake), options)
    }

    fn drafter(&self, drafter: &Drafter, seed: u64) -> Fake {
        let (mut dice, percent) = (Dice::new(seed ^ 0x00d4), drafter.fault_percent);
        let faults = move || {
            let kinds = [Fault::Launch, Fault::Sample, Fault::Collect, Fault::Panic, Fault::DeviceLost];
            dice.chance(percent).then(|| kinds[dice.below(kinds.len())])
        };
        let mut groups = self.groups.clone();
        groups.retain(|group| !group.kind.is_state());
        groups[0].pages = drafter.pages;
        let limits = StepLimits { tokens_max: drafter.tokens_max, ..self.limits };
        // A window sees what its step holds, too.
        for group in groups.iter_mut().filter(|group| group.window.is_some()) {
            group.pages += drafter.tokens_max;
        }
        let (depth, vocab, faults) = (0, self.vocab, Box::new(faults));
        let fake = Fake::new(FakeOptions { groups, limits, depth, vocab, faults });
        fake.with_sections(self.sections).mistaken(seed ^ 0xbad, drafter.wrong_percent)
    }

    /// Drafts what a greedy request would choose, with mistakes.
    fn speculation(&self, seed: u64) -> Speculation {
        if self.drafter.is_some() {
            return Speculation::AlwaysByModel;
        }
        if self.wrong_draft_percent >= 100 {
            return Speculation::Off;
        }
        let (mut dice, percent, vocab) = (Dice::new(seed ^ 0xd4af), self.wrong_draft_percent, self.vocab);
        let groups = self.groups.clone();
        Speculation::Always(Box::new(move |tokens, count| {
            let mut all = tokens.to_vec();
            for _ in 0..dice.below(count + 1) {
                let right = next_token(&all, &groups, 0.0, 0, vocab);
                all.push(if dice.chance(percent) { dice.token(vocab) } else { right });
            }
            all.split_off(tokens.len())
        }))
    }

    fn submit(&self, dice: &mut Dice, handle: &Handle, open: &mut Vec<Watched>, life: &mut Life) {
        let prompt_len = dice.between(1, self.context - 1);
        let shared = dice.below(prompt_len + 1);
        let story = &self.stories[dice.below(self.stories.len())];
        let mut prompt = story.tokens[..shared].to_vec();
        prompt.extend((shared..prompt_len).map(|_| dice.token(self.vocab)));
        let image = dice.pick(&story.images);
        let whole = image.positions().end <= shared;
        let pieces: Vec<Piece> = (whole && dice.chance(60)).then(|| image.clone()).into_iter().collect();
        let embeds = dice.chance(10);
        let prompt_logprobs = (!embeds && pieces.is_empty() && dice.chance(15)).then_some(0);
        let only_scores = prompt_logprobs.is_some() && prompt_len > 1 && dice.chance(30);
        let only_looks = embeds || only_scores;
        let max_tokens = if only_looks { 0 } else { dice.between(1, self.context - prompt_len) };
        let sampling = Sampling {
            temperature: if dice.chance(50) { 1.0 } else { 0.0 },
            end_tokens: vec![END_TOKEN],
            ..Sampling::greedy()
        };
        let request = Request {
            seed: dice.any(),
            pieces,
            embeds,
            prompt_logprobs,
            grammar: (dice.chance(25) && !only_looks).then(|| FORM.clone()),
            choices: if dice.chance(20) && !only_looks { 3 } else { 1 },
            priority: [0, 0, 0, -1, 1][dice.below(5)],
            salt: ["", "", "tenant"][dice.below(3)].into(),
            owner: [None, Some("one"), Some("two")][dice.below(3)].map(Arc::from),
            ..Request::new(prompt, max_tokens, sampling)
        };
        match handle.submit(request.clone()) {
            Ok(replies) => {
                life.admitted += replies.len() as u64;
                open.extend(replies.into_iter().enumerate().map(|(choice, reply)| Watched {
                    reply,
                    scores: if choice == 0 && prompt_logprobs.is_some() { prompt_len - 1 } else { 0 },
                    scored: 0,
                    embedded: false,
                    tokens: request.prompt.clone(),
                    seed: None,
                    form: request.grammar.clone(),
                    forced: VecDeque::new(),
                    request: request.clone(),
                }));
            }
            // Full now, or too small for this even when it is empty.
            Err(
                Refusal::QueueFull { .. } | Refusal::ShareFull { .. } | Refusal::Parameter { name: "n", .. },
            ) => life.refused += 1,
            Err(other) => panic!("refused without a reason: {other}"),
        }
    }
}

/// A choice as its caller sees it.
struct Watched {
    reply: Reply,
    request: Request,
    tokens: Vec<u32>,
    seed: Option<u64>,
    /// Prompt tokens whose log-probabilities must come.
    scores: usize,
    /// Those that have come.
    scored: usize,
    /// Its embedding has come.
    embedded: bool,
    /// A copy of the form, moved along with the answer.
    form: Option<Grammar>,
    /// What the form forces next.
    forced: VecDeque<u32>,
}

impl Watched {
    /// Reads what has come; `false` once the last event has.
    fn read(&mut self, world: &World, life: &mut Life) -> bool {
        while let Some(event) = self.reply.try_recv() {
            match event {
                Event::Started { seed, cached_tokens, .. } => {
                    assert!(self.seed.replace(seed).is_none(), "started twice");
                    life.cached += cached_tokens as u64;
                    life.checkpointed += if world.has_states() { cached_tokens as u64 } else { 0 };
                    self.forced = self.form.as_mut().map(|form| form.forced()).unwrap_or_default().into();
                }
                Event::Scored { token, logprob, .. } => self.check_score(token, logprob, world, life),
                Event::Token { token, .. } => self.check(token, world, life),
                Event::Embedding(values) => {
                    assert!(self.request.embeds && !self.embedded, "an embedding that nobody asked for");
                    assert_eq!(values, embedding(&self.words(world), &world.groups), "an embedding");
                    self.embedded = true;
                    life.embedded += 1;
                }
                Event::End { reason, usage } => {
                    let generated = self.tokens.len() - self.request.prompt.len();
                    assert_eq!(usage.generated_tokens, generated, "usage counts what was sent");
                    assert_eq!(self.scored, self.scores, "every token of the prompt is told once");
                    assert_eq!(self.embedded, self.request.embeds, "an embedding comes if it was asked for");
                    self.check_end(reason, generated);
                    life.answered += 1;
                    return self.nothing_follows();
                }
                Event::Failed(_) => {
                    assert!(world.fault_percent > 0, "failed without a fault: {event:?}");
                    life.failed += 1;
                    return self.nothing_follows();
                }
            }
        }
        true
    }

    /// What it has read so far.
    fn words(&self, world: &World) -> Vec<u32> {
        words(&self.request, &self.tokens, world.sections)
    }

    fn check_score(&mut self, token: u32, score: f32, world: &World, life: &mut Life) {
        let (before, rest) = self.request.prompt.split_at(self.scored + 1);
        assert_eq!(Some(&token), rest.first(), "prompt tokens come in order");
        assert_eq!(score, logprob(before, &world.groups, token), "position {} of the prompt", self.scored);
        self.scored += 1;
        life.scored += 1;
    }

    fn check(&mut self, token: u32, world: &World, life: &mut Life) {
        let seed = self.seed.expect("started before its first token");
        let temperature = self.request.sampling.temperature;
        let mut wanted = next_token(&self.words(world), &world.groups, temperature, seed, world.vocab);
        if let Some(form) = &mut self.form {
            let forced = self.forced.pop_front();
            wanted = forced.unwrap_or_else(|| {
                nearest(wanted, form.mask().expect("within its limits").as_slice(), world.vocab)
            });
            if wanted != END_TOKEN {
                form.accept(wanted).expect("allowed by the mask");
            }
            if forced.is_none() {
                self.forced = form.forced().into();
            }
        }
        assert_eq!(token, wanted, "token {} of a choice is not what its pages hold", self.tokens.len());
        assert!(
            self.tokens.len() < self.request.prompt.len() + self.request.max_tokens,
            "more than max_tokens"
        );
        self.tokens.push(token);
        life.tokens += 1;
        life.formed += u64::from(self.form.is_some());
        life.stateful += u64::from(world.has_states());
        life.given += u64::from(!self.request.pieces.is_empty());
        life.whole += u64::from(self.request.pieces.iter().any(|piece| piece.whole));
    }

    fn check_end(&mut self, reason: EndReason, generated: usize) {
        let full = generated == self.request.max_tokens;
        let ended = self.tokens.last() == Some(&END_TOKEN) && generated > 0;
        let whole = self.form.as_mut().map(|form| form.may_end());
        let right = match reason {
            EndReason::EndToken => ended && whole != Some(false),
            EndReason::Length => full && whole.is_none(),
            EndReason::FormComplete => whole == Some(true),
            EndReason::FormTruncated => full && whole == Some(false),
            EndReason::Cancelled => false,
        };
        assert!(
            right,
            "ended by {reason:?} after {generated} of {} tokens, whole: {whole:?}",
            self.request.max_tokens
        );
    }

    fn nothing_follows(&mut self) -> bool {
        assert_eq!(self.reply.try_recv(), None, "an event after the last");
        false
    }
}

/// Decisions that a seed repeats.
pub struct Dice(SplitMix64);

impl Dice {
    /// The decisions of this seed.
    pub fn new(seed: u64) -> Dice {
        Dice(SplitMix64(seed))
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0.bits()
    }

    /// Below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound)
    }

    /// `low` to `high`, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// True so many times in a hundred.
    pub fn chance(&mut self, percent: u32) -> bool {
        self.below(100) < percent as usize
    }

    /// One of them.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }

    /// Puts them in another order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, self.below(index + 1));
        }
    }

    fn token(&mut self, vocab: u32) -> u32 {
        u32::try_from(self.below(vocab as usize)).expect("below a u32")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    };

    use super::*;

    #[test]
    fn whatever_happens_nothing_is_lost_and_every_token_is_right() {
        let mut all = Life::default();
        for seed in 0..400 {
            let life =
                std::panic::catch_unwind(|| live(seed, 30)).unwrap_or_else(|_| panic!("seed {seed} failed"));
            all.add(&life);
        }
        // The lives together must have met what they are for.
        assert!(
            all.preemptions > 100 && all.cached > 1000 && all.failed > 50 && all.cancelled > 50,
            "{all:?}"
        );
        assert!(all.refused > 10 && all.answered > 1000, "{all:?}");
        assert!(all.stateful > 1000 && all.checkpointed > 1000 && all.given > 1000, "{all:?}");
        assert!(all.whole > 300, "{all:?}");
        assert!(all.restored > 1000, "{all:?}");
        assert!(all.drafted_by_model > 1000 && all.drafters_failed > 5 && all.formed > 1000, "{all:?}");
        assert!(
            all.accepted_by_model > 1000 && all.drafted_by_model > all.accepted_by_model + 1000,
            "{all:?}"
        );
        assert!(all.scored > 1000 && all.accepted > 1000 && all.drafted > 2 * all.accepted, "{all:?}");
    }

    /// A quiet engine with room for one sequence at a time.
    fn narrow() -> (Engine, Handle) {
        let world = World {
            groups: vec![KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 8 }],
            limits: StepLimits { tokens_max: 16, wanted_max: 1, slots: 1 },
            depth: 1,
            sections: 1,
            rewinds: true,
            feeds_back: true,
            vocab: 40,
            context: 64,
            queue: QueueLimits { requests_max: 2000, tokens_max: 100_000 },
            wrong_draft_percent: 100,
            drafter: None,
            shelf: None,
            fault_percent: 0,
            cancel_percent: 0,
            arrival_percent: 0,
            stories: Vec::new(),
        };
        world.engine(0)
    }

    fn request(priority: i8) -> Request {
        Request { priority, ..Request::new(vec![1, 2, 3], 3, Sampling::greedy()) }
    }

    #[test]
    fn urgent_requests_go_first_but_not_for_ever() {
        let (mut engine, handle) = narrow();
        let mut patient = handle.submit(request(1)).unwrap().remove(0);
        let mut urgent: Vec<Reply> = Vec::new();
        let mut served_before = 0;
        // One urgent request arrives for each that is served, without end.
        loop {
            urgent.extend(handle.submit(request(-1)).unwrap());
            engine.turn();
            urgent.retain_mut(|reply| {
                let ended = std::iter::from_fn(|| reply.try_recv()).any(|event| event.is_last());
                served_before += usize::from(ended);
                !ended
            });
            if patient.try_recv().is_some() {
                break;
            }
            assert!(served_before < 1000, "the patient request starves");
        }
        assert!(served_before >= 2, "urgent requests overtook it: {served_before}");
    }

    #[test]
    fn dropping_the_last_handle_answers_what_was_accepted_and_stops() {
        let (engine, handle) = narrow();
        let replies: Vec<Reply> = (0..5).flat_map(|_| handle.submit(request(0)).unwrap()).collect();
        drop(handle);
        engine.run();
        for mut reply in replies {
            let last = std::iter::from_fn(|| reply.recv()).last();
            assert!(matches!(last, Some(Event::End { .. })), "{last:?}");
        }
    }

    #[test]
    fn an_engine_that_dies_tells_its_callers() {
        let (mut engine, handle) = narrow();
        let mut replies: Vec<Reply> = (0..3).flat_map(|_| handle.submit(request(0)).unwrap()).collect();
        engine.turn();
        drop(engine);
        for reply in &mut replies {
            assert_eq!(
                std::iter::from_fn(|| reply.recv()).last(),
                Some(Event::Failed(crate::Failure::EngineGone))
            );
        }
        assert_eq!(handle.submit(request(0)).err(), Some(Refusal::Closed));
        assert_eq!(handle.stats().requests_waiting, 0);
    }

    #[test]
    fn a_step_that_hangs_is_called_stuck_while_it_hangs() {
        let time = Arc::new(AtomicU64::new(0));
        let clock = {
            let time = Arc::clone(&time);
            Arc::new(move || Duration::from_secs(time.load(Ordering::Relaxed)))
        };
        let seen = Arc::new(Mutex::new(Vec::new()));
        let watched: Arc<OnceLock<Handle>> = Arc::default();
        let hang = {
            let (watched, seen) = (Arc::clone(&watched), Arc::clone(&seen));
            move || {
                // Whoever asks while the step runs sees how long it has been running.
                for _ in 0..3 {
                    let stats = watched.get().expect("made before the first step").stats();
                    seen.lock().unwrap().push((stats.step_running_for, stats.stuck));
                    time.fetch_add(40, Ordering::Relaxed);
                }
                None
            }
        };
        let fake = Fake::new(FakeOptions {
            groups: vec![KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 8 }],
            limits: StepLimits { tokens_max: 16, wanted_max: 1, slots: 1 },
            depth: 0,
            vocab: 40,
            faults: Box::new(hang),
        });
        let (mut engine, handle) = Engine::new(Box::new(fake), EngineOptions::new(64, clock));
        assert!(watched.set(handle.clone()).is_ok());
        let _reply = handle.submit(request(0)).unwrap();
        engine.turn();
        let running = |seconds| Some(Duration::from_secs(seconds));
        let seen = seen.lock().unwrap().clone();
        // The clock's first microsecond stands for its start.
        assert_eq!(seen.iter().map(|(_, stuck)| *stuck).collect::<Vec<_>>(), [false, false, true]);
        assert!(seen[1].0 < running(41) && seen[1].0 > running(39), "{seen:?}");
        assert_eq!((handle.stats().step_running_for, handle.stats().stuck), (None, false));
    }

    #[test]
    fn a_lost_device_fails_everybody_clearly_and_lets_nobody_in() {
        for depth in [0, 1] {
            let mut steps = 0;
            let lost_in_the_third_step = move || {
                steps += 1;
                (steps == 3).then_some(Fault::DeviceLost)
            };
            let fake = Fake::new(FakeOptions {
                groups: vec![KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 8 }],
                limits: StepLimits { tokens_max: 16, wanted_max: 2, slots: 2 },
                depth,
                vocab: 40,
                faults: Box::new(lost_in_the_third_step),
            });
            let options = EngineOptions::new(64, Arc::new(|| Duration::ZERO));
            let (mut engine, handle) = Engine::new(Box::new(fake), options);
            let long = || Request::new(vec![1, 2, 3], 50, Sampling::greedy());
            // Two run and two wait.
            let mut replies: Vec<Reply> = (0..4).flat_map(|_| handle.submit(long()).unwrap()).collect();
            for _ in 0..5 {
                engine.turn();
            }
            for reply in &mut replies {
                let last = std::iter::from_fn(|| reply.recv()).last();
                assert!(matches!(&last, Some(Event::Failed(crate::Failure::DeviceLost(_)))), "{last:?}");
            }
            let wanted = "fake is lost: unplugged on purpose";
            assert_eq!(
                handle.submit(long()).err().map(|refusal| refusal.to_string()).as_deref(),
                Some(wanted)
            );
            engine.assert_consistent();
            assert_eq!((handle.stats().pages[0].referenced, handle.stats().ended.failed), (0, 4));
            drop(handle);
            engine.run();
        }
    }

    #[test]
    fn prompt_tokens_are_counted_when_they_are_computed() {
        let (mut engine, handle) = narrow();
        let replies = handle.submit(request(0)).unwrap();
        while engine.turn() == Turn::Worked {}
        assert_eq!(handle.stats().prompt_tokens, 3);
        drop(replies);
    }

    #[test]
    #[should_panic(expected = "a window of 90 wants a pool of 5 pages, it has 4")]
    fn a_pool_too_small_for_its_window_is_noticed_before_any_request() {
        let groups = vec![
            KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 50 },
            KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: Some(90), pages: 4 },
        ];
        let fake = Fake::new(FakeOptions {
            groups,
            limits: StepLimits { tokens_max: 64, wanted_max: 1, slots: 1 },
            depth: 0,
            vocab: 40,
            faults: Box::new(|| None),
        });
        let clock: crate::Clock = Arc::new(|| Duration::ZERO);
        drop(Engine::new(Box::new(fake), EngineOptions::new(128, clock)));
    }
}
