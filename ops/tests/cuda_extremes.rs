//! CUDA kernels on what the cases do not have: rows longer than a warp or a block takes at once, equal elements, and
//! data that makes no sense, which a GPU cannot be asked about without waiting for it.

use autograd::exact::{Array, Scalar};
use autograd::{Gradients, Parameters, ParametersBuilder, Result, Tape, Var};
use ops::BatchNorm;
use ops::case::{Case, Definition, indices, separated, uniform};
use ops::check::device::{parity, tolerance};
use standin::Standin;
use tensor::cuda::nvidia::compiler::version;
use tensor::cuda::{Gpu, MULTIPROCESSORS, with_multiprocessors};
use tensor::{DType, Device, Tensor, bf16};

const PLAIN: BatchNorm = BatchNorm { epsilon: 1e-5, gelu: false };

type Apply = for<'t> fn(&[Var<'t>]) -> Result<Var<'t>>;

/// An operation that is compared with itself on the CPU; what follows its first input are parameters.
struct Ported(Apply);

impl Definition for Ported {
    fn apply<'t>(&self, inputs: &[Var<'t>]) -> Result<Var<'t>> {
        self.0(inputs)
    }
    fn reference<S: Scalar>(&self, _: &[Array<S>]) -> Array<S> {
        unreachable!("the CPU is the reference")
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

/// What a normalisation takes.
fn scaled(rows: usize, channels: usize) -> Vec<Tensor> {
    vec![uniform([rows, channels], 1), uniform([channels], 2), uniform([channels], 3)]
}

fn train<'t>(x: &[Var<'t>]) -> Result<Var<'t>> {
    Ok(ops::batch_norm_train(&x[0], &x[1], &x[2], PLAIN)?.0)
}

fn layer_norm<'t>(x: &[Var<'t>]) -> Result<Var<'t>> {
    ops::layer_norm(&x[0], &x[1], &x[2], 1e-5)
}

#[test]
fn long_rows_agree_with_the_cpu() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let device = Device::Cuda(gpu);
    let cases: [(&str, Vec<Tensor>, Apply); 14] = [
        ("layer_norm, four packs a lane in f64", scaled(7, 256), layer_norm),
        ("layer_norm, four packs a lane in f32", scaled(7, 512), layer_norm),
        ("layer_norm, three packs a lane in bf16", scaled(5, 768), layer_norm),
        ("layer_norm, longer than registers", scaled(3, 1032), layer_norm),
        ("layer_norm, odd", scaled(3, 515), layer_norm),
        ("linear, blocks of columns", vec![uniform([70, 5], 1), uniform([1001, 5], 2), uniform([1001], 3)], |x| {
            ops::linear(&x[0], &x[1], Some(&x[2]))
        }),
        ("softmax", vec![uniform([3, 1000], 1)], |x| ops::softmax(&x[0])),
        ("softmax, odd", vec![uniform([9, 333], 1)], |x| ops::softmax(&x[0])),
        ("cross_entropy", vec![uniform([9, 1000], 1), indices([9], 1000, 2)], |x| {
            ops::cross_entropy(&x[0], x[1].value(), 0.1)
        }),
        ("batch_norm, blocks of channels", scaled(70, 300), train),
        ("batch_norm, odd", scaled(600, 131), train),
        ("top_k", vec![separated([3, 333], 1)], |x| Ok(ops::top_k(&x[0], 40)?.0)),
        ("gather", vec![uniform([2, 5, 1001], 1), indices([2, 7], 5, 2)], |x| ops::gather(&x[0], 1, x[1].value())),
        ("region_pool", vec![uniform([2, 8, 8, 333], 1)], |x| ops::region_pool(&x[0], [2, 4])),
    ];
    for (name, inputs, apply) in cases {
        compare(&Case::new(name, inputs, Ported(apply)), &device, &ALL);
    }
}

const ALL: [DType; 3] = [DType::F64, DType::F32, DType::Bf16];

