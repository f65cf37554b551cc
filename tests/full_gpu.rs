//! A GPU that a training step nearly fills has room for the test after the epoch all the same.
//!
//! One test: the emulated device learns from the process's environment how much memory it has.

use biformer::config::RunConfig;
use biformer::device::DeviceName;
use biformer::inference::Inference;
use biformer::staging::Numbered;
use biformer::trainer::learner::Learner;
use data::Batch;
use tensor::cuda::Gpu;
use tensor::{DType, Device};

fn batch(count: usize) -> Numbered {
    let images = (0..count * 32 * 32 * 3).map(|i| (i as f32 * 0.37).sin()).collect();
    let labels = (0..count as u32).map(|image| image % 10).collect();
    Batch { images, shape: [count, 32, 32, 3], labels, ..Batch::default() }.into()
}

/// What a run leaves: the bytes that the device gave for three steps, and for a test besides; and the test's results.
struct Left {
    held: [usize; 2],
    logits: Vec<f64>,
}

fn run() -> Left {
    let mut config = RunConfig::for_model("nano").unwrap();
    let changes = ["depth=1,1,1", "embed_dim=32,64,128", "head_dim=32", "full_attention_heads=2"];
    config.architecture = config.architecture.with_overrides(changes).unwrap();
    (config.device, config.ema.enabled) = (DeviceName::Emulated, true);
    let mut learner = Learner::new(&config).unwrap();
    let Device::Cuda(gpu) = learner.model().device() else { panic!("no GPU") };
    let train = |learner: &mut Learner, step: u64| learner.train(&batch(4), step, 1e-3, || None).unwrap();
    (0..3).for_each(|step| _ = train(&mut learner, step));
    let before = gpu.stats().held;
    let logits = learner.with_average(|model| {
        let mut inference = Inference::new(model, 1);
        inference.stage(&batch(16))?;
        Ok(inference.pass(|| None)?[0].cast(DType::F64)?.to_vec::<f64>()?)
    });
    let held = [before, gpu.stats().held];
    // And training goes on.
    train(&mut learner, 3);
    Left { held, logits: logits.unwrap() }
}

#[test]
fn a_test_finds_room_beside_a_step_that_nearly_fills_the_gpu() {
    if Gpu::for_tests(0).is_none() || std::env::var_os("BIFORMER_TEST_GPU").is_some() {
        return;
    }
    let roomy = run();
    let [step, with_test] = roomy.held;
    assert!(with_test > step + (1 << 20), "the test needs memory of its own: {step} and {with_test} bytes");
    // SAFETY: this process has no other test, and nobody else reads its environment now.
    unsafe { std::env::set_var("BIFORMER_EMULATED_MEMORY", (step + (with_test - step) / 2).to_string()) };
    assert_eq!(run().logits, roomy.logits);
}
