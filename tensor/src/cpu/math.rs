//! exp, ln and the normal distribution without branches or table look-ups, so that loops over them vectorise in f32. In
//! f64, which only checks use, they are those of the crate `libm`, which has the same bits on every system.

use super::isa::Arch;

/// The transcendental functions of a floating-point type, in the form that kernels call.
pub trait Transcendental: Sized {
    /// e^x. In f32: relative error below 2 ulp; 0 below x = -86.6 (no denormal results), infinity above x = 88.72;
    /// NaN stays NaN.
    fn exponential<A: Arch>(self) -> Self;
    /// 2^x for x of at most 1: the weights of a softmax, at less cost than [`exponential`](Self::exponential). In f32:
    /// relative error below 2 ulp, and none at 0; 2^-126 for all x below -126; NaN stays NaN.
    fn power_of_two<A: Arch>(self) -> Self;
    /// The natural logarithm of a positive number. In f32: within 2 ulp of ln x, or 1e-7 near x = 1; meaningless for
    /// denormal numbers, zero and negative numbers; infinity and NaN are returned unchanged.
    fn logarithm<A: Arch>(self) -> Self;
    /// Φ(x), the distribution function of the standard normal distribution. In f32: absolute error below 2e-7, and
    /// exactly 0 or 1 where |x| > 5.6.
    fn normal_distribution<A: Arch>(self) -> Self;
    /// Φ(x) + x·φ(x), with φ the density: the slope of x·Φ(x). In f32: absolute error below 3e-7, and exactly 0 or 1
    /// where |x| > 5.8.
    fn normal_slope<A: Arch>(self) -> Self;
}

impl Transcendental for f64 {
    #[inline(always)]
    fn exponential<A: Arch>(self) -> Self {
        libm::exp(self)
    }
    #[inline(always)]
    fn power_of_two<A: Arch>(self) -> Self {
        libm::exp2(self)
    }
    #[inline(always)]
    fn logarithm<A: Arch>(self) -> Self {
        libm::log(self)
    }
    #[inline(always)]
    fn normal_distribution<A: Arch>(self) -> Self {
        0.5 * (1.0 + libm::erf(self * std::f64::consts::FRAC_1_SQRT_2))
    }
    #[inline(always)]
    fn normal_slope<A: Arch>(self) -> Self {
        const ROOT_TAU: f64 = 2.506_628_274_631_000_5;
        self.normal_distribution::<A>() + self * libm::exp(-0.5 * self * self) / ROOT_TAU
    }
}

const LN_2_HIGH: f32 = 0.693_359_4; // its last bits are zero, so n·LN_2_HIGH is exact
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Adding and subtracting 1.5 * 2^23 rounds to an integer in the default rounding mode. The sum's low bits are the
/// integer.
pub(super) const ROUND: f32 = 12_582_912.0;
/// As [`ROUND`], and the low bits are the integer with the bias of an exponent: shifted into their place, a power of
/// two.
pub(super) const ROUND_BIASED: f32 = ROUND + 127.0;
/// 2^x by a polynomial (highest power first) of smallest relative error, 2.6e-9, where |x| <= ½.
pub(super) const EXP2: [f32; 7] =
    [1.559_467_8e-4, 1.340_664_3e-3, 9.617_693e-3, 5.550_310_4e-2, 2.402_265_2e-1, 6.931_472_4e-1, 1.0];
/// Powers of two with a smaller exponent are not normal numbers.
pub(super) const MIN_EXPONENT: f32 = -126.0;

impl Transcendental for f32 {
    /// x = n·ln 2 + r with |r| <= ln 2 / 2; e^r by Taylor's series to r^7 (whose next term is below
    /// 5.2e-9); and 2^n is put together from its bits.
    #[inline(always)]
    fn exponential<A: Arch>(self) -> f32 {
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

    /// x = n + r with |r| <= ½; 2^r by a polynomial of degree 6 with the smallest relative error, 2.6e-9; times 2^n,
    /// put together from its bits. Adding n to the exponent bits of 2^r would be as accurate, but could turn NaN into a
    /// number.
    #[inline(always)]
    fn power_of_two<A: Arch>(self) -> f32 {
        let x = if self < MIN_EXPONENT { MIN_EXPONENT } else { self };
        let shifted = x + ROUND_BIASED;
        let series = horner::<A, _>(x - (shifted - ROUND_BIASED), EXP2);
        series * f32::from_bits(shifted.to_bits() << 23)
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

    /// ½ + x·P(x²) on [-5.5, 5.5], beyond which it is 0 or 1 in f32.
    #[inline(always)]
    fn normal_distribution<A: Arch>(self) -> f32 {
        let odd = self
            * even::<A, _>(
                self,
                5.5,
                [
                    5.380_764_5e-4,
                    -1.368_828_9e-3,
                    1.023_85e-3,
                    -1.229_402_4e-3,
                    4.236_370_3e-3,
                    -7.674_669e-3,
                    1.046_862_8e-2,
                    -1.467_136_6e-2,
                    2.028_798e-2,
                    -2.611_246_9e-2,
                    3.208_174e-2,
                    -3.878_726_8e-2,
                    4.773_699e-2,
                    -6.417_248e-2,
                    1.285_519_5e-1,
                ],
            );
        let odd = if odd > 0.5 { 0.5 } else { odd };
        let odd = if odd < -0.5 { -0.5 } else { odd };
        0.5 + odd
    }

    /// ½ + x·P(x²) on [-5.8, 5.8], beyond which it differs from 0 and 1 by less than 1.2e-7.
    #[inline(always)]
    fn normal_slope<A: Arch>(self) -> f32 {
        const END: f32 = 5.8;
        let odd = self
            * even::<A, _>(
                self,
                END,
                [
                    -2.925_559_6e-3,
                    7.334_79e-3,
                    -2.943_150_5e-3,
                    3.649_952_4e-4,
                    -1.785_221_1e-2,
                    3.496_816_8e-2,
                    -3.657_151_8e-2,
                    4.373_257_6e-2,
                    -6.029_710_5e-2,
                    6.976_228e-2,
                    -6.967_926e-2,
                    6.508_76e-2,
                    -5.771_541_2e-2,
                    5.016_049_4e-2,
                    -4.619_704e-2,
                    4.863_595_6e-2,
                    -6.165_747e-2,
                    1.219_987_7e-1,
                ],
            );
        let slope = 0.5 + odd;
        let slope = if self > END { 1.0 } else { slope };
        if self < -END { 0.0 } else { slope }
    }
}

/// P(x²) for |x| up to `end`, and its value at `end` for larger ones. Evaluated in x², it would lose its precision to
/// cancellation; in u = 2·(x/end)² − 1, which lies between -1 and 1, it keeps it. The coefficients (highest power of u
/// first) minimise the largest absolute error of x·P(x²); they were found by reweighted least squares on Chebyshev
/// nodes.
#[inline(always)]
fn even<A: Arch, const N: usize>(x: f32, end: f32, coefficients: [f32; N]) -> f32 {
    let square = x * x;
    let square = if square > end * end { end * end } else { square };
    horner::<A, _>(A::mul_add(square, 2.0 / (end * end), -1.0), coefficients)
}

/// The polynomial with these coefficients, highest power first.
#[inline(always)]
fn horner<A: Arch, const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let [first, rest @ ..] = coefficients.as_slice() else { return 0.0 };
    rest.iter().fold(*first, |sum, &coefficient| A::mul_add(sum, x, coefficient))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, limits};
    use crate::simd;

