//! CPU kernels of [`gather`](super::gather).

use rayon::prelude::*;
use tensor::Float;
use tensor::cpu::parallel::{Out, items_per_task, put};

/// y (N, Q, D) from x (N, R, D) and indices (N, Q); `extents` are N, R and D.
pub fn forward<T: Float>(x: &[T], indices: &[u32], [images, rows, width]: [usize; 3], y: &mut [T]) {
    let picks = indices.len() / images.max(1);
    y.par_chunks_mut(width.max(1)).with_min_len(items_per_task(width)).enumerate().for_each(|(position, y)| {
        let row = position / picks * rows + indices[position] as usize;
        y.copy_from_slice(&x[row * width..][..width]);
    });
}

/// dx (N, R, D) from dy (N, Q, D): every row of dx adds up the rows of dy that were picked from it.
pub fn backward<T: Float>(dy: &[T], indices: &[u32], [images, rows, width]: [usize; 3], out: Out<'_, T>) {
    let Out { data, accumulate } = out;
    if data.is_empty() {
        // Rows without elements can be too many to list.
        return;
    }
    let pickers = Pickers::new(indices, images, rows);
    data.par_chunks_mut(width.max(1)).with_min_len(items_per_task(width)).enumerate().for_each(|(row, dx)| {
        let positions = pickers.of(row);
        if positions.is_empty() && !accumulate {
            dx.fill(T::zero());
        }
        for (term, &position) in positions.iter().enumerate() {
            put(dx, &dy[position * width..][..width], accumulate || term > 0);
        }
    });
}

/// The inverted list: for each of the N·R rows, the positions in indices (N, Q) that picked it, ascending.
struct Pickers {
    /// Where the list of each row starts, and after them the end of the last.
    starts: Vec<usize>,
    positions: Vec<usize>,
}

impl Pickers {
    /// A counting sort of the positions by the row that they picked. Every index must be below `rows`.
    fn new(indices: &[u32], images: usize, rows: usize) -> Self {
        let picks = indices.len() / images.max(1);
        let row_of = |position: usize| position / picks * rows + indices[position] as usize;
        let mut starts = vec![0; images * rows + 1];
        for position in 0..indices.len() {
            starts[row_of(position) + 1] += 1;
        }
        for row in 0..images * rows {
            starts[row + 1] += starts[row];
        }
        let (mut next, mut positions) = (starts.clone(), vec![0; indices.len()]);
        for position in 0..indices.len() {
            let place = &mut next[row_of(position)];
            positions[*place] = position;
            *place += 1;
        }
        Self { starts, positions }
    }

    /// The positions that picked row n·R + r.
    fn of(&self, row: usize) -> &[usize] {
        &self.positions[self.starts[row]..self.starts[row + 1]]
    }
}
