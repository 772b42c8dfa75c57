//! The loop: receive, schedule, launch, collect, sample, tell.

use std::{
    any::Any,
    collections::{HashMap, HashSet, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::Duration,
};

use fornax_compute::{Error, KvGroup, PAGE_TOKENS, PageId, SampleFault, Sampled};
use fornax_model::{Adapter, AdapterFault};

use crate::{
    Clock,
    adapters::{AdapterChange, AdapterRefusal, Adapters},
    budget::Budget,
    drafting::DraftModel,
    event::{EndReason, Event, Failure, Usage},
    grammar::Grammar,
    handle::{Arrived, Door, Handle, QueueLimits},
    question::{Masks, Others, Question, QuestionKind, ask},
    request::{Capacity, PRIORITY_PLACES, Piece, Refusal, Request},
    runner::Runner,
    scheduler::{Scheduled, Scheduler, Sequences, Standing, StepLimits},
    sequence::{Restoring, Sequence, SequenceId},
    shares::{Line, Owner, Uses},
    speculation::{Draft, Guesser, Speculation, Speculator},
    stats::{DraftStats, Stats},
    tier::{Fetched, Missing, PageName, Tier, Unkept},
};

/// What an engine is made with.
pub struct EngineOptions {
    /// Tokens of one request, prompt and answer.
    pub context: usize,
    /// How much may wait.
    pub queue: QueueLimits,
    /// Time, handed in.
    pub clock: Clock,
    /// A step that runs longer than this is called stuck in the stats.
    pub stuck_after: Duration,
    /// When answers are drafted. It changes no token.
    pub speculation: Speculation,
    /// Whether cached prefixes are used again. It changes no token, but how many are computed depends on what was said.
    pub prefix_reuse: bool,
    /// Whether tokens that a form leaves no choice about are computed together. It changes no token either.
    pub fast_forward: bool,
    /// What keeps pages beyond the device's memory.
    pub tier: Option<Box<dyn Tier>>,
}

impl EngineOptions {
    /// Requests of `context` tokens, and a queue with room for 256 of them.
    pub fn new(context: usize, clock: Clock) -> EngineOptions {
        EngineOptions {
            context,
            queue: QueueLimits { requests_max: 256, tokens_max: context.saturating_mul(256) },
            clock,
            // Steps are made to last a tenth of a second; even 16 tokens of a model that hardly fits take seconds.
            stuck_after: Duration::from_secs(60),
            speculation: Speculation::default(),
            prefix_reuse: true,
            fast_forward: true,
            tier: None,
        }
    }
}

/// Many requests on one runner.
pub struct Engine {
    door: Arc<Door>,
    scheduler: Scheduler,
    runner: Box<dyn Runner>,
    /// A smaller model that drafts.
    draft_model: Option<DraftModel>,
    /// What keeps pages beyond the device's memory.
    tier: Option<Box<dyn Tier>>,
    /// What is being read from there: by ticket, for whom, and which pages.
    fetching: HashMap<u64, Fetching>,
    /// Oldest first.
    in_flight: VecDeque<StepInFlight>,
    /// A collected step, whose memory the next one uses again.
    spare: StepInFlight,
    budget: Budget,
    /// Whether forced tokens are computed together.
    fast_forward: bool,
    clock: Clock,
    /// When the last step was collected.
    collected: Duration,
    /// Where those who come in stand.
    line: Line,
    /// Who has had how much of the steps' time lately.
    uses: Uses,
    adapters: Adapters,
    stats: Stats,
}

/// A launched step, until it is collected.
#[derive(Default)]
struct StepInFlight {
    rows: Vec<Scheduled>,
    /// The masks that were computed beside it, in the order of its rows.
    masks: Vec<Masks>,
    /// What was asked of the sampler, in the order of its output.
    asked: Vec<Question>,
    /// What was read instead of sampled, in the order of its rows.
    embedded: Vec<Embedded>,
    tokens: usize,
    /// The same by owner, where there are several.
    tokens_of: Vec<(Owner, usize)>,
    began: Duration,
}

/// How long it is waited for copies where nothing else is to be done: those who come meanwhile are heard after that.
const PATIENCE: Duration = Duration::from_millis(2);

/// Pages that are copied in a turn that has nothing else to do.
const KEPT_AT_ONCE: usize = 8;

/// Pages that are asked for together.
const FETCHED_AT_ONCE: usize = 32;

/// Pages on their way back for a sequence.
struct Fetching {
    id: SequenceId,
    /// Tokens found without them.
    before: usize,
    pages: Vec<(usize, PageName)>,
    /// How many of them have come.
    done: usize,
}

/// Hands copies of pages over. What cannot be copied is computed again some day.
fn keep(runner: &mut dyn Runner, tier: &mut dyn Tier, pages: Vec<Unkept>) {
    for Unkept { name, group, page } in pages {
        if !tier.takes() || tier.holds(&name) {
            continue;
        }
        if let Ok(copy) = guarded(|| runner.copy_out(group, page)) {
            tier.keep(name, copy);
        }
    }
}

/// A sequence's form, while masks of it are computed beside a step.
struct LentForm {
    /// The index of its row.
    row: usize,
    form: Grammar,
    draft: Vec<u32>,
}

/// What the model made of a whole prompt.
struct Embedded {
    /// The index of its row in the step.
    row: usize,
    values: Vec<f32>,
}

/// What a turn of the loop found to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Something moved.
    Worked,
    /// Nobody wants anything.
    Idle,
}

impl Engine {
    /// An engine and the first way into it. The caller drives it, by [`Engine::run`] or turn by turn.
    pub fn new(mut runner: Box<dyn Runner>, options: EngineOptions) -> (Engine, Handle) {
        let full = |group: &&KvGroup| group.window.is_none() && !group.kind.is_state();
        let pages = runner.groups().iter().filter(full).map(|group| group.pages - 1).min();
        let (limits, encodes) = (runner.limits(), runner.encodes());
        let capacity = Capacity {
            // What is computed whole has to fit a step.
            context: if encodes { options.context.min(limits.tokens_max) } else { options.context },
            vocab: runner.vocab(),
            pages: pages.unwrap_or(usize::MAX),
            encodes,
            pairs: runner.pairs().is_some(),
            adapters: runner.adapters(),
            adapter_places: runner.adapter_room().adapters,
            given: runner.given(),
            sections: runner.sections(),
            // Each of the others may want its next token in the same step.
            whole_max: limits.tokens_max.saturating_sub(limits.slots.saturating_sub(1)),
        };
        let door = Door::new(capacity, options.queue, Arc::clone(&options.clock), options.stuck_after);
        let handle = Handle::new(Arc::clone(&door));
        assert_windows_fit(runner.groups(), limits, options.context);
        // What was guessed wrong has to be forgotten.
        let drafter = runner.drafter().filter(|drafter| runner.rewinds() && drafter.rewinds());
        let draft_model = drafter.map(|drafter| {
            assert_eq!(drafter.vocab(), runner.vocab(), "both have the same tokens");
            assert!(drafter.limits().slots >= limits.slots, "it drafts for every seat");
            DraftModel::new(drafter, &options)
        });
        let speculation = if runner.rewinds() { options.speculation } else { Speculation::Off };
        let stats =
            Stats { draft_model: draft_model.as_ref().map(|_| DraftStats::default()), ..Stats::default() };
        let mut engine = Engine {
            door,
            scheduler: Scheduler::new(
                runner.groups(),
                limits,
                Speculator::new(speculation, options.fast_forward),
                options.prefix_reuse && !encodes,
                Sequences {
                    whole: encodes,
                    pairs: runner.pairs().unwrap_or(0),
                    sections: runner.sections(),
                    // A step's sampling needs the tokens of the one before: with more steps in flight that one is not
                    // collected in time, so a sequence waits, and others go on meanwhile.
                    ahead: usize::from(runner.feeds_back() && runner.depth() <= 1),
                },
            ),
            in_flight: VecDeque::new(),
            spare: StepInFlight::default(),
            budget: Budget::new(limits.tokens_max),
            fast_forward: options.fast_forward,
            clock: options.clock,
            collected: Duration::ZERO,
            line: Line::default(),
            uses: Uses::default(),
            adapters: Adapters::new(runner.adapters(), runner.adapter_room()),
            stats,
            runner,
            draft_model,
            // Without reuse nothing would ever be looked for.
            tier: options.tier.filter(|_| options.prefix_reuse && !encodes),
            fetching: HashMap::new(),
        };
        if engine.tier.is_some() {
            engine.scheduler.keep_copies();
        }
        engine.scheduler.draft_by_model(engine.draft_model.is_some());
        (engine, handle)
    }

