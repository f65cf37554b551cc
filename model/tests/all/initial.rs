//! How the parameters of a new model are distributed.

use model::{BiFormer, Builder, Linear, ModelConfig, Result, preset};
use tensor::DType;

/// Asserts the mean of the powers 1, 2 and 4 of values, within five standard errors.
#[track_caller]
fn assert_moments(what: &str, values: &[f64], [second, fourth, eighth]: [f64; 3]) {
    let mean = |power: i32| values.iter().map(|x| x.powi(power)).sum::<f64>() / values.len() as f64;
    for (power, expected, of_square) in [(1, 0.0, second), (2, second, fourth), (4, fourth, eighth)] {
        let error = ((of_square - expected * expected) / values.len() as f64).sqrt();
        let found = mean(power);
        assert!((found - expected).abs() < 5.0 * error, "{what}: the mean of power {power} is {found}");
    }
}

#[test]
fn a_layer_without_inputs_starts_finite() -> Result<()> {
    let config = preset("nano")?.config();
    let layer = |builder: &mut Builder| Linear::convolution(builder, "constant", 0, 4, true);
    let (model, _) = BiFormer::with(&config, 1, DType::F32, layer)?;
    assert!(model.parameters.flat().to_vec::<f32>()?.iter().all(|x| x.is_finite()));
    Ok(())
}

/// Linear weights are normal with deviation 0.02. Convolutions, biases included, are uniform within ±1/√fan_in. Linear
/// biases and norms are 0 and 1.
#[test]
fn parameters_start_as_the_published_ones() -> Result<()> {
    for name in ["tiny", "stl_nchw"] {
        let config = preset(name)?.config().with_overrides(["depth=1,1,1,1"])?;
        let model = BiFormer::new(&config, 1, DType::F32)?;
        let layout = model.parameters.layout();
        for id in layout.ids() {
            let name = layout.name(id);
            let values: Vec<f64> = model.parameters.get(id).to_vec::<f32>()?.into_iter().map(f64::from).collect();
            // What a bias belongs to is told by the weight beside it.
            let weight = name.strip_suffix("bias").map_or(name.to_owned(), |layer| format!("{layer}weight"));
            let shape = layout.shape(layout.find(&weight).expect("a weight beside each bias"));
            match shape.len() {
                1 => assert!(values.iter().all(|&x| x == f64::from(name == weight)), "{name}"),
                2 if name != weight => assert!(values.iter().all(|&x| x == 0.0), "{name}"),
                2 => {
                    let scaled: Vec<f64> = values.iter().map(|x| x / 0.02).collect();
                    assert_moments(name, &scaled, [1.0, 3.0, 105.0]);
                }
                _ => {
                    let fan_in: usize = shape[1..].iter().product();
                    let scaled: Vec<f64> = values.iter().map(|x| x * (fan_in as f64).sqrt()).collect();
                    assert!(scaled.iter().all(|x| x.abs() < 1.0 + 1e-6), "{name}");
                    assert_moments(name, &scaled, [1.0 / 3.0, 1.0 / 5.0, 1.0 / 9.0]);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn gammas_start_at_layer_scale() -> Result<()> {
    let config = ModelConfig { layer_scale: 0.25, ..preset("nano")?.config() };
    let model = BiFormer::new(&config, 1, DType::F32)?;
    let layout = model.parameters.layout();
    let gammas: Vec<_> = layout.ids().filter(|&id| layout.name(id).contains("gamma")).collect();
    assert_eq!(gammas.len(), 2 * 7, "two for each block");
    for id in gammas {
        assert!(model.parameters.get(id).to_vec::<f32>()?.iter().all(|&x| x == 0.25), "{}", layout.name(id));
    }
    Ok(())
}
