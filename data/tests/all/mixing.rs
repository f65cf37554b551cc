//! Mixed images are those of their targets: what a target says of a sample's own class and of its partner's is what the
//! floats show.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::support::loading::*;
use crate::support::*;
use data::{Augmentation, Batch, Loader, LoaderConfig};

const SIDE: usize = 32;
const CLASSES: usize = 10;

/// Of 40 images in an order that stays, batches of eight.
fn config(augmentation: Augmentation) -> LoaderConfig {
    LoaderConfig { shuffle: false, workers: 1, ..LoaderConfig::train(8, 5, varied(SIDE, augmentation)) }
}

/// Images are mixed, and otherwise as they are.
fn mixing(mixup: f64, cutmix: f64) -> Augmentation {
    Augmentation { mixup, cutmix, ..unvaried() }
}

fn batches(config: LoaderConfig, epochs: u64) -> Vec<Batch> {
    let loader = Loader::new(in_memory(40), config).unwrap();
    (0..epochs).flat_map(|epoch| loader.epoch(epoch, 0).map(Result::unwrap).collect::<Vec<_>>()).collect()
}

/// The float that image `sample` has everywhere before it is mixed.
fn own(sample: usize) -> f32 {
    sample as f32 / 255.0
}

/// For each image of a batch that is mixed in one draw: its sample, its partner's, and the share that it has kept, by
/// its target.
fn shares(batch: &Batch) -> Vec<(usize, usize, f32)> {
    let count = batch.samples.len();
    let share = |slot: usize| {
        let (sample, other) = (batch.samples[slot], batch.samples[count - 1 - slot]);
        let target = &batch.targets[slot * CLASSES..(slot + 1) * CLASSES];
        assert!((target.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{target:?}");
        let (own, others) = (target[sample % CLASSES], target[other % CLASSES]);
        assert!((own + others - 1.0).abs() < 1e-6, "{target:?}");
        assert_eq!(batch.labels[slot] as usize, if own >= 0.5 { sample } else { other } % CLASSES, "{target:?}");
        (sample, other, own)
    };
    (0..count).map(share).collect()
}

#[test]
fn mixup_shows_each_image_through_its_partner() {
    let mut seen = BTreeSet::new();
    for batch in batches(config(mixing(0.8, 0.0)), 8) {
        let shares = shares(&batch);
        for (slot, &(sample, other, share)) in shares.iter().enumerate() {
            assert_eq!(share, shares[0].2, "one share a batch");
            let expected = share * own(sample) + (1.0 - share) * own(other);
            assert!(batch.image(slot).iter().all(|x| (x - expected).abs() < 1e-6), "{sample} and {other}, {share}");
        }
        seen.insert((shares[0].2 * 1e6) as u32);
    }
    assert_eq!(seen.len(), 40, "another share for each batch");
}

#[test]
fn cutmix_shows_a_rectangle_of_the_partner() {
    let mut cut = 0;
    for batch in batches(config(mixing(0.0, 1.0)), 8) {
        let partners = |slot: usize, other: usize| -> Vec<bool> {
            batch.image(slot).as_chunks::<3>().0.iter().map(|pixel| *pixel == [own(other); 3]).collect()
        };
        let shares = shares(&batch);
        let first = partners(0, shares[0].1);
        for (slot, &(sample, other, share)) in shares.iter().enumerate() {
            let shown = partners(slot, other);
            assert!(shown == first, "one rectangle a batch");
            let theirs = shown.iter().filter(|&&shown| shown).count();
            assert!((1.0 - theirs as f32 / (SIDE * SIDE) as f32 - share).abs() < 1e-6, "{theirs} pixels, {share}");
            let ours = batch.image(slot).iter().filter(|&&x| x == own(sample)).count();
            assert_eq!(ours + 3 * theirs, SIDE * SIDE * 3, "nothing else is shown");
        }
        let rows: BTreeSet<usize> = (0..SIDE * SIDE).filter(|&pixel| first[pixel]).map(|pixel| pixel / SIDE).collect();
        let columns: BTreeSet<usize> =
            (0..SIDE * SIDE).filter(|&pixel| first[pixel]).map(|pixel| pixel % SIDE).collect();
        assert_eq!(rows.len() * columns.len(), first.iter().filter(|&&shown| shown).count(), "a rectangle");
        cut += usize::from(!rows.is_empty());
    }
    assert!(cut > 30, "{cut} of 40 batches");
}

/// How many of 400 batches were mixed by mixup, by CutMix, and not at all.
fn counts(augmentation: Augmentation) -> [usize; 3] {
    let mut counts = [0; 3];
    for batch in batches(config(augmentation), 80) {
        let (sample, other, share) = shares(&batch)[0];
        let image = batch.image(0);
        let kind = match share {
            _ if image.iter().all(|&x| x == own(sample)) => 2,
            _ if image.iter().all(|&x| x == own(sample) || x == own(other)) => 1,
            _ => 0,
        };
        counts[kind] += 1;
    }
    counts
}

#[test]
fn the_two_take_turns_by_a_fair_coin() {
    let [mixup, cutmix, neither] = counts(mixing(1.0, 1.0));
    assert!((160..240).contains(&mixup) && neither < 20, "{mixup}, {cutmix}, {neither}");
}

#[test]
fn a_batch_is_mixed_as_often_as_asked_for() {
    let [mixup, cutmix, neither] = counts(Augmentation { mix: 0.25, ..mixing(1.0, 0.0) });
    assert!((65..135).contains(&mixup) && cutmix == 0, "{mixup}, {cutmix}, {neither}");
}

#[test]
fn each_micro_batch_is_mixed_by_itself() {
    let config = LoaderConfig { parts: 3, ..config(mixing(1.0, 0.0)) };
    let batch = Loader::new(in_memory(40), config).unwrap().epoch(0, 0).next().unwrap().unwrap();
    assert_eq!([0, 1, 2].map(|part| batch.slots(part, 3)), [0..3, 3..6, 6..8]);
    assert_eq!(batch.samples, [0, 1, 2, 3, 4, 5, 6, 7], "only what is repeated is dealt");
    let share = |slot: usize| batch.targets[slot * CLASSES + batch.samples[slot] % CLASSES];
    // Of three, the one in the middle is its own partner.
    for (slot, partner) in [2, 1, 0, 5, 4, 3, 7, 6].into_iter().enumerate() {
        let (sample, other) = (batch.samples[slot], batch.samples[partner]);
        let expected = share(slot) * own(sample) + (1.0 - share(slot)) * own(other);
        assert!(batch.image(slot).iter().all(|x| (x - expected).abs() < 1e-6), "slot {slot} of {partner}");
    }
    assert_eq!([share(1), share(4)], [1.0; 2]);
    assert!(share(0) != share(3) && share(3) != share(6), "each by a share of its own");
}

/// Of more micro-batches than samples, each sample is one, and its own partner.
#[test]
fn more_micro_batches_than_samples_leave_each_alone() {
    let config = LoaderConfig { parts: usize::MAX, ..config(mixing(1.0, 0.0)) };
    let batch = Loader::new(in_memory(40), config).unwrap().epoch(0, 0).next().unwrap().unwrap();
    assert_eq!(batch.samples, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!((0..8).all(|slot| batch.image(slot).iter().all(|&x| x == own(slot))));
    assert!((0..8).all(|slot| batch.targets[slot * CLASSES + slot] == 1.0));
}

#[test]
fn targets_are_smoothed_as_labels_are() {
    let [plain, smooth] = [0.0, 0.3].map(|smoothing| {
        let config = LoaderConfig { smoothing, ..config(mixing(0.8, 1.0)) };
        batches(config, 2).into_iter().flat_map(|batch| batch.targets).collect::<Vec<f32>>()
    });
    assert!(plain.iter().zip(&smooth).all(|(plain, smooth)| (0.7 * plain + 0.03 - smooth).abs() < 1e-6));
}

#[test]
fn only_mixed_batches_have_targets() {
    let loader = Loader::new(in_memory(40), config(unvaried())).unwrap();
    let mixed = batches(config(mixing(1.0, 0.0)), 1);
    for (batch, mixed) in loader.epoch(0, 0).zip(mixed) {
        assert_eq!(mixed.targets.len(), 8 * CLASSES);
        assert!(batch.unwrap().targets.is_empty());
        // What an epoch gets back may be another loader's.
        loader.recycle(mixed);
    }
}

#[test]
fn repeated_samples_are_dealt_to_the_micro_batches() {
    let first = |batch_size, parts, repeats| {
        let config = LoaderConfig { batch_size, parts, ..config(Augmentation { repeats, ..unvaried() }) };
        Loader::new(in_memory(40), config).unwrap().epoch(0, 0).next().unwrap().unwrap()
    };
    assert_eq!(first(8, 2, 2).samples, [0, 1, 2, 3].repeat(2));
    assert_eq!(first(12, 3, 3).samples, [0, 1, 2, 3].repeat(3));
    let batch = first(10, 4, 3);
    let hands = (0..4).map(|part| &batch.samples[batch.slots(part, 4)]);
    assert_eq!(hands.collect::<Vec<_>>(), [&[0, 1, 2][..], &[0, 1, 3], &[0, 2], &[1, 2]], "none twice");
}

/// Repeated augmentation: an epoch is as long, of fewer images, and each showing is another.
#[test]
fn a_repeated_sample_is_varied_anew() {
    let dataset = in_memory(100);
    let epoch = |repeats: usize| -> Vec<Batch> {
        let config = LoaderConfig::train(20, 3, varied(SIDE, Augmentation { repeats, ..Augmentation::default() }));
        Loader::new(Arc::clone(&dataset), config).unwrap().epoch(2, 0).map(Result::unwrap).collect()
    };
    let (once, thrice) = (epoch(1), epoch(3));
    let samples = |batches: &[Batch]| batches.iter().flat_map(|batch| batch.samples.clone()).collect::<Vec<_>>();
    let expected: Vec<usize> = samples(&once).into_iter().flat_map(|sample| [sample; 3]).take(100).collect();
    assert_eq!(samples(&thrice), expected);
    // A crop is known by the black beyond its edge.
    let crop = |batches: &[Batch], place: usize| -> Vec<f32> { batches[place / 20].image(place % 20).to_vec() };
    let same = (0..99).step_by(3).filter(|&place| crop(&thrice, place) == crop(&thrice, place + 1)).count();
    assert!(same < 6, "{same} of 33 showings are like the one before");
    assert!((0..99).step_by(3).all(|place| crop(&thrice, place) == crop(&once, place / 3)), "the first as ever");
}
