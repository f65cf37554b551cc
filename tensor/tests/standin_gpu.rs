//! What libraries in the role of CUDA's show, and a GPU seldom. One whose memory is full: what the driver needs for
//! itself (kernels, recordings) finds room where tensors have left it, and is called by its name where there is none.
//! And several in one machine.

use standin::Standin;
use std::sync::Arc;
use tensor::cuda::{Gemm, Gpu, Matrix, elements};
use tensor::{DType, Device, Error, Result, Tensor};

/// Where this is not set, a GPU has more memory than a test should take.
const MEMORY: &str = "STANDIN_MEMORY";
/// Where this is not set, there may be one GPU.
const DEVICES: &str = "STANDIN_DEVICES";

/// The device, and tensors that take all of its memory: of 1 MiB, then of 64 KiB, then of 4 KiB.
fn full() -> Option<(Arc<Gpu>, Vec<Tensor>)> {
    std::env::var_os(MEMORY)?;
    let gpu = Gpu::for_tests(1)?;
    let device = Device::Cuda(Arc::clone(&gpu));
    let mut tensors = vec![];
    for count in [1 << 18, 1 << 14, 1 << 10] {
        loop {
            match Tensor::empty_on(&device, [count], DType::F32) {
                Ok(tensor) => tensors.push(tensor),
                Err(error) => break assert!(error.to_string().contains("a smaller batch needs less"), "{error}"),
            }
        }
    }
    Some((gpu, tensors))
}

/// Does what needs memory of the driver's: where all of it is taken, and where some was, and lies free in the pool.
fn squeeze(what: &str, tensors: Vec<Tensor>, mut act: impl FnMut() -> Result<()>) {
    let error = act().unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { bytes: None, in_use: Some(1..), .. }), "{error}");
    assert!(error.to_string().contains(&format!("no room on the GPU for {what}; of its")), "{error}");
    drop(tensors);
    act().unwrap();
}

#[test]
fn kernels_find_room() {
    let Some((_, mut tensors)) = full() else { return };
    let [x, mut y] = [(); 2].map(|()| tensors.pop().unwrap());
    squeeze("loading the kernels of elements", tensors, || elements::put(y.as_out("test", false)?, &x));
}

#[test]
fn products_find_room() {
    let Some((_, mut tensors)) = full() else { return };
    let mut of = || tensors.pop().unwrap().reshape([32, 32]).unwrap();
    let (a, b, mut c) = (of(), of(), of());
    squeeze("cuBLASLt, a product of 32x32 by 32x32, f32 to f32", tensors, || {
        let product = Gemm::new("test", Matrix::plain(&a), Matrix::plain(&b), [32; 3]);
        product.into(c.as_out("test", false)?)
    });
}

#[test]
fn recordings_find_room() {
    let Some((gpu, mut tensors)) = full() else { return };
    let mut x = tensors.pop().unwrap();
    // Room for keys of random streams, and no more.
    drop(tensors.remove(tensors.iter().position(|tensor| tensor.count() == 1 << 18).unwrap()));
    squeeze("preparing a recording", tensors, || {
        gpu.record(|| x.as_out("test", false)?.clear()).map(|(recording, ())| drop(recording))
    });
    assert_eq!(gpu.stats().in_use, x.bytes());
}

/// What earlier work aside keeps, and what this work itself has returned.
#[test]
fn work_aside_finds_room() {
    if std::env::var_os(MEMORY).is_none() {
        return;
    }
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let full = |mebibytes: usize, number| Tensor::full_on(&device, [mebibytes << 18], number, DType::F32);
    // SAFETY: the works read what is named or their own, and what they write is looked at when it has been joined.
    let aside = |reads: &[&Tensor], work: &mut dyn FnMut() -> Result<()>| unsafe { gpu.aside(reads, work) };
    // So much was in use once that work aside may keep more.
    drop(full(16, 0.0).unwrap());
    let (x, mut copy, mut last) = (full(2, 2.0).unwrap(), full(2, 0.0).unwrap(), full(1, 0.0).unwrap());
    let first = &mut || elements::put(copy.as_out("test", false)?, &x.duplicate()?);
    aside(&[&x], first).unwrap();
    drop(x);
    let in_use = gpu.stats().in_use;
    let second = &mut || {
        drop(full(3, 3.0)?);
        elements::put(last.as_out("test", false)?, &full(12, 5.0)?.slice(0, 0..1 << 18)?)
    };
    aside(&[], second).unwrap();
    assert!(
        in_use == 5 << 20 && gpu.stats().in_use == 3 << 20,
        "the second has joined the first, and only where it must"
    );
    gpu.join().unwrap();
    for (tensor, expected) in [(copy, 2.0), (last, 5.0)] {
        assert!(tensor.to_vec::<f32>().unwrap().iter().all(|&number| number == expected), "{expected}");
    }
}

#[test]
fn several_work_side_by_side() {
    if std::env::var_os(DEVICES).is_none() {
        return;
    }
    let gpus = [0, 1].map(|ordinal| Gpu::open(ordinal).unwrap());
    let devices = gpus.clone().map(Device::Cuda);
    let numbers = [1.5f32, 2.5, 3.5, 4.5];
    let tensors = devices.each_ref().map(|gpu| Tensor::from_slice(&numbers, [2, 2]).unwrap().to_device(gpu).unwrap());
    let sums = std::thread::scope(|scope| {
        let work = |x: &Tensor| {
            let mut sum = x.cast(DType::F64).unwrap().cast(DType::F32).unwrap();
            let product = Gemm::new("test", Matrix::plain(x), Matrix::plain(x), [2; 3]);
            product.into(sum.as_out("test", true).unwrap()).unwrap();
            sum.to_vec::<f32>().unwrap()
        };
        let threads = tensors.each_ref().map(|x| scope.spawn(move || (0..20).fold(vec![], |_, _| work(x))));
        threads.map(|thread| thread.join().unwrap())
    });
    let expected = [1.5 + 11.0, 2.5 + 15.0, 3.5 + 21.0, 4.5 + 29.0];
    assert_eq!(sums, [expected, expected]);
    // From one to the other by way of the machine; no operation takes both.
    assert_eq!(tensors[0].to_device(&devices[1]).unwrap().to_vec::<f32>().unwrap(), numbers);
    let mut there = Tensor::zeros_on(&devices[1], [2, 2], DType::F32).unwrap();
    let outcome = elements::put(there.as_out("test", false).unwrap(), &tensors[0]);
    assert!(matches!(outcome, Err(Error::Device { .. })), "{outcome:?}");
    // One goes, and the other stays.
    drop((devices, tensors, there));
    let [gone, stays] = gpus;
    drop(gone);
    assert_eq!(Tensor::full([3], 1f32).to_device(&Device::Cuda(stays)).unwrap().to_vec::<f32>().unwrap(), [1.0; 3]);
}

#[test]
fn on_the_standin_gpu() {
    let Some(standin) = Standin::compiled() else { return };
    // One after another: there is one device. Beside what is full at once it has 64 MiB for cuBLASLt.
    let memory = ((84 << 20) + (300 << 10)).to_string();
    for test in ["kernels_find_room", "products_find_room", "recordings_find_room"] {
        standin.repeat(&[test], &[(MEMORY, &memory)]);
    }
    standin.repeat_in_each_order(&["work_aside_finds_room"], &[(MEMORY, &memory)]);
    standin.repeat_in_each_order(&["side_by_side"], &[(DEVICES, "2")]);
}
