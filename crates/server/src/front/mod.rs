//! The front door: what every request passes before its route sees it.

pub(crate) mod body;
pub(crate) mod door;
pub(crate) mod keys;
pub(crate) mod line;
pub(crate) mod origin;
pub(crate) mod silent;
pub(crate) mod stalled;
pub(crate) mod told;
pub(crate) mod upload;
