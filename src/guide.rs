//! The README and the chapters in `docs/` as doctests: `cargo test --doc` compiles and runs every Rust example in them
//! that is not marked `ignore`.

#[doc = include_str!("../README.md")]
mod readme {}

#[doc = include_str!("../docs/01-tensors.md")]
mod tensors {}

#[doc = include_str!("../docs/02-tape.md")]
mod tape {}

#[doc = include_str!("../docs/03-operation.md")]
mod operation {}

#[doc = include_str!("../docs/04-attention.md")]
mod attention {}

#[doc = include_str!("../docs/05-model.md")]
mod model {}

#[doc = include_str!("../docs/06-learning.md")]
mod learning {}

#[doc = include_str!("../docs/07-trainer.md")]
mod trainer {}

#[doc = include_str!("../docs/08-gpu.md")]
mod gpu {}

#[doc = include_str!("../docs/09-tensor-cores.md")]
mod tensor_cores {}

#[doc = include_str!("../docs/10-testing-gpu-code.md")]
mod testing_gpu_code {}
