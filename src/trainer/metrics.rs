//! What is measured of an epoch: the lines of a run folder's metrics, and of its timings.

use super::score::{Score, Tested};
use super::stopwatch::Lap;
use crate::device::DeviceName;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The metrics of an epoch. Equal runs write equal lines: what depends on the clock is in another file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EpochMetrics {
    /// Epochs done, from 1.
    pub epoch: usize,
    /// The learning rate of its last step.
    pub learning_rate: f64,
    /// Mean training loss, with label smoothing, and of mixed images against both their classes.
    pub train_loss: f64,
    /// The share of (augmented) training images that were classified correctly in their training step; for mixed
    /// images, the class of the larger part counts as correct.
    pub train_accuracy: f64,
    /// Mean cross-entropy on the test images.
    pub test_loss: f64,
    /// The share of test images that are right.
    pub test_accuracy: f64,
    /// The share of test images whose class is among the five likeliest.
    pub test_top5: f64,
    /// The mean of the classes' accuracies, which counts rare classes as much as others. None in a run that was begun
    /// before it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_macro_accuracy: Option<f64>,
}

impl EpochMetrics {
    /// The metrics of a training score and a test.
    pub fn new(epoch: usize, learning_rate: f64, train: Score, test: &Tested) -> Self {
        Self {
            epoch,
            learning_rate,
            train_loss: train.mean_loss(),
            train_accuracy: train.accuracy(),
            test_loss: test.all.mean_loss(),
            test_accuracy: test.all.accuracy(),
            test_top5: test.all.top5(),
            test_macro_accuracy: Some(test.macro_accuracy()),
        }
    }
}

/// Measurements of an epoch that depend on the clock.
#[derive(Debug, Serialize, Deserialize)]
pub struct Timing {
    /// Epochs done, from 1.
    pub epoch: usize,
    /// The duration of the epoch or, if the run was resumed within it, of what was left of it.
    pub(super) seconds: f64,
    /// None if all batches had been done before the run was resumed.
    images_per_second: Option<f64>,
    /// Which share of its training waited for images. On a GPU, which works meanwhile, this is not known.
    waited: Option<f64>,
}

impl Timing {
    /// The timing of an epoch that took `elapsed`, and of its training on this device.
    pub fn new(epoch: usize, elapsed: Duration, training: Lap, device: DeviceName) -> Self {
        let seconds = elapsed.as_secs_f64();
        let waited = (device == DeviceName::Cpu).then(|| training.share_waited());
        Self { epoch, seconds, images_per_second: training.rate(), waited }
    }
}
