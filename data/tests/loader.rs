//! What a batch holds depends on the seed, the epoch and the data; not on threads, nor on where an epoch began.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use data::{
    Augmentation, Batch, Dataset, EraseFill, Error, Loader, LoaderConfig, Mixing, Sample, Split, Statistics, Transform,
    open,
};
use support::*;

fn augmented(size: usize) -> Transform {
    Transform::train(size, PLAIN, &Augmentation::default()).unwrap()
}

/// All that training does to a batch.
fn mixed(batch_size: usize) -> LoaderConfig {
    let mixing = Some(Mixing { mixup: 0.8, cutmix: 1.0, probability: 0.9, smoothing: 0.1 });
    LoaderConfig {
        parts: 3,
        repeats: 2,
        max_bad_images: 30,
        mixing,
        ..LoaderConfig::train(batch_size, 7, augmented(32))
    }
}

fn all(dataset: &Arc<dyn Dataset>, config: &LoaderConfig, epoch: u64, first: usize) -> Vec<Batch> {
    let loader = Loader::new(Arc::clone(dataset), config.clone()).unwrap();
    loader.epoch(epoch, first).collect::<Result<_, _>>().unwrap()
}

#[test]
fn threads_prefetch_and_recycling_change_nothing() {
    let dataset = in_memory(203);
    let config = LoaderConfig { workers: 1, prefetch: 1, ..mixed(16) };
    let expected = all(&dataset, &config, 3, 0);
    assert_eq!(expected.len(), 12);
    for (workers, prefetch) in [(1, 8), (2, 1), (2, 5), (4, 0), (4, 16), (100, 100), (0, 3)] {
        let config = LoaderConfig { workers, prefetch, ..config.clone() };
        assert_eq!(all(&dataset, &config, 3, 0), expected, "{workers} workers, {prefetch} ahead");
        let loader = Loader::new(Arc::clone(&dataset), config).unwrap();
        for repeat in 0..3 {
            for (batch, expected) in loader.epoch(3, 0).zip(&expected) {
                let batch = batch.unwrap();
                assert_eq!(batch, *expected, "repeat {repeat}");
                loader.recycle(batch);
            }
        }
    }
}

#[test]
fn an_epoch_can_begin_anywhere() {
    let dataset = in_memory(100);
    let config = LoaderConfig { workers: 3, drop_last: false, ..mixed(8) };
    let whole = all(&dataset, &config, 5, 0);
    assert_eq!(whole.len(), 13);
    assert_eq!(whole[12].shape, [4, 32, 32, 3]);
    for first in 0..13 {
        assert_eq!(all(&dataset, &config, 5, first), whole[first..]);
    }
    for first in [13, 14, usize::MAX] {
        assert!(all(&dataset, &config, 5, first).is_empty());
    }
}

#[test]
fn an_epoch_holds_each_sample_once() {
    let dataset = in_memory(100);
    let config = LoaderConfig { drop_last: false, ..LoaderConfig::train(8, 7, Transform::eval(32, PLAIN).unwrap()) };
    let order = |config: &LoaderConfig, epoch| -> Vec<usize> {
        all(&dataset, config, epoch, 0).into_iter().flat_map(|batch| batch.samples).collect()
    };
    let first = order(&config, 0);
    assert_eq!(first.iter().copied().collect::<BTreeSet<_>>(), (0..100).collect());
    assert_eq!(first.len(), 100);
    assert_ne!(first, order(&config, 1));
    assert_ne!(first, order(&LoaderConfig { seed: 8, ..config.clone() }, 0));
    assert_eq!(order(&LoaderConfig { shuffle: false, ..config.clone() }, 4), (0..100).collect::<Vec<_>>());

    for batch in all(&dataset, &config, 0, 0) {
        for (slot, &sample) in batch.samples.iter().enumerate() {
            assert_eq!(batch.labels[slot], (sample % 10) as u32);
            assert_eq!(batch.images[slot * 3072], sample as f32 / 255.0);
        }
    }
}

/// A crop is known by the black that it shows beyond the edge.
#[test]
fn a_crop_is_drawn_for_each_seed_epoch_and_sample() {
    let dataset = in_memory(9);
    let crops = |seed: u64, epoch: u64| -> Vec<Vec<bool>> {
        let config = LoaderConfig { shuffle: false, ..LoaderConfig::train(9, seed, augmented(32)) };
        let batch = all(&dataset, &config, epoch, 0).remove(0);
        // The first is black all over.
        (1..9).map(|slot| batch.image(slot).iter().map(|&x| x == 0.0).collect()).collect()
    };
    let first = crops(7, 0);
    assert_ne!(first, crops(7, 1), "another epoch");
    assert_ne!(first, crops(8, 0), "another seed");
    assert!(first.iter().any(|crop| *crop != first[0]), "another sample");
}

