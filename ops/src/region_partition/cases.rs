//! Inputs on which [`region_partition`](super::region_partition) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct RegionPartition {
    grid: [usize; 2],
}

impl Definition for RegionPartition {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::region_partition(&x[0], self.grid)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::region_partition(&x[0], self.grid)
    }
}

fn case(name: &str, shape: [usize; 4], grid: [usize; 2]) -> Case {
    Case::new(name, vec![uniform(shape, 1)], RegionPartition { grid })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("7x7 regions of 2x2 tokens", [2, 14, 14, 3], [7, 7]),
        case("a flat map, grid and regions not square", [2, 6, 15, 2], [3, 5]),
        case("one token per region", [1, 3, 5, 2], [3, 5]),
        case("one region", [2, 3, 5, 2], [1, 1]),
        case("one element", [1, 1, 1, 1], [1, 1]),
        case("no images", [0, 4, 4, 2], [2, 2]),
        case("no tokens", [2, 0, 4, 3], [2, 2]),
        case("more than one thread", [3, 28, 21, 11], [7, 7]),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let grid = [draw.within(0, 1..=3), draw.within(1, 1..=3)];
    let region = [draw.within(2, 0..=3), draw.within(3, 0..=3)];
    let shape = [draw.within(4, 0..=2), grid[0] * region[0], grid[1] * region[1], draw.within(5, 0..=3)];
    case("drawn", shape, grid)
}
