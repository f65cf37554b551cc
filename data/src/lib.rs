//! Data sets, image decoding, augmentation and the prefetching loader.
//!
//! ```
//! use data::{Loader, LoaderConfig, Split, Transform, open};
//! # fn main() -> data::Result<()> {
//! let images = open("embedded", Split::Test)?; // or the path of a folder
//! let transform = Transform::eval(32, images.statistics())?;
//! let batch = Loader::new(images, LoaderConfig::eval(100, transform))?.epoch(0, 0).next().unwrap()?;
//! assert_eq!((batch.shape, batch.labels.len()), ([100, 32, 32, 3], 100));
//! # Ok(())
//! # }
//! ```
//!
//! From a file on disk to the floats of a batch, in the order in which an image passes:
//!
//! | file | what it holds |
//! |---|---|
//! | `picture.rs` | [`Image`], a picture of bytes, (H, W, 3); [`load_image`] decodes one file within fixed limits |
//! | `formats.rs` | what a file tells before it is decoded: whether it is whole, and what memory that takes |
//! | `tiff.rs` | the same of a TIFF file, by its directory, and how its colours are meant |
//! | `room.rs` | memory for large pictures, which threads decode at once |
//! | `dataset.rs` | the [`Dataset`] trait, [`Split`], [`Statistics`], and [`open`] |
//! | `in_memory.rs` | [`InMemory`], the set that lies in memory as a whole |
//! | `embedded.rs` | 6,000 images of CIFAR-10 inside the binary |
//! | `cifar.rs` | the official binary files of CIFAR-10 and CIFAR-100 |
//! | `layout.rs` | which of the layouts a folder has |
//! | `folder/` | image folders: one folder per class, decoded on request |
//! | `among.rs` | [`among`], images of some of a model's classes |
//! | `imagenet.rs` | what ImageNet's classes are called |
//! | `fingerprint.rs` | [`fingerprint`], by which a data set is known again |
//! | `held_out.rs` | which of a folder's images are the test, where the folder does not say |
//! | `listing.rs` | which files in a folder are images, and which are not |
//! | `transform.rs` | [`Transform`], from bytes to normalised floats |
//! | `resample.rs` | how it resizes: to the byte as Pillow does |
//! | `shrink.rs` | [`shrunk`], picture files made smaller once |
//! | `augmentation.rs` | [`Augmentation`], how it varies images for training |
//! | `rand_augment/` | RandAugment: fifteen operations on bytes, and which of them an image undergoes |
//! | `mixing.rs` | images of a batch mixed with one another |
//! | `order.rs` | which samples an epoch shows, and in which order |
//! | `loader.rs` | [`Loader`], which builds batches ahead of their use, in an order that no thread can change |
//! | `job.rs` | how the batches of an epoch are made, on several threads |
//! | `batch.rs` | [`Batch`], what it makes |
//! | `error.rs` | [`Error`], one variant for each kind of failure |
//!
//! Every random choice is a function of (seed, epoch, sample or batch), so the bits of a batch do not depend on how
//! many threads made it or on where in the epoch a resumed run began.
#![forbid(unsafe_code)]

mod among;
mod augmentation;
mod batch;
mod cifar;
mod dataset;
mod embedded;
mod error;
mod fingerprint;
mod folder;
mod formats;
mod held_out;
mod imagenet;
mod in_memory;
mod job;
mod layout;
mod listing;
mod loader;
mod mixing;
mod order;
mod picture;
mod rand_augment;
mod resample;
mod room;
mod shrink;
mod tiff;
mod transform;

pub use among::{among, class_among, look_alike};
pub use augmentation::{Augmentation, Crop, EraseFill, Fill};
pub use batch::{Batch, MicroBatch, Skipped, Targets};
pub use dataset::{Dataset, Sample, Split, Statistics, open, undivided};
pub use error::{Error, Result};
pub use fingerprint::fingerprint;
pub use imagenet::imagenet_classes;
pub use in_memory::InMemory;
pub use listing::{OF_A_RUN, extensions, pictures_below};
pub use loader::{Batches, Loader, LoaderConfig};
pub use picture::{Image, decode_image, load_image, size_of_image};
pub use resample::Filter;
pub use shrink::shrunk;
pub use transform::Transform;
