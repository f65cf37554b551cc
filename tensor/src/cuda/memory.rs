//! Memory of a device, and borrowed parts of it.

use super::Gpu;
use super::pool::Block;
use crate::{DType, Result};
use std::marker::PhantomData;
use std::sync::Arc;

/// A block of a device's memory. Dropping it gives it back to the device's pool.
#[derive(Debug)]
pub struct Memory {
    gpu: Arc<Gpu>,
    block: Block,
    len: usize,
}

impl Memory {
    /// `len` bytes with arbitrary contents. [`Error::OutOfMemory`](crate::Error::OutOfMemory) where there are fewer.
    pub(crate) fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        Ok(Self { gpu: Arc::clone(gpu), block: gpu.take(len)?, len })
    }

    /// Where it begins.
    pub(crate) fn address(&self) -> u64 {
        self.block.address
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The device.
    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.gpu.give_back(self.block, self.len);
    }
}

/// A part of a device's memory that is borrowed to be written.
#[derive(Debug)]
pub struct Span<'a> {
    gpu: &'a Arc<Gpu>,
    address: u64,
    bytes: usize,
    borrowed: PhantomData<&'a mut u8>,
}

impl<'a> Span<'a> {
    pub(crate) fn new(gpu: &'a Arc<Gpu>, address: u64, bytes: usize) -> Self {
        Self { gpu, address, bytes, borrowed: PhantomData }
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.gpu
    }

    /// Splits the span in two at a byte offset. Panics if the offset is beyond the end.
    pub fn split_at(self, bytes: usize) -> (Self, Self) {
        assert!(bytes <= self.bytes, "a span of {} bytes cannot be split at {bytes}", self.bytes);
        (Span::new(self.gpu, self.address, bytes), Span::new(self.gpu, self.address + bytes as u64, self.bytes - bytes))
    }

    /// The span as the place of a gradient. Panics if it does not begin where such an element can.
    pub fn out(&mut self, dtype: DType, accumulate: bool) -> Out<'_> {
        assert!(self.address.is_multiple_of(dtype.size() as u64), "a span that begins within an element");
        Out::new(self.gpu, self.address, self.bytes / dtype.size(), dtype, accumulate)
    }
}

/// Where a kernel puts one of its gradients, on a device: see [`crate::cpu::parallel::Out`].
#[derive(Debug)]
pub struct Out<'a> {
    gpu: &'a Arc<Gpu>,
    address: u64,
    count: usize,
    dtype: DType,
    /// Whether there is something already that must be kept.
    pub accumulate: bool,
    borrowed: PhantomData<&'a mut u8>,
}

impl<'a> Out<'a> {
    pub(crate) fn new(gpu: &'a Arc<Gpu>, address: u64, count: usize, dtype: DType, accumulate: bool) -> Self {
        Self { gpu, address, count, dtype, accumulate, borrowed: PhantomData }
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.gpu
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The number of elements.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Their type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The elements from `start` on, `count` of them. Panics when there are fewer.
    pub fn part(&mut self, start: usize, count: usize) -> Out<'_> {
        assert!(start.checked_add(count).is_some_and(|end| end <= self.count), "a part of an output");
        let address = self.address + (start * self.dtype.size()) as u64;
        Out { address, count, borrowed: PhantomData, ..*self }
    }

    /// Writes zeros.
    pub fn clear(&mut self) -> Result<()> {
        let stream = self.gpu.stream_to_ask()?;
        // SAFETY: the memory is borrowed to be written, and as long.
        unsafe { self.gpu.driver.fill(stream, self.address, 0, self.count * self.dtype.size()) }
    }

    /// [`Error::DType`](crate::Error::DType) unless the elements are of this type.
    pub fn ensure_dtype(&self, op: &'static str, dtype: DType) -> Result<()> {
        self.dtype.ensure_dtype(op, dtype)
    }
}
