//! Segmentation: a head on the maps of all stages, which says of each pixel what it is of.
//!
//! The maps are brought to 32 channels each, enlarged to the size of the first, and added up, as in a feature pyramid.
//! The images are made here: a disc on a ground of nearly its own colour, with noise over both.
//!
//! `cargo run --release --example dense_head`

use anyhow::{Result, ensure};
use biformer::autograd::{Gradients, Tape, Var};
use biformer::model::{BiFormer, Linear, Mode, Pass, preset};
use biformer::ops;
use biformer::optim::{AdamW, AdamWConfig};
use biformer::tensor::rng::Philox;
use biformer::tensor::{DType, Tensor};

const SEED: u64 = 1;
const BATCH: usize = 8;
const SIDE: usize = 32;
const CHANNELS: [usize; 3] = [24, 48, 96];

/// A layer for each stage's map, and one that tells pixels of the disc from all others.
struct Head {
    stages: Vec<Linear>,
    classes: Linear,
}

impl Head {
    /// The logits of pixels, (N, SIDE, SIDE, 2), from the stages' maps (N, H, W, C).
    fn forward<'t>(&self, pass: &Pass<'t>, maps: &[Var<'t>]) -> Result<Var<'t>> {
        let first = [maps[0].shape()[1], maps[0].shape()[2]];
        let mut sum = self.stages[0].forward(pass, &maps[0])?;
        for (layer, map) in self.stages.iter().zip(maps).skip(1) {
            sum = ops::add(&sum, &enlarged(&layer.forward(pass, map)?, first)?)?;
        }
        enlarged(&self.classes.forward(pass, &ops::gelu(&sum)?)?, [SIDE, SIDE])
    }
}

/// A map (N, H, W, C) at another size, by bilinear interpolation as PyTorch's with `align_corners=False`: a product
/// with a matrix for each of its sides, as `linear` is one with the last axis.
fn enlarged<'t>(map: &Var<'t>, [height, width]: [usize; 2]) -> Result<Var<'t>> {
    let along = |axes: &[usize], map: &Var<'t>, to: usize| -> Result<Var<'t>> {
        let map = ops::contiguous(&ops::permute(map, axes)?)?;
        let from = map.shape()[3];
        Ok(ops::linear(&map, &map.tape().constant(interpolation(from, to)?), None)?)
    };
    let rows = along(&[0, 2, 3, 1], map, height)?; // (N, W, C, height)
    let columns = along(&[0, 3, 2, 1], &rows, width)?; // (N, height, C, width)
    Ok(ops::contiguous(&ops::permute(&columns, &[0, 1, 3, 2])?)?)
}

/// How much of each of `from` places each of `to` takes: (to, from).
fn interpolation(from: usize, to: usize) -> Result<Tensor> {
    let mut shares = vec![0f32; to * from];
    for (place, shares) in shares.chunks_exact_mut(from).enumerate() {
        let at = ((place as f32 + 0.5) * from as f32 / to as f32 - 0.5).max(0.0);
        let (before, after) = (at as usize, (at as usize + 1).min(from - 1));
        shares[before] += 1.0 - at.fract();
        shares[after] += at.fract();
    }
    Ok(Tensor::from_slice(&shares, [to, from])?)
}

/// Images (N, SIDE, SIDE, 3), and for each of their pixels whether it is of the disc.
fn discs(step: u64) -> Result<[Tensor; 2]> {
    let (mut pixels, mut labels) = (vec![], vec![]);
    let rng = Philox::new(SEED, step);
    let random = |place: usize| rng.uniform(place as u64);
    for image in 0..BATCH {
        let [x, y, radius] = [0, 1, 2].map(|it| random(3 * image + it));
        let (x, y, radius) = (8.0 + 16.0 * x, 8.0 + 16.0 * y, 4.0 + 6.0 * radius);
        for pixel in 0..SIDE * SIDE {
            let (dx, dy) = ((pixel % SIDE) as f32 - x, (pixel / SIDE) as f32 - y);
            let inside = dx * dx + dy * dy < radius * radius;
            labels.push(u32::from(inside));
            let noise = (0..3).map(|c| random(1000 + (image * SIDE * SIDE + pixel) * 3 + c) - 0.5);
            pixels.extend(noise.map(|noise| noise + if inside { 0.4 } else { 0.0 }));
        }
    }
    let count = labels.len();
    Ok([Tensor::from_slice(&pixels, [BATCH, SIDE, SIDE, 3])?, Tensor::from_slice(&labels, [count])?])
}

/// The share of the pixels that are of the disc or taken for it which are both.
fn intersection_over_union(logits: &Tensor, labels: &Tensor) -> Result<f64> {
    let (logits, labels) = (logits.to_vec::<f32>()?, labels.to_vec::<u32>()?);
    let pairs = || logits.chunks_exact(2).map(|of| of[1] > of[0]).zip(labels.iter().map(|&label| label == 1));
    let (both, either) = (pairs().filter(|&(a, b)| a && b).count(), pairs().filter(|&(a, b)| a || b).count());
    Ok(both as f64 / either.max(1) as f64)
}

/// Trains for some seconds, and then finds most of the discs in images that were not seen before.
pub fn main() -> Result<()> {
    let fields = ["features=dense", "depth=1,1,1", "embed_dim=24,48,96"];
    let config = preset("nano")?.config().with_overrides(fields)?;
    let (mut model, head) = BiFormer::with(&config, SEED, DType::F32, |builder| {
        let stage = |(index, &channels): (usize, &usize)| (format!("own.stages.{index}"), channels);
        let stages: Vec<(String, usize)> = CHANNELS.iter().enumerate().map(stage).collect();
        Head {
            stages: stages.iter().map(|(name, channels)| Linear::new(builder, name, *channels, 32, true)).collect(),
            classes: Linear::new(builder, "own.classes", 32, 2, true),
        }
    })?;
    let mut gradients = Gradients::new(&model.parameters)?;
    let mut adamw = AdamW::new(&model.parameters, AdamWConfig::default())?;
    for step in 0..60 {
        let [images, labels] = discs(step)?;
        let tape = Tape::new();
        let pass = model.pass(&tape, Mode::Train { seed: SEED, step })?;
        let logits = ops::reshape(&head.forward(&pass, &model.run(&pass, &images)?)?, [labels.count(), 2])?;
        let loss = ops::cross_entropy(&logits, &labels, 0.0)?;
        if step % 10 == 0 {
            let (loss, found) = (loss.value().item::<f32>()?, intersection_over_union(logits.value(), &labels)?);
            println!("step {step}: loss {loss:.3}, intersection over union {found:.2}");
        }
        tape.backward(&loss, &mut gradients)?;
        let trace = pass.into_trace();
        drop((logits, loss));
        drop(tape);
        adamw.step(&mut model.parameters, &mut gradients, 3e-3)?;
        model.update_statistics(&trace)?;
    }
    let [images, labels] = discs(1000)?;
    let tape = Tape::inference();
    let pass = model.pass(&tape, Mode::Evaluate)?;
    let logits = head.forward(&pass, &model.run(&pass, &images)?)?;
    let found = intersection_over_union(logits.value(), &labels)?;
    println!("on new images: intersection over union {found:.2}");
    ensure!(found > 0.7, "the discs were not found: {found}");
    Ok(())
}
