//! Random numbers on a GPU, and recorded work, which puts their keys into its memory; on the emulated device.

use standin::Standin;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use tensor::cuda::{Gpu, Module, Repeated, elements};
use tensor::rng::Philox;
use tensor::{DType, Device, Error, Tensor};

static RANDOM: Module = Module {
    name: "random",
    source: r"
        __global__ void random_words(const u64* key, u64 seed, u64 stream, i64 first, u32* out) {
            i64 i = thread_number();
            out[i] = Philox(key, seed, stream).word(first + i);
        }
    ",
    headers: &[],
    kernels: &["random_words"],
};

#[test]
fn random_numbers_are_those_of_the_cpu() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let mut words = Tensor::empty_on(&Device::Cuda(Arc::clone(&gpu)), [256], DType::Index).unwrap();
    for rng in [Philox::new(0, 0), Philox::new(u64::MAX, 1 << 40), Philox::keyed(7, &[1, 2, 3])] {
        for first in [0, 5, (1 << 34) - 100, 1 << 62] {
            let launch = RANDOM.launch(&gpu, "random_words", DType::F32).unwrap().over(256);
            // SAFETY: each thread writes its own place.
            unsafe { launch.random(&rng).unwrap().count(first).output(&mut words).unwrap().run().unwrap() };
            let expected: Vec<u32> = (0..256).map(|i| rng.word(first as u64 + i)).collect();
            assert_eq!(words.to_vec::<u32>().unwrap(), expected, "{rng:?} from {first}");
        }
    }
}

#[test]
fn recorded_work_is_done_again_with_what_then_lies_there() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let mut input = Tensor::from_slice(&[1.0f32, 2.0], [2]).unwrap().to_device(&device).unwrap();
    let mut words = Tensor::zeros_on(&device, [256], DType::Index).unwrap();
    let (first, second) = (Philox::new(1, 2), Philox::new(3, 4));
    // As in a step, whose first run is not recorded, its kernels are loaded before.
    drop((RANDOM.launch(&gpu, "random_words", DType::F32).unwrap(), input.cast(DType::F64).unwrap()));
    let held = gpu.stats().in_use;
    let (recording, sum) = gpu
        .record(|| {
            let launch = RANDOM.launch(&gpu, "random_words", DType::F32)?.over(256).random(&first)?;
            // SAFETY: each thread writes its own place.
            unsafe { launch.count(0).output(&mut words)?.run()? };
            // A tensor that is gone when the recording is done, and one that stays.
            let wide = input.cast(DType::F64)?;
            let mut sum = wide.cast(DType::F32)?;
            elements::put(sum.as_out("test", true)?, &input)?;
            Ok::<_, Error>(sum)
        })
        .unwrap();
    assert_eq!(recording.streams(), [first]);
    for (round, stream) in [first, second, first].iter().enumerate() {
        input.overwrite(0, &Tensor::from_slice(&[round as f32, 10.0], [2]).unwrap()).unwrap();
        // What others do in between does not touch the recording's own memory.
        drop(Tensor::full([1000], f32::NAN).to_device(&device).unwrap());
        recording.replay(&[*stream]).unwrap();
        assert_eq!(sum.to_vec::<f32>().unwrap(), [2.0 * round as f32, 20.0]);
        let expected: Vec<u32> = (0..256).map(|i| stream.word(i)).collect();
        assert_eq!(words.to_vec::<u32>().unwrap(), expected);
    }
    assert!(matches!(recording.replay(&[]), Err(Error::Argument { .. })));
    drop((recording, sum));
    assert_eq!(gpu.stats().in_use, held, "a recording leaves nothing behind");
    let outcome = gpu.record(|| input.to_vec::<f32>());
    assert!(outcome.err().unwrap().to_string().contains("cannot be recorded"));
    assert_eq!(input.to_vec::<f32>().unwrap(), [2.0, 10.0], "and after a recording that failed all is well");
    let panicked = catch_unwind(AssertUnwindSafe(|| gpu.record(|| -> tensor::Result<()> { panic!("within") })));
    assert!(panicked.is_err());
    assert_eq!(input.to_vec::<f32>().unwrap(), [2.0, 10.0], "and after a panic");
    let fail = || gpu.record(|| Err::<(), _>(Error::argument("test", "on purpose"))).err().unwrap();
    fail();
    let held = gpu.stats().held;
    let within = gpu.record(|| {
        drop(input.cast(DType::F64)?);
        gpu.record(|| Ok::<_, Error>(())).map(|_| ())
    });
    assert!(within.err().unwrap().to_string().contains("a recording cannot start within another"));
    fail(); // Recording begins by giving back what is free.
    assert_eq!(gpu.stats().held, held, "a recording that failed keeps nothing");
}

