//! Weights in and out, under the names of the published state_dict.

use crate::biformer::BiFormer;
use crate::config::Features;
use crate::error::{Differences, Error, Result};
use crate::files::TensorFile;
use crate::state::{RunningStatistics, STATISTICS};
use autograd::Parameters;
use tensor::{DType, Device, Tensor};

/// What the names of a classifier's head begin with.
pub(crate) const HEAD: &str = "head.";
/// What the names of tensors begin with that the blocks of a dense backbone do without.
pub(crate) const BESIDE_DENSE: [&str; 3] = [HEAD, "norm.", "extra_norms."];

impl TensorFile {
    /// The weights and running statistics of a model, by name, in the machine's memory. On the CPU they share the
    /// model's buffers: as long as they live, it can be neither trained nor loaded ([`tensor::Error::Shared`]). To keep
    /// them, take their [`duplicate`](Self::duplicate). Errors: those of a GPU.
    pub fn of(parameters: &Parameters, statistics: &[RunningStatistics]) -> Result<Self> {
        let mut file = Self::default();
        let (layout, parameters) = (parameters.layout(), parameters.to_device(&Device::Cpu)?);
        for id in layout.ids() {
            file.tensors.insert(layout.name(id).to_owned(), parameters.get(id));
        }
        for running in statistics {
            let batches = u32::try_from(running.batches).unwrap_or(u32::MAX);
            let [mean, variance] = [&running.mean, &running.variance].map(|tensor| tensor.to_device(&Device::Cpu));
            for (field, tensor) in STATISTICS.into_iter().zip([mean?, variance?, Tensor::scalar(batches)]) {
                file.tensors.insert(format!("{}.{field}", running.name), tensor);
            }
        }
        Ok(file)
    }

    /// Writes these tensors to a model's weights and running statistics. Each of the model's must be there with its
    /// shape, and nothing else; otherwise [`Error::Weights`] lists all differences. [`Error::Unusable`]: a number is
    /// not finite in the model's type, or is a variance below 0. [`tensor::Error::Shared`] while a tape or a view of
    /// the weights or the statistics lives. After an error the model is as it was, unless a GPU has failed. `path`
    /// names the file in errors.
    ///
    /// How many batches went into running statistics may be missing, and is then 0, or be a whole number of a float
    /// type: nothing is computed from it, and programs that convert weights often drop it or convert it with them.
    pub fn put(&self, parameters: &mut Parameters, statistics: &mut [RunningStatistics], path: &str) -> Result<()> {
        self.put_except(&|_| false, parameters, statistics, path).map(|_| ())
    }

    /// The same, but tensors of `skipped` names may be missing here, or surplus. The names of those that keep their
    /// values.
    fn put_except(
        &self,
        skipped: &dyn Fn(&str) -> bool,
        parameters: &mut Parameters,
        statistics: &mut [RunningStatistics],
        path: &str,
    ) -> Result<Vec<String>> {
        let own = TensorFile::of(parameters, statistics)?;
        // Statistics are taken over whole, or not at all.
        let in_part = |name: &str| {
            let there = |layer: &str| STATISTICS.iter().any(|of| self.tensors.contains_key(&format!("{layer}.{of}")));
            name.rsplit_once('.').is_some_and(|(layer, field)| STATISTICS.contains(&field) && there(layer))
        };
        let (mut kept, mut differences) = (vec![], Differences::default());
        // Of a model's tensors only the numbers of batches are integers.
        let counts = |name: &str| own.tensors.get(name).is_some_and(|tensor| tensor.dtype() == DType::Index);
        for (name, tensor) in &own.tensors {
            match self.tensors.get(name) {
                Some(other) if other.shape() != tensor.shape() => {
                    differences.unlike.push(format!("{name} is {}, should be {}", other.shape(), tensor.shape()));
                }
                Some(other) if other.dtype() == DType::Index && !counts(name) => {
                    differences.unlike.push(format!("{name} is of integers, should be of floats"));
                }
                Some(_) => {}
                None if skipped(name) && !in_part(name) => kept.push(name.clone()),
                None if counts(name) => {}
                None => differences.missing.push(format!("{name} {} is missing", tensor.shape())),
            }
        }
        let surplus = self.tensors.iter().filter(|(name, _)| !own.tensors.contains_key(*name) && !skipped(name));
        let surplus = surplus.map(|(name, tensor)| format!("{name} {} is not part of the model", tensor.shape()));
        differences.surplus.extend(surplus);
        if !differences.is_empty() {
            return Err(Error::Weights { path: path.to_owned(), differences });
        }
        for (name, tensor) in self.tensors.iter().filter(|(name, _)| own.tensors.contains_key(*name)) {
            let unusable = if counts(name) {
                // Infinity is one that was too large for the type it was converted to.
                tensor.find(|x| x < 0.0 || x != x.trunc())?
            } else {
                let unusable = |x: f64| !x.is_finite() || (x < 0.0 && name.ends_with(".running_var"));
                // As the model will have them: a number may be too large for its type.
                tensor.cast(parameters.layout().dtype())?.find(unusable)?
            };
            if let Some(number) = unusable {
                return Err(Error::Unusable { path: path.to_owned(), tensor: name.clone(), number });
            }
        }
        drop(own);
        self.assign_to(parameters, statistics)?;
        Ok(kept)
    }

