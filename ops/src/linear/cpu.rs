//! CPU kernels of [`linear`](super::linear).

use rayon::prelude::*;
use tensor::cpu::factor::Factor;
use tensor::cpu::gemm::{Mat, gemm, gemm_by_rows, gemm_plus_row};
use tensor::cpu::packed::{Packed, Right};
use tensor::cpu::parallel::{GRAIN, Out, put, sum_rows};
use tensor::simd;

/// The transpose of a weight (O, I), for one product.
pub fn transposed<F: Factor>(weight: &[F], [outputs, inputs]: [usize; 2]) -> Right<'_, F> {
    Mat::new(weight, outputs, inputs).t().into()
}

/// The same for many products.
pub fn pack<F: Factor>(weight: &[F], [outputs, inputs]: [usize; 2]) -> Packed<F> {
    Packed::new(Mat::new(weight, outputs, inputs).t())
}

/// y (R, O) = x (R, I) · weight (O, I)ᵀ + bias (O) + residual (R, O).
pub fn forward<F: Factor>(
    x: &[F::Sum],
    weight: Right<'_, F>,
    bias: Option<&[F]>,
    residual: Option<&[F::Sum]>,
    [outputs, inputs]: [usize; 2],
    y: &mut [F::Sum],
) {
    if outputs == 0 {
        return;
    }
    let x = Mat::new(x, y.len() / outputs, inputs);
    match bias {
        Some(bias) => gemm_plus_row(x, weight, bias, y),
        None => gemm_by_rows(x, weight, Out::store(y)),
    }
    if let Some(residual) = residual {
        // While y is still in a cache.
        y.par_chunks_mut(GRAIN).zip(residual.par_chunks(GRAIN)).for_each(|(y, residual)| {
            simd!(_A => put(y, residual, true));
        });
    }
}

/// dx (R, I), dweight (O, I) and dbias (O) from dy (R, O).
pub fn backward<F: Factor>(
    dy: &[F::Sum],
    x: &[F::Sum],
    weight: &[F],
    [outputs, inputs]: [usize; 2],
    [dx, dweight, dbias]: [Option<Out<'_, F::Sum>>; 3],
) {
    let rows = dy.len().checked_div(outputs).or(x.len().checked_div(inputs)).unwrap_or(0);
    let dy_matrix = Mat::new(dy, rows, outputs);
    if let Some(dx) = dx {
        gemm(dy_matrix, Mat::new(weight, outputs, inputs), dx);
    }
    if let Some(dweight) = dweight {
        let mut room = None;
        gemm::<F>(dy_matrix.t(), Mat::new(F::factors(x, &mut room), rows, inputs), dweight);
    }
    if let Some(dbias) = dbias {
        sum_rows(dy, dbias);
    }
}
