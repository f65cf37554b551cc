//! CPU kernels of [`broadcast`](super).

use super::{last_repeated, summed};
use rayon::prelude::*;
use tensor::cpu::lanes::sum_map;
use tensor::cpu::parallel::{GRAIN, Out, add_rows, items_per_task, sum_in_pieces};
use tensor::{Float, Result, Shape, Tensor, simd};

/// out[i] = f(a[i], b[i]) over the common shape.
pub fn zip<T: Float>(op: &'static str, a: &Tensor, b: &Tensor, f: impl Fn(T, T) -> T + Sync) -> Result<Tensor> {
    let shape = a.shape().broadcast(b.shape(), op)?;
    let mut out = Tensor::empty(shape.clone(), T::DTYPE);
    let result = out.as_mut_slice::<T>(op)?;
    if a.shape() == b.shape() && a.is_contiguous() && b.is_contiguous() {
        let (a, b) = (a.as_slice::<T>(op)?, b.as_slice::<T>(op)?);
        result.par_chunks_mut(GRAIN).zip(a.par_chunks(GRAIN)).zip(b.par_chunks(GRAIN)).for_each(|((out, a), b)| {
            simd!(_A => out.iter_mut().zip(a.iter().zip(b)).for_each(|(out, (&a, &b))| *out = f(a, b)));
        });
        return Ok(out);
    }
    let (a, b) = (a.broadcast_to(shape.clone())?, b.broadcast_to(shape.clone())?);
    let (a_data, b_data) = (a.as_strided_slice::<T>(op)?, b.as_strided_slice::<T>(op)?);
    let cols = shape.last().copied().unwrap_or(1);
    let last = |t: &Tensor| t.strides().last().copied().unwrap_or(0);
    let (a_step, b_step) = (last(&a), last(&b));
    let rows_per_task = items_per_task(cols);
    result.par_chunks_mut((rows_per_task * cols).max(1)).enumerate().for_each(|(task, rows)| {
        simd!(_A => for (row, out) in rows.chunks_mut(cols.max(1)).enumerate() {
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
        });
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

/// Sums `gradient` over the axes along which an operand of shape `to` was broadcast, in a fixed order: first over the
/// last run of neighbouring broadcast axes, then over the remaining ones.
pub fn reduce<T: Float>(op: &'static str, gradient: &Tensor, to: &Shape, mut out: Out<'_, T>) -> Result<()> {
    let elements = gradient.as_slice::<T>(op)?;
    let whole = gradient.shape();
    let Some((axes, others)) = last_repeated(whole, to) else {
        out.put(elements);
        return Ok(());
    };
    let (first, last) = (*axes.start(), *axes.end());
    let extents = [whole[first..=last].iter().product(), whole[last + 1..].iter().product()];
    if !others {
        sum_middle(elements, extents, out);
        return Ok(());
    }
    let mut sums = Tensor::empty(summed(whole, &axes), T::DTYPE);
    sum_middle(elements, extents, Out::store(sums.as_mut_slice(op)?));
    reduce(op, &sums, to, out)
}

/// out (O, I) = Σ x (O, S, I) over S; `extents` are S and I.
fn sum_middle<T: Float>(x: &[T], [summed, inner]: [usize; 2], Out { data, accumulate }: Out<'_, T>) {
    let block = summed * inner;
    let add = |rows: &[T], sum: &mut [T]| match sum {
        [sum] => *sum += sum_map(rows, |x| x),
        _ => add_rows(rows, sum),
    };
    let outputs = data.par_chunks_mut(inner.max(1)).enumerate();
    if block > GRAIN {
        outputs.for_each(|(place, data)| {
            let rows = &x[place * block..][..block];
            sum_in_pieces(summed, inner, inner, Out { data, accumulate }, |range, sum| {
                add(&rows[range.start * inner..range.end * inner], sum);
            });
        });
    } else {
        outputs.with_min_len(items_per_task(block)).for_each(|(place, data)| {
            if !accumulate {
                data.fill(T::zero());
            }
            add(&x[place * block..][..block], data);
        });
    }
}
