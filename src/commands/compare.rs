//! `biformer compare`.

use super::Status;
use super::output::{Kind, ensure_output};
use crate::config::{Measure, RunConfig, show};
use crate::pictures::comparison;
use crate::printing::{clock, column, print_error, printable, tell};
use crate::trainer::data_facts::in_short;
use crate::trainer::metrics::EpochMetrics;
use crate::trainer::summary::Summary;
use anyhow::{Result, bail};
use clap::Args;
use serde_json::json;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::io;
use std::path::{Component, Path, PathBuf};
use toml::Value;

#[derive(Debug, Args)]
pub struct Arguments {
    /// Run folders, or checkpoints in them, of runs that are done or in progress.
    #[arg(value_name = "DIR|FILE", required = true)]
    runs: Vec<PathBuf>,
    #[arg(long, value_name = "FILE", help = format!("A PNG file to which the accuracies over the epochs are drawn; of \
        more than {} runs, those of the best", comparison::MOST))]
    picture: Option<PathBuf>,
    /// Prints one JSON array, with all epochs and the whole configuration of each run.
    #[arg(long)]
    json: bool,
}

/// A run among those that are compared.
struct Compared<'p> {
    path: &'p Path,
    summary: Summary,
    /// Its values of the fields in which the runs differ.
    set_apart_by: BTreeMap<String, Value>,
}

/// Prints the runs, the best first, and draws them.
pub fn run(arguments: &Arguments) -> Result<Status> {
    ensure_output("--picture", arguments.picture.as_deref(), Kind::Picture)?;
    let mut read = vec![];
    for path in &arguments.runs {
        match Summary::read(path) {
            Ok(summary) => read.push((path.as_path(), summary)),
            Err(error) => print_error(&error),
        }
    }
    if read.is_empty() {
        bail!("there is no run to compare; expected run folders, such as runs/nano");
    }
    let status = if read.len() < arguments.runs.len() { Status::InputsSkipped } else { Status::Done };
    note_other_tests(&read);
    let by = common(read.iter().map(|(_, summary)| summary.config.best_by)).unwrap_or_default();
    let runs = compared(read, by)?;
    if arguments.json {
        say!("{}", serde_json::to_string_pretty(&runs.iter().map(Compared::to_json).collect::<Vec<_>>())?);
    } else {
        print(&runs, by)?;
    }
    if let Some(path) = &arguments.picture {
        draw(&runs, by, path)?;
    }
    Ok(status)
}

/// Says so if the accuracies are of other images.
fn note_other_tests(runs: &[(&Path, Summary)]) {
    let tests = |summary: &Summary| summary.data.test_images.zip(summary.data.test_fingerprint.clone());
    let known: Vec<_> = runs.iter().filter_map(|(path, summary)| Some((path, tests(summary)?))).collect();
    if let Some(pair) = known.windows(2).find(|pair| pair[0].1 != pair[1].1) {
        let [one, other] = [pair[0].0, pair[1].0].map(|path| path.display());
        tell!(
            io::stderr(),
            "note: {one} and {other} are not tested on the same images, by their number, names or classes: their \
             accuracies do not compare"
        );
    }
}

/// What all have in common, if they do.
fn common<T: PartialEq>(mut all: impl Iterator<Item = T>) -> Option<T> {
    let first = all.next()?;
    all.all(|other| other == first).then_some(first)
}

/// The runs, the best first: by this accuracy of the last epoch, and those that have none last.
fn compared(read: Vec<(&Path, Summary)>, by: Measure) -> Result<Vec<Compared<'_>>> {
    let configs: Vec<&RunConfig> = read.iter().map(|(_, summary)| &summary.config).collect();
    let set_apart = RunConfig::set_apart(&configs)?;
    let of_run = |((path, summary), set_apart_by)| Compared { path, summary, set_apart_by };
    let mut runs: Vec<Compared> = read.into_iter().zip(set_apart).map(of_run).collect();
    runs.sort_by(|one, other| match (one.last(), other.last()) {
        (Some(one), Some(other)) if by.prefers(one, other) => Ordering::Less,
        (Some(one), Some(other)) if by.prefers(other, one) => Ordering::Greater,
        (one, other) => other.is_some().cmp(&one.is_some()),
    });
    Ok(runs)
}

