//! What a BiFormer looks like: the fields, and what they must fulfil.

use crate::error::{Error, Result, nearest};
use ops::dwconv::KERNELS;
use serde::{Deserialize, Serialize};

/// The layouts that were published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Convolutional stem, a positional depthwise convolution in each block (tiny, small, base, nano).
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
    /// The four stages' maps through extra LayerNorms: a backbone for segmentation and detection.
    Dense,
}

/// One value for all stages, or one for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
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

    fn fits(&self, stages: usize) -> bool {
        matches!(self, PerStage::All(_)) || matches!(self, PerStage::Each(values) if values.len() == stages)
    }
}

/// The configuration of a BiFormer. `Default` is BiFormer-T.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// The layout.
    pub family: Family,
    /// Logits, or the stages' maps.
    pub features: Features,
    /// Classes of the head.
    pub num_classes: usize,
    /// Blocks per stage.
    pub depth: Vec<usize>,
    /// Channels per stage.
    pub embed_dim: Vec<usize>,
    /// Attention: k > 0 routes each region to k regions; -1 is plain full attention; -2 is full attention with
    /// local context.
    pub topks: Vec<i64>,
    /// S: regions along each side of the map, S·S in all.
    #[serde(alias = "n_wins")]
    pub n_win: PerStage<usize>,
    /// Channels of a head in routed attention.
    pub head_dim: usize,
    /// Heads of full attention.
    pub full_attention_heads: usize,
    /// Hidden channels of the MLP, as a multiple of the stage's.
    #[serde(alias = "mlp_ratios")]
    pub mlp_ratio: PerStage<f64>,
    /// Kernel of the local context convolution ("lepe"); 0 leaves it out of routed attention.
    #[serde(alias = "side_dwconv")]
    pub lce_kernel: usize,
    /// Kernel of the positional convolution at the start of a block; 0 leaves it out.
    #[serde(alias = "before_attn_dwconv")]
    pub pos_kernel: usize,
    /// Strides of the stem's two 3x3 convolutions: 2, 2 for large images; less for small ones.
    pub stem_strides: [usize; 2],
    /// Pads maps with zeros, at the bottom and right, to a multiple of n_win where they do not divide. As in the
    /// published code the padding is not masked.
    pub auto_pad: bool,
    /// Multiplies each region's kept keys and values by the softmax of their routing scores, through which the
    /// router then learns. The published models route hard.
    pub soft_routing: bool,
    /// Initial value of the learned per-channel factor on each residual branch; 0 leaves it out.
    #[serde(alias = "layer_scale_init_value")]
    pub layer_scale: f64,
    /// Stochastic depth of the last block; earlier blocks have proportionally less.
    #[serde(alias = "drop_path_rate")]
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

