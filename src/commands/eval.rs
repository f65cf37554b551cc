//! `biformer eval`.

use super::{MOST_IMAGES, Status, Threads, Trained};
use crate::device::Compute;
use crate::inference::Inference;
use crate::memory::expect_room_to_infer;
use crate::printing::printable;
use crate::staging::numbered;
use crate::trainer::display::{bar, warn_of_skipped};
use crate::trainer::score::{Score, evaluate};
use crate::trainer::trained::{OF_THE_RUN, TrainedModel};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use data::{Loader, LoaderConfig, Split, Transform};
use serde::Serialize;
use tensor::DType;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    trained: Trained,
    /// The data set; by default the one that the model was trained on.
    #[arg(long, value_name = "embedded|DIR")]
    data: Option<String>,
    /// Images per pass.
    #[arg(long, value_name = "N", default_value_t = 128)]
    batch_size: usize,
    /// So many undecodable images are passed over; by default as many as in the run.
    #[arg(long, value_name = "N")]
    max_bad_images: Option<usize>,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    compute: Compute,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Serialize)]
struct Report {
    images: u64,
    top1: f64,
    top5: f64,
    loss: f64,
    classes: Vec<Class>,
}

#[derive(Serialize)]
struct Class {
    name: String,
    images: u64,
    top1: f64,
    top5: f64,
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    let report = arguments.threads.run(|| measure(arguments));
    let report = report.map_err(|error| match error.downcast_ref() {
        Some(data::Error::TooManyBadImages { .. }) => anyhow!("{error:#}, with --max-bad-images"),
        _ => error,
    })?;
    if arguments.json {
        say!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(Status::Done);
    }
    let names: Vec<String> = report.classes.iter().map(|class| printable(&class.name)).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max("all".len());
    say!("{:width$}  {:>7}  {:>6}  {:>6}", "class", "images", "top-1", "top-5");
    for (name, Class { images, top1, top5, .. }) in names.iter().zip(&report.classes) {
        say!("{name:width$}  {images:>7}  {:>5.1}%  {:>5.1}%", 100.0 * top1, 100.0 * top5);
    }
    let Report { images, top1, top5, loss, .. } = report;
    say!("{:width$}  {images:>7}  {:>5.1}%  {:>5.1}%   loss {loss:.4}", "all", 100.0 * top1, 100.0 * top5);
    Ok(Status::Done)
}

fn measure(arguments: &Arguments) -> Result<Report> {
    let batch = arguments.batch_size;
    if !(1..=MOST_IMAGES).contains(&batch) {
        bail!("--batch-size {batch}: expected 1 to {MOST_IMAGES}");
    }
    let TrainedModel { mut model, mut config, data: mut known, named } = arguments.trained.load()?;
    (config.batch_size, config.device) = (batch, arguments.compute.device);
    let (source, whose) = arguments.data.as_ref().map_or((&config.data, OF_THE_RUN), |given| (given, ""));
    let dataset = data::open(source, Split::Test).with_context(|| format!("data {source}{whose}"))?;
    if !named && known.classes.len() == dataset.classes().len() {
        // Those that the published models were trained on are in the order of their folders' names, too.
        known.classes = dataset.classes().to_vec();
    }
    known.expect_classes(source, dataset.classes())?;
    let classes = &known.classes;
    // What the model's training images were normalised by, whatever these are.
    let transform = Transform::eval(config.image_size, known.statistics)?;
    let mut settings = LoaderConfig::eval(batch, transform);
    settings.max_bad_images = arguments.max_bad_images.unwrap_or(config.max_bad_images);
    let loader = Loader::new(dataset, settings)?;
    expect_room_to_infer(&config, [config.image_size; 2], loader.most_bytes(), DType::F32)?;
    arguments.compute.place(&mut model)?;
    let mut per_class = vec![Score::default(); classes.len()];
    let mut inference = Inference::new(&model, loader.batches_per_epoch());
    let bar = bar(loader.batches_per_epoch());
    let mut batches = numbered(loader.epoch(0, 0));
    while let Some(batch) = batches.next() {
        let batch = batch?;
        let scores = evaluate(&mut inference, &batch, || batches.peek()?.as_ref().ok())
            .with_context(|| arguments.trained.checkpoint.display().to_string())?;
        scores.into_iter().for_each(|(label, score)| per_class[label as usize].add(score));
        bar.suspend(|| warn_of_skipped(&batch));
        bar.inc(1);
        bar.set_message(format!("{} of {} batches", bar.position(), loader.batches_per_epoch()));
        loader.recycle(batch.into_batch());
    }
    bar.finish_and_clear();
    let mut all = Score::default();
    per_class.iter().for_each(|score| all.add(*score));
    let class = |(name, score): (String, Score)| Class {
        name,
        images: score.images,
        top1: score.accuracy(),
        top5: score.top5(),
    };
    Ok(Report {
        images: all.images,
        top1: all.accuracy(),
        top5: all.top5(),
        loss: all.mean_loss(),
        classes: known.classes.into_iter().zip(per_class).map(class).collect(),
    })
}
