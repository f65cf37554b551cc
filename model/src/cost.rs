//! What a model costs: parameters and multiply-adds by formula, memory by measurement.

use crate::biformer::BiFormer;
use crate::config::{Attend, Family, Features, ModelConfig};
use crate::error::Result;
use crate::pass::Mode;
use autograd::Tape;
use serde::Serialize;
use std::iter::Sum;
use tensor::{DType, Tensor};

/// Multiply-adds of one image, by kind of work. Normalisations, softmax and GELU are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Macs {
    /// Linear layers.
    pub linear: u64,
    /// Convolutions: stem, merging, position, local context.
    pub conv: u64,
    /// Scores and weighted sums of attention.
    pub attention: u64,
    /// Region-to-region affinities.
    pub routing: u64,
}

impl Macs {
    /// All kinds together.
    pub fn total(&self) -> u64 {
        self.linear + self.conv + self.attention + self.routing
    }

    fn times(self, count: usize) -> Self {
        let Self { linear, conv, attention, routing } = self;
        let [linear, conv, attention, routing] = [linear, conv, attention, routing].map(|macs| macs * count as u64);
        Self { linear, conv, attention, routing }
    }
}

impl Sum for Macs {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, macs| Self {
            linear: sum.linear + macs.linear,
            conv: sum.conv + macs.conv,
            attention: sum.attention + macs.attention,
            routing: sum.routing + macs.routing,
        })
    }
}

/// The multiply-adds of one image of a size, with nothing built or run. Errors:
/// [`Error::Config`](crate::Error::Config), [`Error::ImageSize`](crate::Error::ImageSize).
pub fn macs(config: &ModelConfig, height: usize, width: usize) -> Result<Macs> {
    config.check()?;
    config.check_image(height, width)?;
    let stages = (0..config.stages())
        .flat_map(|stage| [merging_macs(config, stage, [height, width]), blocks_macs(config, stage, [height, width])]);
    Ok(stages.chain([head_macs(config)]).sum())
}

/// One part of a model: a merging, a stage, or the head.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// What it is made of, in words.
    pub layers: String,
    /// The map that it produces, (H, W, C); for the head of a backbone, which normalises the maps of all stages, (1, 1,
    /// C) with the C of the last stage.
    pub map: [usize; 3],
    /// Trainable numbers.
    pub parameters: usize,
    /// Multiply-adds of one image.
    pub macs: Macs,
}

/// The parts of a model for images of a size, in order. Errors: [`Error::ImageSize`](crate::Error::ImageSize).
pub fn parts(model: &BiFormer, height: usize, width: usize) -> Result<Vec<Part>> {
    let config = model.config();
    config.check_image(height, width)?;
    let layout = model.parameters.layout();
    let count = |prefixes: &[String]| -> usize {
        let belongs = |name: &str| prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()));
        layout.ids().filter(|&id| belongs(layout.name(id))).map(|id| layout.span(id).len()).sum()
    };
    let mut parts = vec![];
    for stage in 0..config.stages() {
        let map = [height, width].map(|side| config.map_side(side, stage));
        let dim = config.embed_dim[stage];
        let shape = [map[0], map[1], dim];
        parts.push(Part {
            name: format!("downsample_layers.{stage}"),
            layers: if stage == 0 { "stem".into() } else { format!("merging, into stage {}", stage + 1) },
            map: shape,
            parameters: count(&[format!("downsample_layers.{stage}.")]),
            macs: merging_macs(config, stage, [height, width]),
        });
        let attends = match config.attend(stage) {
            Attend::Routed(k) => {
                let [rows, columns] = config.regions(map, stage).map_or([config.n_win.at(stage); 2], |cut| cut.grid());
                format!("routed to {k} of {rows}x{columns} regions")
            }
            Attend::Full => "full attention".into(),
            Attend::FullWithContext => "full attention with local context".into(),
        };
        let (depth, s) = (config.depth[stage], if config.depth[stage] == 1 { "" } else { "s" });
        parts.push(Part {
            name: format!("stages.{stage}"),
            layers: format!("stage {}: {depth} block{s}, {attends}", stage + 1),
            map: shape,
            parameters: count(&[format!("stages.{stage}.")]),
            macs: blocks_macs(config, stage, [height, width]),
        });
    }
    let last = config.embed_dim[config.stages() - 1];
    let (layers, out) = match config.features {
        Features::Logits => ("norm, mean, linear", config.num_classes),
        Features::Pooled => ("norm, mean", last),
        Features::Dense => ("a norm per stage", last),
    };
    parts.push(Part {
        name: "head".into(),
        layers: layers.into(),
        map: [1, 1, out],
        parameters: count(&["norm.".into(), "head.".into(), "extra_norms.".into()]),
        macs: head_macs(config),
    });
    Ok(parts)
}

fn merging_macs(config: &ModelConfig, stage: usize, image: [usize; 2]) -> Macs {
    let dims = &config.embed_dim;
    let pixels = |map: [usize; 2]| (map[0] * map[1]) as u64;
    let out = pixels(image.map(|side| config.map_side(side, stage)));
    let conv = match (config.family, stage) {
        (Family::Biformer, 0) => {
            let half = dims[0] as u64 / 2;
            let first = pixels(image.map(|side| side.div_ceil(config.stem_strides[0])));
            first * 9 * 3 * half + out * 9 * half * dims[0] as u64
        }
        (Family::Biformer, _) => out * 9 * (dims[stage - 1] * dims[stage]) as u64,
        (_, 0) => out * 16 * 3 * dims[0] as u64,
        _ => out * 4 * (dims[stage - 1] * dims[stage]) as u64,
    };
    Macs { conv, ..Macs::default() }
}

