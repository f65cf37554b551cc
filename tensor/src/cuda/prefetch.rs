//! Copies from host memory that overlap with the device's work: what is needed next is transferred while it computes.
//!
//! The bytes move in three steps. The host writes them to page-locked memory. From there they are copied, on a separate
//! stream, to a staging block of the device that nothing else uses. When they are needed, they are copied from that
//! block to their destination on the work stream, which is cheap, because device memory is many times as fast as the
//! bus. So recorded work always reads the same addresses, even while the next bytes are arriving.

use super::locked::Locked;
use super::{Gpu, Memory, Stream};
use crate::{Error, Result, Tensor};
use rayon::prelude::*;
use std::fmt;
use std::sync::Arc;

/// Bytes on their way to a device: [`Prefetch::send`], then [`Prefetch::receive`].
pub struct Prefetch {
    host: Host,
    block: Memory,
    /// The bytes that were sent and have not been received.
    sent: Option<usize>,
}

/// What the host writes and the device fetches.
enum Host {
    Locked(Locked),
    /// Pageable memory, if page-locked memory cannot be allocated. Sending then takes the host longer; nothing else
    /// differs.
    Paged(Vec<u8>),
}

impl Host {
    fn new(gpu: &Gpu, bytes: usize) -> Result<Self> {
        let locked = gpu.driver.allocate_locked(bytes)?;
        Ok(locked.map_or_else(|| Host::Paged(vec![0; bytes]), Host::Locked))
    }

    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Host::Locked(memory) => memory,
            Host::Paged(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Prefetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefetch").field("block", &self.block).field("sent", &self.sent).finish_non_exhaustive()
    }
}

impl Prefetch {
    /// A prefetch buffer for up to `bytes` at a time. Errors: [`Error::OutOfMemory`] where the device has no room for
    /// them; [`Error::Gpu`]. Panics for more bytes than can be counted.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        gpu.ensure_in_order("creating a prefetch buffer")?;
        let block = Memory::new(gpu, bytes).map_err(|error| error.of_tensor("a prefetch buffer".into()))?;
        // Earlier work may still be using the block.
        gpu.driver.order(Stream::Work, Stream::Copies)?;
        Ok(Self { host: Host::new(gpu, bytes)?, block, sent: None })
    }

    /// Sends these pieces, one after the other, and discards any bytes that were sent but not received. When this
    /// returns, the pieces may be changed; the copy to the device continues asynchronously. Errors: [`Error::Argument`]
    /// for more bytes than there is room for; [`Error::Gpu`], also while work is recorded.
    pub fn send(&mut self, pieces: &[&[u8]]) -> Result<()> {
        let bytes = pieces.iter().map(|piece| piece.len()).sum();
        if bytes > self.block.len() {
            let message = format!("{bytes} bytes were given, but there is room for {}", self.block.len());
            return Err(Error::argument("send", message));
        }
        let gpu = self.block.gpu();
        gpu.ensure_in_order("a copy from the machine's memory")?;
        self.sent = None;
        // The previous copy from the page-locked memory must be complete.
        gpu.driver.finish(Stream::Copies)?;
        let mut rest = &mut self.host.bytes()[..bytes];
        for piece in pieces {
            let (own, after) = rest.split_at_mut(piece.len());
            copy(piece, own);
            rest = after;
        }
        // SAFETY: the block is as long. Whoever used it before is done: `new` and `receive` see to it. The host's
        // memory is neither written nor given back before the copy is done: this function and `drop` see to it.
        unsafe { gpu.driver.send(&self.host.bytes()[..bytes], self.block.address())? };
        self.sent = Some(bytes);
        Ok(())
    }

    /// Copies the bytes that were sent to contiguous tensors on the device, one after another. The host does not wait;
    /// all later work on the device sees the bytes. Errors: [`Error::Argument`] unless exactly as many were sent;
    /// [`Error::Device`], [`Error::NotContiguous`]; [`Error::Shared`] while another tensor shares the buffer;
    /// [`Error::Gpu`], also while work is recorded.
    pub fn receive<'t>(&mut self, tensors: impl IntoIterator<Item = &'t mut Tensor>) -> Result<()> {
        let gpu = self.block.gpu();
        gpu.ensure_in_order("a copy from the machine's memory")?;
        let places = tensors.into_iter().map(|tensor| Ok((tensor.address_mut("receive", gpu)?, tensor.bytes())));
        let places: Vec<(u64, usize)> = places.collect::<Result<_>>()?;
        let bytes = places.iter().map(|(_, bytes)| bytes).sum();
        if self.sent != Some(bytes) {
            let message = format!("{bytes} bytes are expected, and {} were sent", self.sent.unwrap_or(0));
            return Err(Error::argument("receive", message));
        }
        self.sent = None;
        gpu.driver.order(Stream::Copies, Stream::Work)?;
        let mut from = self.block.address();
        for (to, bytes) in places {
            // SAFETY: the tensor is as long, and nobody else sees it; the block has as many bytes from here on.
            unsafe { gpu.driver.copy(Stream::Work, from, to, bytes)? };
            from += bytes as u64;
        }
        // The next transfer must not overwrite the block before these copies are done.
        gpu.driver.order(Stream::Work, Stream::Copies)
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        let gpu = self.block.gpu();
        // Before the memory goes to somebody else. There is nobody to tell of an error.
        let _ = gpu.driver.finish(Stream::Copies);
        if let Host::Locked(memory) = std::mem::replace(&mut self.host, Host::Paged(vec![])) {
            // SAFETY: nothing is on its way from there any more.
            unsafe { gpu.driver.free_locked(memory) };
        }
    }
}

/// Copies in parallel: one thread does not use the full memory bandwidth, and a GPU would soon wait for its next batch.
fn copy(from: &[u8], to: &mut [u8]) {
    const PIECE: usize = 1 << 20;
    to.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE)).for_each(|(to, from)| to.copy_from_slice(from));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn bytes_come_from_either_kind_of_memory() -> Result<()> {
        let Some(gpu) = Gpu::for_tests(1) else { return Ok(()) };
        let device = Device::Cuda(Arc::clone(&gpu));
        let numbers = |round: usize, count: usize| -> Vec<f32> { (0..count).map(|i| (i + 7 * round) as f32).collect() };
        for locked in [true, false] {
            let mut prefetch = Prefetch::new(&gpu, 4 * 300_010)?;
            let paged = Host::Paged(vec![0; 4 * 300_010]);
            if !locked && let Host::Locked(memory) = std::mem::replace(&mut prefetch.host, paged) {
                // SAFETY: it was just locked, and nothing is on its way from there.
                unsafe { gpu.driver.free_locked(memory) };
            }
            let mut tensors = [Tensor::zeros_on(&device, [300_000], crate::DType::F32)?, Tensor::full([10], 1f32)];
            tensors[1] = tensors[1].to_device(&device)?;
            for round in 0..3 {
                let expected = [numbers(round, 300_000), numbers(round + 1, 10)];
                prefetch.send(&expected.each_ref().map(|numbers| bytemuck::cast_slice(numbers)))?;
                prefetch.receive(&mut tensors)?;
                assert_eq!([tensors[0].to_vec::<f32>()?, tensors[1].to_vec::<f32>()?], expected, "{locked}, {round}");
            }
        }
        Ok(())
    }
}
