//! What cannot be computed is refused: results whose extents cannot be counted, although their operands can (beside a
//! zero, or a number repeated), and deviations that may be 0.

use autograd::{Error, Tape, Var};
use ops::{BatchNorm, Mlp, MlpLayers};
use tensor::{DType, Tensor};

const MANY: usize = 1 << 40;
const HALF: usize = 1 << (usize::BITS - 1);
/// So many squared can be counted, and no buffer has room for them.
const LARGE: usize = 1 << 30;

#[test]
fn an_epsilon_that_keeps_no_variance_above_0_is_refused() {
    let tape = Tape::inference();
    let [x, ones] = [&[2, 3][..], &[3]].map(|shape| tape.constant(Tensor::full(shape, 1.0f64)));
    let in_f32 = [&x, &ones].map(|operand| tape.constant(operand.value().cast(DType::F32).unwrap()));
    let [y, scale] = &in_f32;
    let error = ops::layer_norm(y, scale, scale, 1e-50).unwrap_err().to_string();
    assert!(error.contains("epsilon is 1e-50"), "which in f32 is 0: {error}");
    for epsilon in [0.0, -1e-6, f64::NAN, f64::INFINITY] {
        let batch_norm = BatchNorm { epsilon, gelu: false };
        let layers = MlpLayers { norm: [&ones, &ones], first: (&x, None), second: (&x, None) };
        for (op, result) in [
            ("mlp", ops::mlp(&x, layers, Mlp { epsilon, residual: false }).map(drop)),
            ("layer_norm", ops::layer_norm(&x, &ones, &ones, epsilon).map(drop)),
            ("batch_norm", ops::batch_norm_train(&x, &ones, &ones, batch_norm).map(drop)),
            ("batch_norm", ops::batch_norm_eval(&x, &ones, &ones, ones.value(), ones.value(), batch_norm).map(drop)),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.starts_with(&format!("{op}: epsilon is ")), "{error}");
        }
    }
}

#[test]
fn results_that_cannot_be_counted_are_refused() {
    let tape = Tape::inference();
    let empty = |shape: &[usize]| tape.constant(Tensor::empty(shape, DType::F32));
    let one_of_many = |shape: [usize; 2]| tape.constant(Tensor::scalar(1.0f32).broadcast_to(shape).unwrap());
    let refused = |op: &str, result: autograd::Result<Var<'_>>| match result {
        Err(Error::Tensor(error @ tensor::Error::Argument { .. })) => {
            let said = error.to_string();
            assert!(said.contains(op) && said.contains("than can be counted"), "{said}");
        }
        Err(other) => panic!("{op}: {other}"),
        Ok(value) => panic!("{op}: {}", value.shape()),
    };
    let half = empty(&[HALF, 0]);
    refused("concat", ops::concat(&[&half, &half], 0));
    let ten = Tensor::from_slice(&[0u32; 10], [10]).unwrap();
    refused("gather", ops::gather(&empty(&[3, HALF / 4, 0]), 0, &ten));
    // Before there is a result, whose size depends on them, indices are looked at.
    let nothing = ops::gather(&empty(&[0, 1 << 20, 1 << 20]), 0, &Tensor::from_slice(&[0u32], [1]).unwrap());
    assert!(matches!(nothing, Err(Error::Tensor(tensor::Error::OutOfRange { .. }))), "{nothing:?}");
    let no_index = ops::gather(&empty(&[0, 1 << 20, 1 << 20]), 0, &Tensor::full([1], 0.0f32));
    assert!(matches!(no_index, Err(Error::Tensor(tensor::Error::DType { .. }))), "{no_index:?}");
    refused("matmul", ops::matmul(&empty(&[MANY, 0]), &empty(&[0, MANY])));
    refused("linear", ops::linear(&empty(&[MANY, 0]), &empty(&[MANY, 0]), None));
    for (op, result) in [
        ("add", ops::add(&one_of_many([MANY, 1]), &one_of_many([1, MANY]))),
        ("mul", ops::mul(&one_of_many([MANY, 1]), &one_of_many([1, MANY]))),
        ("add", ops::add(&one_of_many([LARGE, 1]), &one_of_many([1, LARGE]))),
        ("matmul", ops::matmul(&empty(&[LARGE, 0]), &empty(&[0, LARGE]))),
        ("pad", ops::pad(&empty(&[0, 2, 3, 4]), [1 << 56, 0])),
    ] {
        refused(op, result);
    }
    for margins in [[usize::MAX, 0], [0, usize::MAX - 2], [1 << 31, 1 << 31]] {
        refused("pad", ops::pad(&empty(&[1, 2, 3, 4]), margins));
    }
    let numbered = ops::drop_path(&empty(&[2, 3]), 0.5, tensor::rng::Philox::new(1, 0), usize::MAX);
    assert!(matches!(numbered, Err(Error::Tensor(tensor::Error::Argument { .. }))), "{numbered:?}");
    let halves = [half.value().clone(), half.value().clone()];
    assert!(matches!(Tensor::join(&halves), Err(tensor::Error::Argument { .. })));
    let grid = ops::Bra { heads: 1, qk_dim: 1, topk: 1 << 31, grid: [1 << 31, 2], scale: 1.0, valid: None };
    refused("bra", ops::bra(&empty(&[1, 0, 4, 3]), None, &grid).map(|result| result.out));
}

#[test]
fn a_scale_that_is_no_number_is_refused() {
    let tape = Tape::inference();
    let qkv = tape.constant(Tensor::full([1, 2, 2, 3], 1.0f32));
    for scale in [f64::NAN, f64::INFINITY, 1e300] {
        let bra = ops::Bra { heads: 1, qk_dim: 1, topk: 1, grid: [2, 2], scale, valid: None };
        for refused in [ops::bra(&qkv, None, &bra).map(drop), ops::attention(&qkv, 1, scale).map(drop)] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("scale is ") && error.contains("finite"), "{error}");
        }
    }
}

/// Where the squares of deviations overflow, what they would be divided by is no number: zeros would pass for results.
#[test]
fn deviations_whose_squares_overflow_make_nan() {
    let tape = Tape::inference();
    let of = |x: &[f32], shape: [usize; 2]| tape.constant(Tensor::from_slice(x, shape).unwrap());
    let ones = |n: usize| tape.constant(Tensor::full([n], 1.0f32));
    let numbers = |y: &Var<'_>| y.value().to_vec::<f32>().unwrap();
    let rows = of(&[1e20, -1e20, 0.0, 3.0, 4.0, 5.0], [2, 3]);
    let y = numbers(&ops::layer_norm(&rows, &ones(3), &ones(3), 1e-6).unwrap());
    assert!(y[..3].iter().all(|y| y.is_nan()) && y[3..].iter().all(|y| y.is_finite()), "{y:?}");
    let batch_norm = BatchNorm { epsilon: 1e-6, gelu: false };
    let columns = of(&[1e20, 3.0, -1e20, 4.0, 0.0, 5.0], [3, 2]);
    let y = numbers(&ops::batch_norm_train(&columns, &ones(2), &ones(2), batch_norm).unwrap().0);
    assert!(y.iter().step_by(2).all(|y| y.is_nan()) && y.iter().skip(1).step_by(2).all(|y| y.is_finite()), "{y:?}");
}
