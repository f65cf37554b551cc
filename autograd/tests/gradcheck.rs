//! The two witnesses of a gradient on a function whose derivatives are known.

use autograd::exact::{Array, LANES, Scalar};
use autograd::gradcheck::{
    backward, difference, difference_of_parameter, exact, exact_along, relative_error, sample, value,
};
use autograd::{Error, InputGrads, Parameters, ParametersBuilder, Result, Rule, Var, rule_fields};
use tensor::{DType, Tensor};

/// x²·w, element by element, of which an index picks nothing.
fn square<'t>(inputs: &[Var<'t>]) -> Result<Var<'t>> {
    let [x, w, _] = inputs else { unreachable!("three inputs") };
    let of = |x: &Var<'t>| x.value().to_vec::<f64>();
    let y: Vec<f64> = of(x)?.iter().zip(of(w)?).map(|(x, w)| x * x * w).collect();
    let rule = || Square { x: x.value().clone(), w: w.value().clone() };
    x.tape().record("square", &[x, w], Tensor::from_slice(&y, x.shape())?, rule)
}

struct Square {
    x: Tensor,
    w: Tensor,
}

impl Rule for Square {
    rule_fields!("square", x, w);

    fn backward(self: Box<Self>, upstream: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let [u, x, w] = [&upstream, &self.x, &self.w].map(|tensor| tensor.to_vec::<f64>().unwrap());
        let each = |f: &dyn Fn(usize) -> f64| Tensor::from_slice(&(0..x.len()).map(f).collect::<Vec<_>>(), [x.len()]);
        grads.give(0, each(&|i| 2.0 * x[i] * w[i] * u[i])?)?;
        grads.give(1, each(&|i| x[i] * x[i] * u[i])?)
    }
}

/// The same as a definition.
fn reference<S: Scalar>(inputs: &[Array<S>]) -> Array<S> {
    Array::from_fn(&inputs[0].shape, |place| inputs[0].at(place) * inputs[0].at(place) * inputs[1].at(place))
}

const X: [f64; 3] = [0.5, -1.25, 3.0];
const W: [f64; 3] = [2.0, 0.75, -0.5];
const UPSTREAM: [f64; 3] = [1.0, -2.0, 0.3];
/// 2·x·w·u and x²·u.
const BY_X: [f64; 3] = [2.0, 3.75, -0.9];
const BY_W: [f64; 3] = [0.25, -3.125, 2.7];

fn inputs() -> [Tensor; 3] {
    let vector = |values: &[f64]| Tensor::from_slice(values, [3]).unwrap();
    [vector(&X), vector(&W), Tensor::zeros([2], DType::Index)]
}

#[test]
fn rules_give_a_gradient_for_each_input_but_an_index() {
    let upstream = Tensor::from_slice(&UPSTREAM, [3]).unwrap();
    let gradients = backward(&square, &inputs(), &upstream).unwrap();
    let gradients: Vec<_> = gradients.iter().map(|of| of.as_ref().map(|of| of.to_vec::<f64>().unwrap())).collect();
    assert_eq!(gradients.len(), 3);
    for (gradient, expected) in gradients.iter().zip([BY_X, BY_W]) {
        assert!(relative_error(gradient.as_ref().unwrap(), &expected) < 1e-15, "{gradients:?}");
    }
    assert_eq!(gradients[2], None);
    assert_eq!(value(&square, &inputs()).unwrap().to_vec::<f64>().unwrap(), [0.5, 1.171875, -4.5]);
}

#[test]
fn differences_come_near_the_derivatives() {
    for (input, expected) in [BY_X, BY_W].iter().enumerate() {
        let found = [0, 1, 2].map(|element| difference(&square, &inputs(), &UPSTREAM, input, element).unwrap());
        assert!(relative_error(&found, expected) < 1e-10, "{found:?}, not {expected:?}");
    }
}

