//! The BiFormer model: its configurations, its layers, a forward pass, and files of weights.
//!
//! ```
//! use autograd::Tape;
//! use model::{BiFormer, Mode, preset};
//! use tensor::{DType, Tensor};
//! # fn main() -> model::Result<()> {
//! let config = preset("nano")?.config().with_overrides(["depth=1,1,1"])?;
//! let model = BiFormer::new(&config, 1, DType::F32)?; // weights drawn from seed 1
//! let images = Tensor::zeros([2, 32, 32, 3], DType::F32); // (N, H, W, 3)
//! let tape = Tape::inference();
//! assert_eq!(*model.forward(&tape, &images, Mode::Evaluate)?.logits()?.shape(), [2, 10]);
//! # Ok(())
//! # }
//! ```
//!
//! | file | what it holds |
//! |---|---|
//! | `config.rs`, `presets.rs` | [`ModelConfig`] and the models by name |
//! | `image_size.rs` | which images a configuration takes |
//! | `regions.rs` | how routed attention cuts a map into regions |
//! | `overrides.rs` | single fields of a configuration, by name |
//! | `biformer.rs`, `run.rs` | [`BiFormer`], stages between mergings, and the head; how images run through it |
//! | `block.rs`, `attention.rs`, `mlp.rs`, `layers.rs` | a block; how it attends; its MLP; layers |
//! | `attention_weights.rs` | what is recorded of an attention's weights, to be shown |
//! | `factors.rs` | parameters as products take them |
//! | `pass.rs`, `trace.rs` | what the layers of one pass share: the tape, the mode, random streams; what it leaves |
//! | `state.rs` | parameters and running statistics, their names and initial values |
//! | `recognised.rs` | state_dicts of other programs: what wraps their names, and which of the named models they are of |
//! | `weights.rs`, `files.rs`, `header.rs`, `elements.rs`, `pth/` | state_dicts, in safetensors and PyTorch's own files |
//! | `reading.rs`, `safely.rs` | how files are read, and how they are written |
//! | `gradcheck.rs` | the gradients of a whole model against differences |
//! | `cost.rs` | parameters, multiply-adds and memory, part by part |
//! | `error.rs` | [`Error`] |
#![forbid(unsafe_code)]

mod attention;
mod attention_weights;
mod biformer;
mod block;
mod config;
pub mod cost;
mod elements;
mod error;
mod factors;
mod files;
mod gradcheck;
mod header;
mod image_size;
mod layers;
mod mlp;
mod overrides;
mod pass;
mod presets;
mod pth;
mod reading;
mod recognised;
mod regions;
mod run;
mod safely;
mod state;
mod trace;
mod weights;

pub use attention::Attention;
pub use biformer::BiFormer;
pub use block::Block;
pub use config::{Attend, Family, Features, ModelConfig, PerStage};
pub use error::{Differences, Error, Result, did_you_mean, in_plain_words, nearest};
pub use factors::Factors;
pub use files::TensorFile;
pub use gradcheck::{GRADIENT_TOLERANCE, PartCheck, check_gradients, images_to_check};
pub use layers::{BatchNorm, Conv, DepthwiseConv, LayerNorm, Linear};
pub use mlp::Mlp;
pub use overrides::{FIELDS, bare_number, field_name};
pub use pass::{Mode, Pass};
pub use presets::{PRESETS, Preset, preset};
pub use recognised::recognised;
pub use run::Output;
pub use safely::{copy_safely, ensure_writable, remove_leftovers, write_safely};
pub use state::{Builder, Init, RunningStatistics, StatisticsId};
pub use trace::{Routes, Trace};
