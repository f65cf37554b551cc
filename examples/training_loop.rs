//! A training loop from the library's parts: data, model, loss, backward, AdamW, and a test at its end.
//!
//! What the program's trainer adds to this: a test after each epoch, checkpoints, micro-batches, tapes that keep less,
//! a moving average, pictures, and the name of the operation where a loss became NaN.
//!
//! `cargo run --release --example training_loop`

use anyhow::{Result, ensure};
use biformer::autograd::{Gradients, Tape};
use biformer::config::RunConfig;
use biformer::data::{self, Augmentation, Loader, LoaderConfig, MicroBatch, Split, Targets, Transform};
use biformer::model::{BiFormer, Mode, preset};
use biformer::ops;
use biformer::optim::{AdamW, AdamWConfig, Schedule, ScheduleRule};
use biformer::tensor::{DType, Tensor};
use biformer::trainer::data_facts::DataFacts;
use biformer::trainer::score::tested;
use biformer::trainer::trained::TrainedModel;

/// The share of each target that is spread over all classes.
const SMOOTHING: f64 = 0.1;
const SEED: u64 = 1;
const STEPS: u64 = 60;

/// Trains for some seconds, and shows that the loss falls.
pub fn main() -> Result<()> {
    // nano, made narrower and shallower so that this takes seconds.
    let config = preset("nano")?.config().with_overrides(["depth=1,1,1", "embed_dim=24,48,96"])?;
    let mut model = BiFormer::new(&config, SEED, DType::F32)?;
    let mut gradients = Gradients::new(&model.parameters)?;
    let mut adamw = AdamW::new(&model.parameters, AdamWConfig::default())?;
    let rule = ScheduleRule::Cosine; // per step
    let schedule = Schedule { peak: 3e-3, start: 1e-4, min: 1e-5, warmup: 10, total: STEPS, rule };
    schedule.check()?; // an error, for instance, if the warm-up is longer than the run

    let images = data::open("embedded", Split::Train)?;
    let (classes, statistics) = (images.classes().to_vec(), images.statistics());
    let transform = Transform::train(32, statistics, &Augmentation::default())?;
    let batches_of_32 = LoaderConfig { smoothing: SMOOTHING, ..LoaderConfig::train(32, SEED, transform) };
    let loader = Loader::new(images, batches_of_32)?;

    let mut losses = vec![];
    let batches = (0..).flat_map(|epoch| loader.epoch(epoch, 0)); // each in an order of its own
    for (step, batch) in (0..STEPS).zip(batches) {
        let batch = batch?;
        let MicroBatch { images, shape, targets } = batch.part(0, 1); // the whole batch
        let images = Tensor::from_slice(images, shape)?; // (N, H, W, 3)

        let tape = Tape::new();
        let output = model.forward(&tape, &images, Mode::Train { seed: SEED, step })?;
        let loss = match targets {
            Targets::Classes(labels) => {
                let labels = Tensor::from_slice(labels, [labels.len()])?; // (N)
                ops::cross_entropy(output.logits()?, &labels, SMOOTHING)?
            }
            Targets::Distributions(shares, shape) => {
                // Where the augmentation has mixup or cutmix; the loader has smoothed them.
                let shares = Tensor::from_slice(shares, shape)?; // (N, K)
                ops::soft_cross_entropy(output.logits()?, &shares)?
            }
        };
        losses.push(loss.value().item::<f32>()?);
        tape.backward(&loss, &mut gradients)?;
        gradients.require_all()?; // a parameter without a path to the loss is an error

        let trace = output.trace; // the batch's statistics, for BatchNorm in evaluation
        drop((output.values, loss)); // once nothing looks at the parameters they can be written
        drop(tape);
        adamw.step_clipped(&mut model.parameters, &mut gradients, schedule.lr(step), 5.0)?;
        model.update_statistics(&trace)?;
        if step % 10 == 9 {
            println!("step {:>2}  mean loss of the last ten {:.3}", step + 1, mean(&losses[step as usize - 9..]));
        }
    }
    ensure!(mean(&losses[50..]) < mean(&losses[..10]), "the loss did not fall");

    let images = data::open("embedded", Split::Test)?;
    let loader = Loader::new(images, LoaderConfig::eval(100, Transform::eval(32, statistics)?))?;
    let test = tested(&model, &loader)?;
    println!("{:.1} % of {} test images are right", 100.0 * test.all.accuracy(), test.all.images);
    ensure!(test.all.accuracy() > 0.15, "no better than chance, which is 0.1");

    // A file that `biformer predict`, `eval` and `info` take, as they take those of `biformer export`.
    let config = RunConfig { architecture: config, image_size: 32, ..RunConfig::for_model("nano")? };
    let trained = TrainedModel { model, config, data: DataFacts::unknown(classes, statistics), named: true };
    let folder = tempfile::tempdir()?; // goes with its contents when the example ends
    trained.export()?.write(&folder.path().join("model.safetensors"))?;
    Ok(())
}

fn mean(losses: &[f32]) -> f32 {
    losses.iter().sum::<f32>() / losses.len() as f32
}
