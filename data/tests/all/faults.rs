//! What a loader makes of images that cannot be decoded, of wrong labels, and of panics.

use std::fs;
use std::io;
use std::sync::Arc;

use crate::support::loading::*;
use crate::support::*;
use data::{Augmentation, Dataset, Error, Loader, LoaderConfig, Split, open};

#[test]
fn a_bad_image_is_replaced_by_the_next_good_one_of_its_batch() {
    let dataset: Arc<dyn Dataset> = Arc::new(Faulty::new(20, |index| [1, 6, 7, 9].contains(&index)));
    let batches = all(&dataset, &in_order(5, 4), 0, 0);
    assert_eq!(batches[0].samples, [0, 2, 2, 3, 4]);
    assert_eq!(batches[1].samples, [5, 8, 8, 8, 5]);
    assert_eq!(batches[1].labels, [5, 8, 8, 8, 5]);
    let colours: Vec<f32> = batches[1].images.chunks(3072).map(|image| image[9] * 255.0).collect();
    assert_eq!(colours, [5.0, 8.0, 8.0, 8.0, 5.0]);
    let skipped: Vec<_> = batches[1].skipped.iter().map(|skipped| (skipped.slot, skipped.sample)).collect();
    assert_eq!(skipped, [(1, 6), (2, 7), (4, 9)]);
    assert!(batches[1].skipped[0].reason.contains("6.png") && batches[2].skipped.is_empty());
    assert_eq!(batches[1].counted(), [true, false, false, true, false]);
    assert_eq!(batches[2].counted(), [true; 5]);
}

/// Of pictures of a data set some may be shown that are all bad, though others are good.
#[test]
fn a_batch_of_chosen_bad_images_shows_a_good_one() {
    let loader = Loader::new(Arc::new(Faulty::new(20, |index| index < 5)), in_order(5, 0)).unwrap();
    let batch = loader.batch_of(vec![4, 1]).unwrap();
    assert_eq!((batch.samples, batch.labels, batch.skipped.len()), (vec![5; 2], vec![5; 2], 2));
    assert!(loader.batch_of(vec![]).unwrap().samples.is_empty());
    let none = Loader::new(Arc::new(Faulty::new(20, |_| true)), in_order(5, 0)).unwrap();
    assert!(matches!(none.batch_of(vec![4, 1]), Err(Error::NoGoodImage { .. })));
}

#[test]
fn a_batch_of_bad_images_takes_the_next_good_one_of_the_epoch() {
    let dataset: Arc<dyn Dataset> = Arc::new(Faulty::new(20, |index| (5..12).contains(&index) || index >= 15));
    let batches = all(&dataset, &in_order(5, 12), 0, 0);
    assert_eq!(batches[1].samples, [12; 5]);
    assert_eq!(batches[1].labels, [2; 5]);
    assert_eq!(batches[3].samples, [0; 5]); // round the end
    assert!(batches[3].images.iter().all(|&x| x == 0.0));
}

/// Where each is repeated, an epoch may show none that is good, though nearly all are.
#[test]
fn a_batch_of_bad_images_takes_one_that_the_epoch_does_not_show() {
    let transform = varied(32, Augmentation { repeats: 20, ..unvaried() });
    let config = LoaderConfig { transform, ..in_order(5, 2) };
    let dataset: Arc<dyn Dataset> = Arc::new(Faulty::new(20, |index| index < 2));
    let batches = all(&dataset, &config, 0, 0);
    assert!(batches.iter().all(|batch| batch.samples == [2; 5] && batch.labels == [2; 5]), "{batches:?}");
    let strict = LoaderConfig { max_bad_images: 1, ..config.clone() };
    let error = Loader::new(dataset, strict).unwrap().epoch(0, 0).find_map(Result::err).unwrap();
    assert!(matches!(&error, Error::TooManyBadImages { limit: 1, first } if first.len() == 2), "{error}");
    let none = LoaderConfig { max_bad_images: 20, ..config };
    let error = Loader::new(Arc::new(Faulty::new(20, |_| true)), none).unwrap().epoch(0, 0).find_map(Result::err);
    assert!(matches!(&error, Some(Error::NoGoodImage { first }) if first[1].contains("1.png")), "{error:?}");
}

