//! The registers of aarch64: each is a pair of NEON registers. So it has as many elements as an AVX2 register, there
//! are sixteen of them, as with AVX2, and kernels use the same tile shapes.
//!
//! A register holds bits, which are f32s or f64s according to the element type `T`. The functions are unsafe only
//! because they need NEON, which every aarch64 target of Rust with hardware floating point has.

use super::{Vector, one_by_one};
use crate::cpu::isa::{Arch, Plain, sealed::Sealed};
use crate::cpu::math::{EXP2, MIN_EXPONENT, ROUND_BIASED, Transcendental};
use crate::cpu::normal::Normal;
use crate::{DType, Float};
use std::arch::aarch64::*;
use std::marker::PhantomData;

/// Two registers whose bits are `T`s.
#[derive(Clone, Copy)]
pub struct Pair<T>([float32x4_t; 2], PhantomData<T>);

/// With NEON, which has fused multiply-add.
#[derive(Clone, Copy)]
pub struct Neon;

impl Sealed for Neon {}

impl Arch for Neon {
    type Vector<T: Float> = Pair<T>;
    const MANY_REGISTERS: bool = false;
    #[inline(always)]
    fn run<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(always)]
    fn mul_add<T: Float>(a: T, b: T, c: T) -> T {
        num_traits::Float::mul_add(a, b, c)
    }
}

impl<T: Float> Pair<T> {
    const DOUBLE: bool = matches!(T::DTYPE, DType::F64);

    /// Applies `single` to each half of these registers, or `double` if they hold f64s.
    #[inline(always)]
    fn by_halves<const N: usize>(
        registers: [Self; N],
        single: impl Fn([float32x4_t; N]) -> float32x4_t,
        double: impl Fn([float64x2_t; N]) -> float64x2_t,
    ) -> Self {
        let half = |i: usize| {
            let halves = registers.map(|register| register.0[i]);
            if !Self::DOUBLE {
                return single(halves);
            }
            // SAFETY: NEON is there.
            unsafe { vreinterpretq_f32_f64(double(halves.map(|half| vreinterpretq_f64_f32(half)))) }
        };
        Self([half(0), half(1)], PhantomData)
    }
}

impl<T: Float> Vector<T> for Pair<T> {
    const LANES: usize = 32 / size_of::<T>();

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: NEON is there, here and below; slices are as long as what is read or written.
        Self([unsafe { vdupq_n_f32(0.0) }; 2], PhantomData)
    }
    #[inline(always)]
    unsafe fn splat(element: T) -> Self {
        // The element is read as what it is.
        // SAFETY: as above.
        let half = unsafe {
            match T::DTYPE {
                DType::F64 => vreinterpretq_f32_f64(vdupq_n_f64(std::mem::transmute_copy(&element))),
                _ => vdupq_n_f32(std::mem::transmute_copy(&element)),
            }
        };
        Self([half; 2], PhantomData)
    }
    #[inline(always)]
    unsafe fn load(from: &[T]) -> Self {
        let from = from[..Self::LANES].as_ptr().cast::<f32>();
        // SAFETY: as above.
        Self(unsafe { [vld1q_f32(from), vld1q_f32(from.add(4))] }, PhantomData)
    }
    #[inline(always)]
    fn store(self, to: &mut [T]) {
        let to = to[..Self::LANES].as_mut_ptr().cast::<f32>();
        // SAFETY: as above.
        unsafe {
            vst1q_f32(to, self.0[0]);
            vst1q_f32(to.add(4), self.0[1]);
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        Self::by_halves([self, other], |[a, b]| unsafe { vaddq_f32(a, b) }, |[a, b]| unsafe { vaddq_f64(a, b) })
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: as above.
        Self::by_halves([self, other], |[a, b]| unsafe { vsubq_f32(a, b) }, |[a, b]| unsafe { vsubq_f64(a, b) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: as above.
        Self::by_halves([self, other], |[a, b]| unsafe { vmulq_f32(a, b) }, |[a, b]| unsafe { vmulq_f64(a, b) })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // Not NEON's own maximum, which is NaN if either element is NaN.
        Self::by_halves(
            [self, other],
            // SAFETY: as above.
            |[a, b]| unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) },
            // SAFETY: as above.
            |[a, b]| unsafe { vbslq_f64(vcgtq_f64(a, b), a, b) },
        )
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self::by_halves(
            [self, b, c],
            // SAFETY: as above.
            |[a, b, c]| unsafe { vfmaq_f32(c, a, b) },
            // SAFETY: as above.
            |[a, b, c]| unsafe { vfmaq_f64(c, a, b) },
        )
    }
    #[inline(always)]
    fn exp2(self) -> Self {
        if Self::DOUBLE {
            return one_by_one(self, |x| Transcendental::power_of_two::<Plain>(x));
        }
        // The steps of one number's.
        // SAFETY: as above.
        let splat = |x: f32| unsafe { Self([vdupq_n_f32(x); 2], PhantomData) };
        let x = splat(MIN_EXPONENT).max(self);
        let shifted = x.add(splat(ROUND_BIASED));
        let r = x.sub(shifted.sub(splat(ROUND_BIASED)));
        let mut series = splat(EXP2[0]);
        for coefficient in &EXP2[1..] {
            series = series.mul_add(r, splat(*coefficient));
        }
        // SAFETY: as above.
        let power =
            shifted.0.map(|half| unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(half))) });
        series.mul(Self(power, PhantomData))
    }
    #[inline(always)]
    fn normal_distribution(self, _normal: &Normal) -> Self {
        one_by_one(self, |x| Transcendental::normal_distribution::<Neon>(x))
    }
    #[inline(always)]
    fn normal_slope(self, _normal: &Normal) -> Self {
        one_by_one(self, |x| Transcendental::normal_slope::<Neon>(x))
    }
    #[inline(always)]
    fn interleave(self, other: Self) -> [Self; 2] {
        let halves = |i: usize| {
            let (a, b) = (self.0[i], other.0[i]);
            // SAFETY: as above.
            unsafe {
                if Self::DOUBLE {
                    let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
                    [vreinterpretq_f32_f64(vzip1q_f64(a, b)), vreinterpretq_f32_f64(vzip2q_f64(a, b))]
                } else {
                    [vzip1q_f32(a, b), vzip2q_f32(a, b)]
                }
            }
        };
        [Self(halves(0), PhantomData), Self(halves(1), PhantomData)]
    }
    #[inline(always)]
    unsafe fn load_quads(from: &[T]) -> Self {
        if Self::DOUBLE {
            // SAFETY: as above.
            return unsafe { Self::load(from) };
        }
        // SAFETY: as above.
        Self([unsafe { vld1q_f32(from[..4].as_ptr().cast()) }; 2], PhantomData)
    }
    #[inline(always)]
    unsafe fn spread(from: &[T]) -> Self {
        // SAFETY: as above.
        let (first, last) = unsafe { (Self::splat(from[0]), Self::splat(from[Self::LANES / 4 - 1])) };
        Self([first.0[0], last.0[0]], PhantomData)
    }
    #[inline(always)]
    fn swap_neighbours(self) -> Self {
        // SAFETY: as above.
        Self::by_halves([self], |[a]| unsafe { vrev64q_f32(a) }, |[a]| unsafe { vextq_f64::<1>(a, a) })
    }
    #[inline(always)]
    fn swap_pairs(self) -> Self {
        if Self::DOUBLE {
            return Self([self.0[1], self.0[0]], PhantomData);
        }
        // SAFETY: as above.
        Self::by_halves([self], |[a]| unsafe { vextq_f32::<2>(a, a) }, |[a]| a)
    }
}
