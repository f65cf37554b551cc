//! The normal distribution and its slope from tables, for registers that can look elements up in one.
//!
//! Both functions less ½ are odd, and constant for large x. Here |x| is cut into sixteen pieces, of which the last has the
//! constant, and in each of the others the function is a polynomial of degree 5 through its own values: six look-ups and
//! five multiply-adds, where [one polynomial](super::math) for all x takes fourteen or seventeen.

use super::isa::Plain;
use super::math::Transcendental;
use std::f64::consts::PI;
use std::sync::LazyLock;

/// As many as a register of f32s has elements.
pub(super) const PIECES: usize = 16;
const TERMS: usize = 6;

/// Φ(x) − ½ and Φ(x) + x·φ(x) − ½, for x of at least 0.
#[derive(Debug)]
pub struct Normal {
    pub(super) distribution: Table,
    pub(super) slope: Table,
}

/// A function in pieces, of which piece i lies around x = i / scale.
#[derive(Debug)]
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

/// The polynomial, highest power first, that agrees with a function where Chebyshev's is zero between -½ and ½: Newton's
/// divided differences, multiplied out.
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
