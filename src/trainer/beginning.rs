//! How a learner comes to be: with random weights, with those of another run, or as a checkpoint left it.

use super::average::{Average, AverageState};
use super::checkpoint::{Checkpoint, tensor_names};
use super::learner::Learner;
use super::stored::Stored;
use super::trained::Described;
use crate::config::RunConfig;
use crate::printing::plural;
use anyhow::{Context, Error, Result, anyhow, bail};
use autograd::Gradients;
use data::class_among;
use model::BiFormer;
use optim::{AdamW, AdamWState};
use std::collections::BTreeSet;
use tensor::DType;

impl Learner {
    /// A learner at the start of a run, with random weights. Errors: those of the model, the device and the optimiser.
    pub fn new(config: &RunConfig) -> Result<Self> {
        Self::around(BiFormer::new(&config.architecture, config.seed, DType::F32)?, config)
    }

    /// A learner at the start of a run that starts from these weights, which are those that the configuration names.
    /// The head is taken over if it is for these classes, as far as the weights say; otherwise only the classes that it
    /// shares with these are taken over, by name, and the others start random. Errors: weights of another model, of
    /// which `strict_weights` lets none or only some be taken over; random tensors that `freeze` would keep; those of
    /// [`new`](Self::new).
    pub fn from_weights(config: &RunConfig, weights: Stored, classes: &[String]) -> Result<Self> {
        let mut model = BiFormer::new(&config.architecture, config.seed, DType::F32)?;
        let path = &config.weights;
        let unfit_head = weights.unfit_head(path, classes);
        let their_model = weights.described().map(|(theirs, _)| theirs.model.clone());
        let (theirs, assumption) =
            weights.class_names(classes).map_or_else(Default::default, |of| (of.names, of.assumption));
        let weights = weights.into_weights()?;
        let loaded = match (config.strict_weights, &unfit_head) {
            (true, None) => model.load(&weights, path).map(|_| [vec![], vec![]]),
            (true, Some(_)) => model.load_backbone(&weights, path).map(|_| [vec![], vec![]]),
            (false, _) => model.load_fitting(&weights, unfit_head.is_none(), path),
        };
        let [mut random, mut unused] = loaded.map_err(|error| with_way_out(error, config, their_model.as_deref()))?;
        // What their head was learned from may not be there.
        let has_norm = !random.iter().any(|name| name == "norm.weight");
        if unfit_head.is_some() {
            // Of the head more is said below.
            [&mut random, &mut unused].into_iter().for_each(|names| names.retain(|name| !name.starts_with("head.")));
        }
        let mut notes = taken_in_part(path, &random, &unused, &model);
        let Some(reason) = unfit_head else {
            notes.extend(assumption.map(|assumption| format!("{path}: {assumption}")));
            let learner = Self { notes, ..Self::around(model, config)? };
            return learner.ensure_known(&random);
        };
        let place = |class: &String| class_among(class, &theirs).filter(|_| has_norm);
        let from: Vec<Option<usize>> = classes.iter().map(place).collect();
        model.load_classes(&weights, &from)?;
        let (known, all) = (from.iter().flatten().count(), classes.len());
        notes.push(match (known, assumption) {
            (0, _) => format!("{reason}: this model gets a fresh one"),
            (_, Some(assumption)) => format!("{path}: {assumption}"),
            (_, None) => format!("{reason}: this model has {known} of its {all} classes from there"),
        });
        let learner = Self { notes, ..Self::around(model, config)? };
        let layout = learner.model.parameters.layout();
        let frozen = layout.ids().any(|id| layout.is_frozen(id) && layout.name(id).starts_with("head."));
        if frozen && known < all {
            let random = all - known;
            bail!(
                "freeze: {reason}; {random} of this model's {all} classes would stay random; leave the head out of freeze"
            );
        }
        learner.ensure_known(&random)
    }

    /// Errors: one of the tensors that start random is frozen.
    fn ensure_known(self, random: &[String]) -> Result<Self> {
        let layout = self.model.parameters.layout();
        let layer = |name: &str| name.rsplit_once('.').map_or_else(String::new, |(layer, _)| layer.to_owned());
        let frozen: BTreeSet<String> =
            layout.ids().filter(|&id| layout.is_frozen(id)).map(|id| layer(layout.name(id))).collect();
        match random.iter().find(|name| frozen.contains(&layer(name))) {
            Some(name) => bail!("freeze: {name} starts random, and would stay so; leave its part out of freeze"),
            None => Ok(self),
        }
    }

    /// A learner of a blank model, whose weights are not drawn: to measure the memory that a step takes. Errors: those
    /// of [`new`](Self::new).
    pub fn blank(config: &RunConfig) -> Result<Self> {
        Self::around(BiFormer::blank(&config.architecture, DType::F32)?, config)
    }

