//! Pixels of a row, in registers of channels.

use super::Map;
use tensor::Float;
use tensor::cpu::registers::{self, Vector};

/// One row of a map, from one of the channels on.
#[derive(Clone, Copy)]
pub(super) struct Line<'a, T> {
    data: &'a [T],
    stride: usize,
    width: usize,
}

impl<'a, T: Float> Line<'a, T> {
    /// Panics unless the map has `lanes` elements from `channel` on for each of the row's pixels.
    #[inline(always)]
    pub(super) fn new(map: Map<'a, T>, row: usize, width: usize, channel: usize, lanes: usize) -> Self {
        let data = &map.data[row * width * map.stride + channel..][..(width - 1) * map.stride + lanes];
        Line { data, stride: map.stride, width }
    }

    /// Some channels of a pixel, if it is on the image; columns left of it have wrapped around.
    ///
    /// # Safety
    /// As of [`Vector::zero`], and `COUNT` registers must hold no more lanes than the line was made for.
    #[inline(always)]
    pub(super) unsafe fn load<V: Vector<T>, const COUNT: usize>(&self, column: usize) -> Option<[V; COUNT]> {
        (column < self.width).then(|| {
            // SAFETY: `new` has seen that the pixel has as many elements, and the caller vouches for the instruction
            // set.
            std::array::from_fn(|i| unsafe {
                registers::load(self.data.as_ptr().add(column * self.stride + i * V::LANES))
            })
        })
    }
}
