//! Weights in and out, under the names of the reference's state_dict.

use crate::biformer::BiFormer;
use crate::config::Features;
use crate::error::{Error, Result};
use crate::files::TensorFile;
use tensor::{DType, Device, Tensor};

/// What loading did beside what was asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loaded {
    /// The file's head was for another number of classes (this many): the model kept its own, untrained one.
    pub head_replaced: Option<usize>,
    /// Tensors that the model has and the file lacks, and which kept their initial values: of a dense backbone that takes a
    /// classifier's weights, and of layers that came [with](BiFormer::with) the model.
    pub kept_initial: Vec<String>,
}

impl BiFormer {
    /// All weights and running statistics by name, in the machine's memory.
    pub fn state_dict(&self) -> Result<TensorFile> {
        let mut file = TensorFile::default();
        let (layout, parameters) = (self.parameters.layout(), self.parameters.to_device(&Device::Cpu)?);
        for id in layout.ids() {
            file.tensors.insert(layout.name(id).to_owned(), parameters.get(id));
        }
        for running in &self.statistics {
            let name = |field: &str| format!("{}.{field}", running.name);
            file.tensors.insert(name("running_mean"), running.mean.to_device(&Device::Cpu)?);
            file.tensors.insert(name("running_var"), running.variance.to_device(&Device::Cpu)?);
            let batches = u32::try_from(running.batches).unwrap_or(u32::MAX);
            file.tensors.insert(name("num_batches_tracked"), Tensor::scalar(batches));
        }
        Ok(file)
    }

    /// Takes weights over. Every tensor of the model must be there with its shape, and nothing else; otherwise
    /// [`Error::Weights`] lists all differences. [`Error::Unusable`]: a number is not finite in the model's type, or is a
    /// variance below 0. After an error the model is as it was. Exceptions, which are reported: a head for another
    /// number of classes, a classifier's weights for a model without a head, and layers that came [with](Self::with) the model. `path` names the file in errors.
    pub fn load(&mut self, file: &TensorFile, path: &str) -> Result<Loaded> {
        let own = self.state_dict()?;
        let mut loaded = Loaded::default();
        let rows = |file: &TensorFile| file.tensors.get("head.weight").and_then(|head| head.shape().first().copied());
        if let (Some(theirs), Some(ours)) = (rows(file), rows(&own))
            && theirs != ours
        {
            loaded.head_replaced = Some(theirs);
        }
        let apart: &[&str] = match self.config().features {
            Features::Logits if loaded.head_replaced.is_none() => &[],
            Features::Logits | Features::Pooled => &["head."],
            Features::Dense => &["head.", "norm.", "extra_norms."],
        };
        let skipped = |name: &str| apart.iter().any(|part| name.starts_with(part)) || self.is_added(name);
        let mut differences = vec![];
        for (name, tensor) in &own.tensors {
            match file.tensors.get(name) {
                Some(other) if other.shape() == tensor.shape() => {
                    if (other.dtype() == DType::Index) != (tensor.dtype() == DType::Index) {
                        differences.push(format!("{name} is of type {}", other.dtype()));
                    }
                }
                _ if loaded.head_replaced.is_some() && name.starts_with("head.") => {}
                Some(other) => differences.push(format!("{name} is {}, should be {}", other.shape(), tensor.shape())),
                None if skipped(name) => loaded.kept_initial.push(name.clone()),
                None => differences.push(format!("{name} {} is missing", tensor.shape())),
            }
        }
        let surplus = file.tensors.iter().filter(|(name, _)| !own.tensors.contains_key(*name) && !skipped(name));
        differences.extend(surplus.map(|(name, tensor)| format!("{name} {} is not part of the model", tensor.shape())));
        if !differences.is_empty() {
            return Err(Error::Weights { path: path.to_owned(), differences });
        }
        for (name, tensor) in file.tensors.iter().filter(|(name, _)| own.tensors.contains_key(*name)) {
            if tensor.dtype() == DType::Index {
                continue;
            }
            let unusable = |x: f64| !x.is_finite() || (x < 0.0 && name.ends_with(".running_var"));
            // As the model will have them: a number may be too large for its type.
            if let Some(number) = tensor.cast(self.parameters.layout().dtype())?.find(unusable)? {
                return Err(Error::Unusable { path: path.to_owned(), tensor: name.clone(), number });
            }
        }
        drop(own);
        self.assign(file, loaded.head_replaced.is_some())?;
        Ok(loaded)
    }

    fn assign(&mut self, file: &TensorFile, keep_head: bool) -> Result<()> {
        let layout = self.parameters.layout().clone();
        for id in layout.ids() {
            let name = layout.name(id);
            if keep_head && name.starts_with("head.") {
                continue;
            }
            if let Some(tensor) = file.tensors.get(name) {
                self.parameters.set(id, &tensor.cast(layout.dtype())?)?;
            }
        }
        for running in &mut self.statistics {
            let get = |field: &str| file.tensors.get(&format!("{}.{field}", running.name));
            if let (Some(mean), Some(variance), Some(batches)) =
                (get("running_mean"), get("running_var"), get("num_batches_tracked"))
            {
                let batches = u64::from(batches.item::<u32>()?);
                let device = running.mean.device();
                let own = |tensor: &Tensor| tensor.cast(layout.dtype())?.to_device(&device);
                (running.mean, running.variance) = (own(mean)?, own(variance)?);
                running.batches = batches;
            }
        }
        Ok(())
    }
}