/// Of all blocks of a stage.
fn blocks_macs(config: &ModelConfig, stage: usize, image: [usize; 2]) -> Macs {
    let map = image.map(|side| config.map_side(side, stage));
    let (c, hidden) = (config.embed_dim[stage] as u64, config.hidden(stage) as u64);
    let tokens = (map[0] * map[1]) as u64;
    let square = |kernel: usize| (kernel * kernel) as u64;
    let mut macs = Macs { conv: square(config.pos_kernel) * c * tokens, ..Macs::default() };
    let mlp = 2 * c * hidden * tokens;
    match config.attend(stage) {
        Attend::Routed(k) => {
            let cut = config.regions(map, stage).expect("invariant: an image that fits leaves maps to cut");
            let [padded, regions] = [cut.count() * cut.tokens(), cut.count()].map(|count| count as u64);
            // The number of tokens that are projected to queries, keys and values; the result is cropped before it is
            // projected in turn.
            let projected = if config.family == Family::BiformerStlNchw { tokens } else { padded };
            macs.linear = 3 * c * c * projected + c * c * tokens + mlp;
            macs.conv += square(config.lce_kernel) * c * padded;
            macs.attention = 2 * padded * (k * cut.tokens()) as u64 * c;
            macs.routing = regions * regions * c;
        }
        attend => {
            macs.linear = 4 * c * c * tokens + mlp;
            macs.attention = 2 * tokens * tokens * c;
            if attend == Attend::FullWithContext {
                macs.conv += square(config.lce_kernel) * c * tokens;
            }
        }
    }
    macs.times(config.depth[stage])
}

fn head_macs(config: &ModelConfig) -> Macs {
    let linear = match config.features {
        Features::Logits => config.embed_dim[config.stages() - 1] * config.num_classes,
        Features::Pooled | Features::Dense => 0,
    };
    Macs { linear: linear as u64, ..Macs::default() }
}

/// A lower bound on the bytes that soft routing needs for an image: the gathered keys and values of all routed regions,
/// their weighted copies, and the scores, in the stage where these are largest. As each region gathers those of k
/// regions, they can exceed everything else; 0 without soft routing.
pub fn gathered_bytes(config: &ModelConfig, image: [usize; 2], dtype: DType) -> u64 {
    let of_stage = |stage: usize| {
        let map = image.map(|side| config.map_side(side, stage));
        let (Attend::Routed(k), Some(cut)) = (config.attend(stage), config.regions(map, stage)) else { return 0 };
        // For each token of each region that is gathered: a key and a value, twice, and a score per head and query.
        let of_token = 4 * config.embed_dim[stage] + config.embed_dim[stage] / config.head_dim.max(1) * cut.tokens();
        let bytes = [k, cut.count(), cut.tokens(), of_token, dtype.size()];
        bytes.into_iter().fold(1, |product: u64, factor| product.saturating_mul(factor as u64))
    };
    (0..config.stages()).filter(|_| config.soft_routing).map(of_stage).max().unwrap_or(0)
}

/// The bytes that a training step's forward pass on such a tape keeps for its backward pass, per image, in the
/// model's precision: measured on a pass over two images. On a CPU, branches that images skip keep nothing, so a model
/// with a [`drop_path`](ModelConfig::drop_path) gives a number that depends on chance. Errors: those of
/// [`BiFormer::forward`].
pub fn activation_bytes(model: &BiFormer, tape: &Tape, height: usize, width: usize) -> Result<usize> {
    const IMAGES: usize = 2;
    let images = Tensor::zeros([IMAGES, height, width, 3], model.parameters.layout().dtype());
    let output = model.forward(tape, &images, Mode::Train { seed: 0, step: 0 })?;
    let kept = tape.saved_bytes().saturating_sub(model.parameters.flat().bytes());
    drop(output);
    Ok(kept / IMAGES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::preset;

    /// A map of 16x16 and n_win = 5: rounded up that is 5x5 regions of 4x4 tokens, rounded down 6x6 of 3x3.
    #[test]
    fn maps_that_do_not_divide_cost_what_each_layout_pads() -> Result<()> {
        for (name, regions, tokens, padded) in [("stl", 25, 16, 400), ("stl_nchw", 36, 9, 324)] {
            let fields = ["depth=1", "embed_dim=32", "topks=2", "n_win=5", "auto_pad=true"];
            let config = preset(name)?.config().with_overrides(fields)?;
            let stage = parts(&BiFormer::blank(&config, DType::F32)?, 64, 64)?.swap_remove(1);
            assert_eq!(stage.macs.routing, regions * regions * 32, "{name}");
            assert_eq!(stage.macs.attention, 2 * padded * 2 * tokens * 32, "{name}");
            let projected = if name == "stl" { padded } else { 256 };
            assert_eq!(stage.macs.linear, 32 * 32 * (3 * projected + 256 + 8 * 256), "{name}");
        }
        Ok(())
    }
}