/// Fails for some samples; can be slow, or panic.
struct Faulty {
    inner: Arc<dyn Dataset>,
    bad: fn(usize) -> bool,
    panics_at: usize,
    delay: Duration,
    asked: AtomicUsize,
}

impl Faulty {
    fn new(len: usize, bad: fn(usize) -> bool) -> Self {
        let (panics_at, delay) = (usize::MAX, Duration::ZERO);
        Self { inner: in_memory(len), bad, panics_at, delay, asked: AtomicUsize::new(0) }
    }
}

impl Dataset for Faulty {
    fn name(&self) -> &str {
        "faulty"
    }

    fn classes(&self) -> &[String] {
        self.inner.classes()
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn get(&self, index: usize) -> data::Result<Sample> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(self.delay);
        assert!(index != self.panics_at, "sample {index} bites");
        if (self.bad)(index) {
            return Err(Error::Undecodable { path: format!("{index}.png").into(), cause: "torn".to_owned() });
        }
        self.inner.get(index)
    }

    fn statistics(&self) -> Statistics {
        PLAIN
    }
}

fn in_order(batch_size: usize, max_bad_images: usize) -> LoaderConfig {
    let transform = Transform::eval(32, PLAIN).unwrap();
    LoaderConfig { max_bad_images, workers: 2, ..LoaderConfig::eval(batch_size, transform) }
}

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
    let config = LoaderConfig { drop_last: false, ..mixed(8) };
    let whole = all(&dataset, &config, 2, 0);
    for (workers, first) in [(1, 0), (3, 5)] {
        let config = LoaderConfig { workers, ..config.clone() };
        assert_eq!(all(&dataset, &config, 2, first), whole[first..], "mixed");
    }
}

/// Shown again, it is passed over again, but it is one bad image.
#[test]
fn a_repeated_bad_image_counts_once() {
    let faulty: Arc<dyn Dataset> = Arc::new(Faulty::new(30, |index| index == 2 || index == 7));
    let config = LoaderConfig { repeats: 3, ..in_order(5, 2) };
    let batches = all(&faulty, &config, 0, 0);
    let skipped: Vec<_> = batches.iter().flat_map(|batch| &batch.skipped).map(|it| (it.sample, it.again)).collect();
    assert_eq!(skipped, [(2, false), (2, true), (2, true), (7, false), (7, true), (7, true)]);
    let strict = LoaderConfig { max_bad_images: 1, ..config };
    let error = Loader::new(faulty, strict).unwrap().epoch(0, 0).find_map(Result::err).unwrap();
    assert!(matches!(&error, Error::TooManyBadImages { limit: 1, first } if first.len() == 2), "{error}");
}

#[test]
fn a_loader_has_as_many_threads_as_the_pool_it_is_made_in() {
    struct Watched(Arc<dyn Dataset>, Mutex<BTreeSet<String>>);
    impl Dataset for Watched {
        fn name(&self) -> &str {
            self.0.name()
        }
        fn classes(&self) -> &[String] {
            self.0.classes()
        }
        fn len(&self) -> usize {
            self.0.len()
        }
        fn statistics(&self) -> Statistics {
            PLAIN
        }
        fn get(&self, index: usize) -> data::Result<Sample> {
            std::thread::sleep(Duration::from_millis(1));
            self.1.lock().unwrap().insert(std::thread::current().name().unwrap_or("?").to_owned());
            self.0.get(index)
        }
    }
    for threads in [1, 3] {
        let watched = Arc::new(Watched(in_memory(60), Mutex::default()));
        let dataset: Arc<dyn Dataset> = Arc::clone(&watched) as _;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let config = LoaderConfig { workers: 0, ..in_order(30, 0) };
        let loader = pool.install(|| Loader::new(dataset, config)).unwrap();
        assert_eq!(loader.epoch(0, 0).map(Result::unwrap).count(), 2);
        let expected: Vec<String> = (0..threads).map(|thread| format!("loader-{thread}")).collect();
        assert_eq!(watched.1.lock().unwrap().iter().cloned().collect::<Vec<_>>(), expected);
    }
}

