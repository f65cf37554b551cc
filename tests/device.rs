//! Training on a GPU, the machine's or the emulated one, against the CPU: the same steps, the same files. And on the
//! CPU in bf16 against f32.

mod common;

use biformer::config::{Changes, Recompute, RunConfig};
use biformer::device::{DeviceName, Precision};
use biformer::inference::Inference;
use biformer::staging::Numbered;
use biformer::trainer::learner::Learner;
use biformer::trainer::{Outcome, Trainer};
use common::program::{assert_same_run, biformer, fresh, json, text};
use common::samples;
use data::Batch;
use model::BiFormer;
use standin::Standin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tensor::cuda::Gpu;
use tensor::cuda::nvidia::compiler::version;
use tensor::{DType, Tensor};

/// The device to test by name; none where there is none.
fn there() -> Option<DeviceName> {
    Gpu::for_tests(0)?;
    Some(if std::env::var_os("BIFORMER_TEST_GPU").is_some() { DeviceName::Cuda(0) } else { DeviceName::Emulated })
}

/// A small model whose heads suit tensor cores, and in which blocks are dropped.
fn config(device: DeviceName, precision: Precision) -> RunConfig {
    let mut config = RunConfig::for_model("nano").unwrap();
    let changes = ["depth=1,1,1", "embed_dim=32,64,128", "head_dim=32", "full_attention_heads=2", "drop_path=0.3"];
    config.architecture = config.architecture.with_overrides(changes).unwrap();
    (config.device, config.precision, config.ema.enabled) = (device, precision, true);
    config
}

fn batch(step: usize) -> Numbered {
    batch_of(4, step)
}

fn batch_of(count: usize, step: usize) -> Numbered {
    let images = (0..count * 32 * 32 * 3).map(|i| ((i + 977 * step) as f32 * 0.37).sin()).collect();
    let labels = (0..count).map(|image| ((image + step) % 10) as u32).collect();
    Batch { images, shape: [count, 32, 32, 3], labels, ..Batch::default() }.into()
}

/// The losses of ten steps, and the weights after them.
fn train(device: DeviceName, precision: Precision) -> (Vec<f64>, Vec<f64>) {
    let config = config(device, precision);
    ten_steps(&mut Learner::new(&config).unwrap())
}

/// Fewer where `STEPS` says so: the second is recorded and replayed, and those after it are all replayed.
fn ten_steps(learner: &mut Learner) -> (Vec<f64>, Vec<f64>) {
    steps(std::env::var("STEPS").map_or(10, |steps| steps.parse().unwrap()), learner, |_| None)
}

/// So many of them, where `ahead` says which batch is sent ahead in each step.
fn steps(count: usize, learner: &mut Learner, ahead: impl Fn(usize) -> Option<usize>) -> (Vec<f64>, Vec<f64>) {
    steps_on(&(0..count).map(batch).collect::<Vec<_>>(), learner, ahead)
}

fn steps_on(
    batches: &[Numbered],
    learner: &mut Learner,
    ahead: impl Fn(usize) -> Option<usize>,
) -> (Vec<f64>, Vec<f64>) {
    let losses = batches.iter().enumerate().map(|(step, batch)| {
        let next = || batches.get(ahead(step)?);
        learner.train(batch, step as u64, 1e-3, next).unwrap().mean_loss()
    });
    let losses = losses.collect();
    let weights = learner.model().parameters.flat().cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
    (losses, weights)
}

/// The norm of the difference, relative to that of the second.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

/// What whoever has a GPU of a kind that was never tried begins with.
#[test]
fn gradcheck_compares_the_devices_kernels() {
    let Some(device) = there() else { return };
    let report = fresh(&format!("device-gradcheck-{device}")).join("report.json");
    let check = ["gradcheck", "--op", "scale", "--device", &device.to_string(), "--report", text(&report)];
    // Twice, as a report may take the place of an earlier one.
    for _ in 0..2 {
        let said = biformer(&check).ok().out;
        assert!(said.contains("1 operation, 0 failures") && !said.contains("FAILED"), "{said}");
    }
    let reports = json(&std::fs::read_to_string(report).unwrap());
    for (place, (dtype, most)) in [("bf16", 1.5e-2), ("f32", 2e-5), ("f64", 1e-11)].into_iter().enumerate() {
        let report = &reports[place];
        assert_eq!((&report["type"], &report["passed"]), (&dtype.into(), &true.into()), "{report}");
        assert!(report["cases"].as_u64() > Some(3) && report["gradient_error"].as_f64() < Some(most), "{report}");
    }
}

