//! CPU kernels of [`softmax`](super::softmax). A row stays in the first-level cache from its maximum to
//! its last product, so memory is read once and written once.

use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::lanes::{max, sum_map, sum_map2};
use tensor::cpu::math::Transcendental;
use tensor::cpu::parallel::{Out, items_per_task};
use tensor::{Float, simd};

pub fn forward<T: Float>(x: &[T], channels: usize, y: &mut [T]) {
    let block = items_per_task(channels) * channels.max(1);
    y.par_chunks_mut(block).zip(x.par_chunks(block)).for_each(|(y, x)| simd!(A => rows::<T, A>(x, channels, y)));
}

#[inline(always)]
fn rows<T: Float, A: Arch>(x: &[T], channels: usize, y: &mut [T]) {
    for (x, y) in x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)) {
        row::<T, A>(x, y);
    }
}

/// y = softmax(x) for one row; returns [max(x), Σ exp(x − max(x))], from which the log-sum-exp follows.
#[inline(always)]
pub(crate) fn row<T: Float, A: Arch>(x: &[T], y: &mut [T]) -> [T; 2] {
    let largest = max(x);
    for (y, &x) in y.iter_mut().zip(x) {
        *y = Transcendental::exponential::<A>(x - largest);
    }
    let sum = sum_map(y, |y| y);
    let inverse = T::one() / sum;
    y.iter_mut().for_each(|y| *y *= inverse);
    [largest, sum]
}

pub fn backward<T: Float>(dy: &[T], y: &[T], channels: usize, dx: Out<'_, T>) {
    let block = items_per_task(channels) * channels.max(1);
    let accumulate = dx.accumulate;
    dx.data
        .par_chunks_mut(block)
        .zip(dy.par_chunks(block).zip(y.par_chunks(block)))
        .for_each(|(data, (dy, y))| simd!(A => backward_rows::<T, A>(dy, y, channels, Out { data, accumulate })));
}

/// dx = y·(dy − Σ dy·y) for each row.
#[inline(always)]
fn backward_rows<T: Float, A: Arch>(dy: &[T], y: &[T], channels: usize, dx: Out<'_, T>) {
    let rows = dy.chunks_exact(channels).zip(y.chunks_exact(channels));
    for ((dy, y), row) in rows.zip(dx.data.chunks_exact_mut(channels)) {
        let delta = sum_map2(dy, y, |dy, y| dy * y);
        for ((dx_i, &dy), &y) in row.iter_mut().zip(dy).zip(y) {
            *dx_i = A::mul_add(y, dy - delta, if dx.accumulate { *dx_i } else { T::zero() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::cpu::isa::{Isa, limits};
    use tensor::rng::Philox;

    /// Rounding x − max costs a relative 2^-24·|x − max|, exp two units, and the sum and the quotient
    /// about one each: 2e-6 covers scores that lie up to 20 apart.
    #[test]
    fn single_precision_agrees_with_double_on_every_instruction_set() {
        for channels in [1, 7, 16, 33, 196, 1000] {
            let x: Vec<f32> = (0..5 * channels as u64).map(|i| 20.0 * Philox::new(2, 1).uniform(i)).collect();
            let dy: Vec<f32> = (0..5 * channels as u64).map(|i| Philox::new(2, 2).uniform(i) - 0.5).collect();
            let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            let (mut wide_y, mut wide_dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
            forward(&wide(&x), channels, &mut wide_y);
            backward(&wide(&dy), &wide_y, channels, Out::store(&mut wide_dx));
            for limited in limits(&Isa::SIMD) {
                let isa = limited.isa();
                let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
                forward(&x, channels, &mut y);
                backward(&dy, &y, channels, Out::store(&mut dx));
                for i in 0..x.len() {
                    let (y, dx) = (f64::from(y[i]), f64::from(dx[i]));
                    assert!((y - wide_y[i]).abs() <= 2e-6 * wide_y[i], "{isa:?}, {channels}: {y}, not {}", wide_y[i]);
                    assert!(
                        (dx - wide_dx[i]).abs() <= 2e-6 * wide_y[i],
                        "{isa:?}, {channels}: {dx}, not {}",
                        wide_dx[i]
                    );
                }
            }
        }
    }

    #[test]
    fn masked_scores_get_nothing_and_large_ones_do_not_overflow() {
        let mut y = [0.0f32; 4];
        forward(&[f32::NEG_INFINITY, 3e38, 3e38, -3e38], 4, &mut y);
        assert_eq!(y, [0.0, 0.5, 0.5, 0.0]);
    }
}
