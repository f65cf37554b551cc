//! What a user sees while a model trains.

use super::checkpoint::Progress;
use super::data_facts::{DataFacts, in_short};
use super::learner::Learner;
use super::metrics::EpochMetrics;
use super::stopwatch::Lap;
use crate::config::{Measure, RunConfig};
use crate::data_notes::{distinct_notes, images_per_class, lost_classes, warn_of};
use crate::device::{DeviceName, Precision};
use crate::paths::quoted;
use crate::printing::{bar, clock, plural, tell};
use anyhow::Error;
use data::{Batch, Dataset, Loader, Split, size_of_image};
use indicatif::ProgressBar;
use std::collections::{BTreeSet, HashSet};
use std::io;
use std::time::{Duration, Instant};

/// Says what is about to be trained, before anything is read or measured that takes its time.
pub fn announce(config: &RunConfig) {
    let (model, data, epochs, threads) = (&config.model, &config.data, config.epochs, rayon::current_num_threads());
    let means = match config.device {
        DeviceName::Cpu => {
            let isa = tensor::cpu::isa::Isa::current().name();
            format!("with {threads} thread{} ({isa})", plural(threads))
        }
        other => format!("on {other}"),
    };
    let precision = if config.precision == Precision::F32 { "" } else { &format!(", {}", config.precision) };
    tell!(io::stdout(), "Training {model} on {data} for {epochs} epoch{} {means}{precision}.", plural(epochs));
    tell!(io::stdout(), "Run folder: {}", config.out.display());
}

/// Says what a run begins with, or goes on with, given what there is to train on and to test on.
pub fn introduce(learner: &Learner, progress: &Progress, facts: &DataFacts, [train, test]: [&Loader; 2]) {
    let (config, layout) = (learner.config(), learner.model().parameters.layout());
    let (begins, steps) = ((progress.epoch(), progress.batch) == (0, 0), train.batches_per_epoch());
    let sets = [train.dataset().as_ref(), test.dataset().as_ref()];
    describe(config, layout.count() as f64 / 1e6, sets, facts.tested_on(), begins);
    if !config.freeze.is_empty() {
        let frozen = layout.ids().filter(|&id| layout.is_frozen(id)).map(|id| layout.shape(id).count());
        let (frozen, parts) = (frozen.sum::<usize>(), config.freeze.join(", "));
        tell!(io::stdout(), "{frozen} of the parameters are frozen: {parts}.");
        if config.weights.is_empty() {
            tell!(io::stderr(), "note: without --weights they are random, and stay so.");
        }
    }
    let peak = config.schedule.peak * config.backbone_lr * config.layer_decay;
    if begins && config.freeze.is_empty() && !config.weights.is_empty() && peak >= FORGETS {
        tell!(
            io::stderr(),
            "note: with a learning rate of {peak} the weights forget much of what they know; to keep it: --lr 1e-4"
        );
    }
    if begins {
        let idle = config.idle_fields();
        idle.iter().for_each(|(field, needs)| tell!(io::stderr(), "note: {field} does nothing here: it needs {needs}"));
    }
    let (epochs, warm_up) = (config.epochs, config.schedule.warmup_epochs);
    if begins && warm_up > epochs as f64 / 2.0 {
        tell!(
            io::stderr(),
            "note: the learning rate rises during {warm_up} of {epochs} epoch{}; to have it fall for longer: --set \
             schedule.warmup_epochs={}",
            plural(epochs),
            config.schedule.shorter_warm_up(epochs)
        );
    }
    if steps < FEW_STEPS && begins && config.batch_size > config.micro_batches {
        let (s, batch) = (plural(steps), config.batch_size);
        tell!(
            io::stdout(),
            "An epoch is {steps} step{s} of {batch} images: there are more with a smaller --batch-size."
        );
    }
    if config.label_smoothing > 0.0 {
        let smoothing = config.label_smoothing;
        let tested_on = facts.tested_on();
        tell!(io::stdout(), "Training losses are with label smoothing of {smoothing}, {tested_on} losses without.");
    }
    if config.augmentation.mixes() {
        tell!(
            io::stdout(),
            "Training images are mixed: in their accuracy, the class of the larger part counts as right."
        );
    }
    learner.notes.iter().for_each(|note| tell!(io::stdout(), "{note}."));
    if !begins {
        let (epoch, batch) = (progress.epoch() + 1, progress.batch);
        tell!(io::stdout(), "Going on in epoch {epoch}, where {batch} of {steps} batches are done.");
    }
}

