//! Where tokens, heads and regions lie in a (N, H, W, 2D + C) map of queries, keys and values.

use crate::Regions;
use tensor::{Error, Result, Shape};

/// The extents of one bi-level routing attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Geometry {
    /// N.
    pub images: usize,
    /// How the map (H, W) is cut.
    pub regions: Regions,
    /// Attention heads.
    pub heads: usize,
    /// D: channels of the queries, and of the keys, over all heads.
    pub qk_dim: usize,
    /// C: channels of the values, and of the result, over all heads.
    pub v_dim: usize,
    /// k: how many regions each region attends to.
    pub topk: usize,
}

/// [`Error::Argument`] unless scores can be scaled by this number.
pub fn ensure_scale(op: &'static str, scale: f64) -> Result<()> {
    let wrong = || Error::argument(op, format!("scale is {scale:?}, but must be finite, in f32, too"));
    (scale as f32).is_finite().then_some(()).ok_or_else(wrong)
}

impl Geometry {
    /// Checks that there are query channels, that the heads divide the channels, that k is from 1 to the number of
    /// regions, and that routes and tokens can be numbered.
    pub fn check(self, op: &'static str) -> Result<Self> {
        if self.qk_dim == 0 {
            return Err(Error::argument(op, "queries and keys need at least one channel"));
        }
        if self.heads == 0 || !self.qk_dim.is_multiple_of(self.heads) || !self.v_dim.is_multiple_of(self.heads) {
            let message = format!("{} heads do not divide {} and {} channels", self.heads, self.qk_dim, self.v_dim);
            return Err(Error::argument(op, message));
        }
        let regions = self.regions.count();
        if self.topk == 0 || self.topk > regions {
            let message = format!("topk {} must be from 1 to the number of regions, {regions}", self.topk);
            return Err(Error::argument(op, message));
        }
        Shape::from([self.images, regions, self.topk]).countable(op)?;
        if u32::try_from(self.tokens()).is_err() {
            return Err(Error::argument(op, format!("a map of {} tokens is too large for u32 indices", self.tokens())));
        }
        Ok(self)
    }

    /// The tokens of one image.
    pub fn tokens(&self) -> usize {
        self.regions.map().iter().product()
    }

    /// The shape of a map with this many channels.
    pub fn shape(&self, channels: usize) -> [usize; 4] {
        let [height, width] = self.regions.map();
        [self.images, height, width, channels]
    }

    /// The tokens that one query attends to.
    pub fn keys(&self) -> usize {
        self.topk * self.regions.tokens()
    }

    /// The multiply-adds of the forward pass: scores, and weighted sums of values. Each of the two products has two
    /// gradients, each as expensive as the product, so a backward pass costs twice as much.
    pub fn multiply_adds(&self) -> u64 {
        (self.images * self.tokens() * self.keys() * (self.qk_dim + self.v_dim)) as u64
    }

    /// Elements from one token of the qkv map to the next.
    pub fn row(&self) -> usize {
        2 * self.qk_dim + self.v_dim
    }

    /// Channels of one head: of its queries and keys, and of its values.
    pub fn head_dims(&self) -> [usize; 2] {
        [self.qk_dim / self.heads, self.v_dim / self.heads]
    }

    /// The channel of a token at which one head's query, key and value start.
    pub fn channels(&self, head: usize) -> [usize; 3] {
        let [d, dv] = self.head_dims();
        [head * d, self.qk_dim + head * d, 2 * self.qk_dim + head * dv]
    }
}
