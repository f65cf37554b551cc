//! Every example runs to its end: they are pages of the documentation, and must not rot.

#[path = "../examples/bra_on_one_image.rs"]
mod bra_on_one_image;
#[path = "../examples/classify_picture.rs"]
mod classify_picture;
mod common;
#[path = "../examples/dense_head.rs"]
mod dense_head;
#[path = "../examples/new_operation.rs"]
mod new_operation;
#[path = "../examples/own_head.rs"]
mod own_head;
#[path = "../examples/resumed_loop.rs"]
mod resumed_loop;
#[path = "../examples/tensor_and_gradient.rs"]
mod tensor_and_gradient;
#[path = "../examples/training_loop.rs"]
mod training_loop;

#[test]
fn a_tensor_and_a_gradient() {
    tensor_and_gradient::main().unwrap();
}

#[test]
fn a_new_operation() {
    new_operation::main().unwrap();
}

#[test]
fn bra_on_one_image_() {
    bra_on_one_image::main().unwrap();
}

#[test]
fn a_training_loop() {
    training_loop::main().unwrap();
}

#[test]
fn a_head_of_ones_own() {
    own_head::main().unwrap();
}

#[test]
fn a_loop_that_is_resumed() {
    resumed_loop::main().unwrap();
}

#[test]
fn a_segmentation_head() {
    dense_head::main().unwrap();
}

#[test]
fn a_picture_is_classified() {
    let run = common::samples::trained("examples-trained", 1).run;
    let picture = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/images/horse.png");
    let classes = classify_picture::classify(&run, picture.as_ref()).unwrap();
    let sum: f32 = classes.iter().map(|(_, probability)| probability).sum();
    assert!(classes.len() > 1 && (sum - 1.0).abs() < 1e-5, "{classes:?}");
    let predicted =
        common::program::biformer(&["predict", "--top", "1", "--checkpoint", common::program::text(&run), picture]);
    assert!(predicted.ok().out.contains(&format!("%  {}  ", classes[0].0)), "as the program says");
    assert!(classify_picture::main().is_err(), "of no picture");
}

#[test]
fn every_example_is_tested() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
    for entry in std::fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let tested = include_str!("examples.rs").contains(&format!("{}::main()", name.trim_end_matches(".rs")));
        assert!(tested, "examples/{name} is not run by tests/examples.rs");
    }
}
