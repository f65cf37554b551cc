//! CPU kernels of [`batch_norm`](super): sums over rows, then one pass over the elements. GELU processes each block of
//! rows while it is in the cache.

use super::Mode;
use crate::epsilon::reciprocal_root;
use crate::gelu;
use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{Out, add_rows, items_per_task, sum_in_pieces, sum_rows};
use tensor::{Float, Scratch, simd};

/// Mean, unbiased variance and 1/√(biased variance + ε) of each channel of x (R, C), R ≥ 2.
///
/// A first pass gives a mean m that carries the rounding error of a long sum. The second sums d = x − m and d²: the
/// true mean is m + Σd/R, and the true sum of squared deviations from it is Σd² − (Σd)²/R.
pub fn statistics<T: Float>(x: &[T], epsilon: T, [mean, variance, rstd]: [&mut [T]; 3]) {
    let channels = mean.len();
    if channels == 0 {
        return;
    }
    let rows = x.len() / channels;
    let inverse = T::one() / T::of(rows as f64);
    let block = |rows: std::ops::Range<usize>| &x[rows.start * channels..rows.end * channels];
    sum_rows(x, Out::store(&mut *mean));
    mean.iter_mut().for_each(|mean| *mean *= inverse);

    let mut sums = Scratch::<T>::new(2 * channels);
    let mut room = None;
    let [means] = repeated([mean], &mut room);
    sum_in_pieces(rows, 2 * channels, 2 * channels, Out::store(&mut sums), |rows, sums| {
        in_one_row(sums, means.len(), |sums| simd!(A => sum_deviations::<T, A>(block(rows), means, sums)));
    });
    let (deviations, squares) = sums.split_at(channels);
    let degrees = T::of((rows - 1) as f64);
    for c in 0..channels {
        let squares = squares[c] - deviations[c] * deviations[c] * inverse;
        // Not `max`, which would turn NaN into 0.
        let squares = if squares < T::zero() { T::zero() } else { squares };
        mean[c] += deviations[c] * inverse;
        variance[c] = squares / degrees;
        rstd[c] = reciprocal_root(squares * inverse + epsilon);
    }
}

/// 1/√(variance + ε).
pub fn reciprocal_deviation<T: Float>(variance: &[T], epsilon: T, rstd: &mut [T]) {
    rstd.iter_mut().zip(variance).for_each(|(rstd, &variance)| *rstd = reciprocal_root(variance + epsilon));
}

#[inline(always)]
fn sum_deviations<T: Float, A: Arch>(x: &[T], mean: &[T], sums: &mut [T]) {
    let (deviations, squares) = sums.split_at_mut(mean.len());
    for x in x.chunks(mean.len()) {
        for (((deviation, square), &x), &mean) in deviations.iter_mut().zip(&mut *squares).zip(x).zip(mean) {
            let d = x - mean;
            *deviation += d;
            *square = A::mul_add(d, d, *square);
        }
    }
}

/// Repeats the channels' values until they fill whole registers, so that kernels can process several rows as one.
fn repeated<'a, T: Float, const N: usize>(values: [&[T]; N], room: &'a mut Option<Scratch<T>>) -> [&'a [T]; N] {
    const ELEMENTS: usize = 64;
    let channels = values[0].len();
    let times = if channels < 4 * ELEMENTS { ELEMENTS >> channels.trailing_zeros().min(ELEMENTS.ilog2()) } else { 1 };
    let len = times * channels;
    let all = room.insert(Scratch::new(N * len));
    for (all, values) in all.chunks_exact_mut(len).zip(values) {
        all.chunks_exact_mut(channels).for_each(|row| row.copy_from_slice(values));
    }
    let all = &*all;
    std::array::from_fn(|i| &all[i * len..][..len])
}

/// Adds two sums per channel to `sums`: `add` computes them over wide rows of `len` elements, each of which holds
/// several rows.
fn in_one_row<T: Float>(sums: &mut [T], len: usize, add: impl FnOnce(&mut [T])) {
    let mut wide = Scratch::new(2 * len);
    wide.fill(T::zero());
    add(&mut wide);
    let channels = sums.len() / 2;
    sums.chunks_exact_mut(channels).zip(wide.chunks_exact(len)).for_each(|(sum, wide)| add_rows(wide, sum));
}

/// γ·r of each channel.
fn scale_of<T: Float>(weight: &[T], rstd: &[T]) -> Scratch<T> {
    let mut scale = Scratch::<T>::new(weight.len());
    scale.iter_mut().zip(weight).zip(rstd).for_each(|((scale, &weight), &r)| *scale = weight * r);
    scale
}

/// y = (x − μ)·γr + β, or GELU of that.
pub fn forward<T: Float>(x: &[T], [weight, bias]: [&[T]; 2], [mean, rstd]: [&[T]; 2], gelu: bool, y: &mut [T]) {
    let channels = weight.len();
    if channels == 0 {
        return;
    }
    let scale = scale_of(weight, rstd);
    let mut room = None;
    let [scale, bias, mean] = repeated([&scale, bias, mean], &mut room);
    let block = items_per_task(channels) * channels;
    y.par_chunks_mut(block).zip(x.par_chunks(block)).for_each(|(y, x)| {
        simd!(A => forward_rows::<T, A>(x, scale, bias, mean, y));
        if gelu {
            gelu::cpu::forward_in_place(y);
        }
    });
}

