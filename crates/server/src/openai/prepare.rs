//! From bytes to questions, away from the threads that serve sockets.

use std::sync::Arc;

use crate::{
    app::App,
    error::{ApiError, Code},
    front::body::RawBody,
    served::Served,
    shape::{self, Body},
};

/// Reads a body and works on it on a thread that may block: parsing, templates, encoding and compiling take as long as
/// a client makes them.
pub(crate) async fn prepare<B: Body + Send, T: Send + 'static>(
    app: &App,
    served: &Arc<Served>,
    body: RawBody,
    work: impl FnOnce(&B, &Served) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let _turn = app.preparing.acquire().await.map_err(|_| gone())?;
    let served = Arc::clone(served);
    let task = tokio::task::spawn_blocking(move || {
        let value = shape::read::<B>(&body.bytes)?;
        // The parsed form is what is left of it.
        drop(body);
        work(&value, &served)
    });
    task.await.map_err(|_| gone())?
}

fn gone() -> ApiError {
    ApiError::new(Code::Internal, "the request could not be prepared")
}

/// Refuses a request for another model than the one served.
pub(crate) fn check_model(served: &Served, asked: Option<&str>) -> Result<(), ApiError> {
    match asked {
        Some(name) if !served.is_called(name) => {
            let message = format!("there is no such model here; this server has {:?}", served.card.name);
            Err(ApiError::new(Code::ModelNotFound, message))
        }
        _ => Ok(()),
    }
}
