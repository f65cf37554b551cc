//! Staging buffers, which hold a batch while a model works on it: fixed memory, so that recorded GPU work (a CUDA
//! graph) finds every batch at the same address. On a GPU the next batch is uploaded while the GPU still works on this
//! one.

use anyhow::Result;
use data::{Batch, Batches, MicroBatch, Targets};
use std::fmt;
use std::iter::Peekable;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use tensor::cuda::{Prefetch, Repeated};
use tensor::{Device, Tensor};

/// An immutable batch with a unique number, by which a batch that was uploaded in advance is recognised when its turn
/// comes.
pub struct Numbered {
    batch: Batch,
    number: u64,
}

impl fmt::Debug for Numbered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Numbered")
            .field("number", &self.number)
            .field("shape", &self.batch.shape)
            .finish_non_exhaustive()
    }
}

impl Numbered {
    /// The batch, to be used again.
    pub fn into_batch(self) -> Batch {
        self.batch
    }
}

impl From<Batch> for Numbered {
    fn from(batch: Batch) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { batch, number: NEXT.fetch_add(1, Ordering::Relaxed) }
    }
}

impl Deref for Numbered {
    type Target = Batch;

    fn deref(&self) -> &Batch {
        &self.batch
    }
}

/// Numbers the batches in order. The iterator is peekable, so that the next batch can be looked at before its turn.
/// Errors: those of the batches.
pub fn numbered(batches: Batches<'_>) -> Peekable<impl Iterator<Item = data::Result<Numbered>>> {
    batches.map(|batch| batch.map(Numbered::from)).peekable()
}

/// Staging buffers for batches of one size, split into parts (micro-batches).
#[derive(Debug)]
pub struct Staging {
    device: Device,
    shape: [usize; 4],
    /// Images and targets of each part.
    parts: Vec<[Tensor; 2]>,
    /// How many [labels](Batch::labels) and [targets](Batch::targets) a batch has.
    told: [usize; 2],
    ahead: Option<Prefetch>,
    /// The number of the batch that was sent ahead.
    sent: Option<u64>,
}

impl Staging {
    /// Staging buffers for batches of this one's size, filled with this one. Errors: those of the device.
    pub fn new(batch: &Batch, parts: usize, device: &Device) -> Result<Self> {
        let part = |part| {
            let [images, targets] = tensors(batch, part, parts)?;
            Ok([images.to_device(device)?, targets.to_device(device)?])
        };
        let parts = (0..parts).map(part).collect::<Result<_>>()?;
        let (shape, told) = (batch.shape, told(batch));
        Ok(Self { device: device.clone(), shape, parts, told, ahead: None, sent: None })
    }

    fn fits(&self, batch: &Batch, parts: usize) -> bool {
        self.shape == batch.shape && self.parts.len() == parts && self.told == told(batch) && batch.is_whole()
    }

    /// Images and targets of each part, as [`tensors`] gives them.
    pub fn parts(&self) -> &[[Tensor; 2]] {
        &self.parts
    }

    /// Replaces the staged batch with another one. Returns false and does nothing if that batch has another size or is
    /// to be split into another number of parts. Errors: those of the device.
    pub fn fill(&mut self, batch: &Numbered, parts: usize) -> Result<bool> {
        if !self.fits(batch, parts) {
            return Ok(false);
        }
        if let Some(ahead) = self.ahead.as_mut().filter(|_| self.sent == Some(batch.number)) {
            self.sent = None;
            ahead.receive(self.parts.iter_mut().flatten())?;
            return Ok(true);
        }
        for (part, own) in self.parts.iter_mut().enumerate() {
            for (own, next) in own.iter_mut().zip(tensors(batch, part, parts)?) {
                own.overwrite(0, &next)?;
            }
        }
        Ok(true)
    }

    /// Uploads the next batch in advance, if it has the size of the staged one. On the CPU `next` is not called, as
    /// nothing would be gained. Errors: those of the device.
    pub fn send<'b>(&mut self, next: impl FnOnce() -> Option<&'b Numbered>) -> Result<()> {
        let Device::Cuda(gpu) = &self.device else { return Ok(()) };
        let parts = self.parts.len();
        let Some(next) = next().filter(|next| self.fits(next, parts)) else { return Ok(()) };
        let pieces = (0..parts).flat_map(|part| {
            let MicroBatch { images, targets, .. } = next.part(part, parts);
            let targets = match targets {
                Targets::Classes(classes) => bytemuck::cast_slice(classes),
                Targets::Distributions(shares, _) => bytemuck::cast_slice(shares),
            };
            [bytemuck::cast_slice(images), targets]
        });
        let pieces: Vec<&[u8]> = pieces.collect();
        let ahead = match &mut self.ahead {
            Some(ahead) => ahead,
            none => none.insert(Prefetch::new(gpu, pieces.iter().map(|piece| piece.len()).sum())?),
        };
        self.sent = None;
        ahead.send(&pieces)?;
        self.sent = Some(next.number);
        Ok(())
    }
}

/// A staged batch, and the work on it, which can be recorded once and replayed for batches of its size. A recording
/// owns the memory that it works with.
#[derive(Debug)]
pub struct Staged<R> {
    /// What is done with each batch.
    pub work: Repeated<R>,
    /// The batch.
    pub batch: Staging,
}

impl<R> Staged<R> {
    /// Stages a batch. Where it has another size than the previous one, the staging buffers are dropped, with the
    /// memory of what was recorded for them, before new ones are allocated. Errors: those of the device.
    pub fn stage(staged: &mut Option<Self>, batch: &Numbered, parts: usize, device: &Device) -> Result<()> {
        if let Some(staged) = staged
            && staged.batch.fill(batch, parts)?
        {
            return Ok(());
        }
        *staged = None;
        *staged = Some(Self { work: Repeated::default(), batch: Staging::new(batch, parts, device)? });
        Ok(())
    }
}

fn told(batch: &Batch) -> [usize; 2] {
    [batch.labels.len(), batch.targets.len()]
}

/// Part `part` of `parts` of a batch: images (N, H, W, 3), and their classes (N), or if they are mixed, distributions
/// over the classes (N, K); of a batch without labels, no classes (0). Errors: [`tensor::Error::Shape`] if the batch's
/// data do not match its `shape`.
pub fn tensors(batch: &Batch, part: usize, parts: usize) -> Result<[Tensor; 2]> {
    if !batch.is_whole() {
        let expected = format!("as many images, labels and targets as a batch of {:?} has", batch.shape);
        return Err(tensor::Error::shape("staging", expected, &[batch.images.len()]).into());
    }
    let MicroBatch { images, shape, targets } = batch.part(part, parts);
    let targets = match targets {
        Targets::Classes(classes) => Tensor::from_slice(classes, [classes.len()])?,
        Targets::Distributions(shares, shape) => Tensor::from_slice(shares, shape)?,
    };
    Ok([Tensor::from_slice(images, shape)?, targets])
}