    fn assign_to(&self, parameters: &mut Parameters, statistics: &mut [RunningStatistics]) -> Result<()> {
        let layout = parameters.layout().clone();
        // What can be refused is refused before anything is written. All of it is written in place, where work that was
        // recorded reads it.
        let values = statistics.iter().flat_map(|running| [&running.mean, &running.variance]);
        [parameters.flat()].into_iter().chain(values).try_for_each(|values| values.ensure_unique("load"))?;
        let read = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.cast(layout.dtype());
        for id in layout.ids() {
            if let Some(tensor) = self.tensors.get(layout.name(id)) {
                parameters.set(id, &read(tensor)?)?;
            }
        }
        for running in statistics {
            let of_file = STATISTICS.map(|field| self.tensors.get(&format!("{}.{field}", running.name)));
            if let [Some(mean), Some(variance), batches] = of_file {
                running.mean.overwrite(0, &read(mean)?)?;
                running.variance.overwrite(0, &read(variance)?)?;
                running.batches = batches.map_or(Ok(0), batches_in)?;
            }
        }
        Ok(())
    }
}

/// The number of batches that a tensor holds, as an integer or as a float.
fn batches_in(tensor: &Tensor) -> Result<u64> {
    Ok(match tensor.dtype() {
        DType::Index => tensor.item::<u32>()?.into(),
        _ => (tensor.cast(DType::F64)?.item::<f64>()? as u32).into(),
    })
}

impl BiFormer {
    /// All weights and running statistics by name: [`TensorFile::of`], with its errors.
    pub fn state_dict(&self) -> Result<TensorFile> {
        TensorFile::of(&self.parameters, &self.statistics)
    }

    /// Takes weights over. Every tensor of the model must be there with its shape, and nothing else, except as
    /// [`TensorFile::put`] has it; otherwise [`Error::Weights`] lists all differences. [`Error::Unusable`]: a number is
    /// not finite in the model's type, or is a variance below 0. After an error the model is as it was. `path` names
    /// the file in errors.
    ///
    /// The names are those of the model; those of a wrapped one are [unwrapped](TensorFile::unwrapped) first. A model
    /// without a head also loads a classifier's weights. Tensors that the file lacks and that may be missing (a
    /// dense backbone's norms, and layers that came [with](Self::with) the model) keep their initial values; their
    /// names are returned.
    pub fn load(&mut self, file: &TensorFile, path: &str) -> Result<Vec<String>> {
        let apart: &[&str] = match self.config().features {
            Features::Logits => &[],
            Features::Pooled => &[HEAD],
            Features::Dense => &BESIDE_DENSE,
        };
        self.load_except(apart, file, path)
    }

