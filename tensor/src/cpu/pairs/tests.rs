//! Products of pairs against their definition, by every instruction set.

use crate::bf16;
use crate::cpu::factor::Factor;
use crate::cpu::gemm::{Mat, Patches, gemm, gemm_patches, gemm_plus_row};
use crate::cpu::isa::{Isa, limits};
use crate::cpu::packed::{Packed, Right};
use crate::cpu::parallel::Out;
use crate::rng::Philox;

/// A left operand, to be rounded.
fn values(count: usize, stream: u64) -> Vec<f32> {
    let mut sequence = Philox::new(1, stream).sequence();
    (0..count).map(|_| (sequence.uniform() - 0.5) as f32).collect()
}

fn random(count: usize, stream: u64) -> Vec<bf16> {
    values(count, stream).into_iter().map(bf16::from_f32).collect()
}

/// A·B, from rows of A and columns of B.
fn product([m, k, n]: [usize; 3], a: impl Fn(usize, usize) -> f32, b: impl Fn(usize, usize) -> bf16) -> Vec<f64> {
    let element = |i: usize, j: usize| (0..k).map(|p| bf16::from_f32(a(i, p)).to_f64() * b(p, j).to_f64()).sum();
    (0..m * n).map(|place| element(place / n, place % n)).collect()
}

fn expect(got: &[f32], want: &[f64], start: impl Fn(usize) -> f64, k: usize, what: &str) {
    for (place, (&got, want)) in got.iter().zip(want).enumerate() {
        let want = want + start(place);
        // Exact products: the order of sums is all that differs.
        assert!((f64::from(got) - want).abs() <= 2e-8 * (k + 1) as f64, "{what}, {place}: {got} is not {want}");
    }
}

#[test]
fn products_are_those_of_the_rounded_factors_on_every_instruction_set() {
    for limited in limits(&Isa::ALL) {
        let isa = limited.isa();
        for extents in [
            [64, 16_500, 64],
            [0, 3, 2],
            [3, 0, 20],
            [1, 1, 1],
            [7, 5, 3],
            [32, 32, 32],
            [33, 64, 33],
            [16, 96, 16],
            [15, 33, 48],
            [700, 64, 65],
            [49, 600, 77],
            [31, 9000, 17],
            [300, 1100, 40],
        ] {
            let [m, k, n] = extents;
            let (a, b, row) = (values(m * k, 1), random(k * n, 2), random(n, 3));
            let at: Vec<f32> = (0..k * m).map(|i| a[i % m * k + i / m]).collect();
            let bt: Vec<bf16> = (0..n * k).map(|i| b[i % k * n + i / k]).collect();
            let want = product(extents, |i, p| a[i * k + p], |p, j| b[p * n + j]);
            for (a, b) in [
                (Mat::new(&a, m, k), Mat::new(&b, k, n)),
                (Mat::new(&at, k, m).t(), Mat::new(&b, k, n)),
                (Mat::new(&a, m, k), Mat::new(&bt, n, k).t()),
            ] {
                for accumulate in [false, true] {
                    let mut c = vec![0.25; m * n];
                    gemm(a, b, Out { data: &mut c, accumulate });
                    let start = if accumulate { 0.25 } else { 0.0 };
                    expect(&c, &want, |_| start, k, &format!("{isa:?} {extents:?}"));
                }
                let mut c = vec![0.25; m * n];
                gemm_plus_row(a, &Packed::new(b), &row, &mut c);
                expect(&c, &want, |place| row[place % n].to_f64(), k, &format!("{isa:?} {extents:?} plus a row"));
            }
        }
    }
}

