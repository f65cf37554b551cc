//! The program's commands, a file each. This file says what they are called and what they take.

/// Prints a line of a command's result. Where `println!` would panic, on a full disk or a closed pipe, the
/// command ends with an error.
macro_rules! say {
    ($($part:tt)*) => {
        $crate::printing::print_lines(format_args!($($part)*))?
    };
}

mod bench;
mod check;
mod devices;
mod eval;
mod export;
mod forward;
mod gradcheck;
mod info;
mod output;
mod predict;
mod shrink;
mod train;

use crate::config::{Changes, RunConfig, merge};
use crate::printing::tell;
use crate::threads::{MOST_THREADS, pool};
use crate::trainer::checkpoint::Stored;
use crate::trainer::trained::TrainedModel;
use anyhow::{Context, Result, anyhow, bail};
use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use data::{extensions, pictures_below};
use model::{ModelConfig, PRESETS, preset, recognised};
use std::any::TypeId;
use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use tensor::cpu::isa::Isa;
use toml::{Table, Value};

/// Trains, runs and checks BiFormer, the vision transformer with bi-level routing attention.
///
/// With no command it trains `nano` on the images inside the program.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    train: train::Arguments,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Trains a model and leaves a run folder with checkpoint, metrics and pictures.
    ///
    /// Ctrl-C, SIGTERM or SIGHUP stop the run, at the latest after the step that it is in, with a checkpoint from which --resume goes on.
    /// The program then ends by that signal (to a shell: status 130, 143 or 129), so that a script or a scheduler sees that it was
    /// stopped. Ctrl-C once more ends it at once.
    Train(train::Arguments),
    /// Measures a trained model on a data set, by default on the images that training evaluates on.
    Eval(eval::Arguments),
    /// Classifies pictures.
    Predict(predict::Arguments),
    /// Reads all images of a data set, and names those that cannot be read.
    Check(check::Arguments),
    /// Makes pictures smaller, once, so that training does not decode all of their pixels in every epoch.
    Shrink(shrink::Arguments),
    /// Writes a trained model's weights alone, as PyTorch and other programs read them.
    Export(export::Arguments),
    /// Checks every operation's gradients, and that the check would notice wrong ones.
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
    /// What the program was called with. A negative number is taken for an option's value, and refused as that.
    pub fn from_arguments() -> Self {
        let option =
            |arg: Arg| if arg.get_action().takes_values() { with_words(arg).allow_negative_numbers(true) } else { arg };
        let mut called = Self::command().mut_args(option).mut_subcommands(|command| command.mut_args(option));
        Self::from_arg_matches(&called.get_matches_mut()).unwrap_or_else(|error| error.format(&mut called).exit())
    }
}

/// An option that says in words what numbers it takes, where it has no reader of its own: clap's words are Rust's.
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

/// Reads a whole number of a range, or says what is expected.
fn whole<T: FromStr + PartialOrd + fmt::Display + Clone>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| format!("expected a whole number from {} to {}", range.start(), range.end()))
    }
}

/// How a command ended, if no error stopped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// As asked.
    Done,
    /// It ran, and what it checked does not hold: exit status 1.
    FellShort,
    /// It ran, but for some of what it was given, which it has named: exit status 2.
    Refused,
    /// It was asked to stop, by Ctrl-C or another signal, and ends by that: exit status 130, 143 or 129 to a shell.
    Interrupted,
}

