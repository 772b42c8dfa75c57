//! Every model that can be asked for: which are loaded, who uses them, and who goes when there is no room.
//!
//! One load or unload happens at a time, since each is planned by what the others take. Whoever asks for a model that
//! is not loaded waits for its load, which goes on when they leave: others may wait for it too.

use std::{
    ops::Deref,
    pin::pin,
    sync::{
        Arc, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use fornax_compute::Sampling;
use fornax_engine::{Event, Request};
use fornax_text::Special;
use serde::Serialize;
use tokio::sync::{Mutex, Notify, watch};
use utoipa::ToSchema;

use crate::{
    app::{Failed, Progress},
    error::{ApiError, Code},
    made::MadeModel,
    metrics::ModelMetrics,
    served::{ModelCard, Served},
};

/// Tokens of the self-test: one from the prompt, one from what was generated.
const SELF_TEST_TOKENS: usize = 2;

/// A model that may stay unused so long is not unloaded.
pub(crate) const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// How long models may take to be freed when the server ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A model that can be asked for, loaded or not.
pub struct Offer {
    /// What is known of it before it is loaded.
    pub card: ModelCard,
    /// Tokens of a request, as planned for it alone.
    pub context: usize,
    /// Whether it is loaded at the start, too. The first of all always is.
    pub preload: bool,
    /// Says from headers alone whether it can be loaded into that room. May take a moment.
    pub plan: Plan,
    /// Loads it, and says how far that is. Blocks.
    pub load: Load,
}

/// Whether a model can be loaded into a room.
pub type Plan = Box<dyn Fn(Room) -> Result<(), Failed> + Send + Sync>;

/// Loads a model.
pub type Load = Box<dyn Fn(Room, &watch::Sender<Progress>) -> Result<Served, Failed> + Send + Sync>;

/// What a model that is to be loaded finds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes that the models beside it take.
    pub taken: u64,
    /// Bytes that others will have given back by then.
    pub returning: u64,
}

/// Where a model stands.
pub(crate) enum State {
    Unloaded,
    Loading(Progress),
    Loaded {
        served: Arc<Served>,
        users: usize,
        /// When it was last wanted.
        last: Instant,
    },
    Unloading,
    /// Its last load failed; the next request tries again.
    Failed(Failed),
}

/// The same, in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Standing {
    Unloaded,
    Loading,
    Loaded,
    Unloading,
    Failed,
}

impl Standing {
    pub(crate) const ALL: [Standing; 5] =
        [Standing::Unloaded, Standing::Loading, Standing::Loaded, Standing::Unloading, Standing::Failed];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Standing::Unloaded => "unloaded",
            Standing::Loading => "loading",
            Standing::Loaded => "loaded",
            Standing::Unloading => "unloading",
            Standing::Failed => "failed",
        }
    }
}

impl State {
    pub(crate) fn standing(&self) -> Standing {
        match self {
            State::Unloaded => Standing::Unloaded,
            State::Loading(_) => Standing::Loading,
            State::Loaded { .. } => Standing::Loaded,
            State::Unloading => Standing::Unloading,
            State::Failed(_) => Standing::Failed,
        }
    }
}

/// All models, the default first.
pub(crate) struct Models {
    slots: Vec<Slot>,
    /// Held while one is loaded or unloaded.
    turn: Mutex<()>,
    /// Told whenever nobody uses a model any more.
    idle: Notify,
    /// Held while an adapter is loaded or unloaded: a name means one.
    pub(crate) adapter_turn: Mutex<()>,
    /// What clients made of models. Locked to read or change the list.
    made: std::sync::Mutex<Vec<Arc<MadeModel>>>,
    /// Held while a model is made or forgotten: a name means one, on the disk too.
    pub(crate) making: Mutex<()>,
}

/// A model, or one of its adapters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) index: usize,
    pub(crate) adapter: Option<Arc<ModelAdapter>>,
    /// What a client made of it, if that was asked for.
    pub(crate) made: Option<Arc<MadeModel>>,
}