/// It would become a part of the recording.
#[test]
fn what_another_thread_asks_during_a_recording_is_refused() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let input = Tensor::from_slice(&[1.0f32, 2.0], [2]).unwrap().to_device(&device).unwrap();
    let rng = Philox::new(1, 2);
    drop((RANDOM.launch(&gpu, "random_words", DType::F32).unwrap(), input.cast(DType::F64).unwrap()));
    let ask = || {
        let launch = RANDOM.launch(&gpu, "random_words", DType::F32)?;
        let outcomes = [
            input.cast(DType::F64).map(drop),
            input.duplicate().map(drop),
            Tensor::zeros_on(&device, [2], DType::F32).map(drop),
            // Its memory could be what the recording uses.
            Tensor::empty_on(&device, [2], DType::F32).map(drop),
            launch.random(&rng).map(drop),
            // SAFETY: nothing is submitted.
            unsafe { gpu.aside(&[], || Ok(())) },
        ];
        Ok::<_, Error>(outcomes.map(|outcome| outcome.map_err(|error| error.to_string())))
    };
    let record = || gpu.record(|| thread::scope(|scope| scope.spawn(ask).join().unwrap()));
    let (recording, outcomes) = record().unwrap();
    for outcome in outcomes {
        assert!(outcome.clone().is_err_and(|error| error.contains("another thread is recording")), "{outcome:?}");
    }
    assert_eq!(recording.streams(), []);
    drop(recording);
    assert!(ask().unwrap().iter().all(Result::is_ok), "afterwards nothing is refused");
}

/// To the very end: whoever asks again and again is let in when it is over, and finds that the work is done.
#[test]
fn another_thread_is_let_in_when_a_recording_has_ended() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let input = Tensor::from_slice(&[1.0f32, 2.0], [2]).unwrap().to_device(&Device::Cuda(Arc::clone(&gpu))).unwrap();
    let input = &input;
    drop(input.cast(DType::F64).unwrap());
    for _ in 0..100 {
        thread::scope(|scope| {
            let (asked, meanwhile) = mpsc::channel();
            let ask = move || {
                asked.send(input.cast(DType::F64).map(drop)).unwrap();
                while input.cast(DType::F64).is_err() {}
                input.cast(DType::F64).unwrap().to_vec::<f64>().unwrap()
            };
            let (recording, asking) = gpu
                .record(|| {
                    let asking = scope.spawn(ask);
                    assert!(meanwhile.recv().unwrap().is_err());
                    Ok::<_, Error>(asking)
                })
                .unwrap();
            assert_eq!(asking.join().unwrap(), [1.0, 2.0]);
            drop(recording);
        });
    }
}

/// On the device, which counts them by itself, a wait would spoil the recording.
#[test]
fn waiting_is_refused_during_a_recording_and_an_older_one_may_go() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let input = Tensor::from_slice(&[1.0f32, 2.0], [2]).unwrap().to_device(&Device::Cuda(Arc::clone(&gpu))).unwrap();
    let held = gpu.stats();
    let (older, _) = gpu.record(|| input.cast(DType::F64)).unwrap();
    let (newer, (wide, refused)) = gpu
        .record(|| {
            let doubled = input.cast(DType::F64)?;
            let refused = gpu.synchronize();
            let wide = doubled.duplicate()?;
            // What this one uses must stay, though it is no tensor's any more when the older one goes.
            drop(doubled);
            drop(older);
            Ok::<_, Error>((wide, refused))
        })
        .unwrap();
    assert!(refused.unwrap_err().to_string().contains("waiting for the device cannot be recorded"));
    for _ in 0..2 {
        newer.replay(&[]).unwrap();
        assert_eq!(wide.to_vec::<f64>().unwrap(), [1.0, 2.0]);
    }
    gpu.synchronize().unwrap();
    drop((newer, wide));
    assert_eq!(gpu.stats().in_use, held.in_use);
}