/// Of batches, and their average: what a test after an epoch normalises by.
#[test]
fn statistics_move_as_on_the_cpu() {
    let Some(device) = there() else { return };
    let numbers = |model: &BiFormer| -> Vec<f64> {
        let all = model.statistics.iter().flat_map(|running| [&running.mean, &running.variance]);
        all.flat_map(|numbers| numbers.cast(DType::F64).unwrap().to_vec::<f64>().unwrap()).collect()
    };
    let run = |device| {
        let config = RunConfig { micro_batches: 2, clip_norm: 0.01, ..config(device, Precision::F32) };
        let mut learner = Learner::new(&config).unwrap();
        let (losses, _) = steps(4, &mut learner, |_| None);
        assert_eq!(learner.model().statistics[0].batches, 8);
        [losses, numbers(learner.model()), learner.with_average(|model| Ok(numbers(model))).unwrap()]
    };
    let (here, there) = (run(DeviceName::Cpu), run(device));
    for (what, (there, here)) in ["losses", "statistics", "average"].iter().zip(there.iter().zip(&here)) {
        let error = distance(there, here);
        println!("{what}: {error:.1e}");
        assert!(error < 1e-4, "{what}: {error}");
    }
    assert!(distance(&here[1], &here[2]) > 1e-2, "they differ");
}

#[test]
fn ten_steps_are_those_of_f32_on_the_cpu() {
    let on_gpu = there().map(|gpu| [(gpu, Precision::F32, [1e-5, 2e-3]), (gpu, Precision::Bf16, [2e-3, 2e-2])]);
    let on_cpu = (DeviceName::Cpu, Precision::Bf16, [2e-3, 2e-2]);
    let (losses, weights) = train(DeviceName::Cpu, Precision::F32);
    // Losses, and weights. Those lie further apart: the gradient of a key's bias is nothing but rounding (a softmax
    // does not see it), and Adam makes steps of full length of it.
    for (device, precision, bounds) in on_gpu.into_iter().flatten().chain([on_cpu]) {
        let (there, weights_there) = train(device, precision);
        let errors = [distance(&there, &losses), distance(&weights_there, &weights)];
        assert!(errors[1] > 0.0, "{device} {precision:?}: something differs");
        println!("{device} {precision:?}: losses {:.1e}, weights {:.1e}", errors[0], errors[1]);
        assert!(
            errors.iter().zip(bounds).all(|(&error, bound)| error < bound),
            "{device} {precision:?}: {errors:?}\n{there:?}\n{losses:?}"
        );
    }
}

#[test]
fn a_recorded_step_has_the_bits_of_one_that_is_not() {
    let Some(device) = there() else { return };
    // A replay has random streams of its own for what is dropped, none of them in what is frozen.
    let frozen = vec!["stages.1".to_owned()];
    for (micro_batches, recompute, freeze) in [(1, Recompute::Cheap, vec![]), (2, Recompute::Block, frozen)] {
        let mut config = config(device, Precision::Bf16);
        (config.micro_batches, config.recompute, config.freeze) = (micro_batches, recompute, freeze);
        let recorded = steps(5, &mut Learner::new(&config).unwrap(), |_| None);
        let mut watched = Learner::new(&config).unwrap();
        // A step that is watched is not recorded.
        watched.profile = Some(Arc::default());
        assert_eq!(steps(5, &mut watched, |_| None), recorded, "{micro_batches} parts");
    }
}

#[test]
fn a_replayed_step_changes_no_statistics_that_somebody_else_holds() {
    let Some(device) = there() else { return };
    let mut learner = Learner::new(&config(device, Precision::F32)).unwrap();
    steps(3, &mut learner, |_| None);
    let next = |learner: &mut Learner| learner.train(&batch(3), 3, 1e-3, || None);
    let held = learner.model().statistics[0].mean.clone();
    let error = next(&mut learner).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(tensor::Error::Shared { .. })), "{error:#}");
    drop(held);
    next(&mut learner).unwrap();
}

/// Recorded, with the next batch sent ahead, as it stands, and on the CPU.
#[test]
fn mixed_images_are_learned_from_as_on_the_cpu() {
    let Some(device) = there() else { return };
    let mixed = |step: usize| {
        let mut batch = batch(step).into_batch();
        let share = (step + 1) as f32 / 5.0;
        batch.targets = vec![0.0; 4 * 10];
        for (image, &label) in batch.labels.iter().enumerate() {
            batch.targets[image * 10 + label as usize] += share;
            batch.targets[image * 10 + 9 - label as usize] += 1.0 - share;
        }
        Numbered::from(batch)
    };
    let batches: Vec<Numbered> = (0..4).map(mixed).collect();
    let run = |device: DeviceName, watched: bool, ahead: fn(usize) -> Option<usize>| {
        let config = RunConfig { micro_batches: 2, ..config(device, Precision::F32) };
        let mut learner = Learner::new(&config).unwrap();
        learner.profile = watched.then(Arc::default);
        steps_on(&batches, &mut learner, ahead)
    };
    let (losses, weights) = run(DeviceName::Cpu, false, |_| None);
    let there = run(device, true, |_| None);
    assert!(run(device, false, |step| Some(step + 1)) == there, "recorded and sent ahead");
    let errors = [distance(&there.0, &losses), distance(&there.1, &weights)];
    assert!(errors[0] < 1e-5 && errors[1] < 2e-3, "{errors:?}");
    let plain = RunConfig { micro_batches: 2, ..config(DeviceName::Cpu, Precision::F32) };
    let (plain, _) = steps(4, &mut Learner::new(&plain).unwrap(), |_| None);
    assert!(distance(&plain, &losses) > 1e-3, "targets are not labels");
}

