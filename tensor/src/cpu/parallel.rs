//! Threads, and reductions that do not notice how many there are.
//!
//! Work is cut into tasks by its shape alone; which thread takes which task is left to rayon. A task
//! writes only its own part of the result, or its own partial sum, and partial sums are added in the
//! order of the tasks. So the bits of a result do not depend on the number of threads.

use super::registers::Vector;
use crate::{Float, Scratch, in_registers, scratch, simd, unrolled};
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::Range;

/// About how many elementary operations make a task that is worth a thread's while.
pub const GRAIN: usize = 1 << 14;

/// How many items (rows, images) a task has, when each costs `work` elementary operations.
pub fn items_per_task(work: usize) -> usize {
    (GRAIN / work.max(1)).max(1)
}

/// The stack of a thread that works: Rust's default, which an environment variable (`RUST_MIN_STACK`) could make too
/// small.
pub const STACK: usize = 2 << 20;

/// A thread pool of `threads` threads (0: one per core) that flush denormals to zero: they carry no information in a
/// network and cost a hundred cycles each. Work on other threads, such as a pool of your own, gives the same bits only
/// if no denormals occur in it.
///
/// Rust itself assumes threads that keep denormals, so what runs on these should not depend on how they are treated; in
/// particular, no index may be computed from one. Errors: the system refuses to start them.
pub fn thread_pool(threads: usize) -> Result<rayon::ThreadPool, rayon::ThreadPoolBuildError> {
    let builder = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .stack_size(STACK)
        .thread_name(|index| format!("worker-{index}"))
        .start_handler(|_| {
            flush_denormals();
            scratch::prepare();
        });
    let pool = builder.build()?;
    // Until all have started: a thread that finds no memory as it starts ends the program.
    pool.broadcast(|_| ());
    Ok(pool)
}

#[cfg(target_arch = "x86_64")]
fn flush_denormals() {
    const FLUSH_TO_ZERO: u32 = 1 << 15;
    const DENORMALS_ARE_ZERO: u32 = 1 << 6;
    let mut control = 0u32;
    // SAFETY: stores and loads this thread's SSE control register through a valid pointer. Rust assumes the default
    // floating-point environment, so this leaves what the language guarantees: constants are folded without these
    // flags. They change nothing but denormal operands and results, on which no code in this program relies, folded or
    // not.
    unsafe {
        std::arch::asm!("stmxcsr [{}]", in(reg) &mut control, options(nostack));
        control |= FLUSH_TO_ZERO | DENORMALS_ARE_ZERO;
        std::arch::asm!("ldmxcsr [{}]", in(reg) &control, options(nostack, readonly));
    }
}

