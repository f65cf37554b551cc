//! Vector registers by name.
//!
//! The compiler vectorises loops over slices well, but not sums that must stay in registers while other
//! loops pass: it keeps arrays of them in memory or builds them from shuffles, at a third of the speed.
//! Here a register is a value; what is done with it is left to [`Vector`].

use super::isa::{Arch, Fused, Plain};
use crate::Float;
use std::marker::PhantomData;

/// An instruction set with its widest registers.
pub trait Registers: Arch {
    /// A register of elements `T`.
    type Vector<T: Float>: Vector<T>;
    /// A smaller one, for what does not fill the other.
    type Half<T: Float>: Vector<T>;
}

/// A register of `LANES` elements, or several that act as one.
pub trait Vector<T: Float>: Copy {
    /// How many elements.
    const LANES: usize;

    /// Zeros.
    ///
    /// # Safety
    /// The machine must have the instruction set that the register belongs to.
    unsafe fn zero() -> Self;

    /// One element in all places.
    ///
    /// # Safety
    /// As of [`Vector::zero`].
    unsafe fn splat(element: T) -> Self;

    /// The first elements of a slice. Panics when there are too few.
    ///
    /// # Safety
    /// As of [`Vector::zero`].
    unsafe fn load(from: &[T]) -> Self;

    /// Writes the first elements of a slice. Panics when there are too few.
    fn store(self, to: &mut [T]);

    /// self + other
    fn add(self, other: Self) -> Self;

    /// self − other
    fn sub(self, other: Self) -> Self;

    /// self·other
    fn mul(self, other: Self) -> Self;

    /// The larger of each pair of elements; `other`'s where one of them is not a number.
    fn max(self, other: Self) -> Self;

    /// self·b + c
    fn mul_add(self, b: Self, c: Self) -> Self;

    /// The elements of both taken in turn, the first of each, the second of each, ..: two registers full.
    fn interleave(self, other: Self) -> [Self; 2];
}

/// No register has more elements.
pub const MOST_LANES: usize = 16;

/// Copies a run of elements register by register: for runs so short that a call would take longer. Panics when the
/// lengths differ.
///
/// # Safety
/// The machine must have the instruction set that the register `V` belongs to.
#[inline(always)]
pub unsafe fn copy_run<T: Float, V: Vector<T>>(to: &mut [T], from: &[T]) {
    assert_eq!(to.len(), from.len(), "lengths of a run");
    let whole = from.len() / V::LANES * V::LANES;
    for start in (0..whole).step_by(V::LANES) {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { V::load(&from[start..]) }.store(&mut to[start..]);
    }
    to[whole..].iter_mut().zip(&from[whole..]).for_each(|(to, &from)| *to = from);
}

/// `N` elements, one operation each; vectorised where the compiler can.
#[derive(Clone, Copy)]
pub struct Each<T, A, const N: usize>([T; N], PhantomData<A>);

impl<T: Float, A: Arch, const N: usize> Vector<T> for Each<T, A, N> {
    const LANES: usize = N;
    #[inline(always)]
    unsafe fn zero() -> Self {
        Each([T::zero(); N], PhantomData)
    }
    #[inline(always)]
    unsafe fn splat(element: T) -> Self {
        Each([element; N], PhantomData)
    }
    #[inline(always)]
    unsafe fn load(from: &[T]) -> Self {
        let mut lanes = [T::zero(); N];
        lanes.copy_from_slice(&from[..N]);
        Each(lanes, PhantomData)
    }
    #[inline(always)]
    fn store(self, to: &mut [T]) {
        to[..N].copy_from_slice(&self.0);
    }
    #[inline(always)]
    fn add(mut self, other: Self) -> Self {
        for lane in 0..N {
            self.0[lane] += other.0[lane];
        }
        self
    }
    #[inline(always)]
    fn sub(mut self, other: Self) -> Self {
        for lane in 0..N {
            self.0[lane] -= other.0[lane];
        }
        self
    }
    #[inline(always)]
    fn mul(mut self, other: Self) -> Self {
        for lane in 0..N {
            self.0[lane] *= other.0[lane];
        }
        self
    }
    #[inline(always)]
    fn max(mut self, other: Self) -> Self {
        for lane in 0..N {
            self.0[lane] = if self.0[lane] > other.0[lane] { self.0[lane] } else { other.0[lane] };
        }
        self
    }
    #[inline(always)]
    fn mul_add(self, b: Self, mut c: Self) -> Self {
        for lane in 0..N {
            c.0[lane] = A::mul_add(self.0[lane], b.0[lane], c.0[lane]);
        }
        c
    }
    #[inline(always)]
    fn interleave(self, other: Self) -> [Self; 2] {
        let turn = |place: usize| if place.is_multiple_of(2) { self.0[place / 2] } else { other.0[place / 2] };
        [0, N].map(|start| Each(std::array::from_fn(|lane| turn(start + lane)), PhantomData))
    }
}

impl Registers for Plain {
    type Vector<T: Float> = Each<T, Plain, 4>;
    type Half<T: Float> = Each<T, Plain, 2>;
}

#[cfg(not(target_arch = "x86_64"))]
impl<const WIDE: bool> Registers for Fused<WIDE> {
    type Vector<T: Float> = Each<T, Self, 4>;
    type Half<T: Float> = Each<T, Self, 2>;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::DType;
    use std::arch::x86_64::*;