/// Runs the command.
pub fn run(cli: Cli) -> Result<Status> {
    Isa::asked()?;
    match cli.command.unwrap_or(Command::Train(cli.train)) {
        Command::Train(arguments) => train::run(&arguments),
        Command::Eval(arguments) => eval::run(&arguments),
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

/// The models by name, in a sentence.
fn model_names() -> String {
    let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
    names.join(", ")
}

/// Errors: more images per step, or more steps, than can be asked for, or none.
fn expect_count(option: &str, count: usize) -> Result<()> {
    const MOST: usize = 1 << 20;
    if !(1..=MOST).contains(&count) {
        bail!("{option} {count}: expected 1 to {MOST}");
    }
    Ok(())
}

/// Which model, and what is different about it.
#[derive(Debug, Args)]
struct ModelChoice {
    #[arg(long, value_name = "NAME", default_value = "nano", help = format!("The model: {}", model_names()))]
    model: String,
    /// Changes a field of the model, for instance --set n_win=8 topks=1,4,16,-2 auto_pad=true.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = assignment)]
    set: Vec<String>,
}

impl ModelChoice {
    fn config(&self) -> Result<ModelConfig> {
        self.changed(preset(&self.model)?.config())
    }

    /// A model with what is asked to be different.
    fn changed(&self, config: ModelConfig) -> Result<ModelConfig> {
        expect_each_once(&self.set)?;
        config.with_overrides(self.set.iter().map(String::as_str)).map_err(as_set)
    }

    /// The size that is asked for, or the one that the model is meant for.
    fn image_size(&self, asked: Option<ImageSize>) -> Result<ImageSize> {
        let usual = preset(&self.model)?.image_size;
        Ok(asked.unwrap_or(ImageSize([usual; 2])))
    }
}

/// Height and width in pixels.
#[derive(Clone, Copy, Debug)]
struct ImageSize([usize; 2]);

impl FromStr for ImageSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let side = |side: &str| side.parse().map_err(|_| "expected a side or HxW, such as 224 or 600x500");
        let (height, width) = text.split_once('x').unwrap_or((text, text));
        Ok(Self([side(height)?, side(width)?]))
    }
}

impl fmt::Display for ImageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.0[0], self.0[1])
    }
}

/// An argument of `--set`, which takes all that follow it.
fn assignment(text: &str) -> Result<String, String> {
    match text.contains('=') {
        true => Ok(text.to_owned()),
        false => {
            Err("--set takes all that follows it, and this is no KEY=VALUE: put it before --set, or after --"
                .to_owned())
        }
    }
}

/// Refuses fields that are set twice, as options are. Names are compared as they are given.
fn expect_each_once(set: &[String]) -> Result<()> {
    let keys: Vec<&str> = set.iter().map(|entry| entry.split('=').next().unwrap_or(entry).trim()).collect();
    match keys.iter().enumerate().find(|(place, key)| keys[..*place].contains(key)) {
        Some((_, twice)) => bail!("--set {twice}: it is given twice; leave one of them out"),
        None => Ok(()),
    }
}

/// What is wrong with a --set.
fn as_set(error: model::Error) -> anyhow::Error {
    match error {
        model::Error::Override { .. } => anyhow!("--set {error}"),
        model::Error::UnknownField { key, .. } if RunConfig::has_field(&key) => {
            anyhow!("--set {key}: a field of training runs, which only train takes; here --set takes the model's")
        }
        other => other.into(),
    }
}

/// The fields of the model that `--set` changes, as a configuration has them, if there are any.
fn fields(set: &[String]) -> Result<Option<Value>> {
    let mut fields = Table::new();
    for entry in set {
        let (_, field, value) = ModelConfig::default().with_override(entry).map_err(as_set)?;
        fields.insert(field.to_owned(), Value::try_from(value)?);
    }
    Ok((!fields.is_empty()).then_some(Value::Table(fields)))
}

/// A field of a run, `key=value` with a dotted key, as a file has it.
fn run_field(entry: &str) -> Result<Table> {
    let (key, value) = entry.split_once('=').with_context(|| format!("--set {entry}: expected key=value"))?;
    let line = |value: &str| format!("{} = {value}", key.trim()).parse().ok().filter(is_one_field);
    // Texts need no quotes here, where a shell would take them away, and lists no brackets.
    let text = |value: &str| Value::from(value.trim()).to_string();
    let list = |value: &str| {
        let entries = value.split(',').filter(|entry| !entry.trim().is_empty());
        let entries = entries.map(|entry| if line(entry).is_some() { entry.to_owned() } else { text(entry) });
        format!("[{}]", entries.collect::<Vec<_>>().join(", "))
    };
    let bare_list = RunConfig::is_list(key) && !value.trim_start().starts_with('[');
    let table = if bare_list { line(&list(value)) } else { line(value).or_else(|| line(&text(value))) };
    table.with_context(|| format!("--set {entry}: not a value"))
}

/// Whether a table has one field, however deep: after a line break, a value could be followed by another field.
fn is_one_field(table: &Table) -> bool {
    let mut values = table.values();
    match [values.next(), values.next()] {
        [Some(Value::Table(section)), None] => is_one_field(section),
        [value, other] => value.is_some() && other.is_none(),
    }
}

/// How many threads.
#[derive(Clone, Copy, Debug, Args)]
struct Threads {
    /// Threads to compute with, at most 8 per core; 0 takes one per core, or as many as RAYON_NUM_THREADS says. The results have the same bits with any number.
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
}

