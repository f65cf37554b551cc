//! Where a point looks: weights of every attention, whole and of the regions that it is routed to.

use autograd::Tape;
use model::{BiFormer, Mode, ModelConfig, Result, Routes, Trace, preset};
use tensor::rng::Philox;
use tensor::{DType, Tensor};

fn trace(model: &BiFormer, images: &Tensor, point: [f64; 2]) -> Result<Trace> {
    let tape = Tape::inference();
    let pass = model.pass(&tape, Mode::Evaluate)?.attention_from(point);
    model.run(&pass, images)?;
    Ok(pass.into_trace())
}

fn images(count: usize, side: usize) -> Tensor {
    let mut random = Philox::new(1, 0).sequence();
    let pixels: Vec<f32> = (0..count * side * side * 3).map(|_| random.normal() as f32).collect();
    Tensor::from_slice(&pixels, [count, side, side, 3]).unwrap()
}

/// Of every layout, with padding and without.
#[test]
fn every_attention_spreads_one_over_what_it_reads() -> Result<()> {
    for (name, side, fields) in [
        ("nano", 32, &["depth=1,2,1"][..]),
        ("nano", 36, &["depth=1,1,1", "auto_pad=true"]),
        ("stl_nchw", 72, &["depth=1,1,1,1", "embed_dim=32,64,96,128", "n_win=2", "topks=1,2,2,-2"]),
    ] {
        let config = preset(name)?.config().with_overrides(fields.iter().copied())?;
        let model = BiFormer::new(&config, 0, DType::F32)?;
        let trace = trace(&model, &images(2, side), [0.3, 0.7])?;
        assert_eq!(trace.attention_weights.len(), config.depth.iter().sum::<usize>());
        for (attention, weights) in &trace.attention_weights {
            let [count, height, width] = weights.dims("test", "(N, H, W)")?;
            let weights = weights.to_vec::<f32>()?;
            for (image, weights) in weights.chunks(height * width).enumerate() {
                let sum: f32 = weights.iter().sum();
                // What is missing lies on padding.
                let routed = trace.routes.iter().find(|routed| routed.name == *attention);
                let all = routed.is_none_or(|routed| routed.regions.map() == routed.map);
                assert!(if all { (sum - 1.0).abs() < 1e-5 } else { sum <= 1.0 + 1e-5 }, "{attention}: {sum}");
                let Some(Routes { indices, regions, map, .. }) = routed else { continue };
                assert_eq!(*map, [height, width]);
                let region = |[row, column]: [usize; 2]| {
                    row / regions.size()[0] * regions.grid()[1] + column / regions.size()[1]
                };
                let at = [(0.3 * height as f64) as usize, (0.7 * width as f64) as usize];
                let routed = indices.slice(0, image..image + 1)?.slice(1, region(at)..region(at) + 1)?;
                let routed = routed.contiguous()?.to_vec::<u32>()?;
                for (token, &weight) in weights.iter().enumerate() {
                    let read = routed.contains(&(region([token / width, token % width]) as u32));
                    assert_eq!(weight > 0.0, read, "{attention}: token {token} of image {image} of {count}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn attention_weights_of_many_images_are_those_of_each() -> Result<()> {
    let config = ModelConfig { depth: vec![1, 1, 1], ..preset("nano")?.config() };
    let (model, images) = (BiFormer::new(&config, 0, DType::F32)?, images(70, 32));
    let all = trace(&model, &images, [0.5, 0.5])?;
    for image in [0, 33, 69] {
        let alone = trace(&model, &images.slice(0, image..image + 1)?.contiguous()?, [0.5, 0.5])?;
        for ((name, weights), (_, alone)) in all.attention_weights.iter().zip(&alone.attention_weights) {
            let weights = weights.slice(0, image..image + 1)?.contiguous()?.to_vec::<f32>()?;
            assert_eq!(weights, alone.to_vec::<f32>()?, "{name} of image {image}");
        }
    }
    let soft = ModelConfig { soft_routing: true, ..config };
    let trace = trace(&BiFormer::new(&soft, 0, DType::F32)?, &images.slice(0, 0..1)?.contiguous()?, [0.5, 0.5])?;
    let sums = trace.attention_weights.iter().map(|(_, weights)| Ok(weights.to_vec::<f32>()?.iter().sum::<f32>()));
    let sums = sums.collect::<Result<Vec<_>>>()?;
    assert!(sums[0] < 0.9 && sums[1] < 0.9, "with the regions' shares: {sums:?}");
    assert!(sums.len() == 3 && (sums[2] - 1.0).abs() < 1e-5, "full attention: {sums:?}");
    Ok(())
}