#[test]
fn strided_operands_and_patches_are_read_where_they_lie() {
    for limited in limits(&Isa::ALL) {
        let isa = limited.isa();
        let [m, k, n] = [37, 90, 50];
        let (map, memory) = (values(20_000, 1), random(20_000, 4));
        // Every third row and second column of a larger matrix, and the same of its transpose.
        let a = Mat::strided(&map, (m, k), (540, 2));
        let b = Mat::strided(&memory[7..], (k, n), (2, 180));
        let mut c = vec![0.0; m * n];
        gemm(a, b, Out::store(&mut c));
        let want = product([m, k, n], |i, p| map[i * 540 + p * 2], |p, j| memory[7 + p * 2 + j * 180]);
        expect(&c, &want, |_| 0.0, k, &format!("{isa:?} strided"));
        // The same element over and over.
        let a_ones = Mat::strided(&map, (m, k), (3, 0));
        gemm(a_ones, b, Out::store(&mut c));
        let want = product([m, k, n], |i, _| map[i * 3], |p, j| memory[7 + p * 2 + j * 180]);
        expect(&c, &want, |_| 0.0, k, &format!("{isa:?} one element a row"));
        gemm(a, Mat::strided(&memory, (k, n), (1, 0)), Out::store(&mut c));
        let want = product([m, k, n], |i, p| map[i * 540 + p * 2], |p, _| memory[p]);
        expect(&c, &want, |_| 0.0, k, &format!("{isa:?} one column"));
        // Columns of an odd number of elements, in pairs that lie as such and in those that do not.
        for start in [0, 1] {
            let (k, b) = (89, Mat::strided(&memory[start..], (50, 89), (90, 1)).t());
            gemm(Mat::strided(&map, (m, k), (540, 2)), b, Out::store(&mut c));
            let want = product([m, k, n], |i, p| map[i * 540 + p * 2], |p, j| memory[start + p + j * 90]);
            expect(&c, &want, |_| 0.0, k, &format!("{isa:?} from {start}"));
        }
        // Odd places, where pairs do not lie as such.
        let b = Mat::strided(&memory[1..], (n, k), (91, 1)).t();
        gemm(a, b, Out::store(&mut c));
        let want = product([m, k, n], |i, p| map[i * 540 + p * 2], |p, j| memory[1 + p + j * 91]);
        expect(&c, &want, |_| 0.0, k, &format!("{isa:?} odd"));

        for (runs, len) in [(vec![0, 900], 300), (vec![7, 50, 3], 30), (vec![0], 0), (vec![], 4)] {
            let (k, starts) = (runs.len() * len, (0..m).map(|i| i * 7 % m * 11).collect::<Vec<_>>());
            let b = random(k * n, 2);
            let packed = Packed::<bf16>::filled((k, n), |columns, to, width| {
                for (row, to) in to.chunks_exact_mut(width).enumerate() {
                    to[..columns.len()].copy_from_slice(&b[row * n..][columns.clone()]);
                    to[columns.len()..].fill(bf16::ZERO);
                }
            });
            let places: Vec<usize> = (0..m).map(|i| i * (n + 2) + 1).collect();
            // Patches anywhere, of neighbouring elements and of others; and some of which most begin with neighbours.
            let neighbours: Vec<usize> = (0..m).map(|i| if i < 33 { i } else { 3 * i }).collect();
            for (starts, step) in [(&starts, 1), (&starts, 5), (&neighbours, 5)] {
                let patches = Patches { data: &map, starts, runs: &runs, len, step };
                let at = |i: usize, p: usize| map[starts[i] + runs[p / len] + p % len * step];
                let want = product([m, k, n], at, |p, j| b[p * n + j]);
                for right in [Right::Packed(&packed), Right::Matrix(Mat::new(&b, k, n))] {
                    let mut c = vec![0.5; m * (n + 2)];
                    gemm_patches(patches, right, Out { data: &mut c, accumulate: true }, &places);
                    for (row, want) in c.chunks_exact(n + 2).zip(want.chunks_exact(n)) {
                        assert_eq!((row[0], row[n + 1]), (0.5, 0.5), "between the rows");
                        expect(&row[1..=n], want, |_| 0.5, k, &format!("{isa:?} patches, every {step}th element"));
                    }
                }
            }
            let want = product([m, k, n], |i, p| map[starts[i] + runs[p / len] + p % len], |p, j| b[p * n + j]);
            // Rows of C that lie evenly, and some that do not, in whole tiles.
            for shift in [0, 1] {
                let b = Packed::<bf16>::filled((k, 32), |columns, to, width| {
                    for (row, to) in to.chunks_exact_mut(width).enumerate() {
                        to.fill(bf16::ZERO);
                        to[..columns.len()].copy_from_slice(&b[row * n..][columns.clone()]);
                    }
                });
                let places: Vec<usize> = (0..32).map(|i| i * 40 + if i > 20 { shift } else { 0 }).collect();
                let patches = Patches { data: &map, starts: &starts[..32], runs: &runs, len, step: 1 };
                let mut c = vec![0.5; 1300];
                gemm_patches(patches, &b, Out { data: &mut c, accumulate: true }, &places);
                for (i, &place) in places.iter().enumerate() {
                    let want = &want[i * n..][..32];
                    expect(&c[place..place + 32], want, |_| 0.5, k, &format!("{isa:?} rows shifted by {shift}"));
                    assert_eq!(c[place + 32..][..7], [0.5; 7], "{isa:?} between the rows");
                }
            }
            let a = values(m * k, 3);
            let mut c = vec![0.5; m * n];
            gemm(Mat::new(&a, m, k), &packed, Out::store(&mut c));
            let want = product([m, k, n], |i, p| a[i * k + p], |p, j| b[p * n + j]);
            expect(&c, &want, |_| 0.0, k, &format!("{isa:?} packed"));
        }
    }
}

#[test]
fn rounding_is_to_the_nearest_even() {
    for limited in limits(&Isa::ALL) {
        let isa = limited.isa();
        let mut values =
            vec![0.0, -0.0, 1.0, 1.003_906_2, 1.011_718_8, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, 1e-40, 1e-20];
        values.extend((0..50_000u32).map(|i| f32::from_bits(i.wrapping_mul(0x9E37_79B9))).filter(|x| !x.is_nan()));
        let mut rounded = vec![bf16::ZERO; values.len()];
        Factor::round(&values, &mut rounded);
        for (value, rounded) in values.iter().zip(&rounded) {
            let nearest = bf16::from_f32(if value.is_subnormal() { 0f32.copysign(*value) } else { *value });
            assert_eq!(rounded.to_bits(), nearest.to_bits(), "{isa:?} {value}");
        }
        let mut nan = [bf16::ZERO; 2];
        Factor::round(&[f32::NAN, f32::from_bits(0x7F80_0001)], &mut nan);
        assert!(nan.iter().all(|nan| nan.is_nan()), "{isa:?}");
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row_and_column() {
    for limited in limits(&Isa::ALL) {
        let isa = limited.isa();
        let [m, k, n] = [17, 33, 33];
        let (mut a, mut b) = (vec![1.0; m * k], vec![bf16::ONE; k * n]);
        (a[m * k - 1], b[k * n - 2]) = (f32::NAN, bf16::INFINITY);
        let mut c = vec![0.0; m * n];
        gemm(Mat::new(&a, m, k), Mat::new(&b, k, n), Out::store(&mut c));
        for (place, &c) in c.iter().enumerate() {
            match (place / n, place % n) {
                (16, _) => assert!(c.is_nan(), "{isa:?} {place}"),
                (_, 31) => assert_eq!(c, f32::INFINITY, "{isa:?} {place}"),
                _ => assert_eq!(c, 33.0, "{isa:?} {place}"),
            }
        }
    }
}
