//! CPU kernels of [`region_pool`](super::region_pool), and of [`mean_pool`](crate::mean_pool), whose map
//! is a single region.

use super::geometry::{Geometry, token_strides};
use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::isa::Arch;
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
            let rows = |of: Range<usize>| of.map(|a| &x.data[first + a * row..]);
            simd!(A => add_tokens::<T, A>(rows(0..h.min(chain)), [w, token], g.weight(), mean));
            for start in (chain..h).step_by(chain) {
                let mut more = Scratch::<T>::new(channels);
                simd!(A => add_tokens::<T, A>(rows(start..h.min(start + chain)), [w, token], g.weight(), &mut more));
                put(mean, &more, true);
            }
        }
    });
}

/// sum = Σ weight·x over the first `w` tokens x of each row, `token` elements apart.
#[inline(always)]
fn add_tokens<'a, T: Float, A: Arch>(
    rows: impl Iterator<Item = &'a [T]>,
    [w, token]: [usize; 2],
    weight: T,
    sum: &mut [T],
) {
    sum.fill(T::zero());
    for row in rows {
        for b in 0..w {
            for (sum, &x) in sum.iter_mut().zip(&row[b * token..]) {
                *sum = A::mul_add(weight, x, *sum);
            }
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
