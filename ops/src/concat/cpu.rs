//! CPU kernel of [`concat`](super::concat); backward, each part is cut out as an
//! [`AxisRange`](crate::axis_range::AxisRange).

use rayon::prelude::*;
use tensor::Float;
use tensor::cpu::parallel::items_per_task;

/// Every row of y is a row of each part, one after another. A part comes with the length of its rows.
pub fn forward<T: Float>(parts: &[(&[T], usize)], y: &mut [T]) {
    let row = parts.iter().map(|(_, width)| width).sum::<usize>().max(1);
    y.par_chunks_mut(row).with_min_len(items_per_task(row)).enumerate().for_each(|(place, y)| {
        let mut rest = y;
        for (part, width) in parts {
            let (own, after) = rest.split_at_mut(*width);
            own.copy_from_slice(&part[place * width..][..*width]);
            rest = after;
        }
    });
}
