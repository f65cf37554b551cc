//! CPU kernels of [`layer_norm`](super::layer_norm): one pass over each row forward, and one backward.

use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::lanes::{sum_map, sum_map2, sum_map3};
use tensor::cpu::parallel::{GRAIN, Out, add_rows, sum_in_pieces};
use tensor::{Float, simd};

pub fn forward<T: Float>(x: &[T], weight: &[T], bias: &[T], epsilon: T, y: &mut [T], [mean, rstd]: [&mut [T]; 2]) {
    let channels = weight.len();
    if channels == 0 {
        return;
    }
    let rows = (GRAIN / channels).max(1);
    y.par_chunks_mut(rows * channels)
        .zip(x.par_chunks(rows * channels))
        .zip(mean.par_chunks_mut(rows).zip(rstd.par_chunks_mut(rows)))
        .for_each(|((y, x), (mean, rstd))| simd!(A => forward_rows::<T, A>(x, weight, bias, epsilon, y, mean, rstd)));
}

#[inline(always)]
fn forward_rows<T: Float, A: Arch>(
    x: &[T],
    weight: &[T],
    bias: &[T],
    epsilon: T,
    y: &mut [T],
    mean: &mut [T],
    rstd: &mut [T],
) {
    let channels = weight.len();
    let inverse = T::one() / T::of(channels as f64);
    for (row, (x, y)) in x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)).enumerate() {
        let m = sum_map(x, |x| x) * inverse;
        let variance = sum_map(x, |x| (x - m) * (x - m)) * inverse;
        let r = T::one() / (variance + epsilon).sqrt();
        (mean[row], rstd[row]) = (m, r);
        for (((y, &x), &weight), &bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
            *y = A::mul_add((x - m) * r, weight, bias);
        }
    }
}

pub fn backward<T: Float>(
    dy: &[T],
    x: &[T],
    weight: &[T],
    [mean, rstd]: [&[T]; 2],
    [dx, dweight, dbias]: [Option<Out<'_, T>>; 3],
) {
    let channels = weight.len();
    if channels == 0 {
        return;
    }
    if let Some(dx) = dx {
        let rows = (GRAIN / channels).max(1);
        let accumulate = dx.accumulate;
        dx.data
            .par_chunks_mut(rows * channels)
            .zip(dy.par_chunks(rows * channels).zip(x.par_chunks(rows * channels)))
            .zip(mean.par_chunks(rows).zip(rstd.par_chunks(rows)))
            .for_each(|((data, (dy, x)), (mean, rstd))| {
                simd!(A => backward_rows::<T, A>(dy, x, weight, mean, rstd, Out { data, accumulate }));
            });
    }
    if let Some(dweight) = dweight {
        sum_in_pieces(mean.len(), channels, channels, dweight, |range, sum| {
            let block = range.start * channels..range.end * channels;
            let (mean, rstd) = (&mean[range.clone()], &rstd[range]);
            simd!(A => weight_rows::<T, A>(&dy[block.clone()], &x[block.clone()], mean, rstd, sum));
        });
    }
    if let Some(dbias) = dbias {
        sum_in_pieces(mean.len(), channels, channels, dbias, |range, sum| {
            simd!(_A => add_rows(&dy[range.start * channels..range.end * channels], sum));
        });
    }
}

/// dx = r·(g − mean(g) − x̂·mean(g·x̂)), g = γ·dy
#[inline(always)]
fn backward_rows<T: Float, A: Arch>(dy: &[T], x: &[T], weight: &[T], mean: &[T], rstd: &[T], out: Out<'_, T>) {
    let channels = weight.len();
    let inverse = T::one() / T::of(channels as f64);
    let rows = dy.chunks_exact(channels).zip(x.chunks_exact(channels)).zip(out.data.chunks_exact_mut(channels));
    for (row, ((dy, x), dx)) in rows.enumerate() {
        let (m, r) = (mean[row], rstd[row]);
        let mean_g = sum_map2(dy, weight, |dy, weight| dy * weight) * inverse;
        let mean_gx = sum_map3(dy, x, weight, |dy, x, weight| dy * weight * (x - m));
        let mean_gx = mean_gx * r * inverse;
        for (((dx, &dy), &x), &weight) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
            let value = r * (A::mul_add(dy, weight, -mean_g) - (x - m) * r * mean_gx);
            *dx = if out.accumulate { *dx + value } else { value };
        }
    }
}

#[inline(always)]
fn weight_rows<T: Float, A: Arch>(dy: &[T], x: &[T], mean: &[T], rstd: &[T], sum: &mut [T]) {
    let channels = sum.len();
    for (row, (dy, x)) in dy.chunks_exact(channels).zip(x.chunks_exact(channels)).enumerate() {
        let (m, r) = (mean[row], rstd[row]);
        for ((sum, &dy), &x) in sum.iter_mut().zip(dy).zip(x) {
            *sum = A::mul_add(dy, (x - m) * r, *sum);
        }
    }
}
