//! CPU kernels of [`layer_norm`](super::layer_norm): a row stays in the cache from its first use to its last.
//! The forward pass goes over it three times (mean, variance, result), the backward pass once if it fills a
//! few whole registers, otherwise twice.

use crate::epsilon::reciprocal_root;
use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{Interleaved, Out, items_per_task, sum_in_pieces};
use tensor::cpu::registers::Vector;
use tensor::{Float, Scratch, in_registers, simd, unrolled};

/// Rows whose moments are computed together.
const ROWS: usize = 16;

/// y (R, C), and each row's mean and 1/√(variance + ε).
pub fn forward<T: Float>(x: &[T], weight: &[T], bias: &[T], epsilon: T, y: &mut [T], [mean, rstd]: [&mut [T]; 2]) {
    let channels = weight.len();
    if channels == 0 {
        return;
    }
    let rows = items_per_task(channels);
    y.par_chunks_mut(rows * channels)
        .zip(x.par_chunks(rows * channels))
        .zip(mean.par_chunks_mut(rows).zip(rstd.par_chunks_mut(rows)))
        .for_each(|((y, x), (mean, rstd))| {
            // SAFETY: `simd!` chooses an instruction set that the machine has.
            simd!(A => unsafe { forward_rows::<T, A>(x, [weight, bias], epsilon, y, [mean, rstd]) });
        });
}

/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
unsafe fn forward_rows<T: Float, A: Arch>(
    x: &[T],
    affine: [&[T]; 2],
    epsilon: T,
    y: &mut [T],
    [mean, rstd]: [&mut [T]; 2],
) {
    let channels = affine[0].len();
    let inverse = T::one() / T::of(channels as f64);
    // Several rows at a time, so that their square roots and divisions, which have long latencies, overlap.
    let (x, y) = (x.chunks(ROWS * channels), y.chunks_mut(ROWS * channels));
    for ((x, y), (mean, rstd)) in x.zip(y).zip(mean.chunks_mut(ROWS).zip(rstd.chunks_mut(ROWS))) {
        for ((x, mean), rstd) in x.chunks_exact(channels).zip(&mut *mean).zip(&mut *rstd) {
            let (mut sum, mut squares) = (T::zero(), T::zero());
            // The mean is a distance from the row's first element, so that in a row of equal ones it is exact.
            in_registers!(T, A, channels, [1], (range, V, _COUNT) => {
                // SAFETY: the caller vouches for the instruction set, here and below.
                sum += unsafe { sum_from::<T, V<T, A>>(&x[range], x[0]) }
            });
            *mean = x[0] + sum * inverse;
            in_registers!(T, A, channels, [1], (range, V, _COUNT) => {
                // SAFETY: as above.
                squares += unsafe { squares_from::<T, V<T, A>>(&x[range], *mean) }
            });
            // The variance for now; the loop below turns it into 1/√(variance + ε).
            *rstd = squares * inverse;
        }
        rstd.iter_mut().for_each(|variance| *variance = reciprocal_root(*variance + epsilon));
        // SAFETY: as above.
        unsafe { normalise_rows::<T, A>(x, affine, [mean, rstd], y) };
    }
}

/// Σ (x − origin)
///
/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn sum_from<T: Float, V: Vector<T>>(x: &[T], origin: T) -> T {
    // SAFETY: the caller vouches for the instruction set, here and below.
    let (origin, mut sum) = unsafe { (V::splat(origin), V::zero()) };
    for x in x.chunks_exact(V::LANES) {
        // SAFETY: as above.
        sum = sum.add(unsafe { V::load(x) }.sub(origin));
    }
    sum.total()
}

/// Σ (x − mean)²
///
/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn squares_from<T: Float, V: Vector<T>>(x: &[T], mean: T) -> T {
    // SAFETY: the caller vouches for the instruction set, here and below.
    let (mean, mut sum) = unsafe { (V::splat(mean), V::zero()) };
    for x in x.chunks_exact(V::LANES) {
        // SAFETY: as above.
        let deviation = unsafe { V::load(x) }.sub(mean);
        sum = sum.add(deviation.mul(deviation));
    }
    sum.total()
}

