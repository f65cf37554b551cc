//! CPU kernels of [`cross_entropy`](super::cross_entropy) and [`soft_cross_entropy`](super::soft_cross_entropy), which
//! differ in their targets alone.

use crate::softmax::cpu::row as softmax_row;
use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::lanes::{sum_map, sum_map2};
use tensor::cpu::parallel::{Out, items_per_task};
use tensor::{DType, Float, Result, Scratch, Tensor, simd};

/// The target distributions t (N, K), by the operations that the kernels need on one row.
trait Targets<T: Float>: Sync {
    /// K.
    fn classes(&self) -> usize;
    /// [Σ t, Σ t·(x − shift)] of row n.
    fn moments(&self, n: usize, x: &[T], shift: T) -> [T; 2];
    /// dx = factor·(p·Σt − t) for row n.
    fn gradient<A: Arch>(&self, n: usize, factor: T, p: &[T], dx: Out<'_, T>);
}

/// (1 − s)·[k = label] + s/K
struct Labels<'a, T> {
    labels: &'a [u32],
    smoothing: T,
    classes: usize,
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

/// Any numbers t (N, K).
struct Soft<'a, T> {
    targets: &'a [T],
    classes: usize,
}

impl<T: Float> Soft<'_, T> {
    fn row(&self, n: usize) -> &[T] {
        &self.targets[n * self.classes..][..self.classes]
    }
}

impl<T: Float> Targets<T> for Soft<'_, T> {
    fn classes(&self) -> usize {
        self.classes
    }

    #[inline(always)]
    fn moments(&self, n: usize, x: &[T], shift: T) -> [T; 2] {
        let t = self.row(n);
        // A class without weight does not count, not even as 0·∞.
        let term = |t: T, x: T| if t == T::zero() { t } else { t * (x - shift) };
        [sum_map(t, |t| t), sum_map2(t, x, term)]
    }

    #[inline(always)]
    fn gradient<A: Arch>(&self, n: usize, factor: T, p: &[T], dx: Out<'_, T>) {
        let t = self.row(n);
        let mass = sum_map(t, |t| t);
        for ((dx_k, &p), &t) in dx.data.iter_mut().zip(p).zip(t) {
            *dx_k = A::mul_add(factor, A::mul_add(p, mass, -t), if dx.accumulate { *dx_k } else { T::zero() });
        }
    }
}

/// The mean loss of logits (N, K) against labels, smoothed, or against shares; `p` takes the probabilities (N, K).
pub fn forward<T: Float>(
    op: &'static str,
    logits: &Tensor,
    targets: &Tensor,
    smoothing: f64,
    p: &mut Tensor,
) -> Result<T> {
    let [_, classes] = logits.dims(op, "logits (N, K)")?;
    let (logits, p) = (logits.as_slice(op)?, p.as_mut_slice(op)?);
    Ok(match targets.dtype() {
        DType::Index => {
            mean_loss(logits, &Labels { labels: targets.as_slice(op)?, smoothing: T::of(smoothing), classes }, p)
        }
        _ => mean_loss(logits, &Soft { targets: targets.as_slice(op)?, classes }, p),
    })
}

/// dx (N, K) from the gradient of the loss.
pub fn backward<T: Float>(dy: T, p: &Tensor, targets: &Tensor, smoothing: f64, dx: Out<'_, T>) -> Result<()> {
    let op = "cross_entropy";
    let [_, classes] = p.dims(op, "probabilities (N, K)")?;
    let p = p.as_slice(op)?;
    match targets.dtype() {
        DType::Index => {
            gradient(dy, p, &Labels { labels: targets.as_slice(op)?, smoothing: T::of(smoothing), classes }, dx)
        }
        _ => gradient(dy, p, &Soft { targets: targets.as_slice(op)?, classes }, dx),
    }
    Ok(())
}

fn mean_loss<T: Float>(logits: &[T], targets: &impl Targets<T>, p: &mut [T]) -> T {
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
fn gradient<T: Float>(dy: T, p: &[T], targets: &impl Targets<T>, dx: Out<'_, T>) {
    let classes = targets.classes();
    let rows = items_per_task(classes);
    let factor = dy / T::of((p.len() / classes) as f64);
    let accumulate = dx.accumulate;
    dx.data.par_chunks_mut(rows * classes).zip(p.par_chunks(rows * classes)).enumerate().for_each(
        |(task, (data, p))| {
            let dx = Out { data, accumulate };
            simd!(A => gradients_of::<T, A>(task * rows, factor, p, targets, dx));
        },
    );
}

/// The gradients of the rows from `first` on.
#[inline(always)]
fn gradients_of<T: Float, A: Arch>(first: usize, factor: T, p: &[T], targets: &impl Targets<T>, dx: Out<'_, T>) {
    let (classes, accumulate) = (targets.classes(), dx.accumulate);
    for (i, (data, p)) in dx.data.chunks_exact_mut(classes).zip(p.chunks_exact(classes)).enumerate() {
        targets.gradient::<A>(first + i, factor, p, Out { data, accumulate });
    }
}
