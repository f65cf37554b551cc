//! From the bytes of an image to the normalised floats of a batch, with random cropping and mirroring for training.
//!
//! The published recipes differ by input size, so two ways of cropping are offered. *Padded* (CIFAR): a window of all
//! of the image, shifted by a few pixels over its edges. *Resized* (ImageNet): a window of random area and shape,
//! resized to the model's input. Both end in one pass that crops, mirrors left and right and normalises straight
//! into the batch, unless RandAugment changes the bytes before they are normalised. Finally, the result may be mirrored
//! up and down, and a rectangle of it erased.

use std::borrow::Cow;

use tensor::rng::{Philox, Sequence};

use crate::rand_augment::{Canvas, RandAugment};
use crate::resample::{Filter, Window, resize, resize_part};
use crate::{Augmentation, Crop, EraseFill, Error, Fill, Image, Result, Statistics};

/// The longest side of an image that counts as tiny: it has no margin to spare.
const TINY: usize = 32;
/// The largest input size, in pixels a side.
const MAX_SIZE: usize = 4096;
/// How often a window of random shape is tried before the largest one is taken.
const ATTEMPTS: usize = 10;
/// The ratios of width to height of a random window.
const RATIOS: [f64; 2] = [3.0 / 4.0, 4.0 / 3.0];
/// What part of an image is erased, and in which ratios of width to height.
const ERASED: [f64; 2] = [0.02, 1.0 / 3.0];
const ERASED_RATIOS: [f64; 2] = [0.3, 1.0 / 0.3];

/// Turns images into the input of a model: (size, size, 3) floats, channels last, `(byte / 255 - mean) / std`.
#[derive(Clone, Debug)]
pub struct Transform {
    size: usize,
    augmentation: Option<Augmentation>,
    /// The length to which evaluation resizes the shorter side; it shows the central `size` pixels of that.
    zoomed: usize,
    /// The normalised value of each byte in each channel: exact, and quicker than computing it.
    levels: Box<[[f32; 3]; 256]>,
    /// The mean colour as bytes.
    mean: [u8; 3],
}

impl Transform {
    /// The transform for training. What an augmentation does with several images, repeating, balancing and mixing them,
    /// is done by a [`Loader`](crate::Loader).
    ///
    /// Errors: [`Error::Setting`] where a number is out of its range.
    pub fn train(size: usize, statistics: Statistics, augmentation: &Augmentation) -> Result<Self> {
        augmentation.check(size)?;
        Ok(Self { augmentation: Some(augmentation.clone()), ..Self::eval(size, statistics)? })
    }

    /// The transform for evaluation, which is the same for each epoch: an image of the model's input size stays as it
    /// is; of another, the shorter side is resized to `size * 256 / 224` and the centre is taken: see
    /// [`showing`](Self::showing). A tiny image (up to 32 x 32 pixels) is shown up to its edges, with its shorter side
    /// resized to `size`, as in training with padded crops; of one that is not square, the largest square in its
    /// middle.
    ///
    /// Errors: [`Error::Setting`] where the size is 0 or above 4096, or the statistics are not finite with `std` above
    /// 0.
    pub fn eval(size: usize, statistics: Statistics) -> Result<Self> {
        if size == 0 || size > MAX_SIZE {
            return Err(Error::setting("image_size", format!("{size} is not in 1..={MAX_SIZE}")));
        }
        let Statistics { mean, std } = statistics;
        if !mean.iter().chain(&std).all(|x| x.is_finite()) || std.iter().any(|&x| x <= 0.0) {
            return Err(Error::setting(
                "statistics",
                format!("mean {mean:?}, std {std:?}: need finite numbers and std above 0"),
            ));
        }
        let level = |byte: usize, channel: usize| {
            ((byte as f64 / 255.0 - f64::from(mean[channel])) / f64::from(std[channel])) as f32
        };
        let levels = Box::new(std::array::from_fn(|byte| std::array::from_fn(|channel| level(byte, channel))));
        let mean = mean.map(|mean| (255.0 * mean).round() as u8);
        Ok(Self { size, augmentation: None, zoomed: size * 256 / 224, levels, mean })
    }

