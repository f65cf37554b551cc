//! `biformer bench`.

use super::{MOST_IMAGES, ModelChoice, Status, Threads};
use crate::config::{Recompute, RunConfig};
use crate::memory::{expect_room_to_train, peak_resident_bytes};
use crate::trainer::step::Learner;
use anyhow::{Result, bail};
use autograd::Tape;
use clap::{Args, ValueEnum};
use data::Batch;
use model::{BiFormer, Mode};
use serde_json::json;
use std::time::Instant;
use tensor::cpu::isa::Isa;
use tensor::rng::Philox;
use tensor::{DType, Tensor};

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelChoice,
    /// The side of the images; by default the one that the model is meant for.
    #[arg(long, value_name = "N")]
    image_size: Option<usize>,
    /// Images per step.
    #[arg(long, value_name = "N", default_value_t = 128)]
    batch_size: usize,
    /// What to time: a whole training step (forward, loss, backward, AdamW), or a forward pass.
    #[arg(long, value_enum, default_value_t = Work::Train)]
    mode: Work,
    /// What a training step computes again in its backward pass instead of keeping it, to save memory.
    #[arg(long, value_enum, default_value_t)]
    recompute: Recompute,
    /// Steps that are timed, after two that are not.
    #[arg(long, value_name = "N", default_value_t = 10)]
    steps: usize,
    /// Prints one JSON object. Its peak_rss_bytes, the largest resident memory, is null where the system does not
    /// tell: elsewhere than on Linux.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Work {
    Train,
    Infer,
}

const WARM_UP: usize = 2;

pub fn run(arguments: &Arguments) -> Result<Status> {
    for (option, value) in [("--steps", arguments.steps), ("--batch-size", arguments.batch_size)] {
        if !(1..=MOST_IMAGES).contains(&value) {
            bail!("{option} {value}: expected 1 to {MOST_IMAGES}");
        }
    }
    let size = arguments.model.image_size(arguments.image_size)?;
    let (mut times, threads) = arguments.threads.run(|| Ok((time(arguments, size)?, rayon::current_num_threads())))?;
    times.sort_by(f64::total_cmp);
    let median = (times[(times.len() - 1) / 2] + times[times.len() / 2]) / 2.0;
    let rate = arguments.batch_size as f64 / median;
    let (isa, peak) = (Isa::current().name(), peak_resident_bytes());
    if arguments.json {
        let object = json!({
            "model": arguments.model.model,
            "image_size": size,
            "batch_size": arguments.batch_size,
            "mode": format!("{:?}", arguments.mode).to_lowercase(),
            "images_per_second": rate,
            "median_step_ms": 1e3 * median,
            "min_step_ms": 1e3 * times[0],
            "peak_rss_bytes": peak,
            "threads": threads,
            "isa": isa,
        });
        say!("{object}");
    } else {
        say!(
            "{} {size}x{size}, batch {}, {:?}: {rate:.1} images/s, median step {:.1} ms, {threads} threads, {isa}{}",
            arguments.model.model,
            arguments.batch_size,
            arguments.mode,
            1e3 * median,
            peak.map_or_else(String::new, |bytes| format!(", peak memory {:.0} MB", bytes as f64 / 1e6))
        );
    }
    Ok(Status::Done)
}

/// The seconds of each step.
fn time(arguments: &Arguments, size: usize) -> Result<Vec<f64>> {
    let mut config = RunConfig::for_model(&arguments.model.model)?;
    config.architecture = arguments.model.config()?;
    config.architecture.check_image(size, size)?;
    (config.image_size, config.batch_size, config.recompute) = (size, arguments.batch_size, arguments.recompute);
    let shape = [arguments.batch_size, size, size, 3];
    let bytes = shape.iter().fold(4.0, |bytes, &extent| bytes * extent as f64);
    if bytes > 8e9 {
        bail!("--batch-size {}: its images alone take {:.0} GB, more than 8", arguments.batch_size, bytes / 1e9);
    }
    if arguments.mode == Work::Train {
        expect_room_to_train(&config)?;
    }
    let random = Philox::new(0, 0);
    let images: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| 2.0 * random.uniform(i as u64) - 1.0).collect();
    let classes = config.architecture.num_classes;
    let labels = (0..arguments.batch_size).map(|i| (i % classes) as u32).collect();
    let batch = Batch { index: 0, images, shape, labels, samples: vec![], skipped: vec![] };
    match arguments.mode {
        Work::Train => {
            let mut learner = Learner::new(&config)?;
            steps(arguments.steps, |step| learner.train(&config, &batch, step as u64, 1e-3).map(|_| ()))
        }
        Work::Infer => {
            let model = BiFormer::new(&config.architecture, 0, DType::F32)?;
            let images = Tensor::from_slice(&batch.images, shape)?;
            steps(arguments.steps, |_| {
                let tape = Tape::inference();
                model.forward(&tape, &images, Mode::Evaluate)?;
                Ok(())
            })
        }
    }
}

fn steps(count: usize, mut work: impl FnMut(usize) -> Result<()>) -> Result<Vec<f64>> {
    let mut times = vec![];
    for step in 0..WARM_UP + count {
        let started = Instant::now();
        work(step)?;
        if step >= WARM_UP {
            times.push(started.elapsed().as_secs_f64());
        }
    }
    Ok(times)
}
