//! Images of some of a model's classes.

use crate::imagenet::other_name;
use crate::{Dataset, Error, Result, Sample, Statistics};
use std::path::Path;
use std::sync::Arc;
use unicode_normalization::UnicodeNormalization;

/// The place of a class among others, by its name; a class of ImageNet may have its folder's name (`n01440764`) in one
/// place and its own (`tench`) in the other.
pub fn class_among(name: &str, classes: &[String]) -> Option<usize> {
    let place = |name: &str| classes.iter().position(|class| class == name);
    place(name).or_else(|| place(other_name(name)?))
}

/// Whether two names of classes differ in nothing but capitals, or in how Unicode spells their letters (an archive made
/// on a Mac may have é as two characters).
pub fn look_alike(a: &str, b: &str) -> bool {
    let [a, b] = [a, b].map(|name| name.nfc().collect::<String>().to_lowercase());
    a == b
}

/// A data set with its labels renumbered as indices into `classes`, among which all of the data set's classes must be,
/// in any order ([`class_among`]). Errors: [`Error::UnknownClasses`].
pub fn among(dataset: Arc<dyn Dataset>, classes: &[String]) -> Result<Arc<dyn Dataset>> {
    if dataset.classes() == classes {
        return Ok(dataset);
    }
    let (mut places, mut unknown) = (vec![], vec![]);
    for name in dataset.classes() {
        match class_among(name, classes) {
            Some(place) => places.push(place as u32),
            None => unknown.push(name.clone()),
        }
    }
    if !unknown.is_empty() {
        return Err(Error::UnknownClasses { names: unknown, classes: classes.to_vec() });
    }
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
