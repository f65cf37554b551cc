//! CPU kernel of [`drop_path`](super::drop_path), which is the same forward and backward.

use crate::dropout::Keep;
use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{GRAIN, Out, put};
use tensor::{Float, simd};

pub fn apply<T: Float>(x: &[T], residual: Option<&[T]>, samples: Range<usize>, keep: Keep, out: Out<'_, T>) {
    let sample = x.len().checked_div(samples.len()).unwrap_or(0);
    let accumulate = out.accumulate || residual.is_some();
    // The pieces are cut regardless of sample boundaries, as there may be few large samples or many small ones.
    out.data.par_chunks_mut(GRAIN).zip(x.par_chunks(GRAIN)).enumerate().for_each(|(part, (data, x))| {
        let start = part * GRAIN;
        if let Some(residual) = residual {
            put(data, &residual[start..start + x.len()], out.accumulate);
        }
        simd!(A => apply_part::<T, A>(x, start, sample, samples.start, keep, Out { data, accumulate }));
    });
}

/// Processes the elements from `start` on, `sample` of which are a sample. The first sample of all is sample `first` of the
/// batch.
#[inline(always)]
fn apply_part<T: Float, A: Arch>(x: &[T], start: usize, sample: usize, first: usize, keep: Keep, out: Out<'_, T>) {
    let mut done = 0;
    while done < x.len() {
        let n = (start + done) / sample;
        let end = ((n + 1) * sample - start).min(x.len());
        let (x, y) = (&x[done..end], &mut out.data[done..end]);
        done = end;
        if keep.allows(keep.rng.word((first + n) as u64)) {
            let scale = T::of(keep.scale);
            for (y, &x) in y.iter_mut().zip(x) {
                *y = A::mul_add(x, scale, if out.accumulate { *y } else { T::zero() });
            }
        } else if !out.accumulate {
            y.fill(T::zero());
        }
    }
}
