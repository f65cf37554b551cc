//! CPU kernel of [`drop_path`](super::drop_path), which is the same forward and backward.

use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{GRAIN, Out, put};
use tensor::{Float, simd};

/// Row r of `out`: row `rows[r]` of x times `scale`, or zero; plus a residual's row r, if there is one.
pub fn apply<T: Float>(x: &[T], residual: Option<&[T]>, rows: &[Option<usize>], scale: f64, out: Out<'_, T>) {
    let row = out.data.len().checked_div(rows.len()).unwrap_or(0);
    let accumulate = out.accumulate || residual.is_some();
    // The pieces are cut regardless of the rows, as there may be few large ones or many small ones.
    out.data.par_chunks_mut(GRAIN).enumerate().for_each(|(part, data)| {
        let start = part * GRAIN;
        if let Some(residual) = residual {
            put(data, &residual[start..start + data.len()], out.accumulate);
        }
        simd!(A => apply_part::<T, A>(x, (rows, row), scale, start, Out { data, accumulate }));
    });
}

/// Processes the elements from `start` on; a row has `row` elements.
#[inline(always)]
fn apply_part<T: Float, A: Arch>(
    x: &[T],
    (rows, row): (&[Option<usize>], usize),
    scale: f64,
    start: usize,
    out: Out<'_, T>,
) {
    let scale = T::of(scale);
    let mut done = 0;
    while done < out.data.len() {
        let (r, column) = ((start + done) / row, (start + done) % row);
        let length = (row - column).min(out.data.len() - done);
        let y = &mut out.data[done..done + length];
        done += length;
        if let Some(from) = rows[r] {
            for (y, &x) in y.iter_mut().zip(&x[from * row + column..]) {
                *y = A::mul_add(x, scale, if out.accumulate { *y } else { T::zero() });
            }
        } else if !out.accumulate {
            y.fill(T::zero());
        }
    }
}
