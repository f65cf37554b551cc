//! The optimiser on the emulated GPU against the one on the CPU.

use autograd::gradcheck::relative_error;
use autograd::{Gradients, InputGrads, Parameters, ParametersBuilder, Result, Rule, Tape, rule_fields};
use optim::{AdamW, AdamWConfig, Ema, EmaConfig, EmaState, Error, gradient_norm};
use standin::Standin;
use tensor::cuda::Gpu;
use tensor::cuda::nvidia::compiler::version;
use tensor::{DType, Device, Tensor};

/// Parameters that decay and others, some not a whole number of cache lines.
fn parameters(dtype: DType) -> Parameters {
    let mut builder = ParametersBuilder::default();
    for (name, shape) in [("a.weight", &[37, 5][..]), ("a.bias", &[37]), ("norm", &[3]), ("b.weight", &[4, 4, 9])] {
        let count: usize = shape.iter().product();
        builder.add(name, shape, (0..count).map(|i| (i as f64 * 0.37).sin()));
    }
    builder.build(dtype).unwrap()
}

/// An operation whose gradient is given.
struct Given {
    gradient: Tensor,
}

impl Rule for Given {
    rule_fields!("given", gradient);

    fn backward(self: Box<Self>, _: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        grads.give(0, self.gradient)
    }
}

/// Begins a step in which the gradient of each parameter is this function of the element's place.
fn give(parameters: &Parameters, gradients: &mut Gradients, value: impl Fn(usize) -> f64) {
    gradients.begin_step();
    for id in parameters.layout().ids() {
        let tape = Tape::new();
        let p = tape.parameter(parameters, id);
        let values: Vec<f64> = (0..p.value().count()).map(&value).collect();
        let gradient = Tensor::from_slice(&values, p.shape().clone()).unwrap().cast(p.dtype()).unwrap();
        let gradient = gradient.to_device(&p.value().device()).unwrap();
        let loss = Tensor::zeros_on(&gradient.device(), [], gradient.dtype()).unwrap();
        let loss = tape.record("given", &[&p], loss, || Given { gradient }).unwrap();
        tape.backward(&loss, gradients).unwrap();
    }
}

/// What some steps make of the parameters: themselves, their average, and the norms of the gradients.
fn train(start: &Parameters, device: &Device) -> [Vec<f64>; 3] {
    let mut parameters = start.duplicate().unwrap().to_device(device).unwrap();
    let mut gradients = Gradients::new(&parameters).unwrap();
    let config = AdamWConfig { weight_decay: 0.3, ..AdamWConfig::default() };
    let rate_of = |name: &str| if name.starts_with("a.") { 0.25 } else { 1.0 };
    let mut adamw = AdamW::with_rates(&parameters, config, rate_of).unwrap();
    let mut ema = Ema::new(&parameters, EmaConfig { decay: 0.9, warmup: false }).unwrap();
    let mut norms = vec![];
    for step in 0..4 {
        give(&parameters, &mut gradients, |i| ((i + step * 7) as f64 * 0.61).cos());
        norms.push(gradient_norm(&gradients).unwrap());
        norms.push(adamw.step_clipped(&mut parameters, &mut gradients, 0.05, 1.0).unwrap());
        ema.update(&parameters).unwrap();
        let (moments, average) = (adamw.state(), ema.average().duplicate().unwrap());
        adamw.restore(&moments).unwrap();
        ema.restore(&EmaState { updates: ema.updates(), average: average.flat().clone() }).unwrap();
    }
    let wide = |flat: &Tensor| flat.cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
    [wide(parameters.flat()), wide(ema.average().flat()), norms]
}

#[test]
fn steps_norms_and_averages_agree() {
    let Some(gpu) = Gpu::for_tests(3) else { return };
    let device = Device::Cuda(gpu);
    for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-14)] {
        let start = parameters(dtype);
        let (cpu, gpu) = (train(&start, &Device::Cpu), train(&start, &device));
        for (what, (cpu, gpu)) in ["parameters", "average", "norms"].into_iter().zip(cpu.iter().zip(&gpu)) {
            assert_eq!(cpu.len(), gpu.len());
            for (cpu, gpu) in cpu.iter().zip(gpu) {
                assert!((cpu - gpu).abs() <= tolerance * cpu.abs().max(1.0), "{dtype} {what}: {gpu}, not {cpu}");
            }
        }
    }
}

