//! CPU kernels of [`layer_norm`](super::layer_norm): one pass over each row forward, and one backward.

use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::lanes::{sum_map, sum_map2, sum_map3};
use tensor::cpu::parallel::{GRAIN, Interleaved, Out, sum_in_pieces};
use tensor::{Float, simd};

/// y (R, C), and each row's mean and 1/√(variance + ε).
pub fn forward<T: Float>(x: &[T], weight: &[T], bias: &[T], epsilon: T, y: &mut [T], [mean, rstd]: [&mut [T]; 2]) {
    let channels = weight.len();
    if channels == 0 {
        return;
    }
    let rows = (GRAIN / channels).max(1);
    y.par_chunks_mut(rows * channels)
        .zip(x.par_chunks(rows * channels))
        .zip(mean.par_chunks_mut(rows).zip(rstd.par_chunks_mut(rows)))
        .for_each(|((y, x), (mean, rstd))| simd!(A => forward_rows::<T, A>(x, [weight, bias], epsilon, y, mean, rstd)));
}

#[inline(always)]
fn forward_rows<T: Float, A: Arch>(x: &[T], scale: [&[T]; 2], epsilon: T, y: &mut [T], mean: &mut [T], rstd: &mut [T]) {
    let channels = scale[0].len();
    let inverse = T::one() / T::of(channels as f64);
    for (row, (x, y)) in x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)).enumerate() {
        let m = sum_map(x, |x| x) * inverse;
        let variance = sum_map(x, |x| (x - m) * (x - m)) * inverse;
        let r = T::one() / (variance + epsilon).sqrt();
        (mean[row], rstd[row]) = (m, r);
        normalise::<T, A>(x, scale, [m, r], y);
    }
}

/// A row's γ·x̂ + β.
#[inline(always)]
fn normalise<T: Float, A: Arch>(x: &[T], [weight, bias]: [&[T]; 2], [mean, rstd]: [T; 2], y: &mut [T]) {
    for (((y, &x), &weight), &bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
        *y = A::mul_add((x - mean) * rstd, weight, bias);
    }
}

/// y again, from the rows' means and 1/√(variance + ε).
pub fn again<T: Float>(x: &[T], weight: &[T], bias: &[T], [mean, rstd]: [&[T]; 2], y: &mut [T]) {
    let channels = weight.len();
    if channels == 0 {
        return;
    }
    let rows = (GRAIN / channels).max(1);
    y.par_chunks_mut(rows * channels)
        .zip(x.par_chunks(rows * channels))
        .zip(mean.par_chunks(rows).zip(rstd.par_chunks(rows)))
        .for_each(|((y, x), (mean, rstd))| {
            simd!(A => {
                let rows = x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)).zip(mean.iter().zip(rstd));
                rows.for_each(|((x, y), (&mean, &rstd))| normalise::<T, A>(x, [weight, bias], [mean, rstd], y));
            });
        });
}

/// dx (R, C), dweight (C) and dbias (C) from dy (R, C).
pub fn backward<T: Float>(
    dy: &[T],
    x: &[T],
    weight: &[T],
    [mean, rstd]: [&[T]; 2],
    [dx, dweight, dbias]: [Option<Out<'_, T>>; 3],
) {
    let channels = weight.len();
    let accumulate = dx.as_ref().is_some_and(|dx| dx.accumulate);
    let dx = dx.map(|dx| Interleaved::new(dx.data));
    let mut sums = vec![T::zero(); 2 * channels];
    sum_in_pieces(mean.len(), channels, sums.len(), Out::store(&mut sums), |rows, sums| {
        let block = rows.start * channels..rows.end * channels;
        let moments = [&mean[rows.clone()], &rstd[rows]];
        // SAFETY: no two pieces have a row in common.
        let data = dx.map(|dx| unsafe { dx.part(block.clone()) });
        let dx = data.map(|data| Out { data, accumulate });
        simd!(A => backward_rows::<T, A>(&dy[block.clone()], &x[block.clone()], weight, moments, dx, sums));
    });
    let (of_weight, of_bias) = sums.split_at(channels);
    dweight.into_iter().for_each(|mut dweight| dweight.put(of_weight));
    dbias.into_iter().for_each(|mut dbias| dbias.put(of_bias));
}

/// dx = r·(g − mean(g) − x̂·mean(g·x̂)), g = γ·dy; and the rows' dγ = Σ dy·x̂ and dβ = Σ dy are added to `sums`.
#[inline(always)]
fn backward_rows<T: Float, A: Arch>(
    dy: &[T],
    x: &[T],
    weight: &[T],
    [mean, rstd]: [&[T]; 2],
    mut dx: Option<Out<'_, T>>,
    sums: &mut [T],
) {
    let channels = weight.len();
    let inverse = T::one() / T::of(channels as f64);
    let (dweight, dbias) = sums.split_at_mut(channels);
    for (row, (dy, x)) in dy.chunks_exact(channels).zip(x.chunks_exact(channels)).enumerate() {
        let (m, r) = (mean[row], rstd[row]);
        for (((dweight, dbias), &dy), &x) in dweight.iter_mut().zip(&mut *dbias).zip(dy).zip(x) {
            *dweight = A::mul_add(dy, (x - m) * r, *dweight);
            *dbias += dy;
        }
        let Some(dx) = &mut dx else { continue };
        let to = &mut dx.data[row * channels..(row + 1) * channels];
        let mean_g = sum_map2(dy, weight, |dy, weight| dy * weight) * inverse;
        let mean_gx = sum_map3(dy, x, weight, |dy, x, weight| dy * weight * (x - m)) * r * inverse;
        for (((to, &dy), &x), &weight) in to.iter_mut().zip(dy).zip(x).zip(weight) {
            let value = r * (A::mul_add(dy, weight, -mean_g) - (x - m) * r * mean_gx);
            *to = if dx.accumulate { *to + value } else { value };
        }
    }
}
