//! CPU kernels of [`gelu`](super::gelu).

use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::math::Transcendental;
use tensor::cpu::parallel::{GRAIN, Out};
use tensor::{Float, simd};

pub fn forward<T: Float>(x: &[T], y: &mut [T]) {
    y.par_chunks_mut(GRAIN).zip(x.par_chunks(GRAIN)).for_each(|(y, x)| simd!(A => forward_part::<T, A>(x, y)));
}

#[inline(always)]
fn forward_part<T: Float, A: Arch>(x: &[T], y: &mut [T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = x * Transcendental::normal_distribution::<A>(x);
    }
}

pub fn backward<T: Float>(dy: &[T], x: &[T], dx: Out<'_, T>) {
    let accumulate = dx.accumulate;
    dx.data
        .par_chunks_mut(GRAIN)
        .zip(dy.par_chunks(GRAIN).zip(x.par_chunks(GRAIN)))
        .for_each(|(data, (dy, x))| simd!(A => backward_part::<T, A>(dy, x, Out { data, accumulate })));
}

#[inline(always)]
fn backward_part<T: Float, A: Arch>(dy: &[T], x: &[T], out: Out<'_, T>) {
    for ((dx, &dy), &x) in out.data.iter_mut().zip(dy).zip(x) {
        let slope = Transcendental::normal_slope::<A>(x);
        *dx = if out.accumulate { *dx + dy * slope } else { dy * slope };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::cpu::isa::{Isa, limit};

    #[test]
    fn single_precision_agrees_with_double_on_every_instruction_set() {
        let x: Vec<f32> = (-40_003..40_003).map(|i| i as f32 * 3e-4).collect();
        let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let ones = (vec![1.0; x.len()], vec![1.0; x.len()]);
        let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let (mut wide_y, mut wide_dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        forward(&wide, &mut wide_y);
        backward(&ones.1, &wide, Out::store(&mut wide_dx));
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            let _limited = limit(isa);
            forward(&x, &mut y);
            backward(&ones.0, &x, Out::store(&mut dx));
            for i in 0..x.len() {
                let bound = 3e-7 * wide[i].abs().max(1.0);
                assert!((f64::from(y[i]) - wide_y[i]).abs() < bound, "{isa:?}: gelu({}) = {}", x[i], y[i]);
                assert!((f64::from(dx[i]) - wide_dx[i]).abs() < 1e-6, "{isa:?}: gelu'({}) = {}", x[i], dx[i]);
            }
        }
    }
}
