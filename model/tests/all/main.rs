//! Models as a program uses them: one program, because linking takes longer than most tests.

mod attention_weights;
mod blocks;
mod features;
mod freeze;
mod gradients;
mod initial;
mod prepared;
mod recompute;
mod sizes;
mod stages;
mod turns;