#[test]
fn bad_images_and_resume_and_threads() {
    let dataset: Arc<dyn Dataset> = Arc::new(Faulty::new(90, |index| index % 4 == 1));
    let config = LoaderConfig { max_bad_images: 30, drop_last: false, ..LoaderConfig::train(2, 1, augmented(32)) };
    let whole = all(&dataset, &config, 2, 0);
    assert!(whole.iter().any(|batch| batch.skipped.len() == 2), "a batch with none good should occur");
    for (workers, first) in [(1, 0), (2, 17), (4, 3)] {
        let config = LoaderConfig { workers, ..config.clone() };
        assert_eq!(all(&dataset, &config, 2, first), whole[first..]);
    }
    let loader = Loader::new(Arc::clone(&dataset), config).unwrap();
    for _ in 0..2 {
        for (batch, expected) in loader.epoch(2, 0).zip(&whole) {
            let batch = batch.unwrap();
            assert_eq!(batch, *expected, "recycled");
            loader.recycle(batch);
        }
    }
    let config = LoaderConfig { drop_last: false, ..mixed(8) };
    let whole = all(&dataset, &config, 2, 0);
    for (workers, first) in [(1, 0), (3, 5)] {
        let config = LoaderConfig { workers, ..config.clone() };
        assert_eq!(all(&dataset, &config, 2, first), whole[first..], "mixed");
    }
}

/// Shown again, it is skipped again, but it is one bad image.
#[test]
fn a_repeated_bad_image_counts_once() {
    let faulty: Arc<dyn Dataset> = Arc::new(Faulty::new(30, |index| index == 2 || index == 7));
    let transform = varied(32, Augmentation { repeats: 3, ..unvaried() });
    let config = LoaderConfig { transform, ..in_order(5, 2) };
    let batches = all(&faulty, &config, 0, 0);
    let skipped: Vec<_> = batches.iter().flat_map(|batch| &batch.skipped).map(|it| (it.sample, it.again)).collect();
    assert_eq!(skipped, [(2, false), (2, true), (2, true), (7, false), (7, true), (7, true)]);
    let strict = LoaderConfig { max_bad_images: 1, ..config };
    let error = Loader::new(faulty, strict).unwrap().epoch(0, 0).find_map(Result::err).unwrap();
    assert!(matches!(&error, Error::TooManyBadImages { limit: 1, first } if first.len() == 2), "{error}");
}

#[test]
fn too_many_bad_images_end_the_epoch() {
    let loader = Loader::new(Arc::new(Faulty::new(40, |index| index % 5 == 3)), in_order(10, 3)).unwrap();
    for epoch in 0..2 {
        let mut batches = loader.epoch(epoch, 0);
        assert!(batches.next().unwrap().is_ok());
        let error = batches.next().unwrap().unwrap_err();
        assert!(matches!(&error, Error::TooManyBadImages { limit: 3, first } if first.len() == 4), "{error}");
        assert!(error.to_string().contains("3.png") && error.to_string().contains("18.png"), "{error}");
        assert!(batches.next().is_none());
    }
    // The later part of an epoch counts for itself.
    assert_eq!(loader.epoch(0, 3).map(|batch| batch.unwrap().skipped.len()).collect::<Vec<_>>(), [2]);
}

#[test]
fn nothing_but_bad_images() {
    for (batch_size, max_bad_images) in [(4, 0), (4, 6), (4, 29), (4, 30), (100, 29), (100, 30), (4, 1000)] {
        let faulty: Arc<dyn Dataset> = Arc::new(Faulty::new(30, |_| true));
        let loader = Loader::new(faulty, in_order(batch_size, max_bad_images)).unwrap();
        let error = loader.epoch(0, 0).next().unwrap().unwrap_err();
        // Where all may be bad, there are not too many of them, but none that could stand in.
        let named = match &error {
            Error::TooManyBadImages { first, .. } if max_bad_images < 30 => first,
            Error::NoGoodImage { first } if max_bad_images >= 30 => first,
            other => panic!("{max_bad_images}: {other}"),
        };
        assert!(!named.is_empty(), "{error}");
    }
}

