//! From bytes to questions, away from the threads that serve sockets.

use std::sync::Arc;

use serde_json::Value;

use crate::{
    app::{Admission, App},
    error::{ApiError, Code},
    front::{body::RawBody, keys::Caller},
    served::Served,
    shape::{self, Body},
};

/// Reads the body of a request, lets it in to the model that it names, and makes of it what is asked; parsing,
/// templates, encoding and compiling take as long as a client makes them, and happen on threads that may block.
pub(crate) async fn admit<B: Body + Send, T: Send + 'static>(
    app: &Arc<App>,
    caller: &Caller,
    body: RawBody,
    work: impl FnOnce(&B, &Served) -> Result<T, ApiError> + Send + 'static,
) -> Result<(Admission, T), ApiError> {
    let entry = app.enter(caller)?;
    let (value, model) = read::<B>(app, body).await?;
    let admission = entry.admit(app.models.named(model.as_deref())?).await?;
    let made = on_a_thread(app, admission.served.served(), move |served| work(&value, served)).await?;
    Ok((admission, made))
}

/// The same for what needs a model and no answer of it.
pub(crate) async fn prepare<B: Body + Send, T: Send + 'static>(
    app: &App,
    body: RawBody,
    work: impl FnOnce(&B, &Served) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    app.check_ready()?;
    let (value, model) = read::<B>(app, body).await?;
    let lease = app.lease(app.models.named(model.as_deref())?).await?;
    on_a_thread(app, lease.served(), move |served| work(&value, served)).await
}

/// Understands a body, and says which model it names.
pub(crate) async fn read<B: Body + Send>(app: &App, body: RawBody) -> Result<(B, Option<String>), ApiError> {
    blocking(app, move || {
        let value = shape::parse(&body.bytes)?;
        // The parsed form is what is left of it.
        drop(body);
        let model = value.get("model").and_then(Value::as_str).map(str::to_owned);
        Ok((shape::understand(value, B::UNKNOWN)?, model))
    })
    .await
}

/// Does work with a model that takes its time.
pub(crate) async fn on_a_thread<T: Send + 'static>(
    app: &App,
    served: &Arc<Served>,
    work: impl FnOnce(&Served) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let served = Arc::clone(served);
    blocking(app, move || work(&served)).await
}

/// Does work on a thread that may block, with as many others as there are cores.
pub(crate) async fn blocking<T: Send + 'static>(
    app: &App,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let _turn = app.preparing.acquire().await.map_err(|_| gone())?;
    tokio::task::spawn_blocking(work).await.map_err(|_| gone())?
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
