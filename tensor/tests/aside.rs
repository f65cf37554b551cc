//! Work that executes beside other work.

use standin::Standin;
use std::sync::Arc;
use tensor::cuda::{Gpu, Module, elements};
use tensor::{DType, Device, Error, Result, Tensor};

const COUNT: usize = 1000;

/// A device, and tensors on it whose elements are all the same.
fn device() -> Option<(Arc<Gpu>, impl Fn(f32) -> Tensor)> {
    let gpu = Gpu::for_tests(1)?;
    let device = Device::Cuda(Arc::clone(&gpu));
    Some((gpu, move |number: f32| Tensor::full_on(&device, [COUNT], number.into(), DType::F32).unwrap()))
}

fn assert_all(tensor: &Tensor, expected: f32, what: &str) {
    let numbers = tensor.to_vec::<f32>().unwrap();
    assert!(numbers.iter().all(|&number| number == expected), "{what}: {}, not {expected}", numbers[0]);
}

/// [`Gpu::aside`], as all tests use it.
fn aside(gpu: &Gpu, reads: &[&Tensor], work: impl FnOnce() -> Result<()>) -> Result<()> {
    // SAFETY: the tests name all tensors that are read. What is written is used by nobody else until it is joined; but
    // on the emulated device, which does not write it before, one test has a look at it.
    unsafe { gpu.aside(reads, work) }
}

/// `sum` = x plus a temporary copy of x, aside.
fn double_aside(gpu: &Gpu, x: &Tensor, sum: &mut Tensor) -> Result<()> {
    aside(gpu, &[x], || {
        elements::put(sum.as_out("test", false)?, x)?;
        let copy = x.duplicate()?;
        elements::put(sum.as_out("test", true)?, &copy)
    })
}

#[test]
fn it_is_done_when_it_is_joined() {
    let Some((gpu, numbers)) = device() else { return };
    let (in_use, mut held) = (gpu.stats().in_use, vec![]);
    for round in 1..4 {
        let factor = round as f32;
        let (x, mut sum) = (numbers(factor), numbers(0.0));
        double_aside(&gpu, &x, &mut sum).unwrap();
        assert!(!x.is_unique(), "nobody may write to what it reads");
        drop(x);
        // Neither the memory of what it reads nor that of its temporary tensor is given to others before.
        let others = [7.0, 8.0, 9.0].map(&numbers);
        gpu.join().unwrap();
        assert_all(&sum, 2.0 * factor, "the sum");
        others.iter().zip([7.0, 8.0, 9.0]).for_each(|(other, factor)| assert_all(other, factor, "another tensor"));
        held.push(gpu.stats().held);
    }
    gpu.join().unwrap();
    assert_eq!(gpu.stats().in_use, in_use);
    assert_eq!(held, [held[0]; 3], "later it is used again");
}

#[test]
fn it_is_joined_for_whichever_tensor_it_reads() {
    let Some((gpu, numbers)) = device() else { return };
    // Besides which it may keep these.
    let _much = Tensor::empty_on(&Device::Cuda(Arc::clone(&gpu)), [1 << 20], DType::F32).unwrap();
    let (x, y) = (numbers(1.0), numbers(2.0));
    for read in [&x, &y] {
        let mut sum = numbers(0.0);
        let work = || {
            elements::put(sum.as_out("test", false)?, &x)?;
            elements::put(sum.as_out("test", true)?, &y)
        };
        aside(&gpu, &[&x, &y], work).unwrap();
        assert!(!x.is_unique() && !y.is_unique());
        gpu.join_readers(read).unwrap();
        assert!(x.is_unique() && y.is_unique(), "done");
        assert_all(&sum, 3.0, "the sum");
    }
}

