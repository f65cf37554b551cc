//! Keeping less and computing it again changes the memory of a training step, and no bit of its gradients.

use autograd::{Gradients, Tape};
use model::{BiFormer, Mode, Result, preset};
use tensor::cpu::parallel::thread_pool;
use tensor::rng::Philox;
use tensor::{DType, Tensor};

/// Small models of every kind of layer: dropped blocks, layer scale, padding, full attention with each context.
const MODELS: [(&str, usize, &[&str]); 4] = [
    ("nano", 32, &["depth=1,2,1", "embed_dim=24,48,48", "drop_path=0.5", "layer_scale=0.1"]),
    ("tiny", 112, &["depth=1,1,3,1", "embed_dim=32,32,64,64", "drop_path=0.4", "auto_pad=true", "num_classes=10"]),
    ("stl", 64, &["depth=1,1,1,2", "embed_dim=32,32,64,64", "drop_path=0.5", "soft_routing=true", "auto_pad=true"]),
    ("stl_nchw", 64, &["depth=1,1,1,2", "embed_dim=32,32,64,64", "topks=1,2,-1,-2", "drop_path=0.5"]),
];

/// What a step leaves behind.
struct Step {
    gradients: Vec<u32>,
    /// Names and routes of the attentions.
    routes: Vec<(String, Vec<u32>)>,
    /// Bytes that the tape kept for the backward pass, without the parameters.
    kept: f64,
}

/// Forward, and backward from the logits as if they were their own gradient.
fn step(model: &BiFormer, images: &Tensor, tape: &Tape) -> Result<Step> {
    let output = model.forward(tape, images, Mode::Train { seed: 3, step: 5 })?;
    let kept = (tape.saved_bytes() - model.parameters.flat().bytes()) as f64;
    let mut gradients = Gradients::new(&model.parameters).unwrap();
    gradients.begin_step();
    let upstream = output.logits()?.value().clone();
    tape.backward_from(output.logits()?, upstream, &mut gradients)?;
    gradients.require_all()?;
    let gradients = gradients.flat().map_or(Ok(vec![]), |flat| flat.to_vec::<f32>())?;
    let routes = output.trace.routes.into_iter().map(|routes| Ok((routes.name, routes.indices.to_vec::<u32>()?)));
    let routes = routes.collect::<Result<_>>()?;
    Ok(Step { gradients: gradients.into_iter().map(f32::to_bits).collect(), routes, kept })
}

#[test]
fn gradients_have_the_same_bits_and_less_is_kept() -> Result<()> {
    for (name, size, fields) in MODELS {
        let model = BiFormer::new(&preset(name)?.config().with_overrides(fields.iter().copied())?, 1, DType::F32)?;
        let images: Vec<f32> = (0..3 * size * size * 3).map(|i| Philox::new(1, 2).uniform(i as u64) - 0.5).collect();
        let images = Tensor::from_slice(&images, [3, size, size, 3])?;
        let run = |threads: usize, tape: fn() -> Tape| {
            // invariant: two threads can be started wherever tests run.
            thread_pool(threads).expect("threads").install(|| step(&model, &images, &tape()))
        };
        let whole = run(1, Tape::new)?;
        for threads in [1, 2] {
            for (tape, most) in [(Tape::recomputing_cheap as fn() -> Tape, 0.95), (Tape::recomputing_segments, 0.5)] {
                let step = run(threads, tape)?;
                assert!(step.gradients == whole.gradients, "{name}: gradients on {threads} threads");
                assert!(step.routes == whole.routes, "{name}: the trace has each attention once");
                assert!(step.kept < most * whole.kept, "{name}: {} bytes of {}", step.kept, whole.kept);
            }
        }
    }
    Ok(())
}
