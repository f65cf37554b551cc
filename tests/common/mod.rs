//! What several whole-product tests share.
#![allow(dead_code)] // each test binary uses its own part

pub mod generator;
pub mod golden;
pub mod program;
pub mod samples;
pub mod undisturbed;
