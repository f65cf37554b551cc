//! What a BiFormer looks like: the fields, and what they must fulfil.

use crate::error::{Error, Result};
use ops::dwconv::SIZES;
use serde::{Deserialize, Serialize};

/// The families of models that were published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Convolutional stem, a positional depthwise convolution in each block (tiny, small, base, nano, micro).
    #[default]
    Biformer,
    /// Swin-Tiny's layout: 4x4 patches, no positional convolution.
    BiformerStl,
    /// The same on NCHW modules: 1x1 convolutions in place of linear layers, padding after the projection,
    /// local context from the values in stage 4 as well.
    BiformerStlNchw,
}

/// What the model returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Features {
    /// Class scores (N, classes).
    #[default]
    Logits,
    /// The input of the head, the mean of the last map (N, C): for a custom head, or for comparing images.
    Pooled,
    /// The stages' maps, each through an extra LayerNorm: a backbone for segmentation and detection.
    Dense,
}

impl Features {
    /// The name in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Features::Logits => "logits",
            Features::Pooled => "pooled",
            Features::Dense => "dense",
        }
    }
}

/// One value for all stages, or one for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected one number, or a list with one for each stage (for n_win whole numbers from 1)"
)]
pub enum PerStage<T> {
    /// The same everywhere.
    All(T),
    /// One per stage.
    Each(Vec<T>),
}

impl<T: Copy> PerStage<T> {
    /// The value of a stage. [`ModelConfig::check`] makes sure that there is one for each.
    pub fn at(&self, stage: usize) -> T {
        match self {
            PerStage::All(value) => *value,
            PerStage::Each(values) => values[stage],
        }
    }

    fn ensure_fits(&self, field: &'static str, stages: usize) -> Result<()> {
        match self {
            PerStage::Each(values) if values.len() != stages => {
                wrong(field, format!("{} values, expected one, or one for each of {stages} stages", values.len()))
            }
            _ => Ok(()),
        }
    }
}

/// The error for a field.
fn wrong(field: &'static str, message: impl Into<String>) -> Result<()> {
    Err(Error::Config { field, message: message.into() })
}

/// The configuration of a BiFormer. `Default` is BiFormer-T.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Which of the published families it belongs to.
    pub family: Family,
    /// What the model returns. Training needs logits; the others are for `forward`, `info` and programs that use the
    /// library.
    pub features: Features,
    /// Classes of the head; in a run, as many as its data have.
    pub num_classes: usize,
    /// Blocks per stage: 1 to 256 in each of 1 to 12 stages.
    pub depth: Vec<usize>,
    /// Channels per stage, up to 65536; where a stage routes, a multiple of `head_dim`.
    pub embed_dim: Vec<usize>,
    /// Attention: k > 0 routes each region to k regions, up to all; -1 is plain full attention; -2 is full attention
    /// with local context. In the `biformer_stl_nchw` family -1 has local context, too, as published.
    pub topks: Vec<i64>,
    /// Regions along each side of the map (S in the paper): 1 to 64, or one such number for each stage: `[8, 4, 2, 1]`.
    /// In the `biformer_stl_nchw` family, as published, a side that `n_win` does not divide has regions of the size
    /// rounded down, and so may have more of them.
    pub n_win: PerStage<usize>,
    /// Channels of a head in routed attention.
    pub head_dim: usize,
    /// Heads of full attention, a divisor of its stage's channels.
    pub full_attention_heads: usize,
    /// Hidden channels of the MLP, as a multiple of the stage's: above 0, up to 64; or one such number for each stage.
    pub mlp_ratio: PerStage<f64>,
    /// Kernel of the local context convolution ("lepe"): 3, 5 or 7; 0 leaves it out of routed attention, and is allowed
    /// only if no stage has full attention with local context.
    pub lce_kernel: usize,
    /// Kernel of the positional convolution at the start of a block: 3, 5 or 7; 0 leaves it out.
    pub pos_kernel: usize,
    /// Strides of the stem's two 3x3 convolutions, each 1 to 4: 2, 2 for large images; less for small ones. The other
    /// families ignore it: they begin with patches of 4x4 pixels.
    pub stem_strides: [usize; 2],
    /// Pads maps with zeros, at the bottom and right, to a multiple of n_win where they do not divide. As in the
    /// published code the padding is not masked. The `biformer_stl_nchw` family pads in any case.
    pub auto_pad: bool,
    /// Multiplies each region's kept keys and values by the softmax of their affinities, through which the
    /// router then learns. The published models route hard, and the `biformer_stl_nchw` family cannot do otherwise.
    pub soft_routing: bool,
    /// Initial value of the learned per-channel factor on the attention and MLP branches; 0 leaves it out.
    pub layer_scale: f64,
    /// The probability with which stochastic depth drops the attention and MLP branches of the last block, falling
    /// linearly to 0 in the first. At least 0, less than 1.
    pub drop_path: f64,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            family: Family::Biformer,
            features: Features::Logits,
            num_classes: 1000,
            depth: vec![2, 2, 8, 2],
            embed_dim: vec![64, 128, 256, 512],
            topks: vec![1, 4, 16, -2],
            n_win: PerStage::All(7),
            head_dim: 32,
            full_attention_heads: 8,
            mlp_ratio: PerStage::All(3.0),
            lce_kernel: 5,
            pos_kernel: 3,
            stem_strides: [2, 2],
            auto_pad: false,
            soft_routing: false,
            layer_scale: 0.0,
            drop_path: 0.0,
        }
    }
}

