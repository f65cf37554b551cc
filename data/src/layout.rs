//! How the layout of a data set's folder is recognised.

use std::path::{Path, PathBuf};

use crate::cifar::{CIFAR10, CIFAR100, Format};
use crate::folder::{PARTS, Undivided};
use crate::{Error, Result};

/// What lies in a folder.
pub(crate) enum Layout {
    /// The files of CIFAR-10 or CIFAR-100, in this folder.
    Cifar(&'static Format, PathBuf),
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
        let (cifar10, cifar100) = (CIFAR10.within(root), CIFAR100.within(root));
        let has_parts = PARTS.iter().any(|part| root.join(part.name()).is_dir());
        Ok(match (cifar10, cifar100, has_parts) {
            (Some(folder), None, false) => Some(Self::Cifar(&CIFAR10, folder)),
            (None, Some(folder), false) => Some(Self::Cifar(&CIFAR100, folder)),
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
