//! What element-wise operations with two operands share: iterating over both by NumPy's broadcasting rule, and summing
//! a gradient over the axes along which an operand was broadcast.

pub mod cpu;
pub mod cuda;

use autograd::{InputGrads, Result};
use std::ops::RangeInclusive;
use tensor::{DType, Device, Shape, Tensor, match_float};

/// Gives an operand of shape `to` and type `dtype` its gradient: `gradient`, summed over the axes along which the
/// operand was broadcast.
pub fn give(
    op: &'static str,
    grads: &mut InputGrads<'_, '_>,
    input: usize,
    gradient: Tensor,
    (to, dtype): (&Shape, DType),
) -> Result<()> {
    if gradient.shape() == to {
        let gradient = if gradient.dtype() == dtype { gradient } else { gradient.cast(dtype)? };
        return grads.give(input, gradient);
    }
    let mut slot = grads.open(input)?;
    match gradient.device() {
        Device::Cpu => match_float!(gradient.dtype(), op, T => {
            if let Some(out) = slot.out::<T>()? {
                cpu::reduce(op, &gradient, to, out)?;
            }
        }),
        // The sums of a parameter that was rounded are not.
        Device::Cuda(_) => {
            if let Some(out) = slot.out_on_gpu()? {
                cuda::reduce(op, &gradient, to, out)?;
            }
        }
    }
    grads.close(slot);
    Ok(())
}

/// The last run of neighbouring axes of `whole` along which an operand of shape `to` was broadcast, and whether there
/// are others before it; `None` if there are no such axes.
fn last_repeated(whole: &Shape, to: &Shape) -> Option<(RangeInclusive<usize>, bool)> {
    let added = whole.len() - to.len();
    let repeated = |&axis: &usize| axis < added || whole[axis] != to[axis - added];
    let last = (0..whole.len()).rev().find(repeated)?;
    let first = (0..last).rev().take_while(repeated).last().unwrap_or(last);
    Some((first..=last, (0..first).any(|axis| repeated(&axis))))
}

/// The shape `whole` with the extents along `axes` set to 1.
fn summed(whole: &Shape, axes: &RangeInclusive<usize>) -> Shape {
    (0..whole.len()).map(|axis| if axes.contains(&axis) { 1 } else { whole[axis] }).collect()
}
