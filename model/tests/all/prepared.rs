//! A model that is prepared for inference computes what the model computes.

use autograd::Tape;
use autograd::gradcheck::nan_max;
use model::{BiFormer, Error, Mode, Result, preset};
use tensor::rng::Philox;
use tensor::{DType, Device, Tensor};

/// Small models of every family, with classes and with dense maps.
const MODELS: [(&str, usize, &[&str]); 4] = [
    ("nano", 32, &["depth=1,2,1", "embed_dim=24,48,48", "layer_scale=0.1"]),
    ("tiny", 112, &["depth=1,1,2,1", "embed_dim=32,32,64,64", "auto_pad=true", "features=dense"]),
    ("stl", 64, &["depth=1,1,1,2", "embed_dim=32,32,64,64", "soft_routing=true", "auto_pad=true"]),
    ("stl_nchw", 64, &["depth=1,1,1,2", "embed_dim=32,32,64,64", "topks=1,2,-1,-2"]),
];

fn random(shape: impl Into<tensor::Shape>, key: u64, from: f64, to: f64) -> Tensor {
    let shape = shape.into();
    let values: Vec<f64> =
        (0..shape.count()).map(|i| from + (to - from) * Philox::new(key, 0).uniform(i as u64) as f64).collect();
    Tensor::from_slice(&values, shape).unwrap()
}

/// A model whose normalisations do something: no parameter is 0 or 1, no mean 0 and no variance 1.
fn model(name: &str, fields: &[&str], dtype: DType) -> Result<BiFormer> {
    let mut model = BiFormer::new(&preset(name)?.config().with_overrides(fields.iter().copied())?, 1, dtype)?;
    for (key, id) in model.parameters.layout().ids().enumerate() {
        let shape = model.parameters.layout().shape(id).clone();
        if shape.len() == 1 {
            model.parameters.set(id, &random(shape, key as u64, -0.5, 1.5).cast(dtype)?)?;
        }
    }
    for (key, running) in model.statistics.iter_mut().enumerate() {
        running.mean = random(running.mean.shape().clone(), 1000 + key as u64, -1.0, 1.0).cast(dtype)?;
        running.variance = random(running.variance.shape().clone(), 2000 + key as u64, 0.1, 3.0).cast(dtype)?;
    }
    Ok(model)
}

/// Each value of a pass, and the largest difference from it of a prepared pass, relative to its largest element.
fn differences(model: &BiFormer, images: &Tensor) -> Result<Vec<f64>> {
    let prepared = model.prepared()?;
    let values = |values: Vec<autograd::Var<'_>>| -> Result<Vec<Vec<f64>>> {
        values.into_iter().map(|value| Ok(value.value().cast(DType::F64)?.to_vec::<f64>()?)).collect()
    };
    let tape = Tape::inference();
    let expected = values(model.forward(&tape, images, Mode::Evaluate)?.values)?;
    let largest = |values: &[f64]| values.iter().map(|value| value.abs()).fold(0.0, nan_max);
    let mut differences = vec![0.0; expected.len()];
    // A second pass finds what the first left.
    for _ in 0..2 {
        let got = values(model.run(&model.pass_with(prepared.clone(), &tape, Mode::Evaluate), images)?)?;
        assert_eq!(got.len(), expected.len());
        for ((got, expected), difference) in got.iter().zip(&expected).zip(&mut differences) {
            assert_eq!(got.len(), expected.len());
            let apart: Vec<f64> = got.iter().zip(expected).map(|(got, expected)| got - expected).collect();
            *difference = nan_max(*difference, largest(&apart) / largest(expected));
        }
    }
    Ok(differences)
}

