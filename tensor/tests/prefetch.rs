//! Copies that go beside a device's work, on the emulated device.

use standin::Standin;
use std::sync::Arc;
use tensor::cuda::{Gpu, Prefetch};
use tensor::{DType, Device, Error, Tensor};

#[test]
fn what_is_sent_ahead_comes_when_it_is_received() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let held = gpu.stats().in_use;
    let mut prefetch = Prefetch::new(&gpu, 16).unwrap();
    let mut pair = [1, 3].map(|count| Tensor::zeros_on(&device, [count], DType::F32).unwrap());
    let sent = |numbers: &[f32]| numbers.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<u8>>();
    for round in 0..3 {
        let first = round as f32;
        prefetch.send(&[&sent(&[first, 5.0]), &sent(&[6.0, 7.0])]).unwrap();
        assert_ne!(pair[0].to_vec::<f32>().unwrap(), [first + 1.0], "nobody sees it before");
        prefetch.receive(&mut pair).unwrap();
        // What is sent next does not change what was received.
        prefetch.send(&[&sent(&[9.0; 4])]).unwrap();
        assert_eq!([&pair[0], &pair[1]].map(|x| x.to_vec::<f32>().unwrap()), [vec![first], vec![5.0, 6.0, 7.0]]);
    }
    prefetch.send(&[&sent(&[1.0])]).unwrap();
    let error = prefetch.receive(&mut pair).unwrap_err().to_string();
    assert!(error.contains("16 bytes are expected, and 4 were sent"), "{error}");
    prefetch.receive(&mut pair[..1]).unwrap();
    assert!(matches!(prefetch.receive(&mut pair[..1]), Err(Error::Argument { .. })), "once received, it is gone");
    assert!(matches!(prefetch.send(&[&[0; 17]]), Err(Error::Argument { .. })));
    let outcome = gpu.record(|| prefetch.send(&[&[0; 16]]));
    assert!(outcome.err().unwrap().to_string().contains("cannot be recorded"));
    let another = gpu.record(|| Prefetch::new(&gpu, 16));
    assert!(another.err().unwrap().to_string().contains("cannot be recorded"));
    drop((prefetch, pair));
    assert_eq!(gpu.stats().in_use, held);
}

#[test]
fn on_the_standin_gpu() {
    let Some(standin) = Standin::compiled() else { return };
    standin.repeat_in_each_order(&[], &[]);
}
