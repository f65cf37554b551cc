//! How a run that cannot continue reports its error, with advice on how to resume it.

use super::Trainer;
use crate::paths::quoted;
use anyhow::{Error, anyhow};
use std::path::Path;

impl Trainer {
    /// Ends a run with this error: saves the progress if that is possible and useful, and adds advice to the error.
    pub(super) fn end_with(&self, error: Error) -> Error {
        let folder = self.folder.argument();
        if failed_gpu(&error) && self.folder.checkpoint().exists() {
            let block = self.learner.config().recompute.advice(" --recompute block");
            let (less, other) = match lacks_memory(&error) {
                true => (block, ", or begin again with a smaller --batch-size and another --out"),
                false => ("", ""),
            };
            // Progress since the last checkpoint was in the GPU's memory, and is lost.
            return anyhow!(
                "{error:#}; what was saved before is unharmed: go on with --resume{less} --out {folder}{other}"
            );
        }
        // An error of the data does not affect what has been learned, so that is saved.
        let Some(cause) = error.downcast_ref::<data::Error>() else { return error };
        if let Err(failed) = self.save() {
            return anyhow!("{error:#}; and what was done since the last checkpoint could not be saved: {failed:#}");
        }
        let remedy = match cause {
            data::Error::TooManyBadImages { .. } => " with --set max_bad_images=N",
            _ => "",
        };
        let (all, kept) = match cause {
            data::Error::TooManyBadImages { .. } | data::Error::NoGoodImage { .. } => {
                (self.check_names_all(), " without taking images away")
            }
            _ => (String::new(), ""),
        };
        anyhow!(
            "{error:#}{remedy}{all}; what was done is saved: mend this{kept}, and go on with --resume --out {folder}"
        )
    }

    /// Which command names all images that cannot be read, where they are in a folder.
    fn check_names_all(&self) -> String {
        let data = &self.learner.config().data;
        if Path::new(data).is_dir() {
            format!(" (biformer check --data {} names all of them)", quoted(data))
        } else {
            String::new()
        }
    }
}

/// Whether a GPU failed or ran out of memory, whichever crate's error says so.
pub(super) fn failed_gpu(error: &Error) -> bool {
    lacks_memory(error) || matches!(of_tensors(error), Some(tensor::Error::Gpu { .. }))
}

/// Whether a GPU had no room.
pub(super) fn lacks_memory(error: &Error) -> bool {
    matches!(of_tensors(error), Some(tensor::Error::OutOfMemory { .. }))
}

/// What a tensor operation reported, whichever error wraps it.
fn of_tensors(error: &Error) -> Option<&tensor::Error> {
    use autograd::Error::Tensor;
    error.chain().find_map(|cause| {
        if let Some(model::Error::Engine(Tensor(error))) = cause.downcast_ref() {
            return Some(error);
        }
        if let Some(Tensor(error)) = cause.downcast_ref() {
            return Some(error);
        }
        if let Some(optim::Error::Autograd(Tensor(error)) | optim::Error::Tensor(error)) = cause.downcast_ref() {
            return Some(error);
        }
        cause.downcast_ref()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_fails_whoever_says_so() {
        let full = || tensor::Error::OutOfMemory {
            what: "f32 (9)".into(),
            bytes: Some(36),
            in_use: Some(1),
            total: 2,
            free: 1,
        };
        let broken = || tensor::Error::Gpu { device: "cuda".into(), message: "unspecified launch failure".into() };
        let said = |error: fn() -> tensor::Error| -> [Error; 6] {
            let engine = autograd::Error::from(error());
            let errors: [Error; 6] = [
                error().into(),
                engine.clone().into(),
                model::Error::from(engine.clone()).into(),
                // From a block that the backward pass computes again.
                autograd::Error::from(model::Error::from(engine.clone())).into(),
                optim::Error::from(engine).into(),
                optim::Error::from(error()).into(),
            ];
            errors.map(|error| error.context("step 7"))
        };
        for (error, of_memory, of_gpu) in [
            (full as fn() -> _, true, true),
            (broken, false, true),
            (|| tensor::Error::Shared { op: "test" }, false, false),
        ] {
            assert_eq!(said(error).map(|error| lacks_memory(&error)), [of_memory; 6]);
            assert_eq!(said(error).map(|error| failed_gpu(&error)), [of_gpu; 6]);
        }
    }
}
