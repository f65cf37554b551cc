//! Batches, built ahead of their use.
//!
//! A thread makes the batches of an epoch one after the other, the images of each on as many threads as there are cores, and
//! puts them into a bounded channel: so they come in order without being sorted, and a slow consumer holds the threads back.
//! A batch is there as soon as it can be, and few are in memory, however many cores there are. No thread's speed can change
//! what a batch holds:
//! the order of an epoch is a function of (seed, epoch), the augmentation of a sample one of (seed, epoch, sample), and how
//! images are mixed one of (seed, epoch, batch).

use std::fmt::Display;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rayon::ThreadPoolBuilder;
use rayon::prelude::*;
use tensor::rng::Philox;

use crate::order::{Showing, order};
use crate::{Batch, Dataset, Error, Mixing, Result, Skipped, Transform};

/// Name the streams of random numbers: the augmentation of a sample, and the mixing of a batch.
const AUGMENT: u64 = 0x4155_474D;
const MIX: u64 = 0x4D49_5845;
/// How many bad images an error names.
const NAMED: usize = 5;
/// The largest batch, in bytes.
const MAX_BATCH_BYTES: u64 = 8 << 30;
const MAX_WORKERS: usize = 256;
const MAX_PREFETCH: usize = 1024;

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
    /// Threads; 0 for one a core.
    pub workers: usize,
    /// Batches built ahead of their use, at least one.
    pub prefetch: usize,
    /// How many undecodable images an epoch (or the part of it that is run) bears before
    /// [`Error::TooManyBadImages`].
    pub max_bad_images: usize,
    /// From an image to its floats.
    pub transform: Transform,
    /// The micro-batches that a batch is cut into, above 0: what follows each other in an epoch's order goes to one after the
    /// other, as cards are dealt.
    pub parts: usize,
    /// How often an epoch shows a sample, one after the other, above 0. Its length is that of the data set in any case: it
    /// shows so many samples fewer.
    pub repeats: usize,
    /// How the images of a batch are mixed, if they are.
    pub mixing: Option<Mixing>,
}

impl LoaderConfig {
    /// For training: a random order, full batches only, each sample once, nothing mixed. No bad image is borne.
    pub fn train(batch_size: usize, seed: u64, transform: Transform) -> Self {
        Self {
            batch_size,
            seed,
            shuffle: true,
            drop_last: true,
            workers: 0,
            prefetch: 2,
            max_bad_images: 0,
            transform,
            parts: 1,
            repeats: 1,
            mixing: None,
        }
    }

    /// For evaluation: every sample once, in the data set's order. No bad image is borne.
    pub fn eval(batch_size: usize, transform: Transform) -> Self {
        Self { shuffle: false, drop_last: false, ..Self::train(batch_size, 0, transform) }
    }

    /// The batches that wait for the consumer.
    fn ahead(&self) -> usize {
        self.prefetch.clamp(1, MAX_PREFETCH)
    }
}

/// Makes the batches of any epoch of a data set.
pub struct Loader {
    dataset: Arc<dyn Dataset>,
    config: Arc<LoaderConfig>,
    workers: usize,
    spare: Arc<Mutex<Vec<Batch>>>,
}

