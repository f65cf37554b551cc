//! Batches, built ahead of their use.
//!
//! A thread makes the batches of an epoch one after the other, the images of each on several threads, and puts them
//! into a bounded channel: so they come in order without being sorted, and a slow consumer holds the threads back. A
//! batch is there as soon as it can be, and few are in memory, however many threads there are. No thread's speed can
//! change what a batch holds: the order of an epoch is a function of (seed, epoch), the augmentation of a sample one of
//! (seed, epoch, sample, how often it was shown), and how images are mixed one of (seed, epoch, batch).

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tensor::cpu::parallel::STACK;
use tensor::lock;

use crate::job::{Job, NAMED, cannot_start, panicked};
use crate::order::{Showing, order};
use crate::{Augmentation, Batch, Dataset, Error, Result, Transform};

/// The largest batch, in bytes.
const MAX_BATCH_BYTES: u64 = 8 << 30;
const MAX_WORKERS: usize = 256;
/// How many finished batches may wait for the consumer.
const AHEAD: usize = 2;
/// How long a consumer waits for a batch before it looks whether it is still to wait.
const PATIENCE: Duration = Duration::from_millis(50);

/// How a [`Loader`] makes its batches.
#[derive(Clone, Debug)]
pub struct LoaderConfig {
    /// Samples in a batch, above 0.
    pub batch_size: usize,
    /// The seed of the order and of the augmentation.
    pub seed: u64,
    /// Whether each epoch has a new random order, or all have the data set's.
    pub shuffle: bool,
    /// Whether a last batch that is not full is left out.
    pub drop_last: bool,
    /// Threads, at most 256; 0 for one per core or, if a thread of a rayon pool makes the loader, for as many as that
    /// pool has.
    pub workers: usize,
    /// How many undecodable images are tolerated per epoch (or the part of it that is run) before
    /// [`Error::TooManyBadImages`].
    pub max_bad_images: usize,
    /// From an image to its floats. By its [augmentation](Transform::augmentation), if it has one, the loader also
    /// repeats, balances and mixes samples.
    pub transform: Transform,
    /// The micro-batches that a batch is cut into, above 0. Each is mixed by itself; the repeats of a sample are spread
    /// over them, like cards that are dealt.
    pub parts: usize,
    /// The share of each of a mixed batch's [targets](Batch::targets) that is spread over all classes, from 0 to 1. (Of
    /// labels it is the loss that does so.)
    pub smoothing: f64,
}

impl LoaderConfig {
    /// For training: a random order, and full batches only. If the transform's augmentation mixes samples, batches have
    /// [targets](Batch::targets), which are not smoothed. No bad image is tolerated.
    pub fn train(batch_size: usize, seed: u64, transform: Transform) -> Self {
        Self { seed, shuffle: true, drop_last: true, ..Self::eval(batch_size, transform) }
    }

    /// For evaluation, with a transform that has no augmentation: all samples, in the data set's order. No bad image is
    /// tolerated.
    pub fn eval(batch_size: usize, transform: Transform) -> Self {
        Self {
            batch_size,
            seed: 0,
            shuffle: false,
            drop_last: false,
            workers: 0,
            max_bad_images: 0,
            transform,
            parts: 1,
            smoothing: 0.0,
        }
    }

    /// How the images of a batch are mixed, if they are.
    pub(crate) fn mixing(&self) -> Option<&Augmentation> {
        self.transform.augmentation().filter(|augmentation| augmentation.mixes())
    }
}

/// Makes the batches of any epoch of a data set.
pub struct Loader {
    dataset: Arc<dyn Dataset>,
    config: Arc<LoaderConfig>,
    workers: usize,
    spare: Arc<Mutex<Vec<Batch>>>,
}

impl fmt::Debug for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("dataset", &self.dataset.name())
            .field("config", &self.config)
            .field("workers", &self.workers)
            .finish_non_exhaustive()
    }
}

