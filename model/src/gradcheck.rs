//! The gradients of a whole model, put together from operations that are checked one by one, against differences in
//! f64.

use crate::biformer::{BiFormer, part_of};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::pass::{Mode, Pass};
use crate::trace::Trace;
use autograd::gradcheck::{difference_of_parameter, nan_max, sample};
use autograd::{Gradients, Parameters, Tape, Var};
use tensor::rng::Philox;
use tensor::{DType, Tensor};

/// The largest difference from a gradient that [`check_gradients`] allows, relative to the model's largest gradient.
pub const GRADIENT_TOLERANCE: f64 = 1e-9;

/// The fewest values of a channel that a batch normalisation is to see: of two values it makes −1 and 1, nearly
/// whatever they are, so that no step is small enough for differences.
const MIN_VALUES: usize = 16;

/// What was found of a part of a model, such as `stages.0`.
#[derive(Clone, Debug, PartialEq)]
pub struct PartCheck {
    /// The part's name.
    pub part: String,
    /// How many parameters (tensors) it has.
    pub parameters: usize,
    /// How many elements of them were compared.
    pub checked: usize,
    /// How many were not, because a step along them changes which regions are routed to: there the loss is not
    /// continuous, and a difference says nothing of its slope.
    pub rerouted: usize,
    /// The largest difference, relative to the largest of all gradients: some, of biases before a batch normalisation,
    /// are zero but for rounding.
    pub error: f64,
    /// The parameter with that difference.
    pub worst: String,
}

impl PartCheck {
    /// Whether something was compared, and all of it is the same.
    pub fn passed(&self) -> bool {
        self.checked > 0 && self.error <= GRADIENT_TOLERANCE
    }
}

/// How many images of this height and width [`check_gradients`] takes: two, or where little is left of them, more.
pub fn images_to_check(config: &ModelConfig, [height, width]: [usize; 2]) -> usize {
    let last = config.stages().saturating_sub(1);
    let pixels = config.map_side(height, last).saturating_mul(config.map_side(width, last));
    MIN_VALUES.div_ceil(pixels.max(1)).max(2)
}

/// Checks the gradients of the loss of a training step, on [some](images_to_check) random images of this height and
/// width, with respect to every parameter of a model in f64: up to `most` elements of each, chosen by `seed`, as the
/// weights and the images are, by four-point central differences. `seen` gets each part as soon as it is checked; for
/// each element the model runs four times. Errors: those of the configuration and of the image's size;
/// [`Error::Headless`](crate::Error::Headless).
pub fn check_gradients(
    config: &ModelConfig,
    [height, width]: [usize; 2],
    most: usize,
    seed: u64,
    mut seen: impl FnMut(&PartCheck),
) -> Result<Vec<PartCheck>> {
    let mut model = BiFormer::new(config, seed, DType::F64)?;
    scatter(&mut model.parameters, seed)?;
    let mut draws = Philox::keyed(seed, &[1]).sequence();
    let images = images_to_check(config, [height, width]);
    let pixels: Vec<f64> = (0..images * height * width * 3).map(|_| draws.uniform_in(-1.0, 1.0)).collect();
    let labels: Vec<u32> = [0, config.num_classes as u32 - 1].into_iter().cycle().take(images).collect();
    let given = [Tensor::from_slice(&pixels, [images, height, width, 3])?, Tensor::from_slice(&labels, [images])?];
    let (by_rules, trace) = by_rules(&model, &given)?;
    compare(&model, &given, &by_rules, &trace, &|count| sample(count, most, seed), &mut seen)
}

/// The gradients of all parameters, flat, and the trace of the pass.
fn by_rules(model: &BiFormer, given: &[Tensor; 2]) -> Result<(Vec<f64>, Trace)> {
    let (mut gradients, tape) = (Gradients::new(&model.parameters)?, Tape::new());
    let (value, trace) = loss(model, &tape, &model.parameters, given)?;
    tape.backward(&value, &mut gradients)?;
    gradients.require_all()?;
    Ok((gradients.flat().map_or(Ok(vec![]), Tensor::to_vec)?, trace))
}