    /// Builds the runner on a thread of its own and drives it there until the last handle is gone. Returns once the
    /// runner is built, or its error.
    pub fn spawn<E: Send + 'static>(
        build: impl FnOnce() -> Result<Box<dyn Runner>, E> + Send + 'static,
        options: EngineOptions,
    ) -> Result<(Handle, thread::JoinHandle<()>), E> {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let thread = thread::Builder::new()
            .name("engine".into())
            .spawn(move || match build() {
                Err(error) => drop(sender.send(Err(error))),
                Ok(runner) => {
                    let (engine, handle) = Engine::new(runner, options);
                    drop(sender.send(Ok(handle)));
                    engine.run();
                }
            })
            .expect("a thread can be started");
        match receiver.recv() {
            Ok(Ok(handle)) => Ok((handle, thread)),
            Ok(Err(error)) => Err(error),
            // The builder panicked: let the caller see that panic.
            Err(_) => match thread.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => unreachable!("the thread sends before it ends"),
            },
        }
    }

    /// Turns until the last handle is gone and everything accepted is answered.
    pub fn run(mut self) {
        loop {
            match self.turn() {
                Turn::Worked => {}
                Turn::Idle if self.door.wait() => {}
                Turn::Idle => return self.keep_all(),
            }
        }
    }

    /// One turn of the loop.
    pub fn turn(&mut self) -> Turn {
        if self.stats.device_lost.is_some() {
            return Turn::Idle;
        }
        let (began, waited_before) = ((self.clock)(), self.stats.waited);
        let changes = self.receive();
        self.end_abandoned();
        self.change_adapters(changes);
        if self.stats.device_lost.is_some() {
            return Turn::Idle;
        }
        self.restore();
        self.door.step_begins();
        let ended_before = self.stats.ended;
        let was_idle = self.in_flight.is_empty();
        self.draft();
        let launched = self.launch();
        let waits = self.scheduler.restores();
        let stalled =
            was_idle && !launched && !waits && self.scheduler.len() > 0 && self.stats.ended == ended_before;
        assert!(!stalled, "whoever is first in line can always move");
        let depth = self.runner.depth();
        // What the newest step's sampling depends on must be known first: tokens, ends, grammar.
        while self.in_flight.len() > depth.max(1) {
            self.collect();
        }
        if launched {
            self.sample();
        }
        while self.in_flight.len() > depth {
            self.collect();
        }
        // Nothing can go on without what the oldest step yields.
        if !launched {
            self.collect();
        }
        if launched || !was_idle {
            let waited = self.stats.waited.saturating_sub(waited_before);
            self.stats.busy += (self.clock)().saturating_sub(began).saturating_sub(waited);
        }
        let goes_on = launched || self.scheduler.len() > 0 || self.keep_some();
        self.publish();
        if goes_on { Turn::Worked } else { Turn::Idle }
    }

    /// Begins to bring back pages for those who are seated next, and takes what has come.
    fn restore(&mut self) {
        let Some(mut tier) = self.tier.take() else { return };
        for id in self.scheduler.unrestored() {
            let missing = self.scheduler.missing(id, &|name| tier.holds(name));
            let worth = missing.filter(|missing| {
                let computing = self.budget.seconds(missing.tokens());
                // Where nothing is known yet, copying is what takes less.
                computing.zip(tier.seconds(missing.pages.len())).is_none_or(|(compute, read)| read < compute)
            });
            let Some(sequence) = self.scheduler.get_mut(id) else { continue };
            let Some(Missing { before, pages, .. }) = worth else {
                sequence.restoring = Restoring::Done { before: None };
                continue;
            };
            sequence.restoring = Restoring::Waits;
            self.fetch(Fetching { id, before, pages, done: 0 }, &mut *tier);
        }
        // With nothing else to do it is waited for; those who come meanwhile are heard soon.
        let idle = self.in_flight.is_empty() && self.scheduler.counts().0 == 0;
        let mut wait = if idle && self.scheduler.restores() { PATIENCE } else { Duration::ZERO };
        while let Some(fetched) = (!self.fetching.is_empty()).then(|| tier.arrived(wait)).flatten() {
            wait = Duration::ZERO;
            self.put_back(fetched, &mut *tier);
        }
        self.tier = Some(tier);
    }

    /// Asks for the next pages of a sequence: some at a time, so that copies take little room and no turn is long.
    fn fetch(&mut self, fetching: Fetching, tier: &mut dyn Tier) {
        let next = fetching.pages[fetching.done..].iter().take(FETCHED_AT_ONCE);
        let ticket = tier.fetch(next.map(|(_, name)| *name).collect());
        self.fetching.insert(ticket, fetching);
    }

    /// Gives pages that have come their places in the cache.
    fn put_back(&mut self, fetched: Fetched, tier: &mut dyn Tier) {
        let Some(mut fetching) = self.fetching.remove(&fetched.ticket) else { return };
        let (runner, copies, id) = (&mut self.runner, fetched.pages, fetching.id);
        let pages = &fetching.pages[fetching.done..][..copies.len()];
        let mut whole = true;
        let mut fill = |index: usize, evicted: Vec<Unkept>, page: PageId| {
            keep(&mut **runner, tier, evicted);
            let group = pages[index].1.group as usize;
            let copied = copies[index].as_ref().map(|copy| guarded(|| runner.copy_in(group, page, copy)));
            let filled = matches!(copied, Some(Ok(())));
            whole &= filled;
            filled
        };
        self.scheduler.restore(id, pages, &mut fill);
        fetching.done += copies.len();
        let Some(sequence) = self.scheduler.get_mut(id) else { return };
        // Behind a page that is gone nothing can be gone on from.
        if !whole || fetching.done == fetching.pages.len() {
            sequence.restoring = Restoring::Done { before: Some(fetching.before) };
        } else {
            self.fetch(fetching, tier);
        }
    }

    /// Copies pages that are about to be written over.
    fn keep_evicted(&mut self) {
        let evicted = self.scheduler.take_evicted();
        if let Some(tier) = &mut self.tier {
            keep(&mut *self.runner, &mut **tier, evicted);
        }
    }

    /// Copies some pages while there is nothing else to do: they are then there after a crash, too. Whether there are more,
    /// or some are still being written.
    fn keep_some(&mut self) -> bool {
        let Some(tier) = &mut self.tier else { return false };
        let stats = tier.stats();
        if stats.off.is_some() {
            return false;
        }
        if !tier.takes() || !self.scheduler.has_unkept() {
            let writes = stats.pages_waiting > 0;
            if writes {
                thread::sleep(PATIENCE);
            }
            return writes;
        }
        // One by one: what is taken counts as kept, and the tier may have enough at any of them.
        for _ in 0..KEPT_AT_ONCE {
            let unkept = if tier.takes() { self.scheduler.take_unkept(1) } else { Vec::new() };
            if unkept.is_empty() {
                break;
            }
            keep(&mut *self.runner, &mut **tier, unkept);
        }
        true
    }

    /// Copies everything that is cached, before it goes with the engine.
    fn keep_all(mut self) {
        if self.stats.device_lost.is_some() {
            return;
        }
        let Some(mut tier) = self.tier.take() else { return };
        loop {
            while !tier.takes() && tier.stats().off.is_none() {
                thread::sleep(PATIENCE);
            }
            let unkept = self.scheduler.take_unkept(1);
            if unkept.is_empty() {
                return;
            }
            keep(&mut *self.runner, &mut *tier, unkept);
        }
    }

    /// Takes in who has come; what is to become of adapters is returned.
    fn receive(&mut self) -> VecDeque<AdapterChange> {
        let Arrived { requests, changes } = self.door.take();
        for arrival in requests {
            let mut leader = None;
            for (choice, (reply, ticket)) in arrival.choices.into_iter().enumerate() {
                let request: Arc<Request> = Arc::clone(&arrival.request);
                let place = self.line.place(&request.owner);
                let id = self.scheduler.add(|id| Sequence {
                    grammar: None,
                    id,
                    tokens: request.prompt.clone(),
                    text: (!request.pieces.is_empty()).then(|| text(&request)),
                    seed: choice_seed(request.seed, choice),
                    draft: Draft::new(),
                    scored: request.prompt_logprobs.filter(|_| leader.is_none()).map(|_| 0),
                    mirostat_mu: request.sampling.mirostat_start(),
                    line: place + i64::from(request.priority) * PRIORITY_PLACES,
                    leader,
                    seat: None,
                    launched: 0,
                    computed: 0,
                    sampled_ahead: 0,
                    steps_in_flight: 0,
                    leave: None,
                    reply,
                    ticket: Some(ticket),
                    cached_tokens: None,
                    restored_tokens: 0,
                    miss: None,
                    restoring: Restoring::Unknown,
                    request,
                });
                leader.get_or_insert(id);
            }
        }
        changes
    }

    /// Loads and unloads adapters while no step is in flight. Whoever has one that was unloaded keeps it.
    fn change_adapters(&mut self, changes: VecDeque<AdapterChange>) {
        for change in changes {
            match change {
                AdapterChange::Unload { number } => {
                    self.adapters.leave(number);
                    self.free_adapters();
                }
                AdapterChange::Load { adapter, told } => {
                    self.free_adapters();
                    let loaded = self.load_adapter(&adapter);
                    if let Ok(number) = loaded {
                        self.door.adapter_loaded(number);
                    }
                    // Whoever asked may be gone; it is loaded all the same.
                    drop(told.send(loaded));
                }
            }
        }
        self.free_adapters();
    }

    fn load_adapter(&mut self, adapter: &Adapter) -> Result<u32, AdapterRefusal> {
        if self.runner.adapter_room().adapters == 0 {
            let (adapter, fault) = (adapter.name().to_owned(), AdapterFault::NoRoom);
            return Err(fornax_model::Error::Adapter { adapter, fault }.into());
        }
        let at = self.adapters.free()?;
        self.set_adapter(self.adapters.device_place(at), Some(adapter))?;
        Ok(self.adapters.loaded(at))
    }

    /// Frees the places of adapters that were unloaded and that no sequence has any more.
    fn free_adapters(&mut self) {
        let left = |engine: &Engine| {
            let has =
                |number| engine.scheduler.all().any(|sequence| sequence.request.adapter == Some(number));
            engine.adapters.left(has)
        };
        while let Some(at) = left(self) {
            // What cannot be freed keeps its place.
            if self.set_adapter(self.adapters.device_place(at), None).is_err() {
                return;
            }
            self.adapters.cleared(at);
        }
    }

    fn set_adapter(&mut self, place: u32, adapter: Option<&Adapter>) -> Result<(), AdapterRefusal> {
        while !self.in_flight.is_empty() {
            self.collect();
        }
        let set = guarded(|| match self.runner.set_adapter(place, adapter) {
            Err(fornax_model::Error::Compute(error)) => Err(error),
            set => Ok(set),
        });
        match set {
            Ok(set) => Ok(set?),
            Err(failed) => {
                let failure = failed.failure.clone();
                self.fail_step(&[], failed);
                Err(AdapterRefusal::Failed(failure))
            }
        }
    }

    /// A dropped reply is a cancelled request.
    fn end_abandoned(&mut self) {
        let gone: Vec<SequenceId> = self
            .scheduler
            .live()
            .filter(|sequence| sequence.reply.abandoned())
            .map(|sequence| sequence.id)
            .collect();
        for id in gone {
            self.end(id, EndReason::Cancelled);
        }
    }

    /// Has the smaller model guess where that promises something. What it fails at costs its guesses and nothing else.
    fn draft(&mut self) {
        let Some(model) = &mut self.draft_model else { return };
        let (wanted, chunk) = self.scheduler.wanted_of(model);
        if wanted.is_empty() {
            return;
        }
        let began = (self.clock)();
        let guessed = model.guess(wanted, chunk);
        self.scheduler.observe_model(model.pace());
        let stats = self.stats.draft_model.get_or_insert_default();
        stats.busy += (self.clock)().saturating_sub(began);
        match guessed {
            Ok(guesses) => {
                guesses.into_iter().for_each(|guess| self.scheduler.guessed(guess.id, guess.tokens));
            }
            Err(reason) => {
                stats.failed = Some(reason);
                self.draft_model = None;
                self.scheduler.draft_by_model(false);
            }
        }
    }

    /// Puts the next step together and starts it; `false` when there was nothing to start.
    fn launch(&mut self) -> bool {
        let mut step = std::mem::take(&mut self.spare);
        let several = self.line.is_shared();
        let guests = match several {
            true => self.uses.guests(self.scheduler.owners(), (self.clock)()),
            false => HashSet::new(),
        };
        step.rows = self.scheduler.schedule(&self.budget, Standing { several, guests }, step.rows);
        if step.rows.is_empty() {
            self.spare = step;
            return false;
        }
        step.tokens_of.clear();
        if several {
            step.tokens_of = self.scheduler.tokens_of(&step.rows);
        }
        self.keep_evicted();
        self.scheduler.place_adapters(|number| self.adapters.place(number));
        let rows = &step.rows;
        let mut forms = self.borrow_forms(rows);
        let batch = self.scheduler.batch();
        let (tokens, began) = (batch.tokens.len(), (self.clock)());
        let mut launch = || guarded(|| self.runner.launch(batch));
        let (masks, launched) = if forms.is_empty() {
            (None, launch())
        } else {
            let masks = |lent: &mut LentForm| Masks::of(lent.row, &mut lent.form, &lent.draft);
            beside(|| forms.iter_mut().map(masks).collect(), launch)
        };
        self.scheduler.take_back(rows);
        for LentForm { row, form, .. } in forms {
            self.scheduler.get_mut(rows[row].id).expect("in this step").grammar = Some(form);
        }
        for row in rows.iter().filter(|row| row.starts) {
            self.start(row.id);
        }
        match launched {
            Ok(()) => {
                step.asked.clear();
                let masks = masks.unwrap_or_default();
                self.in_flight.push_back(StepInFlight { masks, tokens, began, ..step });
                true
            }
            Err(failed) => {
                self.fail_step(&step.rows, failed);
                // It was a turn's work all the same: the next one may go better.
                false
            }
        }
    }

    /// The forms whose next masks can be computed before the step is. A runner that computes while others wait for it
    /// gets its masks in `sample`, when the step before is known.
    fn borrow_forms(&mut self, rows: &[Scheduled]) -> Vec<LentForm> {
        if self.runner.depth() > 0 {
            return Vec::new();
        }
        let choosing = rows.iter().enumerate().filter(|(_, row)| row.samples > 0);
        choosing
            .filter_map(|(index, row)| {
                let sequence = self.scheduler.get_mut(row.id)?;
                let form = sequence.grammar.take()?;
                Some(LentForm { row: index, form, draft: sequence.draft.launched().to_vec() })
            })
            .collect()
    }

    /// Says once that a sequence has its first seat, and frees its place in the queue.
    fn start(&mut self, id: SequenceId) {
        let Some(ticket) = self.scheduler.take_ticket(id) else { return };
        drop(ticket);
        let Some(sequence) = self.scheduler.get_mut(id) else { return };
        // Not before: a copy may be large, and those who wait need none. The step is under way meanwhile.
        sequence.grammar = sequence.request.grammar.clone();
        let place = sequence.line - i64::from(sequence.request.priority) * PRIORITY_PLACES;
        self.line.seat(place);
        let cached_tokens = sequence.cached_tokens.unwrap_or(0);
        let (miss, restored_tokens, seed) = (sequence.miss, sequence.restored_tokens, sequence.seed);
        sequence.reply.send(Event::Started { cached_tokens, restored_tokens, miss, seed });
        self.stats.prefix_restored += restored_tokens as u64;
        self.stats.prefix_queries += sequence.prompt_len() as u64;
        self.stats.prefix_hits += cached_tokens as u64;
        self.fast_forward(id);
    }

    /// Appends the tokens that the form leaves no choice about; they are computed as a chunk, not one by one.
    fn fast_forward(&mut self, id: SequenceId) {
        if !self.fast_forward {
            return;
        }
        let Some(sequence) = self.scheduler.get_mut(id) else { return };
        let Some(grammar) = &mut sequence.grammar else { return };
        for token in grammar.forced() {
            // One by one: max_tokens may cut the stretch, and then the form is only as far as what was sent.
            if self.accept(id, Event::Token { token, logprob: None, top: Vec::new() }, token) {
                return;
            }
            if let Some(sequence) = self.scheduler.get_mut(id) {
                sequence.draft.forced(token);
            }
        }
    }

    /// Moves the form on by a token and takes it; `true` when nothing may follow.
    fn accept(&mut self, id: SequenceId, event: Event, token: u32) -> bool {
        let Some(sequence) = self.scheduler.get_mut(id) else { return true };
        let ends = sequence.ends_with(token);
        let accepted = match &mut sequence.grammar {
            Some(grammar) if !ends => grammar.accept(token),
            _ => Ok(()),
        };
        if let Err(reason) = accepted {
            self.fail(id, Failure::Form(reason));
            return true;
        }
        let reason = chosen(sequence, event, token);
        self.stats.generated_tokens += 1;
        if let Some(reason) = reason {
            self.end(id, reason);
        }
        reason.is_some()
    }

    /// Asks the sampler about the step launched last.
    fn sample(&mut self) {
        let Some(step) = self.in_flight.back_mut() else { return };
        let masks = std::mem::take(&mut step.masks);
        let Others { embeds, broken } = ask(&mut step.rows, masks, &mut self.scheduler, &mut step.asked);
        let mut inputs = Vec::with_capacity(step.asked.len());
        for question in &step.asked {
            let row = &step.rows[question.row];
            let sequence = self.scheduler.get(row.id).expect("just seen");
            inputs.push(question.input(row, sequence, self.runner.vocab()));
        }
        let sampled = guarded(|| {
            self.runner.sample(&inputs)?;
            let wanted: Vec<u32> = embeds.iter().map(|&(_, wanted)| wanted).collect();
            if wanted.is_empty() { Ok(Vec::new()) } else { self.runner.hidden(&wanted) }
        });
        for (id, reason) in broken {
            self.fail(id, Failure::Form(reason));
        }
        match sampled {
            Ok(hidden) => {
                let embedded = embeds.iter().zip(hidden).map(|(&(row, _), values)| Embedded { row, values });
                self.in_flight.back_mut().expect("just used").embedded = embedded.collect();
            }
            Err(failed) => {
                let step = self.in_flight.pop_back().expect("just used");
                self.fail_step(&step.rows, failed);
            }
        }
    }

    /// Waits for the oldest step and tells its sequences.
    fn collect(&mut self) {
        let Some(mut step) = self.in_flight.pop_front() else { return };
        let asked = (self.clock)();
        let output = guarded(|| self.runner.collect());
        let collected = (self.clock)();
        self.stats.waited += collected.saturating_sub(asked);
        let output = match output {
            Ok(output) => output,
            Err(failed) => return self.fail_step(&step.rows, failed),
        };
        if output.sampled.len() != step.asked.len() {
            let reason = format!("{} answers to {} questions", output.sampled.len(), step.asked.len());
            let failed = StepFailed { failure: Failure::Backend(reason), reach: Reach::Steps };
            return self.fail_step(&step.rows, failed);
        }
        // A step that was launched behind another one began when that one ended.
        let elapsed = collected.saturating_sub(step.began.max(self.collected));
        self.collected = collected;
        self.budget.observe(step.tokens, elapsed);
        self.scheduler.observe(step.tokens, elapsed.as_secs_f64());
        let of_each = elapsed.as_secs_f64() / step.tokens.max(1) as f64;
        for (owner, tokens) in step.tokens_of.drain(..) {
            self.uses.add(&owner, of_each * tokens as f64, collected);
        }
        self.stats.steps += 1;
        let mut asked = step.asked.as_slice();
        let mut answers = output.sampled.into_iter();
        let mut embedded = step.embedded.drain(..).peekable();
        for (index, row) in step.rows.iter().enumerate() {
            let leaves = self.scheduler.collected(row);
            // Whether the row's next answer still counts.
            let mut counts = true;
            while let Some((question, left)) = asked.split_first().filter(|(asked, _)| asked.row == index) {
                asked = left;
                let answer = answers.next().expect("as many as were asked");
                counts = counts && self.take(row, question, answer);
            }
            if let Some(Embedded { values, .. }) = embedded.next_if(|embedded| embedded.row == index) {
                self.tell_embedding(row, values);
            }
            if row.drafts() > 0 {
                self.scheduler.verified(row);
            }
            if row.samples > 0 {
                self.scheduler.propose(row.id);
            } else {
                self.end_scored(row.id);
            }
            if leaves {
                self.scheduler.settle(row.id);
            }
        }
        drop(embedded);
        self.spare = step;
    }

    /// A prompt was computed to be looked at: what came of it is all that its request wants.
    fn tell_embedding(&mut self, row: &Scheduled, values: Vec<f32>) {
        let Some(sequence) = self.scheduler.get(row.id) else { return };
        if values.iter().any(|value| !value.is_finite()) {
            return self.fail(row.id, Failure::NumericFault { position: row.end - 1 });
        }
        sequence.reply.send(Event::Embedding(values));
        self.end(row.id, EndReason::Length);
    }

    /// Takes an answer of the sampler; whether the next one of the same row still counts.
    fn take(&mut self, row: &Scheduled, question: &Question, answer: Sampled) -> bool {
        let failure = match answer.fault {
            None => None,
            Some(SampleFault::Logits) => Some(Failure::NumericFault { position: question.position }),
            Some(SampleFault::NothingAllowed) => {
                Some(Failure::NothingAllowed { position: question.position + 1 })
            }
            Some(SampleFault::Parameters) => unreachable!("checked when the request came in"),
        };
        if let Some(failure) = failure {
            self.fail(row.id, failure);
            return false;
        }
        let Some(sequence) = self.scheduler.get_mut(row.id) else { return false };
        let Sampled { token, logprob, top, mu, .. } = answer;
        if question.kind == QuestionKind::Score {
            let logprob = logprob.expect("a given token comes with its log-probability");
            sequence.reply.send(Event::Scored { token, logprob, top });
            return true;
        }
        sequence.mirostat_mu = mu;
        let right = sequence.draft.observe(token);
        let drafted = question.position + 1 < row.end;
        sequence.draft.right += usize::from(drafted && right);
        self.stats.drafted_tokens += u64::from(drafted);
        self.stats.accepted_tokens += u64::from(drafted && right);
        if sequence.draft.by == Guesser::Model
            && let Some(stats) = &mut self.stats.draft_model
        {
            stats.drafted_tokens += u64::from(drafted);
            stats.accepted_tokens += u64::from(drafted && right);
        }
        let event = Event::Token { token, logprob, top };
        if sequence.grammar.is_some() {
            if self.accept(row.id, event, token) {
                return false;
            }
            if !(drafted && right) {
                self.fast_forward(row.id);
            }
            // Nothing is forced behind a drafted token that is right: a draft ends before that.
            return right;
        }
        let reason = chosen(sequence, event, token);
        self.stats.generated_tokens += 1;
        if let Some(reason) = reason {
            self.end(row.id, reason);
        }
        // The next position was computed after the guessed token.
        right && reason.is_none()
    }

    /// A request for the prompt's log-probabilities alone has them all.
    fn end_scored(&mut self, id: SequenceId) {
        let done =
            |sequence: &Sequence| sequence.only_scores() && sequence.computed == sequence.positions_max();
        if self.scheduler.get(id).is_some_and(done) {
            self.end(id, EndReason::Length);
        }
    }

    /// The step is lost: its requests fail, their pages return, the others go on.
    fn fail_step(&mut self, rows: &[Scheduled], failed: StepFailed) {
        if failed.reach != Reach::Step {
            // The runner may have lost count of its steps: none of them can be trusted.
            self.runner.reset();
            for step in std::mem::take(&mut self.in_flight) {
                self.drop_rows(&step.rows, &failed.failure);
            }
        }
        self.drop_rows(rows, &failed.failure);
        if failed.reach == Reach::Device {
            self.lose_device(failed.failure);
        }
    }

    /// Nothing can be computed any more: everybody is told, and nobody is let in.
    fn lose_device(&mut self, failure: Failure) {
        let Failure::DeviceLost(reason) = &failure else { unreachable!("only a lost device reaches all") };
        self.stats.device_lost = Some(reason.clone());
        let arrivals = self.door.close(Refusal::DeviceLost(reason.clone()));
        for (reply, ticket) in arrivals.into_iter().flat_map(|arrival| arrival.choices) {
            drop(ticket);
            reply.send(Event::Failed(failure.clone()));
            self.stats.ended.failed += 1;
        }
        let everybody: Vec<SequenceId> = self.scheduler.live().map(|sequence| sequence.id).collect();
        for id in everybody {
            self.fail(id, failure.clone());
        }
    }

    fn drop_rows(&mut self, rows: &[Scheduled], failure: &Failure) {
        for row in rows {
            self.scheduler.dropped(row);
            self.fail(row.id, failure.clone());
        }
    }

    fn end(&mut self, id: SequenceId, reason: EndReason) {
        let Some(sequence) = self.scheduler.get(id) else { return };
        let usage = Usage {
            prompt_tokens: sequence.prompt_len(),
            cached_tokens: sequence.cached_tokens.unwrap_or(0),
            restored_tokens: sequence.restored_tokens,
            generated_tokens: sequence.generated(),
        };
        sequence.reply.send(Event::End { reason, usage });
        let ended = &mut self.stats.ended;
        *match reason {
            EndReason::EndToken => &mut ended.end_token,
            EndReason::FormComplete => &mut ended.form_complete,
            EndReason::Length | EndReason::FormTruncated => &mut ended.length,
            EndReason::Cancelled => &mut ended.cancelled,
        } += 1;
        self.scheduler.end(id);
    }

    fn fail(&mut self, id: SequenceId, failure: Failure) {
        let Some(sequence) = self.scheduler.get(id) else { return };
        sequence.reply.send(Event::Failed(failure));
        self.stats.ended.failed += 1;
        self.scheduler.end(id);
    }

    fn publish(&mut self) {
        if let Some(model) = &mut self.draft_model {
            model.retain(|id| self.scheduler.is_seated(id));
        }
        self.stats.tier = self.tier.as_ref().map(|tier| tier.stats());
        let (running, _) = self.scheduler.counts();
        self.stats.running = running;
        self.stats.slots = self.runner.limits().slots;
        self.stats.preempted = self.scheduler.preempted();
        self.stats.pages = self.scheduler.page_counts();
        self.stats.preemptions = self.scheduler.preemptions();
        self.stats.prompt_tokens = self.scheduler.prompt_tokens();
        self.door.step_ends(self.stats.clone());
        if self.scheduler.len() == 0 || self.door.is_looked_at() {
            self.door.show(self.scheduler.picture());
        }
    }

    /// Checks all books; for tests.
    pub fn assert_consistent(&self) {
        self.scheduler.assert_consistent();
        if let Some(model) = &self.draft_model {
            model.assert_consistent();
            assert!(self.scheduler.len() > 0 || model.referenced() == 0, "it keeps nothing of who is gone");
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // What had arrived is dropped outside the door's lock, which its tickets take.
        drop(self.door.close(Refusal::Closed));
    }
}

