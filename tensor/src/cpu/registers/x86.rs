//! The registers of x86-64: AVX-512's and AVX2's.
//!
//! A register holds bits, which are f32s or f64s according to the element type `T`.

use super::{Vector, one_by_one};
use crate::cpu::isa::{Arch, Isa, Plain, sealed::Sealed};
use crate::cpu::math::{EXP2, MIN_EXPONENT, ROUND, ROUND_BIASED, Transcendental};
use crate::cpu::normal::{Normal, PIECES, Table};
use crate::{DType, Float};
use std::arch::x86_64::*;
use std::marker::PhantomData;

macro_rules! register {
    ($arch:ident, $features:tt, $many:literal, $name:ident, $register:ty, $bytes:literal, $cast:ident, $back:ident, $f32:tt, $f64:tt, $pairs:tt, $interleave:ident, $quads:ident, $spread:ident, $swap:ident, $half_plus_odd:ident, $exponent:tt) => {
        /// A register whose bits are `T`s. That a value of this type exists proves that the machine has the instruction
        /// set.
        #[derive(Clone, Copy)]
        pub struct $name<T>($register, PhantomData<T>);

        #[doc = concat!("With ", $features, ".")]
        #[derive(Clone, Copy)]
        pub struct $arch;

        impl Sealed for $arch {}

        impl Arch for $arch {
            type Vector<T: Float> = $name<T>;
            const MANY_REGISTERS: bool = $many;
            #[inline(always)]
            fn run<R>(f: impl FnOnce() -> R) -> R {
                #[inline(never)]
                #[target_feature(enable = $features)]
                fn compiled<R>(f: impl FnOnce() -> R) -> R {
                    f()
                }
                assert!(Isa::detected() >= Isa::$arch);
                // SAFETY: the machine has these features.
                unsafe { compiled(f) }
            }
            #[inline(always)]
            fn mul_add<T: Float>(a: T, b: T, c: T) -> T {
                num_traits::Float::mul_add(a, b, c)
            }
        }

        impl<T: Float> Vector<T> for $name<T> {
            const LANES: usize = $bytes / size_of::<T>();
            register!(@ $cast, $back, $f32, $f64, $pairs, $exponent);
            register!(@ normal_distribution, distribution, $arch, $half_plus_odd);
            register!(@ normal_slope, slope, $arch, $half_plus_odd);
            #[inline(always)]
            fn interleave(self, other: Self) -> [Self; 2] {
                // SAFETY: that the registers exist vouches for the instruction set.
                unsafe { $interleave(self.0, other.0, T::DTYPE) }.map(|register| Self(register, PhantomData))
            }
            #[inline(always)]
            unsafe fn load_quads(from: &[T]) -> Self {
                // SAFETY: four elements; the caller vouches for the instruction set.
                Self(unsafe { $quads(from[..4].as_ptr().cast(), T::DTYPE) }, PhantomData)
            }
            #[inline(always)]
            unsafe fn spread(from: &[T]) -> Self {
                // SAFETY: a quarter as many elements as the register holds; as above.
                Self(unsafe { $spread(from[..Self::LANES / 4].as_ptr().cast(), T::DTYPE) }, PhantomData)
            }
            #[inline(always)]
            fn swap_neighbours(self) -> Self {
                // SAFETY: that the register exists vouches for the instruction set.
                Self(unsafe { $swap::<0b10_11_00_01>(self.0, T::DTYPE) }, PhantomData)
            }
            #[inline(always)]
            fn swap_pairs(self) -> Self {
                // SAFETY: as above.
                Self(unsafe { $swap::<0b01_00_11_10>(self.0, T::DTYPE) }, PhantomData)
            }
        }
    };
    (@ $function:ident, $table:ident, $arch:ident, $half_plus_odd:ident) => {
        #[inline(always)]
        fn $function(self, normal: &Normal) -> Self {
            // SAFETY: that the register exists vouches for the instruction set.
            if let Some(register) = unsafe { $half_plus_odd(self.0, &normal.$table, T::DTYPE) } {
                return Self(register, PhantomData);
            }
            one_by_one(self, |x| Transcendental::$function::<$arch>(x))
        }
    };
    (@ $cast:ident, $back:ident, [$zero:ident, $splat:ident, $load:ident, $store:ident, $fma:ident], [$splat64:ident, $fma64:ident], [$($name:ident $op:ident $op64:ident),*], [$add:ident, $sub:ident, $mul:ident, $max:ident, $bits:ident, $from_bits:ident, $shift:ident]) => {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller vouches for the instruction set.
            Self(unsafe { $zero() }, PhantomData)
        }
        #[inline(always)]
        unsafe fn splat(element: T) -> Self {
            // SAFETY: the caller vouches for the instruction set; the element is copied as the type that it has.
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
        #[inline(always)]
        fn exp2(self) -> Self {
            if T::DTYPE == DType::F64 {
                return one_by_one(self, |x| Transcendental::power_of_two::<Plain>(x));
            }
            // The steps of one number's. Where one of two is not a number, the second is the larger.
            // SAFETY: as above.
            unsafe {
                let x = $max($splat(MIN_EXPONENT), self.0);
                let shifted = $add($splat(ROUND_BIASED), x);
                let r = $sub(x, $sub(shifted, $splat(ROUND_BIASED)));
                let mut series = $splat(EXP2[0]);
                for coefficient in &EXP2[1..] {
                    series = $fma(series, r, $splat(*coefficient));
                }
                Self($mul(series, $from_bits($shift::<23>($bits(shifted)))), PhantomData)
            }
        }
    };
}

