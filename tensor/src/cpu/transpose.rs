//! Transposes in registers: a block of N rows of N elements each, N the elements of a register.

use super::registers::Vector;
use crate::{Float, unrolled};

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
    let whole = |extent: usize| extent / V::LANES * V::LANES;
    for row in (0..whole(rows)).step_by(V::LANES) {
        for column in (0..whole(columns)).step_by(V::LANES) {
            let from = &from[row * from_stride + column..];
            let to = &mut to[column * to_stride + row..];
            // SAFETY: the caller vouches for the instruction set.
            unsafe {
                match V::LANES {
                    16 => block::<T, V, 16>(from, from_stride, to, to_stride),
                    8 => block::<T, V, 8>(from, from_stride, to, to_stride),
                    4 => block::<T, V, 4>(from, from_stride, to, to_stride),
                    _ => block::<T, V, 2>(from, from_stride, to, to_stride),
                }
            }
        }
    }
    // The edges: the rows and columns that fill no block.
    for column in 0..columns {
        for row in if column < whole(columns) { whole(rows) } else { 0 }..rows {
            to[column * to_stride + row] = from[row * from_stride + column];
        }
    }
}

/// One block. Interleaving row i with row i + N/2 shifts the bits of a place in the block, taken as a number, around
/// by one; after log₂ N rounds, row and column have changed places.
///
/// # Safety
/// As of [`transpose`].
#[inline(always)]
unsafe fn block<T: Float, V: Vector<T>, const N: usize>(
    from: &[T],
    from_stride: usize,
    to: &mut [T],
    to_stride: usize,
) {
    // SAFETY: the caller vouches for the instruction set.
    let mut rows: [V; N] = std::array::from_fn(|row| unsafe { V::load(&from[row * from_stride..]) });
    unrolled!(_round in 0..N.ilog2() as usize => {
        let old = rows;
        unrolled!(pair in 0..N / 2 => {
            [rows[2 * pair], rows[2 * pair + 1]] = old[pair].interleave(old[pair + N / 2]);
        });
    });
    for (column, row) in rows.into_iter().enumerate() {
        row.store(&mut to[column * to_stride..]);
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
