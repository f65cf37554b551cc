//! Two independent computations of a gradient to check it against: finite differences of the production forward pass,
//! and dual numbers through the reference.

use crate::exact::{Array, Dual, LANES, Scalar};
use crate::{Error, Gradients, ParamId, Parameters, Result, Tape, Var};
use tensor::rng::Philox;
use tensor::{DType, Tensor};

/// A recorded function of several inputs: a `fn`, for instance. (Rust does not infer that a closure accepts tapes of
/// any lifetime.)
pub trait Function: Sync {
    /// Computes the value on the inputs' tape.
    fn apply<'t>(&self, inputs: &[Var<'t>]) -> Result<Var<'t>>;
}

impl<F> Function for F
where
    F: for<'t> Fn(&[Var<'t>]) -> Result<Var<'t>> + Sync,
{
    fn apply<'t>(&self, inputs: &[Var<'t>]) -> Result<Var<'t>> {
        self(inputs)
    }
}

/// The value of a function. Errors: those of the function.
pub fn value(f: &dyn Function, inputs: &[Tensor]) -> Result<Tensor> {
    let tape = Tape::inference();
    let inputs: Vec<Var<'_>> = inputs.iter().map(|input| tape.constant(input.clone())).collect();
    Ok(f.apply(&inputs)?.into_value())
}

/// The gradients of <upstream, f(inputs)> by the backward rules: one per input, of its shape, none for those that are
/// index tensors. `upstream` has the shape of f(inputs). Errors: those of the function, and of
/// [`Tape::backward_from`].
pub fn backward(f: &dyn Function, inputs: &[Tensor], upstream: &Tensor) -> Result<Vec<Option<Tensor>>> {
    backward_on(&Tape::new(), f, inputs, upstream, |_| ())
}

/// As [`backward`], on a tape of any kind that records, and with a chance to tamper with it between the two passes.
/// Errors: those of the function and of its backward pass.
pub fn backward_on(
    tape: &Tape,
    f: &dyn Function,
    inputs: &[Tensor],
    upstream: &Tensor,
    between: impl FnOnce(&Tape),
) -> Result<Vec<Option<Tensor>>> {
    let leaf = |input: &Tensor| match input.dtype() {
        DType::Index => tape.constant(input.clone()),
        _ => tape.input(input.clone()),
    };
    let inputs: Vec<Var<'_>> = inputs.iter().map(leaf).collect();
    let output = f.apply(&inputs)?;
    between(tape);
    let mut gradients = Gradients::default();
    if output.node().is_some() {
        tape.backward_from(&output, upstream.clone(), &mut gradients)?;
    }
    Ok(inputs.iter().map(|input| gradients.of(input).cloned()).collect())
}

/// The step of differences of an operation: neither truncation nor rounding comes near the 1e-6 that checks allow.
const STEP: f64 = 1e-3;
/// That of differences of a model, whose loss is curved more: of one with drop-path, truncation was 1.6e-7 of the
/// largest gradient with a step of 1e-3, and 2e-11 with this.
const STEP_OF_MODEL: f64 = 1e-4;

/// The derivative of a function at 0 by four-point central differences, whose error falls with the fourth power of the
/// step.
fn derivative<E>(step: f64, mut at: impl FnMut(f64) -> std::result::Result<f64, E>) -> std::result::Result<f64, E> {
    Ok((8.0 * (at(step)? - at(-step)?) - (at(2.0 * step)? - at(-2.0 * step)?)) / (12.0 * step))
}

/// The derivative of <upstream, f(inputs)> with respect to one element of one input, by four-point central differences.
///
/// Errors: [`tensor::Error::OutOfRange`] if there is no such input, or element; [`tensor::Error::Shape`] if `upstream`
/// has not as many elements as the value.
pub fn difference(f: &dyn Function, inputs: &[Tensor], upstream: &[f64], input: usize, element: usize) -> Result<f64> {
    let out_of_range = |what, index, bound| tensor::Error::OutOfRange { op: "difference", what, index, bound };
    let base = inputs.get(input).ok_or_else(|| out_of_range("input", input, inputs.len()))?.to_vec::<f64>()?;
    if element >= base.len() {
        return Err(out_of_range("element", element, base.len()).into());
    }
    derivative(STEP, |offset| -> Result<f64> {
        let mut moved = base.clone();
        moved[element] += offset;
        let mut inputs = inputs.to_vec();
        inputs[input] = Tensor::from_slice(&moved, inputs[input].shape().clone())?;
        let value = value(f, &inputs)?;
        if value.count() != upstream.len() {
            let expected = format!("an upstream gradient of {} elements", value.count());
            return Err(tensor::Error::shape("difference", expected, &[upstream.len()]).into());
        }
        let value = value.to_vec::<f64>()?;
        Ok(value.iter().zip(upstream).map(|(value, upstream)| value * upstream).sum())
    })
}

