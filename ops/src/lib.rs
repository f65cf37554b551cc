//! Differentiable operations.

mod broadcast;
pub mod case;
pub mod check;
mod reference;
pub mod registry;

pub mod add;
pub mod batch_norm;
pub mod conv2d;
pub mod dwconv;
pub mod layer_norm;
pub mod linear;

pub use add::add;
pub use batch_norm::{BatchStatistics, batch_norm_eval, batch_norm_train};
pub use conv2d::{Conv2d, conv2d};
pub use dwconv::dwconv;
pub use layer_norm::layer_norm;
pub use linear::linear;
