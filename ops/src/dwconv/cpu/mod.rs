//! CPU kernels of [`dwconv`](super::dwconv), also run by operations that hold its operands inside wider
//! tensors: every operand has its own distance from one pixel to the next.
//!
//! Channels are the vector lanes. Forward, the sums of a few neighbouring pixels stay in registers while the
//! kernel passes, and each pixel of x is loaded once for all taps of a kernel row; for the weight's gradient
//! the sums of all taps stay while rows of pixels pass, or of as many kernel rows as the registers hold. Pixels
//! outside the image are skipped.

mod correlate;
mod line;
mod weight;

pub(crate) use correlate::{backward_input, forward};
pub(crate) use weight::backward_weight;

use std::ops::Range;
use tensor::cpu::parallel::Out;

/// The extents of x, y (N, H, W, C) and of the kernel (C, 1, K, K), K one of [`KERNELS`](super::KERNELS).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extents {
    pub images: usize,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub kernel: usize,
}

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

impl Extents {
    fn rows(&self) -> usize {
        self.images * self.height
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows() * self.width * self.channels == 0
    }

    pub(super) fn taps(&self) -> usize {
        self.kernel * self.kernel
    }

    /// How far a kernel reaches beyond its centre.
    fn reach(&self) -> usize {
        self.kernel / 2
    }

    /// The elements from the first of a map that is not empty to its last.
    pub(super) fn span(&self, stride: usize) -> usize {
        (self.rows() * self.width - 1) * stride + self.channels
    }

    /// The rows of the kernel that lie on the image when its centre is at row `row` of all N·H.
    fn kernel_rows(&self, row: usize) -> Range<usize> {
        let row = row % self.height;
        self.reach().saturating_sub(row)..(self.height + self.reach() - row).min(self.kernel)
    }
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
