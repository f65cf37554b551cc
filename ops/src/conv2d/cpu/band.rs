//! The part of x that a block of output pixels reads, and the part of dy that the gradient of a block of input pixels
//! needs.

use super::super::geometry::Geometry;
use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::parallel::items_per_task;
use tensor::{Float, Scratch};

/// Rows of a map, each padded with zeros where a patch extends past its ends.
struct Band {
    /// Columns of zeros before the first of the map.
    left: usize,
    /// Columns in all, each of `channels` elements.
    columns: usize,
    channels: usize,
}

impl Band {
    /// The band of x that the patches of a row of the output read.
    pub fn of_input(g: &Geometry) -> Self {
        let columns = (g.output[1] - 1) * g.stride + g.kernel[1];
        Self { left: g.padding, columns, channels: g.inputs }
    }

    /// The band of dy that the gradient of a row of x needs.
    pub fn of_output(g: &Geometry) -> Self {
        let left = g.kernel[1].div_ceil(g.stride) - 1;
        Self { left, columns: left + (g.input[1] - 1 + g.padding) / g.stride + 1, channels: g.outputs }
    }

    /// Elements of a row.
    pub fn row(&self) -> usize {
        self.columns * self.channels
    }

    /// Copies a row of a map into a row of the band; zeros if there is no such row.
    fn copy<T: Float>(&self, from: Option<&[T]>, to: &mut [T]) {
        let from = from.unwrap_or_default();
        let (before, rest) = to.split_at_mut((self.left * self.channels).min(to.len()));
        let (inside, after) = rest.split_at_mut(from.len().min(rest.len()));
        before.fill(T::zero());
        inside.copy_from_slice(&from[..inside.len()]);
        after.fill(T::zero());
    }

    /// The band of some rows of a map, numbered across all images; zeros for those that are `None`.
    pub fn cut<T: Float>(&self, map: &[T], width: usize, rows: &[Option<usize>]) -> Scratch<T> {
        let mut band = Scratch::new(rows.len() * self.row());
        let size = width * self.channels;
        let rows = band.par_chunks_exact_mut(self.row().max(1)).zip(rows).with_min_len(items_per_task(self.row()));
        rows.for_each(|(to, row)| self.copy(row.map(|row| &map[row * size..][..size]), to));
        band
    }
}

/// The patches of some rows of output pixels. Neighbouring rows of an image share the rows of x that both see.
pub(super) struct InputBand {
    band: Band,
    /// The rows of x in the band, counted through all images.
    rows: Vec<Option<usize>>,
    /// Where each pixel's patch starts in the band, and where each of its runs starts from there.
    pub starts: Vec<usize>,
    pub runs: Vec<usize>,
}

impl InputBand {
    /// For these rows of the output, numbered across all images.
    pub fn new(g: &Geometry, output_rows: Range<usize>) -> Self {
        let band = Band::of_input(g);
        let (mut rows, mut starts) = (vec![], vec![]);
        for part in in_images(output_rows, g.output[0]) {
            let pixels = |row| {
                let first = (rows.len() + row * g.stride) * band.row();
                (0..g.output[1]).map(move |column| first + column * g.stride * g.inputs)
            };
            starts.extend((0..part.len()).flat_map(pixels));
            let seen = (part.len() - 1) * g.stride + g.kernel[0];
            rows.extend((0..seen).map(|below| g.input_row(part.start, below)));
        }
        let runs = (0..g.kernel[0]).map(|row| row * band.row()).collect();
        Self { band, rows, starts, runs }
    }

    /// The band, cut out of x.
    pub fn cut<T: Float>(&self, g: &Geometry, x: &[T]) -> Scratch<T> {
        self.band.cut(x, g.input[1], &self.rows)
    }
}

/// The part of dy that is multiplied, for some rows of x, by the kernel rows of one remainder modulo the stride. As the
/// row of the kernel increases, the row of dy that it meets decreases, so the band holds the rows of dy from the last
/// one up.
pub(super) struct OutputBand {
    band: Band,
    /// The rows of dy in the band, counted through all images.
    dy_rows: Vec<Option<usize>>,
    /// The rows of x that meet any row of dy, numbered from the first requested row, and where in the band the rows
    /// that they meet begin.
    x_rows: Vec<(usize, usize)>,
    /// Where the row of dy that each tap meets starts, relative to that of the first tap.
    pub runs: Vec<usize>,
}

impl OutputBand {
    /// For these rows of x, numbered across all images, and the kernel rows of the remainder `down`.
    pub fn new(g: &Geometry, rows: Range<usize>, down: usize) -> Self {
        let (band, taps) = (Band::of_output(g), g.taps_of(0, down).len());
        let (mut dy_rows, mut x_rows) = (vec![], vec![]);
        for part in in_images(rows.clone(), g.input[0]) {
            let image = part.start / g.input[0];
            let positions = part.filter_map(|row| Some((row, g.position(row % g.input[0], down)?)));
            let positions: Vec<_> = positions.collect();
            let (Some(&(_, first)), Some(&(_, last))) = (positions.first(), positions.last()) else { continue };
            x_rows.extend(positions.iter().map(|(row, position)| (row - rows.start, dy_rows.len() + last - position)));
            dy_rows.extend((0..last - first + taps).map(|above| {
                let row = last.checked_sub(above).filter(|&row| row < g.output[0])?;
                Some(image * g.output[0] + row)
            }));
        }
        let runs = (0..taps).map(|tap| tap * band.row()).collect();
        Self { band, dy_rows, x_rows, runs }
    }

    /// The band, cut out of dy.
    pub fn cut<T: Float>(&self, g: &Geometry, dy: &[T]) -> Scratch<T> {
        self.band.cut(dy, g.output[1], &self.dy_rows)
    }

    /// For each pixel of these rows of x whose column has the remainder `across`: where in the band the part of dy that
    /// its taps meet begins, and where the pixel lies in the rows of x.
    pub fn pixels(&self, g: &Geometry, across: usize) -> (Vec<usize>, Vec<usize>) {
        let taps = g.taps_of(1, across).len().max(1);
        let columns = (0..g.input[1]).filter_map(|column| {
            let position = g.position(column, across)?;
            Some(((self.band.left + position + 1 - taps) * g.outputs, column * g.inputs))
        });
        let columns: Vec<(usize, usize)> = columns.collect();
        let pixels = self.x_rows.iter().flat_map(|&(row, of_band)| {
            let (start, place) = (of_band * self.band.row(), row * g.input[1] * g.inputs);
            columns.iter().map(move |(from, to)| (start + from, place + to))
        });
        pixels.unzip()
    }
}

/// Splits rows, numbered across all images of `height` rows each, at the boundaries of images.
fn in_images(rows: Range<usize>, height: usize) -> impl Iterator<Item = Range<usize>> {
    let mut first = rows.start;
    std::iter::from_fn(move || {
        let part = first..rows.end.min((first / height + 1) * height);
        first = part.end;
        (!part.is_empty()).then_some(part)
    })
}
