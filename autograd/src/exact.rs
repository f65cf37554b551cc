//! Dual numbers: exact derivatives of anything that is written over a [`Scalar`].
//!
//! A reference implementation is a function of [`Array`]s over any [`Scalar`]. Run on `f64` it defines
//! what an operation computes; run on [`Dual`] it gives, beside each value, the derivative along
//! [`LANES`] directions, exact to rounding. No step size has to be chosen, so checks
//! allow no more than 1e-10, and a constant that is wrong in its ninth digit shows.

use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// Directions that one pass over dual numbers differentiates along.
pub const LANES: usize = 8;

/// What a reference implementation computes with: `f64` or [`Dual`].
pub trait Scalar:
    Copy
    + std::fmt::Debug
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + std::iter::Sum
{
    /// A constant.
    fn of(value: f64) -> Self;
    /// The value without its derivatives: for decisions (which is larger?), which have none.
    fn value(self) -> f64;
    /// e^x
    fn exp(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The square root.
    fn sqrt(self) -> Self;
    /// The error function.
    fn erf(self) -> Self;
}

impl Scalar for f64 {
    fn of(value: f64) -> Self {
        value
    }
    fn value(self) -> f64 {
        self
    }
    fn exp(self) -> Self {
        f64::exp(self)
    }
    fn ln(self) -> Self {
        f64::ln(self)
    }
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }
    fn erf(self) -> Self {
        libm::erf(self)
    }
}

/// A number with its derivatives along [`LANES`] directions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dual {
    /// The number.
    pub value: f64,
    /// Its derivatives.
    pub tangent: [f64; LANES],
}

impl Dual {
    /// f(x), given f's value and derivative at x: the chain rule.
    fn chain(self, value: f64, derivative: f64) -> Self {
        Dual { value, tangent: self.tangent.map(|t| derivative * t) }
    }

    fn combine(self, other: Self, value: f64, by_self: f64, by_other: f64) -> Self {
        let tangent = std::array::from_fn(|lane| by_self * self.tangent[lane] + by_other * other.tangent[lane]);
        Dual { value, tangent }
    }
}

impl Add for Dual {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        self.combine(other, self.value + other.value, 1.0, 1.0)
    }
}

impl Sub for Dual {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self.combine(other, self.value - other.value, 1.0, -1.0)
    }
}

impl Mul for Dual {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        self.combine(other, self.value * other.value, other.value, self.value)
    }
}

impl Div for Dual {
    type Output = Self;
    fn div(self, other: Self) -> Self {
        let quotient = self.value / other.value;
        self.combine(other, quotient, 1.0 / other.value, -quotient / other.value)
    }
}

impl Neg for Dual {
    type Output = Self;
    fn neg(self) -> Self {
        self.chain(-self.value, -1.0)
    }
}

impl AddAssign for Dual {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::iter::Sum for Dual {
    fn sum<I: Iterator<Item = Self>>(terms: I) -> Self {
        terms.fold(Self::of(0.0), Add::add)
    }
}

impl Scalar for Dual {
    fn of(value: f64) -> Self {
        Dual { value, tangent: [0.0; LANES] }
    }
    fn value(self) -> f64 {
        self.value
    }
    fn exp(self) -> Self {
        let value = self.value.exp();
        self.chain(value, value)
    }
    fn ln(self) -> Self {
        self.chain(self.value.ln(), 1.0 / self.value)
    }
    fn sqrt(self) -> Self {
        let value = self.value.sqrt();
        self.chain(value, 0.5 / value)
    }
    fn erf(self) -> Self {
        let derivative = std::f64::consts::FRAC_2_SQRT_PI * (-self.value * self.value).exp();
        self.chain(libm::erf(self.value), derivative)
    }
}

/// A contiguous array of scalars: what reference implementations take and give.
#[derive(Clone, Debug, PartialEq)]
pub struct Array<S> {
    /// The extents.
    pub shape: Vec<usize>,
    /// The elements, last axis fastest.
    pub data: Vec<S>,
}

impl<S: Scalar> Array<S> {
    /// An array of zeros.
    pub fn zeros(shape: &[usize]) -> Self {
        Array { shape: shape.to_vec(), data: vec![S::of(0.0); shape.iter().product()] }
    }

