//! Copies that go beside a device's work, on the emulated device.

use standin::Standin;
use std::sync::Arc;
use tensor::cuda::{Gpu, Prefetch, Stream};
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

/// On a GPU each of these would be right most of the time.
#[test]
fn the_emulated_device_notices_copies_out_of_order() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let driver = gpu.driver();
    let [there, elsewhere] = [(); 2].map(|()| driver.allocate(16).unwrap().unwrap());
    let mut host = [1u8; 16];
    let read = |address| {
        let mut bytes = [0; 16];
        // SAFETY: there are as many.
        unsafe { driver.download(address, &mut bytes).unwrap() };
        bytes
    };
    // SAFETY: all places have 16 bytes, and what is sent from them stays.
    unsafe {
        driver.send(&host, there).unwrap();
        driver.copy(Stream::Work, there, elsewhere, 16).unwrap();
        assert_eq!(read(elsewhere), [0xFF; 16], "work that does not wait for a copy");

        driver.order(Stream::Copies, Stream::Work).unwrap();
        driver.copy(Stream::Work, there, elsewhere, 16).unwrap();
        assert!(driver.send(&host, there).unwrap_err().to_string().contains("no order"), "a copy that overtakes work");
        driver.order(Stream::Work, Stream::Copies).unwrap();
        driver.send(&host, there).unwrap();
        assert_eq!(read(elsewhere), [1; 16]);

        host.fill(2);
        let error = driver.finish(Stream::Copies).unwrap_err().to_string();
        assert!(error.contains("had not waited"), "a host that changes what has not left yet: {error}");
        [there, elsewhere].into_iter().for_each(|address| driver.free(address));
    }
}

/// When requests are done as late as can be, and where one of the streams is ahead of the others.
#[test]
fn on_the_standin_gpu() {
    let Some(standin) = Standin::compiled() else { return };
    for eager in ["0", "1", "2", "3"] {
        standin.repeat(&[], &[("STANDIN_EAGER", eager)]);
    }
}
