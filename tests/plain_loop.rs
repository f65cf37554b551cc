//! A run is a plain loop over the library's parts, with the settings of its configuration.

mod common;

use anyhow::Result;
use biformer::autograd::{Gradients, Tape};
use biformer::config::RunConfig;
use biformer::data::{self, Loader, LoaderConfig, Split, Transform};
use biformer::model::{BiFormer, Mode, TensorFile};
use biformer::ops;
use biformer::optim::{AdamW, AdamWConfig, clip_factor, gradient_norm};
use biformer::tensor::{DType, Tensor};
use biformer::threads::pool;
use biformer::trainer::{Outcome, Trainer};
use common::program::{fresh, text};
use common::samples;
use std::sync::atomic::AtomicBool;

/// Two short epochs of a small model, with every setting of a step unlike its default.
fn config(folder: &std::path::Path) -> Result<RunConfig> {
    let mut config = RunConfig::for_model("nano")?;
    let fields = ["depth=1,1", "embed_dim=8,16", "topks=2,-2", "n_win=2", "head_dim=4", "full_attention_heads=4"];
    config.architecture = config.architecture.with_overrides(fields)?.with_overrides(["drop_path=0.5"])?;
    (config.epochs, config.batch_size, config.micro_batches, config.seed) = (2, 32, 2, 6);
    (config.label_smoothing, config.clip_norm) = (0.3, 0.01);
    config.optimizer = AdamWConfig { betas: [0.5, 0.9], eps: 1e-6, weight_decay: 0.5 };
    config.schedule.warmup_epochs = 0.5;
    config.augmentation.erase = 0.5;
    config.data = text(&samples::cifar10(&folder.join("data"))).to_owned();
    config.out = folder.join("run");
    Ok(config)
}

fn plain_loop(config: &RunConfig) -> Result<BiFormer> {
    let mut model = BiFormer::new(&config.architecture, config.seed, DType::F32)?;
    let mut gradients = Gradients::new(&model.parameters)?;
    let mut adamw = AdamW::new(&model.parameters, config.optimizer)?;
    let images = data::open(&config.data, Split::Train)?;
    let transform = Transform::train(config.image_size, images.statistics(), &config.augmentation)?;
    let loader = Loader::new(images, LoaderConfig::train(config.batch_size, config.seed, transform))?;
    let schedule = config.schedule(loader.batches_per_epoch())?;
    let batches = (0..config.epochs as u64).flat_map(|epoch| loader.epoch(epoch, 0));
    for (step, batch) in (0..).zip(batches) {
        let batch = batch?;
        gradients.begin_step();
        let halves = batch.images.chunks(16 * 32 * 32 * 3).zip(batch.labels.chunks(16));
        for (pass, (images, labels)) in (2 * step..).zip(halves) {
            let tape = Tape::new();
            let images = Tensor::from_slice(images, [16, 32, 32, 3])?;
            let output = model.forward(&tape, &images, Mode::Train { seed: config.seed, step: pass })?;
            let loss = ops::cross_entropy(output.logits(), &Tensor::from_slice(labels, [16])?, 0.3)?;
            tape.backward(&ops::scale(&loss, 0.5)?, &mut gradients)?;
            model.update_statistics(&output.trace)?;
        }
        let norm = gradient_norm(&gradients)?;
        assert!(norm > 0.01, "step {step} should have something to clip");
        adamw.step_scaled(&mut model.parameters, &gradients, schedule.lr(step), clip_factor(norm, 0.01)?)?;
    }
    Ok(model)
}

#[test]
fn a_run_leaves_the_bits_of_a_plain_loop() -> Result<()> {
    let config = config(&fresh("plain-loop"))?;
    let checkpoint = config.out.join("checkpoint.safetensors");
    // Threads like the run's own, which flush denormals.
    let expected = pool(2)?.install(|| plain_loop(&config))?.state_dict()?;
    assert!(matches!(Trainer::new(config)?.run(&AtomicBool::new(false))?, Outcome::Finished { .. }));
    let mut trained = TensorFile::read(&checkpoint)?;
    trained.metadata.clear();
    trained.tensors.retain(|name, _| expected.tensors.contains_key(name));
    assert!(trained.to_bytes()? == expected.to_bytes()?, "some tensor differs");
    Ok(())
}
