//! Inputs on which [`conv2d`](super::conv2d) is checked, and its form with GELU.

use super::Conv2d;
use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

impl Definition for Conv2d {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::conv2d(&x[0], &x[1], x.get(2), *self)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::conv2d(&x[0], &x[1], x.get(2), *self)
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

struct WithGelu(Conv2d);

impl Definition for WithGelu {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::conv2d_gelu(&x[0], &x[1], x.get(2), self.0)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        crate::gelu::reference::gelu(&self.0.reference(x))
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

/// A case from the shape of x, the output channels and the kernel's extents, and stride and padding.
fn case(name: &str, x: [usize; 4], [outputs, down, across]: [usize; 3], window: [usize; 2], bias: bool) -> Case {
    let mut operands = vec![uniform(x, 1), uniform([outputs, x[3], down, across], 2)];
    if bias {
        operands.push(uniform([outputs], 3));
    }
    Case::new(name, operands, Conv2d { stride: window[0], padding: window[1] })
}

/// The same with GELU.
fn with_gelu(name: &str, x: [usize; 4], [outputs, down, across]: [usize; 3], [stride, padding]: [usize; 2]) -> Case {
    let operands = vec![uniform(x, 1), uniform([outputs, x[3], down, across], 2), uniform([outputs], 3)];
    Case::new(name, operands, WithGelu(Conv2d { stride, padding }))
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("downsampling, 3x3, stride 2", [2, 6, 6, 4], [8, 3, 3], [2, 1], true),
        case("3x3, stride 1", [1, 5, 4, 3], [2, 3, 3], [1, 1], true),
        case("patches of 4x4", [2, 8, 8, 3], [5, 4, 4], [4, 0], true),
        case("patches of 2x2, rest left over", [1, 5, 7, 2], [3, 2, 2], [2, 0], false),
        case("1x1, stride 1", [2, 3, 3, 5], [4, 1, 1], [1, 0], true),
        case("1x1, stride 3", [1, 7, 5, 2], [2, 1, 1], [3, 0], true),
        case("a kernel of 2x5, primes", [1, 7, 11, 3], [2, 2, 5], [3, 2], true),
        case("a kernel larger than the image", [2, 2, 1, 2], [3, 5, 5], [1, 2], true),
        case("padding wider than the kernel", [1, 2, 2, 2], [2, 1, 1], [2, 2], true),
        case("one element", [1, 1, 1, 1], [1, 1, 1], [1, 0], true),
        case("no images", [0, 3, 3, 2], [2, 3, 3], [1, 1], true),
        case("an image without columns", [1, 3, 0, 2], [2, 3, 2], [1, 1], true),
        case("no input channels", [1, 3, 3, 0], [2, 3, 3], [1, 1], true),
        case("no output channels", [1, 3, 3, 2], [0, 3, 3], [1, 1], true),
        case("a stride longer than the image", [2, 3, 2, 2], [3, 2, 2], [9, 1], true),
        case("images between whose rows a block ends", [9, 5, 13, 1], [2, 3, 3], [2, 1], false),
        case("several parts of the weight", [1, 2, 3, 97], [130, 2, 3], [2, 1], false),
        case("32 outputs at a time, packs of channels", [2, 9, 7, 8], [16, 3, 3], [2, 1], true),
        case("64 outputs at a time, slices of channels", [1, 5, 6, 64], [64, 3, 3], [2, 1], true),
        case("128 outputs at a time, several tiles", [1, 17, 18, 40], [72, 3, 3], [1, 1], true),
        case("a kernel of 5x4 on tensor cores", [1, 7, 9, 8], [8, 5, 4], [2, 3], true),
        case("outputs in parts, pixels that no tap sees", [1, 7, 4, 72], [136, 1, 2], [3, 1], false),
        case("64 outputs of single channels", [1, 9, 8, 3], [40, 3, 3], [2, 1], true),
        case("128 outputs of single channels", [1, 3, 4, 13], [88, 2, 1], [1, 0], false),
        case("several blocks of pixels and of taps", [3, 11, 9, 33], [2, 3, 3], [1, 1], true),
        case("three channels in rows of whole packs", [3, 6, 8, 3], [16, 3, 3], [2, 1], true),
        case("the same, 48 outputs, rows wider than their taps", [1, 9, 40, 3], [48, 3, 3], [3, 2], true),
        case("one channel, 64 outputs, no bias", [2, 7, 24, 1], [64, 5, 5], [1, 2], false),
        case("one row of three channels", [2, 1, 8, 3], [16, 3, 3], [1, 1], true),
        case("one channel, a kernel taller than the image", [1, 2, 8, 1], [16, 5, 5], [1, 2], true),
        case("three channels, a stride longer than the kernel", [1, 6, 8, 3], [16, 3, 3], [4, 1], true),
        case("three channels, padding wider than the kernel", [1, 4, 8, 3], [16, 3, 3], [1, 4], true),
        case("more pixels than a block takes at once", [1, 3, 136, 3], [32, 3, 3], [1, 0], true),
        case("many pixels of few channels", [1, 73, 71, 8], [8, 2, 2], [1, 1], true),
        with_gelu("GELU, 3x3, stride 2", [1, 6, 5, 3], [16, 3, 3], [2, 1]),
        with_gelu("GELU, three channels in rows of whole packs", [1, 6, 8, 3], [48, 3, 3], [2, 1]),
        with_gelu("GELU, packs of channels", [1, 5, 4, 8], [40, 3, 3], [2, 1]),
        with_gelu("GELU, odd outputs", [1, 4, 5, 2], [3, 2, 2], [1, 0]),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let x = [draw.within(0, 0..=2), draw.within(1, 3..=7), draw.within(2, 3..=7), draw.within(3, 0..=3)];
    let weight = [draw.within(4, 1..=3), draw.within(5, 1..=3), draw.within(6, 1..=3)];
    case("drawn", x, weight, [draw.within(7, 1..=3), draw.within(1, 0..=2)], draw.within(6, 0..=1) == 1)
}
