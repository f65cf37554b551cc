//! A run is a plain loop over the library's parts, with the settings of its configuration.

mod common;

use anyhow::Result;
use biformer::autograd::{Gradients, Tape};
use biformer::config::{Changes, RunConfig};
use biformer::data::{self, Dataset, Loader, LoaderConfig, Sample, Split, Statistics, Transform};
use biformer::model::{BiFormer, Mode, TensorFile};
use biformer::ops;
use biformer::optim::{AdamW, AdamWConfig, Ema, EmaConfig};
use biformer::tensor::{DType, Tensor};
use biformer::threads::pool;
use biformer::trainer::{Images, Outcome, Trainer};
use common::program::{assert_same_run, fresh, place, text};
use common::samples;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const STATISTICS: Statistics = Statistics { mean: [0.5, 0.25, 0.125], std: [0.5, 0.5, 1.0] };
const AVERAGED: EmaConfig = EmaConfig { decay: 0.5, warmup: false };

/// Two short epochs of a small model, with every setting of a step unlike its default.
fn config(folder: &std::path::Path, mixed: bool) -> Result<RunConfig> {
    let mut config = RunConfig::for_model("nano")?;
    let fields = ["depth=1,1", "embed_dim=8,16", "topks=2,-2", "n_win=2", "head_dim=4", "full_attention_heads=4"];
    config.architecture = config.architecture.with_overrides(fields)?.with_overrides(["drop_path=0.5"])?;
    (config.epochs, config.batch_size, config.micro_batches, config.seed) = (2, 32, 2, 6);
    (config.label_smoothing, config.clip_norm) = (0.3, 0.01);
    (config.backbone_lr, config.layer_decay) = (0.25, 0.5);
    config.optimizer = AdamWConfig { betas: [0.5, 0.9], eps: 1e-6, weight_decay: 0.5 };
    config.schedule.warmup_epochs = 0.5;
    (config.ema.enabled, config.ema.decay, config.ema.warmup) = (true, AVERAGED.decay, AVERAGED.warmup);
    [config.preprocessing.mean, config.preprocessing.std] =
        [STATISTICS.mean, STATISTICS.std].map(|of| of.map(f64::from).to_vec());
    config.augmentation.erase = 0.5;
    if mixed {
        (config.augmentation.mixup, config.augmentation.cutmix, config.augmentation.repeats) = (0.8, 1.0, 3);
        config.augmentation.balance = 0.5;
    }
    config.data = text(&samples::cifar10(&folder.join("data"))).to_owned();
    config.out = folder.join("run");
    Ok(config)
}

/// The means and the variances that a model evaluates by.
fn statistics(model: &BiFormer) -> impl Iterator<Item = &Tensor> {
    model.statistics.iter().flat_map(|running| [&running.mean, &running.variance])
}

/// The model, and the averages of its parameters and of its statistics.
fn plain_loop(config: &RunConfig) -> Result<(BiFormer, Ema, Vec<Tensor>)> {
    let mut model = BiFormer::new(&config.architecture, config.seed, DType::F32)?;
    let mut gradients = Gradients::new(&model.parameters)?;
    let rates = [
        ("head.", 1.0),
        ("norm.", 0.25),
        ("stages.1.0.", 0.125),
        ("downsample_layers.1.", 0.125),
        ("stages.0.0.", 0.0625),
        ("downsample_layers.0.", 0.03125),
    ];
    let rate_of = |name: &str| rates.iter().find(|(part, _)| name.starts_with(part)).unwrap().1;
    let mut adamw = AdamW::with_rates(&model.parameters, config.optimizer, rate_of)?;
    let mut average = Ema::new(&model.parameters, AVERAGED)?;
    let mut averages = statistics(&model).map(Tensor::duplicate).collect::<Result<Vec<_>, _>>()?;
    let images = data::open(&config.data, Split::Train)?;
    let transform = Transform::train(config.image_size, STATISTICS, &config.augmentation)?;
    let mut loading = LoaderConfig::train(config.batch_size, config.seed, transform);
    loading.parts = 2;
    loading.smoothing = 0.3;
    let loader = Loader::new(images, loading)?;
    let schedule = config.schedule(loader.batches_per_epoch())?;
    let batches = (0..config.epochs as u64).flat_map(|epoch| loader.epoch(epoch, 0));
    for (step, batch) in (0..).zip(batches) {
        let batch = batch?;
        for (pass, (half, images)) in (2 * step..).zip(batch.images.chunks(16 * 32 * 32 * 3).enumerate()) {
            let tape = Tape::new();
            let images = Tensor::from_slice(images, [16, 32, 32, 3])?;
            let output = model.forward(&tape, &images, Mode::Train { seed: config.seed, step: pass })?;
            let loss = if config.augmentation.mixup > 0.0 {
                let targets = batch.targets.chunks(16 * 10).nth(half).unwrap();
                ops::soft_cross_entropy(output.logits()?, &Tensor::from_slice(targets, [16, 10])?)?
            } else {
                let labels = batch.labels.chunks(16).nth(half).unwrap();
                ops::cross_entropy(output.logits()?, &Tensor::from_slice(labels, [16])?, 0.3)?
            };
            tape.backward(&ops::scale(&loss, 0.5)?, &mut gradients)?;
            model.update_statistics(&output.trace)?;
        }
        let norm = adamw.step_clipped(&mut model.parameters, &mut gradients, schedule.lr(step), 0.01)?;
        assert!(norm > 0.01, "step {step} should have something to clip");
        average.update(&model.parameters)?;
        for (average, value) in averages.iter_mut().zip(statistics(&model)) {
            average.move_towards(value, &Tensor::from_slice(&[1.0 - AVERAGED.decay as f32], [1])?)?;
        }
    }
    Ok((model, average, averages))
}

