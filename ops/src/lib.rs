//! Differentiable operations: a folder each, always built the same way (`ops/README.md` in the repository tells how to
//! add one).
//!
//! ```
//! use autograd::Tape;
//! use tensor::Tensor;
//! # fn main() -> autograd::Result<()> {
//! let tape = Tape::inference();
//! let x = tape.constant(Tensor::from_slice(&[0.0, 0.0, 1.0, 1.0], [2, 2])?);
//! assert_eq!(ops::softmax(&x)?.value().to_vec::<f64>()?, [0.5; 4]);
//!
//! // Values and gradients of all its cases, against its definition and against differences.
//! assert!(ops::check::check(ops::registry::find("softmax").unwrap()).passed());
//! # Ok(())
//! # }
//! ```
//!
//! Beside the errors that an operation lists, all give [`tensor::Error::Device`] for operands on different devices, and
//! on a GPU its errors.
//!
//! | elsewhere in this crate | what it holds |
//! |---|---|
//! | `registry.rs` | the list of all operations |
//! | `case.rs` | cases: inputs on which an operation is checked, compared and timed |
//! | `check/` | the check of an operation from its cases, of its kernels on a GPU, and the check of the check |
//! | `regions.rs` | [`Regions`], how a map is cut into a grid of them |
//! | `broadcast/`, `give.rs`, `axis_range.rs`, `epsilon.rs`, `reference.rs` | what several operations share |

mod axis_range;
mod broadcast;
pub mod case;
pub mod check;
mod epsilon;
mod give;
mod reference;
mod regions;
pub mod registry;

pub mod add;
pub mod attention;
pub mod batch_norm;
pub mod bra;
pub mod concat;
pub mod contiguous;
pub mod conv2d;
pub mod cross_entropy;
pub mod drop_path;
pub mod dropout;
pub mod dwconv;
pub mod gather;
pub mod gelu;
pub mod layer_norm;
pub mod linear;
pub mod matmul;
pub mod mean_pool;
pub mod mlp;
pub mod mul;
pub mod pad;
pub mod permute;
pub mod region_merge;
pub mod region_partition;
pub mod region_pool;
pub mod reshape;
pub mod scale;
pub mod slice;
pub mod softmax;
pub mod sum;
pub mod top_k;

pub use add::add;
pub use attention::attention;
pub use batch_norm::{BatchNorm, BatchStatistics, batch_norm_eval, batch_norm_train};
pub use bra::{Bra, RouteKind, Routed, Routing, bra, bra_composed, bra_weights, route};
pub use concat::concat;
pub use contiguous::contiguous;
pub use conv2d::{Conv2d, conv2d, conv2d_gelu};
pub use cross_entropy::{cross_entropy, soft_cross_entropy};
pub use drop_path::{drop_path, drop_path_residual};
pub use dropout::dropout;
pub use dwconv::{dwconv, dwconv_residual};
pub use gather::gather;
pub use gelu::gelu;
pub use layer_norm::layer_norm;
pub use linear::{linear, linear_residual};
pub use matmul::matmul;
pub use mean_pool::mean_pool;
pub use mlp::{Mlp, MlpLayers, mlp};
pub use mul::mul;
pub use pad::pad;
pub use permute::permute;
pub use region_merge::region_merge;
pub use region_partition::region_partition;
pub use region_pool::region_pool;
pub use regions::Regions;
pub use reshape::reshape;
pub use scale::scale;
pub use slice::slice;
pub use softmax::softmax;
pub use sum::sum;
pub use top_k::top_k;
