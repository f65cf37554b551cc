//! `biformer devices`.

use super::Status;
use crate::printing::plural;
use anyhow::Result;
use clap::Args;
use tensor::Error;
use tensor::cpu::isa::Isa;
use tensor::cuda::nvidia;
use tensor::cuda::{Gpu, Properties};

#[derive(Debug, Args)]
pub struct Arguments {}

pub fn run(_: &Arguments) -> Result<Status> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    say!("cpu       {threads} thread{}, {}", plural(threads), Isa::current().name());
    match nvidia::devices() {
        Ok(gpus) if gpus.is_empty() => say!("cuda      none: the NVIDIA driver is there, but no GPU is"),
        Ok(gpus) => {
            for (number, Properties { name, capability: (major, minor), multiprocessors, memory, .. }) in
                gpus.into_iter().enumerate()
            {
                let memory = memory as f64 / 1e9;
                say!(
                    "cuda:{number:<4} {name}, compute capability {major}.{minor}, {multiprocessors} multiprocessors, {memory:.0} GB"
                );
                // Whatever else is needed to use the GPU shows only when it is opened.
                if let Err(error) = Gpu::open(number) {
                    say!("          cannot be used: {error}");
                }
            }
        }
        Err(error) => say!("cuda      none: {}", reason(error)),
    }
    match Gpu::emulated(0) {
        Ok(_) => say!("emulated  the CPU in the role of a GPU, for checking kernels"),
        Err(error) => say!("emulated  none: {}", reason(error)),
    }
    Ok(Status::Done)
}

/// What is missing, without the device's name, which is already printed before it.
fn reason(error: Error) -> String {
    match error {
        Error::Gpu { message, .. } => message,
        other => other.to_string(),
    }
}
