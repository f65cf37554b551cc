//! Tensors on a GPU, on the emulated device.

use standin::Standin;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use tensor::cuda::nvidia::compiler::version;
use tensor::cuda::{Gemm, Gpu, MULTIPROCESSORS, Matrix, Module, elements, partial_sums, with_multiprocessors};
use tensor::{DType, Device, Error, Tensor, bf16};

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.7).sin() * 10.0).collect()
}

#[test]
fn tensors_go_to_a_device_and_come_back() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(gpu);
    let there = Tensor::from_slice(&numbers(2 * 3 * 5), [2, 3, 5]).unwrap();
    let here = there.to_device(&device).unwrap();
    assert_eq!(here.device(), device);
    assert_eq!(here.to_vec::<f32>().unwrap(), there.to_vec::<f32>().unwrap());
    for dtype in [DType::F32, DType::F64, DType::Bf16] {
        let view = |x: &Tensor| x.cast(dtype).unwrap().permute(&[2, 0, 1]).unwrap().slice(0, 1..4).unwrap();
        let (cpu, gpu) = (view(&there), view(&here));
        let copy = gpu.contiguous().unwrap();
        assert!(copy.is_contiguous());
        let expected = cpu.cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
        assert_eq!(copy.cast(DType::F64).unwrap().to_vec::<f64>().unwrap(), expected, "{dtype}");
    }
    let indices = Tensor::from_slice(&[1u32, 2, u32::MAX, 4], [2, 2]).unwrap().to_device(&device).unwrap();
    assert_eq!(indices.permute(&[1, 0]).unwrap().contiguous().unwrap().to_vec::<u32>().unwrap(), [1, u32::MAX, 2, 4]);
}

#[test]
fn bfloat16_is_rounded_as_on_the_cpu() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(gpu);
    let mut values = numbers(1000);
    values.extend([
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        3.4e38,
    ]);
    let x = Tensor::from_slice(&values, [values.len()]).unwrap();
    let rounded = x.to_device(&device).unwrap().cast(DType::Bf16).unwrap().to_vec::<bf16>().unwrap();
    for (&x, got) in values.iter().zip(rounded) {
        let expected = bf16::from_f32(x);
        assert!(got == expected || (got.is_nan() && expected.is_nan()), "{x}: {got}, not {expected}");
    }
}

#[test]
fn types_become_each_other() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let (device, types) = (Device::Cuda(gpu), [DType::F32, DType::F64, DType::Bf16]);
    for (from, to) in types.into_iter().flat_map(|from| types.map(|to| (from, to))) {
        // Also numbers beside a tie of bf16's that f32 cannot tell from it.
        let beside = [1.0, 3.0]
            .map(|odd| 1.0 + odd * 2f64.powi(-8))
            .map(|tie| [-1.0, 0.0, 1.0].map(|i| tie + i * 2f64.powi(-40)));
        let values = [numbers(37).into_iter().map(f64::from).collect(), beside.concat()].concat();
        let here = Tensor::from_slice(&values, [values.len()]).unwrap().cast(from).unwrap();
        let there = here.to_device(&device).unwrap().cast(to).unwrap();
        let [expected, found] = [here.cast(to).unwrap(), there].map(|x| x.cast(DType::F64).unwrap().to_vec::<f64>());
        assert_eq!(found.unwrap(), expected.unwrap(), "{from} to {to}");
        let filled = Tensor::full_on(&device, [5], 1.5, to).unwrap().cast(DType::F32).unwrap();
        assert_eq!(filled.to_vec::<f32>().unwrap(), [1.5; 5], "{to}");
    }
}

#[test]
fn tensors_of_two_devices_do_not_mix() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let there = Tensor::from_slice(&numbers(4), [4]).unwrap();
    let mut here = there.to_device(&Device::Cuda(gpu)).unwrap();
    assert!(matches!(here.as_slice::<f32>("test"), Err(Error::Device { op: "test", .. })));
    let out = here.as_out("test", false).unwrap();
    assert!(matches!(elements::put(out, &there), Err(Error::Device { .. })));
    let Some(other) = Gpu::for_tests(2) else { return };
    let error = here.address("test", &other).unwrap_err().to_string();
    assert!(error.contains("got one on another cuda ("), "two of one kind: {error}");
}

/// Whoever copies them need not wait, and may have other use for their memory at once.
#[test]
fn many_small_pieces_arrive() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let (rows, columns) = (150, 257);
    let mut there = Tensor::zeros_on(&Device::Cuda(gpu), [rows, columns], DType::F32).unwrap();
    let mut row = vec![0.0f32; columns];
    for i in 0..rows {
        row.iter_mut().enumerate().for_each(|(j, x)| *x = (i * columns + j) as f32);
        there.overwrite(i * columns, &Tensor::from_slice(&row, [columns]).unwrap()).unwrap();
    }
    let expected: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
    assert!(there.to_vec::<f32>().unwrap() == expected);
}

