//! The scores of a block of queries against the keys that they attend to, and what becomes of them.
//!
//! A register holds the scores of neighbouring queries with one key, or of one query with neighbouring keys,
//! whichever fills it: regions of 16 tokens and more have queries enough, smaller ones have keys (4 queries with
//! 64 keys). The products are the same, with the operands' parts exchanged; only sums over the keys go down the
//! registers in the one case, and along them in the other.

use super::{QUERY_BLOCK, Tokens};
use std::ops::Range;
use tensor::cpu::math::Transcendental;
use tensor::cpu::parallel::Interleaved;
use tensor::cpu::registers::{MOST_LANES, Registers, Vector};
use tensor::cpu::tile::{Apart, Left, Right, Target, product};
use tensor::cpu::transpose::transpose;
use tensor::{Float, unrolled};

/// A register of elements from a place on. The caller vouches for the instruction set, as of [`Vector::zero`].
macro_rules! load {
    ($from:expr, $place:expr) => {
        // SAFETY: as just said.
        unsafe { A::Vector::<T>::load(&$from[$place..]) }
    };
}

/// A step for each of these places, in four chains that do not wait for each other and are joined at the end. (A
/// macro, because the compiler does not always inline closures, and code outside loses the instruction set.)
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

/// The elements of a register, joined in pairs.
macro_rules! join {
    ($register:expr, $join:expr) => {{
        let mut elements = [T::zero(); MOST_LANES];
        $register.store(&mut elements);
        let mut width = A::Vector::<T>::LANES / 2;
        while width > 0 {
            for lane in 0..width {
                elements[lane] = $join(elements[lane], elements[lane + width]);
            }
            width /= 2;
        }
        elements[0]
    }};
}

/// A statement for each register of the scores of `$count` queries, with the queries' own numbers at its side.
macro_rules! for_each {
    ($layout:expr, $count:expr, $numbers:expr, |$at:ident, $number:ident| $step:expr) => {
        if $layout.queries_across {
            for column in (0..$count).step_by(A::Vector::<T>::LANES) {
                let $number = load!($numbers, column);
                for $at in $layout.down(column) {
                    $step;
                }
            }
        } else {
            for query in 0..$count {
                // SAFETY: the caller vouches for the instruction set.
                let $number = unsafe { A::Vector::<T>::splat($numbers[query]) };
                for $at in $layout.along::<T, A>(query) {
                    $step;
                }
            }
        }
    };
}

/// Where the score of a query with a key lies.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    keys: usize,
    /// Whether queries lie side by side, or else keys.
    queries_across: bool,
    /// From one row of scores to the next: whole registers.
    stride: usize,
    rows: usize,
}

impl Layout {
    /// Of blocks of at most so many queries, with so many keys.
    pub fn new(queries: usize, keys: usize) -> Self {
        let queries_across = queries >= MOST_LANES;
        let (across, rows) = if queries_across { (queries, keys) } else { (keys, queries) };
        Self { keys, queries_across, stride: across.next_multiple_of(MOST_LANES), rows }
    }

    /// How many elements the scores of a block take.
    pub fn len(&self) -> usize {
        self.rows * self.stride
    }

    /// How many elements [`Layout::products`] needs to work in, for tokens of `dim` channels.
    pub fn transposed_len(&self, dim: usize) -> usize {
        dim * self.stride
    }

