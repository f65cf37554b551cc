//! What a model returns without a head: what the head would see, and what one's own sees.

use autograd::{Gradients, Tape};
use model::{BatchNorm, BiFormer, Builder, Error, Init, Linear, Mode, Pass, Result, TensorFile, preset};
use std::panic::catch_unwind;
use tensor::cuda::Gpu;
use tensor::rng::Philox;
use tensor::{DType, Device, Tensor};

#[test]
fn the_head_makes_logits_of_pooled_features() -> Result<()> {
    let fields = ["depth=1,1,1", "embed_dim=24,48,48", "topks=1,2,-1", "n_win=2", "head_dim=24", "num_classes=7"];
    for name in ["nano", "stl_nchw"] {
        let config = preset(name)?.config().with_overrides(fields)?;
        let whole = BiFormer::new(&config, 1, DType::F64)?;
        let mut backbone = BiFormer::blank(&config.with_overrides(["features=pooled"])?, DType::F64)?;
        let weights = whole.state_dict()?;
        assert!(backbone.load(&weights, "whole")?.is_empty(), "{name}: nothing is missing");

        let values: Vec<f64> = (0..3 * 64 * 64 * 3).map(|i| f64::from(Philox::new(1, 0).uniform(i))).collect();
        let images = Tensor::from_slice(&values, [3, 64, 64, 3])?;
        let tape = Tape::inference();
        let pooled = backbone.forward(&tape, &images, Mode::Evaluate)?;
        assert_eq!(*pooled.values[0].shape(), [3, 48]);
        let none = pooled.logits().unwrap_err().to_string();
        assert!(none.contains("features = \"pooled\"") && none.contains("no logits"), "{none}");
        let [weight, bias] = ["head.weight", "head.bias"].map(|name| tape.constant(weights.tensors[name].clone()));
        let logits = ops::linear(&pooled.values[0], &weight, Some(&bias))?.value().to_vec::<f64>()?;
        let expected = whole.forward(&tape, &images, Mode::Evaluate)?.logits()?.value().to_vec::<f64>()?;
        assert_eq!(logits, expected, "{name}");
    }
    Ok(())
}

/// What a result depends on: the gradient of images, by the backward rules and by differences.
#[test]
fn images_get_a_gradient() -> Result<()> {
    let fields = ["depth=1,1", "embed_dim=24,24", "topks=2,-2", "n_win=2", "num_classes=3"];
    let model = BiFormer::new(&preset("nano")?.config().with_overrides(fields)?, 1, DType::F64)?;
    let random = Philox::new(1, 0);
    let pixels: Vec<f64> = (0..2 * 16 * 16 * 3).map(|i| f64::from(random.uniform(i))).collect();
    let logits = |pixels: &[f64], constant: bool, gradient: Option<&mut Gradients>| {
        let tape = Tape::new();
        let images = tape.input(Tensor::from_slice(pixels, [2, 16, 16, 3])?);
        let mode = Mode::Train { seed: 1, step: 0 };
        let pass = model.pass(&tape, mode)?;
        let pass = if constant { pass.with_constant_parameters() } else { pass };
        let logits = model.run_on(&pass, &images)?.remove(0);
        let upstream = Tensor::from_slice(&[1.0, -2.0, 0.5, 0.25, 1.0, -1.0], [2, 3])?;
        let value: f64 =
            logits.value().to_vec::<f64>()?.iter().zip(upstream.to_vec::<f64>()?).map(|(x, u)| x * u).sum();
        let Some(gradients) = gradient else { return Ok((value, vec![])) };
        tape.backward_from(&logits, upstream, gradients)?;
        let gradient = gradients.of(&images).map_or(Ok(vec![]), Tensor::to_vec::<f64>)?;
        Ok::<_, Error>((value, gradient))
    };
    let (_, gradient) = logits(&pixels, false, Some(&mut Gradients::new(&model.parameters)?))?;
    let (_, of_constants) = logits(&pixels, true, Some(&mut Gradients::default()))?;
    assert_eq!(of_constants, gradient, "without gradients of parameters");
    assert_eq!(gradient.len(), pixels.len());
    for pixel in [0, 100, 767, 768, 1000, 1535] {
        let moved = |by: f64| {
            let mut pixels = pixels.clone();
            pixels[pixel] += by;
            Ok::<_, Error>(logits(&pixels, false, None)?.0)
        };
        let difference = (moved(1e-5)? - moved(-1e-5)?) / 2e-5;
        assert!((gradient[pixel] - difference).abs() < 1e-7 * difference.abs().max(1.0), "{pixel}: {difference}");
    }
    // What run does not convert here is refused.
    let tape = Tape::new();
    let pass = model.pass(&tape, Mode::Evaluate)?;
    let narrow = tape.input(Tensor::zeros([2, 16, 16, 3], DType::F32));
    assert!(model.run_on(&pass, &narrow).is_err());
    Ok(())
}