register!(
    Avx512,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma",
    true,
    Zmm,
    __m512,
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
    interleave_512,
    quads_512,
    spread_512,
    swap_512,
    half_plus_odd_512,
    [_mm512_add_ps, _mm512_sub_ps, _mm512_mul_ps, _mm512_max_ps, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_slli_epi32]
);
register!(
    Avx2,
    "avx2,fma",
    false,
    Ymm,
    __m256,
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
    interleave_256,
    quads_256,
    spread_256,
    swap_256,
    half_plus_odd_256,
    [_mm256_add_ps, _mm256_sub_ps, _mm256_mul_ps, _mm256_max_ps, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_slli_epi32]
);

/// ½ plus the odd function that is tabulated for positive x, in f32. NaN for NaN; `None` for f64.
///
/// # Safety
/// The machine must have AVX-512 F and DQ.
#[inline(always)]
unsafe fn half_plus_odd_512(x: __m512, table: &Table, dtype: DType) -> Option<__m512> {
    const LAST: f32 = (PIECES - 1) as f32;
    if dtype == DType::F64 {
        return None;
    }
    // SAFETY: the caller vouches for the instruction set; a table's rows are as long as a register.
    unsafe {
        // The minimum instruction returns its second operand if either is NaN.
        let place = _mm512_min_ps(_mm512_set1_ps(LAST), _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(table.scale)));
        let shifted = _mm512_add_ps(place, _mm512_set1_ps(ROUND));
        let piece = _mm512_castps_si512(shifted);
        let t = _mm512_sub_ps(place, _mm512_sub_ps(shifted, _mm512_set1_ps(ROUND)));
        let mut value = _mm512_permutexvar_ps(piece, _mm512_loadu_ps(table.terms[0].as_ptr()));
        for terms in &table.terms[1..] {
            value = _mm512_fmadd_ps(value, t, _mm512_permutexvar_ps(piece, _mm512_loadu_ps(terms.as_ptr())));
        }
        let sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0));
        Some(_mm512_add_ps(_mm512_set1_ps(0.5), _mm512_xor_ps(value, sign)))
    }
}

/// Always `None`: AVX2 looks elements up among eight, and a table has sixteen.
///
/// # Safety
/// None.
#[inline(always)]
unsafe fn half_plus_odd_256(_x: __m256, _table: &Table, _dtype: DType) -> Option<__m256> {
    None
}

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

/// Four elements four times (f32) or twice (f64).
///
/// # Safety
/// The machine must have AVX-512 F, and there must be four elements.
#[inline(always)]
unsafe fn quads_512(from: *const f32, dtype: DType) -> __m512 {
    // SAFETY: both guaranteed by the caller.
    unsafe {
        match dtype {
            DType::F64 => _mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_loadu_pd(from.cast()))),
            _ => _mm512_broadcast_f32x4(_mm_loadu_ps(from)),
        }
    }
}

/// Four elements twice (f32) or once (f64).
///
/// # Safety
/// The machine must have AVX, and there must be four elements.
#[inline(always)]
unsafe fn quads_256(from: *const f32, dtype: DType) -> __m256 {
    // SAFETY: both guaranteed by the caller.
    unsafe {
        match dtype {
            DType::F64 => _mm256_castpd_ps(_mm256_loadu_pd(from.cast())),
            _ => _mm256_broadcast_ps(&_mm_loadu_ps(from)),
        }
    }
}

/// Four elements (f32) or two (f64), each four times.
///
/// # Safety
/// The machine must have AVX-512 F, and there must be as many elements.
#[inline(always)]
unsafe fn spread_512(from: *const f32, dtype: DType) -> __m512 {
    // SAFETY: both guaranteed by the caller.
    unsafe {
        if dtype == DType::F64 {
            let order = _mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1);
            let two = _mm512_castpd128_pd512(_mm_loadu_pd(from.cast()));
            _mm512_castpd_ps(_mm512_permutexvar_pd(order, two))
        } else {
            let order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            _mm512_permutexvar_ps(order, _mm512_castps128_ps512(_mm_loadu_ps(from)))
        }
    }
}

/// Two elements (f32) or one (f64), each four times.
///
/// # Safety
/// The machine must have AVX2, and there must be as many elements.
#[inline(always)]
unsafe fn spread_256(from: *const f32, dtype: DType) -> __m256 {
    // SAFETY: both guaranteed by the caller.
    unsafe {
        if dtype == DType::F64 {
            _mm256_castpd_ps(_mm256_set1_pd(*from.cast()))
        } else {
            let two = _mm256_castps128_ps256(_mm_castpd_ps(_mm_set_sd(from.cast::<f64>().read_unaligned())));
            _mm256_permutevar8x32_ps(two, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1))
        }
    }
}

/// Another order of each four elements.
///
/// # Safety
/// The machine must have AVX-512 F.
#[inline(always)]
unsafe fn swap_512<const ORDER: i32>(register: __m512, dtype: DType) -> __m512 {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        match dtype {
            DType::F64 => _mm512_castpd_ps(_mm512_permutex_pd::<ORDER>(_mm512_castps_pd(register))),
            _ => _mm512_permute_ps::<ORDER>(register),
        }
    }
}

/// Another order of each four elements.
///
/// # Safety
/// The machine must have AVX2.
#[inline(always)]
unsafe fn swap_256<const ORDER: i32>(register: __m256, dtype: DType) -> __m256 {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        match dtype {
            DType::F64 => _mm256_castpd_ps(_mm256_permute4x64_pd::<ORDER>(_mm256_castps_pd(register))),
            _ => _mm256_permute_ps::<ORDER>(register),
        }
    }
}
