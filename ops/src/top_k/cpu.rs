//! CPU kernels of [`top_k`](super::top_k).

use rayon::prelude::*;
use tensor::cpu::parallel::{Out, items_per_task};
use tensor::{Float, simd};

/// y (R, k) and indices (R, k) from x (R, T); `extents` are T and k.
pub fn forward<T: Float>(x: &[T], [extent, k]: [usize; 2], y: &mut [T], indices: &mut [u32]) {
    if k == 0 {
        return;
    }
    y.par_chunks_mut(k)
        .zip(indices.par_chunks_mut(k))
        .zip(x.par_chunks(extent))
        .with_min_len(items_per_task(extent))
        .for_each(|((y, indices), x)| select(x, y, indices));
}

/// dx (R, T) from dy (R, k): each dy goes to the place that its element came from.
pub fn backward<T: Float>(dy: &[T], indices: &[u32], [extent, k]: [usize; 2], out: Out<'_, T>) {
    let Out { data, accumulate } = out;
    data.par_chunks_mut(extent.max(1)).with_min_len(items_per_task(extent)).enumerate().for_each(|(row, dx)| {
        if !accumulate {
            dx.fill(T::zero());
        }
        let chosen = row * k..(row + 1) * k;
        for (&place, &dy) in indices[chosen.clone()].iter().zip(&dy[chosen]) {
            dx[place as usize] += dy;
        }
    });
}

/// Rows of at most this many elements are ranked by comparing every pair, without data-dependent branches, if k is at
/// least a quarter of the row.
const RANKED: usize = 64;

/// The largest elements of a row, as many as `values` and `places` hold (not more than there are), in
/// descending order, and where they lie; of equal elements the first comes first. NaNs are smaller than
/// every number.
pub(crate) fn select<T: Float>(row: &[T], values: &mut [T], places: &mut [u32]) {
    if row.len() <= RANKED && 4 * values.len() >= row.len() {
        simd!(_A => rank(row, values, places));
    } else {
        insert(row, values, places);
    }
}

/// An element's rank is the number of elements that come before it, counted for as many elements at a time as fill a
/// register.
#[inline(always)]
fn rank<T: Float>(row: &[T], values: &mut [T], places: &mut [u32]) {
    const TOGETHER: usize = 16;
    let mut sorted = [0; RANKED];
    for (block, elements) in row.chunks(TOGETHER).enumerate() {
        let (mut x, mut before) = ([T::zero(); TOGETHER], [0u32; TOGETHER]);
        x[..elements.len()].copy_from_slice(elements);
        let first = (block * TOGETHER) as u32;
        for (place, &other) in row.iter().enumerate() {
            for lane in 0..TOGETHER {
                // Of equal elements the first comes first.
                let comes_before =
                    if (place as u32) < first + lane as u32 { !larger(x[lane], other) } else { larger(other, x[lane]) };
                before[lane] += u32::from(comes_before);
            }
        }
        for (lane, &before) in before[..elements.len()].iter().enumerate() {
            sorted[before as usize] = first + lane as u32;
        }
    }
    for ((value, to), &place) in values.iter_mut().zip(places).zip(&sorted) {
        (*value, *to) = (row[place as usize], place);
    }
}

/// One pass over the row with the best so far kept sorted: k is small, and most elements are turned away
/// by a single comparison.
fn insert<T: Float>(row: &[T], values: &mut [T], places: &mut [u32]) {
    let mut kept = 0;
    for (place, &x) in row.iter().enumerate() {
        if kept == values.len() {
            match values.last() {
                Some(&last) if larger(x, last) => kept -= 1,
                _ => continue,
            }
        }
        let before = values[..kept].partition_point(|&other| !larger(x, other));
        values.copy_within(before..kept, before + 1);
        places.copy_within(before..kept, before + 1);
        (values[before], places[before]) = (x, place as u32);
        kept += 1;
    }
}

#[inline(always)]
fn larger<T: Float>(a: T, b: T) -> bool {
    (a > b) | (b.is_nan() & !a.is_nan())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(row: &[f32], k: usize) -> Vec<u32> {
        let (mut values, mut places) = (vec![0.0; k], vec![u32::MAX; k]);
        select(row, &mut values, &mut places);
        let picked: Vec<u32> = places.iter().map(|&place| row[place as usize].to_bits()).collect();
        assert_eq!(values.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), picked);
        places
    }

    #[test]
    fn sorted_with_ties_to_the_lower_place() {
        assert_eq!(selected(&[1.0, 3.0, 2.0, 3.0, 0.0], 3), [1, 3, 2]);
        assert_eq!(selected(&[7.0; 5], 5), [0, 1, 2, 3, 4]);
        assert_eq!(selected(&[-0.0, 0.0], 2), [0, 1]);
        assert_eq!(selected(&[1.0, 2.0, 3.0, 4.0], 4), [3, 2, 1, 0]);
        assert!(selected(&[1.0], 0).is_empty());
    }

    #[test]
    fn nan_is_smaller_than_every_number() {
        let row = [f32::NAN, 1.0, f32::NEG_INFINITY, f32::NAN, f32::INFINITY];
        assert_eq!(selected(&row, 3), [4, 1, 2]);
        assert_eq!(selected(&row, 5), [4, 1, 2, 0, 3]);
        assert_eq!(selected(&[f32::NAN, 1.0, 2.0, 3.0, 4.0], 1), [4]);
        // In short rows and long ones, for few places and many.
        for (len, k) in [5, 40, RANKED, RANKED + 1, 200].into_iter().flat_map(|len| [1, 2, 5].map(|k| (len, k))) {
            for nan in [0, len / 2, len - 1] {
                let mut row: Vec<f32> = (0..len).map(|i| ((i * 29) % 13) as f32).collect();
                row[nan] = f32::NAN;
                row[(nan + 1) % len] = f32::NAN;
                let mut sorted: Vec<u32> = (0..len as u32).collect();
                let or_least = |place: u32| if row[place as usize].is_nan() { -1.0 } else { row[place as usize] };
                sorted.sort_by(|&a, &b| or_least(b).total_cmp(&or_least(a)));
                assert_eq!(selected(&row, k), sorted[..k], "{len} {k} {nan}");
            }
        }
    }

    #[test]
    fn agrees_with_a_stable_sort() {
        for (k, len) in (0..=40).flat_map(|k| [(k, 40), (k, RANKED), (k, RANKED + 1), (k, 200)]) {
            let row: Vec<f32> = (0..len).map(|i| ((i * 29 + k * 7) % 13) as f32).collect();
            let mut sorted: Vec<u32> = (0..len as u32).collect();
            sorted.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
            assert_eq!(selected(&row, k), sorted[..k]);
        }
    }
}
