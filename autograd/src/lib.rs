//! Reverse-mode differentiation: a tape that one can read, and the means to check it.
//!
//! Operations append to a [`Tape`] what they compute, as a [`Var`], and how to go back, as a [`Rule`];
//! [`Tape::backward`] puts the gradients of inputs and [`Parameters`] into [`Gradients`]. The operations are in another
//! crate, `ops`. One of them, in short:
//!
//! ```
//! use autograd::{Gradients, InputGrads, Result, Rule, Tape, Var, rule_fields};
//! use tensor::Tensor;
//!
//! struct Square {
//!     x: Tensor,
//! }
//!
//! impl Rule for Square {
//!     rule_fields!("square", x);
//!
//!     fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
//!         let (dy, x) = (dy.to_vec::<f64>()?, self.x.to_vec::<f64>()?);
//!         let dx: Vec<f64> = dy.iter().zip(&x).map(|(dy, x)| 2.0 * x * dy).collect();
//!         grads.give(0, Tensor::from_slice(&dx, self.x.shape().clone())?)
//!     }
//! }
//!
//! fn square<'t>(x: &Var<'t>) -> Result<Var<'t>> {
//!     let y: Vec<f64> = x.value().to_vec::<f64>()?.iter().map(|x| x * x).collect();
//!     let y = Tensor::from_slice(&y, x.shape().clone())?;
//!     x.tape().record("square", &[x], y, || Square { x: x.value().clone() })
//! }
//!
//! # fn main() -> Result<()> {
//! let (tape, mut gradients) = (Tape::new(), Gradients::default());
//! let x = tape.input(Tensor::from_slice(&[3.0], [1])?);
//! tape.backward(&square(&x)?, &mut gradients)?;
//! assert_eq!(gradients.of(&x).unwrap().to_vec::<f64>()?, [6.0]);
//! # Ok(())
//! # }
//! ```
//!
//! | file | what it holds |
//! |---|---|
//! | `tape.rs` | [`Tape`], the list of what was computed; [`Var`], a value on it |
//! | `rule.rs` | [`Rule`], the backward rule of one operation |
//! | `input_grads.rs` | [`InputGrads`], where a rule puts its results |
//! | `backward.rs` | the reverse walk |
//! | `accumulated.rs` | what the walk has accumulated so far |
//! | `recompute.rs` | values that are computed again in the backward pass instead of being kept |
//! | `profile.rs` | [`Profile`]: where the time of a pass goes |
//! | `pieces.rs` | a batch in pieces that stay in the cache |
//! | `params.rs` | [`Parameters`], in one flat buffer |
//! | `gradients.rs` | [`Gradients`], in another one |
//! | `exact.rs` | dual numbers: exact derivatives of reference implementations |
//! | `gradcheck.rs` | what a backward rule is compared with: differences, and dual numbers |
//! | `error.rs` | [`Error`] |
#![deny(unsafe_code)] // `Slot::write_aside` alone is unsafe: its caller promises what a GPU reads and writes

mod accumulated;
mod backward;
mod error;
pub mod exact;
pub mod gradcheck;
mod gradients;
mod input_grads;
mod params;
mod pieces;
mod profile;
mod recompute;
mod rule;
mod tape;

pub use error::{Error, Result};
pub use gradients::Gradients;
pub use input_grads::{InputGrads, Slot};
pub use params::{Layout, ParamId, Parameters, ParametersBuilder};
pub use profile::{MultiplyAdds, Profile, ProfileLine, Work};
pub use rule::{Recompute, Rule};
pub use tape::{Node, Tape, Var};
// For `rule_fields!`, so that a rule can be written in a crate that does not name the tensor crate itself.
#[doc(hidden)]
pub use tensor;
