//! Reverse-mode differentiation: a tape that one can read, and the means to check it.
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