/// Takes a token into the answer and tells the caller; why nothing may follow, if nothing may.
#[inline]
fn chosen(sequence: &mut Sequence, event: Event, token: u32) -> Option<EndReason> {
    sequence.push(token);
    sequence.reply.send(event);
    let full = sequence.generated() == sequence.request.max_tokens;
    let form = sequence.grammar.as_mut().map(|grammar| (grammar.is_over(), grammar.may_end()));
    match form {
        // An end token of the request's own may come where the form has not ended.
        Some((_, false)) if sequence.ends_with(token) => Some(EndReason::FormTruncated),
        _ if sequence.ends_with(token) => Some(EndReason::EndToken),
        Some((true, _)) => Some(EndReason::FormComplete),
        Some((false, true)) if full => Some(EndReason::FormComplete),
        Some((false, false)) if full => Some(EndReason::FormTruncated),
        None if full => Some(EndReason::Length),
        _ => None,
    }
}

/// Whoever is first in line must always move: a pool of windowed layers holds at least what one sequence sees and
/// computes in one step. (Pools of full layers are compared with each request.)
fn assert_windows_fit(groups: &[KvGroup], limits: StepLimits, context: usize) {
    for group in groups {
        let Some(window) = group.window else { continue };
        let seen = (window as usize + limits.tokens_max).div_ceil(PAGE_TOKENS) + 1;
        let wanted = 1 + seen.min(context.div_ceil(PAGE_TOKENS));
        let pages = group.pages;
        assert!(pages >= wanted, "a window of {window} wants a pool of {wanted} pages, it has {pages}");
    }
}

