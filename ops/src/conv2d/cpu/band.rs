//! What a block of pixels sees of a map, or meets of a gradient.

use super::super::geometry::Geometry;
use rayon::prelude::*;
use std::ops::Range;
use tensor::Scratch;
use tensor::cpu::factor::Factor;
use tensor::cpu::parallel::items_per_task;

/// Rows of a map, each with zeros where a patch reaches over its ends.
struct Band {
    /// Columns of zeros before the first of the map.
    left: usize,
    /// Columns in all, each of so many channels.
    columns: usize,
    channels: usize,
}

impl Band {
    /// What x must be cut to for its patches, row by row of the output.
    pub fn of_input(g: &Geometry) -> Self {
        let columns = (g.output[1] - 1) * g.stride + g.kernel[1];
        Self { left: g.padding, columns, channels: g.inputs }
    }

    /// What dy must be cut to for the gradient of x, row by row of x.
    pub fn of_output(g: &Geometry) -> Self {
        let left = g.kernel[1].div_ceil(g.stride) - 1;
        Self { left, columns: left + (g.input[1] - 1 + g.padding) / g.stride + 1, channels: g.outputs }
    }

    /// Elements of a row.
    pub fn row(&self) -> usize {
        self.columns * self.channels
    }

    /// Rounds a row of a map's columns into a row of the band; zeros if there is none.
    fn copy<F: Factor>(&self, from: Option<&[F::Sum]>, to: &mut [F]) {
        let from = from.unwrap_or_default();
        let (before, rest) = to.split_at_mut((self.left * self.channels).min(to.len()));
        let (inside, after) = rest.split_at_mut(from.len().min(rest.len()));
        before.fill(F::default());
        F::round(&from[..inside.len()], inside);
        after.fill(F::default());
    }

    /// Cuts some rows of a map, which are counted through all images, out of it; zeros for those that are none.
    pub fn cut<F: Factor>(&self, map: &[F::Sum], width: usize, rows: &[Option<usize>], to: &mut [F]) {
        let size = width * self.channels;
        let rows = to.par_chunks_exact_mut(self.row().max(1)).zip(rows).with_min_len(items_per_task(self.row()));
        rows.for_each(|(to, row)| self.copy(row.map(|row| &map[row * size..][..size]), to));
    }
}

/// The patches of some rows of output pixels. Neighbouring rows of an image share the rows of x that both see.
pub(super) struct Seen {
    band: Band,
    /// The rows of x in the band, counted through all images.
    rows: Vec<Option<usize>>,
    /// Where each pixel's patch starts, and each of its runs from there.
    pub starts: Vec<usize>,
    pub runs: Vec<usize>,
}

impl Seen {
    /// Of these rows of the output, counted through all images.
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
    pub fn cut<F: Factor>(&self, g: &Geometry, x: &[F::Sum]) -> Scratch<F> {
        let mut band = Scratch::new(self.rows.len() * self.band.row());
        self.band.cut::<F>(x, g.input[1], &self.rows, &mut band);
        band
    }
}

/// The part of dy that is multiplied, for some rows of x, by the kernel rows of one remainder modulo the stride. Kernel
/// rows run downwards as rows of dy run upwards, so the band holds the rows of dy from the last one up.
pub(super) struct Met {
    band: Band,
    /// The rows of dy in the band, counted through all images.
    dy_rows: Vec<Option<usize>>,
    /// The rows of x that meet any, counted from the first that was asked for, and where in the band those begin.
    x_rows: Vec<(usize, usize)>,
    /// Where the row of dy that each tap meets starts, from the first.
    pub runs: Vec<usize>,
}

impl Met {
    /// At these rows of x, counted through all images.
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
    pub fn cut<F: Factor>(&self, g: &Geometry, dy: &[F::Sum]) -> Scratch<F> {
        let mut band = Scratch::new(self.dy_rows.len() * self.band.row());
        self.band.cut::<F>(dy, g.output[1], &self.dy_rows, &mut band);
        band
    }

    /// For each pixel of these rows of x that the taps of a remainder across meet: where in the band what they meet of dy
    /// begins, and where the pixel lies in the rows of x.
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

/// Rows of maps of so many rows each, counted through all images, image by image.
fn in_images(rows: Range<usize>, height: usize) -> impl Iterator<Item = Range<usize>> {
    let mut first = rows.start;
    std::iter::from_fn(move || {
        let part = first..rows.end.min((first / height + 1) * height);
        first = part.end;
        (!part.is_empty()).then_some(part)
    })
}