/// It is no bad image that might be borne, also where its image was to stand in for a batch of bad ones.
#[test]
fn a_label_of_no_class_ends_the_epoch() {
    let bad = [Faulty::new(30, |_| false), Faulty::new(30, |index| index < 3), Faulty::new(30, |index| index < 6)];
    for (faulty, label) in bad.into_iter().zip([3, 3, 6]) {
        let dataset = Arc::new(Faulty { known: 3, ..faulty });
        let config =
            LoaderConfig { transform: varied(32, Augmentation { mixup: 0.8, ..unvaried() }), ..in_order(3, 30) };
        let loader = Loader::new(dataset, config).unwrap();
        let error = loader.epoch(0, 0).find_map(Result::err).unwrap();
        assert_eq!(
            error.to_string().split(" (").next().unwrap(),
            format!("faulty, sample {label}: label {label} is outside the 3 classes")
        );
    }
}

#[test]
fn undecodable_files_of_a_folder_are_named() {
    let root = tempfile::tempdir().unwrap();
    write_folder(root.path(), 6);
    fs::write(root.path().join("train/dog/003.png"), "no picture").unwrap();
    let dataset = open(root.path().to_str().unwrap(), Split::Train).unwrap();
    let config = LoaderConfig { max_bad_images: 1, ..LoaderConfig::train(4, 1, augmented(24)) };
    let batches = all(&dataset, &config, 0, 0);
    let skipped: Vec<_> = batches.iter().flat_map(|batch| &batch.skipped).collect();
    assert_eq!(skipped.len(), 1);
    assert!(skipped[0].reason.contains("003.png") && skipped[0].sample == 9, "{skipped:?}");
    let strict = Loader::new(dataset, LoaderConfig { max_bad_images: 0, ..config }).unwrap();
    assert!(strict.epoch(0, 0).any(|batch| matches!(batch, Err(Error::TooManyBadImages { limit: 0, .. }))));
}

#[test]
fn a_panic_reaches_the_consumer_as_an_error() {
    let faulty = Faulty { panics_at: 23, ..Faulty::new(40, |_| false) };
    let loader = Loader::new(Arc::new(faulty), in_order(5, 0)).unwrap();
    let results: Vec<_> = loader.epoch(0, 0).collect();
    assert_eq!(results.len(), 5);
    assert!(results[..4].iter().all(Result::is_ok));
    let error = results[4].as_ref().unwrap_err();
    assert!(matches!(error, Error::Worker(text) if text.contains("sample 23 bites")), "{error}");
}

/// It is made by the caller's thread, which does not panic either.
#[test]
fn a_panic_in_a_batch_of_chosen_images_is_an_error_too() {
    let faulty = Faulty { panics_at: 2, ..Faulty::new(5, |_| false) };
    let loader = Loader::new(Arc::new(faulty), in_order(5, 0)).unwrap();
    let error = loader.batch_of(vec![1, 2]).unwrap_err();
    assert!(matches!(&error, Error::Worker(text) if text.contains("sample 2 bites")), "{error}");
    assert_eq!(loader.batch_of(vec![1, 3]).unwrap().samples, [1, 3]);
}

/// However many bad images may be replaced: this is no fault of an image.
#[test]
fn an_error_of_another_kind_ends_the_epoch() {
    fn refusal(cause: io::Error) -> Error {
        Error::Io { path: "7.png".into(), cause }
    }
    let reasons: [fn() -> Error; 3] = [
        || Error::Other("the store is gone".into()),
        || refusal(io::ErrorKind::OutOfMemory.into()),
        || refusal(io::Error::from_raw_os_error(if cfg!(windows) { 4 } else { 24 })),
    ];
    let bad: [fn(usize) -> bool; 2] = [|_| false, |index| (5..7).contains(&index)];
    for (bad, reason) in bad.into_iter().flat_map(|bad| reasons.map(|reason| (bad, reason))) {
        let faulty = Faulty { fails_at: 7, reason, ..Faulty::new(40, bad) };
        let loader = Loader::new(Arc::new(faulty), in_order(2, usize::MAX)).unwrap();
        let results: Vec<_> = loader.epoch(0, 0).collect();
        assert_eq!(results.len(), 4);
        for error in [results.last().unwrap().as_ref().unwrap_err(), &loader.batch_of(vec![7]).unwrap_err()] {
            assert_eq!(error.to_string(), reason().to_string());
        }
    }
}