    /// Scores or what was made of them as a matrix (queries, keys).
    pub fn by_query<'a, T>(&self, scores: &'a [T]) -> Left<'a, T, Apart> {
        let (row, column) = if self.queries_across { (1, self.stride) } else { (self.stride, 1) };
        Left { data: scores, rows: Apart(row), col_stride: column }
    }

    /// The same as a matrix (keys, queries).
    pub fn by_key<'a, T>(&self, scores: &'a [T]) -> Left<'a, T, Apart> {
        let Left { data, rows: Apart(column), col_stride: row } = self.by_query(scores);
        Left { data, rows: Apart(row), col_stride: column }
    }

    /// (`count` queries) · keysᵀ over `dim` channels.
    ///
    /// # Safety
    /// The machine must have the instruction set `A`.
    #[inline(always)]
    pub unsafe fn products<T: Float, A: Registers>(
        &self,
        [count, dim]: [usize; 2],
        queries: Tokens<'_, T>,
        keys: Tokens<'_, T>,
        transposed: &mut [T],
        out: &mut [T],
    ) {
        let ((across, columns), (down, rows)) = if self.queries_across {
            ((queries, count), (keys, self.keys))
        } else {
            ((keys, self.keys), (queries, count))
        };
        let down = Left { data: down.data, rows: down.rows, col_stride: 1 };
        let target = Target { data: Interleaved::new(out), offset: 0, rows: Apart(self.stride), accumulate: false };
        // SAFETY: the caller vouches for the instruction set; `out` is borrowed for this alone, in separate rows.
        unsafe {
            A::run(
                #[inline(always)]
                || transpose::<T, A::Vector<T>>([columns, dim], across, transposed, self.stride),
            );
            let across = Right { data: &*transposed, rows: Apart(self.stride) };
            product::<T, A>([rows, dim, columns.next_multiple_of(MOST_LANES)], down, across, target);
        }
    }

    /// Replaces the products of `count` queries by the softmax over the keys of factor · product; also gives the
    /// logarithms of its denominators. `logs` has room for whole registers.
    ///
    /// # Safety
    /// The machine must have the instruction set `A`.
    #[inline(always)]
    pub unsafe fn softmax<T: Float, A: Registers>(&self, count: usize, factor: T, scores: &mut [T], logs: &mut [T]) {
        // SAFETY: the caller vouches for the instruction set, here and below.
        let (zero, lowest) = unsafe { (A::Vector::zero(), A::Vector::splat(T::neg_infinity())) };
        // SAFETY: as above.
        let factors = unsafe { A::Vector::splat(factor) };
        let lanes = A::Vector::<T>::LANES;
        let mut sums = [T::one(); QUERY_BLOCK];
        if self.queries_across {
            for column in (0..count).step_by(lanes) {
                let largest =
                    fold!(self.down(column), lowest, max, |largest, at| load!(scores, at).mul(factors).max(largest));
                largest.store(&mut logs[column..]);
            }
        } else {
            for query in 0..count {
                // For now, so that what lies there is not the largest.
                let first = scores[query * self.stride];
                self.fill_rest(query, scores, first);
                let largest = fold!(self.along::<T, A>(query), lowest, max, |largest, at| {
                    load!(scores, at).mul(factors).max(largest)
                });
                logs[query] = join!(largest, |a: T, b: T| if a > b { a } else { b });
            }
        }
        // SAFETY: as above.
        unsafe { self.exponentials::<T, A>(count, factor, scores, logs) };
        if self.queries_across {
            for column in (0..count).step_by(lanes) {
                let sum = fold!(self.down(column), zero, add, |sum, at| load!(scores, at).add(sum));
                sum.store(&mut sums[column..]);
            }
        } else {
            for (query, sum_of_query) in sums[..count].iter_mut().enumerate() {
                let sum = fold!(self.along::<T, A>(query), zero, add, |sum, at| load!(scores, at).add(sum));
                *sum_of_query = join!(sum, |a: T, b: T| a + b);
            }
        }
        for (log, sum) in logs[..count].iter_mut().zip(&mut sums) {
            *log += Transcendental::logarithm::<A>(*sum);
            *sum = T::one() / *sum;
        }
        for_each!(self, count, sums, |at, inverse| load!(scores, at).mul(inverse).store(&mut scores[at..]));
    }

    /// From the products of `count` queries and the gradients of P, the softmax of factor · product: P in place of
    /// the products, and in place of its gradients those of the products.
    ///
    /// # Safety
    /// The machine must have the instruction set `A`.
    #[inline(always)]
    pub unsafe fn gradients<T: Float, A: Registers>(
        &self,
        count: usize,
        factor: T,
        p: &mut [T],
        dp: &mut [T],
        logs: &[T],
    ) {
        // SAFETY: the caller vouches for the instruction set, here and below.
        let (zero, factors) = unsafe { (A::Vector::zero(), A::Vector::splat(factor)) };
        let mut deltas = [T::zero(); QUERY_BLOCK];
        // SAFETY: as above.
        unsafe { self.exponentials::<T, A>(count, factor, p, logs) };
        if self.queries_across {
            for column in (0..count).step_by(A::Vector::<T>::LANES) {
                let delta = fold!(self.down(column), zero, add, |sum, at| load!(p, at).mul_add(load!(dp, at), sum));
                delta.store(&mut deltas[column..]);
            }
        } else {
            for (query, delta_of_query) in deltas[..count].iter_mut().enumerate() {
                let delta =
                    fold!(self.along::<T, A>(query), zero, add, |sum, at| load!(p, at).mul_add(load!(dp, at), sum));
                *delta_of_query = join!(delta, |a: T, b: T| a + b);
            }
        }
        for_each!(self, count, deltas, |at, delta| {
            load!(dp, at).sub(delta).mul(load!(p, at).mul(factors)).store(&mut dp[at..]);
        });
    }

    /// exp(factor · product − the query's number) in place of each product.
    ///
    /// # Safety
    /// The machine must have the instruction set `A`.
    #[inline(always)]
    unsafe fn exponentials<T: Float, A: Registers>(&self, count: usize, factor: T, products: &mut [T], numbers: &[T]) {
        // SAFETY: the caller vouches for the instruction set.
        let factors = unsafe { A::Vector::splat(factor) };
        for_each!(self, count, numbers, |at, number| {
            load!(products, at).mul(factors).sub(number).store(&mut products[at..]);
        });
        let rows = if self.queries_across { self.keys } else { count };
        products[..rows * self.stride].iter_mut().for_each(|x| *x = Transcendental::exp::<A>(*x));
        if !self.queries_across {
            (0..count).for_each(|query| self.fill_rest(query, products, T::zero()));
        }
    }

    /// Sets what lies between the last key of a query and the end of its register.
    #[inline(always)]
    fn fill_rest<T: Float>(&self, query: usize, scores: &mut [T], value: T) {
        if self.keys < self.stride {
            scores[query * self.stride..][self.keys..self.stride].fill(value);
        }
    }

    /// Where the registers of neighbouring queries lie, key by key.
    #[inline(always)]
    fn down(&self, column: usize) -> std::iter::StepBy<Range<usize>> {
        (column..self.keys * self.stride).step_by(self.stride)
    }

    /// Where the registers of a query lie.
    #[inline(always)]
    fn along<T: Float, A: Registers>(&self, query: usize) -> std::iter::StepBy<Range<usize>> {
        (query * self.stride..(query + 1) * self.stride).step_by(A::Vector::<T>::LANES)
    }
}
