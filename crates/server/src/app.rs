//! What all routes share: where the server stands in its life, and who may come in.

use std::{
    sync::{Arc, OnceLock},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;
use tokio::sync::watch;
use utoipa::ToSchema;

use crate::{
    error::{ApiError, Code},
    front::{
        keys::{Caller, Keys, Tenant},
        line::Line,
    },
    jobs::durable::Durable,
    metrics::Metrics,
    models::{Chosen, Lease, Models, Offer},
    options::ServerOptions,
    shares::{Share, Shares},
    trace::{Span, Traces},
    turns::Turns,
    worker::jobs::Jobs,
};

/// Bytes of a form beside the file in it.
pub(crate) const FORM_BYTES: usize = 64 << 10;

/// Shared by every request.
pub(crate) struct App {
    pub(crate) options: ServerOptions,
    pub(crate) keys: Keys,
    pub(crate) metrics: Metrics,
    pub(crate) models: Arc<Models>,
    /// Where spans go, if anywhere.
    pub(crate) traces: Option<Arc<Traces>>,
    /// Jobs of `/execute` that `/cancel` may name.
    pub(crate) jobs: Jobs,
    /// Durable jobs, from when their store is open; never where none are kept.
    pub(crate) durable: OnceLock<Durable>,
    pub(crate) started: Instant,
    phase: watch::Sender<Phase>,
    /// Told to stop: nobody new comes in.
    draining: watch::Sender<bool>,
    /// The time to finish is over: whoever is still in leaves.
    killed: watch::Sender<bool>,
    /// Requests admitted and not yet done.
    in_flight: watch::Sender<usize>,
    /// Texts are encoded and schemas compiled by as many threads as there are cores, and as many for those who have much of
    /// that. Two at least, so that one tenant cannot take all.
    pub(crate) preparing: Arc<Turns>,
    /// Turns of looking at pictures: one that is decoded takes hundreds of megabytes.
    pub(crate) looking: Arc<Shares>,
    /// Bodies held, in KiB.
    pub(crate) bodies: Arc<Shares>,
    /// What pictures became of requests that are not done, in KiB.
    pub(crate) rows: Arc<Shares>,
}

/// Where the server stands.
#[derive(Clone)]
pub(crate) enum Phase {
    /// It listens; nothing is loaded.
    Starting,
    /// The models of the start are being loaded.
    Loading(Progress),
    /// They are loaded and have answered a question of our own. From here on models come and go.
    Ready,
    /// They cannot be had.
    Failed(Failed),
}

/// How far loading is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Progress {
    /// What is being done.
    pub stage: String,
    /// Bytes done.
    pub bytes: u64,
    /// Bytes there are.
    pub bytes_total: u64,
}

/// Why there is no model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Failed {
    /// What programs know it by.
    pub code: Code,
    /// For people.
    pub message: String,
}

impl Failed {
    /// A failure of the server itself.
    pub(crate) fn internal(message: impl Into<String>) -> Failed {
        Failed { code: Code::Internal, message: message.into() }
    }
}

/// Pictures of how many requests are decoded at once. What is left of one that waits for the tower is small.
const LOOKING: usize = 2;