/// The derivative of a loss with respect to one element of a parameter in f64, in the same way, with a tenth of the
/// step: for modules and whole models, whose parameters are no inputs. `loss` computes it anew from the parameters that
/// it is given.
///
/// Errors: those of `loss`; [`tensor::Error::OutOfRange`], [`tensor::Error::DType`]; [`tensor::Error::Shared`] if
/// something looks at the parameters, or still does when `loss` has returned. Otherwise they are afterwards as they
/// were.
pub fn difference_of_parameter<E: From<Error>>(
    parameters: &mut Parameters,
    id: ParamId,
    element: usize,
    mut loss: impl FnMut(&Parameters) -> std::result::Result<f64, E>,
) -> std::result::Result<f64, E> {
    let span = parameters.layout().span(id);
    let count = parameters.layout().shape(id).count();
    if element >= count {
        let (op, what) = ("difference_of_parameter", "element");
        return Err(Error::from(tensor::Error::OutOfRange { op, what, index: element, bound: count }).into());
    }
    let place = span.start + element;
    let value = parameters.flat_mut::<f64>()?[place];
    let found = derivative(STEP_OF_MODEL, |offset| {
        parameters.flat_mut::<f64>()?[place] = value + offset;
        loss(parameters)
    });
    parameters.flat_mut::<f64>()?[place] = value;
    found
}

/// The exact derivatives of <upstream, f(inputs)> with respect to some elements of one input, by dual
/// numbers through a reference implementation. Panics if there is no such input, or if `upstream` has not as many
/// elements as the value.
pub fn exact(
    reference: &dyn Fn(&[Array<Dual>]) -> Array<Dual>,
    inputs: &[Array<f64>],
    upstream: &[f64],
    input: usize,
    elements: &[usize],
) -> Vec<f64> {
    let mut derivatives = Vec::with_capacity(elements.len());
    for group in elements.chunks(LANES) {
        let direction = |lane: usize, element: usize| f64::from(u8::from(group.get(lane) == Some(&element)));
        derivatives.extend(&exact_along(reference, inputs, upstream, input, &direction)[..group.len()]);
    }
    derivatives
}

/// The exact derivatives of <upstream, f(inputs)> when one input moves along [`LANES`] directions, given by lane and
/// element. Panics as [`exact`] does.
pub fn exact_along(
    reference: &dyn Fn(&[Array<Dual>]) -> Array<Dual>,
    inputs: &[Array<f64>],
    upstream: &[f64],
    input: usize,
    direction: &dyn Fn(usize, usize) -> f64,
) -> [f64; LANES] {
    let lift = |array: &Array<f64>| Array {
        shape: array.shape.clone(),
        data: array.data.iter().map(|&value| Dual::of(value)).collect(),
    };
    let mut lifted: Vec<Array<Dual>> = inputs.iter().map(lift).collect();
    for (element, number) in lifted[input].data.iter_mut().enumerate() {
        number.tangent = std::array::from_fn(|lane| direction(lane, element));
    }
    let output = reference(&lifted);
    assert_eq!(output.data.len(), upstream.len(), "an upstream gradient of the value's elements");
    std::array::from_fn(|lane| output.data.iter().zip(upstream).map(|(y, u)| y.tangent[lane] * u).sum())
}

/// All elements of a tensor of `count` elements, or `most` of them chosen by `seed`, in order.
pub fn sample(count: usize, most: usize, seed: u64) -> Vec<usize> {
    if count <= most {
        return (0..count).collect();
    }
    let mut chosen = Philox::keyed(seed, &[count as u64]).sequence().permutation(count);
    chosen.truncate(most);
    chosen.sort_unstable();
    chosen
}

/// The largest difference between two gradients, relative to the larger one's largest element. Two
/// gradients that vanish agree. Panics if they have different lengths.
pub fn relative_error(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "two gradients of the same elements");
    let scale = a.iter().chain(b).fold(0.0, |scale: f64, x| scale.max(x.abs()));
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, nan_max);
    worst / scale.max(f64::MIN_POSITIVE)
}

/// The larger one; NaN if either is.
pub fn nan_max(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}
