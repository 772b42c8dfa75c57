//! What a scheduler speaks with its workers.

pub(crate) mod callback;
pub(crate) mod cancel;
pub(crate) mod execute;
pub(crate) mod jobs;
