//! What the classes of weights that name none are taken to be.

use data::{class_among, imagenet_classes};

/// The names of the classes that a model's head is for.
#[derive(Debug)]
pub struct ClassNames {
    /// In the order of the head's outputs.
    pub names: Vec<String>,
    /// What was assumed of weights that name none, if it does not go without saying.
    pub assumption: Option<&'static str>,
}

/// Of weights that name no classes: ImageNet's if they are 1,000, or else numbers.
pub fn usual(count: usize) -> Vec<String> {
    match count {
        1000 => imagenet_classes(),
        _ => (0..count).map(|class| format!("class {class}")).collect(),
    }
}

/// Those that weights of `count` classes, which name none, are taken to have among data of these: the [`usual`] ones,
/// except where the data have as many, and either these are the numbers from 0 to 999 in any order (so ImageNet-V2 is
/// laid out), or none of them goes by a usual name.
pub fn assumed(count: usize, of_data: &[String]) -> ClassNames {
    let (usual, as_many) = (usual(count), count == of_data.len());
    if as_many && count == 1000 && (0..count).all(|class| of_data.contains(&class.to_string())) {
        return ClassNames {
            names: (0..count).map(|class| class.to_string()).collect(),
            assumption: Some(
                "the data's classes are the numbers from 0: they are taken to be ImageNet's, by their places",
            ),
        };
    }
    if as_many && of_data.iter().all(|class| class_among(class, &usual).is_none()) {
        return ClassNames {
            names: of_data.to_vec(),
            assumption: Some(
                "the weights name no classes; they are taken to be those of the data, in the order of their names",
            ),
        };
    }
    ClassNames { names: usual, assumption: None }
}
