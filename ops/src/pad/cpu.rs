//! CPU kernels of [`pad`](super::pad).

use rayon::prelude::*;
use tensor::Float;
use tensor::cpu::parallel::{Out, items_per_task, put};

/// The extents of a map before and after.
#[derive(Clone, Copy)]
pub struct Extents {
    /// H
    pub rows: usize,
    /// H + bottom
    pub padded_rows: usize,
    /// W·C, the elements of a row
    pub row: usize,
    /// (W + right)·C
    pub padded_row: usize,
}

pub fn forward<T: Float>(x: &[T], e: Extents, y: &mut [T]) {
    let tasks = y.par_chunks_mut(e.padded_row.max(1)).with_min_len(items_per_task(e.padded_row)).enumerate();
    tasks.for_each(|(place, y)| {
        let (image, row) = (place / e.padded_rows, place % e.padded_rows);
        let (inside, zeros) = y.split_at_mut(if row < e.rows { e.row } else { 0 });
        if row < e.rows {
            inside.copy_from_slice(&x[(image * e.rows + row) * e.row..][..e.row]);
        }
        zeros.fill(T::zero());
    });
}

pub fn backward<T: Float>(dy: &[T], e: Extents, Out { data, accumulate }: Out<'_, T>) {
    let tasks = data.par_chunks_mut(e.row.max(1)).with_min_len(items_per_task(e.row)).enumerate();
    tasks.for_each(|(place, dx)| {
        let (image, row) = (place / e.rows, place % e.rows);
        put(dx, &dy[(image * e.padded_rows + row) * e.padded_row..][..e.row], accumulate);
    });
}
