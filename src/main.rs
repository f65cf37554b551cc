//! The `biformer` program: see `biformer --help`.

use biformer::commands::{self, OrEnd};
use std::process::ExitCode;

// Here and not in the library, whose users have their own.
#[global_allocator]
static ALLOCATOR: OrEnd = OrEnd;

fn main() -> ExitCode {
    commands::main()
}
