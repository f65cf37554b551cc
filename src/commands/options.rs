//! Options that several commands take.

use super::set::{Assignments, assignment, changed, fields, is_of_images, run_field};
use crate::config::{Changes, DEFAULT_MODEL, MAX_COUNT, RunConfig, merge};
use crate::paths::read_text;
use crate::printing::tell;
use crate::threads::{MAX_THREADS, pool};
use crate::trainer::stored::Stored;
use crate::trainer::trained::{TrainedModel, name_of};
use anyhow::{Context, Result, bail};
use clap::Args;
use data::{extensions, pictures_below};
use model::{ModelConfig, PRESETS, preset};
use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::{Table, Value};

/// Reads a whole number of a range, or says what is expected.
pub fn whole<T: FromStr + PartialOrd + fmt::Display + Clone>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| format!("expected a whole number from {} to {}", range.start(), range.end()))
    }
}

/// The models by name, in a sentence.
pub fn model_names() -> String {
    let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
    names.join(", ")
}

/// Errors: a number of images per step, or of steps, that is 0 or larger than allowed.
pub fn ensure_count(option: &str, count: usize) -> Result<()> {
    if !(1..=MAX_COUNT).contains(&count) {
        bail!("{option} {count}: expected 1 to {MAX_COUNT}");
    }
    Ok(())
}

/// Which model, and what is different about it.
#[derive(Debug, Args)]
pub struct ModelChoice {
    #[arg(long, value_name = "NAME", default_value = DEFAULT_MODEL, help = format!("The model: {}", model_names()))]
    pub model: String,
    /// Changes a field of the model, for instance --set depth=2,2,2 auto_pad=true.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = assignment)]
    pub set: Vec<String>,
}

impl ModelChoice {
    pub fn config(&self) -> Result<ModelConfig> {
        self.changed(preset(&self.model)?.config())
    }

    /// A model's configuration with the requested changes.
    pub fn changed(&self, config: ModelConfig) -> Result<ModelConfig> {
        changed(&config, &self.set)
    }

    /// The size that is asked for, or the one that the model is meant for.
    pub fn image_size(&self, asked: Option<ImageSize>) -> Result<ImageSize> {
        let usual = preset(&self.model)?.image_size;
        Ok(asked.unwrap_or(ImageSize([usual; 2])))
    }
}

/// Height and width in pixels.
#[derive(Clone, Copy, Debug)]
pub struct ImageSize(pub [usize; 2]);

impl FromStr for ImageSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let side = |side: &str| side.parse().map_err(|_| "expected a side or HxW, such as 224 or 600x500");
        let (height, width) = text.split_once('x').unwrap_or((text, text));
        Ok(Self([side(height)?, side(width)?]))
    }
}

impl fmt::Display for ImageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.0[0], self.0[1])
    }
}

/// The help of the option for the number of threads, of whichever command.
pub const THREADS_HELP: &str = "Threads to compute with, at most 8 per core; 0 takes one per core, or as many as \
    RAYON_NUM_THREADS says. The results have the same bits with any number";

/// How many threads.
#[derive(Clone, Copy, Debug, Args)]
pub struct Threads {
    #[arg(long, value_name = "N", default_value_t = 0, help = THREADS_HELP)]
    threads: usize,
}

impl Threads {
    /// Runs `work` on a pool of this many threads. All computation must run on such a pool: its threads flush denormals
    /// to zero, and others do not.
    pub fn run<R: Send>(self, work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
        if self.threads > MAX_THREADS {
            bail!("--threads {}: expected up to {MAX_THREADS}, or 0 for one per core", self.threads);
        }
        pool(self.threads)?.install(work)
    }
}

fn of_weights() -> String {
    format!(
        "The model that a state_dict is of: {}; by default the one whose tensors it has. Images are then normalised by \
         ImageNet's mean and deviation",
        model_names()
    )
}

/// The pictures in a folder and below it, of which there must be one. Says which files are skipped.
pub fn pictures_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let (pictures, skipped) = pictures_below(folder)?;
    skipped.iter().for_each(|note| tell!(io::stderr(), "note: {note}"));
    if pictures.is_empty() {
        bail!("{}: holds no image ({})", folder.display(), extensions());
    }
    Ok(pictures)
}

/// Where a trained model is stored, and what is to be changed about it.
#[derive(Debug, Args)]
pub struct Trained {
    /// A run folder, the checkpoint in it, or what `export` wrote; or another state_dict, in a safetensors or .pth
    /// file.
    #[arg(long, value_name = "DIR|FILE")]
    pub checkpoint: PathBuf,
    #[arg(long, value_name = "NAME", help = of_weights())]
    model: Option<String>,
    /// Changes a field of the model that no weight depends on, or how images are prepared, for instance --set n_win=8
    /// auto_pad=true preprocessing.eval_crop=1.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = assignment)]
    set: Vec<String>,
    /// The side of the images; by default the one that the model was trained on, or is meant for.
    #[arg(long, value_name = "N")]
    image_size: Option<u32>,
}

impl Trained {
    pub fn load(&self) -> Result<TrainedModel> {
        let Assignments { of_run, of_model } = Assignments::new(&self.set, is_of_images)?;
        let size = self.image_size.map(|size| Value::Integer(size.into()));
        let asked = [("architecture", fields(&of_model)?), ("image_size", size)];
        let mut asked: Table = asked.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
        for entry in &of_run {
            merge(&mut asked, run_field(entry)?)?;
        }
        let mut trained = self.changed(&Changes::gather(None, asked)?)?;
        trained.data.statistics = trained.config.statistics(trained.data.statistics)?;
        Ok(trained)
    }

    fn changed(&self, changes: &Changes) -> Result<TrainedModel> {
        let shown = self.checkpoint.display();
        let stored = Stored::read(&self.checkpoint)?;
        stored.note_better(&self.checkpoint, "--checkpoint");
        match (stored, &self.model) {
            (Stored::Described(mut described, _), asked) => {
                ensure_model(asked.as_deref(), &described.config, &shown)?;
                described.config = described.config.of_trained(changes)?;
                described.into_model()
            }
            (Stored::Alone(file), asked) => {
                let way_out = format!(
                    "; name with --model the one that is most like theirs ({}), and with --set how they differ",
                    model_names()
                );
                let model = match asked {
                    Some(model) => model,
                    None => name_of(&file, &self.checkpoint, &way_out)?,
                };
                TrainedModel::of_weights(file, &shown.to_string(), model, changes)
            }
        }
    }
}

/// Refuses another model than that of the run that weights are from.
pub(super) fn ensure_model(asked: Option<&str>, known: &RunConfig, weights: impl fmt::Display) -> Result<()> {
    match asked {
        Some(asked) if asked != known.model => {
            bail!("--model: {weights} knows its model, {}; leave it out", known.model)
        }
        _ => Ok(()),
    }
}

/// The names of `count` classes, read from the file that --classes names.
pub(super) fn class_names(file: &Path, count: usize) -> Result<Vec<String>> {
    read_names(file, count).with_context(|| format!("--classes {}", file.display()))
}

fn read_names(file: &Path, count: usize) -> Result<Vec<String>> {
    let text = read_text(file, "a name in each line")?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let names: Vec<String> = text.trim_end().lines().map(|line| line.trim().to_owned()).collect();
    if names.len() != count {
        bail!("{} lines for {count} classes; expected a name in each line", names.len());
    }
    match names.iter().position(String::is_empty) {
        Some(empty) => bail!("line {} is empty; expected a name in each line", empty + 1),
        None => Ok(names),
    }
}
