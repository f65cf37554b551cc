//! Single precision, in which training runs, against the double precision that everything else is checked in.

use super::device::{largest, widened};
use super::gradient::upstream_of;
use crate::case::{Case, array};
use autograd::Result;
use autograd::gradcheck::{backward, nan_max, value};
use tensor::{DType, Tensor};

/// The inputs are about 1. Results that are smaller than this come from terms that cancel, and are compared with it.
const SMALL: f64 = 0.1;

/// The largest relative error of a case's value and gradients in f32, with `factors` in that type (f32 or bf16),
/// against f64: from inputs that are exact in all of these types. Errors: those of the operation.
pub fn single_error(case: &Case, factors: DType) -> Result<f64> {
    let exact = |x: Tensor| if x.dtype() == DType::F32 { x.cast(factors)?.cast(DType::F32) } else { Ok(x) };
    let single: Vec<_> = case.inputs_in(DType::F32, factors)?.into_iter().map(exact).collect::<tensor::Result<_>>()?;
    let double = widened(&single)?;
    let (in_single, in_double) = (value(case, &single)?, value(case, &double)?);
    let upstream = exact(upstream_of(&in_single).cast(DType::F32)?)?;
    let gradients = backward(case, &single, &upstream)?;
    let expected = backward(case, &double, &upstream.cast(DType::F64)?)?;
    Ok(nan_max(distance(&in_single, &in_double), largest(&gradients, &expected, distance)?))
}

/// The largest difference, relative to the largest element.
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (array(a).data, array(b).data);
    let scale = b.iter().fold(SMALL, |scale, x| scale.max(x.abs()));
    a.iter().zip(&b).map(|(a, b)| (a - b).abs() / scale).fold(0.0, nan_max)
}
