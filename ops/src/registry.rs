//! The list of all operations. Everything that must hold for each of them (gradient checks, laws,
//! mutants, benches, the table of operations) starts from here.

use crate::case::{Case, Draw};
use tensor::cuda::Module;

/// An operation as the registry knows it.
#[derive(Debug)]
pub struct Op {
    /// Its name, which is that of its folder and of its node on the tape; a composed operation may record its parts
    /// instead.
    pub name: &'static str,
    /// What it computes, in a line.
    pub summary: &'static str,
    /// Its named cases.
    pub cases: fn() -> Vec<Case>,
    /// A small case from random numbers, for property tests, as in `ops/tests/registry.rs`;
    /// [`check`](crate::check::check()) is about the named ones.
    pub drawn: fn(&Draw) -> Case,
    /// Its own CUDA kernels; `None` if it only runs those of other operations.
    pub kernels: Option<&'static Module>,
}

macro_rules! registry {
    ($($name:ident),* $(,)?) => {
        /// Every operation, in the order of the folders.
        pub static OPS: &[Op] = &[$(Op {
            name: stringify!($name),
            summary: crate::$name::SUMMARY,
            cases: crate::$name::cases::cases,
            drawn: crate::$name::cases::drawn,
            kernels: crate::$name::MODULE,
        }),*];
    };
}

registry![
    add,
    attention,
    batch_norm,
    bra,
    concat,
    contiguous,
    conv2d,
    cross_entropy,
    drop_path,
    dropout,
    dwconv,
    gather,
    gelu,
    layer_norm,
    linear,
    matmul,
    mean_pool,
    mlp,
    mul,
    pad,
    permute,
    region_merge,
    region_partition,
    region_pool,
    reshape,
    scale,
    slice,
    softmax,
    sum,
    top_k,
];

/// The CUDA kernels of tensors, and those of the operations. The optimiser has its own.
pub fn kernels() -> impl Iterator<Item = &'static Module> {
    std::iter::once(&tensor::cuda::elements::KERNELS).chain(OPS.iter().filter_map(|op| op.kernels))
}

/// The operation with this name.
pub fn find(name: &str) -> Option<&'static Op> {
    OPS.iter().find(|op| op.name == name)
}