/// Says what there is to learn from and to be tested on: here a mistake in the data can be seen.
fn describe(config: &RunConfig, parameters: f64, [train, test]: [&dyn Dataset; 2], tested_on: &str, begins: bool) {
    let (images, classes, tests) = (train.len(), train.classes(), test.len());
    let es = if classes.len() == 1 { "" } else { "es" };
    // If the test images are files, names their folder, which may not be the one that the user meant.
    let folder = test.path(0).and_then(|path| path.strip_prefix(&config.data).ok()?.iter().next());
    let folder = folder.filter(|folder| *folder == Split::evaluated(&config.data).name());
    let place = folder.map(|folder| format!(" ({}/)", folder.display())).unwrap_or_default();
    tell!(
        io::stdout(),
        "{parameters:.2} M parameters, {images} training image{} of {} class{es}, {tests} {tested_on} image{}{place}.",
        plural(images),
        classes.len(),
        plural(tests)
    );
    if test.path(0).is_some() && begins {
        let size = config.image_size;
        let remedy = match size < PHOTOGRAPHS && are_larger(train, size) {
            true => "; to see more of photographs: --image-size 64, and beyond --model tiny --image-size 112",
            false => "",
        };
        tell!(io::stdout(), "The model sees {size}x{size} pixels of them{remedy}.");
    }
    if let Some([(small, least), (large, most)]) = uneven(train) {
        let remedy = match config.augmentation.balance {
            0.0 if begins => " To see them equally often: --set augmentation.balance=1.".to_owned(),
            0.0 => String::new(),
            balance => format!(" Small ones are seen more often (augmentation.balance = {balance})."),
        };
        tell!(
            io::stdout(),
            "The classes are uneven: from {least} training image{} ({small}) to {most} ({large}).{remedy}",
            plural(least)
        );
        if begins && config.best_by == Measure::Accuracy && uneven(test).is_some() {
            tell!(
                io::stdout(),
                "So are those of the {tested_on} images. To choose the best epoch by the mean of the classes' \
                 accuracies: --set best_by=macro_accuracy."
            );
        }
    }
    for note in distinct_notes([train, test]) {
        tell!(io::stderr(), "note: {note}");
    }
}

/// Whether any of a few images, of all classes, is larger than this on both sides.
fn are_larger(images: &dyn Dataset, side: usize) -> bool {
    const LOOKED_AT: usize = 16;
    let path = |at: usize| images.path(at * images.len() / LOOKED_AT);
    (0..LOOKED_AT).filter_map(|at| size_of_image(path(at)?)).any(|size| size.into_iter().all(|extent| extent > side))
}

/// The smallest class and the largest, where this has twice as many images or more.
fn uneven(images: &dyn Dataset) -> Option<[(&str, usize); 2]> {
    images.labels()?;
    let counts = images_per_class(images, 0..images.len());
    let counted = || images.classes().iter().map(String::as_str).zip(counts.iter().copied());
    let (small, large) = (counted().min_by_key(|class| class.1)?, counted().max_by_key(|class| class.1)?);
    (large.1 >= 2 * small.1).then_some([small, large])
}

/// The side of images on which details of photographs can be seen.
const PHOTOGRAPHS: usize = 64;
/// An epoch of fewer steps than this may not be what the user meant.
const FEW_STEPS: usize = 10;
/// From this learning rate on, a model forgets its initial weights and learns as if from random ones.
const FORGETS: f64 = 1e-3;
/// How often a run whose progress bar is hidden prints its progress instead.
const NOW_AND_THEN: Duration = Duration::from_secs(60);

/// A progress bar over the whole run, and a line for each epoch; if standard error is not a terminal, a line about once
/// a minute in place of the bar.
pub struct Display {
    bar: ProgressBar,
    /// When something was said last.
    said: Instant,
    /// What was already printed: reasons why images could not be decoded, and classes without others.
    named: HashSet<String>,
    /// The training images that could not be decoded.
    unreadable: BTreeSet<usize>,
    /// Whether the user has been told that training waits for images.
    warned: bool,
    epochs: usize,
    steps: usize,
    /// What it is tested on, in short.
    tested_on: &'static str,
    /// What its epochs are compared by.
    by: Measure,
    /// How long the last test took.
    tested: Duration,
    /// The command that would make the images smaller, if they are files.
    shrink: Option<String>,
}

impl Display {
    /// The display of a run with this progress, on these training images.
    pub fn new(config: &RunConfig, progress: &Progress, facts: &DataFacts, train: &Loader) -> Self {
        let (epochs, steps) = (config.epochs, train.batches_per_epoch());
        let bar = bar(epochs * steps);
        bar.set_position((progress.epoch() * steps + progress.batch) as u64);
        let command = |_| {
            let (data, side) = (quoted(&config.data), (2 * config.image_size).min(4096));
            format!("biformer shrink --data {data} --output SMALLER --side {side}")
        };
        let shrink = train.dataset().path(0).map(command);
        Self {
            bar,
            said: Instant::now(),
            named: HashSet::new(),
            unreadable: BTreeSet::new(),
            warned: false,
            epochs,
            steps,
            tested_on: in_short(facts.tested_on()),
            by: config.best_by,
            tested: Duration::ZERO,
            shrink,
        }
    }

    /// A step is done.
    pub fn batch(&mut self, progress: &Progress, images_per_second: f64) {
        let done = progress.epoch() * self.steps + progress.batch;
        self.bar.set_position(done as u64);
        let left = seconds_left(progress, [self.epochs, self.steps], images_per_second, self.tested);
        let message = message(progress, self.epochs, left, images_per_second);
        if self.bar.is_hidden() && self.said.elapsed() > NOW_AND_THEN {
            self.said = Instant::now();
            tell!(io::stdout(), "{message}");
        }
        self.bar.set_message(message);
    }

