//! What CPU kernels share.
//!
//! | file | what it holds |
//! |---|---|
//! | `isa.rs` | instruction sets found at run time; [`simd!`](crate::simd) runs a kernel with the best one |
//! | `lanes.rs` | sums in a fixed order that the compiler can vectorise |
//! | `math.rs` | exp, ln and the normal distribution in a form that the compiler can vectorise |
//! | `normal.rs` | the normal distribution in tables, for registers that look elements up |
//! | `gemm.rs` | matrix products, split over threads by shape alone |
//! | `factor.rs` | what is multiplied, and what is summed in: f32, f64, or bf16 in f32 |
//! | `block.rs` | what one thread does of a product: rows, wherever they lie, times panels |
//! | `packed.rs` | the right operand of a product, in panels: packed beforehand, or meanwhile |
//! | `pairs/` | products of bf16 matrices, two elements at a time |
//! | `registers.rs` | vector registers by name, for sums that must stay in them |
//! | `tile.rs` | the tiles of a panel of a matrix product, in registers |
//! | `transpose.rs` | transposes, a block at a time in registers |
//! | `parallel.rs` | threads, and reductions whose order does not depend on them |

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
pub mod transpose;
