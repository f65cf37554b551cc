//! `biformer train`.

use super::Status;
use super::options::{THREADS_HELP, whole};
use super::set::{Assignments, assignment, fields, run_field};
use crate::config::{Changes, DEFAULT_MODEL, Recompute, RunConfig, merge};
use crate::device::{DEVICE_HELP, DeviceName, Precision};
use crate::memory::when_it_runs_out;
use crate::printing::{capitalized, plural, printable, tell};
use crate::signals;
use crate::trainer::best::BEST;
use crate::trainer::folder::holds_run;
use crate::trainer::{Outcome, Trainer};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use model::PRESETS;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use toml::{Table, Value};

/// The command line wins over the configuration file, which wins over the defaults.
#[derive(Debug, Default, Args)]
pub struct Arguments {
    /// A TOML file; any field of a run folder's config.toml can be given in it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[arg(long, value_name = "NAME", help = model_help())]
    model: Option<String>,
    /// `embedded` (the default: 6,000 images of CIFAR-10 inside the program), or a folder with CIFAR-10 or
    /// CIFAR-100 in their binary layout, with CLASS/*.png|jpg|.., or with train/CLASS/ and val/ or test/.
    #[arg(long, value_name = "embedded|DIR")]
    data: Option<PathBuf>,
    /// Weights to start from: a run folder, the checkpoint in it, what `export` wrote, or another state_dict, in a
    /// safetensors or .pth file. Unless --model names another, the run takes its model from them and, except from a
    /// bare state_dict, its image size. Images are normalised as they were for these weights (for a bare state_dict, as
    /// ImageNet's). If the head was trained for other classes, those that the data have as well are copied by name; all
    /// others, or a missing head, start random.
    #[arg(long, value_name = "DIR|FILE")]
    weights: Option<PathBuf>,
    #[arg(long, value_name = "N", help = usual("Passes over the training images", |run| run.epochs.to_string()))]
    epochs: Option<u32>,
    #[arg(long, value_name = "N", help = usual("Images per step", |run| format!("{}, fewer where there are few images,", run.batch_size)))]
    batch_size: Option<u32>,
    /// The side of the images; by default the one that the model is meant for.
    #[arg(long, value_name = "N")]
    image_size: Option<u32>,
    /// Changes fields of the model, or of the run as its config.toml has them: --set depth=2,2,2 label_smoothing=0
    /// optimizer.weight_decay=0.1.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = assignment)]
    set: Vec<String>,
    /// What the backward pass computes again instead of keeping it, to save memory. The results have the same bits.
    #[arg(long, value_enum)]
    recompute: Option<Recompute>,
    #[arg(long, value_name = "X", help = usual("The highest learning rate", |run| run.schedule.peak.to_string()))]
    lr: Option<f64>,
    /// Decides initial weights, order, augmentation and dropped branches; 0 to 2^63 - 1.
    #[arg(long, value_name = "N", value_parser = whole(0..=i64::MAX as u64))]
    seed: Option<u64>,
    #[arg(long, value_name = "NAME", help = DEVICE_HELP)]
    device: Option<DeviceName>,
    /// The precision to compute in; weights are always f32.
    #[arg(long, value_enum)]
    precision: Option<Precision>,
    #[arg(long, value_name = "N", help = THREADS_HELP)]
    threads: Option<u32>,
    /// The run folder; runs/MODEL by default.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Continues from the checkpoint in the run folder (--out), with the configuration that the run began with. Only
    /// these can change: --epochs (the rest of the run then follows the learning rate schedule of a run of that
    /// length, with this run's warm-up), --data if the images have moved, --device, --precision, --threads,
    /// --recompute, and with --set checkpoint_every, max_bad_images and best_by. With --resume=auto a run is started if
    /// the folder holds none, so that one command serves for a job that is interrupted and queued again.
    #[arg(long, value_enum, value_name = "auto", hide_possible_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "always")]
    resume: Option<Resume>,
}

/// When a run is resumed.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Resume {
    /// There must be one
    Always,
    /// If there is one; otherwise a run is started
    Auto,
}

