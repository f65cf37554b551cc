//! Inputs on which [`region_pool`](super::region_pool) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::Tensor;

struct RegionPool {
    grid: [usize; 2],
}

impl Definition for RegionPool {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::region_pool(&x[0], self.grid)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::region_pool(&x[0], self.grid)
    }
}

fn case(name: &str, shape: [usize; 4], grid: [usize; 2]) -> Case {
    of(name, uniform(shape, 1), grid)
}

fn of(name: &str, x: Tensor, grid: [usize; 2]) -> Case {
    Case::new(name, vec![x], RegionPool { grid })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    let qkv = uniform([2, 6, 4, 15], 1);
    let keys = qkv.slice(3, 5..10).expect("invariant: channels of the map");
    vec![
        case("7x7 regions, (N, H, W, C)", [2, 14, 14, 3], [7, 7]),
        case("oblong regions of an oblong map", [3, 6, 20, 5], [2, 4]),
        of("keys inside a qkv map", keys, [3, 2]),
        case("one region", [2, 3, 5, 7], [1, 1]),
        case("each token its own region", [1, 3, 2, 4], [3, 2]),
        case("one element", [1, 1, 1, 1], [1, 1]),
        case("no images", [0, 4, 4, 3], [2, 2]),
        case("no channels", [1, 4, 4, 0], [2, 2]),
        case("more than one thread", [2, 28, 28, 31], [7, 7]),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let grid = [draw.within(0, 1..=3), draw.within(1, 1..=3)];
    let map = [grid[0] * draw.within(2, 1..=3), grid[1] * draw.within(3, 1..=3)];
    case("drawn", [draw.within(4, 0..=3), map[0], map[1], draw.within(5, 0..=20)], grid)
}