impl Chosen {
    /// A model itself.
    pub(crate) fn model(index: usize) -> Chosen {
        Chosen { index, adapter: None, made: None }
    }
}

/// An adapter of a model, under the name that clients ask for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ModelAdapter {
    pub(crate) name: String,
    /// The number that the engine knows it by.
    pub(crate) number: u32,
    /// Where it was loaded from while the model ran; `None` of those that the model is always loaded with.
    pub(crate) loaded_from: Option<String>,
}

/// The last word of a client on how long a model stays without a request.
#[derive(Default)]
struct Kept {
    stays: Option<Duration>,
    /// Which word it is, so that none is missed.
    word: u64,
    /// Whether a task sees to it. One is enough, however many words there are.
    is_seen_to: bool,
}

/// A model and where it stands.
pub(crate) struct Slot {
    pub(crate) offer: Offer,
    /// Counted over all its loads.
    pub(crate) metrics: ModelMetrics,
    state: watch::Sender<State>,
    /// Those that it is loaded with, then those that were loaded while it runs. Locked to read or change the list.
    adapters: std::sync::Mutex<Vec<Arc<ModelAdapter>>>,
    /// Whether it was put to sleep; a model that is loaded is awake all the same.
    asleep: AtomicBool,
    /// What clients said of how long it stays. Locked to read or write it.
    kept: std::sync::Mutex<Kept>,
}

impl Slot {
    /// Looks at where it stands. Short: whoever asks for it waits meanwhile.
    pub(crate) fn look<T>(&self, at: impl FnOnce(&State) -> T) -> T {
        at(&self.state.borrow())
    }

    /// The model, if it is loaded. Held shortly: it does not count as used.
    pub(crate) fn loaded(&self) -> Option<Arc<Served>> {
        self.look(|state| match state {
            State::Loaded { served, .. } => Some(Arc::clone(served)),
            _ => None,
        })
    }

    pub(crate) fn watch(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    fn set(&self, state: State) {
        self.state.send_replace(state);
    }

    /// Counts a user in, if it is loaded.
    fn used(state: &mut State) -> Option<Arc<Served>> {
        let State::Loaded { served, users, .. } = state else { return None };
        *users += 1;
        Some(Arc::clone(served))
    }

    /// When it was last wanted and what it takes, if nobody uses it now.
    fn idle(&self) -> Option<(Instant, u64)> {
        self.look(|state| match state {
            State::Loaded { served, users: 0, last } => Some((*last, served.planned_bytes)),
            _ => None,
        })
    }

    /// How long it may stay unused, where the server's own rule is this.
    fn stays(&self, rule: Option<Duration>) -> Option<Duration> {
        self.kept().stays.or(rule).filter(|stays| *stays < FOR_EVER)
    }

    pub(crate) fn adapters(&self) -> MutexGuard<'_, Vec<Arc<ModelAdapter>>> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what was loaded while the model ran: it went with the model.
    fn forget_loaded_adapters(&self) {
        self.adapters().retain(|adapter| adapter.loaded_from.is_none());
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In how long it will be unloaded if nobody asks for it; `None` where it stays.
    pub(crate) fn leaves(&self, rule: Option<Duration>) -> Option<Duration> {
        let stays = self.stays(rule)?;
        let unused = self.idle().map_or(Duration::ZERO, |(last, _)| last.elapsed());
        Some(stays.saturating_sub(unused))
    }

    /// Whether it was put to sleep and nobody has woken it.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed) && self.look(|state| matches!(state, State::Unloaded))
    }

    fn planned_bytes(&self) -> u64 {
        self.loaded().map_or(0, |served| served.planned_bytes)
    }
}

impl Models {
    /// The first is the one that is meant when none is named.
    pub(crate) fn new(offers: Vec<Offer>) -> Arc<Models> {
        assert!(!offers.is_empty(), "there is a model to serve");
        let slot = |offer: Offer| Slot {
            adapters: std::sync::Mutex::new(fixed_adapters(&offer.card)),
            offer,
            metrics: ModelMetrics::new(),
            state: watch::Sender::new(State::Unloaded),
            asleep: AtomicBool::new(false),
            kept: std::sync::Mutex::default(),
        };
        Arc::new(Models {
            slots: offers.into_iter().map(slot).collect(),
            turn: Mutex::new(()),
            adapter_turn: Mutex::new(()),
            made: std::sync::Mutex::default(),
            making: Mutex::new(()),
            idle: Notify::new(),
        })
    }