impl Compared<'_> {
    /// The metrics of the last epoch.
    fn last(&self) -> Option<&EpochMetrics> {
        self.summary.progress.epochs.last()
    }

    /// Those of the one that the run takes for the best.
    fn best(&self) -> Option<EpochMetrics> {
        let Summary { config, progress, .. } = &self.summary;
        config.best_by.last_and_best(&progress.epochs).map(|[_, best]| best)
    }

    /// What the images are called that it is tested on.
    fn tested_on(&self) -> &'static str {
        self.summary.data.tested_on()
    }

    fn to_json(&self) -> serde_json::Value {
        let Self { path, summary, set_apart_by } = self;
        json!({
            "run": path.display().to_string(),
            "tested_on": self.tested_on(),
            "last": self.last(),
            "best": self.best(),
            "seconds": summary.seconds,
            "set_apart_by": set_apart_by,
            "epochs": summary.progress.epochs,
            "config": summary.config,
        })
    }
}

fn print(runs: &[Compared<'_>], by: Measure) -> Result<()> {
    let (heading, names) = column("run", runs.iter().map(|run| run.path.display()));
    let accuracy = if by == Measure::MacroAccuracy { "macro" } else { "accuracy" };
    let loss = format!("{} loss", common(runs.iter().map(Compared::tested_on)).map_or("test", in_short));
    say!("{heading}    epochs  {accuracy:>8}      best (epoch)  train loss  {loss:>9}    time  set apart by");
    for (name, run) in names.iter().zip(runs) {
        let dash = || "-".to_owned();
        let epochs = format!("{}/{}", run.summary.progress.epoch(), run.summary.config.epochs);
        let last = |value: &dyn Fn(&EpochMetrics) -> String| run.last().map_or_else(dash, value);
        let best = run.best().map_or_else(dash, |best| format!("{} ({})", by.percent(&best), best.epoch));
        let time = run.summary.seconds.map_or_else(dash, clock);
        let settings = run.set_apart_by.iter().map(|(field, value)| format!("{field}={}", show(value)));
        let line = format!(
            "{name}  {epochs:>8}  {:>8}  {best:>16}  {:>10}  {:>9}  {time:>6}  {}",
            last(&|last| by.percent(last)),
            last(&|last| format!("{:.3}", last.train_loss)),
            last(&|last| format!("{:.3}", last.test_loss)),
            printable(settings.collect::<Vec<_>>().join(" ")),
        );
        say!("{}", line.trim_end());
    }
    Ok(())
}

fn draw(runs: &[Compared<'_>], by: Measure, picture: &Path) -> Result<()> {
    let names = without_common_folders(runs.iter().map(|run| run.path));
    let curves: Vec<_> =
        names.iter().zip(runs).map(|(name, run)| (name.as_str(), &run.summary.progress.epochs[..])).collect();
    comparison::draw(&curves, by, common(runs.iter().map(Compared::tested_on)), picture)
}

/// The paths without the folders in which all of them are.
fn without_common_folders<'p>(paths: impl Iterator<Item = &'p Path>) -> Vec<String> {
    let parts: Vec<Vec<Component>> = paths.map(|path| path.components().collect()).collect();
    let least = parts.iter().map(|parts| parts.len().saturating_sub(1)).min().unwrap_or(0);
    let common = (0..least).take_while(|&at| parts.windows(2).all(|pair| pair[0][at] == pair[1][at])).count();
    parts.iter().map(|parts| parts[common..].iter().collect::<PathBuf>().display().to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_all_runs_share_are_left_out_of_their_names() {
        let names = |paths: &[&str]| without_common_folders(paths.iter().map(Path::new)).join(" ");
        assert_eq!(names(&["/home/me/sweep/a", "/home/me/sweep/b"]), "a b");
        assert_eq!(
            names(&["runs/nano", "runs/deep/nano"]),
            "nano deep/nano".replace('/', std::path::MAIN_SEPARATOR_STR)
        );
        assert_eq!(names(&["runs/nano"]), "nano");
        assert_eq!(names(&["a", "a", "/"]), "a a /".replace('/', std::path::MAIN_SEPARATOR_STR));
    }
}