/// Does `work` on a thread of its own while `launch` computes here; without such a thread it is not done.
fn beside<A: Send, B>(work: impl FnOnce() -> A + Send, launch: impl FnOnce() -> B) -> (Option<A>, B) {
    thread::scope(|scope| {
        let work = thread::Builder::new().name("masks".into()).spawn_scoped(scope, work);
        let launched = launch();
        (work.ok().and_then(|work| work.join().ok()), launched)
    })
}

/// The tokens of a prompt at whose positions no content is given.
fn text(request: &Request) -> Vec<u32> {
    let mut given = request.pieces.iter().flat_map(Piece::positions).peekable();
    let said = request.prompt.iter().enumerate().filter(|(at, _)| given.next_if_eq(at).is_none());
    said.map(|(_, &token)| token).collect()
}

/// Each choice has its own random numbers; the first has the request's.
fn choice_seed(seed: u64, choice: usize) -> u64 {
    // The golden-ratio step keeps seeds of neighbouring choices far apart.
    seed.wrapping_add((choice as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

pub(crate) struct StepFailed {
    pub(crate) failure: Failure,
    reach: Reach,
}

/// How far a failed call to the runner reaches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// The step that was called for.
    Step,
    /// All steps in flight.
    Steps,
    /// Everything.
    Device,
}

/// Calls the runner so that neither its errors nor its panics reach further than they must.
pub(crate) fn guarded<T>(call: impl FnOnce() -> Result<T, Error>) -> Result<T, StepFailed> {
    let (failure, reach) = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error @ Error::DeviceLost { .. })) => (Failure::DeviceLost(error.to_string()), Reach::Device),
        Ok(Err(error @ Error::Integrity { .. })) => (Failure::Integrity(error.to_string()), Reach::Step),
        Ok(Err(error)) => (Failure::Backend(error.to_string()), Reach::Step),
        Err(panic) => (Failure::Panicked(panic_text(&*panic)), Reach::Steps),
    };
    Err(StepFailed { failure, reach })
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, ops::RangeInclusive, rc::Rc, sync::mpsc};

    use fornax_compute::{Batch, KvKind, Output, SampleRow, Sampling};

    use super::*;
    use crate::{
        automaton::Automaton,
        fake::{Fake, FakeOptions},
        reply::Reply,
    };

    /// A fake that writes down which step is called for what, and can swallow answers.
    type Sizes = Arc<std::sync::Mutex<Vec<usize>>>;

    struct Noting {
        fake: Fake,
        notes: Rc<RefCell<Vec<String>>>,
        /// Tokens of each step.
        sizes: Sizes,
        launched: usize,
        collected: usize,
        /// The answers of this step get lost.
        loses: Option<usize>,
    }

    impl Noting {
        fn note(&self, text: String) {
            self.notes.borrow_mut().push(text);
        }
    }

    impl Runner for Noting {
        fn launch(&mut self, batch: &Batch) -> Result<(), Error> {
            self.note(format!("launch {}", self.launched));
            self.sizes.lock().unwrap().push(batch.tokens.len());
            self.launched += 1;
            self.fake.launch(batch)
        }

        fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<(), Error> {
            let masks = rows.iter().filter(|row| row.mask.is_some()).count();
            self.note(format!("sample {} with {masks} masks", self.launched - 1));
            self.fake.sample(rows)
        }

        fn hidden(&mut self, wanted: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
            self.fake.hidden(wanted)
        }

        fn collect(&mut self) -> Result<Output, Error> {
            self.note(format!("collect {}", self.collected));
            let mut output = self.fake.collect()?;
            if self.loses == Some(self.collected) {
                output.sampled.clear();
            }
            self.collected += 1;
            Ok(output)
        }

        fn reset(&mut self) {
            self.fake.reset();
        }

        fn depth(&self) -> usize {
            self.fake.depth()
        }

        fn limits(&self) -> StepLimits {
            self.fake.limits()
        }

        fn groups(&self) -> &[KvGroup] {
            self.fake.groups()
        }

        fn vocab(&self) -> u32 {
            self.fake.vocab()
        }
    }

    fn noting(depth: usize, loses: Option<usize>) -> (Engine, Handle, Rc<RefCell<Vec<String>>>) {
        let (notes, clock) = (Rc::default(), Arc::new(|| Duration::ZERO));
        let options = EngineOptions::new(128, clock);
        let (engine, handle) = noted(depth, loses, options, &notes, &Sizes::default());
        (engine, handle, notes)
    }

    fn noted(
        depth: usize,
        loses: Option<usize>,
        engine: EngineOptions,
        notes: &Rc<RefCell<Vec<String>>>,
        sizes: &Sizes,
    ) -> (Engine, Handle) {
        let group = KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 9 };
        let limits = StepLimits { tokens_max: 64, wanted_max: 8, slots: 4 };
        let options =
            FakeOptions { groups: vec![group], limits, depth, vocab: 27, faults: Box::new(|| None) };
        let (notes, sizes) = (Rc::clone(notes), Arc::clone(sizes));
        let runner = Noting { fake: Fake::new(options), notes, sizes, launched: 0, collected: 0, loses };
        Engine::new(Box::new(runner), engine)
    }

    /// That many letters but the last of the alphabet.
    fn lettered(tokens: usize) -> Request {
        formed(&vec![0..=24; tokens])
    }

    /// One letter out of each of these.
    fn formed(letters: &[RangeInclusive<u32>]) -> Request {
        let form = Automaton::of_sets(letters, 26, 27);
        Request {
            grammar: Some(Box::new(form)),
            ..Request::new(vec![1, 2, 3], letters.len(), Sampling::greedy())
        }
    }

    #[test]
    fn masks_are_computed_while_a_step_is_under_way() {
        // The next mask needs the token before it. With a runner that computes while the engine goes on, the next step
        // is therefore launched, the one before collected, the mask computed, in this order.
        let (mut engine, handle, notes) = noting(1, None);
        let _reply = handle.submit(lettered(3)).unwrap();
        while engine.turn() == Turn::Worked {}
        assert_eq!(
            *notes.borrow(),
            [
                "launch 0",
                "sample 0 with 1 masks",
                "launch 1",
                "collect 0",
                "sample 1 with 1 masks",
                "launch 2",
                "collect 1",
                "sample 2 with 1 masks",
                "collect 2",
            ]
        );
        // With one that computes in `launch`, they are computed beside it: each side waits for the other here.
        let (to_launch, from_work) = mpsc::channel();
        let (to_work, from_launch) = mpsc::channel();
        let long = Duration::from_secs(60);
        let work = move || {
            to_launch.send(()).unwrap();
            from_launch.recv_timeout(long).is_ok()
        };
        let launch = || {
            to_work.send(()).unwrap();
            from_work.recv_timeout(long).is_ok()
        };
        assert_eq!(beside(work, launch), (Some(true), true));
        let (mut engine, handle, notes) = noting(0, None);
        let _reply = handle.submit(lettered(2)).unwrap();
        while engine.turn() == Turn::Worked {}
        let one_by_one = ["launch 0", "sample 0 with 1 masks", "collect 0"];
        let then = ["launch 1", "sample 1 with 1 masks", "collect 1"];
        assert_eq!(*notes.borrow(), [one_by_one, then].concat());
    }

    #[test]
    fn forced_tokens_are_computed_together_only_where_that_may_be_seen() {
        // A choice, five letters without one, a choice, two letters.
        let letters = [0..=1, 2..=2, 3..=3, 4..=4, 5..=5, 6..=6, 0..=1, 7..=7, 8..=8];
        let answer = |fast_forward: bool| {
            let (notes, sizes) = (Rc::default(), Sizes::default());
            let options =
                EngineOptions { fast_forward, ..EngineOptions::new(128, Arc::new(|| Duration::ZERO)) };
            let (mut engine, handle) = noted(0, None, options, &notes, &sizes);
            let mut reply = handle.submit(formed(&letters)).unwrap();
            while engine.turn() == Turn::Worked {}
            let tokens = std::iter::from_fn(|| reply[0].try_recv()).filter_map(|event| match event {
                Event::Token { token, .. } => Some(token),
                _ => None,
            });
            (tokens.collect::<Vec<_>>(), std::mem::take(&mut *sizes.lock().unwrap()))
        };
        let (forward, one_by_one) = (answer(true), answer(false));
        assert_eq!(forward.0, one_by_one.0, "no token changes");
        assert_eq!(forward.0.len(), 9);
        // A prompt of three; then the choice with the five that follow it, whose last is answered by the next choice.
        assert_eq!(forward.1, [3, 6]);
        assert_eq!(one_by_one.1, [3, 1, 1, 1, 1, 1, 1, 1, 1], "the sizes say nothing about the form");
    }

    /// Turns until the last answer of `owner` has ended, which asks for two while another owner's flood is under way.
    fn turns_beside_a_flood(depth: usize, slots: usize, owner: &str) -> usize {
        let group = KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 400 };
        let limits = StepLimits { tokens_max: 64, wanted_max: 8, slots };
        let options =
            FakeOptions { groups: vec![group], limits, depth, vocab: 27, faults: Box::new(|| None) };
        let engine = EngineOptions {
            queue: QueueLimits { requests_max: 1000, tokens_max: 1_000_000 },
            ..EngineOptions::new(1200, Arc::new(|| Duration::ZERO))
        };
        let (mut engine, handle) = Engine::new(Box::new(Fake::new(options)), engine);
        let ask = |owner: &str, start: u32, prompt: usize, tokens: usize| {
            let prompt = (0..prompt).map(|at| (start + u32::try_from(at).unwrap()) % 27).collect();
            let owner = Some(Arc::from(owner));
            handle.submit(Request { owner, ..Request::new(prompt, tokens, Sampling::greedy()) }).unwrap()
        };
        // Long prompts and long answers.
        let flood: Vec<_> = (0..100).flat_map(|number| ask("flood", number, 1000, 200)).collect();
        for _ in 0..10 {
            assert_eq!(engine.turn(), Turn::Worked);
        }
        let mut honest: Vec<_> = (0..2).flat_map(|number| ask(owner, number, 40, 10)).collect();
        let mut turns = 0;
        while !honest.is_empty() {
            assert_eq!(engine.turn(), Turn::Worked);
            engine.assert_consistent();
            turns += 1;
            honest.retain_mut(|reply| {
                !std::iter::from_fn(|| reply.try_recv()).any(|event| matches!(event, Event::End { .. }))
            });
        }
        drop(flood);
        while engine.turn() == Turn::Worked {}
        engine.assert_consistent();
        assert_eq!(handle.stats().pages[0].referenced, 0);
        turns
    }

    #[test]
    fn a_flood_of_one_owner_delays_anothers_answer_by_what_is_under_way_and_not_by_what_waits() {
        for depth in 0..3 {
            for slots in [2, 4, 8] {
                // Ten tokens each, one after the other where there is one seat for both; a seat is free after the steps
                // under way, and half of each step is for the prompt.
                let turns = turns_beside_a_flood(depth, slots, "honest");
                assert!(turns <= 40 * (depth + 1), "{turns} turns, depth {depth}, {slots} seats");
            }
        }
        // The same, by the owner of the flood: behind a hundred prompts of a thousand tokens.
        assert!(turns_beside_a_flood(0, 4, "flood") > 1000);
    }

    /// Seconds that an owner waits for each of a few answers, on a device where a step takes three milliseconds and each of
    /// its tokens one more; alone, or beside another owner who has flooded the engine for a while.
    fn seconds_of_each_answer(depth: usize, flooded: bool) -> Vec<f64> {
        let sizes = Sizes::default();
        let clock = {
            let sizes = Arc::clone(&sizes);
            Arc::new(move || {
                let sizes = sizes.lock().unwrap();
                Duration::from_millis(sizes.iter().map(|tokens| 3 + *tokens as u64).sum())
            })
        };
        let group = KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 400 };
        let limits = StepLimits { tokens_max: 64, wanted_max: 8, slots: 4 };
        let options =
            FakeOptions { groups: vec![group], limits, depth, vocab: 27, faults: Box::new(|| None) };
        let (fake, notes) = (Fake::new(options), Rc::default());
        let runner = Noting { fake, notes, sizes, launched: 0, collected: 0, loses: None };
        let engine = EngineOptions {
            queue: QueueLimits { requests_max: 1000, tokens_max: 1_000_000 },
            ..EngineOptions::new(1200, Arc::clone(&clock) as Clock)
        };
        let (mut engine, handle) = Engine::new(Box::new(runner), engine);
        let ask = |owner: &str, start: u32, prompt: usize, tokens: usize| {
            let prompt = (0..prompt).map(|at| (start + u32::try_from(at).unwrap()) % 27).collect();
            let owner = Some(Arc::from(owner));
            handle.submit(Request { owner, ..Request::new(prompt, tokens, Sampling::greedy()) }).unwrap()
        };
        let answered = |engine: &mut Engine, mut replies: Vec<Reply>| {
            while !replies.is_empty() {
                // The last turn of all may do nothing but collect.
                let goes_on = engine.turn() == Turn::Worked;
                engine.assert_consistent();
                assert!(goes_on || replies.len() == 1);
                replies.retain_mut(|reply| {
                    let mut events = std::iter::from_fn(|| reply.try_recv());
                    !events.any(|event| {
                        assert!(!matches!(event, Event::Failed(_)), "{event:?}");
                        matches!(event, Event::End { .. })
                    })
                });
            }
        };
        // Others have been here before, and steps of several lengths were seen.
        let first = [ask("other", 0, 50, 5), ask("flood", 0, 3, 5), ask("honest", 0, 70, 5)];
        answered(&mut engine, first.into_iter().flatten().collect());
        let flood: Vec<Reply> = match flooded {
            true => (0..100).flat_map(|number| ask("flood", number, 1000, 200)).collect(),
            false => Vec::new(),
        };
        while flooded && clock() < Duration::from_secs(6) {
            assert_eq!(engine.turn(), Turn::Worked);
        }
        let mut times = Vec::new();
        for number in 0..5 {
            let began = clock();
            let asked = ask("honest", 7 * number, 40, 10);
            answered(&mut engine, asked);
            times.push((clock() - began).as_secs_f64());
        }
        drop(flood);
        while engine.turn() == Turn::Worked {}
        engine.assert_consistent();
        assert_eq!(handle.stats().pages[0].referenced, 0);
        times
    }

    #[test]
    fn who_has_had_much_lately_is_hardly_noticed_by_who_has_not() {
        for depth in 0..2 {
            let (alone, beside) = (seconds_of_each_answer(depth, false), seconds_of_each_answer(depth, true));
            for (alone, beside) in alone.iter().zip(&beside) {
                assert!(*beside < 1.6 * alone, "depth {depth}: {beside} s, alone {alone} s");
            }
        }
    }

    #[test]
    fn a_runner_that_loses_answers_fails_the_steps_in_flight_and_nothing_else() {
        for depth in [0, 1] {
            let (mut engine, handle, _) = noting(depth, Some(1));
            let mut lost = handle.submit(Request::new(vec![1, 2, 3], 5, Sampling::greedy())).unwrap();
            while engine.turn() == Turn::Worked {}
            let events: Vec<Event> = std::iter::from_fn(|| lost[0].try_recv()).collect();
            let reason = "0 answers to 1 questions".to_owned();
            assert_eq!(events.last(), Some(&Event::Failed(Failure::Backend(reason))), "depth {depth}");
            let mut next = handle.submit(Request::new(vec![1, 2, 3], 5, Sampling::greedy())).unwrap();
            while engine.turn() == Turn::Worked {}
            let events: Vec<Event> = std::iter::from_fn(|| next[0].try_recv()).collect();
            assert!(matches!(events.last(), Some(Event::End { .. })), "depth {depth}: {events:?}");
            engine.assert_consistent();
            assert_eq!(handle.stats().pages[0].referenced, 0);
        }
    }

    #[test]
    fn guesses_and_penalties_know_what_was_said_and_no_placeholder() {
        let shown = Arc::new(std::sync::Mutex::new(Vec::new()));
        let drafter = {
            let shown = Arc::clone(&shown);
            Box::new(move |tokens: &[u32], _: usize| {
                shown.lock().unwrap().push(tokens.to_vec());
                vec![5]
            })
        };
        let group = KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 9 };
        let limits = StepLimits { tokens_max: 64, wanted_max: 8, slots: 4 };
        let options =
            FakeOptions { groups: vec![group], limits, depth: 0, vocab: 27, faults: Box::new(|| None) };
        let (notes, sizes) = (Rc::default(), Sizes::default());
        let histories = Rc::new(RefCell::new(Vec::new()));
        let fake = Fake::new(options).with_given(1);
        let noting = Noting { fake, notes, sizes, launched: 0, collected: 0, loses: None };
        let runner = Histories { noting, histories: Rc::clone(&histories) };
        let engine_options = EngineOptions {
            speculation: Speculation::Always(drafter),
            ..EngineOptions::new(128, Arc::new(|| Duration::ZERO))
        };
        let (mut engine, handle) = Engine::new(Box::new(runner), engine_options);
        let piece = |at, rows: &[f32]| crate::Piece {
            at,
            hash: crate::ContentHash([9; 16]),
            columns: 1,
            rows: rows.into(),
            offsets: Vec::new(),
            whole: false,
        };
        let sampling = Sampling { repetition_penalty: 1.5, ..Sampling::greedy() };
        let request = Request {
            pieces: vec![piece(1, &[1.0, 2.0]), piece(4, &[3.0])],
            ..Request::new(vec![11, 0, 0, 12, 0, 13], 3, sampling)
        };
        let mut reply = handle.submit(request).unwrap().remove(0);
        while engine.turn() == Turn::Worked {}
        let tokens: Vec<u32> = std::iter::from_fn(|| reply.try_recv())
            .filter_map(|event| if let Event::Token { token, .. } = event { Some(token) } else { None })
            .collect();
        assert_eq!(tokens.len(), 3);
        assert_eq!(shown.lock().unwrap()[0], [11, 12, 13, tokens[0]]);
        let histories = histories.borrow();
        assert_eq!(histories[0], [11, 12, 13]);
        assert_eq!(histories[1], [11, 12, 13, tokens[0]]);
        assert_eq!(histories[2], [11, 12, 13, tokens[0], 5], "before a drafted position");
    }

    /// A runner that writes down which tokens the sampler is shown.
    struct Histories {
        noting: Noting,
        histories: Rc<RefCell<Vec<Vec<u32>>>>,
    }

    impl Runner for Histories {
        fn launch(&mut self, batch: &Batch) -> Result<(), Error> {
            self.noting.launch(batch)
        }

        fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<(), Error> {
            self.histories.borrow_mut().extend(rows.iter().map(|row| row.history.to_vec()));
            self.noting.sample(rows)
        }

        fn hidden(&mut self, wanted: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
            self.noting.hidden(wanted)
        }

        fn collect(&mut self) -> Result<Output, Error> {
            self.noting.collect()
        }

        fn reset(&mut self) {
            self.noting.reset();
        }

        fn depth(&self) -> usize {
            self.noting.depth()
        }

        fn limits(&self) -> StepLimits {
            self.noting.limits()
        }

        fn groups(&self) -> &[KvGroup] {
            self.noting.groups()
        }

        fn vocab(&self) -> u32 {
            self.noting.vocab()
        }

        fn given(&self) -> Option<usize> {
            self.noting.fake.given()
        }
    }
}
