//! Value and gradients of a case against their witnesses.

use crate::case::{Case, array, uniform};
use autograd::Result;
use autograd::gradcheck::{backward_with, difference, exact, nan_max, relative_error, sample, value};
use tensor::{DType, Tensor};

/// At most this many elements of each input are compared; the rest of a large case is skipped.
const SAMPLE: usize = 48;

#[derive(Default)]
pub(super) struct Found {
    pub checked: usize,
    pub skipped: usize,
    pub value_error: f64,
    pub difference_error: f64,
    pub exact_error: f64,
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
        found.exact_error = nan_max(found.exact_error, relative_error(&of_rule, &exact));
    }
    Ok(found)
}

/// Some elements of a gradient; zeros where there is none, which is what a missing gradient claims.
fn at(gradient: Option<&Tensor>, elements: &[usize]) -> Result<Vec<f64>> {
    let Some(gradient) = gradient else { return Ok(vec![0.0; elements.len()]) };
    let all = gradient.to_vec::<f64>()?;
    Ok(elements.iter().map(|&element| all[element]).collect())
}

/// The exact gradients of a case with respect to a sample of each input's elements, to hold several
/// backward rules against.
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

    /// The gradients by a backward rule whose saved tensors `tamper` may spoil.
    pub fn gradients(&self, case: &Case, tamper: impl FnOnce(&autograd::Tape)) -> Result<Vec<Option<Tensor>>> {
        backward_with(case, &case.inputs, &self.upstream, tamper)
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
