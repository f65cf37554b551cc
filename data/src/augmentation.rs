//! How training images are varied: the section `[augmentation]` of a configuration.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::rand_augment::MAX_MAGNITUDE;
use crate::resample::Filter;
use crate::{Error, Result};

/// The most operations of RandAugment an image.
const MAX_OPERATIONS: usize = 16;
const MAX_REPEATS: usize = 1000;
/// The α for which the distribution Beta(α, α) is not practically degenerate.
const ALPHAS: RangeInclusive<f64> = 0.01..=100.0;

/// How a training image is cropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Crop {
    /// Padded for images of up to 32 x 32 pixels where the model's input is no larger either, resized for all others.
    #[default]
    Auto,
    /// The largest square in the image's middle, shifted by up to `padding` pixels of the model's input each way.
    Padded,
    /// A window of random area and shape, resized.
    Resized,
}

/// What a padded crop shows beyond the edge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fill {
    /// Black: the byte 0, normalised as any other.
    #[default]
    Zero,
    /// The mean colour: the float 0, or about that where RandAugment works on bytes.
    Mean,
}

/// What an erased rectangle shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EraseFill {
    /// The mean colour: the float 0.
    #[default]
    Mean,
    /// Noise: each float drawn from the standard normal distribution.
    Noise,
}

/// The random changes made to training images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Augmentation {
    /// The way of cropping.
    pub crop: Crop,
    /// The largest shift of a padded crop, in pixels of the model's input: 0 to its side.
    pub padding: usize,
    /// What lies beyond the edge in a padded crop.
    pub fill: Fill,
    /// The probability of mirroring left and right, 0 to 1; 0 for digits and text.
    pub flip: f64,
    /// The probability of mirroring up and down, 0 to 1: for images without an up and a down, as from a microscope or
    /// from above.
    pub vertical_flip: f64,
    /// The smallest part of the image's area that a resized crop shows: above 0, up to 1; the largest is all of it.
    pub min_scale: f64,
    /// The filter by which training images are resized.
    pub filter: Filter,
    /// The probability, 0 to 1, of erasing a rectangle of a fiftieth to a third of the image's area (the published
    /// ImageNet recipe has 0.25). As in timm (Zhong et al., "Random erasing data augmentation", 2017), except that the
    /// rectangle may be as high or as wide as the image.
    pub erase: f64,
    /// What an erased rectangle shows (the published ImageNet recipe has noise).
    pub erase_fill: EraseFill,
    /// RandAugment operations per image, 0 (none) to 16 (the published ImageNet recipe has 2). Each is drawn from
    /// fifteen operations, which change colours or move pixels, and applied with probability 1/2, as in timm (Cubuk et
    /// al., "RandAugment", 2019).
    pub rand_augment: usize,
    /// How much these operations change, 0 to 10: the mean of a normal distribution, from which each draws its own.
    pub magnitude: f64,
    /// The standard deviation of that distribution, 0 or more. Magnitudes below 0 or above 10 are clamped to that
    /// range.
    pub magnitude_std: f64,
    /// Mixup blends an image with another one of its batch; the share that it keeps is drawn from the distribution
    /// Beta(α, α), and this is α (0 for none, or 0.01 to 100; the published ImageNet recipe has 0.8).
    pub mixup: f64,
    /// CutMix replaces a rectangle of an image with that of another one of its batch; the share that it keeps is drawn
    /// from Beta(α, α), and this is α (0 for none, or 0.01 to 100; the published ImageNet recipe has 1.0). With `mixup`
    /// as well, each is used for half of the micro-batches, which are mixed separately.
    pub cutmix: f64,
    /// The probability that a micro-batch is mixed, 0 to 1, if there is mixup or CutMix.
    pub mix: f64,
    /// How often an epoch shows an image, each time with new augmentation: 1 to 1000 (the published ImageNet recipe has
    /// 3). The length of an epoch does not change, so with 3 it shows a third of the images (Hoffer et al., "Augment
    /// your batch", 2019).
    pub repeats: usize,
    /// How strongly classes of different sizes are balanced, 0 to 1: an epoch shows a class of n images a number of
    /// times that is proportional to n^(1 − balance), each of its images equally often, give or take one, with new
    /// augmentation each time. With 0 all images are shown equally often, with 1 all classes are (with `repeats` above
    /// 1, on average). The length of an epoch does not change (Kang et al., "Decoupling representation and classifier
    /// for long-tailed recognition", 2020).
    pub balance: f64,
}

impl Default for Augmentation {
    fn default() -> Self {
        Self {
            crop: Crop::Auto,
            padding: 4,
            fill: Fill::Zero,
            flip: 0.5,
            vertical_flip: 0.0,
            min_scale: 0.08,
            filter: Filter::Bicubic,
            erase: 0.0,
            erase_fill: EraseFill::Mean,
            rand_augment: 0,
            magnitude: 9.0,
            magnitude_std: 0.5,
            mixup: 0.0,
            cutmix: 0.0,
            mix: 1.0,
            repeats: 1,
            balance: 0.0,
        }
    }
}

impl Augmentation {
    /// Whether images are mixed with one another.
    pub fn mixes(&self) -> bool {
        self.mixup > 0.0 || self.cutmix > 0.0
    }

    /// Checks that it can vary images for an input of this size.
    ///
    /// Errors: [`Error::Setting`] where a number is out of its range.
    pub fn check(&self, size: usize) -> Result<()> {
        let Augmentation {
            padding, flip, vertical_flip, min_scale, erase, magnitude, magnitude_std, mix, balance, ..
        } = *self;
        if padding > size {
            return Err(Error::setting("padding", format!("{padding} is more than the input size {size}")));
        }
        for (name, probability) in [("flip", flip), ("vertical_flip", vertical_flip), ("erase", erase), ("mix", mix)] {
            if !(0.0..=1.0).contains(&probability) {
                return Err(Error::setting(name, format!("{probability:?} is not a probability in 0..=1")));
            }
        }
        if !(0.0..=1.0).contains(&balance) {
            return Err(Error::setting("balance", format!("{balance} is not in 0..=1")));
        }
        if !(min_scale > 0.0 && min_scale <= 1.0) {
            return Err(Error::setting(
                "min_scale",
                format!("{min_scale:?} is not a part of the area, above 0, up to 1"),
            ));
        }
        for (name, value, range) in
            [("rand_augment", self.rand_augment, 0..=MAX_OPERATIONS), ("repeats", self.repeats, 1..=MAX_REPEATS)]
        {
            if !range.contains(&value) {
                return Err(Error::setting(name, format!("{value} is not in {}..={}", range.start(), range.end())));
            }
        }
        if !(0.0..=MAX_MAGNITUDE).contains(&magnitude) {
            return Err(Error::setting("magnitude", format!("{magnitude} is not in 0..={MAX_MAGNITUDE}")));
        }
        if !(magnitude_std >= 0.0 && magnitude_std.is_finite()) {
            return Err(Error::setting("magnitude_std", format!("{magnitude_std} is not a finite number from 0 on")));
        }
        for (name, alpha) in [("mixup", self.mixup), ("cutmix", self.cutmix)] {
            if alpha != 0.0 && !ALPHAS.contains(&alpha) {
                let [least, most] = [ALPHAS.start(), ALPHAS.end()];
                return Err(Error::setting(name, format!("{alpha} is neither 0, for none, nor in {least}..={most}")));
            }
        }
        Ok(())
    }
}
