//! The `biformer` program: see `biformer --help`.

use biformer::commands::{self, Cli, Status};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match commands::run(cli) {
        Ok(Status::Done) => ExitCode::SUCCESS,
        Ok(Status::FellShort) => ExitCode::from(1),
        Ok(Status::Interrupted) => ExitCode::from(130),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}
