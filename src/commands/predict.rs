//! `biformer predict`.

use super::{Status, Threads, Trained};
use crate::device::Compute;
use crate::printing::{print_error, printable};
use crate::trainer::checkpoint::TrainedModel;
use anyhow::{Result, bail};
use autograd::Tape;
use clap::Args;
use data::{eval_pixels, load_image};
use model::{BiFormer, Factors, Mode};
use serde::Serialize;
use std::borrow::Cow;
use std::path::PathBuf;
use tensor::Tensor;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    trained: Trained,
    /// PNG or JPEG pictures of any size; the centre square is what the model sees.
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<PathBuf>,
    /// Prints a JSON list: for each picture its path, and the probability of every class, likeliest first.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    compute: Compute,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Serialize)]
struct Prediction<'a> {
    path: Cow<'a, str>,
    classes: Vec<Class<'a>>,
}

#[derive(Serialize)]
struct Class<'a> {
    name: &'a str,
    probability: f64,
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    arguments.threads.run(|| {
        let TrainedModel { mut model, config, data, .. } = arguments.trained.load()?;
        arguments.compute.place(&mut model)?;
        let factors = model.prepared()?;
        let (mut status, mut predictions) = (Status::Done, vec![]);
        for image in &arguments.images {
            let loaded = load_image(image).and_then(|image| eval_pixels(&image, config.image_size, data.statistics));
            let pixels = match loaded {
                Ok(pixels) => pixels,
                Err(error) => {
                    // The others are none the worse for it.
                    print_error(&error.into());
                    status = Status::Refused;
                    continue;
                }
            };
            let images = Tensor::from_slice(&pixels, [1, config.image_size, config.image_size, 3])?;
            let probabilities = classify(&model, factors.clone(), &images)?;
            let classes = data.classes.iter().zip(probabilities);
            let mut classes: Vec<Class> = classes.map(|(name, probability)| Class { name, probability }).collect();
            classes.sort_by(|a, b| b.probability.total_cmp(&a.probability));
            if arguments.json {
                predictions.push(Prediction { path: image.to_string_lossy(), classes });
                continue;
            }
            say!("{}", printable(image.display()));
            for Class { name, probability } in classes.iter().take(5) {
                say!("  {:>5.1}%  {}", 100.0 * probability, printable(name));
            }
        }
        if arguments.json {
            say!("{}", serde_json::to_string_pretty(&predictions)?);
        }
        Ok(status)
    })
}

/// The probabilities of an image's classes.
fn classify(model: &BiFormer, factors: Factors, image: &Tensor) -> Result<Vec<f64>> {
    let tape = Tape::inference();
    let output = model.forward_with(factors, &tape, image, Mode::Evaluate)?;
    let logits = output.logits().value();
    if logits.find(|x| !x.is_finite())?.is_some() {
        bail!("the model's logits are not finite: its weights are of no use, take those of another run");
    }
    Ok(ops::softmax(output.logits())?.value().cast(tensor::DType::F64)?.to_vec::<f64>()?)
}
