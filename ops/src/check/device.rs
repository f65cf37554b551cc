//! An operation on a GPU against the same operation on the CPU in f64, and against itself.

use super::gradient::upstream_of;
use super::laws::{Twice, alone_as_among_all, same_bits, views_agree};
use super::within;
use crate::case::{Case, array};
use crate::registry::Op;
use autograd::gradcheck::{backward, nan_max, relative_error, value};
use autograd::{Error, Result};
use tensor::{DType, Device, Tensor};

/// Largest relative error that a value or a gradient on a GPU may have, by the type of the activations: f64 differs
/// from the CPU only in the order of summation, f32 also in its elementary functions, and bf16 rounds each result to 8
/// bits.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-11,
        DType::F32 => 2e-5,
        _ => 1.5e-2,
    }
}

/// What a comparison found.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Parity {
    /// The largest relative error of a value.
    pub value: f64,
    /// The largest relative error of a gradient.
    pub gradient: f64,
}

/// What was found of all cases of an operation on a device, in a type.
#[derive(Clone, Debug)]
pub struct DeviceReport {
    /// The operation.
    pub op: &'static str,
    /// The type of its inputs that are no numbers of classes or regions.
    pub dtype: DType,
    /// How many cases there are.
    pub cases: usize,
    /// The largest errors.
    pub worst: Parity,
    /// What is wrong, a line each.
    pub failures: Vec<String>,
}

/// Compares all cases of an operation on a device, in a type: see [`parity`]. A fault of the device is a failure, too.
pub fn check_on(op: &Op, device: &Device, dtype: DType, again: bool) -> DeviceReport {
    let (cases, bound) = ((op.cases)(), tolerance(dtype));
    let (mut worst, mut failures) = (Parity::default(), vec![]);
    for case in &cases {
        let wrong = match parity(case, device, dtype, again) {
            Ok(found) => {
                worst.value = nan_max(worst.value, found.value);
                worst.gradient = nan_max(worst.gradient, found.gradient);
                let fits = within(found.value, bound) && within(found.gradient, bound);
                (!fits).then(|| format!("{found:?}, more than {bound:.1e}"))
            }
            Err(error) => Some(error.to_string()),
        };
        failures.extend(wrong.map(|wrong| format!("{} {dtype}, \"{}\": {wrong}", op.name, case.name)));
    }
    DeviceReport { op: op.name, dtype, cases: cases.len(), worst, failures }
}

/// Compares a case on a device, in a type, with the CPU in f64 on the same (rounded) inputs. If it is to run `again`, a
/// second run must be bit-identical, a second contribution to a gradient must be accumulated, and in f32 a strided view
/// must give the same bits as a copy, or be refused. Errors: those of the operation; [`Error::Tensor`] if shapes or
/// bits differ; [`Error::MissingGradient`] if only one of the two gives an input a gradient.
pub fn parity(case: &Case, device: &Device, dtype: DType, again: bool) -> Result<Parity> {
    let rounded = case.inputs_as(dtype)?;
    let exact = widened(&rounded)?;
    let there: Vec<Tensor> = rounded.iter().map(|x| x.to_device(device)).collect::<tensor::Result<_>>()?;

    let (expected, got) = (value(case, &exact)?, value(case, &there)?);
    if expected.shape() != got.shape() {
        return Err(tensor::Error::shape("parity", expected.shape().to_string(), got.shape()).into());
    }
    let upstream = upstream_of(&expected).cast(got.dtype())?;
    let upstream_there = upstream.to_device(device)?;
    let gradients = backward(case, &there, &upstream_there)?;
    let expected_gradients = backward(case, &exact, &upstream.cast(DType::F64)?)?;
    let mut found =
        Parity { value: error_of(&got, &expected), gradient: largest(&gradients, &expected_gradients, error_of)? };
    if again {
        let from_double = |got: &Tensor, expected: &Tensor| {
            let expected: Vec<f64> = array(expected).data.iter().map(|x| 2.0 * x).collect();
            relative_error(&array(got).data, &expected)
        };
        let doubled = backward(&Twice(case), &there, &upstream_there)?;
        found.gradient = nan_max(found.gradient, largest(&doubled, &expected_gradients, from_double)?);
        let second = (value(case, &there)?, backward(case, &there, &upstream_there)?);
        if !same_bits(&[Some(got)], &[Some(second.0)]) || !same_bits(&gradients, &second.1) {
            return Err(tensor::Error::argument("parity", "two runs on the same inputs differ in their bits").into());
        }
        // Only once, because they take long: neither what is wanted nor whether a view is refused depends on the type.
        if dtype == DType::F32 && !alone_as_among_all(case, &there, &upstream_there, &gradients)? {
            let message = "a gradient that is wanted alone has other bits than among all";
            return Err(tensor::Error::argument("parity", message).into());
        }
        if dtype == DType::F32 && !views_agree(case, &there, &upstream_there)? {
            return Err(tensor::Error::argument("parity", "a strided view differs from its copy in its bits").into());
        }
    }
    Ok(found)
}

/// Inputs in f64, with the same numbers.
pub(super) fn widened(inputs: &[Tensor]) -> tensor::Result<Vec<Tensor>> {
    let wide = |x: &Tensor| if x.dtype() == DType::Index { Ok(x.clone()) } else { x.cast(DType::F64) };
    inputs.iter().map(wide).collect()
}

/// The largest distance of a gradient from the expected one. Errors: [`Error::MissingGradient`] if only one of the two
/// is there.
pub(super) fn largest(
    gradients: &[Option<Tensor>],
    expected: &[Option<Tensor>],
    distance: impl Fn(&Tensor, &Tensor) -> f64,
) -> Result<f64> {
    let mut largest = 0.0;
    for (input, pair) in gradients.iter().zip(expected).enumerate() {
        match pair {
            (Some(gradient), Some(expected)) => largest = nan_max(largest, distance(gradient, expected)),
            (None, None) => {}
            _ => return Err(Error::MissingGradient { op: "a comparison of gradients", input }),
        }
    }
    Ok(largest)
}

fn error_of(got: &Tensor, expected: &Tensor) -> f64 {
    relative_error(&array(got).data, &array(expected).data)
}