fn compare(case: &Case, device: &Device, types: &[DType]) {
    for &dtype in types {
        let name = &case.name;
        let found = parity(case, device, dtype, true).unwrap_or_else(|error| panic!("{name} {dtype}: {error}"));
        let within = |error: f64| error <= tolerance(dtype);
        assert!(within(found.value) && within(found.gradient), "{name} {dtype}: {found:?}");
    }
}

/// As in the maps of a real step. On smaller ones a block has but one turn, unless the GPU is taken for one with a
/// single multiprocessor. And pieces of rows that are not equally long, more of them than a warp has threads.
#[test]
fn blocks_with_several_turns_agree_with_the_cpu() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let device = Device::Cuda(gpu);
    let map = |kernel: usize| vec![uniform([3, 20, 18, 40], 1), uniform([40, 1, kernel, kernel], 2), uniform([40], 3)];
    let with_gelu: Apply = |x| Ok(ops::batch_norm_train(&x[0], &x[1], &x[2], BatchNorm { gelu: true, ..PLAIN })?.0);
    let [dwconv, residual]: [Apply; 2] =
        [|x| ops::dwconv(&x[0], &x[1], Some(&x[2])), |x| ops::dwconv_residual(&x[0], &x[1], Some(&x[2]))];
    let stem = vec![uniform([2, 24, 20, 3], 1), uniform([16, 3, 3, 3], 2), uniform([16], 3)];
    let [f64, f32, bf16] = ALL.map(|dtype| [dtype]);
    let cases: [(&str, Vec<Tensor>, Apply, &[DType]); 12] = [
        ("batch_norm", scaled(1100, 64), train, &ALL[..2]),
        ("batch_norm in bf16", scaled(2100, 64), train, &bf16),
        ("batch_norm with gelu", scaled(1100, 64), with_gelu, &f64),
        ("batch_norm, uneven pieces", scaled(4333, 3), train, &ALL),
        ("layer_norm", scaled(700, 16), layer_norm, &ALL),
        ("layer_norm, four packs a lane in f64", scaled(50, 256), layer_norm, &f64),
        ("layer_norm, four packs a lane in f32", scaled(50, 512), layer_norm, &f32),
        ("layer_norm, four packs a lane in bf16", scaled(50, 1024), layer_norm, &bf16),
        ("dwconv, 3x3", map(3), residual, &ALL[1..]),
        ("dwconv, 5x5", map(5), dwconv, &ALL[1..]),
        (
            "linear, tall",
            vec![uniform([4200, 16], 1), uniform([16, 16], 2), uniform([16], 3)],
            |x| ops::linear(&x[0], &x[1], Some(&x[2])),
            &bf16,
        ),
        (
            "conv2d, few channels",
            stem,
            |x| ops::conv2d(&x[0], &x[1], Some(&x[2]), ops::Conv2d { stride: 2, padding: 1 }),
            &bf16,
        ),
    ];
    for (name, inputs, apply, types) in cases {
        let case = Case::new(name, inputs, Ported(apply));
        // The pieces' number, or their length, is what one of these cases is about.
        let multiprocessors = if name.ends_with("pieces") { MULTIPROCESSORS } else { 1 };
        with_multiprocessors(multiprocessors, || compare(&case, &device, types));
    }
}

