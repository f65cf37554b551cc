//! Every operation in single precision, in which training runs, against the double precision that is checked.

use autograd::Result;
use autograd::gradcheck::{backward, nan_max, value};
use ops::case::{Case, array, uniform};
use ops::registry::OPS;
use tensor::cpu::isa::{Isa, limit};
use tensor::{DType, Tensor};

/// About a thousand roundings of 6e-8, of terms that may cancel.
const TOLERANCE: f64 = 1e-4;
/// The inputs are about 1. Results that are smaller than this come from terms that cancel, and are compared with it.
const SMALL: f64 = 0.1;

#[test]
fn single_precision_agrees_with_double() {
    tensor::set_poison(true);
    let mut failures = vec![];
    // Every path that this machine has.
    for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| *isa <= Isa::detected()) {
        let _limited = limit(isa);
        for op in OPS {
            for case in (op.cases)() {
                let error = error(&case).unwrap_or_else(|error| panic!("{}, {}: {error}", op.name, case.name));
                if error.is_nan() || error > TOLERANCE {
                    let (op, case) = (op.name, &case.name);
                    failures.push(format!("{op}, case \"{case}\", {}: relative error {error:.1e}", isa.name()));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The largest error of the value and of the gradients.
fn error(case: &Case) -> Result<f64> {
    // Both from inputs that single precision holds exactly.
    let single = case.inputs_as(DType::F32)?;
    let double: Vec<_> = single
        .iter()
        .map(|input| if input.dtype() == DType::Index { Ok(input.clone()) } else { input.cast(DType::F64) })
        .collect::<tensor::Result<_>>()?;
    let (a, b) = (value(case, &single)?, value(case, &double)?);
    let mut worst = distance(&a, &b);
    let upstream = uniform(a.shape().clone(), 99).cast(DType::F32)?;
    let a = backward(case, &single, &upstream)?;
    let b = backward(case, &double, &upstream.cast(DType::F64)?)?;
    for pair in a.iter().zip(&b) {
        match pair {
            (Some(a), Some(b)) => worst = nan_max(worst, distance(a, b)),
            (None, None) => {}
            _ => panic!("a gradient in one precision only"),
        }
    }
    Ok(worst)
}

/// The largest difference, relative to the largest element.
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (array(a).data, array(b).data);
    let scale = b.iter().fold(SMALL, |scale, x| scale.max(x.abs()));
    a.iter().zip(&b).map(|(a, b)| (a - b).abs() / scale).fold(0.0, nan_max)
}
