//! The `biformer` program.
fn main() {}
