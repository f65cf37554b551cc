//! `biformer info`.

use super::{ModelChoice, Status, Threads};
use anyhow::Result;
use clap::Args;
use model::BiFormer;
use model::cost::{Macs, activation_bytes, parts};
use serde_json::json;
use tensor::DType;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelChoice,
    /// The side of the images; by default the one that the model is meant for.
    #[arg(long, value_name = "N")]
    image_size: Option<usize>,
    /// Prints one JSON object, with the configuration.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    threads: Threads,
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    let config = arguments.model.config()?;
    let size = arguments.model.image_size(arguments.image_size)?;
    let (parts, activations) = arguments.threads.run(|| {
        let model = BiFormer::blank(&config, DType::F32)?;
        Ok((parts(&model, size, size)?, activation_bytes(&model, size, size)?))
    })?;
    let parameters: usize = parts.iter().map(|part| part.parameters).sum();
    let total: u64 = parts.iter().map(|part| part.macs.total()).sum();
    if arguments.json {
        let object = json!({
            "model": arguments.model.model,
            "image_size": size,
            "parameters": parameters,
            "macs": total,
            "activation_bytes_per_image": activations,
            "parts": parts,
            "config": config,
        });
        say!("{}", serde_json::to_string_pretty(&object)?);
        return Ok(Status::Done);
    }
    say!("{}, images of {size}x{size}\n", arguments.model.model);
    say!("{:<20} {:<52} {:>13} {:>11} {:>10}", "part", "layers", "map", "parameters", "MMACs");
    for part in &parts {
        let [height, width, channels] = part.map;
        say!(
            "{:<20} {:<52} {:>13} {:>11} {:>10.2}",
            part.name,
            part.layers,
            format!("{height}x{width}x{channels}"),
            part.parameters,
            part.macs.total() as f64 / 1e6
        );
    }
    say!("{:<20} {:<52} {:>13} {parameters:>11} {:>10.2}\n", "in all", "", "", total as f64 / 1e6);
    let sum = |kind: fn(&Macs) -> u64| parts.iter().map(|part| kind(&part.macs)).sum::<u64>() as f64 / 1e6;
    say!(
        "Multiply-adds per image (millions): linear {:.2}, convolutions {:.2}, attention {:.2}, routing {:.2}.",
        sum(|m| m.linear),
        sum(|m| m.conv),
        sum(|m| m.attention),
        sum(|m| m.routing)
    );
    say!("A training step keeps {:.2} MB of activations per image in f32.", activations as f64 / 1e6);
    Ok(Status::Done)
}
