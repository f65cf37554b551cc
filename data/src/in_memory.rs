//! A data set of small square images that lies in memory as a whole.

use std::fmt;
use std::sync::Arc;

use crate::{Dataset, Error, Image, Result, Sample, Statistics};

/// Square RGB images of one size, one after another in one store, with their labels.
///
/// [`get`](Dataset::get) hands out views of the store: it neither copies nor allocates.
pub struct InMemory {
    name: String,
    classes: Vec<String>,
    statistics: Statistics,
    side: usize,
    pixels: Arc<Vec<u8>>, // (N, side, side, 3)
    labels: Vec<u32>,     // (N)
}

impl fmt::Debug for InMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InMemory")
            .field("name", &self.name)
            .field("images", &self.labels.len())
            .field("side", &self.side)
            .field("classes", &self.classes)
            .finish_non_exhaustive()
    }
}

impl InMemory {
    /// The data set with these `pixels`, (N, side, side, 3), and `labels`, (N).
    ///
    /// Errors: [`Error::Setting`] where `side` is 0, the numbers of pixels and labels do not belong together, or a
    /// label names no class.
    pub fn new(
        name: impl Into<String>,
        classes: Vec<String>,
        statistics: Statistics,
        side: usize,
        pixels: Vec<u8>,
        labels: Vec<u32>,
    ) -> Result<Self> {
        let bytes = [side, side, 3].iter().try_fold(labels.len(), |product, &factor| product.checked_mul(factor));
        if side == 0 || bytes != Some(pixels.len()) {
            let problem = format!("{} bytes are not {} images of {side}x{side}x3", pixels.len(), labels.len());
            return Err(Error::setting("pixels", problem));
        }
        if let Some(label) = labels.iter().find(|&&label| label as usize >= classes.len()) {
            return Err(Error::setting("labels", format!("{label} is outside the {} classes", classes.len())));
        }
        Ok(Self { name: name.into(), classes, statistics, side, pixels: Arc::new(pixels), labels })
    }
}

impl Dataset for InMemory {
    fn name(&self) -> &str {
        &self.name
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let Some(&label) = self.labels.get(index) else {
            return Err(Error::Index { dataset: self.name.clone(), index, len: self.len() });
        };
        let start = index * self.side * self.side * 3;
        Ok(Sample { image: Image::square_within(Arc::clone(&self.pixels), start, self.side), label })
    }

    fn statistics(&self) -> Statistics {
        self.statistics
    }

    fn labels(&self) -> Option<&[u32]> {
        Some(&self.labels)
    }
}