    /// The same, but in evaluation it shows `share` of an image's shorter side instead of 224 / 256: 1 for all of it.
    ///
    /// Errors: [`Error::Setting`] where it is not from 0.1 to 1.
    pub fn showing(self, share: f64) -> Result<Self> {
        if !(0.1..=1.0).contains(&share) {
            return Err(Error::setting("eval_crop", format!("{share:?} is not in 0.1..=1")));
        }
        Ok(Self { zoomed: (self.size as f64 / share) as usize, ..self })
    }

    /// How images are varied, in training.
    pub fn augmentation(&self) -> Option<&Augmentation> {
        self.augmentation.as_ref()
    }

    /// The side of the output, in pixels.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The picture that normalised floats (size, size, 3) show: what a model saw, for people to see.
    ///
    /// Errors: [`Error::Setting`] for another number of floats.
    pub fn picture(&self, floats: &[f32]) -> Result<Image> {
        let (black, white) = (self.levels[0], self.levels[255]);
        let byte = |channel: usize, x: f32| 255.0 * (x - black[channel]) / (white[channel] - black[channel]);
        let bytes = floats.iter().enumerate().map(|(index, &x)| byte(index % 3, x).round() as u8).collect();
        Image::new(self.size, self.size, bytes)
    }

    /// One image transformed, (size, size, 3), by the same draws each time.
    pub fn pixels(&self, image: &Image) -> Vec<f32> {
        let mut out = vec![0.0; self.size * self.size * 3];
        self.apply(image, &mut Philox::new(0, 0).sequence(), &mut out);
        out
    }

    /// Transforms one image into `out`, (size, size, 3). Only the training transform draws from `random`.
    ///
    /// # Panics
    /// Where `out` has another length.
    pub fn apply(&self, image: &Image, random: &mut Sequence, out: &mut [f32]) {
        assert_eq!(out.len(), self.size * self.size * 3, "one image of (size, size, 3)");
        let out = out.as_chunks_mut::<3>().0;
        let normalise = |pixel: [u8; 3]| -> [f32; 3] {
            std::array::from_fn(|channel| self.levels[usize::from(pixel[channel])][channel])
        };
        let tiny = image.height().max(image.width()) <= TINY;
        let zoomed = if tiny { self.size } else { self.zoomed };
        let Some(augmentation) = &self.augmentation else {
            let view = self.centred(image, zoomed, Filter::Bicubic, Shift::default());
            return view.write(normalise, self.levels[0], out);
        };
        let padded = match augmentation.crop {
            Crop::Auto => tiny && self.size <= TINY,
            Crop::Padded => true,
            Crop::Resized => false,
        };
        // Drawn in this order in both cases: the mirror, then the window, then the operations, then the mirror up and
        // down, if there is one, then what is erased.
        let flip = random.uniform() < augmentation.flip;
        let view = if padded {
            let mut offset = || random.below(2 * augmentation.padding + 1) as isize - augmentation.padding as isize;
            let shift = Shift { down: offset(), right: offset(), flip };
            self.centred(image, self.size, augmentation.filter, shift)
        } else {
            let window = random_crop([image.height(), image.width()], augmentation.min_scale, random);
            let resized = resize(image, window, [self.size; 2], augmentation.filter);
            let shift = Shift { flip, ..Shift::default() };
            View { pixels: resized.into(), size: self.size, shift }
        };
        match RandAugment::new(augmentation, self.mean) {
            None => {
                let beyond = match augmentation.fill {
                    Fill::Zero => self.levels[0],
                    Fill::Mean => [0.0; 3],
                };
                view.write(normalise, beyond, out);
            }
            Some(operations) => {
                let beyond = match augmentation.fill {
                    Fill::Zero => [0; 3],
                    Fill::Mean => self.mean,
                };
                let mut canvas = Canvas::new(self.size);
                view.write(|pixel| pixel, beyond, canvas.pixels_mut());
                operations.apply(&mut canvas, random);
                out.iter_mut().zip(canvas.pixels()).for_each(|(out, &pixel)| *out = normalise(pixel));
            }
        }
        // Drawn only if it is asked for, so that all other runs have the same draws as before there was such a field.
        if augmentation.vertical_flip > 0.0 && random.uniform() < augmentation.vertical_flip {
            let (upper, lower) = out.split_at_mut(self.size / 2 * self.size);
            let rows = upper.chunks_exact_mut(self.size).zip(lower.chunks_exact_mut(self.size).rev());
            rows.for_each(|(upper, lower)| upper.swap_with_slice(lower));
        }
        if random.uniform() < augmentation.erase {
            self.erase(augmentation.erase_fill, random, out);
        }
    }

