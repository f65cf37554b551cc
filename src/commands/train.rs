//! `biformer train`.

use super::Status;
use crate::config::RunConfig;
use crate::trainer::{Outcome, Trainer};
use anyhow::{Context, Result};
use clap::Args;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tensor::cpu::parallel::thread_pool;
use toml::Value;

/// The command line wins over the configuration file, which wins over the defaults.
#[derive(Debug, Args)]
pub struct Arguments {
    /// A TOML file; any field of a run folder's config.toml can be given in it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The model: nano (the default), tiny, small, base, stl or stl_nchw.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// `embedded` (the default: 6,000 images of CIFAR-10 inside the program), or a folder with CIFAR-10 or
    /// CIFAR-100 in their binary layout, or with train/CLASS/*.png|jpg and val/ or test/.
    #[arg(long, value_name = "embedded|DIR")]
    data: Option<String>,
    /// Passes over the training images.
    #[arg(long, value_name = "N")]
    epochs: Option<usize>,
    /// Images per step.
    #[arg(long, value_name = "N")]
    batch_size: Option<usize>,
    /// The highest learning rate.
    #[arg(long, value_name = "X")]
    lr: Option<f64>,
    /// Decides initial weights, order, augmentation and dropped blocks.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Threads to compute with; 0 takes one per core. The results have the same bits with any number.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// The run folder; runs/MODEL by default.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Goes on where the run folder's checkpoint was made.
    #[arg(long)]
    resume: bool,
}

impl Arguments {
    fn config(&self) -> Result<RunConfig> {
        let mut changes: Vec<(&str, Value)> = vec![];
        let integer = |value: usize| i64::try_from(value).map(Value::Integer).context("a number is too large");
        if let Some(model) = &self.model {
            changes.push(("model", Value::String(model.clone())));
        }
        if let Some(data) = &self.data {
            changes.push(("data", Value::String(data.clone())));
        }
        for (key, value) in [("epochs", self.epochs), ("batch_size", self.batch_size), ("threads", self.threads)] {
            if let Some(value) = value {
                changes.push((key, integer(value)?));
            }
        }
        if let Some(lr) = self.lr {
            changes.push(("schedule", Value::Table([("peak".to_owned(), Value::Float(lr))].into_iter().collect())));
        }
        if let Some(seed) = self.seed {
            changes.push(("seed", Value::Integer(i64::try_from(seed).context("--seed is too large")?)));
        }
        if let Some(out) = &self.out {
            changes.push(("out", Value::String(out.display().to_string())));
        }
        RunConfig::load(self.config.as_deref(), changes)
    }
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    let config = arguments.config()?;
    let stop = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        // The second time somebody is in a hurry.
        if asked.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("\nStopping after this step (press Ctrl-C again to stop at once) ...");
    })
    .context("Ctrl-C handler")?;
    let pool = thread_pool(config.threads).context("starting threads")?;
    pool.install(|| {
        let started = Instant::now();
        let mut trainer = if arguments.resume { Trainer::resume(config)? } else { Trainer::new(config)? };
        let outcome = trainer.run(&stop)?;
        let folder = trainer.folder().path().display().to_string();
        trainer.draw()?;
        match outcome {
            Outcome::Finished { accuracy } => {
                let seconds = started.elapsed().as_secs();
                println!("Test accuracy {:.1}% after {}:{:02} min.", 100.0 * accuracy, seconds / 60, seconds % 60);
                println!("{folder}: config.toml, metrics.jsonl, checkpoint.safetensors, curves.png, routing.png");
                Ok(Status::Done)
            }
            Outcome::Interrupted => {
                println!("Stopped; the checkpoint is saved. Go on with: biformer train --resume --out {folder}");
                Ok(Status::Interrupted)
            }
        }
    })
}
