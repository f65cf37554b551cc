//! CPU kernel of [`region_partition`](super::region_partition) and [`region_merge`](crate::region_merge),
//! forward and backward.

use rayon::prelude::*;
use tensor::Float;
use tensor::cpu::parallel::{Out, items_per_task, put};

/// out (B, Q, P, L) = x (B, P, Q, L): the two middle axes change places, lines of L elements stay whole.
/// `extents` are P, Q and L.
pub fn swap<T: Float>(x: &[T], [p, q, line]: [usize; 3], Out { data, accumulate }: Out<'_, T>) {
    let column = p * line;
    data.par_chunks_mut(column.max(1)).with_min_len(items_per_task(column)).enumerate().for_each(|(place, data)| {
        let (block, j) = (place / q, place % q);
        for (i, data) in data.chunks_exact_mut(line).enumerate() {
            put(data, &x[((block * p + i) * q + j) * line..][..line], accumulate);
        }
    });
}