    pub(crate) fn all(&self) -> &[Slot] {
        &self.slots
    }

    pub(crate) fn default(&self) -> &Slot {
        &self.slots[0]
    }

    /// Which model a client means.
    pub(crate) fn named(&self, name: Option<&str>) -> Result<Chosen, ApiError> {
        let Some(name) = name else { return Ok(Chosen::model(0)) };
        let find = |name: &str| self.served(name).or_else(|| self.made_of(name));
        // Ollama's clients put a tag behind every name.
        let found = find(name).or_else(|| find(name.strip_suffix(":latest")?));
        found.ok_or_else(|| {
            let names: Vec<String> = self.names().iter().map(|name| format!("{name:?}")).collect();
            let message = format!("there is no such model here; this server has {}", names.join(", "));
            ApiError::new(Code::ModelNotFound, message)
        })
    }

    /// The model that is served by this name, or the adapter.
    pub(crate) fn served(&self, name: &str) -> Option<Chosen> {
        self.slots.iter().enumerate().find_map(|(index, slot)| {
            let adapter = slot.adapters().iter().find(|adapter| adapter.name == name).cloned();
            let is_called = adapter.is_some() || slot.offer.card.is_called(name);
            is_called.then_some(Chosen { index, adapter, made: None })
        })
    }

    /// The model that was made by this name, as long as the one that it was made of is there.
    fn made_of(&self, name: &str) -> Option<Chosen> {
        let made = self.made().iter().find(|made| made.told.name == name).cloned()?;
        Some(Chosen { made: Some(Arc::clone(&made)), ..self.served(&made.told.from)? })
    }

    /// What clients made.
    pub(crate) fn made(&self) -> MutexGuard<'_, Vec<Arc<MadeModel>>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds what a client made, in the place of what had its name.
    pub(crate) fn add_made(&self, made: Arc<MadeModel>) {
        let mut others = self.made();
        others.retain(|there| there.told.name != made.told.name);
        others.push(made);
    }

    /// The same of what is there as long as the server runs: jobs may wait for long.
    pub(crate) fn lasting(&self, name: Option<&str>) -> Result<Chosen, ApiError> {
        let chosen = self.named(name)?;
        if let Some(made) = &chosen.made {
            let message = format!(
                "{:?} was made by a client and may be deleted at any time, so no work that waits is kept for it; name {:?}",
                made.told.name, made.told.from
            );
            return Err(ApiError::new(Code::ModelNotFound, message));
        }
        match &chosen.adapter {
            Some(adapter) if adapter.loaded_from.is_some() => {
                let message = format!(
                    "{:?} is an adapter that may be unloaded at any time, so no work that waits is kept for it; \
                     name one that the server was started with",
                    adapter.name
                );
                Err(ApiError::new(Code::ModelNotFound, message))
            }
            _ => Ok(chosen),
        }
    }

    /// Resolves when a model that is in use now, or will be, is not any more: there may be room then.
    pub(crate) fn idle(&self) -> impl Future<Output = ()> {
        self.idle.notified()
    }