impl Arguments {
    fn changes(&self) -> Result<Changes> {
        let number = |value: u32| Value::Integer(i64::from(value));
        let peak = |lr: f64| Value::Table([("peak".to_owned(), Value::Float(lr))].into_iter().collect());
        let path = |flag: &str, path: &Option<PathBuf>| {
            let text = |path: &PathBuf| path.to_str().map(str::to_owned);
            path.as_ref()
                .map(|path| text(path).with_context(|| format!("{flag}: expected a path in UTF-8")))
                .transpose()
        };
        let flags = [
            ("image_size", self.image_size.map(number)),
            ("model", self.model.clone().map(Value::String)),
            ("data", path("--data", &self.data)?.map(Value::String)),
            ("epochs", self.epochs.map(number)),
            ("batch_size", self.batch_size.map(number)),
            ("recompute", self.recompute.map(Value::try_from).transpose()?),
            ("schedule", self.lr.map(peak)),
            ("seed", self.seed.map(|seed| Value::Integer(seed as i64))),
            ("device", self.device.map(|name| Value::String(name.to_string()))),
            ("precision", self.precision.map(Value::try_from).transpose()?),
            ("threads", self.threads.map(number)),
            ("weights", path("--weights", &self.weights)?.map(Value::String)),
            ("out", path("--out", &self.out)?.map(Value::String)),
        ];
        let given = flags.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        let mut given: Table = given.collect();
        let key = |entry: &String| entry.split('=').next().unwrap_or(entry).to_owned();
        let Assignments { of_run, of_model } =
            Assignments::new(&self.set, |name| RunConfig::default_of(name).is_some())?;
        if let Some(unknown) = of_model.iter().find_map(|entry| RunConfig::unknown_field(&key(entry))) {
            bail!("--set: {unknown}");
        }
        let options = given.clone();
        for entry in &of_run {
            ensure_once(&options, &key(entry))?;
            merge(&mut given, run_field(entry)?)?;
        }
        if let Some(fields) = fields(&of_model)? {
            merge(&mut given, [("architecture".to_owned(), fields)].into_iter().collect())?;
        }
        Changes::gather(self.config.as_deref(), given)
    }
}

/// Refuses a --set of a field that an option of its own gives as well.
fn ensure_once(options: &Table, key: &str) -> Result<()> {
    let there = match key.split_once('.') {
        None => options.contains_key(key),
        Some((table, field)) => options.get(table).is_some_and(|table| table.get(field).is_some()),
    };
    let option = if key == "schedule.peak" { "lr".to_owned() } else { key.replace('_', "-") };
    if there {
        bail!("--set {key}: --{option} gives it as well; leave one of them out");
    }
    Ok(())
}

fn model_help() -> String {
    let models: Vec<String> = PRESETS.iter().map(|preset| format!("- {}: {}", preset.name, preset.summary)).collect();
    format!(
        "The model; {DEFAULT_MODEL} by default. The published models get nano's recipe (24 epochs, batches of 64, one \
         learning rate) unless a configuration says otherwise:\n{}",
        models.join("\n")
    )
}

/// An option's help: what it is, and the default that a run has.
fn usual(what: &str, of: impl Fn(&RunConfig) -> String) -> String {
    RunConfig::for_model(DEFAULT_MODEL).map_or(what.to_owned(), |run| format!("{what}; {} by default", of(&run)))
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    let changes = arguments.changes()?;
    let stop = signals::stop_when_asked()?;
    let resumes = match arguments.resume {
        None => false,
        Some(Resume::Always) => true,
        Some(Resume::Auto) => holds_run(&changes.folder()?)?,
    };
    let mut trainer = match resumes {
        true => Trainer::resume(&changes.folder()?, &changes)?,
        false => Trainer::from_changes(&changes)?,
    };
    train(&mut trainer, stop, resumes)
}

