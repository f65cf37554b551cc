//! AdamW against its formulas, one number at a time.

use super::*;
use crate::testing::{draw, give, parameters, values};
use approx::assert_relative_eq;
use serde::de::value::{Error as SerdeError, MapDeserializer};
use tensor::DType;
use tensor::cpu::parallel::thread_pool;

/// Alternately decayed and not; one that spans several chunks; one without elements.
const SHAPES: [(&str, &[usize]); 7] = [
    ("stem.weight", &[37, 19]),
    ("stem.bias", &[19]),
    ("big.weight", &[301, 149]),
    ("norm.weight", &[149]),
    ("none.weight", &[0, 3]),
    ("conv.weight", &[3, 3, 8]),
    ("temperature", &[]),
];

fn gradients_of_step(step: u64) -> Vec<Vec<f64>> {
    let draw = |(i, (_, shape)): (usize, &(&str, &[usize]))| draw(shape.iter().product(), 100 * step + i as u64);
    SHAPES.iter().enumerate().map(draw).collect()
}

fn lr(step: u64) -> f64 {
    0.01 * step as f64
}

/// The norm of all of them together.
fn norm_of(gradients: &[Vec<f64>]) -> f64 {
    gradients.iter().flatten().map(|g| g * g).sum::<f64>().sqrt()
}

/// Makes the steps `range`, with moments that continue from those of `adamw`.
fn run(adamw: &mut AdamW, parameters: &mut Parameters, range: std::ops::RangeInclusive<u64>, max_norm: f64) {
    let mut gradients = Gradients::new(parameters).unwrap();
    for step in range {
        give(parameters, &mut gradients, &gradients_of_step(step));
        let norm = adamw.step_clipped(parameters, &mut gradients, lr(step), max_norm).unwrap();
        assert_relative_eq!(norm, norm_of(&gradients_of_step(step)), max_relative = 1e-6);
    }
}

/// The formulas of the module's head, one number at a time.
fn plain(config: &AdamWConfig, mut p: f64, decays: bool, rate: f64, gradients: &[f64]) -> f64 {
    let [beta1, beta2] = config.betas;
    let (mut m, mut v) = (0.0, 0.0);
    for (t, g) in (1..).zip(gradients) {
        let lr = rate * lr(t);
        if decays {
            p -= lr * config.weight_decay * p;
        }
        m = beta1 * m + (1.0 - beta1) * g;
        v = beta2 * v + (1.0 - beta2) * g * g;
        let m_hat = m / (1.0 - beta1.powf(t as f64));
        let v_hat = v / (1.0 - beta2.powf(t as f64));
        p -= lr * m_hat / (v_hat.sqrt() + config.eps);
    }
    p
}

/// A learning rate of its own for the largest, none at all for one that decays and one that does not.
fn rate_of(name: &str) -> f64 {
    match name {
        "big.weight" => 0.1,
        "conv.weight" | "stem.bias" => 0.0,
        _ => 1.0,
    }
}

#[test]
fn agrees_with_the_plain_formulas() {
    const STEPS: u64 = 5;
    let config = AdamWConfig { betas: [0.8, 0.99], eps: 1e-6, weight_decay: 0.3 };
    let gradients: Vec<Vec<Vec<f64>>> = (1..=STEPS).map(gradients_of_step).collect();
    // Of norms from 122.9 to 123.7: no step is clipped, some are, all are.
    let cases = [(f64::INFINITY, DType::F64, 1e-12), (123.3, DType::F64, 1e-12), (1.0, DType::F64, 1e-12)];
    for (max_norm, dtype, tolerance) in cases.into_iter().chain([(f64::INFINITY, DType::F32, 2e-5)]) {
        let factors = gradients.iter().map(|step| (max_norm / norm_of(step)).min(1.0)).collect::<Vec<_>>();
        let clipped = factors.iter().filter(|&&factor| factor < 1.0).count() as u64;
        assert!(if max_norm == 123.3 { (1..STEPS).contains(&clipped) } else { [0, STEPS].contains(&clipped) });
        let mut parameters = parameters(dtype, &SHAPES);
        let before = values(&parameters);
        let mut adamw = AdamW::with_rates(&parameters, config, rate_of).unwrap();
        run(&mut adamw, &mut parameters, 1..=STEPS, max_norm);
        assert_eq!(adamw.steps(), STEPS);
        for (i, after) in values(&parameters).iter().enumerate() {
            for (j, &after) in after.iter().enumerate() {
                let history: Vec<f64> =
                    gradients.iter().zip(&factors).map(|(step, factor)| factor * step[i][j]).collect();
                let (name, shape) = SHAPES[i];
                let expected = plain(&config, before[i][j], shape.len() >= 2, rate_of(name), &history);
                assert_relative_eq!(after, expected, epsilon = tolerance, max_relative = tolerance);
            }
        }
    }
}