/// How a stage attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attend {
    /// To the tokens of k routed regions.
    Routed(usize),
    /// To all tokens.
    Full,
    /// To all tokens, with local context added.
    FullWithContext,
}

// Limits far beyond any real model: they keep the arithmetic on sizes from overflowing, and a slip of the
// keyboard from asking for more memory than there is.
const MAX_STAGES: usize = 12;
const MAX_BLOCKS: usize = 256;
const MAX_CHANNELS: usize = 1 << 16;
const MAX_MLP_RATIO: f64 = 64.0;
const MAX_CLASSES: usize = 1 << 20;
const MAX_PARAMETERS: f64 = 4e9;
const MAX_LAYER_SCALE: f64 = 1e3;
/// Routing compares all regions with all others.
pub(crate) const MAX_N_WIN: usize = 64;

impl ModelConfig {
    /// The number of stages.
    pub fn stages(&self) -> usize {
        self.depth.len()
    }

    /// How a stage attends.
    pub fn attend(&self, stage: usize) -> Attend {
        match self.topks[stage] {
            -1 if self.family == Family::BiformerStlNchw => Attend::FullWithContext,
            -1 => Attend::Full,
            -2 => Attend::FullWithContext,
            k => Attend::Routed(usize::try_from(k).unwrap_or(0)),
        }
    }

    /// Hidden channels of a stage's MLP.
    pub fn hidden(&self, stage: usize) -> usize {
        (self.embed_dim[stage] as f64 * self.mlp_ratio.at(stage)) as usize
    }

    /// The probability of dropping a block's branches (stochastic depth); blocks are numbered through all stages.
    pub fn drop_path_of(&self, block: usize) -> f64 {
        let blocks: usize = self.depth.iter().sum();
        if blocks < 2 { 0.0 } else { self.drop_path * block as f64 / (blocks - 1) as f64 }
    }

    /// What one side of an image is divided by before each stage.
    pub fn strides(&self) -> Vec<usize> {
        let stem = if self.family == Family::Biformer { self.stem_strides.iter().product() } else { 4 };
        (0..self.stages()).map(|stage| stem << stage).collect()
    }

    /// The side of a stage's map for an image's side.
    pub fn map_side(&self, image_side: usize, stage: usize) -> usize {
        match self.family {
            // 3x3 convolutions with padding 1 round up, each on its own.
            Family::Biformer => {
                let halvings = self.stem_strides.into_iter().chain(std::iter::repeat_n(2, stage));
                halvings.fold(image_side, |side, stride| side.div_ceil(stride))
            }
            // 4x4 and 2x2 patches without padding round down.
            _ => (0..stage).fold(image_side / 4, |side, _| side / 2),
        }
    }

    /// Checks everything that can be wrong with a configuration, whatever the image. Errors: [`Error::Config`], with
    /// the field.
    pub fn check(&self) -> Result<()> {
        let stages = self.stages();
        if !(1..=MAX_STAGES).contains(&stages) || self.depth.iter().any(|blocks| !(1..=MAX_BLOCKS).contains(blocks)) {
            let limits = format!("1 to {MAX_STAGES} stages, each of 1 to {MAX_BLOCKS} blocks");
            return wrong("depth", format!("expected {limits}, got {:?}", self.depth));
        }
        if self.features == Features::Dense && self.family == Family::BiformerStlNchw {
            return wrong("features", "dense features are those of the biformer and biformer_stl families");
        }
        if self.soft_routing && self.family == Family::BiformerStlNchw {
            let message =
                "true, but the biformer_stl_nchw family routes hard only; use biformer_stl, or set it to false";
            return wrong("soft_routing", message);
        }
        self.check_lists()?;
        if !(1..=MAX_CLASSES).contains(&self.num_classes) {
            return wrong("num_classes", format!("{} classes, expected 1 to {MAX_CLASSES}", self.num_classes));
        }
        for (field, kernel) in [("lce_kernel", self.lce_kernel), ("pos_kernel", self.pos_kernel)] {
            if kernel > 0 && !SIZES.contains(&kernel) {
                return wrong(field, format!("{kernel} is not one of {SIZES:?}, or 0 for none"));
            }
        }
        if self.lce_kernel == 0 && (0..stages).any(|stage| self.attend(stage) == Attend::FullWithContext) {
            return wrong("lce_kernel", "0, but a stage of topk -2 has local context; topk -1 is the same without");
        }
        if self.stem_strides.iter().any(|stride| !(1..=4).contains(stride)) {
            return wrong("stem_strides", format!("from 1 to 4, got {:?}", self.stem_strides));
        }
        if !(0.0..1.0).contains(&self.drop_path) {
            return wrong("drop_path", format!("{} is not in [0, 1)", self.drop_path));
        }
        if !(0.0..=MAX_LAYER_SCALE).contains(&self.layer_scale) {
            return wrong("layer_scale", format!("{} is not in 0..={MAX_LAYER_SCALE} (0 for none)", self.layer_scale));
        }
        if self.family == Family::Biformer && !self.embed_dim[0].is_multiple_of(2) {
            let dim = self.embed_dim[0];
            return wrong(
                "embed_dim",
                format!("{dim} in stage 1, expected an even number: the stem starts with half of it"),
            );
        }
        (0..stages).try_for_each(|stage| self.check_stage(stage))?;
        let parameters = self.rough_size();
        if parameters > MAX_PARAMETERS {
            let message = format!("{:?} with depth {:?} makes {parameters:.0e} parameters", self.embed_dim, self.depth);
            return wrong("embed_dim", format!("{message}, more than the {MAX_PARAMETERS:.0e} that fit in memory"));
        }
        Ok(())
    }

