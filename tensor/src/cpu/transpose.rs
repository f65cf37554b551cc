//! Transposes in registers: a block of N rows of N elements each, N the elements of a register.

use super::gemm::last_place;
use super::registers::{Vector, load, store};
use crate::{Float, unrolled};

/// Writes the transpose of `from` (rows × columns) to `to` (columns × rows); the number beside each slice is its row
/// stride. Panics when a slice is too short.
///
/// # Safety
/// The machine must have the instruction set that the register `V` belongs to.
#[inline(always)]
pub unsafe fn transpose<T: Float, V: Vector<T>>(
    [rows, columns]: [usize; 2],
    (from, from_stride): (&[T], usize),
    (to, to_stride): (&mut [T], usize),
) {
    const { assert!(matches!(V::LANES, 2 | 4 | 8 | 16), "a block for this register") };
    if rows == 0 || columns == 0 {
        return;
    }
    let inside = last_place((rows, columns), (from_stride, 1)).is_some_and(|last| last < from.len());
    assert!(inside, "a {rows}x{columns} matrix");
    let inside = last_place((columns, rows), (to_stride, 1)).is_some_and(|last| last < to.len());
    assert!(inside, "the transpose of a {rows}x{columns} matrix");
    if rows < V::LANES || columns < V::LANES {
        for row in 0..rows {
            for (column, &element) in from[row * from_stride..][..columns].iter().enumerate() {
                to[column * to_stride + row] = element;
            }
        }
        return;
    }
    // The last blocks may overlap those before them.
    for row in (0..rows).step_by(V::LANES).map(|row| row.min(rows - V::LANES)) {
        for column in (0..columns).step_by(V::LANES).map(|column| column.min(columns - V::LANES)) {
            let from = (from.as_ptr().wrapping_add(row * from_stride + column), from_stride);
            let to = (to.as_mut_ptr().wrapping_add(column * to_stride + row), to_stride);
            // SAFETY: the block lies inside both matrices, which lie inside their slices, as just checked; the caller
            // vouches for the instruction set.
            unsafe {
                match V::LANES {
                    16 => block::<T, V, 16>(from, to),
                    8 => block::<T, V, 8>(from, to),
                    4 => block::<T, V, 4>(from, to),
                    _ => block::<T, V, 2>(from, to),
                }
            }
        }
    }
}

/// One block, from an element on. Interleaving row i with row i + N/2 rotates the bits of each element's index in the
/// block by one; after log₂ N rounds, row and column are swapped.
///
/// # Safety
/// As of [`transpose`], and `from` and `to` must have room for a block; nobody else may use that of `to`.
#[inline(always)]
unsafe fn block<T: Float, V: Vector<T>, const N: usize>(
    (from, from_stride): (*const T, usize),
    (to, to_stride): (*mut T, usize),
) {
    // SAFETY: the caller vouches for the instruction set and the memory, here and below.
    let mut rows = [unsafe { V::zero() }; N];
    for (i, register) in rows.iter_mut().enumerate() {
        // SAFETY: as above.
        *register = unsafe { load(from.add(i * from_stride)) };
    }
    unrolled!(_round in 0..N.ilog2() as usize => {
        let old = rows;
        unrolled!(pair in 0..N / 2 => {
            [rows[2 * pair], rows[2 * pair + 1]] = old[pair].interleave(old[pair + N / 2]);
        });
    });
    for (column, row) in rows.into_iter().enumerate() {
        // SAFETY: as above.
        unsafe { store(row, to.add(column * to_stride)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, limits};
    use crate::simd;

    fn check<T: Float>() {
        for limited in limits(&Isa::SIMD) {
            let isa = limited.isa();
            for [rows, columns] in [[16, 16], [1, 1], [0, 3], [5, 40], [37, 18], [32, 48]] {
                let from: Vec<T> = (0..rows * columns).map(|i| T::of(i as f64)).collect();
                let mut to = vec![T::zero(); rows * columns];
                // SAFETY: `simd!` chooses an instruction set that is there.
                simd!(A => unsafe {
                    let (from, to) = ((&from[..], columns), (&mut to[..], rows));
                    transpose::<T, <A as Arch>::Vector<T>>([rows, columns], from, to);
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
