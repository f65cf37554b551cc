//! What a data set is, and how one is found on disk.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::layouts;
use crate::folder::ImageFolder;
use crate::layout::Layout;
use crate::{Error, Image, Result, embedded, folder};

/// The part of a data set that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// The training images.
    Train,
    /// The validation images; only image folders may have them.
    Val,
    /// The test images.
    Test,
    /// All images of a folder that does not divide them.
    All,
}

impl Split {
    /// `"train"`, `"val"`, `"test"` or `"all"`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Val => "val",
            Self::Test => "test",
            Self::All => "all",
        }
    }

    /// The split that training evaluates on: for an image folder `val` if it exists, otherwise `test`. If neither
    /// exists, a test split is held out of the training images.
    pub fn evaluated(source: &str) -> Self {
        if source == embedded::SOURCE { Self::Test } else { folder::evaluated(Path::new(source)) }
    }
}

impl FromStr for Split {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let all = [Self::Train, Self::Val, Self::Test, Self::All];
        let found = all.into_iter().find(|split| split.name() == text);
        found.ok_or_else(|| format!("there is no split \"{text}\"; there are train, val, test and all"))
    }
}

/// The mean and the standard deviation of each colour channel (red, green, blue), of pixels scaled to 0..1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// The mean of each channel.
    pub mean: [f32; 3],
    /// The standard deviation of each channel, above 0.
    pub std: [f32; 3],
}

impl Statistics {
    /// Of the 50,000 training images of CIFAR-10.
    pub const CIFAR10: Self = Self { mean: [0.4914, 0.4822, 0.4465], std: [0.2470, 0.2435, 0.2616] };
    /// Of the 50,000 training images of CIFAR-100.
    pub const CIFAR100: Self = Self { mean: [0.5071, 0.4865, 0.4409], std: [0.2673, 0.2564, 0.2762] };
    /// Of ImageNet-1k, as all published BiFormer weights use them.
    pub const IMAGENET: Self = Self { mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225] };
}

/// One labelled image.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The image.
    pub image: Image,
    /// Its class, an index into [`Dataset::classes`].
    pub label: u32,
}

/// Labelled images that can be asked for in any order, from any thread.
pub trait Dataset: Send + Sync {
    /// A short name for messages and reports.
    fn name(&self) -> &str;

    /// The class names; a label is an index into them.
    fn classes(&self) -> &[String];

    /// The number of samples.
    fn len(&self) -> usize;

    /// Whether there is no sample at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sample `index`, the same one each time.
    ///
    /// A loader calls it from several threads. It must not wait for a lock across a call that computes in parallel,
    /// with rayon or in this library: a thread that waits there for others may ask for another sample in the meantime,
    /// and wait for itself.
    ///
    /// Errors: [`Error::Index`] if `index` is not below [`len`](Self::len); for images that are decoded on request,
    /// those of [`load_image`](crate::load_image). A loader ends the epoch with [`Error::Index`], [`Error::Label`] and
    /// [`Error::Other`]; any other error it takes for a fault of the image, in whose place it may show another.
    fn get(&self, index: usize) -> Result<Sample>;

    /// The channel statistics to normalise with.
    fn statistics(&self) -> Statistics;

    /// The labels of all samples, (N), where they are known without reading an image.
    fn labels(&self) -> Option<&[u32]> {
        None
    }

    /// The file of the sample `index`, if each sample is a file of its own.
    fn path(&self, _index: usize) -> Option<&Path> {
        None
    }

    /// Whether these images were [held out](open) of others, because the data set has no test split.
    fn is_held_out(&self) -> bool {
        false
    }

    /// Notes for the user on how the samples were found, one phrase each: for example, that some files were ignored
    /// because they are not images.
    fn notes(&self) -> &[String] {
        &[]
    }
}

/// Opens one split of a data set: `"embedded"`, or a path whose layout is recognised.
///
/// | layout | what is there |
/// |---|---|
/// | CIFAR-10 | `cifar-10-batches-bin/` with `data_batch_1.bin` to `_5.bin`, `test_batch.bin`, `batches.meta.txt` |
/// | CIFAR-100 | `cifar-100-binary/` with `train.bin`, `test.bin`, `fine_label_names.txt` |
/// | image folder | `train/CLASS/*.png`, `.jpg`, `.webp`, `.bmp`, `.tif`, `.ppm`, .., also in folders below `CLASS`, and the same classes, or some of them, in `val/`, `test/` or both; to evaluate on, these suffice |
/// | not divided | only `train/CLASS/`, or none of all this, but two or more `CLASS/` with images: about one in five is held out as the test |
///
/// Errors: [`Error::Missing`] if the path does not exist, [`Error::NoDataset`] if no layout is recognised,
/// [`Error::Lacking`] if there is no such split; [`Error::Unsupported`] if the path is a file or more than one layout
/// is recognised; then whatever reading the layout reports.
pub fn open(source: &str, split: Split) -> Result<Arc<dyn Dataset>> {
    if source == embedded::SOURCE {
        return Ok(Arc::new(embedded::open(split)?));
    }
    let root = Path::new(source);
    if !root.try_exists().map_err(Error::io(root))? {
        let (path, looked_for, help) = (root.to_owned(), "a data set's folder".to_owned(), layouts());
        return Err(Error::Missing { path, looked_for, help });
    }
    if !root.is_dir() {
        let what = "it is a file; name the folder of a data set".to_owned();
        return Err(Error::Unsupported { path: root.to_owned(), what });
    }
    match Layout::of(root)? {
        Some(Layout::Cifar(format, folder)) => Ok(Arc::new(format.open(&folder, split)?)),
        Some(Layout::Undivided(images)) => Ok(Arc::new(ImageFolder::part_of(root, images, split)?)),
        Some(Layout::Divided) if split != Split::Train || root.join(Split::Train.name()).is_dir() => {
            Ok(Arc::new(ImageFolder::divided(root, split)?))
        }
        _ => {
            let python = ["cifar-10-batches-py", "cifar-100-python"].iter().any(|folder| root.join(folder).exists());
            let seen = match python {
                true => "What is there is CIFAR's Python version. ".to_owned(),
                false => folder::nearly(root),
            };
            Err(Error::NoDataset { path: root.to_owned(), seen })
        }
    }
}

/// The folder that holds all classes, if a source does not divide its images into training images and others: its
/// `train/`, or the source itself.
///
/// Errors: those of [`open`].
pub fn undivided(source: &str) -> Result<Option<PathBuf>> {
    let root = Path::new(source);
    if source == embedded::SOURCE || !root.is_dir() {
        return Ok(None);
    }
    Ok(match Layout::of(root)? {
        Some(Layout::Undivided(images)) => Some(images.folder),
        _ => None,
    })
}
