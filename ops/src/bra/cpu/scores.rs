//! What becomes of the scores of a block of queries: their softmax over the keys, and its gradient.
//!
//! What there is one of for each query (its shift, its sum, ..) is stored in four adjacent copies, one for each key of
//! a quad, as it is used: in *slots*. Exponentials are computed as powers of two, which are cheaper than powers of e;
//! the factor log₂ e on the exponents is folded into the scale.

use super::QUERY_QUADS;
use super::products::{SQUARE, ScoreLayout};
use super::quads::QUAD;
use std::f64::consts::{LN_2, LOG2_E};
use std::ops::Range;
use tensor::cpu::isa::Arch;
use tensor::cpu::math::Transcendental;
use tensor::cpu::registers::Vector;
use tensor::{Float, unrolled};

/// The slots of a block of queries.
pub(super) const BLOCK_SLOTS: usize = QUERY_QUADS * SQUARE;

/// A register of elements from a place on. The caller vouches for the instruction set, as of [`Vector::zero`].
macro_rules! load {
    ($from:expr, $place:expr) => {
        // SAFETY: as just said.
        unsafe { A::Vector::<T>::load(&$from[$place..]) }
    };
}

/// Applies a step to each of these places, in four independent chains that are joined at the end. (A macro, because the
/// compiler does not always inline closures, and code that is not inlined is not compiled for the instruction set.)
macro_rules! fold {
    ($places:expr, $start:expr, $join:ident, |$chain:ident, $place:ident| $step:expr) => {{
        let (mut chains, mut places) = ([$start; 4], $places);
        'all: loop {
            unrolled!(i in 0..4 => {
                let Some($place) = places.next() else { break 'all };
                let $chain = chains[i];
                chains[i] = $step;
            });
        }
        let [a, b, c, d] = chains;
        a.$join(b).$join(c.$join(d))
    }};
}

/// Joins the four elements of each quad of a register, and puts the result in all four places.
macro_rules! across {
    ($register:expr, $join:ident) => {{
        let pairs = $register.$join($register.swap_neighbours());
        pairs.$join(pairs.swap_pairs())
    }};
}

impl ScoreLayout {
    /// Replaces the products of queries and keys by the softmax over the keys of factor · product; also writes each
    /// query's log-sum-exp to `logs`.
    pub fn softmax<T: Float, A: Arch>(self, factor: T, scores: &mut [T], logs: &mut [T]) {
        A::run(
            #[inline(always)]
            // SAFETY: `A::run` makes sure of the instruction set.
            || unsafe { self.softmax_here::<T, A>(factor, scores, logs) },
        );
    }

    /// # Safety
    /// The machine must have the instruction set `A`.
    #[inline(always)]
    unsafe fn softmax_here<T: Float, A: Arch>(self, factor: T, scores: &mut [T], logs: &mut [T]) {
        // SAFETY: the caller vouches for the instruction set, here and below.
        let (zero, lowest) = unsafe { (A::Vector::zero(), A::Vector::splat(T::neg_infinity())) };
        let binary = factor * T::of(LOG2_E);
        // SAFETY: as above.
        let factors = unsafe { A::Vector::splat(binary) };
        // Padding scores (those without a key) must not become the maximum.
        self.fill_spare(scores, |first_of_query| first_of_query);
        // What is added to a query's exponents, so that the largest power is 1. It becomes the log-sum-exp at last.
        let shifts = logs;
        for (register, shift) in self.registers_of::<T, A>(shifts) {
            let largest = fold!(self.along::<T, A>(register), lowest, max, |largest, at| {
                load!(scores, at).mul(factors).max(largest)
            });
            zero.sub(across!(largest, max)).store(shift);
        }
        // SAFETY: as above.
        let mut sums = unsafe { self.powers::<T, A>(binary, scores, shifts) };
        let slots = self.quads() * SQUARE;
        // Slices of one length, over which the loop below vectorises.
        let (sums, shifts) = (&mut sums[..slots], &mut shifts[..slots]);
        for (shift, sum) in shifts.iter_mut().zip(&mut *sums) {
            *shift = Transcendental::logarithm::<A>(*sum) - *shift * T::of(LN_2);
            *sum = T::one() / *sum;
        }
        for (register, inverse) in self.registers_of::<T, A>(sums) {
            let inverse = load!(inverse, 0);
            for at in self.along::<T, A>(register) {
                load!(scores, at).mul(inverse).store(&mut scores[at..]);
            }
        }
    }

