//! CPU kernels of [`pad`](super::pad).

use super::geometry::Geometry;
use rayon::prelude::*;
use tensor::Float;
use tensor::cpu::parallel::{Out, items_per_task, put};

pub fn forward<T: Float>(x: &[T], g: Geometry, y: &mut [T]) {
    let tasks = y.par_chunks_mut(g.padded_row.max(1)).with_min_len(items_per_task(g.padded_row)).enumerate();
    tasks.for_each(|(place, y)| {
        let (image, row) = (place / g.padded_rows, place % g.padded_rows);
        let (inside, zeros) = y.split_at_mut(if row < g.rows { g.row } else { 0 });
        if row < g.rows {
            inside.copy_from_slice(&x[(image * g.rows + row) * g.row..][..g.row]);
        }
        zeros.fill(T::zero());
    });
}

pub fn backward<T: Float>(dy: &[T], g: Geometry, Out { data, accumulate }: Out<'_, T>) {
    let tasks = data.par_chunks_mut(g.row.max(1)).with_min_len(items_per_task(g.row)).enumerate();
    tasks.for_each(|(place, dx)| {
        let (image, row) = (place / g.rows, place % g.rows);
        put(dx, &dy[(image * g.padded_rows + row) * g.padded_row..][..g.row], accumulate);
    });
}