    /// NaNs with several payloads: arithmetic on bits could turn some of them into numbers.
    const NANS: [f32; 4] = [f32::NAN, -f32::NAN, f32::from_bits(0x7fc0_0001), f32::from_bits(u32::MAX)];

    /// Runs a check as it is compiled for each instruction set.
    macro_rules! on_every_instruction_set {
        ($check:ident) => {
            for _limited in limits(&Isa::SIMD) {
                simd!(A => $check::<A>());
            }
        };
    }

    #[test]
    fn exp_is_within_two_ulp() {
        #[inline(always)]
        fn check<A: Arch>() {
            let exp = |x: f32| Transcendental::exponential::<A>(x);
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
            assert!(NANS.iter().all(|&nan| exp(nan).is_nan()));
        }
        on_every_instruction_set!(check);
    }

    #[test]
    fn exp2_is_within_two_ulp() {
        #[inline(always)]
        fn check<A: Arch>() {
            let exp2 = |x: f32| Transcendental::power_of_two::<A>(x);
            for i in -126_000..=1_000 {
                let x = i as f32 / 1e3;
                let exact = f64::from(x).exp2();
                assert!((f64::from(exp2(x)) / exact - 1.0).abs() < 2.4e-7, "exp2({x}) = {}, not {exact}", exp2(x));
            }
            assert_eq!([exp2(0.0), exp2(1.0)], [1.0, 2.0]);
            for low in [-126.5, -1e30, f32::NEG_INFINITY] {
                assert_eq!(exp2(low), f32::MIN_POSITIVE);
            }
            assert!(NANS.iter().all(|&nan| exp2(nan).is_nan()));
        }
        on_every_instruction_set!(check);
    }

    #[test]
    fn logarithm_is_within_two_ulp() {
        #[inline(always)]
        fn check<A: Arch>() {
            let ln = |x: f32| Transcendental::logarithm::<A>(x);
            for bits in (f32::MIN_POSITIVE.to_bits()..f32::INFINITY.to_bits()).step_by(4099) {
                let x = f32::from_bits(bits);
                let exact = f64::from(x).ln();
                let error = (f64::from(ln(x)) - exact).abs();
                assert!(error <= (2.4e-7 * exact.abs()).max(1e-7), "ln({x}) = {}, not {exact}", ln(x));
            }
            assert_eq!(ln(1.0), 0.0);
            assert_eq!(ln(f32::INFINITY), f32::INFINITY);
            assert!(NANS.iter().all(|&nan| ln(nan).is_nan()));
        }
        on_every_instruction_set!(check);
    }

    #[test]
    fn the_normal_distribution_and_its_slope_are_within_their_bounds() {
        #[inline(always)]
        fn check<A: Arch>() {
            let distribution = |x: f32| Transcendental::normal_distribution::<A>(x);
            let slope = |x: f32| Transcendental::normal_slope::<A>(x);
            for x in (-80_000..=80_000).map(|i| i as f32 * 1e-4) {
                let wide = f64::from(x);
                let exact = [wide.normal_distribution::<A>(), wide.normal_slope::<A>()];
                assert!((f64::from(distribution(x)) - exact[0]).abs() < 2e-7, "Φ({x}) = {}", distribution(x));
                assert!((f64::from(slope(x)) - exact[1]).abs() < 3e-7, "the slope at {x} is {}", slope(x));
            }
            for large in [5.8f32.next_up(), 1e10, f32::MAX, f32::INFINITY] {
                assert_eq!([slope(large), slope(-large)], [1.0, 0.0], "at {large}");
            }
            for large in [5.6f32.next_up(), 1e10, f32::MAX, f32::INFINITY] {
                assert_eq!([distribution(large), distribution(-large)], [1.0, 0.0], "at {large}");
            }
            assert!(NANS.iter().all(|&nan| distribution(nan).is_nan() && slope(nan).is_nan()));
        }
        on_every_instruction_set!(check);
    }
}
