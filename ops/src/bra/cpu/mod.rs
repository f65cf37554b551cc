//! Routed attention of one head at a time.
//!
//! The keys and values of a region, and of its neighbours if regions are small, are laid out (`quads.rs`) when a query
//! first attends to it, and stay in the core's cache for the other regions that attend to it. Nothing is gathered k
//! times, neither into a tensor nor into a tile: the routed regions are given as a list of quads, which the products
//! (`products.rs`) follow.
//!
//! In the forward pass a task is a head of an image, or some of the head's regions. In the backward pass it is a whole
//! head: it owns all of the head's keys, and accumulates their gradients in the order of the regions. So no atomics are
//! needed, and the results are bit-identical for any number of threads. (A GPU needs more tasks than there are heads:
//! there, parts of a head find the queries that attend to them in the inverted list of the routes.)

mod backward;
mod forward;
mod products;
mod quads;
mod scores;

pub use backward::backward;
pub use forward::forward;

use super::geometry::Geometry;
use products::ScoreLayout;
use quads::{Channels, Pixels, QUAD};
use std::ops::Range;
use tensor::Scratch;

/// Queries are processed in blocks of at most this many quads, so that their scores stay in the cache even when a
/// region is a whole map. Small regions share a block, because every block has a fixed overhead.
const QUERY_QUADS: usize = 8;

/// Neighbouring regions are laid out together as long as they have at most this many tokens in all.
const GROUP_TOKENS: usize = 64;

/// The quads of a block of queries, in order.
const IN_ORDER: [u32; QUERY_QUADS] = [0, 1, 2, 3, 4, 5, 6, 7];

/// Scratch memory cut into parts of these sizes.
fn parts<T, const N: usize>(mut scratch: &mut [T], sizes: [usize; N]) -> [&mut [T]; N] {
    sizes.map(|size| {
        let (part, rest) = std::mem::take(&mut scratch).split_at_mut(size);
        scratch = rest;
        part
    })
}

/// The pixels of each region of a map that is not empty, one region after the other: (P, tokens). A pixel is a token by
/// its place in the map, row by row. Each occurs once.
fn pixels(g: Geometry) -> Scratch<u32> {
    assert!(u32::try_from(g.tokens()).is_ok(), "a map of {} tokens", g.tokens());
    let mut pixels = Scratch::new(g.regions.count() * g.regions.tokens());
    let ([rows, columns], [height, width], [_, row_len]) = (g.regions.grid(), g.regions.size(), g.regions.map());
    let starts = (0..rows * columns).flat_map(|region| {
        let corner = region / columns * height * row_len + region % columns * width;
        (0..height).map(move |row| corner + row * row_len)
    });
    for (run, start) in pixels.chunks_exact_mut(width).zip(starts) {
        run.iter_mut().zip(start..).for_each(|(place, pixel)| *place = pixel as u32);
    }
    pixels
}

/// Which of a token's channels: those of its query, its key or its value.
#[derive(Clone, Copy)]
enum Role {
    Query = 0,
    Key = 1,
    Value = 2,
}

/// One head of one image.
#[derive(Clone, Copy)]
struct Head<'a, T> {
    geometry: Geometry,
    image: usize,
    /// Which of the image's heads.
    index: usize,
    /// (N, H, W, 2D + C)
    qkv: &'a [T],
    /// (P, tokens)
    pixels: Pixels<'a>,
    /// The image's (P, k).
    routes: &'a [u32],
    scale: T,
}

impl<'a, T: Copy> Head<'a, T> {
    /// Head `of_all`, counted through all images, of qkv (N, H, W, 2D + C) and routes (N, P, k).
    fn new(
        geometry: Geometry,
        qkv: &'a [T],
        (pixels, routes): (Pixels<'a>, &'a [u32]),
        scale: T,
        of_all: usize,
    ) -> Self {
        let (image, index) = (of_all / geometry.heads, of_all % geometry.heads);
        let routed = geometry.regions.count() * geometry.topk;
        Self { geometry, image, index, qkv, pixels, routes: &routes[image * routed..][..routed], scale }
    }

    /// Where its queries, keys or values lie in qkv.
    fn channels(&self, role: Role) -> Channels {
        let g = self.geometry;
        let first = self.image * g.tokens() * g.row() + g.channels(self.index)[role as usize];
        let [d, dv] = g.head_dims();
        let dim = match role {
            Role::Query | Role::Key => d,
            Role::Value => dv,
        };
        Channels { first, stride: g.row(), dim }
    }