/// A gradient that nobody wants is not computed, and the others are what they are with it; rows begin where packs do,
/// and elsewhere.
#[test]
fn layer_norm_gives_the_gradients_that_are_wanted() -> Result<()> {
    let Some(gpu) = Gpu::for_tests(11) else { return Ok(()) };
    let device = Device::Cuda(gpu);
    for (channels, offset) in [(64, 0), (64, 1), (65, 0)] {
        let numbers = uniform([1 + 70 * channels], 1).cast(DType::F32)?.to_device(&device)?;
        let x = numbers.slice(0, offset..offset + 70 * channels)?.reshape([70, channels])?;
        let [weight, bias] = [2, 3].map(|stream| uniform([channels], stream));
        let operands = [x, weight.cast(DType::F32)?.to_device(&device)?, bias.cast(DType::F32)?.to_device(&device)?];
        let upstream = uniform([70, channels], 4).cast(DType::F32)?.to_device(&device)?;
        let gradients = |wanted: [bool; 3]| -> Result<Vec<Option<Vec<f32>>>> {
            let tape = Tape::new();
            let place =
                |i: usize| if wanted[i] { tape.input(operands[i].clone()) } else { tape.constant(operands[i].clone()) };
            let [x, weight, bias] = [0, 1, 2].map(place);
            let mut gradients = Gradients::default();
            let y = ops::layer_norm(&x, &weight, &bias, 1e-5)?;
            tape.backward_from(&y, upstream.clone(), &mut gradients)?;
            let found = [x, weight, bias].map(|operand| gradients.of(&operand).map(|found| found.to_vec()).transpose());
            Ok(found.into_iter().collect::<tensor::Result<_>>()?)
        };
        let all = gradients([true; 3])?;
        for wanted in [[true, false, false], [false, true, true], [false, true, false], [true, false, true]] {
            let expected: Vec<_> =
                all.iter().zip(wanted).map(|(found, wanted)| found.clone().filter(|_| wanted)).collect();
            assert!(gradients(wanted)? == expected, "{channels} channels from {offset} on, {wanted:?}");
        }
    }
    Ok(())
}

/// As their mean is exact, in all types and whatever reads the rows.
#[test]
fn layer_norm_leaves_nothing_of_equal_elements() -> Result<()> {
    let Some(gpu) = Gpu::for_tests(11) else { return Ok(()) };
    let device = Device::Cuda(gpu);
    for (dtype, channels) in [DType::F64, DType::F32, DType::Bf16]
        .into_iter()
        .flat_map(|dtype| [48, 224, 515, 1032].map(|channels| (dtype, channels)))
    {
        for number in [85.5, 100.1] {
            let tape = Tape::inference();
            let of = |shape: &[usize], number, dtype| -> Result<Var<'_>> {
                Ok(tape.constant(Tensor::full_on(&device, shape, number, dtype)?))
            };
            let [weight, bias] = [1.0, 0.25].map(|number| of(&[channels], number, dtype.of_sums()));
            let y = ops::layer_norm(&of(&[3, channels], number, dtype)?, &weight?, &bias?, 1e-6)?;
            let left = y.value().cast(DType::F64)?.to_vec::<f64>()?;
            assert!(left.iter().all(|&y| y == 0.25), "{channels} times {number} in {dtype}: {}", left[0]);
        }
    }
    Ok(())
}

/// Rows of one, two and four packs a lane in each type, and such as are no whole packs, in blocks of several turns.
#[test]
fn layer_norm_gives_its_value_again() -> Result<()> {
    const ROWS: usize = 50;
    let Some(gpu) = Gpu::for_tests(11) else { return Ok(()) };
    let device = Device::Cuda(gpu);
    for (dtype, channels) in [DType::F64, DType::F32, DType::Bf16].into_iter().flat_map(|dtype| {
        let most = 32 * 16 / dtype.size();
        [most, 2 * most, 4 * most, 65].map(|channels| (dtype, channels))
    }) {
        let of = |shape: &[usize], dtype: DType, stream| -> Result<Tensor> {
            Ok(uniform(shape.to_vec(), stream).cast(dtype)?.to_device(&device)?)
        };
        let found = |tape: Tape| -> Result<Vec<f64>> {
            let x = tape.input(of(&[ROWS, channels], dtype, 1)?);
            let [weight, bias] = [2, 3].map(|stream| of(&[channels], dtype.of_sums(), stream));
            let y = ops::layer_norm(&x, &tape.constant(weight?), &tape.constant(bias?), 1e-5)?;
            // Its gradient takes the value.
            let square = ops::mul(&y, &y)?;
            drop(y);
            let mut gradients = Gradients::default();
            tape.backward_from(&square, of(&[ROWS, channels], dtype, 4)?, &mut gradients)?;
            Ok(gradients.of(&x).expect("invariant: it depends on x").cast(DType::F64)?.to_vec()?)
        };
        let alike = with_multiprocessors(1, || {
            Ok::<_, autograd::Error>(found(Tape::new())? == found(Tape::recomputing_cheap())?)
        });
        assert!(alike?, "{dtype}, {channels} channels");
    }
    Ok(())
}

