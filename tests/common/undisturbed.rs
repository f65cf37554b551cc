//! A run that nothing disturbs, for others to be compared with.

use super::program::{biformer, fresh, text};
use super::samples;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Steps of an epoch of [`Undisturbed::data`].
pub const STEPS: u64 = samples::TRAIN as u64 / 16;

/// The run, and what it is made from.
pub struct Undisturbed {
    folder: PathBuf,
    /// The data set.
    pub data: PathBuf,
    /// The configuration's file.
    pub config: PathBuf,
    /// How long the run took, once it was made.
    took: OnceLock<Duration>,
}

impl Undisturbed {
    /// What it takes to train it, in a folder of this name.
    pub fn new(name: &str) -> Self {
        let folder = fresh(name);
        let data = samples::cifar10(&folder.join("data"));
        let config = samples::config(
            &folder,
            "checkpoint_every = 1\nlabel_smoothing = 0.0\naugmentation = { mixup = 0.8, cutmix = 1.0, repeats = 2 }",
        );
        Self { folder, data, config, took: OnceLock::new() }
    }

    /// The run's folder; the first call trains it.
    pub fn whole(&self) -> PathBuf {
        self.took();
        self.run("whole")
    }

    /// How long it took.
    pub fn took(&self) -> Duration {
        *self.took.get_or_init(|| {
            let started = Instant::now();
            biformer(&self.train("whole", &["--threads", "1"])).ok();
            started.elapsed()
        })
    }

    /// The arguments that train another run of this name.
    pub fn train<'a>(&'a self, run: &str, more: &[&'a str]) -> Vec<&'a str> {
        let out: &'a str = Box::leak(text(&self.run(run)).to_owned().into_boxed_str());
        let arguments = ["train", "--config", text(&self.config), "--data", text(&self.data), "--out", out];
        [&arguments, more].concat()
    }

    /// The folder of a run of this name.
    pub fn run(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}
