//! Inputs on which [`region_merge`](super::region_merge) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct RegionMerge {
    grid: [usize; 2],
    region: [usize; 2],
}

impl Definition for RegionMerge {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::region_merge(&x[0], self.grid, self.region)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::region_merge(&x[0], self.grid, self.region)
    }
}

fn case(name: &str, [images, channels]: [usize; 2], grid: [usize; 2], region: [usize; 2]) -> Case {
    let x = uniform([images, grid[0] * grid[1], region[0] * region[1], channels], 1);
    Case::new(name, vec![x], RegionMerge { grid, region })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("7x7 regions of 2x2 tokens", [2, 3], [7, 7], [2, 2]),
        case("a flat map, grid and regions not square", [2, 2], [3, 5], [2, 3]),
        case("one token per region", [1, 2], [3, 5], [1, 1]),
        case("one region", [2, 2], [1, 1], [3, 5]),
        case("one element", [1, 1], [1, 1], [1, 1]),
        case("no regions", [2, 3], [0, 2], [2, 2]),
        case("no channels", [2, 0], [2, 2], [2, 2]),
        case("more than one thread", [3, 11], [7, 7], [4, 3]),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let numbers = [0, 1, 2, 3, 4, 5].map(|number| draw.within(number, 0..=3));
    let [images, channels, down, across, rows, columns] = numbers;
    case("drawn", [images, channels], [down, across], [rows, columns])
}
