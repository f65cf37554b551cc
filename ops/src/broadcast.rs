//! What element-by-element operations of two operands share: walking them together by NumPy's
//! broadcasting rule, and adding a gradient up over the axes along which an operand was repeated.

use rayon::prelude::*;
use tensor::cpu::parallel::{GRAIN, Out, put};
use tensor::{Float, Result, Shape, Strides, Tensor};

/// out[i] = f(a[i], b[i]) over the common shape.
pub fn zip<T: Float>(op: &'static str, a: &Tensor, b: &Tensor, f: impl Fn(T, T) -> T + Sync) -> Result<Tensor> {
    let shape = a.shape().broadcast(b.shape(), op)?;
    let mut out = Tensor::empty(shape.clone(), T::DTYPE);
    let result = out.as_mut_slice::<T>(op)?;
    if a.shape() == b.shape() && a.is_contiguous() && b.is_contiguous() {
        let (a, b) = (a.as_slice::<T>(op)?, b.as_slice::<T>(op)?);
        result.par_chunks_mut(GRAIN).zip(a.par_chunks(GRAIN)).zip(b.par_chunks(GRAIN)).for_each(|((out, a), b)| {
            out.iter_mut().zip(a.iter().zip(b)).for_each(|(out, (&a, &b))| *out = f(a, b));
        });
        return Ok(out);
    }
    let (a, b) = (a.broadcast_to(shape.clone())?, b.broadcast_to(shape.clone())?);
    let (a_data, b_data) = (a.as_strided_slice::<T>(op)?, b.as_strided_slice::<T>(op)?);
    let cols = shape.last().copied().unwrap_or(1);
    let last = |t: &Tensor| t.strides().last().copied().unwrap_or(0);
    let (a_step, b_step) = (last(&a), last(&b));
    let rows_per_task = (GRAIN / cols.max(1)).max(1);
    result.par_chunks_mut((rows_per_task * cols).max(1)).enumerate().for_each(|(task, rows)| {
        for (row, out) in rows.chunks_mut(cols.max(1)).enumerate() {
            let row = task * rows_per_task + row;
            let (a_start, b_start) = (row_start(row, &a), row_start(row, &b));
            match (a_step, b_step) {
                (1, 1) => {
                    let (a, b) = (&a_data[a_start..][..cols], &b_data[b_start..][..cols]);
                    out.iter_mut().zip(a.iter().zip(b)).for_each(|(out, (&a, &b))| *out = f(a, b));
                }
                _ => out.iter_mut().enumerate().for_each(|(i, out)| {
                    *out = f(a_data[a_start + i * a_step], b_data[b_start + i * b_step]);
                }),
            }
        }
    });
    Ok(out)
}

/// Where the `row`-th run along the last axis starts, in elements.
fn row_start(mut row: usize, t: &Tensor) -> usize {
    let mut start = 0;
    for axis in (0..t.rank().saturating_sub(1)).rev() {
        let extent = t.shape()[axis];
        start += row % extent * t.strides()[axis];
        row /= extent;
    }
    start
}

/// Adds `gradient` up over the axes along which an operand of shape `to` was repeated, in order.
pub fn reduce<T: Float>(op: &'static str, gradient: &Tensor, to: &Shape, mut out: Out<'_, T>) -> Result<()> {
    let elements = gradient.as_slice::<T>(op)?;
    if gradient.shape() == to {
        out.put(elements);
        return Ok(());
    }
    let whole = gradient.shape();
    // The common case of a bias: only leading axes are repeated.
    let kept: usize = to.iter().product();
    if whole.ends_with(to) && kept > 0 {
        let sum = |range: std::ops::Range<usize>, sum: &mut [T]| {
            for row in elements[range.start * kept..range.end * kept].chunks_exact(kept) {
                put(sum, row, true);
            }
        };
        tensor::cpu::parallel::sum_in_pieces(elements.len() / kept, kept, kept, out, sum);
        return Ok(());
    }
    if !out.accumulate {
        out.data.fill(T::zero());
    }
    let added = whole.len() - to.len();
    let small = to.contiguous_strides();
    let strides: Strides = (0..whole.len())
        .map(|axis| if axis < added || to[axis - added] == 1 { 0 } else { small[axis - added] })
        .collect();
    for (place, &element) in elements.iter().enumerate() {
        let mut rest = place;
        let mut target = 0;
        for axis in (0..whole.len()).rev() {
            target += rest % whole[axis] * strides[axis];
            rest /= whole[axis];
        }
        out.data[target] += element;
    }
    Ok(())
}