    /// An array from a function of the position.
    pub fn from_fn(shape: &[usize], f: impl Fn(&[usize]) -> S) -> Self {
        let mut array = Self::zeros(shape);
        let mut position = vec![0; shape.len()];
        for place in 0..array.data.len() {
            let mut rest = place;
            for axis in (0..shape.len()).rev() {
                position[axis] = rest % shape[axis];
                rest /= shape[axis];
            }
            array.data[place] = f(&position);
        }
        array
    }

    /// The extents as an array of length `N`. Panics if the number of axes is not `N`.
    pub fn dims<const N: usize>(&self) -> [usize; N] {
        self.shape[..].try_into().expect("number of axes of a reference array")
    }

    /// The place of a position among the elements.
    fn place(&self, position: &[usize]) -> usize {
        assert_eq!(position.len(), self.shape.len(), "number of axes of a reference array");
        position.iter().zip(&self.shape).fold(0, |place, (&i, &extent)| {
            assert!(i < extent, "position {position:?} of a reference array of shape {:?}", self.shape);
            place * extent + i
        })
    }

    /// The element at a position.
    pub fn at(&self, position: &[usize]) -> S {
        self.data[self.place(position)]
    }

    /// The element at a position, to be written.
    pub fn at_mut(&mut self, position: &[usize]) -> &mut S {
        let place = self.place(position);
        &mut self.data[place]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::PI;

    const X: f64 = 0.7;
    const Y: f64 = 1.9;

    fn variable(value: f64, lane: usize) -> Dual {
        let mut tangent = [0.0; LANES];
        tangent[lane] = 1.0;
        Dual { value, tangent }
    }

    /// A function of two variables on both kinds of scalars: its value at (X, Y), and its derivatives.
    macro_rules! check {
        (|$x:ident, $y:ident| $f:expr, $value:expr, [$by_x:expr, $by_y:expr]) => {{
            fn f<S: Scalar>($x: S, $y: S) -> S {
                $f
            }
            let what = stringify!($f);
            let dual = f(variable(X, 0), variable(Y, 1));
            assert_eq!(Scalar::value(dual), Scalar::value(f(X, Y)), "{what}");
            assert!((dual.value - $value).abs() < 1e-14, "{what}: {dual:?}");
            for (lane, derivative) in [$by_x, $by_y].into_iter().chain([0.0; LANES - 2]).enumerate() {
                assert!((dual.tangent[lane] - derivative).abs() < 1e-14, "{what}: {dual:?}");
            }
        }};
    }

    #[test]
    fn values_and_derivatives_of_each_function() {
        check!(|x, y| x + y * S::of(0.5), X + 0.5 * Y, [1.0, 0.5]);
        check!(|x, y| x - y, X - Y, [1.0, -1.0]);
        check!(|x, y| x * y * y, X * Y * Y, [Y * Y, 2.0 * X * Y]);
        check!(|x, y| x / y, X / Y, [1.0 / Y, -X / (Y * Y)]);
        check!(|x, y| -x * y, -X * Y, [-Y, -X]);
        check!(|x, y| (x * y).exp(), (X * Y).exp(), [Y * (X * Y).exp(), X * (X * Y).exp()]);
        check!(|x, y| (x * x + y).ln(), (X * X + Y).ln(), [2.0 * X / (X * X + Y), 1.0 / (X * X + Y)]);
        check!(|x, y| (x * y).sqrt(), (X * Y).sqrt(), [0.5 * (Y / X).sqrt(), 0.5 * (X / Y).sqrt()]);
        // erf(0.7)
        check!(|x, _y| x.erf(), 0.677_801_193_837_418_4, [2.0 / PI.sqrt() * (-X * X).exp(), 0.0]);
        check!(|x, y| [x, y, x].into_iter().sum(), 2.0 * X + Y, [2.0, 1.0]);
        check!(
            |x, y| {
                let mut sum = x;
                sum += y * y;
                sum
            },
            X + Y * Y,
            [1.0, 2.0 * Y]
        );
    }

    #[test]
    fn elements_are_found_by_their_positions() {
        let mut array = Array::from_fn(&[2, 3], |position| (10 * position[0] + position[1]) as f64);
        assert_eq!(array.data, [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]);
        assert_eq!((array.dims(), array.place(&[1, 2]), array.at(&[1, 2])), ([2, 3], 5, 12.0));
        *array.at_mut(&[0, 1]) = 7.0;
        assert_eq!(array.data[1], 7.0);
    }
}
