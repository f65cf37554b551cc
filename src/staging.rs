//! Where a batch lies while a model works on it: memory that stays, so that recorded work finds the next batch there too;
//! and on a GPU the way to it, which the next batch goes while the GPU still works on this one.

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
    /// Images and labels of each part.
    parts: Vec<[Tensor; 2]>,
    ahead: Option<Prefetch>,
    /// The number of the batch that was sent ahead.
    sent: Option<u64>,
}

impl Staging {
    /// A place for batches like this one, and this one in it. Errors: those of the device.
    pub fn new(batch: &Batch, parts: usize, device: &Device) -> Result<Self> {
        let part = |part| {
            let [images, labels] = tensors(batch, part, parts)?;
            Ok([images.to_device(device)?, labels.to_device(device)?])
        };
        let parts = (0..parts).map(part).collect::<Result<_>>()?;
        Ok(Self { device: device.clone(), shape: batch.shape, parts, ahead: None, sent: None })
    }

    fn fits(&self, batch: &Batch, parts: usize) -> bool {
        self.shape == batch.shape && self.parts.len() == parts
    }

    /// Images and labels of each part.
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
            let (images, labels) = slices(next, part, parts);
            [bytemuck::cast_slice(images), bytemuck::cast_slice(labels)]
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

/// Part `part` of `parts` of a batch: the floats of its images, and its labels.
fn slices(batch: &Batch, part: usize, parts: usize) -> (&[f32], &[u32]) {
    let [count, height, width, channels] = batch.shape;
    let (start, end) = (count * part / parts, count * (part + 1) / parts);
    let image = height * width * channels;
    (&batch.images[start * image..end * image], &batch.labels[start..end])
}

/// Part `part` of `parts` of a batch: images (N, H, W, 3) and labels (N). Errors: [`tensor::Error::Shape`] where the batch
/// has not the shape that it says.
pub fn tensors(batch: &Batch, part: usize, parts: usize) -> Result<[Tensor; 2]> {
    let (images, labels) = slices(batch, part, parts);
    let [_, height, width, channels] = batch.shape;
    let count = labels.len();
    Ok([Tensor::from_slice(images, [count, height, width, channels])?, Tensor::from_slice(labels, [count])?])
}