    /// Covers a rectangle of `out`, (size, size).
    fn erase(&self, fill: EraseFill, random: &mut Sequence, out: &mut [[f32; 3]]) {
        let Some(window) = random_window([self.size; 2], ERASED, ERASED_RATIOS, random) else { return };
        for row in out.chunks_exact_mut(self.size).skip(window.top).take(window.height) {
            let erased = row[window.left..window.left + window.width].as_flattened_mut();
            match fill {
                EraseFill::Mean => erased.fill(0.0),
                EraseFill::Noise => erased.chunks_mut(2).for_each(|pair| {
                    pair.iter_mut().zip(random.normals()).for_each(|(element, number)| *element = number as f32);
                }),
            }
        }
    }

    /// The centre of the image, shifted. Where the image is not of the input size, its shorter side is first resized to
    /// `zoomed` pixels, as torchvision's `Resize` and `CenterCrop` do it.
    fn centred<'a>(&self, image: &'a Image, zoomed: usize, filter: Filter, shift: Shift) -> View<'a> {
        let (height, width) = (image.height(), image.width());
        if (height, width) == (self.size, self.size) {
            return View { pixels: image.pixels().into(), size: self.size, shift };
        }
        let shorter = height.min(width);
        let lengths = [height, width].map(|length| zoomed * length / shorter);
        // Halves go to even numbers, as Python rounds.
        let middle = lengths.map(|length| {
            let (half, rest) = ((length - self.size) / 2, (length - self.size) % 2);
            half + rest * (half % 2)
        });
        let part = Window { top: middle[0], left: middle[1], ..Window::whole([self.size; 2]) };
        let pixels = resize_part(image, Window::whole([height, width]), lengths, part, filter);
        View { pixels: pixels.into(), size: self.size, shift }
    }
}

/// Where the output window begins in its source, and whether it is mirrored.
#[derive(Clone, Copy, Default)]
struct Shift {
    down: isize,
    right: isize,
    flip: bool,
}

/// Pixels, (size, size, 3), and the window of the same size that is shown of them.
struct View<'a> {
    pixels: Cow<'a, [u8]>,
    size: usize,
    shift: Shift,
}

impl View<'_> {
    /// Writes the window, which begins at row `shift.down` and column `shift.right`, to `out`, (size, size), each pixel
    /// converted by `written`. Where the window extends beyond an edge, it shows `beyond`.
    fn write<T: Copy>(&self, written: impl Fn([u8; 3]) -> T, beyond: T, out: &mut [T]) {
        let (size, Shift { down, right, flip }) = (self.size, self.shift);
        // The output's columns `from..to` lie inside the view; the first of them shows its column `first`.
        let from = right.saturating_neg().clamp(0, size as isize) as usize;
        let to = (size as isize - right).clamp(from as isize, size as isize) as usize;
        let first = (from as isize + right) as usize;
        for (y, row) in out.chunks_exact_mut(size).enumerate() {
            let source = y as isize + down;
            if !(0..size as isize).contains(&source) || from == to {
                row.fill(beyond);
                continue;
            }
            let start = (source as usize * size + first) * 3;
            let pixels = self.pixels[start..start + (to - from) * 3].as_chunks::<3>().0;
            let write = |(out, &pixel): (&mut T, &[u8; 3])| *out = written(pixel);
            if flip {
                row[..size - to].fill(beyond);
                row[size - to..size - from].iter_mut().rev().zip(pixels).for_each(write);
                row[size - from..].fill(beyond);
            } else {
                row[..from].fill(beyond);
                row[from..to].iter_mut().zip(pixels).for_each(write);
                row[to..].fill(beyond);
            }
        }
    }
}

