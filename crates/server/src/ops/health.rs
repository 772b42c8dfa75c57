//! `GET /health` and `GET /ready`. Neither waits for anything: they read what others have written.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use fornax_engine::{Stats, TierStats};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::{
    app::{App, Phase, Progress},
    error::Code,
    front::keys::Caller,
    models::{Slot, Standing, State as Stands},
    served::{Device, Served},
};

/// Where the server stands, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    Starting,
    Loading,
    Ready,
    Draining,
    /// A step takes longer than any step should: the device or its driver hangs.
    Stuck,
    Failed,
}

impl Status {
    pub(crate) fn of(app: &App) -> Status {
        match app.phase() {
            Phase::Failed(_) => Status::Failed,
            _ if app.is_draining() => Status::Draining,
            Phase::Starting => Status::Starting,
            Phase::Loading(_) => Status::Loading,
            Phase::Ready => {
                let loaded = app.models.all().iter().filter_map(Slot::loaded);
                let worst =
                    loaded.map(|served| Status::of_engine(&served)).max_by_key(|status| match status {
                        Status::Failed => 2,
                        Status::Stuck => 1,
                        _ => 0,
                    });
                worst.unwrap_or(Status::Ready)
            }
        }
    }

    fn of_engine(served: &Served) -> Status {
        let stats = served.engine.stats();
        if stats.device_lost.is_some() || served.engine.is_closed() {
            Status::Failed
        } else if stats.stuck {
            Status::Stuck
        } else {
            Status::Ready
        }
    }

    fn is_alive(self) -> bool {
        matches!(self, Status::Starting | Status::Loading | Status::Ready)
    }
}

/// Liveness, and facts for whoever may know them.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Health {
    status: Status,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(flatten)]
    facts: Option<Facts>,
}

/// What only holders of a key see.
#[derive(Debug, Serialize, ToSchema)]
struct Facts {
    version: &'static str,
    /// Seconds since the start.
    uptime: f64,
    /// About the default model, if it is loaded.
    #[serde(flatten)]
    model: Option<ModelFacts>,
    /// Every model that can be asked for, the default first.
    models: Vec<ModelStanding>,
}

/// Where one of the models stands.
#[derive(Debug, Serialize, ToSchema)]
struct ModelStanding {
    name: String,
    state: Standing,
    /// How far its loading is.
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<Progress>,
    /// Why it could not be loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Bytes that it takes of what all together may.
    #[serde(skip_serializing_if = "Option::is_none")]
    planned_bytes: Option<u64>,
    /// Requests that use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<usize>,
    /// Seconds since it was last used.
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_seconds: Option<f64>,
}

impl ModelStanding {
    fn of(slot: &Slot) -> ModelStanding {
        slot.look(|state| {
            let mut standing = ModelStanding {
                name: slot.offer.card.name.clone(),
                state: state.standing(),
                progress: None,
                error: None,
                planned_bytes: None,
                requests: None,
                idle_seconds: None,
            };
            match state {
                Stands::Loading(progress) => standing.progress = Some(progress.clone()),
                Stands::Failed(failed) => standing.error = Some(failed.to_string()),
                Stands::Loaded { served, users, last } => {
                    standing.planned_bytes = Some(served.planned_bytes);
                    standing.requests = Some(*users);
                    standing.idle_seconds = (*users == 0).then(|| last.elapsed().as_secs_f64());
                }
                Stands::Unloaded | Stands::Unloading => {}
            }
            standing
        })
    }
}

/// About the loaded model.
#[derive(Debug, Serialize, ToSchema)]
struct ModelFacts {
    model: String,
    architecture: String,
    quant: String,
    context: usize,
    vocab: u32,
    /// Bytes by purpose, as the allocator counts them.
    devices: Vec<Device>,
    kv: KvFacts,
    running: usize,
    waiting: usize,
    drafts: DraftFacts,
    /// The memory plan that the model was loaded by.
    #[schema(value_type = Object)]
    plan: Value,
}

/// Tokens that were guessed and computed ahead, since the model was loaded.
#[derive(Debug, Serialize, ToSchema)]
struct DraftFacts {
    drafted_tokens: u64,
    /// Of those, the ones that were right.
    accepted_tokens: u64,
    /// Those of a model that drafts.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<DraftModelFacts>,
}

