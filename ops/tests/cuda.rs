//! Every operation's CUDA kernels, on the machine's GPU or the emulated one, on all cases and in every type.

use autograd::gradcheck::{Function, backward, relative_error, value};
use autograd::{Gradients, ParametersBuilder, Tape, Var};
use ops::check::device::{Parity, check_on};
use ops::registry::{self, OPS};
use standin::Standin;
use tensor::cuda::Gpu;
use tensor::cuda::nvidia::compiler::version;
use tensor::{DType, Device, Tensor};

/// The variable with the types in which everything runs again, for its bits and to accumulate: all, if it is not set.
/// In processes that watch the kernels none does, as they take long.
const AGAIN: &str = "AGAIN";
const ONCE: (&str, &str) = (AGAIN, "");

/// Where there is no C++ compiler the test says that it is skipped; in CI it may not be.
#[test]
fn every_operation_is_that_of_the_cpu() {
    let Some(gpu) = Gpu::for_tests(7) else { return };
    let device = Device::Cuda(gpu);
    let only = std::env::var("ONLY").unwrap_or_default();
    let again = std::env::var(AGAIN).ok();
    for name in only.split(',').filter(|name| !name.is_empty()) {
        assert!(registry::find(name).is_some(), "ONLY={name} is no operation");
    }
    let mut failures = vec![];
    for op in OPS.iter().filter(|op| only.is_empty() || only.split(',').any(|name| name == op.name)) {
        // First the one that most people train in: after a fault a GPU refuses its process everything.
        for dtype in [DType::Bf16, DType::F32, DType::F64] {
            let again = again.as_ref().is_none_or(|types| types.split(',').any(|name| name == dtype.to_string()));
            let report = check_on(op, &device, dtype, again);
            let Parity { value, gradient } = report.worst;
            println!("{:<20} {dtype:<5} value {value:.1e}  gradient {gradient:.1e}", op.name);
            failures.extend(report.failures);
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn an_upstream_gradient_elsewhere_is_refused() {
    let Some(gpu) = Gpu::for_tests(37) else { return };
    let (tape, mut gradients) = (Tape::new(), Gradients::default());
    let x = tape.input(Tensor::full([3], 1f32).to_device(&Device::Cuda(gpu)).unwrap());
    let y = ops::scale(&x, 2.0).unwrap();
    let refused = tape.backward_from(&y, Tensor::full([3], 1f32), &mut gradients).unwrap_err().to_string();
    assert!(refused.contains("expected a tensor on") && gradients.of(&x).is_none(), "{refused}");
}

/// As an input of that type would, whatever the operation, but in f32.
#[test]
fn a_parameter_rounded_to_bf16_gets_its_gradient_from_every_operation() -> autograd::Result<()> {
    let Some(gpu) = Gpu::for_tests(31) else { return Ok(()) };
    let device = Device::Cuda(gpu);
    for case in OPS.iter().flat_map(|op| (op.cases)()) {
        let inputs = case.inputs_as(DType::Bf16)?;
        let inputs: Vec<Tensor> = inputs.iter().map(|x| x.to_device(&device)).collect::<tensor::Result<_>>()?;
        let value = value(&case, &inputs)?;
        let upstream = Tensor::full_on(&device, value.shape().clone(), 0.5, value.dtype())?;
        let expected = backward(&case, &inputs, &upstream)?;
        for (input, expected) in expected.iter().enumerate() {
            let Some(expected) = expected.as_ref().filter(|_| inputs[input].dtype() == DType::Bf16) else { continue };
            let mut builder = ParametersBuilder::default();
            let wide = inputs[input].cast(DType::F32)?.to_vec::<f32>()?;
            let id = builder.add("p", inputs[input].shape().clone(), wide.into_iter().map(f64::from));
            let parameters = builder.build(DType::F32)?.to_device(&device)?;
            let (tape, rounded) = (Tape::new(), parameters.cast(DType::Bf16)?);
            let operands = inputs
                .iter()
                .enumerate()
                .map(|(i, x)| if i == input { tape.parameter(&rounded, id) } else { tape.constant(x.clone()) });
            let operands: Vec<Var<'_>> = operands.collect();
            let (y, mut gradients) = (case.apply(&operands)?, Gradients::new(&parameters)?);
            // The value may be the operand itself.
            if y.node() == operands[input].node() {
                continue;
            }
            let passed = tape.backward_from(&y, upstream.clone(), &mut gradients);
            passed.unwrap_or_else(|error| panic!("\"{}\", input {input}: {error}", case.name));
            let found = gradients.parameter(id).expect("a gradient").to_vec::<f32>()?;
            let expected = expected.cast(DType::F32)?.to_vec::<f32>()?;
            let [found, expected] = [found, expected].map(|of| of.into_iter().map(f64::from).collect::<Vec<_>>());
            let error = relative_error(&found, &expected);
            // What is summed over may be rounded once less.
            assert!(error < 1e-2, "\"{}\", input {input}: {error:.1e}", case.name);
        }
    }
    Ok(())
}

/// Not rounded, and also for a batch of one image, over which there is nothing to sum.
#[test]
fn the_gradient_of_a_parameter_rounded_to_bf16_is_not() -> autograd::Result<()> {
    let Some(gpu) = Gpu::for_tests(29) else { return Ok(()) };
    let device = Device::Cuda(gpu);
    let mut builder = ParametersBuilder::default();
    let id = builder.add("p", [1, 3], vec![0.5, -1.0, 2.0]);
    let parameters = builder.build(DType::F32)?.to_device(&device)?;
    let rounded = parameters.cast(DType::Bf16)?;
    for images in [1, 4] {
        for turned in [false, true] {
            let tape = Tape::new();
            let mut p = tape.parameter(&rounded, id);
            let mut x = Tensor::full([images, 3], 1f32);
            if turned {
                (p, x) = (ops::permute(&p, &[1, 0])?, x.permute(&[1, 0])?.contiguous()?);
            }
            let x = tape.constant(x.cast(DType::Bf16)?.to_device(&device)?);
            let sum = ops::add(&x, &p)?;
            let mut gradients = Gradients::new(&parameters)?;
            tape.backward_from(&sum, Tensor::full_on(&device, sum.shape().clone(), 0.5, DType::Bf16)?, &mut gradients)?;
            let found = gradients.parameter(id).map(|gradient| gradient.to_vec::<f32>()).transpose()?;
            assert_eq!(found, Some(vec![0.5 * images as f32; 3]), "{images}, {turned}");
        }
    }
    Ok(())
}

/// Where the CPU refuses an operand whose type does not go with the others', so does the device, in the forward pass;
/// and in bf16, which the CPU does not compute in, nothing goes with f64.
#[test]
fn operands_of_another_type_are_refused() {
    let Some(gpu) = Gpu::for_tests(23) else { return };
    let device = Device::Cuda(gpu);
    let (f32, f64, bf16) = (DType::F32, DType::F64, DType::Bf16);
    for (own, other) in [(f32, f64), (f64, f32), (f64, bf16), (bf16, f64)] {
        for case in OPS.iter().flat_map(|op| (op.cases)()).filter(|case| case.inputs.iter().all(|x| x.count() > 0)) {
            let inputs = case.inputs_as(own).unwrap();
            let floats = || (0..inputs.len()).filter(|&i| inputs[i].dtype() != DType::Index);
            for odd in floats().filter(|_| floats().count() > 1) {
                let refused = |device: &Device| {
                    let tape = Tape::new();
                    let of = |(i, x): (usize, &Tensor)| if i == odd { x.cast(other) } else { Ok(x.clone()) };
                    let inputs: Vec<Var<'_>> = inputs
                        .iter()
                        .enumerate()
                        .map(|x| tape.constant(of(x).unwrap().to_device(device).unwrap()))
                        .collect();
                    case.apply(&inputs).is_err()
                };
                let must_be = own == DType::Bf16 || refused(&Device::Cpu);
                let name = &case.name;
                assert!(!must_be || refused(&device), "\"{name}\" in {own}, but operand {odd} in {other}");
            }
        }
    }
}

/// These operations once more, in a process in which the kernels are watched: memory errors and undefined behaviour end
/// it. With so many multiprocessors: a single one, which few images keep busy, or as many as a large GPU has, where
/// attention then takes other forms.
#[cfg(target_os = "linux")]
fn under_sanitizers(multiprocessors: &str, only: &str) {
    let Some(mut watched) = standin::sanitized(&["--exact", "every_operation_is_that_of_the_cpu"]) else { return };
    watched.envs([("BIFORMER_EMULATED_MULTIPROCESSORS", multiprocessors), ("ONLY", only), ONCE]);
    let ran = watched.output().unwrap();
    let [out, err] = [&ran.stdout, &ran.stderr].map(|said| String::from_utf8_lossy(said));
    assert!(ran.status.success() && out.contains("1 passed"), "{out}{err}");
}

/// Those that run attention's kernels, which take the longest to compile: in one test, so that they are compiled once.
#[cfg(target_os = "linux")]
const ATTENTION: [&str; 2] = ["attention", "bra"];

#[cfg(target_os = "linux")]
#[test]
fn sanitizers_find_nothing() {
    let others: Vec<&str> = OPS.iter().map(|op| op.name).filter(|name| !ATTENTION.contains(name)).collect();
    under_sanitizers("1", &others.join(","));
}

#[cfg(target_os = "linux")]
#[test]
fn sanitizers_find_nothing_in_attention() {
    for multiprocessors in ["1", "132"] {
        under_sanitizers(multiprocessors, &ATTENTION.join(","));
    }
}

/// Products, in all types and forms, as cuBLASLt is asked for them; and where it does nothing besides.
#[test]
fn on_the_standin_gpu() {
    let Some(standin) = Standin::compiled() else { return };
    standin.repeat(&["every_operation"], &[("ONLY", "matmul,linear,mlp,conv2d")]);
    standin.repeat(&["every_operation"], &[("ONLY", "linear,mlp"), ("STANDIN_EPILOGUES", "0")]);
}

/// What NVRTC makes of the kernels, instruction by instruction.
fn repeated_in_ptx(settings: &[(&str, &str)]) {
    let Some(standin) = Standin::in_ptx(version()) else { return };
    standin.repeat(&["every_operation"], settings);
}

#[test]
fn in_ptx() {
    repeated_in_ptx(&[(AGAIN, "bf16")]);
}

#[test]
fn in_ptx_on_a_small_gpu_where_attention_takes_other_forms() {
    repeated_in_ptx(&[("ONLY", "attention,bra"), ("STANDIN_MULTIPROCESSORS", "1"), ONCE]);
}

/// As that of a block is on GPUs of compute capability 8.6 and 8.9: where the usual form has too little room, another
/// is taken.
#[test]
fn in_ptx_with_less_shared_memory() {
    const SHARED: usize = 99 << 10;
    let shared = SHARED.to_string();
    repeated_in_ptx(&[("ONLY", "attention,bra,conv2d,linear,mlp"), ("STANDIN_SHARED", &shared), ONCE]);
}

/// For those that came after 9.0, which another compiler inside NVRTC is for.
#[test]
fn in_ptx_of_later_generations() {
    repeated_in_ptx(&[("STANDIN_CAPABILITY", "990"), ONCE]);
}
