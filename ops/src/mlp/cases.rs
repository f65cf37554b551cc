//! Inputs on which [`mlp`](super::mlp) is checked.

use super::{Mlp, MlpLayers};
use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

impl Definition for Mlp {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        let layers = MlpLayers { norm: [&x[1], &x[2]], first: (&x[3], Some(&x[4])), second: (&x[5], Some(&x[6])) };
        super::mlp(&x[0], layers, *self)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::mlp(x, *self)
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

fn case(name: &str, rows: &[usize], extents: [usize; 2], residual: bool) -> Case {
    with(name, rows, extents, Mlp { epsilon: 1e-6, residual })
}

fn with(name: &str, rows: &[usize], [channels, hidden]: [usize; 2], attributes: Mlp) -> Case {
    let of_channels = |stream| uniform([channels], stream);
    let inputs = vec![
        uniform([rows, &[channels]].concat(), 1),
        of_channels(2),
        of_channels(3),
        uniform([hidden, channels], 4),
        uniform([hidden], 5),
        uniform([channels, hidden], 6),
        of_channels(7),
    ];
    Case::new(name, inputs, attributes)
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("a 4x4 map, (N, H, W, C)", &[2, 4, 4], [16, 48], true),
        case("without residual", &[3], [7, 5], false),
        case("64 channels, more rows than a block", &[3, 50], [64, 192], true),
        case("96 channels, a hidden chunk that is not full", &[2, 9], [96, 104], false),
        case("128 channels", &[17], [128, 64], true),
        case("64 channels, one row", &[1], [64, 8], true),
        case("no rows", &[0], [64, 8], true),
        case("no hidden channels", &[2], [64, 0], true),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let extents = [draw.within(1, 2..=7), draw.within(2, 0..=6)];
    // A large ε: otherwise rows of two channels are normalised to ±1 whatever their values, and so have no gradient.
    let attributes = Mlp { epsilon: 0.5, residual: draw.within(3, 0..=1) == 1 };
    with("drawn", &[draw.within(0, 0..=4)], extents, attributes)
}
