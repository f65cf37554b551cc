//! `biformer bench --only-bra`: routed attention alone, on the maps that it meets in a model's stages.
//!
//! What is timed goes from queries, keys and values to the mixed values, including local context but not the linear
//! layers around it. Calls are launched one after the other and waited for once at the end; on a GPU they are replays
//! of a recording, so that the time in which it would wait for the host does not count.

use super::{Arguments, ensure_sensible, noise};
use crate::commands::Status;
use crate::commands::options::ImageSize;
use anyhow::{Result, bail};
use autograd::{Gradients, Tape, Var};
use model::{Attend, ModelConfig};
use ops::Bra;
use serde::Serialize;
use serde_json::json;
use std::time::Instant;
use tensor::cpu::isa::Isa;
use tensor::cuda::Repeated;
use tensor::{DType, Device, Tensor};

const WARM_UP: usize = 3;

/// A routed stage, and what was measured.
#[derive(Debug, Serialize)]
struct Stage {
    stage: usize,
    tokens: [usize; 2],
    channels: usize,
    heads: usize,
    keys_per_query: usize,
    forward_ms: f64,
    forward_backward_ms: f64,
}

/// Measures the routed stages of a model on images of this size.
pub fn run(arguments: &Arguments, size: ImageSize) -> Result<Status> {
    let Arguments { batch_size: images, steps, compute, json, .. } = *arguments;
    let config = arguments.model.config()?;
    config.check_image(size.0[0], size.0[1])?;
    if config.soft_routing {
        bail!("--set soft_routing: what is timed here is hard routing; time soft routing with a whole model");
    }
    let (device, maps) = (compute.open()?, compute.maps());
    let measured = (0..config.stages()).map(|stage| measure(&config, size.0, stage, images, steps, (&device, maps)));
    let stages: Vec<Stage> = measured.filter_map(Result::transpose).collect::<Result<_>>()?;
    if stages.is_empty() {
        bail!("no stage of this model routes");
    }
    if json {
        let object = json!({
            "model": arguments.model.model,
            "image_size": size.0,
            "batch_size": images,
            "set": arguments.model.set,
            "device": compute.device.to_string(),
            "precision": compute.precision.to_string(),
            "threads": rayon::current_num_threads(),
            "isa": Isa::current().name(),
            "stages": stages,
        });
        say!("{object}");
        return Ok(Status::Done);
    }
    say!(
        "{:>5} {:>9} {:>8} {:>5} {:>5} {:>11} {:>20}",
        "stage",
        "tokens",
        "channels",
        "heads",
        "keys",
        "forward ms",
        "forward+backward ms"
    );
    for Stage { stage, tokens: [height, width], channels, heads, keys_per_query, forward_ms, forward_backward_ms } in
        &stages
    {
        let tokens = format!("{height}x{width}");
        say!(
            "{stage:>5} {tokens:>9} {channels:>8} {heads:>5} {keys_per_query:>5} {forward_ms:>11.3} \
             {forward_backward_ms:>20.3}"
        );
    }
    Ok(Status::Done)
}

/// Measures a stage, if it routes.
fn measure(
    config: &ModelConfig,
    image: [usize; 2],
    stage: usize,
    images: usize,
    steps: usize,
    (device, maps): (&Device, DType),
) -> Result<Option<Stage>> {
    let map = image.map(|side| config.map_side(side, stage));
    let (Attend::Routed(topk), Some(regions)) = (config.attend(stage), config.regions(map, stage)) else {
        return Ok(None);
    };
    let (grid, [height, width], channels) = (regions.grid(), regions.map(), config.embed_dim[stage]);
    let shape = [images, height, width, 3 * channels];
    ensure_sensible(shape, &format!("queries, keys and values in stage {}", stage + 1))?;
    let heads = channels / config.head_dim;
    let scale = (channels as f64).powf(-0.5);
    let attributes = Bra { heads, qk_dim: channels, topk, grid, scale, valid: None };
    let random = |shape: &[usize], stream| -> Result<Tensor> {
        Ok(Tensor::from_slice(&noise(shape.iter().product(), stream), shape)?.to_device(device)?)
    };
    let qkv = random(&shape, 0)?.cast(maps)?;
    let upstream = random(&[images, height, width, channels], 1)?.cast(maps)?;
    let kernel = config.lce_kernel;
    let lepe = match kernel {
        0 => None,
        _ => Some([random(&[channels, 1, kernel, kernel], 2)?, random(&[channels], 3)?]),
    };
    let attend = |tape: &Tape, gradients: Option<&mut Gradients>| -> Result<()> {
        let of = |x: &Tensor| if gradients.is_some() { tape.input(x.clone()) } else { tape.constant(x.clone()) };
        let (qkv, lepe) = (of(&qkv), lepe.as_ref().map(|[weight, bias]| [of(weight), of(bias)]));
        let lepe: Option<[&Var<'_>; 2]> = lepe.as_ref().map(|[weight, bias]| [weight, bias]);
        let out = ops::bra(&qkv, lepe, &attributes)?.out;
        Ok(gradients.map_or(Ok(()), |gradients| tape.backward_from(&out, upstream.clone(), gradients))?)
    };
    Ok(Some(Stage {
        stage: stage + 1,
        tokens: [height, width],
        channels,
        heads,
        keys_per_query: topk * regions.tokens(),
        forward_ms: each_ms(device, steps, || attend(&Tape::inference(), None))?,
        forward_backward_ms: each_ms(device, steps, || attend(&Tape::new(), Some(&mut Gradients::default())))?,
    }))
}

/// The mean time of a call, over `steps` calls, in milliseconds.
fn each_ms(device: &Device, steps: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut repeated = Repeated::default();
    let mut again = |_| repeated.run(device, true, |_| vec![], &mut call).map(|&()| ());
    (0..WARM_UP).try_for_each(&mut again)?;
    device.synchronize()?;
    let started = Instant::now();
    (0..steps).try_for_each(&mut again)?;
    device.synchronize()?;
    Ok(1e3 * started.elapsed().as_secs_f64() / steps as f64)
}
