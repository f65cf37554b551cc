//! What happens between a gradient and the next step: clipping, AdamW, and the moving average of the
//! weights; and how the learning rate changes over a run.
//!
//! | file | what it holds |
//! |---|---|
//! | `adamw.rs` | [`AdamW`]: moments, bias correction and decoupled weight decay in one sweep |
//! | `groups.rs` | which parameters weight decay applies to, and what their learning rates are |
//! | `clip.rs` | [`gradient_norm`], and the factor that clips it |
//! | `schedule.rs` | [`Schedule`]: warm-up and cosine, per step or as the published models were trained |
//! | `ema.rs` | [`Ema`]: the exponential moving average of the weights |
//! | `cuda/` | the same sweeps on a GPU, where a step of [`AdamW`] can be recorded |
//! | `error.rs` | [`Error`] |
//!
//! One training step, after the backward pass and once its tape is dropped:
//!
//! ```
//! # use optim::{AdamW, Ema, Result, Schedule};
//! # fn after_backward(
//! #     parameters: &mut autograd::Parameters, gradients: &mut autograd::Gradients, adamw: &mut AdamW,
//! #     ema: &mut Ema, schedule: &Schedule, step: u64,
//! # ) -> Result<()> {
//! let norm = adamw.step_clipped(parameters, gradients, schedule.lr(step), 5.0)?; // what it was before it was clipped
//! ema.update(parameters)?;
//! # Ok(())
//! # }
//! ```

mod adamw;
mod clip;
pub mod cuda;
mod ema;
mod error;
mod groups;
mod schedule;
#[cfg(test)]
mod testing;

pub use adamw::{AdamW, AdamWConfig, AdamWState};
pub use clip::gradient_norm;
pub use ema::{Ema, EmaConfig, EmaState};
pub use error::{Error, Result};
pub use schedule::{Schedule, ScheduleRule};
