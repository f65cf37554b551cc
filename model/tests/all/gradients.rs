//! The gradients of whole models.

use model::{Error, Family, Features, ModelConfig, PerStage, Result, check_gradients, images_to_check};

/// Two stages, of which the first routes.
fn config() -> ModelConfig {
    ModelConfig {
        depth: vec![1, 1],
        embed_dim: vec![8, 16],
        topks: vec![2, -2],
        n_win: PerStage::All(2),
        head_dim: 4,
        full_attention_heads: 2,
        num_classes: 3,
        ..ModelConfig::default()
    }
}

#[test]
fn gradients_of_a_model_are_those_that_differences_find() -> Result<()> {
    let scaled = ModelConfig { layer_scale: 0.5, soft_routing: true, drop_path: 0.3, ..config() };
    let nchw = ModelConfig { family: Family::BiformerStlNchw, ..config() };
    for config in [config(), scaled, nchw] {
        let mut seen = vec![];
        let parts = check_gradients(&config, [32, 32], 3, 1, |part| seen.push(part.clone()))?;
        println!("{parts:#?}");
        assert_eq!(seen, parts);
        let names: Vec<&str> = parts.iter().map(|part| &part.part[..]).collect();
        assert_eq!(names[..3], ["downsample_layers.0", "downsample_layers.1", "stages.0"], "{:?}", config.family);
        assert!(names.ends_with(&["norm", "head"]), "{names:?}");
        let (checked, rerouted) = parts.iter().fold((0, 0), |sum, part| (sum.0 + part.checked, sum.1 + part.rerouted));
        assert!(checked > 20 * rerouted && checked > 100, "{checked} and {rerouted}");
        assert!(parts.iter().all(|part| part.passed()), "{parts:#?}");
    }
    Ok(())
}

/// Of two images, of which the last map has one pixel each, every channel would be normalised to -1 and 1.
#[test]
fn images_of_which_little_is_left_are_more_than_two() -> Result<()> {
    let config = ModelConfig { auto_pad: true, ..config() };
    assert_eq!([32, 16, 8, 1].map(|side| images_to_check(&config, [side, side])), [2, 4, 16, 16]);
    let parts = check_gradients(&config, [1, 1], 2, 1, |_| ())?;
    assert!(parts.iter().all(|part| part.passed()), "{parts:#?}");
    Ok(())
}

#[test]
fn a_model_without_logits_has_no_loss() -> Result<()> {
    let headless = ModelConfig { features: Features::Pooled, ..config() };
    let refused = check_gradients(&headless, [32, 32], 1, 1, |_| ());
    assert!(matches!(refused, Err(Error::Headless { features: "pooled" })), "{refused:?}");
    assert!(matches!(check_gradients(&config(), [36, 32], 1, 1, |_| ()), Err(Error::ImageSize { .. })));
    Ok(())
}
