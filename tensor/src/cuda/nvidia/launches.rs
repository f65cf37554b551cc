//! Kernel launches. A kernel may start before the one before it in the stream has ended, which CUDA calls programmatic
//! dependent launch: its blocks take the room that the last blocks of that kernel leave, and wait there
//! (`await_previous_kernel` in `prelude.cuh`, with which every kernel begins). So launching it costs no time of its own.

use super::{Doing, compiler, machine};
use crate::Result;
use crate::cuda::driver::Extent;
use cudarc::driver::result;
use cudarc::driver::sys::{
    self, CUfunction, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig, CUstream,
};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

/// If this variable is set, no kernel starts before the previous one has ended: to see whether the overlap is at fault,
/// or what it gains.
const SERIAL_VARIABLE: &str = "BIFORMER_SERIAL";

/// The first generation that can do it. Kernels that are compiled for an older one do not wait.
const GENERATION: u32 = 90;
/// The first CUDA whose graphs have such dependencies: its programming guide, "Edge Data".
const OLDEST_DRIVER: (i32, i32) = (12, 3);

/// The kernels of a stream.
pub struct Launches {
    /// Whether kernels may overlap.
    may_overlap: bool,
    /// Whether the last request to the stream was a kernel, or a product after one. Only the end of a kernel can be
    /// awaited in another one: whatever else comes before it must be over when it starts.
    after_kernel: AtomicBool,
}

impl Launches {
    /// On a GPU of this compute capability.
    pub fn new(capability: (u32, u32)) -> Result<Self> {
        let can = compiler::generation(capability)? >= GENERATION && machine::driver_version()? >= OLDEST_DRIVER;
        let may_overlap = can && std::env::var_os(SERIAL_VARIABLE).is_none();
        Ok(Self { may_overlap, after_kernel: AtomicBool::new(false) })
    }

    /// Says that the stream is asked for something that is no kernel.
    pub fn interrupt(&self) {
        self.after_kernel.store(false, Ordering::Relaxed);
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// The values are those of the parameters that the function declares, and the kernel may run with them. It begins
    /// with `await_previous_kernel`.
    pub unsafe fn launch(
        &self,
        stream: CUstream,
        function: CUfunction,
        extent: Extent,
        values: &mut [*mut c_void],
    ) -> Result<()> {
        let Extent { grid: [x, y, z], threads, shared } = extent;
        let mut overlap = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: stream,
            attrs: &mut overlap,
            numAttrs: 1,
        };
        // SAFETY: the caller's promise; the driver copies all that it is given before it returns.
        let launched = unsafe {
            if self.may_overlap && self.after_kernel.load(Ordering::Relaxed) {
                sys::cuLaunchKernelEx(&config, function, values.as_mut_ptr(), std::ptr::null_mut()).result()
            } else {
                result::launch_kernel(function, (x, y, z), (threads, 1, 1), shared, stream, values)
            }
        };
        launched.doing("starting a kernel")?;
        self.after_kernel.store(true, Ordering::Relaxed);
        Ok(())
    }
}
