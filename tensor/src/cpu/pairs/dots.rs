//! AVX-512's products of pairs: 16 at a time, each added to a sum.

use super::WIDTH;
use super::layout::{LINE, Lines, TILE, pack_lines};
use super::multiply::Engine;
use crate::cpu::block::{Left, Rows};
use crate::cpu::isa::Arch;
use crate::unrolled;
use std::arch::x86_64::*;
use std::ops::Range;

/// The instruction, which needs no setup.
pub struct Dots(());

/// Rows that are multiplied together: 8·2 sums and a row of B leave room in 32 registers.
const HEIGHT: usize = 8;

impl Engine for Dots {
    type Lines = Lines;

    #[inline(always)]
    unsafe fn begin() -> Self {
        Self(())
    }

    #[inline(always)]
    unsafe fn pack<A: Arch>(
        a: Left<'_, f32, impl Rows>,
        rows: Range<usize>,
        part: Range<usize>,
        to: &mut [f32],
    ) -> Lines {
        // SAFETY: guaranteed by the caller.
        unsafe { pack_lines(a, rows, part, to) }
    }

    #[inline(always)]
    unsafe fn multiply(
        &self,
        (a, lines): (*const f32, Lines),
        b: *const f32,
        steps: usize,
        (c, c_apart): (*mut f32, usize),
        begin: Option<(*const f32, usize)>,
        [high, wide]: [usize; 2],
    ) {
        for row in (0..high * TILE).step_by(HEIGHT) {
            let a = (a.wrapping_add(row / TILE * steps * TILE * LINE + row % TILE * lines.row), lines);
            let c = (c.wrapping_add(row * c_apart), c_apart);
            let begin = begin.map(|(begin, apart)| (begin.wrapping_add(row * apart), apart));
            // SAFETY: guaranteed by the caller.
            unsafe {
                match (wide, lines.row) {
                    (2, 1) => tile::<2, true>(a, b, steps, c, begin),
                    (2, _) => tile::<2, false>(a, b, steps, c, begin),
                    (_, 1) => tile::<1, true>(a, b, steps, c, begin),
                    (_, _) => tile::<1, false>(a, b, steps, c, begin),
                }
            }
        }
    }
}

/// [`HEIGHT`] rows by COUNT registers of C. NEIGHBOURS: the rows' pairs lie next to each other, instead of a row's.
///
/// # Safety
/// As of [`Engine::multiply`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn tile<const COUNT: usize, const NEIGHBOURS: bool>(
    (a, lines): (*const f32, Lines),
    b: *const f32,
    steps: usize,
    (c, c_apart): (*mut f32, usize),
    begin: Option<(*const f32, usize)>,
) {
    let (from_row, from_pair) = if NEIGHBOURS { (1, lines.pair) } else { (lines.row, 1) };
    let mut sums = [[_mm512_setzero_ps(); COUNT]; HEIGHT];
    if let Some((begin, apart)) = begin {
        unrolled!(i in 0..HEIGHT => {
            unrolled!(j in 0..COUNT => {
                // SAFETY: guaranteed by the caller.
                sums[i][j] = unsafe { _mm512_loadu_ps(begin.add(i * apart + j * TILE)) };
            });
        });
    }
    for p in 0..steps * LINE {
        // SAFETY: guaranteed by the caller, here and below.
        let row: [__m512bh; COUNT] =
            std::array::from_fn(|j| unsafe { std::mem::transmute(_mm512_loadu_ps(b.add(p * WIDTH + j * TILE))) });
        unrolled!(i in 0..HEIGHT => {
            // SAFETY: as above; a register holds what it is told to.
            let pair: __m512bh = unsafe {
                std::mem::transmute(_mm512_set1_epi32(*a.add(i * from_row + p * from_pair).cast::<i32>()))
            };
            unrolled!(j in 0..COUNT => { sums[i][j] = _mm512_dpbf16_ps(sums[i][j], pair, row[j]); });
        });
    }
    unrolled!(i in 0..HEIGHT => {
        unrolled!(j in 0..COUNT => {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm512_storeu_ps(c.add(i * c_apart + j * TILE), sums[i][j]) };
        });
    });
}
