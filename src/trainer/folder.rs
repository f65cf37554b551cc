//! The run folder: what a run leaves behind.

use super::checkpoint::FILE_NAME;
use super::step::Score;
use crate::config::RunConfig;
use crate::pictures;
use anyhow::{Context, Result, bail};
use data::{Batch, Transform};
use model::{Trace, write_safely};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const CONFIG: &str = "config.toml";
const METRICS: &str = "metrics.jsonl";
const TIMINGS: &str = "timings.jsonl";
const CURVES: &str = "curves.png";
const ROUTING: &str = "routing.png";
/// How many test images the picture of routed regions shows.
const PICTURED: usize = 6;

/// The metrics of an epoch. Equal runs write equal lines: what depends on the clock is in another file.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpochMetrics {
    /// Epochs done, from 1.
    pub epoch: usize,
    /// The learning rate of its last step.
    pub learning_rate: f64,
    /// Mean training loss, with label smoothing.
    pub train_loss: f64,
    /// The share of (varied) training images that were right when they were seen.
    pub train_accuracy: f64,
    /// Mean cross-entropy on the test images.
    pub test_loss: f64,
    /// The share of test images that are right.
    pub test_accuracy: f64,
    /// The share of test images whose class is among the five likeliest.
    pub test_top5: f64,
}

impl EpochMetrics {
    /// The metrics of two scores.
    pub fn new(epoch: usize, learning_rate: f64, train: Score, test: Score) -> Self {
        Self {
            epoch,
            learning_rate,
            train_loss: train.mean_loss(),
            train_accuracy: train.accuracy(),
            test_loss: test.mean_loss(),
            test_accuracy: test.accuracy(),
            test_top5: test.top5(),
        }
    }
}

#[derive(Serialize)]
struct Timing {
    epoch: usize,
    seconds: f64,
    images_per_second: f64,
}

/// A folder with a run in it.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// Makes the folder. One that holds a run already, or anything else that a run would write over, is left alone.
    pub fn create(config: &RunConfig) -> Result<Self> {
        let folder = Self { path: config.out.clone() };
        let shown = folder.path.display();
        if folder.checkpoint().exists() {
            bail!("run folder {shown}: holds a run already; go on with --resume, or choose another with --out");
        }
        if let Some(name) =
            [CONFIG, METRICS, TIMINGS, CURVES, ROUTING].iter().find(|name| folder.path.join(name).exists())
        {
            bail!("run folder {shown}: there is a {name}, and no checkpoint; choose another with --out, or remove it");
        }
        fs::create_dir_all(&folder.path)
            .with_context(|| format!("run folder {shown}: cannot be made; choose another with --out"))?;
        Ok(folder)
    }

    /// The folder of a run that is to be resumed.
    pub fn open(path: &Path) -> Result<Self> {
        let folder = Self { path: path.to_owned() };
        if !folder.checkpoint().exists() {
            bail!(
                "run folder {}: there is no {FILE_NAME} to resume from; name the right folder with --out, or leave \
                 --resume out to start a run",
                path.display()
            );
        }
        Ok(folder)
    }

    /// Writes the configuration.
    pub fn write_config(&self, config: &RunConfig) -> Result<()> {
        write_safely(&self.path.join(CONFIG), config.to_toml()?.as_bytes()).with_context(|| {
            format!("run folder {}: cannot be written; choose another with --out", self.path.display())
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the checkpoint lies.
    pub fn checkpoint(&self) -> PathBuf {
        self.path.join(FILE_NAME)
    }

    /// Adds an epoch's lines.
    pub fn append(&self, metrics: &EpochMetrics, elapsed: Duration, images_per_second: f64) -> Result<()> {
        let seconds = elapsed.as_secs_f64();
        let timing = Timing { epoch: metrics.epoch, seconds, images_per_second };
        self.append_line(METRICS, &serde_json::to_string(metrics)?)?;
        self.append_line(TIMINGS, &serde_json::to_string(&timing)?)
    }

    fn append_line(&self, name: &str, line: &str) -> Result<()> {
        let mut text = self.read(name)?;
        text.push_str(line);
        text.push('\n');
        Ok(write_safely(&self.path.join(name), text.as_bytes())?)
    }

    fn read(&self, name: &str) -> Result<String> {
        let path = self.path.join(name);
        if !path.exists() {
            return Ok(String::new());
        }
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }

    /// Goes back to the state after so many epochs: a run that is resumed from an earlier checkpoint writes the
    /// later lines again. What a killed process left half-written goes away, too.
    pub fn rewind(&self, epochs: usize) -> Result<()> {
        for name in [METRICS, TIMINGS] {
            let text = self.read(name)?;
            let kept: String = text.lines().take(epochs).flat_map(|line| [line, "\n"]).collect();
            if kept != text {
                write_safely(&self.path.join(name), kept.as_bytes())?;
            }
        }
        for entry in fs::read_dir(&self.path)?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if is_temporary(&name) {
                // Another process's litter: worth removing, not worth failing over.
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(())
    }

    /// All epochs' metrics.
    pub fn metrics(&self) -> Result<Vec<EpochMetrics>> {
        let text = self.read(METRICS)?;
        let parse = |(number, line): (usize, &str)| {
            serde_json::from_str(line)
                .with_context(|| format!("{} line {}", self.path.join(METRICS).display(), number + 1))
        };
        text.lines().enumerate().map(parse).collect()
    }

    /// The test accuracy after the last epoch that was done.
    pub fn last_accuracy(&self) -> Result<Option<f64>> {
        Ok(self.metrics()?.last().map(|metrics| metrics.test_accuracy))
    }

    /// Draws the training curves.
    pub fn draw_curves(&self) -> Result<()> {
        let path = self.path.join(CURVES);
        pictures::curves::draw(&self.metrics()?, &path).with_context(|| path.display().to_string())
    }

    /// Draws where the regions of a few images of a batch look, over what the model saw of them.
    pub fn draw_routes(&self, batch: &Batch, trace: &Trace, transform: &Transform) -> Result<()> {
        let path = self.path.join(ROUTING);
        let counted = batch.counted();
        let slots = (0..counted.len()).filter(|&slot| counted[slot]).take(PICTURED);
        let shown = slots.map(|slot| Ok((slot, transform.picture(batch.image(slot))?))).collect::<Result<Vec<_>>>()?;
        pictures::routes::draw(&shown, trace, &path).with_context(|| path.display().to_string())
    }
}

/// Whether a file is one that [`write_safely`] begins for one of a run's files, and that a killed process left.
fn is_temporary(name: &str) -> bool {
    let written = [CONFIG, METRICS, TIMINGS, CURVES, ROUTING, FILE_NAME];
    let number = |rest: &str| rest.strip_suffix(".tmp").is_some_and(is_number);
    let of = |written: &str| name.strip_prefix('.')?.strip_prefix(written)?.strip_prefix('.').map(number);
    written.into_iter().any(|written| of(written) == Some(true))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_that_a_run_begins_are_temporary() {
        assert!(
            [".config.toml.12.tmp", ".checkpoint.safetensors.4711.tmp", ".routing.png.1.tmp"].map(is_temporary)
                == [true; 3]
        );
        let others =
            ["config.toml", ".notes.12.tmp", ".config.toml.tmp", ".config.toml..tmp", ".config.toml.a.tmp", ".x.tmp"];
        assert!(others.map(is_temporary) == [false; 6]);
    }
}
