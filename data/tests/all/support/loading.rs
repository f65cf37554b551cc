//! What tests of the loader share: settings, and a data set that fails.

use super::*;
use data::{Augmentation, Batch, Dataset, Error, Loader, LoaderConfig, Sample, Transform};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub fn augmented(size: usize) -> Transform {
    varied(size, Augmentation::default())
}

/// A training transform for images of this size that is told how to vary them.
pub fn varied(size: usize, augmentation: Augmentation) -> Transform {
    Transform::train(size, PLAIN, &augmentation).unwrap()
}

/// Nothing is changed about an image by itself.
pub fn unvaried() -> Augmentation {
    Augmentation { padding: 0, flip: 0.0, ..Augmentation::default() }
}

/// All that training does to a batch.
pub fn mixed(batch_size: usize) -> LoaderConfig {
    balanced(0.5, batch_size)
}

/// The same, with classes balanced as far as this.
pub fn balanced(balance: f64, batch_size: usize) -> LoaderConfig {
    let augmentation =
        Augmentation { mixup: 0.8, cutmix: 1.0, mix: 0.9, repeats: 2, balance, ..Augmentation::default() };
    let config = LoaderConfig::train(batch_size, 7, varied(32, augmentation));
    LoaderConfig { parts: 3, smoothing: 0.1, max_bad_images: 30, ..config }
}

pub fn all(dataset: &Arc<dyn Dataset>, config: &LoaderConfig, epoch: u64, first: usize) -> Vec<Batch> {
    let loader = Loader::new(Arc::clone(dataset), config.clone()).unwrap();
    loader.epoch(epoch, first).collect::<Result<_, _>>().unwrap()
}

/// Fails for some samples; can be slow, or panic.
pub struct Faulty {
    pub inner: Arc<dyn Dataset>,
    pub bad: fn(usize) -> bool,
    /// How many of the ten classes it says there are.
    pub known: usize,
    pub panics_at: usize,
    /// The sample that fails for another reason than its image.
    pub fails_at: usize,
    pub reason: fn() -> Error,
    pub delay: Duration,
    /// How often it was asked for a sample.
    pub asked: AtomicUsize,
}

impl Faulty {
    pub fn new(len: usize, bad: fn(usize) -> bool) -> Self {
        let (panics_at, fails_at, delay) = (usize::MAX, usize::MAX, Duration::ZERO);
        let reason = || Error::Other("the store is gone".into());
        Self { inner: in_memory(len), bad, known: 10, panics_at, fails_at, reason, delay, asked: AtomicUsize::new(0) }
    }
}

impl Dataset for Faulty {
    fn name(&self) -> &str {
        "faulty"
    }

    fn classes(&self) -> &[String] {
        &self.inner.classes()[..self.known]
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn get(&self, index: usize) -> data::Result<Sample> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(self.delay);
        assert!(index != self.panics_at, "sample {index} bites");
        if index == self.fails_at {
            return Err((self.reason)());
        }
        if (self.bad)(index) {
            return Err(Error::Undecodable { path: format!("{index}.png").into(), cause: "torn".to_owned() });
        }
        self.inner.get(index)
    }

    fn statistics(&self) -> Statistics {
        PLAIN
    }

    fn labels(&self) -> Option<&[u32]> {
        // Those of other classes are found out only when it is asked for their samples.
        self.inner.labels().filter(|labels| labels.iter().all(|&label| (label as usize) < self.known))
    }
}

pub fn in_order(batch_size: usize, max_bad_images: usize) -> LoaderConfig {
    let transform = Transform::eval(32, PLAIN).unwrap();
    LoaderConfig { max_bad_images, workers: 2, ..LoaderConfig::eval(batch_size, transform) }
}
