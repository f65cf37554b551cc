//! What a user is told of data sets, whichever command uses them.

use crate::printing::tell;
use data::{Dataset, Skipped};
use std::io;

/// What is to be said of data sets, each thing once.
pub fn distinct_notes<'d>(sets: impl IntoIterator<Item = &'d dyn Dataset>) -> Vec<&'d str> {
    let mut notes: Vec<&str> = vec![];
    for note in sets.into_iter().flat_map(Dataset::notes) {
        if !notes.contains(&note.as_str()) {
            notes.push(note);
        }
    }
    notes
}

/// Names an image that could not be decoded.
pub fn warn_of(skipped: &Skipped) {
    tell!(io::stderr(), "skipped image {}: {}", skipped.sample, skipped.reason);
}

/// How many of these images each class has. Labels that are none of the classes' are not counted.
pub fn images_per_class(dataset: &dyn Dataset, images: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let (mut counts, labels) = (vec![0; dataset.classes().len()], dataset.labels().unwrap_or_default());
    for &label in images.into_iter().filter_map(|image| labels.get(image)) {
        if let Some(count) = counts.get_mut(label as usize) {
            *count += 1;
        }
    }
    counts
}

/// The classes of which all images are among these, which cannot be read.
pub fn lost_classes(dataset: &dyn Dataset, unreadable: impl IntoIterator<Item = usize>) -> Vec<&str> {
    let [there, lost] = [images_per_class(dataset, 0..dataset.len()), images_per_class(dataset, unreadable)];
    let classes = dataset.classes().iter().zip(there.iter().zip(&lost));
    classes.filter(|(_, (there, lost))| **there > 0 && there == lost).map(|(class, _)| class.as_str()).collect()
}
