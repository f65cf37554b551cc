//! What a loader makes: some samples, and what could not be one.

use std::ops::Range;

/// Some samples, ready for a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The images, (N, H, W, 3), normalised.
    pub images: Vec<f32>,
    /// `[N, H, W, 3]`.
    pub shape: [usize; 4],
    /// The classes, (N), by which answers are scored; empty where there are none to score. Those of mixed images, of
    /// which it is that of the larger part, are not what a model is to learn: [`part`](Self::part) has that.
    pub labels: Vec<u32>,
    /// The soft targets of mixed images, (N, K): for each a distribution over the classes. Empty if nothing is mixed.
    pub targets: Vec<f32>,
    /// The samples' indices in the data set, (N), by which a program can look up targets of its own: of whole images.
    /// Where an image was cropped, mirrored or mixed, positions in it are elsewhere, and nothing says where.
    pub samples: Vec<usize>,
    /// The images that could not be decoded. Their slots hold other samples.
    pub skipped: Vec<Skipped>,
}

impl Batch {
    /// Which slots an evaluation counts, (N): those that hold a sample of their own.
    pub fn counted(&self) -> Vec<bool> {
        let mut counted = vec![true; self.shape[0]];
        self.skipped.iter().for_each(|skipped| counted[skipped.slot] = false);
        counted
    }

    /// The slots of part `part` of `parts`; if they do not divide evenly, the first parts have one more each. Panics if
    /// `parts` is 0.
    pub fn slots(&self, part: usize, parts: usize) -> Range<usize> {
        let (each, more) = (self.shape[0] / parts, self.shape[0] % parts);
        let start = |part: usize| part * each + part.min(more);
        start(part)..start(part + 1)
    }

    /// Part `part` of `parts`, which goes through a model by itself; the first of one is the whole batch. Panics if
    /// `parts` is 0, or the batch has no such part, or it has [fewer images or targets](Self::is_whole) than its shape
    /// says.
    pub fn part(&self, part: usize, parts: usize) -> MicroBatch<'_> {
        let (slots, [count, height, width, channels]) = (self.slots(part, parts), self.shape);
        let of = |row: usize| slots.start * row..slots.end * row;
        let classes = self.targets.len() / count.max(1);
        let targets = match self.targets.is_empty() {
            true if self.labels.is_empty() => Targets::Classes(&[]),
            true => Targets::Classes(&self.labels[slots.clone()]),
            false => Targets::Distributions(&self.targets[of(classes)], [slots.len(), classes]),
        };
        let images = &self.images[of(height * width * channels)];
        MicroBatch { images, shape: [slots.len(), height, width, channels], targets }
    }

    /// Whether there are as many images, labels (if any) and targets (if any) as the shape says.
    pub fn is_whole(&self) -> bool {
        let count = self.shape[0];
        let numbers = self.shape.iter().try_fold(1, |numbers: usize, &extent| numbers.checked_mul(extent));
        numbers == Some(self.images.len())
            && (self.labels.is_empty() || self.labels.len() == count)
            && self.targets.len().is_multiple_of(count.max(1))
    }

    /// The floats of the image in a slot, (H, W, 3). Panics when there is no such slot.
    pub fn image(&self, slot: usize) -> &[f32] {
        let len = self.shape[1..].iter().product::<usize>();
        &self.images[slot * len..(slot + 1) * len]
    }
}

/// A part of a batch: see [`Batch::part`].
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'b> {
    /// The images, (N, H, W, 3).
    pub images: &'b [f32],
    /// `[N, H, W, 3]`.
    pub shape: [usize; 4],
    /// What a model is to say of them.
    pub targets: Targets<'b>,
}

/// What a model is to learn to say of images.
#[derive(Clone, Copy, Debug)]
pub enum Targets<'b> {
    /// Their classes, (N).
    Classes(&'b [u32]),
    /// Of mixed images: for each a distribution over the classes, (N, K), and `[N, K]`.
    Distributions(&'b [f32], [usize; 2]),
}

/// An image that could not be decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Its slot in the batch, which now holds another sample. An evaluation leaves this slot out of its counts.
    pub slot: usize,
    /// Its number in the data set.
    pub sample: usize,
    /// Whether the epoch has met it before, where it shows samples more than once: then it is not counted again.
    pub again: bool,
    /// The failure, with the file's path.
    pub reason: String,
}