/// Of the tokens that were guessed, those that a model guessed.
#[derive(Debug, Serialize, ToSchema)]
struct DraftModelFacts {
    drafted_tokens: u64,
    accepted_tokens: u64,
    /// Seconds that guessing took.
    busy_seconds: f64,
    /// Why it guesses nothing any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

impl DraftFacts {
    fn of(stats: &Stats) -> DraftFacts {
        let model = stats.draft_model.as_ref().map(|model| DraftModelFacts {
            drafted_tokens: model.drafted_tokens,
            accepted_tokens: model.accepted_tokens,
            busy_seconds: model.busy.as_secs_f64(),
            failed: model.failed.clone(),
        });
        let Stats { drafted_tokens, accepted_tokens, .. } = *stats;
        DraftFacts { drafted_tokens, accepted_tokens, model }
    }
}

/// Pages of all KV groups.
#[derive(Debug, Serialize, ToSchema)]
struct KvFacts {
    pages_total: usize,
    /// Referred to by requests.
    pages_used: usize,
    /// Kept for prompts that begin alike; given up when needed.
    pages_cached: usize,
    /// What keeps copies of pages beyond the device's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<DiskFacts>,
}

/// Copies of pages on a disk.
#[derive(Debug, Serialize, ToSchema)]
struct DiskFacts {
    pages: u64,
    bytes: u64,
    bytes_max: u64,
    /// Why it keeps nothing any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    off: Option<String>,
}

impl DiskFacts {
    fn of(tier: &TierStats) -> DiskFacts {
        let TierStats { pages, bytes, bytes_max, ref off, .. } = *tier;
        DiskFacts { pages, bytes, bytes_max, off: off.clone() }
    }
}

impl ModelFacts {
    fn of(served: &Served) -> ModelFacts {
        let stats = served.engine.stats();
        let capacity = served.engine.capacity();
        let card = &served.card;
        ModelFacts {
            model: card.name.clone(),
            architecture: card.architecture.clone(),
            quant: card.quant.clone(),
            context: capacity.context,
            vocab: capacity.vocab,
            devices: served.devices.clone(),
            kv: KvFacts {
                pages_total: stats.pages.iter().map(|group| group.total).sum(),
                pages_used: stats.pages.iter().map(|group| group.referenced).sum(),
                pages_cached: stats.pages.iter().map(|group| group.cached).sum(),
                disk: stats.tier.as_ref().map(DiskFacts::of),
            },
            running: stats.running,
            waiting: stats.requests_waiting + stats.preempted,
            drafts: DraftFacts::of(&stats),
            plan: served.plan.clone(),
        }
    }
}

/// Liveness and facts
///
/// Without a key, where keys are needed, only the status.
#[utoipa::path(get, path = "/health", tag = "operations", responses(
    (status = 200, body = Health, description = "Starting, loading or ready"),
    (status = 503, body = Health, description = "Draining, stuck or failed; where it is set so, also starting or loading")
))]
pub(crate) async fn health(State(app): State<Arc<App>>, caller: Option<Extension<Caller>>) -> Response {
    let status = Status::of(&app);
    let facts = caller.is_some().then(|| Facts {
        version: env!("CARGO_PKG_VERSION"),
        uptime: app.started.elapsed().as_secs_f64(),
        model: app.models.default().loaded().map(|served| ModelFacts::of(&served)),
        models: app.models.all().iter().map(ModelStanding::of).collect(),
    });
    let error = match app.phase() {
        _ if caller.is_none() => None,
        Phase::Failed(failed) => Some(failed.to_string()),
        Phase::Ready => {
            let mut loaded = app.models.all().iter().filter_map(Slot::loaded);
            let lost = loaded.find_map(|served| served.engine.stats().device_lost);
            lost.map(|reason| format!("{}: {reason}", Code::DeviceLost))
        }
        _ => None,
    };
    // Launchers of llama.cpp's server take 200 as ready.
    let is_well = if app.options.health_when_ready { status == Status::Ready } else { status.is_alive() };
    let code = if is_well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(Health { status, error, facts })).into_response()
}

/// Whether requests would be answered.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Readiness {
    status: Status,
}

/// Readiness
///
/// 200 once the models of the start are loaded and have passed a generation of our own; others, and those that were
/// unloaded since, are loaded by the first request for them.
#[utoipa::path(get, path = "/ready", tag = "operations", responses(
    (status = 200, body = Readiness, description = "Requests are answered"),
    (status = 503, body = Readiness, description = "Not yet, or not any more")
))]
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Response {
    let status = Status::of(&app);
    let code = if status == Status::Ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(Readiness { status })).into_response()
}
