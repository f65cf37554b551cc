//! `biformer info`.

use super::Status;
use super::options::{ImageSize, ModelChoice, Threads, ensure_count};
use crate::config::{Recompute, RunConfig};
use crate::device::{DeviceName, Precision};
use crate::memory;
use crate::printing::{capitalized, is_closed, plural, printable, tell};
use crate::trainer::checkpoint::Progress;
use crate::trainer::data_facts::DataFacts;
use crate::trainer::metrics::EpochMetrics;
use crate::trainer::stored::Stored;
use crate::trainer::trained::{config_of, name_of};
use anyhow::Result;
use clap::Args;
use model::cost::{Macs, Part, parts};
use model::{BiFormer, Features};
use serde::Serialize;
use serde_json::json;
use std::io;
use std::path::{Path, PathBuf};
use tensor::DType;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelChoice,
    /// A run folder (its run may be in progress), the checkpoint in it, or a file that `export` wrote: shows what the
    /// run was trained on, how far it has come and the accuracy that it has reached (which exported weights do not
    /// record), and its model in place of --model. Or other weights of a model that the program knows.
    #[arg(long, value_name = "DIR|FILE", conflicts_with = "model")]
    checkpoint: Option<PathBuf>,
    /// The side of the images, or their height and width; by default the one that the model is meant for, or the run's.
    #[arg(long, value_name = "N|HxW")]
    image_size: Option<ImageSize>,
    /// Images per step, for the memory that training and inference take; 64 by default, or as many as the run has.
    #[arg(long, value_name = "N")]
    batch_size: Option<usize>,
    /// What a training step computes again in its backward pass instead of keeping it.
    #[arg(long, value_enum)]
    recompute: Option<Recompute>,
    /// Prints one JSON object, with the configuration. Its training_bytes are null where the model cannot be trained:
    /// without a head, or on one image of one token. So are all bytes that would take minutes to foretell. Its run is
    /// null without --checkpoint, and for weights that do not say which run they are from.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    threads: Threads,
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    arguments.threads.run(|| show(arguments))?;
    Ok(Status::Done)
}

/// The configuration of the run whose model is asked about, and what is known of that run if it has begun.
fn asked(arguments: &Arguments) -> Result<(RunConfig, Option<Begun>)> {
    let Some(path) = &arguments.checkpoint else {
        let run = RunConfig::for_model(&arguments.model.model)?;
        return Ok((RunConfig { architecture: arguments.model.config()?, ..run }, None));
    };
    let (described, progress) = match Stored::read(path)? {
        Stored::Described(described, progress) => (described, progress),
        Stored::Alone(file) => {
            let mut run = config_of(&file, name_of(&file, path, "")?)?;
            run.architecture = arguments.model.changed(run.architecture)?;
            return Ok((run, None));
        }
    };
    let (config, data) = (described.config, described.data);
    let both = progress.as_ref().and_then(|progress| config.best_by.last_and_best(&progress.epochs));
    let (last, best) = both.map(<(_, _)>::from).unzip();
    let mut run = RunConfig { device: DeviceName::Cpu, ..config.clone() };
    if run.precision == Precision::Tf32 {
        run.precision = Precision::F32;
    }
    run.architecture = arguments.model.changed(run.architecture)?;
    Ok((run, Some(Begun { config, data, progress, last, best })))
}

/// What a run has seen and reached.
#[derive(Serialize)]
struct Begun {
    config: RunConfig,
    data: DataFacts,
    /// None for exported weights.
    progress: Option<Progress>,
    /// The last epoch's metrics, and the best one's.
    last: Option<EpochMetrics>,
    best: Option<EpochMetrics>,
}

impl Begun {
    fn print(&self, path: &Path) -> Result<()> {
        let Self {
            config: RunConfig { model, data, epochs, seed, best_by: by, .. },
            data: facts,
            progress,
            last,
            best,
        } = self;
        let (images, classes) = (facts.train_images, facts.classes.len());
        let es = if classes == 1 { "" } else { "es" };
        let s = plural(images);
        let trained = match images {
            0 => format!("for {classes} class{es}; what it was trained on is not recorded"),
            _ => format!("trained on {images} image{s} of {data} ({classes} class{es})"),
        };
        say!("{}: {model}, {}.", printable(path.display()), printable(trained));
        if let Some(progress) = progress {
            let (epoch, batch) = (progress.epoch(), progress.batch);
            let within = if batch > 0 { format!(", and batch {batch} of the next") } else { String::new() };
            let done = if epoch < *epochs { "So far" } else { "Done" };
            say!("{done}: epoch {epoch} of {epochs}{within}; seed {seed}.");
        }
        if let (Some(last), Some(best)) = (last, best) {
            let best = by.surpassed([last, best]).map_or_else(String::new, |best| format!("; {best}"));
            let name = capitalized(facts.tested_on());
            say!("{name} accuracy {}{} after epoch {}{best}.", by.percent(last), by.remark(), last.epoch);
        }
        say!("");
        Ok(())
    }
}

