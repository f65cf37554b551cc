//! What the models weigh and cost, against the published figures.

use model::cost::{Macs, macs, parts};
use model::{BiFormer, PRESETS, preset};
use tensor::DType;

/// 10⁹ multiply-adds of an image of 224x224, as the paper has them in its table of results (there called FLOPs).
#[test]
fn multiply_adds_are_the_published_ones() {
    for (name, published) in [("tiny", 2.2), ("small", 4.5), ("base", 9.8)] {
        let all = macs(&preset(name).unwrap().config(), 224, 224).unwrap().total();
        assert!((all as f64 / 1e9 - published).abs() <= 0.05, "{name}: {all}");
    }
}

/// And those of our own for images of 32x32, as chapter 5 has them.
#[test]
fn multiply_adds_of_small_images() {
    for (name, all) in [("nano", 55_709_568), ("micro", 19_350_016)] {
        assert_eq!(macs(&preset(name).unwrap().config(), 32, 32).unwrap().total(), all, "{name}");
    }
}

#[test]
fn parts_cost_what_the_model_costs() {
    for preset in PRESETS {
        let model = BiFormer::blank(&preset.config(), DType::F32).unwrap();
        let parts = parts(&model, 224, 224).unwrap();
        let of_parts: Macs = parts.iter().map(|part| part.macs).sum();
        assert_eq!(of_parts, macs(model.config(), 224, 224).unwrap(), "{}", preset.name);
        let parameters: usize = parts.iter().map(|part| part.parameters).sum();
        assert_eq!(parameters, model.parameters.layout().count(), "{}", preset.name);
    }
}

/// The rough size is there before a model is made, and decides what is refused. It takes all mergings for 3x3
/// convolutions, and those of Swin's layout are 2x2: 6 % more.
#[test]
fn a_rough_size_is_near_the_size() {
    for preset in PRESETS {
        let config = preset.config();
        let count = BiFormer::blank(&config, DType::F32).unwrap().parameters.layout().count() as f64;
        assert!(
            (config.rough_size() / count - 1.0).abs() < 0.07,
            "{}: {} of {count}",
            preset.name,
            config.rough_size()
        );
    }
}
