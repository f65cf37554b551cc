//! What the models weigh and cost, against the published figures.

use model::cost::parts;
use model::{BiFormer, PRESETS, preset};
use tensor::DType;

/// 10⁹ multiply-adds of an image of 224x224, as the paper has them in its table of results (there called FLOPs).
#[test]
fn multiply_adds_are_the_published_ones() {
    for (name, published) in [("tiny", 2.2), ("small", 4.5), ("base", 9.8)] {
        let model = BiFormer::blank(&preset(name).unwrap().config(), DType::F32).unwrap();
        let all: u64 = parts(&model, 224, 224).unwrap().iter().map(|part| part.macs.total()).sum();
        assert!((all as f64 / 1e9 - published).abs() <= 0.05, "{name}: {all}");
    }
}

/// And those of our own for images of 32x32, as chapter 5 has them.
#[test]
fn multiply_adds_of_small_images() {
    for (name, all) in [("nano", 55_709_568), ("micro", 19_350_016)] {
        let model = BiFormer::blank(&preset(name).unwrap().config(), DType::F32).unwrap();
        assert_eq!(parts(&model, 32, 32).unwrap().iter().map(|part| part.macs.total()).sum::<u64>(), all, "{name}");
    }
}

/// The rough size is there before a model is made, and decides what is refused. It takes all mergings for 3x3 convolutions,
/// and those of Swin's layout are 2x2: 6 % more.
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
