//! Inputs on which [`bra`](super::bra) is checked.

use super::{Bra, RouteKind};
use crate::case::{Case, Definition, Draw, array, from_fn, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::Tensor;
use tensor::rng::Philox;

struct BraCase(Bra);

impl Definition for BraCase {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        let lepe = if let [_, weight, bias] = x { Some([weight, bias]) } else { None };
        Ok(super::bra(&x[0], lepe, &self.0)?.out)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        let mut out = super::reference::attention(&x[0], &self.0, RouteKind::Hard);
        if let [qkv, weight, bias] = x {
            let [n, h, w, channels] = qkv.dims();
            let start = 2 * self.0.qk_dim;
            let values =
                Array::from_fn(&[n, h, w, channels - start], |at| qkv.at(&[at[0], at[1], at[2], start + at[3]]));
            let context = crate::dwconv::reference::dwconv(&values, weight, Some(bias));
            out.data.iter_mut().zip(context.data).for_each(|(out, context)| *out += context);
        }
        out
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

/// qkv whose routes have a wide margin: the first channel of the keys has a different mean in each region, widely
/// spaced and in random order, and the first channel of the queries is near 1 or near −1, so that regions rank the
/// others differently. Small perturbations of single elements do not change any route.
fn qkv(images: usize, attributes: &Bra, region: [usize; 2], v_dim: usize, stream: u64) -> Tensor {
    let [rows, cols] = attributes.grid;
    let (map, channels) = ([rows * region[0], cols * region[1]], 2 * attributes.qk_dim + v_dim);
    let mut values =
        uniform([images, map[0], map[1], channels], stream).to_vec::<f64>().expect("invariant: cases are f64");
    for (pixel, token) in values.chunks_mut(channels).enumerate() {
        let (image, row, col) = (pixel / (map[0] * map[1]), pixel / map[1] % map[0], pixel % map[1]);
        let place = row / region[0] * cols + col / region[1];
        let order = Philox::keyed(stream, &[image as u64]).sequence().permutation(rows * cols);
        token[..2 * attributes.qk_dim].iter_mut().for_each(|x| *x *= 0.2);
        token[0] += if (place + image).is_multiple_of(2) { 1.0 } else { -1.0 };
        token[attributes.qk_dim] += 0.6 * order[place] as f64;
    }
    Tensor::from_slice(&values, [images, map[0], map[1], channels]).expect("invariant: as many as before")
}

struct Setup {
    images: usize,
    grid: [usize; 2],
    region: [usize; 2],
    heads: usize,
    /// Channels of one head: queries and keys, values.
    dims: [usize; 2],
    topk: usize,
    /// Kernel of the local context; 0 for none.
    kernel: usize,
}

impl Setup {
    fn case(self, name: &str) -> Case {
        let Setup { images, grid, region, heads, dims: [d, dv], topk, kernel } = self;
        let (qk_dim, v_dim) = (heads * d, heads * dv);
        let attributes = Bra { heads, qk_dim, topk, grid, scale: (qk_dim as f64).powf(-0.5), valid: None };
        let mut inputs = vec![qkv(images, &attributes, region, v_dim, 1)];
        if kernel > 0 {
            inputs.push(uniform([v_dim, 1, kernel, kernel], 2));
            inputs.push(uniform([v_dim], 3));
        }
        Case::new(name, inputs, BraCase(attributes))
    }
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    let usual = || Setup { images: 2, grid: [2, 2], region: [2, 2], heads: 2, dims: [4, 4], topk: 2, kernel: 5 };
    let skewed = {
        let mut case = Setup { images: 1, topk: 1, ..usual() }.case("all regions choose the same one");
        let mut values = case.inputs[0].to_vec::<f64>().expect("invariant: cases are f64");
        values.chunks_mut(24).for_each(|token| token[0] = 1.0);
        case.inputs[0] = Tensor::from_slice(&values, [1, 4, 4, 24]).expect("invariant: as many as before");
        case
    };
    let padded = |name: &str, dim: usize| {
        let attributes = Bra { heads: 1, qk_dim: dim, topk: 2, grid: [2, 3], scale: 0.7, valid: Some([3, 5]) };
        // With this random stream, the partly valid regions score best.
        Case::new(name, vec![qkv(1, &attributes, [2, 2], dim, 2)], BraCase(attributes))
    };
    let extreme = {
        let few = Setup { images: 1, heads: 1, dims: [32, 32], kernel: 0, ..usual() };
        let mut case = few.case("scores whose exponentials single precision does not hold");
        case.inputs[0] = far_from_zero(&case.inputs[0], 32);
        case
    };
    vec![
        usual().case("2x2 regions, two heads, local context"),
        Setup { kernel: 0, ..usual() }.case("without local context"),
        Setup { grid: [3, 2], region: [1, 3], dims: [3, 5], topk: 3, kernel: 3, ..usual() }
            .case("oblong, values wider than keys"),
        Setup { topk: 4, images: 1, ..usual() }.case("every region attends to all"),
        Setup { region: [1, 1], grid: [3, 3], topk: 4, ..usual() }.case("regions of one token"),
        Setup { images: 1, region: [4, 4], heads: 1, dims: [3, 2], topk: 3, kernel: 0, ..usual() }
            .case("runs of 16 tokens"),
        Setup { images: 1, grid: [1, 2], region: [8, 8], heads: 1, dims: [1, 2], topk: 2, kernel: 0 }
            .case("runs of 64 tokens"),
        Setup { images: 1, grid: [1, 1], region: [9, 8], heads: 1, dims: [2, 2], topk: 1, kernel: 0 }
            .case("one region, more queries than a block"),
        Setup { grid: [2, 3], dims: [32, 32], topk: 5, kernel: 3, images: 1, ..usual() }.case("heads for tensor cores"),
        Setup { grid: [1, 2], region: [5, 7], dims: [24, 24], topk: 1, heads: 1, kernel: 0, images: 1 }
            .case("the same where one region has all keys"),
        Setup { images: 0, ..usual() }.case("no images"),
        Setup { grid: [1, 1], region: [1, 1], topk: 1, ..usual() }.case("one token"),
        skewed,
        padded("means over the valid part of a map", 3),
        padded("the same in whole packs", 8),
        extreme,
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let grid = [draw.within(1, 1..=3), draw.within(2, 1..=3)];
    let region = [draw.within(3, 1..=3), draw.within(4, 1..=2)];
    let dims = [draw.within(5, 1..=3), draw.within(6, 1..=3)];
    let topk = draw.within(7, 1..=grid[0] * grid[1]);
    let (images, heads) = (draw.within(0, 0..=2), 1 + draw.within(0, 0..=1));
    Setup { images, grid, region, heads, dims, topk, kernel: [0, 3, 5][draw.within(4, 0..=2)] }.case("drawn")
}

/// A variant of `qkv` in which one head has scores around ±200: the queries' first channel is multiplied by 32, and 32
/// is added to the keys' first channel. All values are rounded to sixteenths before that, so that their products are
/// exact in single precision too.
pub(crate) fn far_from_zero(qkv: &Tensor, qk_dim: usize) -> Tensor {
    let (values, width) = (array(qkv).data, qkv.shape()[3]);
    from_fn(qkv.shape().clone(), |i| {
        let value = (16.0 * values[i]).round() / 16.0;
        match i % width {
            0 => 32.0 * value,
            channel if channel == qk_dim => 32.0 + value,
            _ => value,
        }
    })
}
