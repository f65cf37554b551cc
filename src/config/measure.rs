//! What epochs are compared by.

use serde::{Deserialize, Serialize};

/// Which accuracy on test images says how good an epoch was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// The share of images that are right.
    #[default]
    Accuracy,
    /// The mean of the classes' accuracies, which counts rare classes as much as others.
    MacroAccuracy,
}
