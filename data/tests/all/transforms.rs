//! Known cases of the transforms, and the bounds of the random ones.

use crate::support::PLAIN;
use approx::assert_relative_eq;
use data::{Augmentation, Crop, EraseFill, Error, Fill, Filter, Image, Statistics, Transform};
use proptest::prelude::*;
use tensor::rng::{Philox, Sequence};

/// Red counts the rows, green the columns.
fn ramp(height: usize, width: usize) -> Image {
    let pixels = (0..height * width).flat_map(|p| [(p / width) as u8, (p % width) as u8, 77]).collect();
    Image::new(height, width, pixels).unwrap()
}

fn noise(height: usize, width: usize) -> Image {
    let words = Philox::new(5, 0);
    Image::new(height, width, (0..height * width * 3).map(|i| words.word(i as u64) as u8).collect()).unwrap()
}

fn random(stream: u64) -> Sequence {
    Philox::new(9, stream).sequence()
}

fn apply(transform: &Transform, image: &Image, stream: u64) -> Vec<f32> {
    let mut out = vec![f32::NAN; transform.size().pow(2) * 3];
    transform.apply(image, &mut random(stream), &mut out);
    out
}

/// What a model with inputs of `size` pixels sees of an image when it is evaluated.
fn seen(image: &Image, size: usize) -> Vec<f32> {
    Transform::eval(size, PLAIN).unwrap().pixels(image)
}

/// The bytes behind floats made with plain statistics.
fn bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().map(|x| (x * 255.0).round() as u8).collect()
}

#[test]
fn no_shift_and_no_mirror_is_the_identity() {
    let image = ramp(32, 32);
    let still = Augmentation { padding: 0, flip: 0.0, ..Augmentation::default() };
    let train = apply(&Transform::train(32, PLAIN, &still).unwrap(), &image, 0);
    assert_eq!(bytes(&train), image.pixels());
    assert_eq!(train, seen(&image, 32));

    let whole = Augmentation { min_scale: 1.0, crop: Crop::Resized, flip: 0.0, ..Augmentation::default() };
    let resized = apply(&Transform::train(32, PLAIN, &whole).unwrap(), &image, 0);
    assert_eq!(bytes(&resized), image.pixels());
}

#[test]
fn a_sure_flip_mirrors() {
    let flip = Augmentation { padding: 0, flip: 1.0, ..Augmentation::default() };
    let out = bytes(&apply(&Transform::train(32, PLAIN, &flip).unwrap(), &ramp(32, 32), 0));
    for (p, pixel) in out.as_chunks::<3>().0.iter().enumerate() {
        assert_eq!(*pixel, [(p / 32) as u8, 31 - (p % 32) as u8, 77]);
    }
}

#[test]
fn a_sure_vertical_flip_turns_columns_over() {
    for size in [32, 31] {
        let with = |vertical_flip: f64| {
            let augmentation = Augmentation { padding: 0, flip: 0.0, vertical_flip, ..Augmentation::default() };
            apply(&Transform::train(size, PLAIN, &augmentation).unwrap(), &ramp(size, size), 0)
        };
        let (still, turned) = (with(0.0), with(1.0));
        let rows = |pixels: &[f32]| pixels.chunks(3 * size).map(<[f32]>::to_vec).collect::<Vec<_>>();
        assert!(rows(&turned).into_iter().rev().eq(rows(&still)), "{size}");
    }
}

/// A shift by four pixels of a large input would be next to none of a tiny image.
#[test]
fn a_tiny_image_is_padded_only_for_a_model_as_small() {
    for (size, same) in [(32, Crop::Padded), (64, Crop::Resized)] {
        let [auto, chosen] = [Crop::Auto, same].map(|crop| {
            let transform = Transform::train(size, PLAIN, &Augmentation { crop, ..Augmentation::default() }).unwrap();
            apply(&transform, &ramp(32, 32), 3)
        });
        assert_eq!(auto, chosen, "{size}");
    }
}