#[test]
fn it_sees_what_was_before_and_later_work_sees_it() {
    let Some((gpu, numbers)) = device() else { return };
    let (mut x, mut sum) = (numbers(1.0), numbers(0.0));
    elements::put(x.as_out("test", true).unwrap(), &numbers(4.0)).unwrap();
    double_aside(&gpu, &x, &mut sum).unwrap();
    let mut twice = numbers(0.0);
    double_aside(&gpu, &sum, &mut twice).unwrap();
    assert!(x.is_unique() && !sum.is_unique(), "of so few tensors no two pieces can be aside");
    let mut later = numbers(1.0);
    gpu.join().unwrap();
    elements::put(later.as_out("test", true).unwrap(), &twice).unwrap();
    assert_all(&later, 21.0, "a sum of sums");
}

/// As in a backward pass.
#[test]
fn more_is_aside_where_memory_has_become_free() {
    let Some((gpu, numbers)) = device() else { return };
    for (freed, all) in [(1 << 10, false), (1 << 20, true)] {
        drop(Tensor::empty_on(&Device::Cuda(Arc::clone(&gpu)), [freed], DType::F32).unwrap());
        let terms: Vec<Tensor> = (1..=20).map(|factor| numbers(factor as f32)).collect();
        let mut sums: Vec<Tensor> = terms.iter().map(|_| numbers(0.0)).collect();
        terms.iter().zip(&mut sums).for_each(|(x, sum)| double_aside(&gpu, x, sum).unwrap());
        assert_eq!(terms.iter().all(|x| !x.is_unique()), all, "{freed}");
        gpu.join().unwrap();
        (1..).zip(&sums).for_each(|(factor, sum)| assert_all(sum, 2.0 * factor as f32, "a sum"));
    }
}

#[test]
fn several_pieces_are_aside_as_long_as_they_keep_little() {
    let Some((gpu, numbers)) = device() else { return };
    // Of 4 MiB, work aside may keep 40 KiB: five pieces, with 8 KiB each.
    let much = Tensor::empty_on(&Device::Cuda(Arc::clone(&gpu)), [1 << 20], DType::F32).unwrap();
    let mut terms: Vec<Tensor> = (1..=20).map(|factor| numbers(factor as f32)).collect();
    let mut sums: Vec<Tensor> = terms.iter().map(|_| numbers(0.0)).collect();
    terms.iter().zip(&mut sums).for_each(|(x, sum)| double_aside(&gpu, x, sum).unwrap());
    let are_read = |terms: &[Tensor]| terms.iter().map(|x| !x.is_unique()).collect::<Vec<_>>();
    let from = are_read(&terms).iter().position(|&read| read).unwrap();
    assert!((14..18).contains(&from) && are_read(&terms)[from..].iter().all(|&read| read), "the last few");
    let one = numbers(1.0);
    // One that is read can be written when those that read it are joined, and the others stay aside.
    gpu.join_readers(&terms[18]).unwrap();
    assert_eq!(are_read(&terms[17..]), [false, false, true]);
    elements::put(terms[18].as_out("test", true).unwrap(), &one).unwrap();
    gpu.join_readers(&terms[18]).unwrap();
    assert!(!terms[19].is_unique());
    gpu.join().unwrap();
    for (place, (x, sum)) in terms.iter().zip(&sums).enumerate() {
        let factor = place as f32 + 1.0;
        assert_all(x, if place == 18 { factor + 1.0 } else { factor }, "a term");
        assert_all(sum, 2.0 * factor, "a sum");
    }
    drop(much);
}

#[test]
fn its_own_temporary_memory_serves_it_again() {
    let Some((gpu, numbers)) = device() else { return };
    let (x, mut sum) = (numbers(1.5), numbers(0.0));
    let work = || {
        (0..20).try_for_each(|_| {
            let copy = x.duplicate()?;
            elements::put(sum.as_out("test", true)?, &copy)
        })
    };
    let held = gpu.stats().held;
    aside(&gpu, &[&x], work).unwrap();
    assert!(gpu.stats().held <= held + 2 * x.bytes(), "for one copy at a time");
    gpu.join().unwrap();
    assert_all(&sum, 30.0, "the sum");
}

