//! The claim of docs/private.md on a tiny model: servers, client and whoever stands between them, over real sockets.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "tests stop at the first surprise, and count")]

mod bad_input;
mod between;
mod exact;
mod fuzz;
mod rig;
mod sessions;
mod tampering;
mod views;