    /// About how many parameters there are; in floating point, where no configuration overflows.
    pub fn rough_size(&self) -> f64 {
        let dims: Vec<f64> = self.embed_dim.iter().map(|&dim| dim as f64).collect();
        let blocks = (0..self.stages())
            .map(|stage| self.depth[stage] as f64 * dims[stage].powi(2) * (4.0 + 2.0 * self.mlp_ratio.at(stage)));
        let mergings = dims.windows(2).map(|pair| 9.0 * pair[0] * pair[1]);
        blocks.chain(mergings).sum::<f64>() + 5.0 * dims[0].powi(2) + dims[dims.len() - 1] * self.num_classes as f64
    }

    /// Checks that each list has a value for each stage.
    fn check_lists(&self) -> Result<()> {
        let stages = self.stages();
        for (field, len) in [("embed_dim", self.embed_dim.len()), ("topks", self.topks.len())] {
            if len != stages {
                return wrong(field, format!("{len} values for the {stages} stages of depth {:?}", self.depth));
            }
        }
        self.n_win.ensure_fits("n_win", stages)?;
        self.mlp_ratio.ensure_fits("mlp_ratio", stages)
    }

    /// Panics unless there is such a stage, and it is valid.
    pub(crate) fn assert_stage(&self, stage: usize) {
        assert!(stage < self.stages(), "there is no stage {stage}: the model has {}, counted from 0", self.stages());
        self.check_lists().unwrap_or_else(|error| panic!("{error}"));
        self.check_stage(stage).unwrap_or_else(|error| panic!("{error}"));
    }

    fn check_stage(&self, stage: usize) -> Result<()> {
        let (dim, n_win, ratio) = (self.embed_dim[stage], self.n_win.at(stage), self.mlp_ratio.at(stage));
        if !(1..=MAX_CHANNELS).contains(&dim) {
            return wrong("embed_dim", format!("{dim} channels in stage {}, expected 1 to {MAX_CHANNELS}", stage + 1));
        }
        if !(ratio > 0.0 && ratio <= MAX_MLP_RATIO) {
            let expected = format!("expected more than 0, and at most {MAX_MLP_RATIO}");
            return wrong("mlp_ratio", format!("{ratio} in stage {}, {expected}", stage + 1));
        }
        if self.hidden(stage) == 0 {
            return wrong("mlp_ratio", format!("{ratio} of {dim} channels in stage {} leaves none", stage + 1));
        }
        match self.attend(stage) {
            Attend::Routed(k) => {
                if !(1..=MAX_N_WIN).contains(&n_win) {
                    return wrong("n_win", format!("{n_win} in stage {}, expected 1 to {MAX_N_WIN}", stage + 1));
                }
                if k == 0 || k > n_win * n_win {
                    let k = self.topks[stage];
                    let regions = n_win * n_win;
                    let choices = "from 1 to that number, -1 (full) or -2 (full, with context)";
                    let message =
                        format!("{k} in stage {}, which has {n_win}x{n_win} = {regions} regions; {choices}", stage + 1);
                    return wrong("topks", message);
                }
                if self.head_dim == 0 || !dim.is_multiple_of(self.head_dim) {
                    let message =
                        format!("{} does not divide the {dim} channels of stage {}", self.head_dim, stage + 1);
                    return wrong("head_dim", message);
                }
            }
            Attend::Full | Attend::FullWithContext => {
                let heads = self.full_attention_heads;
                if heads == 0 || !dim.is_multiple_of(heads) {
                    let message = format!("{heads} heads do not divide the {dim} channels of stage {}", stage + 1);
                    return wrong("full_attention_heads", message);
                }
            }
        }
        Ok(())
    }
}
