//! CPU kernels of [`gelu`](super::gelu).

use rayon::prelude::*;
use std::slice;
use tensor::cpu::normal::Normal;
use tensor::cpu::parallel::{GRAIN, Out};
use tensor::cpu::registers::{MAX_LANES, Vector, load, store};
use tensor::{Float, simd};

pub fn forward<T: Float>(x: &[T], y: &mut [T]) {
    let normal = Normal::tables();
    y.par_chunks_mut(GRAIN).zip(x.par_chunks(GRAIN)).for_each(|(y, x)| {
        // SAFETY: `simd!` chooses an instruction set that the machine has; both have as many elements, and lie apart.
        simd!(A => unsafe { forward_part::<T, <A as Arch>::Vector<T>>(x.as_ptr(), y.as_mut_ptr(), x.len().min(y.len()), normal) });
    });
}

/// The same in place, on the values in `y`.
pub fn forward_in_place<T: Float>(y: &mut [T]) {
    let normal = Normal::tables();
    y.par_chunks_mut(GRAIN).for_each(|y| {
        let (len, y) = (y.len(), y.as_mut_ptr());
        // SAFETY: `simd!` chooses an instruction set that the machine has; the elements are this task's.
        simd!(A => unsafe { forward_part::<T, <A as Arch>::Vector<T>>(y, y, len, normal) });
    });
}

/// # Safety
/// As of [`Vector::zero`]. There must be `len` elements at both pointers, which may be equal, and nobody else may write
/// them meanwhile.
#[inline(always)]
unsafe fn forward_part<T: Float, V: Vector<T>>(x: *const T, y: *mut T, len: usize, normal: &Normal) {
    let whole = len - len % V::LANES;
    for start in (0..whole).step_by(V::LANES) {
        // SAFETY: guaranteed by the caller, here and below.
        unsafe { store(gelu(load::<T, V>(x.add(start)), normal), y.add(start)) };
    }
    // The remainder is processed in a full register too: an element's bits must not depend on how many lie beside it.
    let (mut rest, count) = ([T::zero(); MAX_LANES], len - whole);
    // SAFETY: as above.
    unsafe {
        rest[..count].copy_from_slice(slice::from_raw_parts(x.add(whole), count));
        gelu(V::load(&rest), normal).store(&mut rest);
        slice::from_raw_parts_mut(y.add(whole), count).copy_from_slice(&rest[..count]);
    }
}

#[inline(always)]
fn gelu<T: Float, V: Vector<T>>(x: V, normal: &Normal) -> V {
    x.mul(x.normal_distribution(normal))
}

pub fn backward<T: Float>(dy: &[T], x: &[T], dx: Out<'_, T>) {
    let (accumulate, normal) = (dx.accumulate, Normal::tables());
    dx.data.par_chunks_mut(GRAIN).zip(dy.par_chunks(GRAIN).zip(x.par_chunks(GRAIN))).for_each(|(dx, (dy, x))| {
        // SAFETY: `simd!` chooses an instruction set that the machine has.
        simd!(A => unsafe { backward_part::<T, <A as Arch>::Vector<T>>(dy, x, Out { data: dx, accumulate }, normal) });
    });
}

/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn backward_part<T: Float, V: Vector<T>>(dy: &[T], x: &[T], out: Out<'_, T>, normal: &Normal) {
    let accumulate = out.accumulate;
    let (dx, rest) = out.data.split_at_mut(x.len() - x.len() % V::LANES);
    let (of_dy, of_x) = (dy.chunks_exact(V::LANES), x.chunks_exact(V::LANES));
    // As in the forward pass.
    let [mut wide_dx, mut wide_dy, mut wide_x] = [[T::zero(); MAX_LANES]; 3];
    for (wide, part) in [(&mut wide_dx, &*rest), (&mut wide_dy, of_dy.remainder()), (&mut wide_x, of_x.remainder())] {
        wide[..part.len()].copy_from_slice(part);
    }
    for (dx, (dy, x)) in dx.chunks_exact_mut(V::LANES).zip(of_dy.zip(of_x)) {
        // SAFETY: guaranteed by the caller, here and below.
        unsafe { backward_register::<T, V>(dy, x, dx, accumulate, normal) };
    }
    // SAFETY: as above.
    unsafe { backward_register::<T, V>(&wide_dy, &wide_x, &mut wide_dx, accumulate, normal) };
    rest.copy_from_slice(&wide_dx[..rest.len()]);
}

/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn backward_register<T: Float, V: Vector<T>>(
    dy: &[T],
    x: &[T],
    dx: &mut [T],
    accumulate: bool,
    normal: &Normal,
) {
    // SAFETY: the caller vouches for the instruction set, here and below.
    let (dy, x) = unsafe { (V::load(dy), V::load(x)) };
    let gradient = dy.mul(x.normal_slope(normal));
    // SAFETY: as above.
    let gradient = if accumulate { unsafe { V::load(dx) }.add(gradient) } else { gradient };
    gradient.store(dx);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::cpu::isa::{Isa, limits};

    /// Where a batch is cut depends on the number of threads, in inference.
    #[test]
    fn an_element_has_the_same_bits_whatever_lies_beside_it() {
        let x: Vec<f32> = (0..100).map(|i| (i as f32 - 50.0) * 0.0731).collect();
        let dy: Vec<f32> = x.iter().map(|x| 1.0 - x).collect();
        for limited in limits(&Isa::SIMD) {
            let both = |range: std::ops::Range<usize>| {
                let (mut y, mut dx) = (vec![0.0; range.len()], vec![0.5; range.len()]);
                forward(&x[range.clone()], &mut y);
                backward(&dy[range.clone()], &x[range], Out { data: &mut dx, accumulate: true });
                (y, dx)
            };
            let (y, dx) = both(0..100);
            for range in [0..1, 3..4, 1..16, 5..36, 16..31, 37..100] {
                assert!(both(range.clone()) == (y[range.clone()].to_vec(), dx[range].to_vec()), "{:?}", limited.isa());
            }
        }
    }

    #[test]
    fn single_precision_agrees_with_double_on_every_instruction_set() {
        let x: Vec<f32> = (-40_003..40_003).map(|i| i as f32 * 3e-4).collect();
        let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let ones = (vec![1.0; x.len()], vec![1.0; x.len()]);
        let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let (mut wide_y, mut wide_dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        forward(&wide, &mut wide_y);
        backward(&ones.1, &wide, Out::store(&mut wide_dx));
        for limited in limits(&Isa::SIMD) {
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