    /// Takes weights over as [`load`](Self::load) does, but for the head: whatever the file has in its place, a
    /// classifier keeps its own. It is what fine-tuning for other classes begins with. Errors: as there.
    pub fn load_backbone(&mut self, file: &TensorFile, path: &str) -> Result<Vec<String>> {
        let mut backbone = file.clone();
        backbone.tensors.retain(|name, _| !name.starts_with(HEAD));
        match self.config().features {
            // A dense backbone has no norm before its head, either.
            Features::Logits if file.head_classes().is_none() && !file.tensors.contains_key("norm.weight") => {
                self.load_except(&BESIDE_DENSE, &backbone, path)
            }
            Features::Logits => self.load_except(&[HEAD], &backbone, path),
            Features::Pooled | Features::Dense => self.load(&backbone, path),
        }
    }

    /// Takes over the tensors that the model has with the same shape, of a file of a model that differs in a part.
    /// Running statistics are taken over whole, or not at all; the head, too, and only where the norm before it is,
    /// unless it is to stay as it is. The names of the model's tensors that keep their values, and of the file's that
    /// are not used. Errors: [`Error::Weights`] if nothing fits; [`Error::Unusable`] as of [`load`](Self::load).
    pub fn load_fitting(&mut self, file: &TensorFile, with_head: bool, path: &str) -> Result<[Vec<String>; 2]> {
        let own = self.state_dict()?;
        let fits = |name: &str| {
            let [theirs, own] = [&file.tensors, &own.tensors].map(|tensors| tensors.get(name));
            theirs.zip(own).is_some_and(|(theirs, own)| theirs.shape() == own.shape())
        };
        let whole = |name: &str| match name.rsplit_once('.') {
            Some((layer, field)) if STATISTICS.contains(&field) => {
                STATISTICS[..2].iter().all(|moment| fits(&format!("{layer}.{moment}")))
            }
            _ => true,
        };
        let [norm, head] = ["norm.weight", "head.weight"].map(fits);
        let with_head = with_head && norm && head && fits("head.bias");
        let mut fitting = file.clone();
        fitting.tensors.retain(|name, _| fits(name) && whole(name) && (with_head || !name.starts_with(HEAD)));
        drop(own);
        if fitting.tensors.is_empty() {
            // For its error, which tells how they differ.
            return self.load(file, path).map(|kept| [kept, vec![]]);
        }
        // Each name begins with nothing.
        let kept = self.load_except(&[""], &fitting, path)?;
        let unused = file.tensors.keys().filter(|name| !fitting.tensors.contains_key(*name));
        Ok([kept, unused.cloned().collect()])
    }

    /// Takes classes over from the head of a file whose backbone has been [loaded](Self::load_backbone): `from` says
    /// for each of this model's classes which one of the file's it is, or that it stays as it is. Nothing happens where
    /// either has no head.
    ///
    /// Errors: [`tensor::Error::Shape`] where the file's head is of another width, or `from` is not of as many classes
    /// as the model has; [`tensor::Error::OutOfRange`] where the file has no such class. After an error the model is as
    /// it was. Numbers are not looked at.
    pub fn load_classes(&mut self, file: &TensorFile, from: &[Option<usize>]) -> Result<()> {
        let layout = self.parameters.layout().clone();
        let mut heads = vec![];
        for id in layout.ids().filter(|&id| layout.name(id).starts_with(HEAD)) {
            let classes = layout.shape(id).first().copied().unwrap_or(0);
            if from.len() != classes {
                let expected = format!("a class or none for each of {classes}");
                return Err(tensor::Error::shape("load_classes", expected, &[from.len()]).into());
            }
            let Some(theirs) = file.tensors.get(layout.name(id)) else { continue };
            let (theirs, own) = (theirs.cast(layout.dtype())?, self.parameters.get(id).to_device(&Device::Cpu)?);
            let bound = theirs.shape().first().copied().unwrap_or(0);
            if let Some(&index) = from.iter().flatten().find(|&&from| from >= bound) {
                let out_of_range = tensor::Error::OutOfRange { op: "load_classes", what: "class", index, bound };
                return Err(out_of_range.into());
            }
            let row = |(class, from): (usize, &Option<usize>)| match *from {
                Some(from) => theirs.slice(0, from..from + 1),
                None => own.slice(0, class..class + 1),
            };
            let rows = from.iter().enumerate().map(row).collect::<tensor::Result<Vec<_>>>()?;
            let head = Tensor::join(&rows)?;
            if head.shape() != layout.shape(id) {
                return Err(tensor::Error::shape("load_classes", layout.shape(id).to_string(), head.shape()).into());
            }
            heads.push((id, head));
        }
        heads.iter().try_for_each(|(id, head)| Ok(self.parameters.set(*id, head)?))
    }

