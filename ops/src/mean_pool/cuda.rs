//! CUDA kernels of [`mean_pool`](super::mean_pool): those of the pooling by regions, for one region.

pub use crate::region_pool::cuda::{backward, forward};
