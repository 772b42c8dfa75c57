//! The call that tells a scheduler that this worker is ready.

use std::{net::SocketAddr, time::Duration};

use serde_json::{Value, json};

use crate::{options::Callback, served::Served};

/// A scheduler that takes longer to answer is tried again.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);

/// What the scheduler is told.
pub(crate) fn message(callback: &Callback, address: SocketAddr, tls: bool, served: &Served) -> Value {
    let scheme = if tls { "https" } else { "http" };
    let uri = callback.uri.clone().unwrap_or_else(|| format!("{scheme}://{address}"));
    let mut capabilities = vec!["completions", "execute", "streaming", "structured_output"];
    if served.template.is_ok() {
        capabilities.push("chat");
    }
    json!({
        "worker_id": callback.worker_id,
        "uri": uri,
        "model_ref": served.card.reference,
        "device_bytes": served.device_bytes(),
        "context": served.engine.capacity().context,
        "capabilities": capabilities,
    })
}

/// Calls until somebody answers with success; waits twice as long after each failure. Blocks.
pub(crate) fn call(callback: &Callback, message: &Value) -> bool {
    let agent = ureq::Agent::new_with_config(
        ureq::config::Config::builder().timeout_global(Some(ATTEMPT_TIMEOUT)).build(),
    );
    let mut pause = callback.pause;
    for attempt in 1..=callback.attempts {
        match agent.post(&callback.url).send_json(message) {
            Ok(_) => {
                tracing::info!(attempt, "the scheduler knows that this worker is ready");
                return true;
            }
            Err(error) => {
                let reason = error.to_string();
                tracing::warn!(attempt, attempts = callback.attempts, reason, "the ready callback failed");
            }
        }
        if attempt < callback.attempts {
            std::thread::sleep(pause);
            pause *= 2;
        }
    }
    false
}
