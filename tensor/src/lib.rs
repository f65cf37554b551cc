//! Tensors: the ground floor. Nothing here knows of gradients.
//!
//! A [`Tensor`] is a shape and strides over a shared buffer, of a [`DType`], on a [`Device`]; an [`Error`] says what
//! does not fit.
//!
//! ```
//! use tensor::{Error, Tensor};
//! # fn main() -> tensor::Result<()> {
//! let mut x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?;
//! let column = x.slice(1, 2..3)?; // the same memory
//! assert_eq!(column.to_vec::<f32>()?, [3.0, 6.0]);
//! assert!(matches!(x.as_mut_slice::<f32>("example"), Err(Error::Shared { .. })));
//! drop(column);
//! x.as_mut_slice::<f32>("example")?[0] = 9.0;
//! # Ok(())
//! # }
//! ```
//!
//! | file | what it holds |
//! |---|---|
//! | `tensor/` | [`Tensor`]: shape and strides over a shared buffer; views that never copy; devices |
//! | `shape.rs`, `dtype.rs` | [`Shape`], broadcasting; [`DType`], [`Element`], [`Float`] |
//! | `buffer.rs`, `arena.rs` | 64-byte-aligned memory and the pool that recycles it; the allocator of places within it |
//! | `scratch.rs` | [`Scratch`]: the workspace of a kernel, from the same pool |
//! | `rng.rs` | [`rng::Philox`]: random numbers as a function of seed, stream and position |
//! | `device.rs` | [`Device`]: the machine's memory, or a GPU's |
//! | `cpu/` | what CPU kernels share: instruction sets, vector mathematics, GEMM, threads |
//! | `cuda/` | GPUs: memory, kernels, matrix products; and a device that is emulated on the CPU |
//! | `error.rs` | [`Error`]: one variant per kind of failure |
//! | `lock.rs` | [`lock()`]: locks that outlive a panic |
//! | `memory.rs` | [`memory`]: how much the machine has, and asking for more than it may have |
//!
//! Where the machine itself has no memory left, everything that makes a tensor panics, with a message that begins with
//! [`OUT_OF_MEMORY`]: as with `Vec`, nothing could go on. A GPU's memory running out is an error,
//! [`Error::OutOfMemory`], because a smaller batch may fit. Shapes with more bytes than can be counted are errors
//! wherever there is a `Result`.

mod arena;
mod buffer;
pub mod cpu;
pub mod cuda;
mod device;
mod dtype;
mod error;
mod lock;
pub mod memory;
pub mod rng;
mod scratch;
mod shape;
mod tensor;

pub use buffer::{
    ALIGNMENT, Buffer, OUT_OF_MEMORY, PoolStats, pool_stats, reset_peak, set_poison, settle_pool, trim_pool,
};
pub use device::Device;
pub use dtype::{DType, Element, Float};
pub use error::{Error, Result};
pub use half::bf16;
pub use lock::lock;
pub use scratch::Scratch;
pub use shape::{Shape, Strides};
pub use tensor::Tensor;