fn show(arguments: &Arguments) -> Result<()> {
    let (mut run, begun) = asked(arguments)?;
    if let Some(batch) = arguments.batch_size {
        ensure_count("--batch-size", batch)?;
        (run.batch_size, run.micro_batches) = (batch, 1);
    }
    run.recompute = arguments.recompute.unwrap_or(run.recompute);
    let batch = run.batch_size;
    let size = arguments.image_size.unwrap_or(ImageSize([run.image_size; 2]));
    let config = run.architecture.clone();
    config.check_image(size.0[0], size.0[1])?;
    memory::ensure_room_to_foretell(&run, size.0)?;
    let parts = parts(&BiFormer::blank(&config, DType::F32)?, size.0[0], size.0[1])?;
    // Before memory is foretold, which takes seconds for a large model.
    if !arguments.json {
        if let (Some(begun), Some(path)) = (&begun, &arguments.checkpoint) {
            begun.print(path)?;
        }
        print_parts(&run.model, size, &parts)?;
        if is_closed() {
            return Ok(());
        }
    }
    let unfit = run.ensure_statistics(size.0).err();
    unfit.iter().for_each(|reason| tell!(io::stderr(), "note: this model cannot be trained: {reason}"));
    let trainable = config.features == Features::Logits && unfit.is_none();
    let training = if trainable { memory::training(&run, size.0)? } else { None };
    let activations = memory::activations(&run, size.0)?;
    let inference = memory::inference(&run, size.0, DType::F32)?;
    if activations.is_none() || inference.is_none() {
        tell!(
            io::stderr(),
            "note: to foretell all of the memory that this model takes would take minutes, or too much of it; biformer bench \
             measures it"
        );
    }
    if arguments.json {
        let object = json!({
            "model": run.model,
            "image_size": size.0,
            "parameters": parameters(&parts),
            "macs": macs(&parts).total(),
            "activation_bytes_per_image": activations,
            "batch_size": batch,
            "training_bytes": training,
            "inference_bytes": inference,
            "parts": parts,
            "config": config,
            "run": begun,
        });
        say!("{}", serde_json::to_string_pretty(&object)?);
        return Ok(());
    }
    let how = match run.recompute {
        Recompute::None => " with recompute = \"none\"",
        Recompute::Auto | Recompute::Cheap => "",
        Recompute::Block => " with recompute = \"block\"",
    };
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    if let (Some(training), Some(activations)) = (training, activations) {
        say!("A training step{how} keeps {:.2} MB of activations per image in f32.", activations as f64 / 1e6);
        say!(
            "Training in batches of {batch}{how} takes about {:.0} MB of memory. On top come the images of up to four batches \
             loaded ahead ({:.0} MB in all), data sets that are held in memory as a whole (embedded 18 MB, CIFAR 184 MB), \
             and some 60 MB when a run ends and draws its pictures.",
            megabytes(training),
            megabytes(4 * memory::image_bytes(&run, size.0))
        );
    }
    if let Some(inference) = inference {
        say!("Inference in batches of {batch} takes about {:.0} MB.", megabytes(inference));
    }
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
    let macs = macs(parts);
    let [total, linear, conv, attention, routing] =
        [macs.total(), macs.linear, macs.conv, macs.attention, macs.routing].map(|macs| macs as f64 / 1e6);
    say!("{:<20} {:<58} {:>13} {:>11} {total:>10.2}\n", "in all", "", "", parameters(parts));
    say!(
        "Multiply-adds (MACs) per image, in millions: linear {linear:.2}, convolutions {conv:.2}, attention {attention:.2}, \
         routing {routing:.2}. Normalisations, which fvcore counts, are not among them."
    );
    Ok(())
}

fn parameters(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.parameters).sum()
}

fn macs(parts: &[Part]) -> Macs {
    parts.iter().map(|part| part.macs).sum()
}
