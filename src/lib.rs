//! BiFormer from buffer to trained model.
//!
//! The map of the code, from the ground up. Each crate knows only those before it.
//!
//! | crate | what it holds |
//! |---|---|
//! | [`tensor`] | tensors, the buffer pool, random numbers, what CPU kernels share |
//! | [`autograd`] | the tape, backward, gradient checking |
//! | [`ops`] | every differentiable operation, one folder each, and the registry |
//! | [`model`] | BiFormer: configurations, blocks, weight files |
//! | [`optim`] | AdamW, schedules, clipping, the moving average of weights |
//! | [`data`] | data sets, transforms, the loader |
//! | this one | the trainer ([`trainer`]), its configuration ([`config`]), pictures ([`pictures`]), and the program's commands ([`commands`]) |

pub use autograd;
pub use data;
pub use model;
pub use ops;
pub use optim;
pub use tensor;

pub mod commands;
pub mod config;
#[cfg(doctest)]
mod guide;
pub mod pictures;
pub mod trainer;
