//! `biformer bench`.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | what can be asked for |
//! | `whole.rs` | training and inference, timed as a whole |
//! | `profile.rs` | `--profile`: the parts of a step, beside what this machine can do |
//! | `stages.rs` | `--only-bra`: routed attention alone, as in a model's stages |
//! | `sweep.rs` | `--op bra`: attention on maps of growing size |

mod profile;
mod stages;
mod sweep;
mod whole;

use super::Status;
use super::options::{ImageSize, ModelChoice, Threads, ensure_count};
use crate::config::Recompute;
use crate::device::Compute;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use tensor::rng::Philox;

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
    #[arg(long, value_enum, default_value_t = Workload::Train)]
    mode: Workload,
    /// What a training step computes again in its backward pass instead of keeping it, to save memory.
    #[arg(long, value_enum)]
    recompute: Option<Recompute>,
    /// Steps that are timed, after two that are not.
    #[arg(long, value_name = "N", default_value_t = 10)]
    steps: usize,
    /// Says where the time goes: for each operation, forward and backward, its time, its share, its GFLOP/s and GB/s,
    /// and these rates as a percentage of a large product's and a large copy's, which are measured as well. An
    /// operation's arithmetic and memory traffic are counted as the minimum that its mathematics requires.
    #[arg(long)]
    profile: bool,
    /// Times only the model's routed attention, stage by stage: forward, and forward + backward. The time of a call is
    /// the mean of --steps calls, launched one after the other.
    #[arg(long, conflicts_with_all = ["mode", "recompute", "profile"])]
    only_bra: bool,
    /// Instead of a model: bi-level routing attention and full attention on square maps of 28, 56, 112, ... tokens a
    /// side, with as many regions as equation 9 of the paper asks for. Says how time and memory grow with the tokens.
    #[arg(long, value_enum, conflicts_with_all = [
        "model", "set", "image_size", "batch_size", "mode", "recompute", "steps", "profile", "only_bra", "device", "precision",
    ])]
    op: Option<Swept>,
    /// With --op: the side of the largest map, in tokens, from 56 to 896; sides are doubled as long as they are no
    /// larger. 448 by default.
    #[arg(long, value_name = "N")]
    largest: Option<usize>,
    /// With --op: draws the two curves to this PNG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Prints one JSON object: what was measured, and how. With --only-bra its stages have the times, with --op its
    /// curves. For a model as a whole, its peak_rss_bytes, the peak resident set size, is null on systems other than
    /// Linux. Its gpu_bytes, the GPU memory held after the last step, is null on the CPU. Its loss is the last step's,
    /// null for inference; its output_rms is the root mean square of the last pass's output, null for training. With
    /// these two, devices, precisions and runs can be compared.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    compute: Compute,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Workload {
    Train,
    Infer,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Swept {
    Bra,
}

/// The side of the largest map that is swept.
const LARGEST: usize = 448;

pub fn run(arguments: &Arguments) -> Result<Status> {
    if arguments.op == Some(Swept::Bra) {
        let Arguments { largest, plot, json, .. } = arguments;
        return arguments.threads.run(|| sweep::run(largest.unwrap_or(LARGEST), plot.as_deref(), *json));
    }
    // clap's `requires` does not help here: it does not report a missing --op if that would conflict with another
    // option given.
    for (option, given) in [("--largest", arguments.largest.is_some()), ("--plot", arguments.plot.is_some())] {
        if given {
            bail!("{option} is for --op; give that too, or leave it out");
        }
    }
    if arguments.mode == Workload::Infer && arguments.recompute.is_some() {
        bail!("--recompute is for training; inference keeps nothing, so leave it out");
    }
    ensure_count("--steps", arguments.steps)?;
    ensure_count("--batch-size", arguments.batch_size)?;
    let size = arguments.model.image_size(arguments.image_size)?;
    if arguments.only_bra {
        return arguments.threads.run(|| stages::run(arguments, size));
    }
    whole::run(arguments, size)
}

/// `count` pseudo-random numbers from -1 to 1, the same each time: with zeros, some machines compute faster.
fn noise(count: usize, stream: u64) -> Vec<f32> {
    let random = Philox::new(0, stream);
    (0..count as u64).map(|place| 2.0 * random.uniform(place) - 1.0).collect()
}

/// Refuses a batch (N, ...) whose `part` would take more than 8 GB, which is surely a mistake.
fn ensure_sensible(shape: [usize; 4], part: &str) -> Result<()> {
    let bytes = shape.iter().fold(4.0, |bytes, &extent| bytes * extent as f64);
    if bytes > 8e9 {
        bail!("--batch-size {}: its {part} take {:.0} GB, more than 8", shape[0], bytes / 1e9);
    }
    Ok(())
}
