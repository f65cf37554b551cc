//! Vector registers by name.
//!
//! The compiler vectorises loops over slices well, but not accumulators that must stay in registers across loops: it
//! spills arrays of them to memory or assembles them with shuffles, at a third of the speed. Here a register is a
//! value, with the operations of [`Vector`].

use super::isa::Arch;
use super::math::Transcendental;
use super::normal::Normal;
use crate::Float;
use std::marker::PhantomData;

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

    /// The sum of all elements: each group of four is summed first, if `LANES` is a multiple of four.
    #[inline(always)]
    fn total(self) -> T {
        let mut lanes = [T::zero(); MAX_LANES];
        let apart = if Self::LANES.is_multiple_of(4) {
            let pairs = self.add(self.swap_pairs());
            pairs.add(pairs.swap_neighbours()).store(&mut lanes);
            4
        } else {
            self.store(&mut lanes);
            1
        };
        let mut total = lanes[0];
        for lane in (apart..Self::LANES).step_by(apart) {
            total += lanes[lane];
        }
        total
    }

    /// self + other
    fn add(self, other: Self) -> Self;

    /// self − other
    fn sub(self, other: Self) -> Self;

    /// self·other
    fn mul(self, other: Self) -> Self;

    /// The larger of each pair of elements; `other`'s element if either is NaN.
    fn max(self, other: Self) -> Self;

    /// self·b + c
    fn mul_add(self, b: Self, c: Self) -> Self;

    /// [2^x](Transcendental::power_of_two) of each element.
    fn exp2(self) -> Self;

    /// Φ of each element, within the bounds of [`Transcendental::normal_distribution`]: from the tables, or by that
    /// function.
    fn normal_distribution(self, normal: &Normal) -> Self;

    /// Φ(x) + x·φ(x) of each element x, within the bounds of [`Transcendental::normal_slope`].
    fn normal_slope(self, normal: &Normal) -> Self;

    /// Interleaves the elements of both: `self[0], other[0], self[1], other[1], ..`, in two registers.
    fn interleave(self, other: Self) -> [Self; 2];

    /// The first four elements of a slice, repeated to fill the register. Panics when there are fewer.
    ///
    /// # Safety
    /// As of [`Vector::zero`].
    unsafe fn load_quads(from: &[T]) -> Self;

    /// The first elements of a slice, a quarter of `LANES`, each four times. Panics when there are too few.
    ///
    /// # Safety
    /// As of [`Vector::zero`].
    unsafe fn spread(from: &[T]) -> Self;

    /// Of each four elements a, b, c, d: b, a, d, c.
    fn swap_neighbours(self) -> Self;

    /// Of each four elements a, b, c, d: c, d, a, b.
    fn swap_pairs(self) -> Self;
}

/// A register from memory.
///
/// # Safety
/// As of [`Vector::zero`], and there must be as many elements, which nobody writes meanwhile.
#[inline(always)]
pub unsafe fn load<T: Float, V: Vector<T>>(from: *const T) -> V {
    // SAFETY: both guaranteed by the caller.
    unsafe { V::load(std::slice::from_raw_parts(from, V::LANES)) }
}

/// Writes a register to memory.
///
/// # Safety
/// There must be as many elements, which nobody else uses meanwhile.
#[inline(always)]
pub unsafe fn store<T: Float, V: Vector<T>>(register: V, to: *mut T) {
    // SAFETY: guaranteed by the caller.
    register.store(unsafe { std::slice::from_raw_parts_mut(to, V::LANES) });
}

/// Prefetches memory that will be read soon into the cache. Results do not depend on it.
#[inline(always)]
pub fn fetch<T>(memory: &[T]) {
    const LINE: usize = 64;
    let bytes = memory.as_ptr_range();
    let (first, end) = (bytes.start as usize / LINE * LINE, bytes.end as usize);
    for line in (first..end).step_by(LINE) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, which every x86-64 machine takes, for any address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(line as *const i8);
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as on x86-64.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{}]", in(reg) line, options(readonly, nostack, preserves_flags));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = line;
    }
}

