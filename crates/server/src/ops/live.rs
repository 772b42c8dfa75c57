//! `GET /console/live`: the engine at one moment, for the console. Like `/health` it only reads what others have written.

use std::{fmt::Write, sync::Arc};

use axum::{
    Json,
    extract::{Query, State, rejection::QueryRejection},
};
use fornax_compute::PAGE_TOKENS;
use fornax_engine::{PageUse, Progress as Running};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::health::Status;
use crate::{
    app::{App, Phase, Progress},
    error::{ApiError, Code, Fault},
    models::{Slot, Standing, State as Stands},
    served::{Device, Served},
};

/// How everything stands.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Live {
    status: Status,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    version: &'static str,
    /// Seconds since the start.
    uptime: f64,
    /// How far loading is.
    #[serde(skip_serializing_if = "Option::is_none")]
    loading: Option<Progress>,
    /// Every model that can be looked at, the default first.
    models: Vec<Watched>,
    #[serde(flatten)]
    engine: Option<Engine>,
}

/// A model that can be looked at.
#[derive(Debug, Serialize, ToSchema)]
struct Watched {
    id: String,
    state: Standing,
    /// Requests that are computed.
    running: usize,
    /// Requests that wait.
    waiting: usize,
    /// Why its last load failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Watched {
    fn of(slot: &Slot) -> Watched {
        let stats = slot.loaded().map(|served| served.engine.stats());
        let error = slot.look(|state| match state {
            Stands::Failed(failed) => Some(failed.to_string()),
            _ => None,
        });
        Watched {
            id: slot.offer.card.name.clone(),
            state: slot.look(Stands::standing),
            running: stats.as_ref().map_or(0, |stats| stats.running),
            waiting: stats.as_ref().map_or(0, |stats| stats.requests_waiting + stats.preempted),
            error,
        }
    }
}

/// Which engine is looked at.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct Which {
    /// A model's name, or that of one of its adapters. Otherwise the first that is loaded, which is the default.
    model: Option<String>,
}

/// The engine of a loaded model.
#[derive(Debug, Serialize, ToSchema)]
struct Engine {
    model: String,
    architecture: String,
    quant: String,
    context: usize,
    /// Bytes by purpose, as the allocator counts them.
    devices: Vec<Device>,
    /// The memory plan that the model was loaded by.
    #[schema(value_type = Object)]
    plan: Value,
    /// Tokens of a page.
    page_tokens: usize,
    /// By KV group.
    kv: Vec<Pages>,
    running: usize,
    waiting: usize,
    /// At most 256 of them, those that are computed first.
    requests: Vec<OneRequest>,
    counts: Counts,
}

/// The pages of one KV group.
#[derive(Debug, Serialize, ToSchema)]
struct Pages {
    pages_total: usize,
    /// Referred to by requests.
    pages_used: usize,
    /// Kept for prompts that begin alike.
    pages_cached: usize,
    /// Every page in order, as runs of a letter and a count: f free, c cached, h held by one request, s shared.
    map: String,
}

/// A request, or one of its choices.
#[derive(Debug, Serialize, ToSchema)]
struct OneRequest {
    /// The engine's own number for it: nothing can be done with it.
    id: String,
    state: &'static str,
    prompt_tokens: usize,
    cached_tokens: usize,
    computed_tokens: usize,
    tokens: usize,
    tokens_max: usize,
}

/// Since the start.
#[derive(Debug, Serialize, ToSchema)]
struct Counts {
    steps: u64,
    prompt_tokens: u64,
    generated_tokens: u64,
    prefix_queries: u64,
    prefix_hits: u64,
    /// Of those, the tokens whose pages were brought back from a disk.
    prefix_restored: u64,
    drafted_tokens: u64,
    accepted_tokens: u64,
    preemptions: u64,
}