#[test]
fn memory_that_a_recording_uses_is_no_temporary_memory() {
    let Some((gpu, numbers)) = device() else { return };
    let (x, mut sum) = (numbers(1.5), numbers(0.0));
    elements::put(sum.as_out("test", false).unwrap(), &x).unwrap();
    let (recording, ()) = gpu.record(|| elements::put(sum.as_out("test", false)?, &x)).unwrap();
    let work = || {
        drop(x);
        drop(numbers(7.0));
        Ok::<_, Error>(())
    };
    aside(&gpu, &[], work).unwrap();
    recording.replay(&[]).unwrap();
    assert_all(&sum, 1.5, "what the recording reads");
}

#[test]
fn a_replay_joins_what_is_aside() {
    let Some((gpu, numbers)) = device() else { return };
    let (x, mut sum) = (numbers(3.0), numbers(0.0));
    let _much = Tensor::empty_on(&x.device(), [1 << 20], DType::F32).unwrap();
    double_aside(&gpu, &x, &mut sum).unwrap();
    gpu.join().unwrap();
    let (recording, ()) = gpu.record(|| double_aside(&gpu, &x, &mut sum)).unwrap();
    let mut other = numbers(0.0);
    double_aside(&gpu, &x, &mut other).unwrap();
    assert!(!x.is_unique());
    recording.replay(&[]).unwrap();
    assert!(x.is_unique(), "joined");
}

#[test]
fn a_recording_does_not_begin_within_it() {
    let Some((gpu, _)) = device() else { return };
    let record = || gpu.record(|| Ok::<_, Error>(())).map(drop);
    assert!(matches!(aside(&gpu, &[], record), Err(Error::Argument { op: "record", .. })));
    assert!(record().is_ok());
}

#[test]
fn a_recording_holds_it_as_well() {
    let Some((gpu, numbers)) = device() else { return };
    let (x, mut total) = (numbers(3.0), numbers(0.0));
    let _much = Tensor::empty_on(&x.device(), [1 << 20], DType::F32).unwrap();
    let work = || {
        let [mut sum, mut again] = [(); 2].map(|()| Tensor::empty_on(&x.device(), [COUNT], DType::F32).unwrap());
        double_aside(&gpu, &x, &mut sum)?;
        double_aside(&gpu, &x, &mut again)?;
        let other = Tensor::full_on(&x.device(), [COUNT], 100.0, DType::F32)?;
        gpu.join()?;
        [&sum, &again, &other].into_iter().try_for_each(|term| elements::put(total.as_out("test", true)?, term))?;
        // What is not joined when a recording ends is joined by that.
        let mut unused = Tensor::empty_on(&x.device(), [COUNT], DType::F32)?;
        double_aside(&gpu, &x, &mut unused)?;
        Ok::<_, Error>(unused)
    };
    // Once before, as in training: that loads the kernels.
    double_aside(&gpu, &x, &mut numbers(0.0)).unwrap();
    gpu.join().unwrap();
    let (recording, unused) = gpu.record(work).unwrap();
    for round in 1..4 {
        recording.replay(&[]).unwrap();
        assert_all(&total, 112.0 * round as f32, "a total");
        assert_all(&unused, 6.0, "what was joined last");
    }
}

static EXAMPLE: Module =
    Module { name: "example", source: "__global__ void nothing() {}", headers: &[], kernels: &["nothing"] };

/// Kernels of one module that run side by side do not share its counters: each stream has its own kernels.
#[test]
fn a_launch_runs_where_it_was_prepared() {
    let Some((gpu, _)) = device() else { return };
    let prepared = || EXAMPLE.launch(&gpu, "nothing", DType::F32);
    // SAFETY: the kernel takes nothing, and does nothing.
    aside(&gpu, &[], || unsafe { prepared()?.run() }).unwrap();
    let before = prepared().unwrap();
    let mut within = None;
    let outcome = aside(&gpu, &[], || {
        within = Some(prepared()?);
        // SAFETY: as above.
        unsafe { before.run() }
    });
    // SAFETY: as above.
    for error in [outcome.unwrap_err(), unsafe { within.unwrap().run() }.unwrap_err()] {
        assert!(error.to_string().contains("outside of work aside"), "{error}");
    }
    gpu.join().unwrap();
}

