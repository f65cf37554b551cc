//! What differs from stage to stage and from block to block.

use autograd::Tape;
use model::{BiFormer, Mode, Result, preset};
use tensor::{DType, Tensor};

#[test]
fn stochastic_depth_rises_evenly_from_the_first_block_to_the_last() -> Result<()> {
    let tiny = preset("tiny")?.config().with_overrides(["drop_path=0.1"])?;
    // As the published code gave them; 14 blocks.
    for (block, rate) in [(0, 0.0), (1, 0.007692), (2, 0.015385), (13, 0.1)] {
        assert!((tiny.drop_path_of(block) - rate).abs() < 5e-7, "block {block}: {}", tiny.drop_path_of(block));
    }
    let steps: Vec<f64> = (1..14).map(|block| tiny.drop_path_of(block) - tiny.drop_path_of(block - 1)).collect();
    assert!(steps.iter().all(|step| (step - 0.1 / 13.0).abs() < 1e-15), "{steps:?}");
    let fields = ["depth=1", "embed_dim=16", "topks=1", "head_dim=8", "drop_path=0.1"];
    assert_eq!(preset("nano")?.config().with_overrides(fields)?.drop_path_of(0), 0.0, "the first block is the last");
    Ok(())
}

#[test]
fn a_list_gives_each_stage_its_own() -> Result<()> {
    let fields = ["depth=1,1", "embed_dim=16,32", "topks=2,1", "head_dim=8", "n_win=4,2", "mlp_ratio=2,4"];
    let model = BiFormer::new(&preset("nano")?.config().with_overrides(fields)?, 1, DType::F32)?;
    let layout = model.parameters.layout();
    let hidden = |stage: usize| {
        let id = layout.find(&format!("stages.{stage}.0.mlp.0.weight")).expect("an MLP");
        layout.shape(id).to_vec()
    };
    assert_eq!([hidden(0), hidden(1)], [[2 * 16, 16], [4 * 32, 32]]);
    let images = Tensor::zeros([3, 32, 32, 3], DType::F32);
    let routes = model.forward(&Tape::inference(), &images, Mode::Evaluate)?.trace.routes;
    let shapes: Vec<_> = routes.iter().map(|routes| routes.indices.shape().to_vec()).collect();
    assert_eq!(shapes, [[3, 4 * 4, 2], [3, 2 * 2, 1]]);
    Ok(())
}
