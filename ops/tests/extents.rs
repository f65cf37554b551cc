//! What cannot be computed is refused: results whose extents cannot be counted, although their operands can (beside a
//! zero, or a number repeated), and deviations that may be 0.

use autograd::{Error, Gradients, Tape, Var};
use ops::{BatchNorm, Bra, Conv2d, Mlp, MlpLayers, RouteKind};
use tensor::rng::Philox;
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

/// Kernels rely on these: a part of a result would stay what its memory held before.
#[test]
fn operands_that_do_not_fit_are_refused() {
    let tape = Tape::inference();
    let of = |shape: &[usize]| tape.constant(Tensor::full(shape, 1.0));
    let [x, w, b] = [&[2, 4][..], &[3, 4], &[3]].map(of);
    let (map, qkv, two) = (of(&[1, 4, 4, 3]), of(&[1, 4, 4, 12]), of(&[2]));
    let (window, norm) = (Conv2d { stride: 1, padding: 1 }, BatchNorm { epsilon: 1e-5, gelu: false });
    let bra = Bra { heads: 2, qk_dim: 4, topk: 2, grid: [2, 2], scale: 1.0, valid: None };
    let routed = |changed: Bra| ops::bra(&qkv, None, &changed).map(drop);
    let composed = Bra { valid: Some([4, 4]), ..bra };
    for (op, result) in [
        ("linear", ops::linear(&b, &w, None).map(drop)),
        ("linear", ops::linear(&x, &b, None).map(drop)),
        ("linear", ops::linear(&x, &w, Some(&two)).map(drop)),
        ("linear", ops::linear_residual(&x, &w, None, Some(&x)).map(drop)),
        ("matmul", ops::matmul(&x, &w).map(drop)),
        ("matmul", ops::matmul(&of(&[2, 3, 4]), &of(&[3, 4, 3])).map(drop)),
        ("matmul", ops::matmul(&b, &w).map(drop)),
        ("layer_norm", ops::layer_norm(&x, &b, &of(&[4]), 1e-5).map(drop)),
        ("layer_norm", ops::layer_norm(&x, &of(&[4]), &b, 1e-5).map(drop)),
        ("batch_norm", ops::batch_norm_train(&x, &b, &of(&[4]), norm).map(drop)),
        ("batch_norm", ops::batch_norm_eval(&x, &of(&[4]), &of(&[4]), b.value(), b.value(), norm).map(drop)),
        ("softmax", ops::softmax(&of(&[])).map(drop)),
        ("attention", ops::attention(&of(&[1, 2, 2, 4]), 1, 1.0).map(drop)),
        ("attention", ops::attention(&qkv, 3, 1.0).map(drop)),
        ("conv2d", ops::conv2d(&map, &of(&[5, 3, 3, 3]), Some(&b), window).map(drop)),
        ("conv2d", ops::conv2d(&map, &of(&[5, 4, 3, 3]), None, window).map(drop)),
        ("dwconv", ops::dwconv(&map, &of(&[3, 1, 3, 3]), Some(&two)).map(drop)),
        ("dwconv", ops::dwconv(&map, &of(&[2, 1, 3, 3]), None).map(drop)),
        ("bra", routed(Bra { qk_dim: 0, ..bra })),
        ("bra", routed(Bra { qk_dim: 7, ..bra })),
        ("bra", routed(Bra { heads: 0, ..bra })),
        ("bra", routed(Bra { heads: 3, ..bra })),
        ("bra", routed(Bra { topk: 0, ..bra })),
        ("bra", routed(Bra { topk: 5, ..bra })),
        ("bra", routed(Bra { valid: Some([0, 4]), ..bra })),
        ("bra", routed(Bra { valid: Some([5, 4]), ..bra })),
        ("bra", routed(Bra { valid: Some([2, 4]), ..bra })),
        ("bra_composed", ops::bra_composed(&qkv, None, &composed, RouteKind::Hard).map(drop)),
    ] {
        let error = result.expect_err(op);
        let Error::Tensor(of_tensor @ (tensor::Error::Shape { .. } | tensor::Error::Argument { .. })) = &error else {
            panic!("{op}: {error:?}")
        };
        assert!(of_tensor.to_string().starts_with(&format!("{op}: ")), "{of_tensor}");
    }
}

/// A row of weight 0 does not count, nor what is dropped; and what is NaN is not 0.
#[test]
fn numbers_that_are_not_finite_stay_where_they_are() {
    let tape = Tape::inference();
    let of = |values: &[f64], shape: &[usize]| tape.constant(Tensor::from_slice(values, shape).unwrap());
    let logits = of(&[0.0, f64::NEG_INFINITY, 0.0], &[1, 3]);
    let shares = Tensor::from_slice(&[0.5, 0.0, 0.5], [1, 3]).unwrap();
    let loss = ops::soft_cross_entropy(&logits, &shares).unwrap().value().item::<f64>().unwrap();
    assert!((loss - 2f64.ln()).abs() < 1e-12, "{loss}");
    let endless = of(&[f64::INFINITY; 64], &[64]);
    let dropped = ops::dropout(&endless, 0.5, Philox::new(1, 0)).unwrap().value().to_vec::<f64>().unwrap();
    assert!(dropped.iter().all(|x| *x == 0.0 || *x == f64::INFINITY), "{dropped:?}");
    assert!(dropped.contains(&0.0) && dropped.contains(&f64::INFINITY));
    let (ones, norm) = (of(&[1.0], &[1]), BatchNorm { epsilon: 1e-5, gelu: false });
    let (_, statistics) = ops::batch_norm_train(&of(&[1.0, f64::NAN, 2.0], &[3, 1]), &ones, &ones, norm).unwrap();
    assert!(statistics.variance.item::<f64>().unwrap().is_nan());
}

#[test]
fn rows_without_elements_take_no_memory() {
    let (tape, mut gradients) = (Tape::new(), Gradients::default());
    let x = tape.input(Tensor::empty([MANY, 0], DType::F64));
    let picked = ops::gather(&x, 0, &Tensor::from_slice(&[7u32], [1]).unwrap()).unwrap();
    tape.backward_from(&picked, Tensor::empty([1, 0], DType::F64), &mut gradients).unwrap();
    assert_eq!(*gradients.of(&x).unwrap().shape(), [MANY, 0]);
    let dropped = ops::drop_path(&x, 0.5, Philox::new(1, 0), 0).unwrap();
    let skipped = ops::drop_path_residual(&x, 0.5, Philox::new(1, 0), 0, |x| Ok::<_, Error>(x.clone())).unwrap();
    assert!([dropped, skipped].iter().all(|y| *y.shape() == [MANY, 0]));
}

/// Which would be products of many multiplications each, if there were any.
#[test]
fn a_batch_without_matrices_is_one() {
    let (tape, mut gradients, long) = (Tape::new(), Gradients::default(), 1 << 25);
    let [a, b] = [[0, long, 0], [0, 0, long]].map(|shape| tape.input(Tensor::empty(shape, DType::F64)));
    let y = ops::matmul(&a, &b).unwrap();
    tape.backward_from(&y, y.value().clone(), &mut gradients).unwrap();
    assert_eq!(*gradients.of(&b).unwrap().shape(), [0, 0, long]);
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
    let numbered = ops::top_k(&empty(&[0, LARGE << 3]), 1).map(drop).unwrap_err().to_string();
    assert!(numbered.contains("cannot be numbered"), "{numbered}");
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
    let numbered = ops::drop_path(&empty(&[2, 3]), 0.5, Philox::new(1, 0), usize::MAX);
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