/// m̂ = g and v̂ = g² after one step, so p moves by η·g/(|g| + ε).
#[test]
fn one_step_by_hand() {
    let mut parameters = parameters(DType::F64, &[("weight", &[1, 2]), ("bias", &[1])]);
    parameters.flat_mut::<f64>().unwrap()[..2].copy_from_slice(&[1.0, -2.0]);
    let config = AdamWConfig { eps: 0.5, weight_decay: 0.1, ..AdamWConfig::default() };
    let bias = values(&parameters)[1][0];
    let mut gradients = Gradients::new(&parameters).unwrap();
    give(&parameters, &mut gradients, &[vec![0.5, -1.5], vec![0.0]]);
    AdamW::new(&parameters, config).unwrap().step(&mut parameters, &mut gradients, 0.2).unwrap();
    let after = values(&parameters);
    assert_relative_eq!(after[0][0], 0.98 - 0.2 * 0.5, epsilon = 1e-14);
    assert_relative_eq!(after[0][1], -1.96 + 0.2 * 0.75, epsilon = 1e-14);
    assert_eq!(after[1][0], bias);
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let bits = [1, 2].map(|threads| {
        thread_pool(threads).unwrap().install(|| {
            let mut parameters = parameters(DType::F32, &SHAPES);
            let mut adamw = AdamW::new(&parameters, AdamWConfig::default()).unwrap();
            run(&mut adamw, &mut parameters, 1..=3, f64::INFINITY);
            parameters.flat().to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>()
        })
    });
    assert_eq!(bits[0], bits[1]);
}

#[test]
fn a_restored_optimiser_continues_with_the_same_bits() {
    let mut straight = parameters(DType::F32, &SHAPES);
    let mut adamw = AdamW::new(&straight, AdamWConfig::default()).unwrap();
    run(&mut adamw, &mut straight, 1..=3, f64::INFINITY);
    let (state, mut resumed, mut again) = (adamw.state(), straight.duplicate().unwrap(), straight.duplicate().unwrap());
    let mut other = AdamW::new(&resumed, AdamWConfig::default()).unwrap();
    other.restore(&state).unwrap();
    adamw.restore(&state).unwrap();
    run(&mut adamw, &mut straight, 4..=6, f64::INFINITY);
    run(&mut other, &mut resumed, 4..=6, f64::INFINITY);
    assert_eq!(straight.flat().to_vec::<f32>().unwrap(), resumed.flat().to_vec::<f32>().unwrap());
    assert_eq!((state.steps, other.steps()), (3, 6));
    // Nobody else has the moments any more, so they are not copied.
    let place = |m: &Tensor| m.as_slice::<f32>("test").unwrap().as_ptr();
    let theirs = place(&state.m);
    let mut third = AdamW::resumed(&again, AdamWConfig::default(), |_| 1.0, state).unwrap();
    assert_eq!(place(&third.m), theirs);
    run(&mut third, &mut again, 4..=6, f64::INFINITY);
    assert_eq!(straight.flat().to_vec::<f32>().unwrap(), again.flat().to_vec::<f32>().unwrap());
}

/// Not by weight decay either, nor by moments from before it was frozen.
#[test]
fn a_frozen_parameter_is_not_moved() {
    let mut before = parameters(DType::F64, &SHAPES);
    let config = AdamWConfig { weight_decay: 0.3, ..AdamWConfig::default() };
    let mut adamw = AdamW::new(&before, config).unwrap();
    run(&mut adamw, &mut before, 1..=3, f64::INFINITY);
    let mut after = before.duplicate().unwrap();
    after.freeze(|name| name.starts_with("big") || name == "stem.bias");
    let mut gradients = Gradients::new(&after).unwrap();
    assert!(
        matches!(adamw.step(&mut after, &mut gradients, 0.1), Err(Error::Layout { .. })),
        "made before it was frozen"
    );
    let state = adamw.state();
    let mut adamw = AdamW::new(&after, config).unwrap();
    adamw.restore(&state).unwrap();
    for step in 4..=5 {
        give(&after, &mut gradients, &gradients_of_step(step));
        adamw.step(&mut after, &mut gradients, lr(step)).unwrap();
    }
    let layout = after.layout();
    for id in layout.ids().filter(|&id| !layout.span(id).is_empty()) {
        let same = after.get(id).to_vec::<f64>().unwrap() == before.get(id).to_vec::<f64>().unwrap();
        assert_eq!(same, layout.is_frozen(id), "{}", layout.name(id));
    }
}

