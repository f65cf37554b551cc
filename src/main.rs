//! The `biformer` program: see `biformer --help`.

use biformer::commands::{self, Cli, Status};
use biformer::memory::{OrEnd, or_out_of_memory};
use biformer::printing::print_error;
use biformer::signals;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: OrEnd = OrEnd;

fn main() -> ExitCode {
    signals::survive_size_limit();
    let cli = Cli::from_arguments();
    match or_out_of_memory(|| commands::run(cli)) {
        Ok(Status::Done) => ExitCode::SUCCESS,
        Ok(Status::CheckFailed) => ExitCode::from(1),
        Ok(Status::InputsSkipped) => ExitCode::from(2),
        Ok(Status::Interrupted) => signals::end_as_asked(),
        Err(error) => {
            print_error(&error);
            ExitCode::from(2)
        }
    }
}
