//! Inputs on which [`batch_norm_train`](super::batch_norm_train) and
//! [`batch_norm_eval`](super::batch_norm_eval) are checked, without GELU and with it.

use super::BatchNorm;
use crate::case::{Case, Definition, Draw, array, from_fn, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::Tensor;

fn reference<S: Scalar>(x: &[Array<S>], statistics: [Vec<S>; 2], attributes: BatchNorm) -> Array<S> {
    let y = super::reference::batch_norm(&x[0], &x[1], &x[2], statistics, attributes.epsilon);
    if attributes.gelu { crate::gelu::reference::gelu(&y) } else { y }
}

struct Train(BatchNorm);

impl Definition for Train {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::batch_norm_train(&x[0], &x[1], &x[2], self.0).map(|(y, _)| y)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        reference(x, super::reference::statistics(&x[0]), self.0)
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

struct Eval {
    mean: Tensor,
    variance: Tensor,
    attributes: BatchNorm,
}

impl Definition for Eval {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        let like_x = |statistic: &Tensor| statistic.cast(x[0].dtype().of_sums())?.to_device(&x[0].value().device());
        let (mean, variance) = (like_x(&self.mean)?, like_x(&self.variance)?);
        super::batch_norm_eval(&x[0], &x[1], &x[2], &mean, &variance, self.attributes)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        let constants = |tensor| array(tensor).data.into_iter().map(S::of).collect();
        reference(x, [constants(&self.mean), constants(&self.variance)], self.attributes)
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

fn operands(shape: &[usize]) -> Vec<Tensor> {
    let channels = shape[shape.len() - 1];
    vec![uniform(shape, 1), uniform([channels], 2), uniform([channels], 3)]
}

fn train(name: &str, shape: &[usize], epsilon: f64, gelu: bool) -> Case {
    let mode = if gelu { "training with GELU" } else { "training" };
    Case::new(format!("{mode}: {name}"), operands(shape), Train(BatchNorm { epsilon, gelu }))
}

fn eval(name: &str, shape: &[usize], epsilon: f64, gelu: bool) -> Case {
    let channels = shape[shape.len() - 1];
    let variance = from_fn([channels], |i| 0.5 + 0.3 * (i as f64).sin());
    let definition = Eval { mean: uniform([channels], 4), variance, attributes: BatchNorm { epsilon, gelu } };
    let mode = if gelu { "evaluation with GELU" } else { "evaluation" };
    Case::new(format!("{mode}: {name}"), operands(shape), definition)
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    let mut offset = train("a mean far larger than the deviation", &[40, 3], 1e-5, false);
    offset.inputs[0] = from_fn([40, 3], |i| 100.0 + (i as f64 * 0.7).sin());
    vec![
        train("a 4x4 map, (N, H, W, C)", &[2, 4, 4, 8], 1e-5, false),
        train("a large epsilon", &[5, 3], 0.5, false),
        train("primes", &[13, 7], 1e-5, false),
        train("two rows", &[2, 5], 1e-2, false),
        train("one channel", &[9, 1], 1e-5, false),
        train("no channels", &[3, 0], 1e-5, false),
        train("more than one thread", &[1500, 24], 1e-5, false),
        offset,
        train("a 4x4 map, (N, H, W, C)", &[2, 4, 4, 8], 1e-5, true),
        train("primes", &[13, 7], 1e-5, true),
        train("no channels", &[3, 0], 1e-5, true),
        train("more than one thread", &[1500, 24], 1e-5, true),
        eval("a 4x4 map, (N, H, W, C)", &[2, 4, 4, 8], 1e-5, false),
        eval("primes", &[13, 7], 0.3, false),
        eval("one row", &[1, 5], 1e-5, false),
        eval("a vector", &[3], 1e-5, false),
        eval("no rows", &[0, 4], 1e-5, false),
        eval("no channels", &[3, 0], 1e-5, false),
        eval("more than one thread", &[1500, 24], 1e-5, false),
        eval("a 4x4 map, (N, H, W, C)", &[2, 4, 4, 8], 1e-5, true),
        eval("primes", &[13, 7], 0.3, true),
        eval("no rows", &[0, 4], 1e-5, true),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let (channels, gelu) = (draw.within(2, 0..=20), draw.within(4, 0..=1) == 1);
    if draw.within(3, 0..=1) == 0 {
        // Few rows can come out nearly equal: a large epsilon keeps the derivatives moderate.
        return train("drawn", &[draw.within(0, 1..=5), draw.within(1, 2..=4), channels], 0.1, gelu);
    }
    eval("drawn", &[draw.within(0, 0..=5), draw.within(1, 0..=4), channels], 1e-3, gelu)
}
