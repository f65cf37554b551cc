//! CPU kernels of [`cross_entropy`](super::cross_entropy), and of
//! [`soft_cross_entropy`](crate::soft_cross_entropy), which differs in its targets alone.

use crate::softmax::cpu::row as softmax_row;
use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::lanes::sum_map;
use tensor::cpu::parallel::{Out, items_per_task};
use tensor::{Float, Scratch, simd};

/// The target distributions t (N, K), by the operations that the kernels need on one row.
pub(crate) trait Targets<T: Float>: Sync {
    /// K.
    fn classes(&self) -> usize;
    /// [Σ t, Σ t·(x − shift)] of row n.
    fn moments(&self, n: usize, x: &[T], shift: T) -> [T; 2];
    /// dx = factor·(p·Σt − t) for row n.
    fn gradient<A: Arch>(&self, n: usize, factor: T, p: &[T], dx: Out<'_, T>);
}

/// (1 − s)·[k = label] + s/K
pub(crate) struct Labels<'a, T> {
    pub labels: &'a [u32],
    pub smoothing: T,
    pub classes: usize,
}

impl<T: Float> Labels<'_, T> {
    /// s/K
    fn everywhere(&self) -> T {
        self.smoothing / T::of(self.classes as f64)
    }
}

impl<T: Float> Targets<T> for Labels<'_, T> {
    fn classes(&self) -> usize {
        self.classes
    }

    #[inline(always)]
    fn moments(&self, n: usize, x: &[T], shift: T) -> [T; 2] {
        let (hit, everywhere) = (T::one() - self.smoothing, self.everywhere());
        let mut mean = T::zero();
        // What has no weight does not count, not even as 0·∞.
        if hit > T::zero() {
            mean += hit * (x[self.labels[n] as usize] - shift);
        }
        if everywhere > T::zero() {
            mean += everywhere * sum_map(x, |x| x - shift);
        }
        [T::one(), mean]
    }

    #[inline(always)]
    fn gradient<A: Arch>(&self, n: usize, factor: T, p: &[T], dx: Out<'_, T>) {
        let everywhere = self.everywhere();
        for (dx_k, &p) in dx.data.iter_mut().zip(p) {
            *dx_k = A::mul_add(factor, p - everywhere, if dx.accumulate { *dx_k } else { T::zero() });
        }
        dx.data[self.labels[n] as usize] -= factor * (T::one() - self.smoothing);
    }
}

/// The mean loss; `p` takes the probabilities (N, K).
pub(crate) fn forward<T: Float>(logits: &[T], targets: &impl Targets<T>, p: &mut [T]) -> T {
    let classes = targets.classes();
    let rows = items_per_task(classes);
    let count = logits.len() / classes;
    let mut losses = Scratch::<T>::new(count);
    losses
        .par_chunks_mut(rows)
        .zip(logits.par_chunks(rows * classes).zip(p.par_chunks_mut(rows * classes)))
        .enumerate()
        .for_each(|(task, (losses, (x, p)))| simd!(A => losses_of::<T, A>(task * rows, x, targets, p, losses)));
    // In double precision, so that the mean of a large batch is as good as its terms.
    T::of(losses.iter().map(|loss| loss.as_f64()).sum::<f64>() / count as f64)
}

/// The losses of the rows from `first` on.
#[inline(always)]
fn losses_of<T: Float, A: Arch>(first: usize, x: &[T], targets: &impl Targets<T>, p: &mut [T], losses: &mut [T]) {
    let classes = targets.classes();
    for (i, (x, p)) in x.chunks_exact(classes).zip(p.chunks_exact_mut(classes)).enumerate() {
        let [max, sum] = softmax_row::<T, A>(x, p);
        let [mass, mean] = targets.moments(first + i, x, max);
        losses[i] = mass * T::of(libm::log(sum.as_f64())) - mean;
    }
}

/// dx = dy·(p·Σt − t)/N
pub(crate) fn backward<T: Float>(dy: T, p: &[T], targets: &impl Targets<T>, dx: Out<'_, T>) {
    let classes = targets.classes();
    let rows = items_per_task(classes);
    let factor = dy / T::of((p.len() / classes) as f64);
    let accumulate = dx.accumulate;
    dx.data.par_chunks_mut(rows * classes).zip(p.par_chunks(rows * classes)).enumerate().for_each(|(task, (dx, p))| {
        for (i, (data, p)) in dx.chunks_exact_mut(classes).zip(p.chunks_exact(classes)).enumerate() {
            let n = task * rows + i;
            simd!(A => targets.gradient::<A>(n, factor, p, Out { data, accumulate }));
        }
    });
}
