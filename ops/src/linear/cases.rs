//! Inputs on which [`linear`](super::linear) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

/// Which of the optional operands there are.
struct Linear {
    bias: bool,
    residual: bool,
}

impl Linear {
    /// Bias and residual, from what follows x and the weight.
    fn optional<'a, X>(&self, x: &'a [X]) -> [Option<&'a X>; 2] {
        let residual = self.residual.then(|| x.last()).flatten();
        [self.bias.then(|| &x[2]), residual]
    }
}

impl Definition for Linear {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        let [bias, residual] = self.optional(x);
        super::linear_residual(&x[0], &x[1], bias, residual)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        let [bias, residual] = self.optional(x);
        super::reference::linear(&x[0], &x[1], bias, residual)
    }
    fn is_parameter(&self, input: usize) -> bool {
        input == 1 || (self.bias && input == 2)
    }
}

fn case(name: &str, rows: &[usize], [inputs, outputs]: [usize; 2], bias: bool, residual: bool) -> Case {
    let x = uniform([rows, &[inputs]].concat(), 1);
    let mut operands = vec![x, uniform([outputs, inputs], 2)];
    if bias {
        operands.push(uniform([outputs], 3));
    }
    if residual {
        operands.push(uniform([rows, &[outputs]].concat(), 4));
    }
    Case::new(name, operands, Linear { bias, residual })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("qkv of a 8x8 map, (N, H, W, C)", &[2, 8, 8], [16, 48], true, false),
        case("without bias", &[3, 5], [7, 4], false, false),
        case("the end of a block's branch", &[2, 4, 4], [48, 16], true, true),
        case("a residual without bias", &[3, 5], [7, 4], false, true),
        case("primes", &[13], [11, 17], true, false),
        case("one element", &[1], [1, 1], true, true),
        case("no rows", &[0], [3, 2], true, true),
        case("no inputs", &[3], [0, 2], true, true),
        case("no inputs and nothing else", &[3], [0, 2], false, false),
        case("no outputs", &[3], [2, 0], true, true),
        case("a vector", &[], [5, 3], true, false),
        case("more than one thread", &[5, 400], [33, 65], true, true),
        case("many rows of few channels", &[7, 293], [8, 8], true, false),
        case("many rows without bias", &[3080], [16, 8], false, false),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let rows = [draw.within(0, 0..=4), draw.within(1, 0..=4)];
    let optional = [4, 5].map(|place| draw.within(place, 0..=1) == 1);
    case("drawn", &rows, [draw.within(2, 0..=6), draw.within(3, 1..=6)], optional[0], optional[1])
}