/// A window of uniform area in `min_scale..1` of the image and log-uniform shape in 3/4..4/3, anywhere inside; where
/// none fits in ten attempts, the largest centred one of a permitted shape (Szegedy et al., "Going deeper with
/// convolutions", 2015, as torchvision has it).
fn random_crop([height, width]: [usize; 2], min_scale: f64, random: &mut Sequence) -> Window {
    random_window([height, width], [min_scale, 1.0], RATIOS, random).unwrap_or_else(|| {
        let (full_height, full_width) = (height as f64, width as f64);
        let h = full_height.min((full_width / RATIOS[0]).round()).max(1.0) as usize;
        let w = full_width.min((full_height * RATIOS[1]).round()).max(1.0) as usize;
        Window { top: (height - h) / 2, left: (width - w) / 2, height: h, width: w }
    })
}

/// A window at a random place inside, with a uniform area (a fraction of the whole, in `areas`) and a log-uniform ratio
/// of width to height (in `ratios`); none if ten attempts find none that fits.
fn random_window(
    [height, width]: [usize; 2],
    areas: [f64; 2],
    ratios: [f64; 2],
    random: &mut Sequence,
) -> Option<Window> {
    (0..ATTEMPTS).find_map(|_| {
        let area = height as f64 * width as f64 * random.uniform_in(areas[0], areas[1]);
        let ratio = libm::exp(random.uniform_in(libm::log(ratios[0]), libm::log(ratios[1])));
        let (h, w) = ((area / ratio).sqrt().round() as usize, (area * ratio).sqrt().round() as usize);
        ((1..=height).contains(&h) && (1..=width).contains(&w)).then(|| {
            let (top, left) = (random.below(height - h + 1), random.below(width - w + 1));
            Window { top, left, height: h, width: w }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts that values are uniform between two bounds, by a Kolmogorov-Smirnov test at a significance level of
    /// 0.001.
    #[track_caller]
    fn assert_uniform(what: &str, mut values: Vec<f64>, from: f64, to: f64) {
        values.sort_by(f64::total_cmp);
        let count = values.len() as f64;
        let apart = |(place, value): (usize, &f64)| ((value - from) / (to - from) - place as f64 / count).abs();
        let worst = values.iter().enumerate().map(apart).fold(0.0, f64::max);
        assert!(worst < 1.95 / count.sqrt(), "{what} of {count} is {worst} away from uniform in {from}..{to}");
    }

    /// Windows of up to three quarters of a square's area always fit, so they are distributed as they are drawn.
    #[test]
    fn resized_crops_are_uniform_in_area_place_and_logarithm_of_the_ratio() {
        const SIDE: usize = 2000;
        let mut random = Philox::new(3, 0).sequence();
        for min_scale in [0.08, 0.4] {
            let windows: Vec<Window> = (0..8000).map(|_| random_crop([SIDE; 2], min_scale, &mut random)).collect();
            let area = |window: &Window| (window.height * window.width) as f64 / (SIDE * SIDE) as f64;
            let most = windows.iter().map(area).fold(0.0, f64::max);
            assert!((0.9..=1.0).contains(&most), "{most} at most");
            let drawn = || windows.iter().filter(|&window| area(window) < 0.75);
            let ratio = |window: &Window| (window.width as f64 / window.height as f64).ln();
            assert_uniform("area", drawn().map(area).collect(), min_scale, 0.75);
            assert_uniform("ratio", drawn().map(ratio).collect(), (3f64 / 4.0).ln(), (4f64 / 3.0).ln());
            let place = |offset: usize, extent: usize| offset as f64 / (SIDE - extent) as f64;
            assert_uniform("top", drawn().map(|window| place(window.top, window.height)).collect(), 0.0, 1.0);
            assert_uniform("left", drawn().map(|window| place(window.left, window.width)).collect(), 0.0, 1.0);
        }
    }

    #[test]
    fn a_long_image_is_cropped_to_the_middle_in_the_nearest_shape() {
        for (sides, [top, left, height, width]) in [
            ([3, 300], [0, 148, 3, 4]),
            ([300, 3], [148, 0, 4, 3]),
            ([60, 1000], [0, 460, 60, 80]),
            ([1000, 60], [460, 0, 80, 60]),
            ([1, 100], [0, 49, 1, 1]),
            ([100, 1], [49, 0, 1, 1]),
        ] {
            let window = random_crop(sides, 1.0, &mut Philox::new(3, 0).sequence());
            assert_eq!(window, Window { top, left, height, width }, "{sides:?}");
        }
    }
}