    /// As [`skipped`](Self::skipped), of training images.
    pub fn skipped_in_training(&mut self, batch: &Batch) {
        self.unreadable.extend(batch.skipped.iter().map(|skipped| skipped.sample));
        self.skipped(batch);
    }

    /// Names classes of which no training image could be decoded, each once in a run: the model cannot learn them.
    pub fn lost_classes(&mut self, train: &dyn Dataset) {
        let lost = lost_classes(train, self.unreadable.iter().copied());
        let fresh = lost.into_iter().filter(|class| self.named.insert((*class).to_owned()));
        self.bar
            .suspend(|| fresh.for_each(|class| tell!(io::stderr(), "note: of {class} no training image can be read")));
    }

    /// Names images that could not be decoded, each once in a run.
    pub fn skipped(&mut self, batch: &Batch) {
        let fresh = batch.skipped.iter().filter(|skipped| self.named.insert(skipped.reason.clone()));
        self.bar.suspend(|| fresh.for_each(warn_of));
    }

    /// There was no room for a checkpoint within the epoch.
    pub fn unsaved(&self, error: &Error) {
        let cause = error.root_cause();
        self.bar.suspend(|| {
            tell!(
                io::stderr(),
                "note: no checkpoint could be written ({cause}); training goes on, but make room before the epoch ends"
            );
        });
    }

    /// An epoch is done, with its test.
    pub fn epoch(&mut self, metrics: &EpochMetrics, elapsed: Duration, training: Lap) {
        self.said = Instant::now();
        self.tested = elapsed.saturating_sub(training.elapsed);
        let by_class = match self.by {
            Measure::Accuracy => String::new(),
            by => format!("  macro {:>5}", by.percent(metrics)),
        };
        self.bar.suspend(|| {
            tell!(
                io::stdout(),
                "epoch {:>3}/{}  train loss {:.3} {:>5.1}%   {} loss {:.3}  accuracy {:>4.1}%{by_class}   {:>4}",
                metrics.epoch,
                self.epochs,
                metrics.train_loss,
                100.0 * metrics.train_accuracy,
                self.tested_on,
                metrics.test_loss,
                100.0 * metrics.test_accuracy,
                clock(elapsed.as_secs_f64())
            );
            if training.waits_long() && !std::mem::replace(&mut self.warned, true) {
                let shrink =
                    self.shrink.as_ref().map(|command| format!("; large photographs are read faster after {command}"));
                tell!(
                    io::stderr(),
                    "note: making a batch of images takes longer than training on it{}",
                    shrink.unwrap_or_default()
                );
            }
        });
    }

    /// Takes the bar away.
    pub fn close(&self) {
        self.bar.finish_and_clear();
    }
}

/// How many seconds a run of so many epochs, of so many steps each, still takes: its training, at this speed, and a
/// test of this duration after each epoch.
fn seconds_left(progress: &Progress, [epochs, steps]: [usize; 2], images_per_second: f64, test: Duration) -> f64 {
    let steps_left = (epochs - progress.epoch()) * steps - progress.batch;
    let per_step = progress.score.images as f64 / progress.batch.max(1) as f64;
    let tests_left = (epochs - progress.epoch()) as f64;
    steps_left as f64 * per_step / images_per_second.max(1e-9) + tests_left * test.as_secs_f64()
}

/// The text after the bar. What matters less comes last, where a narrow terminal cuts it off.
fn message(progress: &Progress, epochs: usize, seconds_left: f64, images_per_second: f64) -> String {
    format!(
        "epoch {}/{epochs}  loss {:.3}  accuracy {:>4.1}%  {} left  {images_per_second:.0} images/s",
        progress.epoch() + 1,
        progress.score.mean_loss(),
        100.0 * progress.score.accuracy(),
        clock(seconds_left)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trainer::score::{Score, Tested};

    #[test]
    fn the_time_left_has_that_of_the_tests() {
        let score = Score { images: 50, ..Score::default() };
        let epochs = vec![EpochMetrics::new(1, 1e-3, score, &Tested::new(0))];
        let progress = Progress { epochs, batch: 5, score, ..Progress::default() };
        // 15 steps of 10 images, and two tests.
        assert_eq!(seconds_left(&progress, [3, 10], 50.0, Duration::from_secs(7)), 3.0 + 14.0);
    }

    #[test]
    fn eighty_columns_show_speed_and_time_left() {
        let score = Score { loss: 6907.8, right: 1000, right_in_five: 1000, images: 1000 };
        let epochs = (1..299).map(|epoch| EpochMetrics::new(epoch, 1e-3, score, &Tested::new(0))).collect();
        let progress = Progress { epochs, score, ..Progress::default() };
        let shown = message(&progress, 300, 45_000.0, 1234.5);
        assert!(shown.len() <= 80 - "██████████ ".chars().count(), "{shown}");
        assert!(shown.contains("12h30 left") && shown.contains("1234 images/s"), "{shown}");
    }
}