#[cfg(target_arch = "aarch64")]
fn flush_denormals() {
    const FLUSH_TO_ZERO: u64 = 1 << 24;
    // SAFETY: as on x86-64; FPCR.FZ flushes denormal inputs and results.
    unsafe {
        let mut control: u64;
        std::arch::asm!("mrs {}, fpcr", out(reg) control, options(nomem, nostack));
        control |= FLUSH_TO_ZERO;
        std::arch::asm!("msr fpcr, {}", in(reg) control, options(nomem, nostack));
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn flush_denormals() {}

/// Where a kernel puts one of its gradients: a store when this is the first contribution, an addition
/// when it is a later one.
#[derive(Debug)]
pub struct Out<'a, T> {
    /// The elements.
    pub data: &'a mut [T],
    /// Whether there is something in them already that must be kept.
    pub accumulate: bool,
}

impl<'a, T: Float> Out<'a, T> {
    /// An output to be overwritten.
    pub fn store(data: &'a mut [T]) -> Self {
        Out { data, accumulate: false }
    }

    /// Stores or adds `values`, element by element. Panics unless there are as many as the output has elements.
    pub fn put(&mut self, values: &[T]) {
        assert_eq!(self.data.len(), values.len(), "values of an output");
        let accumulate = self.accumulate;
        let chunks = self.data.par_chunks_mut(GRAIN).zip(values.par_chunks(GRAIN));
        chunks.for_each(|(data, values)| put(data, values, accumulate));
    }
}

/// Stores `values` in `data`, or adds them.
#[inline(always)]
pub fn put<T: Float>(data: &mut [T], values: &[T], accumulate: bool) {
    if accumulate {
        data.iter_mut().zip(values).for_each(|(element, &value)| *element += value);
    } else {
        data.copy_from_slice(values);
    }
}

/// The most rows that [`add_rows`] adds up in one chain, whose rounding errors grow with its length.
const CHAIN: usize = 4096;

/// Adds up rows as long as `sum`, in order: 4096 at a time, and then these sums.
pub fn add_rows<T: Float>(rows: &[T], sum: &mut [T]) {
    if rows.len() <= CHAIN * sum.len() {
        return add_chain(rows, sum);
    }
    let mut chain = Scratch::<T>::new(sum.len());
    for rows in rows.chunks(CHAIN * sum.len()) {
        chain.fill(T::zero());
        add_chain(rows, &mut chain);
        put(sum, &chain, true);
    }
}

/// out (C) = Σ x (R, C) over its rows, in a fixed order.
pub fn sum_rows<T: Float>(x: &[T], out: Out<'_, T>) {
    let width = out.data.len();
    let rows = x.len().checked_div(width).unwrap_or(0);
    sum_in_pieces(rows, width, width, out, |rows, sum| add_rows(&x[rows.start * width..rows.end * width], sum));
}

#[allow(clippy::undocumented_unsafe_blocks)] // clippy overlooks the comment, in a macro's argument
fn add_chain<T: Float>(rows: &[T], sum: &mut [T]) {
    let width = sum.len();
    simd!(A => in_registers!(T, A, width, [4, 2, 1], (columns, V, COUNT) => {
        if V::<T, A>::LANES == 1 {
            // Row by row: with one accumulator per column, each addition would wait for the one before it.
            rows.chunks_exact(width).for_each(|row| put(&mut sum[columns.clone()], &row[columns.clone()], true));
        } else {
            for column in columns.step_by(COUNT * V::<T, A>::LANES) {
                // SAFETY: `simd!` chooses an instruction set that the machine has.
                unsafe { add_columns::<T, V<T, A>, COUNT>(rows, column, sum) };
            }
        }
    }));
}

/// Adds up `COUNT` registers of columns, from `column` on, of rows as long as `sum`.
///
/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn add_columns<T: Float, V: Vector<T>, const COUNT: usize>(rows: &[T], column: usize, sum: &mut [T]) {
    let width = sum.len();
    let sum = &mut sum[column..column + COUNT * V::LANES];
    // SAFETY: the caller vouches for the instruction set, here and below.
    let mut totals = [unsafe { V::zero() }; COUNT];
    unrolled!(i in 0..COUNT => {
        // SAFETY: as above.
        totals[i] = unsafe { V::load(&sum[i * V::LANES..]) };
    });
    for row in rows.chunks_exact(width) {
        let row = &row[column..column + COUNT * V::LANES];
        unrolled!(i in 0..COUNT => {
            // SAFETY: as above.
            totals[i] = totals[i].add(unsafe { V::load(&row[i * V::LANES..]) });
        });
    }
    unrolled!(i in 0..COUNT => {
        totals[i].store(&mut sum[i * V::LANES..]);
    });
}

/// Sums over a long axis: `items` are split into at most 32 ranges, depending only on their number and
/// `work_per_item`; `partial(range, sum)` adds one range up into a row of `width` zeros; the rows are then added in
/// order into `out`.
pub fn sum_in_pieces<T: Float>(
    items: usize,
    work_per_item: usize,
    width: usize,
    out: Out<'_, T>,
    partial: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    sum_stored_pieces(items, work_per_item, width, out, |range, sum| {
        sum.fill(T::zero());
        partial(range, sum);
    });
}

/// As [`sum_in_pieces`], where `partial(range, sum)` stores the sum of one range in a row that may hold anything
/// before.
pub fn sum_stored_pieces<T: Float>(
    items: usize,
    work_per_item: usize,
    width: usize,
    out: Out<'_, T>,
    partial: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    let per_piece = items_per_task(work_per_item).max(items.div_ceil(MAX_PIECES));
    let pieces = items.div_ceil(per_piece);
    if pieces == 0 || width == 0 {
        if !out.accumulate {
            out.data.fill(T::zero());
        }
        return;
    }
    let mut rows = Scratch::<T>::new(pieces * width);
    rows.par_chunks_mut(width).enumerate().for_each(|(piece, row)| {
        let start = piece * per_piece;
        partial(start..(start + per_piece).min(items), row);
    });
    // Columns are shared out among the threads; each is added up in the order of the pieces.
    let (total, rest) = rows.split_at_mut(width);
    let accumulate = out.accumulate;
    let columns = total.par_chunks_mut(GRAIN).zip(out.data.par_chunks_mut(GRAIN)).enumerate();
    columns.for_each(|(chunk, (total, out))| {
        let start = chunk * GRAIN;
        rest.chunks(width).for_each(|row| put(total, &row[start..start + total.len()], true));
        put(out, total, accumulate);
    });
}

/// The most partial sums that [`sum_in_pieces`] makes.
const MAX_PIECES: usize = 32;

/// A slice that several tasks write at once, each its own elements: for results whose parts interleave
/// (the columns of one attention head), which `par_chunks_mut` cannot express.
#[derive(Clone, Copy)]
pub struct Interleaved<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: handing out parts is unsafe, and its contract forbids two tasks the same element.
unsafe impl<T: Send> Send for Interleaved<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Interleaved<'_, T> {}

impl<'a, T> Interleaved<'a, T> {
    /// Takes the slice for as long as the tasks run.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The elements `range`, to be written by the calling task. Panics when they are out of bounds.
    ///
    /// # Safety
    /// Nobody, neither another task nor the calling one, may hold any of these elements at the same time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // that is what this type is for; the contract above guards it
    pub unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// How many elements there are.
    #[allow(clippy::len_without_is_empty)] // nobody asks that
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where the first element lies, to be written through as [`Self::at`].
    #[inline(always)]
    pub fn as_mut_ptr(&self) -> *mut T {
        self.start
    }

    /// The address of an element, to be written through by the one task that it belongs to. Panics when it is
    /// out of bounds.
    #[inline(always)]
    pub fn at(&self, index: usize) -> *mut T {
        assert!(index < self.len, "{index} of {}", self.len);
        self.start.wrapping_add(index)
    }
}