#[test]
fn an_average_that_is_taken_along_has_the_bits_of_one_that_follows() {
    let Some(gpu) = Gpu::for_tests(5) else { return };
    let device = Device::Cuda(gpu);
    let start = parameters(DType::F32).to_device(&device).unwrap();
    let run = |along: bool| {
        let mut parameters = start.duplicate().unwrap();
        let mut gradients = Gradients::new(&parameters).unwrap();
        let mut adamw = AdamW::new(&parameters, AdamWConfig::default()).unwrap();
        let mut ema = Ema::new(&parameters, EmaConfig { decay: 0.9, warmup: true }).unwrap();
        for _ in 0..3 {
            give(&parameters, &mut gradients, |i| (i as f64 * 0.61).cos());
            adamw.prepare(&parameters, 0.05, 1.0, along.then_some(&mut ema)).unwrap();
            adamw.clip_and_step(&mut parameters, &mut gradients, along.then_some(&mut ema)).unwrap();
            adamw.finish(along.then_some(&mut ema)).unwrap();
            if !along {
                ema.update(&parameters).unwrap();
            }
        }
        assert_eq!((adamw.steps(), ema.updates()), (3, 3));
        let rate = ema.rate().unwrap().to_vec::<f32>().unwrap();
        assert_eq!(rate, [(1.0 - EmaConfig { decay: 0.9, warmup: true }.decay_at(2)) as f32]);
        [parameters.flat(), ema.average().flat()].map(|flat| flat.to_vec::<f32>().unwrap())
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn gradients_whose_squares_overflow_are_refused_unless_they_are_clipped() {
    let Some(gpu) = Gpu::for_tests(3) else { return };
    // A norm beyond f32 is refused even if it is clipped.
    for (device, (large, max_norm, refused)) in [Device::Cpu, Device::Cuda(gpu)].into_iter().flat_map(|device| {
        [(1e21, f64::INFINITY, true), (1e21, 1.0, false), (3.4e38, 1.0, true)].map(|case| (device.clone(), case))
    }) {
        let mut parameters = parameters(DType::F32).to_device(&device).unwrap();
        let mut gradients = Gradients::new(&parameters).unwrap();
        let mut adamw = AdamW::new(&parameters, AdamWConfig::default()).unwrap();
        give(&parameters, &mut gradients, |i| if i < 2 { large } else { 1.0 });
        let step = adamw.step_clipped(&mut parameters, &mut gradients, 0.1, max_norm);
        assert_eq!(matches!(step, Err(Error::NonFinite { .. })), refused, "{large} clipped to {max_norm}: {step:?}");
    }
}

/// Asserts that a step was refused because nobody had prepared it.
fn assert_refused(error: Error) {
    assert!(error.to_string().contains("prepared"), "{error}");
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    let Some(gpu) = Gpu::for_tests(3) else { return };
    for (dtype, value) in [(DType::F32, f64::NAN), (DType::F64, f64::NAN), (DType::F32, f64::INFINITY)] {
        let mut parameters = parameters(dtype).to_device(&Device::Cuda(gpu.clone())).unwrap();
        let mut gradients = Gradients::new(&parameters).unwrap();
        let mut adamw = AdamW::new(&parameters, AdamWConfig::default()).unwrap();
        let mut ema = Ema::new(&parameters, EmaConfig { decay: 0.9, warmup: false }).unwrap();
        let mut step = |of_element: &dyn Fn(usize) -> f64| {
            give(&parameters, &mut gradients, of_element);
            adamw.prepare(&parameters, 0.05, 1.0, Some(&mut ema)).unwrap();
            adamw.clip_and_step(&mut parameters, &mut gradients, Some(&mut ema)).unwrap();
            let (norm, moments) = (adamw.finish(Some(&mut ema)), adamw.state());
            let all = [parameters.flat(), &moments.m, &moments.v, ema.average().flat()];
            assert_eq!((adamw.steps(), ema.updates()), (1, 1), "what was no step is not counted");
            (norm, all.map(|flat| flat.cast(DType::F64).unwrap().to_vec::<f64>().unwrap()))
        };
        let (norm, before) = step(&|i| (i as f64 * 0.61).cos());
        assert!(norm.is_ok());
        let (norm, after) = step(&|i| if i == 1 { value } else { 1.0 });
        assert!(matches!(norm, Err(Error::NonFinite { .. })) && after == before, "{dtype} {value}");
        // In one call as well.
        give(&parameters, &mut gradients, |i| if i == 1 { value } else { 1.0 });
        let refused = adamw.step_clipped(&mut parameters, &mut gradients, 0.05, 1.0);
        assert!(matches!(refused, Err(Error::NonFinite { .. })), "{dtype} {value}: {refused:?}");
        let twice = adamw.step_clipped(&mut parameters, &mut gradients, 0.05, 1.0);
        assert_eq!(twice, Err(autograd::Error::NoBackward.into()), "their step has ended");
        give(&parameters, &mut gradients, |_| 1.0);
        assert_refused(adamw.clip_and_step(&mut parameters, &mut gradients, None).unwrap_err());
        assert_eq!(adamw.steps(), 1);
    }
}

/// Its constants would be those of another step, or none.
#[test]
fn a_step_that_was_not_prepared_is_refused() {
    let Some(gpu) = Gpu::for_tests(2) else { return };
    let mut parameters = parameters(DType::F32).to_device(&Device::Cuda(gpu)).unwrap();
    let mut gradients = Gradients::new(&parameters).unwrap();
    give(&parameters, &mut gradients, |i| (i as f64 * 0.61).cos());
    let start = parameters.flat().to_vec::<f32>().unwrap();
    let mut adamw = AdamW::new(&parameters, AdamWConfig::default()).unwrap();
    let mut ema = Ema::new(&parameters, EmaConfig { decay: 0.9, warmup: false }).unwrap();
    assert_refused(adamw.clip_and_step(&mut parameters, &mut gradients, None).unwrap_err());
    assert_refused(adamw.finish(None).unwrap_err());
    for length in [0.0, f64::NAN] {
        let refused = adamw.prepare(&parameters, 0.05, length, None).unwrap_err();
        assert!(matches!(refused, Error::Setting { what: "max_norm", .. }), "{refused}");
    }
    assert_refused(adamw.clip_and_step(&mut parameters, &mut gradients, None).unwrap_err());
    adamw.prepare(&parameters, 0.05, 1.0, None).unwrap();
    assert_refused(adamw.clip_and_step(&mut parameters, &mut gradients, Some(&mut ema)).unwrap_err());
    assert_eq!(parameters.flat().to_vec::<f32>().unwrap(), start);
    adamw.clip_and_step(&mut parameters, &mut gradients, None).unwrap();
    // Nor is one made twice, or counted twice, or counted that was not made.
    give(&parameters, &mut gradients, |i| (i as f64 * 0.61).cos());
    assert_refused(adamw.clip_and_step(&mut parameters, &mut gradients, None).unwrap_err());
    adamw.finish(None).unwrap();
    assert_refused(adamw.finish(None).unwrap_err());
    adamw.prepare(&parameters, 0.05, 1.0, None).unwrap();
    let unmade = adamw.finish(None).unwrap_err();
    assert!(matches!(unmade, Error::NonFinite { norm } if norm.is_nan()), "{unmade}");
    assert_eq!(adamw.steps(), 1);
    // Nor is there a step over what someone else still sees: when it is replayed nothing asks any more.
    let is_shared = |outcome| matches!(outcome, Err(Error::Tensor(tensor::Error::Shared { .. })));
    let (seen, moments, average) = (parameters.share(), adamw.state(), ema.state());
    assert!(is_shared(adamw.prepare(&parameters, 0.05, 1.0, None)));
    drop(seen);
    assert!(is_shared(adamw.prepare(&parameters, 0.05, 1.0, None)));
    drop(moments);
    assert!(is_shared(adamw.prepare(&parameters, 0.05, 1.0, Some(&mut ema))));
    drop(average);
    adamw.prepare(&parameters, 0.05, 1.0, Some(&mut ema)).unwrap();
    // What was prepared serves no step after another one, nor after a return to an earlier state.
    give(&parameters, &mut gradients, |i| (i as f64 * 0.61).cos());
    adamw.step(&mut parameters, &mut gradients, 0.05).unwrap();
    give(&parameters, &mut gradients, |i| (i as f64 * 0.61).cos());
    assert_refused(adamw.clip_and_step(&mut parameters, &mut gradients, None).unwrap_err());
    adamw.prepare(&parameters, 0.05, 1.0, None).unwrap();
    adamw.restore(&adamw.state()).unwrap();
    assert_refused(adamw.clip_and_step(&mut parameters, &mut gradients, None).unwrap_err());
    // Nor does an average's.
    for forget in [
        |ema: &mut Ema, new: &Parameters| ema.update(new).unwrap(),
        |ema: &mut Ema, _: &Parameters| {
            let average = ema.average().flat().duplicate().unwrap();
            ema.restore(&EmaState { updates: ema.updates(), average }).unwrap();
        },
    ] {
        adamw.prepare(&parameters, 0.05, 1.0, Some(&mut ema)).unwrap();
        forget(&mut ema, &parameters);
        assert_refused(adamw.clip_and_step(&mut parameters, &mut gradients, Some(&mut ema)).unwrap_err());
    }
}

/// Its buffer may be shorter than the parameters that the kernel moves it towards.
#[test]
fn another_models_average_is_not_taken_along() {
    let Some(gpu) = Gpu::for_tests(2) else { return };
    let mut parameters = parameters(DType::F32).to_device(&Device::Cuda(gpu.clone())).unwrap();
    let mut gradients = Gradients::new(&parameters).unwrap();
    give(&parameters, &mut gradients, |i| (i as f64 * 0.61).cos());
    let mut builder = ParametersBuilder::default();
    builder.add("a.weight", [37, 5], vec![0.0; 37 * 5]);
    let other = builder.build(DType::F32).unwrap().to_device(&Device::Cuda(gpu)).unwrap();
    let mut average = Ema::new(&other, EmaConfig::default()).unwrap();
    let mut adamw = AdamW::new(&parameters, AdamWConfig::default()).unwrap();
    adamw.prepare(&parameters, 0.05, 1.0, Some(&mut average)).unwrap();
    let refused = adamw.clip_and_step(&mut parameters, &mut gradients, Some(&mut average));
    assert!(matches!(refused, Err(Error::Layout { what: "parameters", .. })), "{refused:?}");
}

/// In several pieces of the norm's sum.
#[test]
fn a_long_gradient_is_clipped_as_on_the_cpu() {
    let Some(gpu) = Gpu::for_tests(3) else { return };
    for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-14)] {
        let mut builder = ParametersBuilder::default();
        builder.add("weight", [200, 250], (0..50_000).map(|i| (i as f64 * 0.37).sin()));
        let start = builder.build(dtype).unwrap();
        let run = |device: &Device| {
            let mut parameters = start.duplicate().unwrap().to_device(device).unwrap();
            let mut gradients = Gradients::new(&parameters).unwrap();
            give(&parameters, &mut gradients, |i| (i as f64 * 0.61).cos());
            let mut adamw = AdamW::new(&parameters, AdamWConfig::default()).unwrap();
            let norm = adamw.step_clipped(&mut parameters, &mut gradients, 0.05, 1.0).unwrap();
            let (moments, norm) = (adamw.state(), Tensor::scalar(norm));
            let all = [parameters.flat(), &moments.m, &moments.v, &norm];
            all.map(|flat| flat.cast(DType::F64).unwrap().to_vec::<f64>().unwrap())
        };
        let (here, there) = (run(&Device::Cpu), run(&Device::Cuda(gpu.clone())));
        for (what, (here, there)) in ["parameters", "mean", "square", "norm"].iter().zip(here.iter().zip(&there)) {
            let error = relative_error(there, here);
            assert!(error <= tolerance, "{dtype} {what}: relative error {error:.1e}");
        }
    }
}

