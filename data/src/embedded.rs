//! The first images of CIFAR-10, inside the binary, so that the program can train without a download.
//!
//! 5,000 training and 1,000 test images (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009),
//! kept as two PNG sheets of 100 images a row; see `assets/cifar10-mini/ORIGIN.md`.

use std::path::Path;

use crate::picture::decode_image;
use crate::{Error, InMemory, Result, Split, Statistics};

/// The name by which [`open`](crate::open) knows this data set.
pub const SOURCE: &str = "embedded";

const SIDE: usize = 32;
const CLASSES: [&str; 10] = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

macro_rules! asset {
    ($name:literal) => {
        include_bytes!(concat!("../assets/cifar10-mini/", $name))
    };
}

/// Unpacks one split (some 50 ms for the training images).
///
/// Errors: [`Error::Lacking`] for other splits than train and test; those of a damaged asset, but the tests show that
/// there are none.
pub fn open(split: Split) -> Result<InMemory> {
    let (sheet, labels, file): (&[u8], &[u8], _) = match split {
        Split::Train => (asset!("train.png"), asset!("train.labels.txt"), "embedded train.png"),
        Split::Val | Split::All => return Err(Error::no_split(Path::new(SOURCE), split)),
        Split::Test => (asset!("test.png"), asset!("test.labels.txt"), "embedded test.png"),
    };
    let sheet = decode_image(sheet, Path::new(file))?;
    let tiles = (sheet.height() / SIDE) * (sheet.width() / SIDE);
    if tiles != labels.len() {
        let (expected, got) = (format!("{} images", labels.len()), format!("{tiles}"));
        return Err(Error::Truncated { path: file.into(), expected, got });
    }
    let labels = labels.iter().map(|digit| u32::from(digit.wrapping_sub(b'0'))).collect();
    let classes = CLASSES.map(str::to_owned).to_vec();
    let pixels = cut(sheet.pixels(), sheet.width() * 3);
    InMemory::new("cifar10-mini", classes, Statistics::CIFAR10, SIDE, pixels, labels)
}

/// Cuts a sheet, (rows * SIDE, columns * SIDE, 3), into its tiles, (N, SIDE, SIDE, 3), row-major.
fn cut(sheet: &[u8], stride: usize) -> Vec<u8> {
    let mut pixels = Vec::with_capacity(sheet.len());
    for band in sheet.chunks_exact(stride * SIDE) {
        for left in (0..stride).step_by(SIDE * 3) {
            for row in band.chunks_exact(stride) {
                pixels.extend_from_slice(&row[left..left + SIDE * 3]);
            }
        }
    }
    pixels
}