/// No register has more elements.
pub const MAX_LANES: usize = 16;

/// Copies a run of elements in blocks of fixed size, the last of which may overlap the one before: for runs so short
/// that a call would take longer. Panics when the lengths differ.
#[inline(always)]
pub fn copy_run<T: Copy>(to: &mut [T], from: &[T]) {
    match from.len() {
        16.. => copy_blocks::<T, 16>(to, from),
        8.. => copy_blocks::<T, 8>(to, from),
        4.. => copy_blocks::<T, 4>(to, from),
        _ => copy_blocks::<T, 1>(to, from),
    }
}

#[inline(always)]
fn copy_blocks<T: Copy, const N: usize>(to: &mut [T], from: &[T]) {
    assert_eq!(to.len(), from.len(), "lengths of a run");
    // The length of a block is a constant, so its copy compiles to a few moves.
    for (to, from) in to.chunks_exact_mut(N).zip(from.chunks_exact(N)) {
        to.copy_from_slice(from);
    }
    if let (Some(to), Some(from)) = (to.last_chunk_mut::<N>(), from.last_chunk::<N>()) {
        *to = *from;
    }
}

/// An array of `N` elements, with one scalar operation for each; the compiler may vectorise them.
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
    fn exp2(mut self) -> Self {
        for lane in 0..N {
            self.0[lane] = Transcendental::power_of_two::<A>(self.0[lane]);
        }
        self
    }
    #[inline(always)]
    fn normal_distribution(mut self, _normal: &Normal) -> Self {
        for lane in 0..N {
            self.0[lane] = Transcendental::normal_distribution::<A>(self.0[lane]);
        }
        self
    }
    #[inline(always)]
    fn normal_slope(mut self, _normal: &Normal) -> Self {
        for lane in 0..N {
            self.0[lane] = Transcendental::normal_slope::<A>(self.0[lane]);
        }
        self
    }
    #[inline(always)]
    fn interleave(self, other: Self) -> [Self; 2] {
        let turn = |place: usize| if place.is_multiple_of(2) { self.0[place / 2] } else { other.0[place / 2] };
        [0, N].map(|start| Each(std::array::from_fn(|lane| turn(start + lane)), PhantomData))
    }
    #[inline(always)]
    unsafe fn load_quads(from: &[T]) -> Self {
        Each(std::array::from_fn(|lane| from[lane % 4]), PhantomData)
    }
    #[inline(always)]
    unsafe fn spread(from: &[T]) -> Self {
        Each(std::array::from_fn(|lane| from[lane / 4]), PhantomData)
    }
    #[inline(always)]
    fn swap_neighbours(self) -> Self {
        Each(std::array::from_fn(|lane| self.0[lane ^ 1]), PhantomData)
    }
    #[inline(always)]
    fn swap_pairs(self) -> Self {
        Each(std::array::from_fn(|lane| self.0[lane ^ 2]), PhantomData)
    }
}

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

/// Applies a function to each element of a register.
#[inline(always)]
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
fn one_by_one<T: Float, V: Vector<T>>(register: V, function: impl Fn(T) -> T) -> V {
    let mut elements = [T::zero(); MAX_LANES];
    register.store(&mut elements);
    for element in &mut elements[..V::LANES] {
        *element = function(*element);
    }
    // SAFETY: that the register exists vouches for the instruction set.
    unsafe { V::load(&elements) }
}

/// Unrolls a statement for `$i` = 0, 1, .. below the constant `$count`, which is at most 14: the compiler does not
/// unroll a loop of many vector operations, and then keeps the arrays that `$i` indexes in memory instead of registers.
/// Repetitions beyond the count are removed before code generation: in nested uses they would be most of the compiler's
/// work.
///
/// ```compile_fail,E0080
/// tensor::unrolled!(i in 0..15 => { println!("{i}") });
/// ```
#[macro_export]
macro_rules! unrolled {
    ($i:ident in 0..$count:expr => $body:block) => {
        const { assert!($count <= 14, "more repetitions than are written out") };
        $crate::unrolled!(@ $i, $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13)
    };
    (@ $i:ident, $count:expr, $body:block, $($n:literal)*) => {
        $(if const { $n < $count } {
            let $i: usize = $n;
            #[allow(unconditional_panic)] // beyond the count, where nothing is done
            $body
        })*
    };
}

