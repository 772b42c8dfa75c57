//! How much memory is left for what callers ask.
//!
//! Plans bound what models take; what requests take beside them depends on callers. Before the system ends the process
//! for it, new requests are refused until there is room again.

use std::{fmt, sync::Arc};

use crate::error::{ApiError, Code};

/// What must be left, so that those who are in can go on.
const LEFT_MIN: u64 = 128 << 20;

/// Bytes of memory for each byte of a body, until it is understood: its bytes, its values, and what is made of them.
const BODY_TIMES: u64 = 8;

/// Says how many bytes the process may still take; `None` where nobody knows.
#[derive(Clone)]
pub struct Ceiling {
    left: Arc<dyn Fn() -> Option<u64> + Send + Sync>,
}

impl Ceiling {
    /// Asks this, often: it must be quick.
    pub fn new(left: impl Fn() -> Option<u64> + Send + Sync + 'static) -> Ceiling {
        Ceiling { left: Arc::new(left) }
    }

    /// Refuses what would need more than is left, a body of this many bytes among it.
    pub(crate) fn check(&self, body_bytes: usize) -> Result<(), ApiError> {
        let needed = LEFT_MIN.saturating_add((body_bytes as u64).saturating_mul(BODY_TIMES));
        match (self.left)() {
            Some(left) if left < needed => {
                let message = "the server has no memory left for this request now";
                Err(ApiError::new(Code::OutOfMemory, message))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Ceiling {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Ceiling").field("left", &(self.left)()).finish()
    }
}