/// A parameter in f32 beside a map in bf16 is rounded; any other two types are a mistake.
#[test]
fn add_and_mul_round_nothing_but_parameters() -> Result<()> {
    let Some(gpu) = Gpu::for_tests(11) else { return Ok(()) };
    let (device, tape) = (Device::Cuda(gpu), Tape::new());
    let of = |shape: &[usize], dtype: DType| -> Result<Var<'_>> {
        Ok(tape.input(uniform(shape, 1).cast(dtype)?.to_device(&device)?))
    };
    let types = [DType::F64, DType::F32, DType::Bf16];
    let operations = [("add", ops::add as for<'t> fn(&Var<'t>, &Var<'t>) -> Result<Var<'t>>), ("mul", ops::mul)];
    for (op, apply) in operations {
        for (a, b) in types.into_iter().flat_map(|a| types.map(|b| (a, b))) {
            // With and without broadcasting.
            for shape in [&[3][..], &[2, 3]] {
                let (fits, second) = (a == b || (a, b) == (DType::Bf16, DType::F32), of(shape, b)?);
                let y = match apply(&of(&[2, 3], a)?, &second) {
                    Ok(y) => y,
                    Err(autograd::Error::Tensor(tensor::Error::DType { op: said, .. })) if !fits && said == op => {
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                assert!(fits && y.dtype() == a, "{op}, {a} and {b}");
                let mut gradients = Gradients::default();
                tape.backward_from(&y, Tensor::full([2, 3], 1.0).cast(a)?.to_device(&device)?, &mut gradients)?;
                let gradient = gradients.of(&second).expect("invariant: y depends on it");
                assert_eq!((gradient.dtype(), &**gradient.shape()), (b, shape), "{op}, {a} and {b}");
                if op == "add" {
                    let sum = if shape.len() == 1 { 2.0 } else { 1.0 };
                    let gradient = gradient.cast(DType::F64)?.to_vec::<f64>()?;
                    assert!(gradient.iter().all(|&g| g == sum), "{a} and {b}: {gradient:?}");
                }
            }
        }
    }
    Ok(())
}

/// Every number of bf16 from -12 to 12: what a result may be off is half a unit in the last of its eight bits, and 1e-5
/// of it for the formula.
#[test]
fn gelu_in_bf16_is_as_exact_as_its_rounding() -> Result<()> {
    let Some(gpu) = Gpu::for_tests(11) else { return Ok(()) };
    let device = Device::Cuda(gpu);
    let numbers = (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f64()).filter(|x| x.abs() <= 12.0);
    let x: Vec<f64> = numbers.collect();
    let found = |device: &Device, dtype: DType| -> Result<[Vec<f64>; 2]> {
        let tape = Tape::new();
        let x = tape.input(Tensor::from_slice(&x, [x.len()])?.cast(dtype)?.to_device(device)?);
        let y = ops::gelu(&x)?;
        let mut gradients = Gradients::default();
        tape.backward_from(&y, Tensor::full([x.shape()[0]], 1.0f64).cast(dtype)?.to_device(device)?, &mut gradients)?;
        let slope = gradients.of(&x).expect("invariant: y depends on x").cast(DType::F64)?.to_vec()?;
        Ok([y.value().cast(DType::F64)?.to_vec()?, slope])
    };
    let ([y, slope], [exact, exact_slope]) = (found(&device, DType::Bf16)?, found(&Device::Cpu, DType::F64)?);
    let rounding = |exact: f64| (exact.abs().log2().floor() - 8.0).exp2();
    for (i, &x) in x.iter().enumerate() {
        let bound = rounding(exact[i]) + 1e-5 * exact[i].abs() + 1e-14;
        assert!((y[i] - exact[i]).abs() <= bound, "gelu({x}) = {}, not {}", y[i], exact[i]);
        // Two terms, which may cancel each other.
        let terms = if x == 0.0 { 0.5 } else { exact[i] / x } + x.abs() * (-0.5 * x * x).exp();
        let bound = rounding(exact_slope[i]) + 1e-5 * terms + 1e-14;
        assert!((slope[i] - exact_slope[i]).abs() <= bound, "gelu'({x}) = {}, not {}", slope[i], exact_slope[i]);
    }
    Ok(())
}

/// Many pieces of rows whose mean is far larger than the deviation, and begins with what is far from both.
#[test]
fn statistics_agree_with_the_cpu() -> Result<()> {
    let Some(gpu) = Gpu::for_tests(11) else { return Ok(()) };
    let device = Device::Cuda(gpu);
    let value = |i: usize| if i < 3 { 0.0 } else { 1000.0 + (i as f32 * 0.7).sin() };
    let x = Tensor::from_slice(&(0..6000).map(value).collect::<Vec<_>>(), [2000, 3])?;
    let statistics = |device: &Device, dtype: DType| -> Result<[Vec<f64>; 2]> {
        let tape = Tape::inference();
        let x = tape.constant(x.cast(dtype)?.to_device(device)?);
        let ones = tape.constant(Tensor::full([3], 1.0f64).cast(dtype)?.to_device(device)?);
        let (_, found) = ops::batch_norm_train(&x, &ones, &ones, PLAIN)?;
        Ok([found.mean.cast(DType::F64)?.to_vec()?, found.variance.cast(DType::F64)?.to_vec()?])
    };
    let expected = statistics(&Device::Cpu, DType::F64)?;
    for (dtype, bound) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
        let found = statistics(&device, dtype)?;
        let close = |a: &f64, b: &f64| (a - b).abs() <= bound * b.abs();
        assert!(found.concat().iter().zip(&expected.concat()).all(|(a, b)| close(a, b)), "{found:?}, not {expected:?}");
    }
    Ok(())
}

