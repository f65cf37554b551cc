//! Tensors, the buffer pool, the random stream and the CPU kernels that every operation shares.
pub mod rng;
