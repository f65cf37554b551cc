//! Which of the algorithms that cuBLASLt recommends for a product is the fastest. It only estimates that: its first
//! choice has been seen to take up to 1.7 times as long as its best one (docs/performance-history.md).
//!
//! Only those take part whose results have the first choice's bits: most of them add up the same products in the same
//! order, and differ in how they divide the result among blocks. So bits depend on no clock.

use super::plan::{Plan, PlanKey};
use super::{Queue, doing, driver_failure, is_refusal};
use crate::Result;
use crate::rng::Philox;
use cudarc::cublaslt::sys::cublasLtHandle_t;
use cudarc::driver::{
    result,
    sys::{CUstream, CUstreamCaptureStatus_enum},
};
use std::fmt;
use std::time::{Duration, Instant};

/// How often an algorithm is run to be timed; less often, so that it takes about as long as this, if it is slow.
const TIMES: u32 = 20;
const LONG: Duration = Duration::from_millis(3);

/// Of the first choice's time, how much another one may take to be preferred: the rest may be noise.
const SHARE: f64 = 0.95;

/// Multiply-adds below which a product takes as long as its start, whatever the algorithm.
const FEW: usize = 1 << 24;

/// Bytes of random numbers with which the operands are filled, again and again, and of each slice of the result that is
/// compared, at so many places.
const PATTERN: usize = 1 << 20;
const SLICE: usize = 1 << 16;
const SLICES: usize = 16;

/// Memory for a product's operands, at this address, freed when this value goes and the stream that uses it has done
/// so.
struct Memory(u64, CUstream);

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it is this value's, and nothing uses it any more. There is nobody to tell of an error.
        unsafe {
            let _ = result::stream::synchronize(self.1);
            let _ = result::free_sync(self.0);
        }
    }
}

/// What an algorithm did.
#[derive(Clone, Copy)]
pub enum Tried {
    /// It had so many waves of blocks and this workspace, and took so many µs for the first choice's bits or others.
    Took { waves: f32, workspace: usize, micros: f64, same_bits: bool },
    /// cuBLASLt refused it.
    Refused,
}

impl Tried {
    fn micros(self) -> Option<f64> {
        match self {
            Self::Took { micros, same_bits: true, .. } => Some(micros),
            _ => None,
        }
    }
}

/// `5.94 waves (0 kB, 48.1 µs)`
impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Took { waves, workspace, micros, same_bits } = self else { return f.write_str("refused") };
        let others = if *same_bits { "" } else { ", other bits" };
        write!(f, "{waves:.2} waves ({} kB, {micros:.1} µs{others})", workspace / 1000)
    }
}

/// Whether the choice among algorithms matters for such a product.
pub fn matters(key: &PlanKey) -> bool {
    key.multiply_adds() >= FEW
}

/// The place of the algorithm to be used, by what all of them did.
pub fn best(tried: &[Tried]) -> usize {
    let times = tried.iter().enumerate().filter_map(|(place, tried)| Some((place, tried.micros()?)));
    let Some((first, usual)) = times.clone().next() else { return 0 };
    let faster = times.min_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, micros)| *micros < SHARE * usual);
    faster.map_or(first, |(place, _)| place)
}

