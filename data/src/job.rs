//! The work of an epoch: how its batches are made, on several threads.

use std::any::Any;
use std::collections::HashSet;
use std::fmt::Display;
use std::iter;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex};

use rayon::ThreadPoolBuilder;
use rayon::prelude::*;
use tensor::cpu::parallel::STACK;
use tensor::lock;
use tensor::memory::reserve;
use tensor::rng::Philox;

use crate::order::Showing;
use crate::{Batch, Dataset, Error, LoaderConfig, Result, Skipped};

/// Name the streams of random numbers: the augmentation of a sample, and the mixing of a batch.
const AUGMENT: u64 = 0x4155_474D;
const MIX: u64 = 0x4D49_5845;
/// How many bad images an error names.
pub(crate) const NAMED: usize = 5;

/// What the threads of one epoch share.
pub(crate) struct Job {
    pub dataset: Arc<dyn Dataset>,
    pub config: Arc<LoaderConfig>,
    pub epoch: u64,
    pub order: Vec<Showing>,
    pub spare: Arc<Mutex<Vec<Batch>>>,
    pub stop: AtomicBool,
}

impl Job {
    /// Makes the batches with these numbers on `workers` threads. Ends after the last one, after an error, or when the
    /// receiver has been dropped.
    pub fn work(&self, numbers: Range<usize>, workers: usize, sender: &SyncSender<Result<Batch>>) {
        let named = |thread| format!("loader-{thread}");
        let pool = match ThreadPoolBuilder::new().num_threads(workers).stack_size(STACK).thread_name(named).build() {
            Ok(pool) => pool,
            Err(cause) => {
                let _ = sender.send(Err(cannot_start(cause)));
                return;
            }
        };
        for number in numbers {
            let result = pool.install(|| self.build(number));
            let failed = result.is_err();
            if sender.send(result).is_err() || failed {
                return;
            }
        }
    }

    /// Builds one batch. An error when told to stop, which nobody waits for.
    pub fn build(&self, number: usize) -> Result<Batch> {
        let LoaderConfig { batch_size, ref transform, .. } = *self.config;
        let (start, size) = (number * batch_size, transform.size());
        let end = self.order.len().min(start + batch_size);
        let image_len = size * size * 3;

        let mut batch = lock(&self.spare).pop().unwrap_or_default();
        batch.shape = [end - start, size, size, 3];
        let len = (end - start) * image_len;
        let more = len.saturating_sub(batch.images.len());
        if reserve(&mut batch.images, more).is_err() {
            let problem = format!("there is no memory left for {} images of {size}x{size}", end - start);
            return Err(Error::setting("batch_size", problem));
        }
        batch.images.resize(len, 0.0);
        batch.labels.clear();
        batch.targets.clear();
        batch.samples.clear();
        batch.samples.extend(self.order[start..end].iter().map(|showing| showing.sample));
        batch.skipped.clear();

        let images = batch.images.par_chunks_exact_mut(image_len).zip(&self.order[start..end]);
        let labels: Vec<Result<u32>> = images.map(|(out, &showing)| self.load(showing, out)).collect();
        for (slot, label) in labels.into_iter().enumerate() {
            batch.labels.push(*label.as_ref().unwrap_or(&0));
            if let Err(error) = label {
                if !error.is_of_image() {
                    return Err(error);
                }
                let Showing { sample, before } = self.order[start + slot];
                batch.skipped.push(Skipped { slot, sample, again: before > 0, reason: error.to_string() });
            }
        }
        if !batch.skipped.is_empty() {
            self.replace_bad(&mut batch, end)?;
        }
        if let Some(augmentation) = self.config.mixing() {
            let random = Philox::keyed(self.config.seed, &[MIX, self.epoch, number as u64]);
            let (parts, classes) = (self.config.parts, self.dataset.classes().len());
            augmentation.mix_batch(&mut batch, parts, self.config.smoothing, classes, &mut random.sequence());
        }
        Ok(batch)
    }

