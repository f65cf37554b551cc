//! What CPU kernels share.
//!
//! | file | what it holds |
//! |---|---|
//! | `isa.rs` | instruction sets found at run time; [`simd!`](crate::simd) runs a kernel with the best one |
//! | `lanes.rs` | sums in a fixed order that the compiler can vectorise |
//! | `math.rs` | exp, ln and the normal distribution in a form that the compiler can vectorise |
//! | `normal.rs` | the normal distribution from tables, for instruction sets that look elements up in registers |
//! | `gemm.rs` | matrix products, split over threads by shape alone |
//! | `factor.rs` | the types of factors and of sums: f32, f64, or bf16 accumulated in f32 |
//! | `block.rs` | one thread's share of a product: rows at any positions times panels |
//! | `packed.rs` | the right operand of a product, in panels: packed in advance, or while it is multiplied |
//! | `pairs/` | products of bf16 matrices, two elements at a time |
//! | `registers.rs` | vector registers by name, for sums that must stay in them |
//! | `tile.rs` | the tiles of a panel of a matrix product, in registers |
//! | `transpose.rs` | transposes, a block at a time in registers |
//! | `parallel.rs` | threads, and reductions whose order does not depend on them |

// Most types here are operands on their way to registers, which nobody prints.
#![allow(missing_debug_implementations)]

mod block;
pub mod factor;
pub mod gemm;
pub mod isa;
pub mod lanes;
pub mod math;
pub mod normal;
pub mod packed;
pub(crate) mod pairs;
pub mod parallel;
pub mod registers;
mod tile;
pub(crate) mod transpose;
