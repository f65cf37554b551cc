//! CPU kernels of [`region_pool`](super::region_pool), and of [`mean_pool`](crate::mean_pool), whose map
//! is a single region.

use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{Out, items_per_task};
use tensor::{Error, Float, Result, Tensor, simd};

/// How a map (N, H, W, C) falls into regions.
#[derive(Clone, Copy)]
pub(crate) struct Regions {
    pub images: usize,
    /// Regions down and across.
    pub grid: [usize; 2],
    /// Tokens of each region, down and across.
    pub tokens: [usize; 2],
    pub channels: usize,
}

impl Regions {
    /// 1/(h·w), the weight of a token in the mean.
    fn weight<T: Float>(&self) -> T {
        T::one() / T::of((self.tokens[0] * self.tokens[1]) as f64)
    }
}

/// The tokens of a map (N, H, W, C), each a run of C elements.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a, T> {
    data: &'a [T],
    /// From one image, one row, one token to the next.
    strides: [usize; 3],
}

impl<'a, T: Float> Tokens<'a, T> {
    pub fn new(op: &'static str, x: &'a Tensor) -> Result<Self> {
        Ok(Self { strides: token_strides(op, x)?, data: x.as_strided_slice(op)? })
    }
}

/// The steps from one image, one row, one token of a map (N, H, W, C) to the next. [`Error::NotContiguous`] unless its
/// channels lie side by side.
pub(crate) fn token_strides(op: &'static str, x: &Tensor) -> Result<[usize; 3]> {
    let [.., channels] = x.dims::<4>(op, "x (N, H, W, C)")?;
    match x.strides() {
        &[image, row, token, channel] if channel == 1 || channels <= 1 => Ok([image, row, token]),
        strides => Err(Error::NotContiguous { op, shape: x.shape().to_string(), strides: strides.to_vec() }),
    }
}

pub fn forward<T: Float>(x: Tokens<'_, T>, regions: Regions, y: &mut [T]) {
    let Regions { grid: [down, across], tokens: [h, w], channels, .. } = regions;
    if channels == 0 {
        return;
    }
    let [image, row, token] = x.strides;
    let per_task = items_per_task(h * w * channels);
    y.par_chunks_mut(per_task * channels).enumerate().for_each(|(task, means)| {
        for (i, mean) in means.chunks_exact_mut(channels).enumerate() {
            let region = task * per_task + i;
            let (n, i, j) = (region / (down * across), region / across % down, region % across);
            let first = n * image + i * h * row + j * w * token;
            let rows = (0..h).map(|a| &x.data[first + a * row..]);
            simd!(A => mean_of_region::<T, A>(rows, [w, token], regions.weight(), mean));
        }
    });
}

/// mean = Σ weight·x over the first `w` tokens x of each row, `token` elements apart.
#[inline(always)]
fn mean_of_region<'a, T: Float, A: Arch>(
    rows: impl Iterator<Item = &'a [T]>,
    [w, token]: [usize; 2],
    weight: T,
    mean: &mut [T],
) {
    mean.fill(T::zero());
    for row in rows {
        for b in 0..w {
            for (mean, &x) in mean.iter_mut().zip(&row[b * token..]) {
                *mean = A::mul_add(weight, x, *mean);
            }
        }
    }
}

pub fn backward<T: Float>(dy: &[T], regions: Regions, dx: Out<'_, T>) {
    let Regions { grid: [down, across], tokens: [h, w], channels, .. } = regions;
    let row = across * w * channels;
    if row == 0 {
        return;
    }
    let weight = regions.weight::<T>();
    let per_task = items_per_task(row);
    let accumulate = dx.accumulate;
    dx.data.par_chunks_mut(per_task * row).enumerate().for_each(|(task, rows)| {
        for (y, row) in rows.chunks_exact_mut(row).enumerate() {
            // Rows are counted through all images, and so are rows of regions.
            let strip = (task * per_task + y) / h;
            let dy = dy[strip * across * channels..][..across * channels].chunks_exact(channels);
            for (dy, region) in dy.zip(row.chunks_exact_mut(w * channels)) {
                for token in region.chunks_exact_mut(channels) {
                    for (dx, &dy) in token.iter_mut().zip(dy) {
                        *dx = if accumulate { *dx + dy * weight } else { dy * weight };
                    }
                }
            }
        }
    });
    debug_assert_eq!(dy.len(), regions.images * down * across * channels);
}
