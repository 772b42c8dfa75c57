//! What operators and their machines ask.

pub(crate) mod console;
pub(crate) mod health;
pub(crate) mod live;
pub(crate) mod loading;
pub(crate) mod metrics;
pub(crate) mod sleep;
