//! Which samples survive, and where they go.

use crate::dropout::Keep;
use autograd::Result;
use std::ops::Range;
use tensor::rng::Philox;
use tensor::{Device, Error, Shape};

/// The draws for some samples of a batch.
#[derive(Clone)]
pub struct Draws {
    /// Their numbers in the batch.
    pub numbers: Range<usize>,
    pub keep: Keep,
}

impl Draws {
    /// For the samples of an x of this shape; none for p = 0, or where they have no elements.
    pub fn new(shape: &Shape, p: f64, rng: Philox, first: usize) -> Result<Option<Self>> {
        let Some(&samples) = shape.first() else {
            return Err(Error::shape("drop_path", "x (N, ...)", shape).into());
        };
        let Some(keep) = Keep::new("drop_path", p, rng)? else { return Ok(None) };
        let Some(end) = first.checked_add(samples) else {
            let reason = format!("{samples} samples from number {first} on overflow");
            return Err(Error::argument("drop_path", reason).into());
        };
        Ok((!shape.contains(&0)).then_some(Self { numbers: first..end, keep }))
    }

    /// How many samples there are.
    pub fn samples(&self) -> usize {
        self.numbers.len()
    }

    /// Whether each of them survives.
    fn survival(&self) -> impl Iterator<Item = bool> {
        self.numbers.clone().map(|number| self.keep.allows(self.keep.rng.word(number as u64)))
    }

    /// Those that survive, counted from the first of these samples.
    pub fn survivors(&self) -> Vec<usize> {
        self.survival().enumerate().filter_map(|(sample, survives)| survives.then_some(sample)).collect()
    }

    /// Survivors keep their places, scaled; the others are zero.
    pub fn in_place(self, device: &Device) -> Moves {
        if *device != Device::Cpu {
            return Moves::OnGpu(self);
        }
        let rows: Vec<_> = self.survival().enumerate().map(|(sample, survives)| survives.then_some(sample)).collect();
        Moves::Rows { forth: rows.clone(), back: rows, scale: self.keep.scale }
    }

    /// Survivors one after the other, as they are.
    pub fn collected(&self) -> Moves {
        Moves::Rows { forth: self.survivors().into_iter().map(Some).collect(), back: self.ranks(), scale: 1.0 }
    }

    /// What [`collected`](Self::collected) has collected goes back to its places, scaled; the others are zero.
    pub fn spread(&self) -> Moves {
        let back = self.survivors().into_iter().map(Some).collect();
        Moves::Rows { forth: self.ranks(), back, scale: self.keep.scale }
    }

    /// The place of each sample among the survivors.
    fn ranks(&self) -> Vec<Option<usize>> {
        let mut next = 0..;
        self.survival().map(|survives| if survives { next.next() } else { None }).collect()
    }
}

/// Where samples go.
pub enum Moves {
    /// Row r of the result is row `forth[r]` of x times `scale`, or zero; the gradient's rows come from `back`.
    Rows { forth: Vec<Option<usize>>, back: Vec<Option<usize>>, scale: f64 },
    /// Survivors stay in their places, scaled, and the others are zero: a GPU draws itself.
    OnGpu(Draws),
}

impl Moves {
    /// How many samples the result has.
    pub fn samples(&self) -> usize {
        match self {
            Moves::Rows { forth, .. } => forth.len(),
            Moves::OnGpu(draws) => draws.samples(),
        }
    }
}
