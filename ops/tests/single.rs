//! Every operation in single precision, in which training runs, against the double precision that is checked; and
//! products of bf16 factors.

use autograd::gradcheck::value;
use autograd::{Gradients, Result, Tape};
use ops::case::{Case, array, uniform};
use ops::check::{SINGLE_TOLERANCE, check_bits, single_error, within};
use ops::registry::OPS;
use tensor::cpu::isa::{Isa, limits};
use tensor::cuda::Gpu;
use tensor::{DType, Device, Tensor};

/// Operations that take factors in bf16.
const PRODUCTS: [&str; 2] = ["linear", "conv2d"];

#[test]
fn single_precision_agrees_with_double() {
    agrees(&Isa::SIMD, |_, _| true, DType::F32);
}

/// Where maps and the gradient from above are bf16s already, nothing is rounded but sums, as in single precision.
/// (Where GELU follows, the gradient that a product takes is its result, and is rounded.)
#[test]
fn products_of_bf16_factors_agree_with_double_precision() {
    let of_bf16 = |op: &str, case: &str| PRODUCTS.contains(&op) && !case.starts_with("GELU");
    agrees(&Isa::ALL, of_bf16, DType::Bf16);
}

/// What does not depend on chance, threads or views in f64 does not in the types that have kernels of their own.
#[test]
fn the_laws_of_bits_hold_in_single_precision_and_with_bf16_factors() {
    let mut failures = vec![];
    for limited in limits(&Isa::ALL) {
        for (factors, ops) in [(DType::F32, &[][..]), (DType::Bf16, &PRODUCTS)] {
            for op in OPS.iter().filter(|op| ops.is_empty() || ops.contains(&op.name)) {
                for mut case in (op.cases)() {
                    case.inputs = case.inputs_in(DType::F32, factors).unwrap();
                    let what = format!("{}, case \"{}\", {factors}, {}", op.name, case.name, limited.isa().name());
                    let broken = check_bits(&case).unwrap_or_else(|error| panic!("{what}: {error}"));
                    failures.extend(broken.iter().map(|law| format!("{what}: {law}")));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Operations that do not treat each row, or image, of their first input by itself.
const NOT_BY_ROWS: [&str; 3] = [
    "batch_norm",    // its statistics are of all rows
    "cross_entropy", // a mean has no rows
    "reshape",       // its new shape is that of all rows
];

/// Which images go through a model together in inference depends on the number of threads.
#[test]
fn a_row_has_the_same_bits_alone_and_among_others() -> Result<()> {
    for limited in limits(&Isa::ALL) {
        for op in OPS.iter().filter(|op| !NOT_BY_ROWS.contains(&op.name)) {
            let mut compared = 0;
            for case in (op.cases)() {
                let in_bf16 = PRODUCTS.contains(&op.name).then_some(DType::Bf16);
                for factors in [DType::F32].into_iter().chain(in_bf16) {
                    compared += rows_compared(&case, factors, &format!("{} {:?}", op.name, limited.isa()))?;
                }
            }
            assert!(compared > 0, "{}: no case has rows", op.name);
        }
        // A sum so long that a product would be cut along it, were it a weight's gradient.
        let (x, weight) = (uniform([600, 2048], 1).cast(DType::F32)?, uniform([512, 2048], 2).cast(DType::F32)?);
        let rows = |x: Tensor| {
            let tape = Tape::inference();
            Ok::<_, autograd::Error>(
                ops::linear(&tape.constant(x), &tape.constant(weight.clone()), None)?.value().to_vec::<f32>()?,
            )
        };
        let all = rows(x.clone())?;
        for count in [2, 30, 512] {
            assert!(rows(x.slice(0, 0..count)?)? == all[..count * 512], "{:?}: {count} rows", limited.isa());
        }
    }
    Ok(())
}

/// Compares the value of some first rows of a case's first input, and of what goes with them, with those of all: how
/// many.
fn rows_compared(case: &Case, factors: DType, what: &str) -> Result<usize> {
    let inputs = case.inputs_in(DType::F32, factors)?;
    let parameters: Vec<bool> =
        case.inputs_in(DType::F32, DType::Bf16)?.iter().map(|input| input.dtype() == DType::Bf16).collect();
    let all = value(case, &inputs)?;
    let rows = inputs[0].shape().first().copied().unwrap_or(0);
    if rows < 2 || inputs[0].rank() < 2 || all.shape().first() != Some(&rows) {
        return Ok(0);
    }
    for count in [1, rows / 2, rows - 1] {
        let part = |(input, &parameter): (&Tensor, &bool)| match input.shape().first() {
            Some(&extent) if extent == rows && !parameter => input.slice(0, 0..count)?.contiguous(),
            _ => Ok(input.clone()),
        };
        let part: Vec<Tensor> = inputs.iter().zip(&parameters).map(part).collect::<tensor::Result<_>>()?;
        let (part, whole) = (array(&value(case, &part)?).data, array(&all.slice(0, 0..count)?.contiguous()?).data);
        let same = part.len() == whole.len() && part.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{what}, case \"{}\", {factors}: {count} of {rows} rows", case.name);
    }
    Ok(rows)
}

/// Some cases, by the names of their operation and their own, on those of the instruction sets that this machine has.
fn agrees(isas: &[Isa], is_one: impl Fn(&str, &str) -> bool, factors: DType) {
    tensor::set_poison(true);
    let (mut failures, mut compared) = (vec![], 0);
    for limited in limits(isas) {
        for op in OPS {
            for case in (op.cases)().into_iter().filter(|case| is_one(op.name, &case.name)) {
                compared += 1;
                let error =
                    single_error(&case, factors).unwrap_or_else(|error| panic!("{}, {}: {error}", op.name, case.name));
                if !within(error, SINGLE_TOLERANCE) {
                    let (op, case) = (op.name, &case.name);
                    failures
                        .push(format!("{op}, case \"{case}\", {}: relative error {error:.1e}", limited.isa().name()));
                }
            }
        }
    }
    assert!(compared > 0, "no such case");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Products take bf16, and nothing else does on the CPU: its gradient is f32, also where a view lies in between.
#[test]
fn the_gradient_of_a_view_of_bf16_is_f32() -> Result<()> {
    let (tape, mut gradients) = (Tape::new(), Gradients::default());
    let weight = tape.input(uniform([2, 3, 1, 1], 1).cast(DType::Bf16)?);
    let x = tape.input(uniform([4, 3], 2).cast(DType::F32)?);
    let y = ops::linear(&x, &ops::reshape(&weight, [2, 3])?, None)?;
    tape.backward_from(&y, Tensor::full([4, 2], 1f32), &mut gradients)?;
    let (dw, x) = (gradients.of(&weight).unwrap().to_vec::<f32>()?, x.value().cast(DType::Bf16)?.cast(DType::F32)?);
    let sums = (0..3).map(|column| x.to_vec::<f32>().map(|x| x.iter().skip(column).step_by(3).sum::<f32>()));
    let sums = sums.collect::<tensor::Result<Vec<_>>>()?;
    for (dw, sum) in dw.iter().zip(sums.iter().cycle()) {
        assert!((dw - sum).abs() < 1e-5, "{dw} is not {sum}");
    }
    Ok(())
}

/// In one chain of additions, 0.1 times the number of tokens would be off by 2e-3.
#[test]
fn long_sums_stay_accurate() -> Result<()> {
    const SIDE: usize = 512;
    let check = |device: &Device, on: &str| -> Result<()> {
        let tape = Tape::inference();
        let map = |channels: usize| Tensor::full([1, SIDE, SIDE, channels], 0.1f32).to_device(device);
        let x = tape.constant(map(3)?);
        let rows = ops::reshape(&x, [SIDE * SIDE, 3])?;
        let route = |qkv: &Tensor, qk_dim: usize| {
            let attributes = ops::Bra { heads: 1, qk_dim, topk: 1, grid: [1, 1], scale: 1.0, valid: None };
            Ok::<_, autograd::Error>(ops::route(qkv, &attributes)?.affinities)
        };
        for (what, sum, exact) in [
            ("mean_pool", ops::mean_pool(&x)?.value().clone(), 0.1),
            ("region_pool", ops::region_pool(&x, [2, 2])?.value().clone(), 0.1),
            ("sum", ops::sum(&rows, &[0], false)?.value().clone(), 0.1 * (SIDE * SIDE) as f64),
            ("route", route(x.value(), 1)?, 0.01),
            ("route, whole packs", route(&map(12)?, 4)?, 0.04),
        ] {
            for value in sum.to_vec::<f32>()? {
                let error = (f64::from(value) / exact - 1.0).abs();
                assert!(error < 5e-5, "{what}: {error:.1e}, {on}");
            }
        }
        Ok(())
    };
    for limited in limits(&Isa::SIMD) {
        check(&Device::Cpu, limited.isa().name())?;
    }
    Gpu::for_tests(1).map_or(Ok(()), |gpu| check(&Device::Cuda(gpu), "GPU"))
}
