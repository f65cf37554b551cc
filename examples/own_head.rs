//! A custom head on a BiFormer with pretrained weights: first trained alone, on a frozen backbone, and then together
//! with the backbone.
//!
//! The weights are those of a short run, made here. In practice they would be of a longer one on more images, or those
//! of a file, as `biformer export` writes it or as they are published: `TensorFile::read(path)?`.
//!
//! `cargo run --release --example own_head`

use anyhow::{Result, ensure};
use biformer::autograd::{Gradients, Tape, Var};
use biformer::config::{Changes, RunConfig};
use biformer::data::{self, Augmentation, Batch, Loader, LoaderConfig, Split, Transform};
use biformer::model::{BiFormer, LayerNorm, Linear, Mode, TensorFile, Trace};
use biformer::ops;
use biformer::optim::{AdamW, AdamWConfig};
use biformer::tensor::{DType, Tensor};
use biformer::trainer::Trainer;
use biformer::trainer::stored::Stored;
use std::sync::atomic::AtomicBool;

const SEED: u64 = 1;

/// Two layers on the pooled map (N, 96), with a normalisation before them.
struct Head {
    norm: LayerNorm,
    layers: [Linear; 2],
}

impl Head {
    /// The loss of a batch, and what the pass leaves.
    fn loss<'t>(&self, model: &BiFormer, tape: &'t Tape, batch: &Batch, mode: Mode) -> Result<(Var<'t>, Trace)> {
        let images = Tensor::from_slice(&batch.images, batch.shape)?; // (N, H, W, 3)
        let labels = Tensor::from_slice(&batch.labels, [batch.labels.len()])?; // (N)
        let pass = model.pass(tape, mode)?;
        let pooled = self.norm.forward(&pass, &model.run(&pass, &images)?[0])?;
        let hidden = ops::gelu(&self.layers[0].forward(&pass, &pooled)?)?;
        let loss = ops::cross_entropy(&self.layers[1].forward(&pass, &hidden)?, &labels, 0.1)?;
        Ok((loss, pass.into_trace()))
    }

    /// The mean loss of all images of a loader.
    fn test(&self, model: &BiFormer, loader: &Loader) -> Result<f32> {
        let mut losses = vec![];
        for batch in loader.epoch(0, 0) {
            losses.push(self.loss(model, &Tape::inference(), &batch?, Mode::Evaluate)?.0.value().item::<f32>()?);
        }
        Ok(losses.iter().sum::<f32>() / losses.len() as f32) // of batches of equal size
    }
}

/// The run whose weights the head is put on: of nano, made narrower and shallower so that this takes seconds.
fn pretraining() -> Result<RunConfig> {
    let architecture = "architecture.depth = [1, 1, 1]\narchitecture.embed_dim = [24, 48, 96]";
    RunConfig::changed(&Changes::parse(&format!("epochs = 3\n{architecture}"))?)
}

fn pretrained(run: RunConfig) -> Result<TensorFile> {
    let folder = tempfile::tempdir()?; // goes with its contents at the end of this function
    let out = folder.path().join("run");
    Trainer::new(RunConfig { out: out.clone(), ..run })?.run(&AtomicBool::new(false))?;
    Stored::read(&out)?.into_weights()
}

/// Trains for some seconds, and shows that the loss falls with the head alone, and further with the backbone.
pub fn main() -> Result<()> {
    let run = pretraining()?;
    let config = run.architecture.with_overrides(["features=pooled"])?;
    // The head's parameters are stored after the backbone's: one tape, one optimiser and one file cover both.
    let (mut model, head) = BiFormer::with(&config, SEED, DType::F32, |builder| Head {
        norm: LayerNorm::new(builder, "own.norm", 96),
        layers: [Linear::new(builder, "own.0", 96, 64, true), Linear::new(builder, "own.1", 64, 10, true)],
    })?;
    model.load(&pretrained(run)?, "weights")?; // all but its head, which this model does not have

    let images = data::open("embedded", Split::Train)?;
    let statistics = images.statistics();
    let transform = Transform::train(32, statistics, &Augmentation::default())?;
    let loader = Loader::new(images, LoaderConfig::train(32, SEED, transform))?;
    let mut batches = loader.epoch(0, 0);
    let test_images = data::open("embedded", Split::Test)?;
    let test_loader = Loader::new(test_images, LoaderConfig::eval(100, Transform::eval(32, statistics)?))?;

    let mut tests = vec![head.test(&model, &test_loader)?];
    let mut steps = 0..;
    for (name, frozen, lr) in [("the head", &["downsample_layers", "stages", "norm"][..], 1e-2), ("all", &[], 5e-4)] {
        model.freeze(frozen)?;
        // Created anew: freezing changes the model's layout, and gradients and optimisers of the old layout are
        // refused.
        let mut gradients = Gradients::new(&model.parameters)?;
        let mut adamw = AdamW::new(&model.parameters, AdamWConfig::default())?;
        for (step, batch) in steps.by_ref().take(60).zip(&mut batches) {
            let tape = Tape::new();
            let (loss, trace) = head.loss(&model, &tape, &batch?, Mode::Train { seed: SEED, step })?;
            tape.backward(&loss, &mut gradients)?;
            drop(loss);
            drop(tape); // once nothing looks at the parameters they can be written
            adamw.step(&mut model.parameters, &mut gradients, lr)?;
            model.update_statistics(&trace)?;
        }
        tests.push(head.test(&model, &test_loader)?);
        println!("training {name}: test loss from {:.3} to {:.3}", tests[tests.len() - 2], tests[tests.len() - 1]);
    }
    ensure!(tests.is_sorted_by(|before, after| after + 0.05 < *before), "the loss did not fall: {tests:?}");
    Ok(())
}
