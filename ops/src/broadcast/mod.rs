//! What element-by-element operations of two operands share: walking them together by NumPy's
//! broadcasting rule, and adding a gradient up over the axes along which an operand was repeated.

pub mod cpu;
pub mod cuda;

use autograd::{InputGrads, Result};
use std::ops::RangeInclusive;
use tensor::{Device, Shape, Tensor, match_float};

/// Gives the gradient of an operand of shape `to`: `gradient`, added up over the axes along which the operand was repeated.
pub fn give(
    op: &'static str,
    grads: &mut InputGrads<'_, '_>,
    input: usize,
    gradient: Tensor,
    to: &Shape,
) -> Result<()> {
    if gradient.shape() == to {
        return grads.give(input, gradient);
    }
    let mut slot = grads.open(input)?;
    match gradient.device() {
        Device::Cpu => match_float!(gradient.dtype(), op, T => {
            if let Some(out) = slot.out::<T>()? {
                cpu::reduce(op, &gradient, to, out)?;
            }
        }),
        Device::Cuda(_) => slot.out_on_gpu()?.map_or(Ok(()), |out| cuda::reduce(op, &gradient, to, out))?,
    }
    grads.close(slot);
    Ok(())
}

/// The last run of neighbouring axes of `whole` along which an operand of shape `to` was repeated, and whether there are
/// others before it.
fn last_repeated(whole: &Shape, to: &Shape) -> Option<(RangeInclusive<usize>, bool)> {
    let added = whole.len() - to.len();
    let repeated = |&axis: &usize| axis < added || whole[axis] != to[axis - added];
    let last = (0..whole.len()).rev().find(repeated)?;
    let first = (0..last).rev().take_while(repeated).last().unwrap_or(last);
    Some((first..=last, (0..first).any(|axis| repeated(&axis))))
}

/// A shape with extents of 1 along some of its axes.
fn summed(whole: &Shape, axes: &RangeInclusive<usize>) -> Shape {
    (0..whole.len()).map(|axis| if axes.contains(&axis) { 1 } else { whole[axis] }).collect()
}