#[test]
fn a_resized_crop_is_mirrored_as_often_as_asked_for() {
    let image = noise(60, 50);
    let crop = |flip: f64, stream: u64| {
        let augmentation = Augmentation { flip, ..Augmentation::default() };
        apply(&Transform::train(16, PLAIN, &augmentation).unwrap(), &image, stream)
    };
    let mut mirrored = 0;
    for stream in 0..400 {
        let (plain, turned, either) = (crop(0.0, stream), crop(1.0, stream), crop(0.25, stream));
        let rows = plain.as_chunks::<3>().0.chunks(16);
        let expected: Vec<f32> = rows.flat_map(|row| row.iter().rev().flatten().copied()).collect();
        assert!(turned == expected && (either == plain || either == turned), "stream {stream}");
        mirrored += usize::from(either == turned);
    }
    assert!((65..135).contains(&mirrored), "{mirrored} of 400"); // 100, and four standard deviations
}

#[test]
fn normalisation_is_by_channel() {
    let image = Image::new(1, 1, vec![0, 128, 255]).unwrap();
    let Statistics { mean, std } = Statistics::IMAGENET;
    let out = Transform::eval(1, Statistics::IMAGENET).unwrap().pixels(&image);
    for (channel, byte) in [0.0, 128.0, 255.0].into_iter().enumerate() {
        assert_relative_eq!(out[channel], (byte / 255.0 - mean[channel]) / std[channel], max_relative = 1e-6);
    }
}

/// Every padded crop is a shifted, perhaps mirrored copy with the fill around it, and every shift occurs.
#[test]
fn padded_crops() {
    for fill in [Fill::Zero, Fill::Mean] {
        let statistics = Statistics { mean: [0.5; 3], std: [0.25; 3] };
        let augmentation = Augmentation { padding: 2, fill, ..Augmentation::default() };
        let transform = Transform::train(8, statistics, &augmentation).unwrap();
        let beyond = if fill == Fill::Zero { -2.0 } else { 0.0 };
        let image = ramp(8, 8);
        let mut seen = std::collections::BTreeSet::new();
        for stream in 0..1000 {
            let out = apply(&transform, &image, stream);
            let find = |down: isize, right: isize, flip: bool| {
                out.as_chunks::<3>().0.iter().enumerate().all(|(p, pixel)| {
                    let (y, x) = ((p / 8) as isize + down, (if flip { 7 - p % 8 } else { p % 8 }) as isize + right);
                    let inside = (0..8).contains(&y) && (0..8).contains(&x);
                    let expected = [y as f32, x as f32, 77.0].map(|byte| (byte / 255.0 - 0.5) / 0.25);
                    let expected = if inside { expected } else { [beyond; 3] };
                    pixel.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6)
                })
            };
            let found = (-2..=2).flat_map(|d| (-2..=2).flat_map(move |r| [(d, r, false), (d, r, true)]));
            seen.insert(found.into_iter().find(|&(d, r, f)| find(d, r, f)).expect("a shifted copy"));
        }
        assert_eq!(seen.len(), 50);
    }
}

#[test]
fn evaluation_of_another_size_shows_the_centre() {
    // 64 x 128: the centred square, halved to 32, of which 28 are shown.
    let out = bytes(&seen(&ramp(64, 128), 28));
    let middle = out[(14 * 28 + 14) * 3..][..3].to_vec();
    // Row 14 + 2 of the reduced square covers rows 32 and 33, and column 32 + 32 and 33 of the image.
    assert!(middle[0].abs_diff(32) <= 1 && middle[1].abs_diff(64) <= 1 && middle[2] == 77, "{middle:?}");
    let corner = out[..3].to_vec();
    assert!(corner[0].abs_diff(4) <= 1 && corner[1].abs_diff(36) <= 1, "{corner:?}");
    // A tiny one is shown whole: its first and last rows stay at the edges.
    let out = bytes(&seen(&ramp(32, 32), 64));
    assert!(out[0] == 0 && out[(63 * 64 + 63) * 3] == 31);
}

#[test]
fn evaluation_shows_224_of_256_pixels_as_they_are() {
    let image = noise(256, 256);
    let rows = image.pixels().chunks(256 * 3).skip(16).take(224);
    let expected: Vec<u8> = rows.flat_map(|row| &row[16 * 3..240 * 3]).copied().collect();
    assert!(bytes(&seen(&image, 224)) == expected);
}

