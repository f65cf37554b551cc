//! The moving average of the weights, as a run has it.

use optim::EmaConfig;
use serde::{Deserialize, Serialize};

/// The moving average of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AverageConfig {
    /// Whether a moving average of the weights is kept; evaluation then uses it.
    pub enabled: bool,
    /// The weight of the old average: at least 0, less than 1.
    pub decay: f64,
    /// Averages over fewer steps at the start, so that the random initial weights are soon forgotten: update t = 0, 1,
    /// ... uses a decay of at most (1 + t)/(10 + t).
    pub warmup: bool,
}

impl AverageConfig {
    /// The optimiser crate's form.
    pub fn settings(&self) -> EmaConfig {
        EmaConfig { decay: self.decay, warmup: self.warmup }
    }
}