/// Targets count among what a batch takes.
#[test]
fn targets_take_room() {
    let bytes = |config| Loader::new(in_memory(100), config).unwrap().most_bytes();
    let plain = LoaderConfig { mixing: None, ..mixed(8) };
    assert_eq!(bytes(plain), 5 * 8 * 32 * 32 * 3 * 4);
    assert_eq!(bytes(mixed(8)), 5 * 8 * (32 * 32 * 3 + 10) * 4);
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
    for (batch_size, max_bad_images) in [(4, 0), (4, 6), (4, 1000), (100, 1000)] {
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

#[test]
fn stopping_early_neither_hangs_nor_works_on() {
    let faulty = Arc::new(Faulty { delay: Duration::from_millis(2), ..Faulty::new(20_000, |_| false) });
    let dataset: Arc<dyn Dataset> = Arc::clone(&faulty) as _;
    let transform = Transform::eval(1, PLAIN).unwrap();
    let config = LoaderConfig { workers: 4, ..LoaderConfig::eval(2, transform) };
    let loader = Loader::new(Arc::clone(&dataset), config.clone()).unwrap();
    let started = Instant::now();
    let mut batches = loader.epoch(0, 0);
    batches.next().unwrap().unwrap();
    drop(batches);
    drop(loader.epoch(0, 0)); // before the first batch
    // In the middle of a batch that would take ten seconds.
    let huge = Loader::new(dataset, LoaderConfig { batch_size: 20_000, ..config }).unwrap();
    drop(huge.epoch(0, 0));
    assert!(started.elapsed() < Duration::from_secs(5));
    let asked = faulty.asked.load(Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(faulty.asked.load(Ordering::Relaxed), asked, "a thread is still at work");
}

#[test]
fn a_slow_consumer_holds_the_threads_back() {
    let faulty = Arc::new(Faulty::new(1000, |_| false));
    let config = LoaderConfig { prefetch: 4, ..in_order(1, 0) };
    let loader = Loader::new(Arc::clone(&faulty) as _, config).unwrap();
    let mut batches = loader.epoch(0, 0);
    batches.next().unwrap().unwrap();
    // One taken, four waiting, and one that there is no room for.
    let started = Instant::now();
    while faulty.asked.load(Ordering::Relaxed) < 6 && started.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(faulty.asked.load(Ordering::Relaxed), 6);
    // And one more that the consumer may look at ahead.
    assert_eq!(loader.most_bytes(), 7 * loader.batch_of(vec![0]).unwrap().images.len() as u64 * 4);
}

#[test]
fn a_batch_of_chosen_samples_is_what_an_epoch_has_of_them() {
    let dataset = in_memory(100);
    let loader = Loader::new(Arc::clone(&dataset), LoaderConfig::train(8, 7, augmented(32))).unwrap();
    let first = loader.epoch(0, 0).next().unwrap().unwrap();
    assert_eq!(loader.batch_of(first.samples.clone()).unwrap(), first);
    assert_eq!(loader.batch_of(vec![99, 3]).unwrap().samples, [99, 3]);
    assert!(loader.batch_of(vec![100]).is_err());
}

#[test]
fn settings_that_make_no_batch() {
    let transform = || Transform::eval(32, PLAIN).unwrap();
    for (len, config) in [
        (10, LoaderConfig::eval(0, transform())),
        (0, LoaderConfig::eval(4, transform())),
        (10, LoaderConfig::train(11, 0, transform())),
        (1000, LoaderConfig::eval(1000, Transform::eval(4096, PLAIN).unwrap())),
    ] {
        let result = Loader::new(in_memory(len), config);
        assert!(matches!(result, Err(Error::Setting { name: "batch_size", .. })));
    }
    // A batch larger than the set is the whole set.
    let loader = Loader::new(in_memory(10), LoaderConfig::eval(usize::MAX, transform())).unwrap();
    assert_eq!(loader.batches_per_epoch(), 1);
    assert_eq!(loader.epoch(0, 0).next().unwrap().unwrap().shape, [10, 32, 32, 3]);
}

/// `DATA=path/to/images cargo test --release -p biformer-data --test loader -- --ignored --nocapture` prints images a second,
/// of a folder at 224x224, or without `DATA` of the embedded ones at 32x32: as they are varied by default, and with the
/// published recipe.
#[test]
#[ignore = "a measurement"]
fn speed() {
    let source = std::env::var("DATA").unwrap_or_else(|_| "embedded".to_owned());
    let (dataset, size) = (open(&source, Split::Train).unwrap(), if source == "embedded" { 32 } else { 224 });
    let plain = Augmentation::default();
    let recipe = Augmentation { rand_augment: 2, erase: 0.25, erase_fill: EraseFill::Noise, ..plain.clone() };
    let recipe = Augmentation { mixup: 0.8, cutmix: 1.0, ..recipe };
    for (name, augmentation) in [("default", plain), ("recipe", recipe)] {
        let transform = Transform::train(size, dataset.statistics(), &augmentation).unwrap();
        for workers in [1, 2, 4, 8, 16] {
            let mixing = Mixing::of(&augmentation, 0.1);
            let config = LoaderConfig { workers, mixing, ..LoaderConfig::train(64, 1, transform.clone()) };
            let loader = Loader::new(Arc::clone(&dataset), config).unwrap();
            let (started, mut images) = (Instant::now(), 0);
            for batch in (0..).flat_map(|epoch| loader.epoch(epoch, 0)) {
                let batch = batch.unwrap();
                images += batch.samples.len();
                loader.recycle(batch);
                if started.elapsed() > Duration::from_secs(2) {
                    break;
                }
            }
            println!(
                "{name}, {workers} threads: {:.0} images a second",
                images as f64 / started.elapsed().as_secs_f64()
            );
        }
    }
}