    /// Every name that a client may use.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for slot in &self.slots {
            let card = &slot.offer.card;
            names.extend([&card.name].into_iter().chain(&card.aliases).cloned());
            names.extend(slot.adapters().iter().map(|adapter| adapter.name.clone()));
        }
        names.extend(self.made().iter().map(|made| made.told.name.clone()));
        names
    }

    /// Everything that can be chosen now: each model, then its adapters; then what was made of them.
    pub(crate) fn choices(&self) -> Vec<Chosen> {
        let mut choices = Vec::new();
        for (index, slot) in self.slots.iter().enumerate() {
            choices.push(Chosen::model(index));
            let adapters = slot.adapters();
            choices.extend(
                adapters.iter().map(|it| Chosen { adapter: Some(Arc::clone(it)), ..Chosen::model(index) }),
            );
        }
        let made: Vec<Arc<MadeModel>> = self.made().clone();
        choices.extend(made.iter().filter_map(|made| self.made_of(&made.told.name)));
        choices
    }

    /// The same of what is there as long as the server runs.
    pub(crate) fn lasting_choices(&self) -> Vec<Chosen> {
        let mut choices = self.choices();
        choices.retain(|chosen| {
            chosen.made.is_none()
                && chosen.adapter.as_ref().is_none_or(|adapter| adapter.loaded_from.is_none())
        });
        choices
    }

    /// The first name of what was chosen.
    pub(crate) fn name<'a>(&'a self, chosen: &'a Chosen) -> &'a str {
        match (&chosen.made, &chosen.adapter) {
            (Some(made), _) => &made.told.name,
            (None, Some(adapter)) => &adapter.name,
            (None, None) => &self.slots[chosen.index].offer.card.name,
        }
    }

    /// The model, loaded if need be. Whoever stops waiting leaves the load to those who go on.
    pub(crate) async fn lease(self: &Arc<Models>, chosen: Chosen) -> Result<Lease, Failed> {
        let index = chosen.index;
        let slot = &self.slots[index];
        let mut changes = slot.state.subscribe();
        let mut waited = false;
        loop {
            let (mut served, mut failed, mut begins) = (None, None, false);
            slot.state.send_if_modified(|state| {
                served = Slot::used(state);
                match state {
                    State::Failed(why) if waited => failed = Some(why.clone()),
                    State::Unloaded | State::Failed(_) => {
                        *state = State::Loading(Progress::default());
                        begins = true;
                    }
                    State::Loaded { .. } | State::Loading(_) | State::Unloading => {}
                }
                begins
            });
            if let Some(served) = served {
                let lease = Lease { models: Arc::clone(self), chosen, served };
                // From here on the model stays, and with it what it was loaded with.
                return lease.checked();
            }
            if let Some(failed) = failed {
                return Err(failed);
            }
            if begins {
                let models = Arc::clone(self);
                // On a task of its own: it does not end with whoever asked first.
                tokio::spawn(async move { models.load(index).await });
            }
            waited = true;
            changes.changed().await.map_err(|_| Failed::internal("the server is gone"))?;
        }
    }

    /// Loads a model whose state says so already.
    async fn load(self: &Arc<Models>, index: usize) {
        let slot = &self.slots[index];
        let _turn = self.turn.lock().await;
        match self.made_room_and_loaded(index).await {
            Ok(served) => {
                tracing::info!(model = served.card.name, seconds = served.load_seconds, "ready");
                slot.metrics.loaded(served.load_seconds);
                slot.asleep.store(false, Ordering::Relaxed);
                slot.set(State::Loaded { served: Arc::new(served), users: 0, last: Instant::now() });
            }
            Err(failed) => {
                let name = &slot.offer.card.name;
                tracing::error!(model = name, code = failed.code.name(), reason = failed.message, "failed");
                slot.metrics.load_failed();
                slot.set(State::Failed(failed));
            }
        }
    }

    async fn made_room_and_loaded(self: &Arc<Models>, index: usize) -> Result<Served, Failed> {
        let slot = &self.slots[index];
        for idle in self.in_the_way(index).await? {
            self.unload(idle, Duration::ZERO).await;
        }
        let room = Room { taken: self.taken(), returning: 0 };
        let progress = watch::Sender::new(Progress::default());
        let mut seen = progress.subscribe();
        let mut loading = pin!(self.on_a_thread(index, move |offer| (offer.load)(room, &progress)));
        let served = loop {
            tokio::select! {
                biased;
                loaded = &mut loading => break loaded?,
                Ok(()) = seen.changed() => {
                    let progress = seen.borrow_and_update().clone();
                    slot.set(State::Loading(progress));
                }
            }
        };
        slot.set(State::Loading(Progress { stage: "self-test".to_owned(), ..Progress::default() }));
        match self_test(&served).await {
            Ok(()) => Ok(served),
            Err(failed) => {
                freed(Arc::new(served)).await;
                Err(failed)
            }
        }
    }

    /// Which models have to go so that this one fits: none where it fits as it is, then those that nobody uses, the
    /// longest unused first. Where that would not be enough all stay, and the refusal says what they take.
    async fn in_the_way(self: &Arc<Models>, index: usize) -> Result<Vec<usize>, Failed> {
        let mut idle: Vec<_> =
            self.slots.iter().enumerate().filter_map(|(at, slot)| Some((at, slot.idle()?))).collect();
        idle.sort_by_key(|(_, (last, _))| *last);
        let mut room = Room { taken: self.taken(), returning: 0 };
        let mut going = Vec::new();
        let mut idle = idle.into_iter();
        loop {
            let asked = room;
            match self.on_a_thread(index, move |offer| (offer.plan)(asked)).await {
                Ok(()) => return Ok(going),
                Err(refused) if refused.code == Code::ModelDoesNotFit => match idle.next() {
                    Some((at, (_, bytes))) => {
                        going.push(at);
                        room.taken -= bytes;
                        room.returning += bytes;
                    }
                    None if self.taken() == 0 => return Err(refused),
                    None => {
                        let message = format!(
                            "{}; {} bytes are taken by models in use: {}",
                            refused.message,
                            room.taken,
                            self.in_use().join(", ")
                        );
                        return Err(Failed { message, ..refused });
                    }
                },
                Err(refused) => return Err(refused),
            }
        }
    }

    /// Bytes of all that are loaded.
    fn taken(&self) -> u64 {
        self.slots.iter().map(Slot::planned_bytes).sum()
    }

    fn in_use(&self) -> Vec<String> {
        let used = self.slots.iter().filter(|slot| slot.loaded().is_some() && slot.idle().is_none());
        used.map(|slot| format!("{:?}", slot.offer.card.name)).collect()
    }

    /// Unloads a model that nobody has used for so long; returns when its memory is free. Whoever calls has the turn.
    async fn unload(&self, index: usize, unused_for: Duration) {
        let slot = &self.slots[index];
        let mut leaving = None;
        slot.state.send_if_modified(|state| {
            let goes = matches!(state, State::Loaded { users: 0, last, .. } if last.elapsed() >= unused_for);
            if goes && let State::Loaded { served, .. } = std::mem::replace(state, State::Unloading) {
                leaving = Some(served);
            }
            goes
        });
        let Some(served) = leaving else { return };
        tracing::info!(model = served.card.name, bytes = served.planned_bytes, "unloading");
        slot.metrics.unloaded(&served.engine.stats());
        slot.forget_loaded_adapters();
        freed(served).await;
        slot.set(State::Unloaded);
    }

    /// Unloads a model as soon as nobody uses it, if that is within so long; whether it is unloaded. The next request
    /// wakes it.
    pub(crate) async fn put_to_sleep(self: &Arc<Models>, index: usize, patience: Duration) -> bool {
        let end = tokio::time::Instant::now() + patience;
        let models = Arc::clone(self);
        // A task of its own: what has begun to be unloaded is unloaded to the end, however long that takes and whatever
        // becomes of the caller.
        let sleeping = tokio::spawn(async move {
            let slot = &models.slots[index];
            loop {
                // Asked for before anything is looked at, so that no end of a use is missed.
                let mut told = pin!(models.idle.notified());
                told.as_mut().enable();
                {
                    let Ok(_turn) = tokio::time::timeout_at(end, models.turn.lock()).await else {
                        return false;
                    };
                    models.unload(index, Duration::ZERO).await;
                    if slot.loaded().is_none() {
                        slot.asleep.store(true, Ordering::Relaxed);
                        return true;
                    }
                }
                if tokio::time::timeout_at(end, told).await.is_err() {
                    return false;
                }
            }
        });
        sleeping.await.unwrap_or(false)
    }

    /// Unloads what has not been used for so long, for ever.
    pub(crate) async fn retire(self: Arc<Models>, unused_for: Duration) {
        loop {
            let due = |slot: &Slot| Some(slot.idle()?.0 + slot.stays(Some(unused_for))?);
            let now = Instant::now();
            // Whatever is loaded or used from now on is not due before that.
            let next = self.slots.iter().filter_map(due).min().unwrap_or(now + unused_for);
            tokio::time::sleep_until(next.max(now + unused_for / 100).into()).await;
            for (index, slot) in self.slots.iter().enumerate() {
                let Some(stays) = slot.stays(Some(unused_for)) else { continue };
                if slot.idle().is_some_and(|(last, _)| last.elapsed() >= stays) {
                    let _turn = self.turn.lock().await;
                    self.unload(index, stays).await;
                }
            }
        }
    }

    /// A client's word on how long a model stays without a request, from the end of its own on. The next such word takes its
    /// place.
    pub(crate) fn keep(self: &Arc<Models>, index: usize, stays: Duration) {
        let mut kept = self.slots[index].kept();
        (kept.stays, kept.word) = (Some(stays), kept.word + 1);
        if !std::mem::replace(&mut kept.is_seen_to, true) {
            let models = Arc::clone(self);
            tokio::spawn(async move { models.see_to(index).await });
        }
        drop(kept);
        // Whoever sees to the word before waits for its time.
        self.idle.notify_waiters();
    }

    /// Unloads a model when it has stayed for as long as the last word says.
    async fn see_to(&self, index: usize) {
        let slot = &self.slots[index];
        loop {
            // Told whenever a model is idle or a word is said; asked for before anything is looked at, so that none is
            // missed.
            let mut told = pin!(self.idle.notified());
            told.as_mut().enable();
            let word = slot.kept().word;
            let due = match (slot.stays(None), slot.idle()) {
                (Some(stays), Some((last, _))) => Some((last + stays, stays)),
                _ => None,
            };
            match due {
                Some((at, stays)) if at <= Instant::now() => {
                    let _turn = self.turn.lock().await;
                    self.unload(index, stays).await;
                }
                Some((at, _)) => tokio::select! {
                    () = tokio::time::sleep_until(at.into()) => {}
                    () = told => {}
                },
                None if slot.stays(None).is_some() && slot.loaded().is_some() => told.await,
                None => {
                    // It is gone, or stays for ever.
                    let mut kept = slot.kept();
                    if kept.word == word {
                        kept.is_seen_to = false;
                        return;
                    }
                }
            }
        }
    }

    /// Unloads everything, whoever uses it: the server ends. Nothing can be loaded any more.
    pub(crate) async fn close(&self) {
        let closing = async {
            for slot in &self.slots {
                if let State::Loaded { served, .. } = slot.state.send_replace(State::Unloading) {
                    freed(served).await;
                }
            }
        };
        // A client that does not read may hold one open; the process ends with it.
        drop(tokio::time::timeout(CLOSE_TIMEOUT, closing).await);
    }

    async fn on_a_thread<T: Send + 'static>(
        self: &Arc<Models>,
        index: usize,
        work: impl FnOnce(&Offer) -> Result<T, Failed> + Send + 'static,
    ) -> Result<T, Failed> {
        let models = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || work(&models.slots[index].offer)).await;
        done.unwrap_or_else(|_| Err(Failed::internal("loading the model panicked")))
    }
}

