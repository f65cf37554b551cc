//! Moving averages.

use super::Tensor;
use crate::cpu::isa::Arch;
use crate::cpu::parallel::GRAIN;
use crate::cuda::elements;
use crate::{Device, Error, Float, Result, match_float, simd};
use rayon::prelude::*;

impl Tensor {
    /// self ← self + rate·(x − self), for a moving average that follows x; x and `rate`, of one element, are on the
    /// same device as self. Unlike (1 − rate)·self + rate·x, this form leaves elements unchanged where both are equal.
    /// Errors: [`Error::Shape`], [`Error::DType`], [`Error::NotContiguous`], [`Error::Device`]; [`Error::Shared`] while
    /// another tensor shares the buffer.
    pub fn move_towards(&mut self, x: &Tensor, rate: &Tensor) -> Result<()> {
        if x.shape() != self.shape() {
            return Err(Error::shape("move_towards", self.shape().to_string(), x.shape()));
        }
        if rate.count() != 1 {
            return Err(Error::shape("move_towards", "a rate of one element", rate.shape()));
        }
        match self.device() {
            Device::Cpu => match_float!(self.dtype(), "move_towards", T => {
                let (x, rate) = (x.as_slice::<T>("move_towards")?, rate.item::<T>()?);
                let y = self.as_mut_slice::<T>("move_towards")?;
                y.par_chunks_mut(GRAIN).zip(x.par_chunks(GRAIN)).for_each(|(y, x)| simd!(A => follow::<T, A>(y, x, rate)));
            }),
            Device::Cuda(_) => elements::move_towards(self, x, rate)?,
        }
        Ok(())
    }
}

#[inline(always)]
fn follow<T: Float, A: Arch>(y: &mut [T], x: &[T], rate: T) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = A::mul_add(rate, x - *y, *y);
    }
}