#[test]
fn equal_elements_and_nan_are_ordered_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = Gpu::for_tests(11) else { return Ok(()) };
    let device = Device::Cuda(gpu);
    let value = |i: usize| match i % 7 {
        3 => f32::NAN,
        5 => f32::INFINITY,
        _ => ((i * 29) % 13) as f32 - 6.0,
    };
    let x = Tensor::from_slice(&(0..400).map(value).collect::<Vec<_>>(), [4, 100])?;
    let tape = Tape::inference();
    let [here, there] = [x.clone(), x.to_device(&device)?].map(|x| ops::top_k(&tape.constant(x), 100));
    assert_eq!(here?.1.to_vec::<u32>()?, there?.1.to_vec::<u32>()?);
    Ok(())
}

#[test]
fn deviations_whose_squares_overflow_make_nan_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = Gpu::for_tests(11) else { return Ok(()) };
    let device = Device::Cuda(gpu);
    let tape = Tape::inference();
    for channels in [8, 3, 1200] {
        // Of two rows, and of all columns, the deviations overflow; of a third row they do not.
        let value = |i: usize| if i < 2 * channels { [1e20f32, -1e20][(i + i / channels) % 2] } else { (i % 7) as f32 };
        let x = Tensor::from_slice(&(0..3 * channels).map(value).collect::<Vec<_>>(), [3, channels])?;
        let ones = || Tensor::full([channels], 1.0f32).to_device(&device).map(|ones| tape.constant(ones));
        let there = tape.constant(x.to_device(&device)?);
        let rows = ops::layer_norm(&there, &ones()?, &ones()?, 1e-6)?.value().to_vec::<f32>()?;
        let nan: Vec<bool> = rows.chunks(channels).map(|row| row.iter().all(|y| y.is_nan())).collect();
        assert_eq!(nan, [true, true, false], "{channels} channels");
        assert!(rows[2 * channels..].iter().all(|y| y.is_finite()), "{channels} channels");
        let columns = ops::batch_norm_train(&there, &ones()?, &ones()?, PLAIN)?.0.value().to_vec::<f32>()?;
        assert!(columns.iter().all(|y| y.is_nan()), "{channels} channels");
    }
    Ok(())
}

