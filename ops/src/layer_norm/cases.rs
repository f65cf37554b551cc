//! Inputs on which [`layer_norm`](super::layer_norm) is checked.

use crate::case::{Case, Definition, Draw, from_fn, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct LayerNorm {
    epsilon: f64,
}

impl Definition for LayerNorm {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::layer_norm(&x[0], &x[1], &x[2], self.epsilon)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::layer_norm(&x[0], &x[1], &x[2], self.epsilon)
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

fn case(name: &str, shape: &[usize], epsilon: f64) -> Case {
    let channels = shape[shape.len() - 1];
    Case::new(name, vec![uniform(shape, 1), uniform([channels], 2), uniform([channels], 3)], LayerNorm { epsilon })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    let mut offset = case("a mean far larger than the deviation", &[3, 40], 1e-6);
    offset.inputs[0] = from_fn([3, 40], |i| 100.0 + (i as f64 * 0.7).sin());
    let mut equal = case("equal elements, whose sum is rounded in f32", &[2, 100], 1e-3);
    equal.inputs[0] = from_fn([2, 100], |_| f64::from(100.1f32));
    vec![
        case("a 4x4 map, (N, H, W, C)", &[2, 4, 4, 32], 1e-6),
        case("a large epsilon", &[3, 5], 0.5),
        case("primes", &[7, 13], 1e-6),
        case("packs that are no power of two", &[9, 48], 1e-6),
        case("as many packs as registers hold", &[5, 96], 1e-6),
        case("one row", &[1, 64], 1e-6),
        case("one channel", &[4, 1], 1e-2),
        case("no rows", &[0, 3], 1e-6),
        case("no channels", &[3, 0], 1e-6),
        case("more than one thread", &[1500, 24], 1e-6),
        offset,
        equal,
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [draw.within(0, 0..=5), draw.within(1, 0..=4), draw.within(2, 2..=40)];
    case("drawn", &shape, 1e-3)
}
