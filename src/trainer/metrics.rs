//! What is measured of an epoch: the lines of a run folder's metrics, and of its timings.

use super::score::Score;
use super::stopwatch::Lap;
use crate::device::DeviceName;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The metrics of an epoch. Equal runs write equal lines: what depends on the clock is in another file.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpochMetrics {
    /// Epochs done, from 1.
    pub epoch: usize,
    /// The learning rate of its last step.
    pub learning_rate: f64,
    /// Mean training loss, with label smoothing, and of mixed images against both their classes.
    pub train_loss: f64,
    /// The share of (varied) training images that were right when they were seen; of mixed ones, the class of the larger part
    /// is right.
    pub train_accuracy: f64,
    /// Mean cross-entropy on the test images.
    pub test_loss: f64,
    /// The share of test images that are right.
    pub test_accuracy: f64,
    /// The share of test images whose class is among the five likeliest.
    pub test_top5: f64,
}

impl EpochMetrics {
    /// The metrics of two scores.
    pub fn new(epoch: usize, learning_rate: f64, train: Score, test: Score) -> Self {
        Self {
            epoch,
            learning_rate,
            train_loss: train.mean_loss(),
            train_accuracy: train.accuracy(),
            test_loss: test.mean_loss(),
            test_accuracy: test.accuracy(),
            test_top5: test.top5(),
        }
    }

    /// The test accuracy as it is told.
    pub fn percent(&self) -> String {
        format!("{:.1}%", 100.0 * self.test_accuracy)
    }

    /// Whether more test images are right, or as many and the loss is smaller.
    fn beats(&self, other: &Self) -> bool {
        let ahead = self.test_accuracy - other.test_accuracy;
        ahead > 0.0 || ahead == 0.0 && self.test_loss < other.test_loss
    }

    /// When it was better than after this last epoch, if it was, as it is told.
    pub fn surpassed_by(&self, best: &Self) -> Option<String> {
        let lower = if best.test_accuracy == self.test_accuracy { " and a lower loss" } else { "" };
        (best.epoch < self.epoch).then(|| format!("best after epoch {}, {}{lower}", best.epoch, best.percent()))
    }

    /// Of some epochs the last, and the best: the first of equals.
    pub fn last_and_best(epochs: &[Self]) -> Option<[Self; 2]> {
        let best = epochs.iter().copied().reduce(|best, next| if next.beats(&best) { next } else { best });
        epochs.last().copied().zip(best).map(<[Self; 2]>::from)
    }
}

/// What of an epoch depends on the clock.
#[derive(Serialize, Deserialize)]
pub struct Timing {
    /// Epochs done, from 1.
    pub epoch: usize,
    /// Of the part of the epoch since the run began, or went on.
    seconds: f64,
    /// None, where all batches had been done before.
    images_per_second: Option<f64>,
    /// Which share of its training waited for images. On a GPU, which works meanwhile, this is not known.
    #[serde(default)] // runs from before it was kept
    waited: Option<f64>,
}

impl Timing {
    /// Of an epoch that took so long, with its training on a device.
    pub fn new(epoch: usize, elapsed: Duration, training: Lap, device: DeviceName) -> Self {
        let seconds = elapsed.as_secs_f64();
        let waited = (device == DeviceName::Cpu).then(|| training.share_waited());
        Self { epoch, seconds, images_per_second: training.rate(), waited }
    }
}