/// On a GPU, few bytes pass through page-locked memory, and many do not.
#[test]
fn tensors_come_back_together() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(gpu);
    for count in [257, 300_000] {
        let there = Tensor::from_slice(&numbers(2 * count), [2, count]).unwrap();
        let here = there.to_device(&device).unwrap();
        let view = here.permute(&[1, 0]).unwrap();
        let half = here.cast(DType::Bf16).unwrap();
        let none = Tensor::zeros_on(&device, [0, 3], DType::F64).unwrap();
        for _ in 0..2 {
            let copies = Tensor::all_to_cpu([&here, &none, &view, &there, &half]).unwrap();
            assert!(copies.iter().all(|copy| copy.device() == Device::Cpu && copy.is_contiguous()));
            let [a, b, c, d, e] = &copies[..] else { panic!("{} copies of 5", copies.len()) };
            let expected = there.to_vec::<f32>().unwrap();
            assert!(a.to_vec::<f32>().unwrap() == expected && d.to_vec::<f32>().unwrap() == expected);
            assert_eq!((b.shape(), b.dtype()), (none.shape(), DType::F64));
            assert_eq!(c.shape(), view.shape());
            assert!(c.to_vec::<f32>().unwrap() == there.permute(&[1, 0]).unwrap().to_vec::<f32>().unwrap());
            let rounded: Vec<bf16> = expected.iter().map(|&x| bf16::from_f32(x)).collect();
            assert!(e.to_vec::<bf16>().unwrap() == rounded);
        }
    }
    assert!(Tensor::all_to_cpu([]).unwrap().is_empty());
    let Some(other) = Gpu::for_tests(2) else { return };
    let [one, two] = [device, Device::Cuda(other)].map(|device| Tensor::zeros_on(&device, [2], DType::F32).unwrap());
    assert!(matches!(Tensor::all_to_cpu([&one, &two]), Err(Error::Device { op: "all_to_cpu", .. })));
}

#[test]
fn memory_is_handed_out_again() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    for _ in 0..5 {
        let tensor = Tensor::empty_on(&device, [1000, 7], DType::F32).unwrap();
        assert!(tensor.to_vec::<f32>().unwrap().iter().all(|x| x.is_nan()), "memory that nobody has written is poison");
    }
    let stats = gpu.stats();
    assert_eq!((stats.allocations, stats.in_use, stats.peak_in_use), (1, 0, 28_000));
    let error = Tensor::empty_on(&device, [1 << 58], DType::F32).unwrap_err();
    assert!(error.to_string().contains("f32 (288230376151711744)"), "{error}");
}

#[test]
fn a_view_goes_into_a_part_of_a_tensor() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(gpu);
    let values = |x: &Tensor| x.cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
    for dtype in [DType::F32, DType::F64, DType::Bf16] {
        let matrix =
            |rows, width| Tensor::from_slice(&numbers(rows * width), [rows, width]).unwrap().cast(dtype).unwrap();
        // Where a block begins in a matrix (3, 40), and how wide it is; packs begin and end at whole 16 bytes.
        for (row, column, width) in [(0, 0, 40), (1, 8, 24), (1, 7, 24), (0, 8, 23), (2, 0, 1)] {
            let transposed = matrix(width, 3 - row);
            let block = transposed.permute(&[1, 0]).unwrap();
            let columns_lie_together = transposed.to_device(&device).unwrap().permute(&[1, 0]).unwrap();
            for there in [block.to_device(&device).unwrap(), columns_lie_together] {
                let mut whole = matrix(3, 40).to_device(&device).unwrap();
                let mut expected = values(&whole);
                for accumulate in [false, true] {
                    let out = whole.as_out("test", accumulate).unwrap();
                    elements::put_within(out, row * 40 + column, &[40, 1], &there).unwrap();
                    for (i, value) in values(&block).into_iter().enumerate() {
                        let place = &mut expected[(row + i / width) * 40 + column + i % width];
                        *place = if accumulate { *place + value } else { value };
                    }
                    // The double of a number is exact in every type.
                    assert_eq!(values(&whole), expected, "{dtype}, {width} from ({row}, {column}) on, {accumulate}");
                }
            }
        }
    }
    let mut out = Tensor::zeros_on(&device, [10], DType::F32).unwrap();
    let block = Tensor::zeros_on(&device, [2, 2], DType::F32).unwrap();
    let error = elements::put_within(out.as_out("test", false).unwrap(), 4, &[5, 1], &block).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { index: 10, bound: 10, .. }), "{error}");
}

