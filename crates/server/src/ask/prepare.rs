//! From bytes to questions, away from the threads that serve sockets.

use std::{
    ops::Deref,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use fornax_engine::Grammar;
use fornax_form::{Form, FormError};
use serde_json::Value;
use tokio::{runtime::Handle, sync::oneshot};

use crate::{
    app::{Admission, App, Entry},
    error::{ApiError, Code},
    front::{
        body::RawBody,
        keys::{Caller, Tenant},
    },
    served::Served,
    shape::{self, Body},
    shares::{Share, Shares},
    turns::Turn,
};

/// Reads the body of a request, lets it in to the model that it names, and makes of it what is asked; parsing,
/// templates, encoding and compiling take as long as a client makes them, and happen on threads that may block.
pub(crate) async fn admit<B: Body + Send, T: Send + 'static>(
    app: &Arc<App>,
    caller: &Caller,
    body: RawBody,
    work: impl FnOnce(&B, &Preparing<'_>) -> Result<T, ApiError> + Send + 'static,
) -> Result<(Admission, T), ApiError> {
    let entry = app.enter(caller)?;
    let Read { body, model, share } = read::<B>(app, caller.tenant(), body).await?;
    let admission = entry.admit(app.models.named(model.as_deref())?).await?;
    let made =
        on_a_thread(app, caller.tenant(), admission.served.served(), move |served| work(&body, served));
    let made = made.await?;
    // Until now: what was read is as large as what was sent.
    drop(share);
    Ok((admission, made))
}

/// The same for what needs a model and no answer of it. The entry counts it as under way.
pub(crate) async fn prepare<B: Body + Send, T: Send + 'static>(
    app: &Arc<App>,
    caller: &Caller,
    body: RawBody,
    work: impl FnOnce(&B, &Preparing<'_>) -> Result<T, ApiError> + Send + 'static,
) -> Result<(Entry, T), ApiError> {
    let entry = app.enter(caller)?;
    let Read { body, model, share } = read::<B>(app, caller.tenant(), body).await?;
    let lease = app.lease(app.models.named(model.as_deref())?).await?;
    let made = on_a_thread(app, caller.tenant(), lease.served(), move |served| work(&body, served)).await?;
    drop(share);
    Ok((entry, made))
}

/// A body that was understood.
pub(crate) struct Read<B> {
    pub(crate) body: B,
    /// The model that it names.
    pub(crate) model: Option<String>,
    /// Its part of what all bodies may take.
    pub(crate) share: Share,
}

/// Understands a body, and says which model it names.
pub(crate) async fn read<B: Body + Send>(
    app: &App,
    tenant: &Tenant,
    body: RawBody,
) -> Result<Read<B>, ApiError> {
    blocking(app, tenant, move |patience| {
        let RawBody { bytes, share } = body;
        let value = shape::parse(&bytes, &|| !patience.is_over())?;
        // The parsed form is what is left of it.
        drop(bytes);
        let model = value.get("model").and_then(Value::as_str).map(str::to_owned);
        Ok(Read { body: shape::understand(value, B::UNKNOWN)?, model, share })
    })
    .await
}

/// Does work with a model that takes its time.
pub(crate) async fn on_a_thread<T: Send + 'static>(
    app: &App,
    tenant: &Tenant,
    served: &Arc<Served>,
    work: impl FnOnce(&Preparing<'_>) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (served, owner) = (Arc::clone(served), tenant.clone());
    let (looking, rows) = (Arc::clone(&app.looking), Arc::clone(&app.rows));
    let shares_pictures = app.options.shared_prefixes;
    blocking(app, tenant, move |patience| {
        work(&Preparing { served: &served, owner, patience, looking: &looking, rows: &rows, shares_pictures })
    })
    .await
}

/// Does work on a thread that may block, when it is its owner's turn. The turn belongs to the thread: it is over when the
/// work is, not when whoever asked has left.
pub(crate) async fn blocking<T: Send + 'static>(
    app: &App,
    tenant: &Tenant,
    work: impl FnOnce(&Patience) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let turn = app.preparing.take(tenant).await;
    let limit = app.options.prepare_timeout;
    let time = Arc::new(Time { until: Instant::now() + limit, limit, left: AtomicBool::new(false) });
    let asker = Asker(Arc::clone(&time));
    let (done, working) = oneshot::channel();
    // A form that is sent in parts is read with it.
    let runtime = Handle::current();
    let thread = std::thread::Builder::new().name("prepare".to_owned()).spawn(move || {
        become_nice(turn.nice());
        let _runtime = runtime.enter();
        let patience = Patience { time, turn: Mutex::new(Some(turn)) };
        let made = patience.check().and_then(|()| work(&patience));
        drop(patience);
        drop(done.send(made));
    });
    if thread.is_err() {
        return Err(ApiError::new(Code::OutOfMemory, "no thread to prepare the request"));
    }
    // The thread looks at the clock between two pieces of work; whoever asked need not wait for the end of one.
    let done = tokio::time::timeout(limit, working).await;
    let late = asker.0.late();
    drop(asker);
    match done {
        Ok(done) => done.map_err(|_| gone())?,
        Err(_) => Err(late),
    }
}

/// Lets others go before this thread by so much more, where both want a core. It cannot be taken back without privileges, so
/// the thread is for nothing else.
#[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "it would be the whole program's"))]
fn become_nice(nice: i32) {
    // Of this thread alone, and of the threads and processes that it starts. Where it cannot be had, it stays as it was.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(nice);
}