/// Tries each algorithm of a plan, on the first of the streams, on operands of the trial's own: numbers of both signs
/// and different sizes, so that sums in different orders differ. Fails where there is no memory for these, and while a
/// stream is being captured.
///
/// # Safety
/// As for [`Plan::multiply`], for a plan that was made for this key.
pub unsafe fn of(key: &PlanKey, plan: &Plan, handle: cublasLtHandle_t, queues: &[Queue; 2]) -> Result<Vec<Tried>> {
    const WHAT: &str = "a product on trial";
    let (queue, stream) = (queues[0], queues[0].stream);
    let failed = |error| driver_failure(WHAT, error);
    // SAFETY: the stream is the caller's.
    let status = unsafe { result::stream::is_capturing(stream) }.map_err(failed)?;
    if status != CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE {
        return Err(super::failure("products are not tried while work is recorded"));
    }
    // Nothing else runs while times are taken.
    // SAFETY: as above.
    queues.iter().try_for_each(|queue| unsafe { result::stream::synchronize(queue.stream) }).map_err(failed)?;
    let (bytes, size) = (key.product(0).1 as usize, key.bytes_of_result());
    let slice = size.min(SLICE);
    // Declared before the memory, which waits for all copies when it goes.
    let (pattern, mut result) = (random_numbers(), vec![0; slice * SLICES]);
    // SAFETY: the memory is used as what it is.
    let memory = Memory(unsafe { result::malloc_sync(bytes) }.map_err(failed)?, stream);
    let finish = || {
        // SAFETY: as above.
        unsafe { result::stream::synchronize(stream) }.map_err(failed)
    };
    let mut filled = bytes.min(PATTERN);
    // SAFETY: these are bytes of the memory, and the pattern lives until they have been written.
    unsafe {
        result::memcpy_htod_async(memory.0, &pattern[..filled], stream).map_err(failed)?;
        while filled < bytes {
            let more = filled.min(bytes - filled);
            result::memcpy_dtod_async(memory.0 + filled as u64, memory.0, more, stream).map_err(failed)?;
            filled += more;
        }
    }
    finish()?;
    let (product, _) = key.product(memory.0);
    let start = product.c.address;
    // SAFETY: the operands lie in this value's memory, the rest is the caller's promise.
    let run = |choice| unsafe { plan.multiply(choice, &product, handle, queue) };
    let mut first: Option<Vec<u8>> = None;
    let mut tried = Vec::with_capacity(plan.algorithms.len());
    for (number, choice) in plan.algorithms.iter().enumerate() {
        // What an algorithm leaves out must not look right.
        // SAFETY: the result lies in the memory.
        unsafe { result::memset_d8_async(start, 0xff, size, stream) }.map_err(failed)?;
        if let Err(error) = run(number) {
            // If the first one only lacked memory, say, the next one's bits must not become the right ones.
            if first.is_none() && !is_refusal(&error) {
                return doing(WHAT, Err(error));
            }
            tried.push(Tried::Refused);
            continue;
        }
        for (i, to) in result.chunks_mut(slice).enumerate() {
            // From the first bytes to the last.
            let from = start + ((size - slice) * i / (SLICES - 1)) as u64;
            // SAFETY: these are bytes of the result, and `to` is waited for.
            unsafe { result::memcpy_dtoh_async(to, from, stream) }.map_err(failed)?;
        }
        finish()?;
        let same_bits = *first.get_or_insert_with(|| result.clone()) == result;
        let seconds = |times| {
            let began = Instant::now();
            (0..times).try_for_each(|_| doing(WHAT, run(number)))?;
            finish().map(|()| began.elapsed().as_secs_f64() / f64::from(times))
        };
        let times = (LONG.as_secs_f64() / seconds(1)?).clamp(1.0, f64::from(TIMES));
        let micros = seconds(times as u32)? * 1e6;
        tried.push(Tried::Took { waves: choice.wavesCount, workspace: choice.workspaceSize, micros, same_bits });
    }
    Ok(tried)
}

/// Numbers in bf16 from 2⁻⁷ to 2, or from −2 to −2⁻⁷. As halves of f32, or quarters of f64, they are harmless as well.
fn random_numbers() -> Vec<u8> {
    let mut random = Philox::new(0, 0).sequence();
    let numbers = (0..PATTERN / 2).flat_map(|_| {
        let bits = random.word() as u16;
        (bits & 0x8000 | 0x3c00 | bits & 0x03ff).to_ne_bytes()
    });
    numbers.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_with_the_first_ones_bits_is_used() {
        let took = |micros, same_bits| Tried::Took { waves: 1.0, workspace: 0, micros, same_bits };
        assert_eq!(best(&[took(80.0, true), took(60.0, true), took(50.0, false), took(61.0, true)]), 1);
        assert_eq!(best(&[took(80.0, true), took(79.0, true)]), 0, "that may be noise");
        assert_eq!(best(&[Tried::Refused, took(80.0, true), took(79.0, true), took(70.0, true)]), 3);
        assert_eq!(best(&[Tried::Refused, took(80.0, true)]), 1);
        assert_eq!(best(&[Tried::Refused]), 0);
        assert_eq!(best(&[]), 0);
    }
}
