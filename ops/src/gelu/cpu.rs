//! CPU kernels of [`gelu`](super::gelu).

use rayon::prelude::*;
use tensor::cpu::normal::Normal;
use tensor::cpu::parallel::{GRAIN, Out};
use tensor::cpu::registers::Vector;
use tensor::{Float, in_registers, simd};

pub fn forward<T: Float>(x: &[T], y: &mut [T]) {
    let normal = Normal::tables();
    y.par_chunks_mut(GRAIN).zip(x.par_chunks(GRAIN)).for_each(|(y, x)| {
        simd!(A => in_registers!(T, A, x.len(), [1], (range, V, _COUNT) => {
            // SAFETY: `simd!` chooses an instruction set that the machine has.
            unsafe { forward_part::<T, V<T, A>>(&x[range.clone()], &mut y[range], normal) };
        }));
    });
}

/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn forward_part<T: Float, V: Vector<T>>(x: &[T], y: &mut [T], normal: &Normal) {
    for (y, x) in y.chunks_exact_mut(V::LANES).zip(x.chunks_exact(V::LANES)) {
        // SAFETY: the caller vouches for the instruction set.
        gelu(unsafe { V::load(x) }, normal).store(y);
    }
}

/// The same, of what `y` holds.
pub fn forward_in_place<T: Float>(y: &mut [T]) {
    let normal = Normal::tables();
    y.par_chunks_mut(GRAIN).for_each(|y| {
        simd!(A => in_registers!(T, A, y.len(), [1], (range, V, _COUNT) => {
            // SAFETY: `simd!` chooses an instruction set that the machine has.
            unsafe { forward_part_in_place::<T, V<T, A>>(&mut y[range], normal) };
        }));
    });
}

/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn forward_part_in_place<T: Float, V: Vector<T>>(y: &mut [T], normal: &Normal) {
    for y in y.chunks_exact_mut(V::LANES) {
        // SAFETY: the caller vouches for the instruction set.
        gelu(unsafe { V::load(y) }, normal).store(y);
    }
}

#[inline(always)]
fn gelu<T: Float, V: Vector<T>>(x: V, normal: &Normal) -> V {
    x.mul(x.normal_distribution(normal))
}

pub fn backward<T: Float>(dy: &[T], x: &[T], dx: Out<'_, T>) {
    let (accumulate, normal) = (dx.accumulate, Normal::tables());
    dx.data.par_chunks_mut(GRAIN).zip(dy.par_chunks(GRAIN).zip(x.par_chunks(GRAIN))).for_each(|(dx, (dy, x))| {
        simd!(A => in_registers!(T, A, x.len(), [1], (range, V, _COUNT) => {
            let (dy, x) = (&dy[range.clone()], &x[range.clone()]);
            // SAFETY: `simd!` chooses an instruction set that the machine has.
            unsafe { backward_part::<T, V<T, A>>(dy, x, Out { data: &mut dx[range], accumulate }, normal) };
        }));
    });
}

/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn backward_part<T: Float, V: Vector<T>>(dy: &[T], x: &[T], out: Out<'_, T>, normal: &Normal) {
    let given = dy.chunks_exact(V::LANES).zip(x.chunks_exact(V::LANES));
    for (dx, (dy, x)) in out.data.chunks_exact_mut(V::LANES).zip(given) {
        // SAFETY: the caller vouches for the instruction set, here and below.
        let (dy, x) = unsafe { (V::load(dy), V::load(x)) };
        let gradient = dy.mul(x.normal_slope(normal));
        // SAFETY: as above.
        let gradient = if out.accumulate { unsafe { V::load(dx) }.add(gradient) } else { gradient };
        gradient.store(dx);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::cpu::isa::{Isa, limits};

    #[test]
    fn single_precision_agrees_with_double_on_every_instruction_set() {
        let x: Vec<f32> = (-40_003..40_003).map(|i| i as f32 * 3e-4).collect();
        let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let ones = (vec![1.0; x.len()], vec![1.0; x.len()]);
        let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let (mut wide_y, mut wide_dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        forward(&wide, &mut wide_y);
        backward(&ones.1, &wide, Out::store(&mut wide_dx));
        for limited in limits(&[Isa::Portable, Isa::Avx2, Isa::Avx512]) {
            let isa = limited.isa();
            forward(&x, &mut y);
            let mut in_place = x.clone();
            forward_in_place(&mut in_place);
            assert!(in_place == y, "{isa:?}: the same bits in place");
            backward(&ones.0, &x, Out::store(&mut dx));
            for i in 0..x.len() {
                let bound = 3e-7 * wide[i].abs().max(1.0);
                assert!((f64::from(y[i]) - wide_y[i]).abs() < bound, "{isa:?}: gelu({}) = {}", x[i], y[i]);
                assert!((f64::from(dx[i]) - wide_dx[i]).abs() < 1e-6, "{isa:?}: gelu'({}) = {}", x[i], dx[i]);
            }
        }
    }
}