impl Loader {
    /// A loader of `dataset`. No thread starts before [`epoch`](Self::epoch).
    ///
    /// Errors: [`Error::Setting`] where the batch size is 0 or takes more than 8 GiB, an epoch would have no batch,
    /// batches are to be cut into 0 parts, the smoothing is out of its range, the data set's
    /// [`labels`](Dataset::labels) are not one of its classes for each sample, or classes are to be balanced and it
    /// does not know its labels.
    pub fn new(dataset: Arc<dyn Dataset>, config: LoaderConfig) -> Result<Self> {
        let LoaderConfig { batch_size, drop_last, parts, smoothing, .. } = config;
        let (len, size) = (dataset.len(), config.transform.size());
        for (name, count) in [("batch_size", batch_size), ("parts", parts)] {
            if count == 0 {
                return Err(Error::setting(name, "it must be 1 or more"));
            }
        }
        if !(0.0..=1.0).contains(&smoothing) {
            return Err(Error::setting("smoothing", format!("{smoothing} is not in 0..=1")));
        }
        let balances = config.transform.augmentation().is_some_and(|augmentation| augmentation.balance > 0.0);
        if let Some(labels) = dataset.labels() {
            let (classes, fault) = (dataset.classes().len(), |it: String| Error::setting("labels", it));
            if labels.len() != len {
                return Err(fault(format!("{} of the {len} samples in {}", labels.len(), dataset.name())));
            }
            if let Some(label) = labels.iter().find(|&&label| label as usize >= classes) {
                return Err(fault(format!("{label} in {}, which has {classes} classes", dataset.name())));
            }
        }
        if balances && dataset.labels().is_none() {
            let problem = format!("the labels of {} are not known without reading its images", dataset.name());
            return Err(Error::setting("balance", problem));
        }
        if len == 0 {
            return Err(Error::setting("batch_size", format!("there is nothing in {}", dataset.name())));
        }
        if drop_last && batch_size > len {
            let problem = format!(
                "of the {len} samples in {} there is no batch of {batch_size}, and smaller ones are dropped",
                dataset.name()
            );
            return Err(Error::setting("batch_size", problem));
        }
        let factors = [size, size, 3, size_of::<f32>()];
        let bytes = factors.iter().try_fold(batch_size.min(len) as u64, |n, &m| n.checked_mul(m as u64));
        if bytes.is_none_or(|bytes| bytes > MAX_BATCH_BYTES) {
            let problem = format!("{batch_size} images of {size}x{size} take more than {MAX_BATCH_BYTES} bytes");
            return Err(Error::setting("batch_size", problem));
        }
        let workers = match config.workers {
            0 if rayon::current_thread_index().is_some() => rayon::current_num_threads(),
            0 => thread::available_parallelism().map_or(1, usize::from),
            workers => workers,
        };
        let workers = workers.min(MAX_WORKERS);
        Ok(Self { dataset, config: Arc::new(config), workers, spare: Arc::default() })
    }

    /// The data set.
    pub fn dataset(&self) -> &Arc<dyn Dataset> {
        &self.dataset
    }

    /// The transform that turns its images into floats.
    pub fn transform(&self) -> &Transform {
        &self.config.transform
    }

    /// The number of batches in an epoch.
    pub fn batches_per_epoch(&self) -> usize {
        let LoaderConfig { batch_size, drop_last, .. } = *self.config;
        if drop_last { self.dataset.len() / batch_size } else { self.dataset.len().div_ceil(batch_size) }
    }

    /// The batches of `epoch` from `first_batch` on: bit for bit those that the whole epoch has from there. Errors,
    /// each in a batch's place: [`Error::TooManyBadImages`]; [`Error::NoGoodImage`] if no image of the data set can be
    /// decoded; [`Error::Label`] and those of the data set; [`Error::Worker`] where a thread cannot be started, or
    /// panics.
    pub fn epoch(&self, epoch: u64, first_batch: usize) -> Batches<'static> {
        self.batches(epoch, first_batch, None)
    }

    /// The same batches, until `stop` is set: then there are no more, even if the next one's images are still being
    /// decoded, which may take long.
    pub fn epoch_until<'s>(&self, epoch: u64, first_batch: usize, stop: &'s AtomicBool) -> Batches<'s> {
        self.batches(epoch, first_batch, Some(stop))
    }

    fn batches<'s>(&self, epoch: u64, first_batch: usize, stop: Option<&'s AtomicBool>) -> Batches<'s> {
        let total = self.batches_per_epoch();
        let left = total.saturating_sub(first_batch);
        let order = order(&self.config, epoch, self.dataset.len(), self.dataset.labels().unwrap_or_default());
        let job = Arc::new(self.job(Arc::clone(&self.config), epoch, order));
        let worker = (left > 0).then(|| {
            let (sender, receiver) = sync_channel(AHEAD);
            let (job, workers) = (Arc::clone(&job), self.workers);
            let work = move || job.work(first_batch..total, workers, &sender);
            let thread = thread::Builder::new().name("loader".to_owned()).stack_size(STACK).spawn(work);
            thread.map(|thread| Worker { receiver, thread }).map_err(cannot_start)
        });
        Batches { job, bad: Vec::new(), left, worker, stop }
    }

    /// A batch of these samples, in this order, varied and mixed as the first batch of the first epoch. Bad images are
    /// tolerated, however many there are: [`Batch::skipped`] names them, and if all are bad, the data set's first good
    /// image is shown instead. Errors: otherwise those of an epoch's batches, and [`Error::Index`].
    pub fn batch_of(&self, samples: Vec<usize>) -> Result<Batch> {
        let batch_size = samples.len();
        let config = LoaderConfig { batch_size, max_bad_images: usize::MAX, ..LoaderConfig::clone(&self.config) };
        let samples = samples.into_iter().chain(0..self.dataset.len());
        let order = samples.map(|sample| Showing { sample, before: 0 }).collect();
        let job = self.job(config.into(), 0, order);
        // The batch of a build that panicked is dropped with it, so that nothing half-made is seen.
        catch_unwind(AssertUnwindSafe(|| job.build(0))).map_err(|payload| panicked(Some(payload)))?
    }

    fn job(&self, config: Arc<LoaderConfig>, epoch: u64, order: Vec<Showing>) -> Job {
        let (dataset, spare) = (Arc::clone(&self.dataset), Arc::clone(&self.spare));
        Job { dataset, config, epoch, order, spare, stop: AtomicBool::new(false) }
    }

    /// The most bytes that images and targets of an epoch's batches take at once, if the consumer looks at one batch
    /// ahead and gives used ones back.
    pub fn most_bytes(&self) -> u64 {
        let size = self.config.transform.size();
        let images = self.config.batch_size.min(self.dataset.len());
        let targets = if self.config.mixing().is_some() { self.dataset.classes().len() } else { 0 };
        (self.most_batches() * images * (size * size * 3 + targets) * size_of::<f32>()) as u64
    }

    /// The most batches that there are at once: those that wait, the one on its way, and what the consumer has in hand.
    fn most_batches(&self) -> usize {
        (AHEAD + 1 + 2).min(self.batches_per_epoch())
    }

    /// Takes a used batch back, so that its memory serves a later one of the epoch. Optional.
    pub fn recycle(&self, batch: Batch) {
        let mut spare = lock(&self.spare);
        // No more than can be on their way at once, should someone hand in batches from elsewhere.
        if spare.len() < self.most_batches() {
            spare.push(batch);
        }
    }
}

