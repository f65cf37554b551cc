//! What a machine has: its driver, how new that and its libraries are, and its GPUs.

use super::{Doing, blas, compiler, driver_failure, failure, libraries};
use crate::Result;
use crate::cuda::Properties;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUresult};

/// The oldest CUDA that will do. Its driver and NVRTC have every function that is called here (cudarc panics where one
/// is missing), graphs keep the priorities of kernels (11.7), and NVRTC knows every instruction (11.8). Of CUDA 11,
/// cudarc finds NVRTC only by its name without a version.
const OLDEST_CUDA: (i32, i32) = (12, 0);

/// The GPUs that the driver knows, also those that are too old. [`Error::Gpu`](crate::Error::Gpu) where there is no
/// driver.
pub fn devices() -> Result<Vec<Properties>> {
    start_driver()?;
    let count = result::device::get_count().doing("counting the GPUs")?;
    (0..count).map(|ordinal| properties(result::device::get(ordinal).doing("asking for a GPU")?)).collect()
}

fn start_driver() -> Result<()> {
    libraries::driver()?;
    ensure_new_enough("the NVIDIA driver", driver_version()?)?;
    result::init().map_err(|error| match error.0 {
        CUresult::CUDA_ERROR_NO_DEVICE => failure("the NVIDIA driver is there, but no GPU is"),
        CUresult::CUDA_ERROR_STUB_LIBRARY => {
            failure("the libcuda.so that was found is a toolkit's stub: take its folder out of LD_LIBRARY_PATH")
        }
        _ => driver_failure("the NVIDIA driver does not start", error),
    })
}

/// The latest CUDA that the driver knows, (13, 0) for 13.0.
fn driver_version() -> Result<(i32, i32)> {
    let mut version = 0;
    // SAFETY: a valid pointer.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().doing("asking for the driver's version")?;
    Ok((version / 1000, version % 1000 / 10))
}

fn ensure_new_enough(what: &str, (major, minor): (i32, i32)) -> Result<()> {
    let (oldest, oldest_minor) = OLDEST_CUDA;
    if (major, minor) >= OLDEST_CUDA {
        return Ok(());
    }
    Err(failure(format!("{what} is of CUDA {major}.{minor}, and {oldest}.{oldest_minor} is the oldest that will do")))
}

/// A driver runs code from a CUDA of its own major version or an earlier one; for a later one it only reports that
/// something is invalid or not initialised.
pub(super) fn ensure_libraries_for_driver() -> Result<()> {
    let (driver, driver_minor) = driver_version()?;
    let compiler = compiler::version()?;
    for (library, (major, minor)) in [("NVRTC", compiler), ("cuBLASLt", blas::version())] {
        ensure_new_enough(library, (major, minor))?;
        if major > driver {
            return Err(failure(format!(
                "{library} is of CUDA {major}.{minor}, and the driver knows CUDA up to {driver}.{driver_minor}: update \
                 the driver, or install NVRTC and cuBLASLt of CUDA {driver}"
            )));
        }
    }
    Ok(())
}

fn properties(device: CUdevice) -> Result<Properties> {
    use CUdevice_attribute as Attribute;
    let attribute = |attribute| {
        // SAFETY: the device is one that the driver gave.
        unsafe { result::device::get_attribute(device, attribute) }.doing("asking a GPU what it is")
    };
    Ok(Properties {
        name: result::device::get_name(device).doing("asking a GPU for its name")?,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        // SAFETY: as above.
        memory: unsafe { result::device::total_mem(device) }.doing("asking a GPU for its memory")?,
        shared_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
    })
}
