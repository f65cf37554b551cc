//! exp, ln and erf without branches or table look-ups, so that loops over them vectorise in f32. In f64,
//! which only checks use, they are the C library's and `libm`'s.

use super::isa::Arch;
use crate::Float;

/// The transcendental functions of a floating-point type, in the form that kernels call.
pub trait Transcendental: Sized {
    /// e^x. In f32: relative error below 2 ulp; 0 below x = -86.6 (no denormal results); NaN stays NaN.
    fn exp<A: Arch>(self) -> Self;
    /// The natural logarithm of a positive number. In f32: within 2 ulp of ln x, or 1e-7 near x = 1; of denormal
    /// numbers, zero and negative numbers it is not a logarithm; infinity and NaN stay what they are.
    fn logarithm<A: Arch>(self) -> Self;
    /// The error function. In f32: absolute error below 5e-7.
    fn erf<A: Arch>(self) -> Self;
}

impl Transcendental for f64 {
    #[inline(always)]
    fn exp<A: Arch>(self) -> Self {
        f64::exp(self)
    }
    #[inline(always)]
    fn logarithm<A: Arch>(self) -> Self {
        f64::ln(self)
    }
    #[inline(always)]
    fn erf<A: Arch>(self) -> Self {
        libm::erf(self)
    }
}

const LN_2_HIGH: f32 = 0.693_359_4; // its last bits are zero, so n·LN_2_HIGH is exact
const LN_2_LOW: f32 = -2.121_944_4e-4;

impl Transcendental for f32 {
    /// x = n·ln 2 + r with |r| <= ln 2 / 2; e^r by Taylor's series to r^7 (whose next term is below
    /// 5.2e-9); and 2^n is put together from its bits.
    #[inline(always)]
    fn exp<A: Arch>(self) -> f32 {
        // Adding and subtracting 1.5 * 2^23 rounds to an integer in the default rounding mode.
        const ROUND: f32 = 12_582_912.0;
        let x = if self > 88.72 { 88.72 } else { self };
        let shifted = A::mul_add(x, std::f32::consts::LOG2_E, ROUND);
        let n = shifted - ROUND;
        let r = A::mul_add(n, -LN_2_HIGH, x);
        let r = A::mul_add(n, -LN_2_LOW, r);
        let series = horner::<A, _>(r, [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0]);
        // n as an integer is what the addition of ROUND left in the low bits: unlike `n as i32`, which must
        // saturate, this vectorises. 2^128 is not an f32, so 2^n is made as 2 · 2^(n-1).
        let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(126);
        let half_power = f32::from_bits(exponent << 23);
        let value = series * half_power * 2.0;
        let value = if x < -86.6 { 0.0 } else { value };
        if self > 88.72 { f32::INFINITY } else { value }
    }

    /// x = 2^n·m with m in [√½, √2); ln m = f − f²/2 + f³·P(f) with f = m − 1. The coefficients are those of
    /// Cephes' `logf`.
    #[inline(always)]
    fn logarithm<A: Arch>(self) -> f32 {
        const ROOT_HALF: u32 = std::f32::consts::FRAC_1_SQRT_2.to_bits();
        let above = self.to_bits().wrapping_sub(ROOT_HALF);
        let n = (above as i32 >> 23) as f32;
        let f = f32::from_bits((above & 0x007f_ffff) + ROOT_HALF) - 1.0;
        let series = horner::<A, _>(
            f,
            [
                7.037_683_6e-2,
                -1.151_461e-1,
                1.167_699_9e-1,
                -1.242_014_1e-1,
                1.424_932_3e-1,
                -1.666_805_8e-1,
                2.000_071_5e-1,
                -2.499_999_4e-1,
                3.333_333e-1,
            ],
        );
        let square = f * f;
        let low = A::mul_add(series * f, square, n * LN_2_LOW);
        let value = A::mul_add(-0.5, square, low) + f;
        let value = A::mul_add(n, LN_2_HIGH, value);
        if self < f32::INFINITY { value } else { self }
    }

