//! CPU kernel of [`dropout`](super::dropout), which is the same forward and backward.

use super::Keep;
use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{GRAIN, Out};
use tensor::{Float, simd};

/// One block of the stream decides about this many elements.
const BLOCK: usize = 4;
/// How many blocks are drawn together, each in its own vector lane.
const LANES: usize = 16;

pub fn apply<T: Float>(x: &[T], keep: Keep, out: Out<'_, T>) {
    let accumulate = out.accumulate;
    out.data.par_chunks_mut(GRAIN).zip(x.par_chunks(GRAIN)).enumerate().for_each(|(part, (data, x))| {
        let first = (part * GRAIN / BLOCK) as u64;
        simd!(A => apply_part::<T, A>(x, first, keep, Out { data, accumulate }));
    });
}

/// The elements that the blocks from `first` on decide about.
#[inline(always)]
fn apply_part<T: Float, A: Arch>(x: &[T], first: u64, keep: Keep, out: Out<'_, T>) {
    let scale = T::of(keep.scale);
    let groups = x.chunks(LANES * BLOCK).zip(out.data.chunks_mut(LANES * BLOCK));
    for (group, (x, y)) in groups.enumerate() {
        let mut words = [[0; BLOCK]; LANES];
        for (lane, words) in words.iter_mut().enumerate() {
            *words = keep.rng.block(first + (group * LANES + lane) as u64);
        }
        for ((y, &x), &word) in y.iter_mut().zip(x).zip(words.as_flattened()) {
            // A selection, not a factor of 0, which would turn infinities and NaN into NaN.
            let kept = if keep.allows(word) { x } else { T::zero() };
            *y = A::mul_add(kept, scale, if out.accumulate { *y } else { T::zero() });
        }
    }
}
