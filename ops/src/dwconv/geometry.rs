//! The extents of a depthwise convolution.

use std::ops::Range;

/// The extents of x, y (N, H, W, C) and of the kernel (C, 1, K, K), K one of [`SIZES`](super::SIZES).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub images: usize,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub kernel: usize,
}

impl Geometry {
    /// The rows of all images.
    pub fn rows(&self) -> usize {
        self.images * self.height
    }

    pub fn is_empty(&self) -> bool {
        self.rows() * self.width * self.channels == 0
    }

    pub fn taps(&self) -> usize {
        self.kernel * self.kernel
    }

    /// How far a kernel reaches beyond its centre.
    pub fn reach(&self) -> usize {
        self.kernel / 2
    }

    /// How many elements a non-empty map spans, from its first to its last.
    pub fn span(&self, stride: usize) -> usize {
        (self.rows() * self.width - 1) * stride + self.channels
    }

    /// The rows of the kernel that lie on the image when its centre is at row `row` of all N·H.
    pub fn kernel_rows(&self, row: usize) -> Range<usize> {
        let row = row % self.height;
        self.reach().saturating_sub(row)..(self.height + self.reach() - row).min(self.kernel)
    }
}