#[test]
fn evaluation_shows_the_share_that_is_asked_for() {
    let eval = || Transform::eval(28, PLAIN).unwrap();
    let image = noise(64, 128);
    assert_eq!(eval().showing(224.0 / 256.0).unwrap().pixels(&image), eval().pixels(&image), "the usual one");
    // The corners of the centred square are in the corners of what is shown.
    let whole = bytes(&eval().showing(1.0).unwrap().pixels(&ramp(64, 128)));
    assert!(whole[0] <= 1 && whole[1].abs_diff(33) <= 1, "{:?}", &whole[..3]);
    // A half of its side: from row 16 and column 48 on, at less than a half of the scale.
    let half = bytes(&eval().showing(0.5).unwrap().pixels(&ramp(64, 128)));
    assert!(half[0].abs_diff(16) <= 1 && half[1].abs_diff(48) <= 1, "{:?}", &half[..3]);
    // A tenth: of 280 pixels from 126 on.
    let tenth = bytes(&eval().showing(0.1).unwrap().pixels(&ramp(64, 128)));
    assert!(tenth[0].abs_diff(29) <= 1 && tenth[1].abs_diff(61) <= 1, "{:?}", &tenth[..3]);
    for share in [0.0, 0.09, 1.1, -1.0, f64::NAN] {
        assert!(matches!(eval().showing(share), Err(Error::Setting { name: "eval_crop", .. })), "{share}");
    }
}

#[test]
fn the_same_stream_gives_the_same_bits() {
    let standard = Augmentation::default();
    let published = Augmentation { rand_augment: 2, erase: 0.25, erase_fill: EraseFill::Noise, ..standard.clone() };
    for (size, augmentation) in [(32, &standard), (48, &standard), (32, &published), (48, &published)] {
        let transform = Transform::train(size, Statistics::CIFAR10, augmentation).unwrap();
        for image in [ramp(32, 32), ramp(60, 50)] {
            let bits = |stream| apply(&transform, &image, stream).into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(3), bits(3));
            assert_ne!(bits(3), bits(4));
        }
    }
}

/// The bits that older runs saw: what is new may not change them unasked. (The last time that it did, resizing came to
/// round as Pillow does.)
#[test]
fn the_bits_of_older_runs() {
    let small = Augmentation { fill: Fill::Mean, erase: 0.5, ..Augmentation::default() };
    let large = Augmentation { filter: Filter::Triangle, ..small.clone() };
    let cases = [
        (32, Statistics::CIFAR10, small.clone(), noise(32, 32), 0xB05A_6C04_F8D5_701F),
        (24, Statistics::IMAGENET, small, noise(60, 50), 0x7783_861F_5A3E_E010),
        (24, Statistics::IMAGENET, large, noise(60, 50), 0xC8E3_FB87_AE8F_9B5A),
    ];
    for (size, statistics, augmentation, image, expected) in cases {
        let transform = Transform::train(size, statistics, &augmentation).unwrap();
        let bits = (0..32).flat_map(|stream| apply(&transform, &image, stream)).map(f32::to_bits);
        let hash = bits.fold(0xCBF2_9CE4_8422_2325, |hash: u64, bits| {
            (hash ^ u64::from(bits)).wrapping_mul(0x100_0000_01B3) // FNV-1a, of words
        });
        assert_eq!(hash, expected, "{augmentation:?}: {hash:#x}");
    }
}

