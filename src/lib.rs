//! BiFormer from buffer to trained model.
//!
//! The map of the code, from the ground up. Each crate knows only those before it.
//!
//! | crate | what it holds |
//! |---|---|
//! | [`tensor`] | tensors, the buffer pool, random numbers, what CPU kernels share; GPUs, and a GPU emulated on the CPU |
//! | [`autograd`] | the tape, backward, gradient checking |
//! | [`ops`] | every differentiable operation, one folder each, and the registry |
//! | [`model`] | BiFormer: configurations, blocks, weight files |
//! | [`optim`] | AdamW, schedules, clipping, the moving average of weights |
//! | [`data`] | data sets, transforms, the loader |
//! | this one | the trainer ([`trainer`]), its configuration ([`config`]), where it computes ([`device`]), on which threads ([`threads`]), how batches come there ([`staging`]), inference ([`inference`]), the program's commands ([`commands`]), and what these share: memory, pictures, notes on data, paths, folder locks, signals, printing |
//!
//! A gradient, in a few lines:
//!
//! ```
//! use biformer::prelude::*;
//!
//! # fn main() -> biformer::autograd::Result<()> {
//! let tape = Tape::new();
//! let x = tape.input(Tensor::from_slice(&[-1.0, 2.0], [2])?);
//! let loss = ops::sum(&ops::gelu(&x)?, &[0], false)?;
//! let mut gradients = Gradients::default();
//! tape.backward(&loss, &mut gradients)?;
//! println!("{:?}", gradients.of(&x));
//! # Ok(())
//! # }
//! ```
//!
//! A whole training run, as the program does it:
//!
//! ```no_run
//! use biformer::prelude::*;
//! use std::sync::atomic::AtomicBool;
//!
//! # fn main() -> anyhow::Result<()> {
//! let mut config = RunConfig::for_model("nano")?;
//! config.epochs = 12;
//! let mut trainer = Trainer::new(config)?;
//! println!("{:?}", trainer.run(&AtomicBool::new(false))?);
//! trainer.draw()?;
//! # Ok(())
//! # }
//! ```
//!
//! The folder `docs/` leads through all of it in ten chapters, and `examples/` has eight pages to run.

pub use autograd;
pub use data;
pub use model;
pub use ops;
pub use optim;
pub use tensor;

pub mod commands;
pub mod config;
mod data_notes;
pub mod device;
mod folder_lock;
#[cfg(doctest)]
mod guide;
pub mod inference;
mod memory;
mod paths;
mod pictures;
mod printing;
mod signals;
pub mod staging;
pub mod threads;
pub mod trainer;

pub use printing::set_quiet;

/// What a program that uses this library begins with: `use biformer::prelude::*;`
pub mod prelude {
    pub use crate::autograd::{Gradients, InputGrads, Parameters, ParametersBuilder, Rule, Tape, Var};
    pub use crate::config::RunConfig;
    pub use crate::data::{self, Augmentation, Loader, LoaderConfig, Split, Transform};
    pub use crate::model::{BiFormer, Builder, Mode, ModelConfig, Pass, TensorFile, preset};
    pub use crate::ops;
    pub use crate::optim::{AdamW, AdamWConfig, Ema, EmaConfig, Schedule, ScheduleRule};
    pub use crate::tensor::{DType, Device, Shape, Tensor};
    pub use crate::trainer::{Trainer, trained::TrainedModel};
}