fn assert_a_run_is_the_plain_loop(config: RunConfig) -> Result<()> {
    let checkpoint = config.out.join("checkpoint.safetensors");
    // Threads like the run's own, which flush denormals.
    let (model, average, averages) = pool(2)?.install(|| plain_loop(&config))?;
    let (expected, average) = (model.state_dict()?, average.average().flat().to_vec::<f32>()?);
    let averages: Vec<f32> = averages.iter().flat_map(|average| average.to_vec::<f32>().unwrap()).collect();
    assert_eq!(Trainer::new(config)?.run(&AtomicBool::new(false))?, Outcome::Finished);
    let mut trained = TensorFile::read(&checkpoint)?;
    assert!(trained.tensors["average.parameters"].to_vec::<f32>()? == average, "the average differs");
    assert!(trained.tensors["average.statistics"].to_vec::<f32>()? == averages, "that of the statistics differs");
    trained.metadata.clear();
    trained.tensors.retain(|name, _| expected.tensors.contains_key(name));
    assert!(trained.to_bytes()? == expected.to_bytes()?, "some tensor differs");
    Ok(())
}

#[test]
fn a_run_leaves_the_bits_of_a_plain_loop() -> Result<()> {
    assert_a_run_is_the_plain_loop(config(&fresh("plain-loop"), false)?)
}

#[test]
fn a_run_on_mixed_images_leaves_the_bits_of_a_plain_loop() -> Result<()> {
    assert_a_run_is_the_plain_loop(config(&fresh("plain-loop-mixed"), true)?)
}

/// Whoever watches a run learns of each epoch once it is stored, and can end the run there, without loss.
#[test]
fn a_run_is_watched_and_ended_after_an_epoch() -> Result<()> {
    let folder = fresh("plain-loop-watched");
    let config = RunConfig { epochs: 3, ..config(&folder, false)? };
    let [whole, ended] = ["whole", "ended"].map(|name| RunConfig { out: folder.join(name), ..config.clone() });
    let stop = AtomicBool::new(false);
    Trainer::new(whole.clone())?.run(&stop)?;
    let mut seen = vec![];
    let outcome = Trainer::new(ended.clone())?.run_watched(&stop, |run| {
        let stored = std::fs::read_to_string(run.folder().path().join("metrics.jsonl")).unwrap();
        seen.push((run.progress().epoch(), stored.lines().count(), place(&ended.out)));
        stop.store(run.progress().epoch() == 2, Ordering::Relaxed);
    })?;
    assert_eq!(outcome, Outcome::Interrupted);
    assert_eq!(seen, [1, 2].map(|epoch| (epoch, epoch, Some((epoch as u64, 0)))), "all of an epoch is stored");
    stop.store(false, Ordering::Relaxed);
    assert_eq!(Trainer::resume(&ended.out, &Changes::default())?.run(&stop)?, Outcome::Finished);
    assert_same_run("ended after an epoch", &whole.out, &ended.out);
    Ok(())
}

/// What tells this program, run again by the test below, that it is to train, and whether it is to be quiet.
const QUIET: &str = "BIFORMER_TEST_QUIET";

