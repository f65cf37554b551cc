//! State_dicts of others: their names without what wraps the model, and which of the named models they are of.

use crate::biformer::BiFormer;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::files::TensorFile;
use crate::presets::{PRESETS, Preset};
use crate::weights::{BESIDE_DENSE, HEAD};
use tensor::{DType, Shape};

/// What wrappers put before all names: DataParallel and AveragedModel, torch.compile, and Lightning.
const WRAPPERS: [&str; 3] = ["module.", "_orig_mod.", "model."];
/// What PyTorch's AveragedModel has beside the tensors of the model that it wraps.
const AVERAGED: &str = "n_averaged";
/// What programs for detection and segmentation put before the names of a backbone, beside which they have heads.
const BACKBONE: &str = "backbone.";

impl TensorFile {
    /// A state_dict under its model's own names: without the `module.` (DataParallel, AveragedModel), `_orig_mod.`
    /// (torch.compile) or `model.` (Lightning) that stands before all names where the model was wrapped. Of a detector
    /// or segmenter, whose backbone's names begin with `backbone.`, the backbone alone is taken.
    pub fn unwrapped(mut self) -> Self {
        if self.tensors.keys().all(|name| name == AVERAGED || name.starts_with("module.")) {
            self.tensors.remove(AVERAGED);
        }
        let wraps = |wrapper: &&str, file: &Self| file.tensors.keys().all(|name| name.starts_with(wrapper));
        while let Some(wrapper) = WRAPPERS.iter().find(|wrapper| !self.tensors.is_empty() && wraps(wrapper, &self)) {
            self.keep_within(wrapper);
        }
        if self.tensors.keys().any(|name| name.starts_with(BACKBONE)) {
            self.keep_within(BACKBONE);
        }
        self
    }

    /// Leaves the tensors whose names begin with a prefix, without it.
    fn keep_within(&mut self, prefix: &str) {
        let tensors = std::mem::take(&mut self.tensors).into_iter();
        self.tensors = tensors.filter_map(|(name, it)| Some((name.strip_prefix(prefix)?.to_owned(), it))).collect();
    }

    /// The number of classes of a state_dict's head, if it has one. An empty tensor is none: its shape may claim any
    /// number, whereas of other tensors a file has no more than it has room for.
    pub fn head_classes(&self) -> Option<usize> {
        let shape = self.tensors.get("head.weight")?.shape();
        shape.first().copied().filter(|_| shape.count() > 0)
    }
}

/// The named model whose tensors, with their shapes, are exactly those of a state_dict, except that its head may be for
/// any number of classes, or missing, with the norm before it, too, in a dense backbone, and that numbers of batches
/// may be missing. Fields that no weight depends on (k, the number of regions, padding) cannot be recognised. Errors:
/// those of [`BiFormer::blank`].
pub fn recognised(file: &TensorFile) -> Result<Option<&'static Preset>> {
    let classes = file.head_classes();
    let apart: &[&str] = match classes {
        Some(_) => &[],
        None if file.tensors.contains_key("norm.weight") => &[HEAD],
        None => &BESIDE_DENSE,
    };
    let shapes = |file: &TensorFile| -> Vec<(String, Shape)> {
        let counts = |name: &str| {
            !name.ends_with(".num_batches_tracked") && !apart.iter().any(|beside| name.starts_with(beside))
        };
        let essential = file.tensors.iter().filter(|(name, _)| counts(name));
        essential.map(|(name, tensor)| (name.clone(), tensor.shape().clone())).collect()
    };
    // Each block has one such norm; the last one's is as wide as its stage.
    let norms = || file.tensors.iter().filter(|(name, _)| name.ends_with(".norm1.weight"));
    let (blocks, width) = (norms().count(), norms().next_back().and_then(|(_, norm)| norm.shape().last()));
    for preset in PRESETS {
        let config = preset.config();
        let config = ModelConfig { num_classes: classes.unwrap_or(config.num_classes), ..config };
        // Checked before a model of that size is built.
        let deep = blocks == config.depth.iter().sum::<usize>();
        let wide = width == config.embed_dim.last();
        if deep && wide && shapes(&BiFormer::blank(&config, DType::F32)?.state_dict()?) == shapes(file) {
            return Ok(Some(preset));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::Tensor;

    #[test]
    fn state_dicts_are_recognised_by_their_tensors() -> Result<()> {
        for name in ["nano", "micro", "tiny", "small", "stl", "stl_nchw"] {
            let config = ModelConfig { num_classes: 7, ..crate::preset(name)?.config() };
            let mut file = BiFormer::blank(&config, DType::F32)?.state_dict()?;
            assert_eq!(recognised(&file)?.map(|preset| preset.name), Some(name));
            file.tensors.retain(|name, _| !name.ends_with("num_batches_tracked"));
            assert_eq!(recognised(&file)?.map(|preset| preset.name), Some(name), "without numbers of batches");
            let mut headless = file.clone();
            headless.tensors.retain(|name, _| !name.starts_with(HEAD));
            assert_eq!(recognised(&headless)?.map(|preset| preset.name), Some(name), "without a head");
            let mut dense = headless.clone();
            dense.tensors.retain(|name, _| !name.starts_with("norm."));
            dense.tensors.insert("extra_norms.0.weight".into(), Tensor::full([8], 0f32));
            assert_eq!(recognised(&dense)?.map(|preset| preset.name), Some(name), "as a dense backbone");
            headless.tensors.remove("norm.bias");
            assert!(recognised(&headless)?.is_none(), "{name} without a head and one more of its tensors");
            let bias = file.tensors.remove("head.bias").unwrap();
            assert!(recognised(&file)?.is_none(), "{name} without one of its tensors");
            file.tensors.insert("head.bias".into(), Tensor::full([8], 0f32));
            assert!(recognised(&file)?.is_none(), "{name} with a tensor of another shape");
            file.tensors.insert("head.bias".into(), bias);
            file.tensors.insert("another".into(), Tensor::full([8], 0f32));
            assert!(recognised(&file)?.is_none(), "{name} with one more");
        }
        assert!(recognised(&TensorFile::default())?.is_none());
        // Whoever names a billion classes needs many gigabytes.
        let claim = Tensor::full([1 << 30, 0], 0f32);
        let file = TensorFile { tensors: [("head.weight".to_owned(), claim)].into(), ..TensorFile::default() };
        assert_eq!((file.head_classes(), recognised(&file)?.is_none()), (None, true));
        Ok(())
    }
}
