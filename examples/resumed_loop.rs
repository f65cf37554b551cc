//! A training loop that can be stopped after any step, and goes on to the bit: weights, moments, moving average and the
//! place in the data are in one file. Each step adds up the gradients of two micro-batches.
//!
//! The trainer does all of this for its runs; this is for loops of one's own.
//!
//! `cargo run --release --example resumed_loop`

use anyhow::{Context, Result, ensure};
use biformer::autograd::{Gradients, Tape};
use biformer::data::{self, Augmentation, Batch, Loader, LoaderConfig, Split, Transform};
use biformer::model::{BiFormer, Mode, ModelConfig, Pass, TensorFile, preset};
use biformer::ops;
use biformer::optim::{AdamW, AdamWConfig, AdamWState, Ema, EmaConfig, EmaState};
use biformer::tensor::{DType, Tensor};
use std::path::Path;

const SEED: u64 = 1;
const PARTS: usize = 2;
const STEPS: u64 = 12;

/// All that a step changes.
struct Training {
    model: BiFormer,
    adamw: AdamW,
    ema: Ema,
    /// How many steps are done.
    step: u64,
}

/// nano, made narrower and shallower so that this takes seconds. Some branches are dropped at random in each pass.
fn small() -> Result<ModelConfig> {
    Ok(preset("nano")?.config().with_overrides(["depth=1,1,1", "embed_dim=24,48,96", "drop_path=0.2"])?)
}

impl Training {
    fn begin() -> Result<Self> {
        let model = BiFormer::new(&small()?, SEED, DType::F32)?;
        let adamw = AdamW::new(&model.parameters, AdamWConfig::default())?;
        let ema = Ema::new(&model.parameters, EmaConfig::default())?;
        Ok(Self { model, adamw, ema, step: 0 })
    }

    /// Trains until so many steps are done.
    fn run(&mut self, loader: &Loader, steps: u64) -> Result<()> {
        let mut gradients = Gradients::new(&self.model.parameters)?;
        // The order of images and their augmentation are functions of the seed, the epoch and the place in it.
        let per_epoch = loader.batches_per_epoch() as u64;
        let (epoch, done) = (self.step / per_epoch, self.step % per_epoch);
        let batches = (epoch..).flat_map(|e| loader.epoch(e, if e == epoch { done as usize } else { 0 }));
        for batch in batches.take((steps - self.step) as usize) {
            let batch = batch?;
            for part in 0..PARTS {
                self.pass(&batch, part, &mut gradients)?;
            }
            self.adamw.step_clipped(&mut self.model.parameters, &mut gradients, 1e-3, 5.0)?;
            self.ema.update(&self.model.parameters)?;
            self.step += 1;
        }
        Ok(())
    }

    /// Adds the gradients of a micro-batch's share of the loss.
    fn pass(&mut self, batch: &Batch, part: usize, gradients: &mut Gradients) -> Result<()> {
        let labels = &batch.labels[batch.slots(part, PARTS)];
        let of_part = batch.part(part, PARTS);
        let images = Tensor::from_slice(of_part.images, of_part.shape)?; // (N / 2, H, W, 3)
        let labels = Tensor::from_slice(labels, [labels.len()])?; // (N / 2)
        let tape = Tape::new();
        // Each pass has a number of its own, from which it draws the branches that it drops.
        let pass = self.step * PARTS as u64 + part as u64;
        let output = self.model.forward(&tape, &images, Mode::Train { seed: SEED, step: pass })?;
        let loss = ops::cross_entropy(output.logits()?, &labels, 0.1)?;
        tape.backward(&ops::scale(&loss, 1.0 / PARTS as f64)?, gradients)?;
        self.model.update_statistics(&output.trace)?; // which no other pass of this step reads
        Ok(())
    }

    fn save(&self, path: &Path) -> Result<()> {
        let mut file = self.model.state_dict()?; // weights and running statistics, by name
        let AdamWState { steps, m, v } = self.adamw.state();
        let EmaState { updates, average } = self.ema.state();
        file.tensors.extend([("m", m), ("v", v), ("average", average)].map(|(name, of)| (name.to_owned(), of)));
        let numbers = [("step", self.step), ("adamw steps", steps), ("ema updates", updates)];
        file.metadata.extend(numbers.map(|(name, number)| (name.to_owned(), number.to_string())));
        file.write(path)?; // to a temporary file, which then takes the name: a kill leaves the old one or the new one
        Ok(())
    }

    fn resume(path: &Path) -> Result<Self> {
        let mut file = TensorFile::read(path)?;
        let mut take = |name: &str| file.tensors.remove(name).with_context(|| format!("no tensor {name}"));
        let (m, v, average) = (take("m")?, take("v")?, take("average")?);
        let number =
            |name: &str| Ok::<u64, anyhow::Error>(file.metadata.get(name).context("a number is missing")?.parse()?);
        let (step, steps, updates) = (number("step")?, number("adamw steps")?, number("ema updates")?);
        let mut training = Training { step, ..Self::begin()? };
        training.model.load(&file, "the saved model")?; // what is left are its own tensors
        training.adamw.restore(&AdamWState { steps, m, v })?;
        training.ema.restore(&EmaState { updates, average })?;
        Ok(training)
    }

    /// The logits of some images (N, H, W, 3) by the averaged weights, with the running statistics of the model.
    fn averaged_logits(&self, images: &Tensor) -> Result<Tensor> {
        let tape = Tape::inference();
        let pass = Pass::new(&tape, Mode::Evaluate, self.ema.average(), &self.model.statistics);
        Ok(self.model.run(&pass, images)?.remove(0).into_value())
    }
}

/// Trains at a stretch, and with a stop in between, and shows that both leave the same file.
pub fn main() -> Result<()> {
    let images = data::open("embedded", Split::Train)?;
    let transform = Transform::train(32, images.statistics(), &Augmentation::default())?;
    let loader = Loader::new(images, LoaderConfig { parts: PARTS, ..LoaderConfig::train(32, SEED, transform) })?;
    let folder = tempfile::tempdir()?; // goes with its contents when the example ends
    let [whole, stopped] = ["whole", "stopped"].map(|name| folder.path().join(format!("{name}.safetensors")));

    let mut training = Training::begin()?;
    training.run(&loader, STEPS)?;
    training.save(&whole)?;

    let mut begun = Training::begin()?;
    begun.run(&loader, 5)?;
    begun.save(&stopped)?;
    drop(begun); // as if the program had ended
    let mut resumed = Training::resume(&stopped)?;
    println!("saved after step 5, going on with step {}", resumed.step + 1);
    resumed.run(&loader, STEPS)?;
    resumed.save(&stopped)?;

    ensure!(std::fs::read(&whole)? == std::fs::read(&stopped)?, "the files differ");
    println!("after step {STEPS} the files are equal, byte for byte");
    let test = data::open("embedded", Split::Test)?;
    let image = Transform::eval(32, loader.dataset().statistics())?.pixels(&test.get(0)?.image);
    let logits = resumed.averaged_logits(&Tensor::from_slice(&image, [1, 32, 32, 3])?)?;
    println!("the averaged model gives {:.2?}", logits.to_vec::<f32>()?);
    Ok(())
}