/// A program with an output of its own wants none of a run's.
#[test]
fn a_quiet_run_prints_nothing() -> Result<()> {
    const NAME: &str = "a_quiet_run_prints_nothing";
    if let Ok(quiet) = std::env::var(QUIET) {
        biformer::set_quiet(quiet == "true");
        let config = RunConfig { epochs: 1, ..config(&fresh(&format!("plain-loop-quiet-{quiet}")), false)? };
        Trainer::new(config)?.run(&AtomicBool::new(false))?;
        return Ok(());
    }
    let printed = |quiet: &str| -> Result<[String; 2]> {
        let arguments = [NAME, "--exact", "--nocapture"];
        let run = Command::new(std::env::current_exe()?).args(arguments).env(QUIET, quiet).output()?;
        assert!(run.status.success(), "{run:?}");
        Ok([run.stdout, run.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    };
    let of_run = |out: &str| ["Training nano", "epoch   1/1"].map(|part| out.contains(part));
    let ([loud, _], [quiet, notes]) = (printed("false")?, printed("true")?);
    assert!(of_run(&loud) == [true; 2] && of_run(&quiet) == [false; 2] && notes.is_empty(), "{loud}{quiet}{notes}");
    Ok(())
}

/// Images whose first sets a flag when it is asked for.
struct Stopping(Arc<dyn Dataset>, Arc<AtomicBool>);

impl Dataset for Stopping {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn classes(&self) -> &[String] {
        self.0.classes()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize) -> data::Result<Sample> {
        self.1.store(true, Ordering::Relaxed);
        self.0.get(index)
    }

    fn statistics(&self) -> Statistics {
        self.0.statistics()
    }

    fn labels(&self) -> Option<&[u32]> {
        self.0.labels()
    }
}

/// Somebody who stops a run while it waits for images does not wait for a step as well.
#[test]
fn a_run_that_is_stopped_while_it_waits_begins_no_step() -> Result<()> {
    let folder = fresh("plain-loop-stopped");
    let config = config(&folder, false)?;
    let (stop, checkpoint) = (Arc::new(AtomicBool::new(false)), config.out.join("checkpoint.safetensors"));
    let train = Stopping(data::open(&config.data, Split::Train)?, Arc::clone(&stop));
    let images = Images::new(Arc::new(train), data::open(&config.data, Split::Test)?)?;
    let mut trainer = Trainer::on(images, config)?;
    let before = std::fs::read(&checkpoint)?;
    assert_eq!(trainer.run(&stop)?, Outcome::Interrupted);
    assert!(before == std::fs::read(&checkpoint)?, "nothing was learned");
    Ok(())
}

/// An epoch whose test was not complete is not done: the test is made again.
#[test]
fn a_run_that_is_stopped_during_a_test_makes_it_again() -> Result<()> {
    let folder = fresh("plain-loop-stopped-test");
    let config = RunConfig { epochs: 1, batch_size: 8, ..config(&folder, false)? };
    let [whole, stopped] = ["whole", "stopped"].map(|name| RunConfig { out: folder.join(name), ..config.clone() });
    let open = |split| data::open(&config.data, split);
    let images = || Images::new(open(Split::Train)?, open(Split::Test)?);
    let (go, stop) = (AtomicBool::new(false), Arc::new(AtomicBool::new(false)));
    Trainer::on(images()?, whole.clone())?.run(&go)?;
    let test: Arc<dyn Dataset> = Arc::new(Stopping(open(Split::Test)?, Arc::clone(&stop)));
    assert!(test.len() > 2 * config.batch_size, "several batches");
    let mut trainer = Trainer::on(Images::new(open(Split::Train)?, test)?, stopped.clone())?;
    assert_eq!(trainer.run(&stop)?, Outcome::Interrupted);
    drop(trainer);
    let steps = open(Split::Train)?.len() / config.batch_size;
    assert_eq!(place(&stopped.out), Some((0, steps as u64)));
    assert!(!stopped.out.join("metrics.jsonl").exists() && !stopped.out.join("best.safetensors").exists());
    assert_eq!(Trainer::resume_on(images()?, &stopped.out, &Changes::default())?.run(&go)?, Outcome::Finished);
    assert_same_run("stopped during a test", &whole.out, &stopped.out);
    Ok(())
}

/// Given as data sets they are the same images as in a folder, also to a run that goes on.
#[test]
fn a_run_on_images_of_ones_own() -> Result<()> {
    let folder = fresh("plain-loop-own");
    let data = text(&samples::cifar10(&folder.join("data"))).to_owned();
    let config = RunConfig { data, micro_batches: 1, ..config(&folder, false)? };
    let (opened, own) = (folder.join("opened"), folder.join("own"));
    let images = || Images::new(data::open(&config.data, Split::Train)?, data::open(&config.data, Split::Test)?);
    let (go, stop) = (AtomicBool::new(false), AtomicBool::new(true));
    Trainer::new(RunConfig { out: opened.clone(), ..config.clone() })?.run(&go)?;
    let mut trainer = Trainer::on(images()?, RunConfig { out: own.clone(), ..config.clone() })?;
    assert_eq!(trainer.run(&stop)?, Outcome::Interrupted, "after a step");
    drop(trainer);
    assert_eq!(Trainer::resume_on(images()?, &own, &Changes::default())?.run(&go)?, Outcome::Finished);
    let metrics = [&opened, &own].map(|run| std::fs::read(run.join("metrics.jsonl")).unwrap());
    assert!(metrics[0] == metrics[1] && !metrics[0].is_empty());
    // They cannot be opened by the name that they have.
    let unknown = Trainer::resume(&own, &Changes::default()).err().unwrap();
    assert!(format!("{unknown:#}").contains("goes on with Trainer::resume_on"), "{unknown:#}");
    let other = Images::new(data::open(&config.data, Split::Train)?, data::open("embedded", Split::Test)?);
    assert!(other.err().unwrap().to_string().contains("different classes"));
    let none = Trainer::on(images()?, RunConfig { epochs: 0, out: folder.join("none"), ..config.clone() });
    assert!(none.err().unwrap().to_string().contains("epochs = 0"));
    Ok(())
}