/// The adapters that a model is always loaded with.
fn fixed_adapters(card: &ModelCard) -> Vec<Arc<ModelAdapter>> {
    let adapter =
        |(number, name): (u32, &String)| ModelAdapter { name: name.clone(), number, loaded_from: None };
    (0..).zip(&card.adapters).map(adapter).map(Arc::new).collect()
}

/// Lets go of a model and waits until its memory is free.
async fn freed(served: Arc<Served>) {
    let mut freed = served.keeper.freed();
    // Tokenizers and grammars take a moment, too.
    drop(tokio::task::spawn_blocking(move || drop(served)).await);
    // A sender that is gone has freed it as well.
    drop(freed.wait_for(|freed| *freed).await);
}

/// A generation of our own: what cannot answer this is not ready.
async fn self_test(served: &Served) -> Result<(), Failed> {
    let prompt = served.tokenizer.encode_prompt("Hello", Special::AsText);
    let prompt = prompt.map_err(|error| Failed::internal(error.to_string()))?;
    // A model that encodes has no answers: it shows what it makes of the prompt.
    let capacity = served.engine.capacity();
    let embeds = capacity.encodes;
    // Nor has one that reads two texts; the second is empty here.
    let second = capacity.pairs.then_some(prompt.len());
    let tokens = if embeds { 0 } else { SELF_TEST_TOKENS };
    let mut replies = served
        .engine
        .submit(Request { embeds, second, ..Request::new(prompt, tokens, Sampling::greedy()) })
        .map_err(|refusal| Failed::internal(format!("the self-test was refused: {refusal}")))?;
    for reply in &mut replies {
        while let Some(event) = reply.next().await {
            if let Event::Failed(failure) = event {
                let message = format!("the self-test failed: {failure}");
                return Err(Failed { code: failure.code(), message });
            }
        }
    }
    Ok(())
}