impl Loader {
    /// A loader of `dataset`. No thread starts before [`epoch`](Self::epoch).
    ///
    /// Errors: [`Error::Setting`] where the batch size is 0 or takes more than 8 GiB, an epoch would have no batch, or samples
    /// are to be repeated, or batches cut, 0 times.
    pub fn new(dataset: Arc<dyn Dataset>, config: LoaderConfig) -> Result<Self> {
        let LoaderConfig { batch_size, drop_last, .. } = config;
        let (len, size) = (dataset.len(), config.transform.size());
        if batch_size == 0 {
            return Err(Error::setting("batch_size", "it must be 1 or more"));
        }
        if config.repeats == 0 || config.parts == 0 {
            return Err(Error::setting("repeats and parts", "they must be 1 or more"));
        }
        if len == 0 || (drop_last && batch_size > len) {
            let problem = format!("{batch_size} samples make no batch of the {len} in {}", dataset.name());
            return Err(Error::setting("batch_size", problem));
        }
        let factors = [size, size, 3, size_of::<f32>()];
        let bytes = factors.iter().try_fold(batch_size.min(len) as u64, |n, &m| n.checked_mul(m as u64));
        if bytes.is_none_or(|bytes| bytes > MAX_BATCH_BYTES) {
            let problem = format!("{batch_size} images of {size}x{size} take more than {MAX_BATCH_BYTES} bytes");
            return Err(Error::setting("batch_size", problem));
        }
        let workers = match config.workers {
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

    /// What makes floats of its images.
    pub fn transform(&self) -> &Transform {
        &self.config.transform
    }

    /// The number of batches in an epoch.
    pub fn batches_per_epoch(&self) -> usize {
        let LoaderConfig { batch_size, drop_last, .. } = *self.config;
        if drop_last { self.dataset.len() / batch_size } else { self.dataset.len().div_ceil(batch_size) }
    }

    /// The batches of `epoch` from `first_batch` on: bit for bit those that the whole epoch has from there.
    pub fn epoch(&self, epoch: u64, first_batch: usize) -> Batches {
        let total = self.batches_per_epoch();
        let order = order(&self.config, epoch, self.dataset.len());
        let job = Arc::new(self.job(Arc::clone(&self.config), epoch, order));
        let (sender, receiver) = sync_channel(self.config.ahead());
        let thread = thread::Builder::new().name("loader".to_owned()).spawn({
            let (job, workers) = (Arc::clone(&job), self.workers);
            move || job.work(first_batch..total, workers, &sender)
        });
        let worker = thread.map(|thread| Worker { receiver, thread }).map_err(cannot_start);
        Batches { job, bad: Vec::new(), left: total.saturating_sub(first_batch), worker: Some(worker) }
    }

    /// A batch of these samples, in this order, as they are in the first epoch. Errors: those of an epoch's batches.
    pub fn batch_of(&self, samples: Vec<usize>) -> Result<Batch> {
        let config = LoaderConfig { batch_size: samples.len().max(1), ..LoaderConfig::clone(&self.config) };
        let order = samples.into_iter().map(|sample| Showing { sample, before: 0 }).collect();
        let job = self.job(config.into(), 0, order);
        job.build(0).unwrap_or_else(|| Err(Error::Worker("it was told to stop".to_owned())))
    }

    fn job(&self, config: Arc<LoaderConfig>, epoch: u64, order: Vec<Showing>) -> Job {
        let (dataset, spare) = (Arc::clone(&self.dataset), Arc::clone(&self.spare));
        Job { dataset, config, epoch, order, spare, stop: AtomicBool::new(false) }
    }

    /// The most bytes that images and targets of an epoch's batches take at once, if the consumer looks at one batch ahead and
    /// gives used ones back.
    pub fn most_bytes(&self) -> u64 {
        let size = self.config.transform.size();
        let images = self.config.batch_size.min(self.dataset.len());
        let targets = if self.config.mixing.is_some() { self.dataset.classes().len() } else { 0 };
        (self.most_batches() * images * (size * size * 3 + targets) * size_of::<f32>()) as u64
    }

    /// The most batches that there are at once: those that wait, the one on its way, and what the consumer has in hand.
    fn most_batches(&self) -> usize {
        (self.config.ahead() + 1 + 2).min(self.batches_per_epoch())
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
pub struct Batches {
    job: Arc<Job>,
    bad: Vec<String>, // the failures so far, at most `max_bad_images`
    left: usize,
    worker: Option<Result<Worker>>,
}

struct Worker {
    receiver: Receiver<Result<Batch>>,
    thread: JoinHandle<()>,
}

impl Iterator for Batches {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let result = self.receive().and_then(|batch| self.judge(batch));
        self.left = if result.is_ok() { self.left - 1 } else { 0 };
        Some(result)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // An error ends the iterator early.
        (self.left.min(1), Some(self.left))
    }
}

impl Batches {
    fn receive(&mut self) -> Result<Batch> {
        if let Some(Ok(worker)) = &self.worker
            && let Ok(result) = worker.receiver.recv()
        {
            return result;
        }
        // The thread did not start, or hung up before it was done, which only a panic makes it do.
        let payload = match self.worker.take() {
            Some(Err(error)) => return Err(error),
            Some(Ok(worker)) => worker.thread.join().err(),
            None => None,
        };
        let text = payload.as_ref().and_then(|payload| {
            payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied())
        });
        Err(Error::Worker(format!("it panicked: {}", text.unwrap_or("no message"))))
    }

    /// Counts the batch's bad images. Done here, in the order of the batches, so that the same batch exceeds the
    /// limit each time.
    fn judge(&mut self, batch: Batch) -> Result<Batch> {
        self.bad.extend(batch.skipped.iter().map(|skipped| skipped.reason.clone()));
        let limit = self.job.config.max_bad_images;
        if self.bad.len() > limit {
            return Err(Error::TooManyBadImages { limit, first: self.bad.drain(..).take(NAMED).collect() });
        }
        Ok(batch)
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        self.job.stop.store(true, Ordering::Relaxed);
        if let Some(Ok(Worker { receiver, thread })) = self.worker.take() {
            // Hang up first: the thread may wait for room in the channel.
            drop(receiver);
            let _ = thread.join();
        }
        // Between epochs nobody needs them, and another loader may.
        lock(&self.job.spare).clear();
    }
}

fn cannot_start(cause: impl Display) -> Error {
    Error::Worker(format!("cannot start it: {cause}"))
}

/// What the threads of one epoch share.
struct Job {
    dataset: Arc<dyn Dataset>,
    config: Arc<LoaderConfig>,
    epoch: u64,
    order: Vec<Showing>,
    spare: Arc<Mutex<Vec<Batch>>>,
    stop: AtomicBool,
}

impl Job {
    /// Makes the batches of these numbers on so many threads. Ends with the last, with an error, or when nobody listens any more.
    fn work(&self, numbers: Range<usize>, workers: usize, sender: &SyncSender<Result<Batch>>) {
        let named = |thread| format!("loader-{thread}");
        let pool = match ThreadPoolBuilder::new().num_threads(workers).thread_name(named).build() {
            Ok(pool) => pool,
            Err(cause) => return sender.send(Err(cannot_start(cause))).unwrap_or_default(),
        };
        for number in numbers {
            let Some(result) = pool.install(|| self.build(number)) else { return };
            let failed = result.is_err();
            if sender.send(result).is_err() || failed {
                return;
            }
        }
    }

    /// Builds one batch, or nothing when told to stop.
    fn build(&self, number: usize) -> Option<Result<Batch>> {
        let LoaderConfig { batch_size, ref transform, .. } = *self.config;
        let (start, size) = (number * batch_size, transform.size());
        let end = self.order.len().min(start + batch_size);
        let image_len = size * size * 3;

        let mut batch = lock(&self.spare).pop().unwrap_or_default();
        batch.shape = [end - start, size, size, 3];
        let len = (end - start) * image_len;
        if batch.images.try_reserve_exact(len.saturating_sub(batch.images.len())).is_err() {
            let problem = format!("there is no memory left for {} images of {size}x{size}", end - start);
            return Some(Err(Error::setting("batch_size", problem)));
        }
        batch.images.resize(len, 0.0);
        batch.labels.clear();
        batch.targets.clear();
        batch.samples.clear();
        batch.samples.extend(self.order[start..end].iter().map(|showing| showing.sample));
        batch.skipped.clear();

        let images = batch.images.par_chunks_exact_mut(image_len).zip(&self.order[start..end]);
        let load = |(out, &showing): (&mut [f32], &Showing)| {
            (!self.stop.load(Ordering::Relaxed)).then(|| self.load(showing, out))
        };
        let labels: Vec<Result<u32>> = images.map(load).collect::<Option<_>>()?;
        for (slot, label) in labels.into_iter().enumerate() {
            batch.labels.push(*label.as_ref().unwrap_or(&0));
            if let Err(error) = label {
                batch.skipped.push(Skipped { slot, sample: batch.samples[slot], reason: error.to_string() });
            }
        }
        if !batch.skipped.is_empty()
            && let Err(error) = self.replace_bad(&mut batch, end)?
        {
            return Some(Err(error));
        }
        if let Some(mixing) = &self.config.mixing {
            let random = Philox::keyed(self.config.seed, &[MIX, self.epoch, number as u64]);
            mixing.apply(&mut batch, self.config.parts, self.dataset.classes().len(), &mut random.sequence());
        }
        Some(Ok(batch))
    }

    /// Fills the slot of each bad image with the next good one of the same batch, counting on from its last slot to
    /// its first. If all are bad, the next good image of the epoch's order after `end` fills them. Either way the
    /// result depends on the order and on the data alone.
    fn replace_bad(&self, batch: &mut Batch, end: usize) -> Option<Result<()>> {
        let (count, image_len) = (batch.samples.len(), batch.images.len() / batch.samples.len());
        let mut good = vec![true; count];
        for skipped in &batch.skipped {
            good[skipped.slot] = false;
        }
        if batch.skipped.len() == count {
            let mut reasons: Vec<String> = batch.skipped.iter().map(|skipped| skipped.reason.clone()).collect();
            for step in 0..self.order.len() - count {
                if self.stop.load(Ordering::Relaxed) {
                    return None;
                }
                let showing = self.order[(end + step) % self.order.len()];
                match self.load(showing, &mut batch.images[..image_len]) {
                    Ok(label) => {
                        (good[0], batch.labels[0], batch.samples[0]) = (true, label, showing.sample);
                        break;
                    }
                    Err(error) => reasons.push(error.to_string()),
                }
                if reasons.len() > self.config.max_bad_images {
                    break;
                }
            }
            if !good[0] {
                let (bad, limit) = (reasons.len(), self.config.max_bad_images);
                reasons.truncate(NAMED);
                return Some(Err(match bad > limit {
                    true => Error::TooManyBadImages { limit, first: reasons },
                    false => Error::NoGoodImage { first: reasons },
                }));
            }
        }
        for slot in (0..count).filter(|&slot| !good[slot]) {
            let source = (1..count).map(|step| (slot + step) % count).find(|&source| good[source]).unwrap_or(slot);
            batch.images.copy_within(source * image_len..(source + 1) * image_len, slot * image_len);
            batch.labels[slot] = batch.labels[source];
            batch.samples[slot] = batch.samples[source];
        }
        Some(Ok(()))
    }

    /// Writes the floats of a sample to `out`, (H, W, 3), and gives its label.
    fn load(&self, Showing { sample, before }: Showing, out: &mut [f32]) -> Result<u32> {
        let loaded = self.dataset.get(sample)?;
        // Shown again, it is varied as another one would be, from beyond the last.
        let varied = sample + before * self.dataset.len();
        let random = Philox::keyed(self.config.seed, &[AUGMENT, self.epoch, varied as u64]);
        self.config.transform.apply(&loaded.image, &mut random.sequence(), out);
        Ok(loaded.label)
    }
}

/// Locks even after a panic elsewhere: what these locks guard is whole at every moment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
