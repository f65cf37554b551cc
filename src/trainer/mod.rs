//! Training: from a configuration to a run folder.
//!
//! | file | what it holds |
//! |---|---|
//! | `start.rs` | a new run |
//! | `resume.rs` | a run that goes on from its checkpoint |
//! | `learner.rs` | [`Learner`]: model, optimiser and average; one training step |
//! | `beginning.rs` | where a learner comes from: random weights, another run's, or a checkpoint |
//! | `score.rs` | how well images are classified, in training and in a test |
//! | `recorded.rs` | a training step on a GPU, recorded once and replayed |
//! | `average.rs` | the moving average of weights and running statistics |
//! | `checkpoint.rs` | what a run must remember to resume bit for bit, and how it is stored |
//! | `saving.rs` | when it is stored within an epoch |
//! | `summary.rs` | what a run's folder tells of it, without its weights |
//! | `stored.rs` | any file of weights, whether a run wrote it or not |
//! | `class_names.rs` | what the classes of weights that name none are taken to be |
//! | `data_facts.rs` | what a run must remember of its data |
//! | `trained.rs` | what of a checkpoint is needed to use a trained model |
//! | `images.rs` | [`Images`]: what a run learns from, and what it is tested on |
//! | `folder.rs` | the run folder: configuration, metrics, pictures |
//! | `best.rs` | the best epoch's checkpoint in it |
//! | `logs.rs` | its metrics and timings, a line an epoch |
//! | `metrics.rs` | what is measured of an epoch |
//! | `measure.rs` | how epochs are compared |
//! | `failure.rs` | the error of a run that fails, with advice on how to go on |
//! | `display.rs` | what a user sees while it trains |
//! | `stopwatch.rs` | how long an epoch takes, and how much of that it waits |

pub mod average;
mod beginning;
pub mod best;
pub mod checkpoint;
pub mod class_names;
pub mod data_facts;
mod display;
mod failure;
pub mod folder;
mod images;
pub mod learner;
mod logs;
mod measure;
pub mod metrics;
mod recorded;
mod resume;
mod saving;
pub mod score;
mod start;
mod stopwatch;
pub mod stored;
pub mod summary;
pub mod trained;

use crate::config::RunConfig;
use crate::memory;
use crate::pictures::curves::Told;
use crate::staging::numbered;
use anyhow::{Context, Result};
use checkpoint::Progress;
use data::{Loader, Split};
use data_facts::DataFacts;
use display::{Display, introduce};
use folder::{PICTURED, RunFolder};
pub use images::Images;
use learner::{LOWER_RATE, Learner};
use metrics::{EpochMetrics, Timing};
use optim::Schedule;
use rayon::ThreadPool;
use saving::Saving;
use score::{Score, Tested};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use stopwatch::{Lap, Stopwatch};

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// All epochs are done.
    Finished,
    /// It was asked to stop; a checkpoint stores how far it has come.
    Interrupted,
}

/// A training run. It computes on threads of its own, as many as its configuration asks for; they flush denormals,
/// which other threads do not.
pub struct Trainer {
    pool: Arc<ThreadPool>,
    folder: RunFolder,
    learner: Learner,
    progress: Progress,
    facts: DataFacts,
    train: Loader,
    test: Loader,
}

impl fmt::Debug for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer")
            .field("folder", &self.folder)
            .field("learner", &self.learner)
            .field("epochs", &self.progress.epoch())
            .finish_non_exhaustive()
    }
}

impl Trainer {
    /// What is known of the images.
    pub fn facts(&self) -> &DataFacts {
        &self.facts
    }

    /// Whether the data have test images that played no part, because training is tested on others.
    pub fn has_unused_test(&self) -> bool {
        let (tested_on, data) = (self.facts.test_split, Path::new(&self.learner.config().data));
        tested_on == Some(Split::Val) && data.join(Split::Test.name()).is_dir()
    }

    /// Its configuration.
    pub fn config(&self) -> &RunConfig {
        self.learner.config()
    }

