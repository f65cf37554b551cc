//! `biformer bench`.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | training and inference, timed as a whole |
//! | `profile.rs` | `--profile`: the parts of a step, beside what this machine can do |
//! | `stages.rs` | `--only-bra`: routed attention alone, as in a model's stages |
//! | `sweep.rs` | `--op bra`: attention on maps of growing size |

mod profile;
mod stages;
mod sweep;

use super::Status;
use super::options::{ImageSize, ModelChoice, Threads, expect_count};
use crate::config::{Recompute, RunConfig};
use crate::device::{Compute, DeviceName};
use crate::inference::Inference;
use crate::memory::{expect_room_to_infer, expect_room_to_train, image_bytes, peak_resident_bytes};
use crate::printing::plural;
use crate::staging::Numbered;
use crate::trainer::step::Learner;
use anyhow::{Result, bail};
use autograd::Profile;
use clap::{Args, ValueEnum};
use data::Batch;
use model::{BiFormer, Features};
use profile::Report;
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use tensor::cpu::isa::Isa;
use tensor::rng::Philox;
use tensor::{DType, Device, Tensor};

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelChoice,
    /// The images' side, or height and width (600x500); by default what the model is meant for.
    #[arg(long, value_name = "N|HxW")]
    image_size: Option<ImageSize>,
    /// Images per step.
    #[arg(long, value_name = "N", default_value_t = 128)]
    batch_size: usize,
    /// What to time: a whole training step (forward, loss, backward, AdamW), or a forward pass.
    #[arg(long, value_enum, default_value_t = Work::Train)]
    mode: Work,
    /// What a training step computes again in its backward pass instead of keeping it, to save memory.
    #[arg(long, value_enum)]
    recompute: Option<Recompute>,
    /// Steps that are timed, after two that are not.
    #[arg(long, value_name = "N", default_value_t = 10)]
    steps: usize,
    /// Says where the time goes: for each operation, forward and backward, its time, its share, its GFLOP/s and GB/s,
    /// and what part they are of the most that this machine does, which is measured as well. An operation's
    /// arithmetic and traffic are the least that its mathematics needs.
    #[arg(long)]
    profile: bool,
    /// Of the model only its routed attention, stage by stage: forward, and forward + backward. The time of a call is the
    /// mean of --steps calls, asked for one behind the other.
    #[arg(long, conflicts_with_all = ["mode", "recompute", "profile"])]
    only_bra: bool,
    /// Instead of a model: bi-level routing attention and full attention on square maps of 28, 56, 112, ... tokens a
    /// side, with as many regions as equation 9 of the paper asks for. Says how time and memory grow with the tokens.
    #[arg(long, value_enum, conflicts_with_all = [
        "model", "set", "image_size", "batch_size", "mode", "recompute", "steps", "profile", "only_bra", "device", "precision",
    ])]
    op: Option<Swept>,
    /// With --op: the side of the largest map, in tokens, from 56 to 896; sides are doubled as long as they are no larger.
    /// 448 by default.
    #[arg(long, value_name = "N")]
    largest: Option<usize>,
    /// With --op: draws the two curves to this PNG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Prints one JSON object. Its peak_rss_bytes, the largest resident memory, is null where the system does not
    /// tell: elsewhere than on Linux. Its gpu_bytes, what is held of the GPU's memory after the last step, is null on the CPU.
    /// Its loss is the last step's, null for inference; its output_rms, the root of the mean square of what the last pass
    /// gave, null for training: by these, devices, precisions and runs can be compared.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    compute: Compute,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Work {
    Train,
    Infer,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Swept {
    Bra,
}

const WARM_UP: usize = 2;
/// The side of the largest map that is swept.
const LARGEST: usize = 448;