fn train(trainer: &mut Trainer, stop: &AtomicBool, goes_on: bool) -> Result<Status> {
    let started = Instant::now();
    let (folder, argument) = (printable(trainer.folder().path().display()), trainer.folder().argument());
    let undrawn =
        format!("the run is done and saved; biformer train --resume --out {argument} draws its pictures, which failed");
    if trainer.finished() {
        // A killed run may not have got as far as drawing the pictures.
        when_it_runs_out(undrawn);
        trainer.draw()?;
        let epochs = trainer.config().epochs;
        say!("{folder}: this run is done, after {epochs} epoch{}.", plural(epochs));
        say!("Train it further with: biformer train --resume --out {argument} --epochs N");
        return Ok(ended(stop));
    }
    let block = match trainer.config().device {
        DeviceName::Cpu => trainer.config().recompute.advice("--recompute block "),
        _ => "",
    };
    when_it_runs_out(format!(
        "what was saved is unharmed: with more memory free, go on with biformer train --resume {block}--out {argument}, or \
         begin again with a smaller --batch-size and another --out"
    ));
    // If the run was asked to stop before this, for example while the data were being opened, no step is begun.
    let outcome = if stop.load(Ordering::Relaxed) { Outcome::Interrupted } else { trainer.run(stop)? };
    match outcome {
        Outcome::Finished => {
            let seconds = started.elapsed().as_secs();
            // Drawn before anything is printed, as that may fail; an error of drawing is returned after the accuracy
            // has been printed.
            when_it_runs_out(undrawn.clone());
            let drawn = trainer.draw();
            print_accuracy(trainer, seconds, goes_on)?;
            drawn.context(undrawn)?;
            print_what_is_there(trainer)?;
            Ok(ended(stop))
        }
        Outcome::Interrupted => {
            when_it_runs_out(format!("the checkpoint is saved; go on with: biformer train --resume --out {argument}"));
            if let Err(error) = trainer.draw() {
                tell!(io::stderr(), "note: no pictures: {error:#}");
            }
            // How the run ended must not depend on whether the output can still be written: Ctrl-C ends `| tee log` as
            // well.
            tell!(
                io::stdout(),
                "Stopped; the checkpoint is saved. Go on with: biformer train --resume --out {argument}"
            );
            Ok(Status::Interrupted)
        }
    }
}

/// How well a run did that took so many seconds.
fn print_accuracy(trainer: &Trainer, seconds: u64, goes_on: bool) -> Result<()> {
    let by = trainer.config().best_by;
    if let Some([last, best]) = by.last_and_best(&trainer.progress().epochs) {
        let since = if goes_on { " since it went on" } else { "" };
        let name = capitalized(trainer.facts().tested_on());
        let accuracy = format!("{}{}", by.percent(&last), by.remark());
        say!("{name} accuracy {accuracy} after {}:{:02} min{since}.", seconds / 60, seconds % 60);
        if let Some(which) = by.surpassed([&last, &best]) {
            match trainer.folder().kept_epoch() {
                Some(kept) if kept == best.epoch => {
                    say!("It was {which}: those weights are in {BEST}, which eval, predict and export");
                    say!("take as well: --checkpoint {}", trainer.folder().argument_of(BEST));
                }
                Some(kept) => say!("It was {which}, whose weights were not kept; those in {BEST} are of epoch {kept}."),
                None => say!("It was {which}, whose weights were not kept."),
            }
        }
    }
    Ok(())
}

/// What a run has left behind, and what it is good for.
fn print_what_is_there(trainer: &Trainer) -> Result<()> {
    let (folder, argument) = (printable(trainer.folder().path().display()), trainer.folder().argument());
    say!("{folder}: {}", trainer.folder().files().join(", "));
    if trainer.has_unused_test() {
        say!("The images in test/ had no part in this: biformer eval --checkpoint {argument} --split test");
    }
    say!("What it says of a picture: biformer predict --checkpoint {argument} PICTURE");
    Ok(())
}

/// How a run ended that is done: if it was asked to stop, too late to have anything left to do, whoever started it
/// should see that, lest a shell's loop go on.
fn ended(stop: &AtomicBool) -> Status {
    if stop.load(Ordering::Relaxed) { Status::Interrupted } else { Status::Done }
}
