//! Inference takes a large batch a few images at a time, and nobody can tell from what comes out.

use autograd::Tape;
use model::{BiFormer, Error, Mode, Result, Trace, preset};
use tensor::cpu::parallel::thread_pool;
use tensor::rng::Philox;
use tensor::{DType, Device, Tensor};

const IMAGES: usize = 8;

/// So many images, of sides of so many pixels.
fn images(count: usize, side: usize) -> Result<Tensor> {
    let stream = Philox::new(1, 0);
    let values: Vec<f64> = (0..count * side * side * 3).map(|i| f64::from(stream.uniform(i as u64))).collect();
    Ok(Tensor::from_slice(&values, [count, side, side, 3])?)
}

fn model(features: &str) -> Result<BiFormer> {
    let fields = ["depth=1,1,1", "embed_dim=24,48,96", "topks=1,2,-1", "n_win=2", "head_dim=24", features];
    BiFormer::new(&preset("nano")?.config().with_overrides(fields)?, 1, DType::F64)
}

/// A configuration's results, and what the pass left behind, with images grouped by their own size or as if they were
/// small.
fn results(features: &str, small: bool) -> Result<(Vec<Tensor>, Trace)> {
    let model = model(features)?;
    let images = images(IMAGES, 64)?;
    let tape = Tape::inference();
    let pass = model.pass(&tape, Mode::Evaluate)?.keep_maps();
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
            let routes = |trace: &Trace| {
                trace.routes.iter().map(|routes| (routes.name.clone(), routes.indices.clone())).collect::<Vec<_>>()
            };
            let named = [(routes(&in_parts), routes(&together)), (in_parts.maps, together.maps)];
            let pairs = named.into_iter().flat_map(|(parts, whole)| {
                assert!(!whole.is_empty());
                let names = |all: &[(String, Tensor)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
                assert_eq!(names(&parts), names(&whole), "{features}");
                parts.into_iter().map(|(_, value)| value).zip(whole.into_iter().map(|(_, value)| value))
            });
            assert_eq!(parts.len(), if features == "features=dense" { 3 } else { 1 });
            let pairs: Vec<_> = pairs.chain(parts.into_iter().zip(whole)).collect();
            for (part, whole) in pairs {
                assert_eq!(part.shape()[0], IMAGES, "{features}");
                assert_eq!((part.shape(), bits(&part)?), (whole.shape(), bits(&whole)?), "{features}");
            }
        }
        Ok::<_, model::Error>(())
    };
    rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(compare).unwrap();
}

/// How many images go together depends on the number of threads; so no row of a product, and no element, may be
/// computed otherwise for those beside it. Maps that fill no registers, in the types that have kernels of their own.
#[test]
fn logits_have_the_same_bits_with_any_number_of_threads() -> Result<()> {
    let fields =
        ["depth=1,1,1", "embed_dim=20,40,80", "head_dim=20", "full_attention_heads=5", "n_win=7", "topks=4,1,-2"];
    let mut model = BiFormer::new(&preset("nano")?.config().with_overrides(fields)?, 1, DType::F32)?;
    let images = images(100, 28)?;
    for maps in [DType::F32, DType::Bf16] {
        model.place(&Device::Cpu, maps)?;
        let logits = |threads: usize| -> Result<Vec<f32>> {
            let run = || -> Result<Vec<f32>> {
                Ok(model.forward(&Tape::inference(), &images, Mode::Evaluate)?.logits()?.value().to_vec::<f32>()?)
            };
            thread_pool(threads).expect("threads").install(run)
        };
        let one = logits(1)?;
        for threads in [2, 3] {
            assert!(one == logits(threads)?, "{maps}: {threads} threads");
        }
    }
    Ok(())
}

#[test]
fn traces_that_are_not_alike_are_not_joined() -> Result<()> {
    let (_, trace) = results("features=logits", true)?;
    let joined = Trace::joined(vec![trace, Trace::default()]);
    assert!(matches!(joined, Err(Error::Pass { .. })), "{joined:?}");
    let model = BiFormer::new(&preset("micro")?.config(), 1, DType::F64)?;
    let trace = |mode| Ok::<_, Error>(model.forward(&Tape::inference(), &images(2, 32)?, mode)?.trace);
    let traces = vec![trace(Mode::Evaluate)?, trace(Mode::Train { seed: 1, step: 0 })?];
    let joined = Trace::joined(traces);
    assert!(matches!(joined, Err(Error::Pass { .. })), "{joined:?}");
    Ok(())
}

/// The batch that a normalisation is by is all of it.
#[test]
fn a_training_pass_goes_together_also_where_nothing_is_recorded() -> Result<()> {
    let model = model("features=logits")?;
    let images = images(IMAGES, 64)?;
    let run = || {
        assert!(model.images_at_once([64; 2]).is_some_and(|at_once| at_once < IMAGES));
        let logits = |tape: Tape| -> Result<Vec<f64>> {
            let output = model.forward(&tape, &images, Mode::Train { seed: 1, step: 0 })?;
            Ok(output.logits()?.value().to_vec()?)
        };
        assert_eq!(logits(Tape::inference())?, logits(Tape::new())?);
        Ok(())
    };
    thread_pool(1).expect("a thread").install(run)
}

/// As they come from files, with channels first, turned round.
#[test]
fn images_may_be_a_view_of_any_type() -> Result<()> {
    let model = BiFormer::new(&preset("micro")?.config(), 1, DType::F32)?;
    let images = images(2, 32)?;
    let logits = |images: &Tensor| {
        Ok::<_, Error>(model.forward(&Tape::inference(), images, Mode::Evaluate)?.logits()?.value().to_vec::<f32>()?)
    };
    let expected = logits(&images)?;
    for dtype in [DType::F32, DType::F64] {
        let turned = images.cast(dtype)?.permute(&[0, 3, 1, 2])?.contiguous()?.permute(&[0, 2, 3, 1])?;
        assert_eq!(logits(&turned)?, expected, "{dtype}");
    }
    Ok(())
}
