//! What a model returns without a head: what the head would see.

use autograd::Tape;
use model::{BiFormer, Mode, Result, preset};
use tensor::rng::Philox;
use tensor::{DType, Tensor};

#[test]
fn the_head_makes_logits_of_pooled_features() -> Result<()> {
    let fields = ["depth=1,1,1", "embed_dim=24,48,48", "topks=1,2,-1", "n_win=2", "head_dim=24", "num_classes=7"];
    for name in ["nano", "stl_nchw"] {
        let config = preset(name)?.config().with_overrides(fields)?;
        let whole = BiFormer::new(&config, 1, DType::F64)?;
        let mut trunk = BiFormer::blank(&config.with_overrides(["features=pooled"])?, DType::F64)?;
        let weights = whole.state_dict()?;
        assert!(trunk.load(&weights, "whole")?.is_empty(), "{name}: nothing is missing");

        let values: Vec<f64> = (0..3 * 64 * 64 * 3).map(|i| f64::from(Philox::new(1, 0).uniform(i))).collect();
        let images = Tensor::from_slice(&values, [3, 64, 64, 3])?;
        let tape = Tape::inference();
        let pooled = trunk.forward(&tape, &images, Mode::Evaluate)?;
        assert_eq!(*pooled.values[0].shape(), [3, 48]);
        let [weight, bias] = ["head.weight", "head.bias"].map(|name| tape.constant(weights.tensors[name].clone()));
        let logits = ops::linear(&pooled.values[0], &weight, Some(&bias))?.value().to_vec::<f64>()?;
        let expected = whole.forward(&tape, &images, Mode::Evaluate)?.logits().value().to_vec::<f64>()?;
        assert_eq!(logits, expected, "{name}");
    }
    Ok(())
}
