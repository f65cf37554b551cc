//! Inputs on which [`attention`](super::attention) is checked.

use crate::bra::cases::far_from_zero;
use crate::case::{Case, Definition, Draw, from_fn, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Attention {
    heads: usize,
    scale: f64,
}

impl Definition for Attention {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::attention(&x[0], self.heads, self.scale)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::attention(&x[0], self.heads, self.scale)
    }
}

fn case(name: &str, images: usize, map: [usize; 2], heads: usize, head_dim: usize) -> Case {
    let qkv = uniform([images, map[0], map[1], 3 * heads * head_dim], 1);
    Case::new(name, vec![qkv], Attention { heads, scale: (head_dim as f64).powf(-0.5) })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    let mut peaked = case("scores that saturate the softmax", 1, [2, 3], 1, 4);
    peaked.inputs[0] = from_fn([1, 2, 3, 12], |i| 4.0 * (i as f64 * 1.7).sin());
    let mut extreme = case("scores whose exponentials single precision does not hold", 1, [3, 5], 1, 32);
    extreme.inputs[0] = far_from_zero(&extreme.inputs[0], 32);
    vec![
        case("a 4x4 map, two heads", 2, [4, 4], 2, 4),
        case("primes", 1, [3, 5], 3, 7),
        case("more queries than a block", 1, [9, 9], 1, 2),
        case("one token", 2, [1, 1], 2, 3),
        case("a small map for tensor cores", 1, [4, 4], 1, 32),
        case("a head for tensor cores", 1, [3, 5], 2, 32),
        case("more keys than a tile", 1, [8, 9], 1, 64),
        case("no images", 0, [2, 2], 1, 2),
        case("no tokens", 1, [0, 2], 1, 2),
        peaked,
        extreme,
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let map = [draw.within(1, 1..=4), draw.within(2, 1..=4)];
    case("drawn", draw.within(0, 0..=2), map, draw.within(3, 1..=3), draw.within(4, 1..=4))
}