fn gone() -> ApiError {
    ApiError::new(Code::Internal, "the request could not be prepared")
}

/// A model, for work on a question that stops when its time is over or nobody waits for it any more.
pub(crate) struct Preparing<'a> {
    served: &'a Served,
    /// Whose question it is.
    owner: Tenant,
    patience: &'a Patience,
    /// Turns of looking at pictures.
    looking: &'a Arc<Shares>,
    /// Room for what pictures become.
    rows: &'a Arc<Shares>,
    /// What was seen for one owner is found by all, as prefixes are.
    shares_pictures: bool,
}

impl Deref for Preparing<'_> {
    type Target = Served;

    fn deref(&self) -> &Served {
        self.served
    }
}

impl Preparing<'_> {
    /// Refuses to go on when the time is over. Asked between pieces of work.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        self.patience.check()
    }

    /// Looks at pictures that become so many bytes, as long as anybody wants it. The turn of preparing is over: what follows
    /// takes long, and is done for as few at once as decoded pictures have room. Turns of it are shared among tenants, too,
    /// and so is the room for what comes of it, which is taken for as long as the share is kept. The work is told by whom it
    /// is found again.
    pub(crate) fn look<T>(
        &self,
        bytes: usize,
        work: impl FnOnce(Option<&str>, &dyn Fn() -> bool) -> Result<T, ApiError>,
    ) -> Result<(T, Share), ApiError> {
        self.patience.end_turn();
        let time = &self.patience.time;
        // What is larger than all room waits for all of it.
        let units = (bytes >> 10).saturating_add(1).min(self.rows.units());
        // Half of what is left of the time: the other half is for looking.
        let half = time.until.saturating_duration_since(Instant::now()) / 2;
        let take = async { tokio::time::timeout(half, self.rows.take(&self.owner, units)).await };
        let share = Handle::current().block_on(take).map_err(|_| {
            let message = "requests with images hold as many bytes already as they may at a time";
            ApiError::new(Code::QueueFull, message)
        })?;
        let take = tokio::time::timeout_at(time.until.into(), self.looking.take(&self.owner, 1));
        let _turn = Handle::current().block_on(take).map_err(|_| time.late())?;
        self.check()?;
        let owner = self.owner.as_deref().filter(|_| !self.shares_pictures);
        let made = work(owner, &|| !self.patience.is_over());
        // What was given up says how long it took.
        self.check()?;
        Ok((made?, share))
    }

    /// Compiles a form, as long as anybody wants it.
    pub(crate) fn compile(&self, form: &Form) -> Result<Grammar, FormError> {
        self.grammars.compile_for(form, &self.owner, &|| !self.patience.is_over())
    }
}

/// The turn of the thread that prepares, and how long it may go on.
pub(crate) struct Patience {
    time: Arc<Time>,
    /// None once it is over, with work that has turns of its own.
    turn: Mutex<Option<Turn>>,
}

impl Patience {
    /// Asked between pieces of work, on the thread that does them.
    pub(crate) fn is_over(&self) -> bool {
        if let Some(nice) = self.turn().as_ref().and_then(Turn::look) {
            become_nice(nice);
        }
        self.time.is_over()
    }

    /// Ends the turn, for work that takes long and has turns of its own.
    fn end_turn(&self) {
        if let Some(nice) = self.turn().take().and_then(Turn::end) {
            become_nice(nice);
        }
    }

    fn turn(&self) -> MutexGuard<'_, Option<Turn>> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn check(&self) -> Result<(), ApiError> {
        if self.is_over() { Err(self.time.late()) } else { Ok(()) }
    }
}

/// How long preparing may go on.
struct Time {
    until: Instant,
    limit: Duration,
    /// Whoever asked is gone.
    left: AtomicBool,
}

impl Time {
    fn is_over(&self) -> bool {
        self.left.load(Ordering::Relaxed) || Instant::now() >= self.until
    }

    fn late(&self) -> ApiError {
        let message = format!("the request took longer than {} s to prepare", self.limit.as_secs_f64());
        ApiError::new(Code::ExecutionTimeout, message)
    }
}

/// Whoever waits for what is prepared. Dropping it stops the work.
struct Asker(Arc<Time>);

impl Drop for Asker {
    fn drop(&mut self) {
        self.0.left.store(true, Ordering::Relaxed);
    }
}

/// Bytes of a text for each byte of its tokens: composing characters (NFC) makes texts shorter, at most by this much.
const SHRINKS_MAX: usize = 4;

/// Refuses a text that cannot fit whatever its tokens are, before time is spent on cutting megabytes into tokens; and
/// any text once the time for preparing is over.
pub(crate) fn check_length(served: &Preparing<'_>, bytes: usize) -> Result<(), ApiError> {
    served.check()?;
    let context = served.engine.capacity().context;
    // Ordinary texts have some four bytes a token: nothing to look up for them.
    if bytes <= context.saturating_mul(16) {
        return Ok(());
    }
    let tokens = 0..u32::try_from(served.tokenizer.vocab_len()).unwrap_or(u32::MAX);
    let longest = tokens.map(|token| served.tokenizer.token_bytes(token).len()).max().unwrap_or(1);
    let most = context.saturating_mul(longest).saturating_mul(SHRINKS_MAX);
    if bytes > most {
        let message = format!(
            "the prompt has {bytes} bytes; this model's maximum context length is {context} tokens, at most {most} bytes"
        );
        return Err(ApiError::new(Code::PromptTooLong, message));
    }
    Ok(())
}
