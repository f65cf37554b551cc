//! Differentiable operations.

mod broadcast;
pub mod case;
pub mod check;
mod reference;
pub mod registry;

pub mod add;
pub mod cross_entropy;
pub mod drop_path;
pub mod dropout;
pub mod gelu;
pub mod layer_norm;
pub mod linear;
pub mod matmul;
pub mod mean_pool;
pub mod region_pool;
pub mod soft_cross_entropy;
pub mod softmax;

pub use add::add;
pub use cross_entropy::cross_entropy;
pub use drop_path::drop_path;
pub use dropout::dropout;
pub use gelu::gelu;
pub use layer_norm::layer_norm;
pub use linear::linear;
pub use matmul::matmul;
pub use mean_pool::mean_pool;
pub use region_pool::region_pool;
pub use soft_cross_entropy::soft_cross_entropy;
pub use softmax::softmax;