/// A model in use. It stays loaded until this is dropped.
pub(crate) struct Lease {
    models: Arc<Models>,
    chosen: Chosen,
    served: Arc<Served>,
}

impl Lease {
    /// The model, for work on other threads.
    pub(crate) fn served(&self) -> &Arc<Served> {
        &self.served
    }

    /// Which model it is.
    pub(crate) fn chosen(&self) -> &Chosen {
        &self.chosen
    }

    pub(crate) fn slot(&self) -> &Slot {
        &self.models.slots[self.chosen.index]
    }

    /// Refuses an adapter that went while its model was waited for.
    fn checked(self) -> Result<Lease, Failed> {
        let Some(adapter) = &self.chosen.adapter else { return Ok(self) };
        if self.slot().adapters().iter().any(|there| Arc::ptr_eq(there, adapter)) {
            return Ok(self);
        }
        let message = format!("the adapter {:?} was unloaded", adapter.name);
        Err(Failed { code: Code::ModelNotFound, message })
    }

    pub(crate) fn metrics(&self) -> &ModelMetrics {
        &self.slot().metrics
    }

    /// What was asked for: the model, or one of its adapters.
    pub(crate) fn name(&self) -> &str {
        self.models.name(&self.chosen)
    }

    /// The adapter, as the engine knows it.
    pub(crate) fn adapter(&self) -> Option<u32> {
        self.chosen.adapter.as_ref().map(|adapter| adapter.number)
    }
}

impl Deref for Lease {
    type Target = Served;

    fn deref(&self) -> &Served {
        &self.served
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut is_idle = false;
        self.slot().state.send_if_modified(|state| {
            if let State::Loaded { users, last, .. } = state {
                *users -= 1;
                *last = Instant::now();
                is_idle = *users == 0;
            }
            false
        });
        if is_idle {
            self.models.idle.notify_waiters();
        }
    }
}