    /// Takes weights over. Tensors whose names begin with one of `apart` may be missing from the file, or surplus in
    /// it.
    fn load_except(&mut self, apart: &[&str], file: &TensorFile, path: &str) -> Result<Vec<String>> {
        let BiFormer { parameters, statistics, added, .. } = self;
        let skipped = |name: &str| apart.iter().any(|part| name.starts_with(part)) || added.contains(name);
        file.put_except(&skipped, parameters, statistics, path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::bf16;
    use tensor::cuda::Gpu;

    #[test]
    fn what_fits_is_taken_over_alone_and_statistics_whole() -> Result<()> {
        let config = crate::preset("nano")?.config();
        let source = BiFormer::new(&config, 1, DType::F32)?;
        let mut file = source.state_dict()?.duplicate()?;
        let moments = |tensor: &mut Tensor| *tensor = Tensor::full(tensor.shape().clone(), 0.5f32);
        file.tensors.iter_mut().filter(|(name, _)| name.contains("running_")).for_each(|(_, tensor)| moments(tensor));
        file.tensors.insert("norm.running_var".into(), Tensor::full([7], 1f32));
        file.tensors.insert("stages.0.0.mlp.0.weight".into(), Tensor::full([7], 1f32));
        file.tensors.insert("another".into(), Tensor::full([7], 1f32));
        let mut model = BiFormer::new(&config, 2, DType::F32)?;
        let before = model.state_dict()?.duplicate()?;
        let [kept, unused] = model.load_fitting(&file, false, "file")?;
        let own = ["head.bias", "head.weight", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var"];
        assert_eq!(kept, [&own[..], &["stages.0.0.mlp.0.weight"]].concat());
        assert_eq!(unused, [&["another"], &own[..], &["stages.0.0.mlp.0.weight"]].concat());
        for (name, tensor) in &model.state_dict()?.tensors {
            let expected = if kept.contains(name) { &before.tensors[name] } else { &file.tensors[name] };
            if tensor.dtype() == DType::Index {
                continue;
            }
            assert!(tensor.cast(DType::F64)?.to_vec::<f64>()? == expected.cast(DType::F64)?.to_vec::<f64>()?, "{name}");
        }
        assert!(!model.load_fitting(&file, true, "file")?[0].contains(&"head.bias".to_owned()));
        // A head is of no use behind other norms.
        file.tensors.insert("norm.weight".into(), Tensor::full([7], 1f32));
        assert!(model.load_fitting(&file, true, "file")?[0].contains(&"head.bias".to_owned()));
        file.tensors.retain(|name, _| name == "another");
        assert!(matches!(model.load_fitting(&file, true, "file"), Err(Error::Weights { .. })));
        Ok(())
    }

    #[test]
    fn the_number_of_batches_may_be_missing_or_a_float() -> Result<()> {
        const NAME: &str = "norm.num_batches_tracked";
        let mut model = BiFormer::new(&crate::preset("nano")?.config(), 0, DType::F32)?;
        let mut file = model.state_dict()?.duplicate()?;
        let mut load = |counted: Option<Tensor>| {
            file.tensors.remove(NAME);
            file.tensors.extend(counted.map(|tensor| (NAME.to_owned(), tensor)));
            let kept = model.load(&file, "file")?;
            assert!(kept.is_empty(), "{kept:?}");
            Ok::<_, Error>(model.statistics.iter().find(|of| of.name == "norm").unwrap().batches)
        };
        let most = u64::from(u32::MAX);
        for (counted, expected) in [
            (Some(Tensor::scalar(7u32)), 7),
            (Some(Tensor::scalar(375_300f32)), 375_300),
            (Some(Tensor::scalar(bf16::from_f32(256.0))), 256),
            (Some(Tensor::scalar(1e300)), most),
            (Some(Tensor::scalar(f32::INFINITY)), most),
            (None, 0),
        ] {
            assert_eq!(load(counted)?, expected);
        }
        for number in [-1.0, 0.5, f64::NEG_INFINITY, f64::NAN] {
            let refused = load(Some(Tensor::scalar(number)));
            assert!(matches!(&refused, Err(Error::Unusable { tensor, .. }) if tensor == NAME), "{number}: {refused:?}");
        }
        assert!(load(Some(Tensor::full([1], 7u32))).unwrap_err().to_string().contains(NAME));
        Ok(())
    }

    /// Neither half of the weights, nor weights that are in use; and tensors may lie anywhere.
    #[test]
    fn weights_are_taken_over_whole_and_in_place() -> Result<()> {
        let config = crate::preset("nano")?.config();
        let (mut model, other) = (BiFormer::new(&config, 0, DType::F32)?, BiFormer::new(&config, 1, DType::F32)?);
        let bits = |model: &BiFormer| {
            model.parameters.flat().to_vec::<f32>().map(|all| all.iter().map(|x| x.to_bits()).collect())
        };
        let (before, expected): (Vec<u32>, Vec<u32>) = (bits(&model)?, bits(&other)?);
        let mut file = other.state_dict()?.duplicate()?;
        for name in ["norm.running_var", "norm.bias"] {
            let tensor = Tensor::full([192], 0.0f32);
            let device = Gpu::for_tests(1).map_or(Device::Cpu, Device::Cuda);
            file.tensors.insert(name.into(), tensor.to_device(&device)?);
        }
        let seen = model.statistics[0].variance.clone();
        let refused = model.load(&file, "file");
        assert!(
            matches!(refused, Err(Error::Engine(autograd::Error::Tensor(tensor::Error::Shared { .. })))),
            "{refused:?}"
        );
        assert_eq!(bits(&model)?, before);
        drop(seen);
        let places = |model: &BiFormer| model.statistics.iter().map(|of| of.mean.buffer_id()).collect::<Vec<_>>();
        let place = places(&model);
        model.load(&file, "file")?;
        assert_eq!(bits(&model)?, expected);
        assert_eq!(places(&model), place);
        let norm = model.statistics.iter().find(|of| of.name == "norm").unwrap();
        assert_eq!(norm.variance.to_vec::<f32>()?, [0.0; 192]);
        Ok(())
    }

    /// Nor weights of integers.
    #[test]
    fn running_statistics_may_not_be_missing() -> Result<()> {
        let mut model = BiFormer::blank(&crate::preset("nano")?.config(), DType::F32)?;
        let mut file = model.state_dict()?.duplicate()?;
        file.tensors.remove("norm.running_var");
        file.tensors.insert("norm.bias".into(), Tensor::full([192], 1u32));
        let said = model.load(&file, "file").unwrap_err().to_string();
        for expected in ["norm.running_var (192) is missing", "norm.bias is of integers, should be of floats"] {
            assert!(said.contains(expected), "{said}");
        }
        Ok(())
    }

    #[test]
    fn of_a_head_without_a_bias_it_is_said_what_to_add() -> Result<()> {
        let mut model = BiFormer::blank(&crate::preset("nano")?.config(), DType::F32)?;
        let mut file = model.state_dict()?;
        for (missing, way_out) in [("head.bias", "add head.bias with zeros"), ("norm.bias", "use the configuration")] {
            file.tensors.remove(missing);
            let said = model.load(&file, "file").unwrap_err().to_string();
            assert!(said.contains("head.bias (10) is missing") && said.contains(way_out), "{said}");
        }
        Ok(())
    }
}
