//! What [`soft_cross_entropy`](super::soft_cross_entropy) adds to the CPU kernels of
//! [`cross_entropy`](crate::cross_entropy): its targets.

use crate::cross_entropy::cpu::Targets;
use tensor::Float;
use tensor::cpu::isa::Arch;
use tensor::cpu::lanes::{sum_map, sum_map2};
use tensor::cpu::parallel::Out;

/// Any numbers t (N, K).
pub struct Soft<'a, T> {
    pub targets: &'a [T],
    pub classes: usize,
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