    /// How far it has come.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// The run folder.
    pub fn folder(&self) -> &RunFolder {
        &self.folder
    }

    /// Whether all epochs are done.
    pub fn finished(&self) -> bool {
        self.progress.epoch() >= self.config().epochs
    }

    /// Trains until all epochs are done or `stop` is set, in which case it stops after the current step at the latest,
    /// or after an image that is being decoded. If `stop` is set from the beginning, it takes one step, or none if only
    /// the epoch's test is left: a caller that always sets it would never get past that test. Errors: images that
    /// cannot be read, a loss that is not finite, a full disk, a GPU that fails. Each says what is saved and how the
    /// run goes on.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<Outcome> {
        self.run_watched(stop, |_| {})
    }

    /// As [`run`](Self::run), and calls `watch` after each epoch, once that is stored. If `watch` sets `stop`, the run
    /// ends there. This one prints nothing, and ends after three epochs without a gain:
    ///
    /// ```no_run
    /// # use biformer::{config::{Measure, RunConfig}, set_quiet, trainer::Trainer};
    /// # use std::sync::atomic::{AtomicBool, Ordering};
    /// # fn main() -> anyhow::Result<()> {
    /// set_quiet(true);
    /// let stop = AtomicBool::new(false);
    /// Trainer::new(RunConfig::for_model("nano")?)?.run_watched(&stop, |run| {
    ///     if let Some([last, best]) = Measure::Accuracy.last_and_best(&run.progress().epochs) {
    ///         stop.store(last.epoch >= best.epoch + 3, Ordering::Relaxed);
    ///     }
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn run_watched(&mut self, stop: &AtomicBool, watch: impl FnMut(&Self) + Send) -> Result<Outcome> {
        Arc::clone(&self.pool).install(|| {
            introduce(&self.learner, &self.progress, &self.facts, [&self.train, &self.test]);
            let mut display = Display::new(self.config(), &self.progress, &self.facts, &self.train);
            let outcome = self.run_on(stop, &mut display, watch).map_err(|error| self.end_with(error));
            display.close();
            outcome
        })
    }

    fn run_on(&mut self, stop: &AtomicBool, display: &mut Display, mut watch: impl FnMut(&Self)) -> Result<Outcome> {
        let one_step = stop.load(Ordering::Relaxed);
        while !self.finished() {
            let started = Instant::now();
            let training = self.train_epoch(stop, one_step, display)?;
            display.lost_classes(self.train.dataset().as_ref());
            // Whoever has set `stop` may have cleared it since.
            let trained = self.progress.batch >= self.train.batches_per_epoch();
            let test = if trained && !stop.load(Ordering::Relaxed) { self.evaluate(stop, display)? } else { None };
            let Some(test) = test else {
                self.save()?;
                return Ok(Outcome::Interrupted);
            };
            let epoch = self.progress.epoch() + 1;
            let last_step = (epoch * self.train.batches_per_epoch()).saturating_sub(1) as u64;
            let metrics = EpochMetrics::new(epoch, self.schedule()?.lr(last_step), self.progress.score, &test);
            self.progress.epochs.push(metrics);
            self.progress.batch = 0;
            self.progress.score = Score::default();
            // The timing comes first: if the program is killed between the two, there is a line too many, which
            // resuming removes. If it cannot be written, the checkpoint still is.
            let elapsed = started.elapsed();
            let timed = self.folder.append_timing(&Timing::new(epoch, elapsed, training, self.config().device));
            self.save()?;
            timed?;
            self.folder.write_metrics(&self.progress)?;
            self.folder.keep_best(&self.progress, self.config().best_by)?;
            display.epoch(&metrics, elapsed, training);
            // If they cannot be drawn, the error is reported at the end of the run.
            let _ = self.folder.draw_curves(&self.progress, self.told());
            watch(self);
        }
        Ok(Outcome::Finished)
    }

    /// Trains on what is left of an epoch, or until `stop` is set. With `one_step`, because `stop` was set from the
    /// beginning, it takes one step at most.
    fn train_epoch(&mut self, stop: &AtomicBool, one_step: bool, display: &mut Display) -> Result<Lap> {
        let (epoch, steps) = (self.progress.epoch(), self.train.batches_per_epoch());
        let schedule = self.schedule()?;
        let (mut clock, mut saving) = (Stopwatch::start(), Saving::every(self.config().checkpoint_every));
        let given_up = if one_step { &AtomicBool::new(false) } else { stop };
        let mut batches = numbered(self.train.epoch_until(epoch as u64, self.progress.batch, given_up));
        while let Some(batch) = clock.waiting(|| batches.next()) {
            let batch = batch?;
            display.skipped_in_training(&batch);
            let step = (epoch * steps + self.progress.batch) as u64;
            let lr = schedule.lr(step);
            // On a GPU training waits for images here, perhaps while this step is still computed.
            let score = self
                .learner
                .train_unless(given_up, &batch, step, lr, || clock.waiting(|| batches.peek())?.as_ref().ok());
            let score = score.with_context(|| {
                let number = self.progress.batch + 1;
                format!("step {} (epoch {}, batch {number} of {steps}), learning rate {lr:.3e}", step + 1, epoch + 1)
            })?;
            let Some(score) = score else { break };
            self.train.recycle(batch.into_batch());
            self.progress.batch += 1;
            self.progress.score.add(score);
            clock.images += score.images;
            display.batch(&self.progress, clock.lap().rate().unwrap_or_default());
            if stop.load(Ordering::Relaxed) {
                break;
            }
            if let Some(full) = saving.after(step + 1, || self.save())? {
                display.unsaved(&full);
            }
        }
        Ok(clock.lap())
    }

    fn schedule(&self) -> Result<Schedule> {
        self.config().schedule(self.train.batches_per_epoch())
    }

    /// The score on the test images, or nothing when `stop` was set before it was complete.
    fn evaluate(&mut self, stop: &AtomicBool, display: &mut Display) -> Result<Option<Tested>> {
        let Self { learner, test, progress, .. } = self;
        let score = learner.with_average(|model| {
            let mut total = Tested::new(test.dataset().classes().len());
            let complete = score::test(model, test, stop, LOWER_RATE, |batch, verdicts, _| {
                display.skipped(batch);
                verdicts.iter().for_each(|verdict| total.add(verdict));
                Ok(())
            })?;
            Ok(complete.then_some(total))
        });
        score.with_context(|| format!("test images after epoch {}", progress.epoch() + 1))
    }

    /// Writes the run's pictures: curves, and where regions of a few test images look. Errors: they cannot be written.
    pub fn draw(&mut self) -> Result<()> {
        self.folder.draw_curves(&self.progress, self.told())?;
        Arc::clone(&self.pool).install(|| {
            // Evenly spaced from the first to the last, because an image folder is ordered by class.
            let all = self.test.dataset().len();
            let shown = PICTURED.min(all);
            let spaced = |image| image * (all - 1) / (shown - 1).max(1);
            let batch = self.test.batch_of((0..shown).map(spaced).collect())?;
            let trace = self.learner.with_average(|model| learner::trace(model, &batch))?;
            self.folder.draw_routes(&batch, &trace, self.test.transform())
        })
    }

    /// What the curves must say of this run.
    fn told(&self) -> Told<'_> {
        let config = self.config();
        Told {
            tested_on: self.facts.tested_on(),
            smooths: config.label_smoothing > 0.0,
            mixes: config.augmentation.mixes(),
        }
    }

    fn save(&self) -> Result<()> {
        self.folder.save(self.learner.checkpoint(&self.progress, self.facts.clone())?)
    }
}

/// Refuses a run that the machine has no room for. `choice` is what the error recommends.
fn ensure_room(config: &RunConfig, train: &Loader, test: &Loader, choice: &str) -> Result<()> {
    // Only one of the loaders makes batches at a time.
    let images = train.most_bytes().max(test.most_bytes());
    memory::ensure_room_to_train(config, [config.image_size; 2], images, choice)
}
