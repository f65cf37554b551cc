//! Training: from a configuration to a run folder.
//!
//! | file | what it holds |
//! |---|---|
//! | `step.rs` | [`Learner`]: model, optimiser and average; one training step, one evaluation |
//! | `checkpoint.rs` | what a run must remember to go on to the bit, and how it is stored |
//! | `folder.rs` | the run folder: configuration, metrics, pictures |
//! | `progress.rs` | what a user sees while it trains |

pub mod checkpoint;
pub mod folder;
pub mod progress;
pub mod step;

use crate::config::RunConfig;
use anyhow::{Context, Result, bail};
use checkpoint::{Checkpoint, Progress};
use data::{Batch, Dataset, Loader, LoaderConfig, Split, Transform};
use folder::{EpochMetrics, RunFolder};
use progress::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use step::{Learner, Score};

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// All epochs are done.
    Finished {
        /// Test accuracy after the last epoch.
        accuracy: f64,
    },
    /// Someone asked it to stop; a checkpoint holds where.
    Interrupted,
}

/// A training run.
pub struct Trainer {
    config: RunConfig,
    folder: RunFolder,
    learner: Learner,
    progress: Progress,
    train: Loader,
    test: Loader,
}

impl Trainer {
    /// A new run: makes its folder, which must not hold a run already.
    pub fn new(mut config: RunConfig) -> Result<Self> {
        let (train, test) = open_data(&config)?;
        adopt_classes(&mut config, train.as_ref())?;
        let folder = RunFolder::create(&config)?;
        let learner = Learner::new(&config)?;
        Self::assemble(config, folder, learner, Progress::default(), train, test)
    }

    /// A run taken up where its checkpoint left it.
    pub fn resume(config: RunConfig) -> Result<Self> {
        let folder = RunFolder::open(&config.out)?;
        let checkpoint = Checkpoint::read(&folder.checkpoint())?;
        let (train, test) = open_data(&checkpoint.config)?;
        let mut learner = Learner::new(&checkpoint.config)?;
        learner.restore(&checkpoint)?;
        let mut stored = checkpoint.config;
        stored.threads = config.threads;
        stored.out = config.out;
        folder.keep_epochs(checkpoint.progress.epoch)?;
        Self::assemble(stored, folder, learner, checkpoint.progress, train, test)
    }

    fn assemble(
        config: RunConfig,
        folder: RunFolder,
        learner: Learner,
        progress: Progress,
        train: Arc<dyn Dataset>,
        test: Arc<dyn Dataset>,
    ) -> Result<Self> {
        let (size, statistics) = (config.image_size, train.statistics());
        let varied = Transform::train(size, statistics, &config.augmentation)?;
        let mut train_config = LoaderConfig::train(config.batch_size, config.seed, varied);
        train_config.max_bad_images = config.max_bad_images;
        let mut test_config = LoaderConfig::eval(config.batch_size, Transform::eval(size, statistics)?);
        test_config.max_bad_images = config.max_bad_images;
        let train = Loader::new(train, train_config)?;
        let test = Loader::new(test, test_config)?;
        Ok(Self { config, folder, learner, progress, train, test })
    }

    /// The run folder.
    pub fn folder(&self) -> &RunFolder {
        &self.folder
    }

    /// Trains until all epochs are done or `stop` is set.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<Outcome> {
        let steps = self.train.batches_per_epoch();
        let schedule = self.config.schedule(steps)?;
        let display = Display::new(&self.config, &self.learner, &self.progress, steps, self.train.dataset().len());
        let mut accuracy = self.folder.last_accuracy()?.unwrap_or(0.0);
        while self.progress.epoch < self.config.epochs {
            let epoch = self.progress.epoch;
            let mut clock = Stopwatch::start();
            for batch in self.train.epoch(epoch as u64, self.progress.batch) {
                let batch = batch?;
                display.skipped(&batch);
                let step = (epoch * steps + self.progress.batch) as u64;
                let score = self.learner.train(&self.config, &batch, step, schedule.lr(step)).with_context(|| {
                    let number = self.progress.batch + 1;
                    format!("epoch {}, batch {number} of {steps}, learning rate {:.3e}", epoch + 1, schedule.lr(step))
                })?;
                self.train.recycle(batch);
                self.progress.batch += 1;
                self.progress.score.add(score);
                clock.images += score.images;
                display.batch(&self.progress, schedule.lr(step), clock.rate());
                if stop.load(Ordering::Relaxed) {
                    self.save()?;
                    display.close();
                    return Ok(Outcome::Interrupted);
                }
            }
            let test = self.evaluate()?;
            accuracy = test.accuracy();
            self.progress.epoch += 1;
            let lr = schedule.lr((self.progress.epoch * steps).saturating_sub(1) as u64);
            let metrics = EpochMetrics::new(self.progress.epoch, lr, self.progress.score, test);
            self.progress.batch = 0;
            self.progress.score = Score::default();
            self.folder.append(&metrics, clock.started.elapsed(), clock.rate())?;
            self.save()?;
            display.epoch(&metrics);
        }
        display.close();
        Ok(Outcome::Finished { accuracy })
    }

    /// The score on the test images.
    pub fn evaluate(&mut self) -> Result<Score> {
        let mut total = Score::default();
        for batch in self.test.epoch(0, 0) {
            let batch = batch?;
            total.add(self.learner.evaluate(&batch)?);
            self.test.recycle(batch);
        }
        Ok(total)
    }

    /// Writes the run's pictures: curves, and where regions of a few test images look.
    pub fn draw(&mut self) -> Result<()> {
        self.folder.draw_curves()?;
        let batch: Option<Batch> = self.test.epoch(0, 0).next().transpose()?;
        if let Some(batch) = batch {
            let trace = self.learner.trace(&batch)?;
            self.folder.draw_routes(&batch, &trace, self.train.dataset().as_ref())?;
        }
        Ok(())
    }

    fn save(&self) -> Result<()> {
        let classes = self.train.dataset().classes().to_vec();
        let checkpoint = self.learner.checkpoint(&self.config, &self.progress, classes)?;
        checkpoint.write(&self.folder.checkpoint())
    }
}

/// Both splits of a data set, which must have the same classes.
fn open_data(config: &RunConfig) -> Result<(Arc<dyn Dataset>, Arc<dyn Dataset>)> {
    let open = |split| data::open(&config.data, split).with_context(|| format!("data {}", config.data));
    let (train, test) = (open(Split::Train)?, open(Split::Test)?);
    if train.classes() != test.classes() {
        bail!("data {}: training and test images have different classes", config.data);
    }
    Ok((train, test))
}

/// A model's default number of classes gives way to the data's; one that was asked for and differs is an error.
fn adopt_classes(config: &mut RunConfig, data: &dyn Dataset) -> Result<()> {
    let (classes, default) = (data.classes().len(), RunConfig::for_model(&config.model)?.architecture.num_classes);
    let asked = config.architecture.num_classes;
    if asked != classes && asked != default {
        bail!("architecture.num_classes = {asked}, but data {} has {classes} classes; leave it out", config.data);
    }
    config.architecture.num_classes = classes;
    Ok(())
}

/// Images and time since an epoch, or its resumed rest, began.
struct Stopwatch {
    started: Instant,
    images: u64,
}

impl Stopwatch {
    fn start() -> Self {
        Self { started: Instant::now(), images: 0 }
    }

    /// Images per second.
    fn rate(&self) -> f64 {
        self.images as f64 / self.started.elapsed().max(Duration::from_nanos(1)).as_secs_f64()
    }
}
