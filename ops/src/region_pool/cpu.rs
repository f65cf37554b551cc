//! CPU kernels of [`region_pool`](super::region_pool), and of [`mean_pool`](crate::mean_pool), whose map
//! is a single region.

use super::geometry::{Geometry, token_strides};
use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::parallel::{Out, items_per_task, put};
use tensor::{Float, Result, Scratch, Tensor, simd};

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

pub fn forward<T: Float>(x: Tokens<'_, T>, g: Geometry, y: &mut [T]) {
    let ([down, across], [h, w], channels) = (g.regions.grid(), g.regions.size(), g.channels);
    if channels == 0 {
        return;
    }
    let [image, row, token] = x.strides;
    let per_task = items_per_task(h * w * channels);
    let chain = g.regions.rows_of_chain();
    y.par_chunks_mut(per_task * channels).enumerate().for_each(|(task, means)| {
        for (i, mean) in means.chunks_exact_mut(channels).enumerate() {
            let region = task * per_task + i;
            let (n, i, j) = (region / (down * across), region / across % down, region % across);
            let first = n * image + i * h * row + j * w * token;
            simd!(_A => mean_of_tokens(&x.data[first..], [h, w], [row, token], chain, mean));
        }
    });
}

/// The mean of a rectangle of tokens, each a run of as many elements as `mean` has, from the first of which the data
/// begin. From one row and one token to the next it is as far as `strides` says. Each `chain` rows are added up by
/// themselves.
#[inline(always)]
pub(crate) fn mean_of_tokens<T: Float>(
    data: &[T],
    [height, width]: [usize; 2],
    strides: [usize; 2],
    chain: usize,
    mean: &mut [T],
) {
    add_tokens(data, [0..height.min(chain), 0..width], strides, mean);
    for start in (chain..height).step_by(chain) {
        let mut more = Scratch::<T>::new(mean.len());
        add_tokens(data, [start..height.min(start + chain), 0..width], strides, &mut more);
        put(mean, &more, true);
    }
    let weight = T::one() / T::of((height * width) as f64);
    mean.iter_mut().for_each(|x| *x *= weight);
}

/// The sum of the tokens in these rows and columns.
#[inline(always)]
fn add_tokens<T: Float>(data: &[T], [rows, columns]: [Range<usize>; 2], [row, token]: [usize; 2], sum: &mut [T]) {
    sum.fill(T::zero());
    for i in rows {
        for j in columns.clone() {
            put(sum, &data[i * row + j * token..][..sum.len()], true);
        }
    }
}

pub fn backward<T: Float>(dy: &[T], g: Geometry, dx: Out<'_, T>) {
    let ([down, across], [h, w], channels) = (g.regions.grid(), g.regions.size(), g.channels);
    let row = across * w * channels;
    if row == 0 {
        return;
    }
    let weight = g.weight::<T>();
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
    debug_assert_eq!(dy.len(), g.images * down * across * channels);
}
