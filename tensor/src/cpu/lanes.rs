//! Sums over slices in a fixed order that the compiler can vectorise.
//!
//! Floating-point addition is not associative, so the compiler may not reorder a plain sum into vector
//! lanes. Here the order is written down: sixteen interleaved partial sums, then those pairwise.

use crate::Float;

const LANES: usize = 16;

/// `Σ f(x[i])`.
#[inline(always)]
pub fn sum_map<T: Float>(x: &[T], f: impl Fn(T) -> T) -> T {
    sum_zipped([x], |[x]| f(x))
}

/// `Σ f(x[i], y[i])`. Panics when the lengths differ.
#[inline(always)]
pub fn sum_map2<T: Float>(x: &[T], y: &[T], f: impl Fn(T, T) -> T) -> T {
    sum_zipped([x, y], |[x, y]| f(x, y))
}

#[inline(always)]
fn sum_zipped<T: Float, const N: usize>(slices: [&[T]; N], f: impl Fn([T; N]) -> T) -> T {
    let len = slices[0].len();
    assert!(slices.iter().all(|slice| slice.len() == len), "slices of one length");
    let mut sums = [T::zero(); LANES];
    let chunked = slices.map(|slice| slice.as_chunks::<LANES>());
    for block in 0..len / LANES {
        let blocks: [&[T; LANES]; N] = chunked.map(|(blocks, _)| &blocks[block]);
        for lane in 0..LANES {
            sums[lane] += f(blocks.map(|block| block[lane]));
        }
    }
    for lane in 0..len % LANES {
        sums[lane] += f(chunked.map(|(_, tail)| tail[lane]));
    }
    fold(sums)
}

/// The largest element; negative infinity for none. NaNs are skipped.
#[inline(always)]
pub fn max<T: Float>(x: &[T]) -> T {
    let mut largest = [T::neg_infinity(); LANES];
    let (blocks, tail) = x.as_chunks::<LANES>();
    let larger = |a: T, b: T| if b > a { b } else { a };
    for block in blocks {
        for lane in 0..LANES {
            largest[lane] = larger(largest[lane], block[lane]);
        }
    }
    for (lane, &x) in tail.iter().enumerate() {
        largest[lane] = larger(largest[lane], x);
    }
    largest.into_iter().fold(T::neg_infinity(), larger)
}

#[inline(always)]
fn fold<T: Float>(mut sums: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            let other = sums[lane + width];
            sums[lane] += other;
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_maxima_of_every_length() {
        for len in 0..70usize {
            let x: Vec<f64> = (0..len).map(|i| i as f64).collect();
            let total = (len * len.saturating_sub(1) / 2) as f64;
            assert_eq!(sum_map(&x, |x| 2.0 * x), 2.0 * total);
            assert_eq!(sum_map2(&x, &x, |x, y| x - 0.5 * y), 0.5 * total);
            assert_eq!(max(&x), if len == 0 { f64::NEG_INFINITY } else { (len - 1) as f64 });
        }
    }
}
