//! Known-answer tests against Pillow, and tests of the distribution of the draws.

use super::*;
use tensor::rng::Philox;

const PICTURES: &[u8] = include_bytes!("../../tests/fixtures/rand_augment.png");
const CASES: &str = include_str!("../../tests/fixtures/rand_augment.txt");
/// ImageNet's mean colour.
const FILL: [u8; 3] = [124, 116, 104];

fn canvas(side: usize, pixels: &[[u8; 3]]) -> Canvas {
    let mut canvas = Canvas::new(side);
    canvas.pixels_mut().copy_from_slice(pixels);
    canvas
}

fn applied(side: usize, pixels: &[[u8; 3]], operation: Operation, magnitude: f64, negative: bool) -> Vec<[u8; 3]> {
    let mut canvas = canvas(side, pixels);
    Step { operation, magnitude, negative }.apply(&mut canvas, FILL);
    canvas.pixels
}

fn noise(side: usize) -> Vec<[u8; 3]> {
    let mut random = Philox::new(5, side as u64).sequence();
    (0..side * side).map(|_| std::array::from_fn(|_| random.word() as u8)).collect()
}

/// `fixtures/rand_augment.py` made them with timm and Pillow: 24 x 24 pixels, the first picture being the input of all
/// cases.
#[test]
fn the_bytes_are_pillows() {
    let strip = image::load_from_memory(PICTURES).unwrap().into_rgb8();
    let side = strip.width() as usize;
    let mut tiles = strip.as_chunks::<3>().0.chunks_exact(side * side);
    let picture = tiles.next().unwrap();
    let mut seen = vec![];
    assert_eq!(tiles.len(), CASES.lines().count());
    for (case, expected) in CASES.lines().zip(tiles) {
        let [name, magnitude, sign] = case.split(' ').collect::<Vec<_>>()[..] else { panic!("{case}") };
        // timm's names say in which of several ways an operation grows.
        let name = name.trim_end_matches("Increasing").trim_end_matches("Rel");
        let operation = Operation::ALL.into_iter().find(|operation| format!("{operation:?}") == name).unwrap();
        let found = applied(side, picture, operation, magnitude.parse().unwrap(), sign == "-");
        let apart = found.as_flattened().iter().zip(expected.as_flattened()).map(|(a, b)| a.abs_diff(*b));
        let (count, most) = (apart.clone().filter(|&apart| apart > 0).count(), apart.max());
        assert_eq!(count, 0, "{case}: bytes that differ, by up to {most:?}");
        seen.push(operation);
    }
    assert!(Operation::ALL.iter().all(|operation| seen.contains(operation)), "{seen:?}");
}

#[test]
fn magnitude_0_leaves_a_picture_and_10_does_the_most() {
    // Enough pixels to equalise, and a range to stretch.
    let side = 20;
    let picture: Vec<[u8; 3]> = noise(side).into_iter().map(|pixel| pixel.map(|byte| 30 + byte / 2)).collect();
    use Operation::{AutoContrast, Equalize, Invert, Posterize};
    for operation in Operation::ALL {
        for negative in [false, true] {
            let same = applied(side, &picture, operation, 0.0, negative) == picture;
            assert_eq!(same, ![AutoContrast, Equalize, Invert, Posterize].contains(&operation), "{operation:?}");
            assert_ne!(applied(side, &picture, operation, 10.0, negative), picture, "{operation:?}");
        }
    }
    // Newer versions of Pillow refuse to keep no bits; those with which the published weights were trained gave black.
    assert_eq!(applied(side, &picture, Posterize, 10.0, false), [[0; 3]; 400]);
    let inverted: Vec<[u8; 3]> = picture.iter().map(|pixel| pixel.map(|byte| 255 - byte)).collect();
    assert_eq!(applied(side, &picture, Operation::Solarize, 10.0, false), inverted);
}

/// The sums that are shifted by 16 bits end in 65,535 for the first four, and in 0 for the others: a little more or
/// less of any colour is another grey.
#[test]
fn greys_are_rounded_as_pillow_does() {
    let colours = [
        ([18, 80, 247], 80),
        ([175, 133, 36], 134),
        ([229, 187, 90], 188),
        ([218, 176, 79], 177),
        ([26, 78, 210], 78),
        ([78, 251, 60], 178),
        ([40, 92, 224], 92),
        ([239, 187, 55], 188),
    ];
    for (colour, grey) in colours {
        let mut pixel = [colour];
        colour::saturation(&mut pixel, 0.0);
        assert_eq!(pixel, [[grey; 3]], "{colour:?}");
    }
}

