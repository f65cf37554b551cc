//! Using a trained model in your own program: what is in a picture?
//!
//! `cargo run --release` leaves a trained model in `runs/nano`; then
//! `cargo run --release --example classify_picture -- runs/nano docs/images/horse.png`.
//! In place of a run folder it takes what `biformer export` wrote.

use anyhow::{Context, Result, bail};
use biformer::autograd::Tape;
use biformer::data::load_image;
use biformer::model::Mode;
use biformer::ops;
use biformer::tensor::Tensor;
use biformer::trainer::trained::TrainedModel;
use std::path::Path;

/// Prints the five likeliest classes of a picture.
pub fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [weights, picture] = &arguments[..] else { bail!("expected a run folder and a picture") };
    for (class, probability) in classify(Path::new(weights), Path::new(picture))?.into_iter().take(5) {
        println!("{:>5.1}%  {class}", 100.0 * probability);
    }
    Ok(())
}

/// The classes that a model knows, with the probability of each, the likeliest first.
pub fn classify(weights: &Path, picture: &Path) -> Result<Vec<(String, f32)>> {
    let trained = TrainedModel::read(weights)?;

    // The middle of the picture, resized and normalised as the model was tested: (1, H, W, 3).
    let transform = trained.config.test_transform(trained.data.statistics)?;
    let side = trained.config.image_size;
    let pixels = Tensor::from_slice(&transform.pixels(&load_image(picture)?), [1, side, side, 3])?;

    let tape = Tape::inference(); // keeps nothing for a backward pass
    let logits =
        trained.model.forward(&tape, &pixels, Mode::Evaluate)?.values.pop().context("a model without an output")?;
    let probabilities = ops::softmax(&logits)?.value().to_vec::<f32>()?; // (1, classes)

    let mut classes: Vec<(String, f32)> = trained.data.classes.into_iter().zip(probabilities).collect();
    classes.sort_by(|a, b| b.1.total_cmp(&a.1));
    Ok(classes)
}
