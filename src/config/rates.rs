//! Which share of the schedule's learning rate each parameter has.

use super::RunConfig;
use anyhow::{Result, bail};
use model::ModelConfig;

impl RunConfig {
    /// What the learning rate is multiplied by for a parameter of this name.
    pub fn rate_of(&self, name: &str) -> f64 {
        if name.starts_with("head.") {
            return 1.0;
        }
        let layers = layers_after(&self.architecture, name);
        // Multiplied one by one: the bits of a power may differ between machines.
        self.backbone_lr * (0..layers).fold(1.0, |share, _| share * self.layer_decay)
    }

    /// Errors: the first layer's rate computes as 0, or there are more rates than the optimiser can tell apart, which
    /// are 256, with and without weight decay.
    pub(super) fn ensure_rates(&self) -> Result<()> {
        // Beside the blocks' there are those of the stem, of the last norm and of the head.
        const MOST: usize = 128 - 3;
        let blocks: usize = self.architecture.depth.iter().sum();
        if self.layer_decay < 1.0 && blocks > MOST {
            let decay = self.layer_decay;
            bail!(
                "layer_decay = {decay}: at most {MOST} blocks can have rates of their own, not {blocks}; leave it out"
            );
        }
        let first = self.schedule.peak * self.rate_of("downsample_layers.0.0.weight");
        if first < f64::from(f32::MIN_POSITIVE) {
            bail!(
                "backbone_lr and layer_decay: the first layer's learning rate is {first:?}, which computes as 0; for what is \
                 to stay as it is: freeze"
            );
        }
        Ok(())
    }
}

/// How many layers come after that of a parameter, if each block is one, and the head with the norm before it. What
/// leads to a stage belongs to the stage's first block, except for the stem, which is a layer of its own.
fn layers_after(config: &ModelConfig, name: &str) -> usize {
    let mut parts = name.split('.');
    let (kind, stage) = (parts.next(), parts.next().and_then(|stage| stage.parse().ok()));
    let from = |stage: usize| config.depth.get(stage..).unwrap_or_default().iter().sum::<usize>();
    match (kind, stage) {
        (Some("downsample_layers"), Some(0)) => from(0) + 1,
        (Some("downsample_layers"), Some(stage)) => from(stage),
        (Some("stages"), Some(stage)) => {
            let block = parts.find_map(|part| part.parse::<usize>().ok()).unwrap_or(0);
            from(stage).saturating_sub(block)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_rates_are_asked_for_than_there_can_be() {
        let mut config = RunConfig::for_model("nano").unwrap();
        config.layer_decay = 0.9;
        for (depth, fits) in [([42, 42, 41], true), ([42, 42, 42], false)] {
            config.architecture.depth = depth.to_vec();
            let refused = config.ensure_rates().err().map(|error| error.to_string());
            assert_eq!(refused.is_none(), fits, "{refused:?}");
            assert!(
                refused.is_none_or(|said| said.contains("at most 125 blocks can have rates of their own, not 126"))
            );
        }
        config.layer_decay = 1.0;
        assert!(config.ensure_rates().is_ok());
    }

    #[test]
    fn rates_fall_from_the_head_to_the_stem() {
        for (model, inner) in [("nano", ""), ("stl", "blocks.")] {
            let mut config = RunConfig::for_model(model).unwrap();
            (config.backbone_lr, config.layer_decay) = (0.5, 0.9);
            config.architecture.depth = vec![2, 3, 2];
            for (name, layers) in [
                ("norm.weight".to_owned(), 0),
                (format!("stages.2.{inner}1.mlp.0.weight"), 1),
                (format!("stages.2.{inner}0.norm1.bias"), 2),
                ("downsample_layers.2.0.weight".into(), 2),
                (format!("stages.1.{inner}2.attn.qkv.qkv.weight"), 3),
                ("downsample_layers.1.1.bias".into(), 5),
                (format!("stages.0.{inner}0.pos_embed.weight"), 7),
                ("downsample_layers.0.3.weight".into(), 8),
            ] {
                approx::assert_relative_eq!(config.rate_of(&name), 0.5 * 0.9f64.powi(layers), max_relative = 1e-14);
            }
            assert_eq!(config.rate_of("head.weight"), 1.0);
        }
    }
}