/// One block, a group of them and several groups; one strip of columns and several; and each twice, as the first time
/// must leave no tickets behind.
#[test]
fn blocks_finish_their_sums() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let device = Device::Cuda(gpu);
    let in_f64 = [(1, 1, 1), (3, 1, 20), (2, 257, 5), (1, 9000, 3), (2, 513, 200), (400, 300, 2), (3000, 2, 2)];
    let in_f64 = in_f64.map(|shape| (DType::F64, shape));
    let in_bf16 = [(DType::Bf16, (1, 33_000, 64))];
    let cases = [&in_f64[..], &in_bf16].concat().into_iter().map(|case| (case, MULTIPROCESSORS));
    // Blocks that have several batches of rows each.
    let of_batches = [(1, 9000, 3), (2, 513, 200)].map(|shape| ((DType::F64, shape), 1));
    for ((dtype, (outer, rows, columns)), multiprocessors) in cases.chain(of_batches) {
        let numbers: Vec<f64> = (0..outer * rows * columns).map(|i| (i % 17) as f64).collect();
        let there = |tensor: Tensor, dtype| tensor.cast(dtype).unwrap().to_device(&device).unwrap();
        let x = there(Tensor::from_slice(&numbers, [outer, rows, columns]).unwrap(), dtype);
        let mut sums = there(Tensor::full([outer, columns], f64::NAN), dtype.of_sums());
        for times in [1.0, 2.0] {
            let out = sums.as_out("test", times > 1.0).unwrap();
            with_multiprocessors(multiprocessors, || elements::sum_rows(&x, [outer, rows, columns], out)).unwrap();
            let sum = |place: usize| -> f64 {
                let (outer, column) = (place / columns, place % columns);
                (0..rows).map(|row| numbers[(outer * rows + row) * columns + column]).sum()
            };
            let expected: Vec<f64> = (0..outer * columns).map(|place| times * sum(place)).collect();
            let got = sums.cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
            assert_eq!(got, expected, "{outer}, {rows}, {columns}, {times}, {multiprocessors}");
        }
        let mut short = Tensor::zeros_on(&device, [outer * columns + 1], dtype.of_sums()).unwrap();
        let error = elements::sum_rows(&x, [outer, rows, columns], short.as_out("test", false).unwrap());
        assert!(matches!(error, Err(Error::Shape { .. })));
    }
    let crowd = partial_sums(&device, DType::F32, [1025, 2, 1]);
    assert!(matches!(crowd, Err(Error::Argument { .. })), "there are not as many counters");
}

/// Two places, the first alone and the last alone, stored and added to; one batch of pieces, several, and none.
#[test]
fn pieces_are_added_up_to_two_places() {
    let Some(gpu) = Gpu::for_tests(19) else { return };
    let device = Device::Cuda(gpu);
    let there = |tensor: Tensor, dtype| tensor.cast(dtype).unwrap().to_device(&device).unwrap();
    for (dtype, pieces, columns, split) in
        [(DType::F32, 392, 512, 256), (DType::F32, 40, 13, 10), (DType::F64, 5, 6, 1), (DType::F32, 0, 3, 2)]
    {
        let numbers: Vec<f64> = (0..pieces * columns).map(|i| (i % 17) as f64).collect();
        let x = there(Tensor::from_slice(&numbers, [pieces, columns]).unwrap(), dtype);
        for (accumulate, wanted) in
            [(false, [true, true]), (true, [true, true]), (false, [true, false]), (true, [false, true])]
        {
            let mut places = [split, columns - split].map(|count| there(Tensor::full([count], 1.0), dtype));
            let out = |(place, wanted): (_, bool)| wanted.then(|| Tensor::as_out(place, "test", accumulate).unwrap());
            let [first, last] = &mut places;
            elements::add_pieces(&x, [out((first, wanted[0])), out((last, wanted[1]))]).unwrap();
            let sum = |c: usize| -> f64 { (0..pieces).map(|piece| numbers[piece * columns + c]).sum() };
            for ((place, wanted), begin) in places.iter().zip(wanted).zip([0, split]) {
                let expected = |i| if wanted { sum(begin + i) + f64::from(u8::from(accumulate)) } else { 1.0 };
                let expected: Vec<f64> = (0..place.count()).map(expected).collect();
                assert_eq!(place.cast(DType::F64).unwrap().to_vec::<f64>().unwrap(), expected, "{pieces}, {columns}");
            }
        }
    }
    let x = there(Tensor::zeros([4, 6], DType::F32), DType::F32);
    let place = |count| there(Tensor::zeros([count], DType::F32), DType::F32);
    for counts in [[Some(2), Some(3)], [Some(7), None], [None, Some(7)]] {
        let mut places = counts.map(|count| count.map(place));
        let places = places.each_mut().map(|place| place.as_mut().map(|place| place.as_out("test", false).unwrap()));
        assert!(matches!(elements::add_pieces(&x, places), Err(Error::Shape { .. })), "{counts:?}");
    }
    let [mut narrow, mut wide] = [place(3), there(Tensor::zeros([3], DType::F64), DType::F64)];
    let places = [&mut narrow, &mut wide].map(|place| Some(place.as_out("test", false).unwrap()));
    assert!(matches!(elements::add_pieces(&x, places), Err(Error::DType { .. })));
}

