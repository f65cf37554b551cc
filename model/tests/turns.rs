//! Inference takes a large batch a few images at a time, and nobody can tell from what comes out.

use autograd::Tape;
use model::{BiFormer, Mode, Pass, Result, Trace, preset};
use tensor::rng::Philox;
use tensor::{DType, Tensor};

const IMAGES: usize = 8;

/// A configuration's results, and what the pass left behind, with images grouped by their own size or as if they were small.
fn results(features: &str, small: bool) -> Result<(Vec<Tensor>, Trace)> {
    let fields = ["depth=1,1,1", "embed_dim=24,48,96", "topks=1,2,-1", "n_win=2", "head_dim=24", features];
    let model = BiFormer::new(&preset("nano")?.config().with_overrides(fields)?, 1, DType::F64)?;
    let values: Vec<f64> = (0..IMAGES * 64 * 64 * 3).map(|i| f64::from(Philox::new(1, 0).uniform(i as u64))).collect();
    let images = Tensor::from_slice(&values, [IMAGES, 64, 64, 3])?;
    let tape = Tape::inference();
    let pass = Pass::new(&tape, Mode::Evaluate, &model.parameters, &model.statistics).keep_maps();
    let (pass, size) = if small { (pass.grouped_as([16, 16]), 16) } else { (pass, 64) };
    let at_once = model.images_at_once([size; 2]).unwrap_or(usize::MAX);
    assert_eq!(at_once < IMAGES, !small, "{at_once} at once");
    let values = model.run(&pass, &images)?.into_iter().map(|value| value.into_value()).collect();
    Ok((values, pass.into_trace()))
}

/// Of floats or indices, to the bit.
fn bits(tensor: &Tensor) -> Result<Vec<u64>> {
    Ok(match tensor.dtype() {
        DType::Index => tensor.to_vec::<u32>()?.into_iter().map(u64::from).collect(),
        _ => tensor.to_vec::<f64>()?.into_iter().map(f64::to_bits).collect(),
    })
}

#[test]
fn a_batch_in_parts_gives_what_it_gives_together() {
    let compare = || {
        for features in ["features=logits", "features=pooled", "features=dense"] {
            let ((parts, in_parts), (whole, together)) = (results(features, false)?, results(features, true)?);
            let named = [(&in_parts.routes, &together.routes), (&in_parts.maps, &together.maps)];
            let pairs = named.into_iter().flat_map(|(parts, whole)| {
                assert!(!whole.is_empty());
                let names = |all: &[(String, Tensor)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
                assert_eq!(names(parts), names(whole), "{features}");
                parts.iter().map(|(_, value)| value).zip(whole.iter().map(|(_, value)| value))
            });
            let pairs: Vec<_> = pairs.chain(parts.iter().zip(&whole)).collect();
            assert_eq!(parts.len(), if features == "features=dense" { 3 } else { 1 });
            for (part, whole) in pairs {
                assert_eq!(part.shape()[0], IMAGES, "{features}");
                assert_eq!((part.shape(), bits(part)?), (whole.shape(), bits(whole)?), "{features}");
            }
        }
        Ok::<_, model::Error>(())
    };
    rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(compare).unwrap();
}
