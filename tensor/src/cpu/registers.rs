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

    /// The larger of each pair of elements; `other` where one of them is not a number.
    fn max(self, other: Self) -> Self;

    /// self·b + c
    fn mul_add(self, b: Self, c: Self) -> Self;

    /// Four columns, from `column` on, of a matrix of `LANES` rows, given where they start.
    ///
    /// # Safety
    /// As of [`Vector::zero`], and each row must have these columns.
    #[inline(always)]
    unsafe fn columns(rows: &[*const T; MOST_LANES], column: usize) -> [Self; 4] {
        // SAFETY: the caller vouches for the instruction set and for the rows.
        unsafe { by_element(rows, column) }
    }
}

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

/// [`Vector::columns`] for any register.
///
/// # Safety
/// As of [`Vector::columns`].
#[inline(always)]
unsafe fn by_element<T: Float, V: Vector<T>>(rows: &[*const T; MOST_LANES], first: usize) -> [V; 4] {
    // SAFETY: the caller vouches for the instruction set, here and below.
    let mut columns = [unsafe { V::zero() }; 4];
    for (place, column) in columns.iter_mut().enumerate() {
        let mut elements = [T::zero(); MOST_LANES];
        for lane in 0..V::LANES {
            // SAFETY: the row has these columns, by the caller's word.
            elements[lane] = unsafe { *rows[lane].add(first + place) };
        }
        // SAFETY: as above.
        *column = unsafe { V::load(&elements) };
    }
    columns
}

/// No register has more elements.
pub const MOST_LANES: usize = 16;

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
        ($name:ident, $half:ty, $register:ty, $wide:literal, $bytes:literal, $cast:ident, $back:ident, $columns:ident, $f32:tt, $f64:tt, $pairs:tt) => {
            /// A register whose bits are `T`s. Whoever has one is on a machine that has the instruction set.
            #[derive(Clone, Copy)]
            pub struct $name<T>($register, PhantomData<T>);

            impl Registers for Fused<$wide> {
                type Vector<T: Float> = $name<T>;
                type Half<T: Float> = $half;
            }

            impl<T: Float> Vector<T> for $name<T> {
                const LANES: usize = $bytes / size_of::<T>();
                register!(@ $cast, $back, $columns, $f32, $f64, $pairs);
            }
        };
        (@ $cast:ident, $back:ident, $columns:ident, [$zero:ident, $splat:ident, $load:ident, $store:ident, $fma:ident], [$splat64:ident, $fma64:ident], [$($name:ident $op:ident $op64:ident),*]) => {
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
            unsafe fn columns(rows: &[*const T; MOST_LANES], column: usize) -> [Self; 4] {
                // SAFETY: the caller vouches for the instruction set and for the rows' lengths.
                unsafe {
                    match T::DTYPE {
                        DType::F64 => by_element(rows, column),
                        _ => {
                            let [a, b, c, d] = $columns(rows, column);
                            [Self(a, PhantomData), Self(b, PhantomData), Self(c, PhantomData), Self(d, PhantomData)]
                        }
                    }
                }
            }
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
        columns_of_16,
        [_mm512_setzero_ps, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps],
        [_mm512_set1_pd, _mm512_fmadd_pd],
        [add _mm512_add_ps _mm512_add_pd, sub _mm512_sub_ps _mm512_sub_pd, mul _mm512_mul_ps _mm512_mul_pd,
         max _mm512_max_ps _mm512_max_pd]
    );
    register!(
        Ymm,
        Each<T, Self, 4>,
        __m256,
        false,
        32,
        _mm256_castps_pd,
        _mm256_castpd_ps,
        columns_of_8,
        [_mm256_setzero_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps],
        [_mm256_set1_pd, _mm256_fmadd_pd],
        [add _mm256_add_ps _mm256_add_pd, sub _mm256_sub_ps _mm256_sub_pd, mul _mm256_mul_ps _mm256_mul_pd,
         max _mm256_max_ps _mm256_max_pd]
    );

    // Four rows lie in the quarters of a register, whose elements change places within their quarters.
    macro_rules! columns {
        ($name:ident, $register:ty, $load:expr, [$low:ident, $high:ident, $low_pair:ident, $high_pair:ident], $cast:ident, $back:ident) => {
            #[inline(always)]
            unsafe fn $name<T>(rows: &[*const T; MOST_LANES], column: usize) -> [$register; 4] {
                // SAFETY: the caller vouches for the instruction set and for four f32 in each row.
                unsafe {
                    let (a, b, c, d) = (
                        $load(rows, 0, column),
                        $load(rows, 1, column),
                        $load(rows, 2, column),
                        $load(rows, 3, column),
                    );
                    let (ab, cd) = ($cast($low(a, b)), $cast($low(c, d)));
                    let (ab_high, cd_high) = ($cast($high(a, b)), $cast($high(c, d)));
                    [
                        $back($low_pair(ab, cd)),
                        $back($high_pair(ab, cd)),
                        $back($low_pair(ab_high, cd_high)),
                        $back($high_pair(ab_high, cd_high)),
                    ]
                }
            }
        };
    }
    columns!(
        columns_of_16,
        __m512,
        every_fourth_of_16,
        [_mm512_unpacklo_ps, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpackhi_pd],
        _mm512_castps_pd,
        _mm512_castpd_ps
    );
    columns!(
        columns_of_8,
        __m256,
        every_fourth_of_8,
        [_mm256_unpacklo_ps, _mm256_unpackhi_ps, _mm256_unpacklo_pd, _mm256_unpackhi_pd],
        _mm256_castps_pd,
        _mm256_castpd_ps
    );

    /// Four elements, from `column` on, of each fourth row, from row `first` on.
    #[inline(always)]
    unsafe fn every_fourth_of_16<T>(rows: &[*const T; MOST_LANES], first: usize, column: usize) -> __m512 {
        // SAFETY: the caller vouches for AVX-512 and for four f32 in each row.
        unsafe {
            let register = _mm512_castps128_ps512(_mm_loadu_ps(rows[first].add(column).cast()));
            let register = _mm512_insertf32x4::<1>(register, _mm_loadu_ps(rows[first + 4].add(column).cast()));
            let register = _mm512_insertf32x4::<2>(register, _mm_loadu_ps(rows[first + 8].add(column).cast()));
            _mm512_insertf32x4::<3>(register, _mm_loadu_ps(rows[first + 12].add(column).cast()))
        }
    }

    /// As [`every_fourth_of_16`], of 8 rows.
    #[inline(always)]
    unsafe fn every_fourth_of_8<T>(rows: &[*const T; MOST_LANES], first: usize, column: usize) -> __m256 {
        // SAFETY: the caller vouches for AVX2 and for four f32 in each row.
        unsafe {
            _mm256_set_m128(
                _mm_loadu_ps(rows[first + 4].add(column).cast()),
                _mm_loadu_ps(rows[first].add(column).cast()),
            )
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