/// What an emulated device must notice.
static FAULTS: Module = Module {
    name: "faults",
    source: r"
        __global__ void half_a_warp(int* out) {
            if (lane() < 7) return;
            *out = __shfl_xor_sync(~0u, 1, 1);
        }
        // Each thread reads what its neighbour wrote, without waiting for it.
        __global__ void missing_barrier(int* out) {
            __shared__ int shared[64];
            shared[threadIdx.x] = -1;
            __syncthreads();
            shared[threadIdx.x] = threadIdx.x;
            out[threadIdx.x] = shared[(threadIdx.x + 1) % 64];
        }
        __global__ void one_too_many(int* out) { out[256] = 1; }
        __global__ void block_sums(int* out) {
            __shared__ int partial[8];
            out[thread_number()] = block_sum(int(threadIdx.x), partial);
        }
    ",
    headers: &[],
    kernels: &["half_a_warp", "missing_barrier", "block_sums", "one_too_many"],
};

#[test]
fn the_emulated_device_notices_mistakes() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let mut out = Tensor::zeros_on(&device, [256], DType::Index).unwrap();
    let mut run = |kernel, threads| {
        let launch = FAULTS.launch(&gpu, kernel, DType::F32).unwrap().threads(threads).output(&mut out).unwrap();
        // SAFETY: each thread writes its own place, at most.
        let outcome = unsafe { launch.run() };
        outcome.map(|()| out.to_vec::<u32>().unwrap())
    };
    assert!(run("half_a_warp", 32).unwrap_err().to_string().contains("never come"));
    let neighbours = |threads: &[u32]| (0..64).all(|i| threads[i] == (i as u32 + 1) % 64);
    assert!(!neighbours(&run("missing_barrier", 64).unwrap()), "a missing barrier shows");
    assert!(run("block_sums", 256).unwrap().iter().all(|&sum| sum == 255 * 128));
    assert!(run("block_sums", 250).unwrap_err().to_string().contains("threads"), "a block that is no whole warps");
}

const SHARING: &[(&str, &str)] = &[(
    "sharing.cuh",
    "template <typename T> __device__ T* shared_memory() { __shared__ T memory[1]; return memory; }",
)];
const SHARES: &str = "
    #include \"sharing.cuh\"
    __global__ void where(u64* out) { *out = reinterpret_cast<u64>(shared_memory<int>()); }
";
static ONE: Module = Module { name: "one", source: SHARES, headers: SHARING, kernels: &["where"] };
static ANOTHER: Module = Module { name: "another", source: SHARES, headers: SHARING, kernels: &["where"] };

/// Kernels of two modules run at the same time, for two devices; what they declare in a common header is not common.
#[test]
fn the_emulated_modules_share_no_memory() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let place = |module: &'static Module| {
        let mut out = Tensor::zeros_on(&Device::Cuda(Arc::clone(&gpu)), [1], DType::F64).unwrap();
        let launch = module.launch(&gpu, "where", DType::F32).unwrap().threads(32).output(&mut out).unwrap();
        // SAFETY: all threads write the one place, the same.
        unsafe { launch.run().unwrap() };
        out.to_vec::<f64>().unwrap()[0].to_bits()
    };
    assert_ne!(place(&ONE), place(&ANOTHER));
}

#[test]
fn the_emulated_device_holds_arguments_against_parameters() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let launch = FAULTS.launch(&gpu, "block_sums", DType::F32).unwrap().count(5);
    // SAFETY: it does not run.
    let error = unsafe { launch.run() }.unwrap_err().to_string();
    assert!(error.contains("called with (l), and declares (p)"), "{error}");
}