    /// Takes the products of queries and keys, and the gradients of A, the softmax of factor · product. Overwrites the
    /// products with A, and the gradients of A with those of the products. `logs` are what [`Self::softmax`] wrote.
    pub fn gradients<T: Float, A: Arch>(self, factor: T, a: &mut [T], da: &mut [T], logs: &[T; BLOCK_SLOTS]) {
        A::run(
            #[inline(always)]
            // SAFETY: `A::run` makes sure of the instruction set.
            || unsafe { self.gradients_here::<T, A>(factor, a, da, logs) },
        );
    }

    /// # Safety
    /// The machine must have the instruction set `A`.
    #[inline(always)]
    unsafe fn gradients_here<T: Float, A: Arch>(self, factor: T, a: &mut [T], da: &mut [T], logs: &[T; BLOCK_SLOTS]) {
        // SAFETY: the caller vouches for the instruction set, here and below.
        let (zero, factors) = unsafe { (A::Vector::zero(), A::Vector::splat(factor)) };
        let mut shifts = *logs;
        shifts.iter_mut().for_each(|shift| *shift *= -T::of(LOG2_E));
        // A logarithm is rounded by more the larger it is, so that a query's powers do not quite add up to 1. Divided
        // by their sum they do; else the gradients of large scores, which add up to 0, would lose much precision. (That
        // of the values does not add up to 0, and takes the powers as they are.)
        // SAFETY: as above.
        let mut sums = unsafe { self.powers::<T, A>(factor * T::of(LOG2_E), a, &mut shifts) };
        sums.iter_mut().for_each(|sum| *sum = T::one() / *sum);
        for (register, inverse) in self.registers_of::<T, A>(&mut sums) {
            let (places, inverse) = (self.along::<T, A>(register), load!(inverse, 0));
            let delta = fold!(places.clone(), zero, add, |sum, at| load!(a, at).mul_add(load!(da, at), sum));
            let (delta, factors) = (across!(delta, add).mul(inverse), inverse.mul(factors));
            for at in places {
                load!(da, at).sub(delta).mul(load!(a, at).mul(factors)).store(&mut da[at..]);
            }
        }
    }

    /// 2^(factor · product + the query's shift) in place of each product. Gives each query's sum of them.
    ///
    /// # Safety
    /// The machine must have the instruction set `A`.
    #[inline(always)]
    unsafe fn powers<T: Float, A: Arch>(self, factor: T, products: &mut [T], shifts: &mut [T]) -> [T; BLOCK_SLOTS] {
        // SAFETY: the caller vouches for the instruction set.
        let (zero, factors) = unsafe { (A::Vector::zero(), A::Vector::splat(factor)) };
        for (register, shift) in self.registers_of::<T, A>(shifts) {
            let shift = load!(shift, 0);
            for at in self.along::<T, A>(register) {
                load!(products, at).mul_add(factors, shift).exp2().store(&mut products[at..]);
            }
        }
        self.fill_spare(products, |_| T::zero());
        let mut sums = [T::one(); BLOCK_SLOTS];
        for (register, sum_of_query) in self.registers_of::<T, A>(&mut sums) {
            let sum = fold!(self.along::<T, A>(register), zero, add, |sum, at| load!(products, at).add(sum));
            across!(sum, add).store(sum_of_query);
        }
        sums
    }

    /// Sets the padding scores, which belong to no key, to a function of the query's first score in the same quad.
    #[inline(always)]
    fn fill_spare<T: Float>(self, scores: &mut [T], value: impl Fn(T) -> T) {
        let [tokens, quads] = self.region;
        let last = tokens % QUAD;
        if last > 0 {
            // The last quad of each region.
            for square in scores.chunks_exact_mut(SQUARE).skip(quads - 1).step_by(quads) {
                for query in square.chunks_exact_mut(QUAD) {
                    let value = value(query[0]);
                    query[last..].fill(value);
                }
            }
        }
    }

    /// Each register of the scores with one quad of keys, by its index, with its queries' slots.
    #[inline(always)]
    fn registers_of<T: Float, A: Arch>(self, slots: &mut [T]) -> impl Iterator<Item = (usize, &mut [T])> {
        slots.chunks_exact_mut(A::Vector::<T>::LANES).take(self.registers::<T, A>()).enumerate()
    }

    /// Where the scores of a register's queries lie, quad by quad of keys.
    #[inline(always)]
    fn along<T: Float, A: Arch>(self, register: usize) -> std::iter::StepBy<Range<usize>> {
        let first = self.place::<T, A>(register);
        (first..first + self.key_quads * SQUARE).step_by(SQUARE)
    }
}
