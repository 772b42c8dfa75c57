//! The `fornax` command.
fn main() {}
