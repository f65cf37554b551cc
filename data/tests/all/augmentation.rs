//! The settings by which images are varied: as text, and within their ranges.

use crate::support::PLAIN;
use data::{Augmentation, EraseFill, Error, Transform};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as ValueError, MapDeserializer};

/// The default settings but for one, by its name.
fn with<T: IntoDeserializer<'static, ValueError>>(field: &'static str, value: T) -> Result<Augmentation, ValueError> {
    Augmentation::deserialize(MapDeserializer::new([(field, value)].into_iter()))
}

#[test]
fn settings_as_text() {
    let standard = Augmentation::default();
    assert_eq!(with("flip", 0.0).unwrap(), Augmentation { flip: 0.0, ..standard.clone() });
    assert_eq!(with("erase_fill", "noise").unwrap(), Augmentation { erase_fill: EraseFill::Noise, ..standard });
    assert!(with("flipp", 0.0).unwrap_err().to_string().contains("unknown field `flipp`"));
    assert!(with("erase_fill", "pixel").unwrap_err().to_string().contains("expected `mean` or `noise`"));
}

#[test]
fn settings_out_of_range() {
    #[track_caller]
    fn refused(field: &str, augmentation: Result<Augmentation, ValueError>) {
        match Transform::train(8, PLAIN, &augmentation.unwrap()) {
            Err(Error::Setting { name, .. }) => assert_eq!(name, field),
            other => panic!("{field}: {other:?}"),
        }
    }
    for (field, values) in [("padding", [9, u64::MAX]), ("rand_augment", [17, u64::MAX]), ("repeats", [0, 1001])] {
        values.into_iter().for_each(|value| refused(field, with(field, value)));
    }
    let (part, alpha) = ([-0.1, 1.1], [1e-3, 1e9]);
    for (field, values) in [
        ("flip", part),
        ("vertical_flip", part),
        ("erase", part),
        ("mix", part),
        ("balance", part),
        ("min_scale", [0.0, 1.1]),
        ("magnitude", [-0.1, 10.1]),
        ("magnitude_std", [-0.1, f64::NEG_INFINITY]),
        ("mixup", alpha),
        ("cutmix", alpha),
    ] {
        let all = values.into_iter().chain([-1.0, f64::INFINITY, f64::NAN]);
        all.for_each(|value| refused(field, with(field, value)));
    }
    let least =
        Augmentation { magnitude: 0.0, magnitude_std: 0.0, mixup: 0.01, cutmix: 100.0, ..Augmentation::default() };
    assert!(least.check(8).is_ok());
}
