//! Resizing with antialiasing: every output pixel is a weighted mean of the input pixels that its filter covers.
//!
//! Along one axis, with `ratio = input / output` and `stretch = max(ratio, 1)` (so that a reduction covers all of the
//! input), output pixel `o` lies at `c = (o + 1/2) ratio` and gives input pixel `i` the weight
//! `k((i + 1/2 - c) / stretch)`, normalised to sum to 1. This is what Pillow does, with which the published weights
//! were trained. The `image` crate computes the same, and the tests hold this module against it; but it goes through
//! an image of four floats a pixel, column by column, and takes 13 times as long (375x500 to 224x224: 7.8 ms, here 0.6).

use serde::{Deserialize, Serialize};

use crate::Image;

/// The interpolation filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Filter {
    /// Catmull and Rom's cubic (Keys' with a = -1/2), two pixels to each side.
    #[default]
    Bicubic,
    /// Linear interpolation, one pixel to each side.
    Triangle,
}

impl Filter {
    /// The distance beyond which the kernel is 0.
    fn support(self) -> f32 {
        match self {
            Self::Bicubic => 2.0,
            Self::Triangle => 1.0,
        }
    }

    fn kernel(self, x: f32) -> f32 {
        let x = x.abs();
        match self {
            Self::Bicubic if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
            Self::Bicubic if x < 2.0 => ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0,
            Self::Bicubic => 0.0,
            Self::Triangle => (1.0 - x).max(0.0),
        }
    }
}

/// A rectangle of pixels inside an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub top: usize,
    pub left: usize,
    pub height: usize,
    pub width: usize,
}

/// The weights of one axis: output pixel `o` is the sum of `weights[o][t] * input[starts[o] + t]`.
struct Axis {
    starts: Vec<usize>, // (output)
    weights: Vec<f32>,  // (output, taps), 0 where a filter covers fewer
    taps: usize,
}

impl Axis {
    fn new(input: usize, output: usize, filter: Filter) -> Self {
        let ratio = input as f32 / output as f32;
        let stretch = ratio.max(1.0);
        let reach = filter.support() * stretch;
        let taps = input.min((2.0 * reach).ceil() as usize + 1);
        let mut axis = Self { starts: Vec::with_capacity(output), weights: vec![0.0; output * taps], taps };
        for (o, weights) in axis.weights.chunks_exact_mut(taps).enumerate() {
            let centre = (o as f32 + 0.5) * ratio;
            // Where fewer than `taps` pixels are left, begin earlier; the extra pixels lie outside the support.
            let start = ((centre - reach).floor().max(0.0) as usize).min(input - taps);
            for (t, weight) in weights.iter_mut().enumerate() {
                *weight = filter.kernel(((start + t) as f32 + 0.5 - centre) / stretch);
            }
            let sum: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= sum);
            axis.starts.push(start);
        }
        axis
    }

    fn of(&self, output: usize) -> (usize, &[f32]) {
        (self.starts[output], &self.weights[output * self.taps..(output + 1) * self.taps])
    }
}

/// The pixels of `window`, resized to (rows, columns, 3). The window lies inside the image and is not empty.
pub(crate) fn resize(image: &Image, window: Window, [rows, columns]: [usize; 2], filter: Filter) -> Vec<u8> {
    let vertical = Axis::new(window.height, rows, filter);
    let horizontal = Axis::new(window.width, columns, filter);
    let stride = image.width() * 3;
    let mut blended = vec![0f32; window.width * 3]; // one output row, still as wide as the window
    let mut resized = Vec::with_capacity(rows * columns * 3);
    for o in 0..rows {
        let (start, weights) = vertical.of(o);
        blended.fill(0.0);
        let first = (window.top + start) * stride + window.left * 3;
        for (row, &weight) in image.pixels()[first..].chunks(stride).zip(weights) {
            for (sum, &value) in blended.iter_mut().zip(row) {
                *sum += weight * f32::from(value);
            }
        }
        for o in 0..columns {
            let (start, weights) = horizontal.of(o);
            let mut sum = [0f32; 3];
            for (pixel, &weight) in blended[start * 3..].chunks_exact(3).zip(weights) {
                sum[0] += weight * pixel[0];
                sum[1] += weight * pixel[1];
                sum[2] += weight * pixel[2];
            }
            // The cast saturates: a cubic may overshoot 0..255.
            resized.extend(sum.map(|value| (value + 0.5) as u8));
        }
    }
    resized
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{ImageBuffer, Rgb, imageops};
    use tensor::rng::Philox;

    fn noise(height: usize, width: usize) -> Image {
        let random = Philox::new(5, (height * 1000 + width) as u64);
        let pixels = (0..height * width * 3).map(|i| random.word(i as u64) as u8).collect();
        Image::new(height, width, pixels).unwrap()
    }

    /// The same window through the `image` crate.
    fn resize_by_image(image: &Image, window: Window, [rows, columns]: [usize; 2], filter: Filter) -> Vec<u8> {
        let [top, left, height, width] = [window.top, window.left, window.height, window.width].map(|x| x as u32);
        let buffer: ImageBuffer<Rgb<u8>, &[u8]> =
            ImageBuffer::from_raw(image.width() as u32, image.height() as u32, image.pixels()).unwrap();
        let filter = match filter {
            Filter::Bicubic => imageops::FilterType::CatmullRom,
            Filter::Triangle => imageops::FilterType::Triangle,
        };
        let view = imageops::crop_imm(&buffer, left, top, width, height);
        imageops::resize(&*view, columns as u32, rows as u32, filter).into_raw()
    }

    #[test]
    fn agrees_with_the_image_crate() {
        let image = noise(61, 83);
        let whole = Window { top: 0, left: 0, height: 61, width: 83 };
        let part = Window { top: 7, left: 20, height: 40, width: 9 };
        for window in [whole, part, Window { height: 1, width: 1, ..part }] {
            for (size, filter) in [[32; 2], [17; 2], [96, 20], [1; 2]]
                .into_iter()
                .flat_map(|size| [(size, Filter::Bicubic), (size, Filter::Triangle)])
            {
                let ours = resize(&image, window, size, filter);
                let theirs = resize_by_image(&image, window, size, filter);
                let worst = ours.iter().zip(&theirs).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
                assert_eq!(ours.len(), theirs.len());
                assert!(worst <= 1, "{window:?} to {size:?}, {filter:?}: off by {worst}");
            }
        }
    }

    #[test]
    fn one_colour_stays_that_colour() {
        let image = Image::new(50, 70, [9, 130, 255].repeat(50 * 70)).unwrap();
        let whole = Window { top: 0, left: 0, height: 50, width: 70 };
        for side in [3, 50, 64] {
            assert_eq!(resize(&image, whole, [side; 2], Filter::Bicubic), [9, 130, 255].repeat(side * side));
        }
    }

    /// `cargo test -p biformer-data -- --ignored --nocapture speed` prints how long each takes.
    #[test]
    #[ignore = "a measurement"]
    fn speed_beside_the_image_crate() {
        let image = noise(375, 500);
        let whole = Window { top: 0, left: 0, height: 375, width: 500 };
        for (name, function) in [("here", resize as fn(_, _, _, _) -> _), ("image crate", resize_by_image)] {
            let started = std::time::Instant::now();
            for _ in 0..50 {
                std::hint::black_box(function(&image, whole, [224; 2], Filter::Bicubic));
            }
            println!("{name}: {:.2} ms, 375x500 to 224x224", started.elapsed().as_secs_f64() * 20.0);
        }
    }
}