#[test]
fn in_ptx() {
    Standin::in_ptx(version()).into_iter().for_each(|standin| _ = standin.repeat(&[], &[]));
}

/// Kernels take all flat buffers to be of the layout's length and type.
#[test]
fn flat_buffers_of_another_type_or_length_are_refused() {
    let Some(gpu) = Gpu::for_tests(5) else { return };
    let device = Device::Cuda(gpu);
    let mut parameters = parameters(DType::F32).to_device(&device).unwrap();
    let mut gradients = Gradients::new(&parameters).unwrap();
    let mut adamw = AdamW::new(&parameters, AdamWConfig::default()).unwrap();
    let config = EmaConfig { decay: 0.9, warmup: false };
    let mut short = Ema::new(&parameters.cast(DType::Bf16).unwrap(), config).unwrap();
    give(&parameters, &mut gradients, |_| 1.0);
    adamw.prepare(&parameters, 1e-3, 1.0, Some(&mut short)).unwrap();
    let refused = adamw.clip_and_step(&mut parameters, &mut gradients, Some(&mut short)).unwrap_err();
    assert!(matches!(&refused, Error::Layout { what: "averaged parameters", .. }), "{refused}");
    let wide = parameters.cast(DType::F64).unwrap();
    *parameters.flat_tensor_mut() = Tensor::zeros_on(&device, [1 << 16], DType::F32).unwrap();
    for mut other in [parameters, wide] {
        let refused = adamw.step(&mut other, &mut gradients, 1e-3).unwrap_err();
        assert!(matches!(&refused, Error::Layout { what: "parameters", .. }), "{refused}");
    }
}
