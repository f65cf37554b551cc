//! The program as users meet it: each test starts it, or reads what it has written.

#[path = "../common/mod.rs"]
mod common;

mod answers;
mod bad_files;
mod bad_input;
mod bad_outputs;
mod bad_values;
mod bench;
mod broken_pictures;
mod cli;
mod compare;
mod determinism;
mod diverging;
mod eval;
mod forward;
mod freeze;
mod longer_runs;
mod predict;
mod preprocessing;
mod pth;
mod readers;
mod run_folder;
mod shrink;
mod tuning;
mod weights;