impl App {
    pub(crate) fn new(options: ServerOptions, keys: Keys, offers: Vec<Offer>) -> Arc<App> {
        // Room for the largest body at least, or it would wait for ever.
        let largest = options.body_bytes_max.max(options.file_bytes_max.saturating_add(FORM_BYTES));
        let bodies_kib = (options.bodies_bytes_max.max(largest) >> 10) + 1;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(App {
            keys,
            metrics: Metrics::new(),
            models: Models::new(offers),
            traces: options.otlp.as_deref().map(|endpoint| Arc::new(Traces::open(endpoint))),
            jobs: Jobs::default(),
            durable: OnceLock::new(),
            started: Instant::now(),
            phase: watch::Sender::new(Phase::Starting),
            draining: watch::Sender::new(false),
            killed: watch::Sender::new(false),
            in_flight: watch::Sender::new(0),
            preparing: Turns::new(cores.max(2)),
            looking: Shares::new(LOOKING),
            bodies: Shares::new(bodies_kib),
            rows: Shares::new((options.rows_bytes_max >> 10).max(1)),
            options,
        })
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    pub(crate) fn watch_phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    pub(crate) fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    pub(crate) fn watch_draining(&self) -> watch::Receiver<bool> {
        self.draining.subscribe()
    }

    /// Lets nobody in any more, and waits for those who are, as long as the options allow. Returns how many had to go.
    pub(crate) async fn drain(&self) -> usize {
        self.draining.send_replace(true);
        let mut in_flight = self.in_flight.subscribe();
        let finished = in_flight.wait_for(|count| *count == 0);
        if tokio::time::timeout(self.options.drain_timeout, finished).await.is_ok() {
            return 0;
        }
        let left = *self.in_flight.borrow();
        self.killed.send_replace(true);
        // Streams end with an error now; only a client that does not read can hold one open.
        let finished = in_flight.wait_for(|count| *count == 0);
        drop(tokio::time::timeout(std::time::Duration::from_secs(1), finished).await);
        left
    }

    pub(crate) fn watch_killed(&self) -> watch::Receiver<bool> {
        self.killed.subscribe()
    }

    /// Refuses while the models of the start are not there, and where they cannot be had.
    pub(crate) fn check_ready(&self) -> Result<(), ApiError> {
        match self.phase() {
            Phase::Ready => Ok(()),
            Phase::Starting | Phase::Loading(_) => {
                Err(ApiError::new(Code::ModelNotReady, "the model is being loaded"))
            }
            Phase::Failed(failed) => Err(ApiError::new(Code::ModelNotReady, failed.to_string())),
        }
    }

    /// A model to use, loaded if need be. Waiting has the bounds of an answer: its deadline, and the server's end.
    pub(crate) async fn lease(&self, chosen: Chosen) -> Result<Lease, ApiError> {
        let lease = self.models.lease(chosen);
        let (mut draining, limit) = (self.watch_draining(), self.options.request_timeout);
        let late = async {
            match limit {
                Some(limit) => tokio::time::sleep(limit).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // What is loaded is had even while the server ends.
            biased;
            lease = lease => lease.map_err(ApiError::from),
            _ = draining.wait_for(|draining| *draining) => Err(leaving()),
            () = late => {
                let seconds = limit.unwrap_or_default().as_secs_f64();
                let message = format!("the model was not loaded within {seconds} seconds");
                Err(ApiError::new(Code::ModelNotReady, message))
            }
        }
    }

    /// Refuses what there is no memory for, a body of this many bytes among it.
    pub(crate) fn check_memory(&self, body_bytes: usize) -> Result<(), ApiError> {
        self.options.ceiling.as_ref().map_or(Ok(()), |ceiling| ceiling.check(body_bytes))
    }

    /// Lets a request in, if the server goes on.
    pub(crate) fn enter(self: &Arc<App>, caller: &Caller) -> Result<Entry, ApiError> {
        self.check_ready()?;
        self.enter_without_model(caller)
    }

    /// The same for what needs no model.
    pub(crate) fn enter_without_model(self: &Arc<App>, caller: &Caller) -> Result<Entry, ApiError> {
        if self.is_draining() {
            return Err(leaving());
        }
        let whose = Whose { tenant: caller.tenant().clone(), urgent: caller.key.urgent };
        Ok(self.entry(caller.span.clone(), Some(Arc::clone(&caller.line)), whose))
    }

    /// Room for this many bytes of a caller's, beside all that is being read, understood or told; they were kept before, so
    /// nobody keeps them from coming, and waiting for room has the bounds of a body's arrival. What is larger than all
    /// room waits for all of it.
    pub(crate) async fn room(&self, tenant: &Tenant, bytes: usize) -> Result<Share, ApiError> {
        let units = (bytes / 1024 + 1).min(self.bodies.units());
        let taken = tokio::time::timeout(self.options.read_timeout, self.bodies.take(tenant, units));
        let share = taken.await.map_err(|_| {
            ApiError::new(Code::QueueFull, "as many bytes are being read or told already as may be at a time")
        })?;
        self.check_memory(bytes)?;
        Ok(share)
    }

    /// Lets in what a durable job asks: whoever submitted it is not waiting, and it is none of their requests under way.
    pub(crate) fn enter_job(self: &Arc<App>, owner: &str) -> Entry {
        let (tenant, urgent) = self.keys.tenant_of(owner);
        self.entry(None, None, Whose { tenant, urgent })
    }

    fn entry(self: &Arc<App>, span: Option<Arc<Span>>, line: Option<Arc<Line>>, whose: Whose) -> Entry {
        self.in_flight.send_modify(|count| *count += 1);
        Entry { app: Arc::clone(self), span, line, whose }
    }
}

fn leaving() -> ApiError {
    ApiError::new(Code::ModelNotReady, "the server is shutting down")
}

/// Whose a request is.
struct Whose {
    tenant: Tenant,
    /// Whether it may go before others.
    urgent: bool,
}

/// A request that was let in. Dropping it lets it out.
pub(crate) struct Entry {
    app: Arc<App>,
    span: Option<Arc<Span>>,
    line: Option<Arc<Line>>,
    whose: Whose,
}

impl Entry {
    /// Brings it to a model.
    pub(crate) async fn admit(self, chosen: Chosen) -> Result<Admission, ApiError> {
        let served = self.app.lease(chosen).await?;
        if let Some(span) = &self.span {
            span.model(served.name());
        }
        if let Some(line) = &self.line {
            line.model(served.name());
        }
        let (app, span, line) = (Arc::clone(&self.app), self.span.clone(), self.line.clone());
        Ok(Admission { app, span, line, served, entry: self })
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.app.in_flight.send_modify(|count| *count -= 1);
    }
}

/// A request with a model that answers it.
pub(crate) struct Admission {
    pub(crate) app: Arc<App>,
    /// Stays loaded until the request is done.
    pub(crate) served: Lease,
    /// Ends with the request.
    pub(crate) span: Option<Arc<Span>>,
    /// Written when the request is over; a job's own is another.
    pub(crate) line: Option<Arc<Line>>,
    entry: Entry,
}

impl Admission {
    pub(crate) fn tenant(&self) -> &Tenant {
        &self.entry.whose.tenant
    }

    /// Whether it may go before others.
    pub(crate) fn is_urgent(&self) -> bool {
        self.entry.whose.urgent
    }
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// 128 random bits in hexadecimal: nobody guesses another's id.
pub(crate) fn random_id() -> String {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system has random numbers");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A seed for whoever brought none. Below 2^53, so that every JSON reader keeps it whole.
pub(crate) fn random_seed() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the operating system has random numbers");
    u64::from_le_bytes(bytes) >> 11
}
