//! CIFAR-10 and CIFAR-100 in their official binary layout (<https://www.cs.toronto.edu/~kriz/cifar.html>).
//!
//! A file is a row of records: the label bytes (CIFAR-10: the class; CIFAR-100: the coarse, then the fine class),
//! then 3072 bytes of pixels as three planes, (3, 32, 32). The planes are interleaved once, at opening.

use std::io;
use std::path::{Path, PathBuf};
use tensor::memory::reserve;

use crate::picture::read_file;
use crate::{Error, InMemory, Result, Split, Statistics};

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
/// The most records that one file may hold (the official ones hold up to 50,000).
const MAX_RECORDS: usize = 100_000;
/// The longest list of class names that is read, in bytes.
const MAX_NAMES: u64 = 64 << 10;

/// One of the two formats.
pub(crate) struct Format {
    name: &'static str,
    /// What the official archive calls its folder.
    folder: &'static str,
    /// The number of classes that each label byte chooses from. The last one is the label used.
    label_classes: &'static [usize],
    statistics: Statistics,
    /// The files of the training images, that of the test images, and that of the classes' names.
    train: &'static [&'static str],
    test: &'static str,
    names: &'static str,
}

pub(crate) const CIFAR10: Format = Format {
    name: "cifar10",
    folder: "cifar-10-batches-bin",
    label_classes: &[10],
    statistics: Statistics::CIFAR10,
    train: &["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"],
    test: "test_batch.bin",
    names: "batches.meta.txt",
};

pub(crate) const CIFAR100: Format = Format {
    name: "cifar100",
    folder: "cifar-100-binary",
    label_classes: &[20, 100],
    statistics: Statistics::CIFAR100,
    train: &["train.bin"],
    test: "test.bin",
    names: "fine_label_names.txt",
};

impl Format {
    /// The folder that holds it: the official one in `root`, or `root` itself where any of the files lies there. One is
    /// enough to recognise the format, so that a missing one can then be named.
    pub(crate) fn within(&self, root: &Path) -> Option<PathBuf> {
        let inner = root.join(self.folder);
        if inner.is_dir() {
            return Some(inner);
        }
        let mut files = self.train.iter().chain([&self.test, &self.names]);
        files.any(|file| root.join(file).exists()).then(|| root.to_owned())
    }

    /// Reads one split from the folder with the files.
    ///
    /// Errors: [`Error::Missing`], [`Error::Truncated`], [`Error::Label`], [`Error::Unsupported`] or [`Error::Io`],
    /// with the file and, where there is one, the record; [`Error::Lacking`] for other splits than train and test.
    pub(crate) fn open(&self, folder: &Path, split: Split) -> Result<InMemory> {
        let files = match split {
            Split::Train => self.train,
            Split::Test => &[self.test],
            Split::Val | Split::All => return Err(Error::no_split(folder, split)),
        };
        let classes = self.class_names(&folder.join(self.names))?;
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        // Reserved at once, because a growing vector would need the memory twice; and fallibly, because a lack of
        // memory is no reason to abort.
        let size = |file: &&str| folder.join(file).metadata().map_or(0, |file| file.len() as usize);
        let room = reserve(&mut pixels, files.iter().map(size).sum());
        room.map_err(io::Error::from).map_err(Error::io(folder))?;
        for file in files {
            self.append(&folder.join(file), &mut pixels, &mut labels)?;
        }
        InMemory::new(self.name, classes, self.statistics, SIDE, pixels, labels)
    }

    fn class_names(&self, path: &Path) -> Result<Vec<String>> {
        let bytes = read_file(path, MAX_NAMES, "the list of class names")?;
        let text = String::from_utf8_lossy(&bytes);
        // Some editors begin a text with a mark of its encoding.
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let names: Vec<String> =
            text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
        let expected = self.label_classes[self.label_classes.len() - 1];
        if names.len() != expected {
            let (expected, got) = (format!("{expected} class names, one a line"), format!("{}", names.len()));
            return Err(Error::Truncated { path: path.to_owned(), expected, got });
        }
        if let Some(name) = names.iter().enumerate().find_map(|(i, name)| names[..i].contains(name).then_some(name)) {
            return Err(Error::Unsupported { path: path.to_owned(), what: format!("it names two classes {name}") });
        }
        Ok(names)
    }

    fn append(&self, path: &Path, pixels: &mut Vec<u8>, labels: &mut Vec<u32>) -> Result<()> {
        let head = self.label_classes.len();
        let length = head + 3 * PLANE;
        let bytes = read_file(path, (MAX_RECORDS * length) as u64, "a binary file of records")?;
        if bytes.is_empty() || !bytes.len().is_multiple_of(length) {
            return Err(Error::Truncated {
                path: path.to_owned(),
                expected: format!("a multiple of {length} bytes, one record or more"),
                got: format!("{} bytes", bytes.len()),
            });
        }
        for (record, bytes) in bytes.chunks_exact(length).enumerate() {
            let (chosen, planes) = bytes.split_at(head);
            for (&label, &classes) in chosen.iter().zip(self.label_classes) {
                if usize::from(label) >= classes {
                    let place = format!("{}, record {record}", path.display());
                    return Err(Error::Label { place, label: u32::from(label), classes });
                }
            }
            labels.push(u32::from(chosen[head - 1]));
            let (red, rest) = planes.split_at(PLANE);
            let (green, blue) = rest.split_at(PLANE);
            pixels.extend(red.iter().zip(green).zip(blue).flat_map(|((&r, &g), &b)| [r, g, b]));
        }
        Ok(())
    }
}
