//! Products of matrices on a GPU, on the emulated device.

use standin::Standin;
use std::sync::Arc;
use tensor::cuda::{Gemm, Gpu, Matrix};
use tensor::{DType, Device, Error, Tensor, bf16};

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.7).sin() * 10.0).collect()
}

#[test]
fn products_of_every_kind() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let (m, n, k, batch) = (3, 5, 4, 2);
    let (a, b) = (numbers(batch * m * k), numbers(batch * k * n + 7)[7..].to_vec());
    for (inputs, output) in [(DType::F32, DType::F32), (DType::F64, DType::F64), (DType::Bf16, DType::F32)] {
        for transposed in [[false, false], [true, false], [false, true], [true, true]] {
            let lay = |data: &[f32], rows: usize, cols: usize, transposed: bool| {
                let tensor = Tensor::from_slice(data, [batch, rows, cols]).unwrap().cast(inputs).unwrap();
                let order = if transposed { [0, 2, 1] } else { [0, 1, 2] };
                tensor.permute(&order).unwrap().contiguous().unwrap().to_device(&device).unwrap()
            };
            let (a_there, b_there) = (lay(&a, m, k, transposed[0]), lay(&b, k, n, transposed[1]));
            let matrix = |tensor, transposed| match transposed {
                true => Matrix::transposed(tensor),
                false => Matrix::plain(tensor),
            };
            let (left, right) = (matrix(&a_there, transposed[0]), matrix(&b_there, transposed[1]));
            let mut c = Tensor::zeros_on(&device, [batch, m, n], output).unwrap();
            // Added to what is there.
            for times in 1..3 {
                let product = Gemm::new("test", left, right, [m, n, k]).batch(batch);
                product.into(c.as_out("test", true).unwrap()).unwrap();
                let got = c.cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
                for (place, got) in got.into_iter().enumerate() {
                    let (image, row, col) = (place / (m * n), place / n % m, place % n);
                    let of = |data: &[f32], i: usize| {
                        if inputs == DType::Bf16 { bf16::from_f32(data[i]).to_f64() } else { f64::from(data[i]) }
                    };
                    let sum: f64 =
                        (0..k).map(|l| of(&a, (image * m + row) * k + l) * of(&b, (image * k + l) * n + col)).sum();
                    assert!(
                        (got - f64::from(times) * sum).abs() < 1e-3,
                        "{inputs} {transposed:?}: {got}, not {times} times {sum}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_a_product_does_besides() {
    let Some(gpu) = Gpu::for_tests(3) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let (m, n, k) = (3, 5, 4);
    // Small whole numbers, so that all results are exact in every type.
    let small = |count: usize, step: usize| -> Vec<f32> { (0..count).map(|i| (i * step % 7) as f32 - 3.0).collect() };
    let (a, b, c, row) = (small(k * m, 3), small(k * n, 5), small(m * n, 2), small(n, 4));
    for (inputs, output) in
        [(DType::F32, DType::F32), (DType::F64, DType::F64), (DType::Bf16, DType::Bf16), (DType::Bf16, DType::F32)]
    {
        let there = |data: &[f32], shape: &[usize], dtype| {
            Tensor::from_slice(data, shape.to_vec()).unwrap().cast(dtype).unwrap().to_device(&device).unwrap()
        };
        let values = |x: &Tensor| x.to_device(&Device::Cpu).unwrap().cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
        let transposed = there(&a, &[k, m], inputs);
        let (right, plus) = (there(&b, &[k, n], inputs), there(&c, &[m, n], output));
        // Where it begins a memory, and eight elements into one, which cuBLASLt has to be told.
        let longer = there(&[&[0.0; 8], &row[..]].concat(), &[8 + n], DType::F32).cast(output.of_sums()).unwrap();
        let rows = [there(&row, &[n], DType::F32).cast(output.of_sums()).unwrap(), longer.slice(0, 8..8 + n).unwrap()];
        for choice in 0..16 {
            let [with_plus, with_row, accumulate] = [1, 2, 4].map(|bit| choice & bit != 0);
            let mut result = there(&c, &[m, n], output);
            let product = Gemm::new("test", Matrix::transposed(&transposed), Matrix::plain(&right), [m, n, k])
                .plus(with_plus.then_some(&plus))
                .row(with_row.then_some(&rows[choice >> 3]));
            let outcome = product.into(result.as_out("test", accumulate).unwrap());
            if with_plus && accumulate {
                assert!(matches!(outcome, Err(Error::Argument { op: "test", .. })));
                continue;
            }
            outcome.unwrap();
            let kept = |asked: bool, value: f32| if asked { f64::from(value) } else { 0.0 };
            for (place, got) in values(&result).into_iter().enumerate() {
                let (i, j) = (place / n, place % n);
                let product: f64 = (0..k).map(|l| f64::from(a[l * m + i] * b[l * n + j])).sum();
                let expected = product + kept(with_plus || accumulate, c[place]) + kept(with_row, row[j]);
                assert_eq!(got, expected, "{inputs} {output} {choice:04b}");
            }
        }
    }
}

/// In f32 no bit is given up in silence; in tf32 factors are rounded to 10 bits behind the leading one. (The emulated
/// device has no such products: it multiplies in f32 then, too.)
#[test]
fn f32_is_tf32_only_where_it_is_asked_for() {
    let Some(gpu) = Gpu::for_tests(2) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let (m, n, k) = (64, 48, 96);
    let (a, b) = (numbers(m * k), numbers(k * n + 7)[7..].to_vec());
    let there = |data: &[f32], shape: [usize; 2]| Tensor::from_slice(data, shape).unwrap().to_device(&device).unwrap();
    let (left, right) = (there(&a, [m, k]), there(&b, [k, n]));
    let largest_error = |tf32| {
        gpu.set_tf32(tf32);
        let mut c = Tensor::zeros_on(&device, [m, n], DType::F32).unwrap();
        let product = Gemm::new("test", Matrix::plain(&left), Matrix::plain(&right), [m, n, k]);
        product.into(c.as_out("test", false).unwrap()).unwrap();
        let error = |(place, got): (usize, f64)| {
            let factors = || (0..k).map(|l| (f64::from(a[place / n * k + l]), f64::from(b[l * n + place % n])));
            let sum: f64 = factors().map(|(a, b)| a * b).sum();
            (got - sum).abs() / factors().map(|(a, b)| (a * b).abs()).sum::<f64>()
        };
        let got = c.cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
        got.into_iter().enumerate().map(error).fold(0.0, f64::max)
    };
    let [kept, rounded] = [false, true].map(largest_error);
    assert!(kept < 1e-6, "{kept}");
    match std::env::var_os("BIFORMER_TEST_GPU") {
        Some(_) => assert!((1e-5..1e-3).contains(&rounded), "{rounded}"),
        None => assert_eq!(rounded, kept),
    }
}

/// As a linear layer's weight gradient has it: a long inner axis, which cuBLASLt splits.
#[test]
fn a_long_product_is_exact() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let (width, k) = (64, 25_088);
    // Small whole numbers, so that all sums are exact.
    let small = |step: usize| -> Vec<f32> { (0..k * width).map(|i| (i * step % 11) as f32 - 4.0).collect() };
    let (dy, x) = (small(7), small(3));
    let mut products = vec![0.0f32; width * width];
    for (dy, x) in dy.chunks_exact(width).zip(x.chunks_exact(width)) {
        for (products, &dy) in products.chunks_exact_mut(width).zip(dy) {
            products.iter_mut().zip(x).for_each(|(product, x)| *product += dy * x);
        }
    }
    for dtype in [DType::Bf16, DType::F32] {
        let there = |data: &[f32]| {
            Tensor::from_slice(data, [k, width]).unwrap().cast(dtype).unwrap().to_device(&device).unwrap()
        };
        let (dy_there, x_there) = (there(&dy), there(&x));
        for accumulate in [false, true] {
            let old = if accumulate { 1.0 } else { f64::NAN };
            let result = Tensor::full([width, width], old).cast(dtype.of_sums()).unwrap();
            let mut result = result.to_device(&device).unwrap();
            Gemm::new("test", Matrix::transposed(&dy_there), Matrix::plain(&x_there), [width, width, k])
                .into(result.as_out("test", accumulate).unwrap())
                .unwrap();
            let plus = if accumulate { 1.0 } else { 0.0 };
            let expected: Vec<f64> = products.iter().map(|&x| f64::from(x) + plus).collect();
            assert!(result.cast(DType::F64).unwrap().to_vec::<f64>().unwrap() == expected, "{dtype} {accumulate}");
        }
    }
}

/// That is the third one if the first is slow, and the second gives other bits; and the first if both others do, or if
/// it is the only fast one. A product that is added to something has kernels, and so a choice, of its own.
#[test]
fn the_fastest_algorithm_that_changes_no_bit_is_used() {
    if std::env::var_os("BIFORMER_TEST_GPU").is_none() {
        let Some(standin) = Standin::compiled() else { return };
        let this = ["the_fastest_algorithm_that_changes_no_bit_is_used"];
        for (slow, inexact, inexact_sums, used) in
            [("1", "2", "0", [3, 3]), ("1", "6", "0", [1, 1]), ("6", "0", "0", [1, 1]), ("1", "2", "4", [3, 1])]
        {
            let settings = [
                ("STANDIN_SLOW", slow),
                ("STANDIN_INEXACT", inexact),
                ("STANDIN_INEXACT_SUMS", inexact_sums),
                ("BIFORMER_PLANS", "1"),
            ];
            let said = standin.repeat(&this, &settings);
            let plans: Vec<&str> = said.lines().filter(|line| line.starts_with("plan 256x300 by ")).collect();
            for ((plan, what), used) in plans.iter().zip([" f32: ", " f32, a matrix added: "]).zip(used) {
                let right = plan.contains(what) && plan.ends_with(&format!("; number {used} is used"));
                assert!(right, "{settings:?}: {said}");
            }
            assert_eq!(plans.len(), 2, "{said}");
        }
        return;
    }
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(gpu);
    let (width, k) = (256, 300);
    // Small whole numbers, so that all sums are exact.
    let small = |step: usize| -> Vec<f32> { (0..k * width).map(|i| (i * step % 11) as f32 - 4.0).collect() };
    let there = |data: &[f32]| Tensor::from_slice(data, [k, width]).unwrap().to_device(&device).unwrap();
    let (a, b) = (small(7), small(3));
    let (a_there, b_there) = (there(&a), there(&b));
    let mut c = Tensor::zeros_on(&device, [width, width], DType::F32).unwrap();
    let mut multiply = |accumulate| {
        Gemm::new("test", Matrix::transposed(&a_there), Matrix::plain(&b_there), [width, width, k])
            .into(c.as_out("test", accumulate).unwrap())
            .unwrap();
        c.to_vec::<f32>().unwrap()
    };
    let first = multiply(false);
    for (place, got) in first.iter().enumerate() {
        let sum: f32 = (0..k).map(|l| a[l * width + place / width] * b[l * width + place % width]).sum();
        assert_eq!(*got, sum);
    }
    assert!(multiply(false) == first, "other bits");
    assert!(multiply(true).iter().zip(&first).all(|(twice, once)| *twice == 2.0 * once));
}

/// If another algorithm or a separate addition took its place, results would have other bits from then on.
#[test]
fn an_epilogue_that_fails_is_an_error() {
    if std::env::var_os("STANDIN_EPILOGUES").is_none_or(|epilogues| epilogues != "4") {
        return;
    }
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(gpu);
    let square = Tensor::zeros_on(&device, [8, 8], DType::F32).unwrap();
    let row = Tensor::zeros_on(&device, [8], DType::F32).unwrap();
    let mut result = square.duplicate().unwrap();
    let product = || Gemm::new("test", Matrix::plain(&square), Matrix::plain(&square), [8; 3]);
    for _ in 0..4 {
        let outcome = product().row(Some(&row)).into(result.as_out("test", false).unwrap());
        assert!(matches!(outcome, Err(Error::Gpu { .. })), "{outcome:?}");
    }
    product().into(result.as_out("test", false).unwrap()).unwrap();
}

/// Also where cuBLASLt does nothing besides, refuses at last what it had promised, or would be slow; where it refuses
/// all but the last of its algorithms; and where it knows none that adds up parts.
#[test]
fn on_the_standin_gpu() {
    let Some(standin) = Standin::compiled() else { return };
    standin.repeat(&["a_long_product", "f32_is_tf32"], &[]);
    for epilogues in ["0", "1", "2", "3"] {
        standin.repeat(&["what_a_product_does_besides"], &[("STANDIN_EPILOGUES", epilogues)]);
    }
    standin.repeat(&["an_epilogue_that_fails_is_an_error"], &[("STANDIN_EPILOGUES", "4")]);
    standin.repeat(&["of_every_kind", "what_a_product_does_besides"], &[("STANDIN_REFUSED", "2")]);
    standin.repeat(&["of_every_kind", "a_long_product"], &[("STANDIN_REDUCTIONS", "0")]);
}
