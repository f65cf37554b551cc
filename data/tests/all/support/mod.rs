//! Small data sets on disk and in memory for the tests.

pub mod loading;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::{Dataset, Error, InMemory, Split, Statistics, open};
use image::{ImageFormat, RgbImage};

/// Statistics under which a byte `b` becomes the float `b / 255`.
pub const PLAIN: Statistics = Statistics { mean: [0.0; 3], std: [1.0; 3] };

/// CIFAR-10 in its official layout, with `records` records a file. Record `r` of any file has label `r % 10` and
/// red = r, green = the pixel's row, blue = the pixel's column.
pub fn write_cifar10(root: &Path, records: usize) -> PathBuf {
    let folder = root.join("cifar-10-batches-bin");
    fs::create_dir_all(&folder).unwrap();
    let bytes: Vec<u8> = (0..records).flat_map(|r| record(&[(r % 10) as u8], r as u8)).collect();
    for file in (1..=5).map(|batch| format!("data_batch_{batch}.bin")).chain(["test_batch.bin".to_owned()]) {
        fs::write(folder.join(file), &bytes).unwrap();
    }
    let names = "airplane automobile bird cat deer dog frog horse ship truck".replace(' ', "\n");
    fs::write(folder.join("batches.meta.txt"), names + "\n\n").unwrap();
    folder
}

/// CIFAR-100 likewise: record `r` has coarse label `r % 20` and fine label `r % 100`.
pub fn write_cifar100(root: &Path, records: usize) -> PathBuf {
    let folder = root.join("cifar-100-binary");
    fs::create_dir_all(&folder).unwrap();
    let bytes: Vec<u8> = (0..records).flat_map(|r| record(&[(r % 20) as u8, (r % 100) as u8], r as u8)).collect();
    for file in ["train.bin", "test.bin"] {
        fs::write(folder.join(file), &bytes).unwrap();
    }
    let names: String = (0..100).map(|class| format!("class{class}\n")).collect();
    fs::write(folder.join("fine_label_names.txt"), names).unwrap();
    folder
}

fn record(labels: &[u8], red: u8) -> Vec<u8> {
    let mut record = labels.to_vec();
    record.extend([red; 1024]);
    record.extend((0..1024).map(|pixel| (pixel / 32) as u8));
    record.extend((0..1024).map(|pixel| (pixel % 32) as u8));
    record
}

/// A picture of one colour, in the format that the path's extension names.
pub fn write_picture(path: &Path, width: u32, height: u32, colour: [u8; 3]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    RgbImage::from_pixel(width, height, image::Rgb(colour)).save(path).unwrap();
}

/// An image folder: classes `cat` and `dog`, each with `train` training images and one validation image.
pub fn write_folder(root: &Path, train: u8) {
    for (class, base) in [("dog", 100), ("cat", 10)] {
        for number in 0..train {
            write_picture(&root.join(format!("train/{class}/{number:03}.png")), 40, 48, [base, number, 0]);
        }
        write_picture(&root.join(format!("val/{class}/one.jpg")), 40, 48, [base, 0, 0]);
    }
}

/// The error of opening a data set.
pub fn fails(source: &Path, split: Split) -> Error {
    open(source.to_str().unwrap(), split).err().expect("an error")
}

/// The bytes of a picture with some texture.
pub fn textured(width: u32, height: u32, format: ImageFormat) -> Vec<u8> {
    let picture = RgbImage::from_fn(width, height, |x, y| image::Rgb([(x * 7) as u8, (y * 5) as u8, (x * y) as u8]));
    let mut bytes = std::io::Cursor::new(Vec::new());
    picture.write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

/// A chunk of a PNG.
pub fn png_chunk(name: &[u8; 4], content: &[u8]) -> Vec<u8> {
    let named = [name, content].concat();
    let (length, checksum) = (content.len() as u32, crc32fast::hash(&named));
    [&length.to_be_bytes()[..], &named, &checksum.to_be_bytes()].concat()
}

/// `len` images of 32x32 in memory; every byte of image `i` is `i % 256`, its label `i % 10`.
pub fn in_memory(len: usize) -> Arc<dyn Dataset> {
    let classes = (0..10).map(|class| class.to_string()).collect();
    let pixels = (0..len).flat_map(|i| std::iter::repeat_n(i as u8, 32 * 32 * 3)).collect();
    let labels = (0..len).map(|i| (i % 10) as u32).collect();
    Arc::new(InMemory::new("test", classes, PLAIN, 32, pixels, labels).unwrap())
}