/// A rectangle of the mean colour, of a fiftieth to a third of the image, in the part of the images that was asked for;
/// all the rest is as without.
#[test]
fn a_rectangle_is_erased() {
    let (side, image) = (40, ramp(40, 40));
    let mean = |pixel: &[f32]| pixel == [0.0; 3];
    let with = |erase: f64| {
        // Statistics that no pixel of the ramp is the mean of.
        let statistics = Statistics { mean: [0.999; 3], std: [1.0; 3] };
        Transform::train(side, statistics, &Augmentation { erase, ..Augmentation::default() }).unwrap()
    };
    let mut parts = vec![];
    for stream in 0..2000 {
        let (whole, erased) = (apply(&with(0.0), &image, stream), apply(&with(0.25), &image, stream));
        assert!(!whole.chunks(3).any(mean));
        let places: Vec<usize> = (0..side * side).filter(|&place| mean(&erased[place * 3..][..3])).collect();
        let (Some(&first), Some(&last)) = (places.first(), places.last()) else { continue };
        let (rows, columns) = (first / side..last / side + 1, first % side..last % side + 1);
        assert_eq!(places.len(), rows.len() * columns.len(), "one rectangle");
        for (place, (whole, erased)) in whole.chunks(3).zip(erased.chunks(3)).enumerate() {
            let inside = rows.contains(&(place / side)) && columns.contains(&(place % side));
            assert!(mean(erased) == inside && (inside || whole == erased));
        }
        parts.push(places.len() as f64 / (side * side) as f64);
    }
    assert!((430..570).contains(&parts.len()), "{} of 2000", parts.len()); // 500, and 3.6 standard deviations
    let least = parts.iter().fold(1.0f64, |least, &part| least.min(part));
    let most = parts.iter().fold(0.0f64, |most, &part| most.max(part));
    assert!((0.015..0.05).contains(&least) && (0.28..0.37).contains(&most), "{least}, {most}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Images of any shape, and all settings that are permitted: each float is written, and one that bytes can give.
    #[test]
    fn every_float_is_written(
        height in 1usize..90, width in 1usize..90, size in 1usize..50, padding in 0usize..8, stream: u64,
        min_scale in 0.001..1.0, crop in prop_oneof![Just(Crop::Auto), Just(Crop::Padded), Just(Crop::Resized)],
        filter in prop_oneof![Just(Filter::Bicubic), Just(Filter::Triangle)],
        fill in prop_oneof![Just(Fill::Zero), Just(Fill::Mean)], erase in 0.0..1.0,
        rand_augment in prop_oneof![Just(0), 1usize..=16], magnitude in 0.0..=10.0,
        magnitude_std in prop_oneof![0.0..3.0, Just(f64::MAX)],
    ) {
        let padding = padding.min(size);
        let augmentation = Augmentation {
            crop, padding, fill, min_scale, filter, erase, rand_augment, magnitude, magnitude_std, ..Augmentation::default()
        };
        let image = ramp(height, width);
        let train = apply(&Transform::train(size, PLAIN, &augmentation).unwrap(), &image, stream);
        let eval = seen(&image, size);
        prop_assert!(train.iter().chain(&eval).all(|x| (0.0..=1.0).contains(x)));
    }
}

/// Ten thousand to one: the work stays that of the output.
#[test]
fn extreme_shapes() {
    for (height, width) in [(1, 10_000), (10_000, 1)] {
        let image = Image::new(height, width, vec![200; 30_000]).unwrap();
        let transform = Transform::train(16, PLAIN, &Augmentation::default()).unwrap();
        assert_eq!(bytes(&apply(&transform, &image, 0)), [200; 16 * 16 * 3]);
        assert_eq!(bytes(&seen(&image, 16)), [200; 16 * 16 * 3]);
    }
}

/// Of a picture of which no permitted window fits, the middle is shown.
#[test]
fn a_window_that_does_not_fit_is_centred() {
    let augmentation =
        Augmentation { flip: 0.0, min_scale: 1.0, crop: Crop::Resized, padding: 0, ..Augmentation::default() };
    let transform = Transform::train(3, PLAIN, &augmentation).unwrap();
    // 9 rows and so 12 columns at most, of 255: from 121 to 132, of which each of three pixels shows four.
    let shown = apply(&transform, &ramp(9, 255), 0);
    let greens: Vec<f32> = shown.iter().skip(1).step_by(3).map(|green| 255.0 * green).collect();
    assert_relative_eq!(greens[..], [122.5, 126.5, 130.5].repeat(3)[..], max_relative = 0.01);
}

#[test]
fn settings_out_of_range() {
    let refused = |size, statistics, setting| {
        let result = Transform::eval(size, statistics);
        assert!(matches!(&result, Err(Error::Setting { name, .. }) if *name == setting), "{result:?}");
    };
    [0, usize::MAX].into_iter().for_each(|size| refused(size, PLAIN, "image_size"));
    for std in [0.0, -1.0, f32::NAN] {
        refused(8, Statistics { std: [1.0, std, 1.0], ..PLAIN }, "statistics");
    }
}

#[test]
fn floats_turn_back_into_the_picture_that_they_show() {
    let image = ramp(24, 24);
    for statistics in [PLAIN, Statistics::CIFAR10, Statistics::IMAGENET] {
        let transform = Transform::eval(24, statistics).unwrap();
        assert_eq!(transform.picture(&transform.pixels(&image)).unwrap(), image);
    }
    assert!(Transform::eval(24, PLAIN).unwrap().picture(&[0.0; 7]).is_err());
}
