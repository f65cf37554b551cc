//! Resizing with antialiasing, as Pillow does it up to version 12, to the bit: the published weights were trained on
//! what it makes, and measured on it.
//!
//! Every output pixel is a weighted mean of the input pixels that its filter covers. Along one axis, with `scale =
//! input / output` and `stretch = max(scale, 1)` (so that a reduction covers all of the input), output pixel `o` lies
//! at `c = (o + 1/2) scale` and gives input pixel `i` the weight `k((i + 1/2 - c) / stretch)`; weights are normalised
//! to sum to 1, and rounded to whole multiples of 2^-22. Rows are resized first, and rounded to bytes; then columns.
//! (Pillow 13 goes the other way where that is quicker; up to 12 it did not, and the weights are older.)

use std::ops::Range;

use serde::{Deserialize, Serialize};

use tensor::simd;

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
    fn support(self) -> f64 {
        match self {
            Self::Bicubic => 2.0,
            Self::Triangle => 1.0,
        }
    }

    /// In the order of operations in which Pillow has it.
    fn kernel(self, x: f64) -> f64 {
        let x = x.abs();
        match self {
            Self::Bicubic if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
            Self::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5,
            Self::Triangle if x < 1.0 => 1.0 - x,
            _ => 0.0,
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

impl Window {
    /// All of so many rows and columns.
    pub fn whole([height, width]: [usize; 2]) -> Self {
        Self { top: 0, left: 0, height, width }
    }
}

/// Fractional bits of a fixed-point weight.
const DIGITS: u32 = 22;
/// The initial value of a sum of weighted bytes: one half, so that dropping the fractional bits rounds to nearest.
const HALF: i32 = 1 << (DIGITS - 1);

/// The most rows that are resized together, and the most bytes of them: very long rows are resized one at a time.
const LANES: usize = 32;
const TURNED: usize = 1 << 22;

/// A sum of weighted bytes, as a byte: a cubic may overshoot 0..255.
#[inline(always)]
fn as_byte(sum: i32) -> u8 {
    (sum >> DIGITS).clamp(0, 255) as u8
}

/// The weights of some output pixels along one axis: pixel `o` of them is the sum of
/// `weights[o][t] * input[first + starts[o] + t]`.
struct Axis {
    first: usize,
    starts: Vec<usize>, // (shown)
    weights: Vec<i32>,  // (shown, taps), 0 where a filter covers fewer
    taps: usize,
}

impl Axis {
    /// The weights of the pixels `shown` of a line of `input` pixels that is resized to `output` pixels.
    fn new(input: usize, output: usize, shown: Range<usize>, filter: Filter) -> Self {
        let scale = input as f64 / output as f64;
        let stretch = scale.max(1.0);
        let reach = filter.support() * stretch;
        let taps = input.min(2 * reach.ceil() as usize + 1);
        let (starts, weights) = (Vec::with_capacity(shown.len()), Vec::with_capacity(shown.len() * taps));
        let mut axis = Self { first: 0, starts, weights, taps };
        let mut covered = vec![0.0; taps];
        for o in shown {
            let centre = (o as f64 + 0.5) * scale;
            let first = (centre - reach + 0.5).max(0.0) as usize;
            let count = input.min((centre + reach + 0.5) as usize) - first;
            let mut sum = 0.0;
            for (t, weight) in covered[..count].iter_mut().enumerate() {
                *weight = filter.kernel(((first + t) as f64 - centre + 0.5) * (1.0 / stretch));
                sum += *weight;
            }
            // Where fewer than `taps` pixels are left, begin earlier, with zeros.
            let start = first.min(input - taps);
            let end = axis.weights.len() + taps;
            axis.weights.resize(axis.weights.len() + first - start, 0);
            let rounded = |weight: f64| (weight / sum * f64::from(1 << DIGITS)).round() as i32;
            axis.weights.extend(covered[..count].iter().map(|&weight| rounded(weight)));
            axis.weights.resize(end, 0);
            axis.starts.push(start);
        }
        axis.first = axis.starts.first().copied().unwrap_or(0);
        axis.starts.iter_mut().for_each(|start| *start -= axis.first);
        axis
    }

    fn of(&self, pixel: usize) -> (usize, &[i32]) {
        (self.starts[pixel], &self.weights[pixel * self.taps..(pixel + 1) * self.taps])
    }

    /// How many input pixels these output pixels depend on, from the first on.
    fn seen(&self) -> usize {
        self.starts.last().map_or(0, |last| last + self.taps)
    }
}

/// The pixels of `window`, resized to (rows, columns, 3). The window lies inside the image and is not empty.
pub(crate) fn resize(image: &Image, window: Window, size: [usize; 2], filter: Filter) -> Vec<u8> {
    resize_part(image, window, size, Window::whole(size), filter)
}

/// The part `part` of that result, computed without the rest.
pub(crate) fn resize_part(
    image: &Image,
    window: Window,
    [rows, columns]: [usize; 2],
    part: Window,
    filter: Filter,
) -> Vec<u8> {
    let vertical = Axis::new(window.height, rows, part.top..part.top + part.height, filter);
    let horizontal = Axis::new(window.width, columns, part.left..part.left + part.width, filter);
    let ([down, across], stride) = ([&vertical, &horizontal].map(Axis::seen), part.width * 3);
    let begin = (window.top + vertical.first) * image.width() + window.left + horizontal.first;
    let rows: Vec<&[u8]> = image.pixels()[begin * 3..].chunks(image.width() * 3).take(down).collect();
    let mut narrowed = vec![0; down * stride]; // (rows seen, columns of the part, 3)
    let lanes = (TURNED / (across * 3)).min(down).clamp(1, LANES);
    let mut turned = vec![0; across * 3 * lanes];
    for (rows, narrowed) in rows.chunks(lanes).zip(narrowed.chunks_mut(lanes * stride)) {
        simd!(A => resize_rows(rows, lanes, &horizontal, &mut turned, narrowed));
    }
    let (mut sums, mut resized) = (vec![0; stride], vec![0; part.height * stride]);
    for (o, resized) in resized.chunks_exact_mut(stride).enumerate() {
        let (start, weights) = vertical.of(o);
        simd!(A => blend(&narrowed[start * stride..], weights, &mut sums, resized));
    }
    resized
}

/// Resizes some rows, at most `lanes`, horizontally. `turned` is a buffer for their bytes, column by column, so that
/// rows are blended side by side as columns are, many bytes at a time.
#[inline(always)]
fn resize_rows(rows: &[&[u8]], lanes: usize, axis: &Axis, turned: &mut [u8], resized: &mut [u8]) {
    for (lane, row) in rows.iter().enumerate() {
        turned.chunks_exact_mut(lanes).zip(*row).for_each(|(column, &byte)| column[lane] = byte);
    }
    let stride = resized.len() / rows.len();
    let (mut sums, mut blended) = ([0; 3 * LANES], [0; 3 * LANES]);
    let (sums, blended) = (&mut sums[..3 * lanes], &mut blended[..3 * lanes]);
    for o in 0..stride / 3 {
        let (start, weights) = axis.of(o);
        blend(&turned[start * 3 * lanes..], weights, sums, blended);
        for (lane, row) in resized.chunks_exact_mut(stride).enumerate() {
            row[o * 3..][..3].copy_from_slice(&[blended[lane], blended[lanes + lane], blended[2 * lanes + lane]]);
        }
    }
}

/// The weighted sum of some rows.
#[inline(always)]
fn blend(rows: &[u8], weights: &[i32], sums: &mut [i32], blended: &mut [u8]) {
    sums.fill(HALF);
    for (row, &weight) in rows.chunks_exact(blended.len()).zip(weights) {
        sums.iter_mut().zip(row).for_each(|(sum, &value)| *sum += weight * i32::from(value));
    }
    blended.iter_mut().zip(sums).for_each(|(blended, sum)| *blended = as_byte(*sum));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Statistics, Transform};

    const PICTURES: &[u8] = include_bytes!("../tests/fixtures/resize.png");
    const CASES: &str = include_str!("../tests/fixtures/resize.txt");

    /// `fixtures/resize.py` made them: the bytes of a picture, and then those of all cases.
    #[test]
    fn the_bytes_are_pillows_and_torchvisions() {
        let all = image::load_from_memory(PICTURES).unwrap().into_rgb8();
        let [rows, columns] = [90, 100];
        let (picture, mut rest) = all.split_at(rows * columns * 3);
        let picture = Image::new(rows, columns, picture.to_vec()).unwrap();
        for case in CASES.lines() {
            let words: Vec<&str> = case.split(' ').collect();
            let number = |place: usize| words[place].parse::<usize>().unwrap();
            let found = match words[0] {
                "resize" => {
                    let window = Window { left: number(1), top: number(2), width: number(3), height: number(4) };
                    let filter = if words[7] == "bicubic" { Filter::Bicubic } else { Filter::Triangle };
                    resize(&picture, window, [number(6), number(5)], filter)
                }
                _ => {
                    let [width, height, size, length] = [1, 2, 3, 4].map(number);
                    let rows = picture.pixels().chunks(columns * 3).take(height);
                    let part = Image::new(height, width, rows.flat_map(|row| &row[..width * 3]).copied().collect());
                    let bytes = Statistics { mean: [0.0; 3], std: [1.0 / 255.0; 3] };
                    let share = size as f64 / (length as f64 + 0.5);
                    let transform = Transform::eval(size, bytes).unwrap().showing(share).unwrap();
                    transform.pixels(&part.unwrap()).into_iter().map(|byte| byte.round() as u8).collect()
                }
            };
            let (expected, after) = rest.split_at(found.len());
            let apart = found.iter().zip(expected).map(|(a, b)| a.abs_diff(*b));
            let (count, most) = (apart.clone().filter(|&apart| apart > 0).count(), apart.max());
            assert_eq!(count, 0, "{case}: bytes that differ, by up to {most:?}");
            rest = after;
        }
        assert!(rest.len() < columns * 3, "the end of the last row");
    }

    #[test]
    fn one_colour_stays_that_colour() {
        let image = Image::new(50, 70, [9, 130, 255].repeat(50 * 70)).unwrap();
        let whole = Window { top: 0, left: 0, height: 50, width: 70 };
        for side in [3, 50, 64] {
            assert_eq!(resize(&image, whole, [side; 2], Filter::Bicubic), [9, 130, 255].repeat(side * side));
        }
    }
}