#[test]
fn what_is_computed_again_has_the_bits_of_what_is_kept() {
    let Some(device) = there() else { return };
    // A mean is a product with 1/C, which is rounded where C is no power of two; a GPU's compiler, unlike this one,
    // would leave that out before a subtraction, if it were let.
    let odd = ["embed_dim=24,48,96", "head_dim=24"];
    for (precision, changes) in
        [(Precision::F32, &[][..]), (Precision::Bf16, &[]), (Precision::F32, &odd), (Precision::Bf16, &odd)]
    {
        let run = |recompute: Recompute| {
            let mut config = RunConfig { recompute, ..config(device, precision) };
            config.architecture = config.architecture.with_overrides(changes.iter().copied()).unwrap();
            steps(2, &mut Learner::new(&config).unwrap(), |_| None)
        };
        let kept = run(Recompute::None);
        for recompute in [Recompute::Cheap, Recompute::Block] {
            assert!(run(recompute) == kept, "{precision:?} {recompute:?} {changes:?}");
        }
    }
}

#[test]
fn a_batch_that_was_sent_ahead_is_the_one_whose_turn_it_is() {
    let Some(device) = there() else { return };
    let mut config = config(device, Precision::Bf16);
    config.micro_batches = 2;
    let ahead = |which: fn(usize) -> Option<usize>| steps(6, &mut Learner::new(&config).unwrap(), which);
    let expected = ahead(|_| None);
    assert_eq!(ahead(|step| Some(step + 1)), expected);
    assert_eq!(ahead(|step| (step % 3 == 1).then_some(step + 1)), expected, "now and then");
    assert_eq!(ahead(|step| Some(step / 2)), expected, "another one comes than was sent");
    let mut learner = Learner::new(&config).unwrap();
    let small = batch_of(2, 1);
    learner.train(&batch(0), 0, 1e-3, || Some(&small)).unwrap();
    learner.train(&small, 1, 1e-3, || None).expect("one of another size, which is not sent ahead");
}

#[test]
fn a_run_that_stops_and_goes_on_has_the_bits_of_one_that_does_not() {
    let Some(device) = there() else { return };
    let folder = fresh(&format!("device-stops-{device}"));
    let data = text(&samples::cifar10_of(&folder.join("data"), 8)).to_owned();
    let config = |out: &str| {
        let (data, out) = (data.clone(), folder.join(out));
        let mut config = RunConfig { data, out, epochs: 1, batch_size: 8, ..config(device, Precision::Bf16) };
        config.schedule.warmup_epochs = 1.0;
        config
    };
    let (go, stop) = (AtomicBool::new(false), AtomicBool::new(true));
    Trainer::new(config("whole")).unwrap().run(&go).unwrap();
    assert_eq!(Trainer::new(config("parts")).unwrap().run(&stop).unwrap(), Outcome::Interrupted);
    let mut trainer = Trainer::resume(&folder.join("parts"), &Changes::default()).unwrap();
    // The batches that it sent ahead it does not go on with.
    for _ in 0..2 {
        assert_eq!(trainer.run(&stop).unwrap(), Outcome::Interrupted);
    }
    assert_eq!(trainer.run(&go).unwrap(), Outcome::Finished);
    assert_same_run("in parts", &folder.join("whole"), &folder.join("parts"));
}

/// What a pass over each of some batches gives, and whether it was a recorded one: then it overwrites what the pass
/// before it gave, whoever sees that.
fn passes(model: &BiFormer, count: usize, ahead: bool) -> Vec<(Vec<f64>, bool)> {
    let batches: Vec<Numbered> = (0..5).map(|number| batch_of(1, number)).collect();
    let mut inference = Inference::new(model, count);
    let mut before: Option<Tensor> = None;
    let passes = batches.iter().enumerate().map(|(number, batch)| {
        inference.stage(batch).unwrap();
        let next = || batches.get(number + 1).filter(|_| ahead);
        let logits = &inference.pass(next).unwrap()[0];
        let overwrites = before.replace(logits.clone()).is_some_and(|before| before.is_same_view(logits));
        (logits.cast(DType::F64).unwrap().to_vec::<f64>().unwrap(), overwrites)
    });
    passes.collect()
}