/// With statistics folded into convolutions that are no longer the model's.
#[test]
fn what_was_prepared_of_other_statistics_is_refused() -> Result<()> {
    let mut model = model("nano", MODELS[0].2, DType::F32)?;
    let images = random([1, 32, 32, 3], 7, -1.0, 1.0).cast(DType::F32)?;
    let [prepared, factors] = [model.prepared()?, model.factors()?];
    let mean = &mut model.statistics[0].mean;
    *mean = mean.duplicate()?;
    let run = |factors| model.run(&model.pass_with(factors, &Tape::inference(), Mode::Evaluate), &images).map(drop);
    assert!(matches!(run(prepared), Err(Error::Pass { .. })));
    run(factors)
}

#[test]
fn a_prepared_model_gives_what_the_model_gives() -> Result<()> {
    for (name, size, fields) in MODELS {
        for (dtype, factors, bound) in
            [(DType::F64, DType::F64, 1e-12), (DType::F32, DType::F32, 2e-6), (DType::F32, DType::Bf16, 0.02)]
        {
            let mut model = model(name, fields, dtype)?;
            model.place(&Device::Cpu, factors)?;
            let images = random([2, size, size, 3], 7, -1.0, 1.0).cast(dtype)?;
            let differences = differences(&model, &images)?;
            println!("{name} {factors}: {differences:?}");
            assert!(differences.iter().all(|&difference| difference < bound), "{name} {factors}: {differences:?}");
        }
    }
    Ok(())
}

/// Which images go through a model together depends on the batch and on the number of threads.
#[test]
fn an_image_has_the_same_bits_whatever_lies_beside_it() -> Result<()> {
    for (name, size, fields) in MODELS {
        for factors in [DType::F32, DType::Bf16] {
            let mut model = model(name, fields, DType::F32)?;
            model.place(&Device::Cpu, factors)?;
            let images = random([7, size, size, 3], 7, -1.0, 1.0).cast(DType::F32)?;
            let [as_it_is, prepared] = [model.factors()?, model.prepared()?];
            for (factors_of, given) in [("as it is", as_it_is), ("prepared", prepared)] {
                let run = |images: &Tensor| -> Result<Vec<Tensor>> {
                    let tape = Tape::inference();
                    let values = model.run(&model.pass_with(given.clone(), &tape, Mode::Evaluate), images)?;
                    Ok(values.into_iter().map(|value| value.into_value()).collect())
                };
                let all = run(&images)?;
                for image in 0..7 {
                    let alone = run(&images.slice(0, image..image + 1)?)?;
                    assert_eq!(all.len(), alone.len());
                    for (all, alone) in all.iter().zip(&alone) {
                        let [all, alone] = [&all.slice(0, image..image + 1)?, alone].map(|value| value.to_vec::<f32>());
                        assert!(all? == alone?, "{name}, {factors}, {factors_of}: image {image}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Out of date, they would give wrong numbers without any error.
#[test]
fn what_factors_were_made_of_cannot_change_while_they_live() -> Result<()> {
    let is_shared = |written: Result<()>| match written {
        Err(Error::Engine(autograd::Error::Tensor(tensor::Error::Shared { .. }))) => true,
        Ok(()) => false,
        Err(other) => panic!("{other}"),
    };
    for factor_type in [DType::F32, DType::Bf16] {
        let mut model = model("nano", MODELS[0].2, DType::F32)?;
        model.place(&Device::Cpu, factor_type)?;
        let images = random([4, 32, 32, 3], 7, -1.0, 1.0).cast(DType::F32)?;
        let trace = model.forward(&Tape::new(), &images, Mode::Train { seed: 1, step: 0 })?.trace;
        let write = |model: &mut BiFormer| model.parameters.flat_mut::<f32>().map(drop).map_err(Error::from);
        for prepared in [false, true] {
            let factors = if prepared { model.prepared()? } else { model.factors()? };
            let copy = factors.clone();
            drop(factors);
            assert!(is_shared(write(&mut model)), "{factor_type}");
            assert_eq!(is_shared(model.update_statistics(&trace)), prepared, "{factor_type}");
            drop(copy);
            write(&mut model)?;
            model.update_statistics(&trace)?;
        }
    }
    Ok(())
}
