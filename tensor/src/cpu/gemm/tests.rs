//! Products against a short reference, of operands as operations have them.

use super::*;
use crate::cpu::isa::{Isa, limits};
use crate::cpu::packed::Packed;
use crate::rng::Philox;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn random(count: usize, stream: u64) -> Vec<f64> {
    let mut sequence = Philox::new(1, stream).sequence();
    (0..count).map(|_| sequence.uniform() - 0.5).collect()
}

fn check(m: usize, k: usize, n: usize, accumulate: bool) {
    let (a, b) = (random(m * k, 1), random(k * n, 2));
    let start = random(m * n, 3);
    let mut expected = if accumulate { start.clone() } else { vec![0.0; m * n] };
    for i in 0..m {
        for p in 0..k {
            for j in 0..n {
                expected[i * n + j] += a[i * k + p] * b[p * n + j];
            }
        }
    }
    let bt: Vec<f64> = (0..n * k).map(|i| b[i % k * n + i / k]).collect();
    for b in [Mat::new(&b, k, n), Mat::new(&bt, n, k).t()] {
        for right in [Right::Matrix(b), Right::Packed(&Packed::new(b))] {
            let mut c = start.clone();
            gemm(Mat::new(&a, m, k), right, Out { data: &mut c, accumulate });
            for (got, want) in c.iter().zip(&expected) {
                assert!((got - want).abs() <= 1e-15 * k as f64, "{m}x{k}x{n}: {got} is not {want}");
            }
        }
    }
}

/// However many columns they would have.
#[test]
fn products_without_rows_are_done_at_once() {
    let b = Mat::strided(&[0.0], (1, usize::MAX), (0, 0));
    let patches = Patches { data: &[], starts: &[], runs: &[0], len: 1, step: 1 };
    gemm_patches(patches, b, Out::store(&mut []), &[]);
    gemm(Mat::new(&[], 0, 1), b, Out::store(&mut []));
    gemm(Mat::strided(&[1.0], (1 << 62, 1), (0, 1)), Mat::<f64>::new(&[], 1, 0), Out::store(&mut []));
}

#[test]
fn every_way_to_split_agrees_with_the_definition() {
    for (m, k, n) in [(0, 3, 2), (3, 0, 2), (1, 1, 1), (7, 5, 3), (700, 64, 65), (49, 300, 777), (31, 9000, 17)] {
        check(m, k, n, false);
        check(m, k, n, true);
    }
}

#[test]
fn patches_are_multiplied_where_they_lie() {
    let image = random(5000, 1);
    // Overlapping patches, in any order, of few long runs and of many short ones, of neighbouring elements and of
    // others; rows of C apart from each other.
    for (runs, len, n, step) in [
        (vec![0, 900], 300, 20, 1),
        (vec![7, 50, 3], 5, 33, 1),
        (vec![0, 400], 270, 32, 3),
        (vec![5, 1, 90, 4], 7, 50, 6),
        (vec![0], 0, 3, 1),
        (vec![], 4, 3, 2),
    ] {
        let starts: Vec<usize> = (0..13).map(|i| (i * 7 % 13) * 11).collect();
        let k = runs.len() * len;
        let place = |i: usize, p: usize| starts[i] + runs[p / len] + p % len * step;
        let copied: Vec<f64> = (0..13 * k).map(|at| image[place(at / k, at % k)]).collect();
        let b = random(k * n, 2);
        let mut expected = vec![0.0; 13 * n];
        gemm(Mat::new(&copied, 13, k), Mat::new(&b, k, n), Out::store(&mut expected));
        let c_starts: Vec<usize> = (0..13).map(|i| i * (n + 2) + 1).collect();
        let packed = Packed::new(Mat::new(&b, k, n));
        for right in [Right::Packed(&packed), Right::Matrix(Mat::new(&b, k, n))] {
            for accumulate in [false, true] {
                let mut c = vec![0.5; 13 * (n + 2)];
                let patches = Patches { data: &image, starts: &starts, runs: &runs, len, step };
                gemm_patches(patches, right, Out { data: &mut c, accumulate }, &c_starts);
                for (row, expected) in c.chunks_exact(n + 2).zip(expected.chunks_exact(n)) {
                    assert_eq!((row[0], row[n + 1]), (0.5, 0.5), "between the rows");
                    let start = if accumulate { 0.5 } else { 0.0 };
                    assert!(row[1..].iter().zip(expected).all(|(got, want)| (got - want - start).abs() < 1e-12));
                }
            }
        }
    }
}

