//! `biformer info`.

use super::{ImageSize, MOST_IMAGES, ModelChoice, Status, Threads};
use crate::config::{Recompute, RunConfig};
use crate::memory;
use anyhow::{Result, bail};
use clap::Args;
use model::cost::{Macs, Part, parts};
use model::{BiFormer, Features};
use serde_json::json;
use tensor::DType;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelChoice,
    /// The side of the images, or their height and width; by default the one that the model is meant for.
    #[arg(long, value_name = "N|HxW")]
    image_size: Option<ImageSize>,
    /// Images per step, for the memory that training and inference take.
    #[arg(long, value_name = "N", default_value_t = 64)]
    batch_size: usize,
    /// What a training step computes again in its backward pass instead of keeping it.
    #[arg(long, value_enum, default_value_t)]
    recompute: Recompute,
    /// Prints one JSON object, with the configuration. Its training_bytes are null where the model cannot be trained:
    /// without a head.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    threads: Threads,
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    arguments.threads.run(|| show(arguments))?;
    Ok(Status::Done)
}

fn show(arguments: &Arguments) -> Result<()> {
    let config = arguments.model.config()?;
    let size = arguments.model.image_size(arguments.image_size)?;
    let batch = arguments.batch_size;
    if !(1..=MOST_IMAGES).contains(&batch) {
        bail!("--batch-size {batch}: expected 1 to {MOST_IMAGES}");
    }
    let mut run = RunConfig::for_model(&arguments.model.model)?;
    (run.batch_size, run.recompute, run.architecture) = (batch, arguments.recompute, config.clone());
    config.check_image(size.0[0], size.0[1])?;
    memory::expect_room_to_foretell(&run, size.0)?;
    let parts = parts(&BiFormer::blank(&config, DType::F32)?, size.0[0], size.0[1])?;
    // Before memory is foretold, which takes seconds for a large model.
    if !arguments.json {
        print_parts(&arguments.model.model, size, &parts)?;
    }
    let trainable = config.features == Features::Logits;
    let training = if trainable { Some(memory::training(&run, size.0)?) } else { None };
    let activations = memory::activations(&run, size.0)?;
    let inference = memory::inference(&run, size.0, DType::F32)?;
    if arguments.json {
        let object = json!({
            "model": arguments.model.model,
            "image_size": size.0,
            "parameters": parameters(&parts),
            "macs": macs(&parts),
            "activation_bytes_per_image": activations,
            "batch_size": batch,
            "training_bytes": training,
            "inference_bytes": inference,
            "parts": parts,
            "config": config,
        });
        say!("{}", serde_json::to_string_pretty(&object)?);
        return Ok(());
    }
    let how = match arguments.recompute {
        Recompute::None => " with recompute = \"none\"",
        Recompute::Auto | Recompute::Cheap => "",
        Recompute::Block => " with recompute = \"block\"",
    };
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    if let Some(training) = training {
        say!("A training step{how} keeps {:.2} MB of activations per image in f32.", activations as f64 / 1e6);
        say!("Training in batches of {batch}{how} takes about {:.0} MB of memory.", megabytes(training));
    }
    say!("Inference in batches of {batch} takes about {:.0} MB.", megabytes(inference));
    Ok(())
}

fn print_parts(model: &str, size: ImageSize, parts: &[Part]) -> Result<()> {
    say!("{model}, images of {size}\n");
    say!("{:<20} {:<58} {:>13} {:>11} {:>10}", "part", "layers", "map", "parameters", "MACs (M)");
    for part in parts {
        let [height, width, channels] = part.map;
        say!(
            "{:<20} {:<58} {:>13} {:>11} {:>10.2}",
            part.name,
            part.layers,
            format!("{height}x{width}x{channels}"),
            part.parameters,
            part.macs.total() as f64 / 1e6
        );
    }
    let (parameters, total) = (parameters(parts), macs(parts) as f64 / 1e6);
    say!("{:<20} {:<58} {:>13} {parameters:>11} {total:>10.2}\n", "in all", "", "");
    let sum = |kind: fn(&Macs) -> u64| parts.iter().map(|part| kind(&part.macs)).sum::<u64>() as f64 / 1e6;
    say!(
        "Multiply-adds (MACs) per image, in millions: linear {:.2}, convolutions {:.2}, attention {:.2}, routing {:.2}. \
         Normalisations, which fvcore counts, are not among them.",
        sum(|m| m.linear),
        sum(|m| m.conv),
        sum(|m| m.attention),
        sum(|m| m.routing)
    );
    Ok(())
}

fn parameters(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.parameters).sum()
}

fn macs(parts: &[Part]) -> u64 {
    parts.iter().map(|part| part.macs.total()).sum()
}
