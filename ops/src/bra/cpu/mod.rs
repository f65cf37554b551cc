//! Routed attention where the keys and values lie.
//!
//! A region is a list of pixels ([`Pixels`]), and the products of attention take the rows of both operands
//! and of the result out of such lists: keys, values and their gradients are never gathered, neither as a tensor
//! nor as a tile. Only the operand that lies across the registers (`scores.rs`) is transposed, a block at a time.
//!
//! Forward, a task is some regions of one head of one image. Backward it is a whole head: it owns all of the
//! head's keys, and adds their gradients up in place in the order of the regions. No atomics, and the same bits
//! with any number of threads. (A GPU, which needs more tasks than heads, takes the inverted list of the routes
//! instead.)

mod backward;
mod forward;
mod scores;

pub use backward::backward;
pub use forward::forward;

use super::geometry::Geometry;
use rayon::prelude::*;
use tensor::cpu::parallel::items_per_task;
use tensor::cpu::tile::{Listed, Right};
use tensor::{DType, Element, Float, Tensor};

/// Queries of one region are taken in blocks of at most this many, so that the scores of a block stay in
/// the cache when a region is a whole map.
const QUERY_BLOCK: usize = 64;

/// Zeros to work in, cut into parts of these sizes.
fn parts<T: Float, const N: usize>(scratch: &mut Tensor, sizes: [usize; N]) -> [&mut [T]; N] {
    let mut rest = elements_mut(scratch);
    rest.fill(T::zero());
    sizes.map(|size| {
        let (part, after) = std::mem::take(&mut rest).split_at_mut(size);
        rest = after;
        part
    })
}

/// The pixels of regions, in which all heads of an image agree.
struct Pixels {
    /// (P, tokens): each region's own.
    own: Tensor,
    /// (N, P, k·tokens): those of all keys that a region attends to.
    routed: Tensor,
}

impl Pixels {
    /// Of a map that is not empty.
    fn new(g: Geometry, routes: &[u32]) -> Self {
        let (tokens, regions) = (g.region_tokens(), g.regions());
        let mut own = Tensor::empty([regions, tokens], DType::Index);
        let mut routed = Tensor::empty([g.images, regions, g.keys()], DType::Index);
        let places = elements_mut(&mut own);
        let all = (0..regions).flat_map(|region| (0..tokens).map(move |t| g.pixel(region, t) as u32));
        places.iter_mut().zip(all).for_each(|(place, pixel)| *place = pixel);
        let copies = elements_mut(&mut routed).par_chunks_mut(tokens).zip(routes).with_min_len(items_per_task(tokens));
        copies.for_each(|(copy, &region)| copy.copy_from_slice(&places[region as usize * tokens..][..tokens]));
        Self { own, routed }
    }
}

/// The elements of scratch memory.
pub(super) fn elements_mut<T: Element>(tensor: &mut Tensor) -> &mut [T] {
    tensor.as_mut_slice("bra").expect("invariant: a new tensor is contiguous and unshared")
}

/// The elements of scratch memory.
fn elements<T: Element>(tensor: &Tensor) -> &[T] {
    tensor.as_slice("bra").expect("invariant: a new tensor is contiguous")
}

/// Some tokens' channels of one head, (·, dim), where they lie.
type Tokens<'a, T> = Right<'a, T, Listed<'a>>;

/// One head of one image: its operands, read in place.
#[derive(Clone, Copy)]
struct Head<'a, T> {
    geometry: Geometry,
    /// (H·W, 2D + C)
    qkv: &'a [T],
    /// Where the head's queries, keys and values start in a row of `qkv`.
    channels: [usize; 3],
    /// (P, tokens)
    own: &'a [u32],
    /// (P, k·tokens)
    routed: &'a [u32],
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
    fn new(geometry: Geometry, qkv: &'a [T], pixels: &'a Pixels, scale: T, [image, head]: [usize; 2]) -> Self {
        let (row, routed) = (geometry.tokens() * geometry.row(), geometry.regions() * geometry.keys());
        Self {
            geometry,
            qkv: &qkv[image * row..][..row],
            channels: geometry.channels(head),
            own: elements(&pixels.own),
            routed: &elements(&pixels.routed)[image * routed..][..routed],
            scale,
        }
    }

    /// The tokens with these pixels.
    #[inline(always)]
    fn tokens(&self, part: Part, pixels: Listed<'a>) -> Tokens<'a, T> {
        Right { data: &self.qkv[self.channels[part as usize]..], rows: pixels.apart(self.geometry.row()) }
    }

    /// The pixels of a region.
    #[inline(always)]
    fn own(&self, region: usize) -> &'a [u32] {
        let tokens = self.geometry.region_tokens();
        &self.own[region * tokens..][..tokens]
    }

    /// The pixels of all keys that a region attends to.
    #[inline(always)]
    fn routed(&self, region: usize) -> Listed<'a> {
        let keys = self.geometry.keys();
        Listed::new(&self.routed[region * keys..][..keys], self.geometry.row())
    }
}
