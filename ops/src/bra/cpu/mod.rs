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
        Self { memory: Tensor::scratch(elements, T::DTYPE), element: std::marker::PhantomData }
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

/// Which of a token's channels: those of its query, its key or its value.
#[derive(Clone, Copy)]
enum Part {
    Query = 0,
    Key = 1,
    Value = 2,
}

impl<'a, T: Float> Head<'a, T> {
    /// The head of a task: task / heads is its image, task % heads its place there.
    fn new(geometry: Geometry, qkv: &'a [T], routes: &'a [u32], scale: T, task: usize) -> Self {
        let (image, head) = (task / geometry.heads, task % geometry.heads);
        let (pixels, per_image) = (geometry.tokens() * geometry.row(), geometry.regions() * geometry.topk);
        Self {
            geometry,
            qkv: &qkv[image * pixels..][..pixels],
            channels: geometry.channels(head),
            routes: &routes[image * per_image..][..per_image],
            scale,
        }
    }

    fn routes(&self, region: usize) -> &'a [u32] {
        &self.routes[region * self.geometry.topk..][..self.geometry.topk]
    }

    /// Channels of one head's part.
    fn dim(&self, part: Part) -> usize {
        self.geometry.head_dims()[part as usize / 2]
    }

    /// The channels of one token, where they lie.
    fn token(&self, region: usize, t: usize, part: Part) -> &'a [T] {
        let start = self.geometry.pixel(region, t) * self.geometry.row() + self.channels[part as usize];
        &self.qkv[start..][..self.dim(part)]
    }

    /// All tokens' channels, scaled, region after region: (P, tokens, dim). Done once, so that bringing a routed
    /// region into a tile is a copy of one run.
    fn regions(&self, part: Part, scale: T, out: &mut [T]) {
        let (tokens, dim) = (self.geometry.region_tokens(), self.dim(part));
        for (place, out) in out.chunks_exact_mut(dim.max(1)).enumerate() {
            let from = self.token(place / tokens, place % tokens, part);
            out.iter_mut().zip(from).for_each(|(out, &from)| *out = from * scale);
        }
    }

    /// All tokens' channels, each region transposed: (P, dim, tokens).
    fn transposed_regions(&self, part: Part, out: &mut [T]) {
        let (tokens, dim) = (self.geometry.region_tokens(), self.dim(part));
        for (region, block) in out.chunks_exact_mut((tokens * dim).max(1)).enumerate() {
            for t in 0..tokens {
                for (channel, &value) in self.token(region, t, part).iter().enumerate() {
                    block[channel * tokens + t] = value;
                }
            }
        }
    }

    /// The tile (k·tokens, dim) of the regions routed to, from [`Head::regions`].
    fn routed_rows(&self, region: usize, all: &[T], out: &mut [T]) {
        let len = out.len() / self.geometry.topk;
        for (out, &routed) in out.chunks_exact_mut(len.max(1)).zip(self.routes(region)) {
            out.copy_from_slice(&all[routed as usize * len..][..len]);
        }
    }

    /// The tile (dim, k·tokens) of the regions routed to, from [`Head::transposed_regions`].
    fn routed_columns(&self, region: usize, all: &[T], out: &mut [T]) {
        // Runs of the usual lengths are moved in registers; a call for each would cost more than the product.
        match self.geometry.region_tokens() {
            4 => self.routed_runs(region, all, out, |out: &mut [T; 4], run| *out = *run),
            16 => self.routed_runs(region, all, out, |out: &mut [T; 16], run| *out = *run),
            64 => self.routed_runs(region, all, out, |out: &mut [T; 64], run| *out = *run),
            tokens => {
                let dim = out.len() / self.geometry.keys().max(1);
                for (slot, &routed) in self.routes(region).iter().enumerate() {
                    let block = &all[routed as usize * tokens * dim..][..tokens * dim];
                    for (run, out) in block.chunks_exact(tokens).zip(out.chunks_exact_mut(self.geometry.keys())) {
                        out[slot * tokens..][..tokens].copy_from_slice(run);
                    }
                }
            }
        }
    }

    fn routed_runs<const N: usize>(
        &self,
        region: usize,
        all: &[T],
        out: &mut [T],
        copy: impl Fn(&mut [T; N], &[T; N]),
    ) {
        let (all, out) = (all.as_chunks::<N>().0, out.as_chunks_mut::<N>().0);
        let topk = self.geometry.topk;
        let dim = out.len() / topk;
        for (slot, &routed) in self.routes(region).iter().enumerate() {
            let block = &all[routed as usize * dim..][..dim];
            for (run, out) in block.iter().zip(out[slot..].iter_mut().step_by(topk)) {
                copy(out, run);
            }
        }
    }
}
