//! A custom head on a BiFormer: first trained alone, on a frozen backbone, and then together with the backbone.
//!
//! In practice the backbone would start from pretrained weights: `model.load(&TensorFile::read(path)?, "weights")` of
//! those that `biformer export` wrote, or of a run `Stored::read(folder)?.into_weights()?`.
//!
//! `cargo run --release --example own_head`

use anyhow::{Result, ensure};
use biformer::autograd::{Gradients, Tape};
use biformer::data::{self, Augmentation, Loader, LoaderConfig, Split, Transform};
use biformer::model::{BiFormer, LayerNorm, Linear, Mode, preset};
use biformer::ops;
use biformer::optim::{AdamW, AdamWConfig};
use biformer::tensor::{DType, Tensor};

const SEED: u64 = 1;

/// Two layers on the pooled map (N, 96), with a normalisation before them.
struct Head {
    norm: LayerNorm,
    layers: [Linear; 2],
}

/// Trains for some seconds, and shows that the loss falls with the head alone, and further with the backbone.
pub fn main() -> Result<()> {
    let fields = ["features=pooled", "depth=1,1,1", "embed_dim=24,48,96"];
    let config = preset("nano")?.config().with_overrides(fields)?;
    // The head's parameters are stored after the backbone's: one tape, one optimiser and one file cover both.
    let (mut model, head) = BiFormer::with(&config, SEED, DType::F32, |builder| Head {
        norm: LayerNorm::new(builder, "own.norm", 96),
        layers: [Linear::new(builder, "own.0", 96, 64, true), Linear::new(builder, "own.1", 64, 10, true)],
    })?;

    let images = data::open("embedded", Split::Train)?;
    let transform = Transform::train(32, images.statistics(), &Augmentation::default())?;
    let loader = Loader::new(images, LoaderConfig::train(32, SEED, transform))?;
    let mut batches = loader.epoch(0, 0);

    let (mut means, mut steps) = (vec![], 0..);
    for (name, frozen, lr) in [("the head", &["downsample_layers", "stages", "norm"][..], 1e-2), ("all", &[], 3e-3)] {
        model.freeze(frozen)?;
        // Created anew: freezing changes the model's layout, and gradients and optimisers of the old layout are
        // refused.
        let mut gradients = Gradients::new(&model.parameters)?;
        let mut adamw = AdamW::new(&model.parameters, AdamWConfig::default())?;
        let mut losses = vec![];
        for (step, batch) in steps.by_ref().take(40).zip(&mut batches) {
            let batch = batch?;
            let images = Tensor::from_slice(&batch.images, batch.shape)?; // (N, H, W, 3)
            let labels = Tensor::from_slice(&batch.labels, [batch.labels.len()])?; // (N)

            let tape = Tape::new();
            let pass = model.pass(&tape, Mode::Train { seed: SEED, step })?;
            let pooled = head.norm.forward(&pass, &model.run(&pass, &images)?[0])?;
            let hidden = ops::gelu(&head.layers[0].forward(&pass, &pooled)?)?;
            let loss = ops::cross_entropy(&head.layers[1].forward(&pass, &hidden)?, &labels, 0.1)?;
            losses.push(loss.value().item::<f32>()?);
            tape.backward(&loss, &mut gradients)?;

            let trace = pass.into_trace();
            drop((pooled, hidden, loss));
            drop(tape);
            adamw.step(&mut model.parameters, &mut gradients, lr)?;
            model.update_statistics(&trace)?;
        }
        means.push(losses[30..].iter().sum::<f32>() / 10.0);
        println!("training {name}: loss {:.3} at first, {:.3} at last", losses[0], means[means.len() - 1]);
    }
    ensure!(means[0] < 2.3 && means[1] < means[0], "the loss did not fall: {means:?}");
    Ok(())
}