/// Splits `$len` elements into ranges for registers `$V`, and runs a statement for each range that is not empty: for
/// each listed count in turn the elements that fill whole groups of `$COUNT` registers (`2 if A::MANY_REGISTERS` uses a
/// count only if there are many registers), then the rest, with registers of one element. `$V` takes the element's type
/// and the instruction set as its parameters.
#[macro_export]
macro_rules! in_registers {
    (
        $T:ident, $A:ident, $len:expr, [$($count:literal $(if $condition:expr)?),+],
        ($range:ident, $V:ident, $COUNT:ident) => $body:expr
    ) => {{
        use $crate::cpu::isa::Arch;
        use $crate::cpu::registers::{Each, Vector};
        macro_rules! part {
            ($part:expr, $vector:ty, $number:literal) => {{
                type $V<$T, $A> = $vector;
                const $COUNT: usize = $number;
                let $range = $part;
                if !$range.is_empty() {
                    $body
                }
            }};
        }
        let (mut start, end): (usize, usize) = (0, $len);
        $($(if $condition)? {
            let whole = end - (end - start) % ($count * <$A as Arch>::Vector::<$T>::LANES);
            part!(start..whole, <$A as Arch>::Vector<$T>, $count);
            start = whole;
        })+
        part!(start..end, Each<$T, $A, 1>, 1);
    }};
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, limits};
    use crate::simd;

    #[inline(always)]
    fn check<T: Float, A: Arch>() {
        for start in [-1e30, -130.0, -30.0, -1.0, f64::NAN] {
            let x: Vec<T> = (0..MAX_LANES).map(|i| T::of(start + 0.123 * i as f64)).collect();
            let mut powers = [T::zero(); MAX_LANES];
            // SAFETY: the caller has chosen an instruction set that is there.
            unsafe { A::Vector::<T>::load(&x) }.exp2().store(&mut powers);
            for (&x, &power) in x.iter().zip(&powers).take(A::Vector::<T>::LANES) {
                let one = Transcendental::power_of_two::<A>(x);
                assert!(power == one || power.is_nan() && one.is_nan(), "2^{x} is {power}, and alone {one}");
            }
        }
        // All bits set, as in poisoned memory that nothing has written.
        let poison: Vec<T> = bytemuck::pod_collect_to_vec(&[u64::MAX; MAX_LANES]);
        let mut powers = [T::zero(); MAX_LANES];
        // SAFETY: as above.
        unsafe { A::Vector::<T>::load(&poison) }.exp2().store(&mut powers);
        assert!(powers.iter().take(A::Vector::<T>::LANES).all(|power| power.is_nan()), "{powers:?}");
    }

    #[inline(always)]
    fn add_up<T: Float, A: Arch>() {
        let x: Vec<T> = (0..MAX_LANES).map(|i| T::of((i * i) as f64)).collect();
        let sum = |lanes: usize| x[..lanes].iter().fold(T::zero(), |sum, &x| sum + x);
        // SAFETY: the caller has chosen an instruction set that is there.
        unsafe {
            assert_eq!(A::Vector::<T>::load(&x).total(), sum(A::Vector::<T>::LANES));
            assert_eq!(Each::<T, A, 1>::load(&x[3..]).total(), x[3]);
            assert_eq!(Each::<T, A, 3>::load(&x).total(), sum(3));
        }
    }

    #[test]
    fn totals_are_sums_on_every_instruction_set() {
        for _limited in limits(&Isa::SIMD) {
            simd!(A => add_up::<f32, A>());
            simd!(A => add_up::<f64, A>());
        }
    }

    #[test]
    fn powers_of_two_are_those_of_single_numbers_on_every_instruction_set() {
        for _limited in limits(&Isa::SIMD) {
            simd!(A => check::<f32, A>());
            simd!(A => check::<f64, A>());
        }
    }
}