impl Threads {
    /// Runs `work` on a pool of so many threads. Everything that computes runs on one: its threads flush
    /// denormals, and others do not.
    fn run<R: Send>(self, work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
        if self.threads > MOST_THREADS {
            bail!("--threads {}: expected up to {MOST_THREADS}, or 0 for one per core", self.threads);
        }
        pool(self.threads)?.install(work)
    }
}

fn of_weights() -> String {
    format!(
        "The model that a state_dict is of: {}; by default the one whose tensors it has. Images are then normalised by \
         ImageNet's mean and deviation",
        model_names()
    )
}

/// The pictures in a folder and below it, of which there must be one. Says which files are passed over.
fn pictures_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let (pictures, passed_over) = pictures_below(folder)?;
    passed_over.iter().for_each(|note| tell!(io::stderr(), "note: {note}"));
    if pictures.is_empty() {
        bail!("{}: holds no image ({})", folder.display(), extensions());
    }
    Ok(pictures)
}

/// Where a trained model lies, and what is to be different about it.
#[derive(Debug, Args)]
struct Trained {
    /// A run folder, the checkpoint in it, or what `export` wrote; or another state_dict, in a safetensors or .pth file.
    #[arg(long, value_name = "DIR|FILE")]
    checkpoint: PathBuf,
    #[arg(long, value_name = "NAME", help = of_weights())]
    model: Option<String>,
    /// Changes a field of the model that no weight depends on, or how images are prepared, for instance --set n_win=8
    /// auto_pad=true preprocessing.eval_crop=1.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = assignment)]
    set: Vec<String>,
    /// The side of the images; by default the one that the model was trained on, or is meant for.
    #[arg(long, value_name = "N")]
    image_size: Option<u32>,
}

impl Trained {
    fn load(&self) -> Result<TrainedModel> {
        expect_each_once(&self.set)?;
        let size = self.image_size.map(|size| Value::Integer(size.into()));
        let (of_run, of_model): (Vec<_>, Vec<_>) =
            self.set.iter().cloned().partition(|entry| entry.trim_start().starts_with("preprocessing."));
        let asked = [("architecture", fields(&of_model)?), ("image_size", size)];
        let mut asked: Table = asked.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
        for entry in &of_run {
            merge(&mut asked, run_field(entry)?);
        }
        let mut trained = self.changed(&Changes::gather(None, asked)?)?;
        trained.data.statistics = trained.config.statistics(trained.data.statistics)?;
        Ok(trained)
    }

    fn changed(&self, changes: &Changes) -> Result<TrainedModel> {
        let shown = self.checkpoint.display();
        match (Stored::read(&self.checkpoint)?, &self.model) {
            (Stored::Described(mut described), model)
                if model.as_ref().is_none_or(|model| *model == described.config.model) =>
            {
                described.config = described.config.of_trained(changes)?;
                described.into_model()
            }
            (Stored::Alone(file), Some(model)) => TrainedModel::of_weights(file, &shown.to_string(), model, changes),
            (Stored::Described(described), _) => {
                bail!("--model: {shown} knows its model, {}; leave it out", described.config.model)
            }
            (Stored::Alone(file), None) => match recognised(&file)? {
                Some(preset) => TrainedModel::of_weights(file, &shown.to_string(), preset.name, changes),
                None => bail!(
                    "{shown}: weights alone, and of none of the models that the program knows; name with --model the one that \
                     is most like theirs ({}), and with --set how they differ",
                    model_names()
                ),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_that_are_lists_need_no_brackets_and_texts_no_quotes() {
        for (entry, expected) in [
            ("freeze=head", r#"freeze = ["head"]"#),
            ("freeze=downsample_layers, stages.0", r#"freeze = ["downsample_layers", "stages.0"]"#),
            (r#"freeze=["head"]"#, r#"freeze = ["head"]"#),
            ("freeze=", "freeze = []"),
            ("optimizer.betas=0.9,0.95", "optimizer.betas = [0.9, 0.95]"),
            ("data=a,b", r#"data = "a,b""#),
            ("epochs=3", "epochs = 3"),
            ("epochs=3\nseed=5", r#"epochs = "3\nseed=5""#), // no other field
        ] {
            assert_eq!(run_field(entry).unwrap(), expected.parse::<Table>().unwrap(), "{entry}");
        }
    }
}
