//! Differentiable operations.

mod broadcast;
pub mod case;
pub mod check;
mod reference;
pub mod registry;
mod slab;

pub mod add;
pub mod concat;
pub mod contiguous;
pub mod gather;
pub mod layer_norm;
pub mod linear;
pub mod mul;
pub mod pad;
pub mod permute;
pub mod region_merge;
pub mod region_partition;
pub mod reshape;
pub mod scale;
pub mod slice;
pub mod sum;
pub mod top_k;

pub use add::add;
pub use concat::concat;
pub use contiguous::contiguous;
pub use gather::gather;
pub use layer_norm::layer_norm;
pub use linear::linear;
pub use mul::mul;
pub use pad::pad;
pub use permute::permute;
pub use region_merge::region_merge;
pub use region_partition::region_partition;
pub use reshape::reshape;
pub use scale::scale;
pub use slice::slice;
pub use sum::sum;
pub use top_k::top_k;