    /// Prefetches the next head's channels at some pixels while this head is being processed: a head's part of a token
    /// is too short for the hardware prefetcher to anticipate the next one.
    fn fetch_next(&self, pixels: Pixels<'_>) {
        let (g, next) = (self.geometry, self.image * self.geometry.heads + self.index + 1);
        if next < g.images * g.heads {
            let next = Self { image: next / g.heads, index: next % g.heads, ..*self };
            for role in [Role::Query, Role::Key, Role::Value] {
                next.channels(role).fetch(self.qkv, pixels);
            }
        }
    }

    /// Where its results lie in (N, H, W, C).
    fn results(&self) -> Channels {
        let g = self.geometry;
        let dim = g.head_dims()[1];
        Channels { first: self.image * g.tokens() * g.v_dim + self.index * dim, stride: g.v_dim, dim }
    }

    /// The pixels of some regions.
    fn pixels_of(&self, regions: Range<usize>) -> Pixels<'a> {
        let tokens = self.geometry.regions.tokens();
        self.pixels.part(regions.start * tokens..regions.end * tokens, tokens)
    }

    /// The share of some regions in `of_all`, which has `width` elements for each token of all regions.
    fn part_of<'t>(&self, regions: Range<usize>, width: usize, of_all: &'t mut [T]) -> &'t mut [T] {
        let size = self.quads() * QUAD * width;
        &mut of_all[regions.start * size..regions.end * size]
    }

    /// How many neighbouring regions are laid out at a time.
    fn group(&self) -> usize {
        (GROUP_TOKENS / self.geometry.regions.tokens()).max(1)
    }

    /// For each region, whether it is not laid out yet, because no query has attended to its group: initially true for
    /// all.
    fn all_missing(&self) -> Vec<bool> {
        vec![true; self.geometry.regions.count()]
    }

    /// The groups that some regions attend to and that are not laid out yet, each of which is marked as laid out when
    /// the iterator gives it: the caller lays it out.
    fn take_missing<'t>(
        &self,
        regions: Range<usize>,
        missing: &'t mut [bool],
    ) -> impl Iterator<Item = Range<usize>> + use<'a, 't, T> {
        let size = self.group();
        // Usually all are laid out after the first few blocks.
        let routes = if missing.contains(&true) { self.routes_of(regions) } else { &[] };
        routes.iter().filter_map(move |&region| {
            let region = region as usize;
            if !missing[region] {
                return None;
            }
            let first = region / size * size;
            let group = first..(first + size).min(missing.len());
            missing[group.clone()].fill(false);
            Some(group)
        })
    }

    fn routes_of(&self, regions: Range<usize>) -> &'a [u32] {
        &self.routes[regions.start * self.geometry.topk..regions.end * self.geometry.topk]
    }

    /// The quads of a region.
    fn quads(&self) -> usize {
        self.geometry.regions.tokens().div_ceil(QUAD)
    }

    /// The largest block of queries: how many regions, and how many quads of each.
    fn largest_block(&self) -> [usize; 2] {
        let quads = self.quads().min(QUERY_QUADS);
        [(QUERY_QUADS / quads).min(self.geometry.regions.count()), quads]
    }

    /// The queries of some regions in blocks: several regions, or parts of one.
    fn blocks(&self, regions: Range<usize>) -> impl Iterator<Item = QueryBlock<'a>> + use<'a, T> {
        let (all, tokens, [several, quads]) = (self.pixels, self.geometry.regions.tokens(), self.largest_block());
        regions.clone().step_by(several).flat_map(move |first| {
            let last = (first + several).min(regions.end);
            let pixels = first * tokens..last * tokens;
            let size = if several > 1 { pixels.len() } else { quads * QUAD };
            pixels.clone().step_by(size).map(move |start| {
                let block = start..(start + size).min(pixels.end);
                let region = block.len() / (last - first);
                QueryBlock { regions: first..last, pixels: all.part(block, region) }
            })
        })
    }

    /// The layout of the scores of the queries of this many regions, with this many quads of queries each.
    fn score_layout(&self, [regions, query_quads]: [usize; 2]) -> ScoreLayout {
        let (tokens, quads) = (self.geometry.regions.tokens(), self.quads());
        ScoreLayout { regions, query_quads, key_quads: self.geometry.topk * quads, region: [tokens, quads] }
    }

    /// The quads of the keys that these regions attend to, one region's after the other's.
    fn route(&self, regions: Range<usize>, quads: &mut Vec<u32>) {
        let (each, routes) = (self.quads(), self.routes_of(regions));
        quads.resize(routes.len() * each, 0);
        // Regions may have a single quad each, so the inner loop runs over regions.
        for place in 0..each {
            for (quads, &region) in quads.chunks_exact_mut(each).zip(routes) {
                quads[place] = region * each as u32 + place as u32;
            }
        }
    }
}

/// A block of queries.
struct QueryBlock<'a> {
    regions: Range<usize>,
    pixels: Pixels<'a>,
}
