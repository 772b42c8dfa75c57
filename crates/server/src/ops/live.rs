//! `GET /console/live`: the engine at one moment, for the console. Like `/health` it only reads what others have written.

use std::{fmt::Write, sync::Arc};

use axum::{Json, extract::State};
use fornax_compute::PAGE_TOKENS;
use fornax_engine::{PageUse, Progress as Running};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::health::Status;
use crate::{
    app::{App, Phase, Progress},
    models::Slot,
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
    #[serde(flatten)]
    engine: Option<Engine>,
}

/// The engine of the loaded model.
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
/// Memory against the plan, every KV page, every request and how far it is. Made for the console: fields may change.
#[utoipa::path(get, path = "/console/live", tag = "operations", responses(
    (status = 200, body = Live, description = "How everything stands"),
    crate::openapi::DoorRefusals
))]
pub(crate) async fn live(State(app): State<Arc<App>>) -> Json<Live> {
    // The default model; of several, the first that is loaded.
    let served = app.models.all().iter().find_map(Slot::loaded);
    let (loading, error) = match app.phase() {
        Phase::Loading(progress) => (Some(progress), None),
        Phase::Failed(failed) => (None, Some(failed.to_string())),
        Phase::Ready => {
            let lost = served.as_ref().and_then(|served| served.engine.stats().device_lost);
            (None, lost.map(|reason| format!("DEVICE_LOST: {reason}")))
        }
        Phase::Starting => (None, None),
    };
    Json(Live {
        status: Status::of(&app),
        error,
        version: env!("CARGO_PKG_VERSION"),
        uptime: app.started.elapsed().as_secs_f64(),
        loading,
        engine: served.map(|served| Engine::of(&served)),
    })
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