/// Rows' γ·x̂ + β.
///
/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
unsafe fn normalise_rows<T: Float, A: Arch>(x: &[T], [weight, bias]: [&[T]; 2], [mean, rstd]: [&[T]; 2], y: &mut [T]) {
    let channels = weight.len();
    for (row, (x, y)) in x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)).enumerate() {
        in_registers!(T, A, channels, [1], (range, V, _COUNT) => {
            let (x, affine) = (&x[range.clone()], [&weight[range.clone()], &bias[range.clone()]]);
            // SAFETY: the caller vouches for the instruction set.
            unsafe { normalise::<T, V<T, A>>(x, affine, [mean[row], rstd[row]], &mut y[range]) };
        });
    }
}

/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn normalise<T: Float, V: Vector<T>>(x: &[T], [weight, bias]: [&[T]; 2], [mean, rstd]: [T; 2], y: &mut [T]) {
    let [weight, bias] = [weight, bias].map(|row| row.chunks_exact(V::LANES));
    // SAFETY: the caller vouches for the instruction set, here and below.
    let (mean, rstd) = unsafe { (V::splat(mean), V::splat(rstd)) };
    for ((y, x), (weight, bias)) in y.chunks_exact_mut(V::LANES).zip(x.chunks_exact(V::LANES)).zip(weight.zip(bias)) {
        // SAFETY: as above.
        let (x, weight, bias) = unsafe { (V::load(x), V::load(weight), V::load(bias)) };
        x.sub(mean).mul(rstd).mul_add(weight, bias).store(y);
    }
}