/// The fields of [`ModelConfig`], as they are written in files and on the command line.
pub const FIELDS: [&str; 17] = [
    "family",
    "features",
    "num_classes",
    "depth",
    "embed_dim",
    "topks",
    "n_win",
    "head_dim",
    "full_attention_heads",
    "mlp_ratio",
    "lce_kernel",
    "pos_kernel",
    "stem_strides",
    "auto_pad",
    "soft_routing",
    "layer_scale",
    "drop_path",
];

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

    /// The stochastic depth of a block, counted over all stages.
    pub fn drop_path_of(&self, block: usize) -> f64 {
        let blocks: usize = self.depth.iter().sum();
        if blocks < 2 { 0.0 } else { self.drop_path * block as f64 / (blocks - 1) as f64 }
    }

    /// What one side of an image is divided by before each stage.
    pub fn strides(&self) -> Vec<usize> {
        let stem = if self.family == Family::Biformer { self.stem_strides.iter().product() } else { 4 };
        (0..self.stages()).map(|stage| stem << stage).collect()
    }

    /// The sides of a stage's map for an image's side.
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

    /// Checks everything that can be wrong with a configuration, whatever the image.
    pub fn check(&self) -> Result<()> {
        let wrong = |field: &'static str, message: String| Err(Error::Config { field, message });
        let stages = self.stages();
        if stages == 0 || self.depth.contains(&0) {
            return wrong("depth", format!("every stage needs a block, got {:?}", self.depth));
        }
        if self.features == Features::Dense && self.family == Family::BiformerStlNchw {
            return wrong("features", "dense features are those of the biformer and biformer_stl layouts".into());
        }
        for (field, len) in [("embed_dim", self.embed_dim.len()), ("topks", self.topks.len())] {
            if len != stages {
                return wrong(field, format!("{len} values for the {stages} stages of depth {:?}", self.depth));
            }
        }
        if !self.n_win.fits(stages) {
            return wrong("n_win", format!("one value, or one for each of {stages} stages"));
        }
        if !self.mlp_ratio.fits(stages) {
            return wrong("mlp_ratio", format!("one value, or one for each of {stages} stages"));
        }
        if self.num_classes == 0 {
            return wrong("num_classes", "at least one class".into());
        }
        for (field, kernel) in [("lce_kernel", self.lce_kernel), ("pos_kernel", self.pos_kernel)] {
            if kernel > 0 && !KERNELS.contains(&kernel) {
                return wrong(field, format!("{kernel} is not one of {KERNELS:?}, or 0 for none"));
            }
        }
        if self.lce_kernel == 0 && (0..stages).any(|stage| self.attend(stage) == Attend::FullWithContext) {
            return wrong("lce_kernel", "0, but a stage of topk -2 has local context".into());
        }
        if self.stem_strides.iter().any(|stride| !(1..=4).contains(stride)) {
            return wrong("stem_strides", format!("from 1 to 4, got {:?}", self.stem_strides));
        }
        if !(0.0..1.0).contains(&self.drop_path) {
            return wrong("drop_path", format!("{} is not in [0, 1)", self.drop_path));
        }
        if !self.layer_scale.is_finite() || self.layer_scale < 0.0 {
            return wrong("layer_scale", format!("{} is not a factor (0 for none)", self.layer_scale));
        }
        if self.family == Family::Biformer && !self.embed_dim[0].is_multiple_of(2) {
            return wrong("embed_dim", format!("the stem starts with half of {} channels", self.embed_dim[0]));
        }
        (0..stages).try_for_each(|stage| self.check_stage(stage))
    }

    fn check_stage(&self, stage: usize) -> Result<()> {
        let wrong = |field: &'static str, message: String| Err(Error::Config { field, message });
        let (dim, n_win, ratio) = (self.embed_dim[stage], self.n_win.at(stage), self.mlp_ratio.at(stage));
        // Far beyond any real model; keeps the arithmetic on sizes from overflowing.
        const MOST: usize = 1 << 16;
        if dim == 0 || dim > MOST {
            return wrong("embed_dim", format!("{dim} channels in stage {}, from 1 to {MOST}", stage + 1));
        }
        if !(ratio > 0.0 && ratio <= 64.0) || self.hidden(stage) == 0 {
            return wrong("mlp_ratio", format!("{ratio} in stage {} leaves no sensible MLP", stage + 1));
        }
        match self.attend(stage) {
            Attend::Routed(k) => {
                if n_win == 0 || n_win > 1024 {
                    return wrong("n_win", format!("{n_win} in stage {}, from 1 to 1024", stage + 1));
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

    /// Checks that an image of this size fits: that every map has tokens and, without auto_pad, divides into
    /// regions.
    pub fn check_image(&self, height: usize, width: usize) -> Result<()> {
        let stride = *self.strides().last().unwrap_or(&1);
        let fits = |side: usize| {
            (0..self.stages()).all(|stage| {
                let side = self.map_side(side, stage);
                let divides = self.auto_pad
                    || self.family == Family::BiformerStlNchw
                    || side.is_multiple_of(self.n_win.at(stage));
                side > 0 && (divides || !matches!(self.attend(stage), Attend::Routed(_)))
            })
        };
        if fits(height) && fits(width) {
            return Ok(());
        }
        let bad = if fits(height) { width } else { height };
        let stage = (0..self.stages())
            .find(|&stage| {
                let side = self.map_side(bad, stage);
                side == 0
                    || (matches!(self.attend(stage), Attend::Routed(_)) && !side.is_multiple_of(self.n_win.at(stage)))
            })
            .unwrap_or(0);
        let side = self.map_side(bad, stage);
        let reason =
            format!("stage {} has a side of {side}, not a multiple of n_win {}", stage + 1, self.n_win.at(stage));
        // Sizes that fit come at least once in every product of all strides and windows: look nearby.
        let step = stride.saturating_mul(self.n_win.at(stage).max(1)).max(1);
        let near = |candidate: usize| {
            (1..=2 * step)
                .find_map(|offset| (candidate + offset > 0 && fits(candidate + offset)).then_some(candidate + offset))
        };
        let below = (1..bad).rev().take(2 * step).find(|&side| fits(side));
        let sizes: Vec<String> = [below, near(bad)].into_iter().flatten().map(|side| format!("{side}")).collect();
        let advice = match sizes.is_empty() {
            true => "set auto_pad = true".to_owned(),
            false => format!("a side of {} fits, or set auto_pad = true", sizes.join(" or ")),
        };
        Err(Error::ImageSize { height, width, reason, advice })
    }

    /// This configuration with fields changed as on a command line: `n_win=8`, `topks=1,4,16,-2`,
    /// `auto_pad=true`.
    pub fn with_overrides<'a>(&self, overrides: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let config = |message: String| Error::Config { field: "--set", message };
        let mut table = serde_json::to_value(self).map_err(|error| config(error.to_string()))?;
        for entry in overrides {
            let (key, value) =
                entry.split_once('=').ok_or_else(|| config(format!("\"{entry}\" is not of the form key=value")))?;
            if !FIELDS.contains(&key) {
                let known = FIELDS.map(str::to_owned).to_vec();
                return Err(Error::UnknownField { key: key.into(), nearest: nearest(key, FIELDS), known });
            }
            table[key] = parse(value, matches!(table[key], serde_json::Value::Array(_)));
        }
        let changed: Self = serde_json::from_value(table).map_err(|error| config(error.to_string()))?;
        changed.check()?;
        Ok(changed)
    }
}

/// A value from the command line: a list where commas or the field ask for one.
fn parse(text: &str, list: bool) -> serde_json::Value {
    let scalar =
        |text: &str| serde_json::from_str(text.trim()).unwrap_or_else(|_| serde_json::Value::from(text.trim()));
    let inner = text.trim().trim_start_matches('[').trim_end_matches(']');
    if list || inner.contains(',') { inner.split(',').map(scalar).collect() } else { scalar(inner) }
}