#[test]
fn gaps_stay_zero() {
    let mut parameters = parameters(DType::F32, &SHAPES);
    let mut adamw = AdamW::new(&parameters, AdamWConfig::default()).unwrap();
    run(&mut adamw, &mut parameters, 1..=2, f64::INFINITY);
    let layout = Arc::clone(parameters.layout());
    for flat in [parameters.flat(), &adamw.m, &adamw.v] {
        let mut flat = flat.to_vec::<f32>().unwrap();
        layout.ids().for_each(|id| flat[layout.span(id)].fill(0.0));
        assert!(flat.iter().all(|&x| x == 0.0));
    }
}

/// ½·Σ aᵢ·(xᵢ − cᵢ)² with curvatures from 1 to 1000: each coordinate has its own scale.
#[test]
fn minimises_a_quadratic() {
    let mut parameters = parameters(DType::F64, &[("x", &[8])]);
    let centre = draw(8, 77);
    let config = AdamWConfig { weight_decay: 0.0, ..AdamWConfig::default() };
    let mut adamw = AdamW::new(&parameters, config).unwrap();
    let mut gradients = Gradients::new(&parameters).unwrap();
    let distance = |parameters: &Parameters| {
        values(parameters)[0].iter().zip(&centre).map(|(x, c)| (x - c).abs()).fold(0.0, f64::max)
    };
    assert!(distance(&parameters) > 0.5);
    for step in 0..2000 {
        let slope = |(i, (x, c)): (usize, (&f64, &f64))| 10f64.powf(3.0 * i as f64 / 7.0) * (x - c);
        let slopes = values(&parameters)[0].iter().zip(&centre).enumerate().map(slope).collect();
        give(&parameters, &mut gradients, &[slopes]);
        adamw.step(&mut parameters, &mut gradients, 0.01 * (1.0 - f64::from(step) / 2000.0)).unwrap();
    }
    assert!(distance(&parameters) < 1e-4, "{}", distance(&parameters));
}

#[test]
fn foreign_gradients_parameters_and_states_are_refused() {
    let mut own = parameters(DType::F32, &SHAPES);
    let foreign = [parameters(DType::F32, &SHAPES[..3]), parameters(DType::F64, &SHAPES)];
    for mut foreign in foreign {
        let mut adamw = AdamW::new(&own, AdamWConfig::default()).unwrap();
        let step = adamw.step(&mut own, &mut Gradients::new(&foreign).unwrap(), 0.1);
        assert!(matches!(step, Err(Error::Layout { what: "gradients", .. })));
        let step = adamw.step(&mut foreign, &mut Gradients::new(&own).unwrap(), 0.1);
        assert!(matches!(step, Err(Error::Layout { what: "parameters", .. })));
        let state = AdamW::new(&foreign, AdamWConfig::default()).unwrap().state();
        assert!(matches!(adamw.restore(&state), Err(Error::Layout { what: "first moments", .. })));
        let half = AdamWState { v: state.v, ..adamw.state() };
        assert!(matches!(adamw.restore(&half), Err(Error::Layout { what: "second moments", .. })));
        assert_eq!(adamw.step(&mut own, &mut Gradients::default(), 0.1), Err(Error::NoParameters));
    }
    // Of one length in both types.
    let [narrow, wide] = [DType::F32, DType::F64].map(|dtype| parameters(dtype, &[("x", &[16])]));
    let state = AdamW::new(&wide, AdamWConfig::default()).unwrap().state();
    let restored = AdamW::new(&narrow, AdamWConfig::default()).unwrap().restore(&state);
    assert!(matches!(restored, Err(Error::Layout { what: "first moments", .. })));
    // Gradients and parameters of another model are accepted if they have the same layout, but not of two.
    let mut alike = parameters(DType::F32, &SHAPES);
    let mut gradients = Gradients::new(&alike).unwrap();
    let mut adamw = AdamW::new(&own, AdamWConfig::default()).unwrap();
    for of_either in [&mut own, &mut alike] {
        give(of_either, &mut gradients, &SHAPES.map(|(_, shape)| vec![1.0; shape.iter().product()]));
        adamw.step(of_either, &mut gradients, 0.1).unwrap();
    }
    give(&own, &mut gradients, &SHAPES.map(|(_, shape)| vec![1.0; shape.iter().product()]));
    assert_eq!(adamw.step(&mut alike, &mut gradients, 0.1), Err(autograd::Error::TwoModels.into()));
    adamw.step(&mut own, &mut gradients, 0.1).unwrap();
}