/// As many micro-batches of a deep model draw them: each kernel finds its own key, also one that was used before.
#[test]
fn thousands_of_random_streams_are_told_apart() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let streams: Vec<Philox> = (0..5000).map(|stream| Philox::new(9, stream)).collect();
    let mut words = Tensor::zeros_on(&Device::Cuda(Arc::clone(&gpu)), [256], DType::Index).unwrap();
    drop(RANDOM.launch(&gpu, "random_words", DType::F32).unwrap());
    let recording = gpu.record(|| {
        for rng in streams.iter().chain([&streams[4321]]) {
            let launch = RANDOM.launch(&gpu, "random_words", DType::F32)?.over(256).random(rng)?;
            // SAFETY: each thread writes its own place.
            unsafe { launch.count(0).output(&mut words)?.run()? };
        }
        Ok::<_, Error>(())
    });
    let (recording, ()) = recording.unwrap();
    assert_eq!(recording.streams(), streams);
    let others: Vec<Philox> = (0..5000).map(|stream| Philox::new(10, stream)).collect();
    recording.replay(&others).unwrap();
    let expected: Vec<u32> = (0..256).map(|i| others[4321].word(i)).collect();
    assert_eq!(words.to_vec::<u32>().unwrap(), expected);
}

/// Someone who watches each operation may ask for that at any time.
#[test]
fn repeated_work_is_recorded_and_replayed_only_where_it_may_be() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let input = Tensor::from_slice(&[1.5f32, 2.0], [2]).unwrap().to_device(&device).unwrap();
    let asked = |may_be_recorded: &[bool]| {
        let mut repeated = Repeated::default();
        let once = |&may_record: &bool| {
            let mut done = false;
            let work = || {
                done = true;
                input.cast(DType::F64)
            };
            let left = repeated.run(&device, may_record, |_| vec![], work).unwrap();
            assert_eq!(left.to_vec::<f64>().unwrap(), [1.5, 2.0]);
            done
        };
        may_be_recorded.iter().map(once).collect::<Vec<_>>()
    };
    // As it stands, recorded, replayed; and as it stands where it may not be, after which the recording still serves.
    let found = asked(&[true, true, true, false, true, false, false]);
    assert_eq!(found, [true, true, false, true, false, true, true]);
    // Nothing is recorded before it may be.
    assert_eq!(asked(&[false, false, true, true, true]), [true, true, true, false, false]);
}

#[test]
fn what_a_recording_uses_stays_its_own_when_the_tensors_go() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let tensor = |value: f32| Tensor::full([1000], value).to_device(&device).unwrap();
    let (input, mut output) = (tensor(1.0), tensor(2.0));
    let places = [&input, &output].map(Tensor::buffer_id);
    let (recording, ()) = gpu.record(|| elements::put(output.as_out("test", true)?, &input)).unwrap();
    drop((input, output));
    // Another recording first gives free memory back to the device.
    let (other, ()) = gpu.record(|| Ok::<_, Error>(())).unwrap();
    let others = [tensor(3.0), tensor(4.0)];
    assert!(others.iter().all(|tensor| !places.contains(&tensor.buffer_id())));
    recording.replay(&[]).unwrap();
    assert!(others[0].to_vec::<f32>().unwrap().iter().all(|&element| element == 3.0));
    let held = gpu.stats().held;
    drop((recording, other));
    drop(gpu.record(|| Ok::<_, Error>(())).unwrap());
    assert!(gpu.stats().held < held, "and goes with the last recording that may use it");
}

/// The second uses memory that was taken after the first was recorded.
#[test]
fn a_recording_that_goes_leaves_another_what_that_uses() {
    let Some(gpu) = Gpu::for_tests(1) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let tensor = |value: f32| Tensor::full([1000], value).to_device(&device).unwrap();
    let (first, ()) = gpu.record(|| Ok::<_, Error>(())).unwrap();
    let (input, mut output) = (tensor(1.0), tensor(2.0));
    let places = [&input, &output].map(Tensor::buffer_id);
    let (second, ()) = gpu.record(|| elements::put(output.as_out("test", true)?, &input)).unwrap();
    drop(first);
    drop((input, output));
    let others = [tensor(3.0), tensor(4.0)];
    assert!(others.iter().all(|tensor| !places.contains(&tensor.buffer_id())));
    second.replay(&[]).unwrap();
    assert!(others[1].to_vec::<f32>().unwrap().iter().all(|&element| element == 4.0));
}

#[test]
fn on_the_standin_gpu() {
    let Some(standin) = Standin::compiled() else { return };
    standin.repeat_in_each_order(&[], &[]);
}
