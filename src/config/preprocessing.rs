//! What becomes of an image before a model sees it.

use super::RunConfig;
use anyhow::{Result, bail};
use data::{Crop, Statistics, Transform};
use serde::{Deserialize, Serialize};

/// How images are normalised, and how much of each image evaluation shows to the model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preprocessing {
    /// The mean of red, green and blue, on a scale from 0 to 1, by which images are normalised, for example `[0.5, 0.5,
    /// 0.5]`. If empty, it is that of the run whose weights this one starts from (ImageNet's if the weights do not
    /// say), or without such weights the data's own, which for a folder of images is ImageNet's.
    pub mean: Vec<f64>,
    /// Their standard deviations, above 0 and up to 1, to be given with `mean`.
    pub std: Vec<f64>,
    /// The fraction of the shorter side that the central crop of a test image covers: 0.1 to 1 (all of it). 0 for what
    /// suits the training: all of it where `augmentation.crop = "padded"` shows all of it, and else 0.875, as the
    /// published models are measured. Images of up to 32x32 pixels, and of the model's own size, are shown up to their
    /// edges in any case.
    pub eval_crop: f64,
}

/// The default fraction of the shorter side that the central crop covers.
const USUAL: f64 = 224.0 / 256.0;

/// Whether images, whose colours are 0 to 1, can be normalised by a mean and a deviation of each.
fn are_usable(mean: &[f32; 3], std: &[f32; 3]) -> bool {
    mean.iter().all(|mean| (0.0..=1.0).contains(mean)) && std.iter().all(|&std| 0.0 < std && std <= 1.0)
}

impl RunConfig {
    /// What images are normalised by: the configured values, or else `usual`, those of the weights that a run starts
    /// from or of its data. Errors: not three numbers each, or not within a colour's range.
    pub fn statistics(&self, usual: Statistics) -> Result<Statistics> {
        let Preprocessing { mean, std, .. } = &self.preprocessing;
        let single = |numbers: &[f64]| numbers.iter().map(|&number| number as f32).collect::<Vec<f32>>();
        match (single(mean).try_into(), single(std).try_into()) {
            (Ok(mean), Ok(std)) if !are_usable(&mean, &std) => {
                bail!(
                    "preprocessing.mean = {mean:?} and std = {std:?}: expected numbers from 0 to 1, and deviations above 0, as \
                     colours go from 0 to 1; divide values on a scale up to 255 by 255"
                )
            }
            (Ok(mean), Ok(std)) => Ok(Statistics { mean, std }),
            _ if mean.is_empty() && std.is_empty() => Ok(usual),
            _ => bail!(
                "preprocessing.mean = {mean:?} and std = {std:?}: expected three numbers each, or none for the data's own"
            ),
        }
    }

    /// How test images become the model's input. Errors: those of [`Transform::eval`] and [`Transform::showing`].
    pub fn test_transform(&self, statistics: Statistics) -> Result<Transform> {
        let share = match self.preprocessing.eval_crop {
            0.0 if self.augmentation.crop == Crop::Padded => 1.0,
            0.0 => USUAL,
            asked => asked,
        };
        Ok(Transform::eval(self.image_size, statistics)?.showing(share)?)
    }

    pub(super) fn check_preprocessing(&self) -> Result<()> {
        self.test_transform(self.statistics(Statistics::IMAGENET)?).map(drop)
    }
}
