//! Any file of weights, whether a run wrote it or not.

use super::best::{BEST, kept_in};
use super::checkpoint::{self, Checkpoint, FILE_NAME, Progress, tensor_names};
use super::class_names::{ClassNames, assumed};
use super::data_facts::DataFacts;
use super::trained::{self, Described};
use crate::config::RunConfig;
use crate::paths::{ensure_expanded, error_of, quoted};
use crate::printing::tell;
use anyhow::{Context, Result, bail};
use data::{class_among, look_alike};
use model::TensorFile;
use std::io;
use std::path::Path;

/// A file of weights.
#[derive(Debug)]
pub enum Stored {
    /// Weights with a description of the run that they are from, and, in a checkpoint, how far it had come.
    Described(Box<Described>, Option<Progress>),
    /// A model's state_dict alone.
    Alone(TensorFile),
}

impl Stored {
    /// Reads a file, or the checkpoint in a run folder. Errors: it cannot be read, is damaged, or holds no weights.
    pub fn read(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { &path.join(FILE_NAME) } else { path };
        let shown = file.display().to_string();
        if !file.try_exists().with_context(|| shown.clone())? {
            let best = path.join(BEST);
            if best.exists() {
                let (best, damaged) = (best.display(), TensorFile::read(&best).err());
                match damaged {
                    None => bail!("{shown}: there is no checkpoint, but that of the best epoch: name {best}"),
                    Some(error) => {
                        bail!("{shown}: there is no checkpoint, nor can that of the best epoch be read: {error}")
                    }
                }
            }
            bail!(
                "{shown}: there is no checkpoint; expected a run folder, the {FILE_NAME} in it, or a model's \
                 state_dict in a safetensors or .pth file"
            );
        }
        let only_to_go_on = |name: &str| [tensor_names::M, tensor_names::V].contains(&name);
        let stored = TensorFile::read_wanted(file, |metadata, name| {
            metadata.get("format").is_none_or(|format| format != checkpoint::FORMAT) || !only_to_go_on(name)
        })?;
        let format = stored.metadata.get("format").map_or("", String::as_str);
        if format == trained::FORMAT {
            let described = Described::parse(file.to_owned(), stored);
            let described = described.with_context(|| format!("{shown}: weights of no use"))?;
            return Ok(Self::Described(described.into(), None));
        }
        // Damaged checkpoints are recognised as well, so that the error is about a checkpoint.
        let by_a_run = format.starts_with("biformer") || stored.tensors.contains_key(tensor_names::M);
        if !(by_a_run || path.is_dir()) {
            return Ok(Self::Alone(stored.unwrapped()));
        }
        let Checkpoint { described, progress } = Checkpoint::parse(file.to_owned(), stored)?;
        Ok(Self::Described(described.into(), Some(progress)))
    }

    /// The weights that a run is to start from, by its setting, if there are any.
    pub(super) fn to_start_from(weights: &str) -> Result<Option<Self>> {
        if weights.is_empty() {
            return Ok(None);
        }
        let path = Path::new(weights);
        ensure_expanded(path).context("weights")?;
        let stored = Self::read(path).map_err(|error| error_of("weights", weights, "", error))?;
        stored.note_better(path, "--weights");
        Ok(Some(stored))
    }

    /// Prints a note if weights other than these may be meant: the run at this path, which `option` names, has not
    /// trained yet or is not done, or it is a run folder, which stands for its last weights, and others in it were
    /// better.
    pub fn note_better(&self, path: &Path, option: &str) {
        let shown = path.display();
        let Self::Described(described, Some(progress)) = self else { return };
        let epoch = progress.epoch();
        if (epoch, progress.batch) == (0, 0) {
            tell!(io::stderr(), "note: {shown}: the run has not taken a step yet: these are its initial weights");
        } else if epoch < described.config.epochs && path.is_dir() {
            tell!(
                io::stderr(),
                "note: {shown}: the run is not done: so far, {epoch} of {} epochs",
                described.config.epochs
            );
        }
        let by = described.config.best_by;
        if let Some(kept) = kept_in(path)
            && let Some(last) = progress.epochs.last()
            && let Some(kept) = progress.epochs.iter().find(|epoch| epoch.epoch == kept)
            && by.prefers(kept, last)
        {
            let (epoch, percent) = (kept.epoch, by.percent(kept));
            let kept = quoted(path.join(BEST).display());
            tell!(
                io::stderr(),
                "note: these are the last epoch's weights; the best, after epoch {epoch} ({percent}): {option} {kept}"
            );
        }
    }

    /// The run that the weights are from, if they say: its configuration, and the facts about its data.
    pub fn described(&self) -> Option<(&RunConfig, &DataFacts)> {
        match self {
            Self::Described(described, _) => Some((&described.config, &described.data)),
            Self::Alone(_) => None,
        }
    }

    /// The names of the classes that the weights' head is for, if they have one: those of weights that name none are
    /// [`assumed`] from these.
    pub(super) fn class_names(&self, classes: &[String]) -> Option<ClassNames> {
        match self {
            Self::Described(described, _) => {
                Some(ClassNames { names: described.data.classes.clone(), assumption: None })
            }
            Self::Alone(file) => file.head_classes().map(|count| assumed(count, classes)),
        }
    }

    /// Why the head of the weights cannot be used as it is for a model of these classes; none if it can. `weights` is
    /// their name in the message.
    pub(super) fn unfit_head(&self, weights: &str, classes: &[String]) -> Option<String> {
        let Some(ClassNames { names, .. }) = self.class_names(classes) else {
            return Some(format!("There is no head in {weights}"));
        };
        if names.len() != classes.len() {
            return Some(format!("The head of {weights} is for {} classes", names.len()));
        }
        let (_, (theirs, ours)) = names
            .iter()
            .zip(classes)
            .enumerate()
            .find(|(place, (theirs, ours))| theirs != ours && class_among(ours, &names) != Some(*place))?;
        let alike =
            if look_alike(theirs, ours) { ": they differ in capitals or in how an accent is stored" } else { "" };
        Some(format!(
            "The head of {weights} is not for these classes in this order (\"{theirs}\", not \"{ours}\"{alike})"
        ))
    }

    /// The weights; averaged, if a run kept an average. Errors: an average that does not fit the model.
    pub fn into_weights(self) -> Result<TensorFile> {
        match self {
            Self::Alone(file) => Ok(file),
            Self::Described(described, _) => Ok(described.into_model()?.model.state_dict()?),
        }
    }
}
