//! CPU kernels of [`batch_norm`](super): sums over rows, then one pass over the elements.

use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{Out, add_rows, items_per_task, sum_in_pieces};
use tensor::{Float, Tensor, simd};

/// Where the statistics come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// From the batch itself.
    Train,
    /// From outside.
    Eval,
}

/// Mean, unbiased variance and 1/√(biased variance + ε) of each channel of x (R, C), R ≥ 2.
///
/// A first pass gives a mean m that is off by the rounding of a long sum. The second sums d = x − m and d²: the
/// true mean is m + Σd/R, and the true squares about it are Σd² − (Σd)²/R.
pub fn statistics<T: Float>(x: &[T], epsilon: T, [mean, variance, rstd]: [&mut [T]; 3]) {
    let channels = mean.len();
    if channels == 0 {
        return;
    }
    let rows = x.len() / channels;
    let inverse = T::one() / T::of(rows as f64);
    let block = |rows: std::ops::Range<usize>| &x[rows.start * channels..rows.end * channels];
    sum_in_pieces(rows, channels, channels, Out::store(&mut *mean), |rows, sum| {
        add_rows(block(rows), sum);
    });
    mean.iter_mut().for_each(|mean| *mean *= inverse);

    let mut sums = Tensor::empty([2, channels], T::DTYPE);
    let sums = sums.as_mut_slice::<T>("batch_norm").expect("invariant: a new tensor is contiguous and unshared");
    sum_in_pieces(rows, 2 * channels, 2 * channels, Out::store(&mut *sums), |rows, sums| {
        simd!(A => sum_deviations::<T, A>(block(rows), mean, sums));
    });
    let (deviations, squares) = sums.split_at(channels);
    let degrees = T::of((rows - 1) as f64);
    for c in 0..channels {
        let squares = (squares[c] - deviations[c] * deviations[c] * inverse).max(T::zero());
        mean[c] += deviations[c] * inverse;
        variance[c] = squares / degrees;
        rstd[c] = T::one() / (squares * inverse + epsilon).sqrt();
    }
}

/// 1/√(variance + ε).
pub fn reciprocal_deviation<T: Float>(variance: &[T], epsilon: T, rstd: &mut [T]) {
    rstd.iter_mut().zip(variance).for_each(|(rstd, &variance)| *rstd = T::one() / (variance + epsilon).sqrt());
}

#[inline(always)]
fn sum_deviations<T: Float, A: Arch>(x: &[T], mean: &[T], sums: &mut [T]) {
    let (deviations, squares) = sums.split_at_mut(mean.len());
    for x in x.chunks_exact(mean.len()) {
        for (((deviation, square), &x), &mean) in deviations.iter_mut().zip(&mut *squares).zip(x).zip(mean) {
            let d = x - mean;
            *deviation += d;
            *square = A::mul_add(d, d, *square);
        }
    }
}

/// γ·r of each channel, in a buffer of the pool.
fn scale_of<'a, T: Float>(weight: &[T], rstd: &[T], buffer: &'a mut Tensor) -> &'a [T] {
    let scale = buffer.as_mut_slice::<T>("batch_norm").expect("invariant: a new tensor is contiguous and unshared");
    scale.iter_mut().zip(weight).zip(rstd).for_each(|((scale, &weight), &r)| *scale = weight * r);
    scale
}

/// y = (x − μ)·γr + β.
pub fn forward<T: Float>(x: &[T], weight: &[T], bias: &[T], [mean, rstd]: [&[T]; 2], y: &mut [T]) {
    let channels = weight.len();
    if channels == 0 {
        return;
    }
    let mut scale = Tensor::empty([channels], T::DTYPE);
    let scale = scale_of(weight, rstd, &mut scale);
    let block = items_per_task(channels) * channels;
    y.par_chunks_mut(block).zip(x.par_chunks(block)).for_each(|(y, x)| {
        simd!(A => forward_rows::<T, A>(x, scale, bias, mean, y));
    });
}

#[inline(always)]
fn forward_rows<T: Float, A: Arch>(x: &[T], scale: &[T], bias: &[T], mean: &[T], y: &mut [T]) {
    let channels = scale.len();
    for (x, y) in x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)) {
        for ((((y, &x), &mean), &scale), &bias) in y.iter_mut().zip(x).zip(mean).zip(scale).zip(bias) {
            *y = A::mul_add(x - mean, scale, bias);
        }
    }
}