#[test]
fn a_parameter_that_is_moved_for_a_difference_comes_back() {
    let mut builder = ParametersBuilder::default();
    builder.add("other", [3], [1.0; 3]);
    let id = builder.add("p", [2], [0.5, -2.0]);
    let mut parameters = builder.build(DType::F64).unwrap();
    let before = parameters.flat().to_vec::<f64>().unwrap();
    let loss = |parameters: &Parameters| {
        let p = parameters.get(id).to_vec::<f64>()?;
        Ok::<_, Error>(p[0].powi(3) + 10.0 * p[1])
    };
    for (element, expected) in [0.75, 10.0].into_iter().enumerate() {
        let found = difference_of_parameter(&mut parameters, id, element, loss).unwrap();
        assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
        assert_eq!(parameters.flat().to_vec::<f64>().unwrap(), before);
    }
    let failed = difference_of_parameter(&mut parameters, id, 0, |_| Err(Error::NoBackward));
    assert_eq!((failed, parameters.flat().to_vec::<f64>().unwrap()), (Err(Error::NoBackward), before));
    let error = difference_of_parameter(&mut parameters, id, 2, loss).unwrap_err().to_string();
    assert!(error.contains("element 2 is out of range, must be below 2"), "{error}");
}

#[test]
fn dual_numbers_are_exact() {
    let arrays = [X, W].map(|data| Array { shape: vec![3], data: data.to_vec() });
    for (input, expected) in [BY_X, BY_W].iter().enumerate() {
        for elements in [&[0, 1, 2][..], &[2], &[]] {
            let found = exact(&reference, &arrays, &UPSTREAM, input, elements);
            let expected: Vec<f64> = elements.iter().map(|&element| expected[element]).collect();
            assert!(found.len() == expected.len() && relative_error(&found, &expected) < 1e-15, "{found:?}");
        }
        // Lane after lane along (lane, 1, 0).
        let direction = |lane: usize, element: usize| [lane as f64, 1.0, 0.0][element];
        let along = exact_along(&reference, &arrays, &UPSTREAM, input, &direction);
        let by_hand: [f64; LANES] = std::array::from_fn(|lane| lane as f64 * expected[0] + expected[1]);
        assert!(relative_error(&along, &by_hand) < 1e-15, "{along:?}, not {by_hand:?}");
    }
    // More elements than lanes.
    let many = [X, W].map(|data| Array { shape: vec![2 * LANES + 1], data: [data[0]; 2 * LANES + 1].to_vec() });
    let all: Vec<usize> = (0..2 * LANES + 1).collect();
    let found = exact(&reference, &many, &[1.0; 2 * LANES + 1], 0, &all);
    assert!(relative_error(&found, &[2.0; 2 * LANES + 1]) < 1e-15, "{found:?}");
}

#[test]
fn differences_of_what_is_not_there_are_refused() {
    for (input, element, upstream, expected) in [
        (0, 0, &UPSTREAM[..2], "expected an upstream gradient of 3 elements, got shape (2)"),
        (3, 0, &UPSTREAM[..], "input 3 is out of range, must be below 3"),
        (0, 3, &UPSTREAM[..], "element 3 is out of range, must be below 3"),
    ] {
        let error = difference(&square, &inputs(), upstream, input, element).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn errors_are_relative_to_the_largest_element() {
    assert_eq!(relative_error(&[1.0, -8.0], &[1.0, -6.0]), 0.25);
    assert_eq!(relative_error(&[1.0, -6.0], &[1.0, -8.0]), 0.25);
    assert_eq!(relative_error(&[1e-8], &[2e-8]), 0.5, "of small numbers, too");
    assert_eq!(relative_error(&[1.0], &[2.0]), 0.5);
    assert_eq!(relative_error(&[0.0; 3], &[-0.0; 3]), 0.0);
    assert_eq!(relative_error(&[], &[]), 0.0);
    for wrong in [[f64::NAN, 1.0], [1.0, f64::NAN]] {
        assert!(relative_error(&wrong, &[1.0, 1.0]).is_nan() && relative_error(&[1.0, 1.0], &wrong).is_nan());
    }
    assert!(relative_error(&[f64::INFINITY, 1.0], &[1.0, 1.0]).is_nan());
}

#[test]
fn a_sample_is_in_order_and_by_its_seed() {
    assert_eq!(sample(5, 5, 1), [0, 1, 2, 3, 4]);
    let [few, again, others] = [1, 1, 2].map(|seed| sample(1000, 20, seed));
    assert!(few.len() == 20 && few.is_sorted_by(|a, b| a < b) && few[19] < 1000, "{few:?}");
    assert!(few == again && few != others);
}
