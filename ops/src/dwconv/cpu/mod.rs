//! CPU kernels of [`dwconv`](super::dwconv), also run by operations that hold its operands inside wider tensors: every
//! operand has its own stride between pixels.
//!
//! Channels are the vector lanes. In the forward pass the sums of a few neighbouring pixels stay in registers while the
//! loop runs over the kernel, and each pixel of x is loaded once for all taps of a kernel row. For the weight's
//! gradient the sums of all taps, or of as many kernel rows as fit, stay in registers while the loop runs over rows of
//! pixels. Pixels outside the image are skipped.

mod correlate;
mod line;
mod weight;

pub(crate) use correlate::{backward_input, forward};
pub(crate) use weight::backward_weight;

use super::geometry::Geometry;
use tensor::cpu::parallel::Out;

/// An operand (N, H, W, C) that is read: pixel p, counted in (N, H, W) order, is `data[p * stride..][..C]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Map<'a, T> {
    pub data: &'a [T],
    pub stride: usize,
}

/// An operand (N, H, W, C) that is written, or added to; what lies between its pixels is left alone.
#[derive(Debug)]
pub(crate) struct MapMut<'a, T> {
    pub out: Out<'a, T>,
    pub stride: usize,
}

/// What x is convolved with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel<'a, T> {
    /// (C, 1, K, K)
    pub weight: &'a [T],
    /// Whether x itself is added to the result: as if the centre of the weight were greater by one.
    pub residual: bool,
}

/// Calls `$kernel::<T, A, K>` for a kernel of extent K.
macro_rules! of_extent {
    ($extent:expr, $kernel:ident::<$T:ident, $A:ident>($($argument:expr),* $(,)?)) => {
        match $extent {
            3 => $kernel::<$T, $A, 3>($($argument),*),
            5 => $kernel::<$T, $A, 5>($($argument),*),
            7 => $kernel::<$T, $A, 7>($($argument),*),
            other => unreachable!("invariant: a kernel of extent {other} was refused"),
        }
    };
}
use of_extent;