/// dx (R, C), dweight (C) and dbias (C) from dy (R, C).
pub fn backward<T: Float>(
    dy: &[T],
    x: &[T],
    weight: &[T],
    [mean, rstd]: [&[T]; 2],
    mode: Mode,
    [dx, dweight, dbias]: [Option<Out<'_, T>>; 3],
) {
    let channels = weight.len();
    if channels == 0 {
        return;
    }
    let rows = dy.len() / channels;
    let mut sums = Tensor::empty([2, channels], T::DTYPE);
    let sums = sums.as_mut_slice::<T>("batch_norm").expect("invariant: a new tensor is contiguous and unshared");
    if mode == Mode::Train || dweight.is_some() || dbias.is_some() {
        sum_in_pieces(rows, 2 * channels, 2 * channels, Out::store(&mut *sums), |rows, sums| {
            let block = rows.start * channels..rows.end * channels;
            simd!(A => sum_gradients::<T, A>(&dy[block.clone()], &x[block], mean, sums));
        });
    } else {
        sums.fill(T::zero());
    }
    // Σ dy and Σ dy·x̂: the gradients of β and γ.
    let (sum_dy, sum_dy_x) = sums.split_at_mut(channels);
    sum_dy_x.iter_mut().zip(rstd).for_each(|(sum, &r)| *sum *= r);
    if let Some(mut dweight) = dweight {
        dweight.put(sum_dy_x);
    }
    if let Some(mut dbias) = dbias {
        dbias.put(sum_dy);
    }
    let Some(dx) = dx else { return };
    let mut scale = Tensor::empty([channels], T::DTYPE);
    let scale = scale_of(weight, rstd, &mut scale);
    // In place of the sums: what dx takes off, dβ/R and r·dγ/R; nothing in evaluation.
    let inverse = T::one() / T::of(rows as f64);
    sum_dy.iter_mut().for_each(|sum| *sum *= inverse);
    sum_dy_x.iter_mut().zip(rstd).for_each(|(sum, &r)| *sum *= r * inverse);
    let block = items_per_task(channels) * channels;
    let accumulate = dx.accumulate;
    dx.data.par_chunks_mut(block).zip(dy.par_chunks(block).zip(x.par_chunks(block))).for_each(|(data, (dy, x))| {
        let out = Out { data, accumulate };
        match mode {
            Mode::Train => simd!(A => train_rows::<T, A>(dy, x, mean, scale, [sum_dy, sum_dy_x], out)),
            Mode::Eval => simd!(A => eval_rows::<T, A>(dy, scale, out)),
        }
    });
}

/// Σ dy and Σ dy·(x − μ).
#[inline(always)]
fn sum_gradients<T: Float, A: Arch>(dy: &[T], x: &[T], mean: &[T], sums: &mut [T]) {
    let channels = mean.len();
    let (sum_dy, sum_dy_x) = sums.split_at_mut(channels);
    for (dy, x) in dy.chunks_exact(channels).zip(x.chunks_exact(channels)) {
        for c in 0..channels {
            sum_dy[c] += dy[c];
            sum_dy_x[c] = A::mul_add(dy[c], x[c] - mean[c], sum_dy_x[c]);
        }
    }
}

/// dx = γr·(dy − dβ/R − (x − μ)·(r·dγ/R))
#[inline(always)]
fn train_rows<T: Float, A: Arch>(
    dy: &[T],
    x: &[T],
    mean: &[T],
    scale: &[T],
    [by_mean, by_deviation]: [&[T]; 2],
    out: Out<'_, T>,
) {
    let channels = mean.len();
    let rows = dy.chunks_exact(channels).zip(x.chunks_exact(channels)).zip(out.data.chunks_exact_mut(channels));
    for ((dy, x), dx) in rows {
        for c in 0..channels {
            let value = scale[c] * A::mul_add(mean[c] - x[c], by_deviation[c], dy[c] - by_mean[c]);
            dx[c] = if out.accumulate { dx[c] + value } else { value };
        }
    }
}

/// dx = γr·dy
#[inline(always)]
fn eval_rows<T: Float, A: Arch>(dy: &[T], scale: &[T], out: Out<'_, T>) {
    let channels = scale.len();
    for (dy, dx) in dy.chunks_exact(channels).zip(out.data.chunks_exact_mut(channels)) {
        for ((dx, &dy), &scale) in dx.iter_mut().zip(dy).zip(scale) {
            *dx = if out.accumulate { A::mul_add(dy, scale, *dx) } else { dy * scale };
        }
    }
}