    /// Fills the slot of each bad image with the next good one of the same batch, wrapping around at the end of the
    /// batch. If all are bad, the next good image of the epoch's order after `end` fills them, or if there is none, the
    /// first of the others. Either way the result depends on the order and on the data alone.
    fn replace_bad(&self, batch: &mut Batch, end: usize) -> Result<()> {
        let (count, image_len) = (batch.samples.len(), batch.images.len() / batch.samples.len());
        let mut good = batch.counted();
        if batch.skipped.len() == count {
            self.find_good(batch, end, image_len)?;
            good[0] = true;
        }
        for slot in (0..count).filter(|&slot| !good[slot]) {
            let source = (1..count).map(|step| (slot + step) % count).find(|&source| good[source]).unwrap_or(slot);
            batch.images.copy_within(source * image_len..(source + 1) * image_len, slot * image_len);
            batch.labels[slot] = batch.labels[source];
            batch.samples[slot] = batch.samples[source];
        }
        Ok(())
    }

    /// Fills the first slot of a batch of bad images with the next good one of the epoch's order after `end`, or if
    /// there is none, with the first good one that the epoch does not show: repeats may leave it few different images.
    fn find_good(&self, batch: &mut Batch, end: usize, image_len: usize) -> Result<()> {
        let (limit, others) = (self.config.max_bad_images, self.order.len() - batch.samples.len());
        let skipped = batch.skipped.iter().filter(|skipped| !skipped.again);
        let mut reasons: Vec<String> = skipped.map(|skipped| skipped.reason.clone()).collect();
        let later = (0..others).map(|step| self.order[(end + step) % self.order.len()]);
        for showing in later.chain(iter::once_with(|| self.unshown()).flatten()) {
            match self.load(showing, &mut batch.images[..image_len]) {
                Ok(label) => {
                    (batch.labels[0], batch.samples[0]) = (label, showing.sample);
                    return Ok(());
                }
                Err(error) if !error.is_of_image() => return Err(error),
                Err(error) if showing.before == 0 => reasons.push(error.to_string()),
                Err(_) => (),
            }
            if reasons.len() > limit {
                break;
            }
        }
        let too_many = reasons.len() > limit;
        reasons.truncate(NAMED);
        Err(if too_many {
            Error::TooManyBadImages { limit, first: reasons }
        } else {
            Error::NoGoodImage { first: reasons }
        })
    }

    /// The samples that the epoch does not show.
    fn unshown(&self) -> impl Iterator<Item = Showing> {
        let shown: HashSet<usize> = self.order.iter().map(|showing| showing.sample).collect();
        let unshown = (0..self.dataset.len()).filter(move |sample| !shown.contains(sample));
        unshown.map(|sample| Showing { sample, before: 0 })
    }

    /// Writes the floats of a sample to `out`, (H, W, 3), and gives its label.
    fn load(&self, Showing { sample, before }: Showing, out: &mut [f32]) -> Result<u32> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Error::Worker("it was told to stop".to_owned()));
        }
        let loaded = self.dataset.get(sample)?;
        let (label, classes) = (loaded.label, self.dataset.classes().len());
        if label as usize >= classes {
            return Err(Error::Label { place: format!("{}, sample {sample}", self.dataset.name()), label, classes });
        }
        // If the sample is shown again, it is augmented as if it were another sample, with an index beyond the last
        // one.
        let varied = sample + before * self.dataset.len();
        let random = Philox::keyed(self.config.seed, &[AUGMENT, self.epoch, varied as u64]);
        self.config.transform.apply(&loaded.image, &mut random.sequence(), out);
        Ok(label)
    }
}

/// The error of threads that do not start.
pub(crate) fn cannot_start(cause: impl Display) -> Error {
    Error::Worker(format!("cannot start it: {cause}"))
}

/// The error of a thread that has panicked.
pub(crate) fn panicked(payload: Option<Box<dyn Any + Send>>) -> Error {
    let text = payload.as_ref().and_then(|payload| {
        payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied())
    });
    Error::Worker(format!("it panicked: {}", text.unwrap_or("no message")))
}
