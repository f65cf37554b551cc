//! Known answers of Pillow, and what the draws must be.

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

/// `fixtures/rand_augment.py` made them with timm and Pillow: 24 x 24 pixels, the first picture that of all cases.
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

/// `cargo test --release -p biformer-data -- --ignored --nocapture operations` prints how long each takes.
#[test]
#[ignore = "a measurement"]
fn speed_of_the_operations() {
    let published = RandAugment { operations: 2, magnitude: 9.0, magnitude_std: 0.5, fill: FILL };
    for side in [224, 32] {
        let (picture, images) = (noise(side), 40 * (224 / side).pow(2));
        // Of ten times, the one with the least of what else the machine does.
        let measure = |name: String, work: &dyn Fn(&mut Canvas, &mut Sequence)| {
            let once = |_| {
                let (mut canvas, mut random) = (canvas(side, &picture), Philox::new(7, 0).sequence());
                let started = std::time::Instant::now();
                for _ in 0..images {
                    canvas.pixels_mut().copy_from_slice(&picture);
                    work(std::hint::black_box(&mut canvas), &mut random);
                }
                started.elapsed().as_secs_f64() * 1e3 / f64::from(images as u32)
            };
            println!("{side}: {:.4} ms, {name}", (0..10).map(once).fold(f64::INFINITY, f64::min));
        };
        for operation in Operation::ALL {
            let step = Step { operation, magnitude: 9.0, negative: false };
            measure(format!("{operation:?}"), &|canvas, _| step.apply(canvas, FILL));
        }
        measure("as published".to_owned(), &|canvas, random| published.apply(canvas, random));
    }
}
