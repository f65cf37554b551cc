//! How the layout of a data set's folder is recognised.

use std::path::{Path, PathBuf};

use crate::folder::{PARTS, Undivided};
use crate::{Error, Result};

/// What lies in a folder.
pub(crate) enum Layout {
    /// The files of CIFAR-10, in this folder.
    Cifar10(PathBuf),
    /// Those of CIFAR-100.
    Cifar100(PathBuf),
    /// Images in `val/`, `test/` or both, and in most cases also in `train/`.
    Divided,
    /// Images in `train/CLASS/` alone, or in `CLASS/`.
    Undivided(Undivided),
}

impl Layout {
    /// The layout of a folder, if it has one.
    ///
    /// Errors: [`Error::Unsupported`] where it has more than one; those of looking for classes.
    pub fn of(root: &Path) -> Result<Option<Self>> {
        let cifar10 = nested(root, "cifar-10-batches-bin", &["data_batch_1.bin", "test_batch.bin", "batches.meta.txt"]);
        let cifar100 = nested(root, "cifar-100-binary", &["train.bin", "test.bin", "fine_label_names.txt"]);
        let has_parts = PARTS.iter().any(|part| root.join(part.name()).is_dir());
        Ok(match (cifar10, cifar100, has_parts) {
            (Some(folder), None, false) => Some(Self::Cifar10(folder)),
            (None, Some(folder), false) => Some(Self::Cifar100(folder)),
            (None, None, _) => match Undivided::of(root)? {
                Some(undivided) => Some(Self::Undivided(undivided)),
                None => has_parts.then_some(Self::Divided),
            },
            _ => {
                let what = "it holds more than one data set; name the folder of one of them".to_owned();
                return Err(Error::Unsupported { path: root.to_owned(), what });
            }
        })
    }
}

/// The folder that holds `files`: `root/folder`, or `root` itself where one of the files lies there. One file is
/// enough to recognise the layout, so that a missing one can then be named.
fn nested(root: &Path, folder: &str, files: &[&str]) -> Option<PathBuf> {
    let inner = root.join(folder);
    if inner.is_dir() {
        return Some(inner);
    }
    files.iter().any(|file| root.join(file).exists()).then(|| root.to_owned())
}