impl Engine {
    fn of(served: &Served) -> Engine {
        let (stats, picture) = (served.engine.stats(), served.engine.picture());
        let card = &served.card;
        let maps = picture.pages.iter().map(|pages| runs(pages)).chain(std::iter::repeat_with(String::new));
        let kv = stats.pages.iter().zip(maps).map(|(counts, map)| Pages {
            pages_total: counts.total,
            pages_used: counts.referenced,
            pages_cached: counts.cached,
            map,
        });
        Engine {
            model: card.name.clone(),
            architecture: card.architecture.clone(),
            quant: card.quant.clone(),
            context: served.engine.capacity().context,
            devices: served.devices.clone(),
            plan: served.plan.clone(),
            page_tokens: PAGE_TOKENS,
            kv: kv.collect(),
            running: stats.running,
            waiting: stats.requests_waiting + stats.preempted,
            requests: picture.requests.iter().map(OneRequest::of).collect(),
            counts: Counts {
                steps: stats.steps,
                prompt_tokens: stats.prompt_tokens,
                generated_tokens: stats.generated_tokens,
                prefix_queries: stats.prefix_queries,
                prefix_hits: stats.prefix_hits,
                prefix_restored: stats.prefix_restored,
                drafted_tokens: stats.drafted_tokens,
                accepted_tokens: stats.accepted_tokens,
                preemptions: stats.preemptions,
            },
        }
    }
}

impl OneRequest {
    fn of(running: &Running) -> OneRequest {
        OneRequest {
            id: format!("{:x}", running.id),
            state: if running.running { "running" } else { "waiting" },
            prompt_tokens: running.prompt_tokens,
            cached_tokens: running.cached_tokens,
            computed_tokens: running.computed_tokens,
            tokens: running.tokens,
            tokens_max: running.tokens_max,
        }
    }
}

/// Runs of pages of one kind.
fn runs(pages: &[PageUse]) -> String {
    let mut text = String::new();
    for run in pages.chunk_by(|a, b| a == b) {
        let letter = match run[0] {
            PageUse::Free => 'f',
            PageUse::Cached => 'c',
            PageUse::Held => 'h',
            PageUse::Shared => 's',
        };
        write!(text, "{letter}{}", run.len()).expect("a string takes everything");
    }
    text
}

/// The engine at one moment
///
/// Memory against the plan, every KV page, every request and how far it is. To look at a model does not load it. Made for
/// the console: fields may change.
#[utoipa::path(get, path = "/console/live", tag = "operations", params(Which), responses(
    (status = 200, body = Live, description = "How everything stands"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn live(
    State(app): State<Arc<App>>,
    which: Result<Query<Which>, QueryRejection>,
) -> Result<Json<Live>, ApiError> {
    let Query(which) = which.map_err(|_| ApiError::fault(Fault::rule("model", "must be one name")))?;
    let slots = app.models.all();
    let slot = match &which.model {
        Some(name) => Some(&slots[app.models.named(Some(name))?.index]),
        None => None,
    };
    let served = slot.map_or_else(|| slots.iter().find_map(Slot::loaded), Slot::loaded);
    let (loading, error) = match app.phase() {
        Phase::Loading(progress) => (Some(progress), None),
        Phase::Failed(failed) => (None, Some(failed.to_string())),
        Phase::Ready => {
            let lost = served.as_ref().and_then(|served| served.engine.stats().device_lost);
            let lost = lost.map(|reason| format!("{}: {reason}", Code::DeviceLost));
            // Models come and go: how the one that was asked for stands.
            slot.map_or((None, lost.clone()), |slot| {
                slot.look(|state| match state {
                    Stands::Loading(progress) => (Some(progress.clone()), None),
                    Stands::Failed(failed) => (None, Some(failed.to_string())),
                    _ => (None, lost),
                })
            })
        }
        Phase::Starting => (None, None),
    };
    Ok(Json(Live {
        status: Status::of(&app),
        error,
        version: env!("CARGO_PKG_VERSION"),
        uptime: app.started.elapsed().as_secs_f64(),
        loading,
        models: slots.iter().map(Watched::of).collect(),
        engine: served.map(|served| Engine::of(&served)),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_of_pages_is_runs_of_letters() {
        use PageUse::{Cached, Free, Held, Shared};
        assert_eq!(runs(&[]), "");
        assert_eq!(runs(&[Free, Free, Held, Shared, Cached, Cached, Cached, Free]), "f2h1s1c3f1");
    }
}