/// The batches of one epoch, in order. Ends after the last one or after an error. Dropping it stops the threads.
pub struct Batches<'s> {
    job: Arc<Job>,
    bad: Vec<String>, // the failures so far, at most `max_bad_images`
    left: usize,
    worker: Option<Result<Worker>>,
    stop: Option<&'s AtomicBool>,
}

impl fmt::Debug for Batches<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batches")
            .field("epoch", &self.job.epoch)
            .field("left", &self.left)
            .field("bad", &self.bad)
            .finish_non_exhaustive()
    }
}

struct Worker {
    receiver: Receiver<Result<Batch>>,
    thread: JoinHandle<()>,
}

impl Iterator for Batches<'_> {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let result = self.receive().map(|result| result.and_then(|batch| self.judge(batch)));
        self.left = if let Some(Ok(_)) = result { self.left - 1 } else { 0 };
        result
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // An error ends the iterator early, and so may a request to stop.
        (self.left.min(1).min(usize::from(self.stop.is_none())), Some(self.left))
    }
}

impl Batches<'_> {
    /// The next batch, unless it is no longer asked for.
    fn receive(&mut self) -> Option<Result<Batch>> {
        while let Some(Ok(worker)) = &self.worker {
            if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                self.job.stop.store(true, Ordering::Relaxed);
                return None;
            }
            match worker.receiver.recv_timeout(PATIENCE) {
                Ok(result) => return Some(result),
                Err(RecvTimeoutError::Timeout) => (),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        // The thread did not start, or hung up before it was done, which only a panic makes it do.
        Some(Err(match self.worker.take() {
            Some(Err(error)) => error,
            Some(Ok(worker)) => panicked(worker.thread.join().err()),
            None => panicked(None),
        }))
    }

    /// Counts the batch's bad images. Done here, in the order of the batches, so that the same batch exceeds the
    /// limit each time.
    fn judge(&mut self, batch: Batch) -> Result<Batch> {
        self.bad.extend(batch.skipped.iter().filter(|skipped| !skipped.again).map(|skipped| skipped.reason.clone()));
        let limit = self.job.config.max_bad_images;
        if self.bad.len() > limit {
            return Err(Error::TooManyBadImages { limit, first: self.bad.drain(..).take(NAMED).collect() });
        }
        Ok(batch)
    }
}

impl Drop for Batches<'_> {
    fn drop(&mut self) {
        self.job.stop.store(true, Ordering::Relaxed);
        if let Some(Ok(Worker { receiver, thread })) = self.worker.take() {
            // Hang up first: the thread may wait for room in the channel.
            drop(receiver);
            let _ = thread.join();
        }
        // The spare batches are not needed between epochs; free their memory for other loaders.
        lock(&self.job.spare).clear();
    }
}
