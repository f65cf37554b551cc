//! Mixing the images of a batch with one another, together with their targets.
//!
//! *Mixup* (Zhang et al., "mixup: beyond empirical risk minimization", 2017) shows one image through another; *CutMix*
//! (Yun et al., "CutMix: regularization strategy to train strong classifiers", 2019) pastes a rectangle of one into
//! another. As in timm's batch mode, with which the published models were trained, all images of a micro-batch are
//! mixed in the same way, with one share λ drawn from Beta(α, α): the first image with the last, the second with the
//! last but one, and so on.

use rayon::prelude::*;
use tensor::rng::Sequence;

use crate::resample::Window;
use crate::{Augmentation, Batch};

impl Augmentation {
    /// Mixes the images of a batch, each of `parts` micro-batches separately, and sets the batch's targets, a share of
    /// which, `smoothing`, is spread over all classes. Labels become the classes of the larger parts.
    pub(crate) fn mix_batch(
        &self,
        batch: &mut Batch,
        parts: usize,
        smoothing: f64,
        classes: usize,
        random: &mut Sequence,
    ) {
        let [count, height, width, _] = batch.shape;
        let (image, parts) = (height * width * 3, parts.min(count));
        batch.targets.resize(count * classes, (smoothing / classes as f64) as f32);
        for part in 0..parts {
            let slots = batch.slots(part, parts);
            let images = &mut batch.images[slots.start * image..slots.end * image];
            let share = self.mix_images(images, [height, width], random);
            let labels = &mut batch.labels[slots.clone()];
            let others: Vec<u32> = labels.iter().rev().copied().collect();
            let targets = batch.targets[slots.start * classes..slots.end * classes].chunks_exact_mut(classes);
            for ((label, other), target) in labels.iter_mut().zip(others).zip(targets) {
                for (class, share) in [(*label, share), (other, 1.0 - share)] {
                    target[class as usize] += ((1.0 - smoothing) * share) as f32;
                }
                if share < 0.5 {
                    *label = other;
                }
            }
        }
    }

    /// Mixes images (N, H, W, 3), and gives the share that each has kept of itself.
    fn mix_images(&self, images: &mut [f32], [height, width]: [usize; 2], random: &mut Sequence) -> f64 {
        if random.uniform() >= self.mix {
            return 1.0;
        }
        let cut = self.mixup == 0.0 || (self.cutmix > 0.0 && random.uniform() < 0.5);
        let share = beta(if cut { self.cutmix } else { self.mixup }, random);
        if cut {
            let window = window([height, width], share, random);
            pairs(images, height * width * 3, |one, other| swap(one, other, width, window));
            return 1.0 - (window.height * window.width) as f64 / (height * width) as f64;
        }
        let (own, others) = (share as f32, (1.0 - share) as f32);
        pairs(images, height * width * 3, |one, other| {
            for (a, b) in one.iter_mut().zip(other) {
                (*a, *b) = (own * *a + others * *b, own * *b + others * *a);
            }
        });
        share
    }
}

/// Shows `work` the first image and the last, the second and the last but one, ...
fn pairs(images: &mut [f32], image: usize, work: impl Fn(&mut [f32], &mut [f32]) + Sync) {
    let (first, last) = images.split_at_mut(images.len() / image / 2 * image);
    let pairs = first.par_chunks_exact_mut(image).zip(last.par_chunks_exact_mut(image).rev());
    pairs.for_each(|(one, other)| work(one, other));
}

/// A rectangle with the image's aspect ratio and `1 - share` of its area, centred at a random pixel and clipped to the
/// image.
fn window([height, width]: [usize; 2], share: f64, random: &mut Sequence) -> Window {
    let part = (1.0 - share).sqrt();
    let mut along = |extent: usize| {
        let (half, centre) = ((extent as f64 * part) as usize / 2, random.below(extent));
        (centre.saturating_sub(half), (centre + half).min(extent))
    };
    let ((top, bottom), (left, right)) = (along(height), along(width));
    Window { top, left, height: bottom - top, width: right - left }
}

/// Exchanges what two images (H, W, 3) show in a window.
fn swap(one: &mut [f32], other: &mut [f32], width: usize, window: Window) {
    let rows = one.chunks_exact_mut(width * 3).zip(other.chunks_exact_mut(width * 3));
    for (one, other) in rows.skip(window.top).take(window.height) {
        let columns = window.left * 3..(window.left + window.width) * 3;
        one[columns.clone()].swap_with_slice(&mut other[columns]);
    }
}

