//! Checks, fixtures, tests and proofs.
fn main() {}