#[test]
fn moments_that_no_step_leaves_are_refused() {
    let own = parameters(DType::F32, &SHAPES);
    let mut adamw = AdamW::new(&own, AdamWConfig::default()).unwrap();
    let good = adamw.state();
    let with = |moment: &Tensor, wrong: f32| {
        let mut values = moment.to_vec::<f32>().unwrap();
        values[1] = wrong;
        Tensor::from_slice(&values, moment.shape().clone()).unwrap()
    };
    for wrong in [f32::NAN, f32::INFINITY, -1e-30] {
        let state = AdamWState { v: with(&good.v, wrong), ..good.clone() };
        assert!(matches!(adamw.restore(&state), Err(Error::Unusable { what: "second moments", .. })), "{wrong}");
        let state = AdamWState { m: with(&good.m, wrong), ..good.clone() };
        match adamw.restore(&state) {
            Err(Error::Unusable { what: "first moments", .. }) => assert!(!wrong.is_finite()),
            restored => assert!(restored.is_ok() && wrong.is_finite(), "{wrong}"),
        }
    }
}

#[test]
fn more_steps_than_can_be_counted_are_refused() {
    let mut adamw = AdamW::new(&parameters(DType::F32, &SHAPES), AdamWConfig::default()).unwrap();
    let state = AdamWState { steps: u64::MAX, ..adamw.state() };
    assert!(matches!(adamw.restore(&state), Err(Error::Unusable { what: "steps", .. })));
    assert_eq!(adamw.steps(), 0);
    adamw.restore(&AdamWState { steps: 1 << 53, ..adamw.state() }).unwrap();
}

/// Weights would become infinite, or NaN.
#[test]
fn a_rate_that_overflows_with_its_parameters_own_is_refused() {
    let decay = AdamWConfig { weight_decay: 1e30, ..AdamWConfig::default() };
    let step = |dtype, config, rate: f64, lr: f64| {
        let mut parameters = parameters(dtype, &[("a.weight", &[2, 2])]);
        let mut gradients = Gradients::new(&parameters).unwrap();
        give(&parameters, &mut gradients, &[vec![1.0; 4]]);
        AdamW::with_rates(&parameters, config, |_| rate)?.step(&mut parameters, &mut gradients, lr)
    };
    for (config, rate, lr) in [(AdamWConfig::default(), 1e300, 0.1), (decay, 1.0, 1e30)] {
        let refused = step(DType::F32, config, rate, lr);
        assert!(matches!(refused, Err(Error::Setting { what: "lr", .. })), "{refused:?}");
        step(DType::F64, config, rate, lr).unwrap();
    }
    step(DType::F64, AdamWConfig::default(), 1.0, 1e300).unwrap();
}

