//! What one thread does of a product of pairs.

use super::layout::{self, LINE, TILE};
use super::{STEP, WIDTH};
use crate::cpu::block::{Begin, Left, Rows};
use crate::cpu::packed::Packed;
use crate::cpu::parallel::{Interleaved, put};
use crate::cpu::registers::Registers;
use crate::{Scratch, bf16};
use std::ops::Range;

/// Elements of the inner axis that are multiplied before the next, and rows of the left operand that are copied
/// together: as many as keep both them and a panel in a first-level cache of 48 KB. From the second level, tiles come
/// half as fast as they are multiplied.
const DEPTH: usize = 256;
const ROWS: usize = 64;

/// A way to multiply tiles.
pub trait Engine {
    /// Makes the instructions ready for use on this thread, until the result is dropped.
    ///
    /// # Safety
    /// The machine must have them.
    unsafe fn begin() -> Self;

    /// C = A·B, or C = A·B + what C begins with, of one or two tiles of rows and as many of columns. Of A the tiles of
    /// [`layout`], `steps` of the same rows after each other; of B as many pairs in rows of [`WIDTH`]; of C rows of
    /// f32s so many apart, and of what it begins with, too.
    ///
    /// # Safety
    /// All must lie in memory, and nobody else may use C.
    unsafe fn multiply(
        &self,
        a: *const f32,
        b: *const f32,
        steps: usize,
        c: (*mut f32, usize),
        begin: Option<(*const f32, usize)>,
        tiles: [usize; 2],
    );
}

/// As [`block`](crate::cpu::block::block), in pairs.
///
/// # Safety
/// As of [`block`](crate::cpu::block::block), and the machine must have the engine.
#[inline(always)]
pub unsafe fn block<A: Registers, E: Engine, R: Rows>(
    a: Left<'_, f32, R>,
    b: &Packed<bf16>,
    begin: Begin<'_, f32>,
    (c, c_rows): (Interleaved<'_, f32>, R),
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let depth = a.runs.starts.len() * a.runs.len;
    let height = ROWS.min(rows.len()).next_multiple_of(TILE);
    let tiles: &mut [f32] = &mut Scratch::new(height * DEPTH.min(depth).next_multiple_of(STEP) / 2);
    // SAFETY: by the caller's word.
    let engine = unsafe { E::begin() };
    for first_row in rows.clone().step_by(ROWS) {
        let chunk = first_row..(first_row + ROWS).min(rows.end);
        for first in (0..depth.max(1)).step_by(DEPTH) {
            let part = first..(first + DEPTH).min(depth);
            let steps = part.len().div_ceil(STEP);
            // SAFETY: by the caller's word.
            unsafe { layout::pack_left::<A>(a, chunk.clone(), part, tiles) };
            for panel in panels.clone() {
                let from = b.rows_from(panel, first / 2);
                assert!(steps * STEP / 2 * WIDTH <= from.len(), "rows of a panel");
                let column = panel * WIDTH;
                let width = WIDTH.min(b.extents.1 - column);
                let begin = match begin {
                    _ if first > 0 => Begin::Kept,
                    Begin::Row(row) => Begin::Row(&row[column..column + width.next_multiple_of(TILE)]),
                    begin => begin,
                };
                for row in chunk.clone().step_by(WIDTH) {
                    let left = tiles[(row - chunk.start) / TILE * steps * TILE * LINE..].as_ptr();
                    let rows = row..(row + WIDTH).min(chunk.end);
                    let to = TilesOfC { c, rows: c_rows, range: rows, columns: column..column + width };
                    // SAFETY: the tiles are there, as just packed, and the panel, as just checked; these tiles of C are
                    // this task's.
                    unsafe { to.put(&engine, left, from.as_ptr(), steps, begin) };
                }
            }
        }
    }
}

/// Where the products of one or two tiles' rows and columns go: these rows and columns of C.
struct TilesOfC<'a, R> {
    c: Interleaved<'a, f32>,
    rows: R,
    range: Range<usize>,
    columns: Range<usize>,
}

impl<R: Rows> TilesOfC<'_, R> {
    /// # Safety
    /// As of [`Engine::multiply`]; these rows and columns must be the caller's alone.
    #[inline(always)]
    unsafe fn put<E: Engine>(self, engine: &E, a: *const f32, b: *const f32, steps: usize, begin: Begin<'_, f32>) {
        let (height, width) = (self.range.len(), self.columns.len());
        let tiles = [height.div_ceil(TILE), width.div_ceil(TILE)];
        let start = |row: usize| self.rows.start(self.range.start + row) + self.columns.start;
        let row_of = |begin| match begin {
            // The same row for all.
            Begin::Row(row) => Some((row.as_ptr(), 0)),
            Begin::Zero | Begin::Kept => None,
        };
        let whole = tiles == [height, width].map(|extent| extent / TILE);
        if let Some(apart) = whole.then(|| self.rows.step(self.range.clone())).flatten() {
            let c = (self.c.at(start(0)), apart);
            // The last element must be there, too.
            self.c.at(start(height - 1) + width - 1);
            let begin = if let Begin::Kept = begin { Some((c.0.cast_const(), apart)) } else { row_of(begin) };
            // SAFETY: by the caller's word.
            return unsafe { engine.multiply(a, b, steps, c, begin, tiles) };
        }
        // What does not fill its tiles is computed aside.
        let mut aside = [0f32; WIDTH * WIDTH];
        // SAFETY: by the caller's word.
        unsafe { engine.multiply(a, b, steps, (aside.as_mut_ptr(), WIDTH), row_of(begin), tiles) };
        for (row, aside) in aside.chunks_exact(WIDTH).take(height).enumerate() {
            // SAFETY: by the caller's word.
            let to = unsafe { self.c.part(start(row)..start(row) + width) };
            put(to, &aside[..width], matches!(begin, Begin::Kept));
        }
    }
}