    /// x·P(x²)/Q(x²) on [-4, 4], beyond which erf is ±1 in f32. The coefficients minimise the largest
    /// relative error (6.5e-8 before rounding); they were found by reweighted least squares on
    /// Chebyshev nodes.
    #[inline(always)]
    fn erf<A: Arch>(self) -> f32 {
        let x = if self > 4.0 { 4.0 } else { self };
        let x = if x < -4.0 { -4.0 } else { x };
        let t = x * x;
        let numerator = horner::<A, _>(
            t,
            [
                1.911_101_1e-8,
                -1.942_299_4e-6,
                1.472_825_8e-4,
                3.990_414e-3,
                5.152_438_6e-2,
                2.071_215_8e-1,
                std::f32::consts::FRAC_2_SQRT_PI,
            ],
        );
        let denominator = horner::<A, _>(t, [1.021_074e-3, 1.495_775e-2, 1.179_692_2e-1, 5.168_88e-1, 1.0]);
        // Exactly ±1 from there on, so that GELU's left tail is exactly 0.
        let value = x * numerator / denominator;
        let value = if self >= 4.0 { 1.0 } else { value };
        if self <= -4.0 { -1.0 } else { value }
    }
}

/// The polynomial with these coefficients, highest power first.
#[inline(always)]
fn horner<A: Arch, const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let [first, rest @ ..] = coefficients.as_slice() else { return 0.0 };
    rest.iter().fold(*first, |sum, &coefficient| A::mul_add(sum, x, coefficient))
}

/// The density of the standard normal distribution.
#[inline(always)]
pub fn normal_density<T: Float, A: Arch>(x: T) -> T {
    <T as Transcendental>::exp::<A>(T::of(-0.5) * x * x) * T::of(0.398_942_280_401_432_7)
}

/// The distribution function of the standard normal distribution, (1 + erf(x/√2)) / 2.
#[inline(always)]
pub fn normal_distribution<T: Float, A: Arch>(x: T) -> T {
    let half = T::of(0.5);
    A::mul_add(half, (x * T::of(std::f64::consts::FRAC_1_SQRT_2)).erf::<A>(), half)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Fused, Plain};

    fn every_arch(check: impl Fn(fn(f32) -> f32, fn(f32) -> f32)) {
        check(<f32 as Transcendental>::exp::<Plain>, <f32 as Transcendental>::erf::<Plain>);
        check(<f32 as Transcendental>::exp::<Fused<true>>, <f32 as Transcendental>::erf::<Fused<true>>);
    }

    #[test]
    fn exp_is_within_two_ulp() {
        every_arch(|exp, _| {
            for i in -86_599..=88_700 {
                let x = i as f32 * 1e-3;
                let exact = f64::from(x).exp();
                assert!((f64::from(exp(x)) / exact - 1.0).abs() < 2.4e-7, "exp({x}) = {}, not {exact}", exp(x));
            }
            assert_eq!(exp(0.0), 1.0);
            assert_eq!(exp(-100.0), 0.0);
            assert_eq!(exp(f32::NEG_INFINITY), 0.0);
            assert_eq!(exp(f32::INFINITY), f32::INFINITY);
            assert_eq!(exp(89.0), f32::INFINITY);
            assert!(exp(f32::NAN).is_nan());
        });
    }

    #[test]
    fn logarithm_is_within_two_ulp() {
        for ln in [<f32 as Transcendental>::logarithm::<Plain>, <f32 as Transcendental>::logarithm::<Fused<true>>] {
            for bits in (f32::MIN_POSITIVE.to_bits()..f32::INFINITY.to_bits()).step_by(4099) {
                let x = f32::from_bits(bits);
                let exact = f64::from(x).ln();
                let error = (f64::from(ln(x)) - exact).abs();
                assert!(error <= (2.4e-7 * exact.abs()).max(1e-7), "ln({x}) = {}, not {exact}", ln(x));
            }
            assert_eq!(ln(1.0), 0.0);
            assert_eq!(ln(f32::INFINITY), f32::INFINITY);
            assert!(ln(f32::NAN).is_nan());
        }
    }

    #[test]
    fn erf_is_within_its_bound() {
        every_arch(|_, erf| {
            for i in -60_000..=60_000 {
                let x = i as f32 * 1e-4;
                assert!((f64::from(erf(x)) - libm::erf(f64::from(x))).abs() < 5e-7, "erf({x}) = {}", erf(x));
            }
            assert!(erf(f32::NAN).is_nan());
            assert_eq!([erf(f32::INFINITY), erf(-5.0)], [1.0, -1.0]);
        });
    }
}
