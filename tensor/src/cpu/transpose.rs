//! Transposes: as many rows as a register has elements become columns, four at a time.

use super::registers::{MOST_LANES, Vector};
use crate::Float;

/// Writes the transpose of `from` (rows × columns, `from_stride` apart) to `to` (columns × rows, `to_stride` apart).
/// Panics when a slice is too short.
///
/// # Safety
/// The machine must have the instruction set that the register `V` belongs to.
#[inline(always)]
pub unsafe fn transpose<T: Float, V: Vector<T>>(
    [rows, columns]: [usize; 2],
    from: &[T],
    from_stride: usize,
    to: &mut [T],
    to_stride: usize,
) {
    let whole = [rows / V::LANES * V::LANES, columns / 4 * 4];
    for row in (0..whole[0]).step_by(V::LANES) {
        let mut starts = [from.as_ptr(); MOST_LANES];
        for lane in 0..V::LANES {
            starts[lane] = from[(row + lane) * from_stride..][..columns].as_ptr();
        }
        for column in (0..whole[1]).step_by(4) {
            // SAFETY: each row has these columns; the caller vouches for the instruction set.
            let block = unsafe { V::columns(&starts, column) };
            for (place, block) in block.into_iter().enumerate() {
                block.store(&mut to[(column + place) * to_stride + row..]);
            }
        }
    }
    // The edges: rows that fill no register, and columns that are fewer than four.
    for column in 0..columns {
        for row in if column < whole[1] { whole[0] } else { 0 }..rows {
            to[column * to_stride + row] = from[row * from_stride + column];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, limit};
    use crate::cpu::registers::Registers;
    use crate::simd;

    fn check<T: Float>() {
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            let _limited = limit(isa);
            for [rows, columns] in [[16, 16], [1, 1], [0, 3], [5, 40], [37, 18], [32, 48]] {
                let from: Vec<T> = (0..rows * columns).map(|i| T::of(i as f64)).collect();
                let mut to = vec![T::zero(); rows * columns];
                // SAFETY: `simd!` chooses an instruction set that is there.
                simd!(A => unsafe {
                    transpose::<T, <A as Registers>::Vector<T>>([rows, columns], &from, columns, &mut to, rows)
                });
                for (place, &element) in to.iter().enumerate() {
                    let (column, row) = (place / rows, place % rows);
                    assert_eq!(element, from[row * columns + column], "{isa:?} {rows}x{columns}");
                }
            }
        }
    }

    #[test]
    fn rows_become_columns_on_every_instruction_set() {
        check::<f32>();
        check::<f64>();
    }
}
