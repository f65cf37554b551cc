//! The extents of a pooling by regions.

use crate::Regions;
use tensor::{Error, Float, Result, Tensor};

/// How a map (N, H, W, C) falls into regions.
#[derive(Clone, Copy)]
pub(crate) struct Geometry {
    /// N.
    pub images: usize,
    pub regions: Regions,
    /// C.
    pub channels: usize,
}

impl Geometry {
    /// How `grid` cuts a map x (N, H, W, C).
    pub fn new(op: &'static str, x: &Tensor, grid: [usize; 2]) -> Result<Self> {
        let [images, height, width, channels] = x.dims(op, "x (N, H, W, C)")?;
        if height == 0 || width == 0 {
            return Err(Error::shape(op, "a map of one token or more, (N, H, W, C)", x.shape()));
        }
        Ok(Self { images, regions: Regions::cut(op, [height, width], grid)?, channels })
    }

    /// 1/(r_h·r_w), the weight of a token in the mean.
    pub fn weight<T: Float>(&self) -> T {
        T::one() / T::of(self.regions.tokens() as f64)
    }
}

/// The steps from one image, one row, one token of a map (N, H, W, C) to the next. [`Error::NotContiguous`] unless its
/// channels lie side by side.
pub(crate) fn token_strides(op: &'static str, x: &Tensor) -> Result<[usize; 3]> {
    let [.., channels] = x.dims::<4>(op, "x (N, H, W, C)")?;
    match x.strides() {
        &[image, row, token, channel] if channel == 1 || channels <= 1 => Ok([image, row, token]),
        strides => Err(Error::NotContiguous { op, shape: x.shape().to_string(), strides: strides.to_vec() }),
    }
}
