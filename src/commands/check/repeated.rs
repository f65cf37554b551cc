//! Pictures that are there more than once: in two splits, or in two classes.

use crate::printing::plural;
use data::{Dataset, Image, Split};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

/// An image: the index of its split, and its own index in that split.
type Place = (usize, usize);

/// A checksum of a picture's pixels. Its 64 bits tell millions of them apart.
pub fn checksum(image: &Image) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(image)
}

/// Notes on images with the same checksum as an earlier one that is in another split, where it inflates the test
/// result, or in another class, so that one of the two labels is wrong.
pub fn notes(splits: &[(Split, Arc<dyn Dataset>)], read: &[Vec<data::Result<u64>>]) -> Vec<String> {
    let class = |(split, image): Place| splits[split].1.labels().and_then(|labels| labels.get(image));
    let mut first = HashMap::new();
    // Pairs of duplicates, by the two splits that they are in.
    let (mut in_splits, mut in_classes) = (BTreeMap::<_, Vec<_>>::new(), vec![]);
    for (split, read) in read.iter().enumerate() {
        for (image, checksum) in read.iter().enumerate() {
            let (Ok(checksum), place) = (checksum, (split, image)) else { continue };
            let before: Place = *first.entry(checksum).or_insert(place);
            if before.0 != split {
                in_splits.entry([before.0, split]).or_default().push([before, place]);
            }
            if class(before) != class(place) {
                in_classes.push([before, place]);
            }
        }
    }
    let name = |(split, image): Place| match splits[split].1.path(image) {
        Some(path) => path.display().to_string(),
        None => format!("image {image} of {}", splits[split].0.name()),
    };
    let note = |of: &str, where_else: &str, pairs: &[[Place; 2]]| {
        let (count, [before, place]) = (pairs.len(), pairs[0].map(name));
        let (s, are) = (plural(count), if count == 1 { "is" } else { "are" });
        format!("{count} image{s}{of} {are} in {where_else}, too, the same in each pixel, such as {place} and {before}")
    };
    let mut notes: Vec<String> = in_splits
        .iter()
        .map(|(split, pairs)| {
            let [before, split] = split.map(|split| splits[split].0.name());
            note(&format!(" of {split}"), before, pairs)
        })
        .collect();
    if !in_classes.is_empty() {
        notes.push(note("", "another class", &in_classes));
    }
    notes
}
