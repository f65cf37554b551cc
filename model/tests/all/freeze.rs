//! Freezing parts of a model: they stay as they are, and nothing changes about the gradients of the others.

use autograd::{Gradients, Tape};
use model::{BiFormer, Error, Mode, Result, Trace, preset};
use tensor::rng::Philox;
use tensor::{DType, Tensor};

/// Small models of every family.
const MODELS: [(&str, &[&str]); 3] = [
    ("nano", &["depth=2,2,1", "embed_dim=24,48,48", "layer_scale=0.1"]),
    ("stl", &["depth=1,1,1,2", "embed_dim=32,32,64,64", "soft_routing=true", "auto_pad=true"]),
    ("stl_nchw", &["depth=1,1,1,2", "embed_dim=32,32,64,64", "topks=1,2,-1,-2"]),
];

fn model(name: &str, fields: &[&str]) -> Result<BiFormer> {
    BiFormer::new(&preset(name)?.config().with_overrides(fields.iter().copied())?, 1, DType::F64)
}

/// The gradients of the parameters that have one, by name.
type Named = Vec<(String, Vec<f64>)>;

/// The gradients that a step leaves, and the number of nodes on the tape.
fn gradients(model: &mut BiFormer, tape: &Tape) -> Result<(Named, usize)> {
    let pixels: Vec<f64> = (0..3 * 64 * 64 * 3).map(|i| f64::from(Philox::new(1, 2).uniform(i)) - 0.5).collect();
    let output =
        model.forward(tape, &Tensor::from_slice(&pixels, [3, 64, 64, 3])?, Mode::Train { seed: 3, step: 5 })?;
    let mut gradients = Gradients::new(&model.parameters)?;
    let upstream = output.logits()?.value().clone();
    tape.backward_from(output.logits()?, upstream, &mut gradients)?;
    gradients.require_all()?;
    model.update_statistics(&output.trace)?;
    let layout = model.parameters.layout();
    let of = |id| Some((layout.name(id).to_owned(), gradients.parameter(id)?.to_vec::<f64>().ok()?));
    Ok((layout.ids().filter_map(of).collect(), tape.nodes().len()))
}

#[test]
fn the_others_have_the_same_gradients() -> Result<()> {
    for (name, fields) in MODELS {
        let (all, nodes) = gradients(&mut model(name, fields)?, &Tape::new())?;
        let last = if name == "nano" { "stages.2.0.mlp" } else { "stages.3.blocks.1.mlp" };
        for parts in [vec!["stages.0"], vec!["stages.1", last], vec!["head"], vec!["stages.0", "stages.1", "stages.2"]]
        {
            for tape in [Tape::new as fn() -> Tape, Tape::recomputing_cheap, Tape::recomputing_segments] {
                let mut model = model(name, fields)?;
                model.freeze(&parts)?;
                let (others, _) = gradients(&mut model, &tape())?;
                let frozen = |name: &str| parts.iter().any(|part| name.starts_with(&format!("{part}.")));
                let expected: Vec<_> = all.iter().filter(|(name, _)| !frozen(name)).cloned().collect();
                assert!(others.len() < all.len() && others == expected, "{name}: {parts:?}");
            }
        }
        // What leads to frozen parameters only is not walked, nor recorded.
        let mut model = model(name, fields)?;
        let tops: Vec<String> =
            (0..4).flat_map(|stage| [format!("downsample_layers.{stage}"), format!("stages.{stage}")]).collect();
        let tops = &tops[..2 * model.config().stages()];
        model.freeze(tops)?;
        for tape in [Tape::new(), Tape::recomputing_segments()] {
            let (others, few) = gradients(&mut model, &tape)?;
            assert_eq!(
                others.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
                ["norm.weight", "norm.bias", "head.weight", "head.bias"]
            );
            assert!(few < 12 && few < nodes, "{few} nodes of {nodes}");
        }
        // And thawed, all is as before.
        model.freeze(&[] as &[&str])?;
        assert!(gradients(&mut model, &Tape::new())?.0 == all);
    }
    Ok(())
}

