//! The arithmetic that operations say they do, against the formulas of `biformer info`: two counts that know nothing
//! of each other.

use biformer::autograd::{Profile, Tape, Work};
use biformer::model::cost::parts;
use biformer::model::{BiFormer, Mode, preset};
use biformer::tensor::{DType, Tensor};
use std::sync::Arc;

#[test]
fn operations_count_the_multiply_adds_that_info_computes() {
    // Padded before the projection and after it; with and without local context; images that are not square.
    for (name, set, [height, width]) in [
        ("nano", &[][..], [32, 32]),
        ("tiny", &["auto_pad=true", "depth=2,1,2,1"], [100, 70]),
        ("stl", &["auto_pad=true", "depth=1,1,2,1"], [64, 96]),
        ("stl_nchw", &["depth=1,1,2,1"], [240, 256]),
        ("nano", &["lce_kernel=0", "topks=1,2,-1", "soft_routing=true"], [32, 64]),
    ] {
        let config = preset(name).unwrap().config().with_overrides(set.iter().copied()).unwrap();
        let model = BiFormer::new(&config, 0, DType::F32).unwrap();
        let profile = Arc::<Profile>::default();
        let tape = Tape::inference().profiled(Some(profile.clone()));
        let images = 2;
        model.forward(&tape, &Tensor::zeros([images, height, width, 3], DType::F32), Mode::Evaluate).unwrap();
        let lines = profile.lines();
        assert!(lines.iter().all(|line| line.work == Work::Forward));
        let counted: u64 = lines.iter().map(|line| line.multiply_adds).sum();
        let computed: u64 = parts(&model, height, width).unwrap().iter().map(|part| part.macs.total()).sum();
        assert_eq!(counted, images as u64 * computed, "{name} {set:?} {height}x{width}");
    }
}