#[test]
fn a_block_that_asks_for_more_than_there_is_does_not_run() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let mut out = Tensor::zeros_on(&Device::Cuda(Arc::clone(&gpu)), [256], DType::F32).unwrap();
    let launch = |bytes, threads| {
        let launch = FAULTS.launch(&gpu, "block_sums", DType::F32).unwrap();
        launch.threads(threads).shared(bytes)
    };
    for (bytes, threads, said) in
        [(228 << 10, 256, "a block needs 233472 bytes of shared memory"), (0, 2048, "2048 threads")]
    {
        // SAFETY: it does not run.
        let error = unsafe { launch(bytes, threads).output(&mut out).unwrap().run() }.unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    for (grid, said) in [
        ([1 << 31, 1, 1], "a grid of 2147483648x1x1 blocks of 256 threads"),
        ([1, 65_536, 1], "a grid of 1x65536x1 blocks"),
        ([1, 1, 65_536], "a grid of 1x1x65536 blocks"),
    ] {
        let launch = launch(0, 256).output(&mut out).unwrap().over(5).grid(grid);
        // SAFETY: as above.
        let error = unsafe { launch.run() }.unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// Runs only as a child of the test below, where the sanitizers watch.
#[test]
#[ignore]
fn an_emulated_kernel_reaches_beyond_a_tensor() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let mut out = Tensor::zeros_on(&Device::Cuda(Arc::clone(&gpu)), [256], DType::Index).unwrap();
    let launch = FAULTS.launch(&gpu, "one_too_many", DType::F32).unwrap().threads(32).output(&mut out).unwrap();
    // SAFETY: none. This is what is to be noticed.
    unsafe { launch.run().unwrap() };
}

#[cfg(target_os = "linux")]
#[test]
fn sanitizers_notice_an_emulated_kernel_that_reaches_beyond_a_tensor() {
    let again = standin::sanitized(&["--ignored", "--exact", "an_emulated_kernel_reaches_beyond_a_tensor"]);
    let Some(mut again) = again else { return };
    let ran = again.output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(!ran.status.success() && said.contains("heap-buffer-overflow"), "{said}");
}

/// Sums that would wrap around lead out of the memory.
#[test]
fn places_beyond_all_memory_are_refused() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(gpu);
    let mut tensor = Tensor::zeros_on(&device, [8], DType::F32).unwrap();
    let values = Tensor::zeros_on(&device, [2], DType::F32).unwrap();
    for (start, stride) in [(usize::MAX, 1), (0, usize::MAX), (2, usize::MAX - 1)] {
        let outcome = elements::put_within(tensor.as_out("test", false).unwrap(), start, &[stride], &values);
        assert!(matches!(outcome, Err(Error::OutOfRange { .. })), "{outcome:?}");
    }
    let part = catch_unwind(AssertUnwindSafe(|| tensor.as_out("test", false).unwrap().part(usize::MAX, 2).count()));
    assert!(part.is_err());
    let square = Tensor::zeros_on(&device, [2, 2], DType::F32).unwrap();
    let mut result = square.duplicate().unwrap();
    let product = Gemm::new("test", Matrix::plain(&square), Matrix::plain(&square), [2; 3]).batch(usize::MAX / 4 + 2);
    let outcome = product.into(result.as_out("test", false).unwrap());
    assert!(matches!(outcome, Err(Error::Argument { op: "test", .. })), "{outcome:?}");
    // 4 times 2^62 rows of 1 column.
    let (nothing, mut sums) = (Tensor::zeros_on(&device, [0], DType::F32).unwrap(), square.duplicate().unwrap());
    let outcome = elements::sum_rows(&nothing, [4, 1 << 62, 1], sums.as_out("test", false).unwrap());
    assert!(matches!(outcome, Err(Error::Shape { .. })), "{outcome:?}");
}

#[test]
fn tensors_of_nearly_all_addresses_are_errors() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(gpu);
    // Half as many bytes in f64 as addresses are allowed for.
    let most = (1 << 59) - 1;
    for dtype in [DType::Bf16, DType::F32, DType::F64] {
        let error = |count| Tensor::zeros_on(&device, [count], dtype).unwrap_err();
        assert!(matches!(error(most), Error::OutOfMemory { .. }), "{dtype}: {}", error(most));
        for count in [most + 1, usize::MAX / 8, usize::MAX] {
            assert!(matches!(error(count), Error::Argument { .. }), "{dtype}, {count}: {}", error(count));
        }
    }
}

#[test]
fn in_ptx() {
    Standin::in_ptx(version()).into_iter().for_each(|standin| _ = standin.repeat(&[], &[]));
}

#[test]
fn on_the_standin_gpu() {
    Standin::compiled().into_iter().for_each(|standin| _ = standin.repeat(&[], &[]));
}
