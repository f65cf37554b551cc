//! Tests of [`batch_norm`](super) beyond its [cases](super::cases).

use super::*;
use crate::case::uniform;
use crate::gelu;
use autograd::Tape;
use autograd::gradcheck::{Function, backward, value};
use tensor::{DType, Shape};

const PLAIN: BatchNorm = BatchNorm { epsilon: 1e-5, gelu: false };

#[test]
fn the_variance_for_running_averages_is_unbiased() {
    let tape = Tape::inference();
    let [x, ones] = [vec![1.0, 10.0, 2.0, 20.0, 6.0, 60.0], vec![1.0, 1.0]]
        .map(|values: Vec<f64>| tape.constant(Tensor::from_slice(&values, [values.len() / 2, 2]).unwrap()));
    let ones = tape.constant(ones.value().reshape([2]).unwrap());
    let (_, BatchStatistics { mean, variance }) = batch_norm_train(&x, &ones, &ones, PLAIN).unwrap();
    assert_eq!(mean.to_vec::<f64>().unwrap(), [3.0, 30.0]);
    assert_eq!(variance.to_vec::<f64>().unwrap(), [7.0, 700.0]);
}

#[test]
fn statistics_in_f32_survive_a_mean_far_larger_than_the_deviation() {
    let tape = Tape::inference();
    let values: Vec<f32> = (0..100_000).map(|i| 1000.0 + (i % 2) as f32).collect();
    let x = tape.constant(Tensor::from_slice(&values, [100_000, 1]).unwrap());
    let one = tape.constant(Tensor::full([1], 1f32));
    let (_, BatchStatistics { mean, variance }) = batch_norm_train(&x, &one, &one, PLAIN).unwrap();
    assert_eq!(mean.item::<f32>().unwrap(), 1000.5);
    let variance = variance.item::<f32>().unwrap();
    assert!((variance - 0.2500025).abs() < 1e-6, "{variance}");
}

/// Batch normalisation with GELU, as one operation or as two.
struct WithGelu {
    fused: bool,
    mode: Mode,
}

impl Function for WithGelu {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        let [x, weight, bias] = x else { unreachable!() };
        let attributes = BatchNorm { gelu: self.fused, ..PLAIN };
        let y = match self.mode {
            Mode::Train => batch_norm_train(x, weight, bias, attributes)?.0,
            Mode::Eval => batch_norm_eval(x, weight, bias, bias.value(), weight.value(), attributes)?,
        };
        if self.fused { Ok(y) } else { gelu(&y) }
    }
}

#[test]
fn gelu_on_the_cpu_gives_the_bits_of_its_own_operation() -> Result<()> {
    let _unlimited = tensor::cpu::isa::unlimited();
    // Several blocks of rows: of few channels, and of more than a register has places for.
    for (rows, channels) in [(3000, 24), (200, 300)] {
        let operand = |shape: Shape, seed| uniform(shape, seed).cast(DType::F32);
        let x =
            [operand([rows, channels].into(), 1)?, Tensor::full([channels], 0.7f32), operand([channels].into(), 2)?];
        let upstream = operand([rows, channels].into(), 3)?;
        for mode in [Mode::Train, Mode::Eval] {
            let run = |fused| -> Result<Vec<Option<Tensor>>> {
                let f = WithGelu { fused, mode };
                Ok([vec![Some(value(&f, &x)?)], backward(&f, &x, &upstream)?].concat())
            };
            for (one, two) in run(true)?.into_iter().flatten().zip(run(false)?.into_iter().flatten()) {
                assert!(one.to_vec::<f32>()? == two.to_vec::<f32>()?, "{mode:?}, {channels} channels");
            }
        }
    }
    Ok(())
}

#[test]
fn training_on_one_row_is_refused() {
    let tape = Tape::inference();
    let [x, w] = [vec![1, 1, 3], vec![3]].map(|shape: Vec<usize>| tape.constant(Tensor::full(shape, 1f32)));
    let error = batch_norm_train(&x, &w, &w, PLAIN).unwrap_err();
    assert!(matches!(error, autograd::Error::Tensor(Error::Argument { op: "batch_norm", .. })), "{error}");
}