/// Layers beside a model are the model's own head where they have its numbers, and are kept where a file lacks them.
#[test]
fn layers_of_ones_own_go_with_the_model() -> Result<()> {
    let fields = ["depth=1,1,1", "embed_dim=24,48,48", "features=pooled"];
    let config = preset("nano")?.config().with_overrides(fields)?;
    let more =
        |builder: &mut _| (BatchNorm::new(builder, "own.norm", 48), Linear::new(builder, "own.head", 48, 5, true));
    let (mut model, (norm, head)) = BiFormer::with(&config, 1, DType::F64, more)?;
    let alone = BiFormer::new(&config, 2, DType::F64)?;
    assert_eq!(model.parameters.layout().count(), alone.parameters.layout().count() + 2 * 48 + 48 * 5 + 5);

    // Not views of the model's own numbers, which are to change.
    let drawn = model.state_dict()?.duplicate()?;
    let mut kept = model.load(&alone.state_dict()?, "alone")?;
    kept.sort();
    let all = ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"];
    let norms = all.map(|name| format!("own.norm.{name}"));
    assert_eq!(kept, [&["own.head.bias".into(), "own.head.weight".into()][..], &norms].concat());
    let now = model.state_dict()?.duplicate()?;
    let same = |name: &str, other: &TensorFile| {
        Ok::<_, Error>(now.tensors[name].to_vec::<f64>()? == other.tensors[name].to_vec::<f64>()?)
    };
    assert!(same("own.head.weight", &drawn)? && same("norm.weight", &alone.state_dict()?)?);
    assert!(!same("stages.0.0.mlp.0.weight", &drawn)?);
    // A file with them is taken whole, and one without a part of the model is not.
    assert!(model.load(&drawn, "drawn")?.is_empty());
    let mut torn = drawn;
    torn.tensors.remove("norm.weight");
    assert!(matches!(model.load(&torn, "torn"), Err(Error::Weights { .. })));
    // Half of a layer's statistics are of no use, also where all of them may be missing.
    let mut half = alone.state_dict()?;
    half.tensors.insert("own.norm.running_mean".into(), Tensor::full([48], 0.5));
    let refused = model.load(&half, "half").unwrap_err().to_string();
    assert!(refused.contains("own.norm.running_var (48) is missing"), "{refused}");

    // One pass, whose trace has the statistics of both.
    let images = Tensor::full([2, 32, 32, 3], 0.5);
    let tape = Tape::new();
    let pass = model.pass(&tape, Mode::Train { seed: 1, step: 0 })?;
    let pooled = model.run(&pass, &images.cast(DType::F64)?)?.remove(0);
    let logits = head.forward(&pass, &norm.forward(&pass, &pooled)?)?;
    assert_eq!(*logits.shape(), [2, 5]);
    // Its statistics are those of all images, or of none.
    let inner = model.pass(&tape, pass.mode())?;
    let maps = tape.constant(Tensor::full([4, 48], 0.5));
    let cut = inner.in_pieces(&maps, 2, |pass, maps| norm.forward(pass, maps));
    assert!(matches!(cut, Err(Error::Pass { .. })), "{cut:?}");
    drop(inner);
    let trace = pass.into_trace();
    drop((pooled, logits));
    let other = model.pass(&tape, Mode::Evaluate)?;
    let refused = model.update_statistics(&trace).unwrap_err();
    assert!(matches!(refused, Error::Engine(autograd::Error::Tensor(tensor::Error::Shared { .. }))), "{refused}");
    drop(other);
    model.update_statistics(&trace)?;
    assert!(model.statistics.iter().all(|running| running.batches == 1));
    Ok(())
}