/// Compares gradients with differences at the elements that `chosen` takes of each parameter's number of them.
fn compare(
    model: &BiFormer,
    given: &[Tensor; 2],
    by_rules: &[f64],
    trace: &Trace,
    chosen: &dyn Fn(usize) -> Vec<usize>,
    seen: &mut dyn FnMut(&PartCheck),
) -> Result<Vec<PartCheck>> {
    let largest = by_rules.iter().fold(f64::MIN_POSITIVE, |most, g| nan_max(most, g.abs()));
    let (layout, mut parameters) = (model.parameters.layout(), model.parameters.duplicate()?);
    let mut parts: Vec<PartCheck> = vec![];
    for id in layout.ids() {
        let (name, by_rules) = (layout.name(id), &by_rules[layout.span(id)]);
        let mut part = match parts.pop_if(|part| part.part == part_of(name)) {
            Some(part) => part,
            None => {
                parts.last().into_iter().for_each(&mut *seen);
                let (part, worst) = (part_of(name), name.to_owned());
                PartCheck { part, parameters: 0, checked: 0, rerouted: 0, error: 0.0, worst }
            }
        };
        part.parameters += 1;
        for element in chosen(by_rules.len()) {
            let mut rerouted = false;
            let by_differences = difference_of_parameter(&mut parameters, id, element, |parameters| -> Result<f64> {
                let tape = Tape::inference();
                let (loss, moved) = loss(model, &tape, parameters, given)?;
                rerouted |= !same_routes(trace, &moved)?;
                Ok(loss.value().item::<f64>()?)
            })?;
            if rerouted {
                part.rerouted += 1;
                continue;
            }
            part.checked += 1;
            let error = (by_rules[element] - by_differences).abs() / largest;
            if error.is_nan() || error > part.error {
                (part.error, part.worst) = (error, name.to_owned());
            }
        }
        parts.push(part);
    }
    parts.last().into_iter().for_each(seen);
    Ok(parts)
}

/// Moves biases and the weights of normalisations away from 0 and 1, so that every term of a gradient shows.
fn scatter(parameters: &mut Parameters, seed: u64) -> Result<()> {
    let mut draws = Philox::keyed(seed, &[2]).sequence();
    let layout = parameters.layout().clone();
    let values = parameters.flat_mut::<f64>()?;
    for id in layout.ids().filter(|&id| layout.shape(id).len() == 1) {
        values[layout.span(id)].iter_mut().for_each(|value| *value += draws.uniform_in(-0.3, 0.3));
    }
    Ok(())
}

/// The loss of a training pass with these parameters, and the trace that it leaves.
fn loss<'t>(
    model: &BiFormer,
    tape: &'t Tape,
    parameters: &Parameters,
    [images, labels]: &[Tensor; 2],
) -> Result<(Var<'t>, Trace)> {
    let pass = Pass::new(tape, Mode::Train { seed: 1, step: 0 }, parameters, &model.statistics);
    let output = model.output(pass, images)?;
    Ok((ops::cross_entropy(output.logits()?, labels, 0.1)?, output.trace))
}

/// Whether two passes routed all regions alike.
fn same_routes(one: &Trace, other: &Trace) -> Result<bool> {
    for (one, other) in one.routes.iter().zip(&other.routes) {
        if one.indices.to_vec::<u32>()? != other.indices.to_vec::<u32>()? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::preset;

    #[test]
    fn a_wrong_gradient_is_found_in_its_part() -> Result<()> {
        let fields = ["depth=1,1", "embed_dim=8,16", "topks=2,-2", "n_win=2", "head_dim=4", "full_attention_heads=2"];
        let model = BiFormer::new(&preset("nano")?.config().with_overrides(fields)?, 1, DType::F64)?;
        let images = Tensor::full([2, 32, 32, 3], 0.5);
        let given = [images, Tensor::from_slice(&[0u32, 2], [2])?];
        let (mut gradients, trace) = by_rules(&model, &given)?;
        let largest = gradients.iter().fold(0.0f64, |most, g| most.max(g.abs()));
        let layout = model.parameters.layout();
        let id = layout.ids().find(|&id| layout.name(id) == "norm.bias").expect("a last normalisation");
        gradients[layout.span(id).start] += 1e-6 * largest;
        let first = |count: usize| (0..count.min(1)).collect();
        let parts = compare(&model, &given, &gradients, &trace, &first, &mut |_| ())?;
        let failed: Vec<(&str, &str)> =
            parts.iter().filter(|part| !part.passed()).map(|part| (&part.part[..], &part.worst[..])).collect();
        assert_eq!(failed, [("norm", "norm.bias")]);
        Ok(())
    }
}
