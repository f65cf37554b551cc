//! Where a batch lies while a model works on it: fixed memory, so that recorded GPU work finds every batch at the same
//! address. On a GPU the next batch is uploaded while the GPU still works on this one.

use anyhow::Result;
use data::{Batch, Batches};
use std::iter::Peekable;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use tensor::cuda::Prefetch;
use tensor::{Device, Tensor};

/// A batch that nobody changes any more, with a number that no other has: by it a batch that was sent ahead is known when
/// its turn comes.
pub struct Numbered {
    batch: Batch,
    number: u64,
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

/// Numbers batches in their order, each of which can be looked at before its turn.
pub fn numbered(batches: Batches) -> Peekable<impl Iterator<Item = data::Result<Numbered>>> {
    batches.map(|batch| batch.map(Numbered::from)).peekable()
}

/// A place for batches of one size, cut into parts.
pub struct Staging {
    device: Device,
    shape: [usize; 4],
    /// Images and targets of each part.
    parts: Vec<[Tensor; 2]>,
    /// The numbers in a batch's targets, if its images are mixed.
    targets: usize,
    ahead: Option<Prefetch>,
    /// The number of the batch that was sent ahead.
    sent: Option<u64>,
}

impl Staging {
    /// A place for batches like this one, and this one in it. Errors: those of the device.
    pub fn new(batch: &Batch, parts: usize, device: &Device) -> Result<Self> {
        let part = |part| {
            let [images, targets] = tensors(batch, part, parts)?;
            Ok([images.to_device(device)?, targets.to_device(device)?])
        };
        let parts = (0..parts).map(part).collect::<Result<_>>()?;
        let (shape, targets) = (batch.shape, batch.targets.len());
        Ok(Self { device: device.clone(), shape, parts, targets, ahead: None, sent: None })
    }

    fn fits(&self, batch: &Batch, parts: usize) -> bool {
        self.shape == batch.shape && self.parts.len() == parts && self.targets == batch.targets.len()
    }

    /// Images and targets of each part, as [`tensors`] gives them.
    pub fn parts(&self) -> &[[Tensor; 2]] {
        &self.parts
    }

    /// Puts another batch in place of the one that is there. False when it is of another size, or to be cut otherwise.
    /// Errors: those of the device.
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

    /// Sends the next batch ahead, if it has the size of this one. Nobody is asked for it on the CPU, where nothing would
    /// be gained. Errors: those of the device.
    pub fn send<'b>(&mut self, next: impl FnOnce() -> Option<&'b Numbered>) -> Result<()> {
        let Device::Cuda(gpu) = &self.device else { return Ok(()) };
        let parts = self.parts.len();
        let Some(next) = next().filter(|next| self.fits(next, parts)) else { return Ok(()) };
        let pieces = (0..parts).flat_map(|part| {
            let MicroBatch { images, targets } = MicroBatch::of(next, part, parts);
            let targets = match targets {
                Targets::Classes(classes) => bytemuck::cast_slice(classes),
                Targets::Distributions(shares) => bytemuck::cast_slice(shares),
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

/// What images are to be taken for.
enum Targets<'b> {
    /// (N)
    Classes(&'b [u32]),
    /// Mixed ones: (N, K).
    Distributions(&'b [f32]),
}

/// A part of a batch, which goes through the model by itself.
struct MicroBatch<'b> {
    images: &'b [f32],
    targets: Targets<'b>,
}

impl<'b> MicroBatch<'b> {
    fn of(batch: &'b Batch, part: usize, parts: usize) -> Self {
        let slots = batch.slots(part, parts);
        let rows = |all: &'b [f32]| {
            let row = all.len() / batch.labels.len().max(1);
            &all[slots.start * row..slots.end * row]
        };
        let targets = match batch.targets.is_empty() {
            true => Targets::Classes(&batch.labels[slots.clone()]),
            false => Targets::Distributions(rows(&batch.targets)),
        };
        Self { images: rows(&batch.images), targets }
    }
}

/// Part `part` of `parts` of a batch: images (N, H, W, 3), and their classes (N), or if they are mixed, distributions over
/// the classes (N, K). Errors: [`tensor::Error::Shape`] where the batch has not the shape that it says.
pub fn tensors(batch: &Batch, part: usize, parts: usize) -> Result<[Tensor; 2]> {
    let MicroBatch { images, targets } = MicroBatch::of(batch, part, parts);
    let ([_, height, width, channels], count) = (batch.shape, batch.slots(part, parts).len());
    let targets = match targets {
        Targets::Classes(classes) => Tensor::from_slice(classes, [count])?,
        Targets::Distributions(shares) => Tensor::from_slice(shares, [count, shares.len() / count.max(1)])?,
    };
    Ok([Tensor::from_slice(images, [count, height, width, channels])?, targets])
}