#[test]
fn passes_of_another_model_are_refused() -> Result<()> {
    let model = |fields: &[&str]| {
        let config = preset("nano")?.config().with_overrides(["embed_dim=24,48,48"])?;
        BiFormer::new(&config.with_overrides(fields.iter().copied())?, 1, DType::F32)
    };
    let (own, deeper) = (model(&["depth=1,1,1"])?, model(&["depth=1,2,1"])?);
    let (tape, images) = (Tape::new(), Tensor::full([2, 32, 32, 3], 0.5));
    let train = Mode::Train { seed: 1, step: 0 };
    for (factors, mode, said) in [
        (deeper.factors()?, Mode::Evaluate, "factors were made of other parameters"),
        (deeper.prepared()?, Mode::Evaluate, "factors were made of other parameters"),
        (model(&["depth=1,1,1"])?.factors()?, Mode::Evaluate, "factors were made of other parameters"),
        (own.prepared()?, train, "cannot be trained"),
    ] {
        let error = own.run(&own.pass_with(factors, &tape, mode), &images).err().map(|error| error.to_string());
        assert!(error.as_ref().is_some_and(|error| error.contains(said)), "{error:?}");
    }
    let mut frozen = model(&["depth=1,1,1"])?;
    let before = frozen.factors()?;
    frozen.freeze(&["stages.0"])?;
    let pass = frozen.pass_with(before, &tape, train);
    assert!(matches!(frozen.run(&pass, &images), Err(Error::Pass { .. })));
    // Where it comes back from elsewhere, it may have been trained there.
    if let Some(gpu) = Gpu::for_tests(1) {
        let mut moved = model(&["depth=1,1,1"])?;
        let made = [moved.factors()?, moved.prepared()?];
        [Device::Cuda(gpu), Device::Cpu].iter().try_for_each(|device| moved.place(device, DType::F32))?;
        for before in made {
            let outcome =
                moved.run(&moved.pass_with(before, &tape, Mode::Evaluate), &images).map(|outputs| outputs.len());
            assert!(matches!(&outcome, Err(Error::Pass { reason }) if reason.contains("moved")), "{outcome:?}");
        }
        moved.run(&moved.pass(&tape, Mode::Evaluate)?, &images)?;
    }
    let wider = model(&["depth=1,1,1", "embed_dim=24,48,72"])?;
    for (parameters, statistics) in [
        (&deeper.parameters, &deeper.statistics[..]),
        (&own.parameters, &wider.statistics),
        (&own.parameters, &own.statistics[1..]),
        (&own.parameters, &[]),
    ] {
        let pass = Pass::new(&tape, train, parameters, statistics);
        assert!(matches!(own.run(&pass, &images), Err(Error::Pass { .. })));
    }
    for wrong in [Tensor::full([2, 3, 32, 32], 0.5), Tensor::full([2, 32, 32, 4], 0.5), Tensor::full([32, 32, 3], 0.5)]
    {
        let error = own.forward(&tape, &wrong, train).err().map(|error| error.to_string());
        assert!(error.as_ref().is_some_and(|error| error.contains("images (N, H, W, 3)")), "{error:?}");
    }
    own.run(&own.pass_with(own.prepared()?, &tape, Mode::Evaluate), &images)?;
    Ok(())
}

/// A state_dict would lose one of the two.
#[test]
fn names_that_are_taken_are_refused() {
    let config = preset("nano").unwrap().config().with_overrides(["depth=1,1,1", "embed_dim=24,48,48"]).unwrap();
    let twice: [fn(&mut Builder); 5] = [
        |builder| _ = builder.parameter("norm.weight".into(), [3], Init::Normal),
        |builder| _ = builder.parameter("norm.running_mean".into(), [3], Init::Constant(7.0)),
        |builder| _ = builder.statistics("norm".into(), 16),
        |builder| _ = (builder.statistics("own".into(), 4), builder.statistics("own".into(), 4)),
        |builder| _ = (BatchNorm::new(builder, "own", 4), builder.parameter("own.bias".into(), [1], Init::Normal)),
    ];
    for more in twice {
        let built = catch_unwind(|| BiFormer::with(&config, 1, DType::F32, more).map(drop));
        let said = *built.expect_err("the name is taken").downcast::<String>().unwrap();
        assert!(said.starts_with("two tensors named"), "{said}");
    }
}

