//! Routed attention where the keys and values lie.
//!
//! One task is one head of one image. It walks the regions in order; for each it brings the keys and
//! values of the routed regions into a tile that stays in the cache, and there computes scores, softmax
//! and result. The gathered keys and values never exist as a tensor, forward or backward. Because a task
//! owns all of its head's keys, it adds their gradients up in the order of the regions: no atomics, and
//! the same bits with any number of threads. (A GPU, which needs more tasks than heads, takes the inverted
//! list of the routes instead.)

mod backward;
mod forward;

pub use backward::backward;
pub use forward::forward;

use super::geometry::Geometry;
use tensor::{Float, Tensor};

/// Queries of one region are taken in blocks of at most this many, so that the scores of a block stay in
/// the cache when a region is a whole map.
const QUERY_BLOCK: usize = 64;

/// Scratch memory of one task, cut into parts.
struct Scratch<T> {
    memory: Tensor,
    element: std::marker::PhantomData<T>,
}

impl<T: Float> Scratch<T> {
    fn new(elements: usize) -> Self {
        Self { memory: Tensor::empty([elements], T::DTYPE), element: std::marker::PhantomData }
    }

    fn parts<const N: usize>(&mut self, sizes: [usize; N]) -> [&mut [T]; N] {
        let mut rest = self.memory.as_mut_slice::<T>("bra").expect("invariant: scratch is contiguous and unshared");
        sizes.map(|size| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(size);
            rest = after;
            part
        })
    }
}

/// One head of one image: its operands, read in place.
#[derive(Clone, Copy)]
struct Head<'a, T> {
    geometry: Geometry,
    /// (H·W, 2D + C)
    qkv: &'a [T],
    /// Where the head's queries, keys and values start in a row of `qkv`.
    channels: [usize; 3],
    /// (P, k): the regions that each region attends to.
    routes: &'a [u32],
    scale: T,
}

impl<'a, T: Float> Head<'a, T> {
    fn routes(&self, region: usize) -> &'a [u32] {
        &self.routes[region * self.geometry.topk..][..self.geometry.topk]
    }

    /// Copies channels of a region's tokens, scaled, into rows: (tokens, dim).
    fn rows(&self, region: usize, tokens: std::ops::Range<usize>, part: usize, scale: T, out: &mut [T]) {
        let dim = self.geometry.head_dims()[part / 2];
        for (t, out) in tokens.zip(out.chunks_exact_mut(dim.max(1))) {
            let from = &self.qkv[self.geometry.pixel(region, t) * self.geometry.row() + self.channels[part]..][..dim];
            out.iter_mut().zip(from).for_each(|(out, &from)| *out = from * scale);
        }
    }

    /// Copies the rows of all regions routed to, one region after the other: (k·tokens, dim).
    fn routed_rows(&self, region: usize, part: usize, out: &mut [T]) {
        let (tokens, dim) = (self.geometry.region_tokens(), self.geometry.head_dims()[part / 2]);
        for (slot, &routed) in self.routes(region).iter().enumerate() {
            self.rows(routed as usize, 0..tokens, part, T::one(), &mut out[slot * tokens * dim..][..tokens * dim]);
        }
    }

    /// All keys or values of the head, each region transposed: (P, dim, tokens). Done once, so that bringing
    /// a routed region into a transposed tile is a copy of runs and not of single elements.
    fn transposed(&self, part: usize, out: &mut [T]) {
        let (tokens, dim) = (self.geometry.region_tokens(), self.geometry.head_dims()[part / 2]);
        for (region, block) in out.chunks_exact_mut((tokens * dim).max(1)).enumerate() {
            for t in 0..tokens {
                let start = self.geometry.pixel(region, t) * self.geometry.row() + self.channels[part];
                for (channel, &value) in self.qkv[start..][..dim].iter().enumerate() {
                    block[channel * tokens + t] = value;
                }
            }
        }
    }

    /// The tile (dim, k·tokens) of the regions routed to, from [`Head::transposed`].
    fn routed_columns(&self, region: usize, transposed: &[T], dim: usize, out: &mut [T]) {
        let (tokens, keys) = (self.geometry.region_tokens(), self.geometry.keys());
        for (slot, &routed) in self.routes(region).iter().enumerate() {
            let block = &transposed[routed as usize * tokens * dim..][..tokens * dim];
            for (channel, run) in block.chunks_exact(tokens).enumerate() {
                out[channel * keys + slot * tokens..][..tokens].copy_from_slice(run);
            }
        }
    }
}