#[test]
fn a_refused_step_changes_nothing() {
    let mut parameters = parameters(DType::F32, &[("a", &[2, 2]), ("b", &[3])]);
    let before = values(&parameters);
    let mut adamw = AdamW::new(&parameters, AdamWConfig::default()).unwrap();
    let mut gradients = Gradients::new(&parameters).unwrap();
    give(&parameters, &mut gradients, &[vec![1.0; 4]]);
    let unreached = autograd::Error::Unreached { names: vec!["b".into()] };
    assert_eq!(adamw.step(&mut parameters, &mut gradients, 0.1), Err(unreached.into()));

    give(&parameters, &mut gradients, &[vec![1.0; 4], vec![1.0; 3]]);
    let tape = autograd::Tape::new();
    let first = parameters.layout().ids().next().unwrap();
    let on_tape = tape.parameter(&parameters, first);
    let refused = adamw.step(&mut parameters, &mut gradients, 0.1);
    assert!(matches!(refused, Err(Error::Tensor(tensor::Error::Shared { op: "parameters" }))));
    drop(on_tape);
    let state = adamw.state();
    let refused = adamw.step(&mut parameters, &mut gradients, 0.1);
    assert!(matches!(refused, Err(Error::Tensor(tensor::Error::Shared { op: "adamw" }))));
    drop(state);
    let infinite_in_f32 = (1e300, 1.0, "lr");
    let of_norm = [0.0, -1.0, f64::NAN].map(|max_norm| (0.1, max_norm, "max_norm"));
    for (lr, max_norm, name) in [(-1.0, 1.0, "lr"), (f64::NAN, 1.0, "lr"), infinite_in_f32].into_iter().chain(of_norm) {
        let refused = adamw.step_clipped(&mut parameters, &mut gradients, lr, max_norm);
        assert!(matches!(refused, Err(Error::Setting { what, .. }) if what == name));
    }
    let mut unsound = Gradients::new(&parameters).unwrap();
    for number in [f64::NAN, f64::INFINITY] {
        give(&parameters, &mut unsound, &[vec![1.0; 4], vec![1.0, number, 1.0]]);
        let refused = adamw.step(&mut parameters, &mut unsound, 0.1);
        assert!(matches!(refused, Err(Error::NonFinite { norm }) if norm.is_nan() == number.is_nan()), "{refused:?}");
        let twice = adamw.step(&mut parameters, &mut unsound, 0.1);
        assert_eq!(twice, Err(autograd::Error::NoBackward.into()), "the next pass is not added to these");
    }
    assert_eq!((values(&parameters), adamw.steps()), (before.clone(), 0));
    adamw.step(&mut parameters, &mut gradients, 0.0).unwrap();
    assert_eq!((values(&parameters), adamw.steps()), (before.clone(), 1), "a rate of zero");
    let twice = adamw.step(&mut parameters, &mut gradients, 0.1);
    assert_eq!(twice, Err(autograd::Error::NoBackward.into()), "along the same gradients");
    give(&parameters, &mut gradients, &[vec![1.0; 4], vec![1.0; 3]]);
    adamw.step(&mut parameters, &mut gradients, 0.1).unwrap();
    assert_ne!(values(&parameters), before);
}

/// The square of 1e21 is infinite in f32, and the second moment would stay so.
#[test]
fn gradients_whose_squares_overflow_are_refused_unless_they_are_clipped() {
    for (dtype, max_norm, refused) in
        [(DType::F32, f64::INFINITY, true), (DType::F32, 1.0, false), (DType::F64, f64::INFINITY, false)]
    {
        let mut parameters = parameters(dtype, &[("a", &[3])]);
        let (mut adamw, before) = (AdamW::new(&parameters, AdamWConfig::default()).unwrap(), values(&parameters));
        let mut gradients = Gradients::new(&parameters).unwrap();
        give(&parameters, &mut gradients, &[vec![1.0, 1e21, 1.0]]);
        let step = adamw.step_clipped(&mut parameters, &mut gradients, 0.1, max_norm);
        assert_eq!(matches!(step, Err(Error::NonFinite { .. })), refused, "{dtype}, clipped to {max_norm}: {step:?}");
        assert_eq!(values(&parameters) == before, refused);
        assert!(adamw.restore(&adamw.state()).is_ok(), "finite moments");
    }
}

#[test]
fn settings() {
    let read = |name: &str| {
        let fields = [(name.to_owned(), 0.1)].into_iter();
        AdamWConfig::deserialize(MapDeserializer::<_, SerdeError>::new(fields))
    };
    let expected = AdamWConfig { weight_decay: 0.1, ..AdamWConfig::default() };
    assert_eq!(read("weight_decay").unwrap(), expected);
    assert!(read("weight_decya").unwrap_err().to_string().contains("weight_decya"));

    let default = AdamWConfig::default();
    let wrong = [
        AdamWConfig { betas: [1.0, 0.999], ..default },
        AdamWConfig { betas: [0.9, f64::NAN], ..default },
        AdamWConfig { eps: 0.0, ..default },
        AdamWConfig { eps: 1e-60, ..default },
        AdamWConfig { weight_decay: -0.1, ..default },
        AdamWConfig { weight_decay: f64::INFINITY, ..default },
    ];
    let parameters = parameters(DType::F32, &[]);
    assert!(default.check().is_ok());
    for config in wrong {
        assert!(matches!(AdamW::new(&parameters, config), Err(Error::Setting { .. })), "{config:?}");
    }
}