/// A trace without batch statistics changes nothing, nor does another model's.
#[test]
fn statistics_move_by_ones_own_batches_alone() -> Result<()> {
    let model = |fields: [&str; 2]| BiFormer::new(&preset("nano")?.config().with_overrides(fields)?, 1, DType::F32);
    let (mut own, wider) =
        (model(["depth=1,1,1", "embed_dim=24,48,48"])?, model(["depth=1,1,1", "embed_dim=24,48,72"])?);
    let images = Tensor::full([2, 32, 32, 3], 0.5);
    let before = own.state_dict()?.to_bytes()?;
    for (is_own, mode) in [(true, Mode::Evaluate), (false, Mode::Train { seed: 1, step: 0 })] {
        let tape = Tape::new();
        let trace = if is_own { &own } else { &wider }.forward(&tape, &images, mode)?.trace;
        drop(tape);
        let moved = own.update_statistics(&trace);
        assert!(if is_own { moved.is_ok() } else { matches!(moved, Err(Error::Pass { .. })) }, "{moved:?}");
        assert_eq!(own.state_dict()?.to_bytes()?, before);
    }
    Ok(())
}

#[test]
fn classes_that_a_file_lacks_change_nothing() -> Result<()> {
    let config = preset("nano")?.config().with_overrides(["depth=1,1,1", "embed_dim=24,48,48", "num_classes=3"])?;
    let mut model = BiFormer::new(&config, 1, DType::F32)?;
    let theirs = BiFormer::new(&config, 2, DType::F32)?.state_dict()?;
    let before = model.state_dict()?.duplicate()?;
    let mut torn = theirs.clone();
    torn.tensors.insert("head.bias".into(), Tensor::full([1], 0f32));
    for (file, from) in [(&torn, [Some(2); 3]), (&theirs, [None, None, Some(3)]), (&theirs, [Some(usize::MAX); 3])] {
        let error = model.load_classes(file, &from).unwrap_err();
        let out_of_range = tensor::Error::OutOfRange { op: "load_classes", what: "class", index: 0, bound: 0 };
        let kind = |error: &tensor::Error| std::mem::discriminant(error);
        assert!(
            matches!(&error, Error::Engine(autograd::Error::Tensor(error)) if kind(error) == kind(&out_of_range)),
            "{error}"
        );
        assert_eq!(model.state_dict()?.to_bytes()?, before.to_bytes()?);
    }
    model.load_classes(&theirs, &[None, Some(2), Some(0)])?;
    let rows = |file: &TensorFile| file.tensors["head.weight"].to_vec::<f32>();
    let (now, theirs, before) = (rows(&model.state_dict()?)?, rows(&theirs)?, rows(&before)?);
    assert_eq!(now, [&before[..48], &theirs[96..], &theirs[..48]].concat());
    Ok(())
}

/// What could not be computed with is refused before anything is moved.
#[test]
fn a_model_is_placed_in_types_that_it_computes_in() -> Result<()> {
    let config = preset("nano")?.config().with_overrides(["depth=1,1,1", "embed_dim=24,48,48"])?;
    for (own, factors, fits) in [
        (DType::F32, DType::F32, true),
        (DType::F32, DType::Bf16, true),
        (DType::F32, DType::F64, false),
        (DType::F32, DType::Index, false),
        (DType::F64, DType::F64, true),
        (DType::F64, DType::F32, false),
        (DType::F64, DType::Bf16, false),
    ] {
        let mut model = BiFormer::blank(&config, own)?;
        let placed = model.place(&Device::Cpu, factors);
        assert_eq!(placed.is_ok(), fits, "{own} with {factors}: {placed:?}");
    }
    Ok(())
}
