//! How long each of the algorithms takes that cuBLASLt recommends for a product: it only estimates that, and its first
//! choice is not always the fastest.

use super::plan::{Plan, PlanKey};
use super::{doing, driver_failure};
use crate::Result;
use cudarc::cublaslt::sys::cublasLtHandle_t;
use cudarc::driver::{result, sys::CUstream};
use std::fmt::Write;
use std::time::Instant;

/// How often an algorithm is run before it is timed, and then. Together the runs take far longer than the host does to
/// request them.
const WARM: u32 = 3;
const TIMED: u32 = 30;

/// What the operands' bytes are: numbers that are neither zero nor very large in any type. A GPU multiplies zeros faster.
const BYTE: u8 = 0x3c;

/// Memory for a product's operands, freed when this value goes.
struct Memory(u64);

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it is this value's, and the stream has been waited for. There is nobody to tell of an error.
        let _ = unsafe { result::free_sync(self.0) };
    }
}

/// For each algorithm how busy it keeps the GPU, the workspace that it takes, and its time, measured on operands of the
/// trial's own: `5.94 waves (0 kB, 48.1 µs), 7.92 waves (0 kB, 51.0 µs)`.
///
/// # Safety
/// As for [`Plan::multiply`], for a plan that was made for this key.
pub unsafe fn describe(
    key: &PlanKey,
    plan: &Plan,
    handle: cublasLtHandle_t,
    workspace: u64,
    stream: CUstream,
) -> Result<String> {
    let failed = |error| driver_failure("a product on trial", error);
    let bytes = key.product(0).1 as usize;
    // SAFETY: the memory is used as what it is.
    let memory = Memory(unsafe { result::malloc_sync(bytes) }.map_err(failed)?);
    // SAFETY: it has this many bytes, and is waited for below.
    unsafe { result::memset_d8_async(memory.0, BYTE, bytes, stream) }.map_err(failed)?;
    let (product, _) = key.product(memory.0);
    let mut said = String::new();
    for (place, choice) in plan.algorithms.iter().enumerate() {
        let comma = if place == 0 { "" } else { ", " };
        let _ = write!(said, "{comma}{:.2} waves ({} kB, ", choice.wavesCount, choice.workspaceSize / 1000);
        let run = |times| -> Result<()> {
            for _ in 0..times {
                // SAFETY: the operands lie in this value's memory, the rest is the caller's promise.
                doing("a product on trial", unsafe { plan.multiply(place, &product, handle, workspace, stream) })?;
            }
            // SAFETY: the stream is the caller's.
            unsafe { result::stream::synchronize(stream) }.map_err(failed)
        };
        let took = run(WARM).and_then(|()| {
            let start = Instant::now();
            run(TIMED).map(|()| start.elapsed().as_secs_f64() * 1e6 / f64::from(TIMED))
        });
        let _ = match took {
            Ok(micros) => write!(said, "{micros:.1} µs)"),
            Err(_) => write!(said, "refused)"),
        };
    }
    Ok(said)
}