    /// A learner that goes on where a checkpoint was made, as configured now: device and precision may be others.
    /// Errors: a checkpoint whose tensors do not fit the model, or are not finite; those of [`new`](Self::new).
    pub fn resume(checkpoint: Checkpoint, config: &RunConfig) -> Result<Self> {
        let from = checkpoint.path().display().to_string();
        let Checkpoint { described: Described { mut file, .. }, progress } = checkpoint;
        let mut take =
            |name: &str| file.tensors.remove(name).with_context(|| format!("{from}: there is no tensor {name}"));
        let (steps, updates) = (progress.optimizer_steps, progress.average_updates);
        let moments = AdamWState { steps, m: take(tensor_names::M)?, v: take(tensor_names::V)? };
        let averages = match config.ema.enabled {
            true => {
                let (parameters, statistics) = (take(tensor_names::AVERAGE)?, take(tensor_names::AVERAGE_STATISTICS)?);
                Some(AverageState { updates, parameters, statistics })
            }
            false => None,
        };
        let mut model = BiFormer::blank(&config.architecture, DType::F32)?;
        model.load(&file, &from)?;
        // Before there is more than the model.
        drop(file);
        Self::with_state(model, config, Some(State { moments, averages, from }))
    }

    /// A learner of this model that has made no step.
    fn around(model: BiFormer, config: &RunConfig) -> Result<Self> {
        Self::with_state(model, config, None)
    }

    /// The same, with what an optimiser and an average had learned.
    fn with_state(mut model: BiFormer, config: &RunConfig, state: Option<State>) -> Result<Self> {
        model.freeze(&config.freeze)?;
        let device = config.compute().place(&mut model)?;
        let mut average = match config.ema.enabled {
            true => Some(Average::new(&model, config.ema.settings())?),
            false => None,
        };
        let (parameters, rate_of) = (&model.parameters, |name: &str| config.rate_of(name));
        let optimizer = match state {
            None => AdamW::with_rates(parameters, config.optimizer, rate_of)?,
            Some(State { moments, averages, from }) => {
                if let (Some(average), Some(state)) = (&mut average, averages) {
                    average.restore(state).with_context(|| from.clone())?;
                }
                AdamW::resumed(parameters, config.optimizer, rate_of, moments).context(from)?
            }
        };
        let gradients = Gradients::new(&model.parameters)?;
        let config = config.clone();
        Ok(Self { config, model, device, gradients, optimizer, average, staged: None, profile: None, notes: vec![] })
    }
}

/// Why weights cannot be taken over, and what can be done about it; `theirs` is the name of their model, if they say.
fn with_way_out(error: model::Error, config: &RunConfig, theirs: Option<&str>) -> Error {
    let RunConfig { model, weights, .. } = config;
    let way_out = match config.strict_weights {
        true => "; to take over no more than what fits: --set strict_weights=false",
        false => "; none of them fits",
    };
    match theirs {
        _ if !matches!(error, model::Error::Weights { .. }) => error.into(),
        Some(theirs) if theirs != model => {
            anyhow!("weights {weights}: they are of {theirs}, not of {model}; leave --model out")
        }
        Some(_) => anyhow!("a run has the model of its weights where no other is asked for: {error}{way_out}"),
        None => anyhow!("{error}{way_out}"),
    }
}

/// What is said of tensors of a model that start random, because those of `path` do not fit, and of those that are not
/// used.
fn taken_in_part(path: &str, random: &[String], unused: &[String], model: &BiFormer) -> Vec<String> {
    let layout = model.parameters.layout();
    let is_parameter = |name: &&String| layout.ids().any(|id| layout.name(id) == **name);
    let parameters: Vec<&String> = random.iter().filter(is_parameter).collect();
    let norms = random.iter().filter(|name| name.ends_with(".running_mean")).count();
    let (count, all) = (parameters.len(), layout.ids().count());
    let of_parameters = parameters.first().map(|first| {
        format!(
            "Of {path} {} of {all} parameters are taken over; {count} start random, {first} among them",
            all - count
        )
    });
    let (s, start) = (plural(norms), if norms == 1 { "starts" } else { "start" });
    let of_statistics = (norms > 0).then(|| format!("The running statistics of {norms} BatchNorm{s} {start} afresh"));
    let of_unused = unused.first().map(|first| {
        let (count, s) = (unused.len(), plural(unused.len()));
        format!("Of {path} {count} tensor{s} of another shape or name are not used, {first} among them")
    });
    [of_parameters, of_statistics, of_unused].into_iter().flatten().collect()
}

/// What a run has learned beside a model's weights.
struct State {
    moments: AdamWState,
    averages: Option<AverageState>,
    /// Where it was read.
    from: String,
}
