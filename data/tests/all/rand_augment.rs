//! RandAugment and erasing with noise, as the transform has them.

use std::collections::BTreeSet;

use crate::support::PLAIN;
use data::{Augmentation, Crop, EraseFill, Fill, Image, Statistics, Transform};
use tensor::rng::Philox;

/// No byte in it is near 0 or 255, so that every operation changes it.
fn picture(height: usize, width: usize) -> Image {
    let words = Philox::new(6, 0);
    let pixels = (0..height * width * 3).map(|i| 20 + (words.word(i as u64) % 200) as u8).collect();
    Image::new(height, width, pixels).unwrap()
}

fn apply(size: usize, statistics: Statistics, augmentation: &Augmentation, image: &Image, stream: u64) -> Vec<f32> {
    let transform = Transform::train(size, statistics, augmentation).unwrap();
    let mut out = vec![f32::NAN; size * size * 3];
    transform.apply(image, &mut Philox::new(9, stream).sequence(), &mut out);
    out
}

/// One operation leaves half of the images as they would be without, to the bit; two leave a quarter.
#[test]
fn images_that_no_operation_meets_are_as_without() {
    for (crop, image) in [(Crop::Padded, picture(32, 32)), (Crop::Resized, picture(50, 40))] {
        let off = Augmentation { crop, ..Augmentation::default() };
        for (rand_augment, expected) in [(1, 150..250), (2, 65..135)] {
            let on = Augmentation { rand_augment, ..off.clone() };
            let same = |&stream: &u64| {
                let [off, on] = [&off, &on].map(|augmentation| apply(32, PLAIN, augmentation, &image, stream));
                off == on
            };
            let same = (0..400).filter(same).count();
            // Five and four standard deviations.
            assert!(expected.contains(&same), "{crop:?}, {rand_augment}: {same} of 400");
        }
    }
}

/// What a padded crop shows beyond the edge, and what moves in where a picture moves away, is a colour of bytes: for
/// ImageNet (124, 116, 104).
#[test]
fn the_mean_colour_in_bytes() {
    let Statistics { mean, std } = Statistics::IMAGENET;
    let level = |byte: f32, channel: usize| (byte / 255.0 - mean[channel]) / std[channel];
    let expected = [level(124.0, 0), level(116.0, 1), level(104.0, 2)];
    let is_mean = |pixel: &&[f32; 3]| pixel.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5);
    let white = Image::new(32, 32, vec![255; 32 * 32 * 3]).unwrap();
    let still = Augmentation { padding: 0, flip: 0.0, rand_augment: 1, ..Augmentation::default() };
    let shifted = Augmentation { padding: 4, fill: Fill::Mean, ..still.clone() };
    let count = |augmentation: &Augmentation, stream| {
        let floats = apply(32, Statistics::IMAGENET, augmentation, &white, stream);
        floats.as_chunks::<3>().0.iter().filter(is_mean).count()
    };
    // Half of the operations are applied, and five of fifteen move.
    let moved = (0..300).filter(|&stream| count(&still, stream) > 0).count();
    assert!((24..76).contains(&moved), "{moved} of 300"); // 50, and four standard deviations
    // 80 of 81 shifts have an edge to fill. Half meet no operation, and 7 of 15 keep the edge's colour: those that
    // move, that which sharpens, and that which equalises, which so few pixels are too few for.
    let filled = (0..300).filter(|&stream| count(&shifted, stream) > 0).count();
    assert!((187..247).contains(&filled), "{filled} of 300"); // 217, and four standard deviations
}

/// What is erased is so after the operations: the rectangle is there in every image, untouched by them.
#[test]
fn a_rectangle_is_erased_after_the_operations() {
    let augmentation = Augmentation { rand_augment: 2, erase: 1.0, ..Augmentation::default() };
    let statistics = Statistics { mean: [0.999; 3], std: [1.0; 3] }; // of which no byte is the mean
    for stream in 0..200 {
        let floats = apply(32, statistics, &augmentation, &picture(32, 32), stream);
        let places: Vec<usize> = (0..32 * 32).filter(|&place| floats[place * 3..][..3] == [0.0; 3]).collect();
        let columns: BTreeSet<usize> = places.iter().map(|place| place % 32).collect();
        let rows: BTreeSet<usize> = places.iter().map(|place| place / 32).collect();
        assert!(places.len() >= 15 && places.len() == rows.len() * columns.len(), "stream {stream}: {places:?}");
    }
}

/// The same rectangle as of the mean colour, with numbers of mean 0 and variance 1 in it, none like the next.
#[test]
fn a_rectangle_of_noise() {
    let image = picture(40, 40);
    let with = |erase_fill| Augmentation { erase: 1.0, erase_fill, ..Augmentation::default() };
    let statistics = Statistics { mean: [0.999; 3], std: [1.0; 3] };
    let mut noise = vec![];
    for stream in 0..100 {
        let mean = apply(40, statistics, &with(EraseFill::Mean), &image, stream);
        for (noisy, mean) in apply(40, statistics, &with(EraseFill::Noise), &image, stream).into_iter().zip(mean) {
            match mean == 0.0 {
                true => noise.push(f64::from(noisy)),
                false => assert_eq!(noisy, mean),
            }
        }
    }
    let count = noise.len() as f64;
    let moment = |power: i32| noise.iter().map(|x| x.powi(power)).sum::<f64>() / count;
    // Of a normal distribution these are 0, 1 and 3, with variances of 1, 2 and 96 by the number of draws.
    for (power, expected, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (4, 3.0, 96.0f64)] {
        let apart = (moment(power) - expected).abs() / (variance / count).sqrt();
        assert!(apart < 4.0, "moment {power} of {count}: {}, {apart} standard deviations away", moment(power));
    }
    let next = noise.windows(2).map(|pair| pair[0] * pair[1]).sum::<f64>() / count;
    assert!(next.abs() < 4.0 / count.sqrt(), "correlation with the next: {next}");
}
