//! The list of all operations. Everything that must hold for each of them (gradient checks, laws,
//! mutants, benches, the audit table) starts from here.

use crate::case::{Case, Draw};

/// An operation as the registry knows it.
pub struct Op {
    /// Its name: the folder's, and the one on the tape.
    pub name: &'static str,
    /// What it computes, in a line.
    pub summary: &'static str,
    /// Its named cases.
    pub cases: fn() -> Vec<Case>,
    /// A small case from random numbers.
    pub drawn: fn(&Draw) -> Case,
}

macro_rules! registry {
    ($($name:ident),* $(,)?) => {
        /// Every operation, in the order of the folders.
        pub static OPS: &[Op] = &[$(Op {
            name: stringify!($name),
            summary: crate::$name::SUMMARY,
            cases: crate::$name::cases::cases,
            drawn: crate::$name::cases::drawn,
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
    mul,
    pad,
    permute,
    region_merge,
    region_partition,
    region_pool,
    reshape,
    scale,
    slice,
    soft_cross_entropy,
    softmax,
    sum,
    top_k,
];

/// The operation with this name.
pub fn find(name: &str) -> Option<&'static Op> {
    OPS.iter().find(|op| op.name == name)
}
