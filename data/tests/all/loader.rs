//! What a batch holds depends on the seed, the epoch and the data; not on threads, nor on where an epoch began.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::support::loading::*;
use crate::support::*;
use data::{
    Augmentation, Batch, Dataset, EraseFill, Error, InMemory, Loader, LoaderConfig, Sample, Split, Statistics,
    Transform, open,
};

#[test]
fn threads_and_recycling_change_nothing() {
    let dataset = in_memory(203);
    let config = LoaderConfig { workers: 1, ..mixed(16) };
    let expected = all(&dataset, &config, 3, 0);
    assert_eq!(expected.len(), 12);
    for workers in [1, 2, 4, 100, 0] {
        let config = LoaderConfig { workers, ..config.clone() };
        assert_eq!(all(&dataset, &config, 3, 0), expected, "{workers} workers");
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

/// Of 100 samples, 80 of which are of one class, 16 of another and 4 of the last.
#[test]
fn rare_classes_are_shown_as_often_as_is_asked_for() {
    let labels: Vec<u32> =
        (0..100).map(|sample| [0, 1, 2][usize::from(sample >= 80) + usize::from(sample >= 96)]).collect();
    let classes = ["much", "some", "rare"].map(str::to_owned).to_vec();
    let dataset: Arc<dyn Dataset> =
        Arc::new(InMemory::new("uneven", classes, PLAIN, 8, vec![255; 100 * 8 * 8 * 3], labels.clone()).unwrap());
    let config = |balance, repeats| {
        let transform = varied(8, Augmentation { balance, repeats, ..Augmentation::default() });
        LoaderConfig { drop_last: false, ..LoaderConfig::train(10, 7, transform) }
    };
    for (balance, expected) in [(0.0, [80, 16, 4]), (0.5, [60, 27, 13]), (1.0, [33, 34, 33])] {
        let epochs: Vec<Vec<Batch>> = (0..2).map(|epoch| all(&dataset, &config(balance, 1), epoch, 0)).collect();
        let orders = epochs.iter().map(|batches| batches.iter().flat_map(|batch| batch.samples.clone()).collect());
        let orders: Vec<Vec<usize>> = orders.collect();
        assert_ne!(orders[0], orders[1], "{balance}");
        for order in &orders {
            let mut shown = [0; 100];
            order.iter().for_each(|&sample| shown[sample] += 1);
            for (class, samples) in [0..80, 80..96, 96..100].into_iter().enumerate() {
                let times = &shown[samples];
                assert_eq!(times.iter().sum::<usize>(), expected[class], "class {class}, {balance}");
                let (least, most) = (times.iter().min().unwrap(), times.iter().max().unwrap());
                assert!(most - least <= 1, "class {class}, {balance}: {times:?}");
            }
            let changes = order.windows(2).filter(|pair| labels[pair[0]] != labels[pair[1]]).count();
            assert!(changes > 15, "classes come mixed: {changes} changes");
        }
    }
    // Of images that are shown twice in a row, an epoch has so many of each class on average.
    let mut shown = [0; 3];
    for epoch in 0..40 {
        for batch in all(&dataset, &config(1.0, 2), epoch, 0) {
            assert!(batch.samples.chunks(2).all(|pair| pair[0] == pair[1]), "{:?}", batch.samples);
            batch.labels.iter().for_each(|&label| shown[label as usize] += 1);
        }
    }
    assert!(shown.iter().all(|shown| (1233..1434).contains(shown)), "{shown:?}");
    // Each of the 8 showings of a rare sample is another crop of it, known by the black beyond its edge.
    let balanced = all(&dataset, &config(1.0, 1), 0, 0);
    let slots = balanced.iter().flat_map(|batch| (0..10).map(move |slot| (batch.samples[slot], batch.image(slot))));
    let crops: Vec<&[f32]> = slots.filter(|&(sample, _)| sample == 96).map(|(_, crop)| crop).collect();
    let different =
        crops.iter().filter(|crop| !crops.iter().any(|other| !std::ptr::eq(*crop, other) && *crop == other));
    assert!(crops.len() >= 8 && different.count() >= 5, "{} showings", crops.len());
}

#[test]
fn classes_that_cannot_be_balanced() {
    struct Unlabelled(Arc<dyn Dataset>);
    impl Dataset for Unlabelled {
        fn name(&self) -> &str {
            "unlabelled"
        }
        fn classes(&self) -> &[String] {
            self.0.classes()
        }
        fn len(&self) -> usize {
            self.0.len()
        }
        fn get(&self, index: usize) -> data::Result<Sample> {
            self.0.get(index)
        }
        fn statistics(&self) -> Statistics {
            PLAIN
        }
    }
    let unlabelled: Arc<dyn Dataset> = Arc::new(Unlabelled(in_memory(40)));
    match Loader::new(Arc::clone(&unlabelled), balanced(0.5, 8)) {
        Err(Error::Setting { name: "balance", problem }) => {
            assert!(problem.contains("labels of unlabelled are not known"), "{problem}");
        }
        other => panic!("{:?}", other.err()),
    }
    /// With labels that are not its samples'.
    struct Mislabelled(Vec<u32>);
    impl Dataset for Mislabelled {
        fn name(&self) -> &str {
            "mislabelled"
        }
        fn classes(&self) -> &[String] {
            &[]
        }
        fn len(&self) -> usize {
            40
        }
        fn get(&self, index: usize) -> data::Result<Sample> {
            in_memory(40).get(index)
        }
        fn statistics(&self) -> Statistics {
            PLAIN
        }
        fn labels(&self) -> Option<&[u32]> {
            Some(&self.0)
        }
    }
    for (labels, said) in [(vec![0; 3], "3 of the 40 samples"), (vec![9; 40], "9 in mislabelled, which has 0 classes")]
    {
        match Loader::new(Arc::new(Mislabelled(labels)), balanced(0.0, 8)) {
            Err(Error::Setting { name: "labels", problem }) => assert!(problem.contains(said), "{problem}"),
            other => panic!("{:?}", other.err()),
        }
    }
    let unbalanced = balanced(0.0, 8);
    assert_eq!(all(&unlabelled, &unbalanced, 0, 0), all(&in_memory(40), &unbalanced, 0, 0));
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

#[test]
fn a_loader_has_as_many_threads_as_the_pool_it_is_made_in() {
    /// Whose samples wait until all threads have asked for one.
    struct Watched {
        samples: Arc<dyn Dataset>,
        threads: usize,
        seen: Mutex<BTreeSet<String>>,
        more: Condvar,
    }
    impl Dataset for Watched {
        fn name(&self) -> &str {
            self.samples.name()
        }
        fn classes(&self) -> &[String] {
            self.samples.classes()
        }
        fn len(&self) -> usize {
            self.samples.len()
        }
        fn statistics(&self) -> Statistics {
            PLAIN
        }
        fn get(&self, index: usize) -> data::Result<Sample> {
            let mut seen = self.seen.lock().unwrap();
            seen.insert(std::thread::current().name().unwrap_or("?").to_owned());
            self.more.notify_all();
            let few = |seen: &mut BTreeSet<String>| seen.len() < self.threads;
            drop(self.more.wait_timeout_while(seen, Duration::from_secs(20), few).unwrap());
            self.samples.get(index)
        }
    }
    for threads in [1, 3] {
        let (seen, more) = (Mutex::default(), Condvar::new());
        let watched = Arc::new(Watched { samples: in_memory(60), threads, seen, more });
        let dataset: Arc<dyn Dataset> = Arc::clone(&watched) as _;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let config = LoaderConfig { workers: 0, ..in_order(30, 0) };
        let loader = pool.install(|| Loader::new(dataset, config)).unwrap();
        assert_eq!(loader.epoch(0, 0).map(Result::unwrap).count(), 2);
        let expected: Vec<String> = (0..threads).map(|thread| format!("loader-{thread}")).collect();
        assert_eq!(watched.seen.lock().unwrap().iter().cloned().collect::<Vec<_>>(), expected);
    }
}

/// Targets count among what a batch takes.
#[test]
fn targets_take_room() {
    let bytes = |config| Loader::new(in_memory(100), config).unwrap().most_bytes();
    assert_eq!(bytes(LoaderConfig::train(8, 7, augmented(32))), 5 * 8 * 32 * 32 * 3 * 4);
    assert_eq!(bytes(mixed(8)), 5 * 8 * (32 * 32 * 3 + 10) * 4);
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

/// Also while it waits for a batch that would take ten seconds.
#[test]
fn an_epoch_ends_when_it_is_asked_to() {
    let faulty = Arc::new(Faulty { delay: Duration::from_millis(2), ..Faulty::new(20_000, |_| false) });
    let transform = Transform::eval(1, PLAIN).unwrap();
    let config = |batch_size| LoaderConfig { workers: 4, ..LoaderConfig::eval(batch_size, transform.clone()) };
    let loader = |batch_size| Loader::new(Arc::clone(&faulty) as _, config(batch_size)).unwrap();
    let (few, huge, stop) = (loader(2), loader(20_000), AtomicBool::new(false));
    let mut batches = few.epoch_until(0, 0, &stop);
    assert_eq!(batches.next().unwrap().unwrap().samples, [0, 1]);
    std::thread::scope(|scope| {
        let mut waiting = huge.epoch_until(0, 0, &stop);
        let asked = Instant::now();
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            stop.store(true, Ordering::Relaxed);
        });
        assert!(waiting.next().is_none() && waiting.next().is_none());
        drop(waiting);
        assert!(asked.elapsed() < Duration::from_secs(5));
    });
    assert!(batches.next().is_none());
    assert!(few.epoch_until(0, 0, &stop).next().is_none());
    assert!(few.epoch(0, 0).next().unwrap().is_ok());
}

#[test]
fn a_slow_consumer_holds_the_threads_back() {
    let faulty = Arc::new(Faulty::new(1000, |_| false));
    let loader = Loader::new(Arc::clone(&faulty) as _, in_order(1, 0)).unwrap();
    let mut batches = loader.epoch(0, 0);
    batches.next().unwrap().unwrap();
    // One taken, two waiting, and one that there is no room for.
    let started = Instant::now();
    while faulty.asked.load(Ordering::Relaxed) < 4 && started.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(faulty.asked.load(Ordering::Relaxed), 4);
    // And one more that the consumer may look at ahead.
    assert_eq!(loader.most_bytes(), 5 * loader.batch_of(vec![0]).unwrap().images.len() as u64 * 4);
}

#[test]
fn a_batch_of_chosen_samples_is_what_an_epoch_has_of_them() {
    let dataset = in_memory(100);
    let loader = Loader::new(Arc::clone(&dataset), LoaderConfig::train(8, 7, augmented(32))).unwrap();
    let first = loader.epoch(0, 0).next().unwrap().unwrap();
    assert_eq!(loader.batch_of(first.samples.clone()).unwrap(), first);
    assert_eq!(loader.batch_of(vec![99, 3]).unwrap().samples, [99, 3]);
    assert!(matches!(loader.batch_of(vec![1, 100]), Err(Error::Index { index: 100, .. })));
}

#[test]
fn settings_that_make_no_batch() {
    let transform = || Transform::eval(32, PLAIN).unwrap();
    let eval = |batch_size| LoaderConfig::eval(batch_size, transform());
    let smoothed = |smoothing| LoaderConfig { smoothing, ..eval(4) };
    for (setting, len, config) in [
        ("batch_size", 10, eval(0)),
        ("batch_size", 0, eval(4)),
        ("batch_size", 10, LoaderConfig::train(11, 0, transform())),
        ("batch_size", 1000, LoaderConfig::eval(1000, Transform::eval(4096, PLAIN).unwrap())),
        ("parts", 10, LoaderConfig { parts: 0, ..eval(4) }),
        ("smoothing", 10, smoothed(-0.1)),
        ("smoothing", 10, smoothed(1.1)),
        ("smoothing", 10, smoothed(f64::NAN)),
    ] {
        let result = Loader::new(in_memory(len), config);
        assert!(matches!(&result, Err(Error::Setting { name, .. }) if *name == setting), "{setting}: {result:?}");
    }
    // A batch larger than the set is the whole set.
    let loader = Loader::new(in_memory(10), LoaderConfig::eval(usize::MAX, transform())).unwrap();
    assert_eq!(loader.batches_per_epoch(), 1);
    assert_eq!(loader.epoch(0, 0).next().unwrap().unwrap().shape, [10, 32, 32, 3]);
}

/// `DATA=path/to/images cargo test --release -p biformer-data --test all -- --ignored --nocapture speed` prints images
/// a second, of a folder at 224x224, or without `DATA` of the embedded ones at 32x32: as they are varied by default,
/// and with the published recipe.
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
            let config = LoaderConfig { workers, smoothing: 0.1, ..LoaderConfig::train(64, 1, transform.clone()) };
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