#[test]
fn recorded_inference_has_the_bits_of_one_that_is_not_whatever_the_weights() {
    let Some(device) = there() else { return };
    for precision in [Precision::F32, Precision::Bf16] {
        let config = config(device, precision);
        let mut learner = Learner::new(&config).unwrap();
        let compare = |model: &BiFormer| {
            let expected = passes(model, 1, false);
            assert!(expected.iter().all(|(_, recorded)| !recorded), "a few passes are not worth a recording");
            for ahead in [false, true] {
                let got = passes(model, 100, ahead);
                assert_eq!(
                    got.iter().map(|(_, recorded)| *recorded).collect::<Vec<_>>(),
                    [false, false, true, true, true]
                );
                assert!(got.iter().zip(&expected).all(|((got, _), (expected, _))| got == expected), "{precision:?}");
            }
            expected
        };
        let first = compare(learner.model());
        for step in 0..3 {
            learner.train(&batch(step as usize), step, 1e-2, || None).unwrap();
        }
        let second = compare(learner.model());
        let averaged = learner.with_average(|model| Ok(compare(model))).unwrap();
        assert!(first != second && second != averaged && averaged != first);
        // Between recorded steps.
        learner.train(&batch(3), 3, 1e-2, || None).unwrap();
        assert_ne!(compare(learner.model()), second);
    }
}

#[test]
fn a_run_goes_on_on_another_device() {
    let Some(device) = there() else { return };
    let folder = fresh(&format!("device-{device}"));
    let data = samples::cifar10_of(&folder.join("data"), 16);
    let config = samples::config(&folder, "");
    let train = |out: &str, more: &[&str]| {
        let out = folder.join(out);
        let arguments = ["train", "--config", text(&config), "--data", text(&data), "--out", text(&out)];
        biformer(&[&arguments, more].concat()).ok();
        out
    };
    let device = device.to_string();
    for (first, second) in [("cpu", &*device), (&*device, "cpu")] {
        let out = train(first, &["--device", first, "--epochs", "1"]);
        train(first, &["--device", second, "--epochs", "2", "--resume"]);
        let eval = |device: &str| biformer(&["eval", "--checkpoint", text(&out), "--device", device, "--json"]).ok();
        let loss = |ran: &common::program::Ran| {
            let report = json(&ran.out);
            report["loss"].as_f64().unwrap()
        };
        let (cpu, gpu) = (loss(&eval("cpu")), loss(&eval(&device)));
        assert!((cpu - gpu).abs() < 1e-3, "{first}: loss {cpu} on the CPU, {gpu} on the other device");
    }
    // What goes on on another device, or in another precision, is computed there, or in that: nearly the same, not
    // quite.
    let second_epoch = |out: &str| {
        let metrics = std::fs::read_to_string(folder.join(out).join("metrics.jsonl")).unwrap();
        metrics.lines().nth(1).expect("two epochs").to_owned()
    };
    for (out, more) in [("plain", ["--device", "cpu"]), ("rounded", ["--precision", "bf16"])] {
        train(out, &["--device", "cpu", "--epochs", "1"]);
        train(out, &[&["--epochs", "2", "--resume"], &more[..]].concat());
    }
    assert_ne!(second_epoch("plain"), second_epoch("rounded"));
    assert_ne!(second_epoch("plain"), second_epoch("cpu"));
}

fn repeated_on_the_standin_gpu(tests: &[&str], multiprocessors: &str, settings: &[(&str, &str)]) {
    let Some(standin) = Standin::compiled() else { return };
    standin.repeat(tests, &[&[("STANDIN_MULTIPROCESSORS", multiprocessors)], settings].concat());
}

/// Requests are done as late as can be.
#[test]
fn on_the_standin_gpu() {
    repeated_on_the_standin_gpu(&["recorded", "stops_and_goes_on"], "1", &[]);
}

#[test]
fn on_the_standin_gpu_whose_copies_come_first() {
    repeated_on_the_standin_gpu(&["sent_ahead"], "1", &[("STANDIN_EAGER", "2")]);
}

/// Of a large GPU, where kernels take other forms.
#[test]
fn on_the_standin_gpu_whose_work_aside_comes_first() {
    repeated_on_the_standin_gpu(&["ten_steps"], "132", &[("STANDIN_EAGER", "3"), ("STEPS", "4")]);
}

/// Whole steps from what NVRTC makes of the kernels, instruction by instruction.
#[test]
fn in_ptx() {
    Standin::in_ptx(version()).into_iter().for_each(|standin| _ = standin.repeat(&["ten_steps"], &[("STEPS", "2")]));
}
