//! What a run that cannot go on says, and how it goes on.

use super::folder::quoted;
use super::{Outcome, Trainer};
use anyhow::{Result, bail};
use std::path::Path;

impl Trainer {
    /// Adds the way out to what ended a run, and saves what was done where that is worth it.
    pub(super) fn explained(&self, error: anyhow::Error) -> Result<Outcome> {
        let folder = self.folder.argument();
        if failed_gpu(&error) && self.folder.checkpoint().exists() {
            // What was done since the last checkpoint lay in its memory.
            bail!("{error:#}; what was saved before is unharmed: go on with --resume --out {folder}");
        }
        // Images that cannot be read take nothing from what has been learned.
        let error = error.downcast::<data::Error>()?;
        self.save()?;
        let remedy = match error {
            data::Error::TooManyBadImages { .. } => " with --set max_bad_images=N",
            _ => "",
        };
        let all = match error {
            data::Error::TooManyBadImages { .. } | data::Error::NoGoodImage { .. } => self.check_names_all(),
            _ => String::new(),
        };
        bail!("{error}{remedy}{all}; what was done is saved: mend this, and go on with --resume --out {folder}")
    }

    /// Which command names all images that cannot be read, where they are in a folder.
    fn check_names_all(&self) -> String {
        let data = &self.config.data;
        if Path::new(data).is_dir() {
            format!(" (biformer check --data {} names all of them)", quoted(data))
        } else {
            String::new()
        }
    }
}

/// Whether it was the GPU that failed, whoever asked it for something.
fn failed_gpu(error: &anyhow::Error) -> bool {
    let of_tensors = error.chain().find_map(|cause| match cause.downcast_ref::<autograd::Error>() {
        Some(autograd::Error::Tensor(error)) => Some(error),
        _ => cause.downcast_ref::<tensor::Error>(),
    });
    matches!(of_tensors, Some(tensor::Error::Gpu { .. }))
}
