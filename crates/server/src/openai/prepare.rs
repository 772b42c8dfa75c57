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
    on_a_thread(app, served, move |served| {
        let value = shape::read::<B>(&body.bytes)?;
        // The parsed form is what is left of it.
        drop(body);
        work(&value, served)
    })
    .await
}

/// Does work that takes its time on a thread that may block, with as many others as there are cores.
pub(crate) async fn on_a_thread<T: Send + 'static>(
    app: &App,
    served: &Arc<Served>,
    work: impl FnOnce(&Served) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let _turn = app.preparing.acquire().await.map_err(|_| gone())?;
    let served = Arc::clone(served);
    tokio::task::spawn_blocking(move || work(&served)).await.map_err(|_| gone())?
}

fn gone() -> ApiError {
    ApiError::new(Code::Internal, "the request could not be prepared")
}

/// Bytes of a text for each byte of its tokens: composing characters (NFC) makes texts shorter, at most by this much.
const SHRINKS_MAX: usize = 4;

/// Refuses a text that cannot fit whatever its tokens are, before time is spent on cutting megabytes into tokens.
pub(crate) fn check_length(served: &Served, bytes: usize) -> Result<(), ApiError> {
    let context = served.engine.capacity().context;
    // Ordinary texts have some four bytes a token: nothing to look up for them.
    if bytes <= context.saturating_mul(16) {
        return Ok(());
    }
    let tokens = 0..u32::try_from(served.tokenizer.vocab_len()).unwrap_or(u32::MAX);
    let longest = tokens.map(|token| served.tokenizer.token_bytes(token).len()).max().unwrap_or(1);
    let most = context.saturating_mul(longest).saturating_mul(SHRINKS_MAX);
    if bytes > most {
        let message =
            format!("the prompt has {bytes} bytes; the context holds {context} tokens, at most {most} bytes");
        return Err(ApiError::new(Code::PromptTooLong, message));
    }
    Ok(())
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