/// Recomputes y from the rows' means and 1/√(variance + ε).
pub fn recompute<T: Float>(x: &[T], weight: &[T], bias: &[T], [mean, rstd]: [&[T]; 2], y: &mut [T]) {
    let channels = weight.len();
    if channels == 0 {
        return;
    }
    let rows = items_per_task(channels);
    y.par_chunks_mut(rows * channels)
        .zip(x.par_chunks(rows * channels))
        .zip(mean.par_chunks(rows).zip(rstd.par_chunks(rows)))
        .for_each(|((y, x), (mean, rstd))| {
            // SAFETY: `simd!` chooses an instruction set that the machine has.
            simd!(A => unsafe { normalise_rows::<T, A>(x, [weight, bias], [mean, rstd], y) });
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
    let mut sums = Scratch::<T>::new(2 * channels);
    sum_in_pieces(mean.len(), channels, sums.len(), Out::store(&mut sums), |rows, sums| {
        let block = rows.start * channels..rows.end * channels;
        let moments = [&mean[rows.clone()], &rstd[rows]];
        // SAFETY: no two pieces have a row in common.
        let data = dx.map(|dx| unsafe { dx.part(block.clone()) });
        let dx = data.map(|data| Out { data, accumulate });
        let (dy, x) = (&dy[block.clone()], &x[block]);
        // SAFETY: `simd!` chooses an instruction set that the machine has.
        simd!(A => unsafe { backward_rows::<T, A>(dy, x, weight, moments, dx, sums) });
    });
    let (of_weight, of_bias) = sums.split_at(channels);
    dweight.into_iter().for_each(|mut dweight| dweight.put(of_weight));
    dbias.into_iter().for_each(|mut dbias| dbias.put(of_bias));
}

/// dx = r·(g − mean(g) − x̂·mean(g·x̂)), g = γ·dy. The rows' dγ = Σ dy·x̂ and dβ = Σ dy are added to `sums`, where they
/// lie one after the other: (2, C).
///
/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
unsafe fn backward_rows<T: Float, A: Arch>(
    dy: &[T],
    x: &[T],
    weight: &[T],
    moments: [&[T]; 2],
    dx: Option<Out<'_, T>>,
    sums: &mut [T],
) {
    macro_rules! at_once {
        ($($count:literal)*) => {$(
            if A::MANY_REGISTERS && weight.len() == $count * A::Vector::<T>::LANES {
                // SAFETY: the caller vouches for the instruction set.
                return unsafe { backward_at_once::<T, A::Vector<T>, $count>([dy, x, weight], moments, dx, sums) };
            }
        )*};
    }
    at_once!(1 2 3 4 6);
    // SAFETY: as above.
    unsafe { backward_in_two_sweeps::<T, A>(dy, x, weight, moments, dx, sums) };
}

/// Rows of any length, in two sweeps over each: first for the sums, then for dx.
///
/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
unsafe fn backward_in_two_sweeps<T: Float, A: Arch>(
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
        let moments = [mean[row], rstd[row]];
        let (mut g, mut gx) = (T::zero(), T::zero());
        in_registers!(T, A, channels, [1], (range, V, _COUNT) => {
            let (given, sums) = (
                [&dy[range.clone()], &x[range.clone()], &weight[range.clone()]],
                [&mut dweight[range.clone()], &mut dbias[range]],
            );
            // SAFETY: the caller vouches for the instruction set, here and below.
            let more = unsafe { add_sums::<T, V<T, A>>(given, moments, sums) };
            g += more[0];
            gx += more[1];
        });
        let Some(dx) = &mut dx else { continue };
        let to = &mut dx.data[row * channels..(row + 1) * channels];
        in_registers!(T, A, channels, [1], (range, V, _COUNT) => {
            let given = [&dy[range.clone()], &x[range.clone()], &weight[range.clone()]];
            let out = Out { data: &mut to[range], accumulate: dx.accumulate };
            // SAFETY: as above.
            unsafe { gradient::<T, V<T, A>>(given, moments, [g * inverse, gx * inverse], out) };
        });
    }
}

/// Rows of `COUNT` registers, few enough that each row is read only once, and that the sums stay in registers for all
/// rows. The results have the same bits as those of `backward_in_two_sweeps`.
///
/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn backward_at_once<T: Float, V: Vector<T>, const COUNT: usize>(
    [dy, x, weight]: [&[T]; 3],
    [mean, rstd]: [&[T]; 2],
    mut dx: Option<Out<'_, T>>,
    sums: &mut [T],
) {
    let channels = COUNT * V::LANES;
    let inverse = T::one() / T::of(channels as f64);
    macro_rules! load {
        ($from:expr, $i:expr) => {
            // SAFETY: the caller vouches for the instruction set.
            unsafe { V::load(&$from[$i * V::LANES..]) }
        };
    }
    // SAFETY: as above.
    let zero = unsafe { V::zero() };
    let (mut weights, mut dweight, mut dbias) = ([zero; COUNT], [zero; COUNT], [zero; COUNT]);
    unrolled!(i in 0..COUNT => {
        weights[i] = load!(weight, i);
        dweight[i] = load!(sums, i);
        dbias[i] = load!(sums, COUNT + i);
    });
    for (row, (dy, x)) in dy.chunks_exact(channels).zip(x.chunks_exact(channels)).enumerate() {
        // SAFETY: as above.
        let (mean, rstd) = unsafe { (V::splat(mean[row]), V::splat(rstd[row])) };
        let (mut x_hat, mut g, mut g_sum, mut gx_sum) = ([zero; COUNT], [zero; COUNT], zero, zero);
        unrolled!(i in 0..COUNT => {
            x_hat[i] = load!(x, i).sub(mean).mul(rstd);
            let dy = load!(dy, i);
            dweight[i] = dy.mul_add(x_hat[i], dweight[i]);
            dbias[i] = dbias[i].add(dy);
            g[i] = dy.mul(weights[i]);
            g_sum = g_sum.add(g[i]);
            gx_sum = gx_sum.add(g[i].mul(x_hat[i]));
        });
        let Some(dx) = &mut dx else { continue };
        // SAFETY: as above.
        let (g_mean, gx_mean) = unsafe { (V::splat(g_sum.total() * inverse), V::splat(-(gx_sum.total() * inverse))) };
        let to = &mut dx.data[row * channels..(row + 1) * channels];
        unrolled!(i in 0..COUNT => {
            let gradient = x_hat[i].mul_add(gx_mean, g[i].sub(g_mean)).mul(rstd);
            let gradient = if dx.accumulate { load!(to, i).add(gradient) } else { gradient };
            gradient.store(&mut to[i * V::LANES..]);
        });
    }
    unrolled!(i in 0..COUNT => {
        dweight[i].store(&mut sums[i * V::LANES..]);
        dbias[i].store(&mut sums[(COUNT + i) * V::LANES..]);
    });
}

/// Adds dy·x̂ and dy to the sums; returns [Σ g, Σ g·x̂].
///
/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn add_sums<T: Float, V: Vector<T>>(
    [dy, x, weight]: [&[T]; 3],
    [mean, rstd]: [T; 2],
    [dweight, dbias]: [&mut [T]; 2],
) -> [T; 2] {
    // SAFETY: the caller vouches for the instruction set, here and below.
    let (mean, rstd, mut g_sum, mut gx_sum) = unsafe { (V::splat(mean), V::splat(rstd), V::zero(), V::zero()) };
    let given = dy.chunks_exact(V::LANES).zip(x.chunks_exact(V::LANES)).zip(weight.chunks_exact(V::LANES));
    let sums = dweight.chunks_exact_mut(V::LANES).zip(dbias.chunks_exact_mut(V::LANES));
    for (((dy, x), weight), (dweight, dbias)) in given.zip(sums) {
        // SAFETY: as above.
        let (dy, x, weight) = unsafe { (V::load(dy), V::load(x).sub(mean).mul(rstd), V::load(weight)) };
        // SAFETY: as above.
        let (of_weight, of_bias) = unsafe { (V::load(dweight), V::load(dbias)) };
        dy.mul_add(x, of_weight).store(dweight);
        of_bias.add(dy).store(dbias);
        let g = dy.mul(weight);
        g_sum = g_sum.add(g);
        gx_sum = gx_sum.add(g.mul(x));
    }
    [g_sum.total(), gx_sum.total()]
}

/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn gradient<T: Float, V: Vector<T>>(
    [dy, x, weight]: [&[T]; 3],
    [mean, rstd]: [T; 2],
    [g_mean, gx_mean]: [T; 2],
    out: Out<'_, T>,
) {
    // SAFETY: the caller vouches for the instruction set, here and below.
    let (mean, rstd, g_mean, gx_mean) =
        unsafe { (V::splat(mean), V::splat(rstd), V::splat(g_mean), V::splat(-gx_mean)) };
    let given = dy.chunks_exact(V::LANES).zip(x.chunks_exact(V::LANES)).zip(weight.chunks_exact(V::LANES));
    for (((dy, x), weight), to) in given.zip(out.data.chunks_exact_mut(V::LANES)) {
        // SAFETY: as above.
        let (g, x) = unsafe { (V::load(dy).mul(V::load(weight)), V::load(x).sub(mean).mul(rstd)) };
        let dx = x.mul_add(gx_mean, g.sub(g_mean)).mul(rstd);
        // SAFETY: as above.
        let dx = if out.accumulate { unsafe { V::load(to) }.add(dx) } else { dx };
        dx.store(to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::cpu::isa::{Isa, limits};
    use tensor::rng::Philox;

    /// The gradient of x, added to what is there or not, and the sums, of five rows of `COUNT` registers, computed in
    /// either way.
    fn both_ways<T: Float, A: Arch, const COUNT: usize>(accumulate: bool) -> [(Vec<T>, Vec<T>); 2] {
        let channels = COUNT * A::Vector::<T>::LANES;
        let random = |seed, count| -> Vec<T> {
            let mut draws = Philox::keyed(seed, &[]).sequence();
            (0..count).map(|_| T::of(draws.uniform() - 0.5)).collect()
        };
        let ([dy, x], weight) = ([1, 2].map(|seed| random(seed, 5 * channels)), random(3, channels));
        let (mean, rstd) = (random(4, 5), random(5, 5));
        [false, true].map(|at_once| {
            let (mut dx, mut sums) = (random(6, 5 * channels), random(7, 2 * channels));
            let (out, moments) = (Some(Out { data: &mut dx, accumulate }), [&mean[..], &rstd[..]]);
            A::run(
                #[inline(always)]
                // SAFETY: `A::run` makes sure of the instruction set.
                || unsafe {
                    if at_once {
                        let given = [&dy[..], &x[..], &weight[..]];
                        backward_at_once::<T, A::Vector<T>, COUNT>(given, moments, out, &mut sums);
                    } else {
                        backward_in_two_sweeps::<T, A>(&dy, &x, &weight, moments, out, &mut sums);
                    }
                },
            );
            (dx, sums)
        })
    }

    #[test]
    fn rows_in_registers_have_the_bits_of_two_sweeps() {
        fn assert_same<T: Float, A: Arch>() {
            macro_rules! same {
                ($($count:literal)*) => {$(for accumulate in [false, true] {
                    let [sweeps, at_once] = both_ways::<T, A, $count>(accumulate);
                    assert!(sweeps == at_once, "{} registers", $count);
                })*};
            }
            same!(1 2 3 4 6);
        }
        for limited in limits(&Isa::SIMD) {
            simd!(limited.isa(), A => {
                assert_same::<f32, A>();
                assert_same::<f64, A>();
            });
        }
    }
}
