//! Inputs on which [`dwconv`](super::dwconv) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

/// With or without x itself added.
struct Dwconv {
    residual: bool,
}

impl Definition for Dwconv {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        let op = if self.residual { super::dwconv_residual } else { super::dwconv };
        op(&x[0], &x[1], x.get(2))
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        let mut y = super::reference::dwconv(&x[0], &x[1], x.get(2));
        if self.residual {
            y.data.iter_mut().zip(&x[0].data).for_each(|(y, &x)| *y += x);
        }
        y
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

fn case(name: &str, shape: [usize; 4], kernel: usize, bias: bool) -> Case {
    with_residual(name, shape, kernel, bias, false)
}

fn with_residual(name: &str, shape: [usize; 4], kernel: usize, bias: bool, residual: bool) -> Case {
    let channels = shape[3];
    let mut operands = vec![uniform(shape, 1), uniform([channels, 1, kernel, kernel], 2)];
    if bias {
        operands.push(uniform([channels], 3));
    }
    Case::new(name, operands, Dwconv { residual })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("local context of a head, 5x5", [1, 7, 7, 32], 5, true),
        case("position encoding, 3x3", [2, 4, 4, 16], 3, true),
        case("without bias", [1, 3, 5, 4], 3, false),
        case("every width of a block of pixels and channels", [1, 2, 19, 43], 3, true),
        case("primes", [2, 3, 13, 11], 5, true),
        case("a kernel larger than the image", [2, 1, 2, 3], 5, true),
        case("a kernel of 7", [1, 5, 11, 8], 7, true),
        case("a kernel of 7, odd", [1, 4, 9, 3], 7, true),
        case("one element", [1, 1, 1, 1], 3, true),
        case("no images", [0, 3, 3, 2], 3, true),
        case("no columns", [2, 3, 0, 2], 3, true),
        case("no columns, in packs", [2, 3, 0, 8], 3, true),
        case("no columns of a kernel of 5, in packs", [2, 3, 0, 8], 5, true),
        case("no channels", [2, 3, 3, 0], 3, true),
        case("chunks of columns, bands of rows, tiles of channels", [1, 16, 13, 72], 5, true),
        case("tiles of pixels", [1, 17, 18, 8], 5, true),
        case("a last tile of an octet less", [1, 3, 17, 8], 5, true),
        case("a last tile of a column less", [1, 2, 35, 8], 5, true),
        case("images of one row, in packs", [3, 1, 2, 8], 5, true),
        case("images of one column, in packs", [2, 2, 1, 16], 5, true),
        with_residual("a residual, 5x5, in packs", [2, 5, 9, 8], 5, true, true),
        case("strips of half a warp, two bands of rows", [1, 29, 8, 24], 3, true),
        case("an odd number of strips of half a warp", [2, 5, 14, 16], 3, false),
        case("two tiles of channels and two bands, strips of a warp", [1, 17, 7, 200], 3, true),
        case("more than one thread", [3, 23, 17, 17], 3, true),
        with_residual("position encoding with its residual", [2, 4, 5, 16], 3, true, true),
        with_residual("a residual, 5x5, without bias", [1, 3, 6, 5], 5, false, true),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [draw.within(0, 0..=2), draw.within(1, 0..=5), draw.within(2, 0..=12), draw.within(3, 0..=10)];
    let [bias, residual] = [5, 6].map(|index| draw.within(index, 0..=1) == 1);
    with_residual("drawn", shape, 3 + 2 * draw.within(4, 0..=2), bias, residual)
}