/// A random number from the distribution Beta(α, α): X / (X + Y), with X and Y from Gamma(α). It is computed from their
/// logarithms, because both can underflow.
fn beta(alpha: f64, random: &mut Sequence) -> f64 {
    let (x, y) = (log_gamma_variate(alpha, random), log_gamma_variate(alpha, random));
    1.0 / (1.0 + libm::exp(y - x))
}

/// The logarithm of a random number from the distribution Gamma(α) (Marsaglia and Tsang, "A simple method for
/// generating gamma variables", 2000), which for α < 1 is derived from one from Gamma(α + 1).
fn log_gamma_variate(alpha: f64, random: &mut Sequence) -> f64 {
    if alpha < 1.0 {
        return log_gamma_variate(alpha + 1.0, random) + libm::log(1.0 - random.uniform()) / alpha;
    }
    let d = alpha - 1.0 / 3.0;
    loop {
        let x = random.normal();
        let root = 1.0 + x / (9.0 * d).sqrt();
        let v = root * root * root;
        if v > 0.0 && libm::log(1.0 - random.uniform()) < 0.5 * x * x + d * (1.0 - v + libm::log(v)) {
            return libm::log(d * v);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::rng::Philox;

    /// A Kolmogorov-Smirnov test at a significance level of 0.001, for α at which the distribution has a closed form.
    #[test]
    fn shares_are_distributed_as_beta() {
        use std::f64::consts::PI;
        let arcsine = |x: f64| 2.0 / PI * x.sqrt().asin();
        let cases: [(f64, &dyn Fn(f64) -> f64); 4] = [
            (0.5, &arcsine),
            (1.0, &|x| x),
            (2.0, &|x| x * x * (3.0 - 2.0 * x)),
            (3.0, &|x| x.powi(3) * (10.0 - 15.0 * x + 6.0 * x * x)),
        ];
        for (alpha, distribution) in cases {
            let mut random = Philox::new(1, alpha.to_bits()).sequence();
            let mut drawn: Vec<f64> = (0..20_000).map(|_| beta(alpha, &mut random)).collect();
            drawn.sort_by(f64::total_cmp);
            let count = drawn.len() as f64;
            let apart = |(place, &x): (usize, &f64)| (distribution(x) - place as f64 / count).abs();
            let worst = drawn.iter().enumerate().map(apart).fold(0.0, f64::max);
            assert!(worst < 1.95 / count.sqrt(), "Beta({alpha}, {alpha}): {worst}");
        }
    }

    #[test]
    fn a_share_is_one_even_of_extreme_distributions() {
        let mut random = Philox::new(2, 0).sequence();
        for alpha in [0.01, 100.0] {
            let drawn: Vec<f64> = (0..10_000).map(|_| beta(alpha, &mut random)).collect();
            assert!(drawn.iter().all(|share| (0.0..=1.0).contains(share)));
            let squares = drawn.iter().map(|share| (share - 0.5).powi(2)).sum::<f64>() / 10_000.0;
            let variance = 1.0 / (4.0 * (2.0 * alpha + 1.0));
            assert!((squares / variance - 1.0).abs() < 0.06, "Beta({alpha}, {alpha}): {squares}, not {variance}");
        }
    }

    /// A window that is not cut at an edge has the image's shape and the area asked for, down to a pixel a side.
    #[test]
    fn a_window_has_the_area_that_is_not_kept_and_its_centre_is_anywhere() {
        let mut random = Philox::new(3, 0).sequence();
        let (mut rows, mut columns) = ([0u32; 4], [0u32; 4]);
        for _ in 0..8000 {
            let Window { top, left, height, width } = window([400, 200], 0.99, &mut random);
            assert!(top + height <= 400 && left + width <= 200);
            let inside = top > 0 && left > 0 && top + height < 400 && left + width < 200;
            assert!(!inside || [height, width] == [40, 20], "{height}x{width}");
            assert!((20..=40).contains(&height) && (10..=20).contains(&width), "{height}x{width}");
            rows[(top + height / 2) / 100] += 1;
            columns[(left + width / 2) / 50] += 1;
        }
        for quarter in rows.iter().chain(&columns) {
            assert!((1800..2200).contains(quarter), "{rows:?}, {columns:?}");
        }
        let all = window([8, 8], 0.0, &mut random);
        assert!(all.height >= 4 && all.width >= 4, "{all:?}");
        let none = window([8, 8], 1.0, &mut random);
        assert_eq!(none.height * none.width, 0);
    }
}
