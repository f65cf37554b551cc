//! The models by name.

use crate::config::{Family, ModelConfig, PerStage};
use crate::error::{Error, Result};

/// A named model.
#[derive(Debug)]
pub struct Preset {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it is for.
    pub summary: &'static str,
    /// The side of the images that it is meant for.
    pub image_size: usize,
    config: fn() -> ModelConfig,
}

/// All named models, small ones first.
pub static PRESETS: &[Preset] = &[
    Preset {
        name: "nano",
        summary: "32x32 images, the default: trains in minutes on two cores",
        image_size: 32,
        config: nano,
    },
    Preset { name: "micro", summary: "32x32 images, a third of nano's work", image_size: 32, config: micro },
    Preset { name: "tiny", summary: "BiFormer-T, 13.1 M parameters", image_size: 224, config: ModelConfig::default },
    Preset { name: "small", summary: "BiFormer-S, 25.5 M parameters", image_size: 224, config: small },
    Preset { name: "base", summary: "BiFormer-B, 56.8 M parameters", image_size: 224, config: base },
    Preset {
        name: "stl",
        summary: "BiFormer-STL, Swin-Tiny's layout, 28.4 M parameters",
        image_size: 224,
        config: stl,
    },
    Preset {
        name: "stl_nchw",
        summary: "the same as published on NCHW modules, padding after the projection",
        image_size: 224,
        config: stl_nchw,
    },
];

/// The model with this name. Errors: [`Error::UnknownModel`], with the nearest name.
pub fn preset(name: &str) -> Result<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name).ok_or_else(|| Error::UnknownModel {
        name: name.to_owned(),
        known: PRESETS.iter().map(|preset| preset.name.to_owned()).collect(),
    })
}

impl Preset {
    /// Its configuration.
    pub fn config(&self) -> ModelConfig {
        (self.config)()
    }
}

fn nano() -> ModelConfig {
    ModelConfig {
        num_classes: 10,
        depth: vec![2, 3, 2],
        embed_dim: vec![48, 96, 192],
        topks: vec![4, 8, -2],
        n_win: PerStage::All(4),
        head_dim: 24,
        full_attention_heads: 6,
        stem_strides: [2, 1],
        ..ModelConfig::default()
    }
}

fn micro() -> ModelConfig {
    ModelConfig {
        num_classes: 10,
        depth: vec![1, 1, 2, 1],
        embed_dim: vec![32, 64, 128, 256],
        topks: vec![2, 4, -2, -2],
        n_win: PerStage::All(4),
        stem_strides: [2, 1],
        ..ModelConfig::default()
    }
}

fn small() -> ModelConfig {
    ModelConfig { depth: vec![4, 4, 18, 4], ..ModelConfig::default() }
}

fn base() -> ModelConfig {
    ModelConfig { embed_dim: vec![96, 192, 384, 768], ..small() }
}

fn stl() -> ModelConfig {
    ModelConfig {
        family: Family::BiformerStl,
        depth: vec![2, 2, 6, 2],
        embed_dim: vec![96, 192, 384, 768],
        mlp_ratio: PerStage::All(4.0),
        pos_kernel: 0,
        ..ModelConfig::default()
    }
}

fn stl_nchw() -> ModelConfig {
    ModelConfig { family: Family::BiformerStlNchw, topks: vec![1, 4, 16, -1], ..stl() }
}
