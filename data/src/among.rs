//! Images of some of a model's classes.

use crate::{Dataset, Error, Result, Sample, Statistics};
use std::path::Path;
use std::sync::Arc;

/// A data set with its labels renumbered as indices into `classes`, which must contain all of the data set's class
/// names, in any order, and may contain more.
pub fn among(dataset: Arc<dyn Dataset>, classes: &[String]) -> Result<Arc<dyn Dataset>> {
    if dataset.classes() == classes {
        return Ok(dataset);
    }
    let unknown: Vec<String> = dataset.classes().iter().filter(|name| !classes.contains(name)).cloned().collect();
    if !unknown.is_empty() {
        return Err(Error::UnknownClasses { names: unknown, classes: classes.to_vec() });
    }
    let place = |name: &String| classes.iter().position(|class| class == name).map(|place| place as u32);
    let places: Vec<u32> = dataset.classes().iter().filter_map(place).collect();
    let among = |label: &u32| places.get(*label as usize).copied();
    let labels = dataset.labels().and_then(|labels| labels.iter().map(among).collect());
    Ok(Arc::new(Among { dataset, classes: classes.to_vec(), places, labels }))
}

struct Among {
    dataset: Arc<dyn Dataset>,
    classes: Vec<String>,
    /// The index in `classes` of each class of the data set.
    places: Vec<u32>,
    labels: Option<Vec<u32>>,
}

impl Dataset for Among {
    fn name(&self) -> &str {
        self.dataset.name()
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let Sample { image, label } = self.dataset.get(index)?;
        let place = self.places.get(label as usize);
        let wrong =
            || Error::Label { place: format!("{}, sample {index}", self.name()), label, classes: self.places.len() };
        Ok(Sample { image, label: *place.ok_or_else(wrong)? })
    }

    fn statistics(&self) -> Statistics {
        self.dataset.statistics()
    }

    fn labels(&self) -> Option<&[u32]> {
        self.labels.as_deref()
    }

    fn path(&self, index: usize) -> Option<&Path> {
        self.dataset.path(index)
    }

    fn is_held_out(&self) -> bool {
        self.dataset.is_held_out()
    }

    fn notes(&self) -> &[String] {
        self.dataset.notes()
    }
}
