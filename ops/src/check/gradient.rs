//! Checks the value of a case against the reference, and its gradients against finite differences and dual numbers.

use crate::case::{Case, array, uniform};
use autograd::exact::LANES;
use autograd::gradcheck::{backward_on, difference, exact, exact_along, nan_max, relative_error, sample, value};
use autograd::{Result, Tape};
use tensor::rng::Philox;
use tensor::{DType, Tensor};

/// At most this many elements of each input are compared one by one; the rest of a large input is skipped, and only
/// checked in aggregate, along random directions.
const SAMPLE: usize = 48;

#[derive(Default)]
pub(super) struct Found {
    pub checked: usize,
    pub skipped: usize,
    pub value_error: f64,
    pub difference_error: f64,
    pub dual_error: f64,
}

/// An upstream gradient for a case's value.
pub(super) fn upstream_of(value: &Tensor) -> Tensor {
    uniform(value.shape().clone(), 99)
}

pub(super) fn check(case: &Case) -> Result<Found> {
    let mut found = Found::default();
    let value = value(case, &case.inputs)?;
    let expected = case.reference(&case.arrays());
    if value.shape()[..] != expected.shape[..] {
        let error = tensor::Error::shape("reference", format!("the reference's {:?}", expected.shape), value.shape());
        return Err(error.into());
    }
    found.value_error = relative_error(&array(&value).data, &expected.data);

    let upstream = upstream_of(&value);
    let weights = upstream.to_vec::<f64>()?;
    let gradients = autograd::gradcheck::backward(case, &case.inputs, &upstream)?;
    for (input, gradient) in gradients.iter().enumerate() {
        if case.inputs[input].dtype() == DType::Index {
            continue;
        }
        let count = case.inputs[input].count();
        let elements = sample(count, SAMPLE, input as u64);
        found.checked += elements.len();
        found.skipped += count - elements.len();
        let of_rule = at(gradient.as_ref(), &elements)?;
        let differences: Vec<f64> = elements
            .iter()
            .map(|&element| difference(case, &case.inputs, &weights, input, element))
            .collect::<Result<_>>()?;
        found.difference_error = nan_max(found.difference_error, relative_error(&of_rule, &differences));
        let exact = exact(&|x| case.dual_reference(x), &case.arrays(), &weights, input, &elements);
        found.dual_error = nan_max(found.dual_error, relative_error(&of_rule, &exact));
        if count > SAMPLE {
            let along = along_random_directions(case, &weights, input, gradient.as_ref())?;
            found.dual_error = nan_max(found.dual_error, along);
        }
    }
    Ok(found)
}

/// The largest difference between a whole gradient and the exact one, projected on random directions of ±1, in which
/// every element counts: a wrong element outside the sample shows up here. Relative to the gradient's norm.
fn along_random_directions(case: &Case, weights: &[f64], input: usize, gradient: Option<&Tensor>) -> Result<f64> {
    let count = case.inputs[input].count();
    let random = Philox::new(0xD1CE, input as u64);
    let direction = |lane: usize, element: usize| match random.word((element * LANES + lane) as u64) & 1 {
        0 => -1.0,
        _ => 1.0,
    };
    let exact = exact_along(&|x| case.dual_reference(x), &case.arrays(), weights, input, &direction);
    let gradient = at(gradient, &(0..count).collect::<Vec<_>>())?;
    let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
    let along = |lane: usize| -> f64 { (0..count).map(|element| gradient[element] * direction(lane, element)).sum() };
    let worst = (0..LANES).map(|lane| (along(lane) - exact[lane]).abs()).fold(0.0, nan_max);
    Ok(if worst == 0.0 { 0.0 } else { worst / norm.max(f64::MIN_POSITIVE) })
}

/// Some elements of a gradient; zeros where there is none, which is what a missing gradient claims.
fn at(gradient: Option<&Tensor>, elements: &[usize]) -> Result<Vec<f64>> {
    let Some(gradient) = gradient else { return Ok(vec![0.0; elements.len()]) };
    let all = gradient.to_vec::<f64>()?;
    Ok(elements.iter().map(|&element| all[element]).collect())
}

/// The exact gradients of a case with respect to a sample of each input's elements, to compare several backward rules
/// with.
pub(super) struct Oracle {
    upstream: Tensor,
    /// Per input: which elements, and their derivatives.
    exact: Vec<(Vec<usize>, Vec<f64>)>,
}

impl Oracle {
    pub fn new(case: &Case) -> Result<Self> {
        let upstream = upstream_of(&value(case, &case.inputs)?);
        let weights = upstream.to_vec::<f64>()?;
        let exact = (0..case.inputs.len())
            .map(|input| {
                let elements = sample(case.inputs[input].count(), SAMPLE, input as u64);
                let derivatives = exact(&|x| case.dual_reference(x), &case.arrays(), &weights, input, &elements);
                (elements, derivatives)
            })
            .collect();
        Ok(Self { upstream, exact })
    }

    /// The upstream gradient for which the exact gradients were computed.
    pub fn upstream(&self) -> &Tensor {
        &self.upstream
    }

    /// The gradients by a backward rule that is given `upstream`, and whose saved tensors `tamper` may corrupt.
    pub fn gradients(
        &self,
        case: &Case,
        upstream: &Tensor,
        tamper: impl FnOnce(&autograd::Tape),
    ) -> Result<Vec<Option<Tensor>>> {
        backward_on(&Tape::new(), case, &case.inputs, upstream, tamper)
    }

    /// Whether these gradients agree with the exact ones.
    pub fn accepts(&self, case: &Case, gradients: &[Option<Tensor>]) -> Result<bool> {
        for (input, gradient) in gradients.iter().enumerate() {
            if case.inputs[input].dtype() == DType::Index {
                continue;
            }
            let (elements, derivatives) = &self.exact[input];
            let error = relative_error(&at(gradient.as_ref(), elements)?, derivatives);
            if error.is_nan() || error > super::EXACT_TOLERANCE {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
