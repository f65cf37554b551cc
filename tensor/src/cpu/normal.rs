//! The normal distribution and its slope from tables, for instruction sets that can look elements up in a register.
//!
//! Both functions less ½ are odd, and constant for large x. Here |x| is divided into sixteen pieces. The last one holds
//! the constant; in each of the others a polynomial of degree 5 interpolates the function. That takes six look-ups and
//! five multiply-adds, where [one polynomial](super::math) for all x takes fourteen or seventeen multiply-adds.

use super::isa::Plain;
use super::math::Transcendental;
use std::f64::consts::PI;
use std::sync::LazyLock;

/// As many as an AVX-512 register has f32 lanes.
pub(super) const PIECES: usize = 16;
const TERMS: usize = 6;

/// Φ(x) − ½ and Φ(x) + x·φ(x) − ½, for x of at least 0.
#[derive(Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only AVX-512 looks elements up
pub struct Normal {
    pub(super) distribution: Table,
    pub(super) slope: Table,
}

/// A piecewise polynomial, whose piece i is centred at x = i / scale.
#[derive(Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // as above
pub(super) struct Table {
    pub scale: f32,
    /// The coefficients of each piece's polynomial in x·scale − i, highest power first.
    pub terms: [[f32; PIECES]; TERMS],
}

static NORMAL: LazyLock<Normal> = LazyLock::new(|| Normal {
    distribution: Table::new(5.6, |x| x.normal_distribution::<Plain>() - 0.5),
    slope: Table::new(5.8, |x| x.normal_slope::<Plain>() - 0.5),
});

impl Normal {
    /// The tables, which are made when they are first asked for.
    pub fn tables() -> &'static Self {
        &NORMAL
    }
}

impl Table {
    /// Of a function that is ½ from `end` on.
    fn new(end: f64, function: impl Fn(f64) -> f64) -> Self {
        let last = PIECES - 1;
        let scale = (last as f64 - 0.5) / end;
        let mut terms = [[0.0; PIECES]; TERMS];
        terms[TERMS - 1][last] = 0.5;
        for piece in 0..last {
            let polynomial = interpolated(|t| function((piece as f64 + t) / scale));
            terms.iter_mut().zip(polynomial).for_each(|(terms, term)| terms[piece] = term as f32);
        }
        Table { scale: scale as f32, terms }
    }
}

/// The polynomial, highest power first, that interpolates a function at the Chebyshev nodes of [-½, ½]: Newton's
/// divided differences, expanded into powers.
fn interpolated(function: impl Fn(f64) -> f64) -> [f64; TERMS] {
    let nodes: [f64; TERMS] = std::array::from_fn(|k| 0.5 * libm::cos(PI * (k as f64 + 0.5) / TERMS as f64));
    let mut differences = nodes.map(function);
    for order in 1..TERMS {
        for k in (order..TERMS).rev() {
            differences[k] = (differences[k] - differences[k - 1]) / (nodes[k] - nodes[k - order]);
        }
    }
    let mut polynomial = [0.0; TERMS];
    for (node, difference) in nodes.iter().zip(differences).rev() {
        // polynomial·(t − node) + difference
        let lower = polynomial;
        polynomial.rotate_left(1);
        polynomial[TERMS - 1] = difference;
        polynomial.iter_mut().zip(lower).for_each(|(term, below)| *term -= node * below);
    }
    polynomial
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Arch, Isa, limits};
    use crate::cpu::registers::{MAX_LANES, Vector};
    use crate::simd;

    #[inline(always)]
    fn functions<A: Arch>(x: f32) -> [f32; 2] {
        let (normal, mut values) = (Normal::tables(), [[0.0; MAX_LANES]; 2]);
        // SAFETY: the caller has chosen an instruction set that is there.
        let x = unsafe { A::Vector::<f32>::splat(x) };
        x.normal_distribution(normal).store(&mut values[0]);
        x.normal_slope(normal).store(&mut values[1]);
        values.map(|values| values[A::Vector::<f32>::LANES - 1])
    }

    #[inline(always)]
    fn check<A: Arch>() {
        for x in (-80_000..=80_000).map(|i| i as f32 * 1e-4) {
            let wide = f64::from(x);
            let exact = [wide.normal_distribution::<Plain>(), wide.normal_slope::<Plain>()];
            let values = functions::<A>(x);
            assert!((f64::from(values[0]) - exact[0]).abs() < 2e-7, "Φ({x}) = {}", values[0]);
            assert!((f64::from(values[1]) - exact[1]).abs() < 3e-7, "the slope at {x} is {}", values[1]);
        }
        for (function, end) in [5.6f32, 5.8].into_iter().enumerate() {
            for large in [end.next_up(), 1e10, f32::MAX, f32::INFINITY] {
                assert_eq!([large, -large].map(|x| functions::<A>(x)[function]), [1.0, 0.0], "at {large}");
            }
        }
        assert!(functions::<A>(f32::NAN).iter().all(|value| value.is_nan()));
    }

    #[test]
    fn registers_are_within_the_bounds_of_single_numbers_on_every_instruction_set() {
        for _limited in limits(&Isa::SIMD) {
            simd!(A => check::<A>());
        }
    }
}
