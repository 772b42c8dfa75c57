//! What all routes share: where the server stands in its life, and who may come in.

use std::{
    sync::{Arc, OnceLock},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use utoipa::ToSchema;

use crate::{
    error::{ApiError, Code},
    front::keys::{Caller, Keys},
    jobs::durable::Durable,
    metrics::Metrics,
    options::ServerOptions,
    served::Served,
    trace::{Span, Traces},
    worker::jobs::Jobs,
};

/// Shared by every request.
pub(crate) struct App {
    pub(crate) options: ServerOptions,
    pub(crate) keys: Keys,
    pub(crate) metrics: Metrics,
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
    /// Texts are encoded and schemas compiled by as many threads as there are cores; more would only wait.
    pub(crate) preparing: Semaphore,
    /// Bodies held, in KiB.
    pub(crate) bodies: Arc<Semaphore>,
}

/// Where the server stands.
#[derive(Clone)]
pub(crate) enum Phase {
    /// It listens; nothing is loaded.
    Starting,
    /// The model is being loaded.
    Loading(Progress),
    /// It is loaded and has answered a question of our own.
    Ready(Arc<Served>),
    /// It cannot be had.
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Failed {
    /// What programs know it by.
    pub code: String,
    /// For people.
    pub message: String,
}

impl App {
    pub(crate) fn new(options: ServerOptions, keys: Keys) -> Arc<App> {
        // Room for the largest body at least, or it would wait for ever.
        let bodies_kib = (options.bodies_bytes_max.max(options.body_bytes_max) >> 10) + 1;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(App {
            keys,
            metrics: Metrics::new(),
            traces: options.otlp.as_deref().map(|endpoint| Arc::new(Traces::open(endpoint))),
            jobs: Jobs::default(),
            durable: OnceLock::new(),
            started: Instant::now(),
            phase: watch::Sender::new(Phase::Starting),
            draining: watch::Sender::new(false),
            killed: watch::Sender::new(false),
            in_flight: watch::Sender::new(0),
            preparing: Semaphore::new(cores),
            bodies: Arc::new(Semaphore::new(bodies_kib.min(Semaphore::MAX_PERMITS))),
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

    /// The model, if it is loaded.
    pub(crate) fn served(&self) -> Option<Arc<Served>> {
        match &*self.phase.borrow() {
            Phase::Ready(served) => Some(Arc::clone(served)),
            _ => None,
        }
    }

    /// The model, or why there is none.
    pub(crate) fn model(&self) -> Result<Arc<Served>, ApiError> {
        match self.phase() {
            Phase::Ready(served) => Ok(served),
            Phase::Starting | Phase::Loading(_) => {
                Err(ApiError::new(Code::ModelNotReady, "the model is being loaded"))
            }
            Phase::Failed(failed) => Err(ApiError::new(Code::ModelNotReady, failed.to_string())),
        }
    }

    /// Lets work in, if there is a model, the server goes on, and the key has not too much under way already.
    pub(crate) fn admit(self: &Arc<App>, caller: &Caller) -> Result<Admission, ApiError> {
        let served = self.model()?;
        if self.is_draining() {
            return Err(ApiError::new(Code::ModelNotReady, "the server is shutting down"));
        }
        let Ok(permit) = Arc::clone(&caller.key.permits).try_acquire_owned() else {
            let most = self.options.per_key_max;
            let message = format!("{most} requests are under way already, as many as a key may have");
            return Err(ApiError::new(Code::QueueFull, message));
        };
        let span = caller.span.clone();
        if let Some(span) = &span {
            span.model(&served.card.name);
        }
        Ok(self.enter(served, span, Some(permit)))
    }

    /// Lets in what a durable job asks: whoever submitted it is not waiting, and their count of requests is not its.
    pub(crate) fn admit_job(self: &Arc<App>) -> Result<Admission, ApiError> {
        Ok(self.enter(self.model()?, None, None))
    }

    fn enter(
        self: &Arc<App>,
        served: Arc<Served>,
        span: Option<Arc<Span>>,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Admission {
        self.in_flight.send_modify(|count| *count += 1);
        Admission { app: Arc::clone(self), served, span, _permit: permit }
    }
}

/// A request that was let in. Dropping it lets it out.
pub(crate) struct Admission {
    pub(crate) app: Arc<App>,
    pub(crate) served: Arc<Served>,
    /// Ends with the request.
    pub(crate) span: Option<Arc<Span>>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.app.in_flight.send_modify(|count| *count -= 1);
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
