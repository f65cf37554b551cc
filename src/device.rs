//! Where a program computes, and in which precision: what the options `--device` and `--precision` say.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use model::BiFormer;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use tensor::cpu::isa::Isa;
use tensor::cuda::Gpu;
use tensor::{DType, Device};

/// A device by name: `cpu`, `cuda` (the first GPU), `cuda:1`, or `emulated`, a GPU emulated on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceName {
    /// The processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by number.
    Cuda(usize),
    /// The CPU in the role of a GPU: slow, and for checking the GPU's kernels without one.
    Emulated,
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = || text.strip_prefix("cuda:")?.parse().ok();
        match text {
            "cpu" => Ok(DeviceName::Cpu),
            "cuda" => Ok(DeviceName::Cuda(0)),
            "emulated" => Ok(DeviceName::Emulated),
            _ => number().map(DeviceName::Cuda).ok_or_else(|| {
                format!("there is no device \"{text}\"; there are cpu, cuda (or cuda:1, ...) and emulated")
            }),
        }
    }
}

impl TryFrom<String> for DeviceName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Cuda(0) => f.write_str("cuda"),
            DeviceName::Cuda(number) => write!(f, "cuda:{number}"),
            DeviceName::Emulated => f.write_str("emulated"),
        }
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        name.to_string()
    }
}

/// The precision of a pass. Parameters, gradients and moments are f32 in each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// All in f32
    #[default]
    F32,
    /// Maps in f32; matrix products on tensor cores, which round their operands to 10 bits of mantissa (GPU only)
    Tf32,
    /// Linear layers and convolutions multiply in bf16 and accumulate in f32; on a GPU, maps are bf16, too
    Bf16,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
        })
    }
}

/// The help of the option that names a device, of whichever command.
pub const DEVICE_HELP: &str =
    "Where to compute: cpu, cuda (or cuda:1, ...), or emulated (the CPU in the role of a GPU, for tests)";

/// Where and how to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Args)]
pub struct Compute {
    /// Where to compute.
    #[arg(long, value_name = "NAME", default_value_t, help = DEVICE_HELP)]
    pub device: DeviceName,
    /// The precision to compute in; weights are always f32.
    #[arg(long, value_enum, default_value_t)]
    pub precision: Precision,
}

impl Compute {
    /// Opens the device. Errors say what is missing.
    pub fn open(self) -> Result<Device> {
        let gpu = match self.device {
            DeviceName::Cpu if self.precision == Precision::Tf32 => {
                bail!("--precision tf32 needs a GPU; on the CPU there are f32 and bf16")
            }
            DeviceName::Cpu => return Ok(Device::Cpu),
            DeviceName::Cuda(number) => Gpu::open(number)?,
            DeviceName::Emulated => Gpu::emulated(0)?,
        };
        gpu.set_tf32(self.precision == Precision::Tf32);
        Ok(Device::Cuda(gpu))
    }

    /// What computes, as far as it can affect the bits of a result: a GPU's name, or the processor's instruction set
    /// (in f32 at most AVX-512, as the bf16 instructions are not used).
    pub fn computed_by(self, device: &Device) -> String {
        let best = if self.precision == Precision::Bf16 { Isa::Amx } else { Isa::Avx512 };
        match device {
            Device::Cpu => format!("cpu ({})", Isa::current().min(best).name()),
            Device::Cuda(_) => device.to_string(),
        }
    }

    /// The type of the maps between layers.
    pub fn maps(self) -> DType {
        if self.device == DeviceName::Cpu { DType::F32 } else { self.precision.factors() }
    }

    /// Opens the device and moves a model there. Errors: those of [`open`](Self::open) and of [`BiFormer::place`].
    pub fn place(self, model: &mut BiFormer) -> Result<Device> {
        let device = self.open()?;
        model.place(&device, self.precision.factors())?;
        Ok(device)
    }
}

impl Precision {
    /// The type in which layers multiply.
    fn factors(self) -> DType {
        if self == Precision::Bf16 { DType::Bf16 } else { DType::F32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for text in ["cpu", "cuda", "cuda:3", "emulated"] {
            assert_eq!(text.parse::<DeviceName>().map(|name| name.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("cuda:0".parse(), Ok(DeviceName::Cuda(0)));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU"] {
            assert!(text.parse::<DeviceName>().unwrap_err().contains("there are cpu, cuda"), "{text}");
        }
    }
}