#[test]
fn a_label_that_is_no_class_makes_nan_of_the_loss_and_of_its_record() -> Result<()> {
    let Some(gpu) = Gpu::for_tests(11) else { return Ok(()) };
    let device = Device::Cuda(gpu);
    let tape = Tape::new();
    let logits = tape.input(Tensor::full([3, 4], 0.5f32).to_device(&device)?);
    let labels = Tensor::from_slice(&[1u32, 4, 3], [3])?.to_device(&device)?;
    let loss = ops::cross_entropy(&logits, &labels, 0.0)?;
    assert!(loss.value().item::<f32>()?.is_nan());
    let gradient = gradient(&tape, &loss, &logits, Tensor::scalar(1.0f32).to_device(&device)?)?;
    assert_eq!(nan_rows(&gradient, 4), [false, true, false]);
    Ok(())
}

#[test]
fn an_index_out_of_range_picks_nan_and_gives_no_gradient() -> Result<()> {
    let Some(gpu) = Gpu::for_tests(11) else { return Ok(()) };
    let device = Device::Cuda(gpu);
    let tape = Tape::new();
    let x = tape.input(Tensor::full([2, 3, 5], 1.0f32).to_device(&device)?);
    let indices = Tensor::from_slice(&[0u32, 3, u32::MAX, 2], [2, 2])?.to_device(&device)?;
    let y = ops::gather(&x, 1, &indices)?;
    assert_eq!(nan_rows(&y.value().to_vec()?, 5), [false, true, true, false]);
    let gradient = gradient(&tape, &y, &x, Tensor::full([2, 2, 5], 1.0f32).to_device(&device)?)?;
    let picked: Vec<f32> = gradient.chunks(5).map(|row| row[0]).collect();
    assert_eq!(picked, [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]);
    Ok(())
}

fn gradient<'t>(tape: &'t Tape, y: &Var<'t>, x: &Var<'t>, upstream: Tensor) -> Result<Vec<f32>> {
    let mut gradients = Gradients::default();
    tape.backward_from(y, upstream, &mut gradients)?;
    Ok(gradients.of(x).expect("invariant: y depends on x").to_vec()?)
}

/// Which rows are NaN throughout; the others must have none.
fn nan_rows(elements: &[f32], width: usize) -> Vec<bool> {
    let rows = elements.chunks(width).map(|row| {
        assert!(row.iter().all(|x| x.is_nan() == row[0].is_nan()), "{row:?}");
        row[0].is_nan()
    });
    rows.collect()
}

#[test]
fn in_ptx() {
    Standin::in_ptx(version()).into_iter().for_each(|standin| _ = standin.repeat(&[], &[]));
}

/// A parameter that was cast, and gradients on another GPU than the parameters: no kernel is given these.
#[test]
fn gradients_of_another_type_or_device_are_refused() -> Result<()> {
    let [Some(gpu), Some(other)] = [11, 12].map(Gpu::for_tests) else { return Ok(()) };
    let [device, other] = [gpu, other].map(Device::Cuda);
    let mut builder = ParametersBuilder::default();
    let id = builder.add("logits", [4, 8], (0..32).map(|i| f64::from(i).sin()));
    let parameters = builder.build(DType::F64)?;
    let labels = Tensor::from_slice(&[0u32, 3, 7, 1], [4])?.to_device(&device)?;
    let loss_of = |parameters: &Parameters, gradients: &mut Gradients| {
        let tape = Tape::new();
        let loss = ops::cross_entropy(&tape.parameter(parameters, id), &labels, 0.0)?;
        tape.backward(&loss, gradients)
    };
    let whole = parameters.to_device(&device)?;
    let (mut fitting, mut elsewhere) = (Gradients::new(&whole)?, Gradients::new(&parameters.to_device(&other)?)?);
    loss_of(&whole, &mut fitting)?;
    let refused = loss_of(&whole.cast(DType::F32)?, &mut fitting).unwrap_err();
    assert!(matches!(refused, autograd::Error::Tensor(tensor::Error::DType { .. })), "{refused}");
    let refused = loss_of(&whole, &mut elsewhere).unwrap_err();
    assert!(matches!(refused, autograd::Error::Tensor(tensor::Error::Device { .. })), "{refused}");
    Ok(())
}