/// Threads share the panels only where no two rows of C overlap; the bits are those of one thread.
#[test]
fn patches_have_the_same_bits_with_any_number_of_threads() {
    let (count, k, n) = (200, 400, 200);
    let (image, b) = (random(count + k, 1), random(k * n, 2));
    let starts: Vec<usize> = (0..count).collect();
    let patches = Patches { data: &image, starts: &starts, runs: &[0], len: k, step: 1 };
    for _limited in limits(&Isa::SIMD) {
        let packed = Packed::new(Mat::new(&b, k, n));
        for apart in [n, n + 3, n - 1, 0] {
            for descending in [false, true] {
                let place = |i: usize| apart * if descending { count - 1 - i } else { i };
                let c_starts: Vec<usize> = (0..count).map(place).collect();
                let computed = |threads: usize| {
                    let mut c = vec![0.0; apart * (count - 1) + n];
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    pool.install(|| gemm_patches(patches, &packed, Out::store(&mut c), &c_starts));
                    c
                };
                assert!(computed(1) == computed(3), "{apart} apart, descending: {descending}");
            }
        }
    }
}

/// One element over and over makes rows without memory, so many that the number of C's elements wraps around to
/// 100.
#[test]
#[should_panic(expected = "size of a matrix product")]
fn a_product_with_more_elements_than_can_be_counted_is_refused() {
    let inverse = (0..6).fold(33usize, |x, _| x.wrapping_mul(2usize.wrapping_sub(x.wrapping_mul(33))));
    let rows = inverse.wrapping_mul(100);
    let mut c = [0.0; 100];
    assert_eq!(rows.wrapping_mul(33), c.len());
    gemm_on_this_thread(Mat::strided(&[1.0], (rows, 1), (0, 0)), Mat::new(&[1.0; 33], 1, 33), Out::store(&mut c));
}

/// Two runs of half of all elements that can be counted are none, if their number wraps around.
#[test]
#[should_panic(expected = "inner extents of a matrix product")]
fn patches_with_more_elements_than_can_be_counted_are_refused() {
    let patches = Patches { data: &[1.0], starts: &[0], runs: &[0, 0], len: 1 << (usize::BITS - 1), step: 1 };
    gemm_patches(patches, Mat::new(&[0.0; 64], 0, 32), Out::store(&mut [0.0; 32]), &[0]);
}

/// With a long inner axis, whose partial sums could as well be added to a larger matrix.
#[test]
#[should_panic(expected = "size of a matrix product")]
fn a_sum_of_partial_products_has_one_size() {
    let (a, b) = (Mat::strided(&[0.0; 1], (20, 20_000), (0, 0)), Mat::strided(&[0.0; 1], (20_000, 20), (0, 0)));
    gemm(a, b, Out::store(&mut [0.0; 401]));
}

#[test]
fn what_lacks_one_element_is_refused() {
    let numbers = [0.0; 32];
    let refused = |act: &dyn Fn()| catch_unwind(AssertUnwindSafe(act)).is_err();
    let matrix = |len: usize| refused(&|| _ = Mat::strided(&numbers[..len], (3, 4), (8, 2)));
    assert_eq!([23, 22].map(matrix), [false, true]);
    let product = |len: usize, c_len: usize| {
        refused(&|| {
            let patches = Patches { data: &numbers[..len], starts: &[5, 0], runs: &[3, 0], len: 2, step: 2 };
            gemm_patches(patches, Mat::new(&numbers, 4, 2), Out::store(&mut [0.0; 9][..c_len]), &[4, 0]);
        })
    };
    assert_eq!([(11, 6), (10, 6), (11, 5)].map(|(len, c_len)| product(len, c_len)), [false, true, true]);
}

#[test]
#[should_panic(expected = "a matrix that is to be packed")]
fn a_matrix_with_more_elements_than_can_be_counted_is_not_packed() {
    Packed::<f32>::new(Mat::strided(&[1.0; 32], ((1 << 59) + 1, 32), (0, 1)));
}

#[test]
fn agrees_with_matrixmultiply_in_f32_on_every_instruction_set() {
    for limited in limits(&Isa::SIMD) {
        let isa = limited.isa();
        // Panels of each width, whole and in part, and rows that fill tiles of each height and leave each remainder.
        for (m, k, n) in [
            (8, 32, 64),
            (49, 300, 50),
            (257, 64, 48),
            (3, 700, 1),
            (100, 27, 33),
            (29, 40, 100),
            (16, 300, 128),
            (11, 30, 80),
        ] {
            let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect::<Vec<_>>();
            let (a, b, mut c) = (narrow(random(m * k, 1)), narrow(random(k * n, 2)), vec![0.0; m * n]);
            let mut expected = c.clone();
            // SAFETY: row-major matrices of these extents.
            unsafe {
                let (k_step, n_step) = (k as isize, n as isize);
                let out = expected.as_mut_ptr();
                matrixmultiply::sgemm(m, k, n, 1.0, a.as_ptr(), k_step, 1, b.as_ptr(), n_step, 1, 0.0, out, n_step, 1);
            }
            gemm(Mat::new(&a, m, k), Mat::new(&b, k, n), Out::store(&mut c));
            for (got, want) in c.iter().zip(&expected) {
                assert!((got - want).abs() <= 1e-5, "{isa:?} {m}x{k}x{n}: {got} is not {want}");
            }
        }
    }
}