#[inline(always)]
fn forward_rows<T: Float, A: Arch>(x: &[T], scale: &[T], bias: &[T], mean: &[T], y: &mut [T]) {
    for (x, y) in x.chunks(scale.len()).zip(y.chunks_mut(scale.len())) {
        for ((((y, &x), &mean), &scale), &bias) in y.iter_mut().zip(x).zip(mean).zip(scale).zip(bias) {
            *y = A::mul_add(x - mean, scale, bias);
        }
    }
}

/// dx (R, C), dweight (C) and dbias (C) from dy (R, C).
pub fn backward<T: Float>(
    dy: &[T],
    x: &[T],
    [weight, bias]: [&[T]; 2],
    [mean, rstd]: [&[T]; 2],
    (mode, gelu): (Mode, bool),
    [dx, dweight, dbias]: [Option<Out<'_, T>>; 3],
) {
    let channels = weight.len();
    if channels == 0 {
        return;
    }
    let before = gelu.then(|| before_gelu(dy, x, [weight, bias], [mean, rstd]));
    let dy = before.as_deref().unwrap_or(dy);
    let rows = dy.len() / channels;
    let mut sums = Scratch::<T>::new(2 * channels);
    if mode == Mode::Train || dweight.is_some() || dbias.is_some() {
        let mut room = None;
        let [mean] = repeated([mean], &mut room);
        sum_in_pieces(rows, 2 * channels, 2 * channels, Out::store(&mut sums), |rows, sums| {
            let block = rows.start * channels..rows.end * channels;
            let (dy, x) = (&dy[block.clone()], &x[block]);
            in_one_row(sums, mean.len(), |sums| simd!(A => sum_gradients::<T, A>(dy, x, mean, sums)));
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
    let scale = scale_of(weight, rstd);
    // Replace the sums by the terms that are subtracted in dx, dβ/R and r·dγ/R; evaluation does not use them.
    let inverse = T::one() / T::of(rows as f64);
    sum_dy.iter_mut().for_each(|sum| *sum *= inverse);
    sum_dy_x.iter_mut().zip(rstd).for_each(|(sum, &r)| *sum *= r * inverse);
    let mut room = None;
    let [mean, scale, sum_dy, sum_dy_x] = repeated([mean, &scale, sum_dy, sum_dy_x], &mut room);
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

/// The gradient of the normalised values (R, C), from that of GELU of them. A block of these values is computed again
/// at a time; the gradient is kept, because on a CPU GELU's slope costs more than the memory traffic.
fn before_gelu<T: Float>(dy: &[T], x: &[T], [weight, bias]: [&[T]; 2], [mean, rstd]: [&[T]; 2]) -> Scratch<T> {
    let (scale, mut room) = (scale_of(weight, rstd), None);
    let [scale, bias, mean] = repeated([&scale, bias, mean], &mut room);
    let mut before = Scratch::<T>::new(dy.len());
    let block = items_per_task(weight.len()) * weight.len();
    before.par_chunks_mut(block).zip(dy.par_chunks(block).zip(x.par_chunks(block))).for_each(|(before, (dy, x))| {
        let mut values = Scratch::<T>::new(x.len());
        simd!(A => forward_rows::<T, A>(x, scale, bias, mean, &mut values));
        gelu::cpu::backward(dy, &values, Out::store(before));
    });
    before
}

/// Σ dy and Σ dy·(x − μ).
#[inline(always)]
fn sum_gradients<T: Float, A: Arch>(dy: &[T], x: &[T], mean: &[T], sums: &mut [T]) {
    let (sum_dy, sum_dy_x) = sums.split_at_mut(mean.len());
    for (dy, x) in dy.chunks(mean.len()).zip(x.chunks(mean.len())) {
        let sums = sum_dy.iter_mut().zip(&mut *sum_dy_x);
        for ((((sum_dy, sum_dy_x), &dy), &x), &mean) in sums.zip(dy).zip(x).zip(mean) {
            *sum_dy += dy;
            *sum_dy_x = A::mul_add(dy, x - mean, *sum_dy_x);
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
    let len = mean.len();
    for ((dy, x), dx) in dy.chunks(len).zip(x.chunks(len)).zip(out.data.chunks_mut(len)) {
        let of_channels = mean.iter().zip(scale).zip(by_mean.iter().zip(by_deviation));
        for (((dx, &dy), &x), ((&mean, &scale), (&by_mean, &by_deviation))) in
            dx.iter_mut().zip(dy).zip(x).zip(of_channels)
        {
            let value = scale * A::mul_add(mean - x, by_deviation, dy - by_mean);
            *dx = if out.accumulate { *dx + value } else { value };
        }
    }
}

/// dx = γr·dy
#[inline(always)]
fn eval_rows<T: Float, A: Arch>(dy: &[T], scale: &[T], out: Out<'_, T>) {
    for (dy, dx) in dy.chunks(scale.len()).zip(out.data.chunks_mut(scale.len())) {
        for ((dx, &dy), &scale) in dx.iter_mut().zip(dy).zip(scale) {
            *dx = if out.accumulate { A::mul_add(dy, scale, *dx) } else { dy * scale };
        }
    }
}
