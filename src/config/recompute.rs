//! What the backward pass computes again.

use autograd::Tape;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tensor::Device;

/// How much of the forward pass is recomputed in the backward pass, to save memory (activation checkpointing): see
/// [`autograd::Tape::segment`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// What suits the device: cheap on the CPU, none on a GPU
    #[default]
    Auto,
    /// Nothing
    None,
    /// The results of GELU, of batch normalisation fused with it, and of layer normalisation: less memory; about as
    /// fast on a CPU, whose caches hold them while they are used
    Cheap,
    /// All of each block, of which only the input is kept: far less memory, somewhat slower
    Block,
}

impl Recompute {
    /// Words that advise to recompute whole blocks; none if that is done already.
    pub fn advice(self, words: &'static str) -> &'static str {
        if self == Recompute::Block { "" } else { words }
    }

    /// A tape that recomputes this much and keeps the other activations.
    pub fn tape(self, device: &Device) -> Tape {
        match (self, device) {
            (Recompute::None, _) | (Recompute::Auto, Device::Cuda(_)) => Tape::new(),
            (Recompute::Cheap, _) | (Recompute::Auto, Device::Cpu) => Tape::recomputing_cheap(),
            (Recompute::Block, _) => Tape::recomputing_segments(),
        }
    }
}
