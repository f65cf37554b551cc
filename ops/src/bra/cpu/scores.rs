//! What becomes of the scores of a block of queries: their softmax over the keys, and its gradient.
//!
//! A query's numbers (its largest score, its sum, ..) are stored in four adjacent copies, one for each key of a quad,
//! as they are used. Exponentials are computed as powers of two, which are cheaper than powers of e; the factor log₂ e
//! on the exponents is folded into the scale.

use super::QUERY_QUADS;
use super::products::{SQUARE, ScoreLayout};
use super::quads::QUAD;
use std::f64::consts::{LN_2, LOG2_E};
use std::ops::Range;
use tensor::cpu::math::Transcendental;
use tensor::cpu::registers::{Registers, Vector};
use tensor::{Float, unrolled};

/// Room for the numbers of a block of queries.
pub(super) const NUMBERS: usize = QUERY_QUADS * SQUARE;

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
    pub fn softmax<T: Float, A: Registers>(self, factor: T, scores: &mut [T], logs: &mut [T]) {
        A::run(
            #[inline(always)]
            // SAFETY: `A::run` makes sure of the instruction set.
            || unsafe { self.softmax_here::<T, A>(factor, scores, logs) },
        );
    }

    /// # Safety
    /// The machine must have the instruction set `A`.
    #[inline(always)]
    unsafe fn softmax_here<T: Float, A: Registers>(self, factor: T, scores: &mut [T], logs: &mut [T]) {
        // SAFETY: the caller vouches for the instruction set, here and below.
        let (zero, lowest) = unsafe { (A::Vector::zero(), A::Vector::splat(T::neg_infinity())) };
        let binary = factor * T::of(LOG2_E);
        // SAFETY: as above.
        let factors = unsafe { A::Vector::splat(binary) };
        // Padding scores (those without a key) must not become the maximum.
        self.fill_spare(scores, |first_of_query| first_of_query);
        for (register, log) in self.numbers::<T, A>(logs) {
            let largest = fold!(self.along::<T, A>(register), lowest, max, |largest, at| {
                load!(scores, at).mul(factors).max(largest)
            });
            // Negative, as it will be added.
            zero.sub(across!(largest, max)).store(log);
        }
        // SAFETY: as above.
        unsafe { self.powers::<T, A>(binary, scores, logs) };
        let mut sums = [T::zero(); NUMBERS];
        let (sums, logs) = (&mut sums[..self.quads() * SQUARE], &mut logs[..self.quads() * SQUARE]);
        for (register, sum_of_query) in self.numbers::<T, A>(sums) {
            let sum = fold!(self.along::<T, A>(register), zero, add, |sum, at| load!(scores, at).add(sum));
            across!(sum, add).store(sum_of_query);
        }
        for (log, sum) in logs.iter_mut().zip(&mut *sums) {
            *log = Transcendental::logarithm::<A>(*sum) - *log * T::of(LN_2);
            *sum = T::one() / *sum;
        }
        for (register, inverse) in self.numbers::<T, A>(sums) {
            let inverse = load!(inverse, 0);
            for at in self.along::<T, A>(register) {
                load!(scores, at).mul(inverse).store(&mut scores[at..]);
            }
        }
    }

    /// Takes the products of queries and keys, and the gradients of P, the softmax of factor · product. Overwrites the
    /// products with P, and the gradients of P with those of the products.
    pub fn gradients<T: Float, A: Registers>(self, factor: T, p: &mut [T], dp: &mut [T], logs: &mut [T]) {
        A::run(
            #[inline(always)]
            // SAFETY: `A::run` makes sure of the instruction set.
            || unsafe { self.gradients_here::<T, A>(factor, p, dp, logs) },
        );
    }

    /// # Safety
    /// The machine must have the instruction set `A`.
    #[inline(always)]
    unsafe fn gradients_here<T: Float, A: Registers>(self, factor: T, p: &mut [T], dp: &mut [T], logs: &mut [T]) {
        // SAFETY: the caller vouches for the instruction set, here and below.
        let (zero, factors) = unsafe { (A::Vector::zero(), A::Vector::splat(factor)) };
        logs.iter_mut().for_each(|log| *log *= -T::of(LOG2_E));
        // SAFETY: as above.
        unsafe { self.powers::<T, A>(factor * T::of(LOG2_E), p, logs) };
        for register in 0..self.registers::<T, A>() {
            let places = self.along::<T, A>(register);
            let delta = fold!(places.clone(), zero, add, |sum, at| load!(p, at).mul_add(load!(dp, at), sum));
            let delta = across!(delta, add);
            for at in places {
                load!(dp, at).sub(delta).mul(load!(p, at).mul(factors)).store(&mut dp[at..]);
            }
        }
    }

    /// 2^(factor · product + the query's number) in place of each product.
    ///
    /// # Safety
    /// The machine must have the instruction set `A`.
    #[inline(always)]
    unsafe fn powers<T: Float, A: Registers>(self, factor: T, products: &mut [T], numbers: &mut [T]) {
        // SAFETY: the caller vouches for the instruction set.
        let factors = unsafe { A::Vector::splat(factor) };
        for (register, number) in self.numbers::<T, A>(numbers) {
            let number = load!(number, 0);
            for at in self.along::<T, A>(register) {
                load!(products, at).mul_add(factors, number).exp2().store(&mut products[at..]);
            }
        }
        self.fill_spare(products, |_| T::zero());
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

    /// Each register of the scores with one quad of keys, by its index, with its queries' numbers.
    #[inline(always)]
    fn numbers<T: Float, A: Registers>(self, numbers: &mut [T]) -> impl Iterator<Item = (usize, &mut [T])> {
        numbers.chunks_exact_mut(A::Vector::<T>::LANES).take(self.registers::<T, A>()).enumerate()
    }

    /// Where the scores of a register's queries lie, quad by quad of keys.
    #[inline(always)]
    fn along<T: Float, A: Registers>(self, register: usize) -> std::iter::StepBy<Range<usize>> {
        let first = self.place::<T, A>(register);
        (first..first + self.keys * SQUARE).step_by(SQUARE)
    }
}