pub fn run(arguments: &Arguments) -> Result<Status> {
    if arguments.op == Some(Swept::Bra) {
        let Arguments { largest, plot, json, .. } = arguments;
        return arguments.threads.run(|| sweep::run(largest.unwrap_or(LARGEST), plot.as_deref(), *json));
    }
    // To require --op for them does not help: it is not missed where it could not be given.
    for (option, given) in [("--largest", arguments.largest.is_some()), ("--plot", arguments.plot.is_some())] {
        if given {
            bail!("{option} is for --op; give that too, or leave it out");
        }
    }
    if arguments.mode == Work::Infer && arguments.recompute.is_some() {
        bail!("--recompute is for training; inference keeps nothing, so leave it out");
    }
    expect_count("--steps", arguments.steps)?;
    expect_count("--batch-size", arguments.batch_size)?;
    let size = arguments.model.image_size(arguments.image_size)?;
    if arguments.only_bra {
        let config = arguments.model.config()?;
        config.check_image(size.0[0], size.0[1])?;
        let Arguments { batch_size, steps, compute, json, .. } = *arguments;
        return arguments.threads.run(|| stages::run(&config, size.0, batch_size, steps, compute, json));
    }
    let profile = arguments.profile.then(Arc::<Profile>::default);
    let (mut times, outcome, [peak, on_gpu], report, threads) = arguments.threads.run(|| {
        let Timed { times, device, outcome } = time(arguments, size, profile.as_ref())?;
        // Before the ceilings are measured, which takes memory of its own.
        let on_gpu = match &device {
            Device::Cpu => None,
            Device::Cuda(gpu) => Some(gpu.stats().held as u64),
        };
        let memory = [peak_resident_bytes(), on_gpu];
        // The emulated device has no ceilings worth comparing with.
        let maps = arguments.compute.maps();
        let gpu = matches!(arguments.compute.device, DeviceName::Cuda(_)).then_some((&device, maps));
        let report = profile.as_ref().map(|profile| Report::new(profile, arguments.steps, gpu)).transpose()?;
        Ok((times, outcome, memory, report, rayon::current_num_threads()))
    })?;
    times.sort_by(f64::total_cmp);
    let median = (times[(times.len() - 1) / 2] + times[times.len() / 2]) / 2.0;
    let rate = arguments.batch_size as f64 / median;
    let isa = Isa::current().name();
    if arguments.json {
        let mut object = json!({
            "model": arguments.model.model,
            "image_size": size.0,
            "batch_size": arguments.batch_size,
            "mode": format!("{:?}", arguments.mode).to_lowercase(),
            "set": arguments.model.set,
            "device": arguments.compute.device.to_string(),
            "precision": arguments.compute.precision.to_string(),
            "recompute": arguments.recompute,
            "images_per_second": rate,
            "median_step_ms": 1e3 * median,
            "min_step_ms": 1e3 * times[0],
            "peak_rss_bytes": peak,
            "gpu_bytes": on_gpu,
            "loss": (arguments.mode == Work::Train).then_some(outcome),
            "output_rms": (arguments.mode == Work::Infer).then_some(outcome),
            "threads": threads,
            "isa": isa,
        });
        if let Some(report) = report {
            object["profile"] = serde_json::to_value(report)?;
        }
        say!("{object}");
    } else {
        say!(
            "{} {size}, batch {}, {:?}: {rate:.1} images/s, median step {:.1} ms, {threads} thread{}, {isa}{}{}, {} {outcome:.9}",
            arguments.model.model,
            arguments.batch_size,
            arguments.mode,
            1e3 * median,
            plural(threads),
            peak.map_or_else(String::new, |bytes| format!(", peak memory {:.0} MB", bytes as f64 / 1e6)),
            on_gpu.map_or_else(String::new, |bytes| format!(", of the GPU {:.0} MB", bytes as f64 / 1e6)),
            match arguments.mode {
                Work::Train => "loss",
                Work::Infer => "output (root mean square)",
            }
        );
        if let Some(report) = report {
            say!("\n{report}");
        }
    }
    Ok(Status::Done)
}

/// What was measured.
struct Timed {
    /// The seconds of each step.
    times: Vec<f64>,
    /// Where it was made.
    device: Device,
    /// The last step's loss, or the root of the mean square of what the last pass gave.
    outcome: f64,
}

