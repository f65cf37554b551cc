//! CPU kernels of [`linear`](super::linear).

use rayon::prelude::*;
use tensor::Float;
use tensor::cpu::gemm::{Mat, gemm};
use tensor::cpu::parallel::{GRAIN, Out, put, sum_in_pieces};

/// y (R, O) = x (R, I) · weight (O, I)ᵀ + bias (O).
pub fn forward<T: Float>(x: &[T], weight: &[T], bias: Option<&[T]>, [outputs, inputs]: [usize; 2], y: &mut [T]) {
    if outputs == 0 {
        return;
    }
    let rows = y.len() / outputs;
    // The product adds to a result that starts as the bias.
    if let Some(bias) = bias {
        let rows_per_task = (GRAIN / outputs).max(1);
        y.par_chunks_mut(rows_per_task * outputs)
            .for_each(|rows| rows.chunks_exact_mut(outputs).for_each(|row| row.copy_from_slice(bias)));
    }
    let out = Out { data: y, accumulate: bias.is_some() };
    gemm(Mat::new(x, rows, inputs), Mat::new(weight, outputs, inputs).t(), out);
}

/// dx (R, I), dweight (O, I) and dbias (O) from dy (R, O).
pub fn backward<T: Float>(
    dy: &[T],
    x: &[T],
    weight: &[T],
    [outputs, inputs]: [usize; 2],
    [dx, dweight, dbias]: [Option<Out<'_, T>>; 3],
) {
    let rows = dy.len().checked_div(outputs).unwrap_or(0);
    let dy_matrix = Mat::new(dy, rows, outputs);
    if let Some(dx) = dx {
        gemm(dy_matrix, Mat::new(weight, outputs, inputs), dx);
    }
    if let Some(dweight) = dweight {
        gemm(dy_matrix.t(), Mat::new(x, rows, inputs), dweight);
    }
    if let Some(dbias) = dbias {
        sum_in_pieces(rows, outputs, outputs, dbias, |range, sum| {
            for row in dy[range.start * outputs..range.end * outputs].chunks_exact(outputs) {
                put(sum, row, true);
            }
        });
    }
}