    macro_rules! register {
        ($name:ident, $half:ty, $register:ty, $wide:literal, $bytes:literal, $cast:ident, $back:ident, $f32:tt, $f64:tt, $pairs:tt, $interleave:ident) => {
            /// A register whose bits are `T`s. Whoever has one is on a machine that has the instruction set.
            #[derive(Clone, Copy)]
            pub struct $name<T>($register, PhantomData<T>);

            impl Registers for Fused<$wide> {
                type Vector<T: Float> = $name<T>;
                type Half<T: Float> = $half;
            }

            impl<T: Float> Vector<T> for $name<T> {
                const LANES: usize = $bytes / size_of::<T>();
                register!(@ $cast, $back, $f32, $f64, $pairs);
                #[inline(always)]
                fn interleave(self, other: Self) -> [Self; 2] {
                    // SAFETY: that the registers exist vouches for the instruction set.
                    unsafe { $interleave(self.0, other.0, T::DTYPE) }.map(|register| Self(register, PhantomData))
                }
            }
        };
        (@ $cast:ident, $back:ident, [$zero:ident, $splat:ident, $load:ident, $store:ident, $fma:ident], [$splat64:ident, $fma64:ident], [$($name:ident $op:ident $op64:ident),*]) => {
            #[inline(always)]
            unsafe fn zero() -> Self {
                // SAFETY: the caller vouches for the instruction set.
                Self(unsafe { $zero() }, PhantomData)
            }
            #[inline(always)]
            unsafe fn splat(element: T) -> Self {
                // SAFETY: the caller vouches for the instruction set; the element is read as what it is.
                let register = unsafe {
                    match T::DTYPE {
                        DType::F64 => $back($splat64(std::mem::transmute_copy(&element))),
                        _ => $splat(std::mem::transmute_copy(&element)),
                    }
                };
                Self(register, PhantomData)
            }
            #[inline(always)]
            unsafe fn load(from: &[T]) -> Self {
                let from = &from[..Self::LANES];
                // SAFETY: as many elements as the register holds; the caller vouches for the instruction set.
                Self(unsafe { $load(from.as_ptr().cast()) }, PhantomData)
            }
            #[inline(always)]
            fn store(self, to: &mut [T]) {
                let to = &mut to[..Self::LANES];
                // SAFETY: as many elements as the register holds; that it exists vouches for the instruction set.
                unsafe { $store(to.as_mut_ptr().cast(), self.0) }
            }
            $(#[inline(always)]
            fn $name(self, other: Self) -> Self {
                // SAFETY: that the registers exist vouches for the instruction set.
                let result = unsafe {
                    match T::DTYPE {
                        DType::F64 => $back($op64($cast(self.0), $cast(other.0))),
                        _ => $op(self.0, other.0),
                    }
                };
                Self(result, PhantomData)
            })*
            #[inline(always)]
            fn mul_add(self, b: Self, c: Self) -> Self {
                // SAFETY: that the registers exist vouches for the instruction set.
                let sum = unsafe {
                    match T::DTYPE {
                        DType::F64 => $back($fma64($cast(self.0), $cast(b.0), $cast(c.0))),
                        _ => $fma(self.0, b.0, c.0),
                    }
                };
                Self(sum, PhantomData)
            }
        };
    }

    register!(
        Zmm,
        Ymm<T>,
        __m512,
        true,
        64,
        _mm512_castps_pd,
        _mm512_castpd_ps,
        [_mm512_setzero_ps, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps],
        [_mm512_set1_pd, _mm512_fmadd_pd],
        [
            add _mm512_add_ps _mm512_add_pd,
            sub _mm512_sub_ps _mm512_sub_pd,
            mul _mm512_mul_ps _mm512_mul_pd,
            max _mm512_max_ps _mm512_max_pd
        ],
        interleave_512
    );
    register!(
        Ymm,
        Each<T, Self, 4>,
        __m256,
        false,
        32,
        _mm256_castps_pd,
        _mm256_castpd_ps,
        [_mm256_setzero_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps],
        [_mm256_set1_pd, _mm256_fmadd_pd],
        [
            add _mm256_add_ps _mm256_add_pd,
            sub _mm256_sub_ps _mm256_sub_pd,
            mul _mm256_mul_ps _mm256_mul_pd,
            max _mm256_max_ps _mm256_max_pd
        ],
        interleave_256
    );

    /// # Safety
    /// The machine must have AVX-512 F.
    #[inline(always)]
    unsafe fn interleave_512(a: __m512, b: __m512, dtype: DType) -> [__m512; 2] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            if dtype == DType::F64 {
                let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
                let low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
                let high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
                [low, high].map(|order| _mm512_castpd_ps(_mm512_permutex2var_pd(a, order, b)))
            } else {
                let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
                let high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
                [low, high].map(|order| _mm512_permutex2var_ps(a, order, b))
            }
        }
    }

    /// # Safety
    /// The machine must have AVX.
    #[inline(always)]
    unsafe fn interleave_256(a: __m256, b: __m256, dtype: DType) -> [__m256; 2] {
        // Unpacking interleaves within each half of a register.
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let (low, high) = if dtype == DType::F64 {
                let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
                (_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)))
            } else {
                (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b))
            };
            [_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high)]
        }
    }
}

/// Repeats a statement with `$i` = 0, 1, .. below `$count`, at most 14, written out: the compiler leaves a
/// loop of many vector operations a loop, and then what `$i` indexes is in memory instead of registers.
#[macro_export]
macro_rules! unrolled {
    ($i:ident in 0..$count:expr => $body:block) => {
        $crate::unrolled!(@ $i, $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13)
    };
    (@ $i:ident, $count:expr, $body:block, $($n:literal)*) => {
        $(if $n < $count {
            let $i: usize = $n;
            $body
        })*
    };
}
