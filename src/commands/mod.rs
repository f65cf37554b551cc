//! The program's commands, a file each. This file lists them; `options.rs` and `set.rs` hold the options that several
//! of them share, and `output.rs` checks where their results may be written.

/// Prints a line of a command's result. Where `println!` would panic, the command ends with an error (on a full disk),
/// or goes on (on a closed pipe).
macro_rules! say {
    ($($part:tt)*) => {
        $crate::printing::print_lines(format_args!($($part)*))?
    };
}

mod bench;
mod check;
mod compare;
mod devices;
mod eval;
mod export;
mod forward;
mod gradcheck;
mod info;
mod options;
mod output;
mod predict;
mod set;
mod shrink;
mod train;

pub use crate::memory::OrEnd;

use crate::memory::or_out_of_memory;
use crate::paths::quoted;
use crate::printing::{print_error, printable};
use crate::signals;
use anyhow::Result;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};
use options::whole;
use std::any::TypeId;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use tensor::cpu::isa::Isa;

/// Trains, runs and checks BiFormer, the vision transformer with bi-level routing attention.
///
/// With no command it does what `train` does with its defaults: it trains `nano` on the images inside the program.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Trains a model and leaves a run folder with checkpoint, metrics and pictures.
    ///
    /// Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 stop the run, after the current step at the latest, with a checkpoint from
    /// which --resume continues. The program then ends by that signal (to a shell: status 130, 143, 129 or 138), so
    /// that a script or a scheduler sees that it was stopped. Ctrl-C once more ends it at once.
    Train(train::Arguments),
    /// Measures a trained model on a data set, by default on the images that training evaluates on.
    Eval(eval::Arguments),
    /// Lists runs by their accuracy, with the settings that set them apart, and draws their curves.
    Compare(compare::Arguments),
    /// Classifies pictures.
    Predict(predict::Arguments),
    /// Reads all images of a data set, names those that cannot be read, and says how many are duplicated across splits
    /// or classes.
    Check(check::Arguments),
    /// Makes pictures smaller, once, so that training does not decode all of their pixels in every epoch.
    Shrink(shrink::Arguments),
    /// Writes a trained model's weights alone, as PyTorch and other programs read them.
    Export(export::Arguments),
    /// Checks gradients: those of every operation, of a whole model (--model), or on a GPU (--device).
    Gradcheck(gradcheck::Arguments),
    /// Shows a model's layers, parameters, multiply-adds and memory.
    Info(info::Arguments),
    /// Runs a model on a tensor from a file.
    Forward(forward::Arguments),
    /// Times training or inference on synthetic images.
    Bench(bench::Arguments),
    /// Lists what there is to compute on.
    Devices(devices::Arguments),
}

impl Cli {
    /// Parses the program's command line. A negative number after an option is taken for its value, so that the error
    /// is about that value.
    fn from_arguments() -> Self {
        let option =
            |arg: Arg| if arg.get_action().takes_values() { with_words(arg).allow_negative_numbers(true) } else { arg };
        let mut called = Self::command().mut_subcommands(|command| command.mut_args(option));
        // With `*.jpg` expanded also on Windows, whose shell leaves it as it is.
        let arguments: Vec<OsString> = wild::args_os().collect();
        let matches = called.try_get_matches_from_mut(&arguments);
        let matches = matches.unwrap_or_else(|error| with_tip(error, &arguments).exit());
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut called).exit())
    }
}

/// An error about the command line, with a tip on what may have been meant.
fn with_tip(mut error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let tip = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(option))) if option.starts_with('-') => {
            let is_file = |name: &&OsString| name.as_encoded_bytes().starts_with(b"-") && Path::new(name).exists();
            let file = arguments.iter().find(is_file);
            let file = file.map(|file| format!("a file of this name is {}", quoted(file.display())));
            let of_runs = arguments.get(1).is_some_and(|command| command == "compare") && option == "--checkpoint";
            let file = file.or_else(|| of_runs.then(|| "runs are named without an option".to_owned()));
            file.or_else(|| Some(format!("options come after the command: {}", with_command(option, arguments)?)))
        }
        (ErrorKind::UnknownArgument, Some(ContextValue::String(word))) => {
            meant_by_a_word(word, arguments).map(|option| format!("perhaps it is meant as: {option}"))
        }
        (ErrorKind::InvalidUtf8, _) => {
            let other = arguments.iter().find(|argument| argument.to_str().is_none());
            other.map(|argument| format!("it is {}", quoted(argument.display())))
        }
        _ => None,
    };
    // What is on the command line may be the name of any file.
    let shown = error.context().filter_map(|(kind, value)| match value {
        ContextValue::String(text) => Some((kind, ContextValue::String(printable(text)))),
        ContextValue::Strings(texts) => Some((kind, ContextValue::Strings(texts.iter().map(printable).collect()))),
        _ => None,
    });
    for (kind, value) in shown.collect::<Vec<_>>() {
        error.insert(kind, value);
    }
    if let Some(tip) = tip {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![printable(tip).into()]));
    }
    error
}