#[test]
fn a_picture_is_equalised_from_255_pixels_on_that_are_not_of_the_brightest_colour() {
    for (brightest, expected) in [(1, [0, 128, 255]), (2, [10, 20, 30])] {
        let levels = |[dark, middle, bright]: [u8; 3]| -> Vec<[u8; 3]> {
            let counts = [(dark, 128), (middle, 128 - brightest), (bright, brightest)];
            counts.into_iter().flat_map(|(level, count)| vec![[level; 3]; count]).collect()
        };
        let found = applied(16, &levels([10, 20, 30]), Operation::Equalize, 0.0, false);
        assert_eq!(found, levels(expected), "{brightest} of 256");
    }
}

/// The smallest pictures have no inside, and one colour has no range.
#[test]
fn extreme_pictures() {
    use Operation::{AutoContrast, Equalize, Sharpness};
    for side in 1..=5 {
        let black_and_white = (0..side * side).map(|i| [if i % 2 == 0 { 0 } else { 255 }; 3]).collect();
        let pictures = [vec![[0; 3]; side * side], vec![[255, 9, 77]; side * side], black_and_white, noise(side)];
        for (number, picture) in pictures.iter().enumerate() {
            for (operation, magnitude) in Operation::ALL.into_iter().flat_map(|o| [0.0, 5.0, 10.0].map(|m| (o, m))) {
                for negative in [false, true] {
                    let found = applied(side, picture, operation, magnitude, negative);
                    assert_eq!(found.len(), side * side);
                    let of_one_colour = number < 2 && [AutoContrast, Equalize, Sharpness].contains(&operation);
                    let all_edge = side < 3 && operation == Sharpness;
                    assert!(!(of_one_colour || all_edge) || found == *picture, "{operation:?} of {picture:?}");
                }
            }
        }
    }
}

fn draws(magnitude: f64, magnitude_std: f64, count: usize) -> Vec<Option<Step>> {
    let augment = RandAugment { operations: 1, magnitude, magnitude_std, fill: FILL };
    let mut random = Philox::new(11, 0).sequence();
    (0..count).map(|_| augment.draw(&mut random)).collect()
}

/// Asserts that an event of this probability happened as often as expected, within four standard deviations.
#[track_caller]
fn assert_part(what: &str, found: usize, of: usize, probability: f64) {
    let (expected, spread) = (of as f64 * probability, (of as f64 * probability * (1.0 - probability)).sqrt());
    assert!((found as f64 - expected).abs() < 4.0 * spread, "{what}: {found} of {of}, expected {expected}");
}

#[test]
fn each_operation_is_as_frequent_and_half_are_applied() {
    const COUNT: usize = 60_000;
    let steps: Vec<Step> = draws(9.0, 0.5, COUNT).into_iter().flatten().collect();
    assert_part("applied", steps.len(), COUNT, 0.5);
    for operation in Operation::ALL {
        let these = || steps.iter().filter(|step| step.operation == operation);
        assert_part(&format!("{operation:?}"), these().count(), COUNT, 0.5 / 15.0);
        assert_part("negative", these().filter(|step| step.negative).count(), these().count(), 0.5);
    }
}

#[test]
fn magnitudes_are_normal_within_their_bounds() {
    let magnitudes = |mean: f64, std: f64| -> Vec<f64> {
        draws(mean, std, 40_000).into_iter().flatten().map(|step| step.magnitude).collect()
    };
    let drawn = magnitudes(5.0, 0.5);
    let count = drawn.len() as f64;
    let mean = drawn.iter().sum::<f64>() / count;
    let variance = drawn.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
    // Four standard deviations of either: of the mean std / sqrt(n), of the variance sqrt(2 / n) std^2.
    assert!((mean - 5.0).abs() < 4.0 * 0.5 / count.sqrt(), "{mean}");
    assert!((variance - 0.25).abs() < 4.0 * 0.25 * (2.0 / count).sqrt(), "{variance}");

    // What lies beyond a bound becomes the bound: two standard deviations above 9 at 0.5, half of one below 0.5 at 1.
    for (mean, std, bound, beyond) in [(9.0, 0.5, 10.0, 0.022_750), (0.5, 1.0, 0.0, 0.308_538)] {
        let drawn = magnitudes(mean, std);
        assert!(drawn.iter().all(|magnitude| (0.0..=10.0).contains(magnitude)));
        let clamped = drawn.iter().filter(|&&magnitude| magnitude == bound).count();
        assert_part(&format!("at {bound}"), clamped, drawn.len(), beyond);
    }
    assert!(magnitudes(7.3, 0.0).iter().all(|&magnitude| magnitude == 7.3));
    assert!(magnitudes(7.3, f64::MAX).iter().all(|magnitude| [0.0, 10.0].contains(magnitude)));
}
