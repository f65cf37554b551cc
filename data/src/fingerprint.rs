//! Fingerprints, by which a data set is recognised.

use std::path::{Component, Path};

use crc32fast::Hasher;

use crate::Dataset;

/// A checksum of a data set's samples in order: their number, their labels and the names of their files, as far as
/// these are known without reading one. Moving the folder does not change it, and pixels are not looked at.
pub fn fingerprint(dataset: &dyn Dataset) -> String {
    let mut summed = Hasher::new();
    let mut number = |number: u64| summed.update(&number.to_le_bytes());
    number(dataset.len() as u64);
    dataset.labels().unwrap_or_default().iter().for_each(|&label| number(label.into()));
    let paths = || (0..dataset.len()).filter_map(|sample| dataset.path(sample));
    let above = shared(paths());
    for path in paths() {
        for part in path.components().skip(above) {
            summed.update(part.as_os_str().as_encoded_bytes());
            summed.update(b"/");
        }
        summed.update(b"\n");
    }
    format!("{:08x}", summed.finalize())
}

/// How many folders all paths begin with.
fn shared<'p>(mut paths: impl Iterator<Item = &'p Path>) -> usize {
    let folder = paths.next().and_then(Path::parent);
    let mut above: Vec<Component> = folder.map_or_else(Vec::new, |folder| folder.components().collect());
    for path in paths {
        let alike = above.iter().zip(path.components()).take_while(|(ours, theirs)| **ours == *theirs).count();
        above.truncate(alike);
    }
    above.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, Result, Sample, Split, Statistics};
    use std::path::PathBuf;

    struct Named(Vec<PathBuf>, Vec<u32>);

    impl Dataset for Named {
        fn name(&self) -> &str {
            "named"
        }
        fn classes(&self) -> &[String] {
            &[]
        }
        fn len(&self) -> usize {
            self.0.len()
        }
        fn get(&self, index: usize) -> Result<Sample> {
            Err(Error::Index { dataset: "named".into(), index, len: 0 })
        }
        fn statistics(&self) -> Statistics {
            Statistics::IMAGENET
        }
        fn labels(&self) -> Option<&[u32]> {
            Some(&self.1)
        }
        fn path(&self, index: usize) -> Option<&Path> {
            self.0.get(index).map(PathBuf::as_path)
        }
    }

    fn of(names: &[&str], labels: &[u32]) -> String {
        fingerprint(&Named(names.iter().map(PathBuf::from).collect(), labels.to_vec()))
    }

    #[test]
    fn the_same_files_elsewhere_are_the_same_and_others_are_not() {
        let ours = of(&["a/pics/cat/1.png", "a/pics/cat/2.png", "a/pics/dog/1.png"], &[0, 0, 1]);
        assert_eq!(ours, of(&["/b/cat/1.png", "/b/cat/2.png", "/b/dog/1.png"], &[0, 0, 1]));
        let others = [
            of(&["a/pics/cat/1.png", "a/pics/cat/3.png", "a/pics/dog/1.png"], &[0, 0, 1]),
            of(&["a/pics/cat/1.png", "a/pics/dog/1.png", "a/pics/dog/2.png"], &[0, 0, 1]),
            of(&["a/pics/cat/1.png", "a/pics/cat/2.png", "a/pics/dog/1.png"], &[0, 1, 1]),
            of(&["a/pics/cat/1.png", "a/pics/cat/2.png"], &[0, 0]),
            of(&[], &[0, 0, 1]),
            of(&[], &[]),
        ];
        assert!(others.iter().all(|theirs| *theirs != ours), "{ours} {others:?}");
    }

    /// By them, existing runs know their data again. (Computed with zlib, in Python.)
    #[test]
    fn fingerprints_stay_what_they_were() {
        assert_eq!(of(&["pics/cat/1.png", "pics/cat/2.png", "pics/dog/1.png"], &[0, 0, 1]), "f0026d28");
        assert_eq!(fingerprint(&*crate::open("embedded", Split::Train).unwrap()), "1deed0da");
    }
}
