//! Inputs on which [`batch_norm_train`](super::batch_norm_train) and
//! [`batch_norm_eval`](super::batch_norm_eval) are checked.

use crate::case::{Case, Definition, Draw, array, from_fn, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::Tensor;

struct Train {
    epsilon: f64,
}

impl Definition for Train {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::batch_norm_train(&x[0], &x[1], &x[2], self.epsilon).map(|(y, _)| y)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::batch_norm(&x[0], &x[1], &x[2], super::reference::statistics(&x[0]), self.epsilon)
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

struct Eval {
    mean: Tensor,
    variance: Tensor,
    epsilon: f64,
}

impl Definition for Eval {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        let like_x = |statistic: &Tensor| statistic.cast(x[0].dtype().of_sums())?.to_device(&x[0].value().device());
        let (mean, variance) = (like_x(&self.mean)?, like_x(&self.variance)?);
        super::batch_norm_eval(&x[0], &x[1], &x[2], &mean, &variance, self.epsilon)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        let constants = |tensor| array(tensor).data.into_iter().map(S::of).collect();
        let statistics = [constants(&self.mean), constants(&self.variance)];
        super::reference::batch_norm(&x[0], &x[1], &x[2], statistics, self.epsilon)
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

fn operands(shape: &[usize]) -> Vec<Tensor> {
    let channels = shape[shape.len() - 1];
    vec![uniform(shape, 1), uniform([channels], 2), uniform([channels], 3)]
}

fn train(name: &str, shape: &[usize], epsilon: f64) -> Case {
    Case::new(format!("training: {name}"), operands(shape), Train { epsilon })
}

fn eval(name: &str, shape: &[usize], epsilon: f64) -> Case {
    let channels = shape[shape.len() - 1];
    let variance = from_fn([channels], |i| 0.5 + 0.3 * (i as f64).sin());
    let definition = Eval { mean: uniform([channels], 4), variance, epsilon };
    Case::new(format!("evaluation: {name}"), operands(shape), definition)
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    let mut offset = train("a mean far larger than the deviation", &[40, 3], 1e-5);
    offset.inputs[0] = from_fn([40, 3], |i| 100.0 + (i as f64 * 0.7).sin());
    vec![
        train("a 4x4 map, (N, H, W, C)", &[2, 4, 4, 8], 1e-5),
        train("a large epsilon", &[5, 3], 0.5),
        train("primes", &[13, 7], 1e-5),
        train("two rows", &[2, 5], 1e-2),
        train("one channel", &[9, 1], 1e-5),
        train("no channels", &[3, 0], 1e-5),
        train("more than one thread", &[1500, 24], 1e-5),
        offset,
        eval("a 4x4 map, (N, H, W, C)", &[2, 4, 4, 8], 1e-5),
        eval("primes", &[13, 7], 0.3),
        eval("one row", &[1, 5], 1e-5),
        eval("a vector", &[3], 1e-5),
        eval("no rows", &[0, 4], 1e-5),
        eval("no channels", &[3, 0], 1e-5),
        eval("more than one thread", &[1500, 24], 1e-5),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let channels = draw.within(2, 0..=20);
    if draw.within(3, 0..=1) == 0 {
        // Few rows can come out nearly equal: a large epsilon keeps the derivatives moderate.
        return train("drawn", &[draw.within(0, 1..=5), draw.within(1, 2..=4), channels], 0.1);
    }
    eval("drawn", &[draw.within(0, 0..=5), draw.within(1, 0..=4), channels], 1e-3)
}
