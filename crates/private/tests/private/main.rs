//! The claim of docs/private.md on a tiny model: servers, client and whoever stands between them, over real sockets.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bad_input;
mod between;
mod exact;
mod fuzz;
mod rig;
mod sessions;
mod tampering;
mod views;
