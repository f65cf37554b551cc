//! Checks the value of a case against the reference, and its gradients against finite differences and dual numbers.

use super::{DIFFERENCE_TOLERANCE, EXACT_TOLERANCE, Report, within};
use crate::case::{Case, array, uniform};
use autograd::exact::LANES;
use autograd::gradcheck::{backward_on, difference, exact, exact_along, nan_max, relative_error, sample, value};
use autograd::{Result, Tape};
use tensor::rng::Philox;
use tensor::{DType, Tensor};

/// At most this many elements of each input are compared one by one; the rest of a large input is skipped, and only
/// checked in aggregate, along random directions.
const SAMPLE: usize = 48;

/// An upstream gradient for a case's value.
pub(super) fn upstream_of(value: &Tensor) -> Tensor {
    uniform(value.shape().clone(), 99)
}

/// Checks a case. Returns the exact gradients that its rule was compared with.
pub(super) fn check<'a>(case: &'a Case, report: &mut Report) -> Result<Oracle<'a>> {
    let value = value(case, &case.inputs)?;
    let expected = case.reference(&case.arrays());
    if value.shape()[..] != expected.shape[..] {
        let error = tensor::Error::shape("reference", format!("the reference's {:?}", expected.shape), value.shape());
        return Err(error.into());
    }
    let value_error = relative_error(&array(&value).data, &expected.data);

    let oracle = Oracle::new(case, upstream_of(&value))?;
    let weights = oracle.upstream.to_vec::<f64>()?;
    let gradients = oracle.gradients(&oracle.upstream, |_| ())?;
    let (mut difference_error, mut dual_error) = (0.0, 0.0);
    for (input, (gradient, exact)) in gradients.iter().zip(&oracle.exact).enumerate() {
        let Some((elements, derivatives)) = exact else { continue };
        let count = case.inputs[input].count();
        report.checked += elements.len();
        report.skipped += count - elements.len();
        let of_rule = at(gradient.as_ref(), elements)?;
        let differences: Vec<f64> = elements
            .iter()
            .map(|&element| difference(case, &case.inputs, &weights, input, element))
            .collect::<Result<_>>()?;
        difference_error = nan_max(difference_error, relative_error(&of_rule, &differences));
        dual_error = nan_max(dual_error, relative_error(&of_rule, derivatives));
        if count > SAMPLE {
            let along = along_random_directions(case, &weights, input, gradient.as_ref())?;
            dual_error = nan_max(dual_error, along);
        }
    }
    report.note(case, "value against the reference", value_error, EXACT_TOLERANCE, |r| &mut r.value_error);
    let against = "gradient against differences";
    report.note(case, against, difference_error, DIFFERENCE_TOLERANCE, |r| &mut r.difference_error);
    report.note(case, "gradient against dual numbers", dual_error, EXACT_TOLERANCE, |r| &mut r.dual_error);
    Ok(oracle)
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
pub(super) struct Oracle<'a> {
    pub case: &'a Case,
    upstream: Tensor,
    /// Per input: which elements, and their derivatives. None of an index tensor.
    exact: Vec<Option<(Vec<usize>, Vec<f64>)>>,
}

impl<'a> Oracle<'a> {
    fn new(case: &'a Case, upstream: Tensor) -> Result<Self> {
        let weights = upstream.to_vec::<f64>()?;
        let exact = |(input, tensor): (usize, &Tensor)| {
            (tensor.dtype() != DType::Index).then(|| {
                let elements = sample(tensor.count(), SAMPLE, input as u64);
                let derivatives = exact(&|x| case.dual_reference(x), &case.arrays(), &weights, input, &elements);
                (elements, derivatives)
            })
        };
        Ok(Self { case, exact: case.inputs.iter().enumerate().map(exact).collect(), upstream })
    }

    /// The upstream gradient for which the exact gradients were computed.
    pub fn upstream(&self) -> &Tensor {
        &self.upstream
    }

    /// The gradients by the case's backward rules, which are given `upstream`, and whose saved tensors `tamper` may
    /// corrupt.
    pub fn gradients(&self, upstream: &Tensor, tamper: impl FnOnce(&Tape)) -> Result<Vec<Option<Tensor>>> {
        backward_on(&Tape::new(), self.case, &self.case.inputs, upstream, tamper)
    }

    /// Whether these gradients agree with the exact ones.
    pub fn accepts(&self, gradients: &[Option<Tensor>]) -> Result<bool> {
        for (gradient, exact) in gradients.iter().zip(&self.exact) {
            let Some((elements, derivatives)) = exact else { continue };
            if !within(relative_error(&at(gradient.as_ref(), elements)?, derivatives), EXACT_TOLERANCE) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