#[test]
fn a_frozen_normalisation_keeps_its_statistics_and_goes_by_them() -> Result<()> {
    let (name, fields) = MODELS[0];
    let mut model = model(name, fields)?;
    for running in &mut model.statistics {
        running.mean = Tensor::full(running.mean.shape().clone(), 0.25).cast(DType::F64)?;
    }
    model.freeze(&["downsample_layers.0", "norm"])?;
    let before: Vec<(String, Vec<f64>, u64)> = model
        .statistics
        .iter()
        .map(|it| Ok((it.name.clone(), it.mean.to_vec()?, it.batches)))
        .collect::<Result<_>>()?;
    gradients(&mut model, &Tape::new())?;
    let moved = model.statistics.iter().zip(&before).map(|(running, (name, mean, batches))| {
        let moved = running.mean.to_vec::<f64>()? != *mean;
        assert_eq!(moved, running.batches > *batches, "{name}");
        Ok((name.as_str(), moved))
    });
    assert_eq!(
        moved.collect::<Result<Vec<_>>>()?,
        [
            ("downsample_layers.0.1", false),
            ("downsample_layers.0.4", false),
            ("downsample_layers.1.1", true),
            ("downsample_layers.2.1", true),
            ("norm", false)
        ]
    );
    Ok(())
}

/// As in evaluation: what a new head learns from is not noisier than what it will see.
#[test]
fn no_image_skips_a_branch_of_a_frozen_block() -> Result<()> {
    let config =
        model::preset("nano")?.config().with_overrides(["depth=1,1,1", "embed_dim=24,48,96", "drop_path=0.9"])?;
    let mut model = BiFormer::new(&config, 1, DType::F64)?;
    let images = Tensor::full([4, 32, 32, 3], 0.5);
    let logits = |model: &BiFormer, mode: Mode| -> Result<Vec<f64>> {
        Ok(model.forward(&Tape::new(), &images, mode)?.logits()?.value().to_vec()?)
    };
    let train = Mode::Train { seed: 1, step: 0 };
    assert_ne!(logits(&model, train)?, logits(&model, Mode::Evaluate)?);
    model.freeze(&["downsample_layers", "stages", "norm"])?;
    assert_eq!(logits(&model, train)?, logits(&model, Mode::Evaluate)?);
    // A block of which only a part is frozen learns, and so images skip its branches.
    model.freeze(&["downsample_layers", "stages.0", "stages.1", "stages.2.0.norm1", "norm"])?;
    assert_ne!(logits(&model, train)?, logits(&model, Mode::Evaluate)?);
    Ok(())
}

#[test]
fn which_images_skip_a_branch_does_not_depend_on_what_is_frozen() -> Result<()> {
    let config =
        model::preset("nano")?.config().with_overrides(["depth=1,2,1", "embed_dim=24,48,96", "drop_path=0.5"])?;
    let mut model = BiFormer::new(&config, 1, DType::F64)?;
    let images = Tensor::full([16, 32, 32, 3], 0.5);
    let mut trace = |frozen: &[&str]| -> Result<_> {
        model.freeze(frozen)?;
        Ok(model.forward(&Tape::new(), &images, Mode::Train { seed: 1, step: 0 })?.trace)
    };
    let (all, others) = (trace(&[])?, trace(&["stages.1.0"])?);
    // The first block of all skips nothing.
    assert_eq!((&all.draws[..], &others.draws[..]), (&[0, 1, 2, 3, 4, 5][..], &[2, 3, 4, 5][..]));
    let rows = |trace: &Trace| trace.routes.iter().map(|routes| routes.indices.shape()[0]).collect::<Vec<_>>();
    assert_eq!((rows(&all)[2], rows(&others)[1]), (rows(&others)[2], 16));
    assert!(rows(&all)[1] < 16 && rows(&all)[2] < 16);
    Ok(())
}

#[test]
fn parts_that_are_not_there() -> Result<()> {
    let (name, fields) = MODELS[0];
    let mut model = model(name, fields)?;
    for (parts, said) in [
        (&["stages.7"][..], "no part \"stages.7\""),
        (&["stages.0", "hea"], "no part \"hea\""),
        (&["stages", "downsample_layers", "norm", "head"], "all of the model"),
    ] {
        let error = model.freeze(parts).unwrap_err();
        assert!(matches!(error, Error::Part { .. }) && error.to_string().contains(said), "{error}");
        assert!(error.to_string().contains("parts are downsample_layers.0, downsample_layers.1, downsample_layers.2, stages.0, stages.1, stages.2, norm, head,"), "{error}");
        assert!(model.parameters.layout().ids().all(|id| !model.parameters.layout().is_frozen(id)));
    }
    Ok(())
}