fn time(arguments: &Arguments, size: ImageSize, profile: Option<&Arc<Profile>>) -> Result<Timed> {
    let [height, width] = size.0;
    let mut config = RunConfig::for_model(&arguments.model.model)?;
    config.architecture = arguments.model.config()?;
    config.architecture.check_image(height, width)?;
    (config.batch_size, config.recompute) = (arguments.batch_size, arguments.recompute.unwrap_or_default());
    let shape = [arguments.batch_size, height, width, 3];
    expect_sensible(shape, "images alone")?;
    (config.device, config.precision) = (arguments.compute.device, arguments.compute.precision);
    if arguments.mode == Work::Train && config.architecture.features != Features::Logits {
        bail!("--set features: only logits have a loss to be trained by; time other features with --mode infer");
    }
    let images = image_bytes(&config, size.0);
    match arguments.mode {
        Work::Train => expect_room_to_train(&config, size.0, images)?,
        Work::Infer => {
            expect_room_to_infer(&config, size.0, images, DType::F32, "a smaller --batch-size, or --image-size")?;
        }
    }
    let images = noise(shape.iter().product(), 0);
    let classes = config.architecture.num_classes;
    let labels = (0..arguments.batch_size).map(|i| (i % classes) as u32).collect();
    let batch = Numbered::from(Batch { images, shape, labels, ..Batch::default() });
    match arguments.mode {
        Work::Train => {
            let mut learner = Learner::new(&config)?;
            learner.profile = profile.cloned();
            let device = learner.device().clone();
            let mut outcome = f64::NAN;
            let times = steps(arguments.steps, profile, |step| {
                // It is the next one as well: as in a run, each step has a batch brought to a GPU while it works.
                outcome = learner.train(&batch, step as u64, 1e-3, || Some(&batch))?.mean_loss();
                Ok(())
            })?;
            Ok(Timed { times, device, outcome })
        }
        Work::Infer => {
            let mut model = BiFormer::new(&config.architecture, 0, DType::F32)?;
            let device = arguments.compute.place(&mut model)?;
            // As if there were no end of them: one is what the next ones are.
            let mut inference = Inference::new(&model, usize::MAX).profiled(profile.cloned());
            inference.stage(&batch)?;
            let mut given = vec![];
            let times = steps(arguments.steps, profile, |_| {
                given.clear(); // first, so that its memory can be had again
                given.extend_from_slice(inference.pass(|| None)?);
                Ok(device.synchronize()?)
            })?;
            Ok(Timed { times, device, outcome: root_mean_square(&given)? })
        }
    }
}

/// Of all numbers of these tensors.
fn root_mean_square(tensors: &[Tensor]) -> Result<f64> {
    let (mut squares, mut count) = (0.0, 0);
    for tensor in tensors {
        let numbers = tensor.to_device(&Device::Cpu)?.cast(DType::F64)?.to_vec::<f64>()?;
        squares += numbers.iter().map(|x| x * x).sum::<f64>();
        count += numbers.len();
    }
    Ok((squares / count as f64).sqrt())
}

/// So many numbers from -1 to 1, the same each time: of zeros some machines are faster.
fn noise(count: usize, stream: u64) -> Vec<f32> {
    let random = Philox::new(0, stream);
    (0..count as u64).map(|place| 2.0 * random.uniform(place) - 1.0).collect()
}

/// Refuses a batch (N, ...) whose `part` is so large that nobody can have meant it.
fn expect_sensible(shape: [usize; 4], part: &str) -> Result<()> {
    let bytes = shape.iter().fold(4.0, |bytes, &extent| bytes * extent as f64);
    if bytes > 8e9 {
        bail!("--batch-size {}: its {part} take {:.0} GB, more than 8", shape[0], bytes / 1e9);
    }
    Ok(())
}

fn steps(count: usize, profile: Option<&Arc<Profile>>, mut work: impl FnMut(usize) -> Result<()>) -> Result<Vec<f64>> {
    let mut times = vec![];
    for step in 0..WARM_UP + count {
        if let Some(profile) = profile.filter(|_| step == WARM_UP) {
            profile.restart();
        }
        let started = Instant::now();
        work(step)?;
        profile.iter().for_each(|profile| profile.lap("other"));
        if step >= WARM_UP {
            times.push(started.elapsed().as_secs_f64());
        }
    }
    Ok(times)
}
