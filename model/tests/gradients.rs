//! The gradients of a whole model, put together from operations that are checked one by one, against differences in f64.

use autograd::gradcheck::{difference_of_parameter, sample};
use autograd::{Gradients, Parameters, Tape, Var};
use model::{BiFormer, Family, Mode, ModelConfig, Pass, PerStage, Result};
use tensor::rng::Philox;
use tensor::{DType, Tensor};

/// Two stages, of which the first routes, to all of its regions: were some left out, a step could change which.
fn config() -> ModelConfig {
    ModelConfig {
        depth: vec![1, 1],
        embed_dim: vec![8, 16],
        topks: vec![4, -2],
        n_win: PerStage::All(2),
        head_dim: 4,
        full_attention_heads: 2,
        num_classes: 3,
        ..ModelConfig::default()
    }
}

/// Weights far from 0, so that no gradient vanishes.
fn scatter(parameters: &mut Parameters) -> Result<()> {
    let mut draws = Philox::new(3, 1).sequence();
    let layout = parameters.layout().clone();
    let values = parameters.flat_mut::<f64>()?;
    for id in layout.ids() {
        values[layout.span(id)].iter_mut().for_each(|value| *value += draws.uniform_in(-0.3, 0.3));
    }
    Ok(())
}

/// The loss of a training pass with these parameters, on the tape.
fn loss<'t>(model: &BiFormer, tape: &'t Tape, parameters: &Parameters) -> Result<Var<'t>> {
    let mut draws = Philox::new(3, 2).sequence();
    let pixels: Vec<f64> = (0..2 * 32 * 32 * 3).map(|_| draws.uniform_in(-1.0, 1.0)).collect();
    let (images, labels) = (Tensor::from_slice(&pixels, [2, 32, 32, 3])?, Tensor::from_slice(&[0u32, 2], [2])?);
    let pass = Pass::new(tape, Mode::Train { seed: 1, step: 0 }, parameters, &model.statistics);
    let logits = model.run(&pass, &images)?.remove(0);
    Ok(ops::cross_entropy(&logits, &labels, 0.1)?)
}

#[test]
fn gradients_of_a_model_are_those_that_differences_find() -> Result<()> {
    let scaled = ModelConfig { layer_scale: 0.5, soft_routing: true, ..config() };
    let nchw = ModelConfig { family: Family::BiformerStlNchw, ..config() };
    for config in [config(), scaled, nchw] {
        let mut model = BiFormer::new(&config, 1, DType::F64)?;
        scatter(&mut model.parameters)?;
        let mut gradients = Gradients::new(&model.parameters)?;
        let tape = Tape::new();
        tape.backward(&loss(&model, &tape, &model.parameters)?, &mut gradients)?;
        gradients.require_all()?;
        drop(tape);
        // Some gradients are zero but for rounding: those of biases before a batch normalisation.
        let largest =
            gradients.flat().expect("a model's").to_vec::<f64>()?.iter().fold(0.0f64, |most, g| most.max(g.abs()));
        let mut parameters = model.parameters.duplicate()?;
        for id in parameters.layout().clone().ids() {
            let by_rules = gradients.parameter(id).expect("one of all").to_vec::<f64>()?;
            let elements = sample(by_rules.len(), 3, 1);
            let mut difference = |&element: &usize| {
                difference_of_parameter(&mut parameters, id, element, |parameters| -> Result<f64> {
                    Ok(loss(&model, &Tape::inference(), parameters)?.value().item::<f64>()?)
                })
            };
            let by_differences: Vec<f64> = elements.iter().map(&mut difference).collect::<Result<_>>()?;
            for (&element, by_difference) in elements.iter().zip(by_differences) {
                let name = model.parameters.layout().name(id);
                let error = (by_rules[element] - by_difference).abs() / largest;
                assert!(error < 1e-8, "{:?}, {name}[{element}]: {}, {by_difference}", config.family, by_rules[element]);
            }
        }
    }
    Ok(())
}