/// The command line that may be meant where an option stands before its command, or without one: that of `train`, which
/// is what no command means.
fn with_command(option: &str, arguments: &[OsString]) -> Option<String> {
    let mut words: Vec<&str> = arguments.iter().skip(1).map(|word| word.to_str()).collect::<Option<_>>()?;
    let root = Cli::command();
    let named = words.iter().position(|word| root.find_subcommand(word).is_some());
    let command = root.find_subcommand(named.map_or("train", |place| words.remove(place)))?;
    let option = option.strip_prefix("--")?;
    let has = command.get_arguments().any(|known| known.get_long() == Some(option));
    let shown = |word: &&str| if word.starts_with('-') { (*word).to_owned() } else { quoted(word) };
    let words: Vec<String> = words.iter().map(shown).collect();
    (has && named != Some(0)).then(|| format!("biformer {} {}", command.get_name(), words.join(" ")))
}

/// The option that a stray word may have been meant for.
fn meant_by_a_word(word: &str, arguments: &[OsString]) -> Option<String> {
    let resumes = arguments.iter().any(|argument| argument == "--resume");
    let option = match arguments.get(1)?.to_str()? {
        "train" if resumes && word == "auto" => return Some("--resume=auto".into()),
        "train" if resumes => "--resume --out",
        "train" | "check" | "shrink" => "--data",
        "eval" | "export" | "forward" | "info" => "--checkpoint",
        _ => return None,
    };
    Some(format!("{option} {}", quoted(word)))
}

/// Gives an option for any number of these types a parser whose errors say in plain words which numbers it takes:
/// clap's errors are in Rust's terms. (An option that takes only some numbers has another type, and a parser of its
/// own.)
fn with_words(option: Arg) -> Arg {
    let number = |text: &str| text.parse::<f64>().map_err(|_| "expected a number");
    let taken = option.get_value_parser().type_id();
    match taken {
        _ if taken == TypeId::of::<u32>() => option.value_parser(whole(0..=u32::MAX)),
        _ if taken == TypeId::of::<usize>() => option.value_parser(whole(0..=u32::MAX as usize)),
        _ if taken == TypeId::of::<f64>() => option.value_parser(number),
        _ => option,
    }
}

/// How a command ended, if no error stopped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    /// As asked.
    Done,
    /// It ran, and what it checked does not hold: exit status 1.
    CheckFailed,
    /// It ran, but had to skip some inputs, which it has named: exit status 2.
    InputsSkipped,
    /// It was asked to stop, by Ctrl-C or another signal, and ends by that: exit status 130, 143, 129 or 138 to a
    /// shell.
    Interrupted,
}

/// The whole program: runs the command that the command line asks for, and says how it ended.
pub fn main() -> ExitCode {
    signals::survive_size_limit();
    let cli = Cli::from_arguments();
    match or_out_of_memory(|| run(cli)) {
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

fn run(cli: Cli) -> Result<Status> {
    Isa::asked()?;
    match cli.command.unwrap_or(Command::Train(Default::default())) {
        Command::Train(arguments) => train::run(&arguments),
        Command::Eval(arguments) => eval::run(&arguments),
        Command::Compare(arguments) => compare::run(&arguments),
        Command::Predict(arguments) => predict::run(&arguments),
        Command::Check(arguments) => check::run(&arguments),
        Command::Shrink(arguments) => shrink::run(&arguments),
        Command::Export(arguments) => export::run(&arguments),
        Command::Gradcheck(arguments) => gradcheck::run(&arguments),
        Command::Info(arguments) => info::run(&arguments),
        Command::Forward(arguments) => forward::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Devices(arguments) => devices::run(&arguments),
    }
}