#[test]
fn after_an_error_other_work_goes_on() {
    let Some((gpu, numbers)) = device() else { return };
    let x = numbers(2.0);
    let failed: Result<()> = aside(&gpu, &[&x], || Err(Error::argument("test", "as it must")));
    assert!(failed.unwrap_err().to_string().contains("as it must"));
    let failed = gpu.record(|| aside(&gpu, &[&x], || Err(Error::argument("test", "here, too"))));
    assert!(failed.err().unwrap().to_string().contains("here, too"));
    let failed = aside(&gpu, &[&x], || x.to_vec::<f32>().map(|_| ()));
    assert!(failed.unwrap_err().to_string().contains("cannot be aside"));
    let failed = aside(&gpu, &[&x], || Tensor::from_slice(&[1.0f32], [1])?.to_device(&x.device()).map(|_| ()));
    assert!(failed.unwrap_err().to_string().contains("cannot be aside"));
    let mut sum = numbers(0.0);
    // Work within work aside is a part of that, and there is nothing to join within.
    aside(&gpu, &[&x], || double_aside(&gpu, &x, &mut sum).and_then(|()| gpu.join())).unwrap();
    gpu.join().unwrap();
    assert_all(&sum, 4.0, "the sum");
}

#[test]
fn threads_take_turns() {
    let Some((gpu, numbers)) = device() else { return };
    std::thread::scope(|scope| {
        for thread in 1..4 {
            let (gpu, numbers) = (&gpu, &numbers);
            scope.spawn(move || {
                for round in 1..20 {
                    let factor = (thread * round) as f32;
                    let (x, mut sum) = (numbers(factor), numbers(0.0));
                    double_aside(gpu, &x, &mut sum).unwrap();
                    drop(x);
                    gpu.join().unwrap();
                    assert_all(&sum, 2.0 * factor, "a thread's sum");
                }
            });
        }
    });
}

static FAULT: Module = Module {
    name: "fault",
    source: "__global__ void half_a_warp(int* out) { if (lane() >= 7) *out = __shfl_xor_sync(~0u, 1, 1); }",
    headers: &[],
    kernels: &["half_a_warp"],
};

/// Nothing that was aside keeps its tensors, and with them the device.
#[test]
fn an_emulated_device_that_has_failed_can_go() {
    let Some((gpu, numbers)) = device() else { return };
    if std::env::var_os("BIFORMER_TEST_GPU").is_some() {
        return;
    }
    let (x, mut out) = (numbers(1.0), numbers(0.0));
    // SAFETY: the kernel would write one number.
    let fault = || unsafe { FAULT.launch(&gpu, "half_a_warp", DType::F32)?.threads(32).output(&mut out)?.run() };
    aside(&gpu, &[&x], fault).unwrap();
    assert!(!x.is_unique());
    assert!(gpu.join().unwrap_err().to_string().contains("never come"));
    assert!(x.is_unique());
    let left = Arc::downgrade(&gpu);
    drop((gpu, numbers, x, out));
    assert!(left.upgrade().is_none());
}

/// On a GPU it might be done earlier.
#[test]
fn the_emulated_device_does_it_as_late_as_possible() {
    let Some((gpu, numbers)) = device() else { return };
    let much = Tensor::empty_on(&Device::Cuda(Arc::clone(&gpu)), [1 << 20], DType::F32).unwrap();
    let terms = [1.0, 2.0].map(&numbers);
    let mut sums = [0.0; 2].map(&numbers);
    terms.iter().zip(&mut sums).for_each(|(x, sum)| double_aside(&gpu, x, sum).unwrap());
    assert_all(&sums[0], 0.0, "before it is joined");
    gpu.join_readers(&terms[0]).unwrap();
    assert_all(&sums[0], 2.0, "when it has been joined");
    assert_all(&sums[1], 0.0, "what came later");
    gpu.synchronize().unwrap();
    assert_all(&sums[1], 4.0, "when the device has done everything");
    drop(much);
}

#[test]
fn on_the_standin_gpu() {
    let Some(standin) = Standin::compiled() else { return };
    standin.repeat_in_each_order(&[], &[]);
}
