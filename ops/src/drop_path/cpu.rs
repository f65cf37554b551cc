//! CPU kernel of [`drop_path`](super::drop_path), which is the same forward and backward.

use crate::dropout::Keep;
use rayon::prelude::*;
use tensor::Float;
use tensor::cpu::parallel::{GRAIN, Out};

pub fn apply<T: Float>(x: &[T], samples: usize, keep: Keep, out: Out<'_, T>) {
    let sample = x.len().checked_div(samples).unwrap_or(0).max(1);
    let accumulate = out.accumulate;
    out.data.par_chunks_mut(sample).zip(x.par_chunks(sample)).enumerate().for_each(|(n, (y, x))| {
        if keep.allows(keep.rng.word(n as u64)) {
            let scale = T::of(keep.scale);
            y.par_chunks_mut(GRAIN).zip(x.par_chunks(GRAIN)).for_each(|(y, x)| {
                for (y, &x) in y.iter_mut().zip(x) {
                    *y = if accumulate { *y + x * scale } else { x * scale };
                }
            });
        } else if !accumulate {
            y.fill(T::zero());
        }
    });
}
