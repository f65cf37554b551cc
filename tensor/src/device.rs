//! Where tensors are.

use crate::Result;
use crate::cuda::Gpu;
use std::fmt;
use std::sync::Arc;

/// The machine's memory, or that of a GPU.
#[derive(Clone, Debug, Default)]
pub enum Device {
    /// The processor's.
    #[default]
    Cpu,
    /// A GPU's.
    Cuda(Arc<Gpu>),
}

impl Device {
    /// Waits until all work on the device has finished, which on the CPU it always has. Errors: those of that work.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Device::Cpu => Ok(()),
            Device::Cuda(gpu) => gpu.synchronize(),
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Device::Cpu, Device::Cpu) => true,
            (Device::Cuda(a), Device::Cuda(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(gpu) => write!(f, "cuda ({})", gpu.properties().name),
        }
    }
}
